"""What holds a process together: one recorder for a provider, nothing after the end, nobody's lock in a child."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from kvcache_otel import semconv
from kvcache_otel.export.settings import Settings
from kvcache_otel.identity import Identity
from kvcache_otel.instrumentation import Instrumentation
from kvcache_otel.runtime import Runtime

if TYPE_CHECKING:
    from collections.abc import Callable

IDENTITY = Identity("custom", "Cache")
NOTHING = Settings.from_environ({})


def _hits(reader: InMemoryMetricReader) -> int | float:
    data = reader.get_metrics_data()
    assert data is not None
    (value,) = (
        point.value
        for metrics in data.resource_metrics
        for scope in metrics.scope_metrics
        for metric in scope.metrics
        if metric.name == semconv.LOOKUP_BLOCKS.name
        for point in metric.data.data_points
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
