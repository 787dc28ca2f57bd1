"""Layers from compiled code alone: a segment is one call of it.

Every row is computed by itself, in an order that its position alone decides: its bits are the same
in a prompt, among drafts, on a branch of a tree and alone. Needs Linux and a C++ compiler, or a
wheel with compiled code inside; without, the generic executor runs the model.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from selfspec.model.executors import Claims
from selfspec.model.executors.program import HIDDEN, Operation, Program
from selfspec.model.executors.recipe import (
    Experts,
    Mlp,
    Recipe,
    Rotation,
    activation_of,
    norm_of,
    plain_linear,
    recipe_of,
)
from selfspec.model.hooks import require_own_code
from selfspec.model.panels import blocks_pay, tiles, wide_vectors
from selfspec.model.parts import DecoderParts, attention_types
from selfspec.model.products import CompiledLinear
from selfspec.model.rows import Rows, Span


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


_BLOCK_ROWS = 1024
"""Rows of a prompt that run through the layers together: its memory does not grow with it."""


class _Costs(NamedTuple):
    """Of a pass's further rows and of a head, in passes of one row; SmolLM2-135M, two threads."""

    rows: tuple[float, ...]
    head: float


_NARROW = {"numbers": _Costs((0.15,), 0.08), "blocks": _Costs((0.3,), 0.2)}
"""With AVX2 arithmetic limits a pass: from numbers two rows take 1.14 of one, from 4-bit blocks
1.27."""

_WIDE = {
    "numbers": _Costs((*(0.02,) * 9, 0.07), 0.07),
    "light numbers": _Costs((*(0.04,) * 9, 0.08), 0.09),
    "blocks": _Costs((0.05, *(0.13,) * 6, 0.6, 0.17), 0.14),
    "light blocks": _Costs((0.05, *(0.1,) * 6, 0.5, 0.12), 0.14),
}
"""With AVX-512 memory limits it, while rows share what is read: ten of them, of blocks eight.
Light: bfloat16 with instructions of its own."""

_TILES = _Costs((0.04,), 0.15)
"""With matrix registers 16 rows cost little more than one, from blocks as from numbers."""


def _costs(linear: CompiledLinear) -> _Costs:
    """By the unembedding's weights, and what this processor computes with."""
    if tiles(linear.dtype):
        return _TILES
    light = linear.dtype == torch.bfloat16 and blocks_pay(linear.dtype)
    name = ("light " if light else "") + ("blocks" if any(linear.stripes.forms) else "numbers")
    return (_WIDE if wide_vectors(linear.dtype) else _NARROW)[name]


class FusedExecutor:
    """The decoder from compiled products, norms, attention and activations."""

    claims = Claims(steady=True, trees=True, spans=_BLOCK_ROWS)
    """What rows and heads cost comes with the weights."""

    def __init__(
        self,
        decoder: DecoderParts,
        lm_head: nn.Linear,
        done: Callable[[nn.Module], object] = lambda _: None,
    ) -> None:
        """Copies the weights, and calls `done` with each part that has its copy.

        Raises ValueError, with the reason, for layers that have no recipe, and without a compiler.
        """
        require_own_code(decoder, lm_head)
        self._decoder, dtype = decoder, lm_head.weight.dtype
        lm_head = plain_linear(lm_head, "lm_head", dtype)
        kinds = attention_types(decoder.config)
        self._recipe(0, kinds[0], dtype)  # raises before long work
        self._program = Program(dtype, lm_head.in_features)
        # the largest first, while there is most room
        linear = CompiledLinear.of(lm_head)
        costs = _costs(linear)
        self.claims = replace(self.claims, row_costs=costs.rows, head_cost=costs.head)
        self.weight_bytes = linear.nbytes
        """Of what a row reads, in the compiled layout."""
        self._unembedding = Program(dtype, lm_head.in_features)
        normed = self._unembedding.buffer("normed", lm_head.in_features)
        self._logits = self._unembedding.buffer("logits", lm_head.out_features)
        norm = norm_of(decoder.norm, lm_head.in_features, dtype)
        self._unembedding.add_layer(
            [
                self._unembedding.norm(HIDDEN, normed, norm),
                self._unembedding.product(normed, self._logits, linear),
            ]
        )
        done(lm_head)
        self._rotations = Rotations(decoder)
        for index, (layer, kind) in enumerate(zip(decoder.layers, kinds, strict=True)):
            recipe = self._recipe(index, kind, dtype)
            rotation = self._rotations.index(kind, recipe.attention.rotation)
            self._program.add_layer(list(self._operations(recipe, rotation)))
            done(layer)
        self.claims = replace(self.claims, pages=self._program.layout)

    def _recipe(self, index: int, kind: str, dtype: torch.dtype) -> Recipe:
        try:
            return recipe_of(self._decoder, self._decoder.layers[index], kind, dtype)
        except (AttributeError, TypeError, ValueError) as error:  # other shapes fail in many ways
            raise ValueError(f"layer {index + 1}: {error}") from error

    def logits(self, hidden: Tensor) -> Tensor:
        """Output of layer L, [T, d] -> what lm_head gives, [T, V]."""
        return self._unembedding.transform(hidden, self._logits)

    def run(self, hidden: Tensor, first: int, last: int, rows: Rows) -> Tensor:
        """Layers first+1..last on [T, d]; adds keys and values of T positions to the lease."""
        if len(hidden) > _BLOCK_ROWS and len(rows.spans) > 1:
            parts = [self.run(part, first, last, one) for part, one in rows.each(hidden)]
            return torch.cat(parts)
        done = []
        for block, part in self._blocks(hidden, rows):
            newest = part.spans[0]
            unseen = 0 if newest.parents is None else -1 - newest.parents[0]
            turns = self._rotations.at(block, part.positions, newest.lease.length(first) - unseen)
            done.append(self._program.run(block, first, last, turns, part.spans))
        return torch.cat(done) if len(done) > 1 else done[0]

    @staticmethod
    def _blocks(hidden: Tensor, rows: Rows) -> Iterator[tuple[Tensor, Rows]]:
        """A long chain in pieces, one behind the other; all else as it is."""
        if len(hidden) <= _BLOCK_ROWS or not rows.are_chains:
            yield hidden, rows
            return
        lease = rows.only.lease
        pieces = zip(hidden.split(_BLOCK_ROWS), rows.positions.split(_BLOCK_ROWS), strict=True)
        for block, positions in pieces:
            yield block, Rows(positions, (Span(lease, len(block)),))

    def _operations(self, recipe: Recipe, rotation: int) -> Iterator[Operation]:
        """One layer, from its input to its output."""
        output, mlp = recipe.attention.output, recipe.mlp
        seen = yield from self._attend(recipe, rotation)
        if not recipe.parallel:
            yield from self._close(recipe, 0, seen, output)
        if isinstance(mlp, Experts):
            made, down = (yield from self._mix(recipe, mlp)), None
        else:
            made, down = (yield from self._activate(recipe, mlp)), mlp.down
        if recipe.parallel:  # the MLP has read the rows as attention did
            yield from self._close(recipe, 0, seen, output)
        yield from self._close(recipe, 1, made, down)

    def _open(self, recipe: Recipe, place: int) -> Generator[Operation, None, int]:
        """What attention (0) or the MLP (1) reads: the rows, normed if the layer does that."""
        norm = recipe.before[place]
        if norm is not None:
            normed = self._program.buffer("normed", len(norm.weight))
            yield self._program.norm(HIDDEN, normed, norm)
            return normed
        shared = recipe.before[0] if recipe.parallel else None  # one norm for both
        return HIDDEN if shared is None else self._program.buffer("normed", len(shared.weight))

    def _close(
        self, recipe: Recipe, place: int, source: int, linear: nn.Linear | None
    ) -> Iterator[Operation]:
        """The last linear layer of attention (0) or the MLP (1), if it has one, to the rows."""
        program, norm, times = self._program, recipe.behind[place], recipe.times
        if linear is not None and norm is None:
            yield program.product(source, HIDDEN, self._product(linear), adds=times)
            return
        if linear is not None:
            branch = program.buffer("branch", linear.out_features)
            yield program.product(source, branch, self._product(linear))
            source = branch
        if norm is None:
            yield program.add(source, HIDDEN, times)
        else:
            yield program.norm(source, HIDDEN, norm, adds=times)

    def _attend(self, recipe: Recipe, rotation: int) -> Generator[Operation, None, int]:
        """To the buffer of one row of heads."""
        program, attention = self._program, recipe.attention
        source = yield from self._open(recipe, 0)
        projected = program.buffer("projected", len(attention.order))
        seen = program.buffer("seen", attention.heads * attention.size)
        projections = self._product(*attention.projections, order=attention.order)
        yield program.product(source, projected, projections)
        if attention.row_norms is not None:
            queries, keys = attention.row_norms
            yield program.norm(projected, projected, queries)
            yield program.norm(projected, projected, keys, at=len(queries.weight))
        yield program.attend(projected, seen, attention, rotation=rotation)
        return seen

    def _activate(self, recipe: Recipe, mlp: Mlp) -> Generator[Operation, None, int]:
        """To the buffer that the MLP's last product reads."""
        program = self._program
        source = yield from self._open(recipe, 1)
        into = self._product(*mlp.into)
        opened = program.buffer("opened", into.out_features)
        activated = program.buffer("activated", mlp.down.in_features)
        yield program.product(source, opened, into)
        yield program.activate(opened, activated, activation_of(mlp.activation), gated=mlp.gated)
        return activated

    def _mix(self, recipe: Recipe, experts: Experts) -> Generator[Operation, None, int]:
        """To the buffer of what each row's experts make of it."""
        program, function = self._program, activation_of(experts.activation)
        source = yield from self._open(recipe, 1)
        router = CompiledLinear(experts.router.detach())
        logits = program.buffer("logits", router.out_features)
        mixed = program.buffer("mixed", router.in_features)
        yield program.product(source, logits, router)
        yield program.experts(source, logits, mixed, experts, function)
        share = experts.shares.each / len(experts.router)
        self.weight_bytes += router.nbytes
        self.weight_bytes += int(share * (experts.into.nbytes + experts.down.nbytes))
        return mixed

    def _product(self, *parts: nn.Linear, order: Tensor | None = None) -> CompiledLinear:
        product = CompiledLinear.of(*parts, order=order)
        self.weight_bytes += product.nbytes
        return product
