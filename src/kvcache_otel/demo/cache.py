"""The cache, as a scheduler sees it: requests that are submitted, admitted, extended, finished, retracted, restored."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, NamedTuple

from kvcache_otel.demo.books import Books
from kvcache_otel.demo.config import Config
from kvcache_otel.demo.controller import Controller
from kvcache_otel.demo.events import EventLog
from kvcache_otel.demo.memory import Lane, Pool, make_memory
from kvcache_otel.demo.pages import content, make_page, split
from kvcache_otel.demo.prefetch import Prefetcher
from kvcache_otel.demo.storage import Storage
from kvcache_otel.demo.tree import RadixTree

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvcache_otel.demo.events import Event
    from kvcache_otel.demo.pages import Page
    from kvcache_otel.demo.prefetch import Fetch
    from kvcache_otel.demo.tree import Node

    Sink = Callable[[list[Event]], None]


class Request:
    """One request.

    Attributes:
        number: Its number.
        tokens: Its prompt, and what has been put out.
        pages: Their pages; the last may have less than a page of them.
        slots: Where these are on the device, while it runs.
        shared: How many of its pages, the first ones, are the tree's and not its own.
        node: Where these end in the tree, while it runs: it is locked.
        fetch: The prefetch that was made for it, if there was one.
        parked: Where its own pages are in host memory, while it is retracted; None where they are not.
    """

    def __init__(self, number: int, tokens: Sequence[int], page_tokens: int) -> None:
        """Args:
        number: As the attribute.
        tokens: Its prompt.
        page_tokens: Tokens of a page.
        """
        self.number = number
        self.tokens = list(tokens)
        self.pages = list(split(tokens, page_tokens))
        self.slots: list[int] = []
        self.shared = 0
        self.node: Node | None = None
        self.fetch: Fetch | None = None
        self.parked: list[int] | None = None

    @property
    def is_ready(self) -> bool:
        """Whether nothing is read for it any more, so that it can be admitted."""
        return self.fetch is None or self.fetch.fulfilled is not None


class Admitted(NamedTuple):
    """What an admitted request was served with.

    Attributes:
        prompt: Tokens of its prompt.
        served: Tokens by the tier that they came from; what no tier had was computed.
    """

    prompt: int
    served: dict[str, int]


class Level(NamedTuple):
    """How full a tier is, in pages.

    Attributes:
        held: What is in the tree, or on the disk.
        limit: How many there can be.
        free: How many there could still be.
        evictable: Of those that are held, what nobody holds on to.
    """

    held: int
    limit: int
    free: int
    evictable: int


class TieredCache:
    """A cache of three tiers. All but the storage thread's work is done on the caller's thread.

    Attributes:
        config: Its configuration.
        books: What has really happened.
        tree: Which prefix is where.
        controller: What moves pages.
        prefetcher: What has them read from the disk.
        storage: The disk.
        device: The pages of the device.
        host: The pages of host memory.
        lane: What copies between these run on.
        requests: Those that have been submitted and have not finished, by their number.
        sinks: What is given the events, each time that there are some.
        levels: How full each tier was when events were last published: for other threads, to which it may not happen
            that one of these numbers is older than the others.
    """

    def __init__(self, config: Config | None = None) -> None:
        """Args:
        config: Its configuration; None for the usual one.

        Raises:
            ImportError: The kind of memory that was asked for is not installed.
        """
        self.config = config = config or Config()
        self.books = Books()
        self._log = EventLog(enabled=config.events)
        self.tree = RadixTree(self._log)
        self.device = _pool(config, config.device_tokens, on_device=True)
        self.host = _pool(config, config.host_tokens, on_device=False)
        self.lane = Lane(self.device.memory)
        self.storage = Storage(config, self.host, self.lane, self.books)
        self.controller = Controller(
            config, self.tree, self.device, self.host, self.lane, self.storage, self._log, self.books
        )
        self.prefetcher = Prefetcher(config, self.tree, self.host, self.storage, self.controller, self.books)
        self.requests: dict[int, Request] = {}
        self.sinks: list[Sink] = []
        self.levels = self._measure()
        self._number = 0
        # Whoever drops the cache without closing it must not be left with its thread.
        self._end_of_jobs = weakref.finalize(self, self.storage.jobs.put, None)

    # -- the life of a request -----------------------------------------------------------------------------------------

    def submit(self, tokens: Sequence[int]) -> Request:
        """Takes a prompt, and has the disk asked for what the tree does not have of it."""
        self._number += 1
        request = self.requests[self._number] = Request(self._number, tokens, self.config.page_tokens)
        wanted = self._wanted(request)
        end = self.tree.match(wanted)
        start = sum(len(node.pages) for node in end.path())
        request.fetch = fetch = self.prefetcher.prefetch(wanted, start, end)
        if fetch is not None and fetch.job is None:
            self.prefetcher.arrive(fetch)
        return request

    def poll(self) -> None:
        """Takes over what the storage has done since."""
        for job in self.storage.poll():
            if job.writes:
                self.controller.written(job)
            else:
                self.prefetcher.read(job)

    def admit(self, request: Request) -> Admitted | None:
        """Has a request run that is ready: takes what the tiers have of its prompt, and computes the rest.

        Returns:
            What it was served with; None where the device has no room for it now.
        """
        found = self._place(request, self._wanted(request))
        if found is None:
            self.controller.refuse("device", "other")
            return None
        on_device, on_host = found
        self._compute(request, request.shared)
        self._share(request, used=True)
        size = self.config.page_tokens
        from_disk = 0
        if request.fetch is not None:
            from_disk = min(on_host, request.fetch.fulfilled or 0)
            self.prefetcher.release(request.fetch)
        served = {"device": on_device * size, "host": (on_host - from_disk) * size}
        if self.storage.pool.limit:
            served["disk"] = from_disk * size
        self.books.add("tokens prompted", by=len(request.tokens))
        for tier, tokens in served.items():
            self.books.add("tokens served", tier, by=tokens)
        return Admitted(len(request.tokens), served)

    def extend(self, request: Request, tokens: Sequence[int]) -> bool:
        """Puts out tokens of a running request; returns whether the device has room for them. If not, nothing is."""
        size = self.config.page_tokens
        slots = self.controller.allocate(-(-(len(request.tokens) + len(tokens)) // size) - len(request.slots))
        if slots is None:
            self.controller.refuse("device", "other")
            return False
        whole = len(request.tokens) // size
        request.slots += slots
        request.tokens += tokens
        del request.pages[whole:]
        for start in range(whole * size, len(request.tokens), size):
            parent = request.pages[-1].hash if request.pages else None
            request.pages.append(make_page(parent, request.tokens[start : start + size]))
        self._compute(request, whole)
        return True

    def finish(self, request: Request) -> None:
        """Ends a running request. What it has computed stays, as far as it fills pages."""
        self._share(request, used=False)
        self.device.give(request.slots[request.shared :])
        self._let_go(request)
        del self.requests[request.number]

    def retract(self, request: Request) -> bool:
        """Takes a running request off the device; returns whether the host had room for what it has of its own."""
        own, pages = request.slots[request.shared :], request.pages[request.shared :]
        request.parked = self.controller.retract(own, pages)
        self._let_go(request)
        self.books.add("retractions")
        return request.parked is not None

    def restore(self, request: Request) -> bool:
        """Has a retracted request run again; returns whether the device has room for it now.

        What was lost meanwhile is computed anew.
        """
        first, parked = request.shared, request.parked
        if self._place(request, request.pages[:first]) is None:
            self.controller.refuse("device", "load")
            return False
        if parked is None:
            self._compute(request, request.shared)
        else:
            self._compute(request, request.shared, first)
            self.controller.restore(parked, request.slots[first:], request.pages[first:])
            request.parked = None
        self._share(request, used=False)
        self.books.add("restorations")
        return True

    # -- the rest ------------------------------------------------------------------------------------------------------

    def publish(self) -> list[Event]:
        """Gives the sinks the events since the last time, as a scheduler does after each step; returns them."""
        self.levels = self._measure()
        events = self._log.take()
        if events:
            for event in events:
                self.books.add("events", type(event).__name__, event.medium)
                self.books.add("blocks in events", type(event).__name__, event.medium, by=len(event.block_hashes))
            for sink in self.sinks:
                sink(events)
        return events

    def close(self) -> None:
        """Ends the storage thread and lets the disk's file go."""
        if self._end_of_jobs.detach() is not None:
            self.storage.close()

    def _measure(self) -> dict[str, Level]:
        tree, disk = self.tree, self.storage
        return {
            "device": Level(tree.held["device"], self.device.limit, self.device.free, tree.evictable["device"]),
            "host": Level(tree.held["host"], self.host.limit, self.host.free, tree.evictable["host"]),
            "disk": Level(len(disk.index), disk.pool.limit, disk.pool.free, disk.evictable),
        }

    def _wanted(self, request: Request) -> list[Page]:
        """Returns the pages that may be taken from the cache: a model must be given at least one token to go on."""
        return request.pages[: (len(request.tokens) - 1) // self.config.page_tokens]

    def _place(self, request: Request, pages: Sequence[Page]) -> tuple[int, int] | None:
        """Gives a request its slots on the device: the tree's, as far as it has these pages, and free ones.

        Returns:
            How many pages the device had, and how many the host; None without room.
        """
        end = self.tree.match(pages)
        path = end.path()
        on_device = sum(len(node.pages) for node in path if node.device is not None)
        on_host = sum(len(node.pages) for node in path) - on_device
        self.tree.lock(end)
        slots = self.controller.allocate(len(request.pages) - on_device)
        if slots is None:
            self.tree.lock(end, -1)
            return None
        self.controller.load_back(end, slots[:on_host])
        request.node, request.shared = end, on_device + on_host
        request.slots = [slot for node in path for slot in node.device or ()] + slots[on_host:]
        return on_device, on_host

    def _compute(self, request: Request, start: int, stop: int | None = None) -> None:
        """Does what a model would: gives pages their bytes."""
        for page, slot in zip(request.pages[start:stop], request.slots[start:stop], strict=True):
            self.device.memory.write(slot, content(page, self.config.page_bytes))

    def _share(self, request: Request, *, used: bool) -> None:
        """Puts the pages into the tree that are full, and has them backed up if they have been used often enough.

        Args:
            request: The request.
            used: Whether this is a use of its prefix; what is new is used once anyhow.
        """
        assert request.node is not None
        full = len(request.tokens) // self.config.page_tokens
        end, spare = self.tree.insert(request.pages[:full], request.slots[:full])
        self.device.give(spare)
        self.tree.lock(end)
        self.tree.lock(request.node, -1)
        path = end.path()
        request.node, request.shared = end, full
        request.slots[:full] = [slot for node in path for slot in node.device or ()]
        for node in path:
            node.hits += used or not node.hits
        often = [node for node in path if node.hits >= self.config.backup_after]
        if often and self.config.policy == "write_through":
            self.controller.backup(often[-1])

    def _let_go(self, request: Request) -> None:
        assert request.node is not None
        self.tree.lock(request.node, -1)
        request.node, request.slots = None, []


def _pool(config: Config, tokens: int, *, on_device: bool) -> Pool:
    pages = config.pages(tokens)
    return Pool(pages, make_memory(config.memory, pages, config.page_bytes, on_device=on_device))
