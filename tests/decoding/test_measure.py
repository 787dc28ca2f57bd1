"""Measured costs: works in turns, medians by an injected clock, a plain step against memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch

from selfspec.decoding import measure as measuring
from selfspec.decoding.measure import ROWS, Clock, StepSpeed, measure, memory_rate, step_speed
from selfspec.decoding.prices import Costs
from selfspec.heads.exit_heads import ExitHeads, logit_lens
from selfspec.model.backbone import Backbone
from tests.heads.kinds import make_heads
from tests.models import make_model, needs_compiler

CPU = torch.device("cpu")


def test_works_are_timed_in_turns_and_the_first_time_does_not_count() -> None:
    time, order = iter([0, 50, 100, 130, 200, 201, 300, 304, 400, 403, 500, 505]), []
    clock = Clock(CPU, 2, lambda: float(next(time)))
    works = {name: (lambda name=name: order.append(name)) for name in ("a", "b")}
    assert clock.laps(works) == {"a": [1.0, 3.0], "b": [4.0, 5.0]}
    assert order == ["a", "b"] * 3


def test_seconds_are_medians() -> None:
    time = iter([0, 1, 10, 17, 20, 22, 30, 33])
    assert Clock(CPU, 3, lambda: float(next(time))).seconds({"a": lambda: None}) == {"a": 3.0}


@pytest.fixture
def heads(backbone: Backbone) -> ExitHeads:
    return logit_lens(backbone.unembedding, backbone.num_layers, "tiny")


def test_a_clock_that_ticks_once_a_part_makes_all_parts_alike(
    backbone: Backbone, heads: ExitHeads
) -> None:
    clock = itertools.count()
    found = measure(backbone, heads, now=lambda: float(next(clock)))
    ones = (1.0,) * 8
    # a pass of few layers takes as long as one of all: everything is its start; a round takes less
    # than the layers and the logits that it is made of: nothing is left for itself
    assert found == Costs(num_layers=6, layers=ones, start=ones, logits=ones, head=1.0, round=0.0)


def laps(seconds: Callable[[int], float]) -> Iterator[float]:
    """Clock readings in pairs; lap n takes `seconds(n)`."""
    time = 0.0
    for lap in itertools.count():
        yield time
        time += seconds(lap)
        yield time


def test_one_slow_moment_does_not_show(backbone: Backbone, heads: ExitHeads) -> None:
    clock = laps(lambda lap: 100.0 if lap in (3, 20, 31) else 2.0)
    found = measure(backbone, heads, now=lambda: next(clock))
    assert {*found.layers, *found.start, *found.logits, found.head} == {2.0}


def test_heads_that_read_deep_states_are_measured_too(backbone: Backbone) -> None:
    heads = make_heads("deep-fused", backbone.unembedding, exit_layers=(0, 2))
    found = measure(backbone, heads, context=20)
    assert found.head > 0.0
    assert len(found.layers) == len(found.start) == len(found.logits) == 8
    assert all(
        0.0 <= start <= whole for start, whole in zip(found.start, found.layers, strict=True)
    )


# --- a plain step against the limit of memory

LAYERS, KV_HEADS, HEAD_SIZE = 6, 2, 8
PRODUCTS = LAYERS * (64 * 32 + 32 * 32 + 128 * 32 + 32 * 64) + 96 * 32
"""Numbers in a tiny Llama: queries, keys and values; output; gate and up; down; lm_head."""
NORMS = LAYERS * 2 * 32 + 32


@pytest.fixture(autouse=True)
def small_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "_CPU_BYTES", 4000)


def ticking(seconds: float = 1.0) -> Clock:
    """Everything takes `seconds`."""
    ticks = itertools.count()
    return Clock(CPU, 1, lambda: seconds * next(ticks))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("executor", "weights", "width"),
    [
        ("generic", PRODUCTS + NORMS, HEAD_SIZE),
        ("cuda-graph", PRODUCTS + NORMS, HEAD_SIZE),  # its segments are the modules
        pytest.param("fused", PRODUCTS, 16, marks=needs_compiler),  # values come in sixteens
    ],
)
def test_a_step_reads_weights_keys_and_values_in_the_models_dtype(
    executor: str, weights: int, width: int, dtype: torch.dtype
) -> None:
    backbone = Backbone(make_model("llama", dtype), executor=executor)
    found = step_speed(backbone, context=10, clock=ticking(0.5))
    assert found.weight_bytes == dtype.itemsize * weights
    assert found.kv_bytes == dtype.itemsize * 2 * LAYERS * KV_HEADS * width * 10
    assert found.rows_s == dict.fromkeys(ROWS, 0.5)
    assert found.memory_bytes_per_s == memory_rate(ticking(0.5)) == 8000.0
    assert found.rows_in_steps == {2: 1.0, 4: 1.0, 8: 1.0, 16: 1.0}


def test_an_unembedding_that_is_the_embedding_counts_once_and_another_embedding_never() -> None:
    tied, own = (
        Backbone(make_model("llama", tie_word_embeddings=tie), executor="generic").weight_bytes
        for tie in (True, False)
    )
    assert tied == own == 4 * (PRODUCTS + NORMS)


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


def test_the_limit_is_the_time_that_reading_takes() -> None:
    given = {
        "context_tokens": 10,
        "weight_bytes": 900,
        "kv_bytes": 100,
        "memory_bytes_per_s": 500.0,
        "rows_s": {1: 4.0, 2: 5.0, 8: 10.0},
    }
    assert StepSpeed(**given).to_dict() == given | {  # type: ignore[arg-type]  # by name
        "step_bytes": 1000,
        "limit_s": 2.0,
        "step_s": 4.0,
        "share_of_limit": 0.5,
        "rows_in_steps": {2: 1.25, 8: 2.5},
    }
