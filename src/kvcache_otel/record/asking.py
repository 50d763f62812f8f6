"""What a thread asks its device just now, for others to see that it gets no answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcache_otel.record.pair import Pair
    from kvcache_otel.record.streams import Lane

# How long a device may take to say whether it is done. It is a matter of microseconds.
HUNG_S = 2.0

# Threads that wait for an answer beside the one that reads. Where there would be more, no stream of the driver answers.
AT_MOST_HUNG = 4


class Asking:
    """What one thread asks.

    Attributes:
        since: When its latest round of asking began, by `time.monotonic`.
        lane: The stream of the pair that it asks; None for one that has nothing to do with others.
        relieved: Whether another thread reads in its place: it ends when it has its answer.
    """

    __slots__ = ("_held", "lane", "relieved", "since")

    def __init__(self) -> None:
        self.since = 0.0
        self.lane: Lane | None = None
        self.relieved = False
        self._held: list[Pair] = []  # Whoever takes it out says what becomes of it.

    def hold(self, pair: Pair, lane: Lane | None) -> None:
        """Says that it asks a pair."""
        self.lane = lane
        self._held.append(pair)

    def claim(self) -> Pair | None:
        """Takes the pair that is asked, to say what becomes of it; None where somebody else has."""
        try:
            return self._held.pop()
        except IndexError:
            return None

    def has_hung(self, now: float) -> bool:
        """Returns whether it has waited for an answer for too long."""
        return bool(self._held) and now - self.since > HUNG_S

    def is_late(self, now: float) -> bool:
        """Returns whether the pair that it asks was to be read before now."""
        return any(pair.until < now for pair in self._held)
