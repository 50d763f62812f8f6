"""Prefetching: what the disk has of a prompt is read into host memory before the request is admitted."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvcache_otel.demo.tree import HOST, Node

if TYPE_CHECKING:
    from kvcache_otel.demo.books import Books
    from kvcache_otel.demo.config import Config
    from kvcache_otel.demo.controller import Controller
    from kvcache_otel.demo.memory import Pool
    from kvcache_otel.demo.pages import Page
    from kvcache_otel.demo.storage import Job, Storage
    from kvcache_otel.demo.tree import RadixTree


class Fetch:
    """A prefetch: pages that the disk has and the tree has not.

    Attributes:
        pages: The prefix, from its first page to the last that the disk has.
        start: How many of these the tree had when the disk was asked.
        anchor: The node at which those end.
        job: What reads them; None where nothing is read.
        lost: Pages that will not be read, by the reason.
        fulfilled: Of what was read, pages that came into the tree; None before it is known.
        node: The node that these are; it is pinned until the prefetch is released.
    """

    def __init__(self, pages: list[Page], start: int, anchor: Node) -> None:
        """Args:
        pages: As the attribute.
        start: As the attribute.
        anchor: As the attribute.
        """
        self.pages = pages
        self.start = start
        self.anchor = anchor
        self.job: Job | None = None
        self.lost: dict[str, int] = {}
        self.fulfilled: int | None = None
        self.node: Node | None = None

    @property
    def hit(self) -> int:
        """Pages that the disk said it has."""
        return len(self.pages) - self.start


class Arrival(NamedTuple):
    """What became of a prefetch, in pages: its hit is fulfilled + all that is unfulfilled."""

    loaded: int
    fulfilled: int
    unfulfilled: dict[str, int]


class Prefetcher:
    """Asks the disk, and puts into the tree what it brings."""

    def __init__(
        self, config: Config, tree: RadixTree, host: Pool, storage: Storage, controller: Controller, books: Books
    ) -> None:
        """Args:
        config: What is worth reading.
        tree: What is where.
        host: The pages of host memory.
        storage: The disk.
        controller: What makes room.
        books: Where all is counted.
        """
        self._config, self._tree, self._host = config, tree, host
        self._storage, self._controller, self._books = storage, controller, books
        self._fetches: dict[Job, Fetch] = {}

    def prefetch(self, pages: list[Page], start: int, anchor: Node) -> Fetch | None:
        """Asks the disk for what the tree does not have, and has it read if that is worth it.

        Args:
            pages: The prompt's.
            start: How many of them the tree has.
            anchor: The node at which these end.

        Returns:
            The prefetch, which `arrive` must be told of if it has no job; None where the disk has nothing.
        """
        hit = self._storage.find(pages[start:])
        if not hit:
            return None
        self._books.add("pages hit", by=hit)
        fetch = Fetch(pages[: start + hit], start, anchor)
        self._tree.lock(anchor)
        if hit * self._config.page_tokens < self._config.prefetch_tokens:
            fetch.lost["below_threshold"] = hit
            return fetch
        if hit > self._host.free:
            self._controller.evict_host(hit - self._host.free)
        room = self._host.take(min(hit, self._host.free)) or []
        if len(room) < hit:
            fetch.lost["host_capacity"] = hit - len(room)
            self._controller.refuse(HOST, "promotion")
        if room:
            fetch.job = self._storage.read(fetch.pages[start : start + len(room)], room)
            self._fetches[fetch.job] = fetch
        return fetch

    def arrive(self, fetch: Fetch) -> Arrival:
        """Puts what a prefetch has brought into the tree, as far as it is not there by now."""
        self._tree.lock(fetch.anchor, -1)
        lost = dict(fetch.lost)
        loaded = fulfilled = 0
        if (job := fetch.job) is not None:
            room, used = job.host, 0
            if job.error:
                lost["storage_transfer"] = len(room)
            else:
                loaded = len(room)
                self._controller.check(self._host, room, job.pages)
                fulfilled, used = self._hang(fetch, room, lost)
            self._host.give(room[: len(room) - used])
        fetch.fulfilled = fulfilled
        arrival = Arrival(loaded, fulfilled, lost)
        self._books.add("pages loaded", by=loaded)
        self._books.add("pages fulfilled", by=fulfilled)
        for reason, pages in lost.items():
            self._books.add("pages unfulfilled", reason, by=pages)
        return arrival

    def release(self, fetch: Fetch) -> None:
        """Lets go of what a prefetch has brought: it has been put to use."""
        if fetch.node is not None:
            self._tree.pin(fetch.node, -1)
            fetch.node = None

    def read(self, job: Job) -> None:
        """Takes over that a job has ended which was to read from the disk."""
        self.arrive(self._fetches.pop(job))

    def _hang(self, fetch: Fetch, room: list[int], lost: dict[str, int]) -> tuple[int, int]:
        """Hangs the pages that were read into the tree; returns how many are of use, and how many slots are taken."""
        pages = fetch.pages[: fetch.start + len(room)]
        end = self._tree.match(pages)
        covered = sum(len(each.pages) for each in end.path()) - fetch.start
        if covered:  # Somebody has computed it meanwhile, or read it.
            lost["device_covered"] = covered
        new = len(room) - covered
        if not new:
            return 0, 0
        self._tree.lock(end)
        anchored = self._controller.backup(end) is not None
        self._tree.lock(end, -1)
        if not anchored:  # What is before it is not on the host, and has no room there.
            lost["anchor_lost"] = new
            return 0, 0
        fetch.node = self._tree.add(end, pages[-new:], room[-new:], HOST)
        self._tree.pin(fetch.node)
        return new, new
