"""A line: the batches of one life of a publisher, as far as they are remembered, and those that wait."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvcache_otel.events.held import Held
from kvcache_otel.events.recall import LOST, UNKNOWN, Recall, mark

if TYPE_CHECKING:
    from collections.abc import Callable

NONE = -1
"""In place of a number: there is none yet."""

FAR = 2**24
"""Numbers that nobody misses in one go: two days of a hundred batches a second."""


class Line:
    """They, in their order. It is false as long as nothing has been applied, nor is known to be next.

    Attributes:
        is_whole: Whether it is known to begin with 0, after a reset: then whatever is missing counts.
        first: The number that was applied first, or given up before that.
        next: The number that follows the last batch applied.
        joined: The number that came live first, after which nothing is taken that did not; None before that.
        top: The highest number that came live and had to wait.
        held: What waits.
        since: When the first of those began to; None before somebody says so.
    """

    __slots__ = ("_apply", "_recall", "first", "held", "is_whole", "joined", "next", "since", "top")

    def __init__(self, apply: Callable[[bytes], object], *, is_whole: bool = False) -> None:
        """Args:
        apply: Takes the next batch over.
        is_whole: As the attribute.
        """
        self._apply = apply
        self.is_whole = is_whole
        self._recall = Recall()
        self.first = self.next = self.top = NONE
        self.joined: int | None = None
        self.held = Held()
        self.since: float | None = None

    def __bool__(self) -> bool:
        return self.next != NONE

    def counts(self, number: int) -> bool:
        """Returns whether a number counts where it is missing."""
        return number >= self.counted_from

    @property
    def counted_from(self) -> float:
        """From which number on what is missing counts; infinite where nothing does yet."""
        return 0 if self.is_whole else math.inf if self.joined is None else self.joined

    # -- what is remembered ----------------------------------------------------------------------------------------

    def mark(self, number: int) -> int:
        """Returns the mark of a batch, `LOST` if it was lost; `UNKNOWN` if it has not come, or is too far back."""
        if number < self.next:
            return self._recall.of(number, self.next)
        waiting = self.held.get(number)
        return UNKNOWN if waiting is None else mark(waiting)

    @property
    def known(self) -> int | None:
        """The highest number that was applied and is remembered; None where there is none."""
        return self._recall.newest(self.next)

    def was(self, number: int) -> int | None:
        """Returns the mark of a batch that was applied; None where there is none."""
        found = self.mark(number)
        return None if found in (UNKNOWN, LOST) else found

    # -- going on ----------------------------------------------------------------------------------------------------

    def start(self, number: int) -> int:
        """Takes the first number.

        Returns:
            How many before it count as missing.
        """
        self.first = self.next = number
        return number if self.is_whole and number <= FAR else 0

    def follow(self, payload: bytes, apply: Callable[[bytes], object] | None = None) -> None:
        """Applies the next batch, where it is said so in another way than the usual."""
        self._recall.put(self.next, payload)
        self.next += 1
        (apply or self._apply)(payload)

    def drain(self) -> None:
        """Applies what waits and is next."""
        held = self.held
        while held and held.first == self.next:
            self.follow(held.pop())

    def begin(self, number: int) -> int:
        """Takes the first number that its replay has: what is missing before is given up.

        Returns:
            How many of these count.
        """
        held, lost = self.held, 0
        if not self:
            if held:
                self.joined = held.first
            lost = self.start(number if self.joined is None else min(number, self.joined))
        while held and self.next < number:
            lost += self.skip() if held.first <= number else self.miss(number)
        self.drain()
        return lost

    def skip(self) -> int:
        """Gives up what is missing before the first batch that waits.

        Returns:
            How many of these count.
        """
        first, lost = self.held.first, 0
        if not self:
            self.joined = first
            lost = self.start(first)
        lost += self.miss(first)
        self.drain()
        return lost

    def miss(self, end: int) -> int:
        """Gives up everything from next on, up to a number.

        Returns:
            How many of these count.
        """
        since = max(self.next, self.counted_from)
        lost = end - int(since) if since < end <= self.next + FAR else 0
        self._recall.lose(self.next, end)
        self.next = end
        return lost

    def rebuilt(self, batches: list[tuple[int, bytes]], restore: Callable[[bytes], object]) -> Line:
        """Returns another, on which these batches were applied, and that goes on with what waits on this one.

        Args:
            batches: With rising numbers.
            restore: Takes those over again that were applied on this one.
        """
        line = Line(self._apply, is_whole=self.is_whole)
        line.held, line.joined, line.top, line.since = self.held, self.joined, self.top, self.since
        line.start(batches[0][0])
        for number, payload in batches:
            line.miss(number)
            applied = number >= self.first and self.mark(number) != LOST
            line.follow(payload, restore if applied else None)
        return line
