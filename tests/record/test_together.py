"""What adds up adds up in every collection, beside an engine that goes on."""

from __future__ import annotations

import dis
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from kvcache_otel.engines.generic.prefetches import PrefetchBooks
from kvcache_otel.export.instruments import Instruments
from kvcache_otel.identity import Identity
from kvcache_otel.record.probe import CacheProbe
from kvcache_otel.record.recorder import Recorder
from kvcache_otel.record.together import TRIES, Changes
from tests.record.test_cells import SWITCH_POINTS
from tests.support.alarms import interrupt

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def switching() -> Iterator[None]:
    """Has threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def collected(reader: InMemoryMetricReader) -> dict[str, int]:
    data: Any = reader.get_metrics_data()
    sums: dict[str, int] = {}
    for metric in data.resource_metrics[0].scope_metrics[0].metrics:
        if metric.name.startswith("kvcache.prefetch."):
            sums[metric.name.split(".")[2]] = sum(point.value for point in metric.data.data_points)
    return sums


@pytest.mark.usefixtures("switching")
def test_hit_is_fulfilled_and_unfulfilled_and_outstanding_in_every_collection() -> None:
    identity = Identity("custom", "Own")
    recorder = Recorder(identity)
    books = PrefetchBooks(CacheProbe(recorder, identity), "disk", None)
    books.tells_hits()
    books.tells_ends(("device_covered", "revoked"))
    reader = InMemoryMetricReader()
    Instruments(MeterProvider([reader], shutdown_on_exit=False), histograms=False).bind(recorder)
    stop = threading.Event()

    def engine() -> None:
        while not stop.is_set():
            for tokens in range(1, 8):
                books.hit(3 * tokens)
                stop.wait(0.0001)
            for tokens in range(1, 8):
                stop.wait(0.0001)
                books.ended(tokens, tokens, {"device_covered": tokens, "whim": tokens})

    threads = [threading.Thread(target=engine) for _ in range(2)]
    for thread in threads:
        thread.start()
    seen = [collected(reader) for _ in range(300)]
    stop.set()
    for thread in threads:
        thread.join()
    assert seen[-1]["hit"] > seen[0]["hit"] > 0
    assert [each for each in seen if each["hit"] != each["fulfilled"] + each["unfulfilled"] + each["outstanding"]] == []
    assert len({each["outstanding"] for each in seen}) > 1
    assert collected(reader)["outstanding"] == 0


def test_who_reads_begins_anew_when_something_changes_meanwhile() -> None:
    changes, reads = Changes(), []

    def read() -> int:
        reads.append(None)
        if len(reads) < 3:
            changes.begun += 1
            changes.done += 1
        return len(reads)

    assert changes.read(read) == 3


def test_who_reads_while_a_change_is_under_way_waits_for_it_and_not_for_ever() -> None:
    changes, reads = Changes(), []
    changes.begun += 1
    assert changes.read(lambda: len(reads)) == 0
    changes.done += 1

    def restless() -> int:
        reads.append(None)
        changes.begun += 1
        changes.done += 1
        return len(reads)

    assert changes.read(restless) == TRIES + 1


def test_a_child_waits_for_no_change_of_its_parent() -> None:
    changes, reads = Changes(), []
    changes.begun += 1
    changes.reset()
    changes.read(lambda: reads.append(None))
    assert len(reads) == 1


@pytest.mark.parametrize("make", [PrefetchBooks.hit, PrefetchBooks.ended])
def test_no_signal_handler_comes_between_a_change_and_that_it_is_counted(make: Any) -> None:
    instructions = list(dis.get_instructions(make))
    names = [each.opname for each in instructions]
    begun = next(at for at, each in enumerate(instructions) if each.argval == "begun" and "STORE" in each.opname)
    done = [at for at, each in enumerate(instructions) if each.argval == "done" and "STORE" in each.opname]
    starts = [each.start for each in dis.Bytecode(make).exception_entries]  # type: ignore[attr-defined]
    entered = next(at for at, each in enumerate(instructions) if each.offset >= min(starts))
    assert not SWITCH_POINTS & {*names[min(entered, begun) : begun + 1]}
    assert len(done) >= 2  # Where it went well, and where it did not.
    for at in done:
        loaded = next(each for each in range(at, 0, -1) if instructions[each].argval == "done" and each < at)
        assert not SWITCH_POINTS & {*names[loaded : at + 1]}


class TooLongError(Exception):
    """What a signal handler of an engine's raises."""


@pytest.mark.parametrize("error", [KeyboardInterrupt, TooLongError])
def test_changes_are_done_though_a_signal_handler_raises_in_their_midst(error: type[BaseException]) -> None:
    identity = Identity("custom", "Own")
    recorder = Recorder(identity)
    books = PrefetchBooks(CacheProbe(recorder, identity), "disk", None)
    books.tells_hits()
    books.tells_ends(("revoked",))

    def step() -> None:
        books.hit(2)
        books.ended(1, 1, {"revoked": 1})

    fired, got = interrupt(step, error, 1.0)
    assert got == fired > 0
    assert recorder.changes.begun == recorder.changes.done > 0
