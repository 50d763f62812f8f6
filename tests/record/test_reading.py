"""The thread that reads pairs wakes up seldom, and no collection is late for that."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from kvcache_otel import semconv
from kvcache_otel.export.instruments import Instruments
from kvcache_otel.identity import Identity
from kvcache_otel.record import reading, timing
from kvcache_otel.record.probe import CacheProbe
from kvcache_otel.record.reading import ReadingThread, Round
from kvcache_otel.record.recorder import Recorder
from kvcache_otel.record.transfers import Transfers
from tests.record.test_timing import FakeEvent, HangingEvent
from tests.support.processes import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

GONE = float("inf")


class Clock:
    """A thread's bell, on which it waits in no time at all, and the copies that it finds meanwhile.

    Attributes:
        now: The time, in seconds.
        waits: How long it waited each time; infinity where it slept until it was called.
        rounds: How often it looked.
    """

    def __init__(self, copies: Sequence[tuple[float, float]]) -> None:
        """Args:
        copies: When each is handed over, and how long it takes.
        """
        self.now, self.waits, self.rounds = 0.0, list[float](), 0
        self._copies = sorted(copies)

    def acquire(self, timeout: float = GONE) -> None:
        self.waits.append(timeout)
        if timeout == GONE:  # Whoever hands over the next rings.
            self.now = next((began for began, _ in self._copies if began > self.now), GONE)
        else:
            self.now += timeout

    def locked(self) -> bool:
        return True

    def read(self, _: int | None, __: float | None) -> Round:
        self.rounds += 1
        begun = [copy for copy in self._copies if copy[0] <= self.now]
        done = [copy for copy in begun if sum(copy) <= self.now]
        self._copies = [copy for copy in self._copies if copy not in done]
        left = len(begun) - len(done)
        return Round(len(done), left, max((took for _, took in done), default=0.0), last=not self._copies)

    def is_empty(self) -> bool:
        return not any(began <= self.now for began, _ in self._copies)


def run(copies: Sequence[tuple[float, float]]) -> Clock:
    clock = Clock(copies)
    thread: Any = ReadingThread(clock.read, clock.is_empty)
    thread._bell = clock
    thread._rounds()
    return clock


def every(gap: float, took: float, count: int) -> list[tuple[float, float]]:
    return [(number * gap, took) for number in range(count)]


@pytest.mark.parametrize(
    ("gap", "took", "most"),
    [
        (0.001, 0.0005, 0.02),
        (0.001, 0.00095, 0.02),
        (0.01, 0.001, 0.15),
        (0.01, 0.009, 0.15),
        (0.1, 0.05, 1.7),
        (1, 0.03, 5),
    ],
)
def test_so_many_copies_are_found_by_so_few_looks(gap: float, took: float, most: float) -> None:
    copies = every(gap, took, 1000)
    clock = run(copies)
    assert clock.rounds / len(copies) <= most
    assert clock.now >= copies[-1][0] + took


def test_a_copy_that_takes_what_the_last_one_took_is_found_at_the_second_look() -> None:
    clock = run([(0.0, 0.05), (20.0, 0.05)])
    slept = clock.waits.index(GONE)
    assert clock.waits[slept + 1 :] == [0.05]


def test_the_first_copy_is_found_when_half_of_what_it_took_has_passed_again_at_the_latest() -> None:
    for took in (0.0015, 0.01, 0.06):
        clock = run([(0.0, took)])
        assert took <= clock.now <= 2 * took + reading.SHORTEST_S


def test_it_sleeps_when_nothing_has_come_for_some_seconds() -> None:
    clock = run([(0.0, 0.001), (1000.0, 0.001)])
    slept = clock.waits.index(GONE)
    assert sum(clock.waits[:slept]) < 5
    assert slept < 10


def test_it_does_not_sleep_while_copies_come_every_second() -> None:
    assert GONE not in run(every(1, 0.03, 100)).waits


@pytest.fixture
def napping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the thread nap for longer than any test takes."""
    for name in ("SHORTEST_S", "LONGEST_S", "NAP_S"):
        monkeypatch.setattr(reading, name, 1000.0)
    monkeypatch.setattr(ReadingThread, "_await", staticmethod(_await))


def _await(done: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not done() and time.monotonic() < deadline:
        time.sleep(0.001)


class Scene:
    """A recorder, and a provider of somebody else's that reads it."""

    def __init__(self) -> None:
        identity = Identity("custom", "Own")
        self.recorder = Recorder(identity)
        self.probe = CacheProbe(self.recorder, identity)
        self.route = self.probe.route("device", "host", timing="device_event")
        self.reader = InMemoryMetricReader()
        Instruments(MeterProvider([self.reader], shutdown_on_exit=False), histograms=False).bind(self.recorder)

    @property
    def samples(self) -> int:
        return sum(self.route.duration.read()[0])

    @property
    def lost(self) -> int | float:
        return sum(point.value for point in self.recorder.points(semconv.TELEMETRY_DROPPED))


class FakeDone(FakeEvent):
    """An event that is done as soon as it is recorded."""

    def record(self, _: object) -> None:
        """Does nothing."""


@pytest.mark.usefixtures("napping")
def test_a_collection_has_what_the_device_is_done_with() -> None:
    scene, end = Scene(), FakeEvent(1.0, passed=False)
    scene.route.timed(FakeEvent(0.0), end)
    assert scene.recorder.harvester._reader is not None
    wait_until(lambda: end.queries == 1)
    end.passed = True
    time.sleep(0.01)
    assert scene.samples == 0
    scene.reader.get_metrics_data()
    assert scene.samples == 1
    assert list(scene.recorder.points(semconv.TELEMETRY_DROPPED))
    scene.recorder.harvester.stop(20)


@pytest.mark.parametrize("by_hand", [True, False])
def test_a_burst_wakes_who_naps_before_there_is_no_room(monkeypatch: pytest.MonkeyPatch, *, by_hand: bool) -> None:
    monkeypatch.setattr(reading, "LONGEST_S", 1000.0)
    scene = Scene()
    harvester = scene.recorder.harvester
    copies = Transfers(scene.probe, "device", "host", timing="device_event", make_event=lambda: FakeDone(1.0))
    scene.route.timed(FakeEvent(0.0), FakeEvent(1.0))
    wait_until(lambda: scene.samples == 1)
    stream = object()
    for number in range(timing.LIMIT + 1024):
        if by_hand:
            copies.begin(stream=stream).end()
        else:
            scene.route.timed(FakeEvent(0.0), FakeEvent(1.0))
        if number % 512 == 0:
            wait_until(lambda: len(harvester._pairs) < 2 * (timing.CROWD + 1))
    assert scene.lost == 0
    harvester.stop(20)
    assert scene.samples == 1 + timing.LIMIT + 1024


def test_a_collection_waits_for_no_device_that_does_not_answer() -> None:
    scene, end = Scene(), HangingEvent(1.0)
    scene.route.timed(FakeEvent(0.0), end)
    scene.route.timed(FakeEvent(0.0), FakeEvent(1.0))
    assert end.asked.wait(20)
    began = time.monotonic()
    scene.reader.get_metrics_data()
    assert timing.FRESHEN_S <= time.monotonic() - began < 1
    end.answer.set()
    scene.recorder.harvester.stop(20)


def test_a_collection_starts_no_thread() -> None:
    scene, before = Scene(), threading.active_count()
    scene.reader.get_metrics_data()
    assert threading.active_count() == before
