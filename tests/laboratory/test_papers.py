"""The documents' experiments run end to end on tiny models, and go on where they were stopped."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from eval import lab
from eval.papers import gammatune, lossy, self_sd
from eval.papers.gammatune import Setting, gains
from eval.papers.lossy import expected_number, final_number
from selfspec.api.speculator import Speculator, wrap
from selfspec.errors import InvalidOption
from selfspec.options import Skip
from tests.models import make_model
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


def test_gammatune_compares_controllers_from_all_initial_lengths(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = (Setting("fixed", 1), Setting("fixed", 5), Setting("gammatune-plus", 5))
    monkeypatch.setattr(gammatune, "SETTINGS", few)
    summary = run(gammatune.main, asked, limit=2)
    assert summary["questions"] == 2
    assert list(summary["gains"]) == ["timed", "c = 4", "c = 10"]
    for gain in summary["gains"].values():
        assert gain[0]["controller"] == "fixed"
        assert gain[0]["mean"] == pytest.approx(1.0)
        assert gain[0]["best"] == 1.0
        assert gain[-1]["controller"] == "gammatune-plus"
    one, five = (row for row in summary["settings"] if row["controller"] == "fixed")
    assert one["rounds"] > five["rounds"]
    for row in summary["settings"]:
        assert row["rounds"] + row["accepted"] == summary["tokens"]
    before = (asked["output"] / "answers.jsonl").read_bytes()
    run(gammatune.main, asked, limit=2)
    assert (asked["output"] / "answers.jsonl").read_bytes() == before
    with pytest.raises(InvalidOption, match="cannot resume"):
        run(gammatune.main, asked | {"new_tokens": 13}, limit=2)


def test_gains_are_over_the_mean_of_fixed_lengths_and_the_best_of_them() -> None:
    # throughput 1 and 0.5, mean 0.75; 0.8 and 1
    seconds = [("fixed", 1, 1.0), ("fixed", 8, 2.0), ("gammatune", 1, 1.25), ("gammatune", 8, 1.0)]
    found = pd.DataFrame(seconds, columns=["controller", "initial", "timed"])
    usual, own = gains(found, "timed").itertuples()
    assert (usual.mean, usual.best, usual.worst, usual.worst_initial) == (1.0, 1.0, 0.5, 8)
    assert own.mean == pytest.approx(0.9 / 0.75)
    assert own.spread == pytest.approx(0.1 / 0.75)
    assert (own.best, own.worst, own.worst_initial) == (1.0, 0.8, 1)


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
