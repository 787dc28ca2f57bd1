"""Rotations of queries and keys by position, for each attention type: tables that grow.

Comes in: positions of a pass. Goes out: complex numbers, one for each pair of a head. Called by the
executors on a CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from selfspec.model.executors.asked import Rotation
from selfspec.model.parts import DecoderParts


class Rotations:
    """The rotations of a decoder, rounded as its own module does."""

    def __init__(self, decoder: DecoderParts) -> None:
        self._decoder = decoder
        self._ways: dict[str, Rotation | None] = {}
        self._tables: list[Tensor] = []  # [slots, pairs] by kind, as long as the texts so far
        self._offset = 0  # position of the first slot, which is not 0 in checks only

    def index(self, kind: str, rotation: Rotation | None) -> int:
        """Where layers of this kind find theirs. Raises ValueError where such layers differ."""
        known = self._ways.get(kind) or rotation
        self._ways[kind] = known
        if rotation not in (None, known):
            raise ValueError("layers differ in how positions are rotated")
        return list(self._ways).index(kind)

    def at(self, rows: Tensor, positions: Tensor, start: int) -> list[Tensor]:
        """By kind, [T, pairs], for `positions` [T] of rows behind `start` slots."""
        offset = int(positions[0]) - start
        end = int(positions.max()) - offset + 1
        if not self._tables or len(self._tables[0]) < end or offset != self._offset:
            every = torch.arange(offset, offset + 2 * end)[None]
            self._tables = [self._table(rows, every, kind) for kind in self._ways]
            self._offset = offset
        places = positions - offset
        return [table[places] for table in self._tables]

    def _table(self, rows: Tensor, positions: Tensor, kind: str) -> Tensor:
        """For `positions` [1, S]; layers without rotations need none of it."""
        if (way := self._ways[kind]) is None:
            return torch.zeros(positions.shape[1], 0, dtype=torch.complex64)
        cos, sin = self._decoder.rotations(rows[None], positions, kind)
        return way.turns(cos[0], sin[0])
