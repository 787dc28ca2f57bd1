"""One sequence while it is decoded: its ids, its keys and values, its waiting rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from selfspec.decoding.hidden_cache import HiddenCache
from selfspec.heads.attending import AttendingHeads
from selfspec.model.backbone import Backbone
from selfspec.model.kv_store import Lease

_MOST_UNREAD = 16
"""Tokens of an answer wait until heads that attend are asked; a prompt is read at once, so that
texts which begin alike need not."""


class DecodeState:
    """Committed ids and the caches that belong to them.

    Between rounds every layer holds all positions but the newest, which is not in yet. Left
    padding (`pad` ids in front) is kept in `ids`, because processors and stopping criteria count
    it, and never reaches the model.
    """

    def __init__(
        self,
        backbone: Backbone,
        ids: Tensor,
        *,
        pad: int = 0,
        exit_layers: Sequence[int] = (),
        lease: Lease | None = None,
        pinned_rows: int | None = None,
        reader: AttendingHeads | None = None,
    ) -> None:
        """`ids` [1, n] with n > pad. `lease` may hold a prefix of them, from an earlier turn.

        `reader`: heads that attend, which then take the place of those at `exit_layers`.
        """
        self.backbone = backbone
        self.lease = Lease(backbone.num_layers) if lease is None else lease
        layers = () if reader is None else reader.layers
        self.hidden = HiddenCache(backbone, self.lease, exit_layers, pinned_rows, layers)
        self.attention = None if reader is None else reader.attention(self._embed)
        """What heads that attend have read of the text."""
        self.pad = pad
        self._committed: list[int] = ids[0, pad:].tolist()
        self._outputs: Tensor | None = None
        self._path: list[int] = []
        """Rows of the round, counted from the newest token's, whose tokens stay."""
        self._written = ids.shape[1]
        """Committed ids that are in the buffer: the others come when somebody looks."""
        self._buffer = torch.cat([ids, ids.new_zeros(1, max(ids.shape[1], 256))], dim=1)
        self.begin()

    def begin(self) -> None:
        """The lease may have got a prefix: what heads that attend have not read runs again."""
        if self.attention is not None and (held := self.lease.length(0)):
            self.lease.truncate(self.attention.begin(self._committed, held))

    def _embed(self, ids: Tensor) -> Tensor:
        return self.backbone.embed(ids.to(self.backbone.device))

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
        """Committed ids, padding included."""
        return self.pad + len(self._committed)

    def committed(self, start: int) -> list[int]:
        """Committed ids from the `start`-th on, without padding; no device is asked."""
        return self._committed[start:]

    @property
    def waiting(self) -> list[int]:
        """Committed ids that are not through all layers: a prompt, later the newest one."""
        return self._committed[self.lease.length(self.backbone.num_layers - 1) :]

    @property
    def deep(self) -> Tensor | None:
        """Output of layer L at the position before the newest token, [1, d]; None if not known."""
        if self._outputs is None or not self._path:
            return None
        last = self._path[-1]
        return self._outputs[last : last + 1]

    def keep_outputs(self, outputs: Tensor) -> None:
        """Outputs of layer L, [k + 1, d], that the next committed tokens come from."""
        self._outputs, self._path = outputs, []

    def keep_states(self, rows: Sequence[int]) -> None:
        """Rows of the pass that has just ended whose positions are committed."""
        if self.attention is not None and self.hidden.states is not None:
            self.attention.add(self.hidden.states[list(rows)])

    def append(self, token: int, row: int) -> None:
        """Commit the token that comes behind `row` of the round: 0 the newest token's, 1 .. k."""
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
            self.attention.read(self._committed)

    @torch.inference_mode()  # also where a round is dropped between two of its works
    def _rewind(self, newest: int) -> None:
        """Keep of the positions from `newest` on those that are committed."""
        # the deepest layer holds least: an error may have stopped a pass halfway down
        deepest = self.lease.length(self.backbone.num_layers - 1)
        if deepest <= newest:
            self.lease.truncate(deepest)
        else:
            path = self._path[: len(self._committed) - 1 - newest]
            self.lease.keep(newest, path)
            if self.hidden.states is not None and self._outputs is not None:
                before = len(self.hidden.states) - len(self._outputs)
                self.keep_states([*range(before), *(before + row for row in path)])
        self.hidden.clear()
