"""One row, one result: the logits of a text, however the text arrives.

Comes in: a Backbone and ids. Goes out: logits of every position, by way. Called by `lossless` for
`selfspec verify`, and by `eval/one_row.py` on many texts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from selfspec.decoding.hidden_cache import HiddenCache
from selfspec.decoding.work import alone
from selfspec.model.backbone import Backbone
from selfspec.model.kv_store import Lease


class Way(NamedTuple):
    """How a text arrives."""

    pieces: Sequence[int]
    """Rows of its passes, again and again."""
    wrong: int = 0
    """Rows behind each pass that are taken back, as rejected drafts are."""
    threads: int | None = None
    """None: as many as there are."""
    kept: bool = False
    """Its first half was read with another end before, and stayed: a turn of a session."""
    branch: bool = False
    """Each row has a wrong sibling: the text is a branch of a tree of drafts."""


WAYS = {
    "pieces of 500": Way([500]),
    "pieces of 64": Way([64]),
    "pieces of 7": Way([7]),
    "token by token": Way([1]),
    "with drafts that are taken back": Way([1, 4, 2, 5, 3], wrong=3),
    "as a branch of a tree": Way([1, 9, 4], branch=True),
    "behind a kept half": Way([500], wrong=20, kept=True),
    "on one thread": Way([500], threads=1),
    "on one thread, pieces of 7": Way([7], threads=1),
    "on two threads": Way([64], threads=2),
}
"""Each is compared with one pass over the whole text."""


def logits(backbone: Backbone, ids: Tensor, way: Way | None = None) -> Tensor:
    """Logits of every position, [T, V], of `ids` [T]; None: in one pass."""
    way = way or Way([len(ids)])
    lease = Lease(backbone.num_layers)
    with torch.inference_mode(), _threads(way.threads):
        found = []
        for start, end in _cuts(len(ids), way):
            if way.branch:
                found.append(_branch(backbone, lease, ids[start:end]))
            else:
                found.append(_chain(backbone, lease, ids[start:end], way.wrong))
        return torch.cat(found)


def _chain(backbone: Backbone, lease: Lease, ids: Tensor, wrong: int) -> Tensor:
    """Logits of the rows of `ids`, with `wrong` others behind them, which are taken back."""
    end = lease.length(0) + len(ids)
    others = (ids[-1:] + 1 + torch.arange(wrong, device=ids.device)) % backbone.vocab_size
    hidden = HiddenCache(backbone, lease)
    hidden.push(backbone.embed(torch.cat([ids, others])))
    found = backbone.logits(alone(hidden.advance_all()))[: len(ids)]
    lease.truncate(end)
    return found


def _branch(backbone: Backbone, lease: Lease, ids: Tensor) -> Tensor:
    """Logits of the rows of `ids`, each behind a sibling, of which none is kept."""
    start, others = lease.length(0), (ids + 1) % backbone.vocab_size
    path = list(range(1, 2 * len(ids), 2))
    hidden = HiddenCache(backbone, lease)
    hidden.push(
        backbone.embed(torch.stack([others, ids], 1).flatten()),
        [row - 2 for row in path for _ in range(2)],  # both follow the text's row before them
    )
    found = backbone.logits(alone(hidden.advance_all()))[path]
    lease.keep(start, path)
    return found


def _cuts(count: int, way: Way) -> Iterator[tuple[int, int]]:
    """Where passes begin and end."""
    middle = count // 2 if way.kept else 0
    for low, high in ((0, middle), (middle, count)):
        step = 0
        while low < high:
            end = min(high, low + way.pieces[step % len(way.pieces)])
            yield low, end
            low, step = end, step + 1


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """With so many threads, then with as many as before."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
