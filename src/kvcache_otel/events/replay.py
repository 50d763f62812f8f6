"""A publisher's replay: what it is asked at present, and when it may be asked again."""

from __future__ import annotations

import math
from typing import NamedTuple

_REST_AT_FIRST = 2.0  # Seconds for which it is left alone that has not answered for the first time.


class Request(NamedTuple):
    """A request that has been sent, and is not over.

    Attributes:
        next: The stream's next number as it was then; below 0 where there was none.
        top: The highest number that came live until then.
        anything: Whether it is only asked if the publisher has any batches at all.
    """

    next: int
    top: int
    anything: bool


class Replay:
    """What is known of a replay, and of the request to it.

    Attributes:
        there: Whether the publisher has one.
        keeps: Whether it has ever had a batch: then it has its last one, always.
        request: What it is asked; None while it is not.
        everything: Whether batches are taken too that did not come live; until something does.
        brought: Whether it has answered this request with any batch.
        begun: Whether it has with one from the request's next number on.
        unanswered: Whether a request was met with silence, so that it has to be asked again.
    """

    def __init__(self, there: bool, *, silence: float, longest: float, deaf: float) -> None:
        """Args:
        there: Whether the publisher has one.
        silence: Seconds for which it may bring nothing new.
        longest: Seconds that it may take in all, however often it is asked for the rest.
        deaf: Seconds for which it is left alone when it did not answer, at the most.
        """
        self.there = there
        self.keeps = False
        self.request: Request | None = None
        self.everything = self.brought = self.begun = self.unanswered = False
        self._silence, self._longest, self._longest_rest = silence, longest, deaf
        self._deadline = self._last_call = math.inf
        self._connected = True
        self._deaf_until = -math.inf
        self._again_at, self._rest = math.inf, 0.0

    # -- when it may be asked ------------------------------------------------------------------------------------------

    def may_be_asked(self, now: float) -> bool:
        """Returns whether it is there, and not left alone for its silence."""
        return self.there and now >= self._deaf_until

    @property
    def again_at(self) -> float:
        """When it is to be asked again what it did not answer; infinite where there is nothing."""
        return self._again_at if self.unanswered and self._connected else math.inf

    def connected(self) -> None:
        """There is a connection to its publisher, to which no silence before is held against it."""
        self._connected = True
        self._forgive()

    def disconnected(self) -> None:
        """There is none: its next will ask again."""
        self._connected = False

    # -- a request -----------------------------------------------------------------------------------------------------

    def ask(self, request: Request, now: float, *, everything: bool, again: bool) -> None:
        """Begins a request, which goes on with the one before if it is asked for the rest, again."""
        self.request, self.everything = request, everything
        self.brought = self.begun = False
        self._deadline = now + self._silence
        if not again:
            self._last_call = now + self._longest

    @property
    def due(self) -> float:
        """When the request is over if nothing more comes."""
        return min(self._deadline, self._last_call)

    def is_late(self, now: float) -> bool:
        """Returns whether it has taken as long as it may in all."""
        return now >= self._last_call

    def heard(self, now: float) -> None:
        """It has brought a batch; the first of a request shows that it is there, whatever it is."""
        if not self.brought:
            self._deadline = now + self._silence
        self.keeps = self.brought = True

    def went_on(self, now: float) -> None:
        """It has brought something new."""
        self._deadline = now + self._silence
        self._forgive()

    def answered(self) -> None:
        """It has said that this is all."""
        self.unanswered = False
        self._forgive()

    def fell_silent(self, now: float, *, deaf: bool) -> None:
        """It has not, and is asked again after a while; after a longer one each time until it brings something new.

        Args:
            now: The time.
            deaf: Whether it is not to be asked for anything before.
        """
        self.unanswered = True
        self._rest = min(max(2 * self._rest, _REST_AT_FIRST), self._longest_rest)
        self._again_at = now + self._rest
        if deaf:
            self._deaf_until = self._again_at

    def _forgive(self) -> None:
        self._deaf_until, self._rest = -math.inf, 0.0
