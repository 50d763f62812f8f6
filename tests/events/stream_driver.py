"""A stream with a clock, counters and a consumer that remembers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvcache_otel.events.frames import END
from kvcache_otel.events.stream import Stream
from kvcache_otel.events.terms import Counts, Limits
from kvcache_otel.record.cells import Counter

if TYPE_CHECKING:
    from collections.abc import Sequence

LIMITS = Limits(idle=math.inf)


def _refuse(amount: float) -> None:
    raise AssertionError(f"a counter was to be changed by {amount}")


def frame(number: int) -> bytes:
    return number.to_bytes(8, "big")


class Driver:
    """Feeds one stream, and is its consumer.

    Attributes:
        now: The clock.
        runs: What was applied, anew after each reset.
        asked: The first batch that is missing, while a replay is asked for it; None while none is.
        sent: What the latest request begins with: the one before, where that is known.
        requests: Where each one was asked from.
    """

    def __init__(self, *, replay: bool = False, limits: Limits = LIMITS) -> None:
        self.now = 1000.0
        self.runs: list[list[bytes]] = [[]]
        self.forgotten: list[bytes] = []
        self.asked: int | None = None
        self.requests: list[int] = []
        self.sent: int | None = None
        self.counts = Counts(*(Counter(_refuse) for _ in Counts._fields))
        self.limits = limits
        self.stream = Stream(self, self.counts, replay=replay, limits=limits)

    # -- the consumer ----------------------------------------------------------------------------------------------

    def apply(self, payload: bytes) -> None:
        assert payload not in self.forgotten
        self.runs[-1].append(payload)

    def reset(self) -> None:
        self.runs.append([])
        self.forgotten = []

    def forget(self) -> None:
        self.forgotten = self.runs[-1]
        self.runs[-1] = []

    def restore(self, payload: bytes) -> None:
        assert payload in self.forgotten
        self.runs[-1].append(payload)

    def ask(self, start: int) -> None:
        assert self.asked is None, "asked twice"
        self.sent = start
        request = self.stream._replay.request
        assert request is not None
        self.asked = max(request.next, 0)
        assert start <= self.asked
        self.requests.append(self.asked)

    def hang_up(self) -> None:
        assert self.asked is not None, "hung up twice"
        self.asked = None

    # -- the publisher ---------------------------------------------------------------------------------------------

    def live(self, *numbers: int, run: int = 0) -> None:
        for number in numbers:
            self.stream.live([b"", frame(number), batch(number, run)], self.now)

    def answer(self, *numbers: int, run: int = 0) -> None:
        for number in numbers:
            self.stream.answer([b"", b"", frame(number), batch(number, run)], self.now)

    def end(self) -> None:
        self.stream.answer([b"", b"", frame(END), b""], self.now)

    def wait(self, seconds: float = LIMITS.patience) -> None:
        self.now += seconds
        self.stream.tick(self.now)

    # -- what came of it -------------------------------------------------------------------------------------------

    def counted(self) -> dict[str, int | float]:
        return {name: counter.value for name, counter in self.counts._asdict().items() if counter.value}

    def applied(self) -> list[int]:
        """The numbers applied since the last reset."""
        return [number for number, _ in map(parse, self.runs[-1])]


def batch(number: int, run: int = 0) -> bytes:
    return b"%d of run %d" % (number, run)


def parse(payload: bytes) -> tuple[int, int]:
    number, _, _, run = payload.split(b" ")
    return int(number), int(run)


def parsed(run: Sequence[bytes]) -> list[tuple[int, int]]:
    return [parse(payload) for payload in run]
