"""What a whole engine's rows of ours must be, worked out from the samples of vLLM's own Prometheus metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvcache_otel import semconv

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvcache_otel.spec import MetricSpec


ANY = "*"
"""Instead of a label's value: the label must be there."""


class Sample(NamedTuple):
    """One sample of vLLM's: its name without ``vllm:``, its labels without model and engine, its value."""

    name: str
    labels: dict[str, str]
    value: float


class Expected(NamedTuple):
    """What the sum of our rows must be.

    Attributes:
        spec: The metric.
        labels: What the rows must have, by short names as in `tests.support.rows`.
        value: The sum of a counter's or gauge's values, or of a histogram's sums.
        count: The sum of a histogram's counts; None where vLLM does not count them.
        without: Short names of labels that the rows must not have.
    """

    spec: MetricSpec
    labels: Mapping[str, str]
    value: float
    count: float | None = None
    without: tuple[str, ...] = ()


class Theirs:
    """vLLM's samples. What it never spoke of is 0: its series begin with their first event."""

    def __init__(self, samples: list[Sample]) -> None:
        self._values: dict[tuple[str, frozenset[tuple[str, str]]], float] = {
            (sample.name, frozenset(sample.labels.items())): sample.value for sample in samples
        }

    def __call__(self, name: str, **labels: str) -> float:
        return self._values.get((name, frozenset(labels.items())), 0)


def expected(theirs: Theirs, tiers: Mapping[str, str]) -> Iterator[Expected]:
    """Every counter and histogram of ours that vLLM also has.

    Args:
        theirs: vLLM's samples.
        tiers: The tiers by vLLM's names of them, the secondary ones: ``{"1:fs": "disk"}``.
    """
    for source, tier in (("device", "device"), ("host", "host"), ("disk", "disk")):
        cached = theirs("prompt_tokens_cached_by_source_total", source=source)
        yield Expected(semconv.LOOKUP_TOKENS, {"tier": tier}, cached)
    computed = theirs("prompt_tokens_by_source_total", source="local_compute")
    yield Expected(semconv.LOOKUP_TOKENS, {"tier": "none"}, computed)
    yield Expected(semconv.LOOKUP_TOKENS, {}, theirs("prompt_tokens_total"))
    yield from _lookups(theirs, {"0:primary": {"tier": "host"}, **_named(tiers)})
    yield from _requests(theirs)
    yield from _secondary(theirs, tiers)
    yield from _device(theirs)
    refused = theirs("kv_offload_tiering_promotion_allocation_failures_total")
    yield Expected(semconv.ALLOCATION_FAILURES, {"tier": "host", "reason": "promotion"}, refused)
    refused = theirs("kv_offload_allocation_failure_total")
    yield Expected(semconv.ALLOCATION_FAILURES, {"tier": "host", "reason": "store"}, refused)


def _named(tiers: Mapping[str, str]) -> dict[str, dict[str, str]]:
    return {name: {"tier": tier, "name": name} for name, tier in tiers.items()}


def _lookups(theirs: Theirs, where: Mapping[str, dict[str, str]]) -> Iterator[Expected]:
    for name, labels in where.items():
        queries = theirs("kv_offload_tiering_chunk_queries_total", tier=name)
        hits = theirs("kv_offload_tiering_chunk_hits_total", tier=name)
        yield Expected(semconv.LOOKUP_BLOCKS, {**labels, "result": "hit"}, hits)
        yield Expected(semconv.LOOKUP_BLOCKS, {**labels, "result": "miss"}, queries - hits)
        for mode in ("sync", "async"):
            delay = f"kv_offload_tiering_lookup_{mode}_delay_seconds"
            yield Expected(
                semconv.LOOKUP_DURATION,
                {**labels, "mode": mode},
                theirs(f"{delay}_sum", tier=name),
                theirs(f"{delay}_count", tier=name),
            )


def _requests(theirs: Theirs) -> Iterator[Expected]:
    for mode in ("sync", "async"):
        delay = f"kv_offload_lookup_{mode}_delay_seconds"
        yield Expected(
            semconv.LOOKUP_REQUEST_DURATION, {"mode": mode}, theirs(f"{delay}_sum"), theirs(f"{delay}_count")
        )


def _secondary(theirs: Theirs, tiers: Mapping[str, str]) -> Iterator[Expected]:
    for name, tier in tiers.items():
        promotion = {"source": tier, "destination": "host", "name": name}
        cascade = {"source": "host", "destination": tier, "name": name}
        for route, way, job in ((promotion, "read", "promotion"), (cascade, "write", "cascade")):
            prefix = "kv_offload_tiering_"
            yield Expected(semconv.TRANSFER_IO, route, theirs(f"{prefix}{way}_bytes_total", tier=name))
            yield Expected(semconv.TRANSFER_DURATION, route, theirs(f"{prefix}{way}_time_total", tier=name))
            failures = theirs(f"{prefix}{job}_job_failures_total", tier=name)
            yield Expected(semconv.TRANSFER_OPERATIONS, {**route, "error": ANY}, failures)
            yield Expected(semconv.TRANSFER_ACTIVE, route, theirs(f"{prefix}active_{job}_jobs", tier=name))
        dropped = theirs("kv_offload_tiering_backpressure_blocks_dropped_total", tier=name)
        yield Expected(semconv.STORE_SKIPPED_BLOCKS, {"tier": tier, "name": name, "reason": "backpressure"}, dropped)


def _device(theirs: Theirs) -> Iterator[Expected]:
    for way, source, destination in (("store", "device", "host"), ("load", "host", "device")):
        route = {"source": source, "destination": destination}
        transfers = theirs(f"kv_offload_{way}_size_count")
        yield Expected(semconv.TRANSFER_IO, route, theirs(f"kv_offload_{way}_bytes_total"), without=("name",))
        yield Expected(
            semconv.TRANSFER_DURATION, route, theirs(f"kv_offload_{way}_time_total"), transfers, without=("name",)
        )
        yield Expected(semconv.TRANSFER_OPERATIONS, route, transfers, without=("name", "error"))
