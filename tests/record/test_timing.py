"""Every event pair ends as one sample or one dropped measurement, and the engine's thread waits for none of them."""

from __future__ import annotations

import gc
import itertools
import logging
import math
import os
import random
import signal
import sys
import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

import pytest

from kvcache_otel import semconv
from kvcache_otel.identity import Identity
from kvcache_otel.record import asking, reading, timing
from kvcache_otel.record.cells import Counter, Histogram
from kvcache_otel.record.doubts import Doubts
from kvcache_otel.record.pair import Outcome, Pair
from kvcache_otel.record.timing import Harvester
from tests.record.test_cells import Span
from tests.support.processes import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from kvcache_otel.record.asking import Asking
    from kvcache_otel.record.reading import Round
    from kvcache_otel.record.streams import Lane

THREAD = "kvcache-otel-harvester"
BOUNDS = semconv.TRANSFER_DURATION.bounds
ENOUGH_S = 20.0


class FakeEvent:
    """Stands in for `torch.cuda.Event`: the device passes it when the test says so, by a clock of its own.

    Attributes:
        at_ms: When the device passes it.
        passed: Whether it has.
        queries: How often it was asked.
        askers: The names of the threads that asked.
        readers: The names of the threads that read a time from it, once for each time.
    """

    def __init__(self, at_ms: Any, *, passed: bool = True) -> None:
        self.at_ms = at_ms
        self.passed = passed
        self.queries = 0
        self.askers: set[str] = set()
        self.readers: list[str] = []

    def query(self) -> bool:
        self.queries += 1
        self.askers.add(threading.current_thread().name)
        return self.passed

    def elapsed_time(self, end: Any) -> float:
        if not end.passed:
            raise RuntimeError("device not ready")
        self.readers.append(threading.current_thread().name)
        return end.at_ms - self.at_ms

    def synchronize(self) -> None:
        pytest.fail("somebody waits for the device")


class RaisingEvent(FakeEvent):
    """Raises when it is asked, or when it is read."""

    def __init__(self, error: BaseException, *, when_asked: bool) -> None:
        super().__init__(0.0)
        self.error = error
        self.when_asked = when_asked

    def query(self) -> bool:
        if self.when_asked:
            raise self.error
        return super().query()

    def elapsed_time(self, end: Any) -> float:
        raise self.error


class HangingEvent(FakeEvent):
    """Does not answer until the test lets it."""

    def __init__(self, at_ms: float) -> None:
        super().__init__(at_ms)
        self.asked = threading.Event()
        self.answer = threading.Event()

    def query(self) -> bool:
        self.asked.set()
        self.answer.wait(ENOUGH_S)
        return super().query()


class Device:
    """A harvester, and what has become of the pairs that it was given.

    Attributes:
        harvester: The harvester.
        duration: Where durations go.
    """

    def __init__(self, **options: Any) -> None:
        doubts = Doubts(Identity("custom", "Own"), pytest.fail)
        self._lost, self._overflowed = Counter(pytest.fail), Counter(pytest.fail)
        doubts.dropped = {"event_lost": self._lost, "queue_full": self._overflowed}
        self.harvester = Harvester(doubts, **options)
        self.duration = Histogram(BOUNDS, pytest.fail)

    def copy(self, milliseconds: Any, *, passed: bool = True) -> FakeEvent:
        """Hands over the events around a copy; returns the one at its end, which the device has passed or not."""
        end = FakeEvent(milliseconds, passed=passed)
        self.add(FakeEvent(0), end)
        return end

    def add(self, start: FakeEvent, end: FakeEvent) -> None:
        self.harvester.add(start, end, self.duration)

    def hang(self) -> HangingEvent:
        """Hands over a pair whose device does not answer, and waits until it is asked."""
        end = HangingEvent(1.0)
        self.add(FakeEvent(0.0), end)
        assert end.asked.wait(ENOUGH_S)
        return end

    def settled(self) -> bool:
        return self.harvester.flush(ENOUGH_S)

    @property
    def samples(self) -> int:
        return sum(self.duration.read()[0])

    @property
    def seconds(self) -> float:
        return self.duration.read()[1]

    @property
    def lost(self) -> int | float:
        return self._lost.value

    @property
    def overflowed(self) -> int | float:
        return self._overflowed.value


def waiting(start: FakeEvent, end: FakeEvent, duration: Histogram) -> Pair:
    """A pair that was handed over just now."""
    pair = Pair(start, end, duration)
    pair.added = time.monotonic()
    pair.until = pair.added + ENOUGH_S
    return pair


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == THREAD]


@pytest.fixture(autouse=True)
def naps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the thread sleep as soon as there is nothing to ask, and not look again for a while first."""
    monkeypatch.setattr(reading, "NAPS", 0)


@pytest.fixture
def make() -> Generator[Callable[..., Device]]:
    devices: list[Device] = []

    def make(**options: Any) -> Device:
        devices.append(Device(**options))
        return devices[-1]

    yield make
    for device in devices:
        device.harvester.stop(ENOUGH_S)
    wait_until(lambda: not threads())


@pytest.fixture
def device(make: Callable[..., Device]) -> Device:
    return make()


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger=timing.__name__)
    return caplog


@pytest.fixture
def hasty_switches() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


# ------------------------------------------------------------------------------------------------ what is read


def test_a_copy_of_40_ms_takes_40_ms_however_soon_its_launch_returned(device: Device) -> None:
    start, end = FakeEvent(0.0), FakeEvent(40.0, passed=False)
    launched = time.perf_counter()
    device.add(start, end)
    host = time.perf_counter() - launched
    assert not device.harvester.flush(ENOUGH_S)
    assert (device.samples, start.readers) == (0, [])
    end.passed = True
    assert device.settled()
    assert (device.samples, device.seconds, device.lost) == (1, 0.04, 0)
    assert (start.askers, end.askers, start.readers) == (set(), {THREAD}, [THREAD])
    assert host < 0.04


def test_nobody_has_to_ask_for_what_is_done(device: Device) -> None:
    end = device.copy(3.0, passed=False)
    wait_until(lambda: end.queries > 2)
    end.passed = True
    wait_until(lambda: device.samples == 1)


def test_durations_from_milliseconds_to_a_minute_are_in_buckets_of_their_own(device: Device) -> None:
    for milliseconds in (3.0, 200.0, 1_700.0, 45_000.0):
        device.copy(milliseconds)
    assert device.settled()
    counts, total = device.duration.read()
    filled = {BOUNDS[index]: count for index, count in enumerate(counts) if count}
    assert filled == {0.005: 1, 0.2: 1, 2: 1, 60: 1}
    assert total == 0.003 + 0.2 + 1.7 + 45.0


def test_samples_and_their_sum_are_the_engines_own_to_the_last_bit(device: Device) -> None:
    draw = random.Random(7)
    samples = [draw.uniform(0.0, 500.0) for _ in range(1_000)]
    alone = [Histogram(BOUNDS, pytest.fail) for _ in samples]
    engine = 0.0
    for milliseconds, histogram in zip(samples, alone, strict=True):
        device.copy(milliseconds)
        device.harvester.add(FakeEvent(0.0), FakeEvent(milliseconds), histogram)
        engine += milliseconds / 1000.0
    assert device.settled()
    assert (device.samples, device.seconds) == (1_000, engine)
    assert [histogram.read()[1] for histogram in alone] == [milliseconds / 1000.0 for milliseconds in samples]


def test_a_copy_that_takes_no_time_is_a_sample(device: Device) -> None:
    device.copy(0)
    assert device.settled()
    assert (device.samples, device.lost) == (1, 0)


def test_streams_are_read_in_the_order_in_which_they_are_done(device: Device) -> None:
    ends = [device.copy(2.0**exponent, passed=False) for exponent in range(8)]
    read = 0.0
    for end in (ends[index] for index in (6, 0, 7, 3, 1, 5, 2, 4)):
        end.passed = True
        read += end.at_ms
        device.harvester.flush(ENOUGH_S)
        assert device.seconds == pytest.approx(read / 1000)
    assert device.settled()
    assert device.samples == len(ends)


def test_a_copy_behind_more_unfinished_ones_than_a_round_asks_is_read_unasked(device: Device) -> None:
    for _ in range(4 * reading.PER_ROUND):
        device.copy(1.0, passed=False)
    device.copy(8.0)
    wait_until(lambda: device.seconds == 0.008)


def test_a_round_asks_no_more_than_it_may(make: Callable[..., Device], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "PER_ROUND", 10)
    monkeypatch.setattr(reading, "SHORTEST_S", ENOUGH_S)
    monkeypatch.setattr(reading, "LONGEST_S", ENOUGH_S)
    device = make()
    hanging = device.hang()
    ends = [device.copy(1.0, passed=False) for _ in range(100)]
    hanging.answer.set()
    wait_until(lambda: device.samples == 1)
    device.harvester._rouse()
    wait_until(lambda: sum(end.queries for end in ends) == 10)
    time.sleep(0.05)
    assert sum(end.queries for end in ends) == 10
    monkeypatch.undo()  # Whoever stops it looks as often as that whether it has ended.


# ------------------------------------------------------------------------------------------ what tells no time


class UnspeakableError(Exception):
    """An exception that cannot even be shown."""

    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__


ERRORS = [
    RuntimeError("Both events must be created with argument 'enable_timing=True'."),
    AttributeError("elapsed_time"),
    SystemExit(3),
    KeyboardInterrupt(),
    GeneratorExit(),
    UnspeakableError(),
]


@pytest.mark.parametrize("when_asked", [True, False], ids=["asked", "read"])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_event_that_raises_is_lost_and_said_once_and_the_others_go_on(
    device: Device, lines: pytest.LogCaptureFixture, error: BaseException, when_asked: bool
) -> None:
    for _ in range(3):
        event = RaisingEvent(error, when_asked=when_asked)
        device.add(event, event)
        device.copy(40.0)
    assert device.settled()
    assert (device.samples, device.lost) == (3, 3)
    assert len(lines.messages) == 1
    assert type(error).__name__ in lines.messages[0]
    assert len(threads()) == 1


@pytest.mark.parametrize("milliseconds", [math.nan, math.inf, -math.inf, -0.001])
def test_a_time_that_is_none_is_lost_and_not_a_sample(
    device: Device, lines: pytest.LogCaptureFixture, milliseconds: float
) -> None:
    device.copy(milliseconds)
    assert device.settled()
    assert (device.samples, device.lost, len(lines.messages)) == (0, 1, 1)


@pytest.mark.parametrize("event", [object(), None, "event"])
def test_what_is_no_event_at_all_is_lost(device: Device, event: Any) -> None:
    device.harvester.add(event, event, device.duration)
    assert device.settled()
    assert (device.samples, device.lost) == (0, 1)


def test_a_time_that_is_no_number_is_lost(device: Device) -> None:
    class Wordy(FakeEvent):
        def elapsed_time(self, end: Any) -> Any:
            return "a while"

    device.add(Wordy(0.0), FakeEvent(1.0))
    assert device.settled()
    assert (device.samples, device.lost) == (0, 1)


def test_events_that_never_complete_are_given_up_and_said_once(
    make: Callable[..., Device], lines: pytest.LogCaptureFixture
) -> None:
    device = make(deadline_s=0.05)
    never = [device.copy(1.0, passed=False) for _ in range(5)]
    device.copy(40.0)
    wait_until(lambda: device.lost == 5)
    assert device.settled()
    assert (device.samples, device.seconds) == (1, 0.04)
    assert lines.messages == [
        "kvcache: a pair of device events told no time (not done after 0.05 s); see kvcache.telemetry.dropped"
    ]
    asked = sum(end.queries for end in never)
    time.sleep(0.1)
    assert sum(end.queries for end in never) == asked


def test_a_pair_that_is_done_is_read_however_late(make: Callable[..., Device]) -> None:
    device = make(deadline_s=0.0)
    device.copy(40.0)
    assert device.settled()
    assert (device.samples, device.lost) == (1, 0)


def test_a_logger_that_raises_costs_no_other_pair_its_time(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(timing._logger, "warning", refuse)
    device.copy(math.nan)
    device.copy(40.0)
    assert device.settled()
    assert (device.samples, device.lost, len(threads())) == (1, 1, 1)


def test_pairs_that_find_no_room_are_counted_and_the_others_are_read(make: Callable[..., Device]) -> None:
    device = make(limit=10)
    hanging = device.hang()  # The one in the thread's hands.
    ends = [device.copy(1.0) for _ in range(15)]
    assert device.overflowed == 5
    assert len(device.harvester._pairs) == 10
    hanging.answer.set()
    assert device.settled()
    assert (device.samples, device.overflowed, device.lost) == (11, 5, 0)
    assert [end.queries for end in ends] == [1] * 10 + [0] * 5
    device.copy(1.0)
    assert device.settled()
    assert (device.samples, device.overflowed) == (12, 5)


def test_what_was_read_is_let_go(make: Callable[..., Device]) -> None:
    device = make(deadline_s=0.05)
    ends = [device.copy(1.0), device.copy(math.nan), device.copy(1.0, passed=False)]
    gone = [weakref.ref(end) for end in ends]
    del ends
    wait_until(lambda: device.lost == 2)
    assert device.settled()
    wait_until(lambda: threads_asleep(device))
    gc.collect()
    assert [reference() for reference in gone] == [None] * 3


# -------------------------------------------------------------------------------------------------- the thread


def threads_asleep(device: Device) -> bool:
    reader = device.harvester._reader
    return reader is not None and reader.asleep


def test_there_is_no_thread_before_the_first_pair(device: Device) -> None:
    assert device.settled()
    device.harvester.stop(ENOUGH_S)
    assert threads() == []
    device.copy(1.0)
    (thread,) = threads()
    assert thread.daemon
    assert device.settled()
    assert threads() == [thread]


def test_first_pairs_of_several_threads_start_one_thread(device: Device) -> None:
    together = threading.Barrier(8)

    def work() -> None:
        together.wait()
        device.copy(1.0)

    on_threads([work] * 8)
    assert len(threads()) == 1
    assert device.settled()
    assert device.samples == 8


@pytest.fixture
def rounds(device: Device, monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One entry for each round of the thread."""
    found: list[None] = []
    read = device.harvester._round

    def counting(at_most: int | None, stopped: float | None, asking: Asking) -> Round:
        found.append(None)
        return read(at_most, stopped, asking)

    monkeypatch.setattr(device.harvester, "_round", counting)
    return found


def test_the_thread_sleeps_while_there_is_nothing_to_ask(device: Device, rounds: list[None]) -> None:
    device.copy(1.0)
    assert device.settled()
    wait_until(lambda: threads_asleep(device))
    done = len(rounds)
    time.sleep(0.2)
    assert len(rounds) == done
    device.copy(1.0)
    wait_until(lambda: device.samples == 2)


def test_while_pairs_keep_coming_nobody_is_woken(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "NAPS", 50)
    device.copy(1.0)
    assert device.settled()
    assert not threads_asleep(device)
    woken: list[None] = []
    monkeypatch.setattr(device.harvester._reader, "wake", lambda: woken.append(None))
    for copies in range(2, 5):
        device.copy(1.0)
        wait_until(lambda copies=copies: device.samples == copies)
    assert not woken
    monkeypatch.undo()


def test_pairs_that_come_fast_are_read_as_fast(make: Callable[..., Device], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "NAPS", 50)
    device, per_ms, pairs = make(), 20, 20_000
    device.copy(1.0)
    assert device.settled()
    due = time.monotonic()
    for number in range(pairs):
        if number % per_ms == 0:
            due = max(due + 0.001, time.monotonic() - 0.02)  # On a machine that is busy it makes up for little.
            time.sleep(max(due - time.monotonic(), 0))
        device.copy(1.0)
    assert device.overflowed == 0
    wait_until(lambda: device.samples == pairs + 1)


def test_after_a_crowd_the_thread_rests_as_before(device: Device, rounds: list[None]) -> None:
    for _ in range(4_000):
        device.copy(1.0)
    wait_until(lambda: device.samples == 4_000)
    wait_until(lambda: threads_asleep(device))
    assert len(rounds) < 60


def test_a_copy_that_takes_long_is_asked_less_and_less_often(device: Device) -> None:
    begun = time.monotonic()
    end = device.copy(300.0, passed=False)
    time.sleep(0.3)
    asked, elapsed = end.queries, time.monotonic() - begun
    assert 3 <= asked <= 6 + elapsed / 0.020  # At first after 0, 1, 3, 7, 15 and 31 ms.
    end.passed = True
    wait_until(lambda: device.samples == 1)


def test_a_pair_that_comes_while_the_thread_lies_down_is_not_forgotten(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = device.harvester._round
    late = [FakeEvent(8.0)]

    def and_then_comes_another(at_most: int | None, stopped: float | None, asking: Asking) -> Round:
        found = read(at_most, stopped, asking)
        if not found.left and late:  # From a thread that saw ours awake, and did not ring.
            device.harvester._pairs.append(waiting(FakeEvent(0.0), late.pop(), device.duration))
        return found

    monkeypatch.setattr(device.harvester, "_round", and_then_comes_another)
    device.copy(1.0)
    wait_until(lambda: device.samples == 2)


def test_what_a_stopped_thread_puts_back_is_read_by_another(device: Device) -> None:
    end = FakeEvent(8.0, passed=False)
    device.harvester._pairs.append(waiting(FakeEvent(0.0), end, device.duration))
    device.harvester._round(None, stopped=0.0)  # What a thread does last that was stopped before that pair came.
    end.passed = True
    wait_until(lambda: device.seconds == 0.008)


@pytest.mark.usefixtures("hasty_switches")
def test_pairs_that_come_one_by_one_are_read_one_by_one(device: Device) -> None:
    for count in range(1, 2_001):
        device.copy(1.0)
        deadline = time.monotonic() + ENOUGH_S
        while device.samples < count:
            assert time.monotonic() < deadline
            time.sleep(0)


def test_stop_reads_what_is_done_counts_the_rest_as_lost_and_ends_the_thread(
    device: Device, lines: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        device.copy(40.0)
        device.copy(1.0, passed=False)
    device.harvester.stop(ENOUGH_S)
    assert (device.samples, device.lost) == (3, 3)
    assert lines.messages == []  # An engine that ends with copies under way is nothing to warn of.
    wait_until(lambda: not threads())
    assert device.settled()


def test_after_stop_the_next_pair_starts_the_thread_again(device: Device) -> None:
    for count in range(1, 4):
        device.copy(40.0)
        device.harvester.stop(ENOUGH_S)
        assert device.samples == count
        wait_until(lambda: not threads())
    device.copy(40.0)
    wait_until(lambda: device.samples == 4)


def test_a_thread_that_ended_by_itself_is_started_again(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    complaints: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", complaints.append)
    with monkeypatch.context() as patched:
        patched.setattr(device.harvester, "_round", lambda *_, **__: 1 / 0)
        device.copy(1.0)
        wait_until(lambda: not threads())
    device.copy(1.0)
    assert device.settled()
    assert (device.samples, len(complaints)) == (2, 1)


def test_a_process_that_can_start_no_thread_waits_for_one_that_can(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        device.copy(1.0)
        assert not device.harvester.flush(ENOUGH_S)
        device.harvester.stop(ENOUGH_S)
    device.copy(1.0)
    assert device.settled()
    assert device.samples == 2


# ------------------------------------------------------------------------------------- a device that does not answer


def test_nobody_waits_longer_than_they_want_for_a_device_that_hangs(device: Device) -> None:
    hanging = device.hang()
    before = time.monotonic()
    assert not device.harvester.flush(0.05)
    device.harvester.stop(0.05)
    assert time.monotonic() - before < 1.0
    hanging.answer.set()
    wait_until(lambda: device.samples == 1)


def test_a_thread_that_hung_when_it_was_stopped_takes_nothing_from_the_next(device: Device) -> None:
    hanging = device.hang()
    left = device.copy(2.0, passed=False)
    device.harvester.stop(0.01)
    under_way = device.copy(4.0, passed=False)
    device.copy(8.0)
    assert not device.harvester.flush(ENOUGH_S)  # By a thread of its own, though the other still hangs.
    assert (device.seconds, len(threads())) == (0.008, 2)
    hanging.answer.set()
    wait_until(lambda: len(threads()) == 1)
    assert (device.samples, device.lost) == (2, 1)  # `left` was under way when the thread was stopped.
    under_way.passed = left.passed = True
    assert device.settled()
    assert (device.samples, device.lost) == (3, 1)
    assert device.seconds == pytest.approx(0.013)


# ------------------------------------------------------------------------------------------------ many at a time


def on_threads(jobs: list[Callable[[], None]]) -> None:
    failed: list[BaseException] = []

    def run(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            failed.append(error)

    running = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert failed == []


@pytest.mark.usefixtures("hasty_switches")
def test_flushes_of_eight_threads_read_each_pair_once(make: Callable[..., Device]) -> None:
    device = make(limit=1_000_000)
    each = 2_000
    added: list[FakeEvent] = []
    adding = threading.Semaphore(0)

    def add() -> None:
        for _ in range(each):
            start, end = FakeEvent(0.0), FakeEvent(1.0)
            added.append(start)
            device.add(start, end)
        adding.release()

    def flush() -> None:
        while adding._value < 8:
            device.harvester.flush(ENOUGH_S)

    on_threads([add] * 8 + [flush] * 8)
    assert device.settled()
    assert (device.samples, device.lost, device.overflowed) == (8 * each, 0, 0)
    assert {tuple(start.readers) for start in added} == {(THREAD,)}


@pytest.mark.usefixtures("hasty_switches")
def test_each_pair_ends_once_whoever_flushes_and_stops_meanwhile(make: Callable[..., Device]) -> None:
    device = make(limit=50)
    draw = random.Random(11)
    fates: list[tuple[FakeEvent, FakeEvent]] = []
    running = threading.Event()

    def add() -> None:
        for _ in range(3_000):
            start, end = FakeEvent(0.0), FakeEvent(draw.choice([1.0, 2.0, math.nan]), passed=draw.random() < 0.9)
            fates.append((start, end))
            device.add(start, end)
            if draw.random() < 0.1:
                draw.choice(fates)[1].passed = True
        running.set()

    def disturb() -> None:
        while not running.is_set():
            draw.choice([device.harvester.flush, device.harvester.stop])(ENOUGH_S)

    on_threads([add, add, disturb, disturb, disturb])
    for _, end in fates:
        end.passed = True
    assert device.settled()
    assert device.samples + device.lost + device.overflowed == len(fates)
    assert device.samples > 0
    assert {len(start.readers) for start, _ in fates} <= {0, 1}


@pytest.mark.parametrize(
    ("function", "name"),
    [(Harvester.stop, "_reader"), (reading.ReadingThread.finish_round, "_asked")],
    ids=["stop", "ask"],
)
def test_no_thread_can_come_between_a_load_and_its_store(function: Callable[..., Any], name: str) -> None:
    span = Span(function, ("LOAD_ATTR", name), ("STORE_ATTR", name))
    assert span.switch_points() == []
    assert span.entered_from_elsewhere() == []


# ----------------------------------------------------------------------------------------------- signals and forks


@pytest.fixture
def on_signal() -> Generator[Callable[[Callable[[], object]], None]]:
    previous = signal.getsignal(signal.SIGUSR1)

    def on_signal(do: Callable[[], object]) -> None:
        signal.signal(signal.SIGUSR1, lambda *_: do())

    yield on_signal
    signal.signal(signal.SIGUSR1, previous)


@pytest.mark.parametrize("what", ["flush", "stop"])
def test_a_signal_handler_may_flush_or_stop_what_it_has_interrupted(
    device: Device, on_signal: Callable[[Callable[[], object]], None], what: str
) -> None:
    on_signal(lambda: getattr(device.harvester, what)(ENOUGH_S))
    with device.harvester._starting:
        device.harvester._pairs.append(waiting(FakeEvent(0.0), FakeEvent(1.0), device.duration))
        os.kill(os.getpid(), signal.SIGUSR1)
    assert device.samples == 1


class Hangs:
    """A device of whose streams some do not answer, and somebody who collects."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.outcomes: list[tuple[str, Outcome]] = []

    def put(self, name: str, end: FakeEvent, lane: Lane | None = None, deadline_s: float = ENOUGH_S) -> None:
        outcomes = self.outcomes

        class Told(Pair):
            def settled(self, outcome: Outcome) -> None:
                outcomes.append((name, outcome))

        assert self.device.harvester.hand_over(Told(FakeEvent(0.0), end, self.device.duration), lane, deadline_s)

    def hang(self, name: str, lane: Lane | None = None, deadline_s: float = ENOUGH_S) -> HangingEvent:
        end = HangingEvent(1.0)
        self.put(name, end, lane, deadline_s)
        assert end.asked.wait(ENOUGH_S)
        return end

    def collect_until(self, done: Callable[[], bool]) -> None:
        def looked() -> bool:
            self.device.harvester.look_after()
            return done()

        wait_until(looked)


@pytest.fixture
def hangs(device: Device, monkeypatch: pytest.MonkeyPatch) -> Hangs:
    for module in (asking, timing):
        monkeypatch.setattr(module, "HUNG_S", 0.05)
    return Hangs(device)


def test_a_stream_that_does_not_answer_hides_no_other(hangs: Hangs, lines: pytest.LogCaptureFixture) -> None:
    device, slow = hangs.device, deque[Pair]()
    hanging = hangs.hang("hanging", slow)
    hangs.put("behind it", behind := FakeEvent(1.0), slow)
    hangs.put("elsewhere", FakeEvent(2.0), deque())
    device.copy(4.0)
    hangs.collect_until(lambda: device.samples == 2)
    assert hangs.outcomes == [("elsewhere", Outcome.READ)]
    assert (device.lost, behind.queries, len(threads())) == (0, 0, 2)
    assert len(lines.messages) == 1
    assert "gets no answer, for 0.05 s; other streams are read by another thread" in lines.messages[0]
    assert not device.harvester.flush(ENOUGH_S)
    hanging.answer.set()
    hangs.collect_until(device.settled)
    assert hangs.outcomes == [("elsewhere", Outcome.READ), ("hanging", Outcome.READ), ("behind it", Outcome.READ)]
    assert (device.samples, device.lost) == (4, 0)
    wait_until(lambda: len(threads()) == 1)


def test_what_does_not_answer_in_its_time_is_counted_once_and_so_is_what_is_behind_it(hangs: Hangs) -> None:
    device, slow = hangs.device, deque[Pair]()
    hanging = hangs.hang("hanging", slow, deadline_s=0.1)
    hangs.put("behind it", FakeEvent(1.0), slow, deadline_s=0.1)
    hangs.collect_until(lambda: device.lost == 2)
    assert sorted(hangs.outcomes) == [("behind it", Outcome.GIVEN_UP), ("hanging", Outcome.GIVEN_UP)]
    hanging.answer.set()
    hangs.collect_until(device.settled)
    wait_until(lambda: len(threads()) == 1)
    assert (len(hangs.outcomes), device.samples, device.lost) == (2, 0, 2)


def test_a_pair_that_was_not_done_when_its_thread_was_relieved_waits_on(hangs: Hangs) -> None:
    device, slow = hangs.device, deque[Pair]()
    hanging = hangs.hang("hanging", slow)
    hanging.passed = False
    hangs.collect_until(lambda: bool(device.harvester._hung))
    hanging.answer.set()
    wait_until(lambda: not device.harvester._hung)
    assert device.samples == 0
    hanging.passed = True
    wait_until(lambda: device.samples == 1)
    assert hangs.outcomes == [("hanging", Outcome.READ)]


def test_a_driver_that_does_not_answer_at_all_takes_a_few_threads_only(hangs: Hangs) -> None:
    device = hangs.device
    ends = [HangingEvent(1.0) for _ in range(10)]
    for end in ends:
        device.add(FakeEvent(0.0), end)
    hangs.collect_until(lambda: len(threads()) == asking.AT_MOST_HUNG + 1)
    for _ in range(20):
        time.sleep(0.01)
        device.harvester.look_after()
    assert len(threads()) == asking.AT_MOST_HUNG + 1
    for end in ends:
        end.answer.set()
    hangs.collect_until(device.settled)
    wait_until(lambda: len(threads()) == 1)
    assert (device.samples, device.lost) == (10, 0)


def test_what_does_not_answer_until_the_end_is_counted_as_lost(hangs: Hangs) -> None:
    device = hangs.device
    hanging = hangs.hang("hanging", deque())
    hangs.collect_until(lambda: bool(device.harvester._hung))
    device.harvester.stop(0.05)
    assert (device.lost, hangs.outcomes) == (1, [("hanging", Outcome.GIVEN_UP)])
    hanging.answer.set()
    wait_until(lambda: not threads())
    assert (device.lost, device.samples, len(hangs.outcomes)) == (1, 0, 1)


def test_a_signal_handler_that_ends_the_process_is_not_held_up_by_a_flush(
    device: Device, on_signal: Callable[[Callable[[], object]], None]
) -> None:
    def end_process() -> None:
        raise SystemExit(15)

    on_signal(end_process)
    hanging = device.hang()
    timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1))
    timer.start()
    with pytest.raises(SystemExit):
        device.harvester.flush(ENOUGH_S)
    hanging.answer.set()
    assert device.settled()
    assert (device.samples, device.lost) == (1, 0)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_forgets_what_waits_and_harvests_anew(device: Device) -> None:
    hanging = device.hang()
    device.copy(2.0, passed=False)
    read, write = os.pipe()
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with device.harvester._starting:  # Which the child does not have: it must not wait for it.
            held.set()
            release.wait(ENOUGH_S)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(ENOUGH_S)
    pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(10)
            device.harvester.reset()
            found = [device.harvester.flush(5.0), len(threads())]
            device.copy(8.0)
            found += [device.harvester.flush(5.0), len(threads()), device.duration.read()[1], device.lost]
            os.write(write, repr(found).encode())
        finally:
            os._exit(0)
    release.set()
    holder.join()
    os.close(write)
    with os.fdopen(read) as answer:
        assert answer.read() == repr([True, 0, True, 1, 0.008, 0])
    os.waitpid(pid, 0)
    hanging.answer.set()
    wait_until(lambda: device.samples == 1)


# --------------------------------------------------------------------------------------------- what it costs


def test_handing_a_pair_over_costs_a_small_multiple_of_an_append(
    make: Callable[..., Device], capsys: pytest.CaptureFixture[str]
) -> None:
    device = make(limit=1_000_000)
    hanging = device.hang()  # The thread is awake, as it is while an engine is busy, and out of the way.
    start, end, duration = FakeEvent(0.0), FakeEvent(1.0), device.duration
    queue: deque[Any] = deque()

    def seconds(hand_over: Callable[[], object]) -> float:
        before = time.perf_counter()
        for _ in itertools.repeat(None, 20_000):
            hand_over()
        return time.perf_counter() - before

    ours = min(seconds(lambda: device.harvester.add(start, end, duration)) for _ in range(5))
    theirs = min(seconds(lambda: queue.append((start, end, duration))) for _ in range(5))
    hanging.answer.set()
    assert device.settled()
    with capsys.disabled():
        print(
            f" [add {ours / 20_000 * 1e9:.0f} ns, append {theirs / 20_000 * 1e9:.0f} ns, x{ours / theirs:.1f}] ", end=""
        )
    assert device.samples == 100_001
    assert ours < 20 * theirs
