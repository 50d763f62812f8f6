"""What a real Prometheus server says after scraping us: the same numbers that were recorded."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import pytest

from kvcache_otel import semconv
from kvcache_otel.export.provider import start
from kvcache_otel.export.settings import Settings
from tests.conftest import require
from tests.export.journal import IDENTITY, LOOKUP, SAMPLES, TRANSFER, USAGE, Journal
from tests.support.prometheus_server import prometheus_server

pytestmark = pytest.mark.prometheus


@pytest.fixture(autouse=True)
def _required() -> None:
    require("prometheus")


def labels(attributes: dict[str, str | int]) -> dict[str, str]:
    """Returns attributes as Prometheus labels."""
    return {key.replace(".", "_"): str(value) for key, value in attributes.items()}


def test_exact_values(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "prometheus")
    monkeypatch.setenv("OTEL_EXPORTER_PROMETHEUS_PORT", "0")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "an-engine")
    journal.look_up(64)
    journal.use(17)
    journal.transfer(*SAMPLES)
    exporter = start(journal.recorder, Settings.from_environ(os.environ))
    assert exporter is not None
    with prometheus_server([f"localhost:{exporter.ports[0]}"]) as prometheus:
        [tokens] = prometheus.wait_for("kvcache_lookup_tokens_total")
        assert tokens.value == 64
        assert tokens.labels == labels(IDENTITY | LOOKUP) | {"__name__": "kvcache_lookup_tokens_total"}
        [usage] = prometheus.query("kvcache_usage")
        assert (usage.value, usage.labels) == (17, labels(IDENTITY | USAGE) | {"__name__": "kvcache_usage"})

        name = "kvcache_transfer_duration_seconds"
        [count] = prometheus.query(f"{name}_count")
        assert count.value == len(SAMPLES)
        assert count.labels == labels(IDENTITY | TRANSFER) | {"__name__": f"{name}_count"}
        [total] = prometheus.query(f"{name}_sum")
        assert total.value == pytest.approx(sum(SAMPLES))
        buckets = {float(sample.labels["le"]): sample.value for sample in prometheus.query(f"{name}_bucket")}
        cumulated = itertools.accumulate(Journal.recount(journal.samples))
        bounds = [*semconv.TRANSFER_DURATION.bounds, float("inf")]
        assert buckets == dict(zip(bounds, map(float, cumulated), strict=True))
        [median] = prometheus.query(f"histogram_quantile(0.5, {name}_bucket)")
        assert 0.002 < median.value <= 0.005

        [empty] = prometheus.query("kvcache_eviction_duration_seconds_count")
        assert empty.value == 0
        [target] = prometheus.query("target_info")
        assert target.labels["service_name"] == "an-engine"
        assert target.labels["service_instance_id"]
        [scraped] = prometheus.targets()
        assert (scraped["health"], scraped["lastError"]) == ("up", "")

        journal.look_up(36)
        assert prometheus.wait_for("kvcache_lookup_tokens_total == 100")
    assert exporter.stop(5)


RANK = """
import os, sys
from kvcache_otel import semconv
from kvcache_otel.identity import Identity, Rank
from kvcache_otel.record.recorder import Recorder
from kvcache_otel.export.provider import start
from kvcache_otel.export.settings import Settings

rank = int(sys.argv[1])
recorder = Recorder(Identity("custom", "ToyCache", Rank(tp=rank)))
recorder.counter(semconv.LOOKUP_TOKENS, {"kvcache.tier": "host"}).add(1024)
recorder.histogram(
    semconv.TRANSFER_DURATION,
    {"kvcache.source.tier": "host", "kvcache.destination.tier": "device", "kvcache.timing.source": "wall_clock"},
).record(0.5)
exporter = start(recorder, Settings.from_environ(os.environ), local_rank=int(sys.argv[2]))
print(exporter.ports[0], flush=True)
sys.stdin.read()
"""


def test_p3_two_processes_that_were_given_one_port_are_both_scraped() -> None:
    environ = {**os.environ, "OTEL_METRICS_EXPORTER": "prometheus", "OTEL_EXPORTER_PROMETHEUS_PORT": "0"}
    ranks: list[subprocess.Popen[str]] = []
    ports: list[int] = []
    try:
        for rank in range(3):
            process = subprocess.Popen(
                [sys.executable, "-c", RANK, str(rank), "0"],
                env=environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            ranks.append(process)
            assert process.stdout is not None
            ports.append(int(process.stdout.readline()))
            environ["OTEL_EXPORTER_PROMETHEUS_PORT"] = str(ports[0])
        assert len(set(ports)) == 3
        with prometheus_server([f"localhost:{port}" for port in ports]) as prometheus:
            [scraped] = prometheus.wait_for("count(kvcache_lookup_tokens_total) == 3")
            assert scraped.value == 3
            # The catalogue says one_rank of the tokens and sum of the durations.
            [tokens] = prometheus.query("max(kvcache_lookup_tokens_total)")
            assert tokens.value == 1024
            [durations] = prometheus.query("sum(kvcache_transfer_duration_seconds_sum)")
            assert durations.value == 1.5
            tp = {sample.labels["kvcache_rank_tp"] for sample in prometheus.query("kvcache_lookup_tokens_total")}
            assert tp == {"0", "1", "2"}
    finally:
        for process in ranks:
            process.communicate("")
