"""Suites of prompts, the file of answers, statistics by hand, and what lossy rules change."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from selfspec.errors import InvalidData
from selfspec.eval import results
from selfspec.eval.results import (
    TASKS,
    Answer,
    Quality,
    Question,
    Run,
    bleu,
    edit_distance,
    first_divergence,
    load_suite,
    log_likelihood,
    quality_summary,
    rouge_l,
)
from tests.models import random_ids

# --- suites


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "questions.jsonl"


def write(file: Path, *records: Any) -> str:
    """One JSON line each; its name."""
    file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(file)


def test_the_built_in_suite_has_eight_questions_of_each_task() -> None:
    suite = load_suite("six-tasks")
    assert Counter(question.task for question in suite) == dict.fromkeys(TASKS, 8)
    assert len({turn for question in suite for turn in question.turns}) == 48 + 8
    assert all(len(q.turns) == (2 if q.task == "chat" else 1) for q in suite)
    assert all(q.reference for q in suite if q.task != "chat")


def test_a_limit_is_spread_over_all_groups() -> None:
    few = load_suite("six-tasks", limit=6)
    assert [question.task for question in few] == list(TASKS)
    spread = [question.id for question in load_suite("six-tasks", limit=4)]
    assert spread == ["math-1", "chat-5", "rag-1", "summary-5"]
    assert len(load_suite("six-tasks", limit=1000)) == 48


def test_spec_benchs_categories_are_six_groups(file: Path) -> None:
    lines = [
        {"question_id": 81, "category": "writing", "turns": ["a", "b"], "reference": ["", "good"]},
        {"question_id": 305, "category": "rag", "turns": ["c"], "reference": [["x", "y"]]},
        {"question_id": 7, "category": "math_reasoning", "turns": ["d"], "reference": [""]},
    ]
    write(file, *lines)
    assert load_suite("spec-bench", file) == [
        Question(id="81", task="chat", turns=("a", "b"), reference="good"),
        Question(id="305", task="RAG", turns=("c",), reference="x"),
        Question(id="7", task="math", turns=("d",)),
    ]
    name = write(file, {"prompt": "a"}, {"turns": ["b", "c"], "id": "two", "task": "law"})
    assert load_suite(name) == [  # any file of prompts is a suite
        Question(id="1", task="prompts", turns=("a",)),
        Question(id="two", task="law", turns=("b", "c")),
    ]


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        ("{", "JSON"),
        ("[1]", "a list"),
        ("{}", "turns"),
        ('{"turns": []}', "turns"),
        ('{"turns": ["a", " "]}', "turn"),
        ('{"prompt": 3}', "turn"),
        ('{"prompt": "b", "id": "1"}', "id 1"),
        ('{"prompt": "b", "id": [1]}', "id"),
        ('{"prompt": "b", "task": "overall"}', "task"),
        ('{"prompt": "b", "reference": 3}', "reference"),
    ],
)
def test_a_broken_line_is_named_with_its_reason(file: Path, second: str, reason: str) -> None:
    file.write_text('{"prompt": "a"}\n' + second + "\n", encoding="utf-8")
    with pytest.raises(InvalidData, match=rf"questions\.jsonl, line 2 .*{reason}"):
        load_suite(str(file))
    file.write_text("\n")
    with pytest.raises(InvalidData, match="holds no questions"):
        load_suite(str(file))


# --- the file of answers

RUN = Run(
    seconds=2.0,
    arrivals=[(1, 1.0), (3, 0.9)],
    equal=True,
    counts={"seconds": {"prefill": 1.0}, "drafted_by_layer": {"2": 1}},
)
ANSWERS = [
    Answer(id=name, task="chat", turn=1, repeat=1, new_tokens=4, runs={"fast": RUN})
    for name in ("q1", "q2")
]


def test_answers_come_back_as_they_were_written_but_for_a_half_written_line(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    results.drop_unfinished(path)
    assert results.read(path) == []
    for entry in ANSWERS:
        results.append(path, entry)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"id": "\xc3')
    results.drop_unfinished(path)
    assert path.read_bytes() == whole
    assert results.read(path) == ANSWERS
    path.write_bytes(whole + b'{"id": "q"}\n')
    with pytest.raises(InvalidData, match=r"answers\.jsonl, line 3 is no answer of a bench"):
        results.read(path)


# --- statistics


def test_speed_up_is_the_ratio_of_total_times_not_the_mean_of_ratios() -> None:
    found = results.speed_up([8.0, 1.0, 1.0], [2.0, 1.0, 2.0])
    assert found.ratio == 10.0 / 5.0
    assert found.mean == (4.0 + 1.0 + 0.5) / 3
    assert found.worst == 0.5
    # ranks 0, 1, 2 hold 0.5, 1, 4: the 5th percentile is a tenth of the way from rank 0 to 1
    assert found.p5 == pytest.approx(0.55, abs=1e-12)
    assert found.prompts == 3

    for base, method in (([1.0, 1.0], [1.0]), ([], [])):
        with pytest.raises(ValueError, match="expected the same and some"):
            results.speed_up(base, method)


def test_an_interval_is_of_pairs_that_stay_together_and_its_seed_repeats_it() -> None:
    # each prompt takes the first method exactly twice as long, however long that is
    above, below = [2.0, 40.0, 6.0, 800.0], [1.0, 20.0, 3.0, 400.0]
    assert results.ratio_interval(above, below) == (2.0, 2.0)
    # of the pairs drawn a quarter is twice the first, a quarter twice the second prompt
    assert results.ratio_interval([3.0, 1.0], [1.0, 1.0]) == (1.0, 3.0)
    values = [1.0, 2.0, 4.0, 3.0, 1.5], [1.0, 1.1, 1.3, 2.0, 0.7]
    assert results.ratio_interval(*values, seed=1) == results.ratio_interval(*values, seed=1)
    assert results.ratio_interval(*values, seed=1) != results.ratio_interval(*values, seed=2)


def test_repeated_share_counts_n_grams_that_were_there_before() -> None:
    # 8-grams of a text with period 2: two distinct ones among five
    assert results.repeated_share([1, 2] * 6) == 1 - 2 / 5
    assert results.repeated_share(list(range(20))) == 0.0
    assert results.repeated_share([1] * 7) == 0.0


# --- lossy texts

WORDS = "the cat sat on the mat"


SAME = Quality(
    text=WORDS,
    plain_text=WORDS,
    reference=None,
    tokens=6,
    plain_tokens=6,
    first_divergence=None,
    edit_distance=0,
    log_likelihood=-6.0,
    plain_log_likelihood=-6.0,
)


@pytest.mark.parametrize(
    ("found", "expected", "index", "distance"),
    [
        ("123", "123", None, 0),
        ("193", "123", 1, 1),
        ("923", "123", 0, 1),
        ("12", "123", 2, 1),  # it ends early
        ("123", "12", 2, 1),
        ("", "", None, 0),
        ("", "abc", 0, 3),
        ("kitten", "sitting", 0, 3),  # the textbook's: two replacements and an insertion
        ("sunday", "saturday", 1, 3),
        ("abcd", "bcda", 0, 2),  # moved, not replaced four times
    ],
)
def test_a_text_parts_behind_equal_tokens_and_is_so_many_edits_away(
    found: str, expected: str, index: int | None, distance: int
) -> None:
    tokens = [*map(ord, found)], [*map(ord, expected)]
    assert first_divergence(*tokens) == index
    assert edit_distance(*tokens) == distance


def test_bleu_of_a_word_is_100_and_rouge_l_the_f1_of_the_longest_common_subsequence() -> None:
    assert bleu(["Paris"], ["Paris"]) == pytest.approx(100.0)  # though it holds no 4-gram
    # "the cat on mat": 4 of its 5 words, 4 of 6 of the reference
    f1 = 2 * (4 / 5) * (4 / 6) / (4 / 5 + 4 / 6)
    assert rouge_l(["the big cat on mat", WORDS], [WORDS, WORDS]) == pytest.approx((f1 + 1) / 2)


def test_log_likelihood_is_the_sum_over_the_answers_tokens(model: PreTrainedModel) -> None:
    ids, tokens = random_ids(5), [7, 3, 90]
    whole = torch.cat([ids, torch.tensor([tokens])], dim=1)
    with torch.no_grad():
        logs = model(whole).logits[0].log_softmax(-1)
    expected = sum(float(logs[4 + place, token]) for place, token in enumerate(tokens))
    # one block of 8 rows either way: only the order of the sum differs
    assert log_likelihood(model, ids, tokens) == pytest.approx(expected, abs=1e-5)


def test_summary_weighs_tokens_not_answers_and_references_where_there_are_any() -> None:
    other = replace(
        SAME,
        text="the cat sat on the rug",
        first_divergence=5,
        edit_distance=1,
        tokens=2,
        plain_tokens=4,
        log_likelihood=-4.0,
    )
    assert quality_summary([SAME, other]) == pytest.approx(
        {
            "answers": 2,
            "exact_share": 0.5,
            "median_first_divergence": 5,
            "edits_per_token": 1 / 10,
            "nats_per_token": -10 / 8,
            "plain_nats_per_token": -12 / 10,
            # both answers are one corpus: 11 of 12 words, 9 of 10 pairs, 7 of 8, 5 of 6
            "relative_bleu": 100 * math.prod([11 / 12, 9 / 10, 7 / 8, 5 / 6]) ** 0.25,
            "with_reference": 0,
            **dict.fromkeys(("bleu", "plain_bleu", "rouge_l", "plain_rouge_l")),
        }
    )
    found = quality_summary([SAME, replace(SAME, text="a dog", reference=WORDS)])
    assert found["with_reference"] == 1
    assert (found["plain_bleu"], found["plain_rouge_l"]) == pytest.approx((100.0, 1.0))
    assert found["rouge_l"] == 0.0
    assert found["bleu"] < 10.0
