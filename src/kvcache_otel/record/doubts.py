"""What there is to doubt about the numbers of one cache: counted beside them, with the same identity."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcache_otel.semconv import Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvcache_otel.identity import Identity
    from kvcache_otel.record.cells import Counter


class Doubts:
    """Contradictions in one cache's bookkeeping, and measurements of it that were given up.

    Attributes:
        identity: The cache's.
        wrong: The rows of ``kvcache.accounting.errors``, by reason.
        dropped: Those of ``kvcache.telemetry.dropped``, by reason.
    """

    __slots__ = ("_say", "dropped", "identity", "wrong")

    def __init__(self, identity: Identity, say: Callable[..., None]) -> None:
        """Args:
        identity: As the attribute.
        say: Says something once: of what kind it is, a message, and what to put into it.
        """
        self.identity = identity
        self.wrong: Mapping[str, Counter] = {}
        self.dropped: Mapping[str, Counter] = {}
        self._say = say

    def accounting_error(self, reason: str, times: int = 1) -> None:
        """Counts bookkeeping that contradicted itself, so many times."""
        self.wrong.get(reason, self.wrong[Reason.OTHER]).add(times)

    def lost(self, reason: str, times: int = 1) -> None:
        """Counts measurements that were given up."""
        self.dropped[reason].add(times)

    def refuse(self, amount: float) -> None:
        """Counts an amount that a cell could not take."""
        # Not a number is neither negative nor positive.
        self.accounting_error(Reason.NEGATIVE_DELTA if amount < 0 else Reason.OTHER)
        self._say("amount", "kvcache: an amount of %r was not added; see kvcache.accounting.errors", amount)

    def underflow(self, value: float) -> None:
        """Counts a quantity that a level could not take."""
        self.accounting_error(Reason.UNDERFLOW if value < 0 else Reason.OTHER)
        self._say("level", "kvcache: a level of %r was not taken; see kvcache.accounting.errors", value)
