"""A plain step against the memory's limit: what is counted, and what is timed by whose clock."""

from __future__ import annotations

import itertools

import pytest
import torch

from selfspec.decoding import measure
from selfspec.decoding.measure import ROWS, Clock, StepSpeed, memory_rate, step_speed
from selfspec.model.backbone import Backbone
from tests.models import make_model, needs_compiler

CPU = torch.device("cpu")

LAYERS, KV_HEADS, HEAD_SIZE = 6, 2, 8
PRODUCTS = LAYERS * (64 * 32 + 32 * 32 + 128 * 32 + 32 * 64) + 96 * 32
"""Numbers in a tiny Llama: queries, keys and values; output; gate and up; down; lm_head."""
NORMS = LAYERS * 2 * 32 + 32


@pytest.fixture(autouse=True)
def small_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_CPU_BYTES", 4000)


def ticking(seconds: float = 1.0) -> Clock:
    """Everything takes `seconds`."""
    ticks = itertools.count()
    return Clock(CPU, 1, lambda: seconds * next(ticks))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_models_own_modules_read_weights_keys_and_values_in_its_dtype(
    dtype: torch.dtype,
) -> None:
    backbone = Backbone(make_model("llama", dtype), executor="generic")
    found = step_speed(backbone, context=10, clock=ticking())
    assert found.weight_bytes == dtype.itemsize * (PRODUCTS + NORMS)
    assert found.kv_bytes == dtype.itemsize * 2 * LAYERS * KV_HEADS * HEAD_SIZE * 10
    assert found.step_bytes == found.weight_bytes + found.kv_bytes


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_weights_count_as_they_are_kept(dtype: torch.dtype) -> None:
    backbone = Backbone(make_model("llama", dtype), executor="fused")
    found = step_speed(backbone, context=10, clock=ticking())
    assert found.weight_bytes == dtype.itemsize * PRODUCTS
    # values come in sixteens
    assert found.kv_bytes == 2 * LAYERS * KV_HEADS * 10 * 16 * dtype.itemsize


def test_an_unembedding_that_is_the_embedding_counts_once_and_another_embedding_never() -> None:
    tied, own = (
        Backbone(make_model("llama", tie_word_embeddings=tie), executor="generic").weight_bytes
        for tie in (True, False)
    )
    assert tied == own == 4 * (PRODUCTS + NORMS)


def test_captured_segments_read_what_the_modules_do() -> None:
    found = [
        step_speed(Backbone(make_model("llama"), executor=name), context=10, clock=ticking())
        for name in ("generic", "cuda-graph")
    ]
    assert found[0] == found[1]


def test_memory_is_read_once_per_lap() -> None:
    assert memory_rate(ticking(2.0)) == 2000.0


def test_everything_is_timed_by_one_clock(backbone: Backbone) -> None:
    found = step_speed(backbone, context=10, clock=ticking(0.5))
    assert found.rows_s == dict.fromkeys(ROWS, 0.5)
    assert found.memory_bytes_per_s == 8000.0
    assert found.rows_in_steps == {2: 1.0, 4: 1.0, 8: 1.0, 16: 1.0}


def test_the_limit_is_the_time_that_reading_takes() -> None:
    found = StepSpeed(
        context_tokens=10,
        weight_bytes=900,
        kv_bytes=100,
        memory_bytes_per_s=500.0,
        rows_s={1: 4.0, 2: 5.0, 8: 10.0},
    )
    assert (found.step_bytes, found.limit_s, found.step_s) == (1000, 2.0, 4.0)
    assert found.share_of_limit == 0.5
    assert found.rows_in_steps == {2: 1.25, 8: 2.5}
    assert found.to_dict() == {
        "context_tokens": 10,
        "weight_bytes": 900,
        "kv_bytes": 100,
        "memory_bytes_per_s": 500.0,
        "rows_s": {1: 4.0, 2: 5.0, 8: 10.0},
        "step_bytes": 1000,
        "limit_s": 2.0,
        "step_s": 4.0,
        "share_of_limit": 0.5,
        "rows_in_steps": {2: 1.25, 8: 2.5},
    }


@pytest.mark.parametrize(
    ("positions", "context", "rows"), [(128, 112, ROWS), (24, 8, ROWS), (14, 1, (1, 2, 4, 8))]
)
@pytest.mark.parametrize("family", ["llama", "gpt2"])  # rotations, and a table that ends
def test_the_context_leaves_room_in_models_of_few_positions(
    family: str, positions: int, context: int, rows: tuple[int, ...]
) -> None:
    model = make_model(family, max_position_embeddings=positions)
    found = step_speed(Backbone(model), clock=ticking())
    assert found.context_tokens == context
    assert tuple(found.rows_s) == rows
