"""What lossy rules change: every figure on cases that were worked by hand."""

from __future__ import annotations

import builtins
import math
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from selfspec.errors import InvalidOption
from selfspec.eval.quality import (
    Quality,
    Text,
    bleu,
    check_packages,
    edit_distance,
    expected_number,
    final_number,
    first_divergence,
    quality,
    rouge_l,
    summary,
)
from selfspec.eval.reference import log_likelihood
from tests.models import random_ids

WORDS = "the cat sat on the mat"


def entry(**values: Any) -> Quality:
    whole = {
        "text": WORDS,
        "plain_text": WORDS,
        "reference": None,
        "tokens": 6,
        "plain_tokens": 6,
        "first_divergence": None,
        "edit_distance": 0,
        "log_likelihood": -6.0,
        "plain_log_likelihood": -6.0,
    }
    return Quality(**whole | values)


@pytest.mark.parametrize(
    ("found", "expected", "index"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([1, 9, 3], [1, 2, 3], 1),
        ([9, 2, 3], [1, 2, 3], 0),
        ([1, 2], [1, 2, 3], 2),  # it ends early
        ([1, 2, 3], [1, 2], 2),
        ([], [], None),
        ([], [1], 0),
    ],
)
def test_first_divergence_counts_equal_tokens(
    found: list[int], expected: list[int], index: int | None
) -> None:
    assert first_divergence(found, expected) == index


@pytest.mark.parametrize(
    ("found", "expected", "distance"),
    [
        ("kitten", "sitting", 3),  # the textbook's: two replacements and an insertion
        ("sunday", "saturday", 3),
        ("", "abc", 3),
        ("abc", "", 3),
        ("abcd", "bcda", 2),  # moved, not replaced four times
        ("same", "same", 0),
    ],
)
def test_edit_distance_is_levenshteins(found: str, expected: str, distance: int) -> None:
    tokens = [ord(letter) for letter in found], [ord(letter) for letter in expected]
    assert edit_distance(*tokens) == distance


def test_bleu_of_equal_texts_is_100_even_if_they_hold_no_4_gram() -> None:
    assert bleu([WORDS], [WORDS]) == pytest.approx(100.0)
    assert bleu(["Paris"], ["Paris"]) == pytest.approx(100.0)


def test_bleu_is_the_geometric_mean_of_n_gram_precisions() -> None:
    # of 6 words, 5 pairs, 4 triples and 3 quadruples the last ends differ: 5, 4, 3, 2 are right
    expected = 100 * math.prod([5 / 6, 4 / 5, 3 / 4, 2 / 3]) ** 0.25
    assert bleu(["the cat sat on the rug"], [WORDS]) == pytest.approx(expected)


def test_bleu_punishes_short_texts_and_other_case() -> None:
    # all n-grams are right, 5 words for 6
    assert bleu(["the cat sat on the"], [WORDS]) == pytest.approx(100 * math.exp(1 - 6 / 5))
    assert bleu([WORDS.upper()], [WORDS]) < 10.0


def test_rouge_l_is_the_f1_of_the_longest_common_subsequence() -> None:
    # "the cat on mat": 4 of its 5 words, 4 of 6 of the reference
    precision, recall = 4 / 5, 4 / 6
    f1 = 2 * precision * recall / (precision + recall)
    assert rouge_l(["the big cat on mat"], [WORDS]) == pytest.approx(f1)
    assert rouge_l(["the big cat on mat", WORDS], [WORDS, WORDS]) == pytest.approx((f1 + 1) / 2)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("So 3 + 4 = 7.", 7.0),
        ("It costs $1,234.50 in all", 1234.5),
        ("-5 degrees", -5.0),
        ("no idea", None),
        ("", None),
    ],
)
def test_a_worked_answer_arrives_at_its_last_number(text: str, number: float | None) -> None:
    assert final_number(text) == number


@pytest.mark.parametrize(
    ("reference", "number"),
    [
        ("400+200=<<400+200=600>>600\n#### 1,000", 1000.0),
        ("23 bags, 3 left over", 23.0),
        ("four", None),
    ],
)
def test_a_reference_says_its_marked_or_first_number(reference: str, number: float | None) -> None:
    assert expected_number(reference) == number


def test_log_likelihood_is_the_sum_over_the_answers_tokens(model: PreTrainedModel) -> None:
    ids, tokens = random_ids(5), [7, 3, 90]
    whole = torch.cat([ids, torch.tensor([tokens])], dim=1)
    with torch.no_grad():
        logs = model(whole).logits[0].log_softmax(-1)
    expected = sum(float(logs[4 + place, token]) for place, token in enumerate(tokens))
    # one block of 8 rows either way: only the order of the sum differs
    assert log_likelihood(model, ids, tokens) == pytest.approx(expected, abs=1e-5)


def test_a_record_holds_both_answers_to_one_question() -> None:
    nats = {(4, 9): -3.0, (4, 2, 2): -1.5}
    found = quality(
        Text([4, 9], "four!"),
        Text([4, 2, 2], "four."),
        "4",
        lambda tokens: nats[tuple(tokens)],
    )
    assert found == Quality(
        text="four!",
        plain_text="four.",
        reference="4",
        tokens=2,
        plain_tokens=3,
        first_divergence=1,
        edit_distance=2,
        log_likelihood=-3.0,
        plain_log_likelihood=-1.5,
    )


def test_summary_weighs_tokens_not_answers() -> None:
    records = [
        entry(),
        entry(
            text="the cat sat on the rug",
            first_divergence=5,
            edit_distance=1,
            tokens=2,
            plain_tokens=4,
            log_likelihood=-4.0,
        ),
    ]
    found = summary(records)
    assert found["answers"] == 2
    assert found["exact_share"] == 0.5
    assert found["median_first_divergence"] == 5
    assert found["edits_per_token"] == pytest.approx(1 / 10)
    assert found["nats_per_token"] == pytest.approx(-10 / 8)
    assert found["plain_nats_per_token"] == pytest.approx(-12 / 10)
    # both answers are one corpus: 11 of 12 words, 9 of 10 pairs, 7 of 8, 5 of 6
    expected = 100 * math.prod([11 / 12, 9 / 10, 7 / 8, 5 / 6]) ** 0.25
    assert found["relative_bleu"] == pytest.approx(expected)


def test_references_count_where_there_are_any() -> None:
    assert summary([entry()])["bleu"] is None
    found = summary([entry(), entry(text="a dog", reference=WORDS)])
    assert found["with_reference"] == 1
    assert found["plain_bleu"] == pytest.approx(100.0)
    assert found["plain_rouge_l"] == pytest.approx(1.0)
    assert found["rouge_l"] == 0.0
    assert found["bleu"] < 10.0


@pytest.mark.parametrize("measure", [bleu, rouge_l])
def test_a_missing_package_is_named(measure: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def missing(name: str, *rest: Any) -> Any:
        if name.split(".")[0] in ("sacrebleu", "rouge_score"):
            raise ImportError(name)
        return original(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(InvalidOption, match=r"pip install 'selfspec\[eval\]'"):
        measure([WORDS], [WORDS])


def test_a_missing_package_is_named_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    check_packages()
    monkeypatch.setattr("selfspec.eval.quality.find_spec", lambda name: None)
    with pytest.raises(InvalidOption, match=r"needs sacrebleu: pip install 'selfspec\[eval\]'"):
        check_packages()
