"""A recorder beside a plain list of what was recorded: the list is counted again, and export must agree with it."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from kvcache_otel import semconv
from kvcache_otel.identity import Identity, Rank
from kvcache_otel.record.recorder import Recorder

if TYPE_CHECKING:
    import logging

    import pytest

IDENTITY = {
    "kvcache.engine": "custom",
    "kvcache.cache.type": "ToyCache",
    "kvcache.rank.tp": 1,
    "kvcache.rank.pp": 0,
    "kvcache.rank.dp": 2,
}

LOOKUP = {"kvcache.tier": "host"}
USAGE = {"kvcache.tier": "device", "kvcache.pool": "kv", "kvcache.state": "used"}
TRANSFER = {
    "kvcache.source.tier": "host",
    "kvcache.destination.tier": "device",
    "kvcache.timing.source": "device_event",
}
EVICTION = {"kvcache.tier": "device"}

# One in every fourth bucket or so, two on a bound, one beyond the last.
SAMPLES = (1e-6, 1e-5, 3e-5, 0.003, 0.003, 0.2, 1.7, 45.0, 60.0, 3600.0)


class Journal:
    """Records, and remembers.

    Attributes:
        recorder: What the tests export.
        samples: Every duration of a transfer.
        tokens: Sum of all tokens looked up.
    """

    def __init__(self, *, replay: bool = False) -> None:
        self.recorder = Recorder(Identity("custom", "ToyCache", Rank(tp=1, dp=2)), replay=replay)
        self.samples: list[float] = []
        self.tokens = 0
        self._counter = self.recorder.counter(semconv.LOOKUP_TOKENS, dict(LOOKUP))
        self._usage = self.recorder.level(semconv.USAGE, dict(USAGE))
        self._duration = self.recorder.histogram(semconv.TRANSFER_DURATION, dict(TRANSFER))
        self.recorder.histogram(semconv.EVICTION_DURATION, dict(EVICTION))  # Never a sample.

    def look_up(self, tokens: int) -> None:
        self.tokens += tokens
        self._counter.add(tokens)

    def use(self, tokens: int | None) -> None:
        self._usage.set(tokens)

    def transfer(self, *seconds: float) -> None:
        for duration in seconds:
            self.samples.append(duration)
            self._duration.record(duration)

    @staticmethod
    def recount(samples: list[float]) -> list[int]:
        """Returns how many samples fall into each bucket, found by comparing each sample with each bound."""
        bounds = [float("-inf"), *semconv.TRANSFER_DURATION.bounds, float("inf")]
        return [sum(1 for sample in samples if low < sample <= high) for low, high in itertools.pairwise(bounds)]


def points(data: Any, name: str) -> list[Any]:
    """Returns the data points of one metric in what a reader collected."""
    return [
        point
        for resource in (data.resource_metrics if data is not None else ())
        for scope in resource.scope_metrics
        for metric in scope.metrics
        if metric.name == name
        for point in metric.data.data_points
    ]


def value(data: Any, name: str, labels: dict[str, Any]) -> Any:
    """Returns the value of the one point that has at least these attributes."""
    [found] = [point.value for point in points(data, name) if labels.items() <= dict(point.attributes).items()]
    return found


def said(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Returns what we and the configuration loader have logged.

    Exporters of tests that came before may still be telling that nobody was there.
    """
    return [
        record for record in caplog.records if record.name.startswith(("kvcache_otel", "opentelemetry.configuration"))
    ]
