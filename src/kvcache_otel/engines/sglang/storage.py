"""A storage backend: what is prefetched from it and backed up to it, on SGLang's storage threads."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from kvcache_otel import semconv
from kvcache_otel.engines.sglang import config
from kvcache_otel.engines.sglang.prefetch import PrefetchBooks
from kvcache_otel.record.cells import unread
from kvcache_otel.semconv import ErrorType, Pool, Reason, Tier

if TYPE_CHECKING:
    from kvcache_otel.engines.hooks import Finish
    from kvcache_otel.record.probe import CacheProbe, Route

# What `error.type` says of a transfer of which a part arrived, and of one that SGLang itself broke off.
PARTIAL = "partial"
CANCELLED = "cancelled"

# The attributes under which an operation carries when it was made, and a prefetch the pages that were read for it.
REQUESTED = "_kvcache_otel_requested"
PAGES = "_kvcache_otel_pages"


class StorageRows:
    """One storage backend, for as long as it is attached."""

    def __init__(self, probe: CacheProbe, controller: Any, *, tells: config.StorageFacts) -> None:
        """Args:
        probe: The cache's probe.
        controller: SGLang's cache controller, with a storage backend attached.
        tells: What this version of SGLang tells of it.
        """
        self.tier, name = config.storage(controller)
        self.prefetches = PrefetchBooks(probe, self.tier, name) if tells.hits else None
        labels: dict[str, str | int] = {semconv.KVCACHE_TIER: self.tier, semconv.KVCACHE_TIER_NAME: name}
        self._loaded = probe.counter(semconv.PREFETCH_LOADED_TOKENS, labels) if tells.loads else None
        self._page = controller.page_size
        self._group = controller.mem_pool_host
        self._reads = _Way(probe.route(self.tier, Tier.HOST, name=name))
        self._writes = _Way(probe.route(Tier.HOST, self.tier, name=name))
        self._skipped = probe.skipped_stores(self.tier, Reason.OTHER, name) if tells.skips else None

    # -- prefetch, on the threads that read ----------------------------------------------------------------------------

    def reading(self, operation: Any) -> Finish:
        """Says that a prefetch begins to read; returns what hears how that went."""
        began = self._reads.began(getattr(operation, REQUESTED, None))

        def read(_: Any, error: BaseException | None) -> None:
            self._reads.active.add(-1)
            pages: int | None = getattr(operation, PAGES, None)
            if pages is None:  # The hook that tells them has stepped aside, or the engine has raised before it could.
                if error is not None:
                    self._reads.failed(error)
                return
            asked = len(operation.hash_value)
            cancelled = pages < asked and operation.is_terminated()
            self._reads.ended(began, pages, asked, error, cancelled=cancelled)
            tokens = pages * self._page
            self._reads.moved(tokens, self._token_bytes, tokens * self._bytes_per_token(operation))

        return read

    def loaded(self, tokens: int) -> None:
        """Counts what has arrived in host memory and can be used."""
        if self._loaded is not None:
            self._loaded.add(tokens)

    def read_besides(self, hits: dict[Any, int]) -> None:
        """Counts what was read for the pools that have pages of their own.

        Args:
            hits: Pages by pool, as this rank read them.
        """
        for name, pages in hits.items():
            if pages > 0:
                self._reads.route.moved.add(pages * self._bytes_per_page(name))

    # -- backup, on the thread that writes -----------------------------------------------------------------------------

    def writing(self, operation: Any) -> Finish:
        """Says that a backup begins to write; returns what hears how that went."""
        began = self._writes.began(getattr(operation, REQUESTED, None))

        def written(_: Any, error: BaseException | None) -> None:
            self._writes.active.add(-1)
            tokens, asked = operation.completed_tokens, len(operation.hash_value)
            self._writes.ended(began, tokens // self._page, asked, error)
            size = tokens * self._bytes_per_token(operation) + self._written_besides(operation)
            self._writes.moved(tokens, self._token_bytes, size)

        return written

    def writing_besides(self, operation: Any) -> Finish:
        """Says that a backup begins to write what has pages of its own, and no keys and values; see `writing`."""
        began = self._writes.began(getattr(operation, REQUESTED, None))

        def written(_: Any, error: BaseException | None) -> None:
            self._writes.active.add(-1)
            pages = _pages_besides(operation)
            count = sum(pages.values())
            # SGLang says that all of the backup is complete, or nothing of it.
            self._writes.ended(began, count, count if operation.completed_tokens else count + 1, error)
            self._writes.route.moved.add(sum(self._bytes_per_page(name) * pages[name] for name in pages))

        return written

    def skipped(self, tokens: int) -> None:
        """Counts blocks that were given up before they were written."""
        if self._skipped is not None:
            self._skipped.add(tokens // self._page)

    # -- both ----------------------------------------------------------------------------------------------------------

    def reads_unknown(self) -> None:
        """Ends the row of active reads."""
        self._reads.active_unknown()

    def writes_unknown(self) -> None:
        """Ends the row of active writes."""
        self._writes.active_unknown()

    def reset(self) -> None:
        """Says that the cache has forgotten what was asked for."""
        if self.prefetches is not None:
            self.prefetches.abandoned()

    @property
    def _token_bytes(self) -> int:
        return self._group.anchor_entry.host_pool.size_per_token

    def _bytes_per_token(self, operation: Any) -> int:
        """Of the pool of keys and values, and of those that ride on its pages."""
        size = self._token_bytes
        for transfer in getattr(operation, "pool_transfers", None) or ():
            if config.pool_name(transfer.indices_from_pool) == Pool.KV:
                entry = self._entry(transfer.name)
                size += entry.host_pool.size_per_token if entry is not None else 0
        return size

    def _written_besides(self, operation: Any) -> int:
        pages = _pages_besides(operation)
        riding = {
            config.pool_name(transfer.name)
            for transfer in getattr(operation, "pool_transfers", None) or ()
            if config.pool_name(transfer.indices_from_pool) == Pool.KV
        }
        return sum(
            count * self._bytes_per_page(name) for name, count in pages.items() if config.pool_name(name) not in riding
        )

    def _bytes_per_page(self, name: Any) -> int:
        entry = self._entry(name)
        return 0 if entry is None else entry.host_pool.size_per_token * entry.host_pool.page_size

    def _entry(self, name: Any) -> Any:
        wanted = config.pool_name(name)
        return next((entry for entry in self._group.entries if config.pool_name(entry.name) == wanted), None)


def _pages_besides(operation: Any) -> dict[Any, int]:
    """Returns the pages that were written of pools other than that of keys and values."""
    result = getattr(operation, "pool_storage_result", None)
    return getattr(result, "extra_pool_hit_pages", None) or {}


class _Way:
    """Reads or writes of one backend. Each is done by one thread of SGLang's."""

    def __init__(self, route: Route) -> None:
        self.route = route
        self.active = route.active
        self._queue = route.queue()
        self._tokens, self._of_pool = route.tokens(Pool.KV), route.pool_moved(Pool.KV)
        self._partial = route.failures(PARTIAL)
        self._failed = route.failures(ErrorType.OTHER)

    def began(self, requested: float | None) -> float:
        now = time.monotonic()
        if requested is not None:
            self._queue.record(now - requested)
        self.active.add(1)
        return now

    def active_unknown(self) -> None:
        """Ends the row of what is active: not every beginning and end is told any more."""
        self.active = unread()  # First: others may begin on a thread of SGLang's meanwhile.
        self.route.active.set(None)
        self.route.active = unread()

    def ended(
        self, began: float, pages: int, asked: int, error: BaseException | None, *, cancelled: bool = False
    ) -> None:
        took = time.monotonic() - began
        if error is not None:
            self.failed(error)
        elif pages >= asked:
            self.route.finished.add(1)
        elif cancelled:
            self.route.failures(CANCELLED).add(1)
        else:
            (self._partial if pages else self._failed).add(1)
        if pages:  # Bytes without their time would make the backend look faster than it is.
            self.route.duration.record(took)

    def failed(self, error: BaseException) -> None:
        self.route.failures(type(error).__name__).add(1)

    def moved(self, tokens: int, token_bytes: int, size: int) -> None:
        self._tokens.add(tokens)
        self._of_pool.add(tokens * token_bytes)
        self.route.moved.add(size)
