"""Layers from compiled code alone: a segment is one call of it.

Every row is computed by itself, in an order that its position alone decides: its bits are the same
in a prompt, among drafts and alone. Needs a C++ compiler on Linux; without one the packed executor
runs the model.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any, cast

import torch
from torch import Tensor, nn

from selfspec.model.executors import Claims
from selfspec.model.executors.known import require_llama_like
from selfspec.model.executors.masks import FULL
from selfspec.model.executors.packed_cpu import PackedExecutor, PackedLayer
from selfspec.model.executors.program import Operation, Program
from selfspec.model.kv_store import Lease
from selfspec.model.products import CompiledLinear


class _Buffer(IntEnum):
    """What operations read and write."""

    HIDDEN = 0
    NORMED = 1
    PROJECTED = 2
    SEEN = 3
    GATE_UP = 4
    GATED = 5


class FusedExecutor(PackedExecutor):
    """The decoder from compiled products, norms, attention and gates."""

    claims = Claims(steady_from=1)
    linear = CompiledLinear

    def __init__(
        self, decoder: Any, lm_head: nn.Linear, done: Callable[[nn.Module], object] = lambda _: None
    ) -> None:
        """As the packed executor; raises ValueError, with the reason, also without a compiler."""
        require_llama_like(decoder, lm_head)
        _require_plain(decoder, lm_head.weight.dtype)
        attention, mlp = decoder.layers[0].self_attn, decoder.layers[0].mlp
        widths = {
            _Buffer.HIDDEN: lm_head.in_features,
            _Buffer.NORMED: lm_head.in_features,
            _Buffer.PROJECTED: attention.q_proj.out_features + 2 * attention.k_proj.out_features,
            _Buffer.SEEN: attention.q_proj.out_features,
            _Buffer.GATE_UP: 2 * mlp.down_proj.in_features,
            _Buffer.GATED: mlp.down_proj.in_features,
        }
        self._program = Program(
            lm_head.weight.dtype,
            head_size=attention.head_dim,
            group=attention.q_proj.out_features // attention.k_proj.out_features,
            widths=list(widths.values()),
        )
        super().__init__(decoder, lm_head, done)
        for index, layer in enumerate(self._layers):
            self._program.add_layer(self._operations(index, layer))

    def _operations(self, index: int, layer: PackedLayer) -> list[Operation]:
        """One layer, from its input to its output."""
        program, at = self._program, _Buffer
        products = (layer.projections, layer.output, layer.gate_up, layer.down)
        projections, output, gate_up, down = (cast(CompiledLinear, part) for part in products)
        return [
            program.norm(at.HIDDEN, at.NORMED, layer.input_norm.weight, layer.input_norm.eps),
            program.product(at.NORMED, at.PROJECTED, projections),
            program.attend(
                at.PROJECTED,
                at.SEEN,
                layer=index,
                kv_heads=self._kv_heads,
                scaling=self._scaling,
                window=0 if layer.kind == FULL else self._window,
                head_norms=layer.head_norm,
                eps=layer.head_eps,
            ),
            program.product(at.SEEN, at.HIDDEN, output, adds=True),
            program.norm(at.HIDDEN, at.NORMED, layer.mlp_norm.weight, layer.mlp_norm.eps),
            program.product(at.NORMED, at.GATE_UP, gate_up),
            program.gate(at.GATE_UP, at.GATED),
            program.product(at.GATED, at.HIDDEN, down, adds=True),
        ]

    def _run(self, rows: Tensor, first: int, last: int, positions: Tensor, kv: Lease) -> Tensor:
        """Layers first+1..last on one block, [T, d], behind the positions that `kv` holds."""
        rotations = self._rotation(rows, positions, kv.length(first))
        return self._program.run(rows, first, last, rotations, self._kv_heads, kv)


def _require_plain(decoder: Any, dtype: torch.dtype) -> None:
    """Raise ValueError unless the compiled code computes what lies between these layers' products.

    A look at the parts only; whether the numbers agree is for the conformance check.
    """
    activation = getattr(decoder.config, "hidden_act", None)
    if activation not in ("silu", "swish"):
        raise ValueError(f"the activation is {activation}, compiled code knows silu")
    for layer in decoder.layers:
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            if norm.weight.dtype != dtype:
                raise ValueError(f"weights are {dtype}, those of a norm are {norm.weight.dtype}")
