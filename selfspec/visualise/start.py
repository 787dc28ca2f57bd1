"""Where the page's sliders begin: a decode's settings, as near as its record can replay them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from selfspec.config import SpeculationOptions
from selfspec.eval import replay
from selfspec.eval.record import Record, RecordInfo
from selfspec.options import Exit, Ngram, Prices
from selfspec.visualise.layers import LayerTrace, TraceSettings

_REPLAYED = ("ngram+exit", "exit", "ngram", "none")
"""Drafters."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """A setting in terms of a record, and in what it differs from the decode's."""

    drafter: str
    """One of ngram+exit, exit, ngram, none."""
    used: tuple[bool, ...]
    """Of each recorded exit layer."""
    thresholds: tuple[float, ...]
    """Of each recorded exit layer."""
    alpha: int
    """Index among the recorded ones."""
    depth: int
    """D_max, an exit layer in use."""
    width: int
    """W_max of exit heads."""
    guesses: int
    """For a place, where the embedding is the only exit layer in use; elsewhere there is one."""
    max_rows: int
    """Of a tree."""
    ngram_size: int
    ngram_width: int
    """W_max of text already seen."""
    never_slower: bool
    row_costs: tuple[float, ...]
    """What drafters take rows to cost, in steps."""
    head_cost: float
    notes: tuple[str, ...]
    """For people; empty if the replay is the decode, round by round."""

    def options(self, info: RecordInfo) -> SpeculationOptions:
        """The same for `eval.replay`."""
        in_use = [column for column, used in enumerate(self.used) if used]
        exits = Exit()
        if in_use:
            exits = Exit(
                layers=tuple(info.exit_layers[column] for column in in_use),
                threshold=tuple(self.thresholds[column] for column in in_use),
                anneal_strength=info.anneal_strengths[self.alpha],
                max_depth=self.depth,
                max_tokens=self.width,
                guesses=self.guesses if self.reads_embedding(info) else 1,
                max_rows=self.max_rows,
            )
        return SpeculationOptions(
            drafter=self.drafter,
            exit=exits,
            ngram=Ngram(size=self.ngram_size, max_tokens=self.ngram_width),
            prices=Prices(row=self.row_costs, head=self.head_cost),
            never_slower=self.never_slower,
        )

    def reads_embedding(self, info: RecordInfo) -> bool:
        """Whether the embedding is the only exit layer in use: trees grow from it alone."""
        used = zip(info.exit_layers, self.used, strict=True)
        return [layer for layer, on in used if on and layer <= self.depth] == [0]


def start(trace: LayerTrace, record: Record) -> Start:
    """The nearest setting that `record`, of the trace's one prompt, reaches."""
    settings, info = trace.info.settings, record.info
    known = dict(zip(trace.info.exit_layers, trace.info.thresholds, strict=True))
    known |= dict(zip(settings.exit_layers, settings.exit_thresholds, strict=True))
    strengths = info.anneal_strengths
    used = [layer for layer in settings.exit_layers if layer in info.exit_layers]
    used = used or list(info.exit_layers)
    asked = [layer for layer in used if layer <= settings.max_draft_depth] or used
    begin = Start(
        drafter=_drafter(settings, info),
        used=tuple(layer in used for layer in info.exit_layers),
        thresholds=tuple(
            max(known.get(layer, 1.0), info.min_threshold) for layer in info.exit_layers
        ),
        alpha=min(
            range(len(strengths)), key=lambda i: abs(strengths[i] - settings.anneal_strength)
        ),
        depth=max(asked, default=0),
        width=min(max(settings.max_draft_tokens, 1), info.max_draft_tokens),
        guesses=min(settings.guesses, record.guesses.shape[-1] or 1),
        max_rows=settings.max_rows,
        ngram_size=settings.ngram_size,
        ngram_width=settings.ngram_tokens,
        never_slower=settings.never_slower,
        row_costs=settings.row_costs,
        head_cost=settings.head_cost,
        notes=(),
    )
    return replace(begin, notes=tuple(_notes(begin, trace, record)))


def _drafter(settings: TraceSettings, info: RecordInfo) -> str:
    """The decode's, or what comes next to it."""
    if settings.drafter in _REPLAYED:
        return settings.drafter
    return "exit" if info.exit_layers and "ngram" not in settings.drafter else "ngram"


def _notes(begin: Start, trace: LayerTrace, record: Record) -> list[str]:
    """In what the decode differs; none where it was replayed as it was."""
    settings, notes = trace.info.settings, []
    if begin.drafter != settings.drafter:
        notes.append(
            f"decoded with drafts by {settings.drafter}; what a draft model says was not recorded"
        )
    elif settings.controller != "fixed" and settings.drafter != "none":
        notes.append(f"decoded with controller {settings.controller}; here W_max is fixed")
    if "exit" in begin.drafter:
        notes += _exit_notes(begin, settings, record)
    if notes:
        return notes
    replayed = replay.rounds(record, 0, begin.options(record.info))
    if replayed[1:] != list(trace.rounds[1:]):  # the prompt may have been read in several passes
        notes.append(
            "decoded in other rounds than these settings make here: penalties, a grammar, or "
            "kernels that round by the rows of a pass had a say in the drafts"
        )
    return notes


def _exit_notes(begin: Start, settings: TraceSettings, record: Record) -> Iterator[str]:
    """Of exit heads."""
    info = record.info
    missing = sorted({*settings.exit_layers} - {*info.exit_layers})
    if missing:
        yield f"exit layers not recorded: {', '.join(map(str, missing))}"
    taus = zip(settings.exit_layers, settings.exit_thresholds, strict=True)
    if any(tau < info.min_threshold for layer, tau in taus if layer not in missing):
        yield f"tau was below {info.min_threshold:g}, where recording stopped"
    if info.anneal_strengths[begin.alpha] != settings.anneal_strength:
        yield f"alpha was {settings.anneal_strength:g}, the nearest recorded one is taken"
    if begin.width < settings.max_draft_tokens:
        yield f"W_max was {settings.max_draft_tokens}, recorded were {begin.width}"
    if settings.guesses > 1 and not begin.reads_embedding(info):
        yield "decoded with second guesses beside drafts, which were not recorded of these layers"
    elif settings.guesses > begin.guesses:
        yield f"guesses for a place were {settings.guesses}, recorded were {begin.guesses}"
