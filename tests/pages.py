"""What the HTML page counts and holds, said in Python: for its tests, in a browser and without."""

from __future__ import annotations

import random
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest

from selfspec.config import SpeculationOptions
from selfspec.decoding.stats import Round
from selfspec.eval import replay
from selfspec.eval.record import Record
from selfspec.eval.totals import plain_seconds, predicted_seconds, totals
from selfspec.options import Exit
from selfspec.visualise.layers import LayerTrace
from tests.eval.test_replay import random_setting
from tests.records import OPTIONS
from tests.traces import make_trace, some_costs

RECORD_LAYERS = 6
COSTS = some_costs(RECORD_LAYERS, OPTIONS.max_draft_tokens + 1)
USED = SpeculationOptions(
    exit=Exit(threshold=0.2, anneal_strength=0.5, max_tokens=3), never_slower=False
)


def many_settings(record: Record) -> list[SpeculationOptions]:
    """By chance; in some a threshold equals a confidence to the last bit."""
    options = [random_setting(record, seed) for seed in range(40)]
    sure = np.unique(record.confidence[record.confidence >= record.info.min_threshold])
    everywhere = options[0].updated({"exit": {"layers": None, "max_depth": None}})
    taus = random.Random(1).sample(sure.tolist(), 10)
    return [*options, *(everywhere.updated({"exit": {"threshold": tau}}) for tau in taus)]


def check_replayed(
    record: Record, options: SpeculationOptions, rounds: list[Any], summary: dict[str, float]
) -> None:
    """Every field of every round, the heads asked, and what is counted and predicted of them."""
    judged = sum(entry["heads"] for entry in rounds)
    assert rounds == [plain(entry) for entry in replay.rounds(record, 0, options)], options
    assert judged == totals(record, [options]).judged[0, 0]
    for name, value in python_results(record, options).items():
        assert summary[name] == pytest.approx(value, rel=1e-12), (name, options)


def as_choice(record: Record, options: SpeculationOptions) -> dict[str, Any]:
    """Options as the page's sliders hold them."""
    info, own = record.info, options.exit
    layers = own.layers or info.exit_layers
    taus = own.thresholds if len(own.thresholds) > 1 else own.thresholds * len(layers)
    by_layer = dict(zip(layers, taus, strict=True))
    return {
        "used": [layer in layers for layer in info.exit_layers],
        "thresholds": [by_layer.get(layer, 1.0) for layer in info.exit_layers],
        "alpha": info.anneal_strengths.index(own.anneal_strength),
        "depth": layers[-1] if own.max_depth is None else own.max_depth,
        "width": own.max_tokens,
    }


def plain(entry: Round) -> dict[str, Any]:
    """A round as JSON has it."""
    return asdict(entry) | {"passes": [list(run) for run in entry.passes]}


def python_results(record: Record, options: SpeculationOptions) -> dict[str, float]:
    """What Python's replay counts and predicts."""
    found = totals(record, [options])
    seconds = predicted_seconds(found, COSTS)[0, 0]
    return {
        "rounds": int(found.rounds[0, 0]),
        "drafted": int(found.drafted[0, 0]),
        "accepted": int(found.accepted[0, 0]),
        "compression_rate": float(found.tokens[0, 0] / found.rounds[0, 0]),
        "seconds": float(seconds),
        "speed_up": float(plain_seconds(record, COSTS)[0] / seconds),
    }


def long_trace(record: Record, places: int = 128) -> tuple[LayerTrace, Record]:
    """Many tokens and 30 layers: a short answer over and over, its heads at other depths."""
    copies, nodes = -(-places // len(record.answers)), len(record.tokens)
    shifted = [
        np.where(record.roots >= 0, record.roots + nodes * copy, record.roots)
        for copy in range(copies)
    ]
    roots = np.concatenate(shifted)[:places].astype(np.int32)
    roots[roots < 0] = 0
    children = np.concatenate(
        [
            np.where(record.children >= 0, record.children + nodes * copy, 0)
            for copy in range(copies)
        ]
    ).astype(np.int32)
    layers = (4, 12, 20)
    long = replace(
        record,
        info=replace(record.info, num_layers=31, exit_layers=layers, end_tokens=()),
        prompts=(replace(record.prompts[0], new_tokens=places, max_new_tokens=places),),
        answers=np.tile(record.answers, copies)[:places],
        roots=roots,
        tokens=np.tile(record.tokens, (copies, 1)),
        children=children,
        confidence=np.tile(record.confidence, (copies, 1, 1)),
    )
    return make_trace(long, USED, range(1, 31)), long
