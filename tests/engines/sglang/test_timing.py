"""Where the durations of copies between device and host come from, with SGLang's own events and without."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tests.conftest import require

require("sglang")

from sglang.srt.mem_cache import l2_transfer  # noqa: E402

from kvcache_otel import semconv  # noqa: E402
from tests.engines.sglang import cpu  # noqa: E402
from tests.engines.sglang.cache_driver import PAGE, CacheDriver  # noqa: E402
from tests.engines.sglang.expected import BACKUP, LOAD_BACK, assert_equals_sglang  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.engines.sglang.conftest import Instrumented
    from tests.support.rows import Rows

pytestmark = pytest.mark.engine

A = list(range(4 * PAGE))


class Script:
    """Fake events of a device on which a copy takes as long as the test says, and is done when it says.

    Attributes:
        now: The device's clock, in milliseconds.
        is_done: Whether copies that were begun are done.
        read_too_early: How often an elapsed time was asked for before its end event was done.
        synchronised: How often somebody waited for an event.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.is_done = True
        self.read_too_early = 0
        self.synchronised = 0


class ScriptedEvent:
    """A fake of a device's event."""

    script: Script

    def __init__(self, enable_timing: bool = False) -> None:
        self.enable_timing = enable_timing
        self.at: float | None = None

    def record(self, stream: Any = None) -> None:
        self.at = self.script.now
        self.script.now += 40.0  # Whatever comes between two events takes 40 ms.

    def query(self) -> bool:
        return self.script.is_done

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        self.script.synchronised += 1

    def elapsed_time(self, end: ScriptedEvent) -> float:
        if not self.script.is_done:
            self.script.read_too_early += 1
        assert self.at is not None
        assert end.at is not None
        assert self.enable_timing
        return end.at - self.at


def _device(event: Any) -> Any:
    """The CPU as a device whose events are these."""
    names = {name: getattr(cpu.torch.cpu, name) for name in ("Stream", "stream", "current_stream")}
    return SimpleNamespace(**names, **({} if event is None else {"Event": event}), __name__="scripted")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any], None]]:
    """Gives SGLang's copies a device with other events."""

    def use(event: Any) -> None:
        monkeypatch.setattr(l2_transfer, "device_module", _device(event))
        l2_transfer._timing_events_supported.cache_clear()

    yield use
    monkeypatch.undo()
    l2_transfer._timing_events_supported.cache_clear()


@pytest.fixture
def script() -> Script:
    ScriptedEvent.script = Script()
    return ScriptedEvent.script


def _copy_both_ways(driver: CacheDriver) -> None:
    driver.insert(A)
    driver.settle()
    driver.evict(1000)
    driver.load_back(A)
    driver.settle()


def test_t1_the_time_is_the_devices(
    make: Callable[..., CacheDriver], instrumented: Instrumented, script: Script, device: Callable[[Any], None]
) -> None:
    """T1: the copies' launches take microseconds, the copies 40 ms."""
    device(ScriptedEvent)
    driver = make()
    script.is_done = False
    driver.insert(A)
    for _ in range(3):
        driver.step()
    assert _samples(instrumented.rows, timing="device_event", **BACKUP) == (0, 0.0)
    assert instrumented.rows.value(semconv.TRANSFER_ACTIVE, **BACKUP) == 1
    script.is_done = True
    driver.settle()
    driver.evict(1000)
    driver.load_back(A)
    driver.settle()
    rows = instrumented.rows
    for route in (BACKUP, LOAD_BACK):
        samples, total = _samples(rows, timing="device_event", **route)
        assert (samples, total) == (1, pytest.approx(0.040))
    assert script.read_too_early == 0
    assert script.synchronised == 2  # SGLang's own, one for each acknowledgement.
    assert_equals_sglang(rows, driver)


class _Untimed(ScriptedEvent):
    """An event that takes no timing flag."""

    def __init__(self) -> None:
        super().__init__()


class _Refusing(ScriptedEvent):
    """An event of a device that has the flag and cannot do it."""

    def __init__(self, enable_timing: bool = False) -> None:
        if enable_timing:
            raise NotImplementedError("no timing on this device")
        super().__init__()


@pytest.mark.parametrize("event", [_Untimed, _Refusing])
def test_t2_without_timed_events_the_clock_on_the_wall_says_so(
    make: Callable[..., CacheDriver],
    instrumented: Instrumented,
    script: Script,
    device: Callable[[Any], None],
    event: type[ScriptedEvent],
) -> None:
    """T2: no device_event sample, the transfers still count, never an exception."""
    device(event)
    driver = make()
    _copy_both_ways(driver)
    _assert_the_wall_clock_says_so(instrumented.rows)
    assert_equals_sglang(instrumented.rows, driver, timing="wall_clock")
    assert script.synchronised == 2


def test_t2_a_device_without_events(
    make: Callable[..., CacheDriver],
    instrumented: Instrumented,
    script: Script,
    device: Callable[[Any], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """T2: the device's module has no class `Event`. SGLang makes no copy there unless it gets events elsewhere."""
    device(None)
    monkeypatch.setattr(l2_transfer, "make_timing_event_pair", lambda: (ScriptedEvent(), ScriptedEvent(), False))
    monkeypatch.setattr(
        l2_transfer.L2TransferEngine, "_start_event", staticmethod(lambda event: event or ScriptedEvent())
    )
    with pytest.raises(AttributeError):
        l2_transfer._timing_events_supported()
    driver = make()
    _copy_both_ways(driver)
    _assert_the_wall_clock_says_so(instrumented.rows)
    assert_equals_sglang(instrumented.rows, driver, timing="wall_clock")
    assert script.synchronised == 2


def test_events_of_ours_where_sglang_uses_none(
    make: Callable[..., CacheDriver],
    instrumented: Instrumented,
    script: Script,
    device: Callable[[Any], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device(ScriptedEvent)
    monkeypatch.setattr(l2_transfer, "_timing_events_supported", lambda: False)
    monkeypatch.setattr(
        l2_transfer, "make_timing_event_pair", lambda: (ScriptedEvent(False), ScriptedEvent(False), False)
    )
    driver = make()
    _copy_both_ways(driver)
    rows = instrumented.rows
    for route in (BACKUP, LOAD_BACK):
        samples, total = _samples(rows, timing="device_event", **route)
        assert samples == 1
        assert total >= 0.040
        assert rows.histogram(semconv.TRANSFER_DURATION, timing="wall_clock", **route) is None
    assert script.read_too_early == 0
    assert script.synchronised == 2
    monkeypatch.undo()


def test_an_event_that_cannot_be_read_costs_its_sample_alone(
    make: Callable[..., CacheDriver], instrumented: Instrumented, script: Script, device: Callable[[Any], None]
) -> None:
    class Lost(ScriptedEvent):
        def elapsed_time(self, end: ScriptedEvent) -> float:
            raise RuntimeError("the device is gone")

    device(Lost)
    driver = make(metrics=False)  # SGLang would ask too, and die of it.
    _copy_both_ways(driver)
    rows = instrumented.rows
    assert rows.value(semconv.TRANSFER_OPERATIONS, **BACKUP) == 1
    assert _samples(rows, timing="device_event", **BACKUP)[0] == 0
    assert rows.value(semconv.TELEMETRY_DROPPED, reason="event_lost") == 2
    instrumented.forgive(semconv.TELEMETRY_DROPPED)


def _assert_the_wall_clock_says_so(rows: Rows) -> None:
    """One copy each way, timed by the clock on the wall alone. None has failed."""
    for route in (BACKUP, LOAD_BACK):
        assert rows.value(semconv.TRANSFER_OPERATIONS, **route) == 1
        assert rows.total(semconv.TRANSFER_OPERATIONS, **route) == 1
        assert _samples(rows, timing="wall_clock", **route)[0] == 1
        assert rows.histogram(semconv.TRANSFER_DURATION, timing="device_event", **route) is None
        assert rows.value(semconv.TRANSFER_IO, timing="wall_clock", **route)
        assert rows.value(semconv.TRANSFER_IO, timing="device_event", **route) is None


def _samples(rows: Rows, **labels: str) -> tuple[int, float]:
    histogram = rows.histogram(semconv.TRANSFER_DURATION, **labels)
    assert histogram is not None
    counts, total = histogram.read()
    return sum(counts), total
