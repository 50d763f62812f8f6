"""Somebody else's two events give one sample at the most, of the copy that they were recorded around."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from kvcache_otel import semconv
from kvcache_otel.record import foreign, reading
from kvcache_otel.record.transfers import Transfers
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


@pytest.fixture
def scene() -> Scene:
    return Scene(timing="device_event")


class RustError(BaseException):
    """A panic of Rust code."""


class Bare(FakeEvent):
    """An event that takes no attributes, as one that is written in C may be."""

    __slots__ = ("kept",)

    def __getattribute__(self, name: str) -> Any:
        if name == "__dict__":
            raise AttributeError(name)
        return super().__getattribute__(name)


def around(stream: FakeStream, milliseconds: float, start: FakeEvent, end: FakeEvent) -> None:
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


@pytest.mark.parametrize("kind", [FakeEvent, Bare])
def test_a_pair_of_two_directions_gives_one_sample_to_the_one_that_recorded_it_last(
    scene: Scene, kind: type[FakeEvent]
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
    pair = foreign.waiting[id(end)]
    end.record(stream)  # At the same moment of the device's, so that only this tells that it was.
    pair.told = None  # As if the device had not been done with it by then.
    again.set()
    assert scene.settled()
    assert (scene.samples(), scene.lost()) == (0, 1)


def test_an_event_is_as_it_was_when_it_was_read_recorded_or_given_up() -> None:
    scene = Scene(timing="device_event", deadline_s=0.01)
    stream, pairs = FakeStream(), [(FakeEvent(), FakeEvent()) for _ in range(3)]
    for start, end in pairs[:2]:
        around(stream, 1.0, start, end)
    before = [vars(end).keys() for _, end in pairs]
    for start, end in pairs[:2]:
        scene.transfers.begin().end(events=(start, end))
    assert all("record" in vars(end) for _, end in pairs[:2])
    pairs[0][1].record(stream)
    assert "record" not in vars(pairs[0][1])
    stream.run()
    assert scene.settled()
    around(stream, 1.0, *pairs[2])
    scene.transfers.begin().end(events=pairs[2])
    time.sleep(0.02)
    scene.settled()
    assert scene.active == 1  # The device was not done in time.
    assert [vars(end).keys() for _, end in pairs] == before
    assert not any("record" in vars(event) for pair in pairs for event in pair)


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


def test_an_event_with_a_record_of_its_own_keeps_it(scene: Scene) -> None:
    stream, start, end = FakeStream(), FakeEvent(), FakeEvent()
    around(stream, 1.0, start, end)
    own: Any = lambda *_: "own"  # noqa: E731
    vars(end)["record"] = own
    scene.transfers.begin().end(events=(start, end))
    assert vars(end)["record"] is own
    stream.run()
    assert scene.settled()
    assert (scene.samples(), vars(end)["record"]) == (1, own)


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
    assert "record" not in vars(end)
    assert scene.lost("queue_full") == 1
