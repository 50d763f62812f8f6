"""The cache's own truth: what has really happened, counted where it happens; and a recount of everything from scratch.

Nothing here is for telemetry: tests compare with it what telemetry says.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from kvcache_otel.demo.pages import content
from kvcache_otel.demo.tree import is_evictable_on_host

if TYPE_CHECKING:
    from kvcache_otel.demo.cache import TieredCache
    from kvcache_otel.demo.memory import Pool
    from kvcache_otel.demo.pages import Page


class Books:
    """Counters by what they count, in words: ``books["pages copied", "device", "host"]``.

    Attributes:
        counts: All of them.
    """

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, ...]] = Counter()

    def add(self, *what: str, by: int = 1) -> None:
        """Counts something. Each counter is one thread's."""
        self.counts[what] += by

    def __getitem__(self, what: str | tuple[str, ...]) -> int:
        return self.counts[(what,) if isinstance(what, str) else what]

    def total(self, *what: str) -> int:
        """Returns the sum of all counters whose words begin so."""
        return sum(count for words, count in self.counts.items() if words[: len(what)] == what)

    def copied(self, source: str, destination: str, pages: int, page_bytes: int) -> None:
        """Counts a copy that has been made."""
        self.add("copies", source, destination)
        self.add("pages copied", source, destination, by=pages)
        self.add("bytes copied", source, destination, by=pages * page_bytes)


class Recount(NamedTuple):
    """What there is, counted page by page.

    Attributes:
        held: Pages in the tree, by tier, and on the disk.
        evictable: Of these, those that nobody holds on to, by tier.
        owned: Pages that requests have, and copies that go on, outside the tree, by tier.
        free: Free pages, by tier.
    """

    held: dict[str, int]
    evictable: dict[str, int]
    owned: dict[str, int]
    free: dict[str, int]


def recount(cache: TieredCache) -> Recount:
    """Counts what there is, from scratch, and checks every byte of it. For a moment at which no storage job runs.

    Raises:
        AssertionError: Pages are lost or in two places, bytes are not what they must be, or the tree is in disorder.
    """
    slots: dict[str, dict[int, Page]] = {"device": {}, "host": {}, "disk": {}}
    held = dict.fromkeys(slots, 0)
    evictable = dict.fromkeys(slots, 0)
    cache.lane.wait()

    def place(tier: str, pages: list[Page], where: list[int] | None) -> int:
        for page, slot in zip(pages, where or (), strict=where is not None):
            assert slot not in slots[tier], f"two pages in one place on {tier}"
            slots[tier][slot] = page
        return 0 if where is None else len(where)

    for node in cache.tree.nodes():
        assert node.parent is not None
        assert node.device is not None or node.host is not None, "a node that is nowhere"
        if node.parent is not cache.tree.root:
            assert node.device is None or node.parent.device is not None, "on the device, but not what is before it"
            assert node.host is None or node.parent.host is not None, "on the host, but not what is before it"
        count = place("device", node.pages, node.device)
        held["device"] += count
        evictable["device"] += count if not node.locks else 0
        count = place("host", node.pages, node.host)
        held["host"] += count
        evictable["host"] += count if is_evictable_on_host(node) else 0
    owned = dict.fromkeys(slots, 0)
    for request in cache.requests.values():
        owned["device"] += place("device", request.pages[request.shared :], request.slots[request.shared :] or None)
        owned["host"] += place("host", request.pages[request.shared :], request.parked)
    for job in cache.storage.going:
        if job.writes:
            owned["disk"] += len(job.slots)
        else:
            owned["host"] += len(job.host)
    for page, slot in cache.storage.index.values():
        held["disk"] += place("disk", [page], [slot])
    evictable["disk"] = sum(cache.storage.readers[key] == 0 for key in cache.storage.index)
    pools: dict[str, Pool] = {"device": cache.device, "host": cache.host, "disk": cache.storage.pool}
    for tier, pool in pools.items():
        assert held[tier] + owned[tier] + pool.free == pool.limit, f"pages of {tier} are lost"
        for slot, page in slots[tier].items():
            size = pool.memory.page_bytes
            assert pool.memory.read(slot) == content(page, size), f"wrong bytes on {tier}"
    return Recount(held, evictable, owned, {tier: pool.free for tier, pool in pools.items()})
