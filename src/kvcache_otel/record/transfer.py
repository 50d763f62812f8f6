"""One transfer, from its beginning to its end."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from kvcache_otel.record.pair import Outcome, Pair

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType
    from typing import Self

    from kvcache_otel.record.cells import Histogram
    from kvcache_otel.record.doubts import Doubts
    from kvcache_otel.record.pair import DeviceEvent
    from kvcache_otel.record.streams import Stream
    from kvcache_otel.record.transfers import Transfers

    Tokens = int | Mapping[str, int] | None
    Events = tuple[DeviceEvent, DeviceEvent] | None
    Failure = str | BaseException | type[BaseException] | None


class Transfer(Pair):
    """One transfer that has begun. Made by `Transfers.begin` or `transfer`; ends by `end`, or with its block.

    What is not known before can be set inside the block, as attributes. A block that raises is a transfer that failed.

    Attributes:
        bytes: Bytes that it moves.
        tokens: Tokens that it moves, by pool; a number is of the first pool that was declared, None says nothing.
        seconds: Its duration as a backend reports it; None where none does.
        events: Somebody else's events around it, the one before and the one after; None where there are none.
        lent: Whether these events may be recorded again as soon as the transfer has ended.
        began: When it began, by `time.monotonic`.
        at: When it ended, by `time.monotonic`; None for when that is said.
        expected: Whether it will get a key.
        ended: Whether it was said that it has ended. A device may still be at it.
        active: Whether it is counted as one that is under way.
        overdue: Whether it was said that it has not ended in time.
    """

    __slots__ = (
        "_transfers",
        "active",
        "at",
        "began",
        "bytes",
        "ended",
        "events",
        "expected",
        "lent",
        "overdue",
        "seconds",
        "stream",
        "tokens",
    )

    # Written by its `Transfers`; a Pair's own `__init__` would set them twice.
    before: Any
    after: Any
    duration: Histogram

    def __init__(self, transfers: Transfers, bytes: int, tokens: Tokens, stream: Stream | None) -> None:
        """Args:
        transfers: The direction that it belongs to.
        bytes: As the attribute.
        tokens: As the attribute.
        stream: The stream on which events of ours are recorded; None for none.
        """
        self._transfers = transfers
        self.bytes = bytes
        self.tokens = tokens
        self.stream = stream
        self.seconds: float | None = None
        self.at: float | None = None
        self.events: Events = None
        self.told = None
        self.before = self.after = None
        self.lent = self.ended = self.void = self.expected = self.active = self.overdue = False
        self.began = time.monotonic()

    @property
    def doubts(self) -> Doubts:
        """What counts that it told no time."""
        return self._transfers.doubts

    def end(
        self,
        *,
        bytes: int | None = None,
        tokens: Tokens = None,
        seconds: float | None = None,
        events: Events = None,
        lent: bool = False,
        at: float | None = None,
        error: Failure = None,
    ) -> None:
        """Says that it has ended, or that all of it is on its stream. Never raises; a second time counts as an error.

        Its duration is, in this order: what `events` tell, `seconds`, what events of ours on its stream tell, the time
        since it began.

        Args:
            bytes: As the attribute; None for what was said before.
            tokens: As the attribute; None for what was said before.
            seconds: As the attribute.
            events: As the attribute.
            lent: As the attribute: the pair is read now or not at all.
            at: As the attribute.
            error: What went wrong: an exception, its class, or a short word, always the same for the same fault: in one
                direction the first 16 have rows of their own. Then only what is said here has moved, and there is no
                duration.
        """
        if self.ended:
            self._transfers.ended_twice()
            return
        self.ended = True
        try:
            if error is not None:
                self._transfers.failed(self, error, bytes, tokens)
                return
            if bytes is not None:
                self.bytes = bytes
            if tokens is not None:
                self.tokens = tokens
            if seconds is not None:
                self.seconds = seconds
            if at is not None:
                self.at = at
            if events is not None:
                self.events, self.lent = events, lent
                self._transfers.finish_by(self, events)  # As `finish` does it, a call less.
            else:
                self._transfers.finish(self)
        except BaseException as error_of_ours:
            self._transfers.broken_off(self, error_of_ours)

    def cancel(self) -> None:
        """Says that nothing was to be moved: it does not count. Never raises."""
        if not self.ended:
            self.ended = True
            try:
                self._transfers.cancelled(self)
            except BaseException as error:
                self._transfers.broken_off(self, error)

    def mark_end(self) -> None:
        """Says that all of it is on its stream, for whoever finds out then what else to say. Never raises."""
        self._transfers.mark_end(self)

    def abandon(self) -> None:
        """Says that nobody has it to end it any more: what it moved is not known."""
        self._transfers.is_over(self)
        self.ended = True

    def belongs_to(self, transfers: Transfers) -> None:
        """Has it end with another `Transfers`: in a forked child, what began before is none of the child's."""
        self._transfers = transfers

    def settled(self, outcome: Outcome) -> None:
        """Hears from the harvester what has become of its events."""
        if outcome is Outcome.GIVEN_UP:  # It has not finished, as far as anybody knows.
            self._transfers.given_up(self)
        else:
            self._transfers.finished_on_device(self, outcome)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: TracebackType | None) -> None:
        if not self.ended:
            self.end(error=error)
