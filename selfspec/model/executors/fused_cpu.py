"""Layers from compiled code alone: our own products, and `layers.cpp` between them.

A layer is then eight calls instead of some forty. Attention looks at just the slots that are
filled. Every row is computed by itself, in an order that its position alone decides: its bits are
the same in a prompt, among drafts and alone. Needs a C++ compiler on Linux; without one the packed
executor runs the model.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from selfspec.model.compiled import compiled
from selfspec.model.executors import Claims
from selfspec.model.executors.known import require_llama_like
from selfspec.model.executors.masks import FULL
from selfspec.model.executors.packed_cpu import PackedExecutor, RowNorm
from selfspec.model.kv_store import Lease
from selfspec.model.products import CompiledLinear

_SOURCE = Path(__file__).parents[1] / "kernels" / "layers.cpp"

_PANEL = 16
"""What the size of a head is filled up to a multiple of, as in `panels.hpp`."""

_Long, _Float, _Pointer = ctypes.c_long, ctypes.c_float, ctypes.c_void_p


class _Shape(ctypes.Structure):
    """The struct of `layers.cpp` by this name."""

    _fields_ = (
        ("rows", _Long),
        ("kv_heads", _Long),
        ("held", _Long),
        ("window", _Long),
        ("slots", _Long),
        ("scaling", _Float),
        ("eps", _Float),
    )


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
        attention = decoder.layers[0].self_attn
        self._kernels = _Kernels(
            lm_head.weight.dtype,
            head_size=attention.head_dim,
            group=attention.q_proj.out_features // attention.k_proj.out_features,
        )
        super().__init__(decoder, lm_head, done)
        self._width = int(decoder.layers[0].mlp.down_proj.in_features)

    def _run(self, rows: Tensor, first: int, last: int, positions: Tensor, kv: Lease) -> Tensor:
        """Layers first+1..last on one block, [T, d], behind the positions that `kv` holds."""
        count, held = len(rows), kv.length(first)
        rotations = self._rotation(rows, positions, held)
        no_keys = rows.new_empty(1, self._kv_heads, 0, -(-self._size // _PANEL) * _PANEL)
        shape = _Shape(count, self._kv_heads, held, scaling=self._scaling)
        # written to in each layer; what a sublayer adds joins `hidden` where the next norm reads it
        hidden, normed = rows.clone(memory_format=torch.contiguous_format), torch.empty_like(rows)
        seen = rows.new_empty(count, self._heads * self._size)
        gated = rows.new_empty(count, self._width)
        added = None
        layers = self._layers[first:last]
        for layer, (keys, values) in zip(layers, kv.room(count, first, last, no_keys), strict=True):
            self._kernels.norm(hidden, added, layer.input_norm, normed)
            shape.window = 0 if layer.kind == FULL else self._window
            shape.slots, shape.eps = keys.shape[2], layer.head_eps
            projected = layer.projections(normed)
            self._kernels.attend(shape, projected, layer.head_norm, rotations, keys, values, seen)
            self._kernels.norm(hidden, layer.output(seen), layer.mlp_norm, normed)
            self._kernels.gate(layer.gate_up(normed), gated)
            added = layer.down(gated)
        kv.extend(count, first, last)
        return hidden if added is None else hidden.add_(added)


class _Kernels:
    """The functions of `layers.cpp` on contiguous tensors; what they do stands there."""

    def __init__(self, dtype: torch.dtype, head_size: int, group: int) -> None:
        """Raises ValueError, with the reason, if they cannot be compiled."""
        constants = {"BFLOAT16": int(dtype == torch.bfloat16)}
        library = compiled(_SOURCE, HEAD_SIZE=head_size, GROUP=group, **constants)
        self._norm, self._gate, self._attend = library.norm, library.gate, library.attend
        self._norm.argtypes = _Long, _Long, *(_Pointer,) * 3, _Float, _Pointer
        self._gate.argtypes = _Long, _Long, _Pointer, _Pointer
        self._attend.argtypes = (_Pointer,) * 7
        self._norm.restype = self._gate.restype = self._attend.restype = None

    def norm(self, hidden: Tensor, added: Tensor | None, by: RowNorm, out: Tensor) -> None:
        """Add `added` to `hidden`, and write the norm of that to `out`. All [T, d]."""
        self._norm(
            *hidden.shape,
            hidden.data_ptr(),
            None if added is None else added.data_ptr(),
            by.weight.data_ptr(),
            by.eps,
            out.data_ptr(),
        )

    def gate(self, gate_up: Tensor, out: Tensor) -> None:
        """[T, 2 n] -> silu of the first half times the second, [T, n]."""
        self._gate(*out.shape, gate_up.data_ptr(), out.data_ptr())

    def attend(
        self,
        shape: _Shape,
        projected: Tensor,
        norms: Tensor | None,
        rotations: Tensor,
        keys: Tensor,
        values: Tensor,
        out: Tensor,
    ) -> None:
        """[T, heads + 2 kv heads, size] -> [T, heads, size]; adds to `keys` and `values`."""
        self._attend(
            ctypes.addressof(shape),
            projected.data_ptr(),
            None if norms is None else norms.data_ptr(),
            rotations.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            out.data_ptr(),
        )


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
