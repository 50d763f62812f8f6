"""What must be equal between SGLang's own numbers, or a walk over its tree, and ours, metric by metric."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvcache_otel import semconv
from tests.engines.sglang.cache_driver import PAGE
from tests.engines.sglang.oracle import own_counters, pools, recount

if TYPE_CHECKING:
    from kvcache_otel.spec import MetricSpec
    from tests.engines.sglang.cache_driver import CacheDriver
    from tests.support.rows import Rows

BACKUP = {"source": "device", "destination": "host"}
LOAD_BACK = {"source": "host", "destination": "device"}
WRITE = {"source": "host", "destination": "disk"}
READ = {"source": "disk", "destination": "host"}
NAME = {"name": "file"}
STORAGE = {"tier": "disk", **NAME}

UNCOUNTED = "other"
"""Why hits are unfulfilled that SGLang leaves out of its count."""


def assert_equals_sglang(
    rows: Rows, driver: CacheDriver, *, timing: str = "device_event", retracted: tuple[int, int] = (0, 0)
) -> None:
    """Every counter and histogram of ours that SGLang also has equals SGLang's. Nothing may be in flight.

    Args:
        rows: Ours, of this one cache.
        driver: Theirs.
        timing: Where the durations between device and host come from; SGLang has none but those of events.
        retracted: Tokens of retracted requests that were copied to the host and back, which SGLang does not count.
    """
    theirs = own_counters(driver)
    assert _count(rows, semconv.EVICTION_TOKENS, tier="device", pool="kv") == theirs.evicted_tokens
    passes = rows.histogram(semconv.EVICTION_DURATION, tier="device")
    assert passes is not None
    counts, seconds = passes.read()
    assert sum(counts) == theirs.evictions
    # SGLang's clock is around ours: what it does before and after, and what our own hook takes, is in its sum alone.
    assert 0 < seconds <= theirs.eviction_seconds or not theirs.evictions
    if driver.cache.cache_controller is None:
        return
    token_bytes = driver.cache.host_pool_group.anchor_entry.host_pool.size_per_token
    backups = (theirs.backup_tokens, theirs.backup_bytes, theirs.backups, theirs.backup_seconds)
    load_backs = (theirs.load_back_tokens, theirs.load_back_bytes, theirs.load_backs, theirs.load_back_seconds)
    for route, besides, (tokens, size, copies, seconds) in (
        (BACKUP, retracted[0], backups),
        (LOAD_BACK, retracted[1], load_backs),
    ):
        assert _count(rows, semconv.TRANSFER_TOKENS, **route, pool="kv") == tokens.get("kv", 0) + besides
        assert rows.total(semconv.TRANSFER_IO, **route) == size + besides * token_bytes
        assert _count(rows, semconv.TRANSFER_POOL_IO, **route, pool="kv") == size + besides * token_bytes
        assert _count(rows, semconv.TRANSFER_ACTIVE, **route) == 0
        assert _count(rows, semconv.TRANSFER_ACTIVE_BLOCKS, **route) == 0
        if timing == "device_event" and not besides:
            duration = rows.histogram(semconv.TRANSFER_DURATION, **route, timing=timing)
            assert duration is not None
            counts, total = duration.read()
            assert sum(counts) == copies == _count(rows, semconv.TRANSFER_OPERATIONS, **route)
            assert math.isclose(total, seconds, rel_tol=1e-9, abs_tol=1e-15)
    for reason, dropped in theirs.dropped_tokens.items():
        assert _count(rows, semconv.DROPPED_TOKENS, tier="device", pool="kv", reason=reason) == dropped
    assert rows.total(semconv.DROPPED_TOKENS) == sum(theirs.dropped_tokens.values())
    if driver.cache.enable_storage:
        _assert_storage_equals(rows, driver)


def _assert_storage_equals(rows: Rows, driver: CacheDriver) -> None:
    theirs = own_counters(driver)
    assert _count(rows, semconv.TRANSFER_TOKENS, **WRITE, pool="kv") == theirs.stored_tokens
    skipped = rows.total(semconv.STORE_SKIPPED_BLOCKS)
    assert skipped * PAGE == theirs.store_dropped_tokens
    assert_prefetches_equal(rows, driver)


def assert_prefetches_equal(rows: Rows, driver: CacheDriver) -> None:
    """What is counted of prefetches equals SGLang's, whatever is in flight."""
    theirs = own_counters(driver)
    assert _count(rows, semconv.PREFETCH_LOADED_TOKENS, **STORAGE) == theirs.prefetched_tokens
    assert _count(rows, semconv.PREFETCH_HIT_TOKENS, **STORAGE) == theirs.prefetch_hit_tokens
    ours = by_reason(rows, semconv.PREFETCH_UNFULFILLED_TOKENS)
    ours.pop(UNCOUNTED, None)
    assert ours == theirs.prefetch_unfulfilled_tokens
    assert by_reason(rows, semconv.PREFETCH_DEFERRED_TOKENS) == theirs.prefetch_deferred_tokens


def assert_closes(rows: Rows) -> None:
    """What storage said it had is fulfilled, unfulfilled or outstanding."""
    outstanding = rows.value(semconv.PREFETCH_OUTSTANDING_TOKENS, **STORAGE)
    settled = _count(rows, semconv.PREFETCH_FULFILLED_TOKENS, **STORAGE) + rows.total(
        semconv.PREFETCH_UNFULFILLED_TOKENS, **STORAGE
    )
    assert _count(rows, semconv.PREFETCH_HIT_TOKENS, **STORAGE) == settled + (outstanding or 0)


def assert_equals_recount(rows: Rows, driver: CacheDriver) -> None:
    """What the tiers hold equals a walk over the tree, and the pools' rows what the pools say."""
    counted, truth = recount(driver), pools(driver)
    assert _held(rows, "device") == counted.device_blocks
    device = {"tier": "device", "pool": "kv"}
    assert _count(rows, semconv.LIMIT, **device) == truth.device_total
    if driver.cache.cache_controller is None:
        return
    assert _held(rows, "host") == counted.host_blocks
    for pool, slots in truth.host.items():
        assert _count(rows, semconv.LIMIT, tier="host", pool=pool) == slots.total


def assert_settled(rows: Rows, driver: CacheDriver) -> None:
    """The pools' rows are as the pools are, right after a step."""
    truth = pools(driver)
    device = {"tier": "device", "pool": "kv"}
    assert _count(rows, semconv.USAGE, **device, state="free") == truth.device_free
    assert _count(rows, semconv.USAGE, **device, state="evictable") == truth.device_evictable
    used = truth.device_total - truth.device_free - truth.device_evictable
    assert _count(rows, semconv.USAGE, **device, state="used") == used
    for pool, slots in truth.host.items():
        assert _count(rows, semconv.USAGE, tier="host", pool=pool, state="used") == slots.used
        assert _count(rows, semconv.USAGE, tier="host", pool=pool, state="free") == slots.total - slots.used
        assert rows.value(semconv.USAGE, tier="host", pool=pool, state="evictable") is None


def assert_published_is_held(rows: Rows) -> None:
    """What the events add up to is what the tree holds."""
    for tier in ("device", "host"):
        published = rows.value(semconv.RESIDENT_BLOCKS, tier=tier, view="published")
        assert published == _held(rows, tier), tier


def by_reason(rows: Rows, spec: MetricSpec) -> dict[str, int]:
    """The rows of a counter by reason, without those at 0."""
    reasons: dict[str, int] = {}
    for key, value in rows.values(spec).items():
        if value:
            reasons[str(dict(key)[semconv.KVCACHE_REASON])] = int(value)
    return reasons


def _held(rows: Rows, tier: str) -> int | float:
    return _count(rows, semconv.RESIDENT_BLOCKS, tier=tier, view="held")


def _count(rows: Rows, spec: MetricSpec, **labels: str) -> int | float:
    value = rows.value(spec, **labels)
    assert value is not None, f"{spec.name} has no row {labels}, but {list(rows.values(spec))}"
    return value
