"""What layers, logits, heads and rounds cost here: a model and its heads come in, Costs go out.

Called by the commands that choose settings or predict by costs: calibrate, tune, trace.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from selfspec.decoding.acceptance import GreedyMatch
from selfspec.decoding.clock import Clock
from selfspec.decoding.decode import StopRule, rounds
from selfspec.decoding.drafters import NoDrafter
from selfspec.decoding.prices import Costs
from selfspec.decoding.scores import Sampler
from selfspec.decoding.sequence import DecodeState
from selfspec.decoding.stats import Stopwatch
from selfspec.heads.answers import answer
from selfspec.heads.exit_heads import ExitHeads
from selfspec.heads.judge import ExitJudge
from selfspec.model.backbone import Backbone
from selfspec.model.kv_store import Lease
from selfspec.model.rows import Rows

_ROWS = 8
"""As many as a pinned pass has."""

_CONTEXT = 256
_REPEATS = 15
_SHORT = 8
"""A short pass runs this fraction of the layers."""

_Part = tuple[str, int]
"""What is timed, and its rows."""


@torch.inference_mode()
def measure(
    backbone: Backbone,
    heads: ExitHeads | None,
    *,
    rows: int = _ROWS,
    context: int = _CONTEXT,
    now: Callable[[], float] = time.perf_counter,
) -> Costs:
    """Medians of 15 passes, in turns, of 1..`rows` rows behind `context` tokens; a few seconds.

    Without heads their cost is 0.
    """
    bench = _Bench(backbone, heads, rows, min(context, backbone.max_positions // 2))
    return bench.costs(Clock(backbone.device, _REPEATS, now).laps(dict(bench.works())))


@dataclass
class _Bench:
    """Parts of a round."""

    backbone: Backbone
    heads: ExitHeads | None
    rows: int
    context: int

    def __post_init__(self) -> None:
        """Fill a cache, and begin a plain decoding beside it."""
        backbone = self.backbone
        exit_layers = () if self.heads is None else self.heads.config.exit_layers
        self._lease = Lease(backbone.num_layers)
        block = torch.zeros(self.context, dtype=torch.int64, device=backbone.device)
        self._token = block[:1]
        self._embedded = backbone.embed(block)
        self._outputs = self._run(self._embedded, backbone.num_layers)
        self._judge = ExitJudge(backbone.num_layers, dict.fromkeys(exit_layers, 1.0))
        self._layers = itertools.cycle(exit_layers)
        self._short = max(1, backbone.num_layers // _SHORT)
        greedy = Sampler(LogitsProcessorList())
        state = DecodeState(backbone, block[None])
        endless = StopRule(max_length=self.context + 2 * _REPEATS)
        self._rounds = rounds(state, NoDrafter(), GreedyMatch(greedy), endless, Stopwatch())
        next(self._rounds)

    def works(self) -> Iterator[tuple[_Part, Callable[[], object]]]:
        """Every part of a round, by its rows."""
        num_layers, logits = self.backbone.num_layers, self.backbone.logits
        for rows in range(1, self.rows + 1):
            part, ends = self._embedded[:rows], self._outputs[:rows]
            yield ("layers", rows), partial(self._run, part, num_layers)
            yield ("logits", rows), partial(logits, ends)
            yield ("short", rows), partial(self._run, part, self._short)
            if rows == 1:  # next to what is subtracted from it
                yield ("round", rows), partial(next, self._rounds)
            if self.heads is not None:
                yield ("head", rows), partial(self._judge_one, self.heads)

    def costs(self, laps: Mapping[_Part, list[float]]) -> Costs:
        """Medians of the parts' laps, which were run in turns."""
        middle = {part: statistics.median(seconds) for part, seconds in laps.items()}
        counts = range(1, self.rows + 1)
        num_layers, short = self.backbone.num_layers, self._short
        layers = tuple(middle["layers", rows] for rows in counts)
        starts = (
            (num_layers * middle["short", rows] - short * whole) / (num_layers - short)
            for rows, whole in zip(counts, layers, strict=True)
        )
        parts = zip(*(laps[name, 1] for name in ("round", "layers", "logits")), strict=True)
        rest = statistics.median(whole - run - read for whole, run, read in parts)
        heads = [lap for rows in counts for lap in laps.get(("head", rows), ())]
        return Costs(
            num_layers=num_layers,
            layers=layers,
            start=tuple(
                min(max(start, 0.0), whole) for start, whole in zip(starts, layers, strict=True)
            ),
            logits=tuple(middle["logits", rows] for rows in counts),
            head=statistics.median(heads) if heads else 0.0,
            round=max(rest, 0.0),
        )

    def _run(self, hidden: Tensor, last: int) -> Tensor:
        """Layers 1..last on [T, d] behind the context; the lease stays as it was."""
        held = self._lease.length(0)
        rows = Rows.of(self._lease, held, len(hidden), hidden.device)
        output = self.backbone.run(hidden, 0, last, rows)
        self._lease.truncate(max(held, self.context))
        return output

    def _judge_one(self, heads: ExitHeads) -> None:
        """What the exit drafter does for one token at one exit layer, layers left out."""
        layer = next(self._layers)
        head = heads[layer]
        self.backbone.embed(self._token)
        newest = self._outputs[-1:]
        deep = newest if heads.reads_deep else None
        answer(head, newest, deep, temperature=self._judge.temperature(layer), count=1)
