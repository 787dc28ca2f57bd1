"""A small trace written by hand, for the tests of what draws it; every case of a token occurs."""

from __future__ import annotations

from typing import Any

from selfspec.decoding.stats import Round
from selfspec.visualise.layers import (
    Kind,
    LayerSays,
    LayerTrace,
    Place,
    TraceInfo,
    TraceSettings,
)

SETTINGS = TraceSettings(
    exit_layers=(2, 4),
    exit_thresholds=(0.5, 0.8),
    anneal_strength=0.2,
    max_draft_depth=4,
    max_draft_tokens=2,
    guesses=1,
    max_rows=16,
    ngram_size=4,
    ngram_tokens=7,
    never_slower=True,
    row_costs=(0.08,),
    head_cost=0.08,
    drafter="exit",
    controller="fixed",
    lossless=True,
)
INFO = TraceInfo(
    base_model="tiny",
    base="0" * 64,
    heads="1" * 64,
    dtype="float32",
    executor="generic",
    num_layers=6,
    exit_layers=(2, 3, 4),
    head_kinds=("translator", "logit-lens", "translator"),
    thresholds=(0.5, 0.9, 0.8),
    settings=SETTINGS,
    prompt="Why?",
    prompt_texts=("<user>", "Why", "?"),
)
RIGHT, WRONG = 7, 8
"""Ids of every final token and of every wrong guess."""


def said(layer: int, confidence: float, *, right: bool, text: str = "no") -> LayerSays:
    """Two guesses, of which the first may be right."""
    order = (RIGHT, WRONG) if right else (WRONG, RIGHT)
    return LayerSays(
        layer=layer,
        top_tokens=order,
        top_texts=("yes", text) if right else (text, "yes"),
        top_probs=(confidence, round(1 - confidence, 6)),
        confidence=confidence,
        rank=1 if right else 2,
        divergence=0.25,
    )


def place(
    index: int,
    text: str,
    kind: Kind = "bonus",
    number: int = 0,
    exit_layer: int | None = None,
    guess: str = "no",
) -> Place:
    """Layer 2 knows it where it left there, else is sure and wrong; 3 is unsure, 4 is right."""
    return Place(
        index=index,
        token=RIGHT,
        text=text,
        kind=kind,
        round=number,
        exit_layer=exit_layer,
        copied_from=None,
        final_top_tokens=(RIGHT, WRONG),
        final_top_texts=("yes", "no"),
        final_top_probs=(0.75, 0.25),
        layers=(
            said(2, 0.625, right=exit_layer == 2, text=guess),
            said(3, 0.3 + index / 1000, right=False),
            said(4, 0.875, right=True),
        ),
    )


def entry(count: int, drafts: int, accepted: int, layers: list[int], **values: Any) -> Round:
    """A round that commits `count` tokens."""
    tokens = [RIGHT] * accepted + [WRONG] * (drafts - accepted)
    return Round(
        tokens=[RIGHT] * count,
        draft_tokens=tokens,
        exit_layers=layers,
        kept=[*range(accepted)],
        **{
            "sources": ["exit"] * drafts,
            "ended": "width",
            "passes": [(1, 0, 2), (1, 2, 4), (drafts + 1, 4, 6)],
            **values,
        },
    )


def small_trace() -> LayerTrace:
    """Prompt's pass, plain round, a kept and a rejected draft, two sources of copied text."""
    return LayerTrace(
        info=INFO,
        places=(
            place(0, "A", "prefill"),
            place(1, " line\n", number=1),
            place(2, " kept", "accepted", 2, 2),
            place(3, " checked", number=2),
            place(4, " deep", "accepted", 3, 4),
            place(5, "<end>", number=3),
        ),
        rounds=(
            entry(1, 0, 0, [], prefill=True, ended="off"),
            entry(1, 0, 0, [], ended="depth"),
            entry(2, 2, 1, [2, 4]),
            entry(2, 1, 1, [4], stop_reason="eos"),
        ),
        draft_texts=((), (), (" kept", " dropped"), (" deep",)),
    )


def long_trace(texts: list[str], guess: str = "no") -> LayerTrace:
    """Plain decoding of `texts`; every guess of layer 2 reads `guess`."""
    return LayerTrace(
        info=INFO,
        places=tuple(
            place(index, text, "bonus" if index else "prefill", index, guess=guess)
            for index, text in enumerate(texts)
        ),
        rounds=tuple(
            entry(1, 0, 0, [], prefill=index == 0, ended="off") for index in range(len(texts))
        ),
        draft_texts=((),) * len(texts),
    )
