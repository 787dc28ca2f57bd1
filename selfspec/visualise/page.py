"""One HTML file that shows an answer layer by layer: a trace comes in, with it a record and costs.

The file needs nothing else: no network, no framework. What other settings would have done is
replayed here, for every point of a Grid, and kept in the file. Called by `selfspec trace --html`
and by `/trace` in a chat.
"""

from __future__ import annotations

import html
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from selfspec import pages
from selfspec.api.givers import NAMES
from selfspec.config import SpeculationOptions
from selfspec.decoding.prices import Costs
from selfspec.decoding.stats import DRAFT_MODEL, EXIT, Round
from selfspec.errors import InvalidData, InvalidOption
from selfspec.eval import replay
from selfspec.eval.record import Record
from selfspec.options import Exit, Ngram, Prices
from selfspec.visualise.layers import (
    LayerTrace,
    TraceSettings,
    gain,
    head_right,
    right_from,
)

_HOME = "selfspec.visualise"

_PARTS = ("story", "readout", "settings", "answer", "depth", "map", "lanes", "main")
_SCRIPTS = tuple(f"{part}.js" for part in _PARTS)
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
    asked = " ".join(trace.info.prompt.split())
    return pages.filled(
        pages.assets(_HOME, ["page.html"]),
        {
            "policy": pages.policy(script, style),
            "title": html.escape(f"{asked[:60]} · {trace.info.base_model}"),
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
                {
                    "top": _tops(words, said.top_tokens, said.top_texts),
                    "probs": _numbers(said.top_probs),
                    "sure": _number(said.confidence),
                    "rank": said.rank,
                    "kl": _number(said.divergence),
                }
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
    found = None if record is None else _grid(grid(trace, record), record, told, texts)
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


def _json(data: Mapping[str, Any]) -> str:
    """JSON that cannot close the element it stands in, nor open another."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


# --- the controls: settings around those of the answer --------------------------------------------


DRAFTERS = {
    "ngram+exit": "text seen, exit heads",
    "exit": "exit heads",
    "ngram": "text already seen",
    "none": "nothing",
}
"""Those that are replayed, in words."""

_TAUS = (0.1, 0.3, 0.6, 0.9)
_WIDTHS, _NGRAM_WIDTHS = (1, 2, 4), (1, 2, 4, 8)
_GUESSES = (1, 2)
"""Stops of the controls, beside the decode's own and the most: they make 200 to 300 points, which
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


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Settings around the decode's."""

    begin: SpeculationOptions
    """The nearest to the decode's that the record reaches."""
    notes: tuple[str, ...]
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


def grid(trace: LayerTrace, record: Record) -> Grid:
    """Around a decode; `record` is of the trace's one prompt."""
    settings, info = trace.info.settings, record.info
    known = dict(zip(trace.info.exit_layers, trace.info.thresholds, strict=True))
    known |= dict(zip(settings.exit_layers, settings.exit_thresholds, strict=True))
    taus = {layer: max(known.get(layer, 1.0), info.min_threshold) for layer in info.exit_layers}
    used = [layer for layer in settings.exit_layers if layer in taus] or list(taus)
    layers = tuple(layer for layer in used if layer <= settings.max_draft_depth) or tuple(used)
    most_guesses = record.guesses.shape[-1] if layers == (0,) else 0
    width = min(max(settings.max_draft_tokens, 1), info.max_draft_tokens)
    begin = SpeculationOptions(
        drafter=_drafter(settings, record),
        ngram=Ngram(size=settings.ngram_size, max_tokens=settings.ngram_tokens),
        prices=Prices(row=settings.row_costs, head=settings.head_cost),
        never_slower=settings.never_slower,
    )
    most = most_rows(trace, record) - 1
    axes = [_stops("ngram-width", ("ngram",), settings.ngram_tokens, _NGRAM_WIDTHS, most)]
    drafters = tuple(name for name in DRAFTERS if layers or "exit" not in name)
    if layers:
        exits = Exit(
            layers=layers,
            threshold=tuple(taus[layer] for layer in layers),
            anneal_strength=min(
                info.anneal_strengths, key=lambda alpha: abs(alpha - settings.anneal_strength)
            ),
            max_tokens=width,
            guesses=max(min(settings.guesses, most_guesses), 1),
            max_rows=settings.max_rows,
        )
        begin = replace(begin, exit=exits)
        both = ("ngram+exit", "exit")
        axes += [
            _exits(begin.exit, record, both),
            _thresholds(taus, begin.exit, info.min_threshold, both),
            _stops("width", both, width, _WIDTHS, info.max_draft_tokens),
            Axis(
                "never-slower",
                "never slower: pause exit heads that do not pay",
                both,
                (False, True),
                ("no", "yes"),
                int(settings.never_slower),
            ),
        ]
    notes = tuple(_notes(begin, trace, record))
    return Grid(begin=begin, notes=notes, drafters=drafters, axes=tuple(axes))


def _drafter(settings: TraceSettings, record: Record) -> str:
    """The decode's, or what comes next to it."""
    if settings.drafter in DRAFTERS:
        return settings.drafter
    return "exit" if record.info.exit_layers and "ngram" not in settings.drafter else "ngram"


def _stops(name: str, drafters: tuple[str, ...], own: int, stops: Sequence[int], most: int) -> Axis:
    words = {"width": "W max, exit heads", "ngram-width": "W max, text seen"}[name]
    values = tuple(sorted({own, most, *(stop for stop in stops if stop <= most)}))
    return Axis(name, words, drafters, values, tuple(map(str, values)), values.index(own))


def _exits(own: Exit, record: Record, drafters: tuple[str, ...]) -> Axis:
    """Exit layers in use; with guesses for a place, where the embedding alone is asked."""
    every, most = record.info.exit_layers, record.guesses.shape[-1]
    here = (own.layers or (), own.guesses)
    found = {here, ((every[0],), 1), ((every[-1],), 1), (every, 1)}
    if every[0] == 0 and most > 1:
        found |= {((0,), count) for count in (*_GUESSES, most)} if every == (0,) else {((0,), most)}
    values = tuple(sorted(found, key=lambda value: (len(value[0]), value)))

    def text(layers: tuple[int, ...], guesses: int) -> str:
        if every == (0,):
            return str(guesses)
        named = "all" if layers == every and len(every) > 2 else ", ".join(map(str, layers))
        return named if guesses == 1 else f"{named} × {guesses}"

    words = "guesses for a place" if every == (0,) else "exit layers"
    texts = tuple(itertools.starmap(text, values))
    return Axis("exits", words, drafters, values, texts, values.index(here))


def _thresholds(taus: dict[int, float], own: Exit, least: float, drafters: tuple[str, ...]) -> Axis:
    """The decode's own by layer, and others that all layers share."""
    used = sorted({taus[layer] for layer in own.layers or ()})
    found = [(tau, f"{tau:g}", dict.fromkeys(taus, tau)) for tau in _TAUS if tau >= least]
    found = [one for one in found if [one[0]] != used]
    text = f"{used[0]:.3g}" if len(used) == 1 else f"{used[0]:.2g}–{used[-1]:.2g}"
    found.append((sum(used) / len(used), text, taus))
    found.sort(key=lambda one: one[0])
    values = tuple(one[2] for one in found)
    own_at = next(at for at, value in enumerate(values) if value is taus)
    return Axis("tau", "τ, exit threshold", drafters, values, tuple(o[1] for o in found), own_at)


def _notes(begin: SpeculationOptions, trace: LayerTrace, record: Record) -> list[str]:
    """In what the decode differs; none where it is replayed as it was."""
    settings, notes = trace.info.settings, []
    if begin.drafter != settings.drafter:
        notes.append(
            f"decoded with drafts by {settings.drafter}; what a draft model says was not recorded"
        )
    elif settings.controller != "fixed" and settings.drafter != "none":
        notes.append(f"decoded with controller {settings.controller}; here W_max is fixed")
    if begin.uses("exit"):
        notes += _exit_notes(begin.exit, settings, record)
    # the prompt may have been read in several passes
    if not notes and replay.rounds(record, 0, begin)[1:] != list(trace.rounds[1:]):
        notes.append(
            "decoded in other rounds than these settings make here: penalties, a grammar, or "
            "kernels that round by the rows of a pass had a say in the drafts"
        )
    return notes


def _exit_notes(begin: Exit, settings: TraceSettings, record: Record) -> Iterator[str]:
    info = record.info
    missing = sorted({*settings.exit_layers} - {*info.exit_layers})
    if missing:
        yield f"exit layers not recorded: {', '.join(map(str, missing))}"
    taus = zip(settings.exit_layers, settings.exit_thresholds, strict=True)
    if any(tau < info.min_threshold for layer, tau in taus if layer not in missing):
        yield f"tau was below {info.min_threshold:g}, where recording stopped"
    if begin.anneal_strength != settings.anneal_strength:
        yield f"alpha was {settings.anneal_strength:g}, the nearest recorded one is taken"
    if begin.max_tokens < settings.max_draft_tokens:
        yield f"W_max was {settings.max_draft_tokens}, recorded were {begin.max_tokens}"
    if settings.guesses > 1 and begin.layers != (0,):
        yield "decoded with second guesses beside drafts, which were not recorded of these layers"
    elif settings.guesses > begin.guesses:
        yield f"guesses for a place were {settings.guesses}, recorded were {begin.guesses}"
