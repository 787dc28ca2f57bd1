"""The commands for a GPU, on a tiny model here: every step, what fails, a time that is over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer

from eval import gpu_hour
from eval.gpu_hour import COMMANDS, Hour, Step
from eval.lab import SHAPES, Shape


def steps_of(output: Path, command: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((output / f"{command}.json").read_text())["steps"]
    return found


def test_every_step_runs_on_a_tiny_model(tmp_path: Path) -> None:
    commands: Any = COMMANDS
    for command in commands:
        gpu_hour.main(command, tmp_path, tiny=True)
    check, speed, fit = (steps_of(tmp_path, command) for command in COMMANDS)
    for name, step in (check | speed | fit).items():
        assert step["outcome"] == ("skipped: no CUDA" if name.startswith("waits") else "done"), name
    assert check["captures"]["found"]["graphs"] >= 2 * 5  # layers and logits, by rows
    rows = {"texts share passes", "2", "4", "8", "16"}
    assert set(check["bits, generic, torch.float32"]["found"]) == rows
    assert len(check["lossless, cuda-graph, torch.float32"]["found"]) == 7
    swept = speed["swept, smollm2-135m"]["found"]
    few, many = (swept[f"7 drafts, {chance}"]["tokens_a_round"] for chance in (0.5, 0.9))
    assert 1.0 <= few < many
    assert speed["ours, smollm2-135m, generic"]["found"]["plain"]["tokens_a_round"] == 1.0
    assert fit["adapted"]["found"]["finished"]
    assert (tmp_path / "adapted" / "heads" / "model.safetensors").exists()


def test_what_fails_hangs_or_no_longer_fits_is_recorded_and_the_others_run(tmp_path: Path) -> None:
    def breaks(_: Hour, found: dict[str, Any], **_more: str) -> None:
        found["half"] = 1
        raise ValueError("no such kernel\nwith more to say")

    def hangs(*_: object) -> None:
        while True:
            pass

    def works(*_: object) -> None:
        pass

    steps = [Step(1, breaks, {}), Step(0.01, hangs, {}), Step(1, works, {})]
    steps.append(Step(61, breaks, {"for": "long"}))
    with pytest.raises(typer.Exit):
        gpu_hour.carried_out(Hour(tmp_path, None, 1, tiny=True), "some", steps)
    found = steps_of(tmp_path, "some")
    assert {name: (entry["outcome"], entry.get("said")) for name, entry in found.items()} == {
        "breaks": ("failed", "no such kernel"),
        "hangs": ("failed", "stopped after 0 s"),
        "works": ("done", None),
        "breaks, long": ("not begun", None),
    }
    broken = found["breaks"]
    assert (broken["found"], broken["error"]) == ({"half": 1}, "ValueError")
    assert broken["trace"][-1].endswith(" breaks")


def test_without_the_model_weights_are_random_and_the_result_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SHAPES, gpu_hour.DEFAULT, Shape(32, 64, 2, 4, 2, 96, 64))
    hour = Hour(tmp_path, tmp_path / "no.gguf", 1, tiny=False)
    label = hour._loaded(gpu_hour.DEFAULT, gpu_hour.BF16)[2]
    assert label.startswith("random weights, smollm2-135m: ")
    assert "no.gguf" in label
