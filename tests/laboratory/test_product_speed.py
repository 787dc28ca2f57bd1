"""The table of product times: what is timed is a product, and what is written are its figures."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import typer

from eval import product_speed
from eval.product_speed import ROWS, Speed, main, markdown, timed


def test_rates_are_bytes_and_operations_over_time() -> None:
    ms = {"ours": [2.0] * len(ROWS), "torch": [1.0] * 3 + [math.nan] * (len(ROWS) - 3)}
    speed = Speed(model="m", part="down", dtype="bfloat16", out=1000, inner=500, ms=ms)
    assert speed.rate("ours", 1) == pytest.approx(1000 * 500 * 2 / 2e-3 / 1e9)
    assert speed.flops("ours", 512) == pytest.approx(2 * 1000 * 500 * 512 / 2e-3 / 1e9)
    page = markdown([speed], 30.0, 150.0)
    assert "30.0 GB/s" in page[0]
    assert "150 GFLOP/s" in page[0]
    assert page[-2].endswith("| 0.5 | 256 |")
    assert page[-1].count("1.000") == 3
    assert page[-1].endswith("| 1.0 |  |")


def test_a_kernel_that_takes_long_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(product_speed.SHAPES, "tiny", {"down": (32, 16)})
    monkeypatch.setattr(product_speed, "_PATIENCE_MS", 0.0)
    speed = timed("tiny", "down", "float32", 0, 1)
    for times in speed.ms.values():
        assert times[0] > 0
        assert all(map(math.isnan, times[1:]))


def test_it_writes_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(product_speed.SHAPES, "tiny", {"output": (16, 16), "down": (32, 16)})
    monkeypatch.setattr(product_speed, "memory_rate", lambda _: 30e9)
    monkeypatch.setattr(product_speed, "arithmetic_rate", lambda: 150.0)
    main(tmp_path / "out", "tiny", "float32", 0, 1)
    found = json.loads((tmp_path / "out" / "speed.json").read_text())
    assert found["memory_gb_s"] == 30.0
    assert [(one["part"], one["out"]) for one in found["products"]] == [
        ("output", 16),
        ("down", 32),
    ]
    assert all(len(ms) == len(ROWS) for one in found["products"] for ms in one["ms"].values())
    assert "tiny float32, down 32×16" in (tmp_path / "out" / "speed.md").read_text()
    with pytest.raises(typer.BadParameter, match="smollm2-135m"):
        main(tmp_path / "other", "huge", "float32", 0, 1)
