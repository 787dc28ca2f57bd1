"""Decoder layers as a list of operations that compiled code runs in one call: `kernels/layers.cpp`.

Comes in: what a layer is made of. Goes out: a Program, which runs any range of its layers on a
block of rows. Another family is another list. Structs are those of `layers.cpp`, field by field the
same. Called by the fused executor.
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Collection, Sequence
from enum import IntEnum
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from selfspec.model.compiled import TEAM, compiled
from selfspec.model.compiler import KERNELS
from selfspec.model.executors.recipe import Activation, Attention, Experts, Norm
from selfspec.model.kv_pages import Page, PageLayout
from selfspec.model.panels import PANEL, Stripes, in_panels
from selfspec.model.products import CompiledLinear
from selfspec.model.rows import Span

Long, Float, Pointer = ctypes.c_long, ctypes.c_float, ctypes.c_void_p


class Kind(IntEnum):
    """`Kinds` of `layers.cpp`."""

    NORM = 0
    PRODUCT = 1
    ATTEND = 2
    ACTIVATE = 3
    EXPERTS = 4
    ADD = 5


class Heads(ctypes.Structure):
    """The struct of `attention.hpp` by this name, which says what the fields mean."""

    _fields_ = (
        ("size", Long),
        ("group", Long),
        ("kv", Long),
        ("rotated", Long),
        ("norms", Pointer),
        ("centred", Long),
        ("norms_last", Long),
        ("window", Long),
        ("eps", Float),
        ("scaling", Float),
        ("softcap", Float),
    )


class ExpertsStruct(ctypes.Structure):
    """The struct `Experts` of `experts.hpp`, which says what the fields mean."""

    _fields_ = (
        ("count", Long),
        ("each", Long),
        ("normalised", Long),
        ("rounds", Long),
        ("inner", Long),
        ("activation", Long),
        ("into", Pointer),
        ("down", Pointer),
        ("into_size", Long),
        ("down_size", Long),
        ("gathered", Long),
        ("opened", Long),
        ("activated", Long),
        ("closed", Long),
    )


class Operation(ctypes.Structure):
    """The struct of `layers.cpp` by this name, which says what the fields mean."""

    _fields_ = (
        ("kind", Long),
        ("source", Long),
        ("target", Long),
        ("inputs", Long),
        ("outputs", Long),
        ("weight", Pointer),
        ("bias", Pointer),
        ("adds", Float),
        ("eps", Float),
        ("at", Long),
        ("row", Long),
        ("centred", Long),
        ("rounds", Long),
        ("activation", Long),
        ("gated", Long),
        ("keys", Long),
        ("rotation", Long),
        ("heads", Heads),
        ("logits", Long),
        ("experts", ExpertsStruct),
    )


class SpanStruct(ctypes.Structure):
    """The struct `Span` of `layers.cpp`."""

    _fields_ = (
        ("first", Long),
        ("rows", Long),
        ("held", Long),
        ("parents", ctypes.POINTER(Long)),
        ("pages", ctypes.POINTER(Pointer)),
    )
    memory: list[Page]
    """A lease may forget them while they are read."""


class Pass(ctypes.Structure):
    """The struct `Pass` of `layers.cpp`."""

    _fields_ = (
        ("rows", Long),
        ("buffers", ctypes.POINTER(Pointer)),
        ("rotations", ctypes.POINTER(Pointer)),
        ("spans", Long),
        ("span", ctypes.POINTER(SpanStruct)),
        ("room", Pointer),
    )


def pointers(addresses: Sequence[int]) -> ctypes.Array[ctypes.c_void_p]:
    """A table of addresses."""
    return (Pointer * len(addresses))(*addresses)


_SOURCE = KERNELS / "layers.cpp"

HIDDEN = 0
"""The buffer of what comes in and goes out."""

_SPARE = 32
"""Rows and inputs at most that `linear.hpp` fills up with zeros."""


class Program:
    """The operations of all layers, and the buffers that they read and write.

    Operations raise ValueError unless they fit their buffers: compiled code does not look.
    """

    def __init__(self, dtype: torch.dtype, width: int) -> None:
        """`width`: numbers of a row of HIDDEN.

        Raises ValueError, with the reason, if nothing can be compiled.
        """
        library = compiled(_SOURCE, BFLOAT16=int(dtype == torch.bfloat16))
        self._run = library.run
        self._run.argtypes = Pointer, Long, Pointer
        self._run.restype = None
        self._dtype, self._widths = dtype, [width]
        self._widest = 0  # inputs of a product
        self._named: dict[tuple[str, int], int] = {}
        self._table: ctypes.Array[Operation] = (Operation * 0)()
        self._starts = [0]  # of each layer among the operations, and their end
        self.layout = PageLayout(dtype, ())
        """Of pages with keys and values of all layers that attend."""
        self._kept: list[Tensor | Stripes] = []  # what the operations point to

    def add_layer(self, operations: Sequence[Operation]) -> None:
        """One more layer."""
        every = [*self._table, *operations]
        self._table = (Operation * len(every))(*every)
        self._starts.append(len(every))

    def buffer(self, name: str, width: int) -> int:
        """The number of a buffer for rows of `width`, one for all layers that call it so."""
        number = self._named.setdefault((name, width), len(self._widths))
        if number == len(self._widths):
            self._widths.append(width)
        return number

    def norm(
        self, source: int, target: int, norm: Norm, *, at: int = 0, adds: float = 0.0
    ) -> Operation:
        """From number `at` of a row on; with `adds`, that many times, to what the target holds."""
        width, row = len(norm.weight), self._widths[source]
        self._need(target, row)
        if at + width > row:
            raise ValueError(f"a norm of {width} numbers does not fit {row}")
        return Operation(
            kind=Kind.NORM,
            source=source,
            target=target,
            inputs=width,
            weight=self._pointer(norm.weight),
            bias=None if norm.bias is None else self._pointer(norm.bias),
            adds=adds,
            eps=norm.eps,
            at=at,
            row=row,
            centred=norm.centred,
            rounds=norm.rounds,
        )

    def product(
        self, source: int, target: int, linear: CompiledLinear, *, adds: float = 0.0
    ) -> Operation:
        """A linear layer; with `adds`, that many times, to what the target holds."""
        self._need(source, linear.in_features)
        self._need(target, linear.out_features)
        self._widest = max(self._widest, linear.in_features)
        return Operation(
            kind=Kind.PRODUCT,
            source=source,
            target=target,
            inputs=linear.in_features,
            outputs=linear.out_features,
            weight=self._stripes(linear),
            bias=None if linear.bias is None else self._pointer(linear.bias),
            adds=adds,
        )

    def attend(self, source: int, target: int, attention: Attention, *, rotation: int) -> Operation:
        """Causal attention of the next layer: queries, keys and values in, one row of heads out.

        `rotation`: which of those that `run` is given.
        """
        size, kv, norms = attention.size, attention.kv_heads, attention.head_norms
        self._need(source, (attention.heads + 2 * kv) * size)
        self._need(target, attention.heads * size)
        width = -(-size // PANEL) * PANEL
        self.layout = PageLayout(self._dtype, (*self.layout.heads, (kv, width)))
        heads = Heads(
            size=size,
            group=attention.heads // kv,
            kv=kv,
            rotated=0 if attention.rotation is None else attention.rotation.size,
            window=attention.window or 0,
            scaling=attention.scaling,
            softcap=attention.softcap or 0.0,
            norms_last=attention.norms_last,
        )
        if norms is not None:
            heads.norms, heads.eps = self._pointer(norms.weight), norms.eps
            heads.centred = norms.centred
        return Operation(
            kind=Kind.ATTEND,
            source=source,
            target=target,
            keys=self.layout.places[-2],
            rotation=rotation,
            heads=heads,
        )

    def activate(
        self, source: int, target: int, activation: Activation, *, gated: bool
    ) -> Operation:
        """A function of each number; `gated`: of the first half, times the second."""
        width = self._widths[target]
        self._need(source, 2 * width if gated else width)
        return Operation(
            kind=Kind.ACTIVATE,
            source=source,
            target=target,
            outputs=width,
            activation=activation,
            gated=gated,
        )

    def experts(
        self, source: int, logits: int, target: int, experts: Experts, activation: Activation
    ) -> Operation:
        """MLPs of which each row takes a few, as its `logits` say."""
        count, outputs, width = experts.into.shape
        inner = outputs // 2
        self._need(source, width)
        self._need(target, width)
        self._need(logits, count)
        if experts.down.shape != (count, width, inner) or not 0 < experts.shares.each <= count:
            raise ValueError(
                f"experts are {outputs} by {width} and {tuple(experts.down.shape[1:])}"
            )
        self._widest = max(self._widest, width, inner)
        into, down = in_panels(experts.into.detach()), in_panels(experts.down.detach())
        made = ExpertsStruct(
            count=count,
            each=experts.shares.each,
            normalised=experts.shares.normalised,
            rounds=experts.shares.rounds,
            inner=inner,
            activation=activation,
            into=self._pointer(into),
            down=self._pointer(down),
            into_size=into.shape[1],
            down_size=down.shape[1],
            gathered=self.buffer("gathered", width),
            opened=self.buffer("opened", outputs),
            activated=self.buffer("activated", inner),
            closed=self.buffer("closed", width),
        )
        return Operation(
            kind=Kind.EXPERTS,
            source=source,
            target=target,
            inputs=width,
            logits=logits,
            experts=made,
        )

    def add(self, source: int, target: int, times: float) -> Operation:
        """What a buffer holds, so many times, to another."""
        width = self._widths[target]
        self._need(source, width)
        return Operation(kind=Kind.ADD, source=source, target=target, inputs=width, adds=times)

    def only(self, kinds: Collection[Kind]) -> Program:
        """Its operations of some kinds alone: what comes out means nothing, the time may."""
        found = copy.copy(self)
        found._table, found._starts = (Operation * 0)(), [0]
        for first, last in pairwise(self._starts):
            found.add_layer([one for one in self._table[first:last] if one.kind in kinds])
        return found

    def run(
        self,
        rows: Tensor,
        first: int,
        last: int,
        rotations: Sequence[Tensor],
        spans: Sequence[Span],
    ) -> Tensor:
        """Layers first+1..last on [T, d]; adds keys and values of T positions to the leases.

        `rotations`: [T, pairs] complex numbers each. Raises ValueError for rows of another kind.
        """
        ends = list(accumulate(span.count for span in spans))
        leases = {id(span.lease) for span in spans}
        if ends[-1] != len(rows) or len(leases) < len(spans):  # else memory is misread
            raise ValueError(f"{len(rows)} rows are not those of {len(spans)} sequences")
        known = [
            self._span(span, end - span.count, first) for span, end in zip(spans, ends, strict=True)
        ]
        asked = Pass(
            rotations=pointers([turns.data_ptr() for turns in rotations]),
            spans=len(spans),
            span=(SpanStruct * len(spans))(*known),
        )
        found = self._call(asked, rows, first, last, HIDDEN)
        for span in spans:
            span.lease.extend(span.count, first, last)
        return found

    def _span(self, span: Span, start: int, first: int) -> SpanStruct:
        """Where keys and values are from layer first+1 on, with room for these rows."""
        lease, count, parents = span.lease, span.count, span.parents
        held = lease.length(first)
        if parents is not None:  # else it would not come back
            earlier = all(-1 - held <= parent < row for row, parent in enumerate(parents))
            if not earlier or len(parents) != count:
                raise ValueError(f"{list(parents)} are no parents of {count} rows")
        pages = lease.pages(count, first, self.layout)
        found = SpanStruct(
            first=start,
            rows=count,
            held=held,
            parents=None if parents is None else (Long * count)(*parents),
            pages=pointers([page.address for page in pages]),
        )
        found.memory = pages
        return found

    def transform(self, rows: Tensor, target: int) -> Tensor:
        """[T, d] through the first layer, which attends to nothing; what buffer `target` then is.

        Raises ValueError for rows of another kind.
        """
        return self._call(Pass(), rows, 0, 1, target)

    def _call(self, asked: Pass, rows: Tensor, first: int, last: int, target: int) -> Tensor:
        if rows.dtype != self._dtype or rows.shape[-1] != self._widths[0]:  # else memory is misread
            raise ValueError(f"rows are {rows.dtype} {tuple(rows.shape)}, not of these layers")
        count = len(rows)
        hidden = rows.clone(memory_format=torch.contiguous_format)
        buffers = [hidden, *(rows.new_empty(count, width) for width in self._widths[1:])]
        room = torch.empty(count + _SPARE, self._widest + _SPARE, dtype=torch.float32)
        asked.rows, asked.room = count, room.data_ptr()
        asked.buffers = pointers([buffer.data_ptr() for buffer in buffers])
        start, end = self._starts[first], self._starts[last]
        at = ctypes.addressof(self._table) + start * ctypes.sizeof(Operation)
        with TEAM.measured():
            self._run(at, end - start, ctypes.addressof(asked))
        return buffers[target]

    def _need(self, buffer: int, width: int) -> None:
        """Raise ValueError for an operation that would read or write beside its buffer."""
        if width != self._widths[buffer]:
            raise ValueError(f"layers differ in width: {width} and {self._widths[buffer]}")

    def _pointer(self, tensor: Tensor) -> int:
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _stripes(self, linear: CompiledLinear) -> int:
        self._kept.append(linear.stripes)
        return linear.stripes.address
