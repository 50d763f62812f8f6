"""Cells lose nothing on any number of threads, refuse what is no amount, and are read at one moment."""

from __future__ import annotations

import dis
import itertools
import math
import sys
import threading
from collections import deque
from types import MemberDescriptorType
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache_otel import semconv
from kvcache_otel.record import cells
from kvcache_otel.record.cells import (
    EXACT,
    Counter,
    DiscardedCounter,
    DiscardedHistogram,
    DiscardedLevel,
    Histogram,
    Level,
    ReplayedHistogram,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BOUNDS = semconv.DURATION_BOUNDS
NAN, INFINITY = math.nan, math.inf

THREADS = 8
ADDS = 1_000_000
# A power of two, so that the exact sum does not depend on the order of the additions.
SAMPLES = [2.0**exponent for exponent in range(-18, 7)]


@pytest.fixture
def refused() -> list[Any]:
    return []


@pytest.fixture
def counter(refused: list[Any]) -> Counter:
    return Counter(refused.append)


@pytest.fixture
def histogram(refused: list[Any]) -> Histogram:
    return Histogram(BOUNDS, refused.append)


@pytest.fixture
def level(refused: list[Any]) -> Level:
    return Level(refused.append)


@pytest.fixture
def hasty_switches() -> Iterator[None]:
    """Ask the running thread for the GIL as soon as another one wants it, not after 5 ms."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def on_threads(number: int, work: Callable[[], None]) -> None:
    together = threading.Barrier(number)

    def run() -> None:
        together.wait()
        work()

    threads = [threading.Thread(target=run) for _ in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# ------------------------------------------------------------------------------------------ nothing is lost


def test_this_interpreter_has_the_gil_that_the_cells_rely_on() -> None:
    assert EXACT


@pytest.mark.usefixtures("hasty_switches")
def test_counter_loses_no_addition_of_eight_threads(counter: Counter) -> None:
    def work() -> None:
        add = counter.add
        for _ in range(ADDS):
            add(3)

    on_threads(THREADS, work)
    assert counter.value == THREADS * ADDS * 3


@pytest.mark.usefixtures("hasty_switches")
def test_histogram_loses_no_sample_of_eight_threads(histogram: Histogram) -> None:
    rounds = ADDS // len(SAMPLES)

    def work() -> None:
        record = histogram.record
        for _ in range(rounds):
            for sample in SAMPLES:
                record(sample)

    on_threads(THREADS, work)
    expected = Histogram(BOUNDS, pytest.fail)
    for sample in SAMPLES:
        expected.record(sample)
    times = THREADS * rounds
    counts, total = histogram.read()
    assert counts == [count * times for count in expected.read()[0]]
    assert total == sum(SAMPLES) * times


@pytest.mark.usefixtures("hasty_switches")
def test_histogram_is_read_at_one_moment_while_threads_record(histogram: Histogram) -> None:
    done = threading.Event()

    def work() -> None:
        while not done.is_set():
            histogram.record(1.0)

    writers = [threading.Thread(target=work) for _ in range(3)]
    for writer in writers:
        writer.start()
    try:
        torn = [(counts, total) for counts, total in (histogram.read() for _ in range(2_000)) if sum(counts) != total]
    finally:
        done.set()
        for writer in writers:
            writer.join()
    assert torn == []


# ------------------------------------------------------------------------------ the same, from the bytecode

# Where CPython looks at its "eval breaker": there the GIL changes hands, signal handlers run and, from 3.12 on, the
# garbage collector does. The sources: `CHECK_EVAL_BREAKER()` in Python/ceval.c of 3.11 and in Python/bytecodes.c of
# 3.12; `_CHECK_PERIODIC` there in 3.13, from which the flag HAS_EVAL_BREAK_FLAG in
# Include/internal/pycore_opcode_metadata.h is made. Specialised forms (CALL_BUILTIN_O, ...) fall under their family's
# name, because `dis` shows that one. A debugger or profiler that traces single opcodes can come in anywhere.
SWITCH_POINTS = {
    "CALL",
    "CALL_FUNCTION_EX",
    "CALL_KW",  # 3.13
    "ENTER_EXECUTOR",  # 3.13
    "JUMP_BACKWARD",
    "POP_JUMP_BACKWARD_IF_FALSE",  # These four: 3.11
    "POP_JUMP_BACKWARD_IF_NONE",
    "POP_JUMP_BACKWARD_IF_NOT_NONE",
    "POP_JUMP_BACKWARD_IF_TRUE",
    "PRECALL",  # 3.11: its specialised forms make the call
    "RESUME",
}

# What may stand between a load and its store. An instruction that is in neither set is one that nobody has looked at.
# The attributes and operands must be the plain ones that the test below asserts: LOAD_ATTR of a property or BINARY_OP
# of an instance with a Python `__add__` would run Python code.
QUIET = {
    "BINARY_OP",
    "BINARY_SUBSCR",
    "BUILD_LIST",
    "COPY",
    "LIST_EXTEND",
    "LOAD_ATTR",
    "LOAD_CONST",
    "LOAD_FAST",
    "LOAD_FAST_LOAD_FAST",
    "STORE_ATTR",
    "STORE_SUBSCR",
    "SWAP",
}


class Span:
    """The instructions of a function from the first that loads one attribute to the last that has to do with it."""

    def __init__(self, function: Callable[..., Any], first: tuple[str, str], last: tuple[str, str]) -> None:
        instructions = list(dis.get_instructions(function))
        starts = [index for index, each in enumerate(instructions) if (each.opname, each.argval) == first]
        assert starts, f"no {first} in {function.__qualname__}"
        ends = [index for index, each in enumerate(instructions) if (each.opname, each.argval) == last]
        ends = [index for index in ends if index > starts[-1]]
        assert ends, f"no {last} after {first} in {function.__qualname__}"
        self.instructions = instructions[starts[-1] : ends[0] + 1]

    def switch_points(self) -> list[str]:
        return [each.opname for each in self.instructions if each.opname in SWITCH_POINTS]

    def not_looked_at(self) -> list[str]:
        return [each.opname for each in self.instructions if each.opname not in SWITCH_POINTS | QUIET]

    def entered_from_elsewhere(self) -> list[int]:
        return [each.offset for each in self.instructions[1:] if each.is_jump_target]


ATOMIC = {
    "counter's value": (Counter.add, ("LOAD_ATTR", "value"), ("STORE_ATTR", "value")),
    "histogram's bucket": (Histogram._sort, ("LOAD_ATTR", "_counts"), ("STORE_SUBSCR", None)),
    "histogram's sum": (Histogram._sort, ("LOAD_ATTR", "_sum"), ("STORE_ATTR", "_sum")),
    "histogram's bucket with its sum": (Histogram._sort, ("LOAD_ATTR", "_counts"), ("STORE_ATTR", "_sum")),
    "reading a histogram": (Histogram.read, ("LOAD_ATTR", "_counts"), ("LOAD_ATTR", "_sum")),
}


@pytest.mark.parametrize("what", ATOMIC)
def test_no_thread_can_come_between_a_load_and_its_store(what: str) -> None:
    span = Span(*ATOMIC[what])
    assert span.switch_points() == []
    assert span.not_looked_at() == []
    assert span.entered_from_elsewhere() == []


def test_no_thread_can_come_between_two_that_move_a_level() -> None:
    span = Span(Level.add, ("LOAD_ATTR", "value"), ("STORE_ATTR", "value"))
    assert span.switch_points() == []  # It may jump, but only forward: what it has not begun it does not do.
    assert not [name for name in (each.opname for each in span.instructions) if "BACKWARD" in name]


def test_no_instruction_is_taken_for_quiet_that_can_switch() -> None:
    assert QUIET.isdisjoint(SWITCH_POINTS)


def test_every_name_above_is_one_of_some_interpreter() -> None:
    unknown = {name for name in SWITCH_POINTS | QUIET if name not in dis.opmap}
    allowed = {"CALL_KW", "ENTER_EXECUTOR", "LOAD_FAST_LOAD_FAST", "PRECALL"}
    assert {name for name in unknown if not name.startswith("POP_JUMP_BACKWARD")} <= allowed


def test_the_proof_sees_a_call_in_between() -> None:
    class Racy(Counter):
        def add(self, amount: int | float = 1) -> None:
            self.value = self.value + abs(amount)

    span = Span(Racy.add, ("LOAD_ATTR", "value"), ("STORE_ATTR", "value"))
    assert "CALL" in span.switch_points()


@pytest.mark.parametrize(("cell", "names"), [(Counter, ["value"]), (Histogram, ["bounds", "_counts", "_sum"])])
def test_attributes_are_plain_slots_whose_access_runs_no_python(cell: type, names: list[str]) -> None:
    assert all(type(vars(cell)[name]) is MemberDescriptorType for name in names)


def test_buckets_are_a_plain_list_whose_access_runs_no_python(histogram: Histogram) -> None:
    assert type(histogram._counts) is list


# ------------------------------------------------------------------------------------------------ counters


def test_counter_starts_at_zero_and_adds_one_by_default(counter: Counter) -> None:
    assert counter.value == 0
    counter.add()
    assert counter.value == 1


@pytest.mark.parametrize("amount", [0, 1, 2**63 - 1, 2.0**62, 0.5, True])
def test_counter_adds_every_amount_from_zero_that_can_be_exported(
    counter: Counter, refused: list[Any], amount: float
) -> None:
    counter.add(amount)
    assert (counter.value, refused) == (amount, [])


@pytest.mark.parametrize("amount", [-1, -60, -0.001, -INFINITY, INFINITY, NAN, 2**63, 10**400])
def test_counter_refuses_what_is_no_amount(counter: Counter, refused: list[Any], amount: float) -> None:
    counter.add(5)
    counter.add(amount)
    assert counter.value == 5
    assert repr(refused) == repr([amount])


@pytest.mark.parametrize("amount", [None, "5", [1]])
def test_counter_is_left_alone_by_what_is_no_number(counter: Counter, refused: list[Any], amount: Any) -> None:
    """A bug of the adapter, not a value of the engine: the hook's guard counts it."""
    counter.add(5)
    with pytest.raises(TypeError):
        counter.add(amount)
    assert (counter.value, refused) == (5, [])


@given(st.lists(st.integers(min_value=-(10**6), max_value=2**63 - 1)))
def test_counter_is_the_sum_of_what_is_not_negative(amounts: list[int]) -> None:
    refused: list[float] = []
    counter = Counter(refused.append)
    for amount in amounts:
        counter.add(amount)
    assert counter.value == sum(amount for amount in amounts if amount >= 0)
    assert refused == [amount for amount in amounts if amount < 0]


def test_counter_reset_starts_from_zero(counter: Counter) -> None:
    counter.add(10)
    counter.reset()
    counter.add(1)
    assert counter.value == 1


# ---------------------------------------------------------------------------------------------- histograms


def test_milliseconds_and_minutes_fall_into_different_buckets(histogram: Histogram) -> None:
    durations = [0.003, 0.2, 1.7, 45.0]
    for duration in durations:
        histogram.record(duration)
    counts, total = histogram.read()
    filled = [index for index, count in enumerate(counts) if count]
    assert [counts[index] for index in filled] == [1, 1, 1, 1]
    assert [BOUNDS[index] for index in filled] == [0.005, 0.2, 2, 60]
    assert total == sum(durations)


@pytest.mark.parametrize("index", range(len(BOUNDS)))
def test_bounds_belong_to_the_bucket_below_them(histogram: Histogram, index: int) -> None:
    histogram.record(BOUNDS[index])
    histogram.record(math.nextafter(BOUNDS[index], INFINITY))
    counts, _ = histogram.read()
    assert (counts[index], counts[index + 1]) == (1, 1)


def test_last_bucket_is_open(histogram: Histogram) -> None:
    histogram.record(1e300)
    counts, _ = histogram.read()
    assert (counts[-1], len(counts)) == (1, len(BOUNDS) + 1)


@pytest.mark.parametrize("sample", [-1, -1e-9, -INFINITY, INFINITY, NAN])
def test_histogram_refuses_what_is_no_duration(histogram: Histogram, refused: list[Any], sample: float) -> None:
    histogram.record(sample)
    assert histogram.read() == ([0] * (len(BOUNDS) + 1), 0.0)
    assert repr(refused) == repr([sample])


@pytest.mark.parametrize("sample", [None, "0.1"])
def test_histogram_is_left_alone_by_what_is_no_number(histogram: Histogram, sample: Any) -> None:
    with pytest.raises(TypeError):
        histogram.record(sample)
    assert histogram.read() == ([0] * (len(BOUNDS) + 1), 0.0)


def test_what_was_read_does_not_change_any_more(histogram: Histogram) -> None:
    histogram.record(1.0)
    counts, total = histogram.read()
    histogram.record(1.0)
    assert (sum(counts), total) == (1, 1.0)


def test_histogram_reset_starts_from_no_samples_in_a_list_of_its_own(histogram: Histogram) -> None:
    histogram.record(1.0)
    before, _ = histogram.read()
    histogram.reset()
    histogram.record(0.003)
    counts, total = histogram.read()
    assert (sum(counts), total, sum(before)) == (1, 0.003, 1)


SAMPLE = st.one_of(st.floats(allow_nan=True), st.sampled_from(BOUNDS), st.integers(-10, 100))


@given(st.lists(SAMPLE))
def test_counts_and_sum_are_a_recount_of_the_samples(samples: list[float]) -> None:
    refused: list[float] = []
    histogram = Histogram(BOUNDS, refused.append)
    for sample in samples:
        histogram.record(sample)
    good = [sample for sample in samples if 0 <= sample < INFINITY]
    edges = list(itertools.pairwise([-INFINITY, *BOUNDS, INFINITY]))
    total = 0.0
    for sample in good:  # Not sum(): from 3.12 on it is more exact than adding one by one.
        total += sample
    assert histogram.read() == ([sum(low < sample <= high for sample in good) for low, high in edges], total)
    assert len(refused) == len(samples) - len(good)


def replayed(refused: list[Any]) -> tuple[ReplayedHistogram, deque[Any], Counter]:
    queue: deque[Any] = deque()
    dropped = Counter(pytest.fail)
    cell = ReplayedHistogram(
        BOUNDS, refused.append, name="kvcache.transfer.duration", attributes={}, queue=queue, dropped=dropped
    )
    return cell, queue, dropped


def test_replayed_histogram_keeps_what_it_records_in_order(refused: list[Any]) -> None:
    cell, queue, dropped = replayed(refused)
    for sample in (1.0, 0.25, 4.0):
        cell.record(sample)
    assert list(queue) == [(cell, 1.0), (cell, 0.25), (cell, 4.0)]
    counts, total = cell.read()
    assert (sum(counts), total, dropped.value) == (3, 5.25, 0)


def test_replayed_histogram_counts_what_finds_the_queue_full_and_keeps_the_oldest(
    refused: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cells, "REPLAY_LIMIT", 2)
    cell, queue, dropped = replayed(refused)
    for sample in (1.0, 2.0, 3.0, 4.0):
        cell.record(sample)
    assert [sample for _, sample in queue] == [1.0, 2.0]
    assert (dropped.value, sum(cell.read()[0])) == (2, 4)


def test_replayed_histogram_does_not_queue_what_it_refuses(refused: list[Any]) -> None:
    cell, queue, dropped = replayed(refused)
    for sample in (-1.0, NAN, INFINITY):
        cell.record(sample)
    assert (list(queue), dropped.value, len(refused)) == ([], 0, 3)


# --------------------------------------------------------------------------------------------------- levels


def test_level_has_no_value_until_it_is_set(level: Level) -> None:
    assert level.value is None


@pytest.mark.parametrize("value", [0, 7, 0.5, None])
def test_level_is_what_it_was_set_to(level: Level, refused: list[Any], value: float | None) -> None:
    level.set(3)
    level.set(value)
    assert (level.value, refused) == (value, [])


def test_level_moves_up_and_down_from_nothing(level: Level, refused: list[Any]) -> None:
    level.add(5)
    level.add(-3)
    assert (level.value, refused) == (2, [])


def test_level_moved_below_zero_stays_at_zero_and_says_so_each_time(level: Level, refused: list[Any]) -> None:
    level.add(1)
    level.add(-3)
    level.add(-1)
    assert (level.value, refused) == (0, [-2, -1])
    level.add(4)
    assert level.value == 4


def test_level_set_below_zero_says_so_when_it_gets_there_and_not_while_it_stays(
    level: Level, refused: list[Any]
) -> None:
    for value in (-1, -2, 5, -3):
        level.set(value)
    assert (level.value, refused) == (0, [-1, -3])


@pytest.mark.parametrize("value", [NAN, INFINITY])
def test_level_set_to_what_is_no_quantity_has_no_row_and_says_so(
    level: Level, refused: list[Any], value: float
) -> None:
    level.set(3)
    level.set(value)
    assert (level.value, len(refused)) == (None, 1)


@pytest.mark.parametrize("amount", [NAN, INFINITY])
def test_level_is_not_moved_by_what_is_no_amount(level: Level, refused: list[Any], amount: float) -> None:
    level.set(3)
    level.add(amount)
    assert (level.value, len(refused)) == (3, 1)


def test_level_reset_forgets_also_that_it_was_below_zero(level: Level, refused: list[Any]) -> None:
    level.set(-1)
    level.reset()
    assert level.value is None
    level.set(-1)
    assert len(refused) == 2


# ---------------------------------------------------------------------------------- in place of the others


def test_discarded_cells_count_each_measurement_once_and_hold_nothing() -> None:
    dropped = Counter(pytest.fail)
    counter, histogram, level = DiscardedCounter(dropped), DiscardedHistogram(dropped), DiscardedLevel(dropped)
    for amount in (1, 1_000_000, -5, NAN):
        counter.add(amount)
    for sample in (0.1, -1.0):
        histogram.record(sample)
    level.set(7)
    level.set(None)
    level.add(-7)
    assert dropped.value == 9
    assert (counter.value, histogram.read(), level.value) == (0, ([0], 0.0), None)


# --------------------------------------------------------------------------------------- samples in batches


def test_a_batch_is_there_when_somebody_reads_and_is_a_copy(refused: list[Any]) -> None:
    histogram = Histogram(BOUNDS, refused.append)
    batch = [BOUNDS[0], BOUNDS[-1] + 1]
    histogram.extend(batch)
    batch.append(1.0)  # An engine goes on using its list.
    counts, total = histogram.read()
    assert (sum(counts), total) == (2, BOUNDS[0] + BOUNDS[-1] + 1)
    assert histogram.read() == (counts, total)


def test_batches_and_samples_add_up_with_writers_and_a_reader_at_once(refused: list[Any]) -> None:
    histogram = Histogram(BOUNDS, refused.append)
    done = threading.Event()

    def write() -> None:
        for _ in range(2_000):
            histogram.extend([0.5, 0.5])
            histogram.record(0.5)

    def read() -> None:
        while not done.is_set():
            histogram.read()

    readers, writers = ([threading.Thread(target=work) for _ in range(4)] for work in (read, write))
    for thread in (*readers, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    for thread in readers:
        thread.join()
    counts, total = histogram.read()
    assert (sum(counts), total, refused) == (4 * 2_000 * 3, 4 * 2_000 * 1.5, [])


@pytest.mark.parametrize("at_once", [1, 7])
def test_samples_that_nobody_reads_are_sorted_before_they_are_too_many(refused: list[Any], at_once: int) -> None:
    histogram = Histogram(BOUNDS, refused.append)
    for _ in range(3 * cells.WAITING):
        histogram.record(0.5)
        histogram.extend([0.5] * at_once)
        assert len(histogram._waiting) < cells.WAITING
    assert sum(histogram.read()[0]) == 3 * cells.WAITING * (1 + at_once)
    assert not histogram._waiting


def test_a_batch_with_something_wrong_in_it_loses_that_alone(refused: list[Any]) -> None:
    histogram = Histogram(BOUNDS, refused.append)
    histogram.extend([0.5, -1.0, NAN, 0.25])
    assert sum(histogram.read()[0]) == 2
    assert len(refused) == 2


def test_a_batch_with_something_in_it_that_is_no_number_loses_that_alone(refused: list[Any]) -> None:
    histogram = Histogram(BOUNDS, refused.append)
    histogram.extend([0.5, None, "1", 0.25])  # type: ignore[list-item]
    assert sum(histogram.read()[0]) == 2
    assert len(refused) == 2
