"""The controller: what moves pages between the tiers, makes room for them, and loses them where there is none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcache_otel.demo.pages import content
from kvcache_otel.demo.tree import DEVICE, HOST, Node

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcache_otel.demo.books import Books
    from kvcache_otel.demo.config import Config
    from kvcache_otel.demo.events import EventLog
    from kvcache_otel.demo.memory import Lane, Pool
    from kvcache_otel.demo.pages import Page
    from kvcache_otel.demo.storage import Job, Storage
    from kvcache_otel.demo.tree import RadixTree


class CorruptedError(Exception):
    """Bytes that have been somewhere else are not what they were."""


class Controller:
    """Everything on the scheduler's thread.

    Attributes:
        lane: What copies between device and host run on.
    """

    def __init__(
        self,
        config: Config,
        tree: RadixTree,
        device: Pool,
        host: Pool,
        lane: Lane,
        storage: Storage,
        log: EventLog,
        books: Books,
    ) -> None:
        """Args:
        config: Policy and thresholds.
        tree: What is where.
        device: The pages of the device.
        host: The pages of host memory.
        lane: As the attribute.
        storage: The disk.
        log: What is told of pages that come to the disk and go.
        books: Where all is counted.
        """
        self.lane = lane
        self._config, self._tree, self._storage = config, tree, storage
        self._device, self._host = device, host
        self._log, self._books = log, books
        self._pinned: dict[Job, Node] = {}

    # -- making room ---------------------------------------------------------------------------------------------------

    def allocate(self, pages: int) -> list[int] | None:
        """Returns free pages of the device, which others may have to leave; None where these are not enough."""
        if pages > self._device.free + self._tree.evictable[DEVICE]:
            return None
        if pages > self._device.free:
            self.evict_device(pages - self._device.free)
        return self._device.take(pages)

    def evict_device(self, pages: int) -> int:
        """Frees pages on the device, as many as were asked for if there are so many; returns how many it were."""
        freed = 0
        for node in self._tree.victims(DEVICE):
            if node.host is None:
                if self._config.policy == "write_through":
                    self._leave(DEVICE, node.pages, "write_through_unbacked_eviction")
                elif self.backup(node) is None:
                    self._leave(DEVICE, node.pages, "host_pressure")
            slots = node.device or []
            self._tree.place(node, DEVICE, None)
            self._device.give(slots)
            freed += len(slots)
            if freed >= pages:
                break
        self._books.add("pages evicted", DEVICE, by=freed)
        self._books.add("evictions", DEVICE, by=freed > 0)
        return freed

    def evict_host(self, pages: int) -> int:
        """Frees pages in host memory, of what is on the device no more; returns how many it were."""
        freed = 0
        for node in self._tree.victims(HOST):
            self._leave(HOST, node.pages, "pool_full")
            slots = node.host or []
            self._tree.place(node, HOST, None)
            self._host.give(slots)
            freed += len(slots)
            if freed >= pages:
                break
        self._books.add("pages evicted", HOST, by=freed)
        self._books.add("evictions", HOST, by=freed > 0)
        return freed

    def evict_disk(self, pages: int) -> int:
        """Frees pages on the disk; returns how many it were."""
        oldest = self._storage.oldest(pages)
        self._storage.forget(oldest)
        self._log.removed("disk", [page.hash for page in oldest])
        self._leave("disk", oldest, "pool_full")
        self._books.add("pages evicted", "disk", by=len(oldest))
        self._books.add("evictions", "disk", by=len(oldest) > 0)
        return len(oldest)

    def lose(self, tier: str, pages: int, reason: str) -> None:
        """Takes note that pages are gone for good: they have left a tier, and were on no other below it."""
        self._books.add("pages lost", tier, reason, by=pages)

    def refuse(self, tier: str, purpose: str) -> None:
        """Takes note that a tier has no room for what was to be done."""
        self._books.add("refusals", tier, purpose)

    # -- between device and host ---------------------------------------------------------------------------------------

    def backup(self, node: Node) -> int | None:
        """Copies a node to the host, and what is before it and not there; returns how many pages, None without room."""
        missing = [each for each in node.path() if each.host is None]
        count = sum(len(each.pages) for each in missing)
        if not count:
            return 0
        slots = self._host_room(count)
        if slots is None:
            self.refuse(HOST, "store")
            return None
        self.copy_to_host(slots, [slot for each in missing for slot in each.device or ()])
        for each in missing:
            self._tree.place(each, HOST, slots[: len(each.pages)])
            slots = slots[len(each.pages) :]
        if self._storage.pool.limit:
            self.store(missing)
        return count

    def load_back(self, node: Node, slots: list[int]) -> int:
        """Copies a locked node to the device, and what is before it and not there; returns how many pages it were.

        Args:
            node: The node.
            slots: As many free pages of the device.
        """
        missing = [each for each in node.path() if each.device is None]
        sources = [slot for each in missing for slot in each.host or ()]
        if not sources:
            return 0
        self.copy_to_device(slots, sources)
        self.check(self._device, slots, [page for each in missing for page in each.pages])
        for each in missing:
            self._tree.place(each, DEVICE, slots[: len(each.pages)])
            slots = slots[len(each.pages) :]
        return len(sources)

    def retract(self, slots: list[int], pages: Sequence[Page]) -> list[int] | None:
        """Copies what a running request has of its own to the host, and frees it on the device.

        Returns:
            Where it is in host memory; None where there was no room, and it is lost.
        """
        parked = self._host_room(len(slots))
        if parked is None:
            self.refuse(HOST, "store")
            self._leave(DEVICE, [page for page in pages if page.hash not in self._tree.known], "host_pressure")
        elif slots:
            self.copy_to_host(parked, slots)
        self._device.give(slots)
        return parked

    def restore(self, parked: list[int], slots: list[int], pages: Sequence[Page]) -> int:
        """Copies what a retracted request had of its own back to the device; returns how many pages it were."""
        if slots:
            self.copy_to_device(slots, parked)
            self.check(self._device, slots, pages)
        self._host.give(parked)
        return len(slots)

    def copy_to_host(self, host: list[int], device: list[int]) -> None:
        """Copies pages of the device, or launches that on the lane's stream."""
        self.lane.copy(self._host, host, self._device, device)
        self._books.copied(DEVICE, HOST, len(device), self._config.page_bytes)

    def copy_to_device(self, device: list[int], host: list[int]) -> None:
        """Copies pages of host memory, or launches that on the lane's stream."""
        self.lane.copy(self._device, device, self._host, host)
        self._books.copied(HOST, DEVICE, len(host), self._config.page_bytes)

    def check(self, pool: Pool, slots: Sequence[int], pages: Sequence[Page]) -> None:
        """Looks at bytes that have come from another tier.

        Raises:
            CorruptedError: They are not what they must be.
        """
        if not self._config.verify:
            return
        self.lane.wait()
        for slot, page in zip(slots, pages, strict=True):
            if pool.memory.read(slot) != content(page, pool.memory.page_bytes):
                raise CorruptedError(f"page {page.hash:x} has come back with other bytes")
        self._books.add("pages verified", by=len(pages))

    # -- between host and disk -----------------------------------------------------------------------------------------

    def store(self, nodes: list[Node]) -> int:
        """Has nodes that have come to the host, one after another, written to the disk as far as they are not there.

        Returns:
            How many pages will be written.
        """
        places = [place for each in nodes for place in zip(each.pages, each.host or (), strict=True)]
        new = [(page, slot) for page, slot in places if not self._storage.has(page.hash)]
        self._skip_if(len(places) - len(new), "already_stored")
        if self._storage.is_busy:
            self._skip_if(len(new), "backpressure")
            return 0
        if len(new) > self._storage.pool.free:
            self.evict_disk(len(new) - self._storage.pool.free)
        fitting = new[: self._storage.pool.free]
        self._skip_if(len(new) - len(fitting), "no_space")
        if fitting:
            job = self._storage.write([page for page, _ in fitting], [slot for _, slot in fitting])
            self._pinned[job] = nodes[-1]
            self._tree.pin(nodes[-1])
        return len(fitting)

    def skip(self, pages: int, reason: str) -> None:
        """Takes note of pages that are not written to the disk."""
        self._books.add("pages skipped", reason, by=pages)

    def written(self, job: Job) -> None:
        """Takes over that a job has ended which was to write to the disk."""
        self._tree.pin(self._pinned.pop(job), -1)
        if not job.error:
            self._log.stored("disk", job.pages)

    # ------------------------------------------------------------------------------------------------------------------

    def _leave(self, tier: str, pages: Sequence[Page], reason: str) -> None:
        """Looks whether pages that leave a tier are elsewhere too."""
        kept = self._tree.known.__contains__ if tier == "disk" else self._storage.has
        lost = sum(not kept(page.hash) for page in pages)
        if lost:
            self.lose(tier, lost, reason)

    def _host_room(self, pages: int) -> list[int] | None:
        if pages > self._host.free + self._tree.evictable[HOST]:
            return None
        if pages > self._host.free:
            self.evict_host(pages - self._host.free)
        return self._host.take(pages)

    def _skip_if(self, pages: int, reason: str) -> None:
        if pages:
            self.skip(pages, reason)
