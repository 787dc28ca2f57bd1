"""What the HTML page counts and holds, said in Python: for the test in a browser."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from selfspec.config import SpeculationOptions
from selfspec.decoding.stats import Round
from selfspec.eval.record import Record
from selfspec.eval.totals import plain_seconds, predicted_seconds, totals
from tests.records import OPTIONS
from tests.traces import some_costs

RECORD_LAYERS = 6
COSTS = some_costs(RECORD_LAYERS, OPTIONS.max_draft_tokens + 1)


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
        "speed_up": float(plain_seconds(record, COSTS)[0] / seconds),
    }
