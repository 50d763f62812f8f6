"""The vLLM hooks. The functions named here are vLLM's own; `adapter.py` reads what they know.

What vLLM sums once per step is read from what its `get_stats` returned, never by calling it: it takes and resets. The
rest of the table is for what vLLM does not say.
"""

from __future__ import annotations

from kvcache_otel.engines.hooks import Hook, HookPoint

NAME = "vLLM"

# How a hook gets into its place: vLLM has no way of its own.
PLACE = HookPoint.attach

# Versions read by eye and by `tests/engines/vllm`: every hook is there from the first of FULL on.
SUPPORTED = ("0.28", "0.33")
FULL = ("0.31", "0.33")

# How vLLM finds us: the group and the name of our entry point, and the variable that can forbid it.
PLUGIN_GROUP = "vllm.general_plugins"
PLUGIN_NAME = "kvcache_otel"
PLUGIN_ALLOW_LIST = "VLLM_PLUGINS"


def allows(value: str, name: str) -> bool:
    """Returns whether that variable lets a plugin in. vLLM compares names as they are, blanks included."""
    return name in value.split(",")


# What makes vLLM stay in the process that makes it; a MeterProvider cannot follow it into others.
IN_ONE_PROCESS = ("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

# What keeps it quiet while `doctor` imports it.
QUIET = {"VLLM_LOGGING_LEVEL": "ERROR"}

_OFFLOAD = "vllm.v1.kv_offload"
_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.offloading"

HOOKS: tuple[Hook, ...] = (
    # Caches being built.
    Hook(
        name="scheduler.init",
        target="vllm.v1.core.sched.scheduler:Scheduler.__init__",
        body="scheduler_built",
        fact="everything about the device tier",
    ),
    Hook(
        name="cpu.get_manager",
        target=f"{_OFFLOAD}.cpu.spec:CPUOffloadingSpec.get_manager",
        body="manager_built",
        fact="everything about the host tier without secondary tiers",
    ),
    Hook(
        name="tiering.get_manager",
        target=f"{_OFFLOAD}.tiering.spec:TieringOffloadingSpec.get_manager",
        body="manager_built",
        fact="everything about the host tier and the secondary tiers",
    ),
    Hook(
        name="cpu.create_worker",
        target=f"{_OFFLOAD}.cpu.spec:CPUOffloadingSpec.create_worker",
        body="worker_built",
        fact="transfers between device and host, per rank, without secondary tiers",
    ),
    Hook(
        name="tiering.create_worker",
        target=f"{_OFFLOAD}.tiering.spec:TieringOffloadingSpec.create_worker",
        body="worker_built",
        fact="transfers between device and host, per rank, with secondary tiers",
    ),
    # What vLLM sums once per step.
    Hook(
        name="cpu.get_stats",
        target=f"{_OFFLOAD}.cpu.manager:CPUOffloadingManager.get_stats",
        body="host_stats_taken",
        fact="what the host tier holds",
    ),
    Hook(
        name="tiering.get_stats",
        target=f"{_OFFLOAD}.tiering.manager:TieringOffloadingManager.get_stats",
        body="tiering_stats_taken",
        fact="lookups, bytes, active transfers and allocation failures of the secondary tiers",
    ),
    Hook(
        name="connector.get_stats",
        target=f"{_CONNECTOR}.scheduler:OffloadingConnectorScheduler.get_stats",
        body="connector_stats_taken",
        fact="request lookups and failed store allocations",
    ),
    Hook(
        name="scheduler.update",
        target="vllm.v1.core.sched.scheduler:Scheduler.update_from_output",
        body="step_done",
        fact="what the device tier holds",
    ),
    # What happens between steps.
    Hook(
        name="cpu.reset_cache",
        target=f"{_OFFLOAD}.cpu.manager:CPUOffloadingManager.reset_cache",
        body="host_reset",
        fact="that the host tier was emptied, until the next step",
    ),
    Hook(
        name="block_pool.reset",
        target="vllm.v1.core.block_pool:BlockPool.reset_prefix_cache",
        body="device_reset",
        fact="that the device tier was emptied, until the next step",
    ),
    Hook(
        name="scheduler.finish",
        target="vllm.v1.core.sched.scheduler:Scheduler.finish_requests",
        body="step_done",
        fact="what aborted requests leave free on the device, until the next step",
    ),
    # What vLLM does not say.
    Hook(
        name="cpu.prepare_store",
        target=f"{_OFFLOAD}.cpu.manager:CPUOffloadingManager.prepare_store",
        body="host_store_prepared",
        fact="evictions from the host tier",
    ),
    Hook(
        name="tiering.job_finished",
        target=f"{_OFFLOAD}.tiering.metrics:TieringMetricsTracker.on_job_finished",
        body="job_finished",
        fact="durations and outcomes of transfers to and from the secondary tiers",
    ),
    Hook(
        name="fs.enqueue_load",
        target=f"{_OFFLOAD}.tiering.fs.thread_pool:DualQueueThreadPool.enqueue_load",
        body="load_enqueued",
        fact="queue time of reads from the fs tier",
        moment="arguments",
    ),
    Hook(
        name="fs.enqueue_store",
        target=f"{_OFFLOAD}.tiering.fs.thread_pool:DualQueueThreadPool.enqueue_store",
        body="store_enqueued",
        fact="queue time of writes to the fs tier",
        moment="arguments",
    ),
    Hook(
        name="worker.transfer_async",
        target=f"{_OFFLOAD}.cpu.gpu_worker:SingleDirectionOffloadingHandler.transfer_async",
        body="transfer_submitted",
        fact="active transfers between device and host",
    ),
    Hook(
        name="worker.get_finished",
        target=f"{_OFFLOAD}.cpu.gpu_worker:SingleDirectionOffloadingHandler.get_finished",
        body="transfers_finished",
        fact="durations and bytes of transfers between device and host",
    ),
    Hook(
        name="worker.shutdown",
        target=f"{_OFFLOAD}.cpu.gpu_worker:SingleDirectionOffloadingHandler.shutdown",
        body="transfers_drained",
        fact="that no transfer between device and host is active any more",
    ),
    Hook(
        name="kv_cache.admitted",
        target="vllm.v1.core.kv_cache_manager:KVCacheManager.record_prefix_cache_stats",
        body="request_admitted",
        fact="prompt tokens by the tier that served them",
    ),
    Hook(
        name="block_pool.evict",
        target="vllm.v1.core.block_pool:BlockPool._maybe_evict_cached_block",
        body="device_block_evicted",
        fact="evictions from the device tier",
    ),
    Hook(
        name="publisher.publish",
        target="vllm.distributed.kv_events:ZmqEventPublisher.publish",
        body="events_published",
        fact="KV events, and what they add up to",
    ),
    # Last words: vLLM's children are killed right after these.
    Hook(
        name="engine.handle_shutdown",
        target="vllm.v1.engine.core:EngineCoreProc._handle_shutdown",
        body="shutdown_handled",
        fact="the last export interval of an engine process that is told to stop",
    ),
    Hook(
        name="engine.shutdown",
        target="vllm.v1.engine.core:EngineCore.shutdown",
        body="engine_stopping",
        fact="the last export interval of an engine that shuts down",
        moment="before",
    ),
    Hook(
        name="worker_proc.shutdown",
        target="vllm.v1.executor.multiproc_executor:WorkerProc.shutdown",
        body="worker_stopping",
        fact="the last export interval of a worker process that shuts down",
        moment="before",
    ),
)

# What no hook can tell, for `doctor` to print: in words, and the version before which it is so, empty for all of them.
LIMITS: tuple[tuple[str, str], ...] = (
    (
        "evictable blocks of the device tier: vLLM counts cached blocks that no request uses among the free ones, so "
        "kvcache.usage has no row with tier=device and state=evictable",
        "",
    ),
    ("how full the secondary tiers are, and what they evict", ""),
    ("block lookups in the device tier; the tokens that it served are in kvcache.lookup.tokens", ""),
    ("how long a transfer waits in a queue, except to and from the fs tier", ""),
    ("how long an eviction takes", ""),
    (
        "tokens of the host tier where groups of layers have blocks of different sizes: its usage and evictions have "
        "no rows then, its resident blocks do",
        "",
    ),
    ("what a publisher of KV events other than vLLM's own zmq publishes, unless it derives from that one", ""),
    ("which tier below the device served a prompt: before 0.32 vLLM does not say, so it is tier=unknown", "0.32"),
    ("stores that a slow secondary tier refuses: there is no back-pressure before 0.31", "0.31"),
)
