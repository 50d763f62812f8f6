"""Whatever a program says of its cache, whatever its objects are: nothing reaches it, and nothing is counted wrong."""

from __future__ import annotations

import functools
import gc
import math
import os
import time
import weakref
from typing import TYPE_CHECKING, Any

import pytest

import kvcache_otel as kv
from kvcache_otel import semconv
from kvcache_otel.engines.hooks import STEP_ASIDE_AFTER
from tests.support.fake_device import FakeDevice, FakeEvent, FakeStream
from tests.support.processes import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcache_otel.spec import MetricSpec
    from tests.engines.generic.conftest import Exported

TIERS = {"device": ("kv", "swa"), "host": "kv", "disk": "kv"}
BACKUP = {"source": "device", "destination": "host"}
TOLD = (semconv.TELEMETRY_ERRORS, semconv.ACCOUNTING_ERRORS, semconv.TELEMETRY_DROPPED)


class Panic(BaseException):
    """What a panic of Rust code raises is no `Exception` either."""


class Panicking:
    """A number that panics when it is asked which."""

    def __index__(self) -> int:
        raise Panic("index")


class Engine:
    """An engine whose methods do nothing but return what they are given."""

    def work(self, value: Any = 7) -> Any:
        return value


def instrument(owner: Any, exported: Exported, *facts: Any, **options: Any) -> Any:
    methods = {"work": facts} if facts else {}
    return kv.instrument_controller(
        owner, **{"tiers": TIERS, "methods": methods, "meter_provider": exported.provider, **options}
    )


def told(exported: Exported) -> int | float:
    return sum(exported.rows.total(spec) for spec in TOLD)


def raising(error: BaseException) -> Callable[..., Any]:
    def reader(*_: Any) -> Any:
        raise error

    return reader


# ---------------------------------------------------------------------------------------------- what readers return


AMOUNTS: dict[str, tuple[Callable[[Any], Any], MetricSpec]] = {
    "tokens of a copy": (lambda read: kv.Backup(tokens=read, bytes=1), semconv.TRANSFER_TOKENS),
    "bytes of a copy": (lambda read: kv.Backup(tokens=1, bytes=read), semconv.TRANSFER_IO),
    "evicted": (lambda read: kv.Eviction(tokens=read), semconv.EVICTION_TOKENS),
    "dropped": (lambda read: kv.Drop(tokens=read, reason="pool_full"), semconv.DROPPED_TOKENS),
    "hit": (lambda read: kv.Prefetch(hit=read), semconv.PREFETCH_HIT_TOKENS),
    "loaded": (lambda read: kv.HostInsert(loaded=read, fulfilled=0, unfulfilled={}), semconv.PREFETCH_LOADED_TOKENS),
    "prompt": (lambda read: kv.Admission(prompt=read, served={}), semconv.LOOKUP_TOKENS),
    "served": (lambda read: kv.Admission(prompt=0, served=lambda *_: {"host": read()}), semconv.LOOKUP_TOKENS),
    "skipped": (
        lambda read: kv.SkippedStore(tier="disk", blocks=read, reason="no_space"),
        semconv.STORE_SKIPPED_BLOCKS,
    ),
    "failures": (
        lambda read: kv.AllocationFailure(tier="disk", times=read, reason="load"),
        semconv.ALLOCATION_FAILURES,
    ),
}
NONE_AT_ALL = [None, math.nan, math.inf, 1.5, -1, -(2**70), 2**63, 10**400, "12", b"1", [1], object(), Panicking()]
BY_POOL = [{"kv": None}, {"kv": -1}, {"nope": 1}, {"swa": 3, "kv": "x"}, {None: 1}]


@pytest.mark.parametrize("value", NONE_AT_ALL, ids=lambda value: str(value)[:12])
@pytest.mark.parametrize("name", AMOUNTS)
def test_what_is_no_amount_is_not_added_and_counted(exported: Exported, name: str, value: Any) -> None:
    make, spec = AMOUNTS[name]
    owner = Engine()
    instrument(owner, exported, make(lambda *_: value))
    assert owner.work() == 7
    assert exported.rows.total(spec) == 0
    assert told(exported) >= 1
    assert exported.rows.value(semconv.TRANSFER_ACTIVE, **BACKUP) in (None, 0)


@pytest.mark.parametrize("value", BY_POOL, ids=str)
@pytest.mark.parametrize("name", ["tokens of a copy", "evicted", "dropped"])
def test_what_is_no_amount_of_a_pool_is_counted(exported: Exported, name: str, value: Any) -> None:
    make, spec = AMOUNTS[name]
    owner = Engine()
    instrument(owner, exported, make(lambda *_: value))
    assert owner.work() == 7
    assert exported.rows.total(spec, pool="kv") == 0
    assert told(exported) >= 1


def test_an_amount_by_pool_is_added_as_a_whole_or_not_at_all(exported: Exported) -> None:
    owner = Engine()
    instrument(owner, exported, kv.Eviction(tokens=lambda result, _: result))
    owner.work({"kv": 5, "swa": None})
    assert exported.rows.total(semconv.EVICTION_TOKENS) == 0
    owner.work({"kv": 5, "swa": 2})
    assert exported.rows.total(semconv.EVICTION_TOKENS) == 7


@pytest.mark.parametrize("error", [Panic("rust"), GeneratorExit(), MemoryError(), StopIteration(), RecursionError()])
@pytest.mark.parametrize("name", AMOUNTS)
def test_whatever_a_reader_raises_it_is_counted_and_steps_aside(
    exported: Exported, name: str, error: BaseException
) -> None:
    make, spec = AMOUNTS[name]
    owner = Engine()
    handle = instrument(owner, exported, make(raising(error)))
    for _ in range(STEP_ASIDE_AFTER + 1):
        assert owner.work() == 7
    assert exported.rows.total(spec) == 0
    assert exported.rows.value(semconv.TELEMETRY_ERRORS, hook="work") == STEP_ASIDE_AFTER
    assert type(error).__name__ in handle.report()
    assert handle.attached == ()


@pytest.mark.parametrize("where", ["stream", "requested", "key", "seconds", "events", "error", "when"])
def test_whichever_reader_of_a_copy_panics_no_transfer_stays_active(exported: Exported, where: str) -> None:
    owner = Engine()
    instrument(owner, exported, kv.Backup(tokens=1, bytes=1, **{where: raising(Panic(where))}))
    assert owner.work() == 7
    assert exported.rows.value(semconv.TELEMETRY_ERRORS, hook="work") == 1
    assert exported.rows.value(semconv.TRANSFER_ACTIVE, **BACKUP) == 0
    assert exported.rows.value(semconv.TRANSFER_OPERATIONS, **BACKUP) == 0


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_what_a_signal_handler_raises_goes_where_it_is_meant_for(exported: Exported, error: BaseException) -> None:
    owner = Engine()
    instrument(owner, exported, kv.Backup(tokens=raising(error), bytes=1))
    with pytest.raises(type(error)):
        owner.work()
    assert exported.rows.value(semconv.TRANSFER_ACTIVE, **BACKUP) == 0


@pytest.mark.parametrize(
    "seconds", [math.nan, math.inf, -1.0, "0.5", [1], 10**400, object()], ids=lambda value: str(value)[:12]
)
def test_a_time_that_is_none_leaves_a_transfer_that_has_ended(exported: Exported, seconds: Any) -> None:
    owner = Engine()
    instrument(owner, exported, kv.Backup(tokens=2, bytes=3, seconds=lambda *_: seconds))
    owner.work()
    rows = exported.rows
    assert (rows.value(semconv.TRANSFER_ACTIVE, **BACKUP), rows.value(semconv.TRANSFER_OPERATIONS, **BACKUP)) == (0, 1)
    assert rows.value(semconv.TRANSFER_IO, **BACKUP, timing="engine_report") == 3
    cell = rows.histogram(semconv.TRANSFER_DURATION, **BACKUP, timing="engine_report")
    assert cell is not None
    assert sum(cell.read()[0]) == 0
    assert told(exported) == 1


@pytest.mark.parametrize(("answer", "failed"), [(None, 0), (False, 0), (0, 0), ("", 0), ("full", 1), (OSError(), 1)])
def test_a_copy_has_failed_where_something_is_said_of_it(exported: Exported, answer: Any, failed: int) -> None:
    owner = Engine()
    reads = {"tokens": 1, "bytes": 1, "error": lambda result, _: result}
    instrument(owner, exported, kv.Backup(**reads))
    owner.work(answer)
    with_error = exported.rows.total(semconv.TRANSFER_OPERATIONS) - (
        exported.rows.value(semconv.TRANSFER_OPERATIONS, **BACKUP) or 0
    )
    assert with_error == failed
    assert told(exported) == 0


# ---------------------------------------------------------------------------------------------- what gauges are told


@pytest.mark.parametrize(
    "value", [None, math.nan, math.inf, 2**63, 10**400, "12", b"1", [1], object(), Panic(), SystemExit(3)], ids=repr
)
def test_what_is_no_quantity_has_no_row_and_costs_no_other_its_own(exported: Exported, value: Any) -> None:
    owner = Engine()
    bad = raising(value) if isinstance(value, BaseException) else lambda _: value
    instrument(owner, exported, gauges=kv.Gauges(resident={"device": bad, "host": lambda _: 5}))
    assert exported.rows.value(semconv.RESIDENT_BLOCKS, tier="host", view="held") == 5
    assert exported.rows.value(semconv.RESIDENT_BLOCKS, tier="device", view="held") is None
    assert exported.rows.value(semconv.TELEMETRY_ERRORS, hook="gauge") == 1


# ---------------------------------------------------------------------------------------------- what objects are


def test_a_subclass_that_calls_what_it_overrides_counts_once(exported: Exported) -> None:
    class Sub(Engine):
        def work(self, value: Any = 7) -> Any:
            return super().work(value) + 1

    owner = Sub()
    instrument(owner, exported, kv.Eviction(tokens=lambda result, _: result))
    assert owner.work(4) == 5
    assert exported.rows.total(semconv.EVICTION_TOKENS) == 5


def test_a_method_may_tell_the_same_fact_of_two_tiers_and_each_has_a_hook(exported: Exported) -> None:
    owner = Engine()
    facts = [
        kv.Eviction(tokens=1),
        kv.Eviction(tier="host", tokens=2),
        kv.Eviction(tier="disk", tokens=raising(OSError())),
    ]
    handle = instrument(owner, exported, *facts)
    assert handle.attached == ("work.Eviction", "work.Eviction.2", "work.Eviction.3")
    for _ in range(STEP_ASIDE_AFTER):
        owner.work()
    rows = exported.rows
    assert rows.value(semconv.EVICTION_TOKENS, tier="device", pool="kv") == STEP_ASIDE_AFTER
    assert rows.value(semconv.EVICTION_TOKENS, tier="host", pool="kv") == 2 * STEP_ASIDE_AFTER
    assert [
        rows.value(semconv.TELEMETRY_HOOK_ATTACHED, hook=hook) for hook in ("work.Eviction", "work.Eviction.3")
    ] == [1, 0]
    assert handle.report().count("aside") == 2  # The state, and why.


def test_a_method_that_is_replaced_on_its_object_is_the_one_that_is_called(exported: Exported) -> None:
    owner = Engine()
    handle = instrument(owner, exported, kv.Eviction(tokens=1))
    owner.work = lambda value=7: -value  # type: ignore[method-assign]
    assert owner.work() == -7
    handle.remove()
    assert owner.work() == -7


def test_a_method_that_lies_in_a_slot_is_reported_as_it_is(exported: Exported) -> None:
    class Slotted:
        __slots__ = ("__dict__", "__weakref__", "fast")

    owner: Any = Slotted()
    owner.fast = lambda: 3
    handle = instrument(owner, exported, methods={"fast": kv.Eviction(tokens=1)})
    assert owner.fast() == 3
    ((name, _, why),) = handle.missing
    assert (name, why) == ("fast", "Slotted does not look fast up on its objects")


@pytest.mark.parametrize("kind", ["property", "cached", "partial", "lambda", "callable", "C"])
def test_whatever_a_method_is_it_is_called_as_before_or_reported(exported: Exported, kind: str) -> None:
    class Callable:
        def __call__(self, value: int) -> int:
            return value

    class Odd(Engine):
        @property
        def made(self) -> Any:
            return lambda value: value

        @functools.cached_property
        def kept(self) -> Any:
            return lambda value: value

    owner: Any = Odd()
    name = {"property": "made", "cached": "kept"}.get(kind, "own")
    if name == "own":
        owner.own = {
            "partial": functools.partial(lambda factor, value: factor * value, 1),
            "lambda": lambda value: value,
            "callable": Callable(),
            "C": abs,
        }[kind]
    handle = instrument(owner, exported, methods={name: kv.Eviction(tokens=lambda result, _: result)})
    assert getattr(owner, name)(3) == 3
    measured = name in handle.attached
    assert measured is (kind not in ("property", "cached"))
    assert exported.rows.total(semconv.EVICTION_TOKENS) == (3 if measured else 0)
    handle.remove()
    assert getattr(owner, name)(3) == 3


def test_marks_hold_for_what_a_subclass_puts_in_the_methods_place(exported: Exported) -> None:
    class Base:
        @kv.measures(kv.Eviction(tokens=lambda result, _: result))
        def trim(self, count: int) -> int:
            raise NotImplementedError

        @kv.measures(kv.Eviction(tier="host", tokens=lambda result, _: result))
        @staticmethod
        def trim_host(count: int) -> int:
            return count

        @classmethod
        @kv.measures(kv.Prefetch(hit=lambda result, _: result))
        def ask(cls, count: int) -> int:
            return count

    class Sub(Base):
        def trim(self, count: int) -> int:
            return count

    owner = Sub()
    handle = instrument(owner, exported, methods=None)
    assert sorted(handle.attached) == ["ask", "trim", "trim_host"]
    assert (owner.trim(1), owner.trim_host(2), owner.ask(4)) == (1, 2, 4)
    rows = exported.rows
    assert rows.value(semconv.EVICTION_TOKENS, tier="device", pool="kv") == 1
    assert rows.value(semconv.EVICTION_TOKENS, tier="host", pool="kv") == 2
    assert rows.value(semconv.PREFETCH_HIT_TOKENS, tier="disk") == 4
    other = Sub()
    assert instrument(other, exported, methods={"trim": ()}).attached == ("trim_host", "ask")


@pytest.mark.parametrize(
    ("marks", "words"),
    [
        (lambda: kv.measures()(len), "at least one fact"),
        (lambda: kv.measures(kv.Eviction(tokens=1))(property(len)), "a property takes no mark"),
        (lambda: kv.measures(kv.Eviction(tokens=1))(len), "takes no mark"),
        (lambda: kv.measures(kv.Eviction(tokens=1))(Engine), "Engine is a class"),
    ],
)
def test_what_cannot_be_marked_is_said_at_once(marks: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        marks()


# ---------------------------------------------------------------------------------------------- devices and endings


def test_a_cache_that_is_dropped_while_a_copy_is_under_way_is_gone_and_its_copy_counts(exported: Exported) -> None:
    device, stream, owner = FakeDevice(), FakeStream(), Engine()
    instrument(owner, exported, kv.Backup(tokens=2, bytes=3, stream=stream, make_event=device.event))
    owner.work()
    rows, harvester, gone = exported.rows, exported.rows.recorder.harvester, weakref.ref(owner)
    assert rows.value(semconv.TRANSFER_ACTIVE, **BACKUP) == 1
    gc.disable()
    try:
        del owner
        assert gone() is None
    finally:
        gc.enable()
    assert rows.value(semconv.TRANSFER_ACTIVE, **BACKUP) is None
    assert not harvester.flush(20.0)
    stream.run()
    assert harvester.flush(20.0)
    assert rows.value(semconv.TRANSFER_OPERATIONS, **BACKUP) == 1
    assert rows.value(semconv.TRANSFER_TOKENS, **BACKUP, pool="kv") == 2
    assert rows.value(semconv.TRANSFER_IO, **BACKUP, timing="device_event") == 3
    assert told(exported) == 0


def test_caches_that_make_their_events_themselves_are_gone_when_they_are_dropped(exported: Exported) -> None:
    class Making(Engine):
        def event(self) -> FakeEvent:
            return FakeEvent()

    stream = FakeStream()
    stream.done_ms = math.inf
    gone: list[Any] = []
    for _ in range(20):
        owner = Making()
        copies = kv.transfers("host", "device", cache="Own", make_event=owner.event, meter_provider=exported.provider)
        timed = kv.Backup(tokens=2, bytes=3, stream=stream, make_event=owner.event)
        instrument(owner, exported, timed)
        owner.work()
        with copies.transfer(stream=stream):
            pass
        gone.append(weakref.ref(owner))
    assert exported.rows.recorder.harvester.flush(20.0)
    assert exported.rows.value(semconv.TRANSFER_OPERATIONS, **BACKUP) == 20
    del owner, copies, timed
    gc.collect()
    assert [each() for each in gone if each() is not None] == []
    assert len(exported.rows.recorder.harvester._others) == 0


def test_a_transfers_object_that_is_dropped_finishes_what_is_under_way(exported: Exported) -> None:
    device, stream = FakeDevice(), FakeStream()
    copies = kv.transfers(
        "device", "host", cache="Own", make_event=device.event, meter_provider=exported.provider, timing="device_event"
    )
    with copies.transfer(bytes=3, stream=stream):
        stream.copy(4.0)
    rows = exported.rows
    del copies
    gc.collect()
    stream.run()
    assert rows.recorder.harvester.flush(20.0)
    assert rows.value(semconv.TRANSFER_OPERATIONS, **BACKUP) == 1


def test_facts_of_one_direction_may_make_events_in_one_way_only(exported: Exported) -> None:
    device, other, stream = FakeDevice(), FakeDevice(), FakeStream()
    first = kv.Backup(tokens=1, bytes=1)
    second = kv.Retraction(tokens=1, bytes=1, stream=stream, make_event=device.event)
    third = kv.Retraction(tokens=1, bytes=1, stream=stream, make_event=other.event)
    owner = Engine()
    with pytest.raises(ValueError, match="another make_event="):
        instrument(owner, exported, second, third)
    instrument(owner, exported, first, second)
    owner.work()
    stream.run()
    assert exported.rows.recorder.harvester.flush(20.0)
    assert len(device.made) == 2  # The one that says so may come second.


class Launching(Engine):
    """One whose copies end some time after `work` has returned."""

    def poll(self, keys: Any) -> Any:
        return keys


BY_KEY: dict[str, Any] = {
    "work": kv.Backup(tokens=1, bytes=1, key=lambda result, _: result),
    "poll": kv.CopiesDone(source="device", destination="host"),
}


def test_a_copy_that_never_ends_stays_active_and_is_counted_and_said_once(
    exported: Exported, lines: pytest.LogCaptureFixture
) -> None:
    owner = Launching()
    instrument(owner, exported, methods=BY_KEY, deadline_s=0.02)
    owner.work(1)
    time.sleep(0.03)
    rows = exported.rows
    for _ in range(3):
        assert rows.value(semconv.TRANSFER_ACTIVE, **BACKUP) == 1
    assert rows.value(semconv.TELEMETRY_DROPPED, reason="event_lost") == 1
    assert [line for line in lines.messages if "begun and not ended for 0.02 s" in line] == lines.messages
    assert len(lines.messages) == 1
    owner.poll([1])
    assert rows.value(semconv.TRANSFER_ACTIVE, **BACKUP) == 0
    assert rows.value(semconv.TRANSFER_OPERATIONS, **BACKUP) == 1


def test_ends_that_do_not_fit_their_beginnings_are_counted_and_said_once(
    exported: Exported, lines: pytest.LogCaptureFixture
) -> None:
    owner = Launching()
    instrument(owner, exported, methods=BY_KEY)
    for _ in range(2):
        owner.poll([5])  # Never begun.
    owner.work(1)
    owner.poll([1, 1])  # Ended twice.
    owner.work(2)
    owner.work(2)  # Begun again before it ended.
    owner.poll([2])
    rows = exported.rows
    assert rows.value(semconv.ACCOUNTING_ERRORS, reason="missing_row") == 3
    assert rows.value(semconv.ACCOUNTING_ERRORS, reason="other") == 1
    assert rows.value(semconv.TRANSFER_OPERATIONS, **BACKUP) == 2
    assert rows.value(semconv.TRANSFER_ACTIVE, **BACKUP) == 0
    assert len(lines.messages) == 2


def test_a_copy_that_is_found_done_before_its_launch_has_returned_ends(exported: Exported) -> None:
    class Launcher(Launching):
        def work(self, *arguments: Any) -> Any:
            self.poll(arguments)  # Another thread of an engine's would be so fast.
            return arguments[0]

    owner = Launcher()
    instrument(owner, exported, methods=BY_KEY)
    for key in range(5):
        owner.work(key)
    rows = exported.rows
    assert rows.value(semconv.TRANSFER_OPERATIONS, **BACKUP) == 5
    assert rows.value(semconv.TRANSFER_TOKENS, **BACKUP, pool="kv") == 5
    assert rows.value(semconv.TRANSFER_ACTIVE, **BACKUP) == 0
    assert told(exported) == 0


def test_the_time_of_readers_is_not_the_copys(exported: Exported) -> None:
    class Clock(FakeStream):
        """A stream that is done with what is on it at once: an event is passed when it is recorded."""

        @property
        def put_ms(self) -> float:
            return time.monotonic() * 1e3

        @put_ms.setter
        def put_ms(self, _: float) -> None:
            pass

    def slowly(*_: Any) -> int:
        time.sleep(0.05)
        return 1

    read: dict[str, Any] = {"tokens": slowly, "bytes": slowly}
    stream, device = Clock(), FakeDevice()
    launched = Launching()
    finding = kv.CopiesDone(source="host", destination="device", keys=lambda keys, _: keys if slowly() else ())
    keyed = kv.LoadBack(tokens=1, bytes=1, key=lambda result, _: result)
    instrument(launched, exported, methods={"work": keyed, "poll": finding})
    instrument(plainly := Engine(), exported, kv.Backup(**read))
    instrument(timed := Engine(), exported, kv.Backup(**read, stream=stream, make_event=device.event))
    rows = exported.rows
    launched.work(1)
    launched.poll([1])
    plainly.work()
    timed.work()
    stream.done_ms = math.inf
    assert rows.recorder.harvester.flush(20.0)
    load_back = {"source": "host", "destination": "device"}
    for way, timing in ((BACKUP, "wall_clock"), (BACKUP, "device_event"), (load_back, "wall_clock")):
        cell = rows.histogram(semconv.TRANSFER_DURATION, **way, timing=timing)
        assert cell is not None
        counts, seconds = cell.read()
        assert sum(counts) == 1
        assert seconds < 0.04


def test_a_device_that_is_never_done_with_a_copy_is_counted_and_said_once(
    exported: Exported, lines: pytest.LogCaptureFixture
) -> None:
    device, stream, owner = FakeDevice(), FakeStream(), Engine()
    stuck = kv.Backup(tokens=1, bytes=1, stream=stream, make_event=device.event)
    instrument(owner, exported, stuck, deadline_s=0.05)
    for _ in range(3):
        owner.work()
    rows = exported.rows
    wait_until(lambda: rows.value(semconv.TELEMETRY_DROPPED, reason="event_lost") == 3)
    assert rows.value(semconv.TRANSFER_ACTIVE, **BACKUP) == 3
    assert rows.value(semconv.TRANSFER_OPERATIONS, **BACKUP) == 0
    assert len(lines.messages) == 1
    assert len(rows.recorder.harvester._pairs) == 0


def test_a_forked_child_with_copies_under_way_neither_raises_nor_hangs(exported: Exported) -> None:
    device, stream, owner = FakeDevice(), FakeStream(), Engine()
    instrument(owner, exported, kv.Backup(tokens=2, bytes=3, stream=stream, make_event=device.event))
    copies = kv.transfers(
        "host", "device", cache="Own", make_event=device.event, meter_provider=exported.provider, timing="device_event"
    )
    owner.work()
    begun = copies.begin(bytes=1, stream=stream, key=1)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            asked = device.made[1].queries  # The last event of a copy of the parent's, whose driver is not here.
            begun.end()
            copies.end(1)
            with copies.transfer(bytes=1, stream=stream):
                found = owner.work(4)
            stream.run()
            flushed = copies._harvester.flush(20.0)
            os.write(write, repr((found, vars(owner), flushed, device.made[1].queries - asked)).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        assert answer.read() == repr((4, {}, True, 0))
    os.waitpid(pid, 0)
    rows = exported.rows
    assert rows.value(semconv.TRANSFER_ACTIVE, source="host", destination="device") == 1
    begun.end()
    stream.run()
    assert rows.recorder.harvester.flush(20.0)
    assert rows.value(semconv.TRANSFER_OPERATIONS, **BACKUP) == 1
    assert rows.value(semconv.TRANSFER_OPERATIONS, source="host", destination="device") == 1
    assert told(exported) == 0


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("how", ["end", "fail", "cancel"])
def test_a_forked_child_in_which_a_copy_of_the_parents_ends_says_nothing_of_it(
    exported: Exported, lines: pytest.LogCaptureFixture, how: str
) -> None:
    """There is no row in the child that could be wrong."""
    copies = kv.transfers("host", "device", cache="Own", meter_provider=exported.provider)
    begun = copies.begin(bytes=1)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            {"end": begun.end, "fail": lambda: begun.end(error="x"), "cancel": begun.cancel}[how]()
            os.write(write, repr(lines.messages).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        assert answer.read() == "[]"
    os.waitpid(pid, 0)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_goes_on_with_transfers_that_were_made_before(exported: Exported) -> None:
    copies = kv.transfers("host", "device", cache="Own", pools="kv", queued=True, meter_provider=exported.provider)
    idle = kv.transfers("device", "host", cache="Own", meter_provider=exported.provider)
    of_parent = copies.begin(bytes=1)
    copies.begin(bytes=100).end()
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            before = exported.runtime.recorder
            with copies.transfer(bytes=7, tokens=3):
                active = exported.rows.value(semconv.TRANSFER_ACTIVE, source="host", destination="device")
                of_parent.end()
            copies.begin(bytes=5, key="k", requested=0.0)
            copies.end("k")
            rows = exported.rows
            found = [before, active, rows.total(semconv.TRANSFER_IO), rows.total(semconv.TRANSFER_TOKENS)]
            found += [rows.total(semconv.TRANSFER_OPERATIONS), rows.total(semconv.TRANSFER_ACTIVE), told(exported)]
            rows_of_idle = rows.values(semconv.TRANSFER_ACTIVE)
            os.write(write, repr((found, len(rows_of_idle), "begin" in vars(idle))).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        assert answer.read() == repr(([None, 1, 12, 3, 2, 0, 0], 1, True))
    os.waitpid(pid, 0)
    of_parent.end()
    assert exported.rows.total(semconv.TRANSFER_IO) == 101
    assert exported.rows.total(semconv.TRANSFER_ACTIVE) == 0


def test_two_objects_of_transfers_for_one_direction_add_up(exported: Exported) -> None:
    both = [kv.transfers("device", "host", cache="Own", meter_provider=exported.provider) for _ in range(2)]
    begun = [copies.begin(bytes=5) for copies in both]
    assert exported.rows.value(semconv.TRANSFER_ACTIVE, **BACKUP) == 2
    for transfer in begun:
        transfer.end()
    assert exported.rows.value(semconv.TRANSFER_ACTIVE, **BACKUP) == 0
    assert exported.rows.value(semconv.TRANSFER_IO, **BACKUP, timing="wall_clock") == 10
