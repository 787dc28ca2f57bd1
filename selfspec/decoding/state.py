"""One sequence while it is decoded: which rows run when, and the hidden states that wait for it.

A text is written by a generator: it yields Work, and is sent what came of it. So it reads as if it
were alone, while works that are alike, of all texts, become one. The engine does them, or `alone`.
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
from selfspec.heads.attending import AttendingHeads
from selfspec.heads.exit_heads import ExitHeads
from selfspec.heads.heads import Answer, ExitHead, Signal, joined, scored
from selfspec.model.backbone import Backbone
from selfspec.model.kv import KVCache, Rows, with_zeros

# --- work: what a text needs computed next, met together with the needs of others

Result = TypeVar("Result")
Key = TypeVar("Key", bound=Hashable)


class Work(Protocol):
    """What one text needs."""

    @property
    def turn(self) -> tuple[int, int, int]:
        """The least comes first: before all others what brings a text on without a pass."""
        return 0, 0, 0

    @property
    def likeness(self) -> Hashable:
        """Works of equal likeness can be done together."""
        return id(self)

    def done(self, alike: Sequence[Any], others: Sequence[Work], /) -> Sequence[Any]:
        """Do works of this likeness, itself among them: what each gives; None: more is to be done.

        Passes stop where rows of `others` wait, which then go on with them.
        """
        ...


Steps = Generator[Work, Any, Result]
"""Yields Work, is sent what it gives, and returns a result in the end."""


@dataclass(eq=False)
class Embed(Work):
    """Ids of one text; gives hidden states at boundary 0, [n, d]."""

    backbone: Backbone
    ids: Sequence[int]

    @property
    def likeness(self) -> Hashable:
        return Embed, id(self.backbone)

    def done(self, alike: Sequence[Embed], _others: Sequence[Work]) -> Sequence[Tensor]:
        ids = [token for work in alike for token in work.ids]
        return list(self.backbone.embed_listed(ids).split([len(work.ids) for work in alike]))


@dataclass(eq=False)
class Run(Work):
    """Rows [T, d] of one text through layers first+1..last; gives [T, d]."""

    backbone: Backbone
    kv: KVCache
    hidden: Tensor
    first: int
    last: int
    parents: Sequence[int] | None = None  # what each row follows, as in a Span
    least: int = 1  # rows that its passes have at least: shorter ones are padded
    states: Sequence[int] = ()  # layers whose states are kept on the way
    kept: dict[int, Tensor] = field(default_factory=dict)

    @property
    def turn(self) -> tuple[int, int, int]:
        """Small models first, which draft; then the earliest layers."""
        return 1, self.backbone.num_layers, self.first

    @property
    def likeness(self) -> Hashable:
        return (Run, id(self.backbone), self.first) if _joins(self) else id(self)

    def done(self, alike: Sequence[Run], others: Sequence[Work]) -> list[Tensor | None]:
        """One pass, up to where the first of them ends, or others wait."""
        backbone, first, stop = self.backbone, self.first, min(work.last for work in alike)
        for other in others:
            if isinstance(other, Run) and other.backbone is backbone and first < other.first < stop:
                stop = other.first
        states: dict[int, list[Tensor]] = {one: [] for work in alike for one in work.states}
        blocks = [with_zeros(work.hidden, work.least) for work in alike]  # padded if alone
        rows = Rows.joined([work._rows(len(b)) for work, b in zip(alike, blocks, strict=True)])
        hidden = blocks[0] if len(blocks) == 1 else torch.cat(blocks)
        made = backbone.run(hidden, first, stop, rows, states)
        counts = [len(work.hidden) for work in alike]
        count = sum(counts)
        if (padding := len(hidden) - count) > 0:
            self.kv.truncate(self.kv.length(first) - padding, first, stop)
        between = {layer: torch.cat(found) for layer, found in states.items() if found}
        for layer, found in between.items():
            for work, part in zip(alike, found[:count].split(counts), strict=True):
                work.kept[layer] = part
        for work, output in zip(alike, made[:count].split(counts), strict=True):
            work.hidden, work.first = output, stop
            if stop in states:
                work.kept[stop] = output
        return [work.hidden if work.first == work.last else None for work in alike]

    def _rows(self, count: int) -> Rows:
        parents = self.parents
        if parents is not None:
            parents = [*parents, *range(len(parents) - 1, count - 1)]
        start = self.kv.length(self.first)
        return Rows.of(self.kv, start, count, self.hidden.device, parents)


@dataclass(eq=False)
class Ask(Work):
    """One exit head asked about rows [n, d] of a text; gives an Answer."""

    backbone: Backbone
    head: ExitHead
    hidden: Tensor
    deep: Tensor | None  # [n, up to head.beside], or None where it is not known
    temperature: float
    count: int  # tokens wanted
    signal: Signal | None = None

    @property
    def likeness(self) -> Hashable:
        return Ask, id(self.head), self.temperature, self.count, self.signal

    def done(self, alike: Sequence[Ask], _others: Sequence[Work]) -> list[Answer]:
        replayed, hidden = self.backbone.claims.replayed, [work.hidden for work in alike]
        inputs = [self.hidden if len(alike) == 1 else torch.cat(hidden)]
        if (deep := joined([work.deep for work in alike], hidden, self.head.beside)) is not None:
            inputs.append(deep)
        found = replayed(self.likeness, self._asked, *inputs) if replayed else self._asked(*inputs)
        whole = Answer.read(*found)
        return [whole.part(slice(*ends)) for ends in _ends(hidden)]

    def _asked(self, hidden: Tensor, deep: Tensor | None = None) -> tuple[Tensor, ...]:
        features, logits = self.head.asked(hidden, deep)
        numbers = scored(self.head, logits, self.temperature, self.count, self.signal)
        return features, logits, numbers


@dataclass(eq=False)
class AskAhead(Work):
    """Heads that look ahead asked about the newest state of a text; gives an Answer of K rows."""

    heads: ExitHeads
    state: Tensor  # [1, d]: the normed output of layer L
    temperature: float
    count: int  # tokens wanted of each

    @property
    def likeness(self) -> Hashable:
        return AskAhead, id(self.heads), self.temperature, self.count

    def done(self, alike: Sequence[AskAhead], _others: Sequence[Work]) -> list[Answer]:
        features = self.heads.ahead(torch.cat([work.state for work in alike]))
        head, each = self.heads.first, len(features) // len(alike)
        logits = head.unembed(features)
        whole = Answer.read(features, logits, scored(head, logits, self.temperature, self.count))
        return [whole.part(slice(at, at + each)) for at in range(0, len(features), each)]


@dataclass(eq=False)
class Unembed(Work):
    """From the output of layer L, [T, d], to logits; gives a Target."""

    backbone: Backbone
    hidden: Tensor
    least: int = 1  # rows that its pass has at least, as in a Run

    @property
    def likeness(self) -> Hashable:
        return (Unembed, id(self.backbone)) if _joins(self) else id(self)

    def done(self, alike: Sequence[Unembed], _others: Sequence[Work]) -> list[Target]:
        hidden = [work.hidden for work in alike]
        block = hidden[0] if len(hidden) == 1 else torch.cat(hidden)
        normed, logits = self.backbone.unembed(with_zeros(block, self.least))
        together = Target(logits, normed)
        return [together.part(slice(*ends)) for ends in _ends(hidden)]


@dataclass(eq=False)
class Enter(Work):
    """A prompt that waits; gives how many rows may run now, at least one: the engine decides."""

    rows: int

    def done(self, alike: Sequence[Enter], _others: Sequence[Work]) -> list[int]:
        return [work.rows for work in alike]


def ready(result: Result) -> Steps[Result]:
    """Steps of what needs no work."""
    return result
    yield  # which makes it a generator


def alone(steps: Steps[Result]) -> Result:
    """Do all its works, one after the other."""
    try:
        work = next(steps)
        while True:
            work = steps.send(done_alone(work))
    except StopIteration as end:
        result: Result = end.value
        return result


def done_alone(work: Work) -> Any:
    """What a work gives, where no other waits."""
    (found,) = work.done([work], [])
    return found


def next_together(waiting: Mapping[Key, Work]) -> list[Key]:
    """Whose works come next and can be done at once.

    Texts that still draft so catch up with those that wait for deeper layers, and all rows of a
    round run through these together.
    """
    first = min(waiting, key=lambda key: waiting[key].turn)
    if len(waiting) == 1:
        return [first]
    alike = waiting[first].likeness
    return [key for key, work in waiting.items() if work.likeness == alike]


def _joins(work: Run | Unembed) -> bool:
    """Whether rows of other texts may stand beside these."""
    return work.least == 1 and work.backbone.runs_many


def _ends(parts: Sequence[Tensor]) -> Iterator[tuple[int, int]]:
    return pairwise(accumulate(map(len, parts), initial=0))


# --- the hidden-state cache


class Pass(NamedTuple):
    """One batched run: `rows` hidden states through layers first+1..last."""

    rows: int
    first: int
    last: int


class HiddenCache:
    """Queues of hidden states: each waits at the boundary that it has reached.

    SpecBound's cache manager (section 2.3): *write* is leaving a row where it is, *reuse* is that a
    deeper token takes its predecessors along. Within a queue positions are contiguous, and the
    first one equals the KV length of the layers that it waits for.
    """

    def __init__(
        self,
        backbone: Backbone,
        kv: KVCache,
        exit_layers: Sequence[int] = (),
        pinned_rows: int | None = None,
        state_layers: Sequence[int] = (),
    ) -> None:
        """`exit_layers` rise and lie in 0..L-1; shorter passes are padded to `pinned_rows`.

        `state_layers`, 0..L: where rows that run to the end leave states for readers; then rows
        wait at no other exit layer than 0.
        """
        self.depths = 0, *exit_layers, backbone.num_layers  # the layer of each boundary
        self.passes: list[Pass] = []  # so far
        self.state_layers = state_layers
        self._passed: dict[int, Tensor] = {}  # by layer, of the last pass
        self.states: Tensor | None = None
        """States of the rows that ran to the end last, layers side by side, [rows, layers * d]."""
        self._backbone = backbone
        self._kv = kv
        self.least = pinned_rows or 1  # rows that every pass has at least
        self._queues: list[list[Tensor]] = [[] for _ in self.depths]
        self._parents: list[int] = []
        """The parent of each row of the round, as they entered; -1: the committed text."""

    @property
    def pushed(self) -> int:
        """Rows of the round that entered."""
        return len(self._parents)

    def push(self, embeddings: Tensor, parents: Sequence[int] | None = None) -> None:
        """Queue [T, d] at boundary 0, a chain or by parents. Raises InvalidDraft behind a tree."""
        if not self._is_chain:
            raise InvalidDraft("rows cannot be queued behind a tree: queue them with it")
        chain = range(self.pushed - 1, self.pushed - 1 + len(embeddings))
        self._parents += chain if parents is None else parents
        self._queues[0].append(embeddings)

    def rows(self, boundary: int) -> Tensor:
        """All rows waiting at `boundary`, [rows, d]. They stay there."""
        queue = self._queues[boundary]
        if len(queue) > 1:
            queue[:] = [torch.cat(queue)]
        return queue[0]

    def advance(self, boundary: int, until: int | None = None) -> Steps[Tensor]:
        """Run all rows at `boundary` to `until` (default the next); gives them, [rows, d]."""
        until = boundary + 1 if until is None else until
        hidden = self.rows(boundary)
        step = Pass(len(hidden), self.depths[boundary], self.depths[until])
        if step.first < step.last:  # exit layer 0 is the embedding
            self.passes.append(step)
            tree, least = self._tree(step), self.least
            work = Run(self._backbone, self._kv, hidden, step.first, step.last, tree, least)
            work.states = self.state_layers
            hidden = yield work
            self._passed = work.kept
        self._queues[boundary].clear()
        self._queues[until].append(hidden)
        return hidden

    def advance_all(self) -> Steps[Tensor]:
        """Run every row to boundary L; gives them all, [rows, d].

        A pass goes on until it meets other rows: first all are aligned to the deepest exit among
        them, then they share one deep pass.
        """
        *before, last = range(len(self._queues))
        for boundary, until in pairwise([*(at for at in before if self._queues[at]), last]):
            first = self.rows(boundary)
            yield from self.advance(boundary, until)
        hidden = self.rows(last)
        if self.state_layers:
            passed = {0: first, **self._passed, self.depths[-1]: hidden}
            states = [passed[layer].to(hidden.device) for layer in self.state_layers]
            self.states = torch.cat(states, dim=-1)
        return hidden

    def unembed(self, hidden: Tensor) -> Steps[Target]:
        """Logits of rows at boundary L, [T, d]."""
        target: Target = yield Unembed(self._backbone, hidden, self.least)
        return target

    def clear(self, passes: Sequence[Pass] = ()) -> None:
        """Drop all rows: another round begins, or one goes on behind these passes."""
        for queue in self._queues:
            queue.clear()
        self.passes, self._parents, self.states = [*passes], [], None

    @property
    def _is_chain(self) -> bool:
        return self._parents == list(range(-1, len(self._parents) - 1))

    def _tree(self, step: Pass) -> list[int] | None:
        if self._is_chain:
            return None
        # no row of the round is through all layers before its last pass
        held = self._kv.length(step.first) - self._kv.length(self._backbone.num_layers - 1)
        parents = [parent - held for parent in self._parents[held : held + step.rows]]
        return None if parents == list(range(-1, step.rows - 1)) else parents


# --- the sequence


_MOST_UNREAD = 16  # tokens that heads which attend read later; prompts at once, for texts to come


class DecodeState:
    """Committed ids and the caches that belong to them.

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

        `heads` find here what they read of it beside the states at `exit_layers`.
        """
        self.backbone = backbone
        self.kv = KVCache(backbone.num_layers) if kv is None else kv
        layers = () if heads is None else heads.layers
        self.hidden = HiddenCache(backbone, self.kv, exit_layers, pinned_rows, layers)
        device, embed = backbone.device, backbone.embed
        self.attention = (
            heads.attention(lambda ids: embed(ids.to(device)))
            if isinstance(heads, AttendingHeads)
            else None
        )
        self.pad = pad
        self._committed: list[int] = ids[0, pad:].tolist()
        self._judged = 0  # rows that the next committed tokens come from
        self.normed: Tensor | None = None
        """What layer L gave for these, normed, [k + 1, d]."""
        self._states: Tensor | None = None
        self._path: list[int] = []  # rows of the round, the newest token's first, that stay
        self._written = ids.shape[1]  # ids in the buffer: the others come when somebody looks
        self._buffer = torch.cat([ids, ids.new_zeros(1, max(ids.shape[1], 256))], dim=1)
        self.begin()

    def begin(self) -> None:
        """The KV cache may have got a prefix: what heads that attend have not read runs again."""
        if self.attention is not None and (held := self.kv.length(0)):
            self.kv.truncate(self.attention.begin(self._committed, held))

    @property
    def ids(self) -> Tensor:
        """All committed ids, padding included, [1, n]; a view."""
        if self._written < self.length:
            while self.length > self._buffer.shape[1]:
                self._buffer = torch.cat([self._buffer, torch.zeros_like(self._buffer)], dim=1)
            for token in self._committed[self._written - self.pad :]:
                self._buffer[0, self._written].fill_(token)  # assigning uploads (torch 2.11)
                self._written += 1
        return self._buffer[:, : self.length]

    @property
    def length(self) -> int:
        return self.pad + len(self._committed)

    def committed(self, start: int) -> list[int]:
        """Ids from the `start`-th on, without padding; no device is asked."""
        return self._committed[start:]

    @property
    def waiting(self) -> list[int]:
        """Ids that are not through all layers: a prompt, later the newest one."""
        return self._committed[self.kv.length(self.backbone.num_layers - 1) :]

    @property
    def deep(self) -> Tensor | None:
        """What heads read in front of the newest token, [1, d] or more; None if not known.

        Normed output of layer L, and states of other layers beside it, where they read such.
        """
        if self.normed is None or not self._path:
            return None
        here = slice(row := self._path[-1], row + 1)
        deep, states = self.normed[here], self._states
        return deep if states is None else torch.cat([deep, states[here].to(deep)], dim=-1)

    def judge(self, count: int) -> None:
        """The next committed tokens come from the last `count` rows, k + 1."""
        self._judged, self._path, self.normed = count, [], None
        states = self.hidden.states
        self._states = None if states is None else states[-count:]

    def keep_states(self, rows: Sequence[int]) -> None:
        """Rows of the pass that has just ended whose positions are committed."""
        if self.attention is not None and self.hidden.states is not None:
            self.attention.add(self.hidden.states[list(rows)])

    def append(self, token: int, row: int) -> None:
        """Commit the token behind `row` of the round: 0 the newest token's, 1 .. k."""
        self._committed.append(token)
        self._path.append(row)

    @contextmanager
    def round(self) -> Iterator[None]:
        """Afterwards, also on an error: caches hold what is committed, and nothing waits."""
        newest = len(self._committed) - 1
        try:
            yield
        finally:
            self._rewind(newest)
        if self.attention is not None and self.attention.waiting > _MOST_UNREAD:
            alone(self.attention.read(self._committed))

    @torch.inference_mode()  # also where a round is dropped between two of its works
    def _rewind(self, newest: int) -> None:
        # the deepest layer holds least: an error may have stopped a pass halfway down
        deepest = self.kv.length(self.backbone.num_layers - 1)
        if deepest <= newest:
            self.kv.truncate(deepest)
        else:
            path = self._path[: len(self._committed) - 1 - newest]
            self.kv.keep(newest, path)
            if self.hidden.states is not None and self._judged:
                before = len(self.hidden.states) - self._judged
                self.keep_states([*range(before), *(before + row for row in path)])
        self.hidden.clear()


# --- what proposes tokens


class Drafter(Protocol):
    """Proposes at most `limit` tokens to follow the committed ones."""

    def draft(self, state: DecodeState, limit: int, watch: Stopwatch) -> Steps[Draft]:
        """A draft of 0..limit tokens, and the work that leads there.

        Rows may wait in `state.hidden`: the newest committed token's, then the drafts', in order.
        """

    def learn(self, draft: Draft, kept: Sequence[int]) -> None:
        """What became of the draft that was asked for last: which of its tokens stayed."""


class NoDrafter:
    """Proposes nothing: plain decoding."""

    def draft(self, state: DecodeState, limit: int, watch: Stopwatch) -> Steps[Draft]:  # noqa: ARG002  # the protocol's
        return ready(Draft())

    def learn(self, draft: Draft, kept: Sequence[int]) -> None: ...
