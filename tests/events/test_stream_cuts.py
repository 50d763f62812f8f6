"""A stream with replay, whose connection breaks and whose publisher starts again anywhere: at rest it knows all."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from kvcache_otel.events.frames import END
from kvcache_otel.events.terms import Limits
from tests.events.stream_driver import Driver, frame

if TYPE_CHECKING:
    from kvcache_otel.events.stream import Stream


class Publisher:
    """A publisher that keeps everything, and a connection to it that is cut now and then."""

    def __init__(self, seed: int, *, deaf: float = 0.0) -> None:
        """Args:
        seed: Of all that is random.
        deaf: How likely its replay is silent while it waits.
        """
        self.deaf = deaf
        self.random = random.Random(seed)
        self.driver = Driver(replay=True, limits=Limits(silence=2.0))
        self.life = 0
        self.restarts = 0
        self.made = 0
        self.batches: list[bytes] = []
        self.slow = self.random.random() < 0.5  # To answer.
        self.stream.connected(self.driver.now)

    @property
    def stream(self) -> Stream:
        return self.driver.stream

    def make(self) -> bytes:
        self.made += 1
        self.batches.append(b"%d of run %d" % (self.made, self.life))
        return self.batches[-1]

    def send(self) -> None:
        payload = self.make()
        self.stream.live([b"", frame(len(self.batches) - 1), payload], self.driver.now)

    def answer(self) -> None:
        """Answers requests, and those that come of an answer."""
        driver = self.driver
        while driver.asked is not None:
            requests, start = len(driver.requests), driver.sent
            assert start is not None
            kept = [(frame(number), payload) for number, payload in enumerate(self.batches) if number >= start]
            for answer in (*kept, (frame(END), b"")):
                if driver.asked is None or len(driver.requests) != requests:
                    break
                self.stream.answer([b"", *answer], driver.now)

    def wait(self, seconds: float) -> None:
        silent = self.random.random() < self.deaf
        for _ in range(round(seconds / 0.05)):
            self.driver.wait(0.05)
            if silent:
                continue
            if not self.slow or self.random.random() < 0.3:
                self.answer()

    def talk(self) -> None:
        for _ in range(self.random.randrange(1, 30)):
            if self.random.random() < 0.15:
                self.make()
            else:
                self.send()
            self.driver.wait(self.random.random() * 0.01)
            if self.random.random() < 0.3:
                self.answer()

    def cut(self) -> None:
        self.stream.disconnected(self.driver.now)
        for _ in range(self.random.randrange(30)):
            self.make()
        self.wait(self.random.choice((0.1, 1, 6)))
        self.stream.connected(self.driver.now)

    def restart(self) -> None:
        """Starts again, and publishes unheard until its numbers are anywhere, just about the old ones too."""
        self.wait(6)
        self.stream.disconnected(self.driver.now)
        before, known = len(self.batches), bool(self.driver.runs[-1])
        self.life += 1
        self.restarts += known
        self.batches = []
        for _ in range(
            self.random.choice((0, 0, 1, self.random.randrange(60), max(before - 2, 0), before, before + 1))
        ):
            self.make()
        self.wait(self.random.choice((0.1, 1, 6)))
        self.stream.connected(self.driver.now)
        for _ in range(self.random.choice((0, 1, 1, 2, 3, 8))):
            self.send()
            self.driver.wait(self.random.random() * 0.02)
        self.wait(self.random.choice((0.5, 7)))


@pytest.mark.parametrize("seed", range(150))
def test_at_rest_everything_is_known_and_nothing_is_counted_that_was_not(seed: int) -> None:
    publisher = Publisher(seed)
    for _ in range(publisher.random.randrange(3, 14)):
        publisher.random.choices((publisher.talk, publisher.cut, publisher.restart), (5, 3, 2))[0]()
    publisher.wait(25)  # Nothing comes after it: what was sent last may be among what was missed.
    driver = publisher.driver
    assert driver.runs[-1] == publisher.batches
    assert driver.counted().keys() <= {"resets", "recovered"}
    assert driver.counts.resets.value == publisher.restarts
    assert driver.asked is None


@pytest.mark.parametrize("seed", range(300))
def test_with_a_replay_that_is_silent_at_times_what_is_not_known_is_lost(seed: int) -> None:
    publisher = Publisher(seed, deaf=0.4)
    for _ in range(publisher.random.randrange(3, 14)):
        publisher.random.choices((publisher.talk, publisher.cut, publisher.restart), (5, 3, 2))[0]()
    publisher.deaf = 0.0
    publisher.wait(130)
    publisher.send()  # One that has said nothing since it started again cannot be told from one that keeps nothing.
    publisher.wait(130)
    driver = publisher.driver
    applied = driver.runs[-1]
    assert applied == [one for one in publisher.batches if one in applied]  # In order, once, of this life alone.
    assert len(publisher.batches) - len(applied) <= driver.counts.lost.value
    assert driver.counts.resets.value <= publisher.restarts  # Of a life that was never told apart there is none.
    assert driver.asked is None
