"""Decoder layers in compiled code: a segment is one call.

Every row is computed separately, in an order that depends only on its position. So its bits are the
same in a prompt, among drafts, on a branch of a tree and alone. Layers are lists of operations; the
structs of `kernels/layers.hpp` are repeated here field by field. Another family is another list.
"""

from __future__ import annotations

import copy
import ctypes
import functools
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from enum import IntEnum
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from selfspec.model.compiler import PANEL
from selfspec.model.generic import Claims, States
from selfspec.model.kv import Page, PageLayout, Rows, Span
from selfspec.model.parts import DecoderParts, attention_types, require_own_code
from selfspec.model.recipe import (
    Activation,
    Attention,
    Experts,
    Norm,
    Recipe,
    Rotation,
    activation_of,
    norm_of,
    plain_linear,
    recipe_of,
)
from selfspec.model.weights import TEAM, CompiledLinear, FilePages, in_panels, library

Long, Float, Pointer = ctypes.c_long, ctypes.c_float, ctypes.c_void_p


class Kind(IntEnum):
    """`Kinds` of `layers.hpp`."""

    NORM = 0
    LINEAR = 1
    ATTEND = 2
    ACTIVATE = 3
    EXPERTS = 4
    ADD = 5


class Heads(ctypes.Structure):
    """`Heads` of `attention.hpp`, which says what the fields mean."""

    _fields_ = (
        *((name, Long) for name in ("size", "group", "kv", "rotated")),
        ("norms", Pointer),
        *((name, Long) for name in ("centred", "norms_last", "window")),
        *((name, Float) for name in ("eps", "scaling", "softcap")),
    )


class ExpertsStruct(ctypes.Structure):
    """`Experts` of `layers.hpp`, which says what the fields mean."""

    _fields_ = (
        *((name, Long) for name in ("count", "each", "normalised", "rounds", "inner")),
        ("activation", Long),
        *((name, Pointer) for name in ("into", "down")),
        *((name, Long) for name in ("into_size", "down_size")),
        *((name, Long) for name in ("gathered", "opened", "activated", "closed")),
    )


class Operation(ctypes.Structure):
    """`Operation` of `layers.hpp`, which says what the fields mean."""

    _fields_ = (
        *((name, Long) for name in ("kind", "source", "target", "inputs", "outputs")),
        *((name, Pointer) for name in ("weight", "bias")),
        *((name, Float) for name in ("adds", "eps")),
        *((name, Long) for name in ("at", "row", "centred", "rounds", "activation", "gated")),
        *((name, Long) for name in ("keys", "rotation")),
        ("heads", Heads),
        ("logits", Long),
        ("experts", ExpertsStruct),
    )


class SpanStruct(ctypes.Structure):
    """`Span` of `attention.hpp`."""

    _fields_ = (
        *((name, Long) for name in ("first", "rows", "held")),
        ("parents", ctypes.POINTER(Long)),
        ("pages", ctypes.POINTER(Pointer)),
    )
    memory: list[Page]  # keeps the pages alive if the KV cache drops them during a call


class Pass(ctypes.Structure):
    """`Pass` of `layers.hpp`."""

    _fields_ = (
        ("rows", Long),
        ("buffers", ctypes.POINTER(Pointer)),
        ("rotations", ctypes.POINTER(Pointer)),
        ("spans", Long),
        ("span", ctypes.POINTER(SpanStruct)),
        ("room", Pointer),
    )


def pointers(addresses: Sequence[int]) -> ctypes.Array[ctypes.c_void_p]:
    return (Pointer * len(addresses))(*addresses)


HIDDEN = 0  # the buffer of the input and output rows
_LINE = 64  # bytes of a cache line
_SPARE = 32  # maximum rows and inputs that `linear.hpp` pads with zeros


class Program:
    """The operations of all layers, and the buffers that they read and write.

    Operations raise ValueError unless they fit their buffers: compiled code does not check.
    """

    def __init__(self, dtype: torch.dtype, width: int) -> None:
        """`width`: numbers of a row of HIDDEN. Raises ValueError if nothing can be compiled."""
        self._kernel = library(dtype).run
        self._dtype, self._widths = dtype, [width]
        self._widest = 0  # inputs of a linear layer
        self._numbers: dict[tuple[str, int], int] = {}
        self._table: ctypes.Array[Operation] = (Operation * 0)()
        self._starts = [0]  # index of each layer's first operation, and the end
        self.layout = PageLayout(dtype, ())  # keys and values of all layers that attend
        self._weights: list[Tensor | CompiledLinear] = []  # keeps the operations' weights alive
        self._copies: dict[int, int] = {}  # by layer: the buffer for a copy of its output

    def add_layer(self, operations: Sequence[Operation]) -> None:
        table = [*self._table, *operations]
        self._table = (Operation * len(table))(*table)
        self._starts.append(len(table))

    def buffer(self, name: str, width: int) -> int:
        """The number of a buffer for rows of `width`; layers share buffers by name and width."""
        number = self._numbers.setdefault((name, width), len(self._widths))
        if number == len(self._widths):
            self._widths.append(width)
        return number

    def norm(
        self, source: int, target: int, norm: Norm, *, at: int = 0, adds: float = 0.0
    ) -> Operation:
        """Norm a row's numbers from `at` on; `adds`: add so many times the result to the target."""
        width, row = len(norm.weight), self._widths[source]
        self._require_width(target, row)
        if at + width > row:
            raise ValueError(f"a norm of {width} numbers does not fit {row}")
        return Operation(
            *(Kind.NORM, source, target),
            inputs=width,
            weight=self._address(norm.weight.float()),
            bias=self._address(norm.bias),
            adds=adds,
            eps=norm.eps,
            at=at,
            row=row,
            centred=norm.centred,
            rounds=norm.rounds,
        )

    def linear(
        self, source: int, target: int, linear: CompiledLinear, *, adds: float = 0.0
    ) -> Operation:
        """A linear layer; `adds`: add so many times the result to the target."""
        self._require_width(source, linear.in_features)
        self._require_width(target, linear.out_features)
        self._widest = max(self._widest, linear.in_features)
        return Operation(
            *(Kind.LINEAR, source, target),
            inputs=linear.in_features,
            outputs=linear.out_features,
            weight=self._address(linear),
            bias=self._address(linear.bias),
            adds=adds,
        )

    def attend(self, source: int, target: int, attention: Attention, *, rotation: int) -> Operation:
        """Causal attention of the next layer; `rotation`: index among the rotations of `run`."""
        size, kv, norms = attention.size, attention.kv_heads, attention.head_norms
        self._require_width(source, (attention.heads + 2 * kv) * size)
        self._require_width(target, attention.heads * size)
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
            heads.norms, heads.eps = self._address(norms.weight), norms.eps
            heads.centred = norms.centred
        keys = self.layout.places[-2]
        return Operation(Kind.ATTEND, source, target, keys=keys, rotation=rotation, heads=heads)

    def activate(
        self, source: int, target: int, activation: Activation, *, gated: bool
    ) -> Operation:
        """A function of each number; `gated`: of the first half, multiplied by the second half."""
        width = self._widths[target]
        self._require_width(source, 2 * width if gated else width)
        return Operation(
            Kind.ACTIVATE, source, target, outputs=width, activation=activation, gated=gated
        )

    def experts(
        self, source: int, logits: int, target: int, experts: Experts, activation: Activation
    ) -> Operation:
        """MLPs of which each row takes a few, chosen by its `logits`."""
        count, outputs, width = experts.into.shape
        inner = outputs // 2
        self._require_width(source, width)
        self._require_width(target, width)
        self._require_width(logits, count)
        down_shape = tuple(experts.down.shape)
        if down_shape != (count, width, inner) or not 0 < experts.shares.each <= count:
            raise ValueError(f"experts are {outputs} by {width} and {down_shape[1:]}")
        self._widest = max(self._widest, width, inner)
        into, down = in_panels(experts.into.detach()), in_panels(experts.down.detach())
        struct = ExpertsStruct(
            count=count,
            each=experts.shares.each,
            normalised=experts.shares.normalised,
            rounds=experts.shares.rounds,
            inner=inner,
            activation=activation,
            into=self._address(into),
            down=self._address(down),
            into_size=into.shape[1],
            down_size=down.shape[1],
            gathered=self.buffer("gathered", width),
            opened=self.buffer("opened", outputs),
            activated=self.buffer("activated", inner),
            closed=self.buffer("closed", width),
        )
        return Operation(Kind.EXPERTS, source, target, inputs=width, logits=logits, experts=struct)

    def add(self, source: int, target: int, times: float) -> Operation:
        width = self._widths[target]
        self._require_width(source, width)
        return Operation(Kind.ADD, source, target, inputs=width, adds=times)

    def of_kinds(self, kinds: Collection[Kind]) -> Program:
        """A program with only some kinds of operations, to time them; its output is meaningless."""
        program = copy.copy(self)
        program._table, program._starts = (Operation * 0)(), [0]
        for first, last in pairwise(self._starts):
            program.add_layer([op for op in self._table[first:last] if op.kind in kinds])
        return program

    def with_copies(self, layers: Collection[int]) -> Program:
        """The same program, which also keeps the output of some layers."""
        program = copy.copy(self)
        program._table, program._starts, program._widths = (Operation * 0)(), [0], [*self._widths]
        program._copies = {layer: len(self._widths) + index for index, layer in enumerate(layers)}
        program._widths += [self._widths[HIDDEN]] * len(layers)
        for layer, (first, last) in enumerate(pairwise(self._starts), start=1):
            copies = [program.add(HIDDEN, program._copies[layer], 1.0)] if layer in layers else []
            program.add_layer([*self._table[first:last], *copies])
        return program

    def run(
        self,
        rows: Tensor,
        first: int,
        last: int,
        rotations: Sequence[Tensor],
        spans: Sequence[Span],
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Run [T, d] through layers first+1..last; adds T positions to the KV caches.

        Also returns kept outputs, by layer. `rotations`: [T, pairs], complex. The last layer makes
        keys and values of all rows, and the rest of those that are read. Raises ValueError.
        """
        ends = list(accumulate(span.count for span in spans))
        caches = {id(span.kv) for span in spans}
        if ends[-1] != len(rows) or len(caches) < len(spans):  # else memory is misread
            raise ValueError(f"{len(rows)} rows are not those of {len(spans)} sequences")
        structs = [
            self._span(span, end - span.count, first) for span, end in zip(spans, ends, strict=True)
        ]
        pass_ = Pass(
            rotations=pointers([turns.data_ptr() for turns in rotations]),
            spans=len(spans),
            span=(SpanStruct * len(spans))(*structs),
        )
        hidden = rows.clone(memory_format=torch.contiguous_format)
        # zeros, since copies are made by adding
        outputs = {layer: rows.new_zeros(rows.shape) for layer in self._copies}
        copies = {self._copies[layer]: output for layer, output in outputs.items()}
        pairs = zip(spans, ends, strict=True)
        read = [row for span, end in pairs for row in range(end - span.read_count, end)]
        self._call(pass_, {HIDDEN: hidden, **copies}, first, last, read)
        for span in spans:
            span.kv.extend(span.count, first, last)
        return hidden, outputs

    def _span(self, span: Span, start: int, first: int) -> SpanStruct:
        """The kernel's view of a span, with room in its pages from layer first+1 on."""
        kv, count, parents = span.kv, span.count, span.parents
        held = kv.length(first)
        if parents is not None:  # a cycle would never end
            earlier = all(-1 - held <= parent < row for row, parent in enumerate(parents))
            if not earlier or len(parents) != count:
                raise ValueError(f"{list(parents)} are no parents of {count} rows")
        pages = kv.pages(count, first, self.layout)
        struct = SpanStruct(
            first=start,
            rows=count,
            held=held,
            parents=None if parents is None else (Long * count)(*parents),
            pages=pointers([page.address for page in pages]),
        )
        struct.memory = pages
        return struct

    def transform(self, rows: Tensor, *targets: int, layers: int = 1) -> list[Tensor]:
        """[T, d] through the first layers, which have no attention -> buffers `targets`.

        `rows` are used as HIDDEN directly: pass a copy if a layer writes there.
        """
        buffers = {target: rows.new_empty(len(rows), self._widths[target]) for target in targets}
        self._call(Pass(), {HIDDEN: rows.contiguous(), **buffers}, 0, layers)
        return [*buffers.values()]

    def _call(
        self,
        pass_: Pass,
        buffers: Mapping[int, Tensor],
        first: int,
        last: int,
        read: list[int] | None = None,
    ) -> None:
        """Run layers first+1..last; `buffers`: the caller's, HIDDEN among them.

        `read`: the rows whose output is read; None: all.
        """
        rows, size = buffers[HIDDEN], self._dtype.itemsize
        if rows.dtype != self._dtype or rows.shape[-1] != self._widths[0]:  # else memory is misread
            raise ValueError(f"rows are {rows.dtype} {tuple(rows.shape)}, not of these layers")
        count = len(rows)
        # one allocation: weights evict caches, and each further torch call would have to reload
        lines = [-(-count * width * size // _LINE) for width in self._widths]
        for number in buffers:
            lines[number] = 0
        *starts, end = accumulate(lines, initial=0)
        memory = torch.empty(end * _LINE, dtype=torch.uint8)
        places = [memory.data_ptr() + start * _LINE for start in starts]
        for number, buffer in buffers.items():
            places[number] = buffer.data_ptr()
        # inputs as they are, in the order of blocks, and summed by groups
        room = torch.empty(count + _SPARE, 3 * self._widest + _SPARE, dtype=torch.float32)
        pass_.rows, pass_.room, pass_.buffers = count, room.data_ptr(), pointers(places)
        start, middle, end = self._starts[first], self._starts[last], self._starts[last]
        if read is not None and len(read) < count:  # attention is the last to need the others
            middle = 1 + max(at for at in range(start, end) if self._table[at].kind == Kind.ATTEND)
        with TEAM.measured():
            self._run(start, middle, pass_)
            if read is None or middle == end:
                return
            few = [buffer[read] for buffer in self._blocks(memory, starts, count, buffers)]
            pass_.rows, pass_.buffers = len(read), pointers([buffer.data_ptr() for buffer in few])
            self._run(middle, end, pass_)
            rows[read] = few[HIDDEN]

    def _blocks(
        self, memory: Tensor, starts: list[int], count: int, buffers: Mapping[int, Tensor]
    ) -> Iterator[Tensor]:
        """All buffers as [count, ..]: the caller's, and those in `memory`."""
        for number, (start, width) in enumerate(zip(starts, self._widths, strict=True)):
            own = memory[start * _LINE :].view(self._dtype)
            yield buffers[number] if number in buffers else own[: count * width].view(count, width)

    def _run(self, start: int, end: int, pass_: Pass) -> None:
        address = ctypes.addressof(self._table) + start * ctypes.sizeof(Operation)
        self._kernel(end - start, address, ctypes.addressof(pass_))

    def _require_width(self, buffer: int, width: int) -> None:
        """Raise ValueError if an operation would read or write outside its buffer."""
        if width != self._widths[buffer]:
            raise ValueError(f"layers differ in width: {width} and {self._widths[buffer]}")

    def _address(self, weight: Tensor | CompiledLinear | None) -> int | None:
        if weight is None:
            return None
        self._weights.append(weight)
        return weight.address if isinstance(weight, CompiledLinear) else weight.data_ptr()


class Rotations:
    """The rotations of a decoder, rounded as its own module does."""

    def __init__(self, decoder: DecoderParts) -> None:
        self._decoder = decoder
        self._by_kind: dict[str, Rotation | None] = {}
        self._table_cache = 0, list[Tensor]()
        """Position of the first slot, 0 except in checks, and [slots, pairs] by kind, as long as
        the longest text so far. They are replaced as one tuple: several threads may decode."""

    def index(self, kind: str, rotation: Rotation | None) -> int:
        """The index of the table for layers of this kind. Raises ValueError if layers differ."""
        known = self._by_kind.get(kind) or rotation
        self._by_kind[kind] = known
        if rotation not in (None, known):
            raise ValueError("layers differ in how positions are rotated")
        return list(self._by_kind).index(kind)

    def at(self, rows: Tensor, spans: Sequence[Span], offset: int) -> list[Tensor]:
        """Rotations by kind, [T, pairs], for rows of these spans; `offset`: position of slot 0."""
        places = [span.positions for span in spans]
        end = max(map(max, places)) - offset + 1
        start, tables = self._table_cache
        if not tables or len(tables[0]) < end or offset != start:
            last, tables = offset + 2 * end, list[Tensor]()
            positions = torch.arange(offset, min(last, self._decoder.rotations_end or last))[None]
            for kind, rotation in self._by_kind.items():
                if rotation is None:
                    tables.append(torch.zeros(2 * end, 0, dtype=torch.complex64))
                else:
                    cos, sin = self._decoder.rotations(rows[None], positions, kind)
                    tables.append(rotation.turns(cos[0], sin[0]))
            self._table_cache = offset, tables
        if isinstance(chain := places[0], range) and len(places) == 1:
            return [table[chain.start - offset : end] for table in tables]
        slots = torch.tensor([place - offset for sequence in places for place in sequence])
        return [table[slots] for table in tables]


_BLOCK_ROWS = 1024  # rows of a prompt that run together, which bounds the memory of buffers


class FusedExecutor:
    """Runs the decoder with compiled linear layers, norms, attention and activations."""

    def __init__(self, decoder: DecoderParts, lm_head: nn.Linear) -> None:
        """Copy the weights; memory-mapped ones are released as soon as they are copied.

        Raises ValueError, with the reason, for layers without a recipe, and without a compiler.
        """
        require_own_code(decoder, lm_head)
        pages = FilePages()
        self._decoder, dtype = decoder, lm_head.weight.dtype
        lm_head = plain_linear(lm_head, "lm_head", dtype)
        kinds = attention_types(decoder.config)
        self._recipe(0, kinds[0], dtype)  # fail early
        self._program = Program(dtype, lm_head.in_features)
        self._with_copies = functools.cache(self._program.with_copies)
        self.weight_bytes = 0  # bytes that a row reads, in the compiled layout
        self._unembedding = unembedding = Program(dtype, lm_head.in_features)
        normed = unembedding.buffer("normed", lm_head.in_features)
        self._outputs = normed, unembedding.buffer("logits", lm_head.out_features)
        linear = unembedding.linear(*self._outputs, self._compile(lm_head))  # the largest first
        norm = norm_of(decoder.norm, lm_head.in_features, dtype)
        unembedding.add_layer([unembedding.norm(HIDDEN, normed, norm), linear])
        pages.release(lm_head)
        self._rotations = Rotations(decoder)
        for index, (layer, kind) in enumerate(zip(decoder.layers, kinds, strict=True)):
            recipe = self._recipe(index, kind, dtype)
            rotation = self._rotations.index(kind, recipe.attention.rotation)
            self._program.add_layer(list(self._operations(recipe, rotation)))
            pages.release(layer)
        layout = self._program.layout
        self.claims = Claims(steady=True, joins=True, keeps_states=True, pages=layout)

    def _recipe(self, index: int, kind: str, dtype: torch.dtype) -> Recipe:
        try:
            return recipe_of(self._decoder, self._decoder.layers[index], kind, dtype)
        except (AttributeError, TypeError, ValueError) as error:  # unknown layers fail in many ways
            raise ValueError(f"layer {index + 1}: {error}") from error

    def unembed(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        normed, logits = self._unembedding.transform(hidden, *self._outputs)
        return normed, logits

    def run(
        self, hidden: Tensor, first: int, last: int, rows: Rows, states: States | None = None
    ) -> Tensor:
        if len(hidden) > _BLOCK_ROWS and (len(rows.spans) > 1 or rows.are_chains):
            parts = rows.parts(hidden, _BLOCK_ROWS)
            if len(rows.spans) == 1:  # of a prompt, block by block
                parts = rows.blocks(hidden, _BLOCK_ROWS)
            return torch.cat([self.run(block, first, last, part, states) for block, part in parts])
        span = rows.spans[0]
        turns = self._rotations.at(hidden, rows.spans, span.start - span.kv.length(first))
        program = self._with_copies(frozenset(states)) if states else self._program
        output, copies = program.run(hidden, first, last, turns, rows.spans)
        for layer, outputs in (states or {}).items():
            if first < layer < last:
                outputs.append(copies[layer])
        return output

    def _operations(self, recipe: Recipe, rotation: int) -> Iterator[Operation]:
        program, attention, mlp = self._program, recipe.attention, recipe.mlp
        source = yield from self._open(recipe, 0)
        projected = program.buffer("projected", len(attention.order))
        seen = program.buffer("seen", attention.heads * attention.size)
        projections = self._compile(*attention.projections, order=attention.order)
        yield program.linear(source, projected, projections)
        if attention.row_norms is not None:
            queries, keys = attention.row_norms
            yield program.norm(projected, projected, queries)
            yield program.norm(projected, projected, keys, at=len(queries.weight))
        yield program.attend(projected, seen, attention, rotation=rotation)
        if not recipe.parallel:
            yield from self._close(recipe, 0, seen, attention.output)
        function = activation_of(mlp.activation)
        source = yield from self._open(recipe, 1)
        if isinstance(mlp, Experts):
            router = CompiledLinear(mlp.router.detach())
            logits = program.buffer("logits", router.out_features)
            output = program.buffer("mixed", router.in_features)
            yield program.linear(source, logits, router)
            yield program.experts(source, logits, output, mlp, function)
            share = mlp.shares.each / len(mlp.router)
            self.weight_bytes += router.nbytes
            self.weight_bytes += int(share * (mlp.into.nbytes + mlp.down.nbytes))
        else:
            into = self._compile(*mlp.into)
            opened = program.buffer("opened", into.out_features)
            output = program.buffer("activated", mlp.down.in_features)
            yield program.linear(source, opened, into)
            yield program.activate(opened, output, function, gated=mlp.gated)
        if recipe.parallel:  # the MLP has read the same rows as attention
            yield from self._close(recipe, 0, seen, attention.output)
        yield from self._close(recipe, 1, output, None if isinstance(mlp, Experts) else mlp.down)

    def _open(self, recipe: Recipe, place: int) -> Generator[Operation, None, int]:
        """The input buffer of attention (0) or the MLP (1): the rows, normed if the layer norms."""
        norm = recipe.input_norms[place]
        shared = recipe.input_norms[0] if norm is None and recipe.parallel else norm  # one for both
        if shared is None:
            return HIDDEN
        normed = self._program.buffer("normed", len(shared.weight))
        if norm is not None:
            yield self._program.norm(HIDDEN, normed, norm)
        return normed

    def _close(
        self, recipe: Recipe, place: int, source: int, linear: nn.Linear | None
    ) -> Iterator[Operation]:
        """Add the result of attention (0) or the MLP (1) to the rows, through its last `linear`."""
        program, norm, times = self._program, recipe.output_norms[place], recipe.factor
        if norm is not None:
            if linear is not None:
                branch = program.buffer("branch", linear.out_features)
                yield program.linear(source, branch, self._compile(linear))
                source = branch
            yield program.norm(source, HIDDEN, norm, adds=times)
        elif linear is not None:
            yield program.linear(source, HIDDEN, self._compile(linear), adds=times)
        else:
            yield program.add(source, HIDDEN, times)

    def _compile(self, *parts: nn.Linear, order: Tensor | None = None) -> CompiledLinear:
        compiled = CompiledLinear.of(*parts, order=order)
        self.weight_bytes += compiled.nbytes
        return compiled
