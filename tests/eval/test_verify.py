"""`selfspec verify`: every rung on tiny models, and bugs that make a rung fail."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from eval.families import tiny_model
from selfspec.api.chat_template import TurnEnd
from selfspec.api.speculator import Speculator, load, wrap
from selfspec.decoding.acceptance import Target
from selfspec.errors import InvalidPrompt
from selfspec.eval import verify
from selfspec.eval.results import Question
from selfspec.eval.verify import RUNGS, WAYS, Case, Comparison, Rung, Subject, Way, climb, logits_of
from selfspec.model.backbone import Backbone
from selfspec.model.fused import FusedExecutor
from tests.decoding.test_mutants import GREEDY_MUTANTS, Mutant, every_draft_stays
from tests.heads.kinds import make_heads, train
from tests.models import EXECUTORS, make_model, needs_compiler, noted, random_ids, wrapped
from tests.talks import make_tokenizer

LENGTH = 12
OPTIONS: dict[str, Any] = {"drafter": "exit:layers=2/4,threshold=0.05,max_tokens=3"}


def speculator_of(model: PreTrainedModel, **options: Any) -> Speculator:
    return wrap(model, heads="logit-lens", **{"executor": "generic"} | OPTIONS | options)


def subject_of(speculator: Speculator, new_tokens: int = LENGTH, **values: Any) -> Subject:
    cases = [
        Case(id=f"prompt {seed}", request=verify.greedy_request(speculator, ids, new_tokens))
        for seed, ids in enumerate([random_ids(9, 1), random_ids(3, 2)])
    ]
    return Subject(speculator=speculator, cases=cases, max_copy_gb=1.0, **values)


@pytest.fixture(scope="module")
def speculator() -> Speculator:
    return speculator_of(make_model("llama"))


def rung(number: int, subject: Subject) -> Rung:
    return list(RUNGS.values())[number - 1](subject)


def test_texts_are_compared_beyond_the_templates_end_of_turn() -> None:
    speculator = speculator_of(make_model("llama"))
    (token,) = speculator.generate(random_ids(9, 1), max_new_tokens=4).token_ids[3:]
    speculator.turn_end = TurnEnd(token=token)
    compared = verify.compare_texts(speculator, subject_of(speculator).cases)
    assert compared.partings == []


def test_questions_longer_than_the_models_context_are_left_out() -> None:
    speculator = speculator_of(make_model("gpt2"))
    turns: Any = {"5": (random_ids(5, 1),), "5000": (random_ids(5000, 1),)}
    questions = [Question(id=name, task="t", turns=turn) for name, turn in turns.items()]
    assert [case.id for case in verify.cases_of(speculator, questions, 4)] == ["5"]
    with pytest.raises(InvalidPrompt, match="5000 tokens"):
        verify.cases_of(speculator, questions[1:], 4)


# --- the rungs


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_correct_model_passes_every_rung(executor: str) -> None:
    model = make_model("llama", torch.bfloat16)
    heads = train(make_heads("deep-fused", Backbone(model).unembedding))
    exits: dict[str, Any] = {"drafter": "exit:layers=2/4,threshold=0.02,max_tokens=3"}
    speculator = wrap(model, heads=heads, executor=executor, **exits)
    subject = subject_of(speculator)
    rungs = dict(climb(subject))
    last = "passed" if executor == "fused" else "skipped"
    assert [rung.outcome for rung in rungs.values()] == ["passed"] * 5 + [last, "passed"]
    first, second, third, _, fifth, sixth, seventh = rungs.values()
    assert first.figures == {"positions": 9 + 3, "differing": 0}
    # six kinds of drafts, and trees where these keep bits; two prompts
    kinds = 7 if executor == "fused" else 6
    assert second.figures == {"positions": kinds * 2 * LENGTH, "differing": 0}
    assert ("kernels" in second.found) == (executor != "generic")
    assert third.figures == {"texts": 2 * 2, "partings": []}
    assert fifth.figures["tokens"] >= 2 * LENGTH
    if last == "passed":
        assert sixth.figures == {"positions": (9 + 3) * len(WAYS), "differing": 0}
    assert seventh.figures == {"positions": 2 * LENGTH, "differing": 0}
    assert ("shared" in seventh.found) == (executor == "fused")


@pytest.mark.parametrize("drafter", ["exit", "lookahead", "none"])
def test_a_model_without_heads_is_verified_with_scripted_drafts(drafter: str) -> None:
    plain = wrap(make_model("llama"), executor="generic", drafter=drafter)
    second = rung(2, subject_of(plain, 8))
    assert second.outcome == "passed"
    assert "4 kinds of drafts" in second.found


def test_the_models_settings_apply(speculator: Speculator, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = subject_of(speculator, 10).comparison.texts
    monkeypatch.setattr(speculator.model.generation_config, "repetition_penalty", 1.8)
    subject = subject_of(speculator, 10)
    assert subject.comparison.texts != texts
    rungs = [rung for _, rung in climb(subject)]
    assert [rung.outcome for rung in rungs] == ["passed"] * 4 + ["skipped"] * 2 + ["passed"]
    assert "in float32 rung 4" in rungs[4].found


@pytest.mark.parametrize("mutant", GREEDY_MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_planted_bug_fails_a_rung(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = subject_of(speculator_of(make_model("llama")))
    mutant(monkeypatch)
    assert any(rung.outcome == "failed" for _, rung in climb(subject))


def test_tokens_against_the_logits_fail_rung_two(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = subject_of(speculator_of(make_model("llama")), 6)
    every_draft_stays(monkeypatch)  # logits of the judging row stay right, bit for bit
    second = rung(2, subject)
    assert second.outcome == "failed"
    assert "though its logits are equal" in second.found


def test_a_skipped_rung_says_why(speculator: Speculator, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "3 of 8 positions changed bits"
    monkeypatch.setattr("selfspec.decoding.measure.why_unpinned", lambda *_, **__: reason)
    unprobed = speculator_of(speculator.model)
    rungs = [rung for _, rung in climb(subject_of(unprobed, 4, rungs=(1, 2, 4, 5, 6, 7)))]
    skipped = [number for number, rung in enumerate(rungs, 1) if rung.outcome == "skipped"]
    assert skipped == [2, 3, 5, 6]
    assert [rung.found for rung in rungs[1:3]] == ["3 of 8 positions changed bits", "--rungs"]
    small = replace(subject_of(unprobed, 4), max_copy_gb=1e-6)
    third = rung(3, small)
    assert third.outcome == "skipped"
    assert "float64 takes" in third.found


@pytest.mark.parametrize(("gap", "outcome"), [(0.2, "passed"), (0.201, "failed")])
def test_near_ties_may_differ(speculator: Speculator, gap: float, outcome: str) -> None:
    subject = subject_of(speculator)
    parting = verify.Parting(case="prompt 1", drafts="wrong", position=7, margin=gap)
    subject.comparison = Comparison([[[1], [2]]], [parting], noise=0.1)
    fourth = rung(4, subject)
    assert fourth.outcome == outcome
    assert "1 of 2 texts equal" in fourth.found
    assert ("prompt 1 with wrong drafts, new token 7" in fourth.found) == (outcome == "failed")


def test_a_token_far_below_the_best_fails_the_fifth_rung() -> None:
    subject = subject_of(speculator_of(make_model("llama", torch.bfloat16)), 4)
    texts = subject.comparison.texts
    assert rung(5, subject).outcome == "passed"
    wrong = [[[*text[:-1], (text[-1] + 1) % 96] for text in answers] for answers in texts]
    subject.comparison = Comparison(wrong)
    assert rung(5, subject).outcome == "failed"


@needs_compiler
def test_rows_of_another_text_fail_rung_seven(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = subject_of(speculator_of(make_model("llama"), executor="fused"))
    original = Target.part

    def first(self: Target, rows: slice) -> Target:
        return original(self, slice(0, rows.stop - rows.start))

    monkeypatch.setattr(Target, "part", first)
    outcomes = [rung.outcome for _, rung in climb(subject)]
    assert outcomes == ["passed"] * 4 + ["skipped", "passed", "failed"]  # only rung 7 has batches


def test_verdict_is_one_sentence() -> None:
    passed, failed, skipped = (Rung(o, "") for o in ("passed", "failed", "skipped"))
    for rungs, start in (
        ([passed] * 5, "lossless: "),
        ([passed, passed, skipped], "lossless: the text is the model's own but for near ties,"),
        ([passed, skipped, skipped, passed, passed], "lossless up to rounding: "),
        ([passed, failed, passed, failed, passed], "NOT lossless: rung 2, 4 failed"),
    ):
        assert verify.verdict(rungs).startswith(start)


# --- one row, one result, in any split of a text into passes, on the fused executor

LLAMA = {"attention_bias": True, "mlp_bias": True, "head_dim": 24, "num_hidden_layers": 4}
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3", "gpt_neox")
"""Others: a sliding window; biases of queries, keys and values; norms of queries and keys; norms
behind sublayers and two rotations; attention and MLP side by side."""


@needs_compiler
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((family, torch.bfloat16) for family in FAMILIES),
        *((family, torch.float32) for family in FAMILIES[::2]),
    ],
    ids=str,
)
def test_a_row_has_one_result(family: str, dtype: torch.dtype) -> None:
    fields: dict[str, Any] = LLAMA if family == "llama" else {}
    backbone = wrapped(family, dtype, "fused", **fields)
    ids = random_ids(200)[0]  # across blocks of 64 positions and the sliding window
    expected = logits_of(backbone, ids)
    for name, way in WAYS.items():
        assert torch.equal(logits_of(backbone, ids, way), expected), name


@needs_compiler
def test_ways_run_wrong_drafts_and_keep_half(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone, ids = wrapped("llama", executor="fused"), random_ids(20)[0]
    logits_of(backbone, ids, Way([20], branch=True))  # the first tree is checked
    rows = noted(monkeypatch, FusedExecutor, "run", lambda _, hidden, *__: len(hidden))
    for way, expected in (
        (None, [20]),
        (Way([7]), [7, 7, 6]),
        (Way([1, 4], wrong=3), [4, 7] * 4),
        (Way([500], wrong=2, kept=True), [12, 12]),
        (Way([4, 1], branch=True), [8, 2] * 4),
    ):
        rows.clear()
        logits_of(backbone, ids, way)
        assert rows == expected


@needs_compiler
def test_a_kernel_that_depends_on_its_rows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    fused, exact, ids = wrapped("llama", executor="fused"), FusedExecutor.unembed, random_ids(80)[0]

    def odd(self: FusedExecutor, rows: Tensor) -> tuple[Tensor, Tensor]:
        normed, logits = exact(self, rows)
        return normed, logits * (1 + 2**-22 * (len(rows) > 64))

    monkeypatch.setattr(FusedExecutor, "unembed", odd)
    expected = logits_of(fused, ids)
    differ = {name: not logits_of(fused, ids, way).equal(expected) for name, way in WAYS.items()}
    assert differ["pieces of 64"]
    assert not differ["pieces of 500"]


# --- comparisons


def test_bits_differ_where_values_may_not() -> None:
    bits = verify.Bits()
    expected = torch.tensor([[0.0, 1.0], [float("nan"), 2.0], [3.0, 4.0]])
    bits.compare("here", expected.clone(), expected)
    assert (bits.positions, bits.differing, bits.first) == (3, 0, "")
    logits = torch.tensor([[0.0, 1.0], [float("nan"), 2.0], [3.5, 3.0]])
    bits.compare("there", logits, expected)
    bits.compare("later", -torch.zeros(1, 2), torch.zeros(1, 2))
    assert (bits.positions, bits.differing) == (7, 2)
    assert bits.first == "there, position 3: 2 of 2 logits, by up to 1"


def test_margin_is_the_difference_of_their_scores() -> None:
    scores = torch.tensor([[1.0, 5.0, 2.0], [0.0, 4.0, 3.5]])
    assert verify.margin(scores, [1, 1], [1, 2], index=1) == 0.5
    # our text ended: no pair of tokens to compare
    assert verify.margin(scores, [1, 1], [1], index=1) == 5.0
    # forbidden tokens are no difference
    found, expected = torch.tensor([1.0, -torch.inf, 2.0]), torch.tensor([1.5, -torch.inf, 2.0])
    assert verify.largest_difference(found, expected) == 0.5


def test_shortfall_is_measured_in_the_exact_model(
    speculator: Speculator, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = torch.tensor([[0.0, 3.0], [2.0, 1.0]])
    logits = {"exact": exact, "run": exact + torch.tensor([[0.25, 0.0], [0.0, -0.5]])}
    monkeypatch.setattr(verify, "block_logits", lambda model, *_: logits[model])
    case = Case(id="x", request=verify.greedy_request(speculator, random_ids(3), 2))
    figures = verify.shortfall(case, [1, 1], "exact", "run")  # type: ignore[arg-type]  # stand-ins
    assert figures == (1.0, 0.5)


def test_experts_run_in_float64(tmp_path: Path) -> None:
    model = tiny_model("mixtral", torch.float32)
    model.set_experts_implementation("grouped_mm")  # the default
    third = rung(3, subject_of(speculator_of(model), 4))
    assert third.outcome == "passed", third.found
    model.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    loaded = load(tmp_path, dtype="float64").generate(random_ids(9), max_new_tokens=4)
    assert loaded.token_ids == wrap(model).generate(random_ids(9), max_new_tokens=4).token_ids


@pytest.mark.parametrize("kind", ["translator", "deep-fused-draft"])
def test_a_float64_twin_has_the_same_heads(kind: str) -> None:
    model = make_model("llama", torch.bfloat16)
    heads = train(make_heads(kind, Backbone(model, executor="generic").unembedding))
    twin = verify.speculator_in(wrap(model, heads=heads, executor="generic"), torch.float64).heads
    assert twin is not None
    hidden = torch.randn(1, 32, generator=torch.Generator().manual_seed(5)).bfloat16()
    exact = twin[4](hidden.double())
    # bfloat16 keeps 8 bits; logits are up to 20 here
    torch.testing.assert_close(exact, heads[4](hidden), rtol=0, atol=0.3)
    assert twin[4].features(hidden.double()).dtype == torch.float64
