"""Each transfer counts once and is timed by the clock that it was given, and nothing that is said of it raises."""

from __future__ import annotations

import gc
import importlib
import itertools
import logging
import math
import queue
import random
import sys
import threading
import time
import types
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache_otel import semconv
from kvcache_otel.identity import Identity
from kvcache_otel.record import foreign, reading, timing, underway
from kvcache_otel.record.cells import Histogram
from kvcache_otel.record.keys import KEPT, LATER
from kvcache_otel.record.probe import CacheProbe
from kvcache_otel.record.recorder import Recorder
from kvcache_otel.record.streams import CURRENT
from kvcache_otel.record.transfers import ERROR_TYPES, Transfers
from tests.support.fake_device import FakeDevice, FakeEvent, FakeStream
from tests.support.processes import wait_until
from tests.support.rows import Rows

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

THREAD = "kvcache-otel-harvester"
ENOUGH_S = 20.0
ROUTE = {"source": "device", "destination": "host"}


MADE: list[Scene] = []
"""Every scene of a test, whose threads end with it."""


class Scene:
    """Backups of one cache, on a device that is made up.

    Attributes:
        recorder: What they are recorded into.
        device: The device.
        transfers: The backups.
    """

    def __init__(self, **options: Any) -> None:
        identity = Identity("custom", "Own")
        self.recorder = Recorder(identity)
        MADE.append(self)
        self.probe = CacheProbe(self.recorder, identity)
        self.device = FakeDevice()
        self.transfers = self.make(**options)
        self.rows = Rows(self.recorder)

    def make(self, **options: Any) -> Transfers:
        return Transfers(self.probe, "device", "host", **{"make_event": self.device.event, **options})

    def settled(self) -> bool:
        return self.recorder.harvester.flush(ENOUGH_S)

    def samples(self, source: str = "device_event") -> int:
        cell = self.rows.histogram(semconv.TRANSFER_DURATION, **ROUTE, timing=source)
        return 0 if cell is None else sum(cell.read()[0])

    def seconds(self, source: str = "device_event") -> float:
        cell = self.rows.histogram(semconv.TRANSFER_DURATION, **ROUTE, timing=source)
        assert cell is not None
        return cell.read()[1]

    def moved(self, source: str = "device_event") -> int | float | None:
        return self.rows.value(semconv.TRANSFER_IO, **ROUTE, timing=source)

    @property
    def active(self) -> int | float | None:
        return self.rows.value(semconv.TRANSFER_ACTIVE, **ROUTE)

    @property
    def finished(self) -> int | float | None:
        return self.rows.value(semconv.TRANSFER_OPERATIONS, **ROUTE)

    def tokens(self, pool: str = "kv") -> int | float | None:
        return self.rows.value(semconv.TRANSFER_TOKENS, **ROUTE, pool=pool)

    def lost(self, reason: str = "event_lost") -> int | float | None:
        return self.rows.value(semconv.TELEMETRY_DROPPED, reason=reason)

    def wrong(self, reason: str) -> int | float | None:
        return self.rows.value(semconv.ACCOUNTING_ERRORS, reason=reason)

    def failed(self) -> int | float | None:
        return self.rows.value(semconv.TELEMETRY_ERRORS, hook="transfer")


@pytest.fixture(autouse=True)
def threads_end(monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    """Has threads sleep as soon as there is nothing to ask, and end with their test."""
    monkeypatch.setattr(reading, "NAPS", 0)
    yield
    while MADE:
        MADE.pop().recorder.harvester.stop(ENOUGH_S)
    wait_until(lambda: THREAD not in {thread.name for thread in threading.enumerate()})


@pytest.fixture
def scene() -> Scene:
    return Scene(timing="device_event")


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="kvcache_otel")
    return caplog


# ------------------------------------------------------------------------------------------------ the four clocks


def test_rows_exist_at_zero_before_anything_moves() -> None:
    scene = Scene(pools=("kv", "swa"), queued=True)
    assert (scene.active, scene.finished, scene.moved("wall_clock")) == (0, 0, 0)
    assert (scene.tokens("kv"), scene.tokens("swa")) == (0, 0)
    assert scene.samples("wall_clock") == 0
    assert scene.moved("device_event") is None
    assert scene.rows.histogram(semconv.TRANSFER_QUEUE_DURATION, **ROUTE) is not None


def test_t1_a_copy_of_40_ms_takes_40_ms_however_soon_its_launch_returned(scene: Scene) -> None:
    stream = FakeStream()
    before = time.perf_counter()
    with scene.transfers.begin(bytes=4096, tokens={"kv": 64}, stream=stream):
        stream.copy(40.0)
    host = time.perf_counter() - before
    assert not scene.settled()
    assert (scene.samples(), scene.active, scene.finished, scene.moved(), scene.tokens()) == (0, 1, 0, 0, 0)
    stream.run()
    assert scene.settled()
    assert (scene.samples(), scene.seconds()) == (1, 0.04)
    assert (scene.active, scene.finished, scene.moved(), scene.tokens()) == (0, 1, 4096, 64)
    assert {name for event in scene.device.made for name in event.askers} == {THREAD}
    assert host < 0.04


@pytest.mark.parametrize("error", [TypeError("unexpected keyword 'enable_timing'"), NotImplementedError()])
def test_t2_a_device_whose_events_cannot_be_timed_still_counts(
    scene: Scene, lines: pytest.LogCaptureFixture, error: Exception
) -> None:
    def refuse() -> Any:
        raise error

    copies = scene.make(make_event=refuse, timing="device_event")
    for _ in range(3):
        with copies.begin(bytes=10, stream=FakeStream()):
            pass
    assert (scene.samples(), scene.finished, scene.moved(), scene.active, scene.lost()) == (0, 3, 30, 0, 3)
    assert len(lines.messages) == 1
    assert type(error).__name__ in lines.messages[0]


def test_t2_without_torch_it_counts_too(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    copies = scene.make(make_event=None)
    stream = FakeStream()
    stream.device = types.SimpleNamespace(type="cuda", index=0)
    strange = object()
    for which in (stream, CURRENT, strange):
        copies.begin(stream=which).end(bytes=1)
    assert (scene.samples(), scene.moved(), scene.lost()) == (0, 3, 3)
    monkeypatch.setattr(importlib, "import_module", pytest.fail)  # It is looked for once.
    for which in (stream, CURRENT, strange):
        copies.begin(stream=which).end(bytes=1)
    assert (scene.moved(), scene.lost()) == (6, 6)


def test_t2_an_event_that_fails_after_the_copy_counts_without_a_duration(scene: Scene) -> None:
    class Fragile(FakeEvent):
        def record(self, stream: FakeStream) -> None:
            if stream.put_ms:
                raise RuntimeError("stream capture")
            super().record(stream)

    copies, stream = scene.make(make_event=Fragile), FakeStream()
    with copies.begin(bytes=5, stream=stream):
        stream.copy(1.0)
    assert (scene.samples(), scene.finished, scene.moved(), scene.active, scene.lost()) == (0, 1, 5, 0, 1)


@pytest.mark.parametrize(
    ("attributes", "which"),
    [(["cuda"], "cuda"), (["xpu"], "xpu"), ([], "generic")],
)
def test_events_are_those_of_the_streams_own_device(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, attributes: list[str], which: str
) -> None:
    made: list[tuple[str, dict[str, Any]]] = []

    def maker(name: str) -> Any:
        def make(*args: Any, **kwargs: Any) -> FakeEvent:
            made.append((name, {"args": args, **kwargs}))
            return FakeEvent()

        return make

    torch = types.ModuleType("torch")
    torch.Event = maker("generic")  # type: ignore[attr-defined]
    for name in attributes:
        setattr(torch, name, types.SimpleNamespace(Event=maker(name)))
    monkeypatch.setitem(sys.modules, "torch", torch)
    stream = FakeStream()
    stream.device = types.SimpleNamespace(type=attributes[0] if attributes else "mtia", index=1)  # type: ignore
    copies = scene.make(make_event=None)
    copies.begin(stream=stream).end()
    stream.run()
    assert scene.settled()
    assert [name for name, _ in made] == [which, which]
    assert all(options["enable_timing"] is True for _, options in made)
    assert made[0][1]["args"] == (() if attributes else ("mtia:1",))
    assert scene.samples() == 1


def test_t3_durations_have_buckets_of_their_own(scene: Scene) -> None:
    stream = FakeStream()
    for milliseconds in (3.0, 200.0, 1_700.0, 45_000.0):
        with scene.transfers.begin(stream=stream):
            stream.copy(milliseconds)
    stream.run()
    assert scene.settled()
    cell = scene.rows.histogram(semconv.TRANSFER_DURATION, **ROUTE, timing="device_event")
    assert cell is not None
    assert sorted(cell.read()[0])[-5:] == [0, 1, 1, 1, 1]


def test_t4_events_that_go_back_to_a_pool_tell_the_first_transfers_time(scene: Scene) -> None:
    stream, start, end = FakeStream(), FakeEvent(), FakeEvent()
    for milliseconds in (40.0, 3.0):
        copy = scene.transfers.begin()
        start.record(stream)
        stream.copy(milliseconds)
        end.record(stream)
        stream.run()  # The engine has waited for it, and puts its events back.
        copy.end(events=(start, end))
        assert scene.seconds() == pytest.approx({40.0: 0.04, 3.0: 0.043}[milliseconds])
    assert (scene.samples(), scene.active, scene.lost()) == (2, 0, 0)


def test_t4_events_that_are_recorded_again_too_early_tell_no_time_for_the_first(
    scene: Scene, lines: pytest.LogCaptureFixture
) -> None:
    stream, start, end = FakeStream(), FakeEvent(), FakeEvent()
    for milliseconds in (40.0, 3.0):
        copy = scene.transfers.begin(bytes=1)
        start.record(stream)
        stream.copy(milliseconds)
        end.record(stream)
        copy.end(events=(start, end))  # Not done yet.
    assert not scene.settled()
    stream.run()
    assert scene.settled()
    assert (scene.samples(), scene.seconds()) == (1, 0.003)
    assert (scene.finished, scene.moved(), scene.active, scene.lost()) == (2, 2, 0, 1)
    assert "recorded again" in lines.messages[0]


def test_the_first_of_a_pair_takes_nothing_of_the_seconds(scene: Scene) -> None:
    stream, start, end = FakeStream(), FakeEvent(), FakeEvent()
    copies = [scene.transfers.begin() for _ in range(2)]
    for copy in copies:
        start.record(stream)
        stream.copy(7.0)
        end.record(stream)
        copy.end(events=(start, end))
    scene.transfers.given_up(copies[0])
    assert foreign.waiting[id(end)] is copies[1]
    scene.transfers.given_up(copies[1])
    assert id(end) not in foreign.waiting


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError, "ValueError"),
        (ValueError("x"), "ValueError"),
        ("partial", "partial"),
        ("", "_OTHER"),
        (type("Odd", (Exception,), {"__name__": 5})(), "Odd"),
        ("a\ud800", "a?"),
    ],
)
def test_what_went_wrong_is_a_class_or_a_word(scene: Scene, error: Any, kind: str) -> None:
    scene.transfers.begin().end(error=error)
    assert scene.rows.value(semconv.TRANSFER_OPERATIONS, **ROUTE, error=kind) == 1
    assert scene.failed() is None


def test_errors_that_are_messages_have_few_rows_and_all_are_counted(
    scene: Scene, lines: pytest.LogCaptureFixture
) -> None:
    for number in range(3000):
        scene.transfers.begin().end(error=f"timeout after {number} ms")
    scene.transfers.begin().end(error="timeout after 2 ms")
    rows = scene.rows.values(semconv.TRANSFER_OPERATIONS)
    assert len(rows) == 1 + ERROR_TYPES + 1  # Those that ended well, the first kinds, and all others.
    assert scene.rows.value(semconv.TRANSFER_OPERATIONS, **ROUTE, error="timeout after 2 ms") == 2
    assert scene.rows.value(semconv.TRANSFER_OPERATIONS, **ROUTE, error="_OTHER") == 3000 - ERROR_TYPES
    assert scene.rows.total(semconv.TRANSFER_OPERATIONS) == 3001
    assert lines.messages == [
        "kvcache: transfers from device to host: more than 16 kinds of errors; others are '_OTHER'"
    ]
    assert len(scene.transfers._failures) == ERROR_TYPES + 1


def test_a_dict_of_tokens_may_be_used_again(scene: Scene) -> None:
    stream, start, end, tokens = FakeStream(), FakeEvent(), FakeEvent(), {"kv": 64}
    with scene.transfers.begin(stream=stream, tokens=tokens):
        stream.copy(1.0)
    tokens["kv"] = 32
    copy = scene.transfers.begin(tokens=tokens)
    start.record(stream)
    end.record(stream)
    copy.end(events=(start, end))
    tokens["kv"] = 1
    stream.run()
    assert scene.settled()
    assert scene.tokens() == 96


def test_an_end_at_no_time_is_an_end(scene: Scene) -> None:
    nonsense: Any = "x"
    scene.transfers.begin(bytes=3).end(at=nonsense)
    assert (scene.active, scene.finished, scene.moved("wall_clock"), scene.failed()) == (0, 1, 3, 1)


def test_t4_events_that_are_lent_are_read_now_or_not_at_all(scene: Scene, lines: pytest.LogCaptureFixture) -> None:
    stream, start, end = FakeStream(), FakeEvent(), FakeEvent()
    copy = scene.transfers.begin(bytes=7)
    start.record(stream)
    stream.copy(40.0)
    end.record(stream)
    copy.end(events=(start, end), lent=True)
    stream.run()
    assert scene.settled()
    assert (scene.samples(), scene.finished, scene.moved(), scene.active, scene.lost()) == (0, 1, 7, 0, 1)
    assert "lent" in lines.messages[0]


def test_somebody_elses_events_are_read_when_they_are_done(scene: Scene) -> None:
    stream, start, end = FakeStream(), FakeEvent(), FakeEvent()
    with scene.transfers.begin(bytes=7) as copy:
        start.record(stream)
        stream.copy(8.0)
        end.record(stream)
        copy.events = (start, end)
    assert not scene.settled()
    assert scene.active == 1
    stream.run()
    assert scene.settled()
    assert (scene.samples(), scene.seconds(), scene.active) == (1, 0.008, 0)
    assert scene.device.made == []


@pytest.mark.parametrize("events", [(1, 2), object(), (FakeEvent(),), "ab", ()])
def test_what_are_no_events_tells_no_time(scene: Scene, events: Any) -> None:
    scene.transfers.begin(bytes=7).end(events=events)
    assert (scene.samples(), scene.finished, scene.moved(), scene.active, scene.lost()) == (0, 1, 7, 0, 1)


def test_what_a_backend_reports_is_taken_as_it_is(scene: Scene) -> None:
    scene.transfers.begin().end(seconds=0.003, bytes=4096, tokens=16)
    assert (scene.samples("engine_report"), scene.seconds("engine_report")) == (1, 0.003)
    assert (scene.moved("engine_report"), scene.moved("device_event"), scene.tokens()) == (4096, 0, 16)


def test_the_wall_clock_is_from_beginning_to_end() -> None:
    scene = Scene()
    with scene.transfers.begin(bytes=9):
        assert scene.active == 1
        time.sleep(0.02)
    assert scene.active == 0
    assert 0.02 <= scene.seconds("wall_clock") < 1.0
    assert scene.moved("wall_clock") == 9


def test_the_queue_is_from_the_request_to_the_beginning() -> None:
    scene = Scene()
    scene.transfers.begin(requested=time.monotonic() - 5.0).end()
    cell = scene.rows.histogram(semconv.TRANSFER_QUEUE_DURATION, **ROUTE)
    assert cell is not None
    assert cell.read()[1] == pytest.approx(5.0, abs=0.5)


# ------------------------------------------------------------------------------------------------ order and pooling


def test_streams_are_read_as_they_are_done_and_each_in_its_order(scene: Scene) -> None:
    first, second = FakeStream(), FakeStream()
    for stream, milliseconds in ((first, 1.0), (second, 2.0), (first, 4.0), (second, 8.0)):
        with scene.transfers.begin(bytes=1, stream=stream):
            stream.copy(milliseconds)
    second.run()
    scene.settled()
    assert (scene.samples(), scene.active) == (2, 2)
    assert scene.seconds() == pytest.approx(0.010)
    first.done_ms = 1.0
    scene.settled()
    assert scene.seconds() == pytest.approx(0.011)
    first.run()
    assert scene.settled()
    assert scene.seconds() == pytest.approx(0.015)


def test_a_stream_that_is_another_object_each_time_is_known_by_its_number(scene: Scene) -> None:
    class View(FakeStream):
        """As `torch.cuda.current_stream()` makes one each time: it says which stream it is."""

        def __init__(self, device_index: Any, stream_id: Any = 3) -> None:
            super().__init__()
            self.device_type, self.device_index, self.stream_id = 1, device_index, stream_id

    streams = scene.transfers._streams
    first, second = streams.stream(View(0)), streams.stream(View(1))
    assert first is streams.stream(View(0)) is not second
    assert second is streams.stream(View(1)) is not streams.stream(View(1, 4))
    assert first.lane is not second.lane
    assert len(streams._streams) == 3  # No more is kept of those that are gone.
    for odd in (View(0, "3"), View(0, None), View([], 5)):  # One whose number is none is known as an object.
        assert streams.stream(odd) is streams.stream(odd)
    assert scene.lost() == 0


def test_in_a_stream_nothing_is_asked_before_what_came_first_is_done(scene: Scene) -> None:
    class Rushed(FakeEvent):  # Says at once that it is done, whatever came before.
        def query(self) -> bool:
            super().query()
            return self.at_ms != 1.0 or self.passed

    stream = FakeStream()
    scene.recorder.harvester._reader = types.SimpleNamespace(asleep=False, ended=False)  # type: ignore[assignment]
    copies = scene.make(make_event=lambda: scene.device.made.append(Rushed()) or scene.device.made[-1])
    for _ in range(3):
        with copies.begin(stream=stream):
            stream.copy(1.0)
    scene.recorder.harvester._round(None, None)
    ends = scene.device.made[1::2]
    asked = ends[0].queries
    scene.recorder.harvester._round(None, None)
    assert ends[0].queries - asked == 1  # Not once for each that waits behind it.
    assert [bool(event.askers) for event in ends] == [True, False, False]
    stream.run()
    scene.recorder.harvester._round(None, None)
    assert scene.samples() == 3
    scene.recorder.harvester._reader = None


@given(
    work=st.lists(st.tuples(st.integers(0, 3), st.floats(0.0, 100.0)), max_size=30),
    order=st.randoms(use_true_random=False),
)
@settings(max_examples=30, deadline=None)
def test_whatever_order_streams_are_done_in_each_copy_has_its_own_time(
    work: list[tuple[int, float]], order: random.Random
) -> None:
    scene = Scene(timing="device_event")
    streams = [FakeStream() for _ in range(4)]
    samples: list[float] = []
    record = (
        scene.transfers._usual.duration.record
    )  # The sum alone is the same whichever ends go with which beginnings.
    scene.transfers._usual.duration = types.SimpleNamespace(  # type: ignore[assignment]
        record=lambda seconds: samples.append(seconds) or record(seconds)
    )
    for number, milliseconds in work:
        with scene.transfers.begin(bytes=1, stream=streams[number]):
            streams[number].copy(milliseconds)
    for stream in order.sample(streams, 4):
        stream.run()
        scene.settled()
    assert scene.settled()
    assert (scene.samples(), scene.active, scene.moved(), scene.lost()) == (len(work), 0, len(work), 0)
    assert sorted(samples) == pytest.approx(sorted(milliseconds / 1000 for _, milliseconds in work), abs=1e-9)
    assert scene.seconds() == pytest.approx(sum(samples))


def test_an_event_is_used_again_only_after_it_was_read(scene: Scene) -> None:
    stream, draw = FakeStream(), random.Random(5)
    for _ in range(500):
        held = [event for event in scene.device.made if event.recorded > event.read]
        with scene.transfers.begin(stream=stream):
            stream.copy(1.0)
        assert all(event.recorded <= event.read + 1 for event in scene.device.made)
        assert all(event.recorded > event.read for event in held if not event.askers or event.stream is None)
        if draw.random() < 0.3:
            stream.run()
            scene.settled()
    stream.run()
    assert scene.settled()
    assert scene.samples() == 500
    assert len(scene.device.made) < 200
    assert all(event.recorded == event.read for event in scene.device.made)


# ------------------------------------------------------------------------------------------ what does not go well


def test_a_device_that_is_never_done_stays_active_and_is_said_once(lines: pytest.LogCaptureFixture) -> None:
    scene = Scene(timing="device_event", deadline_s=0.05)
    stuck, stream = FakeStream(), FakeStream()
    for which in (stuck, stuck, stream):
        with scene.transfers.begin(bytes=1, stream=which):
            which.copy(4.0)
    stream.run()
    wait_until(lambda: scene.lost() == 2)
    assert scene.settled()
    assert (scene.active, scene.finished, scene.moved(), scene.samples()) == (2, 1, 1, 1)
    assert len(lines.messages) == 1
    assert "not done after 0.05 s" in lines.messages[0]
    assert len(scene.recorder.harvester._pairs) == 0
    stuck.run()
    assert scene.settled()
    assert scene.active == 2


def test_what_waits_is_bounded_and_what_finds_no_room_counts_without_a_duration(scene: Scene) -> None:
    scene.recorder.harvester._limit = 10
    stuck = FakeStream()
    for _ in range(100):
        with scene.transfers.begin(bytes=1, stream=stuck):
            stuck.copy(1.0)
    assert len(scene.recorder.harvester._pairs) <= 11
    assert scene.lost("queue_full") == scene.finished == scene.moved() >= 89
    stuck.run()
    assert scene.settled()
    assert (scene.finished, scene.moved(), scene.active) == (100, 100, 0)
    assert scene.samples() + scene.lost("queue_full") == 100


@pytest.mark.parametrize("error", [RuntimeError("CUDA error: device-side assert"), SystemExit(1), AttributeError()])
def test_an_event_whose_query_raises_counts_without_a_duration(scene: Scene, error: BaseException) -> None:
    class Broken(FakeEvent):
        def query(self) -> bool:
            raise error

    copies, stream = scene.make(make_event=Broken), FakeStream()
    for _ in range(3):
        with copies.begin(bytes=1, stream=stream):
            stream.copy(1.0)
    assert scene.settled()
    assert (scene.samples(), scene.finished, scene.active, scene.lost()) == (0, 3, 0, 3)


def test_nothing_that_is_done_is_lost_at_the_end(scene: Scene) -> None:
    stream, stuck = FakeStream(), FakeStream()
    for _ in range(50):
        with scene.transfers.begin(bytes=1, stream=stream):
            stream.copy(1.0)
        with scene.transfers.begin(bytes=1, stream=stuck):
            stuck.copy(1.0)
    stream.run()
    scene.recorder.harvester.stop(ENOUGH_S)
    assert (scene.samples(), scene.finished, scene.active, scene.lost()) == (50, 50, 50, 50)


def test_a_begin_that_never_ends_stays_active_and_is_counted_once(lines: pytest.LogCaptureFixture) -> None:
    scene = Scene(deadline_s=0.02)
    forgotten = scene.transfers.begin(bytes=1)
    scene.transfers.begin().end()
    time.sleep(0.03)
    assert (scene.active, scene.active, scene.lost()) == (1, 1, 1)  # Whoever reads what is active has it looked after.
    assert lines.messages == [
        "kvcache: transfers from device to host: one has begun and not ended for 0.02 s, and stays active"
    ]
    forgotten.end()
    assert (scene.active, scene.finished, scene.moved("wall_clock"), scene.lost()) == (0, 2, 1, 1)


def test_one_that_nobody_has_any_more_is_not_active_for_ever(lines: pytest.LogCaptureFixture) -> None:
    scene = Scene(deadline_s=0.02)
    scene.transfers.begin(bytes=1)
    kept, keyed = scene.transfers.begin(bytes=1), scene.transfers.begin(bytes=1, key=1).began
    time.sleep(0.03)
    assert (scene.active, scene.active, scene.lost(), scene.finished) == (2, 2, 3, 0)
    assert len(lines.messages) == 2
    assert keyed
    kept.end()
    scene.transfers.end(1)
    assert (scene.active, scene.lost(), scene.finished, scene.wrong("missing_row")) == (0, 3, 2, 0)


def test_begins_that_never_end_take_a_bounded_memory() -> None:
    scene = Scene(limit=100)
    for _ in range(1_000):
        scene.transfers.begin()
    assert len(scene.transfers._underway) <= 2 * 100 + underway.A_FEW
    assert scene.active == 1_000
    for key in range(3_000):
        scene.transfers.begin(key=key)
    assert scene.transfers.open_keys == 100 * KEPT
    assert scene.active == 4_000


def test_ends_by_a_key_that_found_no_room_are_counted_and_are_nobodys_error(lines: pytest.LogCaptureFixture) -> None:
    scene = Scene(limit=2, pools=("kv", "swa"))
    room, begun = 2 * KEPT, 2 * KEPT + 10
    for key in range(begun):
        scene.transfers.begin(key=key, bytes=10, tokens=1)
    assert (scene.active, scene.transfers.open_keys) == (begun, room)
    assert "more than 32 wait to be ended by their key; the oldest will have no duration" in lines.text
    dropped = scene.lost("queue_full")
    for key in range(begun):
        said: dict[str, Any] = {3: {"error": "gone"}, 4: {"bytes": 7, "tokens": {"swa": 2}}}.get(key, {})
        scene.transfers.end(key, **said)
    assert (scene.active, scene.finished, scene.samples("wall_clock")) == (0, begun - 1, room)
    assert (scene.moved("wall_clock"), scene.tokens("kv"), scene.tokens("swa")) == (10 * room + 7, room, 2)
    assert scene.rows.value(semconv.TRANSFER_OPERATIONS, **ROUTE, error="gone") == 1
    assert (scene.wrong("missing_row"), scene.wrong("other"), scene.failed()) == (0, 0, None)
    assert scene.lost("queue_full") == dropped >= 10
    scene.transfers.end("one more")
    assert scene.wrong("missing_row") == 1
    for key in range(room + 1):
        scene.transfers.begin(key=key)
    scene.transfers.end("unknown", bytes="many")  # type: ignore[arg-type]
    assert (scene.active, scene.failed(), scene.wrong("missing_row")) == (room, 1, 1)


def test_five_thousand_keys_are_no_matter() -> None:
    scene = Scene()
    for key in range(5_000):
        scene.transfers.begin(key=key, bytes=10)
    assert scene.active == 5_000
    for key in range(5_000):
        scene.transfers.end(key)
    assert (scene.active, scene.finished, scene.moved("wall_clock")) == (0, 5_000, 50_000)
    assert (scene.samples("wall_clock"), scene.wrong("missing_row"), scene.wrong("other")) == (5_000, 0, 0)


def test_tokens_of_several_pools_are_counted_all_or_not_at_all() -> None:
    scene = Scene(pools=("kv", "swa"))
    scene.transfers.begin().end(tokens={"kv": 5, "swa": "x"})  # type: ignore[dict-item]
    scene.transfers.begin().end(tokens=types.MappingProxyType({"kv": 5, "swa": 1.5}))  # type: ignore[dict-item]
    assert (scene.tokens("kv"), scene.tokens("swa"), scene.failed()) == (0, 0, 2)
    scene.transfers.begin().end(tokens={"kv": 5, "swa": True})
    assert (scene.tokens("kv"), scene.tokens("swa"), scene.failed()) == (5, 1, 2)


def test_one_that_takes_long_is_not_taken_for_the_many_that_end_beside_it(lines: pytest.LogCaptureFixture) -> None:
    scene = Scene(limit=100)
    long = scene.transfers.begin()
    for _ in range(1_000):
        scene.transfers.begin().end()
        assert len(scene.transfers._underway) <= 2 * underway.A_FEW
    assert (scene.active, scene.lost("queue_full"), lines.messages) == (1, 0, [])
    long.end()


def test_what_has_really_not_ended_is_bounded_and_counted(lines: pytest.LogCaptureFixture) -> None:
    scene = Scene(limit=100)
    begun = [scene.transfers.begin() for _ in range(150)]
    assert (scene.active, scene.lost("queue_full"), len(scene.transfers._underway)) == (150, 50, 100)
    assert len(lines.messages) == 1
    for transfer in begun:
        transfer.end()
    assert (scene.active, scene.lost("queue_full"), len(scene.transfers._underway)) == (0, 50, 0)


def test_one_that_is_overdue_is_counted_behind_one_that_is_not() -> None:
    scene = Scene(deadline_s=100.0)
    young, old = scene.transfers.begin(), scene.transfers.begin()
    old.began -= 200.0
    assert (scene.active, scene.lost()) == (2, 1)
    young.end()


def test_ended_twice_counts_once_and_is_said_once(lines: pytest.LogCaptureFixture) -> None:
    scene = Scene()
    copy = scene.transfers.begin(bytes=5)
    for _ in range(3):
        copy.end()
    assert (scene.finished, scene.active, scene.moved("wall_clock"), scene.wrong("missing_row")) == (1, 0, 5, 2)
    assert len(lines.messages) == 1


def test_an_end_without_a_begin_counts_nothing_and_is_said_once(lines: pytest.LogCaptureFixture) -> None:
    scene = Scene()
    for key in (1, "x", None):
        scene.transfers.end(key, bytes=5)
    scene.transfers.begin(key=7).end()
    scene.transfers.end([], bytes=5)  # type: ignore[arg-type]
    assert (scene.finished, scene.active, scene.moved("wall_clock"), scene.wrong("missing_row")) == (1, 0, 0, 3)
    assert scene.failed() == 1
    assert len(lines.messages) == 2


def test_transfers_end_by_their_key_in_any_order() -> None:
    scene = Scene()
    for key in range(5):
        scene.transfers.begin(key=key, bytes=2**key)
    for key in (3, 0, 4):
        scene.transfers.end(key)
    assert (scene.active, scene.finished, scene.moved("wall_clock")) == (2, 3, 8 + 1 + 16)
    scene.transfers.begin(key=1, bytes=100)  # It is used again: whoever had it has ended unseen.
    assert (scene.active, scene.wrong("other")) == (2, 1)
    scene.transfers.begin(key=5).end()  # It has ended, if not by its key, which is free.
    scene.transfers.begin(key=5).cancel()
    assert (scene.active, scene.finished, scene.wrong("other")) == (2, 4, 1)
    scene.transfers._keys.pop(5)
    scene.transfers.forget("reset")
    assert (scene.active, scene.finished, scene.transfers.open_keys) == (0, 4, 0)
    assert scene.rows.value(semconv.TRANSFER_OPERATIONS, **ROUTE, error="reset") == 2


def test_an_end_that_comes_before_its_key_meets_it() -> None:
    scene = Scene()
    early, late, other = (scene.transfers.begin(key=LATER) for _ in range(3))
    scene.transfers.end(1, bytes=5, at=early.began + 0.25)
    assert (scene.active, scene.finished, scene.wrong("missing_row")) == (3, 0, 0)
    scene.transfers.keep(early, 1)
    assert (early.ended, scene.moved("wall_clock"), scene.transfers.open_keys) == (True, 5, 0)
    assert scene.seconds("wall_clock") == pytest.approx(0.25)
    scene.transfers.end(7)
    scene.transfers.end(7)  # One of them is too many.
    assert scene.wrong("missing_row") == 1
    scene.transfers.keep(late, 2)
    assert scene.wrong("missing_row") == 1
    other.end()
    assert scene.active == 1  # Whoever reads it has it looked after: nobody is left who could be called 7.
    assert scene.wrong("missing_row") == 2
    scene.transfers.end(2)
    assert (scene.active, scene.finished, len(scene.transfers._keys._launching)) == (0, 3, 0)


def test_an_end_does_not_wait_for_a_transfer_that_began_after_it() -> None:
    scene = Scene()
    hanging = scene.transfers.begin(key=LATER)
    scene.transfers.end(1)
    scene.transfers.keep(again := scene.transfers.begin(key=LATER), 1)
    assert (again.ended, scene.wrong("missing_row"), scene.transfers.open_keys) == (False, 1, 1)
    hanging.cancel()


def test_ends_that_wait_for_a_launch_that_hangs_are_bounded_and_aged() -> None:
    scene = Scene(limit=10, deadline_s=0.05)
    scene.transfers.begin(key=LATER)
    for key in range(100):
        scene.transfers.end(key)
    assert len(scene.transfers._keys._early) == 10
    assert scene.wrong("missing_row") == 90
    time.sleep(0.06)
    assert scene.active == 1
    assert (len(scene.transfers._keys._early), scene.wrong("missing_row")) == (0, 100)


def test_lent_events_of_an_early_end_are_read_when_it_comes(scene: Scene) -> None:
    stream, events = FakeStream(), (FakeEvent(), FakeEvent())
    launched = scene.transfers.begin(key=LATER)
    events[0].record(stream)
    stream.copy(8.0)
    events[1].record(stream)
    stream.run()
    scene.transfers.end(1, events=events, lent=True)
    stream.copy(100.0)
    events[1].record(stream)
    scene.transfers.keep(launched, 1)
    assert (scene.samples(), scene.seconds(), scene.lost()) == (1, 0.008, 0)


def test_whichever_thread_is_first_every_end_meets_its_key() -> None:
    scene, jobs, times = Scene(), queue.SimpleQueue[int](), 3_000
    interval = sys.getswitchinterval()

    def end() -> None:
        for _ in range(times):
            scene.transfers.end(jobs.get(), bytes=1)

    ending = [threading.Thread(target=end) for _ in range(2)]
    sys.setswitchinterval(1e-5)
    try:
        for thread in ending:
            thread.start()
        for key in range(2 * times):
            launched = scene.transfers.begin(key=LATER)
            jobs.put(key)
            if key % 3 == 0:
                time.sleep(0)
            scene.transfers.keep(launched, key)
        for thread in ending:
            thread.join(ENOUGH_S)
    finally:
        sys.setswitchinterval(interval)
    assert (scene.active, scene.finished, scene.moved("wall_clock")) == (0, 2 * times, 2 * times)
    assert (scene.wrong("missing_row"), scene.wrong("other"), scene.failed()) == (0, 0, None)
    assert (scene.transfers.open_keys, len(scene.transfers._keys._early)) == (0, 0)


def test_threads_that_crowd_each_other_out_raise_nothing() -> None:
    scene, interval = Scene(limit=2), sys.getswitchinterval()

    def crowd(which: int) -> None:
        for number in range(2_000):
            scene.transfers.begin(key=(which, number))

    crowding = [threading.Thread(target=crowd, args=(which,)) for which in range(4)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in crowding:
            thread.start()
        for thread in crowding:
            thread.join(ENOUGH_S)
    finally:
        sys.setswitchinterval(interval)
    assert scene.failed() is None
    assert scene.transfers.open_keys <= 2 * KEPT + len(crowding)
    assert (scene.active, scene.wrong("other")) == (8_000, 0)
    assert scene.transfers._keys.forgotten == 8_000 - scene.transfers.open_keys


def test_a_block_that_raises_is_a_transfer_that_failed(scene: Scene) -> None:
    stream = FakeStream()
    with pytest.raises(KeyError, match="gone"), scene.transfers.begin(bytes=5, tokens=5, stream=stream):
        raise KeyError("gone")
    assert (scene.active, scene.finished, scene.moved(), scene.tokens()) == (0, 0, 0, 0)
    assert scene.rows.value(semconv.TRANSFER_OPERATIONS, **ROUTE, error="KeyError") == 1
    scene.transfers.begin(bytes=5).end(error="partial", bytes=3)
    assert scene.moved() == 3
    assert scene.rows.value(semconv.TRANSFER_OPERATIONS, **ROUTE, error="partial") == 1
    assert scene.samples("wall_clock") == 0


NONSENSE: list[dict[str, Any]] = [
    {"bytes": "many"},
    {"bytes": 1.5},
    {"tokens": "many"},
    {"tokens": {"kv": None}},
    {"tokens": object()},
    {"seconds": "long"},
]


@pytest.mark.parametrize("said", NONSENSE, ids=repr)
def test_nonsense_is_counted_and_said_once_and_never_raises(
    lines: pytest.LogCaptureFixture, said: dict[str, Any]
) -> None:
    scene = Scene()
    for _ in range(3):
        scene.transfers.begin().end(**said)
    assert scene.failed() == 3
    assert len(lines.messages) == 1


def test_negative_amounts_are_not_added_and_counted(scene: Scene) -> None:
    scene.transfers.begin().end(bytes=-5, tokens={"kv": -3}, seconds=-1.0)
    assert (scene.moved("engine_report"), scene.tokens(), scene.samples("engine_report")) == (0, 0, 0)
    assert (scene.finished, scene.wrong("negative_delta")) == (1, 3)


@pytest.mark.parametrize("seconds", [math.nan, math.inf])
def test_times_that_are_none_are_not_recorded(scene: Scene, seconds: float) -> None:
    scene.transfers.begin().end(seconds=seconds)
    assert (scene.finished, scene.samples("engine_report"), scene.wrong("other")) == (1, 0, 1)


class Arrays:
    """Stands in for an array of one number: its sums and comparisons are arrays, and it can be made a float."""

    def __init__(self, number: float) -> None:
        self.number = number

    def __float__(self) -> float:
        return self.number

    def __index__(self) -> int:
        return int(self.number)

    def _array(self, _: Any = None) -> Arrays:
        return self

    __add__ = __radd__ = __sub__ = __truediv__ = __ge__ = __le__ = __lt__ = __gt__ = _array

    def __rsub__(self, other: float) -> Arrays:
        return Arrays(other - self.number)


class Halves(float):
    """Stands in for a number of half the precision, in which sums are made as well."""

    def _half(self, _: float) -> Halves:
        return Halves(-1.0)

    __add__ = __radd__ = __truediv__ = _half


class Telling(FakeEvent):
    """An event that is passed, and tells a time of somebody else's."""

    def __init__(self, milliseconds: Any) -> None:
        super().__init__()
        self.milliseconds = milliseconds

    def record(self, stream: FakeStream) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Any) -> Any:
        return self.milliseconds


@pytest.mark.parametrize("number", [Arrays, Halves])
def test_numbers_of_somebody_elses_are_pythons_own_in_a_cell(scene: Scene, number: Any) -> None:
    said: dict[str, Any] = {"seconds": number(0.25), "bytes": Arrays(7), "tokens": {"kv": Arrays(3)}}
    scene.transfers.begin().end(**said)
    scene.transfers.begin().end(events=(Telling(number(8.0)), Telling(0.0)))
    ours = scene.make(make_event=lambda: Telling(number(4.0)))
    with ours.transfer(stream=FakeStream()):
        pass
    scene.transfers.begin(requested=number(time.monotonic() - 5.0)).end()
    assert scene.settled()
    cell = scene.rows.histogram(semconv.TRANSFER_QUEUE_DURATION, **ROUTE)
    assert cell is not None
    sums = (scene.seconds("engine_report"), scene.seconds(), cell.read()[1])
    assert [type(each) for each in (*sums, scene.moved("engine_report"), scene.tokens())] == [float] * 3 + [int] * 2
    assert sums == (0.25, 0.012, pytest.approx(5.0, abs=0.5))
    assert (scene.failed(), scene.lost(), scene.active) == (None, 0, 0)


def test_a_request_at_no_time_costs_a_transfer_nothing_else(scene: Scene) -> None:
    scene.transfers.begin(requested="soon", key=1)  # type: ignore[arg-type]
    scene.transfers.end(1, seconds=0.1)
    assert (scene.failed(), scene.finished, scene.active, scene.wrong("missing_row")) == (1, 1, 0, 0)


def test_a_pool_that_was_not_declared_is_counted_and_said_once(scene: Scene, lines: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        scene.transfers.begin().end(tokens={"kv": 1, "mamba": 2})
    assert (scene.tokens(), scene.tokens("mamba"), scene.lost("other")) == (3, None, 3)
    assert len(lines.messages) == 1
    assert "'mamba'" in lines.messages[0]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"source": "gpu"}, "'gpu'"),
        ({"destination": ""}, "''"),
        ({"pools": ("kv", "kvv")}, "'kvv'"),
        ({"pools": ()}, "pools"),
        ({"timing": "guess"}, "'guess'"),
        ({"deadline_s": 0}, "deadline_s"),
        ({"deadline_s": math.nan}, "deadline_s"),
    ],
)
def test_what_the_catalogue_does_not_have_is_said_at_set_up(arguments: dict[str, Any], word: str) -> None:
    identity = Identity("custom", "Own")
    probe = CacheProbe(Recorder(identity), identity)
    with pytest.raises(ValueError, match=word):
        Transfers(probe, **{"source": "device", "destination": "host", **arguments})


@given(st.dictionaries(st.text(), st.integers(-5, 5), max_size=3), st.text())
@settings(deadline=None)
def test_hostile_words_make_no_series_and_break_nothing(tokens: dict[str, int], error: str) -> None:
    scene = Scene()
    scene.transfers.begin().end(tokens=tokens)
    scene.transfers.begin().end(error=error)
    assert {dict(key)[semconv.KVCACHE_POOL] for key in scene.rows.values(semconv.TRANSFER_TOKENS)} == {"kv"}
    assert scene.active == 0
    assert scene.rows.total(semconv.TRANSFER_OPERATIONS) == 2
    for key in scene.rows.values(semconv.TRANSFER_OPERATIONS):
        for _, value in key:
            assert len(str(value).encode()) <= 4 * 128


# ------------------------------------------------------------------------------------------------ many, and gone


def test_eight_threads_lose_nothing(scene: Scene) -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        scene.recorder.harvester._limit = 10**6
        each = 2_000

        def work() -> None:
            stream = FakeStream()
            for number in range(each):
                with scene.transfers.begin(bytes=1, tokens=1, stream=stream if number % 2 else None, key=None):
                    stream.copy(1.0)
                stream.run()

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert scene.settled()
    assert (scene.active, scene.finished, scene.tokens(), scene.lost()) == (0, 8 * each, 8 * each, 0)
    assert (scene.samples(), scene.samples("wall_clock")) == (4 * each, 4 * each)
    assert scene.failed() is None


class Panic(BaseException):
    """What a panic of Rust code raises is no `Exception` either."""


class Panicking(FakeEvent):
    def record(self, stream: FakeStream) -> None:
        raise Panic("record")

    def query(self) -> bool:
        raise Panic("query")

    def __index__(self) -> int:
        raise Panic("index")


@pytest.mark.parametrize(
    "said", [{"bytes": Panicking()}, {"tokens": Panicking()}, {"tokens": {"kv": Panicking()}}], ids=str
)
def test_amounts_that_panic_are_counted(scene: Scene, said: dict[str, Any]) -> None:
    scene.transfers.begin().end(**said)
    assert (scene.failed(), scene.active, scene.finished) == (1, 0, 1)


def test_events_that_panic_tell_no_time(scene: Scene) -> None:
    copies = scene.make(make_event=Panicking, timing="device_event")
    with copies.transfer(bytes=2, stream=FakeStream()):
        pass
    copies.begin().end(bytes=3, events=(FakeEvent(), Panicking()))
    made = iter([FakeEvent(), Panicking()])
    with scene.make(make_event=lambda: next(made)).transfer(bytes=4, stream=FakeStream()):
        pass
    assert (scene.lost(), scene.active, scene.finished, scene.moved()) == (3, 0, 3, 9)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_what_a_signal_handler_raises_goes_through(scene: Scene, error: BaseException) -> None:
    class Interrupted(FakeEvent):
        def record(self, stream: FakeStream) -> None:
            raise error

    copies = scene.make(make_event=Interrupted)
    with pytest.raises(type(error)):
        copies.begin(stream=FakeStream())
    assert scene.active == 0


class Walk:
    """Whatever can be said of transfers, in any order, and what must come of it.

    Attributes:
        begun: Transfers that have begun.
        gone: Those that failed, were taken back, or lost their key to another.
        ended: Those that have ended well, as far as the host is concerned.
        bytes: What they moved.
        wrong: What was said and cannot be.
    """

    def __init__(self, scene: Scene, seed: int) -> None:
        self.scene = scene
        self.draw = random.Random(seed)
        self.streams = [FakeStream() for _ in range(3)]
        self.open: list[tuple[Any, int | None]] = []
        self.over: list[Any] = []
        self.begun = self.gone = self.ended = self.bytes = self.wrong = 0

    def step(self) -> None:
        self.draw.choice([self.begin, self.begin, self.end, self.end, self.fail, self.cancel, self.err, self.run])()

    def begin(self) -> None:
        key = self.draw.randrange(12) if self.draw.random() < 0.3 else None
        if key is not None and any(key == other for _, other in self.open):
            before = next(pair for pair in self.open if pair[1] == key)
            self.open.remove(before)
            self.gone, self.wrong = self.gone + 1, self.wrong + 1
        stream = self.draw.choice([None, *self.streams])
        transfer = self.scene.transfers.begin(stream=stream, key=key)
        if stream is not None:
            stream.copy(self.draw.random() * 10)
        self.open.append((transfer, key))
        self.begun += 1

    def end(self) -> None:
        if (pair := self.taken()) is None:
            return
        transfer, key = pair
        moved, how = self.draw.randrange(100), self.draw.choice(["plain", "seconds", "events", "lent", "nonsense"])
        said: dict[str, Any] = {"bytes": moved}
        if how == "seconds":
            said["seconds"] = self.draw.random()
        elif how in ("events", "lent"):
            stream, start, end = self.draw.choice(self.streams), FakeEvent(), FakeEvent()
            start.record(stream)
            stream.copy(1.0)
            end.record(stream)
            said |= {"events": (start, end), "lent": how == "lent"}
        elif how == "nonsense":
            said["events"] = (1, 2)
        if key is None:
            transfer.end(**said)
        else:
            self.scene.transfers.end(key, **said)
        self.over.append(transfer)
        self.ended, self.bytes = self.ended + 1, self.bytes + moved

    def fail(self) -> None:
        if (pair := self.taken()) is not None:
            if pair[1] is None:
                pair[0].end(error="full")
            else:
                self.scene.transfers.end(pair[1], error=OSError())
            self.over.append(pair[0])
            self.gone += 1

    def cancel(self) -> None:
        if self.open and self.open[-1][1] is None:
            self.open.pop()[0].cancel()
            self.gone += 1

    def err(self) -> None:
        if self.over:
            self.draw.choice(self.over).end()
        else:
            self.scene.transfers.end(99)
        self.wrong += 1

    def run(self) -> None:
        self.draw.choice(self.streams).run()
        self.scene.settled()

    def taken(self) -> tuple[Any, int | None] | None:
        return self.open.pop(self.draw.randrange(len(self.open))) if self.open else None


@pytest.mark.parametrize("seed", range(8))
def test_whatever_is_said_in_whatever_order_every_count_closes(scene: Scene, seed: int) -> None:
    walk = Walk(scene, seed)
    for _ in range(400):
        walk.step()
        finished, active = scene.finished or 0, scene.active or 0
        assert walk.begun == finished + walk.gone + active
        assert finished <= walk.ended
    for stream in walk.streams:
        stream.run()
    assert scene.settled()
    assert (scene.finished, scene.active) == (walk.ended, len(walk.open))
    clocks = ("device_event", "engine_report", "wall_clock")
    assert sum(scene.moved(clock) or 0 for clock in clocks) == walk.bytes
    wrong = (scene.wrong("missing_row") or 0) + (scene.wrong("other") or 0)
    assert wrong == walk.wrong
    assert sum(scene.samples(clock) for clock in clocks) + (scene.lost() or 0) == walk.ended
    assert scene.failed() is None


def test_a_hundred_thousand_transfers_leave_memory_and_threads_where_they_were(scene: Scene) -> None:
    stream = FakeStream()

    def work(times: int) -> None:
        for number in itertools.repeat(None, times):
            with scene.transfers.begin(bytes=1, stream=stream) as copy:
                stream.copy(1.0)
            stream.run()
            scene.transfers.begin(key=id(copy)).end(seconds=0.1)
            scene.transfers.end(id(copy))  # Counted as ended twice.
            del number

    def objects() -> int:
        """How many there are beside the device's events, of which there may be two for each pair that may wait."""
        assert scene.settled()
        gc.collect()
        events = sum(type(thing) in (FakeEvent, set) for thing in gc.get_objects())
        return len(gc.get_objects()) - events

    work(2_000)
    before, threads = objects(), threading.active_count()
    work(50_000)
    assert objects() < before + 500
    assert threading.active_count() <= threads
    assert len(scene.transfers._underway) <= 2 * underway.A_FEW
    assert scene.transfers.open_keys == 0
    assert len(scene.device.made) < 2 * timing.LIMIT + 100
    assert scene.active == 0


class Mark:
    """An event that is passed after it was asked so many times."""

    def __init__(self, asked: int = 0) -> None:
        self.left = asked

    def query(self) -> bool:
        self.left -= 1
        return self.left < 0

    def elapsed_time(self, _: Any) -> float:
        return 1.0


CLOCKS: dict[str, Callable[[Transfers], object]] = {
    "wall clock": lambda copies: copies.begin().end(),
    "engine report": lambda copies: copies.begin().end(seconds=0.5),
    "events that are done": lambda copies: copies.begin().end(events=(Mark(), Mark())),
    "events that wait": lambda copies: copies.begin().end(events=(Mark(), Mark(1))),
}


@pytest.mark.parametrize("clock", CLOCKS)
def test_a_transfer_is_counted_before_it_has_a_duration(clock: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(Identity("custom", "Order"))
    copies = Transfers(CacheProbe(recorder, recorder.identity), "device", "host")
    finished: list[int | float] = []
    record = Histogram.record

    def spied(cell: Histogram, sample: float) -> None:
        finished.append(sum(point.value for point in recorder.points(semconv.TRANSFER_OPERATIONS)))
        record(cell, sample)

    monkeypatch.setattr(Histogram, "record", spied)
    CLOCKS[clock](copies)
    assert recorder.harvester.flush(20.0)
    recorder.harvester.stop(20.0)
    assert finished == [1]


@pytest.mark.parametrize("clock", CLOCKS)
def test_a_transfer_that_says_nonsense_of_its_bytes_has_a_duration_all_the_same(clock: str) -> None:
    recorder = Recorder(Identity("custom", "Order"))
    copies = Transfers(CacheProbe(recorder, recorder.identity), "device", "host")
    begin = copies.begin
    copies.begin = lambda: begin(bytes=2.0)  # type: ignore[arg-type,method-assign,assignment]
    CLOCKS[clock](copies)
    assert recorder.harvester.flush(20.0)
    recorder.harvester.stop(20.0)
    [*samples] = (sum(row.cell.read()[0]) for row in recorder.histograms(semconv.TRANSFER_DURATION))
    assert sum(samples) == 1
    assert [point.value for point in recorder.points(semconv.TRANSFER_OPERATIONS)] == [1]
    assert sum(point.value for point in recorder.points(semconv.TELEMETRY_ERRORS)) == 1
