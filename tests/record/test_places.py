"""Caches that are gone give their places to others; what they had counted stays until then, or is counted as lost."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from kvcache_otel import semconv
from kvcache_otel.identity import Identity, Rank
from kvcache_otel.record.probe import CacheProbe
from kvcache_otel.record.recorder import Recorder
from kvcache_otel.semconv import Reason

if TYPE_CHECKING:
    from kvcache_otel.spec import MetricSpec

FIRST = Identity("custom", "First")
REASONS = len(semconv.ACCOUNTING_ERRORS.values[semconv.KVCACHE_REASON])

# Places for the first cache and two more.
LIMIT = 3 * REASONS


@pytest.fixture
def recorder() -> Recorder:
    return Recorder(FIRST, series_limit=LIMIT)


def probe(recorder: Recorder, name: str) -> CacheProbe:
    return CacheProbe(recorder, Identity("custom", name))


def counted(recorder: Recorder, spec: MetricSpec = semconv.EVICTION_TOKENS, **labels: str) -> dict[str, int | float]:
    """The rows of a counter that have some labels, by cache."""
    return {
        str(point.attributes[semconv.KVCACHE_CACHE_TYPE]): point.value
        for point in recorder.points(spec)
        if labels.items() <= {key.rpartition(".")[2]: value for key, value in point.attributes.items()}.items()
    }


def overflowed(recorder: Recorder) -> dict[str, int | float]:
    rows = counted(recorder, semconv.TELEMETRY_DROPPED, reason=Reason.LABEL_OVERFLOW)
    return {name: value for name, value in rows.items() if value}


def test_the_place_of_a_cache_that_is_gone_is_given_to_another_and_not_that_of_one_that_lives(
    recorder: Recorder,
) -> None:
    living = probe(recorder, "living")
    living.evictions("device", "kv").add(1)
    for number in range(50):
        probe(recorder, f"gone{number}").evictions("device", "kv").add(2)
        counted(recorder)
    assert counted(recorder) == {"living": 1, "gone49": 2}
    assert counted(recorder, semconv.ACCOUNTING_ERRORS, reason=Reason.RECOUNT) == {"First": 0, "living": 0, "gone49": 0}
    living.evictions("device", "kv").add(1)
    assert counted(recorder)["living"] == 2
    assert overflowed(recorder) == {}


def test_what_was_counted_stays_as_long_as_nobody_needs_the_place(recorder: Recorder) -> None:
    probe(recorder, "gone").evictions("device", "kv").add(2)
    assert counted(recorder) == {"gone": 2}
    again = probe(recorder, "gone")
    again.evictions("device", "kv").add(1)
    assert counted(recorder) == {"gone": 3}


def test_a_counter_does_not_go_down_while_another_of_the_same_cache_lives(recorder: Recorder) -> None:
    first, second = probe(recorder, "twice"), probe(recorder, "twice")
    first.evictions("device", "kv").add(2)
    second.evictions("device", "kv").add(3)
    del first
    for number in range(20):
        probe(recorder, f"gone{number}")
        assert counted(recorder)["twice"] == 5
    second.evictions("device", "kv").add(1)
    assert counted(recorder)["twice"] == 6
    del second
    for number in range(20):
        probe(recorder, f"gone{number}").evictions("device", "kv")
    assert "twice" not in counted(recorder)


def test_who_is_gone_longest_makes_room_first(recorder: Recorder) -> None:
    for name in ("a", "b", "a", "c"):  # The second time round a is the newer of the two.
        probe(recorder, name).evictions("device", "kv")
        counted(recorder)
    assert set(counted(recorder)) == {"a", "c"}


def test_what_was_exported_makes_room_before_what_was_not(recorder: Recorder) -> None:
    probe(recorder, "untold").evictions("device", "kv")
    told = probe(recorder, "told")
    told.evictions("device", "kv").add(1)
    counted(recorder)
    probe(recorder, "untold").evictions("device", "kv").add(1)
    del told
    newer = probe(recorder, "newer")
    newer.evictions("device", "kv")
    assert set(counted(recorder)) == {"untold", "newer"}
    assert overflowed(recorder) == {}


def test_what_nobody_has_read_of_a_cache_that_makes_room_is_counted_as_lost_and_said_once(
    recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for number in range(6):
            probe(recorder, f"gone{number}").evictions("device", "kv").add(1)
    assert set(counted(recorder)) == {"gone4", "gone5"}
    assert overflowed(recorder) == {"First": 4}
    [line] = caplog.messages
    assert "come and go faster than they are exported" in line


def test_a_cache_that_finds_no_room_is_told_of_it_itself(recorder: Recorder) -> None:
    living = [probe(recorder, f"living{number}") for number in range(2)]
    late = probe(recorder, "late")
    assert not any(probe.doubts.identity == late.identity for probe in living)
    for number in range(LIMIT + 2):
        late.dropped("device", "kv", Reason.OTHER)
        late.counter(
            semconv.LOOKUP_BLOCKS,
            {
                semconv.KVCACHE_TIER: "disk",
                semconv.KVCACHE_TIER_NAME: f"{number}",
                semconv.KVCACHE_LOOKUP_RESULT: "hit",
            },
        ).add(1)
    assert overflowed(recorder) == {"late": 2}


def test_there_is_a_last_bound_on_caches_that_are_told_so() -> None:
    recorder = Recorder(FIRST, series_limit=LIMIT)
    living = [probe(recorder, f"living{number}") for number in range(3 * LIMIT)]
    counters = [one.evictions("device", "kv") for one in living]
    for counter in counters:
        counter.add(1)
    told = overflowed(recorder)
    assert sum(told.values()) == 2 * LIMIT
    assert told.pop("First") > 1
    assert set(told.values()) == {1}
    assert len(list(recorder.points(semconv.TELEMETRY_DROPPED))) < 2 * LIMIT


def test_the_process_itself_is_never_gone(recorder: Recorder) -> None:
    CacheProbe(recorder, FIRST).evictions("device", "kv").add(1)
    for number in range(20):
        probe(recorder, f"gone{number}").evictions("device", "kv")
    assert counted(recorder)["First"] == 1
    recorder.accounting_error(Reason.RECOUNT)
    assert counted(recorder, semconv.ACCOUNTING_ERRORS, reason=Reason.RECOUNT)["First"] == 1


def test_caches_that_are_exported_under_one_name_are_one(recorder: Recorder) -> None:
    """Names are cut where they are too long; neither may take the other's rows along."""
    long = "x" * 200
    living = CacheProbe(recorder, Identity("custom", long + "1"))
    living.evictions("device", "kv").add(1)
    CacheProbe(recorder, Identity("custom", long + "2")).evictions("device", "kv").add(1)
    for number in range(20):
        probe(recorder, f"gone{number}").evictions("device", "kv")
        counted(recorder)
    assert counted(recorder)[long[:128]] == 2


def test_rows_that_nobody_was_said_to_keep_last(recorder: Recorder) -> None:
    kept = recorder.counter(
        semconv.EVICTION_TOKENS, {"kvcache.tier": "host", "kvcache.pool": "kv"}, Identity("custom", "kept")
    )
    for number in range(20):
        CacheProbe(recorder, Identity("custom", "gone", Rank(tp=number))).evictions("device", "kv")
    kept.add(1)
    assert counted(recorder)["kept"] == 1
