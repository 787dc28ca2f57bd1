"""One HTML file that shows an answer layer by layer: a trace comes in, and with it costs.

The file needs nothing else: no network, no framework. Called by `selfspec trace --html` and by
`/trace` in a chat.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from html import escape
from typing import Any

from selfspec import pages
from selfspec.api.givers import NAMES, Giver
from selfspec.decoding.costs import MeasuredCosts
from selfspec.decoding.stats import EXIT, SOURCES, Round
from selfspec.visualise.layers import (
    LayerTrace,
    gain,
    head_right,
    rejected,
    right_from,
    usable,
)

_SCRIPTS = tuple(f"{part}.js" for part in ("story", "readout", "answer", "map", "lanes", "main"))
"""In this order: one module in the page."""

_LOOKS = {"solid": "", "dotted": "seen", "dashed": "grammar", "double": "second"}
"""Class of a token, by the line under it; of an exit head's: left."""


def render(trace: LayerTrace, costs: MeasuredCosts | None) -> str:
    """The whole file as text; without `costs` no speed-up is predicted, and the page says so."""
    info = trace.info
    # JSON that cannot close the element it stands in, nor open another
    data = page_data(trace, costs)
    packed = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    html, _ = pages.page(
        "selfspec.visualise",
        "page",
        _SCRIPTS,
        title=escape(f"{' '.join(info.prompt.split())[:60]} · {info.base_model}"),
        headline=escape(gain(trace, costs).headline),
        facts=escape(f"{info.base_model} · {info.dtype}, {info.executor} · {trace.summary}"),
        prompt=escape(info.prompt),
        data=packed.replace("<", "\\u003c"),
    )
    return html


def page_data(trace: LayerTrace, costs: MeasuredCosts | None) -> dict[str, Any]:
    """Everything the page shows, ready for JSON; a token with its text is an index into `words`."""
    info, words = trace.info, dict[tuple[int, str], int]()

    def tops(tokens: Sequence[int], texts: Sequence[str]) -> list[int]:
        return [words.setdefault(word, len(words)) for word in zip(tokens, texts, strict=True)]

    places = [
        {
            "word": words.setdefault((place.token, place.text), len(words)),
            "copied_from": place.copied_from,
            "right_from": right_from(trace, place),
            "head_right": head_right(trace, place),
            "top": tops(place.final_top_tokens, place.final_top_texts),
            "probs": place.final_top_probs,
            "layers": [
                {
                    "top": tops(said.top_tokens, said.top_texts),
                    "probs": said.top_probs,
                    "sure": said.confidence,
                    "rank": said.rank,
                    "kl": said.divergence if math.isfinite(said.divergence) else None,
                }
                for said in place.layers
            ],
        }
        for place in trace.places
    ]
    costs = usable(trace, costs)
    givers = [*map(Giver, NAMES), *(Giver(EXIT, at) for at in range(info.num_layers))]
    rounds = zip(trace.rounds, trace.draft_texts, strict=True)
    return {
        "num_layers": info.num_layers,
        "exit_layers": info.exit_layers,
        "head_kinds": info.head_kinds,
        "thresholds": info.thresholds,
        "in_use": list(info.taus),
        "prompt_texts": info.prompt_texts,
        "places": places,
        "rounds": [_told(entry, texts, givers, costs) for entry, texts in rounds],
        "givers": [
            {
                "words": giver.words,
                "look": "left" if giver.source == EXIT else _LOOKS[SOURCES[giver.source].line],
                "layer": giver.layer if giver.source == EXIT else None,
                "colour": giver.colour(info.num_layers),
            }
            for giver in givers
        ],
        "plain_step": None if costs is None else costs.plain_step(),
        "words": list(words),
    }


def _told(
    entry: Round, texts: Sequence[str], givers: Sequence[Giver], costs: MeasuredCosts | None
) -> tuple[Any, ...]:
    """A round as story.js reads it: who gave each token, and what was rejected before which."""
    given = tuple(givers.index(Giver(*giver)) for giver in entry.givers)
    branches = tuple(
        (
            place,
            "".join(texts[draft] for draft in branch),
            entry.exit_layers[branch[0]] if entry.sources[branch[0]] == EXIT else None,
        )
        for place, branch in rejected(entry)
    )
    return given, branches, entry.prefill, *_took(entry, costs)


def _took(entry: Round, costs: MeasuredCosts | None) -> tuple[float, float]:
    """Seconds of drafting and of verifying; without costs steps of plain decoding."""
    if costs is None or entry.prefill:
        return (0.0, 0.0 if entry.prefill else 1.0)
    ends = [run for run in entry.passes if run[2] == costs.num_layers]
    verifying = costs.seconds(
        [(rows, 1, last - first) for rows, first, last in ends],
        [(len(entry.draft_tokens) + 1, 1)],
        0,
    )
    return round(costs.seconds_of([entry]) - verifying, 9), round(verifying, 9)
