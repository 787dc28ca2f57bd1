"""What a text needs computed next, and how the needs of many texts are met together.

A text is written by a generator: it yields Work, and is sent what came of it. So everything about
one text reads as if it were alone, while works that are alike, of all texts that run, become one
pass, one question to a head, one product. Called by the engine; `alone` drives a single text.
"""

from __future__ import annotations

from collections.abc import Generator, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from selfspec.decoding.acceptance import Target
from selfspec.heads.heads import Answer, ExitHead, Signal, joined, scored
from selfspec.model.backbone import Backbone
from selfspec.model.kv import Lease, Rows, uploaded, with_zeros

Result = TypeVar("Result")
Key = TypeVar("Key", bound=Hashable)


class Work(Protocol):
    """What one text needs."""

    @property
    def turn(self) -> tuple[int, int, int]:
        """Its turn, the least first: before all others what brings a text on without a pass."""
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


@dataclass(eq=False, kw_only=True)
class Embed(Work):
    """Ids of one text; gives hidden states at boundary 0, [n, d]."""

    backbone: Backbone
    ids: Sequence[int]

    @property
    def likeness(self) -> Hashable:
        return Embed, id(self.backbone)

    def done(self, alike: Sequence[Embed], _others: Sequence[Work]) -> Sequence[Tensor]:
        ids = [token for work in alike for token in work.ids]
        hidden = self.backbone.embed(uploaded(ids, self.backbone.device))
        parts: Sequence[Tensor] = hidden.split([len(work.ids) for work in alike])
        return parts


@dataclass(eq=False, kw_only=True)
class Run(Work):
    """Rows of one text through layers first+1..last; gives what comes out, [T, d]."""

    backbone: Backbone
    lease: Lease
    hidden: Tensor
    """[T, d]"""
    first: int
    last: int
    parents: Sequence[int] | None = None
    """What each row follows, as in a Span."""
    least: int = 1
    """Rows that its passes have at least: shorter ones are padded."""

    @property
    def turn(self) -> tuple[int, int, int]:
        """Small models first, which draft; then the earliest layers."""
        return 1, self.backbone.num_layers, self.first

    @property
    def likeness(self) -> Hashable:
        """Equal for runs from one layer on, if rows of other texts may stand beside these."""
        return (Run, id(self.backbone), self.first) if _joins(self) else id(self)

    def done(self, alike: Sequence[Run], others: Sequence[Work]) -> list[Tensor | None]:
        """One pass, up to where the first of them ends, or others wait."""
        backbone, first, stop = self.backbone, self.first, min(work.last for work in alike)
        for other in others:
            if isinstance(other, Run) and other.backbone is backbone and first < other.first < stop:
                stop = other.first
        if len(alike) == 1:
            outputs: Sequence[Tensor] = [self._alone(stop)]
        else:
            rows = Rows.joined([work._rows(len(work.hidden)) for work in alike])
            hidden = torch.cat([work.hidden for work in alike])
            counts = [span.count for span in rows.spans]
            outputs = backbone.run(hidden, first, stop, rows).split(counts)
        for work, output in zip(alike, outputs, strict=True):
            work.hidden, work.first = output, stop
        return [work.hidden if work.first == work.last else None for work in alike]

    def _alone(self, stop: int) -> Tensor:
        count, start = len(self.hidden), self.lease.length(self.first)
        block = with_zeros(self.hidden, self.least)
        output = self.backbone.run(block, self.first, stop, self._rows(len(block)))
        if len(block) > count:
            self.lease.truncate(start + count, self.first, stop)
        return output[:count]

    def _rows(self, count: int) -> Rows:
        parents = self.parents
        if parents is not None:
            parents = [*parents, *range(len(parents) - 1, count - 1)]
        start = self.lease.length(self.first)
        return Rows.of(self.lease, start, count, self.hidden.device, parents)


@dataclass(eq=False, kw_only=True)
class Ask(Work):
    """One exit head asked about rows of a text; gives an Answer."""

    backbone: Backbone
    head: ExitHead
    hidden: Tensor
    """[n, d]"""
    deep: Tensor | None
    """[n, d], or None where it is not known."""
    temperature: float
    count: int
    """Tokens wanted."""
    signal: Signal | None = None

    @property
    def likeness(self) -> Hashable:
        return Ask, id(self.head), self.temperature, self.count, self.signal

    def done(self, alike: Sequence[Ask], _others: Sequence[Work]) -> list[Answer]:
        hidden = [work.hidden for work in alike]
        inputs = [hidden[0] if len(alike) == 1 else torch.cat(hidden)]
        if (deep := joined([work.deep for work in alike], hidden)) is not None:
            inputs.append(deep)
        if (replayed := self.backbone.claims.replayed) is None:
            whole = Answer.read(*self._asked(*inputs))
        else:
            whole = Answer.read(*replayed(self.likeness, self._asked, *inputs))
        if len(alike) == 1:
            return [whole]
        return [whole.part(slice(*ends)) for ends in _ends(hidden)]

    def _asked(self, hidden: Tensor, deep: Tensor | None = None) -> tuple[Tensor, ...]:
        features = self.head.features(hidden, deep)
        return scored(self.head, features, self.temperature, self.count, self.signal)


@dataclass(eq=False, kw_only=True)
class Unembed(Work):
    """The way from the output of layer L to logits; gives a Target."""

    backbone: Backbone
    hidden: Tensor
    """[T, d]"""
    least: int = 1
    """Rows that its pass has at least, as in a Run."""

    @property
    def likeness(self) -> Hashable:
        """All of one model, if rows of other texts may stand beside these."""
        return (Unembed, id(self.backbone)) if _joins(self) else id(self)

    def done(self, alike: Sequence[Unembed], _others: Sequence[Work]) -> list[Target]:
        if len(alike) == 1:
            logits = self.backbone.logits(with_zeros(self.hidden, self.least))
            return [Target(logits[: len(self.hidden)])]
        hidden = [work.hidden for work in alike]
        together = Target(self.backbone.logits(torch.cat(hidden)))
        return [together.part(slice(*ends)) for ends in _ends(hidden)]


@dataclass(eq=False, kw_only=True)
class Enter(Work):
    """A prompt that waits; gives how many of its rows may run now, at least one.

    The engine that runs the texts decides; alone, all rows may.
    """

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
    """Whose works come next and can be done at once; of passes, those of the earliest layers.

    So texts that still draft catch up with those that wait for deeper layers, and all rows of a
    round run through these together. A second model, which drafts, goes before both.
    """
    first = min(waiting, key=lambda key: waiting[key].turn)
    if len(waiting) == 1:
        return [first]
    alike = waiting[first].likeness
    return [key for key, work in waiting.items() if work.likeness == alike]


def _joins(work: Run | Unembed) -> bool:
    return work.least == 1 and work.backbone.runs_many


def _ends(parts: Sequence[Tensor]) -> Iterator[tuple[int, int]]:
    return pairwise(accumulate(map(len, parts), initial=0))
