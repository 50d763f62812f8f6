"""The thread that reads event pairs: when it reads, when it sleeps, and how it is told."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

# Between two rounds of asking, the first and the longest. Nobody is in a hurry: a collection has one made before it.
# What costs is to wake up, some 50 to 100 us of a processor that has been at something else: to ask takes 3.
SHORTEST_S = 0.001
LONGEST_S = 0.1

# To wake a thread costs the engine's own ten microseconds, and more where both then want the interpreter. While pairs
# keep coming nobody is woken, therefore: they are looked for after naps that grow to this, and only after so many looks
# in vain the reader sleeps until it is called.
NAP_S = 1.0
NAPS = 5

# Asking an event takes a microsecond or two, so one round holds the interpreter for less than a millisecond.
PER_ROUND = 256


class Round(NamedTuple):
    """What one look at the pairs has come to.

    Attributes:
        settled: How many there is nothing more to ask.
        left: How many wait then.
        took: The longest time that one of these told, in seconds.
        last: Whether it was the thread's last: another one reads in its place.
    """

    settled: int
    left: int
    took: float = 0.0
    last: bool = False


class ReadingThread:
    """The thread: when it reads, when it sleeps, and how it is told.

    Attributes:
        asleep: Whether it has to be woken to notice a new pair.
        ended: Whether it has ended, for whatever reason.
        left: How many pairs were left to be read after its latest round.
    """

    def __init__(self, read: Callable[[int | None, float | None], Round], is_empty: Callable[[], bool]) -> None:
        """Args:
        read: Reads so many pairs, or all; for the last time where it is told when the thread was stopped.
        is_empty: Returns whether there is no pair to be read.
        """
        self.asleep = False
        self.ended = False
        self.left = 0
        self._read = read
        self._is_empty = is_empty
        self._stopped: float | None = None
        self._asked = 0
        self._answered = 0
        # Locked until somebody rings. An Event is not safe to be set by a signal handler that interrupted its setting.
        self._bell = threading.Lock()
        self._bell.acquire()
        self._thread = threading.Thread(target=self._run, name="kvcache-otel-harvester", daemon=True)

    def start(self) -> None:
        """Starts the thread.

        Raises:
            RuntimeError: No thread can be started.
        """
        self._thread.start()

    def wake(self) -> None:
        """Lets it read at once."""
        if self._bell.locked():
            with suppress(RuntimeError):  # Somebody else was faster.
                self._bell.release()

    def finish_round(self, timeout_s: float) -> bool:
        """Lets it read all pairs once more, from now on; returns whether it has done so in time."""
        mine = self._asked = self._asked + 1
        self.wake()
        self._await(lambda: self.ended or self._answered >= mine, timeout_s)
        return self._answered >= mine

    def end(self, timeout_s: float) -> None:
        """Lets it read all pairs a last time and end, and waits for that."""
        self._stopped = time.monotonic()
        self.wake()
        self._await(lambda: self.ended, timeout_s)

    @staticmethod
    def _await(done: Callable[[], bool], timeout_s: float) -> None:
        # Nothing is held while it waits, whatever a signal handler raises meanwhile.
        deadline = time.monotonic() + timeout_s
        while not done() and time.monotonic() < deadline:
            time.sleep(SHORTEST_S)

    def _run(self) -> None:
        try:
            self._rounds()
        finally:
            self.ended = self.asleep = True

    def _rounds(self) -> None:
        # How long copies have taken is how long the next one will: so long nobody need ask.
        usual, pause, nap, naps = SHORTEST_S, SHORTEST_S, LONGEST_S, 0
        while True:
            asked, stopped = self._asked, self._stopped
            everything = stopped is not None or asked > self._answered
            settled, self.left, took, last = self._read(None if everything else PER_ROUND, stopped)
            self._answered = asked
            if stopped is not None or last:
                return
            if settled:
                usual = min(max(took, SHORTEST_S), LONGEST_S)
            if 2 * settled >= PER_ROUND:  # They come fast: the next look is soon, and the naps grow again from there.
                self._bell.acquire(timeout=SHORTEST_S)
                pause, nap, naps = SHORTEST_S, 2 * SHORTEST_S, 0
            elif self.left:
                self._bell.acquire(timeout=pause)
                pause, naps = min(2 * pause, LONGEST_S), 0
            elif naps < NAPS:
                self._bell.acquire(timeout=nap)
                vain = self._is_empty()
                pause, nap, naps = usual, min(2 * nap, NAP_S if vain else LONGEST_S), naps + 1 if vain else 0
            else:
                self._sleep()
                pause, nap, naps = usual, LONGEST_S, 0

    def _sleep(self) -> None:
        self.asleep = True
        if self._is_empty():  # Whoever came before that did not ring.
            self._bell.acquire()
        self.asleep = False
