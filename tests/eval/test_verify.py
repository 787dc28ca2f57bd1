"""`selfspec verify`: every rung on tiny models, what makes one fail, and the command around it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from selfspec.api.speculator import Speculator, wrap
from selfspec.cli.main import main
from selfspec.decoding.acceptance import Together
from selfspec.errors import PinnedUnavailable
from selfspec.eval import compare
from selfspec.eval.compare import Bits, Case, Comparison, Parting, largest_difference, margin
from selfspec.eval.decoding import greedy_request
from selfspec.eval.lossless import RUNGS, Rung, Subject, climb, verdict
from selfspec.eval.one_result import WAYS
from selfspec.eval.reference import speculator_in
from selfspec.model.backbone import Backbone
from tests.decoding.test_mutants import GREEDY_MUTANTS, Mutant, every_draft_stays
from tests.heads.kinds import make_heads, train
from tests.models import EXECUTORS, make_model, needs_compiler, random_ids
from tests.talks import make_tokenizer

OPTIONS: dict[str, Any] = {"drafter": "exit:layers=2/4,threshold=0.05,max_tokens=3"}


def speculator_of(model: PreTrainedModel, **options: Any) -> Speculator:
    return wrap(model, heads="logit-lens", **{"executor": "generic"} | OPTIONS | options)


def subject_of(speculator: Speculator, new_tokens: int = 20, **values: Any) -> Subject:
    cases = [
        Case(id=f"prompt {seed}", request=greedy_request(speculator, ids, new_tokens))
        for seed, ids in enumerate([random_ids(9, 1), random_ids(3, 2)])
    ]
    return Subject(speculator=speculator, cases=cases, max_copy_gb=1.0, **values)


@pytest.fixture(scope="module")
def speculator() -> Speculator:
    return speculator_of(make_model("llama"))


def outcomes(subject: Subject) -> list[str]:
    return [rung.outcome for _, rung in climb(subject)]


# --- the rungs


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_correct_model_passes_every_rung(executor: str) -> None:
    model = make_model("llama", torch.bfloat16)
    heads = train(make_heads("deep-fused", Backbone(model).unembedding))
    exits: dict[str, Any] = {"drafter": "exit:layers=2/4,threshold=0.02,max_tokens=3"}
    found = wrap(model, heads=heads, executor=executor, **exits)
    ticks: list[None] = []
    subject = subject_of(found, tick=lambda: ticks.append(None))
    rungs = dict(climb(subject))
    last = "passed" if executor == "fused" else "skipped"
    assert [rung.outcome for rung in rungs.values()] == ["passed"] * 5 + [last, "passed"]
    assert len(ticks) == (len(RUNGS) - (last == "skipped")) * len(subject.cases)
    first, second, third, _, fifth, sixth, seventh = rungs.values()
    assert first.figures == {"positions": 9 + 3, "differing": 0}
    # six kinds of drafts, and trees where these keep bits; two prompts, 20 tokens each
    kinds = 7 if executor == "fused" else 6
    assert second.figures == {"positions": kinds * 2 * 20, "differing": 0}
    assert ("kernels" in second.found) == (executor != "generic")
    assert third.figures == {"texts": 2 * 2, "partings": []}
    assert fifth.figures["tokens"] >= 2 * 20
    if last == "passed":
        assert sixth.figures == {"positions": (9 + 3) * len(WAYS), "differing": 0}
    assert seventh.figures == {"positions": 2 * 20, "differing": 0}
    assert ("shared" in seventh.found) == (executor == "fused")


@pytest.mark.parametrize("executor", EXECUTORS)
def test_float32_leaves_the_fifth_rung_to_the_one_before(executor: str) -> None:
    found = speculator_of(make_model("llama"), executor=executor)
    rungs = [rung for _, rung in climb(subject_of(found))]
    assert [rung.outcome for rung in rungs[:5]] == ["passed"] * 4 + ["skipped"]
    assert "in float32 rung 4" in rungs[4].found


def test_a_model_without_heads_is_verified_with_scripted_drafts() -> None:
    plain = wrap(make_model("llama"), executor="generic")
    second = list(climb(subject_of(plain, 8)))[1][1]
    assert second.outcome == "passed"
    assert "4 kinds of drafts" in second.found


def test_generation_settings_of_the_model_count_on_both_sides() -> None:
    model = make_model("llama")
    without = [text for kind in subject_of(speculator_of(model)).compared.texts for text in kind]
    model.generation_config.repetition_penalty = 1.8
    subject = subject_of(speculator_of(model))
    assert [text for kind in subject.compared.texts for text in kind] != without
    assert outcomes(subject) == ["passed"] * 4 + ["skipped"] * 2 + ["passed"]


@pytest.mark.parametrize("mutant", GREEDY_MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_planted_bug_fails_a_rung(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = subject_of(speculator_of(make_model("llama")))
    mutant(monkeypatch)
    assert "failed" in outcomes(subject)


def test_tokens_that_are_not_the_logits_choice_fail_the_second_rung(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    subject = subject_of(speculator_of(make_model("llama")), 6)
    every_draft_stays(monkeypatch)  # the row that judges a wrong draft is right, bit for bit
    rung = list(RUNGS.values())[1](subject)
    assert rung.outcome == "failed"
    assert "though its logits are equal" in rung.found


def test_what_is_skipped_says_why(speculator: Speculator, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PinnedUnavailable("3 of 8 positions changed bits")

    monkeypatch.setattr("selfspec.decoding.probe.check_pinned", refuse)
    unprobed = speculator_of(speculator.model)
    rungs = [rung for _, rung in climb(subject_of(unprobed, 4, skip_float64=True))]
    skipped = [number for number, rung in enumerate(rungs, 1) if rung.outcome == "skipped"]
    assert skipped == [2, 3, 5, 6]
    assert [rung.found for rung in rungs[1:3]] == [
        "3 of 8 positions changed bits",
        "--skip-float64",
    ]
    small = replace(subject_of(unprobed, 4), max_copy_gb=1e-6)
    third = list(climb(small))[2][1]
    assert third.outcome == "skipped"
    assert "float64 takes" in third.found


@pytest.mark.parametrize(("gap", "outcome"), [(0.2, "passed"), (0.201, "failed")])
def test_a_parting_is_forgiven_up_to_twice_the_noise(
    speculator: Speculator, gap: float, outcome: str
) -> None:
    subject = subject_of(speculator)
    parting = Parting(case="prompt 1", drafts="wrong", position=7, margin=gap)
    subject.compared = Comparison([[[1], [2]]], [parting], noise=0.1)
    rung = list(RUNGS.values())[3](subject)
    assert rung.outcome == outcome
    assert "1 of 2 texts equal" in rung.found
    assert ("prompt 1 with wrong drafts, new token 7" in rung.found) == (outcome == "failed")


def test_a_token_far_below_the_best_fails_the_fifth_rung() -> None:
    subject = subject_of(speculator_of(make_model("llama", torch.bfloat16)), 4)
    right = subject.compared.texts
    assert list(RUNGS.values())[4](subject).outcome == "passed"
    wrong = [[[*text[:-1], (text[-1] + 1) % 96] for text in texts] for texts in right]
    subject.compared = Comparison(wrong)
    assert list(RUNGS.values())[4](subject).outcome == "failed"


@needs_compiler
def test_a_text_that_gets_the_rows_of_another_fails_the_seventh_rung(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    subject = subject_of(speculator_of(make_model("llama"), executor="fused"))
    right = Together.part
    monkeypatch.setattr(
        Together, "part", lambda self, rows: right(self, slice(0, rows.stop - rows.start))
    )
    found = [rung.outcome for _, rung in climb(subject)]
    assert found == ["passed"] * 4 + ["skipped", "passed", "failed"]  # no other rung has company


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (["passed"] * 5, "lossless: "),
        (["passed", "skipped", "skipped", "passed", "passed"], "lossless up to rounding: "),
        (["passed", "failed", "passed", "failed", "passed"], "NOT lossless: rung 2, 4 failed"),
    ],
)
def test_verdict_is_one_sentence(found: list[Any], words: str) -> None:
    assert verdict([Rung(outcome=outcome, found="") for outcome in found]).startswith(words)


# --- what they compare


def test_bits_differ_where_values_may_not() -> None:
    bits = Bits()
    expected = torch.tensor([[0.0, 1.0], [float("nan"), 2.0], [3.0, 4.0]])
    bits.compare("here", expected.clone(), expected)
    assert (bits.positions, bits.differing, bits.first) == (3, 0, "")
    found = torch.tensor([[0.0, 1.0], [float("nan"), 2.0], [3.5, 3.0]])
    bits.compare("there", found, expected)
    bits.compare("later", -torch.zeros(1, 2), torch.zeros(1, 2))
    assert (bits.positions, bits.differing) == (7, 2)
    assert bits.first == "there, position 3: 2 of 2 logits, by up to 1"


def test_margin_is_what_their_scores_prefer_their_token_by() -> None:
    scores = torch.tensor([[1.0, 5.0, 2.0], [0.0, 4.0, 3.5]])
    assert margin(scores, [1, 1], [1, 2], at=1) == 0.5
    # ours ended: no pair of tokens to compare
    assert margin(scores, [1, 1], [1], at=1) == 5.0


def test_largest_difference_leaves_out_what_processors_forbid() -> None:
    forbidden = -torch.inf
    found, expected = torch.tensor([1.0, forbidden, 2.0]), torch.tensor([1.5, forbidden, 2.0])
    assert largest_difference(found, expected) == 0.5


def test_shortfall_is_measured_in_the_exact_model(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = torch.tensor([[0.0, 3.0], [2.0, 1.0]])
    logits = {"exact": exact, "run": exact + torch.tensor([[0.25, 0.0], [0.0, -0.5]])}
    monkeypatch.setattr(compare, "block_logits", lambda model, *_: logits[model])
    spec = speculator_of(make_model("llama"))
    case = Case(id="x", request=greedy_request(spec, random_ids(3), 2))
    found = compare.shortfall(case, [1, 1], "exact", "run")  # type: ignore[arg-type]  # stand-ins
    assert (found.below, found.noise, found.excess) == (1.0, 0.5, 0.0)


@pytest.mark.parametrize("kind", ["mlp", "deep-fused-draft"])
def test_a_float64_twin_has_the_same_heads(kind: str) -> None:
    model = make_model("llama", torch.bfloat16)
    heads = train(make_heads(kind, Backbone(model, executor="generic").unembedding))
    twin = speculator_in(wrap(model, heads=heads, executor="generic"), torch.float64).heads
    assert twin is not None
    hidden = torch.randn(1, 32, generator=torch.Generator().manual_seed(5)).bfloat16()
    exact = twin[4](hidden.double())
    # bfloat16 keeps 8 bits; logits are up to 20 here
    torch.testing.assert_close(exact, heads[4](hidden), rtol=0, atol=0.3)
    assert twin[4].features(hidden.double()).dtype == torch.float64


# --- the command


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs verify on a tiny model and three prompts of one's own."""
    make_model("llama").save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    lines = [json.dumps({"prompt": words}) for words in ("a b c", "c a", "b b")]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    common = ["--model", "model", "--heads", "logit-lens", "--dtype", "float32"]

    def verify(*flags: str) -> int:
        return main(["verify", *common, "--suite", "prompts.jsonl", *flags])

    return verify


def test_command_prints_a_line_per_rung_and_a_verdict(
    workplace: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert workplace("--max-new-tokens", "6") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[0:10:2]] == [
        [str(number), "skipped" if number == 5 else "passed"] for number in range(1, 6)
    ]
    assert lines[-1].endswith("no draft moves a bit")


def test_command_fails_with_a_planted_bug(
    workplace: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    every_draft_stays(monkeypatch)
    flags = ["--executor", "generic", "--limit", "1", "--max-new-tokens", "6", "--skip-float64"]
    assert workplace(*flags, "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert found["passed"] is False
    assert found["verdict"].startswith("NOT lossless")
    assert (found["prompts"], found["max_new_tokens"]) == (1, 6)
    assert found["rungs"][2]["outcome"] == "skipped"
    assert {rung["outcome"] for rung in found["rungs"]} >= {"passed", "failed"}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--limit", "0"], "limit is 0"),
        (["--questions", "nowhere.jsonl"], "Leave out --questions"),
        (["--lenience", "0.5"], "No such option: --lenience"),
        (["--max-new-tokens", "0"], "max_new_tokens"),
    ],
)
def test_bad_input_is_one_line(
    flags: list[str],
    words: str,
    workplace: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert workplace(*flags) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert words in line
