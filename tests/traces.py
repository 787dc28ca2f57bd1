"""Layer traces without a model: made-up layers around the rounds that a record replays to."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from selfspec.config import SpeculationOptions
from selfspec.decoding.prices import Costs, DraftCost
from selfspec.decoding.stats import Round
from selfspec.eval import replay
from selfspec.eval.record import Record
from selfspec.heads.heads import spread
from selfspec.visualise.layers import LayerSays, LayerTrace, Place, TraceInfo, TraceSettings

TEXTS = (
    " the",
    "<script>hacked = 1</script>",
    "</script>",
    "<!--",
    "<img src=x onerror=hacked=1>",
    "{{data}}",
    "\n",
    "  ",
    "שלום",
    "語",
    "🙂",
    "",
    "&amp;",
    '"',
    "\u2028",
)


def text_of(token: int) -> str:
    """Awkward texts, a few of them over and over."""
    return TEXTS[token % len(TEXTS)]


def alone(record: Record, prompt: int) -> Record:
    """One prompt of a record."""
    places = record.places(prompt)
    span = slice(places.start, places.stop)
    return replace(
        record,
        prompts=(record.prompts[prompt],),
        contexts=np.array(record.context(prompt), np.int32),
        answers=record.answers[span],
        roots=record.roots[span],
    )


def settings_of(options: SpeculationOptions, record: Record) -> TraceSettings:
    """What a trace notes of options; layers below D_max are not in use."""
    own, fitted = options.exit, record.info.exit_layers
    cost = DraftCost(rows=record.info.row_costs, head=record.info.head_cost)
    cost = cost.with_prices(options.prices)
    by_layer = spread(own.thresholds, own.layers or fitted)
    depth = max(by_layer, default=0) if own.max_depth is None else own.max_depth
    used = {layer: tau for layer, tau in by_layer.items() if layer <= depth}
    return TraceSettings.of(
        options, cost, used, drafter=options.drafter, trees=options.grows_trees, lossless=True
    )


def make_trace(
    record: Record, options: SpeculationOptions, layers: Sequence[int] | None = None
) -> LayerTrace:
    """The decode of a record's one prompt under `options`, looked at in `layers`."""
    fitted = record.info.exit_layers
    looked_at = tuple(fitted if layers is None else layers)
    settings = settings_of(options, record)
    taus = dict(zip(settings.exit_layers, settings.exit_thresholds, strict=True))
    rounds = replay.rounds(record, 0, options)
    return LayerTrace(
        info=TraceInfo(
            base_model="tiny </title><script>hacked = 1</script>",
            base=record.info.base,
            heads=record.info.heads,
            dtype=record.info.dtype,
            executor=record.info.executor,
            num_layers=record.info.num_layers,
            exit_layers=looked_at,
            head_kinds=tuple("translator" if e in fitted else "logit-lens" for e in looked_at),
            thresholds=tuple(
                taus.get(layer, max(taus.values(), default=1.0)) for layer in looked_at
            ),
            settings=settings,
            prompt="Say </script> and <script>hacked = 1</script>.",
            prompt_texts=tuple(f"p{n} " for n in range(record.prompts[0].prompt_tokens)),
        ),
        places=tuple(_places(rounds, looked_at)),
        rounds=tuple(rounds),
        draft_texts=tuple(tuple(map(text_of, entry.draft_tokens)) for entry in rounds),
    )


def _places(rounds: Sequence[Round], layers: Sequence[int]) -> list[Place]:
    dice = random.Random(0)
    found: list[Place] = []
    for number, entry in enumerate(rounds):
        for offset, token in enumerate(entry.tokens):
            draft = entry.kept[offset] if offset < entry.accepted else None
            left = None
            if draft is not None and entry.sources[draft] == "exit":
                left = entry.exit_layers[draft]
            top, probs = _guesses(dice, token)
            found.append(
                Place(
                    index=len(found),
                    token=token,
                    text=text_of(token),
                    kind="prefill" if entry.prefill else "bonus" if draft is None else "accepted",
                    round=number,
                    exit_layer=left,
                    copied_from=None,
                    final_top_tokens=top,
                    final_top_texts=tuple(map(text_of, top)),
                    final_top_probs=probs,
                    layers=tuple(_says(dice, layer, token) for layer in layers),
                )
            )
    return found


def _guesses(dice: random.Random, token: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Five tokens, `token` mostly among them, and probabilities that fall."""
    top = dice.sample(range(100), 5)
    if token not in top and dice.random() < 0.7:
        top[dice.randrange(2)] = token
    probs = sorted((dice.random() / 5 for _ in top), reverse=True)
    return tuple(top), tuple(probs)


def _says(dice: random.Random, layer: int, token: int) -> LayerSays:
    top, probs = _guesses(dice, token)
    return LayerSays(
        layer=layer,
        top_tokens=top,
        top_texts=tuple(map(text_of, top)),
        top_probs=probs,
        confidence=dice.random(),
        rank=top.index(token) + 1 if token in top else dice.choice([0, 6, 4711]),
        divergence=float("inf") if dice.random() < 0.02 else dice.expovariate(0.5),
    )


def some_costs(num_layers: int, rows: int) -> Costs:
    """Uneven ones, so that every term of a prediction counts."""
    return Costs(
        num_layers=num_layers,
        layers=tuple(0.010 + 0.0013 * row for row in range(rows)),
        start=tuple(0.0011 + 0.0002 * row for row in range(rows)),
        logits=tuple(0.0017 + 0.0003 * row for row in range(rows)),
        head=0.00023,
        round=0.00071,
    )
