"""A stream between a publisher that knows what it sent and a channel that knows what it did: the counts must close."""

from __future__ import annotations

import random
from collections import deque
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache_otel.events.frames import END
from kvcache_otel.events.terms import Limits
from tests.events.stream_driver import LIMITS, Driver, batch, frame, parsed

if TYPE_CHECKING:
    from kvcache_otel.events.stream import Stream

SEEDS = range(40)

# Waits for so much longer than a batch is ever late that no batch in time counts as missing.
PATIENT = Limits(patience=1.0)
STEP = 0.01
LATEST = 5

BLINKS = 0.05

# Batches that get through after a restart: some had their numbers lost before it, and prove nothing.
PROOF = 15


class World:
    """A publisher, started again now and then, and the way from it to a stream, which is also asked for replays.

    Attributes:
        sent: Numbers sent, by run.
        arrived: For each run, the numbers that came live, however late or often.
        again: How many came twice.
        restarts: How often the publisher started again.
    """

    def __init__(self, seed: int, *, replay: int | None, drops: float, repeats: float, late: float) -> None:
        """Args:
        seed: Of all that is random.
        replay: How many batches the publisher keeps for replay; None where it has none.
        drops: How likely a batch is dropped.
        repeats: How likely it comes twice.
        late: How likely it comes after up to `LATEST` of its successors.
        """
        self.random = random.Random(seed)
        self.driver = Driver(replay=replay is not None, limits=PATIENT if late else Limits())
        self.drops, self.repeats, self.late = drops, repeats, late
        self.buffer: deque[int] = deque(maxlen=replay)
        self.sent = [0]
        self.arrived: list[set[int]] = [set()]
        self.again = self.restarts = 0
        self.waiting: list[list[int]] = []  # Countdown and number of each batch that is late.
        self.answers: deque[int] | None = None
        self.answered = 0  # Requests that are answered or being answered.

    @property
    def run(self) -> int:
        return self.restarts

    def deliver(self, number: int) -> None:
        if number in self.arrived[-1]:
            self.again += 1
        self.arrived[-1].add(number)
        self.driver.live(number, run=self.run)

    def send(self, *, certain: bool = False) -> None:
        number = self.sent[-1]
        self.sent[-1] += 1
        self.buffer.append(number)
        chance = self.random.random
        for entry in self.waiting:
            entry[0] -= 1
        if certain or chance() >= self.drops:
            # 0 again is a reset, unless it comes right after itself.
            if not certain and number and chance() < self.late:
                self.waiting.append([self.random.randint(1, LATEST), number])
            else:
                self.deliver(number)
                if not certain and chance() < self.repeats:
                    self.deliver(number)
                elif number and chance() < self.repeats:
                    self.waiting.append([self.random.randint(1, LATEST), number])
        self.bring(now=False)

    def bring(self, *, now: bool) -> None:
        """Delivers what is late."""
        due = [entry for entry in self.waiting if now or entry[0] <= 0]
        self.waiting = [entry for entry in self.waiting if entry not in due]
        for _, number in due:
            self.deliver(number)

    def step(self) -> None:
        """Lets time go by, and a replay go on; now and then the connection blinks, which must change no count."""
        driver = self.driver
        if self.random.random() < BLINKS:
            driver.stream.connected(driver.now)
        driver.wait(self.random.random() * STEP)
        if len(driver.requests) > self.answered and self.random.random() < 0.3:
            self.answered = len(driver.requests)
            start = driver.sent
            assert start is not None
            self.answers = deque(number for number in self.buffer if number >= start)
        if self.answers is not None:
            for _ in range(self.random.randint(0, 8)):
                if driver.asked is None or len(driver.requests) > self.answered:
                    self.answers = None
                    return
                if not self.answers:
                    self.answers = None
                    driver.end()
                    return
                driver.answer(self.answers.popleft(), run=self.run)

    def settle(self) -> None:
        """Lets everything on its way arrive."""
        self.bring(now=True)
        while self.driver.stream.due < float("inf"):
            self.step()
            if self.driver.asked is None:
                self.driver.wait(self.driver.limits.patience)
        assert self.driver.asked is None

    def restart(self, *, settled: bool) -> None:
        """Starts the publisher again.

        Where everything has arrived, its first batches may be dropped. With a gap still open, or nothing applied yet,
        those that follow could be what is missing.
        """
        self.send(certain=True)
        while max(self.arrived[-1]) < 30:
            self.send(certain=True)
        self.settle() if settled or not self.driver.runs[-1] else self.bring(now=True)
        missed = self.random.choice((0, 0, 1, 2, 3)) if settled else 0
        self.restarts += 1
        self.buffer.clear()
        self.answers, self.answered = None, len(self.driver.requests)
        self.sent.append(missed)
        self.buffer.extend(range(missed))
        self.arrived.append(set())
        for _ in range(PROOF):
            self.send(certain=True)

    def live(self, batches: int, *, restarts: float = 0.0, settled: bool = False) -> None:
        for _ in range(batches):
            self.send()
            self.step()
            if self.random.random() < restarts:
                self.restart(settled=settled)
        self.send(certain=True)
        self.settle()

    # -- what must hold --------------------------------------------------------------------------------------------

    def missed(self) -> int:
        """Batches between the first and the last of each run that did not come live; after a reset the first is 0."""
        return sum(max(run) - min(run) * (not life) + 1 - len(run) for life, run in enumerate(self.arrived))

    def check_order(self) -> None:
        """Each run is applied by itself, in order, no batch twice."""
        runs = [parsed(run) for run in self.driver.runs]
        assert len(runs) == self.restarts + 1
        for name, run in enumerate(runs):
            assert {publisher for _, publisher in run} == {name}
            assert all(before < after for (before, _), (after, _) in pairwise(run))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("settled", [False, True])
def test_without_replay_what_was_dropped_is_lost(seed: int, settled: bool) -> None:
    world = World(seed, replay=None, drops=0.2, repeats=0.1, late=0.1)
    world.live(300, restarts=0.02, settled=settled)
    world.check_order()
    counts = world.driver.counts
    assert world.again > 0
    assert counts.lost.value == world.missed() > 0
    assert counts.duplicate.value == world.again
    assert counts.resets.value == world.restarts
    assert counts.recovered.value == 0
    for applied, arrived in zip(world.driver.runs, world.arrived, strict=True):
        assert {number for number, _ in parsed(applied)} == arrived


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("late", [0.0, 0.1])
def test_with_replay_everything_is_applied_once_and_in_order(seed: int, late: float) -> None:
    world = World(seed, replay=1_000_000, drops=0.2, repeats=0.1, late=late)
    world.live(300, restarts=0.02, settled=True)
    world.check_order()
    counts = world.driver.counts
    assert counts.lost.value == 0
    assert counts.resets.value == world.restarts
    for applied, sent in zip(world.driver.runs, world.sent, strict=True):
        assert [number for number, _ in parsed(applied)] == [*range(sent)]
    # A batch that is late may have been recovered before it comes, or applied as one from before the first.
    early = counts.recovered.value - world.missed()
    assert counts.duplicate.value - world.again >= early >= 0
    assert world.missed() > 0
    assert late or counts.duplicate.value - world.again == early == 0


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kept", [0, 1, 5, 30])
def test_with_a_short_replay_every_gap_is_recovered_or_lost(seed: int, kept: int) -> None:
    world = World(seed, replay=kept, drops=0.3, repeats=0.1, late=0.0)
    world.live(300, restarts=0.02, settled=seed % 2 == 0)
    world.check_order()
    counts = world.driver.counts
    assert counts.recovered.value + counts.lost.value == world.missed()
    assert counts.lost.value > 0 or kept == 30
    assert counts.recovered.value > 0 or kept <= 5
    assert counts.duplicate.value == world.again
    assert counts.resets.value == world.restarts


@pytest.mark.parametrize("seed", SEEDS)
def test_joining_a_publisher_that_has_been_talking(seed: int) -> None:
    world = World(seed, replay=1_000_000, drops=0.2, repeats=0.0, late=0.0)
    world.sent = [500]
    world.buffer.extend(range(500))
    world.driver.stream.connected(world.driver.now)
    for _ in range(world.random.randint(0, 50)):
        world.step()
    world.live(100)
    world.check_order()
    assert [number for number, _ in parsed(world.driver.runs[0])] == [*range(world.sent[0])]
    assert world.driver.counts.lost.value == 0
    assert world.driver.counts.recovered.value <= world.missed()


# -- anything at all ---------------------------------------------------------------------------------------------------

NUMBERS = st.integers(0, 12) | st.sampled_from((200, 2**24, 2**24 + 13, 2**63, END - 1, END)) | st.integers(0, END)
PAYLOADS = st.sampled_from((b"", b"a", b"b", b"c" * 300)) | st.binary(max_size=4)
MESSAGES = (
    st.tuples(st.just(b""), NUMBERS.map(frame), PAYLOADS)
    | st.tuples(st.just(b""), st.just(b"topic"), NUMBERS.map(frame), PAYLOADS)
    | st.lists(st.binary(max_size=9), max_size=5)
)
CALLS = st.tuples(st.sampled_from(("live", "live", "live", "answer", "answer")), MESSAGES) | st.tuples(
    st.sampled_from(("wait", "connected")), st.sampled_from((0.01, 0.1, 5.0, 60.0))
)
SMALL = Limits(window=4, held=8, held_bytes=500)


@settings(max_examples=1000, deadline=None)
@given(st.booleans(), st.lists(CALLS, max_size=80))
def test_whatever_comes_a_stream_goes_on(replay: bool, calls: list[tuple[str, object]]) -> None:
    driver = Driver(replay=replay, limits=SMALL)
    stream = driver.stream
    before = 0
    for name, argument in calls:
        if name == "wait":
            assert isinstance(argument, float)
            driver.wait(argument)
        elif name == "connected":
            stream.connected(driver.now)
        else:
            assert isinstance(argument, (list, tuple))
            (stream.live if name == "live" else stream.answer)([*argument], driver.now)
        check_bounds(stream, driver)
        lost = driver.counts.lost.value
        assert 0 <= lost - before <= (2**24 + 1) * SMALL.held * 2
        before = lost
    assert driver.asked is None or replay
    for _ in range(100):
        driver.wait(10_000)
    for _ in range(20):  # Whether it is still the same publisher is asked until it is told.
        if driver.asked is not None:
            driver.end()
        else:
            driver.wait(10_000)
    assert driver.asked is None
    assert stream.due == float("inf")
    # What comes then, in order, is applied as it comes.
    for number in range(3):
        driver.live(number, run=9)
    driver.live(3, run=9)
    assert driver.runs[-1][-2:] == [batch(2, 9), batch(3, 9)]


def check_bounds(stream: Stream, driver: Driver) -> None:
    """What a stream keeps is bounded, by what its limits say and a few more."""
    held = stream._line.held  # pyright: ignore[reportPrivateUsage]
    assert len(held) <= SMALL.held
    assert held.size <= SMALL.held_bytes
    assert len(stream._suspects) <= 66  # pyright: ignore[reportPrivateUsage]
    assert (driver.asked is not None) == (stream._replay.request is not None)  # pyright: ignore[reportPrivateUsage]
    assert stream.due < float("inf") or not held


@pytest.mark.parametrize("seed", SEEDS)
def test_random_numbers_at_full_speed(seed: int) -> None:
    rng = random.Random(seed)
    driver = Driver(replay=seed % 2 == 0, limits=SMALL)
    for _ in range(3000):
        number = rng.choice(
            (rng.getrandbits(64), rng.getrandbits(32), rng.randrange(100), driver.stream._line.next + 1)
        )  # pyright: ignore[reportPrivateUsage]
        message = [b"", frame(number), rng.randbytes(rng.randrange(80))]
        (driver.stream.answer if rng.random() < 0.3 else driver.stream.live)(message, driver.now)
        if rng.random() < 0.1:
            driver.wait(rng.random() * LIMITS.silence)
        check_bounds(driver.stream, driver)
    assert sum(counter.value for counter in driver.counts) < 2**40
