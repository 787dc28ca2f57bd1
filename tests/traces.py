"""Layer traces without a model: rounds by hand or at random, in made-up layers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from selfspec.config import SpeculationOptions
from selfspec.decoding.stats import Round
from selfspec.options import Costs, Exit
from selfspec.visualise.layers import LayerSays, LayerTrace, Place, TraceInfo
from selfspec.visualise.look import provenance

TOKEN = 7  # every token of a trace by hand

TEXTS = (
    *(" the", "<script>hacked = 1</script>", "</script>", "<!--", "<img src=x onerror=hacked=1>"),
    *("{{data}}", "\n", "  ", "שלום", "語", "🙂", "", "&amp;", '"', "\u2028"),
)


def text_of(token: int) -> str:
    """One of a few awkward texts."""
    return TEXTS[token % len(TEXTS)]


INFO = TraceInfo(
    base_model="tiny </title><script>hacked = 1</script>",
    base="0" * 64,
    heads="1" * 64,
    dtype="float32",
    executor="generic",
    num_layers=6,
    exit_layers=(2, 3, 4),
    head_kinds=("translator", "logit-lens", "translator"),
    thresholds=(0.5, 0.9, 0.8),
    options=SpeculationOptions(exit=Exit(layers=(2, 4), threshold=(0.5, 0.8), max_tokens=2)),
    lossless=True,
    prompt="Say </script> and <script>hacked = 1</script>.",
    prompt_texts=("p0 ", "p1 ", "p2 "),
)


def trace_of(
    rounds: Sequence[Round],
    texts: Sequence[str],
    draft_texts: Sequence[tuple[str, ...]],
    info: TraceInfo = INFO,
) -> LayerTrace:
    """A trace of tokens with these texts; the guesses of layers are random."""
    dice, places = random.Random(0), list[Place]()
    for index, (origin, _) in enumerate(provenance((), rounds, 4)):
        top, probs = _guesses(dice, origin["token"])
        places.append(
            Place(
                index=index,
                text=texts[index],
                **origin,
                final_top_tokens=top,
                final_top_texts=tuple(map(text_of, top)),
                final_top_probs=probs,
                layers=tuple(_says(dice, layer, origin["token"]) for layer in info.exit_layers),
            )
        )
    drafts = tuple(draft_texts)
    return LayerTrace(info=info, places=tuple(places), rounds=tuple(rounds), draft_texts=drafts)


def _guesses(dice: random.Random, token: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Five tokens, mostly with `token` among them, and falling probabilities."""
    top = dice.sample(range(100), 5)
    if token not in top and dice.random() < 0.7:
        top[dice.randrange(2)] = token
    return tuple(top), tuple(sorted((dice.random() / 5 for _ in top), reverse=True))


def _says(dice: random.Random, layer: int, token: int) -> LayerSays:
    top, probs = _guesses(dice, token)
    return LayerSays(
        layer=layer,
        top_tokens=top,
        top_texts=tuple(map(text_of, top)),
        top_probs=probs,
        confidence=dice.random(),
        rank=top.index(token) + 1 if token in top else dice.choice([0, 6, 4711]),
        divergence=dice.expovariate(0.5),
    )


# Rounds by hand


def entry(count: int, layers: Sequence[int] = (), accepted: int = 0, **values: Any) -> Round:
    """A round that commits `count` tokens; its drafts exited at `layers`."""
    drafts = len(layers)
    fields: dict[str, Any] = {
        "sources": ["exit"] * drafts,
        "kept": [*range(accepted)],
        "ended": "width",
        "passes": [(1, 0, 2), (1, 2, 4), (drafts + 1, 4, 6)],
    }
    return Round(
        tokens=[TOKEN] * count,
        draft_tokens=[TOKEN] * accepted + [TOKEN + 1] * (drafts - accepted),
        exit_layers=list(layers),
        **fields | values,
    )


def small_trace() -> LayerTrace:
    """The prompt's pass, a plain round, a kept and a rejected draft, a draft that ends the text."""
    return trace_of(
        (
            entry(1, prefill=True, ended="off"),
            entry(1, ended="depth"),
            entry(2, [2, 4], 1),
            entry(2, [4], 1, stop_reason="eos"),
        ),
        ("A", " line\n", " kept", " checked", " deep", "<end>"),
        ((), (), (" kept", " dropped"), (" deep",)),
    )


def long_trace(texts: Sequence[str]) -> LayerTrace:
    """Plain decoding of `texts`."""
    rounds = [entry(1, prefill=index == 0, ended="off") for index in range(len(texts))]
    return trace_of(rounds, texts, [()] * len(texts))


def drawn_trace(
    count: int = 20,
    num_layers: int = 6,
    heads: Sequence[int] = (1, 3, 5),
    layers: Sequence[int] = (0, 1, 2, 3, 5),
) -> LayerTrace:
    """`count` tokens with awkward texts, after random chains and trees of drafts."""
    dice, rounds = random.Random(3), [entry(1, prefill=True, ended="off")]
    shapes = [(None, [0, 1]), (None, [0]), (None, []), ([-1, -1, 1], [1, 2]), ([-1, 0, 0], [0])]
    rest = count - 1
    while rest:
        parents, kept = dice.choice(shapes) if rest > 2 else (None, [])
        drafts = [dice.randrange(100) for _ in range(3)]
        template = entry(len(kept) + 1, dice.choices(heads, k=3), parents=parents, kept=kept)
        tokens = [*(drafts[index] for index in kept), dice.randrange(100)]
        rounds.append(replace(template, tokens=tokens, draft_tokens=drafts))
        rest -= len(tokens)
    info = replace(
        INFO,
        num_layers=num_layers,
        exit_layers=tuple(layers),
        head_kinds=tuple("translator" if layer in heads else "logit-lens" for layer in layers),
        thresholds=(0.2,) * len(layers),
        options=SpeculationOptions(
            exit=Exit(layers=tuple(heads), threshold=(0.2, 0.3, 0.4)),
            costs=Costs(row=(0.13, 0.11), head=0.02),
        ),
        prompt_texts=tuple(f"p{number} " for number in range(5)),
    )
    texts = [text_of(token) for one in rounds for token in one.tokens]
    trace = trace_of(rounds, texts, [tuple(map(text_of, one.draft_tokens)) for one in rounds], info)
    place, *places = trace.places
    # the page can show infinity, which JSON lacks
    far = tuple(replace(says, divergence=float("inf")) for says in place.layers[:1])
    return replace(trace, places=(replace(place, layers=far + place.layers[1:]), *places))
