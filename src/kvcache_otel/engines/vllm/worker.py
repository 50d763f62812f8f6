"""Transfers between device and host, on the rank that does them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcache_otel.record.cells import unread
from kvcache_otel.semconv import ErrorType, Tier, TimingSource

if TYPE_CHECKING:
    from kvcache_otel.record.probe import CacheProbe


class DirectionRows:
    """One direction of one rank. vLLM times a transfer with the event pair that it records around the copy."""

    def __init__(self, probe: CacheProbe, *, store: bool) -> None:
        """Args:
        probe: The rank's probe.
        store: Whether it moves from device to host, or the other way.
        """
        source, destination = (Tier.DEVICE, Tier.HOST) if store else (Tier.HOST, Tier.DEVICE)
        self._route = probe.route(source, destination, timing=TimingSource.DEVICE_EVENT)
        self._failed = self._route.failures(ErrorType.OTHER)

    def submitted(self) -> None:
        """Counts a transfer as active."""
        self._route.active.add(1)

    def finished(self, results: list[Any]) -> None:
        """Counts the transfers that vLLM found finished; it read their events before it gave them back to its pool."""
        for result in results:
            self._route.active.add(-1)
            if not result.success:
                self._failed.add(1)
                continue
            self._route.finished.add(1)
            if result.transfer_size is not None and result.transfer_time is not None:
                self._route.moved.add(result.transfer_size)
                self._route.duration.record(result.transfer_time)

    def drained(self) -> None:
        """Says that nothing is active any more."""
        self._route.active.set(0)

    def unknown(self) -> None:
        """Ends the row of active transfers: not all that begins or ends is told any more."""
        self._route.active = unread()
