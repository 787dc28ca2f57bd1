"""Runs Llama-like layers on a CPU from packed weights: faster, and the same bits for any row count.

oneDNN reorders each weight once, for a few rows at a time; then two to eight rows cost little more
than one, and a row's result does not depend on how many others run with it (the plain kernels
choose another one for one row than for several). The operators are private: what torch's own
compiler emits for frozen weights. Where they are missing, or a layer is not of this shape, the
generic executor runs the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from selfspec.executors.generic import FULL, attention_types, hooked
from selfspec.executors.slots import SteadySlots
from selfspec.kv_cache import KVCache

_PACK_ROWS = 8
"""Row count that weights are laid out for; any number runs."""

_ATTENTION_ROWS = {16: 12, 0: 25}
"""Query rows of one product at least, by head size from: below them float32 `bmm` rounds a row
otherwise than above (MKL, 1 and 2 threads, head sizes 8 to 128)."""

_PROBED_ROWS = (1, 4, 8)
"""Rows of a pass for which slot counts are measured."""

_QUERY_ROWS = 128
"""Rows whose attention scores exist at a time: long prompts need memory in proportion to length."""

_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}


class PackedLinear:
    """One or several linear layers side by side, weights reordered by oneDNN."""

    def __init__(self, *parts: nn.Linear, order: Tensor | None = None) -> None:
        """`order` [out] rearranges the rows of the joined weight."""
        weight = torch.cat([part.weight.detach() for part in parts])
        biases = [
            part.weight.new_zeros(part.out_features) if part.bias is None else part.bias.detach()
            for part in parts
        ]
        self._bias = None if all(part.bias is None for part in parts) else torch.cat(biases)
        if order is not None:
            weight = weight[order]
            self._bias = None if self._bias is None else self._bias[order]
        self.nbytes = weight.nbytes
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_ROWS)

    def __call__(self, rows: Tensor) -> Tensor:
        """[T, in] -> [T, out]."""
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self._weight, self._bias, "none", [], ""
        )
        return product


@dataclass(frozen=True)
class PackedLayer:
    """What one decoder layer computes with."""

    kind: str
    input_norm: Any
    projections: PackedLinear  # queries, keys, values
    head_norm: Tensor | None  # [heads + kv heads, head_dim]: weights of q_norm and k_norm
    head_eps: float
    output: PackedLinear
    mlp_norm: Any
    gate_up: PackedLinear
    activation: Any
    down: PackedLinear


class PackedExecutor:
    """The decoder from packed weights; keys, values and attention in float32."""

    min_rows = 2
    """From two rows on, results do not depend on the number of rows. The probe tests it."""

    def __init__(
        self, decoder: Any, lm_head: nn.Linear, done: Callable[[nn.Module], object] = lambda _: None
    ) -> None:
        """Copies the weights, and calls `done` with each part that has its copy.

        Raises ValueError, with the reason, for layers of another shape.
        """
        _require_llama_like(decoder, lm_head)
        attention = decoder.layers[0].self_attn
        self._decoder = decoder
        self._size = int(attention.head_dim)
        self._kv_heads = attention.k_proj.out_features // self._size
        self._heads = attention.q_proj.out_features // self._size
        self._scaling = float(attention.scaling)
        self._attention_rows = _ATTENTION_ROWS[16 if self._size >= 16 else 0]
        group = self._heads // self._kv_heads
        query_rows = sorted({max(self._attention_rows, group * rows) for rows in _PROBED_ROWS})
        self._slots = SteadySlots(self._kv_heads, self._size, query_rows)
        self._window = int(getattr(decoder.config, "sliding_window", None) or 0)
        # rotary pairs (j, j + size / 2) become neighbours: a rotation is then one complex product
        self._pairs = torch.arange(self._size).view(2, -1).T.flatten()
        self._lm_head = PackedLinear(lm_head)  # the largest first, while there is most room
        done(lm_head)
        self._layers: list[PackedLayer] = []
        for layer, kind in zip(decoder.layers, attention_types(decoder.config), strict=True):
            self._layers.append(self._pack(layer, kind))
            done(layer)
        self._rotations = torch.empty(0)  # [positions, size / 2], grows with the text

    @property
    def nbytes(self) -> int:
        """Bytes of the packed copy."""
        parts = [
            (layer.projections, layer.output, layer.gate_up, layer.down) for layer in self._layers
        ]
        return self._lm_head.nbytes + sum(part.nbytes for four in parts for part in four)

    def logits(self, hidden: Tensor) -> Tensor:
        """Output of layer L, [1, T, d] -> what lm_head gives, [1, T, V]."""
        return self._lm_head(self._decoder.norm(hidden)[0])[None]

    def run(self, hidden: Tensor, first: int, last: int, positions: Tensor, kv: KVCache) -> Tensor:
        """Layers first+1..last on [1, T, d] at `positions` [1, T]; appends T positions to `kv`."""
        rows = hidden[0]
        held = kv.get_mask_sizes(len(rows), first)[0]
        rotation = self._rotation(hidden, positions, held)
        end = kv.slots or self._slots.at_least(held)
        kinds = {layer.kind for layer in self._layers[first:last]}
        masks = {kind: self._masks(kind, positions[0], held, end) for kind in kinds}
        for index in range(first, last):
            layer = self._layers[index]
            attended = self._attend(layer, index, rows, rotation, masks[layer.kind], kv)
            rows = rows + layer.output(attended)
            gate, up = layer.gate_up(layer.mlp_norm(rows)).chunk(2, dim=-1)
            rows = rows + layer.down(layer.activation(gate) * up)
        return rows[None]

    def _attend(
        self,
        layer: PackedLayer,
        index: int,
        rows: Tensor,
        rotation: Tensor,
        masks: Sequence[Tensor],
        kv: KVCache,
    ) -> Tensor:
        """Attention of layer `index`, before its output product: [T, d] -> [T, heads * size].

        `masks`: one for each _QUERY_ROWS rows, as wide as what they look at.
        """
        count, rotated = len(rows), self._heads + self._kv_heads
        projected = layer.projections(layer.input_norm(rows)).view(count, -1, self._size)
        turned = projected[:, :rotated].float()
        if layer.head_norm is not None:
            turned = nn.functional.rms_norm(turned, (self._size,), eps=layer.head_eps)
            turned = turned * layer.head_norm
        pairs = torch.view_as_complex(turned.view(count, rotated, -1, 2))
        turned = torch.view_as_real(pairs * rotation).view(count, rotated, self._size)
        keys, values = kv.update(
            turned[:, self._heads :].transpose(0, 1)[None],
            projected[:, rotated:].float().transpose(0, 1)[None],
            index,
            seen=masks[-1].shape[1],
        )
        queries = turned[:, : self._heads].view(count, self._kv_heads, -1, self._size)
        chunks = [
            self._weigh(part, keys[0, :, : mask.shape[1]], values[0, :, : mask.shape[1]], mask)
            for part, mask in zip(queries.split(_QUERY_ROWS), masks, strict=True)
        ]
        return torch.cat(chunks).to(rows.dtype) if len(chunks) > 1 else chunks[0].to(rows.dtype)

    def _weigh(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """[T, kv heads, group, size] attends to [kv heads, S, size] -> [T, heads * size].

        The query heads that share a key head are rows of one product.
        """
        count, kv_heads, group, size = queries.shape
        grouped = queries.permute(1, 2, 0, 3).reshape(kv_heads, group * count, size)
        mask = mask.repeat(group, 1)
        if (missing := self._attention_rows - group * count) > 0:
            grouped = nn.functional.pad(grouped, (0, 0, 0, missing))
            mask = nn.functional.pad(mask, (0, 0, 0, missing))
        scores = torch.baddbmm(mask[None], grouped, keys.transpose(1, 2), alpha=self._scaling)
        weighed = torch.bmm(scores.softmax(-1), values)[:, : group * count]
        return weighed.reshape(kv_heads, group, count, size).permute(2, 0, 1, 3).reshape(count, -1)

    def _rotation(self, hidden: Tensor, positions: Tensor, end: int) -> Tensor:
        """A complex number per position and pair, [T, 1, size / 2], rounded as the model does."""
        if len(self._rotations) < end:
            every = torch.arange(2 * end)[None]
            cos, sin = self._decoder.rotary_emb(hidden, position_ids=every)
            half = self._size // 2
            self._rotations = torch.complex(cos[0, :, :half].float(), sin[0, :, :half].float())
        return self._rotations[positions[0], None]

    def _masks(self, kind: str, positions: Tensor, held: int, end: int) -> list[Tensor]:
        """One for each _QUERY_ROWS rows; all but the last leave out what comes behind them."""
        masks, ahead = [], len(positions)
        for part in positions.split(_QUERY_ROWS):
            ahead -= len(part)
            seen = self._slots.at_least(held - ahead) if ahead else end
            masks.append(self._mask(kind, part, seen))
        return masks

    def _mask(self, kind: str, positions: Tensor, end: int) -> Tensor:
        """[T, S]: 0 where a row may look, -inf where not."""
        behind = positions[:, None] - torch.arange(end)[None]
        hidden = behind < 0
        if kind != FULL:
            hidden |= behind >= self._window
        return torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)

    def _pack(self, layer: Any, kind: str) -> PackedLayer:
        attention, mlp = layer.self_attn, layer.mlp
        rotated = self._heads + self._kv_heads
        heads = torch.arange(rotated * self._size).view(rotated, self._size)[:, self._pairs]
        rest = torch.arange(rotated * self._size, (rotated + self._kv_heads) * self._size)
        order = torch.cat([heads.flatten(), rest])
        return PackedLayer(
            kind=kind,
            input_norm=_fast_norm(layer.input_layernorm),
            projections=PackedLinear(
                attention.q_proj, attention.k_proj, attention.v_proj, order=order
            ),
            head_norm=self._head_norm(attention),
            head_eps=attention.q_norm.variance_epsilon if hasattr(attention, "q_norm") else 0.0,
            output=PackedLinear(attention.o_proj),
            mlp_norm=_fast_norm(layer.post_attention_layernorm),
            gate_up=PackedLinear(mlp.gate_proj, mlp.up_proj),
            activation=mlp.act_fn,
            down=PackedLinear(mlp.down_proj),
        )

    def _head_norm(self, attention: Any) -> Tensor | None:
        if not hasattr(attention, "q_norm"):
            return None
        weights = [
            attention.q_norm.weight.expand(self._heads, -1),
            attention.k_norm.weight.expand(self._kv_heads, -1),
        ]
        return torch.cat(weights).detach().float()[:, self._pairs]


def _fast_norm(norm: Any) -> Any:
    """The fused RMSNorm of torch with this norm's weight, instead of six operations."""
    weight, eps = norm.weight.detach(), norm.variance_epsilon
    shape = tuple(weight.shape)
    return lambda rows: nn.functional.rms_norm(rows, shape, weight, eps)


def _require_llama_like(decoder: Any, lm_head: nn.Module) -> None:
    """Raise ValueError unless this file computes what these layers compute.

    A look at the parts only; whether the numbers agree is for the conformance check.
    """
    weight = lm_head.weight
    _need(weight.device.type == "cpu", f"weights are on {weight.device}")
    _need(weight.dtype in (torch.float32, torch.bfloat16), f"weights are {weight.dtype}")
    _need(hasattr(torch.ops.mkldnn, "_linear_pointwise"), "this torch has no packed products")
    _need(type(lm_head) is nn.Linear, "lm_head is no plain linear layer")
    for layer in decoder.layers:
        children = {name for name, _ in layer.named_children()}
        _need(children == _LAYER, f"layers hold {sorted(children)}")
        attention = {name for name, _ in layer.self_attn.named_children()}
        _need(attention - _HEAD_NORMS == _ATTENTION, f"attention holds {sorted(attention)}")
        mlp = {name for name, _ in layer.mlp.named_children()}
        _need(mlp == _MLP, f"mlp holds {sorted(mlp)}")
        for name, part in layer.named_modules():
            _need(not hooked(part), f"{name or 'a layer'} has hooks")
            _need(not name.endswith("_proj") or type(part) is nn.Linear, f"{name} is not linear")
            _need(not name.endswith("norm") or hasattr(part, "variance_epsilon"), f"{name} differs")


def _need(condition: bool, otherwise: str) -> None:
    if not condition:
        raise ValueError(otherwise)
