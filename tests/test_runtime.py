"""What holds a process together: one recorder for a provider, nothing after the end, nobody's lock in a child."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from kvcache_otel import semconv
from kvcache_otel.export.settings import Settings
from kvcache_otel.identity import Identity
from kvcache_otel.instrumentation import Instrumentation
from kvcache_otel.runtime import Runtime
from tests.support.processes import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcache_otel.record.probe import Route

IDENTITY = Identity("custom", "Cache")
NOTHING = Settings.from_environ({})


def _points(reader: InMemoryMetricReader, name: str) -> list[Any]:
    data = reader.get_metrics_data()
    return [
        point
        for metrics in (data.resource_metrics if data is not None else ())
        for scope in metrics.scope_metrics
        for metric in scope.metrics
        if metric.name == name
        for point in metric.data.data_points
    ]


def _hits(reader: InMemoryMetricReader) -> int | float:
    (value,) = (
        point.value
        for point in _points(reader, semconv.LOOKUP_BLOCKS.name)
        if point.attributes[semconv.KVCACHE_LOOKUP_RESULT] == "hit"
    )
    return value


def test_a_provider_that_was_used_before_goes_on_counting() -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], shutdown_on_exit=False)
    for hits, total in ((100, 100), (10, 110)):
        runtime = Runtime(NOTHING, meter_provider=provider)
        runtime.probe(IDENTITY).lookups("host").hits.add(hits)
        assert _hits(reader) == total
        runtime.stop()
    other = InMemoryMetricReader()
    runtime = Runtime(NOTHING, meter_provider=MeterProvider([other], shutdown_on_exit=False))
    runtime.probe(IDENTITY).lookups("host").hits.add(1)
    assert _hits(other) == 1
    runtime.stop()


def test_after_the_end_nothing_is_started() -> None:
    runtime = Runtime(Settings.from_environ({"OTEL_METRICS_EXPORTER": "prometheus"}))
    runtime.stop()
    runtime.probe(IDENTITY).lookups("host").hits.add(1)
    assert runtime.exporter is None
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvcache-prometheus")]


def test_stopping_from_a_signal_handler_waits_for_nobody() -> None:
    runtime = Runtime(NOTHING)
    with runtime._lock:  # The handler interrupts what its own thread does.
        previous = signal.signal(signal.SIGUSR1, lambda *_: runtime.stop(0.1))
        try:
            os.kill(os.getpid(), signal.SIGUSR1)
        finally:
            signal.signal(signal.SIGUSR1, previous)


def test_an_engine_that_was_detached_meanwhile_gets_no_adapter() -> None:
    instrumentation = Instrumentation()
    instrumentation.attach("vllm", NOTHING)
    instrumentation.detach()
    with pytest.raises(LookupError, match="vllm"):
        instrumentation._adapter("vllm")
    assert instrumentation.runtime is None


@pytest.mark.parametrize("make", [Instrumentation, lambda: Runtime(NOTHING)], ids=["instrumentation", "runtime"])
def test_a_forked_child_inherits_nobodys_lock(make: Callable[[], Instrumentation | Runtime]) -> None:
    held, done = threading.Event(), threading.Event()
    holder = make()

    def hold() -> None:
        with holder._lock:
            held.set()
            done.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(30)
    child = os.fork()
    if child == 0:
        os._exit(0 if holder._lock.acquire(timeout=5) else 1)
    _, status = os.waitpid(child, 0)
    done.set()
    thread.join()
    assert os.waitstatus_to_exitcode(status) == 0


class FakeEvent:
    """Stands in for a device's event that it has passed, or has not, or that does not answer for a while."""

    def __init__(self, at_ms: float, *, passed: bool = True, hangs_s: float = 0.0) -> None:
        self.at_ms = at_ms
        self.passed = passed
        self.hangs_s = hangs_s

    def query(self) -> bool:
        time.sleep(self.hangs_s)
        return self.passed

    def elapsed_time(self, end: Any) -> float:
        return end.at_ms - self.at_ms


def _with_reader() -> tuple[Runtime, Route, InMemoryMetricReader]:
    reader = InMemoryMetricReader()
    runtime = Runtime(NOTHING, meter_provider=MeterProvider([reader], shutdown_on_exit=False))
    return runtime, runtime.probe(IDENTITY).route("device", "host", timing="device_event"), reader


def _durations(reader: InMemoryMetricReader) -> list[tuple[int, float]]:
    return [(point.count, point.sum) for point in _points(reader, semconv.TRANSFER_DURATION.name)]


def test_flush_exports_the_time_of_every_copy_that_is_done_and_waits_for_no_other() -> None:
    runtime, route, reader = _with_reader()
    under_way = FakeEvent(8.0, passed=False)
    route.timed(FakeEvent(0.0), under_way)
    route.timed(FakeEvent(0.0), FakeEvent(40.0))
    before = time.monotonic()
    assert runtime.flush(20)
    assert time.monotonic() - before < 5
    assert _durations(reader) == [(1, 0.04)]
    under_way.passed = True
    assert runtime.flush(20)
    assert _durations(reader) == [(2, 0.048)]
    runtime.stop()


def test_stop_exports_the_time_of_every_copy_that_is_done_and_counts_the_others() -> None:
    runtime, route, reader = _with_reader()
    assert runtime.recorder is not None
    lost = runtime.recorder.dropped(semconv.Reason.EVENT_LOST)
    route.timed(FakeEvent(0.0), FakeEvent(8.0, passed=False))
    route.timed(FakeEvent(0.0), FakeEvent(40.0))
    runtime.stop(20)
    assert _durations(reader) == [(1, 0.04)]
    assert lost.value == 1
    wait_until(lambda: not [thread for thread in threading.enumerate() if thread.name == "kvcache-otel-harvester"])


def test_a_provider_that_was_used_before_gets_the_times_of_later_copies_too() -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], shutdown_on_exit=False)
    for count in (1, 2, 3):
        runtime = Runtime(NOTHING, meter_provider=provider)
        runtime.probe(IDENTITY).route("device", "host").timed(FakeEvent(0.0), FakeEvent(40.0))
        runtime.stop(20)
        assert [found for found, _ in _durations(reader)] == [count]


@pytest.mark.parametrize("end", ["flush", "stop"])
def test_a_device_that_does_not_answer_leaves_the_export_its_share_of_the_time(
    monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    runtime, route, _ = _with_reader()
    assert runtime.exporter is not None
    given: list[float] = []
    export = getattr(runtime.exporter, end)
    monkeypatch.setattr(runtime.exporter, end, lambda timeout_s: given.append(timeout_s) or export(timeout_s))
    route.timed(FakeEvent(0.0), FakeEvent(8.0, hangs_s=2.0))
    before = time.monotonic()
    getattr(runtime, end)(1.0)
    assert time.monotonic() - before < 1.8
    assert 0.3 < given[0] < 0.6
    runtime.stop(20)


EXIT = """
import time
from kvcache_otel.export.settings import Settings
from kvcache_otel.identity import Identity
from kvcache_otel.runtime import Runtime
from tests.test_runtime import FakeEvent

runtime = Runtime(Settings.from_environ({"OTEL_METRICS_EXPORTER": "console"}))
end = FakeEvent(40.0, passed=False)
runtime.probe(Identity("custom", "Cache")).route("device", "host").timed(FakeEvent(0.0), end)
time.sleep(0.2)  # Now the thread asks every 20 ms only.
end.passed = True
"""


def test_a_process_that_ends_exports_the_time_of_every_copy_that_is_done() -> None:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(["src", "."])}
    done = subprocess.run([sys.executable, "-c", EXIT], env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert '"sum": 0.04' in done.stdout
