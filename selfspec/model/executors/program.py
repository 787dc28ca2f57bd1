"""Decoder layers as a list of operations that compiled code runs in one call: `kernels/layers.cpp`.

Comes in: what a layer is made of. Goes out: a Program, which runs any range of its layers on a
block of rows. Another family is another list. Called by the fused executor.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path

import torch
from torch import Tensor

from selfspec.model.compiled import compiled
from selfspec.model.kv_store import Lease
from selfspec.model.products import PANEL, CompiledLinear

_SOURCE = Path(__file__).parents[1] / "kernels" / "layers.cpp"

_Long, _Float, _Pointer = ctypes.c_long, ctypes.c_float, ctypes.c_void_p


class Kind(IntEnum):
    """`Kinds` of `layers.cpp`."""

    NORM = 0
    PRODUCT = 1
    ATTEND = 2
    GATE = 3


class Operation(ctypes.Structure):
    """The struct of `layers.cpp` by this name, which says what the fields mean."""

    _fields_ = (
        ("kind", _Long),
        ("source", _Long),
        ("target", _Long),
        ("inputs", _Long),
        ("outputs", _Long),
        ("weight", _Pointer),
        ("bias", _Pointer),
        ("head_norms", _Pointer),
        ("adds", _Long),
        ("layer", _Long),
        ("kv_heads", _Long),
        ("window", _Long),
        ("eps", _Float),
        ("scaling", _Float),
    )


class _Pass(ctypes.Structure):
    """The struct `Pass` of `layers.cpp`."""

    _fields_ = (
        ("rows", _Long),
        ("held", _Long),
        ("buffers", ctypes.POINTER(_Pointer)),
        ("keys", ctypes.POINTER(_Pointer)),
        ("values", ctypes.POINTER(_Pointer)),
        ("slots", ctypes.POINTER(_Long)),
        ("rotations", _Pointer),
        ("room", _Pointer),
    )


class Program:
    """The operations of all layers, and the buffers that they read and write.

    Operations raise ValueError unless they fit their buffers: compiled code does not look.
    """

    def __init__(
        self, dtype: torch.dtype, head_size: int, group: int, widths: Sequence[int]
    ) -> None:
        """`widths`: numbers of a row in each buffer; the first is what comes in and goes out.

        Raises ValueError, with the reason, if nothing can be compiled.
        """
        constants = {"BFLOAT16": int(dtype == torch.bfloat16)}
        library = compiled(_SOURCE, HEAD_SIZE=head_size, GROUP=group, **constants)
        self._run = library.run
        self._run.argtypes = _Pointer, _Long, _Pointer
        self._run.restype = None
        self._dtype, self._widths = dtype, tuple(widths)
        self._sizes = head_size, group
        self._value_size = -(-head_size // PANEL) * PANEL
        self._table: ctypes.Array[Operation] = (Operation * 0)()
        self._per_layer = 0
        self._kept: list[Tensor] = []  # what the operations point to

    def add_layer(self, operations: Sequence[Operation]) -> None:
        """One more layer; all must have as many operations."""
        every = [*self._table, *operations]
        self._table = (Operation * len(every))(*every)
        self._per_layer = len(operations)

    def norm(self, source: int, target: int, weight: Tensor, eps: float) -> Operation:
        """RMSNorm with `weight` [d]."""
        self._need(source, len(weight))
        self._need(target, len(weight))
        return Operation(
            kind=Kind.NORM,
            source=source,
            target=target,
            inputs=len(weight),
            weight=self._pointer(weight),
            eps=eps,
        )

    def product(
        self, source: int, target: int, linear: CompiledLinear, *, adds: bool = False
    ) -> Operation:
        """A linear layer; `adds` to what the target holds."""
        self._need(source, linear.in_features)
        self._need(target, linear.out_features)
        return Operation(
            kind=Kind.PRODUCT,
            source=source,
            target=target,
            inputs=linear.in_features,
            outputs=linear.out_features,
            weight=self._pointer(linear.panels),
            bias=None if linear.bias is None else self._pointer(linear.bias),
            adds=adds,
        )

    def attend(
        self,
        source: int,
        target: int,
        *,
        layer: int,
        kv_heads: int,
        scaling: float,
        window: int = 0,
        head_norms: Tensor | None = None,
        eps: float = 0.0,
    ) -> Operation:
        """Causal attention of layer `layer`: queries, keys and values in, one row of heads out."""
        size, group = self._sizes
        self._need(source, (group + 2) * kv_heads * size)
        self._need(target, group * kv_heads * size)
        return Operation(
            kind=Kind.ATTEND,
            source=source,
            target=target,
            layer=layer,
            kv_heads=kv_heads,
            scaling=scaling,
            window=window,
            head_norms=None if head_norms is None else self._pointer(head_norms),
            eps=eps,
        )

    def gate(self, source: int, target: int) -> Operation:
        """The first half through silu, times the second."""
        self._need(source, 2 * self._widths[target])
        return Operation(kind=Kind.GATE, source=source, target=target, outputs=self._widths[target])

    def run(
        self, rows: Tensor, first: int, last: int, rotations: Tensor, kv_heads: int, lease: Lease
    ) -> Tensor:
        """Layers first+1..last on [T, d]; adds keys and values of T positions to the lease.

        `rotations` [T, 1, size / 2]: complex numbers. Raises ValueError for rows of another kind.
        """
        if rows.dtype != self._dtype or rows.shape[-1] != self._widths[0]:  # else memory is misread
            raise ValueError(f"rows are {rows.dtype} {tuple(rows.shape)}, not of these layers")
        count, held = len(rows), lease.length(first)
        no_keys = rows.new_empty(1, kv_heads, 0, self._value_size)
        held_here = list(lease.room(count, first, last, no_keys))
        hidden = rows.clone(memory_format=torch.contiguous_format)
        buffers = [hidden, *(rows.new_empty(count, width) for width in self._widths[1:])]
        room = torch.empty(count, max(self._widths) + 1, dtype=torch.float32)
        before = [None] * first  # layers that do not run
        asked = _Pass(
            rows=count,
            held=held,
            buffers=_pointers([buffer.data_ptr() for buffer in buffers]),
            keys=_pointers([*before, *(keys.data_ptr() for keys, _ in held_here)]),
            values=_pointers([*before, *(values.data_ptr() for _, values in held_here)]),
            slots=(_Long * last)(*(0 for _ in before), *(keys.shape[2] for keys, _ in held_here)),
            rotations=rotations.data_ptr(),
            room=room.data_ptr(),
        )
        size = ctypes.sizeof(Operation) * self._per_layer
        start = ctypes.addressof(self._table) + first * size
        self._run(start, (last - first) * self._per_layer, ctypes.addressof(asked))
        lease.extend(count, first, last)
        return hidden

    def _need(self, buffer: int, width: int) -> None:
        """Raise ValueError for an operation that would read or write beside its buffer."""
        if width != self._widths[buffer]:
            raise ValueError(f"layers differ in width: {width} and {self._widths[buffer]}")

    def _pointer(self, tensor: Tensor) -> int:
        self._kept.append(tensor)
        return tensor.data_ptr()


def _pointers(addresses: Sequence[int | None]) -> ctypes.Array[ctypes.c_void_p]:
    return (_Pointer * len(addresses))(*addresses)
