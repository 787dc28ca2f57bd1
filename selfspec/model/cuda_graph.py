"""Runs the model's own layers on a GPU as CUDA graphs: one launch per segment instead of hundreds.

torch's compiler first makes a few kernels of a layer's many small ones, where it can. A graph
replays kernels with the addresses and shapes that it was captured with. So inputs are copied into
fixed buffers, rows are padded to a few counts, keys and values stay where they are, and which slots
a row may see comes from numbers on the device. Nothing here needs a GPU but `graph_capture`.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from selfspec.errors import first_line
from selfspec.model.generic import Claims, GenericExecutor, as_mask, in_reach, run_layer
from selfspec.model.kv import (
    KVCache,
    Rows,
    ancestors,
    depths,
    fixed_slots,
    held_behind,
    with_zeros,
)
from selfspec.model.parts import require_own_code


class StaticSlots:
    """Buffers of every layer, [1, kv heads, slots, head_dim], and the sequence that has them."""

    def __init__(self, samples: Sequence[tuple[Tensor, Tensor]], slots: int) -> None:
        """`samples`: keys and values of one position, [1, kv heads, 1, head_dim], per layer."""
        self.samples = samples
        self.tenant: Callable[[], KVCache | None] = lambda: None
        self.grow(slots)

    def grow(self, slots: int) -> None:
        """Other buffers, made when the old ones are gone: both at once may not fit the device."""
        self.recall()
        self.slots, self.keys, self.values = 0, list[Tensor](), list[Tensor]()
        with torch.inference_mode(False):  # else only inference mode could write to them
            self.keys = [_zeros(keys, slots) for keys, _ in self.samples]
            self.values = [_zeros(values, slots) for _, values in self.samples]
        self.slots = slots

    def lend(self, kv: KVCache) -> None:
        """Move the keys and values of `kv` here; those of the sequence before it move out."""
        if self.tenant() is kv:
            return
        self.recall()
        for buffer in (*self.keys, *self.values):
            buffer.zero_()  # masked slots weigh nothing, but nothing times NaN is NaN
        kv.move_to(self.keys, self.values)
        self.tenant = weakref.ref(kv)

    def recall(self) -> None:
        """Move out what is lent, into buffers of its own; a sequence that is gone needs none."""
        if (tenant := self.tenant()) is not None:
            held = max(tenant.length(layer) for layer in range(tenant.num_layers))
            tenant.move_to(
                [_zeros(buffer, held) for buffer in self.keys],
                [_zeros(buffer, held) for buffer in self.values],
            )
        self.tenant = lambda: None


class SlotView(NamedTuple):
    """A layer's cache, in transformers' terms; a replay with other `places` writes elsewhere.

    It does not look at the layer's number, which compiled code would be made for.
    """

    keys: Tensor  # [1, heads, slots, head_dim]
    values: Tensor
    places: Tensor  # [rows]: slots
    seen: int  # the layer looks at as many slots

    def update(
        self, keys: Tensor, values: Tensor, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Write [1, heads, rows, head_dim] at their places; what is seen, [1, heads, S, ..]."""
        self.keys.index_copy_(2, self.places, keys)
        self.values.index_copy_(2, self.places, values)
        return self.keys[:, :, : self.seen], self.values[:, :, : self.seen]


def _zeros(like: Tensor, slots: int) -> Tensor:
    """[1, heads, slots, head_dim] for a buffer of any number of slots."""
    return like.new_zeros(*like.shape[:-2], slots, like.shape[-1])


_MOST_GRAPHS = 256  # kept at a time; the one unused for longest makes room

_MOST_LANES = 4
"""Texts whose keys and values stay in slots of their own, with graphs of their own: those of others
are moved in and out."""

_WARM_UPS = 3  # runs before a capture, which must not see libraries set up their workspaces

logger = logging.getLogger(__name__)

Work = Callable[..., tuple[Tensor, ...]]  # from buffers at fixed addresses, given or its own
Capture = Callable[[Work], Work]  # captures; what the result gives may be overwritten by the next


def uncaptured(work: Work) -> Work:
    """The work itself: the strategy where there is nothing to capture with."""
    return work


def graph_capture(device: torch.device) -> Capture:
    """Captures work on `device` as CUDA graphs that share one memory pool, as torch documents it.

    What graphs of one pool keep between replays may overlap, which is safe because they never run
    at the same time and every output is copied before the next one runs. What it gives raises
    RuntimeError where work cannot be captured.
    """
    pool = torch.cuda.graph_pool_handle()

    def capture(work: Work) -> Work:
        with torch.cuda.device(device):  # streams belong to the current device
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(_WARM_UPS):
                    work()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            # thread_local: what other threads do on the GPU meanwhile is no fault of this capture
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                output = work()

        def replay() -> tuple[Tensor, ...]:
            graph.replay()
            return output

        return replay

    return capture


class Replays:
    """Captured work by key: captured at its first use, replayed from then on."""

    def __init__(self, strategy: Callable[[], Capture]) -> None:
        """`strategy` makes a Capture: one for all graphs that live together."""
        self._strategy = strategy
        self._capture = strategy()
        self._graphs: dict[Hashable, tuple[Work, list[Tensor]]] = {}

    @property
    def captures(self) -> bool:
        """Whether work is captured, rather than run as it is."""
        return self._capture is not uncaptured

    def run(self, key: Hashable, work: Work, *inputs: Tensor) -> tuple[Tensor, ...]:
        """What `work` makes of `inputs`, by the graph under `key`; copy it before the next run."""
        found = self._graphs.pop(key, None)
        graph, held = found or self._captured(work, inputs)
        self._graphs[key] = graph, held  # newest last
        for address, one in zip(held, inputs, strict=True):
            address.copy_(one)
        return graph()

    def clear(self) -> None:
        """Drop all graphs: their addresses are no longer right."""
        self._graphs.clear()
        if self.captures:  # a pool is not used again once the last graph in it is gone
            self._capture = self._strategy()

    def _captured(self, work: Work, inputs: Sequence[Tensor]) -> tuple[Work, list[Tensor]]:
        """Falls back to the work itself, for good, where capturing it fails."""
        if len(self._graphs) >= _MOST_GRAPHS:
            self._graphs.pop(next(iter(self._graphs)))
        with torch.inference_mode(False):  # else only inference mode could write to them
            held = [torch.zeros_like(one) for one in inputs]
        work = partial(work, *held)
        try:
            return self._capture(work), held
        except RuntimeError as error:
            logger.warning(
                "no CUDA graphs (%s): segments run uncaptured from now on", first_line(error)
            )
            self._capture = uncaptured
            return work, held


ROW_COUNTS = (1, 2, 4, 8, 16)  # of a captured pass; fewer are padded, more (prompts) run uncaptured
_MOST_ROWS = ROW_COUNTS[-1]

_DEPTHS, _UNSEEN = _MOST_ROWS, _MOST_ROWS + 1
"""Behind who sees whom, each row's distance from the text and how much of its end it does not see,
in numbers on the device."""

_FEWEST_SEEN = 256
"""Slots that a captured pass looks at: this, doubled as long as the text needs it. Each count takes
a graph of its own, and fewer counts cost more masked slots."""

_FIRST_SLOTS = 1024  # there is memory for at first; more double it, and all is captured anew
_TRIAL_ROWS = (7, 1, 1, 1, 3)  # of a replay's test: one row is captured, then replayed with others
_TRIAL_ERROR = 0.05
"""Largest error of a replay, relative to the output (root mean square): a library may pick another
kernel for a capture, but an input that a graph misses is off by much more."""


_MOST_COMPILED = 64  # versions of a layer, of all models of a process, and of counts of rows


def compiled_layer(compiler: str) -> Callable[..., Tensor]:
    """`run_layer` with the element-wise work between products in few kernels, rounded as without.

    All layers of a kind share its code, for all counts of rows but one, and of slots. What it gives
    raises RuntimeError where a layer cannot be compiled as a whole.
    """
    options: Any = {"emulate_precision_casts": True} if compiler == "inductor" else None
    work = torch.compile(run_layer, backend=compiler, fullgraph=True, dynamic=True, options=options)
    shapes: Any = torch.fx.experimental._config  # rows would be taken for heads, if as many

    def through(*layer: Any, **given: Any) -> Tensor:
        most = torch._dynamo.config.patch(recompile_limit=_MOST_COMPILED)
        with most, shapes.patch(use_duck_shape=False):
            return work(*layer, **given)

    return through


class CudaGraphExecutor:
    """Segments at fixed addresses, each captured once per number of rows and of slots."""

    def __init__(self, decoder: Any, lm_head: nn.Module, *, slots: int = _FIRST_SLOTS) -> None:
        """`slots`: positions with room at first. Raises ValueError for what cannot be captured."""
        require_own_code(decoder, lm_head)
        _require_capturable(decoder, lm_head)
        self._decoder = decoder
        self._generic = GenericExecutor(decoder, lm_head)
        self.weight_bytes = self._generic.weight_bytes
        self._num_layers = len(decoder.layers)
        config = decoder.config
        # padding may lie behind the last one
        self._limit = fixed_slots(config.max_position_embeddings + _MOST_ROWS)
        weight = decoder.embed_tokens.weight
        with torch.inference_mode(False):
            self._hidden = weight.new_zeros(_MOST_ROWS, config.hidden_size)
            self._positions = torch.zeros(_MOST_ROWS, dtype=torch.int64, device=weight.device)
            self._places = torch.zeros_like(self._positions)  # the slots of the rows
            self._tree = torch.zeros(_MOST_ROWS + 2, _MOST_ROWS, dtype=torch.int64).to(self._places)
            self._offsets = torch.arange(_MOST_ROWS, device=weight.device)
        first = StaticSlots(self._one_position(), self._count(min(slots, self._limit)))
        self._lanes = [first]
        self._planted: tuple[int, ...] = ()
        self.replays = Replays(lambda: uncaptured)
        self._through: Callable[..., Tensor] = run_layer
        self._lock = threading.Lock()  # answers may be written in several threads
        self.claims = Claims(replayed=self._replayed)

    def start_capture(
        self, strategy: Callable[[], Capture] | None = None, compiler: str | None = "inductor"
    ) -> None:
        """Capture each segment at its first use from now on. Raises ValueError if a replay errs.

        `compiler`: torch's name of the one that makes one kernel of a layer's many small ones.
        """
        strategy = strategy or (lambda: graph_capture(self._hidden.device))
        expected = self._trial()
        try:
            if compiler is not None:
                logger.info("compiling layers for this device: half a minute, the first time")
                self._through = compiled_layer(compiler)
                self._compare(expected, "a compiled layer")
        except Exception as error:  # noqa: BLE001  # whatever fails: layers run as they are
            logger.warning("layers run uncompiled: %s", first_line(error))
            self._through = run_layer
        self.replays = Replays(strategy)
        self._compare(expected, "a captured segment, replayed,")

    def _compare(self, expected: Sequence[Tensor], what: str) -> None:
        for found, right in zip(self._trial(), expected, strict=True):
            error = (found.float() - right.float()).square().mean().sqrt()
            if not float(error) <= _TRIAL_ERROR * float(right.float().square().mean().sqrt()):
                raise ValueError(f"{what} comes out differently")

    def run(self, hidden: Tensor, first: int, last: int, rows: Rows) -> Tensor:
        """Layers first+1..last on [T, d], of one text; adds to the KV cache."""
        kv, count = rows.only.kv, len(hidden)
        start, padded = kv.length(first), _padded(count)
        kv.check_room(start + count)
        needed = kv.slots + _MOST_ROWS if kv.slots else start + (padded or count)
        with self._lock:
            lane = self._lane(kv, needed)
            if padded is None:
                return self._generic.run(hidden, first, last, rows)
            # what lay behind may be NaN, which masks let through
            self._hidden[:padded] = with_zeros(hidden, padded)
            self._plant(rows.only.parents)
            torch.add(self._tree[_DEPTHS, :padded], rows.only.start, out=self._positions[:padded])
            torch.add(self._offsets[:padded], start, out=self._places[:padded])
            segment = lane, first, last, padded, self._count(needed)
            (output,) = self.replays.run(segment, partial(self._segment, *segment))
            kv.extend(count, first, last)
            return output[:count].clone()  # the next replay overwrites it

    def unembed(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Output of layer L, [T, d] -> normed, [T, d], and what lm_head makes of that, [T, V]."""
        normed, logits = self._replayed("unembed", self._generic.unembed, hidden)
        return normed, logits

    def _replayed(self, key: Hashable, work: Work, *inputs: Tensor) -> tuple[Tensor, ...]:
        if (padded := _padded(count := len(inputs[0]))) is None:
            return work(*inputs)
        rows = [with_zeros(one, padded) for one in inputs]
        with self._lock:
            outputs = self.replays.run((key, padded, len(inputs)), work, *rows)
            return tuple(output[:count].clone() for output in outputs)

    def _lane(self, kv: KVCache, needed: int) -> StaticSlots:
        """Where `kv` is, or goes: unused slots, new ones, or those of whom was away for longest."""
        lanes = self._lanes  # the one used last is the last
        of_kv, free = ([one for one in lanes if one.tenant() is who] for who in (kv, None))
        if not (of_kv or free) and len(lanes) < _MOST_LANES:
            with suppress(torch.OutOfMemoryError):  # then somebody's are taken
                free = [StaticSlots(lanes[-1].samples, lanes[-1].slots)]
        lane = (of_kv or free or lanes)[0]
        self._lanes = [*(one for one in lanes if one is not lane), lane]
        if needed > lane.slots:
            self.replays.clear()
            lane.grow(self._count(needed))
        lane.lend(kv)
        return lane

    def _plant(self, parents: Sequence[int] | None) -> None:
        """Say which rows see which; those of padding follow one another."""
        parents = () if parents is None else tuple(parents)
        parents = *parents, *range(len(parents) - 1, _MOST_ROWS - 1)
        if parents != self._planted:
            numbers = torch.tensor([depths(parents), held_behind(parents)])
            tree = torch.cat([ancestors(parents), numbers])
            pinned = tree.pin_memory() if self._tree.is_cuda else tree
            self._tree.copy_(pinned, non_blocking=True)
            self._planted = parents

    @torch.inference_mode(False)  # or the buffers' rows and what layers give differ in kind
    @torch.no_grad()
    def _segment(
        self, lane: StaticSlots, first: int, last: int, count: int, seen: int
    ) -> tuple[Tensor]:
        """Layers first+1..last from the fixed buffers: what is captured."""
        positions, places = self._positions[None, :count], self._places[:count]
        kinds = set(self._generic.layer_types[first:last])
        masks = {kind: self._mask(kind, count, seen) for kind in kinds}
        slots = zip(lane.keys, lane.values, strict=True)
        views = [SlotView(keys, values, places, seen) for keys, values in slots]
        hidden = self._hidden[None, :count].clone()  # no view, like what later layers get
        run = self._generic.run_layers
        return (run(hidden, first, last, positions, views, masks, self._through)[0],)

    def _mask(self, kind: str, count: int, seen: int) -> Tensor:
        """[1, 1, rows, seen] as transformers makes it, but from numbers on the device."""
        tree, first, config = self._tree[:, :count], self._places[0], self._decoder.config
        slots = torch.arange(seen, device=first.device)
        row = (slots - first).clamp(-1, count)  # of this pass that a slot is for
        ours, row = (row >= 0) & (row < count), row.clamp(0, count - 1)
        held = slots < first - tree[_UNSEEN, :, None]
        visible = held | (ours & tree.index_select(1, row)[:count].bool())
        stands = torch.where(ours, first + tree[_DEPTHS].index_select(0, row), slots)
        visible = in_reach(visible, kind, config, first + tree[_DEPTHS], stands)
        return as_mask(visible, config, self._hidden)

    def _count(self, needed: int) -> int:
        """Slots for `needed` positions: few distinct counts, and none beyond what is ever used."""
        count = max(_FEWEST_SEEN, 1 << (needed - 1).bit_length())
        return self._limit if needed <= self._limit < count else count

    @torch.no_grad()
    def _one_position(self) -> list[tuple[Tensor, Tensor]]:
        kv, embed = KVCache(self._num_layers), self._decoder.embed_tokens
        device = embed.weight.device
        ids = torch.zeros(1, dtype=torch.int64, device=device)
        self._generic.run(embed(ids), 0, self._num_layers, Rows.of(kv, 0, 1, device))
        held = [kv.first(1, layer) for layer in range(self._num_layers)]
        return [(keys.clone(), values.clone()) for keys, values in held]  # not their buffers

    @torch.no_grad()
    def _trial(self) -> list[Tensor]:
        """Outputs and logits of a few passes over one text, at the first and the last positions."""
        found, count = [], sum(_TRIAL_ROWS)
        weight = self._decoder.embed_tokens.weight
        ids = torch.arange(count, device=weight.device) % len(weight)
        for start in (0, max(0, int(self._decoder.config.max_position_embeddings) - count)):
            kv, done = KVCache(self._num_layers), start
            for block in ids.split(_TRIAL_ROWS):
                rows = Rows.of(kv, done, len(block), weight.device)
                hidden = self._decoder.embed_tokens(block)
                found.append(self.run(hidden, 0, self._num_layers, rows))
                found += self.unembed(found[-1])
                done += len(block)
        return found


def _padded(count: int) -> int | None:
    """Rows of the captured pass that `count` rows run in; None: they run uncaptured."""
    return next((rows for rows in ROW_COUNTS if rows >= count), None)


def _require_capturable(decoder: Any, lm_head: nn.Module) -> None:
    """Raise ValueError for experts, which Python reads back, and for several devices."""
    for kind in {type(part) for layer in decoder.layers for part in layer.modules()}:
        if any(word in kind.__name__.lower() for word in ("expert", "moe")):
            raise ValueError(f"{kind.__name__} reads values back")
    devices = {weight.device for part in (decoder.module, lm_head) for weight in part.parameters()}
    if len(devices) != 1:
        raise ValueError(f"weights are on {len(devices)} devices, expected one")
