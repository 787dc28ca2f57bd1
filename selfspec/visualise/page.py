"""One HTML file that shows an answer layer by layer: a trace comes in, with it a record and costs.

The file needs nothing else: no network, no framework. What other settings would have done is
replayed here, for every point of a Grid, and kept in the file. Called by `selfspec trace --html`
and by `/trace` in a chat.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from selfspec import pages
from selfspec.api.givers import NAMES
from selfspec.config import SpeculationOptions
from selfspec.decoding.prices import Costs
from selfspec.decoding.sources import DRAFT_MODEL, EXIT
from selfspec.decoding.stats import Round
from selfspec.errors import InvalidData, InvalidOption
from selfspec.eval import replay
from selfspec.eval.record import Record
from selfspec.visualise.gain import gain, head_right, right_from
from selfspec.visualise.grid import DRAFTERS, Grid, grid
from selfspec.visualise.layers import LayerSays, LayerTrace, TraceInfo

_HOME = "selfspec.visualise"

_SCRIPTS = (
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
    texts: Callable[[int], str] = "#{}".format,
    why: str = "",
) -> str:
    """The whole file as text; `texts` says what a token is that another setting drafts.

    Without `record` no other setting is shown, for a reason that `why` gives; without `costs` no
    speed-up is predicted; the page says so. Raises InvalidData for a record of another answer,
    InvalidOption for costs of another model or of too few rows.
    """
    if not trace.info.settings.lossless:
        record = None
        why = "Decoded by a lossy rule: with other drafts the answer would have been another one."
    if record is not None:
        _check(trace, record, costs)
    data = page_data(trace, record, costs, texts) | {"why": why}
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
    texts: Callable[[int], str] = "#{}".format,
) -> dict[str, Any]:
    """Everything the page shows, ready for JSON; a token with its text is an index into `words`."""
    words = _Pool()
    places = [
        {
            "word": words.add((place.token, place.text)),
            "kind": place.kind,
            "round": place.round,
            "copied_from": place.copied_from,
            "right_from": right_from(trace, place),
            "head_right": head_right(trace, place),
            "final": _tops(words, place.final_top_tokens, place.final_top_texts),
            "final_probs": _numbers(place.final_top_probs),
            "layers": [
                {"top": _tops(words, said.top_tokens, said.top_texts), **_said(said)}
                for said in place.layers
            ],
        }
        for place in trace.places
    ]
    priced = costs
    if any(DRAFT_MODEL in entry.sources for entry in trace.rounds):
        priced = None  # costs do not know what a draft model takes
    told = _Rounds(words, priced)
    decoded = told.add(trace.rounds, trace.draft_texts)
    found = (
        None
        if record is None
        else _grid(grid(trace, record, most_rows(trace, record)), record, told, texts)
    )
    return {
        "info": asdict(trace.info),
        "names": NAMES,
        "places": places,
        "decoded": decoded,
        "grid": found,
        "rounds": list(told.rounds.known),
        "plain_step": None if priced is None else priced.plain_step(),
        "words": list(words.known),
    }


class _Pool:
    """Things that are said once, and named by their index from then on."""

    def __init__(self) -> None:
        self.known: dict[Any, int] = {}

    def add(self, one: Any) -> int:
        return self.known.setdefault(one, len(self.known))


def _tops(words: _Pool, tokens: Sequence[int], texts: Sequence[str]) -> list[int]:
    return [words.add(word) for word in zip(tokens, texts, strict=True)]


class _Rounds:
    """Rounds as the page tells them, each once, and what is counted of them."""

    def __init__(self, words: _Pool, costs: Costs | None) -> None:
        self.rounds = _Pool()
        self._words, self._costs = words, costs

    def add(self, rounds: Sequence[Round], texts: Sequence[Sequence[str]]) -> dict[str, Any]:
        """One answer's, with the texts of their drafts."""
        told = [self.rounds.add(self._told(*each)) for each in zip(rounds, texts, strict=True)]
        return {"rounds": told, "counts": counts(rounds, self._costs)}

    def _told(self, entry: Round, texts: Sequence[str]) -> tuple[Any, ...]:
        """As story.js reads it: who gave each draft is an exit layer or a name."""
        givers = (
            layer if source == EXIT else source
            for layer, source in zip(entry.exit_layers, entry.sources, strict=True)
        )
        return (
            len(entry.tokens),
            tuple(_tops(self._words, entry.draft_tokens, texts)),
            tuple(givers),
            None if entry.parents is None else tuple(entry.parents),
            tuple(entry.kept),
            entry.prefill,
            *self._took(entry),
        )

    def _took(self, entry: Round) -> tuple[float, float]:
        """Seconds of drafting and of verifying; without costs steps of plain decoding."""
        if self._costs is None or entry.prefill:
            return (0.0, 0.0 if entry.prefill else 1.0)
        whole = self._costs.seconds_of([entry])
        ends = [run for run in entry.passes if run[2] == self._costs.num_layers]
        verifying = self._costs.seconds(
            [(rows, 1, last - first) for rows, first, last in ends],
            [(len(entry.draft_tokens) + 1, 1)],
            0,
        )
        return (_number(whole - verifying) or 0.0, _number(verifying) or 0.0)


def counts(rounds: Sequence[Round], costs: Costs | None) -> dict[str, float | None]:
    """What the table beside the controls shows; the prompt's pass is left out."""
    behind = [entry for entry in rounds if not entry.prefill]
    tokens = sum(len(entry.tokens) for entry in behind)
    drafted = sum(len(entry.draft_tokens) for entry in behind)
    accepted = sum(entry.accepted for entry in behind)
    work = sum(rows * (last - first) for entry in behind for rows, first, last in entry.passes)
    seconds = 0.0 if costs is None else costs.seconds_of(behind)
    return {
        "rounds": len(behind),
        "cr": tokens / len(behind) if behind else 0.0,
        "drafted": drafted,
        "accepted": accepted,
        "acceptance": 100.0 * accepted / drafted if drafted else 0.0,
        "work": work / tokens if tokens else None,
        "speed": tokens * costs.plain_step() / seconds if costs is not None and seconds else None,
    }


def _grid(
    found: Grid, record: Record, told: _Rounds, texts: Callable[[int], str]
) -> dict[str, Any]:
    """The controls, and what every point gives; points that give the same share it."""
    results: dict[str, int] = {}

    def result(options: SpeculationOptions) -> int:
        rounds = replay.rounds(record, 0, options)
        made = told.add(rounds, [list(map(texts, entry.draft_tokens)) for entry in rounds])
        return results.setdefault(json.dumps(made), len(results))

    points = {name: list(map(result, found.points(name))) for name in found.drafters}
    own = {axis.name: axis.own for axis in found.axes}
    return {
        "drafters": {name: DRAFTERS[name] for name in found.drafters},
        "axes": [axis._asdict() for axis in found.axes],
        "begin": {"drafter": found.begin.drafter, **own},
        "notes": found.notes,
        "points": points,
        "results": [json.loads(made) for made in results],
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
