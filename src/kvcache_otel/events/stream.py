"""A publisher's sequence of batches: put in order, without repetitions, with replay for what went missing.

A stream opens no socket and reads no clock: whoever has them hands over frames, with the time at which they came.

What numbers say. *Next* is the number that follows the last batch applied:

* Next itself is applied. A higher one waits for those between, for a moment; what is still missing then is asked for
  where the publisher has a replay socket, and is lost where it has not, or where replay did not bring it.
* 0 starts the sequence again: the publisher was reset. So it does right after another 0, if it is another batch.
* A number below next is a duplicate if it is on the same batch as then. Batches are told apart by their first bytes,
  which hold the time when they were made; of the last 64 batches they are kept. Any other low number is suspicious,
  but for the one just before next where that had been given up. So are a number more than 2**24 above next, and one
  that a waiting batch has and that is now on another.
* Three suspicious batches in a row, with rising numbers not more than 64 apart, are from a publisher that started again
  and whose first batches did not get here: a reset. Numbers that had been given up as lost may be among them, but prove
  nothing: they may just be late. If anything else comes before there are three, they were duplicates; from far above,
  numbers that mean nothing. If nothing comes at all for some seconds, those below next are a reset as well: so it looks
  when an engine starts again, says little, and falls silent.

A replay is asked to begin with the batch that was applied last: where that is another batch now, the publisher has
started again, and was past the old numbers before anybody received it. That may be so whenever a connection was lost:
the first batch after it waits until the one before was compared. Without replay, a publisher that started again and of
which the very next number is the first to get here looks as if it had not.

What a publisher sent before the first number that arrived live, at first or after a reset, is neither lost nor
recovered. Where there is replay it is asked for all the same, and applied.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvcache_otel.events import frames
from kvcache_otel.events.held import Held
from kvcache_otel.semconv import Reason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcache_otel.record.cells import Counter

_UNKNOWN = -1  # In place of a number: there is none yet.
_REMEMBERED = 64  # Batches whose beginnings are known.
_BEGINNING = 48  # Bytes of a batch that tell it from others: its time, and the first event's first fields.
_NEAR = 64  # Numbers that suspicious batches may skip.
_FAR = 2**24  # Numbers that nobody misses in one go: two days of a hundred batches a second.
_PROOF = 3  # Suspicious batches in a row that prove a reset.


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
        deaf: Seconds for which a publisher that did not answer is not asked again.
        doubt: Seconds of silence after which suspicious batches below next are a reset.
    """

    window: int = 64
    patience: float = 0.1
    held: int = 10_000
    held_bytes: int = 32 * 2**20
    silence: float = 5.0
    longest: float = 60.0
    deaf: float = 60.0
    doubt: float = 5.0


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
        self._deaf_until = -math.inf
        self._busy = False  # Something waits, is asked for or is in doubt: a batch must go the long way.
        self._held = Held()
        self._suspects: list[tuple[int, bytes]] = []
        self._recent: deque[bytes | None] = deque(maxlen=_REMEMBERED)  # Beginnings, up to next; None for what was lost.
        self._start()

    def _start(self) -> None:
        """Knows nothing of the publisher's numbers."""
        self._next: int = _UNKNOWN
        self._joined: int | None = None  # From here on what is missing counts; None before anything came live.
        self._top: int = _UNKNOWN  # The highest number that came live and had to wait.
        self._since: float | None = None  # When the first that waits began to.
        self._suspects.clear()
        self._evidence = 0  # How many of them prove something.
        self._doubted = math.inf  # When the last of them came, where all are below next.
        self._recent.clear()
        # A replay before anything came live gets ahead of what is on its way: that will come again, once.
        self._ahead: int = _UNKNOWN
        self._ahead_until = math.inf
        self._replayed: dict[int, int] = {}  # What it brought, by number.
        self._unsure = False  # The connection was lost: is the batch applied last still what it was?
        # The replay that is asked for.
        self._asked: int | None = None
        self._asked_next: int = _UNKNOWN
        self._asked_top: int = _UNKNOWN
        self._answered = False
        self._deadline = math.inf
        self._last_call = math.inf

    # -- what comes in ---------------------------------------------------------------------------------------------

    def open(self, now: float) -> None:
        """Asks for what the publisher has sent so far, before anything came. Without replay there is nothing to do."""
        if self._replay and not self._busy and self._next == _UNKNOWN:
            self._ask(now)
            self._rest()

    def reconnected(self) -> None:
        """The connection was lost and is there again: with replay, sees whether it is still the same sequence."""
        if self._replay and self._is_last_known:
            self._unsure = self._busy = True

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
            self._recent.append(payload[:_BEGINNING])
            self._apply(payload)
        else:
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
            if now >= self._doubted + self._limits.doubt:
                self._restart(self._suspects.copy(), now)
            elif self._asked is not None:
                self._ended(now, silent=True)
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
        self._acquit()
        if held is None:
            self._held.put(number, payload, now)
        self._top = max(self._top, number)
        self._go_on(now)

    def _old(self, number: int, payload: bytes, now: float) -> None:
        behind = self._next - number
        remembered = behind <= len(self._recent)
        beginning = self._recent[-behind] if remembered else None
        same = beginning is None or beginning == payload[:_BEGINNING]  # As far as one can tell.
        if now >= self._ahead_until:
            self._replayed.clear()
        if self._next == self._ahead and number > self._top and self._replayed.get(number) == _mark(payload):
            self._top = number
            if self._joined is None:
                self._joined = self._next
                self._ahead_until = now + self._limits.silence
        elif number == 0 and (behind > 1 or not same):
            self._acquit()
            self._restart([(number, payload)], now)
        elif same and (behind == 1 or beginning is not None):
            self.counts.duplicate.add(1)
        else:
            self._suspect(number, payload, now, late=remembered and beginning is None)

    def _suspect(self, number: int, payload: bytes, now: float, *, late: bool = False) -> None:
        suspects = self._suspects
        if (number, payload) in suspects:
            self.counts.duplicate.add(1)
            return
        if suspects and not 0 < number - suspects[-1][0] <= _NEAR:
            self._acquit()
        suspects.append((number, payload))
        self._evidence += not late
        below = all(number < self._next for number, _ in suspects)
        self._doubted = now if below and self._evidence else math.inf
        if self._evidence == _PROOF:
            self._restart(suspects.copy(), now)
        elif sum(len(payload) for _, payload in suspects) > self._limits.held_bytes:
            self._acquit()

    def _acquit(self) -> None:
        """The publisher did not start again."""
        for number, _ in self._suspects:
            above = number > self._next + _FAR
            (self.counts.sequence_frame if above else self.counts.duplicate).add(1)
        self._suspects.clear()
        self._evidence = 0
        self._doubted = math.inf

    def _restart(self, batches: list[tuple[int, bytes]], now: float) -> None:
        while self._held:
            self._skip()
        if self._asked is not None:
            self._hang_up()
        self.counts.resets.add(1)
        self._consumer.reset()
        self._start()
        for number, payload in batches:
            self._arrive(number, payload, now)

    # -- what waits ------------------------------------------------------------------------------------------------

    def _go_on(self, now: float) -> None:
        """Applies what can be; if something still waits, sees whether it has waited long enough."""
        before = self._next
        limits, held = self._limits, self._held
        if now < self._deaf_until:
            self._unsure = False
        if not self._unsure:
            self._drain()
        if self._next != before:
            self._since = held.since
        while held:
            if self._asked is not None:
                if len(held) <= limits.held and held.size <= limits.held_bytes:
                    return
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
            elif replay and (self._unsure or self._next == _UNKNOWN):
                self._ask(now)
            else:
                return

    def _drain(self) -> None:
        held = self._held
        while held and held.first == self._next:
            self._next += 1
            payload = held.pop()
            self._recent.append(payload[:_BEGINNING])
            self._apply(payload)

    def _skip(self) -> None:
        """Gives up what is missing before the first batch that waits."""
        self._unsure = False
        first = self._held.first
        if self._next == _UNKNOWN:
            self._next = self._joined = first
        self._miss(first)
        self._drain()

    def _miss(self, end: int) -> None:
        """Gives up everything from next on, up to a number."""
        if self._joined is not None:
            self.counts.lost.add(max(end - max(self._next, self._joined), 0))
        self._recent.extend([None] * min(end - self._next, _REMEMBERED))
        self._next = end

    def _rest(self) -> None:
        """Sees what is left to be done."""
        if not self._held:
            self._since = None
            if self._asked is not None and self._joined is not None:
                self._hang_up()
        self._busy = bool(self._held or self._suspects) or self._unsure or self._asked is not None
        if self._asked is not None:
            self.due = min(self._deadline, self._last_call)
        elif self._since is not None:
            self.due = self._since + self._limits.patience
        else:
            self.due = math.inf
        self.due = min(self.due, self._doubted + self._limits.doubt)

    # -- replay ----------------------------------------------------------------------------------------------------

    def _ask(self, now: float, *, again: bool = False) -> None:
        self._asked = max(self._next, 0)
        self._asked_next = self._next
        self._asked_top = self._held.last if self._held else self._next - 1
        self._answered = False
        self._deadline = now + self._limits.silence
        if not again:
            self._last_call = now + self._limits.longest
        # With the last one that was applied: if that is another now, so are all before it.
        self._consumer.ask(self._asked - self._is_last_known)

    @property
    def _is_last_known(self) -> bool:
        return bool(self._recent) and self._recent[-1] is not None

    def _hang_up(self) -> None:
        self._asked = None
        self._consumer.hang_up()

    def _recover(self, number: int, payload: bytes, now: float) -> None:
        """Takes a batch that is missing. One that did not come live yet either is left to come, once anything has."""
        if self._asked is None:
            return
        if number < self._asked:
            if number == self._asked - 1 == self._next - 1:
                self._compare(payload, now)
            return
        self._unsure = False
        if not self._answered:
            self._answered = True
            self._begin(number)
        ahead = self._joined is None
        if number < self._next or self._held.get(number) is not None:
            return
        if number - self._next > _FAR or not (ahead or number <= self._top):
            return
        if self._joined is not None and number >= self._joined:
            self.counts.recovered.add(1)
        if ahead:
            self._replayed[number] = _mark(payload)
        self._held.put(number, payload, now)
        self._deadline = now + self._limits.silence
        self._go_on(now)
        if ahead:
            self._ahead = self._next

    def _compare(self, payload: bytes, now: float) -> None:
        """Takes the batch again that was applied last; if it is another, the publisher has started again meanwhile."""
        self._unsure = False
        if not self._is_last_known or self._recent[-1] == payload[:_BEGINNING]:
            self._go_on(now)
        else:
            waiting: list[tuple[int, bytes]] = []
            while self._held:
                waiting.append((self._held.first, self._held.pop()))
            self._restart(waiting, now)

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
        self._hang_up()
        late = now >= self._last_call
        if held and (late or not (progress or held.first > asked_top)):
            if nothing:
                self._deaf_until = now + self._limits.deaf
            # All that was sent before the request was in the answer, or is gone.
            while held and (late or nothing or held.first <= asked_top):
                self._skip()
        if held:
            self._ask(now, again=True)
        elif self._joined is None and self._next != _UNKNOWN:
            self._joined = self._next
            self._ahead_until = now + self._limits.silence

    def _unreadable(self, error: frames.UnreadableFramesError) -> None:
        counts = self.counts
        (counts.frame_count if error.reason == Reason.FRAME_COUNT else counts.sequence_frame).add(1)


def _mark(payload: bytes) -> int:
    return hash(payload[:_BEGINNING])
