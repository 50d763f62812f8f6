"""What must be equal between vLLM's own numbers and ours, metric by metric."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvcache_otel import semconv

if TYPE_CHECKING:
    from kvcache_otel.record.cells import Histogram
    from tests.engines.vllm.manager_driver import Recount, Totals
    from tests.support.rows import Rows

HOST, DISK = "0:primary", "1:fs"
PROMOTION = {"source": "disk", "destination": "host", "name": DISK}
CASCADE = {"source": "host", "destination": "disk", "name": DISK}
ON_HOST = {"tier": "host"}
ON_DISK = {"tier": "disk", "name": DISK}


def assert_samples(histogram: Histogram | None, samples: list[float]) -> None:
    """A histogram has exactly these samples: their number, their sum, and each in its bucket."""
    assert histogram is not None
    counts, total = histogram.read()
    assert sum(counts) == len(samples)
    assert math.isclose(total, math.fsum(samples), rel_tol=1e-9, abs_tol=1e-15)
    for index, count in enumerate(counts):
        lower = histogram.bounds[index - 1] if index else -math.inf
        upper = histogram.bounds[index] if index < len(histogram.bounds) else math.inf
        assert count == sum(lower < sample <= upper for sample in samples)


def assert_equals_vllm(rows: Rows, totals: Totals) -> None:
    """Every counter and histogram of ours that vLLM's tiering manager also has equals vLLM's."""
    for label, where in ((HOST, ON_HOST), (DISK, ON_DISK)):
        queries = totals.counter("tiering_chunk_queries", label)
        hits = totals.counter("tiering_chunk_hits", label)
        assert rows.value(semconv.LOOKUP_BLOCKS, **where, result="hit") == hits
        assert rows.value(semconv.LOOKUP_BLOCKS, **where, result="miss") == queries - hits
        for mode in ("sync", "async"):
            samples = totals.histogram(f"tiering_lookup_{mode}_delay_seconds", label)
            assert_samples(rows.histogram(semconv.LOOKUP_DURATION, **where, mode=mode), samples)
    for route, way, job in ((PROMOTION, "read", "promotion"), (CASCADE, "write", "cascade")):
        timed = {**route, "timing": "engine_report"}
        assert rows.value(semconv.TRANSFER_IO, **timed) == totals.counter(f"tiering_{way}_bytes", DISK)
        duration = rows.histogram(semconv.TRANSFER_DURATION, **timed)
        assert duration is not None
        theirs = totals.counter(f"tiering_{way}_time", DISK)
        assert math.isclose(duration.read()[1], theirs, rel_tol=1e-9, abs_tol=1e-15)
        operations = rows.total(semconv.TRANSFER_OPERATIONS, **route)
        succeeded = rows.value(semconv.TRANSFER_OPERATIONS, **route)
        assert succeeded is not None
        assert operations - succeeded == totals.counter(f"tiering_{job}_job_failures", DISK)
        assert rows.value(semconv.TRANSFER_ACTIVE, **route) == totals.gauge(f"tiering_active_{job}_jobs", DISK)
    refused = rows.value(semconv.ALLOCATION_FAILURES, tier="host", reason="promotion")
    assert refused == totals.counter("tiering_promotion_allocation_failures")
    dropped = rows.value(semconv.STORE_SKIPPED_BLOCKS, **ON_DISK, reason="backpressure")
    assert dropped == totals.counter("tiering_backpressure_blocks_dropped", DISK)


def assert_equals_recount(rows: Rows, recount: Recount, *, tokens: int) -> None:
    """What the host tier holds, and what is under way, equals a walk over the manager's own structures."""
    pool = {"tier": "host", "pool": "kv"}
    assert rows.value(semconv.LIMIT, **pool) == recount.capacity * tokens
    assert rows.value(semconv.USAGE, **pool, state="used") == recount.used * tokens
    assert rows.value(semconv.USAGE, **pool, state="evictable") == recount.evictable * tokens
    assert rows.value(semconv.USAGE, **pool, state="free") == recount.free * tokens
    assert rows.value(semconv.RESIDENT_BLOCKS, tier="host", view="held") == recount.evictable + recount.referenced
    for route, is_promotion in ((PROMOTION, True), (CASCADE, False)):
        kind = (DISK, is_promotion)
        assert rows.value(semconv.TRANSFER_ACTIVE, **route) == recount.jobs[kind]
        assert rows.value(semconv.TRANSFER_ACTIVE_BLOCKS, **route) == recount.job_blocks[kind]


def published_events(rows: Rows, kind: str, medium: str) -> list[int | float | None]:
    """How many events of one type and medium we say were published, and how many blocks they were about."""
    labels = {
        (semconv.KVCACHE_VIEW, "published"),
        (semconv.KVCACHE_EVENT_TYPE, kind),
        (semconv.KVCACHE_EVENT_MEDIUM, medium),
    }
    return [rows.values(spec).get(frozenset(labels)) for spec in (semconv.EVENTS, semconv.EVENT_BLOCKS)]
