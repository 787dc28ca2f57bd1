"""Measurements of a model on this machine: costs, and whether drafts can change bits.

Works are timed in turns. So a change of the machine's speed affects all alike, and each work finds
the processor's caches as cold as in a round.
"""

from __future__ import annotations

import itertools
import logging
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from selfspec.decoding.acceptance import Target
from selfspec.decoding.state import Ask, AskAhead, HiddenCache, Steps, run_alone
from selfspec.errors import InvalidOption, PinnedUnavailable
from selfspec.heads.attending import AttendingHeads, Attention
from selfspec.heads.exit_heads import ExitHeads
from selfspec.heads.heads import ExitHead
from selfspec.model.backbone import Backbone
from selfspec.model.kv import KVCache
from selfspec.model.weights import TEAM
from selfspec.options import Costs

Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True)
class Clock:
    """Times works on one device."""

    device: torch.device
    repeats: int  # at least 1
    now: Callable[[], float] = time.perf_counter  # seconds; tests inject their own
    warmups: int = 0  # untimed runs before each timed one: another program's threads may still spin

    def seconds(self, works: Mapping[Name, Callable[[], object]]) -> dict[Name, float]:
        return {name: statistics.median(laps) for name, laps in self.laps(works).items()}

    def laps(self, works: Mapping[Name, Callable[[], object]]) -> dict[Name, list[float]]:
        """Seconds of every run, after a discarded first one that captures graphs and warms up."""
        seconds: dict[Name, list[float]] = {name: [] for name in works}
        for _ in range(self.repeats + 1):
            for name, work in works.items():
                with TEAM.limited():  # as in a round: a spinning thread would be timed
                    for _ in range(self.warmups):
                        work()
                    self._wait(self.device)
                    start = self.now()
                    output = work()
                    self._wait(output.device if isinstance(output, Tensor) else self.device)
                    seconds[name].append(self.now() - start)
        return {name: laps[1:] for name, laps in seconds.items()}

    def _wait(self, device: torch.device) -> None:
        """Wait for the queued work of an accelerator, on the device of the last layers."""
        if device.type == "cuda":
            torch.cuda.synchronize(device)


# --- a plain step and the memory bandwidth

ROWS = (1, 2, 4, 8, 16)
CONTEXT = 256
_STEP_REPEATS = 7

_CPU_BYTES, _OTHER_BYTES = 400_000_000, 1 << 30
"""Bytes read to measure the memory bandwidth: more than caches hold."""


@dataclass(frozen=True, kw_only=True)
class StepSpeed:
    """The speed of one model with one executor on this machine. Seconds and rates are medians."""

    context_tokens: int  # positions before the rows
    weight_bytes: int  # weights of all layers and of the unembedding, as the executor keeps them
    kv_bytes: int  # keys and values of the context
    memory_bytes_per_s: float  # uncached reads by all threads or the accelerator
    rows_s: dict[int, float]  # by rows: a pass through all layers, to the best token of each row

    @property
    def step_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes

    @property
    def limit_s(self) -> float:
        """Seconds to read these bytes: the lower bound of a step."""
        return self.step_bytes / self.memory_bytes_per_s

    @property
    def step_s(self) -> float:
        return self.rows_s[1]

    @property
    def share_of_limit(self) -> float:
        """Speed of a plain step as a share of the memory's limit; above 1 if weights are cached."""
        return self.limit_s / self.step_s

    @property
    def rows_in_steps(self) -> dict[int, float]:
        """Cost of passes of 2 and more rows, in passes of one row."""
        return {rows: seconds / self.step_s for rows, seconds in self.rows_s.items() if rows > 1}

    def to_dict(self) -> dict[str, Any]:
        names = ("step_bytes", "limit_s", "step_s", "share_of_limit", "rows_in_steps")
        return asdict(self) | {name: getattr(self, name) for name in names}


@torch.inference_mode()
def step_speed(
    backbone: Backbone, *, context: int = CONTEXT, clock: Clock | None = None
) -> StepSpeed:
    """Measure steps after `context` tokens, or as many as the model allows; takes a few seconds."""
    clock = clock or Clock(backbone.device, _STEP_REPEATS)
    passes = Passes(backbone, context, ROWS)
    return StepSpeed(
        context_tokens=passes.context,
        weight_bytes=backbone.weight_bytes,
        kv_bytes=passes.context * backbone.position_bytes,
        memory_bytes_per_s=memory_rate(clock),
        rows_s=clock.seconds(passes.works),
    )


def memory_rate(clock: Clock) -> float:
    """Bytes per second of a sum over float32 numbers that exceed the caches."""
    size = _CPU_BYTES if clock.device.type == "cpu" else _OTHER_BYTES
    numbers = torch.ones(size // 4, device=clock.device)
    return numbers.nbytes / clock.seconds({"read": lambda: numbers.sum()})["read"]


class PassShape(NamedTuple):
    """The common shape of all passes of pinned decoding; None: any."""

    rows: int | None = None
    slots: int | None = None  # for keys


_ANY = PassShape()


class Behind:
    """A context in a KV cache, and passes of rows after it that are removed again."""

    def __init__(
        self,
        backbone: Backbone,
        pieces: Sequence[Tensor],
        shape: PassShape = _ANY,
        layers: int | None = None,
    ) -> None:
        """`pieces`: ids of the context, one pass each; `layers`: run only the first few."""
        exit_layers = (layers,) if layers is not None and layers < backbone.num_layers else ()
        self.kv = KVCache(backbone.num_layers, shape.slots)
        self._hidden = HiddenCache(backbone, self.kv, exit_layers, pinned_rows=shape.rows)
        self.backbone = backbone
        for piece in pieces:
            self._run(piece)
        self.context = self.kv.length(0)

    def target(self, ids: Tensor, kept: int = 0) -> Target:
        """Logits of `ids`, of which the first `kept` stay in the KV cache."""
        start, states = self.kv.length(0), self._run(ids)
        target = run_alone(self._hidden.unembed(states))
        self.kv.truncate(start + kept)
        return target

    def _run(self, ids: Tensor) -> Tensor:
        self._hidden.clear()
        self._hidden.push(self.backbone.embed(ids))
        return run_alone(self._hidden.advance(0))


class Passes(Behind):
    """Passes of `counts` rows after `context` tokens, or as many as the model has room for."""

    def __init__(self, backbone: Backbone, context: int, counts: Sequence[int]) -> None:
        room, most = backbone.max_positions, max(counts)
        context = max(1, min(context, room - most))
        # ids of the context, then of the rows
        self.ids = torch.arange(context + most, device=backbone.device) % backbone.vocab_size
        self.counts = [rows for rows in counts if rows == 1 or context + rows <= room]
        super().__init__(backbone, [self.ids[:context]])

    def run(self, rows: int) -> list[int]:
        """The best token after each of `rows` rows, read back; leaves the KV cache unchanged."""
        return self.target(self.ids[self.context :][:rows]).best

    @property
    def works(self) -> dict[int, Callable[[], object]]:
        return {rows: partial(self.run, rows) for rows in self.counts}


# --- costs of a model and its heads

_QUICK_ROWS = (16, 8, 6, 5, 4, 3, 2, 1)
"""The largest pass comes first, since a first pass's delay weighs least there. Kernels switch
algorithms at small row counts, so that one count may cost three times its neighbour."""

_QUICK_CONTEXT = 64
_LEAST = 0.01  # cost of a row on a busy machine: drafts without a cost would never pause
_QUICK_S = 1.5  # seconds after which no pass is repeated, once each has run twice


@torch.inference_mode()
def quick_costs(
    backbone: Backbone, heads: ExitHeads | None, now: Callable[[], float] = time.perf_counter
) -> Costs:
    """Measure the costs of rows and a head, in two seconds or 16 passes.

    Uses the faster half of the passes: other load on the machine only makes passes longer. If other
    programs keep it busy, only the fastest, and all rows are given one cost.
    """
    passes = Passes(backbone, _QUICK_CONTEXT, _QUICK_ROWS)
    works, row_counts = passes.works, sorted(passes.counts)
    if heads is not None:
        works[0] = _question(backbone, heads, backbone.embed(passes.ids[:1]), passes.context)
    start = now()
    laps = Clock(backbone.device, 1, now).laps(works)
    while now() - start < _QUICK_S:
        for work, times in Clock(backbone.device, 3, now).laps(works).items():
            laps[work] += times
    count = 1 if TEAM.crowded else (1 + len(laps[1])) // 2
    seconds = {work: statistics.mean(sorted(times)[:count]) for work, times in laps.items()}
    if TEAM.crowded:
        row_counts = sorted({1, row_counts[-1]})
    step, costs = seconds[1], list[float]()
    for fewer, more in itertools.pairwise(row_counts):
        cost = (seconds[more] - seconds[fewer]) / (more - fewer) / step
        costs += [round(min(max(cost, _LEAST if TEAM.crowded else 0.0), 1.0), 3)] * (more - fewer)
    head = round(seconds[0] / step, 3) if heads is not None else None
    return Costs(row=tuple(costs) or None, head=head)


def _question(
    backbone: Backbone, heads: ExitHeads, hidden: Tensor, context: int
) -> Callable[[], object]:
    """The exit drafter's work per token without the layers, for one exit layer after the other.

    Heads read `hidden` [1, d].
    """
    layers, text = itertools.cycle(heads.config.exit_layers), None
    if isinstance(heads, AttendingHeads):
        text = Attention(heads, backbone.embed)
        text.add(hidden.repeat(context, len(heads.layers)))

    def steps() -> Steps[object]:
        layer, inputs = next(layers), hidden
        backbone.embed_listed([0])
        if text is not None and (output := (yield from text.read([0] * (context + 1)))) is not None:
            inputs = yield text.draft([0], output, [-1])
        if heads.looks_ahead:
            return (yield AskAhead(heads, hidden, 1.0, 1))
        head = cast("ExitHead", heads.by_layer[str(layer)])
        return (yield Ask(backbone, head, inputs, hidden if heads.reads_deep else None, 1.0, 1))

    return lambda: run_alone(steps())


# --- whether a row's bits depend on the other rows of its pass
#
# They do not if kernels give a row the same result for any number of rows, or if all passes are
# padded to one fixed shape over a fixed number of slots. Both are properties of the kernels, so
# they are probed before anyone relies on them.

logger = logging.getLogger(__name__)

_CONTEXTS = (16, 180)
"""Tokens before the probed ones: kernels may split longer sums differently from short ones (MKL
with AVX512 does between 192 and 384)."""

_PIECE = 13  # rows of the pieces that a prompt is cut into
_FEW_LAYERS = 4
_MOST_SLOTS = 1 << 20  # positions allocated from the start: a larger number is a typing error


class PinnedProbe:
    """Probes one model on this machine; each question once."""

    def __init__(self, backbone: Backbone) -> None:
        self._backbone = backbone
        self._reason = cache(partial(why_unpinned, backbone))

    def shape(self, fixed: PassShape, widest: int) -> PassShape:
        """The pass shape that makes bits independent of drafts: any shape, else the `fixed` one.

        Raises PinnedUnavailable if neither does, InvalidOption if `fixed` has too many slots.
        """
        if self._backbone.claims.steady and self._reason(_ANY, widest) is None:
            return _ANY
        if (fixed.slots or 0) > _MOST_SLOTS:
            raise InvalidOption(
                f"pinned passes would look at {fixed.slots} positions each, expected at most "
                f"{_MOST_SLOTS}. Lower max_new_tokens, or leave pinned out"
            )
        if (reason := self._reason(fixed, widest)) is not None:
            raise PinnedUnavailable(reason)
        return fixed

    def treats_rows_alike(self, widest: int) -> bool:
        """Whether kernels treat all rows alike without padding, by a quick probe."""
        check, passed = f"rows-{widest}", self._backbone.passed
        if not self._backbone.claims.steady:
            return False
        if check not in passed and (reason := self._reason(_ANY, widest, quick=True)) is not None:
            logger.info("drafts may change bits here: %s", reason)
            return False
        passed.add(check)
        return True


@torch.inference_mode()
def why_unpinned(
    backbone: Backbone, shape: PassShape, widest: int, *, quick: bool = False
) -> str | None:
    """The difference that the grouping of rows makes; None: logits are bitwise the same.

    The same random tokens run one at a time, in blocks of `widest` rows, and in uneven blocks;
    every second block ends with wrong tokens, like rejected drafts. Their context runs in one pass;
    for the blocks it runs in pieces if the executor claims that this changes nothing either. Costs
    about 3 * `widest` passes at each of two contexts; `quick` probes only the longer one, with half
    as many tokens and the first few layers.
    """
    for context in _CONTEXTS[-1:] if quick else _CONTEXTS:
        room = (shape.slots or backbone.max_positions) - widest - context
        if (count := min(widest if quick else 2 * widest, room)) <= 0:
            continue
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(backbone.vocab_size, (context + count,), generator=generator)
        prefix, ids = ids.to(backbone.device).split([context, count])
        pieces = _PIECE if shape == _ANY and backbone.claims.steady else context
        reference, candidate = (
            Behind(backbone, prefix.split(size), shape, _FEW_LAYERS if quick else None)
            for size in (context, pieces)
        )
        row_logits = _in_blocks(reference, ids, [1] * count, widest)
        uneven = [1 + step % max(widest - 1, 1) for step in range(count)]
        for name, widths in {"full": [widest] * count, "uneven": uneven}.items():
            block_logits = _in_blocks(candidate, ids, widths, widest)
            if differing := int((row_logits != block_logits).any(-1).sum()):
                return (
                    f"{differing} of {count} positions after {context} others changed bits "
                    f"between single rows and {name} blocks of up to {widest} rows: these kernels "
                    "do not treat all rows alike"
                )
    return None


def _in_blocks(behind: Behind, ids: Tensor, widths: Sequence[int], widest: int) -> Tensor:
    """Logits [count, V] of `ids` [count], run in blocks of `widths`."""
    logits, start = list[Tensor](), 0
    while start < len(ids):
        block = rows = ids[start : start + widths[len(logits)]]
        if len(logits) % 2:
            wrong = (block[-1:] + 1) % behind.backbone.vocab_size
            rows = torch.cat([block, wrong.expand(widest - len(block))])
        logits.append(behind.target(rows, len(block)).logits[: len(block)])
        start += len(block)
    behind.kv.truncate(behind.context)
    return torch.cat(logits)
