"""One HTML file that shows an answer layer by layer: a trace comes in, with it a record and costs.

The file needs nothing else: no network, no framework. From the record it replays other settings in
the reader's browser: assets/replay.js is eval/replay.py again, with scripts for the runtime's
drafters. Called by `selfspec trace --html` and by `/trace` in a chat.
"""

from __future__ import annotations

import base64
import html
import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from selfspec import pages
from selfspec.api.givers import NAMES
from selfspec.decoding.prices import Costs
from selfspec.errors import InvalidData, InvalidOption
from selfspec.eval.record import NONE, Record
from selfspec.visualise.gain import gain, head_right, right_from
from selfspec.visualise.layers import LayerSays, LayerTrace, TraceInfo
from selfspec.visualise.start import Start, start

_HOME = "selfspec.visualise"

_SCRIPTS = (
    "prices.js",
    "drafts.js",
    "ngram.js",
    "paying.js",
    "tree.js",
    "replay.js",
    "story.js",
    "readout.js",
    "settings.js",
    "answer.js",
    "depth.js",
    "map.js",
    "lanes.js",
    "main.js",
)
"""In this order: one module in the page."""


def render(
    trace: LayerTrace,
    record: Record | None,
    costs: Costs | None,
    texts: Mapping[int, str] | None = None,
    why: str = "",
) -> str:
    """The whole file as text; `texts`: of tokens that a replay may draft.

    Without `record` nothing can be replayed, for a reason that `why` gives; without `costs` no
    speed-up is predicted; the page says so. Raises InvalidData for a record of another answer,
    InvalidOption for costs of another model or of too few rows.
    """
    begin = None
    if not trace.info.settings.lossless:
        why = "Decoded by a lossy rule: with other drafts the answer would have been another one."
    elif record is not None:
        _check(trace, record, costs)
        begin = start(trace, record)
    data = page_data(trace, record if begin else None, costs, begin, texts) | {"why": why}
    style = pages.style_of(_HOME, "page.css")
    script = pages.script_of(_HOME, *_SCRIPTS)
    return pages.filled(
        pages.assets(_HOME, ["page.html"]),
        {
            "policy": pages.policy(script, style),
            "title": html.escape(_title(trace.info)),
            "headline": html.escape(gain(trace, costs).headline),
            "style": style,
            "script": script,
            "data": _json(data),
        },
    )


def page_data(
    trace: LayerTrace,
    record: Record | None,
    costs: Costs | None,
    begin: Start | None,
    texts: Mapping[int, str] | None = None,
) -> dict[str, Any]:
    """Everything the page shows, ready for JSON; a token with its text is an index into `words`."""
    words: dict[tuple[int, str], int] = {}

    def word(token: int, text: str) -> int:
        return words.setdefault((token, text), len(words))

    places = [
        {
            "word": word(place.token, place.text),
            "kind": place.kind,
            "round": place.round,
            "copied_from": place.copied_from,
            "right_from": right_from(trace, place),
            "head_right": head_right(trace, place),
            "final": list(map(word, place.final_top_tokens, place.final_top_texts)),
            "final_probs": _numbers(place.final_top_probs),
            "layers": [
                {"top": list(map(word, said.top_tokens, said.top_texts)), **_said(said)}
                for said in place.layers
            ],
        }
        for place in trace.places
    ]
    rounds = [
        asdict(entry) | {"drafts": list(map(word, entry.draft_tokens, texts))}
        for entry, texts in zip(trace.rounds, trace.draft_texts, strict=True)
    ]
    for token, text in (texts or {}).items():
        word(token, text)
    return {
        "info": asdict(trace.info),
        "names": NAMES,
        "places": places,
        "rounds": rounds,
        "words": list(words),
        "record": None if record is None else _packed(record),
        "most_rows": 0 if record is None else most_rows(trace, record),
        "prices": None if costs is None else _prices(costs),
        "start": None if begin is None else asdict(begin),
    }


def _said(said: LayerSays) -> dict[str, Any]:
    """Numbers of a layer's guesses."""
    return {
        "probs": _numbers(said.top_probs),
        "sure": _number(said.confidence),
        "rank": said.rank,
        "kl": _number(said.divergence),
    }


def _check(trace: LayerTrace, record: Record, costs: Costs | None) -> None:
    """Raise InvalidData, InvalidOption if the parts do not belong together."""
    info = record.info
    # without heads a record has no fingerprint; the answer below says enough
    other = info.base != trace.info.base and bool(info.exit_layers)
    if len(record.prompts) != 1 or other:
        raise InvalidData(
            f"the page needs a record of its one prompt on {trace.info.base_model}, found "
            f"{len(record.prompts)} prompts on {info.base_model}"
        )
    if record.answers.tolist() != [place.token for place in trace.places]:
        raise InvalidData("the record is of another answer than the trace. Trace both again")
    rows = most_rows(trace, record)
    if costs is not None and (len(costs.layers) < rows or costs.num_layers != info.num_layers):
        raise InvalidOption(
            f"costs are of {costs.num_layers} layers and up to {len(costs.layers)} rows, the "
            f"record needs {info.num_layers} layers and {rows} rows. Measure them again"
        )


def most_rows(trace: LayerTrace, record: Record) -> int:
    """Of a pass that the page may show, the prompt's left out: costs are needed up to there."""
    settings = trace.info.settings
    made = (len(entry.draft_tokens) + 1 for entry in trace.rounds if not entry.prefill)
    tree = settings.max_rows if settings.guesses > 1 else 1
    return max(record.widest, settings.ngram_tokens + 1, tree, *made)


def _prices(costs: Costs) -> dict[str, Any]:
    """Seconds that replay.js multiplies its counts by; lists go by rows: 1, 2, .."""
    rows = range(1, len(costs.layers) + 1)
    return {
        "pass": costs.start,
        "layer": [costs.layer(row) for row in rows],
        "verdict": [costs.verdict(row) for row in rows],
        "head": costs.head,
        "plain_step": costs.plain_step(),
    }


def _packed(record: Record) -> dict[str, Any]:
    """A record of one prompt. `arrays`, as replay.js unpacks it: zlib of little-endian numbers."""
    info, prompt = record.info, record.prompts[0]
    unsure = record.confidence < info.min_threshold  # no setting tells these apart: they pack well
    unsure[record.roots[record.roots != NONE]] = False  # but they are shown
    confidence = np.where(unsure, np.float32(0.0), record.confidence)
    parts = (
        np.array(record.context(0), "<i4"),
        record.answers.astype("<i4"),
        record.roots.astype("<i4"),
        record.tokens.astype("<i4"),
        record.children.astype("<i4"),
        confidence.astype("<f4"),
        record.guesses.astype("<i4"),
        record.behind.astype("<i4"),
        record.chances[:, :, 1:].astype("<f4"),  # the best guess has the first column's confidence
    )
    arrays = b"".join(np.ascontiguousarray(part).tobytes() for part in parts)
    return {
        "num_layers": info.num_layers,
        "exit_layers": list(info.exit_layers),
        "anneal_strengths": list(info.anneal_strengths),
        "min_threshold": info.min_threshold,
        "max_draft_tokens": info.max_draft_tokens,
        "end_tokens": list(info.end_tokens),
        "prompt_tokens": prompt.prompt_tokens,
        "max_new_tokens": prompt.max_new_tokens,
        "places": len(record.answers),
        "nodes": len(record.tokens),
        "guesses": record.guesses.shape[-1],
        "arrays": base64.b64encode(zlib.compress(arrays, 9)).decode("ascii"),
    }


def _number(value: float) -> float | None:
    """Nine digits tell any two float32 apart; JSON has no infinity."""
    return float(f"{value:.9g}") if math.isfinite(value) else None


def _numbers(values: tuple[float, ...]) -> list[float]:
    """Probabilities: they are shown with four digits."""
    return [round(value, 6) for value in values]


def _title(info: TraceInfo) -> str:
    """What a browser's tab shows."""
    line = " ".join(info.prompt.split())
    return f"{line[:60]} · {info.base_model}"


def _json(data: Mapping[str, Any]) -> str:
    """JSON that cannot close the element it stands in, nor open another."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")
