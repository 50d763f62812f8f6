"""What each SGLang hook reads. Rows are kept on the cache that they are about, and end with it."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from kvcache_otel.engines.sglang import config
from kvcache_otel.engines.sglang.cache import ROWS, CacheRows
from kvcache_otel.engines.sglang.pools import settle
from kvcache_otel.engines.sglang.storage import PAGES, REQUESTED
from kvcache_otel.semconv import Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Set

    from kvcache_otel.engines.hooks import Finish
    from kvcache_otel.engines.sglang.device import DeviceRows
    from kvcache_otel.engines.sglang.host import HostRows
    from kvcache_otel.engines.sglang.prefetch import PrefetchBooks
    from kvcache_otel.engines.sglang.storage import StorageRows
    from kvcache_otel.engines.sglang.transfer import DirectionRows
    from kvcache_otel.identity import Identity
    from kvcache_otel.record.probe import CacheProbe

_logger = logging.getLogger(__name__)


class SglangAdapter:
    """The bodies of the hooks in `table.py`.

    Those that run for every request take `ROWS` as an attribute: to ask for it by its name costs them a twentieth.
    """

    def __init__(self, probe: Callable[[Identity, int], CacheProbe], flush: Callable[[], None]) -> None:
        """Args:
        probe: Gives the probe for a cache that has been built: its identity, and how far from the first Prometheus port
            that of its process is.
        flush: Exports what there is, within a short deadline of its own.
        """
        self._probe = probe
        self._flush = flush
        self._lost: Callable[[], Set[str]] = frozenset
        self._failed: Callable[[], Set[str]] = frozenset
        self._caches: weakref.WeakSet[CacheRows] = weakref.WeakSet()

    def watch_hooks(self, lost: Callable[[], Set[str]], failed: Callable[[], Set[str]]) -> None:
        """Says who knows which hooks can be relied upon.

        Args:
            lost: Returns the names of those that see nothing.
            failed: Returns the names of those that have missed something.
        """
        self._lost, self._failed = lost, failed

    def hook_failed(self) -> None:
        """Ends the rows that are wrong since a hook has missed something."""
        lost, failed = self._lost(), self._failed()
        for rows in self._known():
            rows.lose(lost, failed)

    def _known(self) -> list[CacheRows]:
        while True:
            try:
                return list(self._caches)
            except RuntimeError:  # Another thread builds a cache.
                continue

    def forget(self) -> None:
        """Ends the rows of every cache: from now on nobody tells them of it."""
        for rows in self._known():
            rows.end()

    # -- caches being built --------------------------------------------------------------------------------------------

    def cache_built(self, _: None, cache: Any, *__: Any, **___: Any) -> None:
        """`UnifiedRadixCache.__init__`: SGLang's ranks are published by now."""
        if cache.disable:
            _logger.warning("kvcache: nothing is measured here: SGLang's radix cache is disabled in this process")
        else:
            rows = CacheRows(self._probe(config.identity(cache), config.local_rank()), cache)
            rows.belongs_to(cache)
            rows.lose(self._lost(), self._failed())
            self._caches.add(rows)

    def tiers_built(self, _: None, cache: Any, *__: Any, **___: Any) -> None:
        """`init_hicache`: the host pools, the controller and, where configured, the storage backend."""
        rows = _rows(cache)
        controller = cache.cache_controller
        if rows is not None and controller is not None:
            rows.extend(cache)
            pipeline = getattr(cache, "buffer_pipeline", None)
            rows.belongs_to(cache.tree_core, controller, controller.l2_transfer_engine, pipeline)
            if controller.enable_storage:
                rows.attach_storage(controller)
            rows.lose(self._lost(), self._failed())

    def storage_attached(self, _: None, controller: Any, *__: Any, **___: Any) -> None:
        """`attach_storage_backend`, at run time: it raises where it fails."""
        rows = _rows(controller)
        if rows is not None and controller.enable_storage:
            rows.attach_storage(controller)
            rows.lose(self._lost(), self._failed())

    def storage_detached(self, _: None, controller: Any, *__: Any, **___: Any) -> None:
        """`detach_storage_backend`: its threads have ended."""
        rows = _rows(controller)
        if rows is not None:
            rows.detach_storage()

    # -- once per step -------------------------------------------------------------------------------------------------

    def events_checked(self, _: None, cache: Any, *__: Any, **___: Any) -> None:
        """`check_hicache_events`: where the scheduler learns what has ended since the last step."""
        try:
            rows: CacheRows = cache._kvcache_otel
            if cache.cache_controller.write_policy is not rows.policy:
                rows.watch_drops(cache)
        except AttributeError:
            return
        settle(rows.tiers)

    def step_done(self, _: Any, scheduler: Any, *__: Any, **___: Any) -> None:
        """`Scheduler.process_batch_result` and `on_idle`: the end of a step, with HiCache or without."""
        rows = _rows(getattr(scheduler, "tree_cache", None))
        if rows is not None:
            settle(rows.tiers)

    def events_taken(self, events: Any, cache: Any, *_: Any, **__: Any) -> None:
        """`take_events`, on its way to the publisher. It drains: the result may only be looked at."""
        rows = _rows(cache)
        if rows is not None and rows.published is not None:
            if isinstance(events, Sequence):  # To look at anything else could be to take it.
                rows.published.apply(cast("Sequence[Any]", events))
            for tier in rows.tiers:
                tier.hold()

    def cache_reset(self, _: None, cache: Any, *__: Any, **___: Any) -> None:
        """`_reset_full`; SGLang calls it once before there are rows."""
        rows = _rows(cache)
        if rows is not None:
            rows.reset()

    # -- looking up ----------------------------------------------------------------------------------------------------

    def admitted(self, _: None, adder: Any, *__: Any, **___: Any) -> None:
        """`_update_prefill_budget`, `_account_prefill_cache_admission`: SGLang's own sums over a batch."""
        rows = _rows(adder.tree_cache)
        if rows is not None:
            rows.admitted(adder)

    # -- losing --------------------------------------------------------------------------------------------------------

    def evicting(self, cache: Any, request_by_type: Any, tracker: dict[Any, int], *_: Any, **__: Any) -> Finish | None:
        """`_evict_components`: one eviction pass, which counts what it frees in its tracker."""
        try:
            device: DeviceRows = cache._kvcache_otel.device
        except AttributeError:
            return None
        return device.eviction(tracker)

    def dropped(self, _: None, cache: Any, dropped_tokens: Any, reason: Any, *__: Any, **___: Any) -> None:
        """`_record_dropped_tokens`, mostly of none. Before 0.5.20 it is given what was freed before and after."""
        if dropped_tokens == 0:
            return
        rows = _rows(cache)
        if rows is None:
            return
        if isinstance(reason, str):
            rows.device.dropped(dropped_tokens, reason)
        else:
            for component, freed in dropped_tokens.items():
                rows.device.dropped(freed - reason[component], Reason.HOST_PRESSURE, config.pool_of(component))

    def host_evicted(self, result: Any, core: Any, *_: Any, **__: Any) -> None:
        """`drive_host_eviction` of either tree core."""
        try:
            host: HostRows | None = core._kvcache_otel.host
        except AttributeError:
            return
        if host is not None:
            host.evicted(result.tracker)

    def host_freed(self, component: Any, host_values: list[Any], *_: Any, **__: Any) -> None:
        """`FullComponent.free_host_values`: every slot of full attention that the tree gives up."""
        cache = component.cache
        try:
            host: HostRows | None = cache._kvcache_otel.host
        except AttributeError:
            return
        if host is not None:
            host.freed(host_values)

    def store_dropped(self, _: None, pipeline: Any, num_tokens: int, *__: Any, **___: Any) -> None:
        """`BufferModePipeline._log_backup_dropped`: backups that host memory had no room for, or that came too late."""
        storage = _storage(pipeline)
        if storage is not None:
            storage.skipped(num_tokens)

    # -- moving between device and host --------------------------------------------------------------------------------

    def backup_allocated(self, slots: Any, cache: Any, node_id: Any, device_value: Any, *_: Any, **__: Any) -> None:
        """`_execute_kv_backup`: a node's copy has got its slots, or there were none."""
        try:
            rows: CacheRows = cache._kvcache_otel
            host, backup = rows.host, rows.backup
        except AttributeError:
            return
        if host is not None and backup is not None:
            host.backup_began(node_id, slots, device_value.numel())
            # Before 0.5.21 it is on its stream by now.
            if slots is not None and cache.cache_controller.write_queue:
                backup.requested()

    def load_back_requested(self, controller: Any, *_: Any, **__: Any) -> Finish | None:
        """`HybridCacheController.load`."""
        rows = _rows(controller)
        return rows.load_back.requesting() if rows is not None and rows.load_back is not None else None

    def backup_submitted(self, engine: Any, transfers: list[Any], *_: Any, **__: Any) -> Finish | None:
        """`submit_device_to_host`."""
        try:
            backup: DirectionRows | None = engine._kvcache_otel.backup
        except AttributeError:
            return None
        return None if backup is None else backup.submitting(transfers)

    def load_back_submitted(self, engine: Any, transfers: list[Any], *_: Any, **__: Any) -> Finish | None:
        """`submit_host_to_device`."""
        rows = _rows(engine)
        return rows.load_back.submitting(transfers) if rows is not None and rows.load_back is not None else None

    def backup_acknowledged(self, _: None, cache: Any, ack: Any, *__: Any, **___: Any) -> None:
        """`_log_write_ack_metrics`: called whether SGLang's metrics are on or not, after it has waited for the copy."""
        try:
            rows: CacheRows = cache._kvcache_otel
            host, backup = rows.host, rows.backup
        except AttributeError:
            return
        if host is not None and backup is not None:
            host.backup_done(ack.node_ids)
            backup.done(ack, ack.num_bytes, ack.num_tokens_by_pool or {})

    def load_backs_checked(self, cache: Any, *_: Any, **__: Any) -> Finish | None:
        """`loading_check`: takes the copies that are done from the front of its queue, and says of none that it did."""
        controller = cache.cache_controller
        if controller is None or not controller.ack_load_queue:
            return None
        rows = _rows(cache)
        if rows is None or rows.load_back is None:
            return None
        load_back, queue = rows.load_back, controller.ack_load_queue
        waiting = tuple(queue)

        def checked(_: Any, __: BaseException | None) -> None:
            for ack in waiting[: len(waiting) - len(queue)]:
                load_back.done(ack, ack.num_bytes, ack.num_tokens_by_pool or {})

        return checked

    def retraction_backed_up(self, cache: Any, *_: Any, **__: Any) -> Finish | None:
        """`backup_kv_cache`: a retracted request's copy, which is not acknowledged."""
        rows = _rows(cache)
        return rows.backup.retracting() if rows is not None and rows.backup is not None else None

    def retraction_restored(self, cache: Any, req: Any, backup: Any, *_: Any, **__: Any) -> Finish | None:
        """`restore_kv_cache`: the same, on its way back."""
        rows = _rows(cache)
        return rows.load_back.retracting(backup) if rows is not None and rows.load_back is not None else None

    # -- storage -------------------------------------------------------------------------------------------------------

    def host_inserted(self, result: Any, core: Any, *_: Any, **__: Any) -> None:
        """`insert_host` of either tree core: what a prefetch brought goes into the tree, where it is not there yet."""
        host = _host(core)
        if host is not None and not result.host_insert_dropped:
            host.inserted(result.total_len - result.prefix_len)

    def prefetch_hit(self, _: None, cache: Any, request: Any, num_tokens: int, *__: Any, **___: Any) -> None:
        """`_record_storage_prefetch_hit`."""
        books = _prefetches(cache)
        if books is not None:
            books.hit(request, num_tokens)

    def prefetch_loaded(self, usable: bool, cache: Any, request: Any, operation: Any, *_: Any, **__: Any) -> None:
        """`_check_hybrid_prefetch_result`: whether what has arrived can be used, which all ranks agree on."""
        storage = _storage(cache)
        if storage is not None and usable:
            storage.loaded(operation.completed_tokens)

    def prefetch_resolved(
        self, _: None, cache: Any, request: Any, num_tokens: int, reason: str | None = None, *__: Any, **___: Any
    ) -> None:
        """`_resolve_storage_prefetch_tokens`."""
        books = _prefetches(cache)
        if books is not None:
            books.resolved(request, num_tokens, reason)

    def prefetch_covered(self, _: None, cache: Any, request: Any, credited_tokens: int, *__: Any, **___: Any) -> None:
        """`_settle_storage_prefetch_hit`: does nothing itself where SGLang's metrics are off."""
        books = _prefetches(cache)
        if books is not None:
            books.covered(request, credited_tokens)

    def prefetch_finished(
        self, _: None, cache: Any, request: Any, fulfilled_tokens: int, reason: str | None, *__: Any, **___: Any
    ) -> None:
        """`_finish_storage_prefetch`."""
        books = _prefetches(cache)
        if books is not None:
            books.finished(request, fulfilled_tokens, reason)

    def prefetch_discarded(self, _: None, cache: Any, request: Any, *__: Any, **___: Any) -> None:
        """`discard_storage_prefetch_accounting`: aborted and retracted requests, which SGLang does not count."""
        books = _prefetches(cache)
        if books is not None:
            books.finished(request, 0, None)

    def prefetch_deferred(self, _: None, cache: Any, num_tokens: int, reason: str, *__: Any, **___: Any) -> None:
        """`_log_storage_prefetch_deferred`."""
        books = _prefetches(cache)
        if books is not None:
            books.deferred(num_tokens, reason)

    def storage_read(self, controller: Any, operation: Any, *_: Any, **__: Any) -> Finish | None:
        """`HybridCacheController._page_transfer`, on a thread of SGLang's."""
        storage = _storage(controller)
        return storage.reading(operation) if storage is not None else None

    def storage_pages_read(self, pages: Any, controller: Any, operation: Any, *_: Any, **__: Any) -> None:
        """`HiCacheController._page_transfer`, inside the one before: the pages that have arrived."""
        if _storage(controller) is not None:
            if pages is None:
                pages = operation.completed_tokens // controller.page_size
            setattr(operation, PAGES, pages)

    def storage_read_besides(self, controller: Any, ack: Any, *_: Any, **__: Any) -> None:
        """`_reduce_prefetch_ack`, before the ranks agree on the least of what they have read."""
        if ack.pool_hits:
            storage = _storage(controller)
            if storage is not None:
                storage.read_besides(ack.pool_hits)

    def storage_requested(self, _: None, operation: Any, *__: Any, **___: Any) -> None:
        """`StorageOperation.__init__`: before any thread can take it."""
        setattr(operation, REQUESTED, time.monotonic())

    def storage_written(self, controller: Any, operation: Any, *_: Any, **__: Any) -> Finish | None:
        """`HybridCacheController._page_backup`, on a thread of SGLang's."""
        storage = _storage(controller)
        if storage is None:
            return None
        if not controller.backup_skip:
            return storage.writing(operation)
        # Another rank writes the same keys and values. What is this one's own all the same, if anything, goes alone.
        if any(map(controller.should_backup, getattr(operation, "pool_transfers", None) or ())):
            return storage.writing_besides(operation)
        return None

    # -- last words ----------------------------------------------------------------------------------------------------

    def stopping(self, *_: Any, **__: Any) -> None:
        """`release_host_resources`: a scheduler that shuts down in good order."""
        self._flush()


def _rows(part: Any) -> CacheRows | None:
    return getattr(part, ROWS, None)


def _host(part: Any) -> HostRows | None:
    rows: CacheRows | None = getattr(part, ROWS, None)
    return None if rows is None else rows.host


def _prefetches(part: Any) -> PrefetchBooks | None:
    storage = _storage(part)
    return None if storage is None else storage.prefetches


def _storage(part: Any) -> StorageRows | None:
    rows: CacheRows | None = getattr(part, ROWS, None)
    return None if rows is None else rows.storage
