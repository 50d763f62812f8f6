"""A publisher's sequence of batches: put in order, without repetitions, with replay for what went missing.

A stream opens no socket and reads no clock: whoever has them hands over frames, with the time at which they came.

What numbers say. *Next* is the number that follows the last batch applied:

* Next itself is applied. A higher one waits for those between, for a moment; what is still missing then is asked for
  where the publisher has a replay socket, and is lost where it has not, or where replay did not bring it.
* 0 starts the sequence again: the publisher was reset. So it does right after another 0, if it is another batch.
* Another number below next is a duplicate if it is on the same batch as then, by its first bytes, which hold the time
  when it was made; of the last thousand batches that is known. Any other low number is suspicious, but for the one just
  before next where that had been given up. So are a number more than 2**24 above next, and one that a waiting batch has
  and that is now on another.

What is suspicious is from a publisher that started again and whose first batches did not get here, or is not:

* The replay is asked for the batch that was applied last: another one under its number, or none at all from a publisher
  that has others or had some before, is a reset; the same one means that there was none. What comes meanwhile waits.
* Three suspicious batches in a row, with rising numbers not more than 64 apart, are a reset: at once where each has a
  number that is known to have been on another batch, otherwise where replay does not answer. So is one with a number
  known to be of another, if next or one shortly above follows. Numbers that had been given up as lost prove nothing.
* If anything else comes, they were duplicates; from far above, numbers that mean nothing. If nothing comes at all for
  some seconds, those below next are a reset as well: an engine starts again, says little, and falls silent.

A replay is asked as well when a connection is made, when a source has been idle for a while, and whenever something is
missing; always from the last batch on that is known. Without replay, a publisher that started again and of which the
very next number is the first to get here looks as if it had not.

What a publisher sent before the first number that arrived live, at first or after a reset, is neither lost nor
recovered. Where there is replay it is asked for all the same, and applied.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvcache_otel.events import frames
from kvcache_otel.events.ahead import Ahead
from kvcache_otel.events.held import Held
from kvcache_otel.events.recall import LOST, UNKNOWN, Recall, mark
from kvcache_otel.semconv import Reason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcache_otel.record.cells import Counter

_UNKNOWN = -1  # In place of a number: there is none yet.
_NEAR = 64  # Numbers that suspicious batches may skip.
_FAR = 2**24  # Numbers that nobody misses in one go: two days of a hundred batches a second.
_PROOF = 3  # Suspicious batches in a row that prove a reset.
_DEAF_AT_FIRST = 2.0  # Seconds for which a publisher is not asked again that has not answered for the first time.
_TRUST = 1.0  # Seconds after a replay has shown that there was no reset, in which it is not asked again whether.


class Consumer(Protocol):
    """What a stream tells, in order. Nothing here may raise, nor call the stream."""

    def apply(self, payload: bytes, /) -> object:
        """Takes over the next batch."""

    def reset(self) -> object:
        """Forgets what the batches so far added up to: the publisher started again."""

    def ask(self, start: int, /) -> object:
        """Sends `frames.request` on a new socket, whose answers then go to `Stream.answer`.

        New, because answers do not say which request they are for.
        """

    def hang_up(self) -> object:
        """Closes that socket: nothing more is wanted from it."""


class Counts(NamedTuple):
    """Where a stream counts.

    Attributes:
        lost: Batches that were skipped and not recovered.
        recovered: Batches that were missed and that replay brought.
        duplicate: Batches that had been here before, or came when they were given up.
        resets: Times that the numbers started again.
        frame_count: Messages with too many frames or too few.
        sequence_frame: Messages whose number could not be read, or meant nothing.
    """

    lost: Counter
    recovered: Counter
    duplicate: Counter
    resets: Counter
    frame_count: Counter
    sequence_frame: Counter


class Limits(NamedTuple):
    """How long a stream waits, and for how much.

    Attributes:
        window: Batches that wait until a number counts as missing.
        patience: Seconds that they wait.
        held: Batches that wait while a replay is asked for.
        held_bytes: Bytes of batches that wait, at any time.
        silence: Seconds for which a replay may bring nothing new.
        longest: Seconds that a replay may take in all, however often it is asked for the rest.
        deaf: Seconds for which a publisher that did not answer is not asked again, once it has not for long; at first
            it is two, and then twice as long each time.
        doubt: Seconds of silence after which suspicious batches below next are a reset.
        idle: Seconds after the last batch when replay is asked, once, whether it was the last.
    """

    window: int = 64
    patience: float = 0.1
    held: int = 10_000
    held_bytes: int = 32 * 2**20
    silence: float = 5.0
    longest: float = 60.0
    deaf: float = 60.0
    doubt: float = 5.0
    idle: float = 10.0


class Stream:
    """One publisher's sequence.

    Attributes:
        counts: Where it counts.
        heard: When the last message that could be read came live; None before the first.
        due: When `tick` will have something to do; infinite where only a message can change anything.
    """

    def __init__(
        self, consumer: Consumer, counts: Counts, *, replay: bool = False, limits: Limits | None = None
    ) -> None:
        """Args:
        consumer: Told what comes of it.
        counts: Where to count.
        replay: Whether the publisher has a replay socket.
        limits: How long to wait, and for how much.
        """
        self.counts = counts
        self.heard: float | None = None
        self.due = math.inf
        self._consumer = consumer
        self._apply = consumer.apply
        self._replay = replay
        self._limits = limits or Limits()
        self._deaf_until = self._trusted_until = self._connected_at = -math.inf
        self._deaf_for = 0.0
        self._keeps = False  # It has answered: then it has its last batch, always.
        self._busy = (
            replay  # A batch must go the long way: something waits, is asked for or in doubt, or it is a first.
        )
        self._held = Held()
        self._idle_at: float | None = None  # The last batch after which it was asked, since nothing came.
        self._start()

    def _start(self) -> None:
        """Knows nothing of the publisher's numbers."""
        self._next: int = _UNKNOWN
        # Whether this batch, by its number and its mark, is still what it was: a new connection has not told yet.
        self._question: tuple[int, int] | None = None
        self._live = False  # Something came live that was applied: its replay knows the same sequence.
        self._joined: int | None = None  # From here on what is missing counts; None before anything came live.
        self._top: int = _UNKNOWN  # The highest number that came live and had to wait.
        self._since: float | None = None  # When the first that waits began to.
        self._recall = Recall()
        self._suspects: list[tuple[int, bytes]] = []
        self._evidence = self._proofs = 0  # How many of them prove something, and how many by their bytes.
        self._doubted = math.inf  # When the last of them came, where all are below next.
        self._ahead = Ahead()
        self._ahead_next: int = _UNKNOWN  # Next, as the replay left it: as long as it is, copies may be on their way.
        self._ahead_until = math.inf
        # The replay that is asked for.
        self._asked: int | None = None
        self._asked_next: int = _UNKNOWN
        self._asked_top: int = _UNKNOWN
        self._asked_all = False  # What did not come live either is taken, until something does.
        self._unsure = False  # Whether there was a reset: what comes waits for what it says.
        self._anything = False  # It has none of the batches that it must have, and is asked whether it has any.
        self._answered = self._brought = False  # It has sent something that was asked for, or anything.
        self._deadline = math.inf
        self._last_call = math.inf

    # -- what comes in ---------------------------------------------------------------------------------------------

    def connected(self, now: float) -> None:
        """The connection is there, or there again: with replay, sees whether anything was missed, and a reset."""
        self._deaf_until, self._deaf_for = -math.inf, 0.0
        self._connected_at = now
        if self._replay:
            if self._asked is not None:
                self._hang_up()
            self._acquit()  # What was suspicious before is for the replay to tell.
            known = self._recall.newest(self._next)
            if self._question is None and known is not None:
                self._question = known, self._recall.of(known, self._next)
            self._ask(now, everything=True)
            self._unsure = self._next != _UNKNOWN
            self._rest()

    def disconnected(self) -> None:
        """The connection is lost. Nobody is asked anything for being silent."""
        self._idle_at = self.heard
        self._rest()

    def live(self, message: Sequence[bytes], now: float) -> None:
        """Takes a message of the publisher's PUB socket.

        Args:
            message: Its frames.
            now: The time, in seconds, on any clock that never goes back.
        """
        try:
            number, payload = frames.published(message)
        except frames.UnreadableFramesError as error:
            self._unreadable(error)
            return
        self.heard = now
        if number is None:
            self._apply(payload)
        elif number == self._next and not self._busy:
            self._next = number + 1
            self._recall.put(number, payload)
            self._apply(payload)
        else:
            self._asked_all = False
            self._arrive(number, payload, now)
            self._rest()

    def answer(self, message: Sequence[bytes], now: float) -> None:
        """Takes a message of the replay socket; after `Consumer.hang_up` it is ignored.

        Args:
            message: Its frames.
            now: As in `live`.
        """
        if self._asked is None:
            return
        try:
            batch = frames.answered(message)
        except frames.UnreadableFramesError as error:
            self._unreadable(error)
            return
        self._deaf_for = 0.0
        if batch is None:
            self._ended(now, silent=False)
        else:
            self._recover(*batch, now)
        self._rest()

    def tick(self, now: float) -> None:
        """Does what is due.

        Args:
            now: As in `live`.
        """
        if now >= self.due:
            if now >= self._ahead_until:
                self._came()
            if self._asked is not None:
                if now >= min(self._deadline, self._last_call):
                    self._ended(now, silent=True)
            elif now >= self._doubted + self._limits.doubt:
                self._restart(self._suspects, now)
            elif now >= self._idle_from:
                self._idle_at = self.heard
                if now >= self._deaf_until:
                    self._ask(now, everything=True)
            elif self._question is not None and now >= self._deaf_until:
                self._ask(now, everything=True)
            else:
                self._go_on(now)
            self._rest()

    # -- live ------------------------------------------------------------------------------------------------------

    def _arrive(self, number: int, payload: bytes, now: float) -> None:
        if self._next == _UNKNOWN:
            if self._held and not -_NEAR <= number - self._held.first <= _FAR:
                self._skip()  # The two are not of one sequence.
                self._arrive(number, payload, now)
                return
            if number == 0:
                self._next = self._joined = 0
        elif number < self._next:
            self._old(number, payload, now)
            return
        elif number - self._next > _FAR:
            self._suspect(number, payload, now)
            return
        elif self._joined is None:
            self._joined = number
        held = self._held.get(number)
        if held is not None and number <= self._top:
            if held == payload:
                self.counts.duplicate.add(1)
            else:
                self._suspect(number, payload, now)
            return
        if not self._unsure:
            if self._is_followed_by(number):
                self._restart([*self._suspects, (number, payload)], now)
                return
            self._acquit()
        if held is None:
            self._held.put(number, payload, now)
        self._live = True
        self._top = max(self._top, number)
        self._go_on(now)

    def _old(self, number: int, payload: bytes, now: float) -> None:
        found, its = self._recall.of(number, self._next), mark(payload)
        if self._next == self._ahead_next and number > self._top:
            missed = self._ahead.take(number, its, self._since_joined)
            if missed is not None:
                self.counts.recovered.add(missed)
                self._top, self._live = number, True
                if self._joined is None:
                    self._joined = self._next
                return
        last = number == self._next - 1
        if number == 0 and not (last and found in (LOST, its)):
            self._acquit()
            self._restart([(number, payload)], now)
        elif found == its or (last and found == LOST):
            self.counts.duplicate.add(1)
        else:
            self._suspect(number, payload, now)

    # -- in doubt --------------------------------------------------------------------------------------------------

    def _suspect(self, number: int, payload: bytes, now: float) -> None:
        if (number, payload) in self._suspects:
            self.counts.duplicate.add(1)
            return
        if self._suspects and not (self._unsure or 0 < number - self._suspects[-1][0] <= _NEAR):
            self._acquit()
        suspects = self._suspects
        suspects.append((number, payload))
        found = self._recall.of(number, self._next) if number < self._next else UNKNOWN
        self._evidence += found != LOST
        self._proofs += found not in (LOST, UNKNOWN)
        below = all(number < self._next for number, _ in suspects)
        self._doubted = now if below and self._evidence else math.inf
        if self._proofs == _PROOF or (self._evidence >= _PROOF and not self._may_ask(now)):
            self._restart(suspects, now)
        elif len(suspects) > _NEAR or sum(len(payload) for _, payload in suspects) > self._limits.held_bytes:
            self._acquit()
        elif self._may_ask(now) and not self._unsure:
            if self._asked is not None:
                self._hang_up()
            self._ask(now)
            self._unsure = True

    def _is_followed_by(self, number: int) -> bool:
        """Returns whether those that are suspicious, and then a number that is not, are a reset."""
        return self._proofs > 0 and 0 < number - self._suspects[-1][0] <= _NEAR

    def _may_ask(self, now: float) -> bool:
        """Returns whether a replay may tell if there was a reset."""
        answers = self._replay and self._live and now >= max(self._deaf_until, self._trusted_until)
        return answers and self._recall.newest(self._next) is not None

    def _acquit(self) -> None:
        """The publisher did not start again."""
        for number, _ in self._suspects:
            above = number > self._next + _FAR
            (self.counts.sequence_frame if above else self.counts.duplicate).add(1)
        self._suspects = []
        self._evidence = self._proofs = 0
        self._doubted = math.inf

    def _untold(self, now: float) -> None:
        """No replay says whether there was a reset: numbers have to."""
        self._unsure = False
        self._trusted_until = max(self._trusted_until, now + _TRUST)
        suspects, self._suspects = self._suspects, []
        self._evidence = self._proofs = 0
        run = self._recall
        for number, payload in suspects:
            if self._recall is run:
                self._suspect(number, payload, now)
            else:
                self._arrive(number, payload, now)  # There was, by those before it.
        if self._held and self._recall is run:
            if self._is_followed_by(self._held.first):
                self._replaced(now)
            else:
                self._acquit()

    def _restart(self, batches: list[tuple[int, bytes]], now: float) -> None:
        """Begins anew, with these batches."""
        self._came()
        while self._held:
            self._skip()
        if self._asked is not None:
            self._hang_up()
        self.counts.resets.add(1)
        self._consumer.reset()
        self._start()
        for number, payload in batches:
            self._arrive(number, payload, now)
        if self._replay and not batches and now >= self._deaf_until:
            self._ask(now, everything=True)

    def _replaced(self, now: float) -> None:
        """Begins anew, with everything that has come since. What waited before the connection was lost is not of it."""
        batches, held = self._suspects, self._held
        while held:
            came, number = held.since, held.first
            payload = held.pop()
            if came is not None and came >= self._connected_at:
                batches.append((number, payload))
        self._restart(batches, now)

    # -- what waits ------------------------------------------------------------------------------------------------

    def _go_on(self, now: float) -> None:
        """Applies what can be; if something still waits, sees whether it has waited long enough."""
        before = self._next
        limits, held = self._limits, self._held
        if not self._unsure:
            self._drain()
        if self._next != before:
            self._since = held.since
        while held:
            if self._asked is not None:
                if len(held) <= limits.held and held.size <= limits.held_bytes:
                    return
                if self._unsure:
                    self._untold(now)
                else:
                    self._skip()
                continue
            replay = self._replay and now >= self._deaf_until
            if self._since is None:
                self._since = now
            waited = now >= self._since + limits.patience
            if waited or len(held) >= limits.window or held.size > limits.held_bytes:
                if replay:
                    self._ask(now)
                else:
                    self._skip()
                    self._since = held.since
            elif replay and self._next == _UNKNOWN:
                self._ask(now)
            else:
                return

    def _drain(self) -> None:
        held = self._held
        while held and held.first == self._next:
            self._next += 1
            payload = held.pop()
            self._recall.put(self._next - 1, payload)
            self._apply(payload)

    def _skip(self) -> None:
        """Gives up what is missing before the first batch that waits."""
        first = self._held.first
        if self._next == _UNKNOWN:
            self._next = self._joined = first
        self._miss(first)
        self._drain()

    def _miss(self, end: int) -> None:
        """Gives up everything from next on, up to a number."""
        if self._joined is not None:
            self.counts.lost.add(max(end - max(self._next, self._joined), 0))
        self._recall.lose(self._next, end)
        self._next = end

    def _rest(self) -> None:
        """Sees what is left to be done."""
        if not self._held:
            self._since = None
            wanted = self._joined is None or self._asked_all or self._unsure or self._question is not None
            if self._asked is not None and not wanted:
                self._hang_up()
        idle = self._idle_from
        first = self._replay and (not self._live or self.heard == self._idle_at)  # Of a sequence, or after silence.
        self._busy = bool(self._held or self._suspects) or self._asked is not None or first
        if self._asked is not None:
            self.due = min(self._deadline, self._last_call)
        else:
            self.due = min(self._doubted + self._limits.doubt, idle)
            if self._since is not None:
                self.due = min(self.due, self._since + self._limits.patience)
            if self._question is not None:
                self.due = min(self.due, self._deaf_until)
        self.due = min(self.due, self._ahead_until)

    @property
    def _idle_from(self) -> float:
        """When it is asked whether the last batch was the last; infinite where it was asked, and nothing has come."""
        if not self._replay or self._next == _UNKNOWN or self.heard is None or self.heard == self._idle_at:
            return math.inf
        return self.heard + self._limits.idle

    # -- replay ----------------------------------------------------------------------------------------------------

    def _ask(self, now: float, *, everything: bool = False, again: bool = False, anything: bool = False) -> None:
        self._asked = max(self._next, 0)
        self._asked_next = self._next
        self._asked_top = self._held.last if self._held else self._next - 1
        self._asked_all, self._anything = everything, anything
        self._answered = self._brought = False
        self._deadline = now + self._limits.silence
        if not again:
            self._last_call = now + self._limits.longest
        # With the last one that is known: if that is another now, so are all before it.
        if anything:
            known = 0
        elif self._question is not None:
            known, _ = self._question
        else:
            known = self._recall.newest(self._next)
        self._consumer.ask(self._asked if known is None else known)

    def _hang_up(self) -> None:
        self._asked, self._unsure = None, False
        self._consumer.hang_up()

    def _recover(self, number: int, payload: bytes, now: float) -> None:
        """Takes a batch that is missing. One that did not come live yet either is left to come, once anything has."""
        if self._asked is None:
            return
        self._keeps = self._brought = True
        if self._anything:
            self._replaced(now)
            return
        if number < self._asked:
            self._compare(number, payload, now)
            return
        waiting = self._held.get(number)
        if waiting not in (None, payload) and now >= self._trusted_until:
            self._contradicted(now)
            return
        if self._unsure:  # It does not have the one that is known any more.
            self._same(now)
        if not self._answered:
            self._answered = True
            self._begin(number)
        if number < self._next:
            self._compare(number, payload, now)
            return
        if waiting is not None:
            return
        early = number > self._top and (self._asked_all or self._joined is None)
        if number - self._next > _FAR or not (early or number <= self._top):
            return
        if early and self._ahead.put(number, mark(payload)):
            self._ahead_until = now + self._limits.silence
        elif number >= self._since_joined:
            self.counts.recovered.add(1)
        self._held.put(number, payload, now)
        self._deadline = now + self._limits.silence
        self._go_on(now)
        if early:
            self._ahead_next = self._next

    def _compare(self, number: int, payload: bytes, now: float) -> None:
        """Takes a batch again that is known; if it is another, the publisher has started again meanwhile."""
        found = self._recall.of(number, self._next)
        if self._question is not None and self._question[0] == number:
            (_, found), self._question = self._question, None
        if found in (UNKNOWN, LOST):
            return
        if found != mark(payload):
            self._replaced(now)
        elif self._unsure:
            self._trusted_until = now + _TRUST
            self._same(now)

    def _contradicted(self, now: float) -> None:
        """Begins anew, with what its replay has: what waits came from whoever was connected before, or by its side."""
        self._trusted_until = now + _TRUST
        applied = self._next != _UNKNOWN
        self._held, self._suspects = Held(), []
        if applied:
            self._restart([], now)
        else:
            self._hang_up()
            self._start()
            self._ask(now, everything=True)

    def _same(self, now: float) -> None:
        self._unsure, self._question = False, None
        self._acquit()
        self._go_on(now)

    @property
    def _since_joined(self) -> float:
        return math.inf if self._joined is None else self._joined

    def _came(self) -> None:
        """What a replay brought before it came live, and did not come since, was missed."""
        self.counts.recovered.add(self._ahead.rest(self._since_joined))
        self._ahead_next, self._ahead_until = _UNKNOWN, math.inf

    def _begin(self, number: int) -> None:
        """Takes the first answer's number: the publisher does not have anything below it any more."""
        held = self._held
        if self._next == _UNKNOWN:
            if held:
                self._joined = held.first
            self._next = number if self._joined is None else min(number, self._joined)
        while held and self._next < number:
            if held.first <= number:
                self._skip()
            else:
                self._miss(number)
        self._drain()

    def _ended(self, now: float, *, silent: bool) -> None:
        """Goes on after a replay, be it over or not: asks for the rest if that may help, and else gives it up."""
        held, asked_top = self._held, self._asked_top
        progress = self._next > self._asked_next
        nothing = silent and not progress
        unsure, anything, gone = self._unsure, self._anything, not (silent or self._brought)
        self._hang_up()
        if not silent:
            self._question = None
        if unsure:
            if gone and self._keeps:
                self._replaced(now)
                return
            if gone and not anything:
                self._ask(now, again=True, anything=True)
                self._unsure = True
                return
            if nothing:
                self._turn_deaf(now)
            self._untold(now)
            self._go_on(now)
            return
        late = now >= self._last_call
        if held and (late or not (progress or held.first > asked_top)):
            if nothing:
                self._turn_deaf(now)
            # All that was sent before the request was in the answer, or is gone.
            while held and (late or nothing or held.first <= asked_top):
                self._skip()
        if held:
            self._ask(now, again=True)
        elif self._joined is None and self._next != _UNKNOWN:
            self._joined = self._next

    def _turn_deaf(self, now: float) -> None:
        """Asks nobody for a while who has not answered."""
        self._deaf_for = min(max(2 * self._deaf_for, _DEAF_AT_FIRST), self._limits.deaf)
        self._deaf_until = now + self._deaf_for

    def _unreadable(self, error: frames.UnreadableFramesError) -> None:
        counts = self.counts
        (counts.frame_count if error.reason == Reason.FRAME_COUNT else counts.sequence_frame).add(1)
