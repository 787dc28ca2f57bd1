"""The state of one sequence while it is decoded, and the Work that its decoding yields.

A generator decodes each sequence: it yields Work and is sent the results. Its code reads as if the
sequence were alone; the engine batches equal works of all sequences, and `run_alone` runs just one.
"""

from __future__ import annotations

from collections.abc import Generator, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from selfspec.decoding.acceptance import Draft, Target
from selfspec.decoding.stats import Stopwatch
from selfspec.errors import InvalidDraft
from selfspec.heads.attending import AttendingHeads, Attention
from selfspec.heads.exit_heads import ExitHeads
from selfspec.heads.heads import Answer, ExitHead, Signal, joined, scored
from selfspec.model.backbone import Backbone
from selfspec.model.kv import KVCache, Rows, with_zeros

# --- work: what a sequence needs computed next, batched with the works of other sequences

Result = TypeVar("Result")
Key = TypeVar("Key", bound=Hashable)


class Work(Protocol):
    """One computation that a sequence waits for."""

    @property
    def priority(self) -> tuple[int, int, int]:
        """Priority; the smallest goes first. Works that run no layers precede all others."""
        return 0, 0, 0

    @property
    def batch_key(self) -> Hashable:
        """Works of equal keys can be batched."""
        return id(self)

    def do(self, alike: Sequence[Any], others: Sequence[Work], /) -> Sequence[Any]:
        """Do the works `alike`, this one included; returns a result for each, None: unfinished.

        A pass stops at the layer where rows of `others` wait, so that they can join its next part.
        """
        ...


Steps = Generator[Work, Any, Result]
"""A generator that yields Work, is sent each work's result, and finally returns its own."""


@dataclass(eq=False)
class Embed(Work):
    """Ids of one sequence; gives hidden states at boundary 0, [n, d]."""

    backbone: Backbone
    ids: Sequence[int]

    @property
    def batch_key(self) -> Hashable:
        return Embed, id(self.backbone)

    def do(self, alike: Sequence[Embed], _others: Sequence[Work]) -> Sequence[Tensor]:
        ids = [token for work in alike for token in work.ids]
        return list(self.backbone.embed_listed(ids).split([len(work.ids) for work in alike]))


@dataclass(eq=False)
class Run(Work):
    """Rows [T, d] of one sequence through layers first+1..last; gives [T, d]."""

    backbone: Backbone
    kv: KVCache
    hidden: Tensor
    first: int
    last: int
    parents: Sequence[int] | None = None  # the row that each row follows, as in a Span
    least_rows: int = 1  # minimum rows of a pass: shorter passes are padded
    state_layers: Sequence[int] = ()  # layers whose output is kept in `layer_states`
    layer_states: dict[int, Tensor] = field(default_factory=dict)
    read: int | None = None  # rows at the end whose output is read, as in a Span

    @property
    def priority(self) -> tuple[int, int, int]:
        """Small models first, since they draft; then the earliest layers."""
        return 1, self.backbone.num_layers, self.first

    @property
    def batch_key(self) -> Hashable:
        return (Run, id(self.backbone), self.first) if _joins(self) else id(self)

    def do(self, alike: Sequence[Run], others: Sequence[Work]) -> list[Tensor | None]:
        """Run one pass, up to the first layer where one of them ends or one of `others` waits."""
        backbone, first, stop = self.backbone, self.first, min(work.last for work in alike)
        for other in others:
            if isinstance(other, Run) and other.backbone is backbone and first < other.first < stop:
                stop = other.first
        states: dict[int, list[Tensor]] = {layer: [] for run in alike for layer in run.state_layers}
        blocks = [with_zeros(work.hidden, work.least_rows) for work in alike]  # padded if alone
        pairs = zip(alike, blocks, strict=True)
        rows = Rows.joined([work._rows(len(block), stop) for work, block in pairs])
        hidden = blocks[0] if len(blocks) == 1 else torch.cat(blocks)
        outputs = backbone.run(hidden, first, stop, rows, states)
        counts = [len(work.hidden) for work in alike]
        count = sum(counts)
        if (padding := len(hidden) - count) > 0:
            self.kv.truncate(self.kv.length(first) - padding, first, stop)
        layer_states = {layer: torch.cat(pieces) for layer, pieces in states.items() if pieces}
        for layer, block in layer_states.items():
            for work, part in zip(alike, block[:count].split(counts), strict=True):
                work.layer_states[layer] = part
        for work, output in zip(alike, outputs[:count].split(counts), strict=True):
            work.hidden, work.first = output, stop
            if stop in states:
                work.layer_states[stop] = output
        return [work.hidden if work.first == work.last else None for work in alike]

    def _rows(self, count: int, stop: int) -> Rows:
        parents = self.parents
        if parents is not None:
            parents = [*parents, *range(len(parents) - 1, count - 1)]
        read = self.read if stop == self.last and count == len(self.hidden) else None
        start = self.kv.length(self.first)
        return Rows.of(self.kv, start, count, self.hidden.device, parents, read)


@dataclass(eq=False)
class Ask(Work):
    """Asks one exit head about rows [n, d] of a sequence; gives an Answer."""

    backbone: Backbone
    head: ExitHead
    hidden: Tensor
    deep: Tensor | None  # [n, up to head.deep_size]; None: unknown
    temperature: float
    count: int  # tokens wanted per row
    signal: Signal | None = None

    @property
    def batch_key(self) -> Hashable:
        return Ask, id(self.head), self.temperature, self.count, self.signal

    def do(self, alike: Sequence[Ask], _others: Sequence[Work]) -> list[Answer]:
        replay, hidden = self.backbone.claims.replay, [work.hidden for work in alike]
        inputs = [self.hidden if len(alike) == 1 else torch.cat(hidden)]
        if (deep := joined([work.deep for work in alike], hidden, self.head.deep_size)) is not None:
            inputs.append(deep)
        output = replay(self.batch_key, self._answer, *inputs) if replay else self._answer(*inputs)
        answer = Answer.read(*output)
        return [answer.part(slice(*ends)) for ends in _bounds(hidden)]

    def _answer(self, hidden: Tensor, deep: Tensor | None = None) -> tuple[Tensor, ...]:
        features, logits = self.head.ask(hidden, deep)
        numbers = scored(self.head, logits, self.temperature, self.count, self.signal)
        return features, logits, numbers


@dataclass(eq=False)
class AskAhead(Work):
    """Asks heads that look ahead about a sequence's newest state; gives an Answer of K rows."""

    heads: ExitHeads
    state: Tensor  # [1, d]: the normed output of layer L
    temperature: float
    count: int  # tokens wanted per head

    @property
    def batch_key(self) -> Hashable:
        return AskAhead, id(self.heads), self.temperature, self.count

    def do(self, alike: Sequence[AskAhead], _others: Sequence[Work]) -> list[Answer]:
        features = self.heads.features_ahead(torch.cat([work.state for work in alike]))
        head, rows = self.heads.first, len(features) // len(alike)
        logits = head.unembed(features)
        answer = Answer.read(features, logits, scored(head, logits, self.temperature, self.count))
        return [answer.part(slice(start, start + rows)) for start in range(0, len(features), rows)]


@dataclass(eq=False)
class Unembed(Work):
    """Logits from the output of layer L, [T, d]; gives a Target."""

    backbone: Backbone
    hidden: Tensor
    least_rows: int = 1  # minimum rows of the pass, as in a Run

    @property
    def batch_key(self) -> Hashable:
        return (Unembed, id(self.backbone)) if _joins(self) else id(self)

    def do(self, alike: Sequence[Unembed], _others: Sequence[Work]) -> list[Target]:
        hidden = [work.hidden for work in alike]
        block = hidden[0] if len(hidden) == 1 else torch.cat(hidden)
        normed, logits = self.backbone.unembed(with_zeros(block, self.least_rows))
        target = Target(logits, normed)
        return [target.part(slice(*ends)) for ends in _bounds(hidden)]


@dataclass(eq=False)
class Enter(Work):
    """A prompt that waits; gives the number of rows that the engine admits now, at least one."""

    rows: int

    def do(self, alike: Sequence[Enter], _others: Sequence[Work]) -> list[int]:
        return [work.rows for work in alike]


def no_work(result: Result) -> Steps[Result]:
    return result
    yield  # makes this a generator


def run_alone(steps: Steps[Result]) -> Result:
    """Do all works of `steps`, one after the other; returns its result."""
    try:
        work = next(steps)
        while True:
            work = steps.send(do_alone(work))
    except StopIteration as end:
        result: Result = end.value
        return result


def do_alone(work: Work) -> Any:
    (result,) = work.do([work], [])
    return result


def next_batch(waiting: Mapping[Key, Work]) -> list[Key]:
    """Keys of the works to do next, as one batch.

    Sequences that still draft catch up with those that wait for deeper layers, so that all rows of
    a round run through the deep layers together.
    """
    first = min(waiting, key=lambda key: waiting[key].priority)
    if len(waiting) == 1:
        return [first]
    alike = waiting[first].batch_key
    return [key for key, work in waiting.items() if work.batch_key == alike]


def _joins(work: Run | Unembed) -> bool:
    """Whether this work may share a pass with other sequences."""
    return work.least_rows == 1 and work.backbone.runs_many


def _bounds(parts: Sequence[Tensor]) -> Iterator[tuple[int, int]]:
    return pairwise(accumulate(map(len, parts), initial=0))


# --- the hidden-state cache


class Pass(NamedTuple):
    """One batched run: `rows` hidden states through layers first+1..last."""

    rows: int
    first: int
    last: int


class HiddenCache:
    """Queues of hidden states: each row waits at the boundary that it has reached.

    SpecBound's cache manager (section 2.3): *write* leaves a row in its queue, *reuse* runs it with
    a deeper token that needs its keys and values. Positions within a queue are contiguous, and the
    first one equals the KV length of the layers after the boundary.
    """

    def __init__(
        self,
        backbone: Backbone,
        kv: KVCache,
        exit_layers: Sequence[int] = (),
        pinned_rows: int | None = None,
        state_layers: Sequence[int] = (),
    ) -> None:
        """`exit_layers` ascend within 0..L-1; shorter passes are padded to `pinned_rows`.

        `state_layers`, 0..L: the layers whose states are kept of rows that run to the end. If any
        are given, rows may wait at exit layer 0 only.
        """
        self.depths = 0, *exit_layers, backbone.num_layers  # the layer of each boundary
        self.passes: list[Pass] = []  # of this round, so far
        self.state_layers = state_layers
        self._pass_states: dict[int, Tensor] = {}  # states of the last pass, by layer
        self.states: Tensor | None = None
        """States of the rows that last ran to the end, layers side by side, [rows, layers * d]."""
        self._backbone = backbone
        self._kv = kv
        self.least_rows = pinned_rows or 1  # minimum rows of every pass
        self._queues: list[list[Tensor]] = [[] for _ in self.depths]
        self._parents: list[int] = []
        """The parent of each row of the round, in order of entry; -1: the committed text."""

    @property
    def row_count(self) -> int:
        return len(self._parents)

    def push(self, embeddings: Tensor, parents: Sequence[int] | None = None) -> None:
        """Queue [T, d] at boundary 0; no `parents`: a chain. Raises InvalidDraft after a tree."""
        if not self._is_chain:
            raise InvalidDraft("rows cannot be queued behind a tree: queue them with it")
        chain = range(self.row_count - 1, self.row_count - 1 + len(embeddings))
        self._parents += chain if parents is None else parents
        self._queues[0].append(embeddings)

    def rows(self, boundary: int) -> Tensor:
        """All rows waiting at `boundary`, [rows, d]. They stay there."""
        queue = self._queues[boundary]
        if len(queue) > 1:
            queue[:] = [torch.cat(queue)]
        return queue[0]

    def advance(
        self, boundary: int, until: int | None = None, read: int | None = None
    ) -> Steps[Tensor]:
        """Run all rows at `boundary` to `until` (default: the next); returns them, [rows, d].

        `read`: as in a Span.
        """
        until = boundary + 1 if until is None else until
        hidden = self.rows(boundary)
        step = Pass(len(hidden), self.depths[boundary], self.depths[until])
        if step.first < step.last:  # exit layer 0 is the embedding
            self.passes.append(step)
            tree, least_rows = self._tree(step), self.least_rows
            work = Run(self._backbone, self._kv, hidden, step.first, step.last, tree, least_rows)
            work.state_layers, work.read = self.state_layers, read
            hidden = yield work
            self._pass_states = work.layer_states
        self._queues[boundary].clear()
        self._queues[until].append(hidden)
        return hidden

    def advance_all(self, read: int | None = None) -> Steps[Tensor]:
        """Run every row to the last boundary; returns all, [rows, d]. `read`: as in a Span.

        Each pass stops at the next boundary where rows wait and takes them along, so that all rows
        share one deep pass from the deepest exit on.
        """
        *boundaries, last = range(len(self._queues))
        for boundary, until in pairwise([*(at for at in boundaries if self._queues[at]), last]):
            inputs = self.rows(boundary)
            ends = until == last and self.depths[last] not in self.state_layers
            yield from self.advance(boundary, until, read if ends else None)
        hidden = self.rows(last)
        if self.state_layers:
            by_layer = {0: inputs, **self._pass_states, self.depths[-1]: hidden}
            states = [by_layer[layer].to(hidden.device) for layer in self.state_layers]
            self.states = torch.cat(states, dim=-1)
        return hidden

    def unembed(self, hidden: Tensor) -> Steps[Target]:
        """Logits of rows at boundary L, [T, d]."""
        target: Target = yield Unembed(self._backbone, hidden, self.least_rows)
        return target

    def clear(self, passes: Sequence[Pass] = ()) -> None:
        """Drop all rows, before a new round or, with the round's `passes` so far, within one."""
        for queue in self._queues:
            queue.clear()
        self.passes, self._parents, self.states = [*passes], [], None

    @property
    def _is_chain(self) -> bool:
        return self._parents == list(range(-1, len(self._parents) - 1))

    def _tree(self, step: Pass) -> list[int] | None:
        if self._is_chain:
            return None
        # before the round's last pass none of its rows has run through all layers
        offset = self._kv.length(step.first) - self._kv.length(self._backbone.num_layers - 1)
        parents = [parent - offset for parent in self._parents[offset : offset + step.rows]]
        return None if parents == list(range(-1, step.rows - 1)) else parents


# --- the sequence


_MOST_UNREAD = 16  # tokens that attending heads may read later; prompts are read at once, for reuse


class DecodeState:
    """The committed ids of a sequence and its caches.

    Between rounds every layer holds all positions but the newest. Left padding (`pad` ids in front)
    is kept in `ids`, because processors and stopping criteria count it; the model never sees it.
    """

    def __init__(
        self,
        backbone: Backbone,
        ids: Tensor,
        *,
        pad: int = 0,
        exit_layers: Sequence[int] = (),
        kv: KVCache | None = None,
        pinned_rows: int | None = None,
        heads: ExitHeads | None = None,
    ) -> None:
        """`ids` [1, n] with n > pad. `kv` may hold a prefix of them.

        For `heads`, the states that they read beside those at `exit_layers` are kept.
        """
        self.backbone = backbone
        self.kv = KVCache(backbone.num_layers) if kv is None else kv
        layers = () if heads is None else heads.layers
        self.hidden = HiddenCache(backbone, self.kv, exit_layers, pinned_rows, layers)
        self.attention: Attention | None = None
        if isinstance(heads, AttendingHeads):
            self.attention = heads.attention(lambda ids: backbone.embed(ids.to(backbone.device)))
        self.pad = pad
        self._committed: list[int] = ids[0, pad:].tolist()
        self._judged_rows = 0  # rows of the round whose logits give the next committed tokens
        self.normed: Tensor | None = None
        """The normed output of layer L for these rows, [k + 1, d]."""
        self._states: Tensor | None = None
        self._path: list[int] = []  # accepted rows of the round, the newest token's first
        self._buffer_end = ids.shape[1]  # ids in the buffer; later ones are written by `ids`
        self._buffer = torch.cat([ids, ids.new_zeros(1, max(ids.shape[1], 256))], dim=1)
        self.begin()

    def begin(self) -> None:
        """Start from the KV cache's prefix, cut to the part that attending heads have read."""
        if self.attention is not None and (cached := self.kv.length(0)):
            self.kv.truncate(self.attention.begin(self._committed, cached))

    @property
    def ids(self) -> Tensor:
        """All committed ids, padding included, [1, n]; a view."""
        if self._buffer_end < self.length:
            while self.length > self._buffer.shape[1]:
                self._buffer = torch.cat([self._buffer, torch.zeros_like(self._buffer)], dim=1)
            for token in self._committed[self._buffer_end - self.pad :]:
                self._buffer[0, self._buffer_end].fill_(token)  # assigning uploads (torch 2.11)
                self._buffer_end += 1
        return self._buffer[:, : self.length]

    @property
    def length(self) -> int:
        return self.pad + len(self._committed)

    def committed(self, start: int) -> list[int]:
        """Ids from the `start`-th on, without padding; no device read."""
        return self._committed[start:]

    @property
    def waiting_ids(self) -> list[int]:
        """Ids that have not run through all layers: the prompt, later the newest token."""
        return self._committed[self.kv.length(self.backbone.num_layers - 1) :]

    @property
    def deep(self) -> Tensor | None:
        """What heads read of the position before the newest token, [1, d] or wider; None: unknown.

        The normed output of layer L, followed by the states of other layers if heads read any.
        """
        if self.normed is None or not self._path:
            return None
        span = slice(row := self._path[-1], row + 1)
        deep, states = self.normed[span], self._states
        return deep if states is None else torch.cat([deep, states[span].to(deep)], dim=-1)

    def judge(self, count: int) -> None:
        """Note that the last `count` = k + 1 rows give the next committed tokens."""
        self._judged_rows, self._path, self.normed = count, [], None
        states = self.hidden.states
        self._states = None if states is None else states[-count:]

    def keep_states(self, rows: Sequence[int]) -> None:
        """Give attending heads the states of `rows` of the last pass, now committed positions."""
        if self.attention is not None and self.hidden.states is not None:
            self.attention.add(self.hidden.states[list(rows)])

    def append(self, token: int, row: int) -> None:
        """Commit the token after `row` of the round: 0 the newest token's, 1 .. k the drafts'."""
        self._committed.append(token)
        self._path.append(row)

    @contextmanager
    def round(self) -> Iterator[None]:
        """On exit, also after an error: caches hold the committed text, and queues are empty."""
        newest = len(self._committed) - 1
        try:
            yield
        finally:
            self._rewind(newest)
        if self.attention is not None and self.attention.waiting_rows > _MOST_UNREAD:
            run_alone(self.attention.read(self._committed))

    @torch.inference_mode()  # a round dropped between two works is rewound outside `Engine.step`
    def _rewind(self, newest: int) -> None:
        # the deepest layer holds fewest positions: an error may have stopped a pass halfway
        deepest = self.kv.length(self.backbone.num_layers - 1)
        if deepest <= newest:
            self.kv.truncate(deepest)
        else:
            path = self._path[: len(self._committed) - 1 - newest]
            self.kv.keep(newest, path)
            if self.hidden.states is not None and self._judged_rows:
                offset = len(self.hidden.states) - self._judged_rows
                self.keep_states([*range(offset), *(offset + row for row in path)])
        self.hidden.clear()


# --- what proposes tokens


class Drafter(Protocol):
    """Proposes at most `limit` tokens to follow the committed ones."""

    def draft(self, state: DecodeState, limit: int, watch: Stopwatch) -> Steps[Draft]:
        """Yield the work of drafting and return 0..limit tokens.

        Rows may stay in `state.hidden`: the newest committed token's, then the drafts', in order.
        """

    def learn(self, draft: Draft, kept: Sequence[int]) -> None:
        """Learn from the latest draft: `kept` are the indices of its accepted tokens."""


class NoDrafter:
    """Proposes nothing: plain decoding."""

    def draft(self, state: DecodeState, limit: int, watch: Stopwatch) -> Steps[Draft]:  # noqa: ARG002  # the protocol's
        return no_work(Draft())

    def learn(self, draft: Draft, kept: Sequence[int]) -> None: ...
