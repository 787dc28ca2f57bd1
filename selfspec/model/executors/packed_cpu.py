"""Runs Llama-like layers on a CPU from packed weights: faster, and the same bits for any row count.

Two to eight rows then cost little more than one (`products.py`). Where that cannot be had, or
a layer is not of this shape, the generic executor runs the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from selfspec.model.executors import Claims
from selfspec.model.executors.asked import Norm
from selfspec.model.executors.known import require_known
from selfspec.model.executors.masks import FULL, attention_types
from selfspec.model.executors.recipe import Mlp, Recipe, recipe_of
from selfspec.model.executors.rotations import Rotations
from selfspec.model.executors.slots import SteadySlots
from selfspec.model.kv_store import Lease
from selfspec.model.parts import DecoderParts
from selfspec.model.products import PackedLinear, Product
from selfspec.model.rows import Rows

_ATTENTION_ROWS = {16: 12, 0: 25}
"""Query rows of one product at least, by head size from: below them float32 `bmm` rounds a row
otherwise than above (MKL, 1 and 2 threads, head sizes 8 to 128)."""

_LEAST_ROWS = {torch.float32: 2, torch.bfloat16: 4}
"""Shorter passes are padded: oneDNN gives a row the same bits from two rows on. A product of
16384×3072 takes 3.0, 3.4, 2.3, 2.3 ms for 1 to 4 rows in bfloat16 (AVX-512), but 9.9, 10.5 and 15.7
for 1, 2 and 4 in float32 (AVX2)."""

_PROBED_ROWS = (1, 4, 8)
"""Rows of a pass for which slot counts are measured."""

_QUERY_ROWS = 64
"""Rows whose attention scores exist at a time."""

_BLOCK_ROWS = 1024
"""Rows that run through the layers together, with their masks: long prompts need memory in
proportion to their length."""


class RowNorm(NamedTuple):
    """An RMSNorm as one operation of torch, instead of the six of a module."""

    weight: Tensor
    eps: float

    def __call__(self, rows: Tensor) -> Tensor:
        """[T, d] -> [T, d]."""
        return nn.functional.rms_norm(rows, self.weight.shape, self.weight, self.eps)

    @classmethod
    def of(cls, norm: Norm, dtype: torch.dtype) -> RowNorm:
        """For rows of `dtype`."""
        return cls(norm.weight.to(dtype), norm.eps)


@dataclass(frozen=True)
class PackedLayer:
    """What one decoder layer computes with."""

    window: int | None
    input_norm: RowNorm
    projections: Product  # queries, keys, values
    head_norm: Norm | None
    output: Product
    mlp_norm: RowNorm
    gate_up: Product
    activation: Any
    down: Product


class PackedExecutor:
    """Layers like Llama's from packed weights; keys, values and attention in float32."""

    def __init__(
        self,
        decoder: DecoderParts,
        lm_head: nn.Linear,
        done: Callable[[nn.Module], object] = lambda _: None,
    ) -> None:
        """Copies the weights, and calls `done` with each part that has its copy.

        Raises ValueError, with the reason, for layers of another shape.
        """
        require_known(decoder, lm_head)
        dtype, kinds = lm_head.weight.dtype, attention_types(decoder.config)
        self.claims = Claims(steady_from=_LEAST_ROWS[dtype], steady_to=16)
        attention = recipe_of(decoder, decoder.layers[0], kinds[0], dtype).attention
        self._decoder = decoder
        self._size, self._scaling = attention.size, attention.scaling
        self._kv_heads, self._heads = attention.kv_heads, attention.heads
        self._attention_rows = _ATTENTION_ROWS[16 if self._size >= 16 else 0]
        group = self._heads // self._kv_heads
        query_rows = sorted({max(self._attention_rows, group * rows) for rows in _PROBED_ROWS})
        self._slots = SteadySlots(self._kv_heads, self._size, query_rows)
        # the largest first, while there is most room
        self._lm_head: Product = PackedLinear.of(lm_head)
        done(lm_head)
        self._rotations = Rotations(decoder)
        self._layers: list[PackedLayer] = []
        for layer, kind in zip(decoder.layers, kinds, strict=True):
            recipe = recipe_of(decoder, layer, kind, dtype)
            self._require_llama_like(recipe)
            self._rotations.index(FULL, recipe.attention.rotation)
            self._layers.append(_packed(recipe, dtype))
            done(layer)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the packed copy; norms and biases, a thousandth of it, are left out."""
        parts = [
            (layer.projections, layer.output, layer.gate_up, layer.down) for layer in self._layers
        ]
        return self._lm_head.nbytes + sum(part.nbytes for four in parts for part in four)

    def logits(self, hidden: Tensor) -> Tensor:
        """Output of layer L, [T, d] -> what lm_head gives, [T, V]."""
        return self._lm_head(self._decoder.norm(hidden))

    def run(self, hidden: Tensor, first: int, last: int, rows: Rows) -> Tensor:
        """Layers first+1..last on [T, d]; adds keys and values of T positions to the lease."""
        lease = rows.only.lease
        blocks = zip(hidden.split(_BLOCK_ROWS), rows.positions.split(_BLOCK_ROWS), strict=True)
        done = [self._run(block, first, last, places, lease) for block, places in blocks]
        return torch.cat(done) if len(done) > 1 else done[0]

    def _run(self, rows: Tensor, first: int, last: int, positions: Tensor, kv: Lease) -> Tensor:
        """Layers first+1..last on one block, [T, d]."""
        start = kv.length(first)
        held = kv.get_mask_sizes(len(rows), first)[0]
        (turns,) = self._rotations.at(rows, positions, start)
        rotation = turns[:, None]
        end = kv.slots or self._slots.at_least(held)
        windows = {layer.window for layer in self._layers[first:last]}
        places = torch.arange(start, start + len(rows))
        masks = {window: self._masks(window, places, held, end) for window in windows}
        for index in range(first, last):
            layer = self._layers[index]
            attended = self._attend(layer, index, rows, rotation, masks[layer.window], kv)
            rows = rows + layer.output(attended)
            gate, up = layer.gate_up(layer.mlp_norm(rows)).chunk(2, dim=-1)
            rows = rows + layer.down(layer.activation(gate).mul_(up))
        return rows

    def _attend(
        self,
        layer: PackedLayer,
        index: int,
        rows: Tensor,
        rotation: Tensor,
        masks: Sequence[Tensor],
        kv: Lease,
    ) -> Tensor:
        """Attention of layer `index`, before its output product: [T, d] -> [T, heads * size].

        `masks`: one for each _QUERY_ROWS rows, as wide as what they look at.
        """
        projected = layer.projections(layer.input_norm(rows)).view(len(rows), -1, self._size)
        parts = projected.float()  # [T, heads + 2 kv heads, size]: queries, keys, values
        queries, keys, values = parts.split([self._heads, self._kv_heads, self._kv_heads], dim=1)
        turned = parts[:, : self._heads + self._kv_heads]
        if layer.head_norm is not None:
            normed = nn.functional.rms_norm(turned, (self._size,), eps=layer.head_norm.eps)
            torch.mul(normed, layer.head_norm.weight, out=turned)
        torch.view_as_complex(turned.view(*turned.shape[:2], -1, 2)).mul_(rotation)
        seen = masks[-1].shape[1]
        keys, values = kv.update(
            keys.transpose(0, 1)[None], values.transpose(0, 1)[None], index, seen=seen
        )
        queries = queries.view(len(rows), self._kv_heads, -1, self._size)
        chunks = [
            self._weigh(part, keys[0, :, : mask.shape[1]], values[0, :, : mask.shape[1]], mask)
            for part, mask in zip(queries.split(_QUERY_ROWS), masks, strict=True)
        ]
        attended = torch.cat(chunks) if len(chunks) > 1 else chunks[0]
        return attended.to(rows.dtype, memory_format=torch.contiguous_format).flatten(1)

    def _weigh(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """[T, kv heads, group, size] attends to [kv heads, S, size] -> the queries' shape.

        The query heads that share a key head are rows of one product, as they are of `mask`.
        """
        count, kv_heads, group, size = queries.shape
        grouped = queries.new_zeros(kv_heads, len(mask), size)
        rows = (slice(None), slice(group * count))
        grouped[rows].view(kv_heads, group, count, size).copy_(queries.permute(1, 2, 0, 3))
        scores = torch.baddbmm(mask[None], grouped, keys.transpose(1, 2), alpha=self._scaling)
        weighed = torch.bmm(scores.softmax(-1), values)
        return weighed[rows].view(kv_heads, group, count, size).permute(2, 0, 1, 3)

    def _masks(self, window: int | None, places: Tensor, held: int, end: int) -> list[Tensor]:
        """One for each _QUERY_ROWS rows; all but the last leave out what comes behind them.

        `places` [T]: the slots that the rows' own keys go to.
        """
        masks, ahead = [], len(places)
        for part in places.split(_QUERY_ROWS):
            ahead -= len(part)
            seen = self._slots.at_least(held - ahead) if ahead else end
            masks.append(self._mask(window, part, seen))
        return masks

    def _mask(self, window: int | None, places: Tensor, end: int) -> Tensor:
        """[group * T, S]: 0 where a query may look, -inf where not; or more rows, of zeros."""
        behind = places[:, None] - torch.arange(end)[None]
        hidden = behind < 0
        if window is not None:
            hidden |= behind >= window
        group = self._heads // self._kv_heads
        queries = group * len(places)
        mask = torch.zeros(max(queries, self._attention_rows), end)
        mask[:queries].unflatten(0, (group, -1)).masked_fill_(hidden, -torch.inf)
        return mask

    def _require_llama_like(self, recipe: Recipe) -> None:
        """Raise ValueError for a layer that needs more than is here, or other heads."""
        attention, norms = recipe.attention, recipe.attention.head_norms
        shape = attention.heads, attention.kv_heads, attention.size, attention.scaling
        mine = self._heads, self._kv_heads, self._size, self._scaling
        plain = [*recipe.before, *(() if norms is None else (norms,))]
        for fits, what in (
            (None not in recipe.before and recipe.behind == (None, None), "places of norms"),
            (all(one is None or one.is_plain_rms for one in plain), "norms"),
            (attention.row_norms is None and not attention.norms_last, "norms of queries and keys"),
            (attention.rotation is not None, "positions"),
            (attention.rotation is None or attention.rotation.size == self._size, "rotations"),
            (attention.softcap is None, "a cap of scores"),
            (isinstance(recipe.mlp, Mlp) and recipe.mlp.gated, "an mlp"),
            (not recipe.parallel and recipe.times == 1, "residuals"),
            (shape == mine, "heads that differ by layer"),
        ):
            if not fits:
                raise ValueError(f"layers have {what} of another kind than Llama's")


def _packed(recipe: Recipe, dtype: torch.dtype) -> PackedLayer:
    attention, mlp = recipe.attention, recipe.mlp
    assert isinstance(mlp, Mlp)  # noqa: S101  # as was required
    input_norm, mlp_norm = (RowNorm.of(norm, dtype) for norm in recipe.before if norm is not None)
    return PackedLayer(
        window=attention.window,
        input_norm=input_norm,
        projections=PackedLinear.of(*attention.projections, order=attention.order),
        head_norm=attention.head_norms,
        output=PackedLinear.of(attention.output),
        mlp_norm=mlp_norm,
        gate_up=PackedLinear.of(*mlp.into),
        activation=mlp.activation,
        down=PackedLinear.of(mlp.down),
    )
