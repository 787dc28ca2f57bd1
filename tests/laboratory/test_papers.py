"""The documents' experiments run end to end on tiny models, and go on where they were stopped."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from eval import lab
from eval.papers import lossy, self_sd, specbound
from eval.papers.lossy import expected_number, final_number
from eval.papers.specbound import (
    Dial,
    DialledHead,
    Run,
    dialled_heads,
    early_model,
    expected_tokens,
    points,
    round_cost,
    small_vocabulary,
)
from selfspec.api.speculator import Speculator, wrap
from selfspec.errors import InvalidOption, UnsupportedModel
from selfspec.heads.heads import DraftVocabulary, LogitLensHead
from selfspec.model.backbone import Backbone
from selfspec.options import Skip
from tests.models import make_model, random_ids
from tests.talks import make_tokenizer

TASKS = ("math", "translation", "summary")


@cache
def tiny(*_: Any, max_tokens: int = 6, controller: str = "fixed") -> Speculator:
    """In the place of the default model; float64, so that texts are equal."""
    model = make_model("llama", torch.float64, vocab_size=10)
    small = make_model("llama", torch.float64, vocab_size=10, num_hidden_layers=4)
    small.load_state_dict(model.state_dict(), strict=False)
    drafter = f"draft-model:max_tokens={max_tokens}"
    return wrap(model, make_tokenizer(), draft_model=small, drafter=drafter, controller=controller)


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What every script is asked for."""
    lines = [
        {"id": f"{task} {number}", "task": task, "prompt": "a b c a"[: 2 * number + 1]}
        | {"reference": "a b 3"}
        for task in TASKS
        for number in (1, 2)
    ]
    suite = tmp_path / "suite.jsonl"
    suite.write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(lab, "drafting", tiny)
    output = tmp_path / "out"
    return {"suite": str(suite), "output": output, "draft_model": Path("small"), "new_tokens": 12}


def run(command: Callable[..., None], asked: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The summary that a script wrote."""
    command(**asked, **more)
    summary: dict[str, Any] = json.loads((asked["output"] / "summary.json").read_text())
    return summary


def test_cm_asd_is_measured_in_both_readings_on_both_tasks(asked: dict[str, Any]) -> None:
    summary = run(lossy.cm_asd, asked, limit=2, tolerances="0,9")
    methods = summary["methods"]
    assert list(methods)[:2] == ["plain", "lossless"]
    assert [name for name, entry in methods.items() if entry["lossy"]] == list(methods)[2:]
    assert len(methods) == 2 + 2 * 2
    for task in ("translation", "summary"):
        found = summary["quality"]["lossless"][task]
        assert found["relative_bleu"] == pytest.approx(100.0)
        assert found["exact_share"] == 1.0
        rates = summary["all"][task]
        loosest = rates["intent, tau_base 9"]
        assert loosest["acceptance_rate"] >= rates["lossless"]["acceptance_rate"]


def test_easd_counts_right_answers_along_both_thresholds(asked: dict[str, Any]) -> None:
    options = {"entropy_threshold": 3.0, "entropies": "0", "overlaps": "0,0.8"}
    summary = run(lossy.easd, asked, limit=1, **options)
    assert len(summary["methods"]) == 2 + 2 * 2
    for name in ("plain", "lossless"):
        assert summary["numbers"][name]["plain's"] == 1.0
    # no distribution over ten tokens has an entropy above log 10 = 2.3: nothing is penalised
    assert summary["quality"]["tau_H 3, tau_O 0.8"]["overall"]["exact_share"] == 1.0
    assert summary["quality"]["tau_H 0, tau_O 0"]["overall"]["exact_share"] < 1.0
    assert "| plain " in (asked["output"] / "table.md").read_text().split("Answers to sums")[1]


@pytest.mark.parametrize(
    ("read", "text", "number"),
    [
        (final_number, "So 3 + 4 = 7.", 7.0),
        (final_number, "It costs $1,234.50 in all", 1234.5),
        (final_number, "-5 degrees", -5.0),
        (final_number, "no idea", None),
        (expected_number, "400+200=<<400+200=600>>600\n#### 1,000", 1000.0),
        (expected_number, "23 bags, 3 left over", 23.0),
        (expected_number, "four", None),
    ],
)
def test_an_answer_arrives_at_its_last_number_and_a_reference_says_its_marked_or_first(
    read: Any, text: str, number: float | None
) -> None:
    assert read(text) == number


def test_lenience_keeps_more_drafts_the_lower_it_is(asked: dict[str, Any]) -> None:
    summary = run(lossy.lenience, {**asked, "new_tokens": 60}, limit=1, leniences="1,0.5,0.1")
    live = summary["all"]["overall"]
    assert summary["methods"]["l = 0.1"]["lossy"]
    before = (asked["output"] / "answers.jsonl").read_bytes()
    run(lossy.lenience, {**asked, "new_tokens": 60}, limit=1, leniences="1,0.5,0.1")
    assert (asked["output"] / "answers.jsonl").read_bytes() == before
    with pytest.raises(InvalidOption, match="cannot resume"):
        run(lossy.lenience, asked, limit=1, leniences="1,0.5,0.1")
    assert live["l = 0.1"]["acceptance_rate"] > live["lossless"]["acceptance_rate"]
    with pytest.raises(InvalidOption, match="hold no 1"):
        lossy.lenience(**asked, leniences="0.5")


def test_rounds_end_behind_an_unsure_draft_and_go_on_behind_the_first_wrong_one() -> None:
    right = [True, True, False, True, True, True, True]
    assert self_sd.rounds(right, [0.9] * 7) == [(7, 2), (4, 4)]
    assert self_sd.rounds(right, [0.9, 0.7, 0.9, 0.9, 0.9, 0.9, 0.9]) == [(2, 2), (4, 4)]
    assert self_sd.rounds([True] * 12, [0.9] * 12) == [(8, 8), (3, 3)]


def test_the_search_leaves_out_more_layers_while_it_notes_what_drafts_come_to(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_sd, "load", tiny)
    del asked["draft_model"]
    found = run(self_sd.main, asked, limit=2, ratio=0.5)
    sizes = [one["skipped"] for one in found["sizes"]]
    assert [len(one) for one in sizes] == [1, 2, 3]
    assert all(set(one) < set(more) <= {2, 3, 4, 5, 6} for one, more in pairwise(sizes))
    assert found["skipped"] == max(found["sizes"], key=lambda one: one["speed"])["skipped"]
    costs = [one["cost"] for one in found["sizes"]]
    assert 1.0 > costs[0] > costs[1] > costs[2] > 0.5
    monkeypatch.setattr(self_sd, "RULE", Skip(threshold=0.0, max_tokens=1))
    single = run(self_sd.main, asked, limit=2, ratio=0.2)
    assert single["sizes"][0]["speed"] != found["sizes"][0]["speed"]


# --- SpecBound: early models, heads that are wrong on demand, what a round should cost

IDS = random_ids(11)


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits
    return found


# --- early models


@pytest.mark.parametrize(
    ("family", "dtype"), [("llama", torch.bfloat16), ("gemma3", torch.float32)], ids=str
)
def test_layers_that_add_nothing_change_no_bit(family: str, dtype: torch.dtype) -> None:
    base = make_model(family, dtype)
    before = logits(base)
    deep = early_model(base, 6, 3)
    assert torch.equal(logits(deep), before)
    assert Backbone(deep).num_layers == 9  # conformance, and agreement of the packed weights
    layers = [*base.get_decoder().layers, *deep.get_decoder().layers]
    assert len({layer.mlp.gate_proj.weight.data_ptr() for layer in layers}) == 6 + 9
    assert layers[-1].mlp.gate_proj.weight.any()
    assert torch.equal(logits(base), before)
    with torch.no_grad():  # a shorter one answers what the lens reads there
        hidden = base(IDS, output_hidden_states=True).hidden_states[4]
        expected = base.get_output_embeddings()(base.get_decoder().norm(hidden))
    assert torch.equal(logits(early_model(base, 4, 2)), expected)


def test_a_model_that_cannot_be_made_early_is_refused() -> None:
    odd = make_model("llama")
    with pytest.raises(InvalidOption, match="7 layers asked for, the model has 6"):
        early_model(odd, 7, 1)
    for layer in odd.model.layers:
        layer.mlp = torch.nn.Identity()
    with pytest.raises(UnsupportedModel, match="down_proj"):
        early_model(odd, 6, 1)


# --- the head


def test_wrong_places_grow_with_the_dial_and_come_again() -> None:
    states = torch.randn(4000, 32, generator=torch.Generator().manual_seed(4))  # [4000, d]
    unembedding = Backbone(make_model("llama"), executor="generic").unembedding
    vocabulary = DraftVocabulary.of(unembedding, None)
    head = DialledHead(unembedding, vocabulary)
    right = LogitLensHead(unembedding, vocabulary)(states).argmax(-1)
    wrong = {}
    for share in (0.0, 0.1, 0.3, 1.0):
        head.wrong_share = share
        wrong[share] = head(states).argmax(-1) != right
        assert torch.equal(head(states).argmax(-1) != right, wrong[share])
        alone = torch.cat([head(row).argmax(-1) for row in states[:16].split(1)])
        assert torch.equal(alone != right[:16], wrong[share][:16])
    # of 4,000 places; four standard deviations are 0.02 and 0.03. A spike hits the best token
    # itself at one place in 96
    assert wrong[0.1].double().mean() == pytest.approx(0.1 * 95 / 96, abs=0.02)
    assert wrong[0.3].double().mean() == pytest.approx(0.3 * 95 / 96, abs=0.03)
    assert wrong[1.0].double().mean() == pytest.approx(95 / 96, abs=0.01)
    assert not wrong[0.0].any()
    assert not (wrong[0.1] & ~wrong[0.3]).any()


def test_vocabulary_holds_what_is_needed_then_the_lowest() -> None:
    assert small_vocabulary([9, 4, 9], 5, 10).tolist() == [0, 1, 2, 4, 9]
    for ids, size in (([1, 2, 3], 2), ([1], 11)):
        with pytest.raises(InvalidOption, match=f"vocabulary of {size} for"):
            small_vocabulary(ids, size, 10)


def test_a_right_head_keeps_every_draft() -> None:
    backbone = Backbone(early_model(make_model("llama", torch.float64), 3, 5))
    heads, head = dialled_heads(backbone, 3)
    options: dict[str, Any] = {"drafter": "exit:threshold=1e-06,max_tokens=4"}
    speculator = wrap(backbone.model, heads=heads, **options)
    stats = speculator.generate(IDS, max_new_tokens=21).stats
    assert (stats.accepted, stats.drafted, stats.rounds) == (16, 16, 4)
    head.wrong_share = 0.4
    assert speculator.generate(IDS, max_new_tokens=21).stats.accepted < 16


# --- the formula


def test_a_round_commits_what_stays_and_costs_plain_steps() -> None:
    assert expected_tokens(0.8, 6) == pytest.approx((1 - 0.8**7) / (1 - 0.8))
    assert expected_tokens(1.0, 3) == 4
    assert round_cost(4, 0.25, rows=5, head=0.01) == pytest.approx(5 * 0.25 + 0.75 + 0.04)


def test_points_are_ratios_of_totals_of_medians() -> None:
    same: dict[str, Any] = {"depth_ratio": 0.25, "new_tokens": 11, "equal": True}
    none = {"drafts": (0,) * 10, "accepted": 0, "tried": 0, "heads_s": 0.0}
    some = {"drafts": (2, 2, 2, 2, 1), "accepted": 6, "tried": 8, "heads_s": 0.18}
    runs = [
        Run(dial=dial, prompt=prompt, decode_s=seconds, **same | counts)
        for dial, counts, times in (
            (None, none, {"a": (2.0, 2.0, 9.0), "b": (6.0, 6.0, 6.0)}),
            (Dial(0.25, 2, 0.1), some, {"a": (1.0, 1.0, 7.0), "b": (3.0, 4.0, 3.0)}),
        )
        for prompt, each in times.items()
        for seconds in each
    ]
    runs.append(replace(runs[-1], equal=False))
    (point,) = points(runs).itertuples()
    assert (point.prompts, point.equal_texts) == (2, 1)
    assert point.speed_up == (2 + 6) / (1 + 3)
    assert point.acceptance == 6 / 8
    assert point.compression_rate == 10 / 5
    # 18 drafts took 0.36 s; 20 plain steps took 8 s
    assert point.head_cost == pytest.approx(0.02 / 0.4)
    # four rounds of two drafts, one of one
    tokens = 4 * (1 + 0.75 + 0.75**2) + (1 + 0.75)
    cost = 4 * (2 * 0.25 + 0.75) + (1 * 0.25 + 0.75)
    complete = 4 * (3 * 0.25 + 0.75 + 2 * 0.05) + (2 * 0.25 + 0.75 + 0.05)
    assert point.formula == pytest.approx(tokens / cost)
    assert point.complete_formula == pytest.approx(tokens / complete)


# --- all of it


def test_every_setting_is_timed_in_turn_with_plain_decoding(
    tiny_model: str, prompts: str, tmp_path: Path
) -> None:
    specbound.main(
        tmp_path / "out",
        model=tiny_model,
        dtype="float32",
        layers=3,
        extra_layers="9,3",
        max_draft_tokens="1,3",
        wrong_shares="0,0.4",
        suite=prompts,
        limit=2,
        draft_vocab_size=90,
        max_new_tokens=13,
        repeats=2,
    )
    runs = list(map(json.loads, (tmp_path / "out/runs.jsonl").read_text().splitlines()))
    assert len(runs) == 2 * 5 * 2 * 2
    turns = [runs[start : start + 5] for start in range(0, len(runs), 5)]
    for turn in turns:
        assert len({entry["prompt"] for entry in turn}) == 1
        assert len({str(entry["dial"]) for entry in turn}) == 5
    assert len({str([entry["dial"] for entry in turn]) for turn in turns[:4]}) > 1  # shuffled
    assert all(entry["equal"] and entry["new_tokens"] == 13 for entry in runs)
    assert all((sum(entry["drafts"]) == 0) == (entry["dial"] is None) for entry in runs)
    points = json.loads((tmp_path / "out/summary.json").read_text())["points"]
    assert len(points) == 8
    for point in points:
        assert point["depth_ratio"] in (0.25, 0.5)
        assert (point["acceptance"] == 1.0) == (point["wrong_share"] == 0.0)
        assert point["compression_rate"] <= point["max_draft_tokens"] + 1
    assert (tmp_path / "out/table.md").read_text().count("\n|    0.") == 8
