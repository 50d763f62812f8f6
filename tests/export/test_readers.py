"""Histogram cells through three kinds of reader, cumulative and delta, against a recount of the plain samples."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.sdk.metrics import Histogram, MeterProvider
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    ConsoleMetricExporter,
    InMemoryMetricReader,
    MetricExporter,
    MetricExportResult,
)
from prometheus_client.parser import text_string_to_metric_families

from kvcache_otel import semconv
from kvcache_otel.export.instruments import SCOPE_NAME, Instruments
from kvcache_otel.export.prometheus import PrometheusReader
from kvcache_otel.export.readers import PeriodicReader, cell_reader
from kvcache_otel.identity import Identity
from kvcache_otel.record.probe import CacheProbe
from kvcache_otel.record.transfers import Transfers
from tests.export.journal import EVICTION, IDENTITY, SAMPLES, TRANSFER, Journal, points, said

CUMULATIVE = AggregationTemporality.CUMULATIVE
DELTA = AggregationTemporality.DELTA


class Keeping(MetricExporter):
    """Keeps what it was given."""

    def __init__(self, temporality: AggregationTemporality) -> None:
        super().__init__(preferred_temporality={Histogram: temporality})
        self.received: list[Any] = []

    def export(self, metrics_data: Any, timeout_millis: float = 10_000, **kwargs: Any) -> MetricExportResult:
        self.received.append(metrics_data)
        return MetricExportResult.SUCCESS

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        return True

    def shutdown(self, timeout_millis: float = 30_000, **kwargs: Any) -> None:
        pass


class InMemory:
    """Collects through an InMemoryMetricReader."""

    def __init__(self, journal: Journal, temporality: AggregationTemporality) -> None:
        kind = cell_reader(InMemoryMetricReader)
        self.reader: Any = kind(journal.recorder, preferred_temporality={Histogram: temporality})
        provide(journal, self.reader)

    def collect(self) -> Any:
        return self.reader.get_metrics_data()


class Periodic:
    """Collects through a PeriodicExportingMetricReader."""

    def __init__(self, journal: Journal, temporality: AggregationTemporality) -> None:
        self.exporter = Keeping(temporality)
        self.reader = PeriodicReader(journal.recorder, self.exporter, export_interval_millis=1e8)
        provide(journal, self.reader)

    def collect(self) -> Any:
        self.reader.force_flush()
        return self.exporter.received[-1]


def provide(journal: Journal, reader: Any) -> None:
    provider = MeterProvider(metric_readers=[reader], shutdown_on_exit=False)
    Instruments(provider, histograms=False).bind(journal.recorder)


@pytest.mark.parametrize("kind", [InMemory, Periodic])
def test_cumulative(journal: Journal, kind: Any) -> None:
    reading = kind(journal, CUMULATIVE)
    starts = set()
    for batch in (SAMPLES, (), (0.5,)):
        journal.transfer(*batch)
        [point] = points(reading.collect(), "kvcache.transfer.duration")
        assert list(point.bucket_counts) == Journal.recount(journal.samples)
        assert point.count == len(journal.samples)
        assert point.sum == pytest.approx(sum(journal.samples))
        assert tuple(point.explicit_bounds) == semconv.TRANSFER_DURATION.bounds
        assert dict(point.attributes) == IDENTITY | TRANSFER
        assert point.start_time_unix_nano <= point.time_unix_nano
        starts.add(point.start_time_unix_nano)
    assert len(starts) == 1


@pytest.mark.parametrize("kind", [InMemory, Periodic])
def test_delta(journal: Journal, kind: Any) -> None:
    reading = kind(journal, DELTA)
    intervals = []
    for batch in (SAMPLES, (), (0.5, 0.5), (1e-5,)):
        journal.transfer(*batch)
        found = points(reading.collect(), "kvcache.transfer.duration")
        if not batch:
            assert found == []
            continue
        [point] = found
        assert list(point.bucket_counts) == Journal.recount(list(batch))
        assert point.count == len(batch)
        assert point.sum == pytest.approx(sum(batch))
        intervals.append((point.start_time_unix_nano, point.time_unix_nano))
    for (_, end), (start, _) in itertools.pairwise(intervals):
        assert end <= start
    assert intervals[1][1] == intervals[2][0]


@settings(deadline=None)
@given(st.lists(st.lists(st.floats(0, 1e6), max_size=5), max_size=6))
def test_deltas_add_up_to_the_whole(batches: list[list[float]]) -> None:
    journal = Journal()
    delta, whole = InMemory(journal, DELTA), InMemory(journal, CUMULATIVE)
    counts = [0] * (len(semconv.TRANSFER_DURATION.bounds) + 1)
    total = 0.0
    for batch in batches:
        journal.transfer(*batch)
        for point in points(delta.collect(), "kvcache.transfer.duration"):
            counts = [a + b for a, b in zip(counts, point.bucket_counts, strict=True)]
            total += point.sum
    [point] = points(whole.collect(), "kvcache.transfer.duration")
    assert counts == list(point.bucket_counts) == Journal.recount(journal.samples)
    assert total == pytest.approx(point.sum)


def test_two_readers_have_deltas_of_their_own(journal: Journal) -> None:
    first, second = InMemory(journal, DELTA), InMemory(journal, DELTA)
    journal.transfer(1.0)
    assert points(first.collect(), "kvcache.transfer.duration")[0].count == 1
    journal.transfer(1.0)
    assert points(first.collect(), "kvcache.transfer.duration")[0].count == 1
    assert points(second.collect(), "kvcache.transfer.duration")[0].count == 2


def test_delta_after_a_reset_starts_again(journal: Journal) -> None:
    reading = InMemory(journal, DELTA)
    journal.transfer(1.0, 1.0)
    reading.collect()
    journal.recorder.reset()
    journal.transfer(1.0)
    [point] = points(reading.collect(), "kvcache.transfer.duration")
    assert (point.count, point.sum) == (1, 1.0)


def test_no_sample_is_in_two_deltas_of_overlapping_collections(journal: Journal) -> None:
    reading = Periodic(journal, DELTA)
    done = threading.Event()

    def flush() -> None:
        while not done.is_set():
            reading.reader.force_flush()

    threads = [threading.Thread(target=flush) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(300):
        journal.transfer(0.25)
    done.set()
    for thread in threads:
        thread.join()
    reading.reader.force_flush()
    found = [point for data in reading.exporter.received for point in points(data, "kvcache.transfer.duration")]
    assert sum(point.count for point in found) == 300
    assert sum(point.sum for point in found) == pytest.approx(75.0)


def test_rows_without_samples(journal: Journal) -> None:
    [point] = points(InMemory(journal, CUMULATIVE).collect(), "kvcache.eviction.duration")
    assert (point.count, point.sum, set(point.bucket_counts)) == (0, 0.0, {0})
    assert dict(point.attributes) == IDENTITY | EVICTION
    assert points(InMemory(journal, DELTA).collect(), "kvcache.eviction.duration") == []


def test_everything_is_in_one_scope_with_one_resource(journal: Journal) -> None:
    [resource] = InMemory(journal, CUMULATIVE).collect().resource_metrics
    [scope] = resource.scope_metrics
    assert scope.scope.name == SCOPE_NAME
    names = [metric.name for metric in scope.metrics]
    assert len(names) == len(set(names))
    assert {"kvcache.lookup.tokens", "kvcache.transfer.duration"} <= set(names)


def test_descriptions_and_units_are_the_catalogues(journal: Journal) -> None:
    journal.use(5)
    [resource] = InMemory(journal, CUMULATIVE).collect().resource_metrics
    for metric in resource.scope_metrics[0].metrics:
        spec = semconv.METRICS[metric.name]
        assert (metric.description, metric.unit) == (spec.brief, spec.unit)


def test_every_exporter_can_encode_unknown_extremes(journal: Journal, capsys: pytest.CaptureFixture[str]) -> None:
    journal.transfer(*SAMPLES)
    data = InMemory(journal, CUMULATIVE).collect()
    request = encode_metrics(data)
    metrics = request.resource_metrics[0].scope_metrics[0].metrics
    [point] = next(metric for metric in metrics if metric.name == "kvcache.transfer.duration").histogram.data_points
    assert not point.HasField("min")
    assert not point.HasField("max")
    assert list(point.bucket_counts) == Journal.recount(journal.samples)
    ConsoleMetricExporter().export(data)
    assert "kvcache.transfer.duration" in data.to_json()


def test_prometheus_reader(journal: Journal) -> None:
    reader = PrometheusReader(journal.recorder)
    provide(journal, reader)
    for batch in (SAMPLES, (0.5, 0.5)):
        journal.transfer(*batch)
        journal.look_up(64)
        samples = scrape(reader)
        cumulated = list(itertools.accumulate(Journal.recount(journal.samples)))
        labels = {key.replace(".", "_"): str(value) for key, value in (IDENTITY | TRANSFER).items()}
        name = "kvcache_transfer_duration_seconds"
        buckets = {
            float(sample_labels["le"]): found
            for sample_name, sample_labels, found in samples
            if sample_name == f"{name}_bucket" and labels.items() <= sample_labels.items()
        }
        assert buckets == dict(
            zip([*semconv.TRANSFER_DURATION.bounds, float("inf")], map(float, cumulated), strict=True)
        )
        assert (f"{name}_count", labels, len(journal.samples)) in samples
        [total] = [found for sample_name, found_labels, found in samples if sample_name == f"{name}_sum"]
        assert total == pytest.approx(sum(journal.samples))
        [tokens] = [found for sample_name, _, found in samples if sample_name == "kvcache_lookup_tokens_total"]
        assert tokens == journal.tokens


def test_flushing_a_prometheus_reader_leaves_nothing_behind(journal: Journal) -> None:
    reader = PrometheusReader(journal.recorder)
    provide(journal, reader)
    reader.force_flush()
    names = [(name, tuple(sorted(labels.items()))) for name, labels, _ in scrape(reader)]
    assert len(names) == len(set(names))


def test_a_histogram_that_cannot_be_read_does_not_stop_the_others(
    journal: Journal, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = InMemory(journal, CUMULATIVE)
    monkeypatch.setattr(journal.recorder, "histograms", lambda spec: 1 / 0)
    journal.look_up(3)
    with caplog.at_level(logging.WARNING, "kvcache_otel"):
        for _ in range(3):
            assert points(reading.collect(), "kvcache.lookup.tokens")[0].value == 3
    [record] = said(caplog)
    assert "histograms are not exported" in record.message


def scrape(reader: PrometheusReader) -> list[tuple[str, dict[str, str], float]]:
    from prometheus_client import generate_latest

    text = generate_latest(reader.registry).decode()
    return [
        (sample.name, sample.labels, sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    ]


@pytest.mark.parametrize("asked", [semconv.LIMIT, semconv.BLOCK_SIZE])
@pytest.mark.parametrize("kind", [InMemory, Periodic])
def test_no_collection_has_more_durations_than_operations_however_many_come_meanwhile(
    journal: Journal, kind: Any, asked: Any
) -> None:
    copies = Transfers(CacheProbe(journal.recorder, Identity("custom", "Copies")), "device", "host")
    labels: Any = {"kvcache.tier": "device"} | ({"kvcache.pool": "kv"} if asked is semconv.LIMIT else {})

    def one_more() -> int:
        copies.begin(bytes=1).end()
        return 1

    journal.recorder.observe(asked, labels, one_more)
    bench = kind(journal, CUMULATIVE)
    for _ in range(3):
        data = bench.collect()
        [operations] = points(data, semconv.TRANSFER_OPERATIONS.name)
        durations = sum(
            point.count
            for point in points(data, semconv.TRANSFER_DURATION.name)
            if point.attributes["kvcache.cache.type"] == "Copies"
        )
        assert durations <= operations.value
    assert durations >= 2


class Scraped:
    """Collects through a reader of Prometheus' kind, as a scrape does."""

    def __init__(self, journal: Journal, temporality: AggregationTemporality) -> None:
        self.reader = PrometheusReader(journal.recorder)
        provide(journal, self.reader)

    def collect(self) -> Any:
        return self.reader.registry.collect()


class Foreign:
    """Collects through a provider that is not ours, whose readers know no cells."""

    def __init__(self, journal: Journal, temporality: AggregationTemporality) -> None:
        self.reader = InMemoryMetricReader()
        provide(journal, self.reader)

    def collect(self) -> Any:
        return self.reader.get_metrics_data()


def values(data: Any) -> dict[str, float]:
    """Returns the sum of each metric's numbers, by OpenTelemetry's name."""
    if hasattr(data, "resource_metrics"):
        return {
            metric.name: sum(point.value for point in points(data, metric.name))
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if "duration" not in metric.name
        }
    return {family.name.replace("_", "."): sum(sample.value for sample in family.samples) for family in data}


@pytest.mark.parametrize("kind", [InMemory, Periodic, Scraped, Foreign])
def test_what_nobody_ends_is_looked_after_before_anything_is_read(journal: Journal, kind: Any) -> None:
    copies = Transfers(CacheProbe(journal.recorder, Identity("custom", "Copies")), "device", "host", deadline_s=0.01)
    copies.begin()
    bench = kind(journal, CUMULATIVE)
    time.sleep(0.02)
    journal.recorder.observe(semconv.LOOKUP_TOKENS, {"kvcache.tier": "disk"}, lambda: dropped(journal))
    read = values(bench.collect())
    assert read["kvcache.transfer.active"] == 0
    assert read["kvcache.telemetry.dropped"] == 1
    assert read["kvcache.lookup.tokens"] == 1, "the first that is read knows of it too"


def dropped(journal: Journal) -> int | float:
    return sum(point.value for point in journal.recorder.points(semconv.TELEMETRY_DROPPED))
