"""One row for each label set, whoever writes it; a row ends with its owner; one bad reader costs one row."""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvcache_otel import semconv
from kvcache_otel.identity import Identity, Rank
from kvcache_otel.record.recorder import Attributes, Recorder

if TYPE_CHECKING:
    from collections.abc import Generator

    from kvcache_otel.record.cells import Level
    from kvcache_otel.spec import MetricSpec

LOGGER = "kvcache_otel.record.recorder"
IDENTITY = Identity("custom", "TestCache")
TIER, POOL, STATE, REASON = semconv.KVCACHE_TIER, semconv.KVCACHE_POOL, semconv.KVCACHE_STATE, semconv.KVCACHE_REASON

EVICTED: Attributes = {TIER: "device", POOL: "kv"}
USED: Attributes = {TIER: "device", POOL: "kv", STATE: "used"}


@pytest.fixture
def recorder() -> Recorder:
    return Recorder(IDENTITY)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger=LOGGER)
    return caplog


def rows(recorder: Recorder, spec: MetricSpec, *keys: str) -> dict[Any, int | float]:
    """The rows of a metric by the values of some attributes; fails where that leaves two rows the same."""
    points = list(recorder.points(spec))
    found = {tuple(point.attributes.get(key) for key in keys): point.value for point in points}
    assert len(found) == len(points)
    return {key[0] if len(keys) == 1 else key: value for key, value in found.items()}


def telemetry_errors(recorder: Recorder) -> int | float:
    return sum(point.value for point in recorder.points(semconv.TELEMETRY_ERRORS))


# -------------------------------------------------------------------------------------------------- rows


def test_counter_has_a_row_at_zero_before_anything_happens(recorder: Recorder) -> None:
    recorder.counter(semconv.EVICTION_TOKENS, EVICTED)
    assert rows(recorder, semconv.EVICTION_TOKENS, TIER, POOL) == {("device", "kv"): 0}


def test_histogram_has_a_row_without_samples_before_anything_happens(recorder: Recorder) -> None:
    recorder.histogram(semconv.EVICTION_DURATION, {TIER: "device"})
    (row,) = recorder.histograms(semconv.EVICTION_DURATION)
    assert row.cell.read() == ([0] * (len(semconv.EVICTION_DURATION.bounds) + 1), 0.0)


def test_level_has_no_row_before_it_is_set_and_none_once_it_is_unknown(recorder: Recorder) -> None:
    level = recorder.level(semconv.USAGE, USED)
    assert rows(recorder, semconv.USAGE) == {}
    level.set(0)
    assert rows(recorder, semconv.USAGE, STATE) == {"used": 0}
    level.set(None)
    assert rows(recorder, semconv.USAGE) == {}


def test_series_carries_identity_and_labels_in_the_catalogues_order(recorder: Recorder) -> None:
    recorder.counter(semconv.EVICTION_TOKENS, {POOL: "kv", TIER: "host"}, Identity("vllm", "Cache", Rank(1, 2, 3)))
    (point,) = recorder.points(semconv.EVICTION_TOKENS)
    assert list(point.attributes.items()) == [
        ("kvcache.engine", "vllm"),
        ("kvcache.cache.type", "Cache"),
        ("kvcache.rank.tp", 1),
        ("kvcache.rank.pp", 2),
        ("kvcache.rank.dp", 3),
        ("kvcache.tier", "host"),
        ("kvcache.pool", "kv"),
    ]


def test_series_without_identity_carries_only_its_own_attributes(recorder: Recorder) -> None:
    spec = semconv.EVENT_BATCHES_LOST
    recorder.counter(spec, {semconv.KVCACHE_WORKER: "w0", semconv.KVCACHE_RANK_DP: 1})
    (point,) = recorder.points(spec)
    assert not spec.identity
    assert point.attributes == {"kvcache.worker": "w0", "kvcache.rank.dp": 1}


def test_telemetry_about_ourselves_is_there_at_zero_from_the_start(recorder: Recorder) -> None:
    for spec in (semconv.TELEMETRY_DROPPED, semconv.ACCOUNTING_ERRORS):
        assert rows(recorder, spec, REASON) == dict.fromkeys(spec.values[REASON], 0)


@pytest.mark.parametrize("spec", semconv.METRICS.values(), ids=semconv.METRICS)
def test_metric_nobody_asked_for_has_no_row(recorder: Recorder, spec: MetricSpec) -> None:
    if spec not in (semconv.TELEMETRY_DROPPED, semconv.ACCOUNTING_ERRORS):
        assert list(recorder.points(spec)) == []
        assert list(recorder.histograms(spec)) == []


def test_missing_attribute_is_an_error_that_names_it(recorder: Recorder) -> None:
    with pytest.raises(KeyError, match=r"kvcache\.eviction\.tokens needs kvcache\.pool"):
        recorder.counter(semconv.EVICTION_TOKENS, {TIER: "device"})


def test_unknown_attribute_is_an_error_that_names_it(recorder: Recorder) -> None:
    with pytest.raises(KeyError, match=r"kvcache\.eviction\.tokens has no kvcache\.state"):
        recorder.counter(semconv.EVICTION_TOKENS, {**EVICTED, STATE: "used"})
    assert rows(recorder, semconv.EVICTION_TOKENS) == {}


def test_optional_attribute_tells_two_series_apart(recorder: Recorder) -> None:
    route: Attributes = {semconv.KVCACHE_SOURCE_TIER: "disk", semconv.KVCACHE_DESTINATION_TIER: "host"}
    recorder.counter(semconv.TRANSFER_OPERATIONS, route).add(5)
    recorder.counter(semconv.TRANSFER_OPERATIONS, {**route, semconv.ERROR_TYPE: "TimeoutError"}).add(1)
    assert rows(recorder, semconv.TRANSFER_OPERATIONS, semconv.ERROR_TYPE) == {None: 5, "TimeoutError": 1}


def test_values_that_fold_to_the_same_label_are_one_row(recorder: Recorder) -> None:
    for pool in ("cxl", "nvlink", "other"):
        recorder.counter(semconv.EVICTION_TOKENS, {TIER: "device", POOL: pool}).add(1)
    assert rows(recorder, semconv.EVICTION_TOKENS, POOL) == {"other": 3}


# ------------------------------------------------------------------------------------ several of one kind


def test_two_caches_of_one_class_are_both_counted_in_one_row(recorder: Recorder) -> None:
    first = recorder.counter(semconv.EVICTION_TOKENS, EVICTED, Identity("vllm", "KVCacheManager"))
    second = recorder.counter(semconv.EVICTION_TOKENS, dict(EVICTED), Identity("vllm", "KVCacheManager"))
    first.add(10)
    second.add(4)
    assert rows(recorder, semconv.EVICTION_TOKENS, TIER) == {"device": 14}


def test_histograms_of_two_caches_are_one_row(recorder: Recorder) -> None:
    for sample in (0.003, 0.2):
        recorder.histogram(semconv.EVICTION_DURATION, {TIER: "device"}).record(sample)
    (row,) = recorder.histograms(semconv.EVICTION_DURATION)
    counts, total = row.cell.read()
    assert (sum(counts), total) == (2, 0.203)


def test_levels_with_the_same_labels_add_up(recorder: Recorder) -> None:
    first, second = recorder.level(semconv.USAGE, USED), recorder.level(semconv.USAGE, USED)
    first.set(30)
    assert rows(recorder, semconv.USAGE, STATE) == {"used": 30}
    second.set(12)
    assert rows(recorder, semconv.USAGE, STATE) == {"used": 42}


def test_levels_of_other_labels_are_other_rows(recorder: Recorder) -> None:
    used, free = recorder.level(semconv.USAGE, USED), recorder.level(semconv.USAGE, {**USED, STATE: "free"})
    used.set(30)
    free.set(12)
    assert rows(recorder, semconv.USAGE, STATE) == {"used": 30, "free": 12}


def test_newest_of_several_counts_where_a_sum_would_mean_nothing(recorder: Recorder) -> None:
    first, second = (recorder.level(semconv.BLOCK_SIZE, {TIER: "device"}) for _ in range(2))
    second.set(32)
    first.set(16)
    assert semconv.BLOCK_SIZE.instrument == "gauge"
    assert rows(recorder, semconv.BLOCK_SIZE, TIER) == {"device": 32}
    second.set(None)
    assert rows(recorder, semconv.BLOCK_SIZE, TIER) == {"device": 16}


class Pool:
    """Somebody who owns rows."""

    def __init__(self, recorder: Recorder, value: int) -> None:
        self.level = recorder.level(semconv.USAGE, USED)
        self.level.set(value)


def test_row_of_a_level_ends_with_its_owner(recorder: Recorder) -> None:
    first, second = Pool(recorder, 30), Pool(recorder, 12)
    del first
    gc.collect()
    assert rows(recorder, semconv.USAGE, STATE) == {"used": 12}
    del second
    gc.collect()
    assert rows(recorder, semconv.USAGE) == {}


def test_owners_that_come_and_go_leave_nothing_behind(recorder: Recorder) -> None:
    for value in range(1_000):
        Pool(recorder, value)
    gc.collect()
    last = Pool(recorder, 5)
    (series,) = recorder._tables[semconv.USAGE.name].values()
    assert len(series.levels) == 1
    assert last.level.value == 5


def test_counter_outlives_its_owner(recorder: Recorder) -> None:
    recorder.counter(semconv.EVICTION_TOKENS, EVICTED).add(7)
    gc.collect()
    assert rows(recorder, semconv.EVICTION_TOKENS, TIER) == {"device": 7}


# -------------------------------------------------------------------------------------------- asked values


class Sized:
    """An engine's pool that is asked for its size."""

    def __init__(self, size: object) -> None:
        self.size = size

    def read(self) -> Any:
        if isinstance(self.size, BaseException):
            raise self.size
        return self.size


POOLS = ("kv", "swa", "mamba")


@pytest.fixture
def pools(recorder: Recorder) -> dict[str, Sized]:
    sized = {pool: Sized(100) for pool in POOLS}
    for pool, each in sized.items():
        recorder.observe(semconv.LIMIT, {TIER: "device", POOL: pool}, each.read)
    return sized


def test_observed_value_is_asked_at_each_collection(recorder: Recorder, pools: dict[str, Sized]) -> None:
    pools["swa"].size = 7
    assert rows(recorder, semconv.LIMIT, POOL) == {"kv": 100, "swa": 7, "mamba": 100}
    pools["swa"].size = 0
    assert rows(recorder, semconv.LIMIT, POOL) == {"kv": 100, "swa": 0, "mamba": 100}


def test_observed_none_is_no_row_and_no_error(recorder: Recorder, pools: dict[str, Sized]) -> None:
    pools["swa"].size = None
    assert rows(recorder, semconv.LIMIT, POOL) == {"kv": 100, "mamba": 100}
    assert telemetry_errors(recorder) == 0


class UnspeakableError(Exception):
    """An exception that cannot even be shown."""

    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__


@pytest.mark.parametrize(
    "size",
    [NotImplementedError("no size here"), SystemExit(3), RecursionError(), UnspeakableError(), "many", [1], object()],
    ids=lambda size: type(size).__name__,
)
def test_one_pool_that_cannot_tell_its_size_costs_its_own_row(
    recorder: Recorder, pools: dict[str, Sized], lines: pytest.LogCaptureFixture, size: object
) -> None:
    pools["swa"].size = size
    for _ in range(3):
        assert rows(recorder, semconv.LIMIT, POOL) == {"kv": 100, "mamba": 100}
    assert telemetry_errors(recorder) == 1
    assert len(lines.messages) == 1


def test_pool_that_tells_its_size_again_has_its_row_again_and_may_fail_anew(
    recorder: Recorder, pools: dict[str, Sized], lines: pytest.LogCaptureFixture
) -> None:
    errors: list[int | float] = []
    for size in (NotImplementedError(), NotImplementedError(), 50, OSError(), 60):
        pools["swa"].size = size
        found = rows(recorder, semconv.LIMIT, POOL)
        assert found.get("swa") == (None if isinstance(size, Exception) else size)
        errors.append(telemetry_errors(recorder))
    assert errors == [1, 1, 1, 2, 2]
    assert len(lines.messages) == 1


def test_exception_of_a_reader_that_two_share_leaves_the_other_ones_value(recorder: Recorder) -> None:
    broken, good = Sized(ValueError()), Sized(5)
    for each in (broken, good):
        recorder.observe(semconv.LIMIT, {TIER: "host", POOL: "kv"}, each.read)
    assert rows(recorder, semconv.LIMIT, TIER) == {"host": 5}


def test_interrupt_from_the_keyboard_is_not_swallowed(recorder: Recorder, pools: dict[str, Sized]) -> None:
    pools["swa"].size = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        list(recorder.points(semconv.LIMIT))


def test_row_of_an_observed_value_ends_with_its_owner(recorder: Recorder) -> None:
    owner = Sized(100)
    recorder.observe(semconv.LIMIT, {TIER: "device", POOL: "kv"}, lambda: 100, owner=owner)
    recorder.observe(semconv.LIMIT, {TIER: "host", POOL: "kv"}, lambda: 200)
    assert rows(recorder, semconv.LIMIT, TIER) == {"device": 100, "host": 200}
    del owner
    gc.collect()
    assert rows(recorder, semconv.LIMIT, TIER) == {"host": 200}
    assert [len(series.readers) for series in recorder._tables[semconv.LIMIT.name].values()] == [0, 1]


def test_observed_counter_and_counted_one_add_up(recorder: Recorder) -> None:
    labels: Attributes = {semconv.KVCACHE_TELEMETRY_HOOK: "scheduler.init"}
    recorder.counter(semconv.TELEMETRY_ERRORS, labels).add(2)
    recorder.observe(semconv.TELEMETRY_ERRORS, labels, lambda: 3)
    assert telemetry_errors(recorder) == 5


class Foreign:
    """A number of somebody else's library, as numpy's are: not an int, but knows how to become one."""

    def __float__(self) -> float:
        return 2.5


def test_numbers_of_other_libraries_become_plain_ones(recorder: Recorder) -> None:
    recorder.observe(semconv.LIMIT, {TIER: "device", POOL: "kv"}, lambda: True)
    recorder.observe(semconv.LIMIT, {TIER: "host", POOL: "kv"}, lambda: Foreign())  # type: ignore[arg-type,return-value]
    found = rows(recorder, semconv.LIMIT, TIER)
    assert found == {"device": 1, "host": 2.5}
    assert {type(value) for value in found.values()} == {int, float}


# -------------------------------------------------------------------------------------------- series limit

LIMIT = 20


def worker(number: int) -> Attributes:
    return {semconv.KVCACHE_WORKER: f"w{number}", semconv.KVCACHE_RANK_DP: 0}


def overflow(recorder: Recorder) -> int | float:
    return recorder.dropped(semconv.Reason.LABEL_OVERFLOW).value


def test_every_measurement_beyond_the_series_limit_is_counted_and_said_once(lines: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(IDENTITY, series_limit=LIMIT)
    spec = semconv.EVENT_BATCHES_LOST
    counters = [recorder.counter(spec, worker(number)) for number in range(LIMIT + 5)]
    assert overflow(recorder) == 0
    for counter in counters:
        counter.add(1_000)
        counter.add(1_000)
    assert rows(recorder, spec, semconv.KVCACHE_WORKER) == {f"w{number}": 2_000 for number in range(LIMIT)}
    assert overflow(recorder) == 10
    assert lines.messages == [
        f"kvcache: {spec.name} has {LIMIT} series; more are not recorded, see kvcache.telemetry.dropped"
    ]


def test_known_series_is_found_again_at_the_limit() -> None:
    recorder = Recorder(IDENTITY, series_limit=LIMIT)
    for number in range(LIMIT + 5):
        recorder.counter(semconv.EVENT_BATCHES_LOST, worker(number))
    recorder.counter(semconv.EVENT_BATCHES_LOST, worker(3)).add(7)
    assert rows(recorder, semconv.EVENT_BATCHES_LOST, semconv.KVCACHE_WORKER)["w3"] == 7
    assert overflow(recorder) == 0


def test_limit_holds_for_each_metric_apart_and_for_every_kind_of_cell(lines: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(IDENTITY, series_limit=LIMIT)
    named = [{TIER: "disk", semconv.KVCACHE_TIER_NAME: str(number)} for number in range(LIMIT + 1)]
    for labels in named:
        histogram = recorder.histogram(semconv.LOOKUP_DURATION, {**labels, semconv.KVCACHE_LOOKUP_MODE: "sync"})
        level = recorder.level(semconv.PREFETCH_OUTSTANDING_TOKENS, labels)
        recorder.observe(semconv.EVENT_LAST_AGE, worker(int(labels[semconv.KVCACHE_TIER_NAME])), lambda: 1)
    assert overflow(recorder) == 1  # The observed value: it cannot be counted later.
    histogram.record(0.1)
    level.set(1)
    level.add(-1)
    assert overflow(recorder) == 4
    assert len(list(recorder.histograms(semconv.LOOKUP_DURATION))) == LIMIT
    assert len(list(recorder.points(semconv.EVENT_LAST_AGE))) == LIMIT
    assert rows(recorder, semconv.PREFETCH_OUTSTANDING_TOKENS) == {}
    assert len(lines.messages) == 3


def test_limit_leaves_room_for_what_the_sdk_folds_itself() -> None:
    assert Recorder(IDENTITY).series_limit <= 2_000 // 2


# ---------------------------------------------------------------------------------- bookkeeping gone wrong


def errors(recorder: Recorder) -> dict[str, int | float]:
    return {reason: value for reason, value in rows(recorder, semconv.ACCOUNTING_ERRORS, REASON).items() if value}


def test_negative_amount_is_an_accounting_error_and_said_once(
    recorder: Recorder, lines: pytest.LogCaptureFixture
) -> None:
    counter = recorder.counter(semconv.EVICTION_TOKENS, EVICTED)
    for _ in range(3):
        counter.add(-60)
    assert rows(recorder, semconv.EVICTION_TOKENS, TIER) == {"device": 0}
    assert errors(recorder) == {"negative_delta": 3}
    assert len(lines.messages) == 1


@pytest.mark.parametrize("sample", [float("nan"), float("inf")])
def test_amount_that_is_no_number_is_an_accounting_error_of_another_kind(recorder: Recorder, sample: float) -> None:
    recorder.histogram(semconv.EVICTION_DURATION, {TIER: "device"}).record(sample)
    level = recorder.level(semconv.USAGE, USED)
    level.set(sample)
    assert errors(recorder) == {"other": 2}
    assert rows(recorder, semconv.USAGE) == {}


def test_level_below_zero_is_an_underflow_and_said_once(recorder: Recorder, lines: pytest.LogCaptureFixture) -> None:
    level = recorder.level(semconv.USAGE, USED)
    level.set(1)
    level.add(-2)
    level.add(-2)
    assert rows(recorder, semconv.USAGE, STATE) == {"used": 0}
    assert errors(recorder) == {"underflow": 2}
    assert len(lines.messages) == 1


def test_unknown_kind_of_accounting_error_is_still_one(recorder: Recorder) -> None:
    recorder.accounting_error("recount")
    recorder.accounting_error("never heard of")
    assert errors(recorder) == {"recount": 1, "other": 1}


# -------------------------------------------------------------------------------------------------- forks


def test_reset_starts_every_kind_of_series_from_nothing() -> None:
    recorder = Recorder(IDENTITY, replay=True)
    counter = recorder.counter(semconv.EVICTION_TOKENS, EVICTED)
    histogram = recorder.histogram(semconv.EVICTION_DURATION, {TIER: "device"})
    level = recorder.level(semconv.USAGE, USED)
    counter.add(10)
    histogram.record(0.1)
    level.set(5)
    recorder.accounting_error("recount")
    recorder.reset()
    assert rows(recorder, semconv.EVICTION_TOKENS, TIER) == {"device": 0}
    assert rows(recorder, semconv.USAGE) == {}
    assert errors(recorder) == {}
    assert recorder.replayed is not None
    assert len(recorder.replayed) == 0
    (row,) = recorder.histograms(semconv.EVICTION_DURATION)
    counts, total = row.cell.read()
    assert (sum(counts), total) == (0, 0.0)


class UnfinishedEvent:
    """Stands in for a device's event that it has not passed."""

    def query(self) -> bool:
        return False

    def elapsed_time(self, end: object) -> float:
        raise RuntimeError("device not ready")


def test_event_pairs_that_tell_no_time_are_dropped_measurements_and_those_of_a_parent_are_not(
    recorder: Recorder,
) -> None:
    histogram = recorder.histogram(semconv.EVICTION_DURATION, {TIER: "device"})
    recorder.harvester.add(UnfinishedEvent(), UnfinishedEvent(), histogram)
    recorder.harvester.stop(20)
    assert rows(recorder, semconv.TELEMETRY_DROPPED, REASON)["event_lost"] == 1
    recorder.harvester._pairs.append((UnfinishedEvent(), UnfinishedEvent(), histogram, None))
    recorder.reset()
    assert recorder.harvester.flush(20)
    assert set(rows(recorder, semconv.TELEMETRY_DROPPED, REASON).values()) == {0}


@contextmanager
def held_by_another_thread(lock: Any) -> Generator[None]:
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            release.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    yield
    release.set()
    thread.join()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_child_counts_one_and_the_parent_ten(recorder: Recorder) -> None:
    counter = recorder.counter(semconv.EVICTION_TOKENS, EVICTED)
    counter.add(10)
    read, write = os.pipe()
    with held_by_another_thread(recorder._lock):  # Which the child does not have: it must not wait for it.
        pid = os.fork()
        if pid == 0:
            try:
                signal.alarm(10)
                recorder.reset()
                counter.add(1)
                found = rows(recorder, semconv.EVICTION_TOKENS, TIER)
                os.write(write, repr(found).encode())
            finally:
                os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        assert answer.read() == "{'device': 1}"
    os.waitpid(pid, 0)
    assert rows(recorder, semconv.EVICTION_TOKENS, TIER) == {"device": 10}


# ------------------------------------------------------------------------- a random walk against a plain dict

TIERS = st.sampled_from(["device", "host", "disk", "cxl"])
POOL_NAMES = st.sampled_from(["kv", "swa", "weird"])
WHICH = st.integers(0, 9)
CACHES = st.sampled_from([Identity("vllm", "A"), Identity("vllm", "A", Rank(tp=1)), Identity("custom", "B")])


def folded(tier: str, pool: str) -> tuple[str, str]:
    return ("unknown" if tier == "cxl" else tier), ("other" if pool == "weird" else pool)


class RandomWalk(RuleBasedStateMachine):
    """Every row of the recorder is what a dictionary of numbers says."""

    def __init__(self) -> None:
        super().__init__()
        self.recorder = Recorder(IDENTITY)
        self.counted: dict[Any, int] = {}
        self.sampled: dict[Any, list[int]] = {}
        self.levels: list[tuple[Any, Level]] = []
        self.held: dict[int, int | None] = {}
        self.wrong: dict[Any, int] = {}

    def doubt(self, cache: Identity, reason: str, times: int) -> None:
        if times:
            self.wrong[cache, reason] = self.wrong.get((cache, reason), 0) + times

    @rule(cache=CACHES, tier=TIERS, pool=POOL_NAMES, amount=st.integers(-3, 100))
    def add(self, cache: Identity, tier: str, pool: str, amount: int) -> None:
        self.recorder.counter(semconv.EVICTION_TOKENS, {TIER: tier, POOL: pool}, cache).add(amount)
        key = (cache, *folded(tier, pool))
        self.counted[key] = self.counted.get(key, 0) + max(amount, 0)
        self.doubt(cache, "negative_delta", amount < 0)

    @rule(cache=CACHES, tier=TIERS, sample=st.integers(-3, 100))
    def record(self, cache: Identity, tier: str, sample: int) -> None:
        self.recorder.histogram(semconv.EVICTION_DURATION, {TIER: tier}, cache).record(sample)
        samples = self.sampled.setdefault((cache, folded(tier, "kv")[0]), [])
        samples.extend([sample] if sample >= 0 else [])
        self.doubt(cache, "negative_delta", sample < 0)

    @rule(cache=CACHES, tier=TIERS, pool=POOL_NAMES)
    def new_owner(self, cache: Identity, tier: str, pool: str) -> None:
        level = self.recorder.level(semconv.LIMIT, {TIER: tier, POOL: pool}, cache)
        self.levels.append(((cache, *folded(tier, pool)), level))

    @rule(which=WHICH, value=st.one_of(st.none(), st.integers(0, 50)))
    def set_level(self, which: int, value: int | None) -> None:
        if self.levels:
            _, level = self.levels[which % len(self.levels)]
            level.set(value)
            self.held[id(level)] = value

    @rule(which=WHICH, amount=st.integers(-20, 20))
    def move_level(self, which: int, amount: int) -> None:
        if self.levels:
            (cache, *_), level = self.levels[which % len(self.levels)]
            level.add(amount)
            value = (self.held.get(id(level)) or 0) + amount
            self.doubt(cache, "underflow", value < 0)
            self.held[id(level)] = max(value, 0)

    @rule(which=WHICH)
    def owner_leaves(self, which: int) -> None:
        if self.levels:
            _, level = self.levels.pop(which % len(self.levels))
            self.held.pop(id(level), None)

    @rule()
    def fork(self) -> None:
        self.recorder.reset()
        self.counted = dict.fromkeys(self.counted, 0)
        self.sampled = {key: [] for key in self.sampled}
        self.held.clear()
        self.wrong.clear()

    @invariant()
    def rows_are_those_of_the_dictionary(self) -> None:
        gauges: dict[Any, int] = {}
        for key, level in self.levels:
            if (value := self.held.get(id(level))) is not None:
                gauges[key] = gauges.get(key, 0) + value
        assert self.rows(semconv.EVICTION_TOKENS) == self.counted
        assert self.rows(semconv.LIMIT) == gauges
        histograms = {self.key(row.attributes): row.cell.read() for row in self.histograms()}
        assert {key: (sum(counts), total) for key, (counts, total) in histograms.items()} == {
            key: (len(samples), sum(samples)) for key, samples in self.sampled.items()
        }
        assert {key: count for key, count in self.rows(semconv.ACCOUNTING_ERRORS).items() if count} == self.wrong

    def rows(self, spec: MetricSpec) -> dict[Any, int | float]:
        points = list(self.recorder.points(spec))
        found = {self.key(point.attributes): point.value for point in points}
        assert len(found) == len(points)
        return found

    def histograms(self) -> list[Any]:
        return list(self.recorder.histograms(semconv.EVICTION_DURATION))

    @staticmethod
    def key(attributes: Attributes) -> tuple[object, ...]:
        engine, cache, tp, pp, dp, *own = attributes.values()
        return (Identity(str(engine), str(cache), Rank(int(tp), int(pp), int(dp))), *own)


RandomWalk.TestCase.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
TestRandomWalk = RandomWalk.TestCase


@pytest.mark.parametrize(("held", "exported"), [(2**63 - 1, int), (2**64, float), (10**400, float)])
def test_a_number_that_64_bits_do_not_hold_is_a_float(held: int, exported: type) -> None:
    recorder = Recorder(Identity("vllm", "Cache"))
    level = recorder.level(semconv.LIMIT, {semconv.KVCACHE_TIER: "host", semconv.KVCACHE_POOL: "kv"})
    level.value = held
    (point,) = recorder.points(semconv.LIMIT)
    assert type(point.value) is exported


# ------------------------------------------------------------------------------------------- rows about a worker


def of_worker(name: str, rank: int = 2) -> Attributes:
    return {semconv.KVCACHE_WORKER: name, semconv.KVCACHE_RANK_DP: rank}


def test_rows_about_a_worker_carry_its_rank_and_no_identity(recorder: Recorder) -> None:
    recorder.level(semconv.BLOCK_SIZE, {TIER: "device"}).set(1)
    level = recorder.level(semconv.BLOCK_SIZE, {TIER: "device", **of_worker("w")})
    level.set(16)
    assert [point.attributes for point in recorder.points(semconv.BLOCK_SIZE)] == [{TIER: "device", **of_worker("w")}]


def test_rows_end_by_a_label_whoever_writes_them(recorder: Recorder) -> None:
    counters = {name: recorder.counter(semconv.EVENT_BATCHES_LOST, of_worker(name)) for name in ("gone", "stays")}
    level = recorder.level(semconv.BLOCK_SIZE, {TIER: "device", **of_worker("gone")})
    level.set(16)
    recorder.observe(semconv.EVENT_LAST_AGE, of_worker("gone"), lambda: 1.0)
    for counter in counters.values():
        counter.add(3)
    recorder.end(semconv.KVCACHE_WORKER, "gone")
    counters["gone"].add(1)
    level.set(32)
    assert rows(recorder, semconv.EVENT_BATCHES_LOST, semconv.KVCACHE_WORKER) == {"stays": 3}
    assert list(recorder.points(semconv.BLOCK_SIZE)) == list(recorder.points(semconv.EVENT_LAST_AGE)) == []
    assert recorder.counter(semconv.EVENT_BATCHES_LOST, of_worker("gone")).value == 0


def test_of_the_rows_with_a_label_those_end_that_have_others_too(recorder: Recorder) -> None:
    lost = {
        (name, rank): recorder.counter(semconv.EVENT_BATCHES_LOST, {**of_worker(name), semconv.KVCACHE_RANK_DP: rank})
        for name in ("w", "other")
        for rank in range(3)
    }
    failures = recorder.counter(
        semconv.EVENT_DECODE_FAILURES, {semconv.KVCACHE_WORKER: "w", semconv.KVCACHE_REASON: "other"}
    )
    for cell in (*lost.values(), failures):
        cell.add(1)

    def left() -> set[tuple[object, ...]]:
        return {
            tuple(point.attributes[key] for key in (semconv.KVCACHE_WORKER, semconv.KVCACHE_RANK_DP))
            for point in recorder.points(semconv.EVENT_BATCHES_LOST)
        }

    recorder.end(semconv.KVCACHE_WORKER, "w", {semconv.KVCACHE_RANK_DP: 1})
    assert left() == lost.keys() - {("w", 1)}
    assert [point.value for point in recorder.points(semconv.EVENT_DECODE_FAILURES)] == [1]
    recorder.end(semconv.KVCACHE_WORKER, "w")
    assert left() == {("other", rank) for rank in range(3)}
    assert not list(recorder.points(semconv.EVENT_DECODE_FAILURES))


def test_to_end_a_row_takes_no_longer_where_there_are_many() -> None:
    looked_at = 0

    class Counted(dict[tuple[object, ...], Any]):
        def items(self) -> Any:
            raise AssertionError("it looks at all of them")

        __iter__ = values = items

        def __delitem__(self, row: tuple[object, ...]) -> None:
            nonlocal looked_at
            looked_at += 1
            super().__delitem__(row)

    recorder = Recorder(IDENTITY, series_limit=2000)
    tables = recorder._tables  # pyright: ignore[reportPrivateUsage]
    tables[semconv.EVENT_BATCHES_LOST.name] = Counted()
    for number in range(1000):
        recorder.counter(semconv.EVENT_BATCHES_LOST, of_worker(f"w{number}"))
    recorder.end(semconv.KVCACHE_WORKER, "w500")
    assert looked_at == 1


def test_series_that_have_ended_make_room() -> None:
    recorder = Recorder(IDENTITY, series_limit=10)
    for number in range(50):
        recorder.counter(semconv.EVENT_BATCHES_LOST, of_worker(f"w{number}")).add(1)
        recorder.end(semconv.KVCACHE_WORKER, f"w{number}")
    assert recorder.dropped(semconv.Reason.LABEL_OVERFLOW).value == 0
