"""The SGLang hooks. The functions named here are SGLang's own; `adapter.py` reads what they know.

What both tree cores do is hooked above them where it can be, in the cache, which is Python with either; and where it is
done least often. SGLang's collectors are left alone: they exist only with ``--enable-metrics``, and may be anybody's.
"""

from __future__ import annotations

from kvcache_otel.engines.hooks import Hook
from kvcache_otel.engines.sglang.registry import place

NAME = "SGLang"

# How a hook gets into its place.
PLACE = place

# Versions read by eye and by `tests/engines/sglang`. Before the first of FULL SGLang does things that no hook can see;
# from it on, a hook is missing only where SGLang does nothing of the kind yet. LIMITS says what hooks do not help with.
SUPPORTED = ("0.5.18", "0.5.23")
FULL = ("0.5.20", "0.5.23")

# How SGLang finds us: the group and the name of our entry point, and the variable that can forbid it.
PLUGIN_GROUP = "sglang.srt.plugins"
PLUGIN_NAME = "kvcache_otel"
PLUGIN_ALLOW_LIST = "SGLANG_PLUGINS"


def allows(value: str, name: str) -> bool:
    """Returns whether that variable lets a plugin in. SGLang lets all in if it is empty, and takes blanks off names."""
    return not value or name in [part.strip() for part in value.split(",")]


# SGLang's schedulers are always processes of their own; a MeterProvider cannot follow it into them.
IN_ONE_PROCESS = None

# What keeps it quiet while `doctor` imports it.
QUIET: dict[str, str] = {}

_MEM, _MANAGERS = "sglang.srt.mem_cache", "sglang.srt.managers"
_CACHE = f"{_MEM}.unified_radix_cache:UnifiedRadixCache"
_CONTROLLER = f"{_MEM}.hybrid_cache.hybrid_cache_controller:HybridCacheController"
_RUST_CORE = f"{_MEM}.rust_tree_core.adapter:RustUnifiedTreeCore"
_TRANSFER = f"{_MEM}.l2_transfer:L2TransferEngine"

HOOKS: tuple[Hook, ...] = (
    # Caches being built.
    Hook(
        name="cache.init",
        target=f"{_CACHE}.__init__",
        body="cache_built",
        fact="everything",
    ),
    Hook(
        name="cache.init_hicache",
        target=f"{_CACHE}.init_hicache",
        body="tiers_built",
        fact="everything below the device tier",
    ),
    Hook(
        name="storage.attach",
        target=f"{_CONTROLLER}.attach_storage_backend",
        body="storage_attached",
        fact="a storage backend that is attached at run time",
    ),
    Hook(
        name="storage.detach",
        target=f"{_CONTROLLER}.detach_storage_backend",
        body="storage_detached",
        fact="that a storage backend was detached at run time",
    ),
    # Once per step.
    Hook(
        name="cache.check_events",
        target=f"{_CACHE}.check_hicache_events",
        body="events_checked",
        fact="what the tiers hold, with HiCache",
    ),
    Hook(
        name="scheduler.batch_done",
        target=f"{_MANAGERS}.scheduler:Scheduler.process_batch_result",
        body="step_done",
        fact="what the device tier holds, without HiCache",
    ),
    Hook(
        name="scheduler.idle",
        target=f"{_MANAGERS}.scheduler:Scheduler.on_idle",
        body="step_done",
        fact="what the tiers hold, while the engine is idle",
    ),
    Hook(
        name="cache.take_events",
        target=f"{_CACHE}.take_events",
        body="events_taken",
        fact="what the KV events add up to",
    ),
    Hook(
        name="cache.reset",
        target=f"{_CACHE}._reset_full",
        body="cache_reset",
        fact="that the cache was emptied, until the next step",
    ),
    # Looking up.
    Hook(
        name="adder.budget",
        target=f"{_MANAGERS}.schedule_policy:PrefillAdder._update_prefill_budget",
        body="admitted",
        fact="prompt tokens that were computed",
    ),
    Hook(
        name="adder.admitted",
        target=f"{_MANAGERS}.schedule_policy:PrefillAdder._account_prefill_cache_admission",
        body="admitted",
        fact="prompt tokens by the tier that served them",
        since="0.5.20",
        needless_before=True,  # SGLang does all of it in the function above.
    ),
    # Losing.
    Hook(
        name="cache.evict",
        target=f"{_CACHE}._evict_components",
        body="evicting",
        fact="evictions from the device tier and how long they take",
        moment="around",
    ),
    Hook(
        name="cache.dropped",
        target=f"{_CACHE}._record_dropped_tokens",
        body="dropped",
        fact="tokens that are destroyed with no copy left below",
    ),
    Hook(
        name="core.evict_host",
        target=f"{_MEM}.unified_cache.unified_tree_core:UnifiedTreeCore.drive_host_eviction",
        body="host_evicted",
        fact="evictions from the host tier, with the Python tree core",
    ),
    Hook(
        name="rust_core.evict_host",
        target=f"{_RUST_CORE}.drive_host_eviction",
        body="host_evicted",
        fact="evictions from the host tier, with the Rust tree core",
        since="0.5.19",
        needless_before=True,
    ),
    Hook(
        name="component.free_host",
        target=f"{_MEM}.unified_cache.components:FullComponent.free_host_values",
        body="host_freed",
        fact="how many blocks the host tier holds",
        moment="before",
    ),
    Hook(
        name="buffer.dropped",
        target=f"{_MEM}.buffer_mode.pipeline:BufferModePipeline._log_backup_dropped",
        body="store_dropped",
        fact="backups to storage that are given up, where host memory is a buffer only",
        since="0.5.19",
        needless_before=True,
    ),
    # Moving between device and host.
    Hook(
        name="cache.backup",
        target=f"{_CACHE}._execute_kv_backup",
        body="backup_allocated",
        fact="how many blocks the host tier holds, how long backups wait, stores that there was no room for",
    ),
    Hook(
        name="controller.load",
        target=f"{_CONTROLLER}.load",
        body="load_back_requested",
        fact="how long load-backs wait",
        moment="around",
    ),
    Hook(
        name="transfer.backup",
        target=f"{_TRANSFER}.submit_device_to_host",
        body="backup_submitted",
        fact="active backups, and how long they take where SGLang does not time them",
        moment="around",
    ),
    Hook(
        name="transfer.load_back",
        target=f"{_TRANSFER}.submit_host_to_device",
        body="load_back_submitted",
        fact="active load-backs, and how long they take where SGLang does not time them",
        moment="around",
    ),
    Hook(
        name="cache.backup_ack",
        target=f"{_CACHE}._log_write_ack_metrics",
        body="backup_acknowledged",
        fact="backups: tokens, bytes, durations; how many blocks the host tier holds",
    ),
    Hook(
        name="cache.load_back_ack",
        target=f"{_CACHE}.loading_check",
        body="load_backs_checked",
        fact="load-backs: tokens, bytes, durations",
        moment="around",
    ),
    Hook(
        name="cache.retract",
        target=f"{_CACHE}.backup_kv_cache",
        body="retraction_backed_up",
        fact="backups of retracted requests",
        formerly="retraction_backup",
        moment="around",
    ),
    Hook(
        name="cache.restore",
        target=f"{_CACHE}.restore_kv_cache",
        body="retraction_restored",
        fact="load-backs of retracted requests",
        formerly="retraction_restore",
        moment="around",
    ),
    # Storage.
    Hook(
        name="core.insert_host",
        target=f"{_MEM}.unified_cache.unified_tree_core:UnifiedTreeCore.insert_host",
        body="host_inserted",
        fact="how many blocks the host tier holds, with the Python tree core",
    ),
    Hook(
        name="rust_core.insert_host",
        target=f"{_RUST_CORE}.insert_host",
        body="host_inserted",
        fact="how many blocks the host tier holds, with the Rust tree core",
        since="0.5.19",
        needless_before=True,
    ),
    Hook(
        name="prefetch.hit",
        target=f"{_CACHE}._record_storage_prefetch_hit",
        body="prefetch_hit",
        fact="what storage said it had, and what becomes of it",
        since="0.5.20",
    ),
    Hook(
        name="prefetch.loaded",
        target=f"{_CACHE}._check_hybrid_prefetch_result",
        body="prefetch_loaded",
        fact="tokens that a prefetch brought into host memory",
        since="0.5.19",
    ),
    Hook(
        name="prefetch.resolved",
        target=f"{_CACHE}._resolve_storage_prefetch_tokens",
        body="prefetch_resolved",
        fact="why parts of what storage had are not used",
        since="0.5.20",
    ),
    Hook(
        name="prefetch.covered",
        target=f"{_CACHE}._settle_storage_prefetch_hit",
        body="prefetch_covered",
        fact="how much of what storage had the device has by now",
        since="0.5.22",
        needless_before=True,  # SGLang tells it in prefetch.resolved.
    ),
    Hook(
        name="prefetch.finished",
        target=f"{_CACHE}._finish_storage_prefetch",
        body="prefetch_finished",
        fact="how much of what storage had is used",
        since="0.5.20",
    ),
    Hook(
        name="prefetch.discarded",
        target=f"{_CACHE}.discard_storage_prefetch_accounting",
        body="prefetch_discarded",
        fact="prefetches of aborted and retracted requests",
        since="0.5.20",
    ),
    Hook(
        name="prefetch.deferred",
        target=f"{_CACHE}._log_storage_prefetch_deferred",
        body="prefetch_deferred",
        fact="prefetches that are put off",
        since="0.5.20",
    ),
    Hook(
        name="storage.read",
        target=f"{_CONTROLLER}._page_transfer",
        body="storage_read",
        fact="reads from storage: durations, failures, queue time",
        moment="around",
    ),
    Hook(
        name="storage.read_pages",
        target=f"{_MANAGERS}.cache_controller:HiCacheController._page_transfer",
        body="storage_pages_read",
        fact="reads from storage: tokens and bytes",
    ),
    Hook(
        name="storage.read_besides",
        target=f"{_CONTROLLER}._reduce_prefetch_ack",
        body="storage_read_besides",
        fact="reads from storage: bytes of pools that have pages of their own",
        since="0.5.19",
        moment="before",
    ),
    Hook(
        name="storage.requested",
        target=f"{_MEM}.hybrid_cache.hybrid_cache_controller:StorageOperation.__init__",
        body="storage_requested",
        fact="how long reads from storage and writes to it wait",
    ),
    Hook(
        name="storage.write",
        target=f"{_CONTROLLER}._page_backup",
        body="storage_written",
        fact="writes to storage: tokens, bytes, durations, failures",
        moment="around",
    ),
    # Last words.
    Hook(
        name="cache.release",
        target=f"{_CACHE}.release_host_resources",
        body="stopping",
        fact="the last export interval of a scheduler that shuts down",
        moment="before",
    ),
)

# What no hook can tell, for `doctor` to print: in words, and the version before which it is so, empty for all of them.
LIMITS: tuple[tuple[str, str], ...] = (
    (
        "evictable slots of the host tier: SGLang does not tell them from those in use, so kvcache.usage has no row "
        "with tier=host and state=evictable",
        "",
    ),
    ("how full a storage backend is, and what it evicts", ""),
    ("whether what the host tier evicts is in storage", ""),
    (
        "tokens that leave the device with no copy in host memory (kvcache.dropped.tokens) under "
        "--hicache-write-policy write_through_selective, and where host memory is a buffer only: SGLang does not count "
        "them, and there is no row",
        "",
    ),
    ("block lookups in any tier; what storage had is in kvcache.prefetch.hit.tokens", ""),
    ("bytes of sidecars, which ride on another pool's slots, by pool; they are in kvcache.transfer.io", ""),
    ("caches other than UnifiedRadixCache, and one that is disabled (--disable-radix-cache, PD decode)", ""),
    ("what PD decode servers offload by DecodeKVCacheOffloadManager", ""),
    (
        "tokens that leave the device with no copy in host memory under write_through: before 0.5.20 with either tree "
        "core, in 0.5.20 with the Rust one",
        "0.5.21",
    ),
    ("most models: before 0.5.19 they get that cache only with SGLANG_ENABLE_UNIFIED_RADIX_TREE=1", "0.5.19"),
)
