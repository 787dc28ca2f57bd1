"""Traces and settings for the tests of the HTML page, and what they do in a browser."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np

from selfspec.config import SpeculationOptions
from selfspec.eval.record import NONE, Ints, Record
from selfspec.options import Exit, Fixed, Prices
from selfspec.visualise.layers import LayerTrace
from tests.eval.test_replay import learning_setting
from tests.traces import make_trace, some_costs

RECORD_LAYERS = 6
COSTS = some_costs(RECORD_LAYERS, 16)
USED = SpeculationOptions(
    exit=Exit(threshold=0.2, anneal_strength=0.5, max_tokens=3), never_slower=False
)


PROMPT = 1
"""Of a record's."""
PHONE: dict[str, Any] = {"viewport": {"width": 360, "height": 740}}
"""Of a browser."""


def learning_settings(record: Record) -> list[SpeculationOptions]:
    """By chance: text already seen, pauses, and trees where the record has them.

    In some a threshold equals a confidence to the last bit.
    """
    found = []
    met = record.confidence[record.roots[record.roots != NONE]]
    for seed in range(60):
        dice = random.Random(seed)
        drafter = dice.choice(["ngram", "exit", "ngram+exit", "ngram+exit", "none"])
        options = learning_setting(record, seed, drafter)
        if record.guesses.size and dice.random() < 0.7:
            options = replace(options, exit=_trees(options.exit, dice))
        alpha = record.info.anneal_strengths.index(options.exit.anneal_strength)
        taus = [tau for tau in met[..., alpha].ravel().tolist() if tau >= record.info.min_threshold]
        if taus and dice.random() < 0.4:
            options = replace(options, exit=replace(options.exit, threshold=dice.choice(taus)))
        # dear as a whole, so that pauses come soon, but few single rows: else nothing is tried
        heads = dice.choice([0.0, 0.2, 0.34, 0.6])
        dear = Prices(row=(0.05, dice.choice([0.1, 0.9])), head=heads)
        prices = options.prices if dice.random() < 0.2 else dear
        found.append(replace(options, controller=Fixed(), prices=prices))
    return found


def _trees(exits: Exit, dice: random.Random) -> Exit:
    return replace(
        exits,
        layers=(0,),
        max_depth=None,
        threshold=exits.thresholds[0],
        guesses=dice.randint(2, 8),
        max_rows=dice.randint(2, 16),
    )


def tiled(record: Record, places: int) -> Record:
    """A short answer over and over: many places, and nodes of their own for each copy."""
    copies, nodes = -(-places // len(record.answers)), len(record.tokens)

    def shifted(found: Ints) -> Ints:
        each = [np.where(found >= 0, found + nodes * copy, nodes * copy) for copy in range(copies)]
        return np.concatenate(each).astype(np.int32)

    return replace(
        record,
        info=replace(record.info, end_tokens=()),
        prompts=(replace(record.prompts[0], new_tokens=places, max_new_tokens=places),),
        answers=np.tile(record.answers, copies)[:places],
        roots=shifted(record.roots)[:places],
        tokens=np.tile(record.tokens, (copies, 1)),
        children=shifted(record.children),
        confidence=np.tile(record.confidence, (copies, 1, 1)),
        guesses=np.tile(record.guesses, (copies, 1)),
        chances=np.tile(record.chances, (copies, 1, 1)),
        behind=shifted(record.behind),
    )


def long_trace(record: Record, places: int = 128) -> tuple[LayerTrace, Record]:
    """Many tokens and 30 layers, heads at other depths."""
    long = tiled(record, places)
    long = replace(long, info=replace(long.info, num_layers=31, exit_layers=(4, 12, 20)))
    return make_trace(long, USED, range(1, 31)), long


def unfold(page: Any) -> None:
    """The table of guesses, and the sliders."""
    for name in ("guesses", "settings"):
        page.locator(f"#{name} > summary").click()
    page.locator("#map td").first.wait_for(state="attached")


def cell(page: Any, trace: LayerTrace, place: int, layer: int) -> Any:
    """A cell of the map; deep layers stand above."""
    row = len(trace.info.exit_layers) - 1 - trace.info.exit_layers.index(layer)
    return page.locator("#map tbody tr").nth(row).locator("td").nth(place)


def set_slider(page: Any, slider: Any, value: float) -> None:
    slider.evaluate(
        "(node, value) => { node.value = value; "
        "node.dispatchEvent(new Event('input', { bubbles: true })); }",
        value,
    )
