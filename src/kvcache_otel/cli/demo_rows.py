"""What ``kvcache-otel demo`` shows, read from the very rows that are exported: never from the cache's own books."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from kvcache_otel import semconv
from kvcache_otel.semconv import Reason, State, Tier, View

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvcache_otel.record.recorder import Attributes, Recorder
    from kvcache_otel.spec import MetricSpec

TIERS = (Tier.DEVICE, Tier.HOST, Tier.DISK, Tier.PEER, Tier.EXTERNAL, Tier.UNKNOWN)

DROPPED, NEEDLESS = "dropped", "not needed"
"""What became of it: lost for good, or nothing that anybody would miss."""

_LOST = {
    DROPPED: semconv.DROPPED_TOKENS,
    "no room": semconv.ALLOCATION_FAILURES,
    "not stored": semconv.STORE_SKIPPED_BLOCKS,
    "prefetch unfulfilled": semconv.PREFETCH_UNFULFILLED_TOKENS,
}
"""What has reasons, in the order in which it is shown: what is lost for good comes first."""

_NOT_NEEDED = (Reason.ALREADY_STORED, Reason.DEVICE_COVERED, Reason.DEVICE_OVERLAP)
"""Reasons that say that it was there already: nothing is lost. They come last."""

_DOUBTS = (semconv.ACCOUNTING_ERRORS, semconv.TELEMETRY_ERRORS, semconv.TELEMETRY_DROPPED)


class TierRow(NamedTuple):
    """One tier. None stands for what has no row.

    Attributes:
        tier: Its name.
        served: Prompt tokens that came from it.
        used: Tokens in use, or pinned by a transfer.
        evictable: Tokens that may be evicted.
        free: Tokens that there is room for.
        limit: Tokens that it can hold.
        held: Blocks that the cache itself has in it.
        published: Blocks that are in it by the events that were published.
        evicted: Tokens whose slots eviction has freed.
    """

    tier: str
    served: float | None
    used: float | None
    evictable: float | None
    free: float | None
    limit: float | None
    held: float | None
    published: float | None
    evicted: float | None


class RouteRow(NamedTuple):
    """The transfers from one tier to another, timed by one clock.

    Attributes:
        source: The tier that is read.
        destination: The tier that is written.
        clock: Where the durations come from: ``kvcache.timing.source``.
        transfers: How many have a duration.
        bytes: What they moved.
        seconds: How long they took, all together.
        p50: The upper bound, in seconds, of the bucket that half of them are at or below; None without any.
        p99: The same for 99 of 100; infinite for the last bucket, which has no bound.
        active: How many are under way, whatever they are timed by.
        failed: How many have failed, whatever they are timed by.
    """

    source: str
    destination: str
    clock: str
    transfers: int
    bytes: float
    seconds: float
    p50: float | None
    p99: float | None
    active: float | None
    failed: float

    @property
    def bandwidth(self) -> float | None:
        """Bytes per second that one transfer gets while it moves; None where nothing was timed."""
        return self.bytes / self.seconds if self.seconds > 0 else None


class LossRow(NamedTuple):
    """What was lost or left undone, for one reason.

    Attributes:
        what: What became of it.
        tier: Where; empty where the metric does not say.
        reason: Why.
        amount: How much.
        unit: Of what: ``token``, ``block`` or ``failure``.
    """

    what: str
    tier: str
    reason: str
    amount: float
    unit: str


class Seen(NamedTuple):
    """What there is now.

    Attributes:
        prompt: Tokens of all prompts: the sum over what served them.
        computed: Of these, what no tier served.
        tiers: The tiers, from the nearest to the farthest.
        routes: Transfers.
        losses: What was lost or left undone, by reason, zeros too.
        prefetch: Tokens that storage had (``hit``), and what became of them; empty without prefetches.
        doubts: What says that these numbers may be wrong, by metric and reason: nothing, if all is well.
    """

    prompt: float
    computed: float
    tiers: list[TierRow]
    routes: list[RouteRow]
    losses: list[LossRow]
    prefetch: dict[str, float]
    doubts: dict[str, float]


def read(recorder: Recorder) -> Seen:
    """Returns what a recorder exports now.

    Args:
        recorder: The process's.
    """
    served = _sums(recorder, semconv.LOOKUP_TOKENS, semconv.KVCACHE_TIER)
    return Seen(
        prompt=sum(served.values()),
        computed=served.pop((Tier.NONE,), 0),
        tiers=list(_tiers(recorder, served)),
        routes=list(_routes(recorder)),
        losses=sorted(_losses(recorder), key=lambda row: row.what == NEEDLESS),
        prefetch=_prefetch(recorder),
        doubts={
            f"{spec.name} {' '.join(key)}".strip(): value
            for spec in _DOUBTS
            for key, value in _sums(recorder, spec, *spec.attributes).items()
            if value
        },
    )


def _tiers(recorder: Recorder, served: Mapping[tuple[str, ...], float]) -> Iterator[TierRow]:
    tier = semconv.KVCACHE_TIER
    limits = _sums(recorder, semconv.LIMIT, tier)
    usage = _sums(recorder, semconv.USAGE, tier, semconv.KVCACHE_STATE)
    resident = _sums(recorder, semconv.RESIDENT_BLOCKS, tier, semconv.KVCACHE_VIEW)
    evicted = _sums(recorder, semconv.EVICTION_TOKENS, tier)
    for name in TIERS:
        found = TierRow(
            name,
            served=served.get((name,)),
            used=usage.get((name, State.USED)),
            evictable=usage.get((name, State.EVICTABLE)),
            free=usage.get((name, State.FREE)),
            limit=limits.get((name,)),
            held=resident.get((name, View.HELD)),
            published=resident.get((name, View.PUBLISHED)),
            evicted=evicted.get((name,)),
        )
        if any(value is not None for value in found[1:]):
            yield found


def _routes(recorder: Recorder) -> Iterator[RouteRow]:
    way = (semconv.KVCACHE_SOURCE_TIER, semconv.KVCACHE_DESTINATION_TIER)
    moved = _sums(recorder, semconv.TRANSFER_IO, *way, semconv.KVCACHE_TIMING_SOURCE)
    active = _sums(recorder, semconv.TRANSFER_ACTIVE, *way)
    failed: dict[tuple[str, ...], float] = {}
    for attributes, value in recorder.points(semconv.TRANSFER_OPERATIONS):
        if semconv.ERROR_TYPE in attributes:
            key = _key(attributes, way)
            failed[key] = failed.get(key, 0) + value
    for key, (bounds, counts, seconds) in sorted(
        _times(recorder, *way, semconv.KVCACHE_TIMING_SOURCE).items(), key=_near
    ):
        source, destination, clock = key
        yield RouteRow(
            source,
            destination,
            clock,
            sum(counts),
            moved.get(key, 0),
            seconds,
            quantile(bounds, counts, 0.5),
            quantile(bounds, counts, 0.99),
            active.get((source, destination)),
            failed.get((source, destination), 0),
        )


def _losses(recorder: Recorder) -> Iterator[LossRow]:
    for what, spec in _LOST.items():
        for (tier, reason), value in _sums(recorder, spec, semconv.KVCACHE_TIER, semconv.KVCACHE_REASON).items():
            yield LossRow(NEEDLESS if reason in _NOT_NEEDED else what, tier, reason, value, spec.unit.strip("{}"))


def _prefetch(recorder: Recorder) -> dict[str, float]:
    specs = {
        "hit": semconv.PREFETCH_HIT_TOKENS,
        "fulfilled": semconv.PREFETCH_FULFILLED_TOKENS,
        "unfulfilled": semconv.PREFETCH_UNFULFILLED_TOKENS,
        "outstanding": semconv.PREFETCH_OUTSTANDING_TOKENS,
    }
    found = {name: _sums(recorder, spec) for name, spec in specs.items()}
    return {name: sum(rows.values()) for name, rows in found.items() if rows}


def quantile(bounds: tuple[float, ...], counts: list[int], share: float) -> float | None:
    """Returns the upper bound of the bucket in which a share of the samples is reached.

    Args:
        bounds: Upper bounds of the buckets, ascending; the last bucket has none.
        counts: Samples in each, one more than there are bounds.
        share: Between 0 and 1.

    Returns:
        The bound; infinity for the last bucket, None where there are no samples.
    """
    total = sum(counts)
    reached = zip((*bounds, float("inf")), accumulate(counts), strict=True)
    return next((bound for bound, below in reached if below >= share * total), None) if total else None


# -- rows of the recorder ----------------------------------------------------------------------------------------------


def _sums(recorder: Recorder, spec: MetricSpec, *keys: str) -> dict[tuple[str, ...], float]:
    """Returns the sums of a metric's rows by some of their labels, in the order of the rows."""
    found: dict[tuple[str, ...], float] = {}
    for attributes, value in recorder.points(spec):
        key = _key(attributes, keys)
        found[key] = found.get(key, 0) + value
    return found


def _times(recorder: Recorder, *keys: str) -> dict[tuple[str, ...], tuple[tuple[float, ...], list[int], float]]:
    """Returns the durations of transfers by some of their labels: bounds, samples in each bucket, and their sum."""
    found: dict[tuple[str, ...], tuple[tuple[float, ...], list[int], float]] = {}
    for attributes, cell in recorder.histograms(semconv.TRANSFER_DURATION):
        key = _key(attributes, keys)
        counts, seconds = cell.read()
        if key in found:
            _, before, more = found[key]
            counts, seconds = [a + b for a, b in zip(before, counts, strict=True)], seconds + more
        found[key] = cell.bounds, counts, seconds
    return found


def _key(attributes: Attributes, keys: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(str(attributes.get(key, "")) for key in keys)


def _near(route: tuple[tuple[str, ...], object]) -> tuple[int, ...]:
    """Orders routes from the nearest tiers to the farthest, down before up."""
    source, destination = (TIERS.index(tier) for tier in route[0][:2])
    return max(source, destination), source
