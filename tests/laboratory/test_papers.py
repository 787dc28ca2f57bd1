"""The documents' experiments run end to end on tiny models, and go on where they were stopped."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from selfspec.api.speculator import Speculator, wrap
from selfspec.errors import InvalidOption
from tests.models import make_model
from tests.talks import make_tokenizer

TASKS = ("math", "translation", "summary")


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
    monkeypatch.setattr(importlib.import_module("eval.papers.shared"), "load", tiny)
    output = tmp_path / "out"
    return {"suite": str(suite), "output": output, "draft_model": Path("small"), "new_tokens": 12}


def run(name: str, asked: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The summary that a script wrote; a second run finds everything and writes the same."""
    script = importlib.import_module(f"eval.papers.{name}")
    output = asked["output"]
    script.main(**asked, **more)
    texts = {path.name: path.read_bytes() for path in output.iterdir() if path.suffix != ".png"}
    script.main(**asked, **more)
    assert {name: (output / name).read_bytes() for name in texts} == texts
    assert [path.stem for path in output.glob("*.png")] == [name.replace("_", "-")]
    summary: dict[str, Any] = json.loads(texts["summary.json"])
    assert summary["command"].startswith("python ")
    return summary


def test_gammatune_replays_the_rounds_that_live_runs_make(asked: dict[str, Any]) -> None:
    summary = run("gammatune", asked, limit=3, timed=1)
    assert (summary["questions"], summary["timed_questions"]) == (3, 1)
    assert summary["timed_runs_with_replayed_rounds"] == summary["timed_runs"] == 60
    assert list(summary["gains"]) == ["here", "c = 4", "c = 10", "timed"]
    for gain in summary["gains"].values():
        assert gain[0]["controller"] == "fixed"
        assert gain[0]["mean"] == pytest.approx(1.0)
        assert gain[0]["best"] == 1.0
    names = [gain["controller"] for gain in summary["sensitivity"]["here"]]
    assert len(names) == len(set(names)) == 5 + 12
    assert names[5] == "gammatune, rate 0.1"
    fixed = [row for row in summary["settings"] if row["controller"] == "fixed"]
    assert [row["rounds"] for row in fixed] == sorted((r["rounds"] for r in fixed), reverse=True)


def test_cm_asd_is_measured_in_both_readings_on_both_tasks(asked: dict[str, Any]) -> None:
    summary = run("cm_asd", asked, limit=4, tolerances="0,9")
    for task in ("translation", "summary"):
        found = summary[task]
        assert list(found)[:2] == ["plain", "lossless"]
        assert len(found) == 2 + 2 * 2
        assert found["lossless"]["relative_bleu"] == pytest.approx(100.0)
        assert found["lossless"]["exact_share"] == 1.0
        assert [name for name, row in found.items() if not row["lossless"]] == list(found)[2:]
        loosest = found["intent, tau_base 9"]
        assert loosest["acceptance_rate"] >= found["lossless"]["acceptance_rate"]


def test_easd_counts_right_answers_along_both_thresholds(asked: dict[str, Any]) -> None:
    summary = run("easd", asked, limit=2, entropy_threshold=3.0, entropies="0,1", overlaps="0,0.8")
    found = summary["settings"]
    assert found["plain"]["same_number"] == found["lossless"]["same_number"] == 1.0
    # no law over ten tokens has an entropy above log 10 = 2.3: nothing is penalised
    assert found["tau_H 3, tau_O 0.8"]["exact_share"] == 1.0
    assert found["tau_H 0, tau_O 0"]["exact_share"] < 1.0
    assert all(0.0 <= row["accuracy"] <= 1.0 for row in found.values())


def test_lenience_moves_the_law_by_more_the_lower_it_is(asked: dict[str, Any]) -> None:
    summary = run("lenience", {**asked, "new_tokens": 60}, limit=2, leniences="1,0.5,0.1")
    for found in (summary["model"], *summary["tiny"].values()):
        rows = list(found.values())
        moved = [row["total_variation"] for row in rows]
        assert moved[0] < 1e-6
        assert moved == sorted(moved)
        assert [row["accepted"] for row in rows] == sorted(row["accepted"] for row in rows)
    live = summary["live"]
    assert live["l = 1"]["lossless"]
    assert not live["l = 0.1"]["lossless"]
    assert live["l = 0.1"]["acceptance_rate"] > live["l = 1"]["acceptance_rate"]
    with pytest.raises(InvalidOption, match="hold no 1"):
        importlib.import_module("eval.papers.lenience").main(**asked, leniences="0.5")


def test_a_folder_of_another_run_is_not_gone_on_with(asked: dict[str, Any]) -> None:
    script = importlib.import_module("eval.papers.lenience")
    script.main(**asked, limit=1, leniences="1")
    with pytest.raises(InvalidOption, match="cannot resume"):
        script.main(**asked, limit=1, leniences="1", max_draft_tokens=3)
