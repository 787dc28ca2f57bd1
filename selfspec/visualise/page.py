"""One HTML file that shows an answer layer by layer: a trace comes in, with it a record and costs.

The file needs nothing else: no network, no framework. What other settings would have done is
replayed here, for every point of a Grid, and kept in the file. Called by `selfspec trace --html`
and by `/trace` in a chat.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from html import escape
from typing import Any, NamedTuple

from selfspec import pages
from selfspec.api.givers import NAMES, Giver
from selfspec.config import SpeculationOptions
from selfspec.decoding.costs import MeasuredCosts
from selfspec.decoding.stats import EXIT, SOURCES, Round
from selfspec.eval import replay
from selfspec.eval.record import Record, RecordInfo
from selfspec.heads.heads import spread
from selfspec.options import Exit, Fixed
from selfspec.visualise.layers import (
    LayerTrace,
    counted,
    gain,
    head_right,
    rejected,
    right_from,
    usable,
)

_SCRIPTS = tuple(
    f"{part}.js"
    for part in ("story", "readout", "settings", "answer", "depth", "map", "lanes", "main")
)
"""In this order: one module in the page."""

_LOOKS = {"solid": "", "dotted": "seen", "dashed": "grammar", "double": "second"}
"""Class of a token, by the line under it; of an exit head's: left."""


def render(
    trace: LayerTrace,
    record: Record | None,
    costs: MeasuredCosts | None,
    texts: Callable[[int], str] = "#{}".format,
    why: str = "",
) -> str:
    """The whole file as text; `texts` says what a token is that another setting drafts.

    Without `record` no other setting is shown, for a reason that `why` gives; without `costs` no
    speed-up is predicted; the page says so. Both must be of this answer and reach `most_rows`.
    """
    info = trace.info
    if not info.lossless:
        record = None
        why = "Decoded by a lossy rule: with other drafts the answer would have been another one."
    data = page_data(trace, record, costs, texts) | {"why": why}
    # JSON that cannot close the element it stands in, nor open another
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


def page_data(
    trace: LayerTrace,
    record: Record | None,
    costs: MeasuredCosts | None,
    texts: Callable[[int], str] = "#{}".format,
) -> dict[str, Any]:
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
    told = _Rounds(info.num_layers, costs)
    decoded = told.add(trace.rounds, trace.draft_texts)
    return {
        "num_layers": info.num_layers,
        "exit_layers": info.exit_layers,
        "head_kinds": info.head_kinds,
        "thresholds": info.thresholds,
        "in_use": list(info.taus),
        "prompt_texts": info.prompt_texts,
        "places": places,
        "decoded": decoded,
        "grid": None if record is None else _grid(grid(trace, record), record, told, texts),
        "rounds": list(told.rounds),
        "givers": [
            {
                "words": giver.words,
                "look": "left" if giver.source == EXIT else _LOOKS[SOURCES[giver.source].line],
                "layer": giver.layer if giver.source == EXIT else None,
                "colour": giver.colour(info.num_layers),
            }
            for giver in told.givers
        ],
        "plain_step": None if costs is None else costs.plain_step(),
        "words": list(words),
    }


class _Rounds:
    """Rounds as the page tells them, each once, and what is counted of them."""

    def __init__(self, num_layers: int, costs: MeasuredCosts | None) -> None:
        self.rounds: dict[tuple[Any, ...], int] = {}
        self.givers = [*map(Giver, NAMES), *(Giver(EXIT, at) for at in range(num_layers))]
        self._num_layers, self._costs = num_layers, costs

    def add(self, rounds: Sequence[Round], texts: Sequence[Sequence[str]]) -> dict[str, Any]:
        """One answer's, with the texts of their drafts; counts leave the prompt's pass out."""
        told = [self._told(*each) for each in zip(rounds, texts, strict=True)]
        stats = counted([entry for entry in rounds if not entry.prefill], self._num_layers)
        costs, tokens = self._costs, stats.new_tokens
        seconds = 0.0 if costs is None else costs.seconds_of(rounds)
        return {
            "rounds": [self.rounds.setdefault(one, len(self.rounds)) for one in told],
            "counts": {
                "rounds": stats.rounds,
                "cr": stats.compression_rate,
                "drafted": stats.drafted,
                "accepted": stats.accepted,
                "acceptance": 100.0 * stats.acceptance_rate,
                "work": stats.row_layers / tokens if tokens else None,
                "speed": tokens * costs.plain_step() / seconds if costs and seconds else None,
            },
        }

    def _told(self, entry: Round, texts: Sequence[str]) -> tuple[Any, ...]:
        """A round as story.js reads it: who gave each token, and what was rejected before which."""
        given = tuple(self.givers.index(Giver(*giver)) for giver in entry.givers)
        branches = tuple(
            (
                place,
                "".join(texts[draft] for draft in branch),
                entry.exit_layers[branch[0]] if entry.sources[branch[0]] == EXIT else None,
            )
            for place, branch in rejected(entry)
        )
        return given, branches, entry.prefill, *self._took(entry)

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
        return round(whole - verifying, 9), round(verifying, 9)


def most_rows(trace: LayerTrace, record: Record) -> int:
    """Rows of the widest pass the page may show, the prompt's left out: costs must reach so far."""
    options = trace.info.options
    made = (len(entry.draft_tokens) + 1 for entry in trace.rounds if not entry.prefill)
    tree = options.exit.max_rows if options.exit.guesses > 1 else 1
    return max(record.widest, options.ngram.max_tokens + 1, tree, *made)


# --- the controls: settings around those of the answer --------------------------------------------


DRAFTERS = {
    "ngram+exit": "text seen, exit heads",
    "exit": "exit heads",
    "ngram": "prompt lookup",
    "none": "nothing",
}
"""Those that are replayed, in words; with few stops on each axis they make 200 to 300 points, which
are replayed in a few seconds."""


class Axis(NamedTuple):
    """One control: its stops, and the stop of the decode."""

    name: str
    words: str
    drafters: tuple[str, ...]
    """For which it means something."""
    values: tuple[Any, ...]
    texts: tuple[str, ...]
    own: int


class Grid(NamedTuple):
    """Settings around the decode's."""

    begin: SpeculationOptions
    """The nearest to the decode's that the record reaches."""
    notes: list[str]
    """In what it differs, for people; empty if its replay is the decode, round by round."""
    drafters: tuple[str, ...]
    axes: tuple[Axis, ...]

    def of(self, drafter: str) -> list[Axis]:
        """The axes that mean something for a drafter."""
        return [axis for axis in self.axes if drafter in axis.drafters]

    def points(self, drafter: str) -> Iterator[SpeculationOptions]:
        """All settings of a drafter; the last axis changes first."""
        axes = self.of(drafter)
        for values in itertools.product(*(axis.values for axis in axes)):
            at = dict(zip((axis.name for axis in axes), values, strict=True))
            exits, ngram = self.begin.exit, self.begin.ngram
            if "exits" in at:
                layers, guesses = at["exits"]
                taus = tuple(at["tau"][layer] for layer in layers)
                exits = replace(
                    exits, layers=layers, guesses=guesses, threshold=taus, max_tokens=at["width"]
                )
            yield replace(
                self.begin,
                drafter=drafter,
                exit=exits,
                ngram=replace(ngram, max_tokens=at.get("ngram-width", ngram.max_tokens)),
                never_slower=at.get("never-slower", self.begin.never_slower),
            )


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


def grid(trace: LayerTrace, record: Record) -> Grid:
    """Around a decode; `record` is of the trace's one prompt."""
    info = record.info
    begin, taus = _nearest(trace, record)
    own, most = begin.ngram.max_tokens, most_rows(trace, record) - 1
    axes = [
        _axis("ngram-width", "W max, text seen", ("ngram",), _widths(own, (1, 2, 4, 8), most), own)
    ]
    if info.exit_layers:
        own, most = begin.exit.max_tokens, info.max_draft_tokens
        here = begin.exit.layers, begin.exit.guesses
        named = "guesses for a place" if info.exit_layers == (0,) else "exit layers"
        pausing = {"no": False, "yes": True}
        both = ("ngram+exit", "exit")
        axes += [
            _axis("exits", named, both, _exits(begin.exit, record), here),
            _axis("tau", "τ, exit threshold", both, _thresholds(taus, begin.exit, info), taus),
            _axis("width", "W max, exit heads", both, _widths(own, (1, 2, 4), most), own),
            _axis("never-slower", "never slower", both, pausing, begin.never_slower),
        ]
    drafters = tuple(name for name in DRAFTERS if info.exit_layers or "exit" not in name)
    return Grid(begin, _notes(begin, trace, record), drafters, tuple(axes))


def _nearest(trace: LayerTrace, record: Record) -> tuple[SpeculationOptions, dict[int, float]]:
    """The decode's own settings as far as they were recorded, and tau of each recorded layer."""
    options, info = trace.info.options, record.info
    drafter, exits = options.drafter, options.exit
    if drafter not in DRAFTERS:
        drafter = "exit" if info.exit_layers and "ngram" not in drafter else "ngram"
    known = dict(zip(trace.info.exit_layers, trace.info.thresholds, strict=True))
    known |= spread(exits.thresholds, exits.layers or ())
    taus = {layer: max(known.get(layer, 1.0), info.min_threshold) for layer in info.exit_layers}
    if taus:
        layers = tuple(layer for layer in exits.layers or () if layer in taus) or tuple(taus)
        most_guesses = record.guesses.shape[-1] if layers == (0,) else 1
        exits = replace(
            exits,
            layers=layers,
            threshold=tuple(taus[layer] for layer in layers),
            anneal_strength=min(
                info.anneal_strengths, key=lambda alpha: abs(alpha - exits.anneal_strength)
            ),
            max_tokens=min(exits.max_tokens, info.max_draft_tokens),
            guesses=max(min(exits.guesses, most_guesses), 1),
        )
    begin = replace(options, drafter=drafter, controller=Fixed(), exit=exits, pinned=None)
    return begin, taus


def _axis(
    name: str, words: str, drafters: tuple[str, ...], stops: Mapping[str, Any], own: Any
) -> Axis:
    values = tuple(stops.values())
    return Axis(name, words, drafters, values, tuple(stops), values.index(own))


def _widths(own: int, stops: Sequence[int], most: int) -> dict[str, int]:
    return {str(stop): stop for stop in sorted({own, most, *stops}) if stop <= max(own, most)}


def _exits(own: Exit, record: Record) -> dict[str, tuple[tuple[int, ...], int]]:
    """Exit layers in use, and guesses for a place, of which the embedding may make several."""
    every, most = record.info.exit_layers, record.guesses.shape[-1]
    found = {(own.layers or (), own.guesses), (every[:1], 1), (every[-1:], 1), (every, 1)}
    if every[0] == 0 and most > 1:
        found |= {((0,), count) for count in ((1, 2, most) if every == (0,) else (most,))}
    stops = {}
    for layers, guesses in sorted(found, key=lambda one: (len(one[0]), one)):
        named = "all" if layers == every and len(every) > 2 else ", ".join(map(str, layers))
        several = f"{named} × {guesses}" if guesses > 1 else named
        stops[str(guesses) if every == (0,) else several] = layers, guesses
    return stops


def _thresholds(taus: dict[int, float], own: Exit, info: RecordInfo) -> dict[str, dict[int, float]]:
    """The decode's own by layer, and others that all layers share."""
    used = [taus[layer] for layer in own.layers or ()]
    low, high = min(used), max(used)
    shared = (0.1, 0.3, 0.6, 0.9)
    found = {
        tau: (f"{tau:g}", dict.fromkeys(taus, tau)) for tau in shared if tau >= info.min_threshold
    }
    found[sum(used) / len(used)] = f"{low:.3g}" if low == high else f"{low:.2g}–{high:.2g}", taus
    return dict(found[tau] for tau in sorted(found))


def _notes(begin: SpeculationOptions, trace: LayerTrace, record: Record) -> list[str]:
    """In what the decode differs; none where it is replayed as it was."""
    was, here = replace(trace.info.options, pinned=None).described(), begin.described()
    notes = [
        f"decoded with {name} {was[name]}, the nearest that was recorded is {here[name]}"
        for name in here
        if was[name] != here[name]
    ]
    # the prompt may have been read in several passes
    if not notes and replay.rounds(record, 0, begin)[1:] != list(trace.rounds[1:]):
        notes.append(
            "decoded in other rounds than these settings make here: penalties, a grammar, or "
            "kernels that round by the rows of a pass had a say in the drafts"
        )
    return notes
