"""Cells: where facts are written. One Python call each, no lock, no allocation, no OpenTelemetry.

Why no lock: CPython hands the GIL to another thread only where a function starts, a call returns or a loop jumps
back. Between the load and the store of ``self.value += n`` there is none of these, so no addition is lost, on any
number of threads. ``tests/record/test_cells.py`` proves it twice: from the bytecode of every method here, and with
eight threads. A free-threaded interpreter gives no such guarantee; there `EXACT` is False and nothing is recorded.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_INFINITY = float("inf")

_NOT_A_NUMBER = float("nan")

# OTLP's integers have 64 bits, with a sign; one that has more would keep everything beside it from being exported.
_TOO_MUCH = 2**63

# Samples of one histogram that wait to be sorted into its buckets: for a reader, who comes every few seconds, or until
# there are so many. To sort each when it comes, with none of the bounds in the processor's cache, costs ten times that.
WAITING = 256

# Samples that wait to be replayed into somebody else's provider, over all histograms of a process. Not the deque's own
# ``maxlen``, which would push out the oldest without a word where two threads come to a full queue at once.
REPLAY_LIMIT = 65_536

# The function is CPython's own name for it, from 3.13 on.
EXACT: bool = getattr(sys, "_is_gil_enabled", lambda: True)()


class Counter:
    """A sum that only goes up.

    Attributes:
        value: The sum so far, in the metric's unit.
    """

    __slots__ = ("_refuse", "value")

    def __init__(self, refuse: Callable[[float], None]) -> None:
        """Args:
        refuse: Told of every amount that is negative, not a number or of 2**63 and more; such amounts are not added.
        """
        self.value: int | float = 0
        self._refuse = refuse

    def add(self, amount: int | float = 1) -> None:
        """Adds an amount of at least 0 and less than 2**63: an int or a float of Python's own."""
        if 0 <= amount < _TOO_MUCH:
            self.value += amount
        else:
            self._refuse(amount)

    def reset(self) -> None:
        """Starts again from 0, in a forked child."""
        self.value = 0


class Histogram:
    """A distribution over fixed bounds.

    Attributes:
        bounds: Upper bounds of the buckets, inclusive, ascending; the last bucket is open.
    """

    __slots__ = ("_counts", "_refuse", "_sum", "_waiting", "bounds")

    def __init__(self, bounds: Sequence[float], refuse: Callable[[float], None]) -> None:
        """Args:
        bounds: Upper bounds of the buckets, ascending.
        refuse: Told of every sample that is negative, infinite or not a number; such samples are not recorded.
        """
        self.bounds = tuple(bounds)
        self._counts = [0] * (len(self.bounds) + 1)
        self._sum: float = 0.0
        self._refuse = refuse
        self._waiting: deque[float] = deque()

    def record(self, sample: float) -> None:
        """Records a finite sample of at least 0."""
        if 0 <= sample < _INFINITY:
            waiting = self._waiting
            waiting.append(sample)
            if len(waiting) >= WAITING:
                self._sort()
        else:
            self._refuse(sample)

    def extend(self, samples: Sequence[float]) -> None:
        """Records the samples that an engine has gathered itself.

        Args:
            samples: As in `record`, of which each is looked at when they are sorted; a list or a tuple.
        """
        self._waiting.extend(samples)
        if len(self._waiting) >= WAITING:
            self._sort()

    def _sort(self) -> None:
        waiting, bounds = self._waiting, self.bounds
        while waiting:
            try:
                sample = waiting.popleft()
            except IndexError:  # Another thread took the last one.
                return
            try:
                good = 0 <= sample < _INFINITY
            except TypeError:  # Not a number at all.
                good, sample = False, _NOT_A_NUMBER
            if good:
                bucket = bisect_left(bounds, sample)
                self._counts[bucket] += 1
                self._sum += sample
            else:
                self._refuse(sample)

    def read(self) -> tuple[list[int], float]:
        """Returns the bucket counts, one more than there are bounds, and the sum, taken at one moment."""
        self._sort()
        return [*self._counts], self._sum  # Not copy(): a call would let a writer in between the two.

    def reset(self) -> None:
        """Starts again from no samples, in a forked child."""
        self._waiting.clear()
        self._counts = [0] * len(self._counts)
        self._sum = 0.0


class ReplayedHistogram(Histogram):
    """A histogram whose samples are also kept, for the instrument of a provider that is not ours."""

    __slots__ = ("_dropped", "_queue", "attributes", "name")

    def __init__(
        self,
        bounds: Sequence[float],
        refuse: Callable[[float], None],
        *,
        name: str,
        attributes: dict[str, str | int],
        queue: deque[tuple[ReplayedHistogram, float]],
        dropped: Counter,
    ) -> None:
        """Args:
        bounds: As in `Histogram`.
        refuse: As in `Histogram`.
        name: The metric's name, for the replay.
        attributes: The series' attributes, for the replay.
        queue: Where samples wait, `REPLAY_LIMIT` of them at the most.
        dropped: Counts the samples that found the queue full.
        """
        super().__init__(bounds, refuse)
        self.name = name
        self.attributes = attributes
        self._queue = queue
        self._dropped = dropped

    def extend(self, samples: Sequence[float]) -> None:
        """Records and queues samples."""
        for sample in samples:
            self.record(sample)

    def record(self, sample: float) -> None:
        """Records a finite sample of at least 0 and queues it."""
        if 0 <= sample < _INFINITY:
            queue, waiting = self._queue, self._waiting
            if len(queue) >= REPLAY_LIMIT:
                self._dropped.add(1)
            else:
                queue.append((self, sample))
            waiting.append(sample)
            if len(waiting) >= WAITING:
                self._sort()
        else:
            self._refuse(sample)

    def lose(self) -> None:
        """Counts a sample that was queued and is replayed no more."""
        self._dropped.add(1)


class Level:
    """A quantity that is as it is now; None while it is not known, and then no row is exported.

    One thread at a time sets it; any number may move it.

    Attributes:
        value: The quantity, in the metric's unit, or None.
    """

    __slots__ = ("__weakref__", "_below", "_underflow", "value")

    def __init__(self, underflow: Callable[[float], None]) -> None:
        """Args:
        underflow: Told of a value that fell below 0, where the level stays, and of one that is infinite or not a
            number, which is no quantity.
        """
        self.value: int | float | None = None
        self._below = False
        self._underflow = underflow

    def set(self, value: int | float | None) -> None:
        """Sets the level; None ends the row. A level set below 0 is told when it gets there, not while it stays."""
        if value is None or 0 <= value < _INFINITY:
            self.value = value
            self._below = False
            return
        if not self._below:
            self._below = True
            self._underflow(value)
        self.value = 0 if value < 0 else None

    def add(self, amount: int | float) -> None:
        """Moves the level up or down, from any thread. Below 0 it stays at 0 and says so."""
        value = (self.value or 0) + amount
        if 0 <= value < _INFINITY:
            self.value = value
        else:
            self._refuse(value)

    def _refuse(self, value: float) -> None:
        self._underflow(value)
        if value < 0:
            self.value = 0

    def reset(self) -> None:
        """Forgets the level, in a forked child."""
        self.value = None
        self._below = False


def unread() -> Level:
    """Returns a level that nobody reads, to go on writing to where the facts have become too few for a row."""
    return Level(lambda _: None)


class DiscardedCounter(Counter):
    """Takes the place of a counter that may not exist: every measurement is counted as dropped."""

    __slots__ = ("_dropped",)

    def __init__(self, dropped: Counter) -> None:
        super().__init__(dropped.add)
        self._dropped = dropped

    def add(self, amount: int | float = 1) -> None:
        self._dropped.add(1)


class DiscardedHistogram(Histogram):
    """Takes the place of a histogram that may not exist: every measurement is counted as dropped."""

    __slots__ = ("_dropped",)

    def __init__(self, dropped: Counter) -> None:
        super().__init__((), dropped.add)
        self._dropped = dropped

    def record(self, sample: float) -> None:
        self._dropped.add(1)

    def extend(self, samples: Sequence[float]) -> None:
        self._dropped.add(len(samples))


class DiscardedLevel(Level):
    """Takes the place of a level that may not exist: every measurement is counted as dropped."""

    __slots__ = ("_dropped",)

    def __init__(self, dropped: Counter) -> None:
        super().__init__(dropped.add)
        self._dropped = dropped

    def set(self, value: int | float | None) -> None:
        self._dropped.add(1)

    def add(self, amount: int | float) -> None:
        self._dropped.add(1)
