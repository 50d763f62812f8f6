"""The host tier and the tiers below it, as vLLM's offloading managers keep them."""

from __future__ import annotations

import logging
import time
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from kvcache_otel.engines.vllm import config
from kvcache_otel.semconv import ErrorType, Reason, Tier, View

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from kvcache_otel.record.cells import Histogram, Level
    from kvcache_otel.record.probe import CacheProbe

    Sink = Callable[[Any], None]

_logger = logging.getLogger(__name__)

# Not a value of the catalogue but of error.type, which is open: some blocks of a promotion arrived, some did not.
PARTIAL = "partial"

_CONNECTOR = "vllm:kv_offload_"
_TIERING = "vllm:kv_offload_tiering_"
_QUERIES, _HITS = f"{_TIERING}chunk_queries", f"{_TIERING}chunk_hits"
_STORES_SKIPPED = "vllm:kv_offload_stores_skipped"


def chunk_count(manager: Any) -> int:
    """Returns how many chunks a CPUOffloadingManager has room for."""
    return getattr(manager, f"_num_{_unit(manager)}")


def _unit(manager: Any) -> str:
    # Named blocks until 0.29, chunks since.
    return "chunks" if hasattr(manager, "_num_chunks") else "blocks"


class HostRows:
    """What one host tier holds and loses. Kept by its manager, so the rows end with it.

    Attributes:
        counts_skipped: Whether the manager lets blocks wait until they were offered often enough, and counts those.
    """

    def __init__(self, probe: CacheProbe, manager: Any, *, tokens: int | None, pool: str, blocks: int) -> None:
        """Args:
        probe: The process's probe.
        manager: vLLM's CPUOffloadingManager.
        tokens: Tokens per chunk; None where groups of layers differ, and then nothing is said in tokens.
        pool: The pool that its chunks belong to.
        blocks: Blocks that its events announce for each chunk.
        """
        unit = _unit(manager)
        self._counts = attrgetter(
            f"_num_allocated_{unit}", f"_num_write_pending_{unit}", f"_num_evictable_cache_{unit}", "_free_list"
        )
        self._chunks = chunk_count(manager)
        self._tokens = tokens or 0
        self._pool = probe.pool(Tier.HOST, pool) if tokens else None
        self._evicted = probe.evictions(Tier.HOST, pool) if tokens else None
        self._resident = probe.resident(Tier.HOST, View.HELD)
        self._block_size = probe.block_size(Tier.HOST)
        self._blocks = blocks
        self._block_size.set(None if tokens is None else tokens // blocks)
        self.counts_skipped = manager.store_threshold >= 2
        self._skipped = probe.skipped_stores(Tier.HOST, Reason.OTHER) if self.counts_skipped else None
        self._known = True
        self.settle(manager)

    def settle(self, manager: Any) -> None:
        """Takes over what the manager counts: which chunks are pinned, evictable, free, and which hold something."""
        if not self._known:
            return
        allocated, pending, evictable, free_list = self._counts(manager)
        occupied = allocated - len(free_list)
        # A chunk still being written is there for nobody yet, and is not published either.
        self._resident.set((occupied - pending) * self._blocks)
        if self._pool is not None:
            tokens, chunks = self._tokens, self._chunks
            self._pool.settle(chunks * tokens, (chunks - occupied) * tokens, evictable * tokens)

    def unknown(self) -> None:
        """Ends the gauges that depend on being set in every step: they are not any more."""
        self._known = False
        self._resident.set(None)
        if self._pool is not None:
            self._pool.forget()

    def evicted(self, chunks: int) -> None:
        """Counts chunks that made room for others."""
        if self._evicted is not None:
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
        self.promotion.pins()
        self.cascade.pins()
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
        route = self.promotion if job.is_promotion else self.cascade
        if result.success:
            route.finished.add(1)
        elif not job.is_promotion:
            self.failed_cascade.add(1)
            return
        elif result.successful_keys:
            self.partial_promotion.add(1)
        else:
            self.failed_promotion.add(1)
            return
        if result.transfer_time is not None:
            route.duration.record(result.transfer_time)


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
    return [_Watched(task, requested, waited) for task in tasks]


class _Watched:
    """One task of a job. (A class: made in a third of a closure's time, on the engine's thread.)"""

    __slots__ = ("_requested", "_task", "_waited")

    def __init__(self, task: Callable[[], Any], requested: Iterator[float], waited: Histogram) -> None:
        self._task = task
        self._requested = requested
        self._waited = waited

    def __call__(self) -> Any:
        since = next(self._requested, None)
        if since is not None:
            self._waited.record(time.monotonic() - since)
        return self._task()


class TieringRows:
    """All secondary tiers of one tiering manager, and the lookups in its primary one."""

    def __init__(self, probe: CacheProbe, manager: Any, *, blocks: int) -> None:
        """Args:
        probe: The process's probe.
        manager: vLLM's TieringOffloadingManager.
        blocks: Blocks per chunk, as in `HostRows`.
        """
        tracker = manager._metrics
        self._probe = probe
        self._strangers: set[Any] = set()
        self.tiers: list[SecondaryRows] = [
            SecondaryRows(probe, tier, tracker.tier_label(index)[0])
            for index, tier in enumerate(manager.secondary_tiers)
        ]
        labels = [tracker.tier_label(index) for index in range(len(self.tiers))]
        lookups = {tracker.primary_tier_label: probe.lookups(Tier.HOST)}
        lookups.update((label, tier.lookups) for label, tier in zip(labels, self.tiers, strict=True))
        self._answered = {label: rows.answered for label, rows in lookups.items()}
        chunks, refused = chunk_count(manager.primary_tier), probe.allocation_failures(Tier.HOST, Reason.PROMOTION)

        def pins(level: Level) -> Callable[[float], None]:
            return lambda share: level.set(round(share * chunks) * blocks)

        def by_tier(sink: Callable[[SecondaryRows], Sink]) -> dict[Any, Sink]:
            return {label: sink(tier) for label, tier in zip(labels, self.tiers, strict=True)}

        # What vLLM says, by its name and its labels, and where it goes.
        sinks: dict[str, dict[Any, Sink]] = {
            "lookup_sync_delay_seconds": {label: rows.blocked.extend for label, rows in lookups.items()},
            "lookup_async_delay_seconds": {label: rows.deferred.extend for label, rows in lookups.items()},
            "read_bytes": by_tier(lambda tier: tier.promotion.moved.add),
            "write_bytes": by_tier(lambda tier: tier.cascade.moved.add),
            "active_promotion_jobs": by_tier(lambda tier: tier.promotion.active.set),
            "active_cascade_jobs": by_tier(lambda tier: tier.cascade.active.set),
            "primary_write_usage_perc": by_tier(lambda tier: pins(tier.promotion.pins())),
            "primary_read_usage_perc": by_tier(lambda tier: pins(tier.cascade.pins())),
            "backpressure_blocks_dropped": by_tier(lambda tier: tier.refused.add),
            "promotion_allocation_failures": {(): refused.add},
        }
        self._sinks = tuple((_TIERING + name, by_label) for name, by_label in sinks.items() if by_label)

    def finished(self, tier_index: int, job: Any, result: Any) -> None:
        """Counts one finished job of one tier."""
        if tier_index < len(self.tiers):
            self.tiers[tier_index].finished(job, result)

    def unknown(self) -> None:
        """Ends the gauges, which depend on what every `get_stats` says; nobody hears it any more."""
        for tier in self.tiers:
            for route in (tier.promotion, tier.cascade):
                route.active.set(None)
                route.pins().set(None)

    def take(self, values: dict[str, Any]) -> None:
        """Takes over what one `get_stats` of the manager returned: ``{metric: {labels: value or samples}}``."""
        for name, sinks in self._sinks:
            if name in values:
                for label, value in values[name].items():
                    if label in sinks:
                        sinks[label](value)
                    else:
                        self._missing(label)
        if _QUERIES in values:
            hits = values.get(_HITS, {})
            for label, queries in values[_QUERIES].items():
                if label in self._answered:
                    self._answered[label](queries, hits.get(label, 0))
                else:
                    self._missing(label)

    def _missing(self, label: Any) -> None:
        # A tier that somebody added to a manager that was built already: it has no rows, which is said once.
        if label not in self._strangers:
            self._strangers.add(label)
            self._probe.accounting_error(Reason.MISSING_ROW)
            _logger.warning("kvcache: vLLM speaks of a tier %r that was not there when its manager was built", label)


class ConnectorRows:
    """What vLLM's connector knows over all tiers: whole requests, and stores that found no room."""

    def __init__(self, probe: CacheProbe) -> None:
        """Args:
        probe: The process's probe.
        """
        self.probe = probe
        requests, refused = probe.request_lookups(), probe.allocation_failures(Tier.HOST, Reason.STORE)
        self._sinks: tuple[tuple[str, Sink], ...] = (
            (f"{_CONNECTOR}lookup_sync_delay_seconds", requests.blocked.extend),
            (f"{_CONNECTOR}lookup_async_delay_seconds", requests.deferred.extend),
            (f"{_CONNECTOR}allocation_failure", refused.add),
        )

    def take(self, values: dict[str, Any]) -> None:
        """Takes over the connector's own part of what one `get_stats` returned; the managers' part was taken there."""
        for name, sink in self._sinks:
            if name in values:
                for value in values[name].values():
                    sink(value)
