"""Keys and values of many texts within a budget; what texts begin with alike is kept once.

    lease   for a text that will be written
    admit   it begins, with the longest prefix of its ids that is held; or it waits
    share   its prompt has run: others that begin alike may read its full pages
    done    it has ended: its pages stay for texts to come, until their room is needed

Held text is a tree of pages. A text follows the pages that hold exactly its ids; of the page that
holds only some of the next ids it takes a copy. Pages that no text reads go, least recently used
first. Executors without pages get leases of their own, which are counted alike and share nothing.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from selfspec.errors import InvalidOption
from selfspec.model.kv_pages import POSITIONS, Page, PageLayout, Pages
from selfspec.model.kv_store import Lease

Ids = tuple[int, ...]


class Memory(NamedTuple):
    """In bytes."""

    used: int
    """By texts that are being written."""
    promised: int
    """What these may still grow to."""
    kept: int
    """Of texts that have ended, for others that begin alike; it makes room for what is promised."""
    most: int
    """The budget."""


@dataclass(eq=False)
class _Node:
    """A page of held text behind those of its parents."""

    ids: Ids
    """Up to 64; only a leaf has fewer."""
    parent: _Node | None = None
    page: Page | None = None
    """None: the root, which stands before all texts."""
    children: dict[Ids, _Node] = field(default_factory=dict)
    order: list[Ids] = field(default_factory=list)
    """Of the children, sorted: those that share most with some ids are next to them."""
    used: int = 0
    """When it was needed last."""

    def add(self, child: _Node) -> None:
        self.children[child.ids] = child
        insort(self.order, child.ids)

    def remove(self, child: _Node) -> None:
        del self.children[child.ids]
        del self.order[bisect_left(self.order, child.ids)]

    def nearest(self, ids: Ids) -> tuple[int, _Node | None]:
        """The child that shares most of its first ids with `ids`, and how many."""
        place = bisect_left(self.order, ids)
        near = (self.children[one] for one in self.order[max(0, place - 1) : place + 1])
        return max(((_shared(one.ids, ids), one) for one in near), default=(0, None), key=_first)


class PooledLease(Lease):
    """A lease whose pages are the store's."""

    def __init__(self, store: KVStore, most: int) -> None:
        """`most`: pages that it may come to."""
        super().__init__(store.num_layers)
        self.store, self.most = store, most

    def _new_pages(self, layout: PageLayout) -> Pages:
        return _PooledPages(layout, self.store)

    @property
    def held(self) -> list[Page]:
        """Its pages."""
        return [] if self._pages is None else self._pages.held

    def start_from(self, pages: Sequence[Page], length: int, layout: PageLayout) -> None:
        """Hold what another text left."""
        self._pages = self._new_pages(layout)
        for page in pages:
            self._pages.hold(page)
        self.extend(length, 0, self.num_layers)

    def go_on_within(self, page: Page) -> None:
        """A copy of what others need as it is."""
        if self._pages is not None:
            own = self._pages.new()
            own.numbers.copy_(page.numbers)
            self._pages.hold(own)


class _PooledPages(Pages):
    """Pages that come from a store."""

    def __init__(self, layout: PageLayout, store: KVStore) -> None:
        super().__init__(layout)
        self._store = store

    def new(self) -> Page:
        """A page that nobody holds."""
        return self._store.take()


class KVStore:
    """Gives leases. Never holds more than its budget, but for a text that is alone."""

    def __init__(
        self, num_layers: int, layout: PageLayout | None, position_bytes: int, most: int
    ) -> None:
        """`layout`: of pages, None: the executor has none. `most`: bytes."""
        self.num_layers = num_layers
        self._layout = layout
        self._page_bytes = position_bytes * POSITIONS if layout is None else layout.nbytes
        self._most = most // self._page_bytes
        self._root = _Node(())
        self._nodes: dict[Page, _Node] = {}
        self._free: list[Page] = []
        self._idle: list[tuple[int, int, _Node]] = []
        """A heap, least recently used first; what has been used since is skipped."""
        self._clock = count(1)
        self._leases: set[PooledLease] = set()
        self._made = 0

    @property
    def memory(self) -> Memory:
        """What is in use now."""
        used, promised = self._in_use()
        kept = sum(page.leases == 0 for page in self._nodes)
        return Memory(*(pages * self._page_bytes for pages in (used, promised, kept, self._most)))

    def refuse_too_long(self, positions: int) -> None:
        """Raise InvalidOption for a text that can never fit."""
        if (needed := _pages(positions)) > self._most:
            raise InvalidOption(
                f"a text of up to {positions} tokens needs {_size(needed * self._page_bytes)} for "
                f"keys and values, kv_memory is {_size(self._most * self._page_bytes)}. Lower "
                "max_new_tokens, or raise kv_memory"
            )

    def lease(self, positions: int) -> PooledLease:
        """For a text of up to `positions`, which takes no room before it is admitted."""
        return PooledLease(self, _pages(positions))

    def admit(self, lease: PooledLease, ids: Sequence[int]) -> bool:
        """Begin with the longest prefix of `ids` that is held; at least one id is left to run.

        False: there is no room now.
        """
        nodes, partial, length = self._prefix(tuple(ids[:-1]))
        pages = [node.page for node in nodes if node.page is not None]
        grows = max(0, lease.most - len(pages))
        newly_used = sum(page.leases == 0 for page in pages)
        if self._leases and sum(self._in_use()) + newly_used + grows > self._most:
            return False
        self._leases.add(lease)
        if self._layout is not None and length:
            lease.start_from(pages, length, self._layout)
            self._touch(nodes)
            if partial is not None and partial.page is not None:
                self._touch([partial])
                lease.go_on_within(partial.page)
        return True

    def held(self, ids: Sequence[int]) -> int:
        """How many of the first of `ids` are held."""
        return self._prefix(tuple(ids[:-1]))[2]

    def share(self, lease: Lease, ids: Sequence[int]) -> None:
        """Others may read the full pages of `ids`, which `lease` holds."""
        full = len(ids) // POSITIONS * POSITIONS
        self._keep(lease, tuple(ids[:full]))

    def done(self, lease: Lease, ids: Sequence[int]) -> None:
        """The text has ended with `ids`, of which the lease may lack the last."""
        if not isinstance(lease, PooledLease) or lease not in self._leases:
            return
        self._leases.remove(lease)
        self._keep(lease, tuple(ids[: lease.length(self.num_layers - 1)]))
        for page in lease.held:
            page.leases -= 1
            if page.leases == 0 and not page.kept:
                self._free.append(page)
        self._touch([self._nodes[page] for page in lease.held if page in self._nodes])
        self._shrink()

    def take(self) -> Page:
        """A page that nobody holds: a free one, a new one, or the one unused for longest."""
        assert self._layout is not None  # noqa: S101  # leases without pages never ask
        if not self._free and self._made >= self._most:
            self._evict()
        if self._free:
            return self._free.pop()
        self._made += 1
        return Page.new(self._layout)

    def _in_use(self) -> tuple[int, int]:
        """Pages that texts hold, and how many more they may come to."""
        held = {page for lease in self._leases for page in lease.held}
        if self._layout is None:  # leases of their own grow as they like
            return sum(lease.most for lease in self._leases), 0
        return len(held), sum(max(0, one.most - len(one.held)) for one in self._leases)

    def _prefix(self, ids: Ids) -> tuple[list[_Node], _Node | None, int]:
        """Nodes that hold the first ids, one that holds some of the next, and how many in all."""
        node, nodes = self._root, list[_Node]()
        while (child := node.children.get(ids[len(nodes) * POSITIONS :][:POSITIONS])) is not None:
            if len(child.ids) < POSITIONS:
                break
            nodes.append(child)
            node = child
        length = len(nodes) * POSITIONS
        more, partial = node.nearest(ids[length:][:POSITIONS])
        return nodes, partial if more else None, length + more

    def _keep(self, lease: Lease, ids: Ids) -> None:
        """Hang the lease's pages with these ids into the tree, where they are not yet."""
        node, pages = self._root, lease.held if isinstance(lease, PooledLease) else []
        for page, part in zip(pages, _parts(ids), strict=False):
            child = node.children.get(part)
            if child is None:
                if page.kept:  # it holds more, or other, ids elsewhere
                    return
                child = _Node(part, node, page)
                node.add(child)
                self._nodes[page], page.kept = child, True
            if len(part) < POSITIONS:
                return
            node = child

    def _touch(self, nodes: Sequence[_Node]) -> None:
        """They are needed now; parents later than children, which so go first."""
        for node in reversed(nodes):
            node.used = next(self._clock)
            if not node.children and node.page is not None and node.page.leases == 0:
                heapq.heappush(self._idle, (node.used, id(node), node))
        if len(self._idle) > 2 * len(self._nodes) + POSITIONS:  # most have been used since
            self._idle = [
                (used, number, node)
                for used, number, node in self._idle
                if used == node.used and node.page in self._nodes
            ]
            heapq.heapify(self._idle)

    def _shrink(self) -> None:
        """Down to the budget, which a text that was alone may have exceeded."""
        while self._made > self._most and (self._free or self._evict()):
            self._free.pop()
            self._made -= 1

    def _evict(self) -> bool:
        """Free the page that was unused for longest; whether there is one."""
        while self._idle:
            used, _, node = heapq.heappop(self._idle)
            page, parent = node.page, node.parent
            if page is None or parent is None or self._nodes.get(page) is not node:
                continue  # it has gone already
            if used != node.used or node.children or page.leases:
                continue
            parent.remove(node)
            del self._nodes[page]
            page.kept = False
            self._free.append(page)
            if parent.page is not None and parent.page.leases == 0 and not parent.children:
                heapq.heappush(self._idle, (parent.used, id(parent), parent))
            return True
        return False


def _parts(ids: Ids) -> Iterator[Ids]:
    for start in range(0, len(ids), POSITIONS):
        yield ids[start : start + POSITIONS]


def _pages(positions: int) -> int:
    """Pages for so many positions, and for the drafts behind them."""
    return -(-positions // POSITIONS) + 1


def _shared(one: Ids, other: Ids) -> int:
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _first(pair: tuple[int, object]) -> int:
    return pair[0]


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
