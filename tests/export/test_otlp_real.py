"""What a real OTLP receiver gets: the same numbers that were recorded."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from kvcache_otel import semconv
from kvcache_otel.export.instruments import SCOPE_NAME
from kvcache_otel.export.provider import start
from kvcache_otel.export.settings import Settings
from tests.conftest import require
from tests.export.journal import EVICTION, IDENTITY, LOOKUP, SAMPLES, TRANSFER, USAGE, Journal
from tests.support.otlp_receiver import OtlpReceiver, otlp_receiver
from tests.support.processes import free_port, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvcache_otel.export.exporter import Exporter

pytestmark = pytest.mark.otlp

PROTOCOLS = ["grpc", "http/protobuf"]


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    require("otlp")
    with otlp_receiver() as running:
        yield running


def exporting(journal: Journal, protocol: str, endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Exporter:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    exporter = start(journal.recorder, Settings.from_environ(os.environ))
    assert exporter is not None
    assert endpoint in exporter.endpoints[0]
    return exporter


def endpoint(receiver: OtlpReceiver, protocol: str) -> str:
    return receiver.grpc_endpoint if protocol == "grpc" else receiver.http_endpoint


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_same_values_arrive(
    journal: Journal, receiver: OtlpReceiver, protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "an-engine")
    journal.look_up(64)
    journal.use(17)
    journal.transfer(*SAMPLES)
    exporter = exporting(journal, protocol, endpoint(receiver, protocol), monkeypatch)
    assert exporter.flush(10)

    tokens = receiver.wait_for("kvcache.lookup.tokens")
    assert (tokens.value, tokens.monotonic, tokens.delta, tokens.unit) == (64, True, False, "{token}")
    assert tokens.attributes == IDENTITY | LOOKUP
    assert tokens.scope == SCOPE_NAME
    assert tokens.resource["service.name"] == "an-engine"
    assert tokens.resource["service.instance.id"]

    usage = receiver.wait_for("kvcache.usage")
    assert (usage.value, usage.monotonic) == (17, False)
    assert usage.attributes == IDENTITY | USAGE

    transfer = receiver.wait_for("kvcache.transfer.duration")
    assert list(transfer.buckets) == Journal.recount(journal.samples)
    assert transfer.count == len(SAMPLES)
    assert transfer.sum == pytest.approx(sum(SAMPLES))
    assert transfer.bounds == semconv.TRANSFER_DURATION.bounds
    assert transfer.attributes == IDENTITY | TRANSFER
    assert transfer.unit == "s"
    assert not transfer.delta
    assert not transfer.has_extremes
    assert transfer.resource == tokens.resource
    assert 0 < transfer.start_ns < transfer.time_ns

    eviction = receiver.wait_for("kvcache.eviction.duration")
    assert (eviction.count, eviction.sum, set(eviction.buckets)) == (0, 0.0, {0})
    assert eviction.attributes == IDENTITY | EVICTION
    assert exporter.stop(5)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_deltas_add_up(
    journal: Journal, receiver: OtlpReceiver, protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "delta")
    exporter = exporting(journal, protocol, endpoint(receiver, protocol), monkeypatch)
    for batch in (SAMPLES, (0.5,), ()):
        journal.transfer(*batch)
        journal.look_up(len(batch))
        assert exporter.flush(10)
    assert exporter.stop(5)
    wait_until(lambda: len(receiver.find("kvcache.lookup.tokens")) >= 4)  # Three flushes and the last export.
    rows = receiver.find("kvcache.transfer.duration")
    assert [row.count for row in rows] == [len(SAMPLES), 1]
    assert all(row.delta for row in rows)
    assert rows[0].time_ns == rows[1].start_ns
    assert sum(row.sum for row in rows) == pytest.approx(sum(journal.samples))
    totals = [sum(bucket) for bucket in zip(*(row.buckets for row in rows), strict=True)]
    assert totals == Journal.recount(journal.samples)
    assert sum(row.value or 0 for row in receiver.find("kvcache.lookup.tokens")) == journal.tokens


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_base2_histograms_are_declined(
    journal: Journal, receiver: OtlpReceiver, protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION", "base2_exponential_bucket_histogram")
    journal.transfer(*SAMPLES)
    exporter = exporting(journal, protocol, endpoint(receiver, protocol), monkeypatch)
    assert exporter.stop(10)
    assert receiver.wait_for("kvcache.transfer.duration").kind == "histogram"


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_exotic_labels(
    journal: Journal, receiver: OtlpReceiver, protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels: dict[str, str | int] = {
        "kvcache.tier": "disk",
        "kvcache.tier.name": 'a "b"\n\\ 数 \ud800',
        "kvcache.lookup.result": "hit",
    }
    journal.recorder.counter(semconv.LOOKUP_BLOCKS, labels).add(2**40)
    exporter = exporting(journal, protocol, endpoint(receiver, protocol), monkeypatch)
    assert exporter.stop(10)
    row = receiver.wait_for("kvcache.lookup.blocks")
    assert row.attributes["kvcache.tier.name"] == 'a "b"\n\\ 数 ?'
    assert row.value == 2**40


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_p4_counts_are_right_once_the_collector_is_back(
    journal: Journal, protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    require("otlp")
    ports = {"grpc_port": free_port(), "http_port": free_port()}
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "200")
    where = f"http://127.0.0.1:{ports['grpc_port' if protocol == 'grpc' else 'http_port']}"
    exporter = exporting(journal, protocol, where, monkeypatch)
    with otlp_receiver(**ports) as receiver:
        journal.look_up(1)
        journal.transfer(1.0)
        wait_until(lambda: receiver.wait_for("kvcache.lookup.tokens").value == 1)
    journal.look_up(10)
    journal.transfer(2.0)
    assert not exporter.flush(0.3)
    with otlp_receiver(**ports) as receiver:
        journal.look_up(100)
        journal.transfer(3.0)
        wait_until(lambda: receiver.wait_for("kvcache.lookup.tokens", timeout_s=30).value == 111, timeout_s=30)
        wait_until(lambda: receiver.wait_for("kvcache.transfer.duration").sum == 6.0)
        newest = receiver.wait_for("kvcache.transfer.duration")
        assert (newest.count, list(newest.buckets)) == (3, Journal.recount(journal.samples))
        assert exporter.stop(5)
