"""Replay of thousands of settings at once: counts instead of rounds, and the seconds they predict.

The rounds of every place are followed together, one draft of all of them at a time; then each
prompt jumps from round to round. Settings that differ in W_max only share the drafting. Counts
equal those of `replay.rounds`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from selfspec.config import SpeculationOptions
from selfspec.decoding.costs import Costs
from selfspec.errors import InvalidOption
from selfspec.eval.record import Record
from selfspec.eval.replay import Setting

Counts = npt.NDArray[np.int32]
Indices = npt.NDArray[np.integer]

_KINDS = _ROUNDS, _TOKENS, _DRAFTED, _ACCEPTED, _JUDGED = range(5)
"""Columns of plain counters; behind them three tables by the number of rows."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Totals:
    """What S settings do on P prompts, prompt passes left out. Each [S, P], or [S, P, rows]."""

    counts: Counts
    """[S, P, columns]"""
    widest: int
    """Rows of a pass at most; entry r - 1 of a table stands for r rows."""

    @property
    def rounds(self) -> Counts:
        """Verifications."""
        return self.counts[..., _ROUNDS]

    @property
    def tokens(self) -> Counts:
        """Committed behind the first, which is the prompt's."""
        return self.counts[..., _TOKENS]

    @property
    def drafted(self) -> Counts:
        """Draft tokens."""
        return self.counts[..., _DRAFTED]

    @property
    def accepted(self) -> Counts:
        """Drafts among the committed tokens."""
        return self.counts[..., _ACCEPTED]

    @property
    def judged(self) -> Counts:
        """How often a head was asked."""
        return self.counts[..., _JUDGED]

    @property
    def passes(self) -> Counts:
        """Passes, by rows."""
        return self._table(0)

    @property
    def layers(self) -> Counts:
        """Layers run, by rows."""
        return self._table(1)

    @property
    def verified(self) -> Counts:
        """Verifications, by the rows whose logits were read."""
        return self._table(2)

    def _table(self, index: int) -> Counts:
        start = len(_KINDS) + index * self.widest
        return self.counts[..., start : start + self.widest]


def predicted_seconds(totals: Totals, costs: Costs) -> npt.NDArray[np.float64]:
    """Wall time behind the prompt's pass, [S, P]."""
    rows = range(1, totals.widest + 1)
    start = np.array([costs.start[row - 1] for row in rows])
    each = np.array([costs.run(1, row) for row in rows]) - start
    logits = np.array([costs.logits[row - 1] for row in rows])
    seconds: npt.NDArray[np.float64] = (
        totals.passes @ start
        + totals.layers @ each
        + totals.verified @ logits
        + totals.judged * costs.head
        + totals.rounds * costs.round
    )
    return seconds


def plain_seconds(record: Record, costs: Costs) -> npt.NDArray[np.float64]:
    """Wall time of plain decoding behind the prompt's pass, [P]."""
    return np.array([(entry.new_tokens - 1) * costs.plain_step() for entry in record.prompts])


def totals(record: Record, settings: Sequence[SpeculationOptions]) -> Totals:
    """Counts of all settings on all prompts.

    Neighbours that differ in W_max only are replayed together. Raises InvalidOption for a setting
    that the record does not reach, and for rounds that depend on those before them.
    """
    for options in settings:
        kind = options.controller.kind
        if (options.drafter, kind) != ("exit", "fixed"):
            raise InvalidOption(
                f"drafter {options.drafter} with controller {kind} learns from round "
                "to round, and is replayed round by round only. Take exit and fixed"
            )
        if options.never_slower:
            raise InvalidOption(
                "never_slower learns from round to round, and is replayed round by round only. "
                "Switch it off"
            )
    checked = [Setting.of(record, options) for options in settings]
    board = _Board(record)
    counts = np.zeros((len(checked), len(record.prompts), board.columns), np.int32)
    done = 0
    for _, family in itertools.groupby(checked, key=lambda s: (s.columns, s.thresholds, s.alpha)):
        members = list(family)
        by_width = dict(board.replay(members[0], {member.width for member in members}))
        for member in members:
            counts[done] = by_width[member.width]
            done += 1
    return Totals(counts=counts, widest=board.widest)


class _Board:
    """A record laid out for replay: R places where a round can begin, of all prompts."""

    def __init__(self, record: Record) -> None:
        info = record.info
        self.num_layers = info.num_layers
        self.widest = info.max_draft_tokens + 1
        self.columns = len(_KINDS) + 3 * self.widest
        self.tokens, self.children = record.tokens, record.children
        self.confidence = record.confidence.astype(np.float64)  # thresholds are float64
        self.is_end = np.isin(record.tokens, info.end_tokens)
        self.answers = record.answers
        spans = [record.places(prompt) for prompt in range(len(record.prompts))]
        # the last token of an answer begins no round
        self.places = np.concatenate([np.arange(span.start, span.stop - 1) for span in spans])
        self.roots = record.roots[self.places]
        counts = np.array([len(span) - 1 for span in spans])
        known = np.concatenate([np.arange(1, count + 1) for count in counts])
        asked = np.array([prompt.max_new_tokens for prompt in record.prompts])
        self.limits = np.repeat(asked, counts) - known - 1
        self.left = np.repeat(counts, counts) - known + 1
        """Tokens of the answer behind each place."""
        self._prompts = np.flatnonzero(counts)
        self._ends = counts.cumsum()[self._prompts]
        self._first = self._ends - counts[self._prompts]
        self._shape = len(counts), self.columns

    def replay(self, setting: Setting, widths: set[int]) -> Iterator[tuple[int, Counts]]:
        """Counts [P, columns] for each W_max."""
        walk = _Walk(self, setting)
        for width in range(1, max(widths) + 1):
            walk.step()
            if width in widths:
                yield width, self._summed(walk.verified())

    def _summed(self, table: Counts) -> Counts:
        """[R, columns] of all rounds that could begin -> [P, columns] of those that do."""
        begins = np.zeros(len(table), np.bool_)
        now, ends = self._first, self._ends
        while len(now):
            begins[now] = True
            now = now + table[now, _TOKENS]
            going = now < ends
            now, ends = now[going], ends[going]
        chosen = np.flatnonzero(begins)
        counts = np.zeros(self._shape, np.int32)
        if len(chosen):
            parts = np.searchsorted(chosen, self._first)
            counts[self._prompts] = np.add.reduceat(table[chosen], parts, axis=0)
        return counts


class _Walk:
    """Rounds from all places at once; `step` drafts one more token in each."""

    def __init__(self, board: _Board, setting: Setting) -> None:
        self._board = board
        self._setting = setting
        self._depths = (0, *setting.layers, board.num_layers)
        count = len(board.places)
        self._table = np.zeros((count, board.columns), np.int32)
        self._waiting = np.zeros((len(self._depths) - 1, count), np.int32)
        self._nodes = board.roots.copy()
        self._right = np.ones(count, np.bool_)
        self._open = np.arange(count)
        """Places that are still drafting."""

    def step(self) -> None:
        """One more draft where drafting goes on; rounds that end here are verified for good."""
        board, table = self._board, self._table
        full = table[self._open, _DRAFTED] >= board.limits[self._open]
        self._verify(self._open[full], table)
        active = self._open[~full]
        self._waiting[0, active] += 1
        column, unsure = self._exits(active)
        self._verify(unsure, table, difficult=True)
        drafting = column >= 0
        active, column = active[drafting], column[drafting]
        nodes = self._nodes[active]
        truth = board.places[active] + table[active, _DRAFTED] + 1
        hit = board.tokens[nodes, column] == board.answers.take(truth, mode="clip")
        self._right[active] &= hit
        table[active, _ACCEPTED] += self._right[active]
        table[active, _DRAFTED] += 1
        self._nodes[active] = board.children[nodes, column]
        ended = board.is_end[nodes, column]
        self._verify(active[ended], table)
        self._open = active[~ended]

    def verified(self) -> Counts:
        """[R, columns] if no more is drafted."""
        table: Counts = self._table.copy()
        self._verify(self._open, table)
        return table

    def _exits(self, active: Indices) -> tuple[Indices, Indices]:
        """The column of the first confident layer, -1 for difficult tokens, and the latter."""
        board, setting = self._board, self._setting
        column = np.full(len(active), -1)
        waiting = np.arange(len(active))
        asked = zip(setting.columns, setting.thresholds, strict=True)
        for boundary, (index, tau) in enumerate(asked):
            places = active[waiting]
            rows = self._waiting[boundary, places]
            self._count(self._table, places, rows, self._depths[boundary : boundary + 2])
            self._waiting[boundary, places] = 0
            self._waiting[boundary + 1, places] += rows
            self._table[places, _JUDGED] += 1
            sure = board.confidence[self._nodes[places], index, setting.alpha] >= tau
            column[waiting[sure]] = index
            waiting = waiting[~sure]
        return column, active[waiting]

    def _verify(self, places: Indices, table: Counts, *, difficult: bool = False) -> None:
        """Take all waiting rows to layer L, and count the round."""
        waiting = self._waiting[:, places]
        if not difficult:  # else the newest row has come to D_max already
            waiting[0] += 1
        rows, first = waiting[0], np.zeros(len(places), np.int32)
        for boundary, depth in enumerate(self._depths[1:-1], start=1):
            meets = waiting[boundary] > 0
            self._count(table, places[meets], rows[meets], (first[meets], depth))
            rows = rows + waiting[boundary]
            first = np.where(meets, depth, first)
        self._count(table, places, rows, (first, self._board.num_layers))
        accepted = table[places, _ACCEPTED]
        table[places, _ROUNDS] = 1
        table[places, _TOKENS] = np.minimum(accepted + 1, self._board.left[places])
        verified = len(_KINDS) + 2 * self._board.widest
        table[places, verified + table[places, _DRAFTED]] = 1

    def _count(
        self, table: Counts, places: Indices, rows: Indices, layers: Sequence[int | Indices]
    ) -> None:
        """One pass at each place; none where there are no rows or no layers."""
        count = np.broadcast_to(layers[1] - layers[0], rows.shape)
        runs = (rows > 0) & (count > 0)
        places, rows, count = places[runs], rows[runs], count[runs]
        table[places, len(_KINDS) - 1 + rows] += 1
        table[places, len(_KINDS) - 1 + self._board.widest + rows] += count
