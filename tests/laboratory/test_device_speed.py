"""Figures of a plain step: what is counted, what is timed, and that pages say what they are."""

from __future__ import annotations

import importlib
import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from eval.device_speed import (
    HUGGING_FACE,
    ROWS,
    DeviceSpeed,
    _Clock,
    bandwidth,
    markdown,
    measure,
    random_model,
    step_bytes,
)
from tests.models import make_model

CPU = torch.device("cpu")
MISSING = {"fused"} if shutil.which("c++") is None else set()


@pytest.fixture(scope="module")
def found() -> DeviceSpeed:
    return measure(make_model("llama"), "tiny", context=20, new_tokens=3, repeats=1)


def test_a_step_reads_all_weights_but_an_embedding_of_its_own_and_the_cache() -> None:
    model = make_model("llama", torch.bfloat16)
    numbers = sum(weight.numel() for weight in model.parameters())
    kept = 2 * 6 * 2 * 8 * 10  # keys and values, layers, heads, head size, positions
    assert step_bytes(model, 10) == 2 * (numbers - 96 * 32 + kept)
    tied = make_model("llama", tie_word_embeddings=True)
    numbers = sum(weight.numel() for weight in tied.parameters())
    assert step_bytes(tied, 0) == 4 * numbers


def test_works_are_timed_in_turns_and_the_first_time_does_not_count() -> None:
    time, order = iter([0, 50, 100, 130, 200, 201, 300, 304, 400, 403, 500, 505]), []
    clock = _Clock(CPU, 2, lambda: float(next(time)))
    works = {name: (lambda name=name: order.append(name)) for name in ("a", "b")}
    assert clock.seconds(works) == {"a": 2.0, "b": 4.5}
    assert order == ["a", "b"] * 3


def test_a_copy_reads_and_writes() -> None:
    ticks = itertools.count()
    assert bandwidth(CPU, _Clock(CPU, 1, lambda: float(next(ticks)))) == 2 * (64 << 20)


def test_all_decoders_and_passes_are_measured(found: DeviceSpeed) -> None:
    assert found.rows_s.keys() == {"generic", "packed", "fused"} - MISSING
    assert found.token_s.keys() == {HUGGING_FACE, *found.rows_s}
    assert all(tuple(rows) == ROWS for rows in found.rows_s.values())
    assert not found.captured  # there is no GPU
    assert found.limit_s == found.step_bytes / found.bandwidth_bytes_per_s


def test_the_page_says_what_was_timed_and_sets_it_against_the_limit(found: DeviceSpeed) -> None:
    assert "graph" not in "\n".join(markdown(found))
    times = {HUGGING_FACE: 0.004, "generic": 0.002, "cuda-graph": 0.001}
    fixed = replace(found, step_bytes=500, bandwidth_bytes_per_s=1e6, token_s=times)
    page = "\n".join(markdown(fixed))
    assert "no graph was timed" in page
    assert "| cuda-graph | 1.000 | 2.00 | 4.00× |" in page
    assert "no graph" not in "\n".join(markdown(replace(fixed, captured=True)))


def test_an_executor_that_cannot_run_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    found = measure(make_model("llama"), "tiny", context=20, new_tokens=3, repeats=1)
    assert found.rows_s.keys() == {"generic", "packed"}


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
    assert "random weights" in record["weights"]
    assert (tmp_path / "new" / "speed.md").read_text() == capsys.readouterr().out
    with pytest.raises(script.typer.BadParameter, match="llama-2-7b"):
        script.main(output=tmp_path, shape="large")
