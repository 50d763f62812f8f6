"""The host tier and the tiers below it, as vLLM's offloading managers keep them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from kvcache_otel.engines.vllm import config
from kvcache_otel.semconv import ErrorType, Reason, Tier, View

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvcache_otel.record.cells import Histogram
    from kvcache_otel.record.probe import CacheProbe

# Not a value of the catalogue but of error.type, which is open: some blocks of a promotion arrived, some did not.
PARTIAL = "partial"

_CONNECTOR = "vllm:kv_offload_"
_TIERING = "vllm:kv_offload_tiering_"
_STORES_SKIPPED = "vllm:kv_offload_stores_skipped"


def chunk_count(manager: Any) -> int:
    """Returns how many chunks a CPUOffloadingManager has room for."""
    return getattr(manager, f"_num_{_unit(manager)}")


def _unit(manager: Any) -> str:
    # Named blocks until 0.29, chunks since.
    return "chunks" if hasattr(manager, "_num_chunks") else "blocks"


class HostRows:
    """What one host tier holds and loses. Kept by its manager, so the rows end with it."""

    def __init__(self, probe: CacheProbe, manager: Any, *, tokens: int | None, pool: str) -> None:
        """Args:
        probe: The process's probe.
        manager: vLLM's CPUOffloadingManager.
        tokens: Tokens per chunk; None where groups of layers differ, and then nothing is said in tokens.
        pool: The pool that its chunks belong to.
        """
        unit = _unit(manager)
        self._allocated, self._pending = f"_num_allocated_{unit}", f"_num_write_pending_{unit}"
        self._evictable = f"_num_evictable_cache_{unit}"
        self._chunks = chunk_count(manager)
        self._tokens = tokens
        self._pool = probe.pool(Tier.HOST, pool) if tokens else None
        self._evicted = probe.evictions(Tier.HOST, pool) if tokens else None
        self._resident = probe.resident(Tier.HOST, View.HELD)
        self._block_size = probe.block_size(Tier.HOST)
        self._block_size.set(tokens)
        self._skipped = probe.skipped_stores(Tier.HOST, Reason.OTHER) if manager.store_threshold >= 2 else None
        self.settle(manager)

    def settle(self, manager: Any) -> None:
        """Takes over what the manager counts: which chunks are pinned, evictable, free, and which hold something."""
        occupied: int = getattr(manager, self._allocated) - len(manager._free_list)
        # A chunk still being written is there for nobody yet, and is not published either.
        self._resident.set(occupied - getattr(manager, self._pending))
        if self._pool is not None and self._tokens is not None:
            self._pool.settle(
                limit=self._chunks * self._tokens,
                free=(self._chunks - occupied) * self._tokens,
                evictable=getattr(manager, self._evictable) * self._tokens,
            )

    def evicted(self, chunks: int) -> None:
        """Counts chunks that made room for others."""
        if self._evicted is not None and self._tokens is not None:
            self._evicted.add(chunks * self._tokens)

    def take(self, values: dict[str, Any]) -> None:
        """Takes over what one `get_stats` of the manager returned."""
        if self._skipped is not None:
            self._skipped.add(sum(values.get(_STORES_SKIPPED, {}).values()))


class SecondaryRows:
    """One secondary tier: cascades go down to it, promotions come up from it."""

    def __init__(self, probe: CacheProbe, tier: Any, name: str) -> None:
        """Args:
        probe: The process's probe.
        tier: vLLM's SecondaryTierManager.
        name: vLLM's own name of it, ``1:fs``.
        """
        kind, timing = config.tier_of_secondary(tier), config.timing_of_secondary(tier)
        self.lookups = probe.lookups(kind, name)
        self.promotion = probe.route(kind, Tier.HOST, name=name, timing=timing)
        self.cascade = probe.route(Tier.HOST, kind, name=name, timing=timing)
        self.promotion_pins, self.cascade_pins = self.promotion.pins(), self.cascade.pins()
        self.failed_promotion = self.promotion.failures(ErrorType.OTHER)
        self.partial_promotion = self.promotion.failures(PARTIAL)
        self.failed_cascade = self.cascade.failures(ErrorType.OTHER)
        self.refused = probe.skipped_stores(kind, Reason.BACKPRESSURE, name)
        pool = getattr(tier, "_pool", None)
        if pool is not None and hasattr(pool, "enqueue_load"):
            # Only the fs tier lets both ends of the wait be seen.
            pool._kvcache_otel = QueueRows(self.promotion.queue(), self.cascade.queue())

    def finished(self, job: Any, result: Any) -> None:
        """Counts one finished job, by vLLM's own rule of what moved."""
        moved = bool(result.success)
        if moved:
            (self.promotion if job.is_promotion else self.cascade).finished.add(1)
        elif not job.is_promotion:
            self.failed_cascade.add(1)
        elif result.successful_keys:
            self.partial_promotion.add(1)
            moved = True
        else:
            self.failed_promotion.add(1)
        if moved and result.transfer_time is not None:
            (self.promotion if job.is_promotion else self.cascade).duration.record(result.transfer_time)


class QueueRows:
    """The wait between a job's request and the first of its tasks, in the fs tier's thread pool."""

    def __init__(self, loads: Histogram, stores: Histogram) -> None:
        """Args:
        loads: Seconds that reads waited.
        stores: Seconds that writes waited.
        """
        self.loads = loads
        self.stores = stores


def watch_first(tasks: Iterable[Callable[[], Any]], waited: Histogram) -> list[Callable[[], Any]]:
    """Returns the tasks of one job, the first of which to run, on whatever thread, records how long it waited."""
    requested = iter((time.monotonic(),))  # Taken by whoever comes first: next() is one step for every thread.

    def watched(task: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            since = next(requested, None)
            if since is not None:
                waited.record(time.monotonic() - since)
            return task()

        return run

    return [watched(task) for task in tasks]


class TieringRows:
    """All secondary tiers of one tiering manager, and the lookups in its primary one."""

    def __init__(self, probe: CacheProbe, manager: Any) -> None:
        """Args:
        probe: The process's probe.
        manager: vLLM's TieringOffloadingManager.
        """
        tracker = manager._metrics
        self.tiers: list[SecondaryRows] = [
            SecondaryRows(probe, tier, tracker.tier_label(index)[0])
            for index, tier in enumerate(manager.secondary_tiers)
        ]
        self._by_label = {tracker.tier_label(index): tier for index, tier in enumerate(self.tiers)}
        self._lookups = {label: tier.lookups for label, tier in self._by_label.items()}
        self._lookups[tracker.primary_tier_label] = probe.lookups(Tier.HOST)
        self._promotion_refused = probe.allocation_failures(Tier.HOST, Reason.PROMOTION)
        self._chunks = chunk_count(manager.primary_tier)

    def take(self, values: dict[str, Any]) -> None:
        """Takes over what one `get_stats` of the manager returned: ``{metric: {labels: value or samples}}``."""
        self._take_lookups(values)
        for label, gained in _of(values, "read_bytes"):
            self._by_label[label].promotion.moved.add(gained)
        for label, gained in _of(values, "write_bytes"):
            self._by_label[label].cascade.moved.add(gained)
        for label, jobs in _of(values, "active_promotion_jobs"):
            self._by_label[label].promotion.active.set(jobs)
        for label, jobs in _of(values, "active_cascade_jobs"):
            self._by_label[label].cascade.active.set(jobs)
        for label, share in _of(values, "primary_write_usage_perc"):
            self._by_label[label].promotion_pins.set(round(share * self._chunks))
        for label, share in _of(values, "primary_read_usage_perc"):
            self._by_label[label].cascade_pins.set(round(share * self._chunks))
        for label, blocks in _of(values, "backpressure_blocks_dropped"):
            self._by_label[label].refused.add(blocks)
        for _, failures in _of(values, "promotion_allocation_failures"):
            self._promotion_refused.add(failures)

    def _take_lookups(self, values: dict[str, Any]) -> None:
        hits = values.get(f"{_TIERING}chunk_hits", {})
        for label, queries in _of(values, "chunk_queries"):
            self._lookups[label].answered(queries, hits.get(label, 0))
        for label, samples in _of(values, "lookup_sync_delay_seconds"):
            for sample in samples:
                self._lookups[label].blocked.record(sample)
        for label, samples in _of(values, "lookup_async_delay_seconds"):
            for sample in samples:
                self._lookups[label].deferred.record(sample)


class ConnectorRows:
    """What vLLM's connector knows over all tiers: whole requests, and stores that found no room."""

    def __init__(self, probe: CacheProbe) -> None:
        """Args:
        probe: The process's probe.
        """
        self.probe = probe
        self._requests = probe.request_lookups()
        self._store_refused = probe.allocation_failures(Tier.HOST, Reason.STORE)

    def take(self, values: dict[str, Any]) -> None:
        """Takes over the connector's own part of what one `get_stats` returned; the managers' part was taken there."""
        for sample in values.get(f"{_CONNECTOR}lookup_sync_delay_seconds", {}).get((), ()):
            self._requests.blocked.record(sample)
        for sample in values.get(f"{_CONNECTOR}lookup_async_delay_seconds", {}).get((), ()):
            self._requests.deferred.record(sample)
        self._store_refused.add(values.get(f"{_CONNECTOR}allocation_failure", {}).get((), 0))


def _of(values: dict[str, Any], name: str) -> Iterable[tuple[Any, Any]]:
    return values.get(_TIERING + name, {}).items()
