"""Figures of a plain step: what is counted, what is timed, and that pages say what they are."""

from __future__ import annotations

import importlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from eval.device_speed import HUGGING_FACE, DeviceSpeed, markdown, measure, random_model
from selfspec.decoding.speed import ROWS, StepSpeed
from tests.models import make_model

CPU = torch.device("cpu")
MISSING = {"fused"} if shutil.which("c++") is None else set()


@pytest.fixture(scope="module")
def found() -> DeviceSpeed:
    return measure(make_model("llama"), "tiny", context=20, new_tokens=3, repeats=1)


def test_all_decoders_and_passes_are_measured(found: DeviceSpeed) -> None:
    assert found.steps.keys() == {"generic", "fused"} - MISSING
    assert found.token_s.keys() == {HUGGING_FACE, *found.steps}
    for step in found.steps.values():
        assert tuple(step.rows_s) == ROWS
        assert step.context_tokens == found.context == 20
    assert not found.captured  # there is no GPU


def test_the_page_says_what_was_timed_and_sets_it_against_the_limit(found: DeviceSpeed) -> None:
    assert "graph" not in "\n".join(markdown(found))
    times = {HUGGING_FACE: 0.004, "generic": 0.002, "cuda-graph": 0.001}
    step = StepSpeed(
        context_tokens=20,
        weight_bytes=400,
        kv_bytes=100,
        memory_bytes_per_s=1e6,
        rows_s=dict.fromkeys(ROWS, 0.003),
    )
    fixed = replace(found, steps={"generic": step}, token_s=times)
    page = "\n".join(markdown(fixed))
    assert "no graph was timed" in page
    assert "| cuda-graph | 1.000 | 2.00 | 4.00× |" in page
    assert "| generic | 3.000 | 3.000 | 3.000 | 3.000 | 3.000 |" in page
    assert "no graph" not in "\n".join(markdown(replace(fixed, captured=True)))


def test_an_executor_that_cannot_run_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    found = measure(make_model("llama"), "tiny", context=20, new_tokens=3, repeats=1)
    assert found.steps.keys() == {"generic"}


def test_random_models_have_their_shape_and_never_end() -> None:
    model = random_model("tiny", torch.bfloat16, CPU)
    assert model.dtype == torch.bfloat16
    assert model.generation_config.eos_token_id is None


@pytest.fixture
def script() -> Any:
    return importlib.import_module("eval.step_speed")


def test_the_script_runs(script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"dtype": "float32", "new_tokens": 2, "repeats": 1}
    script.main(output=tmp_path / "new", shape="tiny", device="cpu", context=999, **options)
    record = json.loads((tmp_path / "new" / "speed.json").read_text())
    assert record["context"] == 240  # what the shape has room for
    assert record["steps"]["generic"]["context_tokens"] == 240
    assert "random weights" in record["weights"]
    assert (tmp_path / "new" / "speed.md").read_text() == capsys.readouterr().out
    with pytest.raises(script.typer.BadParameter, match="llama-2-7b"):
        script.main(output=tmp_path, shape="large")
