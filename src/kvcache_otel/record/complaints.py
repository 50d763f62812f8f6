"""What is wrong with what is said of one direction's transfers: counted each time, and said once of each kind."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvcache_otel.record.labels import printable
from kvcache_otel.record.outside import let_through
from kvcache_otel.semconv import Reason

if TYPE_CHECKING:
    from kvcache_otel.record.probe import CacheProbe

_logger = logging.getLogger(__name__)


class Complaints:
    """What is said of one direction. Nothing here raises.

    Attributes:
        where: The direction, in words.
    """

    __slots__ = ("_probe", "_said", "where")

    def __init__(self, probe: CacheProbe, where: str) -> None:
        """Args:
        probe: The cache's probe.
        where: As the attribute.
        """
        self._probe = probe
        self._said: set[str] = set()
        self.where = where

    def contradicted(self, what: str, reason: str) -> None:
        """Counts what cannot be right: an end without a beginning, say."""
        self._probe.accounting_error(reason)
        self.say(what, f"one {what}; see kvcache.accounting.errors")

    def untimed(self, error: BaseException) -> None:
        """Counts a transfer that no device has timed."""
        self._probe.lost(Reason.EVENT_LOST)
        self.say("untimed", f"no device time: {type(error).__name__}: {printable(error)}")

    def overdue(self, deadline_s: float, *, stays: bool) -> None:
        """Counts a transfer that has not ended in time, and stays active where somebody may still end it."""
        self._probe.lost(Reason.EVENT_LOST)
        if stays:
            self.say("overdue", f"one has begun and not ended for {deadline_s:g} s, and stays active")
        else:
            self.say(
                "let go", f"one has begun and not ended for {deadline_s:g} s, and nobody has it to end it any more"
            )

    def unwatched(self, limit: int) -> None:
        """Counts a transfer that is not looked after, because there are too many."""
        self._probe.lost(Reason.QUEUE_FULL)
        self.say("many", f"more than {limit} have begun and not ended; the oldest are not watched")

    def crowded_out(self, limit: int) -> None:
        """Counts a transfer whose key finds no room: what it said when it began is lost, and its duration."""
        self._probe.lost(Reason.QUEUE_FULL)
        self.say("keys", f"more than {limit} wait to be ended by their key; the oldest will have no duration")

    def interrupted(self) -> None:
        """Counts a transfer whose end was interrupted by something from outside."""
        self._probe.lost(Reason.OTHER)

    def undeclared(self, pool: object) -> None:
        """Counts the tokens of a pool that was not declared, which have no row."""
        self._probe.lost(Reason.OTHER)
        self.say("pool", f"tokens of the pool {printable(pool)!r}, which was not declared, are not counted")

    def broken(self, error: BaseException) -> None:
        """Counts an exception of ours, or of what somebody said about a transfer."""
        self._probe.failed("transfer", f"transfers from {self.where}", error)

    def say(self, what: str, words: str) -> None:
        """Says something once; a handler of somebody's that raises is no affair of the engine's."""
        if what not in self._said:
            self._said.add(what)
            try:
                _logger.warning("kvcache: transfers from %s: %s", self.where, words)
            except Exception as error:
                let_through(error)
