"""The KV cache: keys and values per layer, in pages that sequences share, within a memory budget.

Each layer has its own length, since shallow layers see drafts that deep layers have not seen yet. A
pass is a flat block of rows [T, d], and `Rows` says which sequences and positions they belong to.
One sequence with a chain of drafts is the smallest case.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain, groupby
from operator import attrgetter
from typing import NamedTuple
from weakref import proxy

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor

from selfspec.errors import InvalidOption
from selfspec.model.compiler import PANEL

# --- pages: 64 positions of all layers each; a page held by several caches is never written

POSITIONS = 64  # positions of a page; BLOCK of the kernel


@dataclass(frozen=True)
class PageLayout:
    """The layout of each layer's keys and values in a page."""

    dtype: torch.dtype
    heads: tuple[tuple[int, int], ...]
    """For each layer: the number of key heads, and their width, padded to whole vectors."""

    @cached_property
    def places(self) -> tuple[int, ...]:
        """The offset of each layer's keys, and the end of the last layer.

        Keys and values are laid out like a linear layer's weights, with `step` neighbours of the
        inner dimension together: keys [kv heads, 64 / PANEL, width / step, PANEL, step], then
        values [kv heads, width / PANEL, 64 / step, PANEL, step].
        """
        return tuple(
            accumulate((2 * kv * POSITIONS * width for kv, width in self.heads), initial=0)
        )

    @property
    def nbytes(self) -> int:
        return self.places[-1] * self.dtype.itemsize

    def slots(self, page: Tensor, slot: int) -> list[tuple[Tensor, Tensor]]:
        """Views of the keys and values of one slot, one pair for each run of equal layers.

        Keys [layers, kv heads, width / step, step], values [.., .., width / PANEL, PANEL].
        """
        views, layer, step = [], 0, 4 // self.dtype.itemsize
        for (kv, width), alike in groupby(self.heads):
            size, place = kv * POSITIONS * width, self.places[layer]
            layers = len(list(alike))
            keys = page.as_strided(
                (layers, kv, width // step, step),
                (2 * size, POSITIONS * width, PANEL * step, 1),
                place + slot // PANEL * PANEL * width + slot % PANEL * step,
            )
            values = page.as_strided(
                (layers, kv, width // PANEL, PANEL),
                (2 * size, POSITIONS * width, POSITIONS * PANEL, step),
                place + size + slot // step * PANEL * step + slot % step,
            )
            views.append((keys, values))
            layer += layers
        return views


class Page:
    """The numbers of one page, and its users."""

    def __init__(self, layout: PageLayout) -> None:
        """Fill with zeros: masked numbers have weight 0, but 0 times NaN is NaN."""
        self.numbers = torch.zeros(layout.places[-1], dtype=layout.dtype)
        self.address = self.numbers.data_ptr()
        self.caches = 0
        self.kept = False  # whether a store keeps it for later sequences


# --- one sequence: buffers with spare room; to keep part of a chain only changes a length

_FIRST_SLOTS = 256  # of a new buffer: a short answer to a short prompt fits without growing

_SPARE = 4  # one spare slot for this many needed ones: a growing text is copied only a few times


class KVCache:
    """The keys and values of one sequence, layer by layer.

    transformers' attention layers call `update`, its mask functions `get_seq_length`,
    `get_query_offset` and `get_mask_sizes`. Compiled attention calls `pages` instead.

    With `slots`, attention always sees buffers of exactly that many slots, the unused ones masked,
    so that the shape of a pass does not depend on the number of filled positions (pinned mode).
    """

    def __init__(self, num_layers: int, slots: int | None = None) -> None:
        self.num_layers = num_layers
        self.slots = slots
        self.held_pages: list[Page] = []  # in order; empty if the model's own layers fill buffers
        self._layout: PageLayout | None = None
        self._new_page: Callable[[PageLayout], Page] = Page
        self._lengths = [0] * num_layers
        self._keys: list[Tensor | None] = [None] * num_layers  # [B, kv heads, slots, head_dim]
        self._values: list[Tensor | None] = [None] * num_layers

    @property
    def is_compileable(self) -> bool:
        """True with fixed slots: a one-row pass then needs a mask too."""
        return self.slots is not None

    def length(self, layer_idx: int = 0) -> int:
        """The number of positions held by a layer, which is the position of its next row."""
        return self._lengths[layer_idx]

    get_seq_length = get_query_offset = length

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Append [B, heads, T, head_dim] to `layer`; return all it holds, [B, heads, length, ..].

        With fixed slots the whole buffers are returned; the mask hides unfilled slots.
        """
        start = self._lengths[layer]
        end = start + keys.shape[-2]
        self.check_room(end)
        seen = self.slots or end
        all_keys = self._keys[layer] = self._room(self._keys[layer], keys, start, seen)
        all_values = self._values[layer] = self._room(self._values[layer], values, start, seen)
        all_keys[..., start:end, :] = keys
        all_values[..., start:end, :] = values
        self._lengths[layer] = end
        return all_keys[..., :seen, :], all_values[..., :seen, :]

    def first(self, count: int, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first positions of `layer`, [B, heads, count, head_dim]; views."""
        keys, values = self._keys[layer], self._values[layer]
        if keys is None or values is None:
            raise IndexError(f"layer {layer} holds nothing")
        return keys[..., :count, :], values[..., :count, :]

    def pages(self, count: int, first: int, layout: PageLayout) -> list[Page]:
        """All pages, with room for `count` more positions from layer first+1 on; call `extend`."""
        start = self._lengths[first]
        end = start + count
        self.check_room(end)
        self._layout = layout
        while len(self.held_pages) * POSITIONS < end:
            self.hold(self._new_page(layout))
        for index in range(start // POSITIONS, -(-end // POSITIONS)):
            page = self.held_pages[index]
            if page.kept or page.caches > 1:
                self.held_pages[index] = copy = self._new_page(layout)
                copy.numbers.copy_(page.numbers)
                page.caches, copy.caches = page.caches - 1, 1
        return self.held_pages

    def hold(self, page: Page) -> None:
        page.caches += 1
        self.held_pages.append(page)

    def check_room(self, end: int) -> None:
        """Raise IndexError unless `end` positions fit the fixed slots, if there are any."""
        if self.slots is not None and end > self.slots:
            raise IndexError(f"{end} positions do not fit {self.slots} fixed slots")

    def move_to(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Copy all to these buffers, [B, kv heads, slots, head_dim] per layer, and use them."""
        for buffers, targets in ((self._keys, keys), (self._values, values)):
            for layer, length in enumerate(self._lengths):
                if (buffer := buffers[layer]) is not None:
                    targets[layer][..., :length, :] = buffer[..., :length, :]
            buffers[:] = targets

    def extend(self, count: int, first: int, last: int) -> None:
        """Count positions that were written directly into the buffers of layers first+1..last."""
        self._lengths[first:last] = [length + count for length in self._lengths[first:last]]

    def truncate(self, length: int, first: int = 0, last: int | None = None) -> None:
        """Cut layers first+1..last (default all) to at most `length` positions; copies nothing."""
        last = self.num_layers if last is None else last
        self._lengths[first:last] = [min(held, length) for held in self._lengths[first:last]]

    def keep(self, start: int, path: Sequence[int]) -> None:
        """Keep only those positions from `start` on that are in `path`, in every layer.

        `path`, the accepted rows of a round, counts from `start` and ascends. For a chain it is
        0, 1, .., and nothing is copied; a tree's rows move up.
        """
        for place, row in enumerate(path):
            if row != place:
                self._move(start + row, start + place)
        self.truncate(start + len(path))

    def _move(self, source: int, dest: int) -> None:
        """Copy one slot to another in all layers, all buffers in one call."""
        if (layout := self._layout) is not None:
            old, new = (
                list(chain(*layout.slots(self.held_pages[at // POSITIONS].numbers, at % POSITIONS)))
                for at in (source, dest)
            )
        else:
            buffers = [buffer for buffer in (*self._keys, *self._values) if buffer is not None]
            old, new = ([buffer.select(-2, slot) for buffer in buffers] for slot in (source, dest))
        if new:
            torch._foreach_copy_(new, old)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """The number of keys that a mask for `query_length` more rows covers, and the offset 0."""
        return self.slots or self._lengths[layer_idx] + query_length, 0

    def _room(self, buffer: Tensor | None, like: Tensor, used: int, needed: int) -> Tensor:
        """`buffer`, or a larger copy of its first `used` slots if it has fewer than `needed`."""
        if buffer is not None and buffer.shape[-2] >= needed:
            return buffer
        slots = self.slots or max(_FIRST_SLOTS, needed + needed // _SPARE)
        # zeros, not empty: masked slots have weight 0, but 0 times NaN is NaN
        grown = like.new_zeros(*like.shape[:-2], fixed_slots(slots), like.shape[-1])
        if buffer is not None:
            grown[..., :used, :] = buffer[..., :used, :]
        return grown


def fixed_slots(length: int) -> int:
    """Slots for up to `length` positions: a multiple of 64, since each new shape is probed."""
    return -(-length // 64) * 64


@dataclass(frozen=True)
class Span:
    """The adjacent rows of one sequence in the block."""

    kv: KVCache
    count: int
    start: int  # the position after the newest held one
    parents: tuple[int, ...] | None = None
    """None: each row follows the one before. Else, for each row, the earlier row of the span that
    it follows; -1: the newest held position, -2: the one before it, and so on."""
    read: int | None = None  # rows at the end whose output is read; None: all

    @property
    def read_count(self) -> int:
        return self.count if self.read is None else min(self.read, self.count)

    @property
    def positions(self) -> Sequence[int]:
        """One for each row; siblings share theirs."""
        if self.parents is None:
            return range(self.start, self.start + self.count)
        return [self.start + depth for depth in depths(self.parents)]


@dataclass(frozen=True)
class Rows:
    """The rows of one pass."""

    device: torch.device
    spans: tuple[Span, ...]  # in the order of the block

    @classmethod
    def of(
        cls,
        kv: KVCache,
        start: int,
        count: int,
        device: torch.device,
        parents: Sequence[int] | None = None,
        read: int | None = None,
    ) -> Rows:
        """`count` rows of one sequence after its first `start` positions: a chain, or a tree."""
        parents = None if parents is None else tuple(parents)
        return cls(device, (Span(kv, count, start, parents, read),))

    @classmethod
    def joined(cls, parts: Sequence[Rows]) -> Rows:
        """Join several passes, of different sequences, into one."""
        return cls(parts[0].device, tuple(span for part in parts for span in part.spans))

    @cached_property
    def positions(self) -> Tensor:
        """[T] int64; made on first use, since compiled layers do not need them."""
        if len(self.spans) == 1 and (span := self.span).parents is None:
            return torch.arange(span.start, span.start + span.count, device=self.device)
        return upload([place for span in self.spans for place in span.positions], self.device)

    @property
    def span(self) -> Span:
        """The span of a pass with a single one."""
        (span,) = self.spans
        return span

    @property
    def are_chains(self) -> bool:
        return all(span.parents is None for span in self.spans)

    def parts(self, hidden: Tensor, most: int = 1) -> Iterator[tuple[Tensor, Rows]]:
        """The block [T, d] and its rows in parts: adjacent spans of up to `most` rows, or one."""
        groups, rows = list[list[Span]](), most  # so that the first span begins a group
        for span in self.spans:
            if rows + span.count > most:
                groups.append([])
                rows = 0
            groups[-1].append(span)
            rows += span.count
        blocks = hidden.split([sum(span.count for span in group) for group in groups])
        for block, group in zip(blocks, groups, strict=True):
            yield block, Rows(self.device, tuple(group))

    def blocks(self, hidden: Tensor, most: int) -> Iterator[tuple[Tensor, Rows]]:
        """The block [T, d] and its rows, a single chain, in parts of up to `most` rows."""
        span = self.span
        start, read = span.start, span.read  # rows that are read may lie in two parts
        for block in hidden.split(most):
            yield block, Rows.of(span.kv, start, len(block), self.device, None, read)
            start += len(block)


def upload(numbers: Sequence[int], device: torch.device) -> Tensor:
    """[T] int64 on `device`; the host does not wait for the copy."""
    if len(numbers) == 1:  # passed with the kernel launch, without a copy
        return torch.full((1,), numbers[0], device=device)
    pinned = torch.tensor(numbers, dtype=torch.int64, pin_memory=device.type == "cuda")
    return pinned.to(device, non_blocking=True)


def with_zeros(hidden: Tensor, least_rows: int) -> Tensor:
    """[T, d] with zero rows up to `least_rows`."""
    missing = least_rows - len(hidden)
    return F.pad(hidden, (0, 0, 0, missing)) if missing > 0 else hidden


def depths(parents: Sequence[int]) -> list[int]:
    """Each row's distance after the newest held position; 0 is the next one."""
    distances: list[int] = []
    for parent in parents:
        distances.append((distances[parent] if parent >= 0 else parent) + 1)
    return distances


def count_unseen(parents: Sequence[int]) -> list[int]:
    """The number of newest held positions that each row of a tree does not see."""
    counts: list[int] = []
    for parent in parents:
        counts.append(counts[parent] if parent >= 0 else -1 - parent)
    return counts


def ancestors(parents: Sequence[int]) -> Tensor:
    """[T, T], true where the column's row is the row itself or one that it follows."""
    mask = torch.eye(len(parents), dtype=torch.bool)
    for row, parent in enumerate(parents):
        if parent >= 0:
            mask[row] |= mask[parent]
    return mask


# --- many sequences, within a budget

Ids = tuple[int, ...]


class Memory(NamedTuple):
    """Bytes for keys and values, by use."""

    used: int  # by running sequences
    promised: int  # room that these may still need
    kept: int  # prefixes of ended sequences, for reuse; evicted when the promised room is needed
    most: int  # the budget


@dataclass(eq=False)
class _Node:
    ids: Ids  # 64; only a leaf may have fewer
    parent: _Node | None = None  # a weak proxy: a cycle would keep all pages until a collection
    page: Page | None = None  # None: the root, before all texts
    children: list[_Node] = field(default_factory=list)
    """Sorted by their ids, so the child with the longest common prefix is found by bisection."""

    def nearest(self, ids: Ids) -> tuple[int, _Node | None]:
        """The length of the longest prefix that a child shares with `ids`, and this child."""
        place = bisect_left(self.children, ids, key=attrgetter("ids"))
        candidates = self.children[max(0, place - 1) : place + 1]
        pairs = ((common_prefix(child.ids, ids), child) for child in candidates)
        return max(pairs, default=(0, None), key=lambda pair: pair[0])


class PooledKVCache(KVCache):
    """A KV cache that takes its pages from a store."""

    def __init__(self, store: KVStore, most: int) -> None:
        """`most`: maximum number of pages."""
        super().__init__(store.num_layers)
        self.most, self._layout, self._new_page = most, store.layout, lambda _: store.take()


class KVStore:
    """Makes KV caches that share a budget; only a sequence that runs alone may exceed it."""

    def __init__(
        self, num_layers: int, layout: PageLayout | None, position_bytes: int, most: int
    ) -> None:
        """`layout`: that of pages; None: the executor has no pages. `most`: the budget in bytes."""
        self.num_layers = num_layers
        self.layout = layout
        self._page_bytes = position_bytes * POSITIONS if layout is None else layout.nbytes
        self._budget, self._most = most, most // self._page_bytes
        self._root = _Node(())
        self._nodes: dict[Page, _Node] = {}  # least recently used first
        self._free: list[Page] = []
        self._caches: set[PooledKVCache] = set()
        self._page_count = 0

    @property
    def memory(self) -> Memory:
        used, promised = self._pages_in_use()
        kept = sum(page.caches == 0 for page in self._nodes)
        return Memory(*(pages * self._page_bytes for pages in (used, promised, kept, self._most)))

    def refuse_too_long(self, positions: int) -> None:
        """Raise InvalidOption for a text that can never fit."""
        if (needed := _pages(positions)) > self._most:
            raise InvalidOption(
                f"a text of up to {positions} tokens needs {_size(needed * self._page_bytes)} for "
                f"keys and values, kv_memory is {_size(self._budget)}. Lower max_new_tokens, or "
                "raise kv_memory"
            )

    def kv(self, positions: int) -> PooledKVCache:
        """A KV cache for up to `positions`; it takes no room before `admit`."""
        return PooledKVCache(self, _pages(positions))

    def admit(self, kv: PooledKVCache, ids: Sequence[int]) -> bool:
        """Give `kv` the longest held prefix of `ids[:-1]`; return False if there is no room yet."""
        nodes, partial, length = self._prefix(tuple(ids[:-1]))
        pages = [node.page for node in nodes if node.page is not None]
        missing = max(0, kv.most - len(pages))
        newly_used = sum(page.caches == 0 for page in pages)
        if self._caches and sum(self._pages_in_use()) + newly_used + missing > self._most:
            return False
        self._caches.add(kv)
        for page in pages:
            kv.hold(page)
        kv.extend(length, 0, self.num_layers)
        self._touch(pages)
        if partial is not None and partial.page is not None:
            self._touch([partial.page])
            copy = self.take()
            copy.numbers.copy_(partial.page.numbers)
            kv.hold(copy)
        return True

    def prefix_length(self, ids: Sequence[int]) -> int:
        """The length of the longest held prefix of `ids[:-1]`."""
        return self._prefix(tuple(ids[:-1]))[2]

    def share(self, kv: KVCache, ids: Sequence[int]) -> None:
        """Share the full pages of `ids`, which `kv` holds, with other sequences."""
        if isinstance(kv, PooledKVCache):
            self._keep(kv, tuple(ids[: len(ids) // POSITIONS * POSITIONS]))

    def release(self, kv: KVCache, ids: Sequence[int]) -> None:
        """Release a sequence that ended with `ids`; the KV cache may lack the last of them."""
        if not isinstance(kv, PooledKVCache) or kv not in self._caches:
            return
        self._caches.remove(kv)
        self._keep(kv, tuple(ids[: kv.length(self.num_layers - 1)]))
        for page in kv.held_pages:
            page.caches -= 1
            if page.caches == 0 and not page.kept:
                self._free.append(page)
        self._touch([page for page in kv.held_pages if page in self._nodes])
        # shrink to the budget, which a sequence that ran alone may have exceeded
        while self._page_count > self._most and (self._free or self._evict()):
            self._free.pop()
            self._page_count -= 1

    def take(self) -> Page:
        """A page for a new owner: a free one, a new one, or the least recently used."""
        assert self.layout is not None  # noqa: S101  # KV caches without pages never call this
        if not self._free and self._page_count >= self._most:
            self._evict()
        if self._free:
            return self._free.pop()
        self._page_count += 1
        return Page(self.layout)

    def _pages_in_use(self) -> tuple[int, int]:
        pages = {page for kv in self._caches for page in kv.held_pages}
        if self.layout is None:  # buffers outside the store: count the most that each may need
            return sum(kv.most for kv in self._caches), 0
        return len(pages), sum(max(0, kv.most - len(kv.held_pages)) for kv in self._caches)

    def _prefix(self, ids: Ids) -> tuple[list[_Node], _Node | None, int]:
        """Nodes of the longest held prefix, one that holds part of its end, and its length."""
        nodes, length = [self._root], 0
        while True:
            count, child = nodes[-1].nearest(ids[length : length + POSITIONS])
            if child is None or count < POSITIONS:
                return nodes[1:], child if count else None, length + count
            nodes.append(child)
            length += POSITIONS

    def _keep(self, kv: PooledKVCache, ids: Ids) -> None:
        """Add the cache's pages with these ids to the tree, unless it has them."""
        node = self._root
        for start, page in zip(range(0, len(ids), POSITIONS), kv.held_pages, strict=False):
            part = ids[start : start + POSITIONS]
            _, child = node.nearest(part)
            if child is None or child.ids != part:
                if page.kept:  # already in the tree, with more or other ids
                    return
                self._nodes[page] = child = _Node(part, proxy(node), page)
                insort(node.children, child, key=attrgetter("ids"))
                page.kept = True
            node = child

    def _touch(self, pages: Sequence[Page]) -> None:
        """Mark pages as most recently used; children before parents, so they are evicted first."""
        for page in reversed(pages):
            self._nodes[page] = self._nodes.pop(page)

    def _evict(self) -> bool:
        """Free the least recently used page; returns whether there is one."""
        for page, node in self._nodes.items():
            if node.parent is not None and not node.children and not page.caches:
                node.parent.children.remove(node)
                del self._nodes[page]
                page.kept = False
                self._free.append(page)
                return True
        return False


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return int(psutil.virtual_memory().available)


def _pages(positions: int) -> int:
    return -(-positions // POSITIONS) + 1


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    count = min(len(one), len(other))
    if one[:count] == other[:count]:
        return count
    return next((index for index in range(count) if one[index] != other[index]), count)


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
