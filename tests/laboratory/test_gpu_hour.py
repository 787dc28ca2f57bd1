"""The commands for a GPU, on a tiny model here: every step, what fails, a time that is over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer

from eval import gpu_hour
from eval.gpu_hour import COMMANDS, Hour, Step
from selfspec.errors import InvalidData


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
    assert set(check["bits, generic, torch.float32"]["found"]) == {"2", "4", "8", "16"}
    rungs = check["verify, cuda-graph, torch.float32"]["found"].values()
    assert len(rungs) == 7
    planted = speed["smollm2-135m, planted drafts"]["found"]
    few, many = (planted[f"7 drafts, {chance}"]["tokens_a_round"] for chance in (0.5, 0.9))
    assert 1.0 <= few < many
    assert speed["smollm2-135m, generic"]["found"]["plain"]["tokens_a_round"] == 1.0
    assert fit["fit"]["found"]["metrics"]["train_answer_tokens"] > 0
    sizes = [file.stat().st_size for file in tmp_path.iterdir()]
    assert len(sizes) <= 8
    assert max(sizes) < 15 << 20


def test_what_fails_hangs_or_no_longer_fits_is_recorded_and_the_others_run(tmp_path: Path) -> None:
    def breaks(_: Hour, found: dict[str, Any]) -> None:
        found["half"] = 1
        raise ValueError("no such kernel\nwith more to say")

    def hangs(*_: object) -> None:
        while True:
            pass

    steps = [Step("breaks", 1, breaks, {}), Step("hangs", 0.01, hangs, {})]
    steps += [Step("works", 1, lambda *_: None, {}), Step("long", 61, breaks, {})]
    with pytest.raises(typer.Exit):
        gpu_hour.carried_out(Hour(tmp_path, None, 1, tiny=True), "some", steps)
    found = steps_of(tmp_path, "some")
    assert {name: (entry["outcome"], entry.get("said")) for name, entry in found.items()} == {
        "breaks": ("failed", "no such kernel"),
        "hangs": ("failed", "stopped after 0 s"),
        "works": ("done", None),
        "long": ("not begun", None),
    }
    broken = found["breaks"]
    assert (broken["found"], broken["error"]) == ({"half": 1}, "ValueError")
    assert broken["trace"][-1].endswith(" breaks")


def test_a_file_travels_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, folder = tmp_path / "it.gguf", tmp_path / "parts"
    file.write_bytes(bytes(range(100)))
    monkeypatch.setattr(gpu_hour, "default_model_file", lambda: file)
    monkeypatch.setattr(gpu_hour, "PART", 40)
    assert "holds no parts" in Hour(tmp_path, folder, 1, tiny=False).file[1]
    gpu_hour.main("parts", folder)
    assert len(list(folder.glob("it.gguf.part-*"))) == 3
    assert gpu_hour.joined(folder).read_bytes() == file.read_bytes()
    (folder / "it.gguf.part-01").write_bytes(b"")
    with pytest.raises(InvalidData, match=r"not what parts\.json says"):
        gpu_hour.joined(folder)
    monkeypatch.setattr(gpu_hour, "find_spec", lambda _: None)
    assert Hour(tmp_path, None, 1, tiny=False).file == (None, "no package gguf to read it.gguf")
