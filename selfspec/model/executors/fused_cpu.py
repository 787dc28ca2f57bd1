"""Layers from compiled code alone: a segment is one call of it.

Every row is computed by itself, in an order that its position alone decides: its bits are the same
in a prompt, among drafts, on a branch of a tree and alone. Needs a C++ compiler on Linux; without
one the packed executor runs the models that it knows, and the generic one all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import IntEnum

import torch
from torch import Tensor, nn

from selfspec.model.executors import Claims
from selfspec.model.executors.asked import activation_of
from selfspec.model.executors.known import require_known
from selfspec.model.executors.masks import attention_types
from selfspec.model.executors.program import Operation, Program
from selfspec.model.executors.recipe import Recipe, recipe_of
from selfspec.model.executors.rotations import Rotations
from selfspec.model.parts import DecoderParts
from selfspec.model.products import CompiledLinear
from selfspec.model.rows import Rows

_BLOCK_ROWS = 1024
"""Rows of a prompt that run through the layers together: its memory does not grow with it."""


class _Buffer(IntEnum):
    """What operations read and write."""

    HIDDEN = 0
    NORMED = 1
    PROJECTED = 2
    SEEN = 3
    INTO = 4
    ACTIVATED = 5
    BRANCH = 6


class FusedExecutor:
    """The decoder from compiled products, norms, attention and activations."""

    claims = Claims(steady_from=1, trees=True)

    def __init__(
        self,
        decoder: DecoderParts,
        lm_head: nn.Linear,
        done: Callable[[nn.Module], object] = lambda _: None,
    ) -> None:
        """Copies the weights, and calls `done` with each part that has its copy.

        Raises ValueError, with the reason, for layers that have no recipe, and without a compiler.
        """
        require_known(decoder, lm_head)
        self._decoder, dtype = decoder, lm_head.weight.dtype
        kinds = attention_types(decoder.config)
        first = recipe_of(decoder, decoder.layers[0], kinds[0], dtype)  # before long work
        self._program = Program(dtype, list(_widths(first, lm_head.in_features).values()))
        # the largest first, while there is most room
        self._lm_head = CompiledLinear.of(lm_head)
        self.nbytes = self._lm_head.nbytes
        """Bytes of the compiled layout of all weights."""
        done(lm_head)
        self._rotations = Rotations(decoder)
        for index, (layer, kind) in enumerate(zip(decoder.layers, kinds, strict=True)):
            recipe = recipe_of(decoder, layer, kind, dtype)
            rotation = self._rotations.index(kind, recipe.attention.rotation)
            self._program.add_layer(list(self._operations(recipe, index, rotation)))
            done(layer)

    def logits(self, hidden: Tensor) -> Tensor:
        """Output of layer L, [T, d] -> what lm_head gives, [T, V]."""
        return self._lm_head(self._decoder.norm(hidden))

    def run(self, hidden: Tensor, first: int, last: int, rows: Rows) -> Tensor:
        """Layers first+1..last on [T, d]; adds keys and values of T positions to the lease."""
        span, lease = rows.only, rows.only.lease
        size = _BLOCK_ROWS if span.parents is None else len(hidden)  # a tree is one block
        done = []
        for block, places in zip(hidden.split(size), rows.positions.split(size), strict=True):
            turns = self._rotations.at(block, places, lease.length(first))
            done.append(self._program.run(block, first, last, turns, lease, span.parents))
        return torch.cat(done) if len(done) > 1 else done[0]

    def _operations(self, recipe: Recipe, index: int, rotation: int) -> Iterator[Operation]:
        """One layer, from its input to its output."""
        program, at = self._program, _Buffer
        attention, mlp = recipe.attention, recipe.mlp

        def normed(place: int) -> Iterator[Operation]:
            if (norm := recipe.before[place]) is not None:
                yield program.norm(at.HIDDEN, at.NORMED, norm)

        def added(place: int, source: int, linear: nn.Linear) -> Iterator[Operation]:
            product, norm = self._product(linear), recipe.behind[place]
            if norm is None:
                yield program.product(source, at.HIDDEN, product, adds=recipe.times)
            else:
                yield program.product(source, at.BRANCH, product)
                yield program.norm(at.BRANCH, at.HIDDEN, norm, adds=recipe.times)

        def attend() -> Iterator[Operation]:
            source = at.HIDDEN if recipe.before[0] is None else at.NORMED
            projections = self._product(*attention.projections, order=attention.order)
            yield program.product(source, at.PROJECTED, projections)
            if attention.row_norms is not None:
                queries, keys = attention.row_norms
                yield program.norm(at.PROJECTED, at.PROJECTED, queries)
                yield program.norm(at.PROJECTED, at.PROJECTED, keys, at=len(queries.weight))
            yield program.attend(at.PROJECTED, at.SEEN, attention, layer=index, rotation=rotation)

        def activate() -> Iterator[Operation]:
            shared = recipe.parallel and recipe.before[0] is not None
            source = at.HIDDEN if recipe.before[1] is None and not shared else at.NORMED
            function = activation_of(mlp.activation)
            yield program.product(source, at.INTO, self._product(*mlp.into))
            yield program.activate(at.INTO, at.ACTIVATED, function, gated=mlp.gated)

        yield from normed(0)
        yield from attend()
        if not recipe.parallel:
            yield from added(0, at.SEEN, attention.output)
        yield from normed(1)
        yield from activate()
        if recipe.parallel:
            yield from added(0, at.SEEN, attention.output)
        yield from added(1, at.ACTIVATED, mlp.down)

    def _product(self, *parts: nn.Linear, order: Tensor | None = None) -> CompiledLinear:
        product = CompiledLinear.of(*parts, order=order)
        self.nbytes += product.nbytes
        return product


def _widths(recipe: Recipe, width: int) -> dict[_Buffer, int]:
    """Numbers of a row in each buffer."""
    attention, mlp, at = recipe.attention, recipe.mlp, _Buffer
    return {
        at.HIDDEN: width,
        at.NORMED: width,
        at.PROJECTED: len(attention.order),
        at.SEEN: attention.heads * attention.size,
        at.INTO: sum(part.out_features for part in mlp.into),
        at.ACTIVATED: mlp.down.in_features,
        at.BRANCH: 0 if recipe.behind == (None, None) else width,
    }
