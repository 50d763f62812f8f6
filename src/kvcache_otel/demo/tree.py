"""The radix tree: which prefix is on which tier, who holds on to it, and who has not been used for longest.

Every node has some pages, which follow upon its parent's, and for each tier that has them the slots where they are.
Two things always hold, and everything relies on them: what is on the device has all before it on the device, and what
is on the host has all before it on the host.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvcache_otel.demo.events import EventLog
    from kvcache_otel.demo.pages import Page

DEVICE, HOST = "device", "host"


class Node:
    """Some pages in a row.

    Attributes:
        pages: The pages.
        parent: The node before; None for the root.
        children: The nodes after, by the hash of their first page.
        device: Where they are on the device; None where they are not.
        host: Where they are in host memory; None where they are not.
        locks: Running requests that need them, here and below.
        pins: Copies from or into host memory that are going on, here and below.
        hits: How often they have been used.
        used: When that was last, by the tree's clock.
    """

    __slots__ = ("children", "device", "hits", "host", "locks", "pages", "parent", "pins", "used")

    def __init__(self, pages: list[Page], parent: Node | None) -> None:
        self.pages = pages
        self.parent = parent
        self.children: dict[int, Node] = {}
        self.device: list[int] | None = None
        self.host: list[int] | None = None
        self.locks = self.pins = self.hits = self.used = 0

    def __lt__(self, other: Node) -> bool:
        return self.used < other.used

    def path(self) -> list[Node]:
        """Returns the nodes from below the root to this one."""
        path: list[Node] = []
        node = self
        while node.parent is not None:
            path.append(node)
            node = node.parent
        return path[::-1]


class RadixTree:
    """The tree. Whatever changes what is where goes through `place`, so that the sums and the events are right.

    Attributes:
        root: Where every prompt begins; it has no pages.
        held: Pages on device and host.
        evictable: Of these, the pages that could be evicted.
        known: The hashes of all pages in the tree.
    """

    def __init__(self, log: EventLog) -> None:
        """Args:
        log: What is told of pages that come and go.
        """
        self.root = Node([], None)
        self.held = {DEVICE: 0, HOST: 0}
        self.evictable = {DEVICE: 0, HOST: 0}
        self.known: set[int] = set()
        self._log = log
        self._clock = 0

    # -- finding and inserting -----------------------------------------------------------------------------------------

    def match(self, pages: Sequence[Page]) -> Node:
        """Returns the node at which the longest known prefix ends; one that goes on beyond it is split."""
        self._clock += 1
        node, at = self.root, 0
        while at < len(pages) and (child := node.children.get(pages[at].hash)) is not None:
            common = _common(child.pages, pages, at)
            node = self._split(child, common) if common < len(child.pages) else child
            node.used = self._clock
            at += common
        return node

    def insert(self, pages: Sequence[Page], slots: Sequence[int]) -> tuple[Node, list[int]]:
        """Puts a prefix into the tree that is on the device.

        Args:
            pages: The whole prefix, from its first page on.
            slots: Where each of them is.

        Returns:
            The node at which it ends, and the slots of pages that were there already in others.
        """
        spare: list[int] = []
        at = 0
        end = self.match(pages)
        for node in end.path():
            mine = list(slots[at : at + len(node.pages)])
            at += len(node.pages)
            if node.device is None:  # It was elsewhere only, and has been computed anew.
                self.place(node, DEVICE, mine)
            else:
                spare += [slot for slot, there in zip(mine, node.device, strict=True) if slot != there]
        return (self.add(end, pages[at:], slots[at:], DEVICE) if at < len(pages) else end), spare

    def add(self, parent: Node, pages: Sequence[Page], slots: Sequence[int], tier: str) -> Node:
        """Adds a node of pages that the tree does not have; returns it."""
        node = Node(list(pages), parent)
        node.used = self._clock
        parent.children[pages[0].hash] = node
        self.known.update(page.hash for page in pages)
        self.place(node, tier, list(slots))
        return node

    def nodes(self) -> Iterator[Node]:
        """Yields all nodes below the root, parents first."""
        waiting = list(self.root.children.values())
        while waiting:
            node = waiting.pop()
            yield node
            waiting += node.children.values()

    # -- what is where -------------------------------------------------------------------------------------------------

    def place(self, node: Node, tier: str, slots: list[int] | None) -> None:
        """Says where a node's pages are in a tier from now on. A node that is nowhere is no node any more."""
        self._count(node, -1)
        if tier == DEVICE:
            node.device = slots
        else:
            node.host = slots
        self._count(node, 1)
        if slots is not None:
            self._log.stored(tier, node.pages)
            return
        self._log.removed(tier, [page.hash for page in node.pages])
        if node.device is None and node.host is None and node.parent is not None:
            del node.parent.children[node.pages[0].hash]
            self.known.difference_update(page.hash for page in node.pages)

    def lock(self, node: Node, by: int = 1) -> None:
        """Holds on to a node and all before it, for a running request; -1 lets go."""
        for each in node.path():
            self._count(each, -1)
            each.locks += by
            self._count(each, 1)

    def pin(self, node: Node, by: int = 1) -> None:
        """Holds on to the host copy of a node and all before it, for a copy that is going on; -1 lets go."""
        for each in node.path():
            self._count(each, -1)
            each.pins += by
            self._count(each, 1)

    # -- who is to go --------------------------------------------------------------------------------------------------

    def victims(self, tier: str) -> Iterator[Node]:
        """Yields what may be evicted, the longest unused first. Each must be gone before the next is asked for."""
        is_last = _is_last_on_device if tier == DEVICE else _is_last_on_host
        heap = [node for node in self.nodes() if is_last(node)]
        heapq.heapify(heap)
        while heap:
            node = heapq.heappop(heap)
            parent = node.parent
            yield node
            if parent is not None and parent.parent is not None and is_last(parent):
                heapq.heappush(heap, parent)

    # ------------------------------------------------------------------------------------------------------------------

    def _split(self, node: Node, at: int) -> Node:
        """Puts the first pages of a node into one of their own above it, which is returned."""
        assert node.parent is not None
        upper = Node(node.pages[:at], node.parent)
        upper.locks, upper.pins, upper.hits, upper.used = node.locks, node.pins, node.hits, node.used
        if node.device is not None:
            upper.device, node.device = node.device[:at], node.device[at:]
        if node.host is not None:
            upper.host, node.host = node.host[:at], node.host[at:]
        node.parent.children[upper.pages[0].hash] = upper
        node.pages, node.parent = node.pages[at:], upper
        upper.children[node.pages[0].hash] = node
        return upper

    def _count(self, node: Node, sign: int) -> None:
        """Adds a node to the sums, or takes it out before it changes."""
        pages = sign * len(node.pages)
        if node.device is not None:
            self.held[DEVICE] += pages
            if not node.locks:
                self.evictable[DEVICE] += pages
        if node.host is not None:
            self.held[HOST] += pages
            if is_evictable_on_host(node):
                self.evictable[HOST] += pages


def is_evictable_on_host(node: Node) -> bool:
    """Returns whether the host may lose it, after all below it: what the device has too stays, and so does its way."""
    return node.device is None and not node.locks and not node.pins


def _is_last_on_device(node: Node) -> bool:
    return node.device is not None and not node.locks and all(child.device is None for child in node.children.values())


def _is_last_on_host(node: Node) -> bool:
    return node.host is not None and is_evictable_on_host(node) and not node.children


def _common(mine: Sequence[Page], pages: Sequence[Page], at: int) -> int:
    """Returns how many pages are the same, from one place on."""
    longest = min(len(mine), len(pages) - at)
    return next((i for i in range(longest) if mine[i].hash != pages[at + i].hash), longest)
