"""The Prometheus endpoint: its port, its registry, its threads."""

from __future__ import annotations

import errno
import os
import socket
import struct
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from kvcache_otel.export import prometheus
from kvcache_otel.export.prometheus import PrometheusServer, free_port
from kvcache_otel.export.provider import start
from kvcache_otel.export.settings import Settings
from tests.export.journal import Journal, said
from tests.support import processes

if TYPE_CHECKING:
    from kvcache_otel.export.exporter import Exporter


def read(port: int, host: str = "localhost") -> str:
    with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=5) as response:
        return response.read().decode()


def started(journal: Journal, rank: int = 0, **environ: str) -> Exporter:
    settings = Settings.from_environ({"OTEL_METRICS_EXPORTER": "prometheus", **environ})
    exporter = start(journal.recorder, settings, local_rank=rank)
    assert exporter is not None
    return exporter


def consecutive_free_ports(count: int) -> int:
    """Returns the first of some ports that are free."""
    return processes.free_ports(count)[0]


def test_each_rank_has_its_port() -> None:
    base = consecutive_free_ports(3)
    servers = [PrometheusServer(CollectorRegistry(), "localhost", base, rank) for rank in range(3)]
    try:
        assert [server.port for server in servers] == [base, base + 1, base + 2]
        assert [server.moved for server in servers] == ["", "", ""]
        assert servers[1].url == f"http://localhost:{base + 1}/metrics"
    finally:
        for server in servers:
            server.close()


def test_p3_two_processes_one_port(caplog: pytest.LogCaptureFixture) -> None:
    base = str(consecutive_free_ports(3))
    first, second = Journal(), Journal()
    first.look_up(1)
    second.look_up(2)
    one = started(first, OTEL_EXPORTER_PROMETHEUS_PORT=base)
    other = started(second, OTEL_EXPORTER_PROMETHEUS_PORT=base)
    try:
        assert one.ports == [int(base)]
        assert other.ports == [int(base) + 1]
        assert "kvcache_lookup_tokens_total" in read(one.ports[0])
        values = [
            sample.value
            for exporter in (one, other)
            for family in text_string_to_metric_families(read(exporter.ports[0]))
            for sample in family.samples
            if sample.name == "kvcache_lookup_tokens_total"
        ]
        assert values == [1, 2]
        [moved] = [record.message for record in said(caplog)]
        assert f"http://localhost:{int(base) + 1}/metrics" in moved
        assert f"port {base} of localhost cannot be used" in moved
    finally:
        one.stop(5)
        other.stop(5)


def test_when_every_port_near_is_taken_any_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcache_otel.export.prometheus.PORTS_TRIED", 2)
    base = consecutive_free_ports(2)
    blockers = [PrometheusServer(CollectorRegistry(), "localhost", base + offset) for offset in range(2)]
    server = PrometheusServer(CollectorRegistry(), "localhost", base)
    try:
        assert server.port not in (base, base + 1)
        assert str(base) in server.moved
        assert read(server.port) == ""
    finally:
        for each in (*blockers, server):
            each.close()


def test_a_rank_beyond_the_last_port() -> None:
    server = PrometheusServer(CollectorRegistry(), "localhost", 65_535, 7)
    assert server.port
    assert server.moved == "there is no port 65542"
    server.close()


def test_port_0_is_any_for_every_rank() -> None:
    server = PrometheusServer(CollectorRegistry(), "localhost", 0, 5)
    assert server.port
    assert server.moved == ""
    server.close()


def test_it_listens_on_this_machine_alone_by_default(journal: Journal) -> None:
    exporter = started(journal, OTEL_EXPORTER_PROMETHEUS_PORT="0")
    connections = [
        line.split()
        for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]
        if int(line.split()[1].split(":")[1], 16) == exporter.ports[0] and line.split()[3] == "0A"
    ]
    assert [entry[1].split(":")[0] for entry in connections] == ["0100007F"]
    exporter.stop(5)


def test_ipv6() -> None:
    try:
        server = PrometheusServer(CollectorRegistry(), "::1", 0)
    except OSError:
        pytest.skip("needs IPv6")
    assert server.url == f"http://[::1]:{server.port}/metrics"
    assert read(server.port, "[::1]") == ""
    server.close()


@pytest.mark.parametrize("host", ["no-such-host.invalid", "203.0.113.7", "a" * 300])
def test_an_address_that_cannot_be_bound_is_one_line(
    journal: Journal, host: str, caplog: pytest.LogCaptureFixture
) -> None:
    settings = Settings.from_environ({"OTEL_METRICS_EXPORTER": "prometheus", "OTEL_EXPORTER_PROMETHEUS_HOST": host})
    assert start(journal.recorder, settings) is None
    [record] = said(caplog)
    assert record.message.startswith("kvcache: OTEL_METRICS_EXPORTER=prometheus: nothing is exported")
    assert f"OTEL_EXPORTER_PROMETHEUS_HOST={host[:190]}" in record.message
    assert record.exc_info is None


def test_free_port() -> None:
    base = consecutive_free_ports(2)
    assert free_port("localhost", base, 0) == base
    blocker = PrometheusServer(CollectorRegistry(), "localhost", base)
    assert free_port("localhost", base, 0) == base + 1
    blocker.close()


def test_p8_a_multiprocess_directory_does_not_matter(
    journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "counter_1.db").touch()
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    journal.look_up(5)
    exporter = started(journal, OTEL_EXPORTER_PROMETHEUS_PORT="0")
    assert "kvcache_lookup_tokens_total" in read(exporter.ports[0])
    exporter.stop(5)
    assert [path.name for path in tmp_path.iterdir()] == ["counter_1.db"]


def test_p9_base2_histograms_are_declined_in_a_clear_word(
    journal: Journal, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    variable = "OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION"
    monkeypatch.setenv(variable, "base2_exponential_bucket_histogram")
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "prometheus")
    monkeypatch.setenv("OTEL_EXPORTER_PROMETHEUS_PORT", "0")
    journal.transfer(0.5)
    exporter = start(journal.recorder, Settings.from_environ(os.environ))
    assert exporter is not None
    assert 'le="0.5"' in read(exporter.ports[0])
    [record] = said(caplog)
    assert variable in record.message
    assert "explicit bounds" in record.message
    exporter.stop(5)


def test_nothing_but_ours_is_served_and_ours_is_nowhere_else(journal: Journal) -> None:
    exporter = started(journal, OTEL_EXPORTER_PROMETHEUS_PORT="0")
    families = {family.name for family in text_string_to_metric_families(read(exporter.ports[0]))}
    assert all(name.startswith(("kvcache_", "target")) for name in families)
    assert "otel_scope" not in read(exporter.ports[0])
    assert not any(family.name.startswith("kvcache_") for family in REGISTRY.collect())
    exporter.stop(5)


def test_stop_frees_the_port_and_ends_its_thread(journal: Journal) -> None:
    exporter = started(journal, OTEL_EXPORTER_PROMETHEUS_PORT="0")
    [port] = exporter.ports
    assert exporter.stop(5)
    with pytest.raises(urllib.error.URLError):
        read(port)
    processes.wait_until(lambda: not any(thread.name == "kvcache-prometheus" for thread in threading.enumerate()))


def test_scrapes_at_once_do_not_mix(journal: Journal) -> None:
    journal.transfer(0.5)
    exporter = started(journal, OTEL_EXPORTER_PROMETHEUS_PORT="0")
    answers: list[str] = []
    threads = [threading.Thread(target=lambda: answers.append(read(exporter.ports[0]))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 8
    for answer in answers:
        lines = [line for line in answer.splitlines() if not line.startswith("#")]
        assert len(lines) == len(set(lines))
    assert len({len(answer) for answer in answers}) == 1
    exporter.stop(5)


def test_exotic_labels_survive_the_text_format(journal: Journal) -> None:
    from kvcache_otel import semconv

    name = 'a "quoted"\nback\\slash 数'
    labels: dict[str, str | int] = {"kvcache.tier": "disk", "kvcache.tier.name": name, "kvcache.lookup.result": "hit"}
    journal.recorder.counter(semconv.LOOKUP_BLOCKS, labels).add(3)
    exporter = started(journal, OTEL_EXPORTER_PROMETHEUS_PORT="0")
    found = [
        (sample.labels["kvcache_tier_name"], sample.value)
        for family in text_string_to_metric_families(read(exporter.ports[0]))
        for sample in family.samples
        if sample.name == "kvcache_lookup_blocks_total"
    ]
    assert found == [(name, 3)]
    exporter.stop(5)


def test_a_connection_that_cannot_be_accepted_does_not_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    server = PrometheusServer(CollectorRegistry(), "127.0.0.1", 0)
    refused: list[float] = []

    def accept(_: object) -> None:
        refused.append(time.monotonic())
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch, socket.socket() as client:
        patch.setattr(socket.socket, "accept", accept)
        client.connect(("127.0.0.1", server.port))
        time.sleep(0.7)
    assert 1 <= len(refused) <= 6
    assert read(server.port) == ""
    server.close()


def test_silent_connections_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    assert prometheus._QuietHandler.timeout == 10
    monkeypatch.setattr(prometheus._QuietHandler, "timeout", 0.3)
    before = set(threading.enumerate())
    server = PrometheusServer(CollectorRegistry(), "127.0.0.1", 0)
    with socket.create_connection(("127.0.0.1", server.port)), socket.create_connection(("127.0.0.1", server.port)):
        processes.wait_until(lambda: len(set(threading.enumerate()) - before) == 3)
        server.close()
        processes.wait_until(lambda: set(threading.enumerate()) <= before, 5)


def test_no_more_connections_than_threads_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus, "MAX_CONNECTIONS", 1)
    server = PrometheusServer(CollectorRegistry(), "127.0.0.1", 0)
    address = ("127.0.0.1", server.port)
    with socket.create_connection(address), socket.create_connection(address, timeout=5) as second:
        assert second.recv(1) == b""
    processes.wait_until(lambda: read(server.port) == "")
    server.close()


def test_many_may_wait_to_be_accepted() -> None:
    assert prometheus._Server.request_queue_size == 128


def test_reset_connections_leave_no_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    server = PrometheusServer(CollectorRegistry(), "127.0.0.1", 0)
    before = set(threading.enumerate())
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.send(b"GET /metrics")
    assert read(server.port) == ""
    processes.wait_until(lambda: set(threading.enumerate()) <= before)
    server.close()
    assert capfd.readouterr().err == ""


def test_a_scrape_that_fails_is_one_line(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    class Failing(CollectorRegistry):
        def collect(self) -> Any:
            raise RuntimeError("no metrics")

    server = PrometheusServer(Failing(), "127.0.0.1", 0)
    with pytest.raises(urllib.error.HTTPError, match="500"):
        read(server.port)
    server.close()
    [record] = said(caplog)
    assert "no metrics" in record.message
    assert capfd.readouterr().err == ""


def test_an_address_in_brackets(journal: Journal) -> None:
    if not socket.has_ipv6 or not Path("/proc/net/if_inet6").exists():
        pytest.skip("needs IPv6")
    exporter = started(journal, OTEL_EXPORTER_PROMETHEUS_HOST="[::1]", OTEL_EXPORTER_PROMETHEUS_PORT="0")
    assert f"http://[::1]:{exporter.ports[0]}/metrics" in exporter.endpoints[0]
    exporter.stop(5)


def test_ports_are_not_shared() -> None:
    server = PrometheusServer(CollectorRegistry(), "127.0.0.1", 0)
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", server.port))
    server.close()
