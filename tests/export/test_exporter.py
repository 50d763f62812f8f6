"""The handle: everything ends in time, whatever the collector does. With processes of their own, to see them end."""

from __future__ import annotations

import http.server
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider

from kvcache_otel.export.exporter import Exporter
from kvcache_otel.export.instruments import Instruments
from kvcache_otel.export.provider import start
from kvcache_otel.export.settings import Settings
from tests.export.journal import said
from tests.support.processes import free_port, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.export.journal import Journal

# The box that runs the tests may be slow; what would hang, hangs for 10 s or more.
SLACK_S = 4.0


@contextmanager
def silent_listener() -> Iterator[int]:
    """A port that takes connections and never says a word: the worst of collectors."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(16)
        yield listener.getsockname()[1]


def exporting(journal: Journal, protocol: str, port: int, monkeypatch: pytest.MonkeyPatch) -> Exporter:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    exporter = start(journal.recorder, Settings.from_environ(os.environ))
    assert exporter is not None
    return exporter


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_p4_stop_and_flush_end_in_time_with_nobody_there(
    journal: Journal, protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter = exporting(journal, protocol, free_port(), monkeypatch)
    assert took(lambda: exporter.flush(0.3)) < 0.3 + SLACK_S
    assert took(lambda: exporter.stop(0.5)) < 0.5 + SLACK_S


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_p4_stop_and_flush_end_in_time_with_a_collector_that_hangs(
    journal: Journal, protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with silent_listener() as port:
        exporter = exporting(journal, protocol, port, monkeypatch)
        assert took(lambda: exporter.flush(0.3)) < 0.3 + SLACK_S
        assert not exporter.flush(0.1)  # The first one still hangs.
        assert took(lambda: exporter.stop(0.5)) < 0.5 + SLACK_S


def test_recording_never_waits(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "10")
    with silent_listener() as port:
        exporter = exporting(journal, "http/protobuf", port, monkeypatch)
        time.sleep(0.1)  # By now its thread hangs.
        seconds = took(lambda: [journal.transfer(0.1) or journal.look_up(1) for _ in range(1000)])
        assert seconds < 2.0
        exporter.stop(0.1)


def test_flush_and_stop_raise_nothing(journal: Journal) -> None:
    class Raising(MeterProvider):
        def force_flush(self, timeout_millis: float = 10_000) -> bool:
            raise ValueError("no")

        def shutdown(self, timeout_millis: float = 30_000) -> None:
            raise ValueError("no")

    provider = Raising(shutdown_on_exit=False)
    instruments = Instruments(provider, histograms=False)
    exporter = Exporter(
        journal.recorder, instruments, provider, own=True, replay=None, servers=(), endpoints=["nowhere"]
    )
    assert not exporter.flush(1)
    assert exporter.stop(1)
    assert exporter.endpoints == ["nowhere"]


def test_a_flush_that_a_signal_ends_does_not_spoil_the_next(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> bool:
        raise SystemExit(3)

    provider = MeterProvider(shutdown_on_exit=False)
    instruments = Instruments(provider, histograms=False)
    exporter = Exporter(journal.recorder, instruments, provider, own=True, replay=None, servers=(), endpoints=())
    with monkeypatch.context() as patch:
        patch.setattr("kvcache_otel.export.exporter.run_within", interrupted)
        with pytest.raises(SystemExit):
            exporter.flush(1)
    assert exporter.flush(1)
    assert exporter.stop(1)


def test_stop_twice(journal: Journal, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "prometheus")
    monkeypatch.setenv("OTEL_EXPORTER_PROMETHEUS_PORT", "0")
    exporter = start(journal.recorder, Settings.from_environ(os.environ))
    assert exporter is not None
    assert exporter.stop(5)
    assert exporter.stop(5)
    assert said(caplog) == []


def test_stop_leaves_no_thread(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(threading.enumerate())
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "prometheus,console")
    monkeypatch.setenv("OTEL_EXPORTER_PROMETHEUS_PORT", "0")
    exporter = start(journal.recorder, Settings.from_environ(os.environ))
    assert exporter is not None
    assert exporter.flush(5)
    assert exporter.stop(5)
    wait_until(lambda: set(threading.enumerate()) <= before)


PROCESS = """
import os, sys, time
from kvcache_otel import semconv
from kvcache_otel.identity import Identity
from kvcache_otel.record.recorder import Recorder
from kvcache_otel.export.provider import start
from kvcache_otel.export.settings import Settings

recorder = Recorder(Identity("custom", "ToyCache"))
recorder.counter(semconv.LOOKUP_TOKENS, {"kvcache.tier": "host"}).add(7)
exporter = start(recorder, Settings.from_environ(os.environ))
print("up", flush=True)
"""


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_a_process_exits_in_time_with_a_collector_that_hangs(protocol: str) -> None:
    with silent_listener() as port:
        environ = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
            "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
        }
        # 3 s is the deadline; an OTLP export alone would hang for 10 s.
        assert exit_seconds(PROCESS, environ) < 3.0 + SLACK_S


def test_a_process_exports_a_last_time_when_it_exits() -> None:
    bodies: list[bytes] = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        environ = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
            "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        }
        assert exit_seconds(PROCESS, environ) < 3.0
        server.shutdown()
    assert len(bodies) == 1
    assert b"kvcache.lookup.tokens" in bodies[0]


FORK = (
    PROCESS
    + """
pid = os.fork()
if pid == 0:
    recorder.counter(semconv.LOOKUP_TOKENS, {"kvcache.tier": "host"}).add(1)
    begun = time.monotonic()
    time.sleep(0.5)  # Two intervals.
    assert not exporter.flush(1)
    assert exporter.stop(1)
    assert time.monotonic() - begun < 1
    sys.exit(17)
_, status = os.waitpid(pid, 0)
assert os.waitstatus_to_exitcode(status) == 17
print("parent", exporter.flush(5), flush=True)
"""
)


def test_p2_a_forked_child_exports_nothing() -> None:
    output = run(FORK, {"OTEL_METRICS_EXPORTER": "console", "OTEL_METRIC_EXPORT_INTERVAL": "200"})
    assert "parent True" in output
    assert '"value": 7' in output
    assert '"value": 8' not in output


THEIRS = """
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from tests.export.journal import Journal, points

reader = InMemoryMetricReader()
provider = MeterProvider(metric_readers=[reader])

def tokens():
    return [point.value for point in points(reader.get_metrics_data(), "kvcache.lookup.tokens")]

def begin(count):
    journal = Journal(replay=True)
    journal.look_up(count)
    journal.transfer(0.5)
    return journal, start(journal.recorder, Settings(), meter_provider=provider)

journal, exporter = begin(10)
assert tokens() == [10]
pid = os.fork()
if pid == 0:
    journal.look_up(1)
    assert tokens() == []
    mine, _ = begin(1)
    assert tokens() == [1]
    sys.exit(17)
_, status = os.waitpid(pid, 0)
assert os.waitstatus_to_exitcode(status) == 17
assert tokens() == [10]
print("right")
"""


def test_p2_a_forked_child_counts_from_nothing_in_a_provider_it_has_inherited() -> None:
    imports = PROCESS.partition("recorder = ")[0]
    assert run(imports + THEIRS, {"PYTHONPATH": os.pathsep.join(["src", "."])}) == "right\n"


FILE = """
from tests.export.journal import Journal, points

def collected(provider):
    seen = []
    for reader in readers_of(provider):
        reader._exporter.export = lambda data, **_: seen.append(data)  # Before any interval is over.
    provider.force_flush()
    return [point.count for data in seen for point in points(data, "kvcache.transfer.duration")]

def begin(samples):
    journal = Journal(replay=True)
    exporter = start(journal.recorder, Settings.from_environ(os.environ))
    assert exporter is not None
    journal.transfer(*samples)
    assert exporter.flush(5)
    return process_provider()

provider = begin([0.5, 0.5])
assert collected(provider) == [2]
pid = os.fork()
if pid == 0:
    assert collected(provider) == []
    assert process_provider() is None
    mine = begin([0.5])
    assert mine is not provider
    assert collected(mine) == [1]
    os._exit(17)
_, status = os.waitpid(pid, 0)
assert os.waitstatus_to_exitcode(status) == 17
assert process_provider() is provider
assert collected(provider) == [2]
print("right")
"""


def test_a_forked_child_does_not_tell_what_the_parent_counted_through_a_file(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.configuration")
    path = tmp_path / "otel.yaml"
    path.write_text(
        "file_format: '1.0'\nmeter_provider:\n  readers:\n    - periodic:\n        exporter: {console: {}}\n"
    )
    imports = PROCESS.partition("recorder = ")[0] + (
        "from kvcache_otel.export.provider import process_provider\n"
        "from kvcache_otel.export.foreign import readers_of\n"
    )
    environ = {"OTEL_CONFIG_FILE": str(path), "PYTHONPATH": os.pathsep.join(["src", "."])}
    assert run(imports + FILE, environ).splitlines()[-1] == "right"


def test_a_forked_child_does_not_hold_the_port() -> None:
    code = (
        PROCESS
        + """
import socket
[port] = exporter.ports
pid = os.fork()
if pid == 0:
    time.sleep(30)
    os._exit(0)
exporter.stop(5)
try:
    for _ in range(100):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                print("free", flush=True)
                break
        time.sleep(0.1)
finally:
    os.kill(pid, 9)
    os.waitpid(pid, 0)
"""
    )
    environ = {"OTEL_METRICS_EXPORTER": "prometheus", "OTEL_EXPORTER_PROMETHEUS_PORT": "0"}
    assert "free" in run(code, environ)


def took(action: Any) -> float:
    begun = time.monotonic()
    action()
    return time.monotonic() - begun


def run(code: str, environ: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def exit_seconds(code: str, environ: dict[str, str]) -> float:
    """Returns how long a process took from its last statement to its end."""
    with subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, **environ}, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        begun = time.monotonic()
        assert process.wait(timeout=60) == 0
        return time.monotonic() - begun
