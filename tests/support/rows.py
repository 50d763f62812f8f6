"""Reads what a recorder holds, as a test wants to compare it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcache_otel import semconv

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvcache_otel.record.cells import Histogram
    from kvcache_otel.record.recorder import Recorder
    from kvcache_otel.spec import MetricSpec

KEYS = {
    "tier": semconv.KVCACHE_TIER,
    "name": semconv.KVCACHE_TIER_NAME,
    "source": semconv.KVCACHE_SOURCE_TIER,
    "destination": semconv.KVCACHE_DESTINATION_TIER,
    "pool": semconv.KVCACHE_POOL,
    "state": semconv.KVCACHE_STATE,
    "reason": semconv.KVCACHE_REASON,
    "timing": semconv.KVCACHE_TIMING_SOURCE,
    "result": semconv.KVCACHE_LOOKUP_RESULT,
    "mode": semconv.KVCACHE_LOOKUP_MODE,
    "view": semconv.KVCACHE_VIEW,
    "hook": semconv.KVCACHE_TELEMETRY_HOOK,
    "error": semconv.ERROR_TYPE,
    "type": semconv.KVCACHE_EVENT_TYPE,
    "medium": semconv.KVCACHE_EVENT_MEDIUM,
    "worker": semconv.KVCACHE_WORKER,
}
"""Short names of the attributes, for keyword arguments."""


DOUBTS = (semconv.ACCOUNTING_ERRORS, semconv.TELEMETRY_DROPPED, semconv.TELEMETRY_ERRORS)
"""What every cache of a recorder has rows of. Tests that have several want to know of all of them, as a rule."""


class Rows:
    """The rows of one recorder. Labels are given by the names in `KEYS`, all of them but the identity's."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def value(self, spec: MetricSpec, **labels: str) -> int | float | None:
        """The value of a counter's or gauge's row, None where there is no such row."""
        return self.values(spec).get(_key(labels))

    def values(self, spec: MetricSpec) -> dict[frozenset[tuple[str, str | int]], int | float]:
        """All rows of a counter or a gauge, by their labels without the identity; doubts about all caches together."""
        values: dict[frozenset[tuple[str, str | int]], int | float] = {}
        for point in self.recorder.points(spec):
            key = _own(point.attributes)
            assert key not in values or spec in DOUBTS, f"two rows of {spec.name}: {point.attributes}"
            values[key] = values.get(key, 0) + point.value
        return values

    def total(self, spec: MetricSpec, **labels: str) -> int | float:
        """The sum of a counter's rows that have these labels among theirs."""
        wanted = _key(labels)
        return sum(value for key, value in self.values(spec).items() if wanted <= key)

    def histogram(self, spec: MetricSpec, **labels: str) -> Histogram | None:
        """The cell of a histogram's row, None where there is no such row."""
        wanted = _key(labels)
        return next((row.cell for row in self.recorder.histograms(spec) if _own(row.attributes) == wanted), None)


def _key(labels: Mapping[str, str]) -> frozenset[tuple[str, str | int]]:
    return frozenset((KEYS[name], value) for name, value in labels.items())


def _own(attributes: Mapping[str, str | int]) -> frozenset[tuple[str, str | int]]:
    return frozenset((key, value) for key, value in attributes.items() if key not in semconv.IDENTITY_ATTRIBUTES)
