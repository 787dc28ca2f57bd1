"""What a text needs computed next, and how the needs of many texts are met together.

A text is written by a generator: it yields Work, and is sent what came of it. So everything about
one text reads as if it were alone, while works that are alike, of all texts that run, become one
pass, one question to a head, one product. Called by the engine; `alone` drives a single text.
"""

from __future__ import annotations

from collections.abc import Generator, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from selfspec.decoding.acceptance import Target, Together
from selfspec.heads import answers
from selfspec.heads.answers import Answer
from selfspec.heads.confidence import Signal
from selfspec.heads.types import ExitHead
from selfspec.model.backbone import Backbone
from selfspec.model.kv_store import Lease
from selfspec.model.rows import Rows


@dataclass(eq=False, kw_only=True)
class Embed:
    """Ids of one text; gives hidden states at boundary 0, [n, d]."""

    backbone: Backbone
    ids: Sequence[int]


@dataclass(eq=False, kw_only=True)
class Run:
    """Rows of one text through layers first+1..last; gives what comes out, [T, d]."""

    backbone: Backbone
    lease: Lease
    hidden: Tensor
    """[T, d]"""
    first: int
    last: int
    parents: Sequence[int] | None = None
    """As a Span has them."""
    least: int = 1
    """Rows that its passes have at least: shorter ones are padded."""


@dataclass(eq=False, kw_only=True)
class Ask:
    """One exit head asked about rows of a text; gives an Answer."""

    head: ExitHead
    hidden: Tensor
    """[n, d]"""
    deep: Tensor | None
    """[n, d], or None where it is not known."""
    temperature: float
    count: int
    """Tokens wanted."""
    signal: Signal | None = None


@dataclass(eq=False, kw_only=True)
class Unembed:
    """The way from the output of layer L to logits; gives a Target."""

    backbone: Backbone
    hidden: Tensor
    """[T, d]"""
    least: int = 1
    """As in a Run."""


@dataclass(eq=False, kw_only=True)
class Enter:
    """A prompt that waits; gives how many of its rows may run now, at least one."""

    rows: int


Work = Embed | Run | Ask | Unembed | Enter

Result = TypeVar("Result")
Key = TypeVar("Key", bound=Hashable)

Steps = Generator[Work, Any, Result]
"""Yields Work, is sent what it gives, and returns a result in the end."""


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
    if isinstance(work, Enter):
        return work.rows
    (found,) = done([work])
    return found


def next_together(waiting: Mapping[Key, Work]) -> list[Key]:
    """Whose works come next and can be done at once; of passes, those of the earliest layers.

    So texts that still draft catch up with those that wait for deeper layers, and all rows of a
    round run through these together. A second model, which drafts, goes before both.
    """
    first = min(waiting, key=lambda key: _turn(waiting[key]))
    if len(waiting) == 1:
        return [first]
    alike = _likeness(waiting[first])
    return [key for key, work in waiting.items() if key == first or _likeness(work) == alike]


def done(works: Sequence[Work], others: Sequence[Work] = ()) -> Sequence[Any]:
    """Do works that are alike, in one call; what each gives, None: there is more of it to do.

    Passes stop where rows of `others` wait, which then go on with them.
    """
    if isinstance(works[0], Run):
        return _run([work for work in works if isinstance(work, Run)], others)
    if isinstance(works[0], Ask):
        return _ask([work for work in works if isinstance(work, Ask)])
    if isinstance(works[0], Embed):
        return _embed([work for work in works if isinstance(work, Embed)])
    return _unembed([work for work in works if isinstance(work, Unembed)])


def _turn(work: Work) -> tuple[int, int, int]:
    """What comes first: whatever brings texts on; then passes."""
    if isinstance(work, Run):
        return 1, work.backbone.num_layers, work.first
    return 0, 0, 0


def _likeness(work: Work) -> Hashable:
    """Works of equal likeness can be done together."""
    if isinstance(work, Ask):
        return id(work.head), work.temperature, work.count, work.signal
    if isinstance(work, Embed):
        return Embed, id(work.backbone)
    if isinstance(work, Enter) or not _joins(work):
        return id(work)
    return type(work), id(work.backbone), work.first if isinstance(work, Run) else None


def _joins(work: Run | Unembed) -> bool:
    """Whether rows of other texts may stand beside these."""
    return work.least == 1 and work.backbone.runs_many


def _embed(works: Sequence[Embed]) -> Sequence[Tensor]:
    backbone = works[0].backbone
    ids = [token for work in works for token in work.ids]
    hidden = backbone.embed(torch.tensor(ids, device=backbone.device))
    parts: Sequence[Tensor] = hidden.split([len(work.ids) for work in works])
    return parts


def _run(works: Sequence[Run], others: Sequence[Work]) -> list[Tensor | None]:
    first, stop, backbone = works[0].first, min(work.last for work in works), works[0].backbone
    for other in others:
        if isinstance(other, Run) and other.backbone is backbone and first < other.first < stop:
            stop = other.first
    if len(works) == 1:
        outputs: Sequence[Tensor] = [_run_one(works[0], stop)]
    else:
        rows = Rows.joined([_rows(work, len(work.hidden)) for work in works])
        hidden = torch.cat([work.hidden for work in works])
        counts = [span.count for span in rows.spans]
        outputs = backbone.run(hidden, first, stop, rows).split(counts)
    for work, output in zip(works, outputs, strict=True):
        work.hidden, work.first = output, stop
    return [work.hidden if work.first == work.last else None for work in works]


def _run_one(work: Run, stop: int) -> Tensor:
    """With padding, whose keys and values are cut off again."""
    count, start = len(work.hidden), work.lease.length(work.first)
    block = padded(work.hidden, work.least)
    output = work.backbone.run(block, work.first, stop, _rows(work, len(block)))
    if len(block) > count:
        work.lease.truncate(start + count, work.first, stop)
    return output[:count]


def _rows(work: Run, count: int) -> Rows:
    """The rows of one text, and padding behind them up to `count`."""
    parents = work.parents
    if parents is not None:
        parents = [*parents, *range(len(parents) - 1, count - 1)]
    return Rows.of(work.lease, work.lease.length(work.first), count, work.hidden.device, parents)


def padded(hidden: Tensor, least: int) -> Tensor:
    """[T, d] with zero rows up to `least`."""
    missing = least - len(hidden)
    return F.pad(hidden, (0, 0, 0, missing)) if missing > 0 else hidden


def _ask(works: Sequence[Ask]) -> list[Answer]:
    one, hidden = works[0], [work.hidden for work in works]
    whole = answers.answer(
        one.head,
        hidden[0] if len(works) == 1 else torch.cat(hidden),
        answers.joined([work.deep for work in works], hidden),
        temperature=one.temperature,
        count=one.count,
        signal=one.signal,
    )
    if len(works) == 1:
        return [whole]
    return [whole.part(slice(*ends)) for ends in _ends(hidden)]


def _unembed(works: Sequence[Unembed]) -> list[Target]:
    one = works[0]
    if len(works) == 1:
        logits = one.backbone.logits(padded(one.hidden, one.least))
        return [Target(logits[: len(one.hidden)])]
    together = Together(one.backbone.logits(torch.cat([work.hidden for work in works])))
    return [together.part(slice(*ends)) for ends in _ends([work.hidden for work in works])]


def _ends(parts: Sequence[Tensor]) -> Iterator[tuple[int, int]]:
    """Where each part's rows begin and end in all of them."""
    return pairwise(accumulate(map(len, parts), initial=0))
