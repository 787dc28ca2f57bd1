"""Replay of thousands of settings at once: counts instead of rounds, and the seconds they predict.

The rounds of every place are followed together, one draft of all of them at a time; then each
prompt jumps from round to round. Settings that differ in W_max only share the drafting. Counts
equal those of `replay.rounds`.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from selfspec.config import SpeculationOptions
from selfspec.decoding.prices import Costs
from selfspec.errors import InvalidOption
from selfspec.eval.record import Record
from selfspec.eval.replay import Setting
from selfspec.eval.schedules import Counts, Places, Schedules

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
    return costs.seconds(
        [(row, totals.passes[..., row - 1], totals.layers[..., row - 1]) for row in rows],
        [(row, totals.verified[..., row - 1]) for row in rows],
        totals.judged,
    )


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
        count = len(board.places)
        self._schedules = Schedules(setting.layers, board.num_layers, count, board.widest)
        self._table = np.zeros((count, len(_KINDS)), np.int32)
        self._nodes = board.roots.copy()
        self._right = np.ones(count, np.bool_)
        self._open = np.arange(count)
        """Places that are still drafting."""

    def step(self) -> None:
        """One more draft where drafting goes on; rounds that end here are verified for good."""
        board, table = self._board, self._table
        full = table[self._open, _DRAFTED] >= board.limits[self._open]
        _verify(self._schedules, self._open[full])
        active = self._open[~full]
        self._schedules.push(active)
        column, unsure = self._exits(active)
        self._schedules.finish(unsure)  # the newest row has come to D_max already
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
        _verify(self._schedules, active[ended])
        self._open = active[~ended]

    def verified(self) -> Counts:
        """[R, columns] if no more is drafted."""
        schedules, table = copy.deepcopy((self._schedules, self._table))
        _verify(schedules, self._open)
        table[:, _ROUNDS] = 1
        table[:, _TOKENS] = np.minimum(table[:, _ACCEPTED] + 1, self._board.left)
        verified = np.arange(self._board.widest) == table[:, _DRAFTED, None]
        return np.concatenate([table, schedules.passes, schedules.layers, verified], axis=1)

    def _exits(self, active: Places) -> tuple[Places, Places]:
        """The column of the first confident layer, -1 for difficult tokens, and the latter."""
        board, setting = self._board, self._setting
        column = np.full(len(active), -1)
        waiting = np.arange(len(active))
        asked = zip(setting.columns, setting.thresholds, strict=True)
        for boundary, (index, tau) in enumerate(asked):
            places = active[waiting]
            self._schedules.advance(places, boundary)
            self._table[places, _JUDGED] += 1
            sure = board.confidence[self._nodes[places], index, setting.alpha] >= tau
            column[waiting[sure]] = index
            waiting = waiting[~sure]
        return column, active[waiting]


def _verify(schedules: Schedules, places: Places) -> None:
    """The newest token of each round enters, and all rows go to layer L."""
    schedules.push(places)
    schedules.finish(places)
