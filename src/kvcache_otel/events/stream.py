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
  that has others or had some before, is a reset; the same one means that there was none. What comes meanwhile waits,
  for as long as a replay may be silent.
* Three suspicious batches in a row, with rising numbers not more than 64 apart, are a reset: at once where each has a
  number that is known to have been on another batch, otherwise where replay does not answer. So is one with a number
  known to be of another, if next or one shortly above follows. Numbers that had been given up as lost prove nothing.
* If anything else comes, they were duplicates; from far above, numbers that mean nothing. If nothing comes at all for
  some seconds, those below next are a reset as well: an engine starts again, says little, and falls silent.

A replay is asked as well when a connection is made, when a source has been idle for a while, and whenever something is
missing; always from the last batch on that is known. What it does not answer it is asked again, less and less often:
it may still tell of a reset, though nothing waits for that any more.

What replay cannot tell. A publisher that started again and of which the very next number is the first to get here looks
as if it had not, if there is no replay, or if that has neither the batch that was applied last nor those after it.

What a publisher sent before the first number that arrived live is neither lost nor recovered. Where there is replay it
is asked for all the same, and applied; where that answers too late, everything is begun anew once all of it is there.
After a reset its numbers begin with 0, so that all that is missing counts, from there on.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvcache_otel.events import frames
from kvcache_otel.events.ahead import Ahead
from kvcache_otel.events.earlier import Earlier
from kvcache_otel.events.line import FAR, NONE, Line
from kvcache_otel.events.recall import LOST, mark
from kvcache_otel.events.replay import Replay, Request
from kvcache_otel.events.suspects import Suspect, Suspects
from kvcache_otel.events.terms import Limits
from kvcache_otel.semconv import Reason

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvcache_otel.events.terms import Consumer, Counts

_NEAR = 64  # Numbers that suspicious batches may skip.
_PROOF = 3  # Suspicious batches in a row that prove a reset.
_TRUST = 1.0  # Seconds after a replay has shown that there was no reset, in which it is not asked again whether.


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
        self._limits = limits = limits or Limits()
        self._replay = Replay(replay, silence=limits.silence, longest=limits.longest, deaf=limits.deaf)
        self._trusted_until = -math.inf
        self._connected_at = self._broken_at = -math.inf  # What came before came from whoever was there then.
        self._busy = replay  # A batch must go the long way: it is a first, or something waits, is asked or in doubt.
        self._idle_at: float | None = None  # The last batch after which it was asked, since nothing came.
        self._start()

    def _start(self, *, is_whole: bool = False) -> None:
        """Knows nothing of the publisher's numbers; but perhaps that they begin with 0, after a reset."""
        self._line = Line(self._apply, is_whole=is_whole)
        # Whether this batch, by its number and its mark, is still what it was: what was asked has not been answered.
        self._question: tuple[int, int] | None = None
        self._unsure = False  # What comes waits for what the replay says of it.
        self._unsure_since = math.inf
        self._live = False  # Something came live that was applied: its replay knows the same sequence.
        self._late = False  # The replay may still have what came before that and was given up: it had not answered.
        self._earlier = Earlier()  # What it has of that.
        self._carried = NONE  # Up to here, what waits may be of the life before.
        self._suspects = Suspects()
        self._ahead = Ahead()
        # Next, as the replay left it: as long as it is, copies may be on their way.
        self._ahead_next: int | None = None
        self._ahead_until = math.inf

    # -- what comes in ---------------------------------------------------------------------------------------------

    def connected(self, now: float) -> None:
        """The connection is there, or there again: with replay, sees whether anything was missed, and a reset."""
        self._connected_at = now
        if self._replay.there:
            self._replay.connected()
            self._hang_up()
            self._wonder()
            self._ask(now, everything=True)
            if self._line:
                self._doubt(now)
            self._rest()

    def disconnected(self, now: float) -> None:
        """The connection is lost. Nobody is asked anything for being silent."""
        self._connected_at = self._broken_at = math.nextafter(now, math.inf)  # What has just come is from before.
        self._replay.disconnected()
        self._idle_at = self.heard
        if self._replay.there:
            self._suspects.since = math.inf  # It is not the publisher's silence any more.
        if not self._line:  # What waits for the first answer must not be taken for the next publisher's.
            while self._line.held:
                self._skip()
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
        elif number == self._line.next and not self._busy:
            self._line.follow(payload)
        else:
            self._replay.everything = False
            self._arrive(number, payload, now)
            self._rest()

    def answer(self, message: Sequence[bytes], now: float) -> None:
        """Takes a message of the replay socket; after `Consumer.hang_up` it is ignored.

        Args:
            message: Its frames.
            now: As in `live`.
        """
        if self._replay.request is None:
            return
        try:
            batch = frames.answered(message)
        except frames.UnreadableFramesError as error:
            self._unreadable(error)
            return
        if batch is None:
            self._ended(now, silent=False)
        else:
            self._replay.heard(now)
            self._recover(self._replay.request, *batch, now)
        if self._ahead:
            self._ahead_next = self._line.next
        self._rest()

    def tick(self, now: float) -> None:
        """Does what is due.

        Args:
            now: As in `live`.
        """
        if now < self.due:
            return
        if now >= self._ahead_until:
            self._came()
        if self._replay.request is not None:
            if now >= min(self._replay.due, self._unsure_until):
                self._ended(now, silent=True)
        elif now >= self._suspects.since + self._limits.doubt:
            self._restart(self._suspects.take(), now)
        elif now >= min(self._idle_from, self._replay.again_at):
            self._idle_at = self.heard
            if self._replay.may_be_asked(now):
                self._ask(now, everything=True)
        else:
            self._go_on(now)
        self._rest()

    # -- live ------------------------------------------------------------------------------------------------------

    def _arrive(self, number: int, payload: bytes, now: float) -> None:
        line = self._line
        if not line:
            if line.held and not -_NEAR <= number - line.held.first <= FAR:
                self._skip()  # The two are not of one sequence.
                self._arrive(number, payload, now)
                return
            if number == 0:
                line.joined = 0
                line.start(0)
                self._replay.unanswered = False  # There was nothing before.
        elif number < line.next:
            self._old(number, payload, now)
            return
        elif number - line.next > FAR:
            self._suspect(Suspect(number, payload, now), now)
            return
        elif line.joined is None:
            line.joined = number
        held = line.held.get(number)
        if held is not None and number <= line.top:
            if held == payload:
                self.counts.duplicate.add(1)
            else:
                self._suspect(Suspect(number, payload, now), now)
            return
        if not self._unsure:
            if self._is_followed_by(number):
                self._restart([*self._suspects.take(), Suspect(number, payload, now)], now)
                return
            self._acquit()
        if held is None:
            line.held.put(number, payload, now)
        self._live = True
        line.top = max(line.top, number)
        self._go_on(now)

    def _old(self, number: int, payload: bytes, now: float) -> None:
        line = self._line
        found, its = line.mark(number), mark(payload)
        if line.next == self._ahead_next and number > line.top:
            missed = self._ahead.take(number, its, self._line.counted_from)
            if missed is not None:
                self.counts.recovered.add(missed)
                line.top, self._live = number, True
                if line.joined is None:
                    line.joined = line.next
                return
        last = number == line.next - 1
        if number == 0 and not (last and found in (LOST, its)):
            self._acquit()
            self._restart([Suspect(number, payload, now)], now)
        elif found == its or (last and found == LOST):
            self.counts.duplicate.add(1)
        else:
            self._suspect(Suspect(number, payload, now), now)

    # -- in doubt --------------------------------------------------------------------------------------------------

    def _suspect(self, suspect: Suspect, now: float) -> None:
        suspects, number = self._suspects, suspect.number
        if suspects.has(number, suspect.payload):
            self.counts.duplicate.add(1)
            return
        if not (self._unsure or suspects.followed_by(number, _NEAR)):
            self._acquit()
        suspects.put(suspect, self._line.mark(number), self._line.next)
        may_ask = self._may_tell(now)
        if suspects.proofs == _PROOF or (suspects.evidence >= _PROOF and not may_ask):
            if self._unsure:
                self._replaced(now)
            else:
                batches = suspects.take()
                waiting = self._line.held.drop(math.nextafter(batches[0].came, math.inf))  # What came after the first.
                self._restart([*batches, *(Suspect(*one) for one in waiting)], now)
        elif len(suspects) > _NEAR or suspects.size > self._limits.held_bytes:
            self._acquit()
        elif may_ask and not self._unsure:
            self._hang_up()
            self._ask(now)
            self._doubt(now)

    def _may_tell(self, now: float) -> bool:
        """Returns whether a replay may tell if there was a reset."""
        may_be_asked = self._live and now >= self._trusted_until and self._replay.may_be_asked(now)
        return may_be_asked and self._line.known is not None

    def _is_followed_by(self, number: int) -> bool:
        """Returns whether those that are suspicious, and then a number that is not, are a reset."""
        return self._suspects.proofs > 0 and self._suspects.followed_by(number, _NEAR)

    def _doubt(self, now: float) -> None:
        """Lets what comes wait until the replay has told, or has been silent."""
        if not self._unsure:
            self._unsure, self._unsure_since = True, now

    def _trust(self) -> None:
        self._unsure, self._unsure_since = False, math.inf

    @property
    def _unsure_until(self) -> float:
        return self._unsure_since + self._limits.silence

    def _acquit(self) -> None:
        """The publisher did not start again."""
        for suspect in self._suspects.take():
            self._pass_over(suspect)

    def _pass_over(self, suspect: Suspect) -> None:
        above = suspect.number > self._line.next + FAR
        (self.counts.sequence_frame if above else self.counts.duplicate).add(1)

    def _same(self, now: float) -> None:
        """The publisher is the same."""
        self._trust()
        self._question = None
        self._acquit()
        self._go_on(now)

    def _untold(self, now: float) -> None:
        """No replay says whether there was a reset: numbers have to."""
        self._trust()
        self._trusted_until = max(self._trusted_until, now + _TRUST)
        line = self._line
        for suspect in self._suspects.take():
            if self._line is not line:
                self._arrive(suspect.number, suspect.payload, now)  # There was, by those before it.
            elif suspect.came < self._connected_at:
                self._pass_over(suspect)
            else:
                self._suspect(suspect, now)
        if line.held and self._line is line:
            if self._is_followed_by(line.held.first):
                self._replaced(now)
            else:
                self._acquit()

    # -- begun anew --------------------------------------------------------------------------------------------------

    def _restart(self, batches: Iterable[Suspect], now: float) -> None:
        """Begins anew, with these batches: the publisher was reset."""
        self._came()
        self._line.held.drop(self._unsure_since, self._broken_at)  # Nobody knows whose these are.
        while self._line.held:
            self._skip()
        self._hang_up()
        self.counts.resets.add(1)
        self._consumer.reset()
        self._start(is_whole=True)
        for suspect in batches:
            self._arrive(suspect.number, suspect.payload, now)
        if not (self._line or self._line.held) and self._replay.may_be_asked(now):
            self._ask(now, everything=True)

    def _replaced(self, now: float) -> None:
        """Begins anew, with all that has come by this connection. What waited before it was lost is not of it."""
        batches = [suspect for suspect in self._suspects.take() if suspect.came >= self._connected_at]
        batches += (Suspect(*one) for one in self._line.held.drop(self._connected_at))
        self._restart(batches, now)
        self._carried = max((suspect.number for suspect in batches), default=NONE)

    def _contradicted(self, now: float) -> None:
        """Begins anew, with what its replay has: what waits came from whoever was connected before, or by its side."""
        self._trusted_until = now + _TRUST
        self._line.held.drop(-math.inf)
        self._suspects.take()
        if self._line:
            self._restart([], now)
        else:
            self._hang_up()
            self._start()
            self._ask(now, everything=True)

    def _join_again(self, now: float) -> None:
        """Begins anew, with what its replay has, which has what came before the first that came live."""
        self._consumer.forget()
        self._line = self._line.rebuilt(self._earlier.batches(), self._consumer.restore)
        self._late = False
        self._same(now)

    # -- what waits ------------------------------------------------------------------------------------------------

    def _go_on(self, now: float) -> None:
        """Applies what can be; if something still waits, sees whether it has waited long enough."""
        line, limits, before = self._line, self._limits, self._line.next
        if not self._unsure:
            line.drain()
        if line.next != before:
            line.since = line.held.since
        while line.held:
            held = line.held
            if self._replay.request is not None:
                if len(held) <= limits.held and held.size <= limits.held_bytes:
                    return
                if self._unsure:
                    self._untold(now)
                    line = self._line
                else:
                    self._skip()
                continue
            replay = self._replay.may_be_asked(now)
            if line.since is None:
                line.since = now
            waited = now >= line.since + limits.patience
            if waited or len(held) >= limits.window or held.size > limits.held_bytes:
                if replay:
                    self._ask(now)
                else:
                    self._skip()
                    line.since = held.since
            elif replay and not line:
                self._ask(now)
            else:
                return

    def _skip(self) -> None:
        """Gives up what is missing before the first batch that waits."""
        line = self._line
        if not (line and line.counts(line.next)):
            self._late = self._replay.unanswered or self._replay.request is not None
        self.counts.lost.add(line.skip())

    def _rest(self) -> None:
        """Sees what is left to be done."""
        replay, line = self._replay, self._line
        if not line.held:
            line.since = None
            wanted = replay.everything or replay.unanswered or self._unsure or self._question or self._late
            if line.joined is not None and not wanted:
                self._hang_up()
        first = replay.there and (not self._live or self.heard == self._idle_at)  # Of a sequence, or after silence.
        self._busy = bool(line.held or self._suspects) or replay.request is not None or first
        if replay.request is not None:
            self.due = min(replay.due, self._unsure_until)
        else:
            self.due = min(self._suspects.since + self._limits.doubt, self._idle_from, replay.again_at)
            if line.since is not None:
                self.due = min(self.due, line.since + self._limits.patience)
        self.due = min(self.due, self._ahead_until)

    @property
    def _idle_from(self) -> float:
        """When it is asked whether the last batch was the last; infinite where it was asked, and nothing has come."""
        if not (self._replay.there and self._line) or self.heard is None or self.heard == self._idle_at:
            return math.inf
        return self.heard + self._limits.idle

    # -- replay ----------------------------------------------------------------------------------------------------

    def _ask(self, now: float, *, everything: bool = False, again: bool = False, anything: bool = False) -> None:
        line = self._line
        top = line.held.last if line.held else line.next - 1
        self._replay.ask(Request(line.next, top, anything), now, everything=everything, again=again)
        self._earlier = Earlier()
        # With the last one that is known: if that is another now, so are all before it.
        if anything or self._late:
            start = 0
        elif self._question is not None:
            start, _ = self._question
        else:
            start = line.known
        self._consumer.ask(max(line.next, 0) if start is None else start)

    def _wonder(self) -> None:
        """Keeps in mind what the last batch is that is known, until the replay has told whether it still is."""
        known = self._line.known
        if self._question is None and known is not None:
            self._question = known, self._line.mark(known)

    def _hang_up(self) -> None:
        if self._replay.request is not None:
            self._replay.request = None
            self._consumer.hang_up()

    def _recover(self, request: Request, number: int, payload: bytes, now: float) -> None:
        """Takes a batch that is missing. One that did not come live yet either is left to come, once anything has."""
        if request.anything:
            self._replaced(now)
            return
        line, replay = self._line, self._replay
        if self._late and number < line.next:
            self._collect(number, payload, now)
            return
        if number < request.next:
            self._compare(number, payload, now)
            return
        waiting = line.held.get(number)
        if waiting not in (None, payload) and now >= self._trusted_until:
            self._contradicted(now)
            return
        if self._unsure:  # It does not have the one that is known any more.
            self._same(now)
        if line and number - line.next > FAR:
            return
        if not replay.begun:
            replay.begun = True
            self.counts.lost.add(line.begin(number))
        if number < line.next:
            self._compare(number, payload, now)
            return
        if waiting is not None:
            return
        early = number > line.top and (replay.everything or line.joined is None)
        if number - line.next > FAR or not (early or number <= line.top):
            return
        if early and self._ahead.put(number, mark(payload)):
            self._ahead_until = now + self._limits.silence
        elif line.counts(number):
            self.counts.recovered.add(1)
        line.held.put(number, payload, now)
        replay.went_on(now)
        self._go_on(now)

    def _compare(self, number: int, payload: bytes, now: float) -> bool:
        """Takes a batch again that is known; if it is another, the publisher has started again meanwhile.

        Returns:
            Whether it is the same.
        """
        was = self._line.was(number)
        if self._question is not None and self._question[0] == number:
            (_, was), self._question = self._question, None
            self._replay.unanswered = False
        if was is None:
            return False
        if was != mark(payload):
            self._replaced(now)
            return False
        if self._unsure and not self._late:
            self._trusted_until = now + _TRUST
            self._same(now)
        return True

    def _collect(self, number: int, payload: bytes, now: float) -> None:
        """Takes a batch of a life of which the beginning has been given up. What comes waits until all are there."""
        line, earlier, limits = self._line, self._earlier, self._limits
        is_known = self._compare(number, payload, now)
        if self._line is not line:
            return
        self._unsure, self._unsure_since = True, now
        joined = line.next if line.joined is None else line.joined
        earlier.put(number, payload, is_news=number < joined and not is_known)
        self._replay.went_on(now)
        too_many = len(earlier) > limits.held or earlier.size > limits.held_bytes  # Then the books stay as they are.
        if number != line.next - 1 and not too_many:
            return
        if not too_many and earlier.is_news and earlier.covers(line.first, joined, line.next):
            self._join_again(now)
            return
        self._late = False
        self._same(now)

    def _came(self) -> None:
        """What a replay brought before it came live, and did not come since, was missed."""
        self.counts.recovered.add(self._ahead.rest(self._line.counted_from))
        self._ahead_next, self._ahead_until = None, math.inf

    def _ended(self, now: float, *, silent: bool) -> None:
        """Goes on after a replay, be it over or not: asks for the rest if that may help, and else gives it up."""
        line, replay, request = self._line, self._replay, self._replay.request
        assert request is not None
        progress = line.next > request.next
        nothing = silent and not progress
        gone = not (silent or replay.brought)
        self._hang_up()
        asked_whether = self._unsure or self._question is not None
        if silent:
            self._wonder()
            replay.fell_silent(now, deaf=nothing and (self._unsure or bool(line.held)))
        else:
            replay.answered()
            if (
                self._late and self._earlier.is_news and not self._earlier.again
            ):  # Some have come live since it was asked.
                self._ask(now, everything=True, again=True)
                self._earlier = Earlier(again=True)
                return
            known = -1 if line.known is None else line.known
            if self._late and self._earlier.is_news and self._earlier.last < known:
                self._replaced(now)  # It does not have the one that is known, and has its own last.
                return
            self._question, self._late = None, False
        if gone and line.known is not None and (asked_whether or not line.held):
            if replay.keeps:
                self._replaced(now)
                return
            if asked_whether and not request.anything:
                self._ask(now, again=True, anything=True)
                return
        if self._unsure:
            self._untold(now)
            self._go_on(now)
            return
        late, held = replay.is_late(now), line.held
        if held and (late or nothing or not (progress or held.first > request.top)):
            # All that was sent before the request was in the answer, or is gone.
            while held and (late or nothing or held.first <= request.top):
                if replay.brought and not silent and held.first <= self._carried:
                    held.pop()  # The publisher would have it, as it has its last.
                else:
                    self._skip()
        if held:
            self._ask(now, again=True)
        elif line and line.joined is None:
            line.joined = line.next

    def _unreadable(self, error: frames.UnreadableFramesError) -> None:
        counts = self.counts
        (counts.frame_count if error.reason == Reason.FRAME_COUNT else counts.sequence_frame).add(1)
