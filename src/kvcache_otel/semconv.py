"""The catalogue as constants: attribute keys, their values, and the specification of each metric.

Generated from model/kvcache.yaml by tools/generate.py. Do not edit: change the catalogue and generate again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvcache_otel.spec import AttributeSpec, MetricSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

CATALOGUE_VERSION: Final = 1

KVCACHE_ENGINE: Final = "kvcache.engine"
KVCACHE_CACHE_TYPE: Final = "kvcache.cache.type"
KVCACHE_RANK_TP: Final = "kvcache.rank.tp"
KVCACHE_RANK_PP: Final = "kvcache.rank.pp"
KVCACHE_RANK_DP: Final = "kvcache.rank.dp"
KVCACHE_TIER: Final = "kvcache.tier"
KVCACHE_TIER_NAME: Final = "kvcache.tier.name"
KVCACHE_SOURCE_TIER: Final = "kvcache.source.tier"
KVCACHE_DESTINATION_TIER: Final = "kvcache.destination.tier"
KVCACHE_POOL: Final = "kvcache.pool"
KVCACHE_STATE: Final = "kvcache.state"
KVCACHE_REASON: Final = "kvcache.reason"
KVCACHE_TIMING_SOURCE: Final = "kvcache.timing.source"
KVCACHE_LOOKUP_RESULT: Final = "kvcache.lookup.result"
KVCACHE_LOOKUP_MODE: Final = "kvcache.lookup.mode"
KVCACHE_EVENT_TYPE: Final = "kvcache.event.type"
KVCACHE_EVENT_MEDIUM: Final = "kvcache.event.medium"
KVCACHE_VIEW: Final = "kvcache.view"
KVCACHE_TELEMETRY_HOOK: Final = "kvcache.telemetry.hook"
KVCACHE_WORKER: Final = "kvcache.worker"
ERROR_TYPE: Final = "error.type"

IDENTITY_ATTRIBUTES: Final = (KVCACHE_ENGINE, KVCACHE_CACHE_TYPE, KVCACHE_RANK_TP, KVCACHE_RANK_PP, KVCACHE_RANK_DP)
"""What every series that is recorded inside an engine carries."""


class Engine:
    """Values of ``kvcache.engine``."""

    VLLM: Final = "vllm"
    """vLLM."""
    SGLANG: Final = "sglang"
    """SGLang."""
    CUSTOM: Final = "custom"
    """caches of one's own."""


class Tier:
    """Values of ``kvcache.tier``, ``kvcache.source.tier`` and ``kvcache.destination.tier``."""

    DEVICE: Final = "device"
    """Memory of the accelerator."""
    HOST: Final = "host"
    """Memory of the machine that the accelerator sits in."""
    DISK: Final = "disk"
    """A disk or file system that the engine writes to."""
    PEER: Final = "peer"
    """The cache of another engine instance."""
    EXTERNAL: Final = "external"
    """A storage service outside the engine."""
    UNKNOWN: Final = "unknown"
    """The engine did not say which tier."""
    NONE: Final = "none"
    """No tier had it; the tokens were computed."""


class Pool:
    """Values of ``kvcache.pool``."""

    KV: Final = "kv"
    """Keys and values of full attention."""
    SWA: Final = "swa"
    """Keys and values of sliding-window attention."""
    MAMBA: Final = "mamba"
    """States of Mamba layers, counted in states."""
    INDEXER: Final = "indexer"
    """Keys of a sparse-attention indexer."""
    DRAFT: Final = "draft"
    """Keys and values of a speculative draft model."""
    OTHER: Final = "other"
    """A pool that is none of the above."""
    ALL: Final = "all"
    """All pools together, where the engine tells only their sum."""


class State:
    """Values of ``kvcache.state``."""

    USED: Final = "used"
    """In use, or pinned by a transfer; what could be evicted too, where an engine does not tell."""
    EVICTABLE: Final = "evictable"
    """Holds cached KV that nothing refers to, free to be evicted."""
    FREE: Final = "free"
    """Holds nothing."""


class Reason:
    """Values of ``kvcache.reason``."""

    HOST_PRESSURE: Final = "host_pressure"
    """The host tier had to make room."""
    WRITE_THROUGH_UNBACKED_EVICTION: Final = "write_through_unbacked_eviction"
    """It was evicted before its write-through backup was made."""
    POOL_FULL: Final = "pool_full"
    """The pool below was full."""
    BACKPRESSURE: Final = "backpressure"
    """Too many stores were already on their way."""
    NO_SPACE: Final = "no_space"
    """The lower tier had no room."""
    ALREADY_STORED: Final = "already_stored"
    """The lower tier already had it."""
    STORE: Final = "store"
    """Space was asked for to store into a lower tier."""
    PROMOTION: Final = "promotion"
    """Space was asked for to bring KV up from a secondary tier."""
    LOAD: Final = "load"
    """Space was asked for to load KV back for a request."""
    BELOW_THRESHOLD: Final = "below_threshold"
    """The hit was shorter than a prefetch is worth."""
    HOST_CAPACITY: Final = "host_capacity"
    """Host memory had no room for it."""
    DEVICE_CAPACITY: Final = "device_capacity"
    """Device memory had no room for it, or it was too little to be worth a load-back."""
    DEVICE_COVERED: Final = "device_covered"
    """The device held it already, all or a part."""
    STORAGE_TRANSFER: Final = "storage_transfer"
    """Storage delivered less than it had promised."""
    DEADLINE: Final = "deadline"
    """It had not arrived when the wait for it ended."""
    ANCHOR_LOST: Final = "anchor_lost"
    """The prefix that it continues was evicted meanwhile."""
    AUX_WINDOW_TRIM: Final = "aux_window_trim"
    """A sliding window or state pool could serve only part of it."""
    DEVICE_OVERLAP: Final = "device_overlap"
    """The device came to hold that part while it was being fetched."""
    CACHE_ADMISSION_SHORTFALL: Final = "cache_admission_shortfall"
    """The request was admitted with a shorter cached prefix."""
    SHRUNK: Final = "shrunk"
    """The prefix that it continues got shorter before it was admitted."""
    UNSERVABLE_PREFIX: Final = "unservable_prefix"
    """What it continues could not be read as a prefix."""
    DROPPED: Final = "dropped"
    """The prefetch was given up before it finished."""
    MISSING_ROW: Final = "missing_row"
    """A change referred to an entry that the books do not have."""
    UNDERFLOW: Final = "underflow"
    """A count would have fallen below zero."""
    UNKNOWN_REMOVE: Final = "unknown_remove"
    """A block was removed that was not there."""
    RECOUNT: Final = "recount"
    """A full recount differed from the running count."""
    CONSERVATION: Final = "conservation"
    """The parts did not add up to the whole."""
    NEGATIVE_DELTA: Final = "negative_delta"
    """The engine reported a negative amount."""
    MSGPACK: Final = "msgpack"
    """The payload is not valid MessagePack."""
    FRAME_COUNT: Final = "frame_count"
    """The message has an unexpected number of frames."""
    SEQUENCE_FRAME: Final = "sequence_frame"
    """The sequence number could not be read."""
    BATCH_SHAPE: Final = "batch_shape"
    """The batch has no form that is known."""
    EVENT_SHAPE: Final = "event_shape"
    """An event has no form that is known."""
    BLOCK_HASH: Final = "block_hash"
    """A block hash is of no type that is known."""
    QUEUE_FULL: Final = "queue_full"
    """The bounded queue of pending measurements was full."""
    EVENT_LOST: Final = "event_lost"
    """The device event that would have told the time was never seen to finish."""
    LABEL_OVERFLOW: Final = "label_overflow"
    """There were more distinct label values than are kept."""
    OTHER: Final = "other"
    """A reason that is not in the metric's closed set."""


class TimingSource:
    """Values of ``kvcache.timing.source``."""

    DEVICE_EVENT: Final = "device_event"
    """An event pair on the accelerator; data movement alone."""
    ENGINE_REPORT: Final = "engine_report"
    """The engine's own figure, taken as it is."""
    WALL_CLOCK: Final = "wall_clock"
    """The host's clock, until the call that moved the data came back or somebody found it moved."""


class LookupResult:
    """Values of ``kvcache.lookup.result``."""

    HIT: Final = "hit"
    """The tier had the block."""
    MISS: Final = "miss"
    """The tier did not have the block."""


class LookupMode:
    """Values of ``kvcache.lookup.mode``."""

    SYNC: Final = "sync"
    """The lookup answered in the call itself."""
    ASYNC: Final = "async"
    """The lookup asked to be repeated and answered later."""


class EventType:
    """Values of ``kvcache.event.type``."""

    BLOCK_STORED: Final = "block_stored"
    """Blocks entered a tier."""
    BLOCK_REMOVED: Final = "block_removed"
    """Blocks left a tier."""
    ALL_BLOCKS_CLEARED: Final = "all_blocks_cleared"
    """The cache was emptied."""
    OTHER: Final = "other"
    """A type that is not known here."""


class EventMedium:
    """Values of ``kvcache.event.medium``."""

    DEVICE: Final = "device"
    """The event names the accelerator's memory."""
    HOST: Final = "host"
    """The event names the machine's memory."""
    DISK: Final = "disk"
    """The event names a disk or file system."""
    EXTERNAL: Final = "external"
    """The event names an external store."""
    UNTAGGED: Final = "untagged"
    """The event names no medium."""
    UNKNOWN: Final = "unknown"
    """The event names a medium that is not known here."""


class View:
    """Values of ``kvcache.view``."""

    HELD: Final = "held"
    """The engine's own tree."""
    PUBLISHED: Final = "published"
    """What its events add up to, taken in the engine's process."""
    RECEIVED: Final = "received"
    """What a subscriber of those events believes."""


class ErrorType:
    """Values of ``error.type``."""

    OTHER: Final = "_OTHER"
    """An error of no class that is known here."""


ATTRIBUTES: Final[Mapping[str, AttributeSpec]] = {
    KVCACHE_ENGINE: AttributeSpec(
        name=KVCACHE_ENGINE,
        type="string",
        members=frozenset({"vllm", "sglang", "custom"}),
        fallback="custom",
        brief="The inference engine that owns the cache.",
    ),
    KVCACHE_CACHE_TYPE: AttributeSpec(
        name=KVCACHE_CACHE_TYPE,
        type="string",
        members=None,
        fallback=None,
        brief="The name of the class that defines the cache, one per process as a rule.",
    ),
    KVCACHE_RANK_TP: AttributeSpec(
        name=KVCACHE_RANK_TP,
        type="int",
        members=None,
        fallback=None,
        brief="The tensor-parallel rank that owns the KV shard.",
    ),
    KVCACHE_RANK_PP: AttributeSpec(
        name=KVCACHE_RANK_PP,
        type="int",
        members=None,
        fallback=None,
        brief="The pipeline-parallel rank that owns the KV shard.",
    ),
    KVCACHE_RANK_DP: AttributeSpec(
        name=KVCACHE_RANK_DP,
        type="int",
        members=None,
        fallback=None,
        brief="The data-parallel rank that owns the KV shard.",
    ),
    KVCACHE_TIER: AttributeSpec(
        name=KVCACHE_TIER,
        type="string",
        members=frozenset({"device", "host", "disk", "peer", "external", "unknown", "none"}),
        fallback="unknown",
        brief="The memory tier that the value is about.",
    ),
    KVCACHE_TIER_NAME: AttributeSpec(
        name=KVCACHE_TIER_NAME,
        type="string",
        members=None,
        fallback=None,
        brief="The engine's own name of a secondary tier or storage backend, as configured.",
    ),
    KVCACHE_SOURCE_TIER: AttributeSpec(
        name=KVCACHE_SOURCE_TIER,
        type="string",
        members=frozenset({"device", "host", "disk", "peer", "external", "unknown"}),
        fallback="unknown",
        brief="The memory tier that a transfer reads from.",
    ),
    KVCACHE_DESTINATION_TIER: AttributeSpec(
        name=KVCACHE_DESTINATION_TIER,
        type="string",
        members=frozenset({"device", "host", "disk", "peer", "external", "unknown"}),
        fallback="unknown",
        brief="The memory tier that a transfer writes to.",
    ),
    KVCACHE_POOL: AttributeSpec(
        name=KVCACHE_POOL,
        type="string",
        members=frozenset({"kv", "swa", "mamba", "indexer", "draft", "other", "all"}),
        fallback="other",
        brief="The memory pool within a tier.",
    ),
    KVCACHE_STATE: AttributeSpec(
        name=KVCACHE_STATE,
        type="string",
        members=frozenset({"used", "evictable", "free"}),
        fallback=None,
        brief="What the space in a pool is doing.",
    ),
    KVCACHE_REASON: AttributeSpec(
        name=KVCACHE_REASON,
        type="string",
        members=frozenset(
            {
                "host_pressure",
                "write_through_unbacked_eviction",
                "pool_full",
                "backpressure",
                "no_space",
                "already_stored",
                "store",
                "promotion",
                "load",
                "below_threshold",
                "host_capacity",
                "device_capacity",
                "device_covered",
                "storage_transfer",
                "deadline",
                "anchor_lost",
                "aux_window_trim",
                "device_overlap",
                "cache_admission_shortfall",
                "shrunk",
                "unservable_prefix",
                "dropped",
                "missing_row",
                "underflow",
                "unknown_remove",
                "recount",
                "conservation",
                "negative_delta",
                "msgpack",
                "frame_count",
                "sequence_frame",
                "batch_shape",
                "event_shape",
                "block_hash",
                "queue_full",
                "event_lost",
                "label_overflow",
                "other",
            }
        ),
        fallback="other",
        brief="Why it happened, from the closed set of the metric.",
    ),
    KVCACHE_TIMING_SOURCE: AttributeSpec(
        name=KVCACHE_TIMING_SOURCE,
        type="string",
        members=frozenset({"device_event", "engine_report", "wall_clock"}),
        fallback=None,
        brief="Where the duration of a transfer was taken from.",
    ),
    KVCACHE_LOOKUP_RESULT: AttributeSpec(
        name=KVCACHE_LOOKUP_RESULT,
        type="string",
        members=frozenset({"hit", "miss"}),
        fallback=None,
        brief="How a lookup ended.",
    ),
    KVCACHE_LOOKUP_MODE: AttributeSpec(
        name=KVCACHE_LOOKUP_MODE,
        type="string",
        members=frozenset({"sync", "async"}),
        fallback=None,
        brief="Whether a lookup blocked its caller or was answered later.",
    ),
    KVCACHE_EVENT_TYPE: AttributeSpec(
        name=KVCACHE_EVENT_TYPE,
        type="string",
        members=frozenset({"block_stored", "block_removed", "all_blocks_cleared", "other"}),
        fallback="other",
        brief="What a KV event announces.",
    ),
    KVCACHE_EVENT_MEDIUM: AttributeSpec(
        name=KVCACHE_EVENT_MEDIUM,
        type="string",
        members=frozenset({"device", "host", "disk", "external", "untagged", "unknown"}),
        fallback="unknown",
        brief="The storage medium that a KV event names.",
    ),
    KVCACHE_VIEW: AttributeSpec(
        name=KVCACHE_VIEW,
        type="string",
        members=frozenset({"held", "published", "received"}),
        fallback=None,
        brief="Whose account of a tier it is.",
    ),
    KVCACHE_TELEMETRY_HOOK: AttributeSpec(
        name=KVCACHE_TELEMETRY_HOOK,
        type="string",
        members=None,
        fallback=None,
        brief="The short name of a hook of this instrumentation, as `kvcache-otel doctor` lists it.",
    ),
    KVCACHE_WORKER: AttributeSpec(
        name=KVCACHE_WORKER,
        type="string",
        members=None,
        fallback=None,
        brief="The publisher that a received value is about, by its configured name or endpoint.",
    ),
    ERROR_TYPE: AttributeSpec(
        name=ERROR_TYPE,
        type="string",
        members=None,
        fallback="_OTHER",
        brief="The class of error that the operation ended with, as OpenTelemetry defines it; absent on success.",
    ),
}

DURATION_BOUNDS: Final = (
    1e-05,
    2e-05,
    5e-05,
    0.0001,
    0.0002,
    0.0005,
    0.001,
    0.002,
    0.005,
    0.01,
    0.02,
    0.05,
    0.1,
    0.2,
    0.5,
    1.0,
    2.0,
    5.0,
    10.0,
    30.0,
    60.0,
)

_TIER_WITHOUT_NONE: Final = frozenset({"device", "host", "disk", "peer", "external", "unknown"})

LOOKUP_TOKENS: Final = MetricSpec(
    name="kvcache.lookup.tokens",
    instrument="counter",
    unit="{token}",
    brief=(
        "Prompt tokens of admitted requests by the tier that served them, where `none` are those that were computed. "
        "Fold: read one rank."
    ),
    fold="one_rank",
    attributes=(KVCACHE_TIER,),
)

LOOKUP_BLOCKS: Final = MetricSpec(
    name="kvcache.lookup.blocks",
    instrument="counter",
    unit="{block}",
    brief=(
        "Block lookups in one tier, counted once per request, tier and block until the request is admitted. Fold: read "
        "one rank."
    ),
    fold="one_rank",
    attributes=(KVCACHE_TIER, KVCACHE_TIER_NAME, KVCACHE_LOOKUP_RESULT),
    optional=frozenset({KVCACHE_TIER_NAME}),
    values={KVCACHE_TIER: _TIER_WITHOUT_NONE},
)

LOOKUP_DURATION: Final = MetricSpec(
    name="kvcache.lookup.duration",
    instrument="histogram",
    unit="s",
    brief="Duration of one block lookup in one tier. Fold: read one rank.",
    fold="one_rank",
    attributes=(KVCACHE_TIER, KVCACHE_TIER_NAME, KVCACHE_LOOKUP_MODE),
    optional=frozenset({KVCACHE_TIER_NAME}),
    values={KVCACHE_TIER: _TIER_WITHOUT_NONE},
    bounds=DURATION_BOUNDS,
)

LOOKUP_REQUEST_DURATION: Final = MetricSpec(
    name="kvcache.lookup.request.duration",
    instrument="histogram",
    unit="s",
    brief=(
        "Duration of one request's lookup over all its blocks and tiers, where the engine tells it. Fold: read one "
        "rank."
    ),
    fold="one_rank",
    attributes=(KVCACHE_LOOKUP_MODE,),
    bounds=DURATION_BOUNDS,
)

TRANSFER_DURATION: Final = MetricSpec(
    name="kvcache.transfer.duration",
    instrument="histogram",
    unit="s",
    brief="Duration of one transfer between two tiers, data movement only. Fold: add the ranks.",
    fold="sum",
    attributes=(KVCACHE_SOURCE_TIER, KVCACHE_DESTINATION_TIER, KVCACHE_TIER_NAME, KVCACHE_TIMING_SOURCE),
    optional=frozenset({KVCACHE_TIER_NAME}),
    bounds=DURATION_BOUNDS,
)

TRANSFER_QUEUE_DURATION: Final = MetricSpec(
    name="kvcache.transfer.queue.duration",
    instrument="histogram",
    unit="s",
    brief=(
        "Time that one transfer waited between being requested and starting to move, where both moments are known. "
        "Fold: add the ranks."
    ),
    fold="sum",
    attributes=(KVCACHE_SOURCE_TIER, KVCACHE_DESTINATION_TIER, KVCACHE_TIER_NAME),
    optional=frozenset({KVCACHE_TIER_NAME}),
    bounds=DURATION_BOUNDS,
)

TRANSFER_IO: Final = MetricSpec(
    name="kvcache.transfer.io",
    instrument="counter",
    unit="By",
    brief="Bytes moved between two tiers, every pool and sidecar included. Fold: add the ranks.",
    fold="sum",
    attributes=(KVCACHE_SOURCE_TIER, KVCACHE_DESTINATION_TIER, KVCACHE_TIER_NAME, KVCACHE_TIMING_SOURCE),
    optional=frozenset({KVCACHE_TIER_NAME}),
)

TRANSFER_TOKENS: Final = MetricSpec(
    name="kvcache.transfer.tokens",
    instrument="counter",
    unit="{token}",
    brief=(
        "Tokens moved between two tiers per pool, without sidecars that ride on another pool's indices. Fold: read one "
        "rank."
    ),
    fold="one_rank",
    attributes=(KVCACHE_SOURCE_TIER, KVCACHE_DESTINATION_TIER, KVCACHE_POOL),
)

TRANSFER_POOL_IO: Final = MetricSpec(
    name="kvcache.transfer.pool.io",
    instrument="counter",
    unit="By",
    brief="Bytes of one pool moved between two tiers, where the engine tells its pools apart. Fold: add the ranks.",
    fold="sum",
    attributes=(KVCACHE_SOURCE_TIER, KVCACHE_DESTINATION_TIER, KVCACHE_POOL),
)

TRANSFER_OPERATIONS: Final = MetricSpec(
    name="kvcache.transfer.operations",
    instrument="counter",
    unit="{operation}",
    brief="Transfers between two tiers that finished, in success or failure. Fold: add the ranks.",
    fold="sum",
    attributes=(KVCACHE_SOURCE_TIER, KVCACHE_DESTINATION_TIER, KVCACHE_TIER_NAME, ERROR_TYPE),
    optional=frozenset({KVCACHE_TIER_NAME, ERROR_TYPE}),
)

TRANSFER_ACTIVE: Final = MetricSpec(
    name="kvcache.transfer.active",
    instrument="updowncounter",
    unit="{operation}",
    brief="Transfers between two tiers that have begun and not finished. Fold: add the ranks.",
    fold="sum",
    attributes=(KVCACHE_SOURCE_TIER, KVCACHE_DESTINATION_TIER, KVCACHE_TIER_NAME),
    optional=frozenset({KVCACHE_TIER_NAME}),
)

TRANSFER_ACTIVE_BLOCKS: Final = MetricSpec(
    name="kvcache.transfer.active.blocks",
    instrument="updowncounter",
    unit="{block}",
    brief=(
        "Blocks of the nearer tier that transfers which have begun and not finished keep pinned. Fold: add the ranks."
    ),
    fold="sum",
    attributes=(KVCACHE_SOURCE_TIER, KVCACHE_DESTINATION_TIER, KVCACHE_TIER_NAME),
    optional=frozenset({KVCACHE_TIER_NAME}),
)

EVICTION_TOKENS: Final = MetricSpec(
    name="kvcache.eviction.tokens",
    instrument="counter",
    unit="{token}",
    brief="Token slots that eviction freed in a tier, whether or not their content was backed up. Fold: read one rank.",
    fold="one_rank",
    attributes=(KVCACHE_TIER, KVCACHE_POOL),
    values={KVCACHE_TIER: _TIER_WITHOUT_NONE},
)

EVICTION_DURATION: Final = MetricSpec(
    name="kvcache.eviction.duration",
    instrument="histogram",
    unit="s",
    brief="Duration of one eviction pass in a tier, including a backup that blocks inside it. Fold: add the ranks.",
    fold="sum",
    attributes=(KVCACHE_TIER,),
    values={KVCACHE_TIER: _TIER_WITHOUT_NONE},
    bounds=DURATION_BOUNDS,
)

DROPPED_TOKENS: Final = MetricSpec(
    name="kvcache.dropped.tokens",
    instrument="counter",
    unit="{token}",
    brief="Tokens whose KV was destroyed while no lower tier held a copy. Fold: read one rank.",
    fold="one_rank",
    attributes=(KVCACHE_TIER, KVCACHE_POOL, KVCACHE_REASON),
    values={
        KVCACHE_TIER: _TIER_WITHOUT_NONE,
        KVCACHE_REASON: frozenset({"host_pressure", "write_through_unbacked_eviction", "pool_full", "other"}),
    },
)

STORE_SKIPPED_BLOCKS: Final = MetricSpec(
    name="kvcache.store.skipped.blocks",
    instrument="counter",
    unit="{block}",
    brief="Blocks that were not written to a lower tier. Fold: read one rank.",
    fold="one_rank",
    attributes=(KVCACHE_TIER, KVCACHE_TIER_NAME, KVCACHE_REASON),
    optional=frozenset({KVCACHE_TIER_NAME}),
    values={
        KVCACHE_TIER: _TIER_WITHOUT_NONE,
        KVCACHE_REASON: frozenset({"backpressure", "no_space", "already_stored", "other"}),
    },
)

ALLOCATION_FAILURES: Final = MetricSpec(
    name="kvcache.allocation.failures",
    instrument="counter",
    unit="{failure}",
    brief="Requests for space that a tier could not meet. Fold: read one rank.",
    fold="one_rank",
    attributes=(KVCACHE_TIER, KVCACHE_REASON),
    values={KVCACHE_TIER: _TIER_WITHOUT_NONE, KVCACHE_REASON: frozenset({"store", "promotion", "load", "other"})},
)

PREFETCH_HIT_TOKENS: Final = MetricSpec(
    name="kvcache.prefetch.hit.tokens",
    instrument="counter",
    unit="{token}",
    brief="Tokens that storage said it had. Fold: read one rank.",
    fold="one_rank",
    attributes=(KVCACHE_TIER, KVCACHE_TIER_NAME),
    optional=frozenset({KVCACHE_TIER_NAME}),
    values={KVCACHE_TIER: _TIER_WITHOUT_NONE},
)

PREFETCH_LOADED_TOKENS: Final = MetricSpec(
    name="kvcache.prefetch.loaded.tokens",
    instrument="counter",
    unit="{token}",
    brief="Tokens that arrived from storage in host memory. Fold: read one rank.",
    fold="one_rank",
    attributes=(KVCACHE_TIER, KVCACHE_TIER_NAME),
    optional=frozenset({KVCACHE_TIER_NAME}),
    values={KVCACHE_TIER: _TIER_WITHOUT_NONE},
)

PREFETCH_FULFILLED_TOKENS: Final = MetricSpec(
    name="kvcache.prefetch.fulfilled.tokens",
    instrument="counter",
    unit="{token}",
    brief="Tokens of a storage hit that became usable prefix. Fold: read one rank.",
    fold="one_rank",
    attributes=(KVCACHE_TIER, KVCACHE_TIER_NAME),
    optional=frozenset({KVCACHE_TIER_NAME}),
    values={KVCACHE_TIER: _TIER_WITHOUT_NONE},
)

PREFETCH_UNFULFILLED_TOKENS: Final = MetricSpec(
    name="kvcache.prefetch.unfulfilled.tokens",
    instrument="counter",
    unit="{token}",
    brief="Tokens of a storage hit that did not become usable prefix, per attempt. Fold: read one rank.",
    fold="one_rank",
    attributes=(KVCACHE_TIER, KVCACHE_TIER_NAME, KVCACHE_REASON),
    optional=frozenset({KVCACHE_TIER_NAME}),
    values={
        KVCACHE_TIER: _TIER_WITHOUT_NONE,
        KVCACHE_REASON: frozenset(
            {
                "below_threshold",
                "host_capacity",
                "device_capacity",
                "device_covered",
                "storage_transfer",
                "deadline",
                "anchor_lost",
                "aux_window_trim",
                "device_overlap",
                "cache_admission_shortfall",
                "shrunk",
                "unservable_prefix",
                "dropped",
                "other",
            }
        ),
    },
)

PREFETCH_DEFERRED_TOKENS: Final = MetricSpec(
    name="kvcache.prefetch.deferred.tokens",
    instrument="counter",
    unit="{token}",
    brief="Tokens of prefetch attempts that were put off. Fold: read one rank.",
    fold="one_rank",
    attributes=(KVCACHE_TIER, KVCACHE_TIER_NAME, KVCACHE_REASON),
    optional=frozenset({KVCACHE_TIER_NAME}),
    values={KVCACHE_TIER: _TIER_WITHOUT_NONE, KVCACHE_REASON: frozenset({"host_capacity", "device_capacity", "other"})},
)

PREFETCH_OUTSTANDING_TOKENS: Final = MetricSpec(
    name="kvcache.prefetch.outstanding.tokens",
    instrument="updowncounter",
    unit="{token}",
    brief="Tokens of a storage hit whose fate is not settled yet. Fold: read one rank.",
    fold="one_rank",
    attributes=(KVCACHE_TIER, KVCACHE_TIER_NAME),
    optional=frozenset({KVCACHE_TIER_NAME}),
    values={KVCACHE_TIER: _TIER_WITHOUT_NONE},
)

USAGE: Final = MetricSpec(
    name="kvcache.usage",
    instrument="updowncounter",
    unit="{token}",
    brief="Tokens that a pool has room for, by what that room is doing; states for a Mamba pool. Fold: add the ranks.",
    fold="sum",
    attributes=(KVCACHE_TIER, KVCACHE_POOL, KVCACHE_STATE),
    values={KVCACHE_TIER: _TIER_WITHOUT_NONE},
)

LIMIT: Final = MetricSpec(
    name="kvcache.limit",
    instrument="updowncounter",
    unit="{token}",
    brief="Size of a pool, in tokens; in states for a Mamba pool. Fold: add the ranks.",
    fold="sum",
    attributes=(KVCACHE_TIER, KVCACHE_POOL),
    values={KVCACHE_TIER: _TIER_WITHOUT_NONE},
)

BLOCK_SIZE: Final = MetricSpec(
    name="kvcache.block.size",
    instrument="gauge",
    unit="{token}",
    brief="Tokens per block, the unit (also called page or chunk) that a tier counts in. Fold: read one rank.",
    fold="one_rank",
    attributes=(KVCACHE_TIER, KVCACHE_WORKER, KVCACHE_RANK_DP),
    optional=frozenset({KVCACHE_WORKER, KVCACHE_RANK_DP}),
    values={KVCACHE_TIER: _TIER_WITHOUT_NONE},
)

RESIDENT_BLOCKS: Final = MetricSpec(
    name="kvcache.resident.blocks",
    instrument="updowncounter",
    unit="{block}",
    brief=(
        "Distinct blocks in a tier, as the engine holds, as its events publish or as a subscriber received them. Fold: "
        "read one rank."
    ),
    fold="one_rank",
    attributes=(KVCACHE_TIER, KVCACHE_VIEW, KVCACHE_WORKER, KVCACHE_RANK_DP),
    optional=frozenset({KVCACHE_WORKER, KVCACHE_RANK_DP}),
    values={KVCACHE_TIER: _TIER_WITHOUT_NONE},
)

ACCOUNTING_ERRORS: Final = MetricSpec(
    name="kvcache.accounting.errors",
    instrument="counter",
    unit="{error}",
    brief="Contradictions found in the bookkeeping, none of them on a correct cache. Fold: add the ranks.",
    fold="sum",
    attributes=(KVCACHE_REASON,),
    values={
        KVCACHE_REASON: frozenset(
            {"missing_row", "underflow", "unknown_remove", "recount", "conservation", "negative_delta", "other"}
        ),
    },
)

EVENTS: Final = MetricSpec(
    name="kvcache.events",
    instrument="counter",
    unit="{event}",
    brief=(
        "KV events that were published or received, by what they announce and the medium they name. Fold: read one "
        "rank."
    ),
    fold="one_rank",
    attributes=(KVCACHE_VIEW, KVCACHE_EVENT_TYPE, KVCACHE_EVENT_MEDIUM, KVCACHE_WORKER, KVCACHE_RANK_DP),
    optional=frozenset({KVCACHE_WORKER, KVCACHE_RANK_DP}),
    values={KVCACHE_VIEW: frozenset({"published", "received"})},
)

EVENT_BLOCKS: Final = MetricSpec(
    name="kvcache.event.blocks",
    instrument="counter",
    unit="{block}",
    brief="Block hashes carried by the KV events that were published or received. Fold: read one rank.",
    fold="one_rank",
    attributes=(KVCACHE_VIEW, KVCACHE_EVENT_TYPE, KVCACHE_EVENT_MEDIUM, KVCACHE_WORKER, KVCACHE_RANK_DP),
    optional=frozenset({KVCACHE_WORKER, KVCACHE_RANK_DP}),
    values={KVCACHE_VIEW: frozenset({"published", "received"})},
)

EVENT_BATCHES_LOST: Final = MetricSpec(
    name="kvcache.event.batches.lost",
    instrument="counter",
    unit="{batch}",
    brief="Batches of KV events whose sequence numbers were skipped and which replay did not recover.",
    fold=None,
    attributes=(KVCACHE_WORKER, KVCACHE_RANK_DP),
    identity=False,
)

EVENT_BATCHES_RECOVERED: Final = MetricSpec(
    name="kvcache.event.batches.recovered",
    instrument="counter",
    unit="{batch}",
    brief="Batches of KV events that were missed at first and recovered by replay.",
    fold=None,
    attributes=(KVCACHE_WORKER, KVCACHE_RANK_DP),
    identity=False,
)

EVENT_BATCHES_DUPLICATE: Final = MetricSpec(
    name="kvcache.event.batches.duplicate",
    instrument="counter",
    unit="{batch}",
    brief="Batches of KV events with an old or repeated sequence number, dropped before anything in them was counted.",
    fold=None,
    attributes=(KVCACHE_WORKER, KVCACHE_RANK_DP),
    identity=False,
)

EVENT_PUBLISHER_RESETS: Final = MetricSpec(
    name="kvcache.event.publisher.resets",
    instrument="counter",
    unit="{reset}",
    brief="Times that a publisher's sequence numbers started again.",
    fold=None,
    attributes=(KVCACHE_WORKER, KVCACHE_RANK_DP),
    identity=False,
)

EVENT_DECODE_FAILURES: Final = MetricSpec(
    name="kvcache.event.decode.failures",
    instrument="counter",
    unit="{failure}",
    brief="Messages, batches and events from a publisher that could not be read.",
    fold=None,
    attributes=(KVCACHE_WORKER, KVCACHE_REASON),
    values={
        KVCACHE_REASON: frozenset(
            {"msgpack", "frame_count", "sequence_frame", "batch_shape", "event_shape", "block_hash", "other"}
        ),
    },
    identity=False,
)

EVENT_LAST_AGE: Final = MetricSpec(
    name="kvcache.event.last.age",
    instrument="gauge",
    unit="s",
    brief="Time since the last batch of KV events arrived from a publisher, absent before the first.",
    fold=None,
    attributes=(KVCACHE_WORKER, KVCACHE_RANK_DP),
    identity=False,
)

INDEX_MAINTAINED: Final = MetricSpec(
    name="kvcache.index.maintained",
    instrument="updowncounter",
    unit="{index}",
    brief="1 while this process keeps an index of received blocks, 0 where it could and does not.",
    fold=None,
    identity=False,
)

TELEMETRY_HOOK_ATTACHED: Final = MetricSpec(
    name="kvcache.telemetry.hook.attached",
    instrument="updowncounter",
    unit="{hook}",
    brief=(
        "1 while a hook is attached, 0 where this engine version lacks its target or the hook stepped aside. Fold: add "
        "the ranks."
    ),
    fold="sum",
    attributes=(KVCACHE_TELEMETRY_HOOK,),
)

TELEMETRY_ERRORS: Final = MetricSpec(
    name="kvcache.telemetry.errors",
    instrument="counter",
    unit="{error}",
    brief=(
        "Exceptions of this instrumentation that were caught before they could reach the engine. Fold: add the ranks."
    ),
    fold="sum",
    attributes=(KVCACHE_TELEMETRY_HOOK,),
)

TELEMETRY_DROPPED: Final = MetricSpec(
    name="kvcache.telemetry.dropped",
    instrument="counter",
    unit="{measurement}",
    brief="Measurements that this instrumentation gave up. Fold: add the ranks.",
    fold="sum",
    attributes=(KVCACHE_REASON,),
    values={KVCACHE_REASON: frozenset({"queue_full", "event_lost", "label_overflow", "other"})},
)

METRICS: Final[Mapping[str, MetricSpec]] = {
    spec.name: spec
    for spec in (
        LOOKUP_TOKENS,
        LOOKUP_BLOCKS,
        LOOKUP_DURATION,
        LOOKUP_REQUEST_DURATION,
        TRANSFER_DURATION,
        TRANSFER_QUEUE_DURATION,
        TRANSFER_IO,
        TRANSFER_TOKENS,
        TRANSFER_POOL_IO,
        TRANSFER_OPERATIONS,
        TRANSFER_ACTIVE,
        TRANSFER_ACTIVE_BLOCKS,
        EVICTION_TOKENS,
        EVICTION_DURATION,
        DROPPED_TOKENS,
        STORE_SKIPPED_BLOCKS,
        ALLOCATION_FAILURES,
        PREFETCH_HIT_TOKENS,
        PREFETCH_LOADED_TOKENS,
        PREFETCH_FULFILLED_TOKENS,
        PREFETCH_UNFULFILLED_TOKENS,
        PREFETCH_DEFERRED_TOKENS,
        PREFETCH_OUTSTANDING_TOKENS,
        USAGE,
        LIMIT,
        BLOCK_SIZE,
        RESIDENT_BLOCKS,
        ACCOUNTING_ERRORS,
        EVENTS,
        EVENT_BLOCKS,
        EVENT_BATCHES_LOST,
        EVENT_BATCHES_RECOVERED,
        EVENT_BATCHES_DUPLICATE,
        EVENT_PUBLISHER_RESETS,
        EVENT_DECODE_FAILURES,
        EVENT_LAST_AGE,
        INDEX_MAINTAINED,
        TELEMETRY_HOOK_ATTACHED,
        TELEMETRY_ERRORS,
        TELEMETRY_DROPPED,
    )
}
"""Every metric, in the order of the catalogue."""

PRESET_ATTRIBUTES: Final[Mapping[str, tuple[str, ...]]] = {
    EVENTS.name: (KVCACHE_EVENT_TYPE, KVCACHE_EVENT_MEDIUM),
    EVENT_BLOCKS.name: (KVCACHE_EVENT_TYPE, KVCACHE_EVENT_MEDIUM),
}
"""By metric, the attributes whose every combination of values is present from the start, at zero."""
