"""What becomes of the tokens that storage said it had.

SGLang keeps such books too, but only where its own metrics are on. These are ours, of every request's attempt, so that
hit = fulfilled + unfulfilled + outstanding holds whether they are on or not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcache_otel.engines.sglang.bounds import MOST, TooMany
from kvcache_otel.record.cells import unread
from kvcache_otel.semconv import Reason

if TYPE_CHECKING:
    from kvcache_otel.record.cells import Counter
    from kvcache_otel.record.probe import CacheProbe

# Why a hit may stay unfulfilled here. ``other`` is for what SGLang leaves out of its own count: requests that were
# aborted or retracted, and what a reset or a detached backend made nobody wait for.
_REASONS = (
    Reason.BELOW_THRESHOLD,
    Reason.HOST_CAPACITY,
    Reason.DEVICE_CAPACITY,
    Reason.DEVICE_COVERED,
    Reason.STORAGE_TRANSFER,
    Reason.DEADLINE,
    Reason.ANCHOR_LOST,
    Reason.AUX_WINDOW_TRIM,
    Reason.DEVICE_OVERLAP,
    Reason.CACHE_ADMISSION_SHORTFALL,
    Reason.SHRUNK,
    Reason.UNSERVABLE_PREFIX,
    Reason.DROPPED,
    Reason.OTHER,
)

_DEFERRALS = (Reason.HOST_CAPACITY, Reason.DEVICE_CAPACITY)


class PrefetchBooks:
    """The prefetches of one cache from one storage backend.

    Attributes:
        forgot: Whether there were too many to remember, so that what was hit does not add up any more.
    """

    def __init__(self, probe: CacheProbe, tier: str, name: str) -> None:
        """Args:
        probe: The cache's probe.
        tier: The backend's tier.
        name: SGLang's name of the backend.
        """
        self._rows = probe.prefetches(tier, name)
        self._unfulfilled: dict[str, Counter] = {reason: self._rows.unfulfilled(reason) for reason in _REASONS}
        self._deferred: dict[str, Counter] = {reason: self._rows.deferred(reason) for reason in _DEFERRALS}
        self._remaining: dict[Any, int] = {}
        self.forgot = False
        self._too_many = TooMany(probe, "requests that waited for what storage had")

    def hit(self, request: Any, tokens: int) -> None:
        """Books what storage said it had for one attempt of a request."""
        if tokens <= 0:
            return
        self.finished(request, 0, None)  # An attempt before, of which nobody has heard the end.
        if len(self._remaining) >= MOST:  # Nor of others.
            self._too_many.forgotten(len(self._remaining))
            self._remaining.clear()
            self.forgot = True
            self.outstanding_unknown()
        self._remaining[request] = tokens
        self._rows.hit.add(tokens)
        self._rows.outstanding.add(tokens)

    def resolved(self, request: Any, tokens: int, reason: str | None) -> None:
        """Books a part of what remains of a hit.

        Args:
            request: The attempt.
            tokens: How many.
            reason: Why they are no usable prefix; None where they are one already, by another request's doing.
        """
        remaining = self._remaining.get(request)
        if remaining is None or tokens <= 0:
            return
        settled = min(tokens, remaining)
        self._settle(settled if reason is None else 0, 0 if reason is None else settled, reason)
        if settled < remaining:
            self._remaining[request] = remaining - settled
        else:
            del self._remaining[request]

    def covered(self, request: Any, credited: int) -> None:
        """Books all of a hit but what the request still takes from storage: the device has the rest by now."""
        remaining = self._remaining.get(request)
        if remaining is not None:
            self.resolved(request, remaining - credited, Reason.DEVICE_COVERED)

    def finished(self, request: Any, fulfilled: int, reason: str | None) -> None:
        """Books all that remains of a hit.

        Args:
            request: The attempt.
            fulfilled: How much of it is usable prefix now.
            reason: Why the rest is not; None where SGLang does not count it.
        """
        remaining = self._remaining.pop(request, None)
        if remaining is not None:
            fulfilled = min(max(fulfilled, 0), remaining)
            self._settle(fulfilled, remaining - fulfilled, reason)

    def deferred(self, tokens: int, reason: str) -> None:
        """Counts tokens whose prefetch was put off."""
        counter = self._deferred.get(reason)
        (counter or self._rows.deferred(reason)).add(tokens)

    def abandoned(self) -> None:
        """Books that nobody waits for any of them any more."""
        for request in list(self._remaining):
            self.finished(request, 0, None)

    def outstanding_unknown(self) -> None:
        """Ends the row of what is not settled: not all that settles it is told any more."""
        self._rows.outstanding = unread()

    def _settle(self, fulfilled: int, unfulfilled: int, reason: str | None) -> None:
        self._rows.outstanding.add(-(fulfilled + unfulfilled))
        self._rows.fulfilled.add(fulfilled)
        if unfulfilled:
            counter = self._unfulfilled.get(reason or Reason.OTHER)
            (counter or self._rows.unfulfilled(reason or Reason.OTHER)).add(unfulfilled)
