"""Somebody else's two events give one sample at the most, of the copy that they were recorded around."""

from __future__ import annotations

import copy
import dataclasses
import dis
import inspect
import itertools
import pickle
import sys
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import pytest

from kvcache_otel import semconv
from kvcache_otel.instrumentation import Instrumentation
from kvcache_otel.record import foreign, reading
from kvcache_otel.record.pair import Pair
from kvcache_otel.record.transfers import Transfers
from tests.record.test_cells import SWITCH_POINTS
from tests.record.test_transfers import ENOUGH_S, MADE, Scene
from tests.support.fake_device import FakeEvent, FakeStream

if TYPE_CHECKING:
    from collections.abc import Generator


@pytest.fixture(autouse=True)
def nobody_waits(monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    monkeypatch.setattr(reading, "NAPS", 0)
    foreign.waiting.clear()
    yield
    while MADE:
        MADE.pop().recorder.harvester.stop(ENOUGH_S)
    assert not foreign.waiting
    foreign.let_go()


@pytest.fixture
def scene() -> Scene:
    return Scene(timing="device_event")


class RustError(BaseException):
    """A panic of Rust code."""


class Bare(FakeEvent):
    """An event that takes no attributes."""

    __slots__ = ("kept",)

    def __getattribute__(self, name: str) -> Any:
        if name == "__dict__":
            raise AttributeError(name)
        return super().__getattribute__(name)


class Closed(type):
    """Lets nobody set what its classes have, as one that is written in C."""

    def __setattr__(cls, name: str, value: Any) -> None:
        raise TypeError(f"cannot set {name!r}")


class Deaf(FakeEvent, metaclass=Closed):
    """An event that nobody hears of, as `torch.Event`."""

    def record(self, stream: FakeStream) -> None:
        super().record(stream)


@dataclasses.dataclass(slots=True)
class Slotted:
    """One of a few slots, with an event inside that does it."""

    inner: FakeEvent = dataclasses.field(default_factory=FakeEvent)

    def record(self, stream: FakeStream) -> None:
        self.inner.record(stream)

    def query(self) -> bool:
        return self.inner.query()

    def elapsed_time(self, end: Slotted) -> float:
        return self.inner.elapsed_time(end.inner)


def around(stream: FakeStream, milliseconds: float, start: Any, end: Any) -> None:
    start.record(stream)
    stream.copy(milliseconds)
    end.record(stream)


def samples(scene: Scene, source: str, destination: str) -> tuple[int, float]:
    cell = scene.rows.histogram(
        semconv.TRANSFER_DURATION, source=source, destination=destination, timing="device_event"
    )
    assert cell is not None
    counts, total = cell.read()
    return sum(counts), total


@pytest.mark.parametrize("kind", [FakeEvent, Bare, Deaf, Slotted])
def test_a_pair_of_two_directions_gives_one_sample_to_the_one_that_recorded_it_last(
    scene: Scene, kind: type[Any]
) -> None:
    back = Transfers(scene.probe, "host", "device", timing="device_event")
    stream, start, end = FakeStream(), kind(), kind()
    for transfers, milliseconds in ((scene.transfers, 40.0), (back, 3.0)):
        copy = transfers.begin()
        around(stream, milliseconds, start, end)
        copy.end(events=(start, end))
    stream.run()
    assert scene.settled()
    assert samples(scene, "device", "host") == (0, 0.0)
    assert samples(scene, "host", "device") == (1, 0.003)
    assert (scene.lost(), scene.finished) == (1, 1)


def test_a_pair_that_two_recorders_wait_for_gives_one_sample(scene: Scene) -> None:
    other, stream, start, end = Scene(timing="device_event"), FakeStream(), FakeEvent(), FakeEvent()
    around(stream, 5.0, start, end)
    for each in (scene, other):
        each.transfers.begin().end(events=(start, end))
    stream.run()
    assert scene.settled()
    assert other.settled()
    assert (scene.samples(), scene.lost()) == (0, 1)
    assert (other.samples(), other.lost()) == (1, 0)


@pytest.fixture
def asleep(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Has nobody read a pair before it is set."""
    woken = threading.Event()
    rounds = reading.ReadingThread._rounds
    monkeypatch.setattr(reading.ReadingThread, "_rounds", lambda thread: (woken.wait(ENOUGH_S), rounds(thread))[0])
    return woken


@pytest.mark.parametrize("again", [False, True])
def test_t4_a_pair_that_its_owner_records_again_when_it_is_done_tells_the_first_time(
    scene: Scene, asleep: threading.Event, *, again: bool
) -> None:
    stream, start, end = FakeStream(), FakeEvent(), FakeEvent()
    around(stream, 40.0, start, end)
    scene.transfers.begin().end(events=(start, end))
    stream.run()
    end.record(stream) if again else around(stream, 3.0, start, end)
    stream.run()
    asleep.set()
    assert scene.settled()
    assert (scene.samples(), scene.seconds(), scene.lost(), scene.finished) == (1, 0.04, 0, 1)


@pytest.mark.parametrize("error", [RuntimeError("gone"), RustError()])
def test_what_an_event_raises_when_it_is_recorded_again_does_not_reach_its_owner(
    scene: Scene, asleep: threading.Event, error: BaseException
) -> None:
    class Raises(FakeEvent):
        def query(self) -> bool:
            raise error

    stream, start, end = FakeStream(), FakeEvent(), Raises()
    around(stream, 40.0, start, end)
    pair = scene.transfers.begin()
    pair.before, pair.after = start, end
    foreign.wait_for(pair, pair.before, pair.after)
    end.record(stream)
    assert (end.recorded, pair.void, pair.told) == (2, True, None)
    asleep.set()


@pytest.mark.parametrize("done", [True, False])
def test_t4_a_pair_that_its_owner_records_again_too_early_tells_no_time(scene: Scene, *, done: bool) -> None:
    stream, start, end = FakeStream(), FakeEvent(), FakeEvent()
    copy = scene.transfers.begin(bytes=1)
    around(stream, 40.0, start, end)
    copy.end(events=(start, end))
    around(stream, 3.0, start, end)  # For something that nobody tells of.
    if done:
        stream.run()
    assert scene.settled()
    assert (scene.samples(), scene.lost(), scene.finished, scene.moved(), scene.active) == (0, 1, 1, 1, 0)


def test_t4_an_earlier_event_that_is_recorded_again_alone_lies_behind_the_later(scene: Scene) -> None:
    stream, start, end = FakeStream(), FakeEvent(), FakeEvent()
    around(stream, 40.0, start, end)
    scene.transfers.begin().end(events=(start, end))
    stream.copy(1.0)
    start.record(stream)
    stream.run()
    assert scene.settled()
    assert (scene.samples(), scene.lost()) == (0, 1)


def test_one_earlier_event_may_be_that_of_many_copies(scene: Scene) -> None:
    stream, start, ends = FakeStream(), FakeEvent(), [FakeEvent() for _ in range(3)]
    start.record(stream)
    for end in ends:
        stream.copy(2.0)
        end.record(stream)
        scene.transfers.begin().end(events=(start, end))
    stream.run()
    assert scene.settled()
    assert (scene.samples(), scene.seconds(), scene.lost()) == (3, pytest.approx(0.012), 0)


def test_an_event_is_recorded_again_while_it_is_read(scene: Scene) -> None:
    stream, end = FakeStream(), FakeEvent()

    class Slow(FakeEvent):
        def elapsed_time(self, end: Any) -> float:
            if threading.current_thread() is not threading.main_thread():
                read.set()
                assert again.wait(ENOUGH_S)
            return super().elapsed_time(end)

    read, again, start = threading.Event(), threading.Event(), Slow()
    around(stream, 40.0, start, end)
    scene.transfers.begin().end(events=(start, end))
    stream.run()
    assert read.wait(ENOUGH_S)
    (pair,) = foreign._pairs(id(end))
    end.record(stream)  # At the same moment of the device's, so that only this tells that it was.
    pair.told = None  # As if the device had not been done with it by then.
    again.set()
    assert scene.settled()
    assert (scene.samples(), scene.lost()) == (0, 1)


def test_an_event_is_left_as_it_is_while_it_waits_and_afterwards() -> None:
    scene = Scene(timing="device_event", deadline_s=0.01)
    stream, pairs = FakeStream(), [(FakeEvent(), FakeEvent()) for _ in range(3)]
    for start, end in pairs[:2]:
        around(stream, 1.0, start, end)
    before = [vars(end).keys() for _, end in pairs]
    for start, end in pairs[:2]:
        scene.transfers.begin().end(events=(start, end))
    assert [vars(end).keys() for _, end in pairs] == before
    pairs[0][1].record(stream)
    stream.run()
    assert scene.settled()
    around(stream, 1.0, *pairs[2])
    scene.transfers.begin().end(events=pairs[2])
    time.sleep(0.02)
    scene.settled()
    assert scene.active == 1  # The device was not done in time.
    assert [vars(end).keys() for _, end in pairs] == before
    assert not foreign.waiting


def _pickled(event: FakeEvent) -> Any:
    return pickle.loads(pickle.dumps(event))


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, _pickled])
def test_a_copy_of_an_event_that_waits_is_nothing_to_it(scene: Scene, make: Any) -> None:
    stream, start, end = FakeStream(), FakeEvent(), FakeEvent()
    around(stream, 40.0, start, end)
    scene.transfers.begin().end(events=(start, end))
    copied = make(end)
    assert vars(copied).keys() == vars(FakeEvent()).keys()
    copied.record(FakeStream())
    assert (end.recorded, copied.recorded) == (1, 2)
    stream.run()
    assert scene.settled()
    assert (scene.samples(), scene.seconds(), scene.lost()) == (1, 0.04, 0)


@pytest.mark.parametrize("read_first", [True, False])
def test_an_earlier_event_of_many_copies_that_is_recorded_again_tells_none_of_them_another_time(
    scene: Scene, *, read_first: bool
) -> None:
    streams = FakeStream(), FakeStream()
    start, ends = FakeEvent(), (FakeEvent(), FakeEvent())
    streams[0].put_ms = streams[1].put_ms = 1.0
    start.record(streams[0])
    for stream, end, milliseconds in zip(streams, ends, (5.0, 1000.0), strict=True):
        stream.copy(milliseconds)
        end.record(stream)
        scene.transfers.begin().end(events=(start, end))
    if read_first:
        streams[0].run()
        assert scene.settled() is False
        assert scene.seconds() == 0.005
    streams[1].done_ms = 601.0
    start.stream, start.at_ms = streams[1], 601.0
    start.record(streams[1])
    streams[0].run()
    streams[1].run()
    assert scene.settled()
    assert (scene.samples(), scene.seconds()) == ((1, 0.005) if read_first else (0, 0.0))
    assert scene.lost() == (1 if read_first else 2)


@pytest.mark.parametrize("read_first", [True, False])
def test_an_event_between_two_copies_that_is_recorded_again_tells_neither_another_time(
    scene: Scene, *, read_first: bool
) -> None:
    stream, events = FakeStream(), [FakeEvent() for _ in range(3)]
    events[0].record(stream)
    for before, after, milliseconds in ((*events[:2], 5.0), (*events[1:], 1000.0)):
        stream.copy(milliseconds)
        after.record(stream)
        scene.transfers.begin().end(events=(before, after))
    stream.done_ms = 10.0
    if read_first:
        scene.settled()
    events[1].record(stream)
    stream.run()
    assert scene.settled()
    assert (scene.samples(), scene.seconds(), scene.lost()) == (1, 0.005, 1)


def test_a_chain_of_copies_that_nobody_records_again_tells_all_their_times(scene: Scene) -> None:
    stream, events = FakeStream(), [FakeEvent() for _ in range(4)]
    events[0].record(stream)
    for before, after in itertools.pairwise(events):
        stream.copy(2.0)
        after.record(stream)
        scene.transfers.begin().end(events=(before, after))
    stream.run()
    assert scene.settled()
    assert (scene.samples(), scene.seconds(), scene.lost()) == (3, pytest.approx(0.006), 0)


def test_an_event_that_nobody_hears_of_tells_no_time_when_it_is_handed_over_again(scene: Scene) -> None:
    stream, events = FakeStream(), [Deaf() for _ in range(3)]
    events[0].record(stream)
    for before, after in itertools.pairwise(events):
        stream.copy(2.0)
        after.record(stream)
        scene.transfers.begin().end(events=(before, after))
    stream.run()
    assert scene.settled()
    assert (scene.samples(), scene.seconds(), scene.lost()) == (1, 0.002, 1)


@pytest.mark.parametrize("unheard", [0, 1])
def test_a_time_is_not_read_of_one_that_may_have_been_recorded_unheard(scene: Scene, unheard: int) -> None:
    stream, events = FakeStream(), [FakeEvent(), FakeEvent()]
    events[unheard] = Deaf()
    around(stream, 40.0, *events)
    scene.transfers.begin().end(events=tuple(events))
    stream.run()
    events[unheard].at_ms = 30.0  # As if it had been recorded again.
    events[1 - unheard].record(stream)
    stream.run()
    assert scene.settled()
    assert (scene.samples(), scene.lost()) == (0, 1)


def test_what_the_device_is_not_done_with_is_not_read_when_it_is_recorded_again(scene: Scene) -> None:
    class Guesses(FakeEvent):
        def elapsed_time(self, _: Any) -> float:
            return 1.0

    stream, start, end = FakeStream(), Guesses(), Guesses()
    around(stream, 40.0, start, end)
    pair = scene.transfers.begin()
    pair.before, pair.after = start, end
    assert foreign.wait_for(pair, start, end)
    end.record(stream)
    assert (pair.void, pair.told) == (True, None)


@pytest.mark.parametrize("milliseconds", [-1.0, float("nan"), float("inf"), float("-inf")])
def test_what_is_read_when_it_is_recorded_again_is_a_time_or_nothing(scene: Scene, milliseconds: float) -> None:
    class Odd(FakeEvent):
        def elapsed_time(self, _: Any) -> float:
            return milliseconds

    stream, start, end = FakeStream(), Odd(), Odd()
    around(stream, 40.0, start, end)
    pair = scene.transfers.begin()
    pair.before, pair.after = start, end
    assert foreign.wait_for(pair, start, end)
    stream.run()
    end.record(stream)
    assert (pair.void, pair.told) == (True, None)


def test_an_event_that_is_recorded_again_gets_what_it_is_given_and_returns_and_raises_its_own(scene: Scene) -> None:
    class Own(FakeEvent):
        def record(self, stream: FakeStream | None = None, *, twice: bool = False) -> Any:
            if stream is None:
                raise RuntimeError("no stream")
            super().record(stream)
            return "recorded", twice

    stream, start, end = FakeStream(), FakeEvent(), Own()
    around(stream, 1.0, start, end)
    for said, expected in (((stream,), ("recorded", True)), ((), None)):
        scene.transfers.begin().end(events=(start, end))
        if expected is None:
            with pytest.raises(RuntimeError, match="no stream"):
                end.record(*said)
        else:
            assert end.record(*said, twice=True) == expected
    stream.run()
    assert scene.settled()
    assert scene.lost() == 2


def of_its_own(event: Any) -> None:
    record = event.record
    event.record = lambda stream: record(stream)


def no_method(event: Any) -> None:
    event.record = print


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("change", [of_its_own, no_method])
@pytest.mark.parametrize("which", [0, 1])
def test_an_event_that_hides_its_classs_record_is_read_at_once_or_not_at_all(
    scene: Scene, which: int, change: Any, *, known: bool
) -> None:
    stream, events = FakeStream(), (FakeEvent(), FakeEvent())
    if known:
        foreign.hearing._hear(FakeEvent)
    change(events[which])
    around(stream, 5.0, *events) if change is of_its_own else None
    own = vars(events[which])["record"]
    scene.transfers.begin().end(events=events)
    assert vars(events[which])["record"] is own
    around(stream, 200.0, *events) if change is of_its_own else None
    stream.run()
    assert scene.settled()
    assert (scene.samples(), scene.lost(), scene.finished) == (0, 1, 1)
    assert not foreign.waiting
    scene.transfers.begin().end(events=events)  # The device is done with them.
    assert scene.samples() == (1 if change is of_its_own else 0)


def test_an_event_whose_own_record_is_its_classs_is_heard(scene: Scene) -> None:
    stream, events = FakeStream(), (FakeEvent(), FakeEvent())
    around(stream, 5.0, *events)
    scene.transfers.begin().end(events=events)
    events[1].record = events[1].record  # type: ignore[method-assign]
    stream.run()
    assert scene.settled()
    around(stream, 6.0, *events)
    scene.transfers.begin().end(events=events)
    around(stream, 200.0, *events)
    stream.run()
    assert scene.settled()
    assert (scene.samples(), scene.seconds(), scene.lost()) == (1, 0.005, 1)


def test_a_class_has_its_own_record_back(scene: Scene) -> None:
    class Sub(FakeEvent):
        pass

    genuine, stream = vars(FakeEvent)["record"], FakeStream()
    for start, end in ((FakeEvent(), FakeEvent()), (Sub(), Sub()), (Sub(), FakeEvent())):
        around(stream, 1.0, start, end)
        scene.transfers.begin().end(events=(start, end))
    assert vars(FakeEvent)["record"] is not genuine
    assert inspect.signature(FakeEvent.record) == inspect.signature(genuine)
    assert "record" not in vars(Sub)
    stream.run()
    assert scene.settled()
    assert scene.samples() == 3
    waits = FakeEvent(), FakeEvent()
    around(stream, 1.0, *waits)
    scene.transfers.begin().end(events=waits)
    foreign.let_go()
    assert vars(FakeEvent)["record"] is genuine
    assert not foreign.waiting
    stream.run()
    assert scene.settled()
    assert (scene.samples(), scene.lost()) == (3, 1)  # It could have been recorded unheard.


def test_who_uninstruments_has_every_class_back(scene: Scene) -> None:
    genuine, stream, events = vars(FakeEvent)["record"], FakeStream(), (FakeEvent(), FakeEvent())
    around(stream, 1.0, *events)
    scene.transfers.begin().end(events=events)
    assert vars(FakeEvent)["record"] is not genuine
    Instrumentation().detach()
    assert vars(FakeEvent)["record"] is genuine


def test_one_that_inherits_its_record_from_what_lets_nobody_is_heard(scene: Scene) -> None:
    class Open(Closed):
        __setattr__ = type.__setattr__
        __delattr__ = type.__delattr__

    class Inherits(Deaf, metaclass=Open):
        pass

    stream, start, end = FakeStream(), Inherits(), Inherits()
    around(stream, 40.0, start, end)
    scene.transfers.begin().end(events=(start, end))
    around(stream, 3.0, start, end)
    stream.run()
    assert scene.settled()
    assert (scene.samples(), scene.lost()) == (0, 1)
    foreign.let_go()
    assert "record" not in vars(Inherits)


def test_one_whose_record_is_written_in_c_is_heard(scene: Scene) -> None:
    class Appends(deque[int]):
        record = deque.append

        def query(self) -> bool:
            return False

        def elapsed_time(self, _: Any) -> float:
            return 0.0

    pair, start, end = scene.transfers.begin(), Appends(), Appends()
    pair.before, pair.after = start, end
    assert foreign.wait_for(pair, start, end)
    end.record(1)
    assert (list(end), pair.void) == ([1], True)


def test_a_class_that_is_given_another_record_since_is_heard_again_a_few_times(scene: Scene) -> None:
    class Patched(FakeEvent):
        pass

    stream, start, end = FakeStream(), Patched(), Patched()
    for number in range(20):
        original: Any = vars(FakeEvent)["record"]
        Patched.record = lambda event, stream, original=original: original(event, stream)  # type: ignore[method-assign]
        around(stream, 40.0, start, end)
        scene.transfers.begin().end(events=(start, end))
        assert foreign.hearing.hears(end) is (number < 16)
        scene.settled()
        around(stream, 3.0, start, end)
        assert bool(foreign.waiting) is (number >= 16)
        foreign.waiting.clear()
        stream.run()
        scene.settled()


class Ways(FakeEvent):
    """Events that are recorded in many ways."""

    def plain(self, stream: Any = None) -> Any:
        return self, stream

    def named(self, stream: Any, *, twice: bool = True) -> Any:
        return self, stream, twice

    def first_only(self, /, stream: Any = 5) -> Any:
        return self, stream

    def both_only(self, stream: Any, /, table: Any = 6) -> Any:
        return self, stream, table

    def any_of_them(self, *args: Any, **kwargs: Any) -> Any:
        return self, args, kwargs

    def two_only(self, stream: Any, /, other: Any = 7) -> Any:
        return self, stream, other


CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("plain", (), {}),
    ("plain", (1,), {}),
    ("plain", (), {"stream": 2}),
    ("plain", (1, 2), {}),
    ("plain", (), {"other": 1}),
    ("named", (1,), {"twice": False}),
    ("named", (), {}),
    ("first_only", (), {}),
    ("first_only", (), {"stream": 1}),
    ("first_only", (), {"self": 1}),
    ("both_only", (1,), {}),
    ("both_only", (1,), {"table": 3}),
    ("two_only", (1,), {"other": 3}),
    ("two_only", (), {"stream": 3}),
    ("any_of_them", (1, 2), {"three": 3}),
]


@pytest.mark.parametrize(("way", "args", "kwargs"), CALLS)
def test_what_records_an_event_takes_returns_and_refuses_what_it_did(way: str, args: Any, kwargs: Any) -> None:
    kind: Any = type("Kind", (FakeEvent,), {"record": vars(Ways)[way]})
    event, pair = kind(), Pair(FakeEvent(), FakeEvent(), None)  # type: ignore[arg-type]

    def called() -> Any:
        try:
            return event.record(*args, **kwargs)
        except TypeError as error:
            return str(error)

    before = called()
    pair.after = event
    assert foreign.wait_for(pair, pair.before, pair.after)
    assert kind.record is not vars(Ways)[way]
    assert (called(), inspect.signature(kind.record)) == (before, inspect.signature(vars(Ways)[way]))
    assert pair.void or isinstance(before, str)
    foreign.forget(pair)


def test_a_record_that_is_no_method_is_left_alone(scene: Scene) -> None:
    class Odd(FakeEvent):
        record = staticmethod(print)  # type: ignore[assignment]

    there, pair = vars(Odd)["record"], scene.transfers.begin()
    pair.before, pair.after = Odd(), Odd()
    assert foreign.wait_for(pair, pair.before, pair.after)
    assert vars(Odd)["record"] is there
    foreign.forget(pair)


def test_events_that_many_threads_share_are_in_the_table_while_they_wait_and_no_longer() -> None:
    shared, interval, wrong = FakeEvent(), sys.getswitchinterval(), []

    def wait(times: int) -> None:
        for _ in range(times):
            pair = Pair(shared, FakeEvent(), None)  # type: ignore[arg-type]
            foreign.wait_for(pair, pair.before, pair.after)
            if pair not in foreign._pairs(id(shared)):
                wrong.append(pair)
            foreign.forget(pair)
            if pair in foreign._pairs(id(shared)) or foreign._pairs(id(pair.after)):
                wrong.append(pair)

    threads = [threading.Thread(target=wait, args=(3_000,)) for _ in range(4)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(ENOUGH_S)
    finally:
        sys.setswitchinterval(interval)
    assert (wrong, foreign.waiting) == ([], {})


@pytest.mark.parametrize("function", [foreign._share, foreign._leave])
def test_no_thread_comes_between_a_look_into_the_table_and_what_is_done_about_it(function: Any) -> None:
    points = [each.opname for each in dis.get_instructions(function) if each.opname in SWITCH_POINTS]
    assert [name for name in points if name != "PRECALL"] == ["RESUME", "CALL"]  # It has begun; the list was changed.


def test_what_somebody_has_put_around_an_event_that_waits_stays_and_is_called_once(scene: Scene) -> None:
    stream, start, end, called = FakeStream(), FakeEvent(), FakeEvent(), []
    around(stream, 1.0, start, end)
    scene.transfers.begin().end(events=(start, end))
    ours: Any = end.record

    def theirs(stream: FakeStream) -> None:
        called.append(stream)
        ours(stream)

    vars(end)["record"] = theirs
    end.record(stream)
    assert (called, end.recorded, end.record) == ([stream], 2, theirs)
    stream.run()
    assert scene.settled()
    assert (scene.samples(), scene.lost()) == (0, 1)


def test_who_keeps_what_records_an_event_tells_of_whoever_waits_for_it_then(scene: Scene) -> None:
    stream, start, end = FakeStream(), FakeEvent(), FakeEvent()
    around(stream, 1.0, start, end)
    scene.transfers.begin().end(events=(start, end))
    kept: Any = end.record
    stream.run()
    assert scene.settled()
    around(stream, 2.0, start, end)
    scene.transfers.begin().end(events=(start, end))
    kept(stream)
    assert end.recorded == 3
    stream.run()
    assert scene.settled()
    assert (scene.samples(), scene.lost()) == (1, 1)


def test_events_that_found_no_room_are_left_alone(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scene.recorder.harvester, "_limit", 0)
    stream, start, end = FakeStream(), FakeEvent(), FakeEvent()
    around(stream, 1.0, start, end)
    scene.transfers.begin().end(events=(start, end))
    assert not foreign.waiting
    assert scene.lost("queue_full") == 1
