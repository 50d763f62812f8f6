"""What the rows must say of a demo cache: what its own books say, and a recount."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcache_otel import semconv
from kvcache_otel.demo.books import recount
from kvcache_otel.demo.events import MEDIA
from kvcache_otel.demo.instrument import LOSSES, REFUSALS, SKIPS, UNFULFILLED
from kvcache_otel.events.counts import KINDS
from kvcache_otel.events.counts import MEDIA as CELLS
from tests.support.rows import Rows

if TYPE_CHECKING:
    from kvcache_otel.demo.books import Recount
    from kvcache_otel.demo.cache import TieredCache

ROUTES = (("device", "host"), ("host", "device"), ("host", "disk"), ("disk", "host"))
KIND = {"block_stored": "BlockStored", "block_removed": "BlockRemoved"}
TIERS = ("device", "host", "disk")


class Taken(Rows):
    """The rows of one moment, each metric read once."""

    def __init__(self, rows: Rows) -> None:
        super().__init__(rows.recorder)
        self._values: dict[Any, Any] = {}

    def values(self, spec: Any) -> Any:
        if spec not in self._values:
            self._values[spec] = super().values(spec)
        return self._values[spec]


def differences(rows: Rows, cache: TieredCache, *, timing: str = "wall_clock") -> dict[str, tuple[Any, Any]]:
    """Returns what the rows say, and the truth, where they are not the same.

    Args:
        rows: The rows.
        cache: The cache, between two jobs of its storage.
        timing: What times copies between device and host.
    """
    taken, truth = Taken(rows), recount(cache)
    told = {
        **_transfers(taken, cache, timing),
        **_losses(taken, cache),
        **_prefetches(taken, cache),
        **_lookups(taken, cache),
        **_holdings(taken, cache, truth),
        **_events(taken, cache, truth),
    }
    for spec in (semconv.TELEMETRY_ERRORS, semconv.ACCOUNTING_ERRORS, semconv.TELEMETRY_DROPPED):
        told[spec.name] = taken.total(spec), 0
    told["hooks"] = set(taken.values(semconv.TELEMETRY_HOOK_ATTACHED).values()), {1}
    return {what: pair for what, pair in told.items() if pair[0] != pair[1]}


def _transfers(rows: Rows, cache: TieredCache, between: str) -> dict[str, tuple[Any, Any]]:
    told: dict[str, tuple[Any, Any]] = {}
    books, size = cache.books, cache.config.page_tokens
    for source, destination in ROUTES:
        route = {"source": source, "destination": destination}
        named = {**route, **({"name": "file"} if "disk" in (source, destination) else {})}
        timing = "wall_clock" if "disk" in (source, destination) else between
        what = f"{source} to {destination}"
        copies, pages = books["copies", source, destination], books["pages copied", source, destination]
        told[f"{what}: copies"] = rows.value(semconv.TRANSFER_OPERATIONS, **named), copies
        failed = rows.total(semconv.TRANSFER_OPERATIONS, **named) - copies
        told[f"{what}: failed"] = failed, books.total("copies failed", source, destination)
        told[f"{what}: tokens"] = rows.value(semconv.TRANSFER_TOKENS, **route, pool="kv"), pages * size
        moved = books["bytes copied", source, destination]
        told[f"{what}: bytes"] = rows.value(semconv.TRANSFER_IO, **named, timing=timing), moved
        told[f"{what}: bytes are pages"] = moved, pages * cache.config.page_bytes
        told[f"{what}: durations"] = _samples(rows, semconv.TRANSFER_DURATION, **named, timing=timing), copies
        told[f"{what}: active"] = rows.value(semconv.TRANSFER_ACTIVE, **named), 0
        if "disk" in (source, destination):
            queued = _samples(rows, semconv.TRANSFER_QUEUE_DURATION, **named)
            told[f"{what}: queued"] = queued, copies + failed
    told["all failed"] = (
        sum(
            value for key, value in rows.values(semconv.TRANSFER_OPERATIONS).items() if semconv.ERROR_TYPE in dict(key)
        ),
        books.total("copies failed"),
    )
    return told


def _losses(rows: Rows, cache: TieredCache) -> dict[str, tuple[Any, Any]]:
    told: dict[str, tuple[Any, Any]] = {}
    books, size = cache.books, cache.config.page_tokens
    for tier in TIERS:
        evicted = rows.value(semconv.EVICTION_TOKENS, tier=tier, pool="kv")
        told[f"{tier}: evicted"] = evicted, books["pages evicted", tier] * size
        told[f"{tier}: evictions"] = _samples(rows, semconv.EVICTION_DURATION, tier=tier), books["evictions", tier]
        for reason in LOSSES[tier]:
            dropped = rows.value(semconv.DROPPED_TOKENS, tier=tier, pool="kv", reason=reason)
            told[f"{tier}: dropped, {reason}"] = dropped, books["pages lost", tier, reason] * size
    told["all dropped"] = rows.total(semconv.DROPPED_TOKENS), books.total("pages lost") * size
    for reason in SKIPS:
        skipped = rows.value(semconv.STORE_SKIPPED_BLOCKS, tier="disk", name="file", reason=reason)
        told[f"skipped, {reason}"] = skipped, books["pages skipped", reason]
    for tier, reason in REFUSALS:
        refused = rows.value(semconv.ALLOCATION_FAILURES, tier=tier, reason=reason)
        told[f"{tier}: refused, {reason}"] = refused, books["refusals", tier, reason]
    told["all refused"] = rows.total(semconv.ALLOCATION_FAILURES), books.total("refusals")
    return told


def _prefetches(rows: Rows, cache: TieredCache) -> dict[str, tuple[Any, Any]]:
    told: dict[str, tuple[Any, Any]] = {}
    books, size = cache.books, cache.config.page_tokens
    disk = {"tier": "disk", "name": "file"}
    for word in ("hit", "loaded", "fulfilled"):
        spec = semconv.METRICS[f"kvcache.prefetch.{word}.tokens"]
        told[f"prefetches: {word}"] = rows.value(spec, **disk), books[f"pages {word}"] * size
    for reason in (*UNFULFILLED, "other"):
        lost = rows.value(semconv.PREFETCH_UNFULFILLED_TOKENS, **disk, reason=reason)
        told[f"prefetches: {reason}"] = lost, books["pages unfulfilled", reason] * size
    going = [request.fetch for request in cache.requests.values() if request.fetch and not request.is_ready]
    outstanding = rows.value(semconv.PREFETCH_OUTSTANDING_TOKENS, **disk) or 0
    told["prefetches: outstanding"] = outstanding, sum(fetch.hit for fetch in going) * size
    settled = rows.total(semconv.PREFETCH_FULFILLED_TOKENS) + rows.total(semconv.PREFETCH_UNFULFILLED_TOKENS)
    told["prefetches close"] = settled + outstanding, rows.total(semconv.PREFETCH_HIT_TOKENS)
    return told


def _lookups(rows: Rows, cache: TieredCache) -> dict[str, tuple[Any, Any]]:
    books = cache.books
    told: dict[str, tuple[Any, Any]] = {
        f"{tier}: served": (rows.value(semconv.LOOKUP_TOKENS, tier=tier), books["tokens served", tier])
        for tier in TIERS
    }
    told["prompts close"] = rows.total(semconv.LOOKUP_TOKENS), books["tokens prompted"]
    return told


def _holdings(rows: Rows, cache: TieredCache, truth: Recount) -> dict[str, tuple[Any, Any]]:
    told: dict[str, tuple[Any, Any]] = {}
    size = cache.config.page_tokens
    limits = {"device": cache.config.device_tokens, "host": cache.config.host_tokens, "disk": cache.config.disk_tokens}
    for tier in TIERS:
        for view in ("held", "published"):
            resident = rows.value(semconv.RESIDENT_BLOCKS, tier=tier, view=view)
            told[f"{tier}: {view}"] = resident, truth.held[tier]
        told[f"{tier}: block size"] = rows.value(semconv.BLOCK_SIZE, tier=tier), size
        told[f"{tier}: limit"] = rows.value(semconv.LIMIT, tier=tier, pool="kv"), limits[tier]
        used = truth.held[tier] - truth.evictable[tier] + truth.owned[tier]
        for state, pages in (("free", truth.free[tier]), ("evictable", truth.evictable[tier]), ("used", used)):
            usage = rows.value(semconv.USAGE, tier=tier, pool="kv", state=state)
            told[f"{tier}: {state}"] = usage, pages * size
    return told


def _events(rows: Rows, cache: TieredCache, truth: Recount) -> dict[str, tuple[Any, Any]]:
    told: dict[str, tuple[Any, Any]] = {}
    for kind in KINDS:
        for medium in CELLS:
            words = KIND.get(kind, kind), MEDIA.get(medium, medium)
            cell = {"view": "published", "type": kind, "medium": medium}
            told[f"events: {kind} {medium}"] = rows.value(semconv.EVENTS, **cell), cache.books["events", *words]
            blocks = rows.value(semconv.EVENT_BLOCKS, **cell)
            told[f"blocks in events: {kind} {medium}"] = blocks, cache.books["blocks in events", *words]
    for tier in TIERS:  # An oracle of the books themselves.
        stored, removed = (cache.books["blocks in events", name, MEDIA[tier]] for name in KIND.values())
        told[f"{tier}: stored and not removed"] = stored - removed, truth.held[tier]
    return told


def _samples(rows: Rows, spec: Any, **labels: str) -> int | None:
    histogram = rows.histogram(spec, **labels)
    return None if histogram is None else sum(histogram.read()[0])
