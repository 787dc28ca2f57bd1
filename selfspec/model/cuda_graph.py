"""Runs the model's own layers on a GPU as CUDA graphs: one launch per segment instead of hundreds.

torch's compiler first fuses a layer's many small kernels, where it can. A graph replays kernels
with the addresses and shapes of its capture. So inputs are copied into fixed buffers, rows are
padded to a few counts, keys and values stay in place, and numbers on the device say which slots a
row may see; rows of different sequences differ only in these slots. Only `graph_capture` needs a
GPU.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from selfspec.errors import first_line
from selfspec.model.generic import Claims, GenericExecutor, as_mask, in_reach, run_layer
from selfspec.model.kv import (
    KVCache,
    Rows,
    Span,
    ancestors,
    count_unseen,
    depths,
    fixed_slots,
    free_bytes,
    upload,
    with_zeros,
)
from selfspec.model.parts import require_own_code


class StaticSlots:
    """Buffers of every layer, [1, kv heads, lanes, slots, head_dim]; one sequence per lane."""

    def __init__(self, samples: Sequence[tuple[Tensor, Tensor]], slots: int) -> None:
        """`samples`: keys and values of one position, [1, kv heads, 1, head_dim], per layer."""
        self._samples = samples
        self._tenants: dict[int, Callable[[], KVCache | None]] = {}
        """By lane; least recently used first."""
        self.grow(1, slots)

    @property
    def lanes(self) -> int:
        return len(self._tenants)

    def grow(self, lanes: int, slots: int) -> None:
        """Replace the buffers; the old ones are freed first, since both may not fit the device."""
        for lane in self._tenants:
            self._recall(lane)
        self.slots, self.keys, self.values = 0, list[Tensor](), list[Tensor]()
        self._tenants = {}
        with torch.inference_mode(False):  # else they could be written only in inference mode
            self.keys = [_zeros(keys[:, :, None], lanes, slots) for keys, _ in self._samples]
            self.values = [_zeros(values[:, :, None], lanes, slots) for _, values in self._samples]
        self.slots = slots
        self._tenants = dict.fromkeys(range(lanes), lambda: None)

    def size_of(self, lanes: int, slots: int) -> int:
        return lanes * slots * sum(tensor.nbytes for pair in self._samples for tensor in pair)

    def strangers(self, caches: Sequence[KVCache]) -> int:
        """The number of other sequences that have a lane."""
        return sum(tenant() not in (None, *caches) for tenant in self._tenants.values())

    def lend(self, caches: Sequence[KVCache]) -> list[int]:
        """Return a lane for each cache; keys and values of new ones move there.

        A new cache takes an unused lane, or the least recently used one, whose tenant moves out.
        """
        for kv in caches:
            tenants = {lane: reference() for lane, reference in self._tenants.items()}
            lane = next((lane for lane, tenant in tenants.items() if tenant is kv), None)
            if lane is None:
                others = [lane for lane, tenant in tenants.items() if tenant not in caches]
                lane = min((other for other in others if tenants[other] is None), default=others[0])
                self._recall(lane)
                keys, values = self._lane_views(lane)
                for buffer in (*keys, *values):
                    buffer.zero_()  # masked slots have weight 0, but 0 times NaN is NaN
                kv.move_to(keys, values)
            del self._tenants[lane]
            self._tenants[lane] = weakref.ref(kv)
        return [*self._tenants][-len(caches) :]

    def _recall(self, lane: int) -> None:
        """Move the lane's sequence into buffers of its own, unless it no longer exists."""
        if (tenant := self._tenants[lane]()) is not None:
            length = max(tenant.length(layer) for layer in range(tenant.num_layers))
            buffers = ([_zeros(like, length) for like in views] for views in self._lane_views(lane))
            tenant.move_to(*buffers)
        self._tenants[lane] = lambda: None

    def _lane_views(self, lane: int) -> tuple[list[Tensor], list[Tensor]]:
        return [one[:, :, lane] for one in self.keys], [one[:, :, lane] for one in self.values]


class SlotView(NamedTuple):
    """A layer's cache, in transformers' terms; a replay writes to the `places` of its pass.

    It ignores the layer's index, for which code would otherwise be compiled.
    """

    keys: Tensor  # [1, heads, lanes, slots, head_dim]
    values: Tensor
    places: Tensor  # [rows]: slots, numbered through all lanes
    slots: int  # number of slots of each lane that the layer reads

    def update(
        self, keys: Tensor, values: Tensor, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Write [1, heads, rows, head_dim] at `places`; return seen slots, [1, heads, S, ..]."""
        self.keys.flatten(2, 3).index_copy_(2, self.places, keys)
        self.values.flatten(2, 3).index_copy_(2, self.places, values)
        views = self.keys[..., : self.slots, :], self.values[..., : self.slots, :]
        return views[0].flatten(2, 3), views[1].flatten(2, 3)


class Segment(NamedTuple):
    """The key of a captured graph of layers."""

    begin: int  # the first lane
    size: int  # lanes
    first: int
    last: int
    rows: int
    slots: int  # slots of each lane


def _zeros(like: Tensor, *slots: int) -> Tensor:
    """A buffer [1, heads, slots, head_dim], or with lanes, for any number of slots."""
    return like.new_zeros(*like.shape[:2], *slots, like.shape[-1])


_MOST_GRAPHS = 256  # kept at a time; the least recently used is dropped

_MOST_LANES = 128
"""Sequences whose keys and values have a lane, within half of the free memory; those of further
sequences are moved in and out."""

_WARM_UPS = 3  # runs before a capture, since libraries set up their workspaces in the first ones

logger = logging.getLogger(__name__)

Work = Callable[..., tuple[Tensor, ...]]  # reads buffers at fixed addresses, given or its own
Capture = Callable[[Work], Work]  # captures a work; the next replay may overwrite the outputs


def uncaptured(work: Work) -> Work:
    """Return the work itself: the strategy without a GPU."""
    return work


def graph_capture(device: torch.device) -> Capture:
    """A Capture on `device` as CUDA graphs that share one memory pool, as torch documents it.

    Memory of graphs in one pool may overlap, which is safe because they never run at the same time
    and every output is copied before the next one runs. The Capture raises RuntimeError for work
    that cannot be captured.
    """
    pool = torch.cuda.graph_pool_handle()

    def capture(work: Work) -> Work:
        with torch.cuda.device(device):  # streams belong to the current device
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UPS):
                    work()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            # thread_local: work of other threads on the GPU must not break this capture
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                output = work()

        def replay() -> tuple[Tensor, ...]:
            graph.replay()
            return output

        return replay

    return capture


class Replays:
    """Works by key, captured on first use and replayed from then on."""

    def __init__(self, strategy: Callable[[], Capture]) -> None:
        """`strategy` makes a Capture, shared by all graphs of one pool."""
        self._strategy = strategy
        self._capture = strategy()
        self._graphs: dict[Hashable, tuple[Work, list[Tensor]]] = {}

    @property
    def captures(self) -> bool:
        return self._capture is not uncaptured

    def run(self, key: Hashable, work: Work, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The outputs of `work`, by the graph of `key`; copy them before the next run."""
        entry = self._graphs.pop(key, None)
        graph, buffers = entry or self._capture_work(work, inputs)
        self._graphs[key] = graph, buffers  # newest last
        for buffer, source in zip(buffers, inputs, strict=True):
            buffer.copy_(source)
        return graph()

    def clear(self) -> None:
        """Drop the graphs of segments, whose addresses are no longer valid."""
        for key in [key for key in self._graphs if isinstance(key, Segment)]:
            del self._graphs[key]
        if self.captures and not self._graphs:  # a pool without graphs cannot be reused
            self._capture = self._strategy()

    def _capture_work(self, work: Work, inputs: Sequence[Tensor]) -> tuple[Work, list[Tensor]]:
        """Capture a work; if that fails, run it and all later ones uncaptured."""
        if len(self._graphs) >= _MOST_GRAPHS:
            self._graphs.pop(next(iter(self._graphs)))
        with torch.inference_mode(False):  # else they could be written only in inference mode
            buffers = [torch.zeros_like(tensor) for tensor in inputs]
        work = partial(work, *buffers)
        try:
            return self._capture(work), buffers
        except RuntimeError as error:
            logger.warning(
                "no CUDA graphs (%s): segments run uncaptured from now on", first_line(error)
            )
            self._capture = uncaptured
            return work, buffers


ROW_COUNTS = (1, 2, 4, 8, 16)  # of a captured pass; fewer are padded, more (prompts) run uncaptured
_MOST_ROWS = ROW_COUNTS[-1]

_DEPTHS, _UNSEEN, _ROOTS, _LANES = range(_MOST_ROWS, _MOST_ROWS + 4)
"""After the rows' visibility matrix, numbers of each row on the device: its distance from the held
text, how much of that text's end it does not see, its sequence's first row, and its lane."""

_FEWEST_SEEN = 256
"""Slots that a captured pass reads: this, doubled until the text fits. Each count needs its own
graph, while fewer counts would mean more masked slots."""

_FIRST_SLOTS = 1024  # initial slots; more double them, and all passes are captured again
_TRIAL_ROWS = (7, 1, 1, 1, 3)  # of a replay's test: one row is captured, then replayed with others
_TRIAL_ERROR = 0.05
"""Largest error of a replay, relative to the output (root mean square): a library may pick another
kernel for a capture, but a missing input of a graph gives a much larger error."""

_MOST_COMPILED = 64  # versions of a layer, for all models of a process and counts of rows


def compiled_layer(compiler: str) -> Callable[..., Tensor]:
    """`run_layer` with the element-wise work between matmuls fused, and rounded as unfused.

    All layers of a kind share its code, for all counts of slots, and of rows but one. The result
    raises RuntimeError if a layer cannot be compiled as a whole.
    """
    options: Any = {"emulate_precision_casts": True} if compiler == "inductor" else None
    work = torch.compile(run_layer, backend=compiler, fullgraph=True, dynamic=True, options=options)
    shapes: Any = torch.fx.experimental._config  # else equal numbers of rows and heads are merged

    def run_compiled(*arguments: Any, **keywords: Any) -> Tensor:
        limit = torch._dynamo.config.patch(recompile_limit=_MOST_COMPILED)
        with limit, shapes.patch(use_duck_shape=False):
            return work(*arguments, **keywords)

    return run_compiled


class CudaGraphExecutor:
    """Runs segments at fixed addresses, each captured once per number of rows and of slots."""

    def __init__(self, decoder: Any, lm_head: nn.Module, *, slots: int = _FIRST_SLOTS) -> None:
        """`slots`: initial room in positions. Raises ValueError for what cannot be captured."""
        require_own_code(decoder, lm_head)
        _require_capturable(decoder, lm_head)
        self._decoder = decoder
        self._generic = GenericExecutor(decoder, lm_head)
        self.weight_bytes = self._generic.weight_bytes
        self._num_layers = len(decoder.layers)
        config = decoder.config
        # padding may follow the last position
        self._limit = fixed_slots(config.max_position_embeddings + _MOST_ROWS)
        weight = decoder.embed_tokens.weight
        with torch.inference_mode(False):
            self._hidden = weight.new_zeros(_MOST_ROWS, config.hidden_size)
            self._offsets = torch.arange(_MOST_ROWS, device=weight.device)
            self._places = self._offsets.new_zeros(2, _MOST_ROWS)  # positions, and slots in a lane
            self._tree = self._offsets.new_zeros(_LANES + 1, _MOST_ROWS)
        self._slots = StaticSlots(self._one_position(), self._slot_count(min(slots, self._limit)))
        self._most_lanes = _MOST_LANES
        self._uploaded_trees: object = None
        self._alike_rows = 1  # maximum rows of a pass that have the bits of single-row passes
        self.replays = Replays(lambda: uncaptured)
        self._layer_function: Callable[..., Tensor] = run_layer
        self._lock = threading.Lock()  # several threads may decode
        self.claims = Claims(replay=self._replay)

    def start_capture(
        self, strategy: Callable[[], Capture] | None = None, compiler: str | None = "inductor"
    ) -> None:
        """From now on capture each segment on first use. Raises ValueError if a replay is wrong.

        `compiler`: torch's name of the compiler that fuses a layer's small kernels.
        """
        strategy = strategy or (lambda: graph_capture(self._hidden.device))
        expected = self._trial()
        try:
            if compiler is not None:
                logger.info("compiling layers for this device: half a minute, the first time")
                self._layer_function = compiled_layer(compiler)
                self._compare(expected, "a compiled layer")
        except Exception as error:  # noqa: BLE001  # on any failure layers run uncompiled
            logger.warning("layers run uncompiled: %s", first_line(error))
            self._layer_function = run_layer
        self.replays = Replays(strategy)
        self._compare(expected, "a captured segment, replayed,")
        self._alike_rows = self._count_alike_rows()
        # whether sequences keep their bits in a shared pass is tested when there are several
        self.claims = Claims(replay=self._replay, joins=self._alike_rows > 1)

    def _compare(self, expected: Sequence[Tensor], name: str) -> None:
        for output, reference in zip(self._trial(), expected, strict=True):
            error = (output.float() - reference.float()).square().mean().sqrt()
            if not float(error) <= _TRIAL_ERROR * float(reference.float().square().mean().sqrt()):
                raise ValueError(f"{name} comes out differently")

    def run(self, hidden: Tensor, first: int, last: int, rows: Rows) -> Tensor:
        counts = [span.count for span in rows.spans]
        parts = list(hidden.split(counts))  # each is replaced by its output
        with self._lock:
            self._make_room(rows.spans, first)
            queue, lanes = list(range(len(parts))), self._slots.lanes
            if 1 < len(queue) <= lanes:  # by lane, so that each pass spans few of them
                queue.sort(key=self._slots.lend([span.kv for span in rows.spans]).__getitem__)
            while queue:
                # as many sequences share a pass as keep their bits
                totals = accumulate(counts[at] for at in queue[:lanes])
                turn = queue[: max(1, sum(total <= self._alike_rows for total in totals))]
                queue = queue[len(turn) :]
                block = parts[turn[0]] if len(turn) == 1 else torch.cat([parts[at] for at in turn])
                output = self._pass(block, first, last, [rows.spans[at] for at in turn])
                for at, part in zip(turn, output.split([counts[at] for at in turn]), strict=True):
                    parts[at] = part
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _make_room(self, spans: Sequence[Span], first: int) -> None:
        """Add or lengthen lanes if sequences need them; then all passes are captured again."""
        pool, caches = self._slots, [span.kv for span in spans]
        count = len(caches) + pool.strangers(caches)
        lanes = max(pool.lanes, min(self._most_lanes, 1 << (count - 1).bit_length()))
        slots = max(pool.slots, *(self._slot_count(_needed_slots(span, first)) for span in spans))
        if (lanes, slots) != (pool.lanes, pool.slots):
            room = (free_bytes(self._hidden.device) + pool.size_of(pool.lanes, pool.slots)) / 2
            while lanes > 1 and pool.size_of(lanes, slots) > room:
                lanes //= 2
        while (lanes, slots) != (pool.lanes, pool.slots):
            text = "room for %d texts of %d positions: passes are captured again"
            logger.info(text, lanes, slots)
            self.replays.clear()
            try:
                pool.grow(lanes, slots)
            except torch.OutOfMemoryError:  # use fewer lanes, which sequences share in turns
                if lanes == 1:
                    raise
                lanes = self._most_lanes = lanes // 2

    def _pass(self, hidden: Tensor, first: int, last: int, spans: Sequence[Span]) -> Tensor:
        count, padded = len(hidden), _padded_count(len(hidden))
        lanes = self._slots.lend([span.kv for span in spans])
        if padded is None:
            return self._generic.run(hidden, first, last, Rows(hidden.device, tuple(spans)))
        size = 1
        while min(lanes) // size < max(lanes) // size:
            size *= 2
        begin = min(lanes) // size * size
        # zeros: earlier rows may be NaN, which masks let through
        self._hidden[:padded] = with_zeros(hidden, padded)
        self._upload_trees(spans, [lane - begin for lane in lanes])
        self._set_places(spans, first, padded)
        seen = self._slot_count(max(_needed_slots(span, first) for span in spans))
        segment = Segment(begin, size, first, last, padded, seen)
        (output,) = self.replays.run(segment, partial(self._segment, segment))
        for span in spans:
            span.kv.extend(span.count, first, last)
        return output[:count].clone()  # the next replay overwrites it

    def unembed(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        pieces = hidden.split(self._alike_rows) if self._alike_rows > 1 else (hidden,)
        pairs = [self._replay("unembed", self._generic.unembed, piece) for piece in pieces]
        normed, logits = pairs[0] if len(pairs) == 1 else map(torch.cat, zip(*pairs, strict=True))
        return normed, logits

    def _replay(self, key: Hashable, work: Work, *inputs: Tensor) -> tuple[Tensor, ...]:
        if (padded := _padded_count(count := len(inputs[0]))) is None:
            return work(*inputs)
        blocks = [with_zeros(block, padded) for block in inputs]
        with self._lock:
            outputs = self.replays.run((key, padded, len(inputs)), work, *blocks)
            return tuple(output[:count].clone() for output in outputs)

    def _upload_trees(self, spans: Sequence[Span], lanes: Sequence[int]) -> None:
        """Upload which rows see which others, and their lanes."""
        trees = _trees_of(spans)
        if (planted := [*zip(lanes, trees, strict=True)]) == self._uploaded_trees:
            return
        counts = torch.tensor([len(parents) for parents in trees])
        roots = (counts.cumsum(0) - counts).repeat_interleave(counts)
        numbers = [
            [number for parents in trees for number in of(parents)] for of in (depths, count_unseen)
        ]
        by_row = torch.tensor(lanes).repeat_interleave(counts)
        visible = torch.block_diag(*map(ancestors, trees)).long()
        tree = torch.cat([visible, torch.tensor(numbers), roots[None], by_row[None]])
        self._tree.copy_(tree.pin_memory() if self._tree.is_cuda else tree, non_blocking=True)
        self._uploaded_trees = planted

    def _set_places(self, spans: Sequence[Span], first: int, count: int) -> None:
        """Set the rows' positions and slots; for a single sequence nothing is uploaded."""
        positions, slots = self._places[:, :count]
        starts = [span.kv.length(first) for span in spans]
        if len(spans) == 1:
            torch.add(self._tree[_DEPTHS, :count], spans[0].start, out=positions)
            torch.add(self._offsets[:count], starts[0], out=slots)
            return
        rows = [
            (span.start + depth, start + row)
            for span, start, parents in zip(spans, starts, _trees_of(spans), strict=True)
            for row, depth in enumerate(depths(parents))
        ]
        numbers = [number for column in zip(*rows[:count], strict=True) for number in column]
        self._places[:, :count] = upload(numbers, slots.device).view(2, count)

    @torch.inference_mode(False)  # else buffers are normal tensors and outputs inference tensors
    @torch.no_grad()
    def _segment(self, of: Segment) -> tuple[Tensor]:
        """The captured work: layers first+1..last on the fixed buffers."""
        (positions, slots), lanes = self._places[:, : of.rows], self._tree[_LANES, : of.rows]
        masks = {
            kind: self._mask(kind, of) for kind in {*self._generic.layer_types[of.first : of.last]}
        }
        pool, part = self._slots, slice(of.begin, of.begin + of.size)
        places = lanes * pool.slots + slots
        views = [
            SlotView(keys[:, :, part], values[:, :, part], places, of.slots)
            for keys, values in zip(pool.keys, pool.values, strict=True)
        ]
        hidden = self._hidden[None, : of.rows].clone()  # not a view, like the input of later layers
        run = self._generic.run_layers
        through = self._layer_function
        return (run(hidden, of.first, of.last, positions[None], views, masks, through)[0],)

    def _mask(self, kind: str, of: Segment) -> Tensor:
        """The mask [1, 1, rows, lanes * slots] as by transformers, from numbers on the device."""
        (positions, slots), tree = self._places[:, : of.rows], self._tree[:, : of.rows]
        places = torch.arange(of.size * of.slots, device=slots.device)
        lane, slot = places // of.slots, places % of.slots
        row = torch.full_like(places, -1)  # the row of this pass in each slot
        row.index_copy_(0, tree[_LANES] * of.slots + slots, self._offsets[: of.rows])
        fresh, row = row >= 0, row.clamp(min=0)
        ends = slots.index_select(0, tree[_ROOTS]) - tree[_UNSEEN]
        held = (lane == tree[_LANES, :, None]) & (slot < ends[:, None])
        visible = held | (fresh & tree.index_select(1, row)[: of.rows].bool())
        slot_positions = torch.where(fresh, positions.index_select(0, row), slot)
        visible = in_reach(visible, kind, self._decoder.config, positions, slot_positions)
        return as_mask(visible, self._decoder.config, self._hidden)

    def _slot_count(self, needed: int) -> int:
        """Slots for `needed` positions: few distinct counts, up to the model's limit."""
        count = max(_FEWEST_SEEN, 1 << (needed - 1).bit_length())
        return self._limit if needed <= self._limit < count else count

    @torch.no_grad()
    def _one_position(self) -> list[tuple[Tensor, Tensor]]:
        kv, embed = KVCache(self._num_layers), self._decoder.embed_tokens
        device = embed.weight.device
        ids = torch.zeros(1, dtype=torch.int64, device=device)
        self._generic.run(embed(ids), 0, self._num_layers, Rows.of(kv, 0, 1, device))
        pairs = [kv.first(1, layer) for layer in range(self._num_layers)]
        return [(keys.clone(), values.clone()) for keys, values in pairs]  # free the larger buffers

    def _trial(self) -> list[Tensor]:
        """Outputs and logits of a few passes over a text, at the first and the last positions."""
        last = int(self._decoder.config.max_position_embeddings) - sum(_TRIAL_ROWS)
        return [rows for start in (0, max(0, last)) for rows in self._passes(_TRIAL_ROWS, start)]

    def _count_alike_rows(self) -> int:
        """The maximum number of rows in a pass that keep the bits of single-row passes."""

        def bits(count: int) -> Tensor:
            outputs = self._passes([count] * (_MOST_ROWS // count))
            return torch.cat([torch.cat(outputs[kind::3]) for kind in range(3)], 1)

        expected, rows = bits(1), 1
        for count in ROW_COUNTS[1:]:
            if not torch.equal(bits(count), expected):
                break
            rows = count
        return rows

    @torch.no_grad()
    def _passes(self, counts: Sequence[int], start: int = 0) -> list[Tensor]:
        """Output, normed rows and logits of successive passes of `counts` rows."""
        weight, kv = self._decoder.embed_tokens.weight, KVCache(self._num_layers)
        ids = torch.arange(sum(counts), device=weight.device) % len(weight)
        outputs = list[Tensor]()
        for block in ids.split(list(counts)):
            rows = Rows.of(kv, start + kv.length(0), len(block), weight.device)
            outputs.append(self.run(self._decoder.embed_tokens(block), 0, self._num_layers, rows))
            outputs += self.unembed(outputs[-1])
        return outputs


def _needed_slots(span: Span, first: int) -> int:
    """Slots of a lane for a span that runs through layers first+1.., with room for padding."""
    end = (start := span.kv.length(first)) + span.count
    span.kv.check_room(end)
    return span.kv.slots + _MOST_ROWS if span.kv.slots else max(end, start + _MOST_ROWS)


def _trees_of(spans: Sequence[Span]) -> list[tuple[int, ...]]:
    """For each sequence, the row that each row follows; padding continues the last sequence."""
    trees = [
        tuple(range(-1, span.count - 1)) if span.parents is None else span.parents for span in spans
    ]
    total, last = sum(map(len, trees)), len(trees[-1])
    return [*trees[:-1], (*trees[-1], *range(last - 1, last - 1 + _MOST_ROWS - total))]


def _padded_count(count: int) -> int | None:
    """Rows of the captured pass for `count` rows; None: they run uncaptured."""
    return next((rows for rows in ROW_COUNTS if rows >= count), None)


def _require_capturable(decoder: Any, lm_head: nn.Module) -> None:
    """Raise ValueError for experts, which read values back to the host, and several devices."""
    if decoder.rotations_end is not None:
        raise ValueError("rotations change with the longest position of a pass, padding included")
    for kind in {type(part) for layer in decoder.layers for part in layer.modules()}:
        if any(word in kind.__name__.lower() for word in ("expert", "moe")):
            raise ValueError(f"{kind.__name__} reads values back")
    devices = {weight.device for part in (decoder.module, lm_head) for weight in part.parameters()}
    if len(devices) != 1:
        raise ValueError(f"weights are on {len(devices)} devices, expected one")
