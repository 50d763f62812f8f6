"""Device time: pairs of events around a copy, whose distance is read when the device is done, by nobody who waits.

The engine's thread hands a pair over and goes on. A thread of ours asks the second event now and then whether it is
done, and only then how far apart the two are; where no pair has come for a while it sleeps until one does.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import weakref
from collections import deque
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, cast

from kvcache_otel.record.asking import AT_MOST_HUNG, HUNG_S, Asking
from kvcache_otel.record.labels import printable
from kvcache_otel.record.pair import DeviceEvent, Outcome, Pair
from kvcache_otel.record.plain import plain
from kvcache_otel.record.reading import ReadingThread, Round
from kvcache_otel.record.streams import Lane, Streams
from kvcache_otel.semconv import Reason

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcache_otel.record.cells import Histogram
    from kvcache_otel.record.doubts import Doubts

__all__ = ["DEADLINE_S", "LIMIT", "DeviceEvent", "Harvester", "Lane", "check_deadline"]

_logger = logging.getLogger(__name__)

# Pairs that wait for their device, over all routes of a process.
LIMIT = 4096

# A reader that naps is woken each time that so many more wait (a power of two, less one), before there is no room.
CROWD = 1023

# How long a pair may wait. A copy that takes longer will hardly end at all.
DEADLINE_S = 60.0

# How long a collection may wait for what is to be read before it. It is a matter of a millisecond.
FRESHEN_S = 0.02

_INFINITY = float("inf")

# A pair that nobody has looked at yet: its events, where the seconds between them go, and what counts that it tells
# none. The engine's thread reads no clock for it.
_New = tuple[DeviceEvent, DeviceEvent, "Histogram", "Doubts | None"]


def check_deadline(deadline_s: object) -> None:
    """Looks at how long something may take, in seconds.

    Raises:
        ValueError: That is no number of seconds, or no float holds it.
    """
    if type(deadline_s) not in (int, float) or not 0 < cast("float", deadline_s) <= sys.float_info.max:
        said = printable(deadline_s) if isinstance(deadline_s, int) else repr(deadline_s)
        raise ValueError(f"deadline_s is {said}, and must be a number of seconds")


class _Loss(NamedTuple):
    """Why a pair told no time.

    Attributes:
        why: The same in words.
        kind: What is said once.
    """

    why: str
    kind: str


_RECORDED_AGAIN = _Loss("recorded again before they were read", "void")


def _before_that(pair: Pair) -> float | _Loss:
    return _RECORDED_AGAIN if pair.told is None else pair.told


class Harvester:
    """The event pairs of one process that wait for their device, and what becomes of them.

    Each pair that was handed over ends as one sample of its histogram, or as one dropped measurement.

    Attributes:
        streams: The streams with events of ours that torch makes.
    """

    def __init__(self, doubts: Doubts, *, limit: int = LIMIT, deadline_s: float = DEADLINE_S) -> None:
        """Args:
        doubts: Counts the pairs that told no time or found no room, of those that are about no cache.
        limit: Pairs that may wait, give or take one for each thread that is at it.
        deadline_s: How long a pair may wait, in seconds.
        """
        self.streams = Streams()
        # Those with events that somebody else makes, as long as anybody has them timed.
        self._others: weakref.WeakSet[Streams] = weakref.WeakSet()
        self._doubts = doubts
        self._limit = limit
        self._deadline_s = deadline_s
        # Whoever takes a pair out owns it until it is settled or put back, so that none is ever read twice. A lane is
        # in here once for each of its pairs: whoever takes it out may ask the one at its head.
        self._pairs: deque[_New | Pair | Lane] = deque()
        self._reader: ReadingThread | None = None
        self._asking = Asking()
        self._hung: list[Asking] = []  # Of threads that were relieved and have no answer yet.
        self._starting = threading.RLock()  # A signal handler may flush or stop what it has interrupted.
        self._said: set[str] = set()
        self._inherited: list[object] = []

    def streams_by(self, make_event: Callable[[], object]) -> Streams:
        """Returns streams for events that somebody else makes, for the caller to keep."""
        streams = Streams(make_event)
        self._others.add(streams)
        return streams

    def add(self, start: DeviceEvent, end: DeviceEvent, duration: Histogram, doubts: Doubts | None = None) -> None:
        """Hands a pair over, on the engine's thread: no device is asked, and nobody waited for.

        Args:
            start: The event before the copy, recorded on its stream.
            end: The event after it, on the same stream. Neither may be recorded again before the pair has been read.
            duration: Where the seconds between the two go.
            doubts: Counts where it tells none; None where it is about no cache.
        """
        # As `hand_over` does it, with less: a `Pair` is made of it on the harvester's thread.
        pairs = self._pairs
        waiting = len(pairs)
        if waiting >= self._limit:
            self._doubt(doubts, Reason.QUEUE_FULL)
            return
        pairs.append((start, end, duration, doubts))
        reader = self._reader
        if reader is None or reader.asleep or waiting & CROWD == CROWD:
            self._rouse()

    def hand_over(self, pair: Pair, lane: Lane | None = None, deadline_s: float | None = None) -> bool:
        """Hands a pair over that wants to hear what becomes of it, on the engine's thread, as in `add`.

        Args:
            pair: The pair.
            lane: The pairs of its stream, which are read in order; None for one that has nothing to do with others.
            deadline_s: How long it may wait, in seconds; None for what the harvester was made with.

        Returns:
            Whether there was room for it. Where there was none it is counted, and hears nothing.
        """
        pairs = self._pairs
        waiting = len(pairs)
        if waiting >= self._limit:
            self._doubt(pair.doubts, Reason.QUEUE_FULL)
            return False
        pair.added = now = time.monotonic()
        pair.until = now + (self._deadline_s if deadline_s is None else deadline_s)
        if lane is None:
            pairs.append(pair)
        else:
            lane.append(pair)  # First: whoever takes the lane out finds a pair in it.
            pairs.append(lane)
        reader = self._reader
        if reader is None or reader.asleep or waiting & CROWD == CROWD:
            self._rouse()
        return True

    def flush(self, timeout_s: float) -> bool:
        """Reads every pair that its device is done with, on any thread. Never raises, never takes longer.

        Args:
            timeout_s: How long to wait for a device that does not answer, in seconds; for its copies nobody waits.

        Returns:
            Whether nothing is left to be read.
        """
        self.look_after()
        # In this order: a reader that sleeps after there was no pair has none in its hands either.
        if not self._pairs and ((reader := self._reader) is None or reader.asleep):
            return not self._hung
        reader = self._rouse()
        return reader is not None and reader.finish_round(timeout_s) and reader.left == 0 and not self._hung

    def look_after(self) -> None:
        """Relieves a thread whose device does not answer, so that others are read; on any thread. Never raises.

        The pair that it asks is given up after its time, as any other.
        """
        now = time.monotonic()
        asking = self._asking
        if asking.has_hung(now) and len(self._hung) < AT_MOST_HUNG:
            with self._starting:
                if self._asking is asking and not asking.relieved:
                    asking.relieved = True
                    self._hung.append(asking)
                    self._reader, self._asking = None, Asking()
            if self._pairs:
                self._rouse()
            self._say("hung", f"gets no answer, for {HUNG_S:g} s; other streams are read by another thread meanwhile")
        for hung in tuple(self._hung):
            if hung.is_late(now):
                self._give_up(hung, "no answer in its time")

    def freshen(self) -> None:
        """Has pairs read that the device is done with, before somebody collects; on any thread. Never raises.

        Nobody is kept for long: what takes longer is read afterwards.
        """
        reader = self._reader
        if self._pairs and reader is not None and not self._hung:
            reader.finish_round(FRESHEN_S)

    def stop(self, timeout_s: float) -> None:
        """Reads every pair that its device is done with, and ends the thread; the next pair starts another.

        Pairs that are not done count as lost.

        Args:
            timeout_s: As in `flush`. What hangs then ends when it can.
        """
        pairs = self._pairs
        for hung in tuple(self._hung):
            self._give_up(hung, "no answer until the end")
        if pairs:
            self._rouse()
        for _ in range(len(pairs)):  # What comes from now on is another reader's.
            try:
                taken = pairs.popleft()
            except IndexError:
                break
            pairs.append(self._dated(taken) if isinstance(taken, tuple) else taken)
        reader, self._reader = self._reader, None  # No other thread can come between the two; see `cells`.
        if reader is not None:
            reader.end(timeout_s)

    def reset(self) -> None:
        """Forgets every pair, in a forked child."""
        # Not destroyed either: that would ask a driver that is not there, and may have been forked with its locks held.
        self._inherited += (
            self._pairs,
            self._asking,
            *self._hung,
            *(streams.part() for streams in (self.streams, *self._others)),
        )
        self._pairs = deque()
        self._reader, self._asking, self._hung = None, Asking(), []
        self._starting = threading.RLock()
        self._said = set()

    def _rouse(self) -> ReadingThread | None:
        """Wakes the thread, or starts it; returns None where none can be started."""
        reader = self._reader
        if reader is not None and not reader.ended:
            reader.wake()
            return reader
        with self._starting:
            reader = self._reader
            if reader is not None and not reader.ended:
                return reader
            # Before it runs, so that whoever adds a pair from now on can see whether it sleeps.
            self._asking = asking = Asking()
            self._reader = reader = ReadingThread(partial(self._round, asking=asking), self._is_empty)
            try:
                reader.start()
            except BaseException as error:  # Too many threads, an interpreter that ends, or a signal handler's.
                self._reader = None  # The next pair tries again.
                if not isinstance(error, RuntimeError):
                    raise
                return None
            return reader

    def _is_empty(self) -> bool:
        return not self._pairs

    def _round(self, at_most: int | None, stopped: float | None, asking: Asking | None = None) -> Round:
        """Asks so many pairs once, or all, and puts back what is not done.

        Args:
            at_most: How many; None for all.
            stopped: When the thread was stopped, for its last round: no pair that is older is put back.
            asking: Says what the thread asks; None where nobody needs to know.
        """
        pairs, asking = self._pairs, asking or Asking()
        asking.since = now = time.monotonic()
        unasked = {id(hung.lane) for hung in self._hung}  # Nor would they answer.
        undone: set[int] = set()  # Lanes whose head the device is not done with: nor is it then with what comes after.
        waiting, settled, took = len(pairs), 0, 0.0
        for _ in range(waiting if at_most is None else min(waiting, at_most)):
            try:
                taken = pairs.popleft()
                if isinstance(taken, tuple):
                    pair, lane = self._dated(taken), None
                elif isinstance(taken, Pair):
                    pair, lane = taken, None
                elif id(taken) in undone:
                    pairs.append(taken)
                    continue
                else:
                    pair, lane = taken.popleft(), taken
            except IndexError:  # A reader that hung when it was stopped is back, and took the last one.
                break
            if lane is None or id(lane) not in unasked:
                asking.hold(pair, lane)
                answer = self._ask(pair)
                if asking.claim() is None or (answer is not None and self._settle(pair, answer)):
                    settled += 1
                    if type(answer) is float and answer > took:
                        took = answer
                    if asking.relieved:
                        break
                    continue
            if pair.until < now:
                self._lose(pair, f"not done after {pair.until - pair.added:g} s", "late")
                self._tell(pair, Outcome.GIVEN_UP)
            elif stopped is not None and pair.added <= stopped:
                self._doubt(pair.doubts, Reason.EVENT_LOST)
                self._tell(pair, Outcome.GIVEN_UP)
            elif lane is None:
                pairs.append(pair)  # Behind the others: whichever stream is done first is read first.
            else:
                undone.add(id(lane))
                lane.appendleft(pair)
                pairs.append(lane)
            if asking.relieved:
                break
        if asking.relieved:
            return self._relieved(asking, settled)
        if stopped is not None and pairs:
            self._rouse()  # They came meanwhile, and are another thread's.
        return Round(settled, len(pairs), took)

    def _dated(self, new: _New) -> Pair:
        pair = Pair(*new)
        pair.added = time.monotonic()
        pair.until = pair.added + self._deadline_s
        return pair

    def _relieved(self, asking: Asking, settled: int) -> Round:
        """Ends the part of a thread that has its answer after all."""
        with suppress(ValueError):  # In a forked child it was forgotten.
            self._hung.remove(asking)
        if self._pairs:
            self._rouse()
        return Round(settled, len(self._pairs), last=True)

    @staticmethod
    def _ask(pair: Pair) -> float | _Loss | None:
        """Returns the seconds of a pair, or why it tells none; None where the device is not done with it."""
        try:
            if pair.void:
                return _before_that(pair)
            if not pair.after.query():
                return None
            seconds = plain(pair.before.elapsed_time(pair.after)) / 1000.0
            if pair.void:  # They were recorded just now.
                return _before_that(pair)
            return seconds if 0 <= seconds < _INFINITY else _Loss(f"{seconds!r} s apart", "apart")
        except BaseException as error:  # Signals reach the main thread only: SystemExit is no signal handler's here.
            return _Loss(f"{type(error).__name__}: {printable(error)}", "raised")

    def _settle(self, pair: Pair, answer: float | _Loss) -> bool:
        """Records a pair that is done, or counts it; returns that there is nothing more to ask it."""
        if isinstance(answer, _Loss):
            self._lose(pair, *answer)
            self._tell(pair, Outcome.UNTOLD)
        else:
            self._tell(pair, Outcome.READ)  # First: it is counted before it has a duration.
            pair.duration.record(answer)
        return True

    def _give_up(self, asking: Asking, why: str) -> None:
        """Gives up the pair that a thread has no answer about."""
        pair = asking.claim()
        if pair is not None:
            self._lose(pair, why, "late")
            self._tell(pair, Outcome.GIVEN_UP)

    def _tell(self, pair: Pair, outcome: Outcome) -> None:
        try:
            pair.settled(outcome)
        except BaseException as error:  # It costs no other pair its time.
            self._lose(pair, f"{type(error).__name__}: {printable(error)}", "settled")

    def _doubt(self, doubts: Doubts | None, reason: str) -> None:
        (doubts or self._doubts).lost(reason)

    def _lose(self, pair: Pair, why: str, kind: str) -> None:
        """Counts a pair that told no time, and says the first of each kind."""
        self._doubt(pair.doubts, Reason.EVENT_LOST)
        self._say(kind, f"told no time ({why}); see kvcache.telemetry.dropped")

    def _say(self, kind: str, words: str) -> None:
        """Says the first of each kind of things about a pair."""
        if kind not in self._said:
            self._said.add(kind)
            with suppress(Exception):  # A handler of somebody's that raises costs no other pair its time.
                _logger.warning("kvcache: a pair of device events %s", words)
