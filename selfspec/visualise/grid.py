"""Settings around those of an answer: its trace and record come in, a Grid goes out.

The page has the rounds of every point; its controls go from point to point. The grid is laid around
the decode's own settings, as near as the record can replay them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from selfspec.config import SpeculationOptions
from selfspec.eval import replay
from selfspec.eval.record import Record
from selfspec.options import Exit, Ngram, Prices
from selfspec.visualise.layers import LayerTrace, TraceSettings

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


def grid(trace: LayerTrace, record: Record, most_rows: int) -> Grid:
    """Around a decode; `record` is of the trace's one prompt, passes have up to `most_rows`."""
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
    axes = [
        _numbers("ngram-width", ("ngram",), settings.ngram_tokens, _NGRAM_WIDTHS, most_rows - 1)
    ]
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
            _numbers("width", both, width, _WIDTHS, info.max_draft_tokens),
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


def _numbers(
    name: str, drafters: tuple[str, ...], own: int, stops: Sequence[int], most: int
) -> Axis:
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
