"""What there is to doubt is counted with the identity of the cache that it is about, and of no other."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import pytest

from kvcache_otel import semconv
from kvcache_otel.identity import Identity, Rank
from kvcache_otel.record.cells import REPLAY_LIMIT
from kvcache_otel.record.probe import CacheProbe
from kvcache_otel.record.recorder import Recorder
from kvcache_otel.record.transfers import Transfers
from kvcache_otel.semconv import Reason
from tests.record.test_timing import FakeEvent, RaisingEvent
from tests.support.rows import DOUBTS

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

FIRST, AT_FAULT = Identity("custom", "First"), Identity("custom", "Second", Rank(tp=1))
TIER = {semconv.KVCACHE_TIER: "device"}


@pytest.fixture
def recorder() -> Generator[Recorder]:
    """A recorder whose first cache is not the one at fault."""
    made = Recorder(FIRST)
    CacheProbe(made, FIRST)
    yield made
    made.harvester.stop(20)


def doubts(recorder: Recorder) -> dict[tuple[str, str, str], int | float]:
    """What is not zero, by metric, cache and reason or hook."""
    keys = (semconv.KVCACHE_REASON, semconv.KVCACHE_TELEMETRY_HOOK)
    return {
        (spec.name, str(attributes[semconv.KVCACHE_CACHE_TYPE]), str(attributes[key])): value
        for spec in DOUBTS
        for attributes, value in recorder.points(spec)
        for key in keys
        if key in attributes and value
    }


def wrong(reason: str, times: int = 1) -> dict[Any, int]:
    return {(semconv.ACCOUNTING_ERRORS.name, "Second", reason): times}


def dropped(reason: str, times: int = 1) -> dict[Any, int]:
    return {(semconv.TELEMETRY_DROPPED.name, "Second", reason): times}


def failed(hook: str, times: int = 1) -> dict[Any, int]:
    return {(semconv.TELEMETRY_ERRORS.name, "Second", hook): times}


def copies(probe: CacheProbe) -> Transfers:
    return Transfers(probe, "device", "host", timing="device_event")


def sinks(probe: CacheProbe) -> None:
    level = probe.level(semconv.BLOCK_SIZE, dict(TIER))
    level.set(-1)


def raises() -> int:
    raise OSError


FAULTS: dict[str, tuple[Callable[[CacheProbe], object], dict[Any, int]]] = {
    "a counter refuses": (lambda probe: probe.evictions("device", "kv").add(-1), wrong(Reason.NEGATIVE_DELTA)),
    "a histogram refuses": (lambda probe: probe.eviction_passes("device").record(-1.0), wrong(Reason.NEGATIVE_DELTA)),
    "a level sinks": (sinks, wrong(Reason.UNDERFLOW)),
    "an adapter contradicts itself": (lambda probe: probe.accounting_error("recount", 3), wrong(Reason.RECOUNT, 3)),
    "a pool does not add up": (lambda probe: probe.pool("device", "kv").settle(1, 2), wrong(Reason.CONSERVATION)),
    "an end without a beginning": (lambda probe: copies(probe).end(7), wrong(Reason.MISSING_ROW)),
    "a transfer of a negative amount": (
        lambda probe: copies(probe).begin().end(bytes=-1),
        wrong(Reason.NEGATIVE_DELTA),
    ),
    "a transfer of an undeclared pool": (
        lambda probe: copies(probe).begin().end(tokens={"swa": 1}),
        dropped(Reason.OTHER),
    ),
    "a transfer of nonsense": (lambda probe: copies(probe).begin().end(bytes="x"), failed("transfer")),  # type: ignore[arg-type]
    "an adapter gives up": (lambda probe: probe.lost(Reason.OTHER), dropped(Reason.OTHER)),
    "an adapter fails": (lambda probe: probe.failed("evict", "nothing", OSError()), failed("evict")),
    "a quantity cannot be told": (lambda probe: probe.gauge_failed("blocks", OSError()), failed("gauge")),
    "a gauge raises": (lambda probe: probe.observe(semconv.BLOCK_SIZE, dict(TIER), raises), failed("gauge")),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_told_of_the_cache_at_fault(recorder: Recorder, fault: str) -> None:
    commit, expected = FAULTS[fault]
    commit(CacheProbe(recorder, AT_FAULT))
    list(recorder.points(semconv.BLOCK_SIZE))  # Where gauges are asked.
    assert doubts(recorder) == expected


@pytest.mark.parametrize("by_hand", [True, False])
def test_a_pair_that_tells_no_time_is_told_of_its_own_cache(recorder: Recorder, *, by_hand: bool) -> None:
    probe = CacheProbe(recorder, AT_FAULT)
    events = RaisingEvent(OSError(), when_asked=False), FakeEvent(1.0, passed=False)
    if by_hand:
        copies(probe).begin().end(events=events)
    else:
        probe.route("device", "host").timed(*events)
    events[1].passed = True
    assert recorder.harvester.flush(20)
    assert doubts(recorder) == dropped(Reason.EVENT_LOST)


@pytest.mark.parametrize("by_hand", [True, False])
def test_a_pair_that_finds_no_room_is_told_of_its_own_cache(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, *, by_hand: bool
) -> None:
    monkeypatch.setattr(recorder.harvester, "_limit", 0)
    probe, events = CacheProbe(recorder, AT_FAULT), (FakeEvent(0.0), FakeEvent(1.0, passed=False))
    if by_hand:
        copies(probe).begin().end(events=events)
    else:
        probe.route("device", "host").timed(*events)
    assert doubts(recorder) == dropped(Reason.QUEUE_FULL)


def test_a_pair_that_is_not_done_at_the_end_is_told_of_its_own_cache(recorder: Recorder) -> None:
    CacheProbe(recorder, AT_FAULT).route("device", "host").timed(FakeEvent(0.0), FakeEvent(1.0, passed=False))
    recorder.harvester.stop(20)
    assert doubts(recorder) == dropped(Reason.EVENT_LOST)


def test_a_sample_that_somebody_elses_provider_has_no_room_for_is_told_of_its_own_cache() -> None:
    recorder = Recorder(FIRST, replay=True)
    assert recorder.replayed is not None
    passes = CacheProbe(recorder, AT_FAULT).eviction_passes("device")
    recorder.replayed.extend(deque([(passes, 1.0)]) * REPLAY_LIMIT)  # type: ignore[arg-type]
    passes.record(1.0)
    assert doubts(recorder) == dropped(Reason.QUEUE_FULL)


def test_what_is_about_no_cache_carries_the_identity_of_the_process(recorder: Recorder) -> None:
    CacheProbe(recorder, AT_FAULT)
    recorder.accounting_error(Reason.RECOUNT)
    recorder.harvester.add(
        FakeEvent(0.0),
        RaisingEvent(OSError(), when_asked=True),
        recorder.histogram(semconv.EVICTION_DURATION, dict(TIER)),
    )
    assert recorder.harvester.flush(20)
    assert doubts(recorder) == {
        (semconv.ACCOUNTING_ERRORS.name, "First", "recount"): 1,
        (semconv.TELEMETRY_DROPPED.name, "First", "event_lost"): 1,
    }


def test_rows_of_every_cache_are_there_at_zero_from_the_start(recorder: Recorder) -> None:
    CacheProbe(recorder, AT_FAULT)
    for spec in (semconv.ACCOUNTING_ERRORS, semconv.TELEMETRY_DROPPED):
        found = [
            (point.attributes[semconv.KVCACHE_CACHE_TYPE], point.attributes[semconv.KVCACHE_REASON], point.value)
            for point in recorder.points(spec)
        ]
        reasons = spec.values[semconv.KVCACHE_REASON]
        assert sorted(found) == sorted((name, reason, 0) for name in ("First", "Second") for reason in reasons)


def test_where_there_is_no_room_for_more_rows_the_process_is_told(recorder: Recorder) -> None:
    reasons = len(semconv.ACCOUNTING_ERRORS.values[semconv.KVCACHE_REASON])
    room = recorder.series_limit // reasons
    for number in range(1, room):
        CacheProbe(recorder, Identity("custom", "Second", Rank(tp=number))).accounting_error(Reason.RECOUNT)
    assert doubts(recorder) == wrong(Reason.RECOUNT)  # By the name alone: each is 1.
    CacheProbe(recorder, Identity("custom", "Second", Rank(tp=room))).accounting_error(Reason.RECOUNT)
    assert doubts(recorder) == wrong(Reason.RECOUNT) | {(semconv.ACCOUNTING_ERRORS.name, "First", "recount"): 1}
    assert len(list(recorder.points(semconv.ACCOUNTING_ERRORS))) == room * reasons <= recorder.series_limit


def test_a_child_starts_at_zero_for_every_cache(recorder: Recorder) -> None:
    probe = CacheProbe(recorder, AT_FAULT)
    probe.accounting_error(Reason.RECOUNT)
    recorder.reset()
    assert doubts(recorder) == {}
    probe.accounting_error(Reason.RECOUNT)
    assert doubts(recorder) == wrong(Reason.RECOUNT)
