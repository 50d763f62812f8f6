"""What each vLLM hook reads. Rows are kept on the vLLM object that they are about, and end with it."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from kvcache_otel.engines.vllm import config, needs
from kvcache_otel.engines.vllm.device import DeviceRows
from kvcache_otel.engines.vllm.host import ConnectorRows, HostRows, QueueRows, TieringRows, watch_first
from kvcache_otel.engines.vllm.published import PublishedRows, publishes
from kvcache_otel.engines.vllm.worker import DirectionRows
from kvcache_otel.identity import Identity, Rank
from kvcache_otel.semconv import Engine, Tier

# The attribute under which a vLLM object carries its rows. Looked up in place: a call more would be felt in a step.
ROWS = "_kvcache_otel"

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Set

    from kvcache_otel.record.probe import CacheProbe

    Tasks = Iterable[Callable[[], Any]]


class VllmAdapter:
    """The bodies of the hooks in `table.py`."""

    def __init__(self, probe: Callable[[Identity, int], CacheProbe], flush: Callable[[], None]) -> None:
        """Args:
        probe: Gives the probe for a cache that has been built: its identity, and how far from the first Prometheus port
            that of its process is.
        flush: Exports what there is, within a short deadline of its own.
        """
        self._probe = probe
        self._flush = flush
        self._watch = needs.Watch()

    def watch_hooks(self, lost: Callable[[], Set[str]], failed: Callable[[], Set[str]]) -> None:
        """Says who knows which hooks can be relied upon; see `needs.Watch.ask`."""
        self._watch.ask(lost, failed)

    def hook_failed(self) -> None:
        """Ends the rows that are wrong since a hook has missed something."""
        self._watch.look()

    # -- caches being built ----------------------------------------------------------------------------------------

    def manager_built(self, manager: Any, spec: Any, *_: Any, **__: Any) -> None:
        """`get_manager`: builds the manager at the first call, returns the same one ever after."""
        if getattr(manager, ROWS, None) is not None:
            return
        probe = self._probe(config.scheduler_identity(spec), config.scheduler_port(spec))
        tokens, pool, blocks = config.chunk_tokens(spec), config.offload_pool(spec), config.announced_blocks(spec)
        manager._kvcache_otel_connector = ConnectorRows(probe)
        tracker, primary = getattr(manager, "_metrics", None), getattr(manager, "primary_tier", manager)
        primary._kvcache_otel = host = HostRows(probe, primary, tokens=tokens, pool=pool, blocks=blocks)
        self._watch.add(host, needs.HOST)
        if tracker is not None:
            manager._kvcache_otel = secondary = TieringRows(probe, manager, blocks=blocks)
            # vLLM keeps a tracker for ever, in a cache of one of its methods; the rows must go with the manager.
            tracker._kvcache_otel = weakref.ref(secondary)
            self._watch.add(secondary, needs.SECONDARY)

    def worker_built(self, worker: Any, spec: Any, *_: Any, **__: Any) -> None:
        """`create_worker`: a rank's two directions exist from now on."""
        if getattr(worker._store_handler, ROWS, None) is not None:
            return
        probe = self._probe(config.worker_identity(spec), config.worker_port(spec))
        for handler, store in ((worker._store_handler, True), (worker._load_handler, False)):
            handler._kvcache_otel = rows = DirectionRows(probe, store=store)
            self._watch.add(rows, needs.COPIES)

    def scheduler_built(self, _: None, scheduler: Any, *__: Any, **___: Any) -> None:
        """`Scheduler.__init__`: the connector, and below it the offloading manager, were built inside it."""
        manager = _offloading_manager(scheduler.connector)
        offloading: ConnectorRows | None = getattr(manager, "_kvcache_otel_connector", None)
        if offloading is not None:
            probe = offloading.probe
        else:
            parallel = scheduler.vllm_config.parallel_config
            replica = parallel.data_parallel_index
            identity = Identity(Engine.VLLM, type(scheduler.kv_cache_manager).__name__, Rank(dp=replica))
            probe = self._probe(identity, replica)
        rows = DeviceRows(probe, scheduler, _tiers_below(scheduler.connector, manager))
        manager_of_blocks = scheduler.kv_cache_manager
        scheduler._kvcache_otel = manager_of_blocks._kvcache_otel = manager_of_blocks.block_pool._kvcache_otel = rows
        self._watch.add(rows, needs.DEVICE)
        publisher: Any = getattr(scheduler, "kv_event_publisher", None)
        if publishes(publisher):
            publisher._kvcache_otel = published = PublishedRows(probe, manager)
            self._watch.add(published, needs.PUBLISHED)

    # -- once per step ---------------------------------------------------------------------------------------------

    def host_stats_taken(self, stats: Any, manager: Any, *_: Any, **__: Any) -> None:
        """`CPUOffloadingManager.get_stats`: once per step, whether vLLM logs statistics or not."""
        rows: HostRows | None = getattr(manager, ROWS, None)
        if rows is not None:
            rows.settle(manager)
            if rows.counts_skipped and stats is not None:
                rows.take(stats.data["data"])

    def tiering_stats_taken(self, stats: Any, manager: Any, *_: Any, **__: Any) -> None:
        """`TieringOffloadingManager.get_stats`: what every tier summed since the last time."""
        rows: TieringRows | None = getattr(manager, ROWS, None)
        if rows is not None and stats is not None:
            rows.take(stats.data["data"])

    def connector_stats_taken(self, stats: Any, scheduler: Any, *_: Any, **__: Any) -> None:
        """`OffloadingConnectorScheduler.get_stats`: the connector's own sums, its manager's among them."""
        rows: ConnectorRows | None = getattr(scheduler.manager, "_kvcache_otel_connector", None)
        if rows is not None and stats is not None:
            rows.take(stats.data["data"])

    def step_done(self, _: Any, scheduler: Any, *__: Any, **___: Any) -> None:
        """`Scheduler.update_from_output`: the end of a step."""
        rows: DeviceRows | None = getattr(scheduler, ROWS, None)
        if rows is not None:
            rows.settle()

    def host_reset(self, _: None, manager: Any, *__: Any, **___: Any) -> None:
        """`CPUOffloadingManager.reset_cache`: an idle engine takes no step that would tell of it."""
        rows: HostRows | None = getattr(manager, ROWS, None)
        if rows is not None:
            rows.settle(manager)

    def device_reset(self, _: bool, pool: Any, *__: Any, **___: Any) -> None:
        """`BlockPool.reset_prefix_cache`, as above."""
        rows: DeviceRows | None = getattr(pool, ROWS, None)
        if rows is not None:
            rows.settle()

    # -- what vLLM does not say ------------------------------------------------------------------------------------

    def host_store_prepared(self, output: Any, manager: Any, *_: Any, **__: Any) -> None:
        """`prepare_store`, for stores and promotions alike: room was made, or None where there is none."""
        if output is not None and output.evicted_keys:
            rows: HostRows | None = getattr(manager, ROWS, None)
            if rows is not None:
                rows.evicted(len(output.evicted_keys))

    def job_finished(self, _: None, tracker: Any, job_metadata: Any, result: Any, *__: Any, **___: Any) -> None:
        """`on_job_finished`: one transfer between the host tier and a secondary one has ended."""
        reference: weakref.ref[TieringRows] | None = getattr(tracker, ROWS, None)
        rows = reference() if reference is not None else None
        if rows is not None:
            rows.finished(job_metadata.tier_idx, job_metadata.transfer_job, result)

    def load_enqueued(self, pool: Any, job_id: int, n_tasks: int, tasks: Tasks) -> tuple[Any, ...] | None:
        """`enqueue_load`: a read begins to wait for a thread."""
        return _watched(pool, job_id, n_tasks, tasks, "loads")

    def store_enqueued(self, pool: Any, job_id: int, n_tasks: int, tasks: Tasks) -> tuple[Any, ...] | None:
        """`enqueue_store`: a write begins to wait for a thread."""
        return _watched(pool, job_id, n_tasks, tasks, "stores")

    def transfer_submitted(self, submitted: bool, handler: Any, *_: Any, **__: Any) -> None:
        """`transfer_async`: a copy is on its stream."""
        rows: DirectionRows | None = getattr(handler, ROWS, None)
        if rows is not None and submitted:
            rows.submitted()

    def transfers_finished(self, results: list[Any], handler: Any, *_: Any, **__: Any) -> None:
        """`get_finished`: the copies whose end events were done."""
        if results:
            rows: DirectionRows | None = getattr(handler, ROWS, None)
            if rows is not None:
                rows.finished(results)

    def transfers_drained(self, _: None, handler: Any, *__: Any, **___: Any) -> None:
        """`shutdown` of one direction."""
        rows: DirectionRows | None = getattr(handler, ROWS, None)
        if rows is not None:
            rows.drained()

    def request_admitted(self, _: None, manager: Any, request: Any, num_hits: int, *__: Any, **___: Any) -> None:
        """`record_prefix_cache_stats`: called at admission, whether vLLM logs statistics or not."""
        rows: DeviceRows | None = getattr(manager, ROWS, None)
        if rows is not None:
            rows.admitted(request, num_hits)

    def device_block_evicted(self, evicted: bool, pool: Any, block: Any, *_: Any, **__: Any) -> None:
        """`_maybe_evict_cached_block`, for every block that is handed out; other pools of this class have no rows."""
        if evicted:
            rows: DeviceRows | None = getattr(pool, ROWS, None)
            if rows is not None:
                rows.block_evicted()

    def events_published(self, _: None, publisher: Any, events: Any, *__: Any, **___: Any) -> None:
        """`publish`, with what one step has made known of all tiers; its thread sends it while we look at it."""
        rows: PublishedRows | None = getattr(publisher, ROWS, None)
        if rows is not None:
            rows.apply(events)

    # -- last words ------------------------------------------------------------------------------------------------

    def shutdown_handled(self, running: bool, *_: Any, **__: Any) -> None:
        """`_handle_shutdown`, once per turn of the engine's loop: false when it is to end."""
        if not running:
            self._flush()

    def engine_stopping(self, *_: Any, **__: Any) -> None:
        """`EngineCore.shutdown`."""
        self._flush()

    def worker_stopping(self, *_: Any, **__: Any) -> None:
        """`WorkerProc.shutdown`."""
        self._flush()


def _watched(pool: Any, job_id: int, n_tasks: int, tasks: Tasks, way: str) -> tuple[Any, ...] | None:
    rows: QueueRows | None = getattr(pool, ROWS, None)
    if rows is None or not isinstance(tasks, (list, tuple)):
        return None  # An iterator is vLLM's to go through: what it raises belongs there.
    return pool, job_id, n_tasks, watch_first(tasks, getattr(rows, way))


def _offloading_manager(connector: Any) -> Any:
    """Returns the manager of an OffloadingConnector, alone or among the connectors of a MultiConnector."""
    for candidate in getattr(connector, "_connectors", (connector,)):
        manager = getattr(getattr(candidate, "connector_scheduler", None), "manager", None)
        if manager is not None:
            return manager
    return None


def _tiers_below(connector: Any, manager: Any) -> tuple[str, ...]:
    if connector is None:
        return ()
    if manager is None:
        return (Tier.UNKNOWN,)  # Another connector: its hits come from outside, from where it does not say.
    secondary = (config.tier_of_secondary(tier) for tier in getattr(manager, "secondary_tiers", ()))
    return tuple(dict.fromkeys((Tier.HOST, *secondary, Tier.UNKNOWN)))
