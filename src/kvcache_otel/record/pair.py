"""A pair of device events around a copy, from being handed over to being read."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from kvcache_otel.record.cells import Histogram
    from kvcache_otel.record.doubts import Doubts


class DeviceEvent(Protocol):
    """A mark on a device's stream that knows when it was passed: `torch.cuda.Event` and its like, with timing."""

    def query(self) -> bool:
        """Returns whether the device has passed it, without waiting."""
        ...

    def elapsed_time(self, end: Any, /) -> float:
        """Returns the milliseconds from this event to a later one."""
        ...


class Outcome(Enum):
    """What has become of a pair that nobody asks any more."""

    READ = "read"
    """The device was done with it, and the time between its events is a sample."""
    UNTOLD = "untold"
    """It cannot be asked, or tells no time; whether the device is done with it is not known."""
    GIVEN_UP = "given up"
    """The device was not done with it in time."""


class Pair:
    """Two events around a copy.

    Attributes:
        before: The event before the copy, recorded on its stream.
        after: The event after it, on the same stream.
        duration: Where the seconds between the two go.
        added: When it was handed over, by `time.monotonic`.
        until: When it is given up, by the same clock.
        void: Whether its events were recorded again, so that their distance is not this copy's any more.
        told: The seconds between them as they were before that; None where the device was not done with them.
    """

    __slots__ = ("_doubts", "added", "after", "before", "duration", "told", "until", "void")

    def __init__(
        self, before: DeviceEvent, after: DeviceEvent, duration: Histogram, doubts: Doubts | None = None
    ) -> None:
        self.before = before
        self.after = after
        self.duration = duration
        self._doubts = doubts
        self.added = self.until = 0.0
        self.void = False
        self.told: float | None = None

    @property
    def doubts(self) -> Doubts | None:
        """What counts that it told no time; None where it is about no cache."""
        return self._doubts

    def settled(self, outcome: Outcome) -> None:
        """Hears what has become of it, once, on the harvester's thread."""
