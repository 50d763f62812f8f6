"""Observable instruments: the right values, and nothing that a callback does stops collection."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from kvcache_otel import semconv
from kvcache_otel.export.instruments import Instruments
from tests.export.journal import IDENTITY, LOOKUP, USAGE, Journal, points, said, value

if TYPE_CHECKING:
    from collections.abc import Callable


class Bench:
    """A provider with one reader."""

    def __init__(self, journal: Journal) -> None:
        self.reader = InMemoryMetricReader()
        provider = MeterProvider(metric_readers=[self.reader], shutdown_on_exit=False)
        self.instruments = Instruments(provider, histograms=False)
        self.instruments.bind(journal.recorder)

    def collect(self) -> Any:
        return self.reader.get_metrics_data()


def test_counters_and_levels(journal: Journal) -> None:
    bench = Bench(journal)
    journal.look_up(10)
    journal.use(7)
    data = bench.collect()
    [tokens] = points(data, "kvcache.lookup.tokens")
    assert tokens.value == 10
    assert dict(tokens.attributes) == IDENTITY | LOOKUP
    [usage] = points(data, "kvcache.usage")
    assert usage.value == 7
    assert dict(usage.attributes) == IDENTITY | USAGE


def test_a_level_that_is_not_known_has_no_row(journal: Journal) -> None:
    bench = Bench(journal)
    journal.use(7)
    assert points(bench.collect(), "kvcache.usage")
    journal.use(None)
    assert points(bench.collect(), "kvcache.usage") == []


def test_kinds_of_instrument(journal: Journal) -> None:
    journal.use(1)
    journal.recorder.observe(semconv.BLOCK_SIZE, {"kvcache.tier": "device"}, lambda: 16)
    [resource] = Bench(journal).collect().resource_metrics
    data = {metric.name: metric.data for metric in resource.scope_metrics[0].metrics}
    assert data["kvcache.lookup.tokens"].is_monotonic
    assert not data["kvcache.usage"].is_monotonic
    assert type(data["kvcache.block.size"]).__name__ == "Gauge"
    assert not any(name.endswith("duration") for name in data)


class HarshError(BaseException):
    """Is not an Exception."""


@pytest.mark.parametrize("raised", [SystemExit(1), ValueError("x"), HarshError(), asyncio.CancelledError()])
def test_p5_collection_goes_on_whatever_a_gauge_raises(
    journal: Journal, raised: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    journal.recorder.observe(semconv.BLOCK_SIZE, {"kvcache.tier": "device"}, raising(raised))
    journal.recorder.observe(semconv.LIMIT, {"kvcache.tier": "host", "kvcache.pool": "kv"}, lambda: 5)
    journal.look_up(3)
    bench = Bench(journal)
    with caplog.at_level(logging.WARNING, "kvcache_otel"):
        for _ in range(3):
            data = bench.collect()
            assert value(data, "kvcache.lookup.tokens", LOOKUP) == 3
            assert value(data, "kvcache.limit", {}) == 5
            assert points(data, "kvcache.block.size") == []
    assert len(said(caplog)) == 1
    assert value(bench.collect(), "kvcache.telemetry.errors", {}) >= 1


def test_keyboard_interrupt_passes(journal: Journal) -> None:
    journal.recorder.observe(semconv.BLOCK_SIZE, {"kvcache.tier": "device"}, raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        Bench(journal).collect()


def test_a_released_recorder_has_no_rows(journal: Journal) -> None:
    bench = Bench(journal)
    journal.look_up(3)
    other = Journal()
    bench.instruments.release(other.recorder)
    assert points(bench.collect(), "kvcache.lookup.tokens")
    bench.instruments.release(journal.recorder)
    assert points(bench.collect(), "kvcache.lookup.tokens") == []


def test_another_recorder_takes_over(journal: Journal) -> None:
    bench = Bench(journal)
    journal.look_up(3)
    other = Journal()
    other.look_up(4)
    bench.instruments.bind(other.recorder)
    bench.instruments.release(journal.recorder)
    assert value(bench.collect(), "kvcache.lookup.tokens", {}) == 4


def test_plain_numbers_and_exotic_labels_arrive() -> None:
    journal = Journal()
    name = 'storage "ä"\n\\ 数 \ud800 ' + "x" * 500
    labels: dict[str, str | int] = {"kvcache.tier": "disk", "kvcache.tier.name": name, "kvcache.lookup.result": "hit"}
    journal.recorder.counter(semconv.LOOKUP_BLOCKS, labels).add(1)
    [point] = points(Bench(journal).collect(), "kvcache.lookup.blocks")
    exported = str(point.attributes["kvcache.tier.name"])
    assert exported.encode()
    assert exported.startswith('storage "ä"\n\\ 数 ? xxx')
    assert len(exported) == 128


def raising(error: BaseException) -> Callable[[], int]:
    def read() -> int:
        raise error

    return read
