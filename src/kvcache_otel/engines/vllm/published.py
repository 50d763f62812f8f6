"""What one engine publishes about its blocks, as it hands it to its publisher of KV events."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcache_otel.events.published import PublishedBooks
from kvcache_otel.semconv import Tier

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvcache_otel.record.probe import CacheProbe

# The one whose `publish` is hooked; what derives from it is called through it.
_PUBLISHER = "ZmqEventPublisher"


class PublishedRows:
    """What one scheduler's KV events add up to. Kept by its publisher, so the rows end with it.

    vLLM announces each copy of a block, and its "all blocks cleared" is about the device: it is sent when the prefix
    cache there was emptied, whatever became of the tiers below.
    """

    def __init__(self, probe: CacheProbe, manager: Any) -> None:
        """Args:
        probe: The scheduler's probe.
        manager: vLLM's offloading manager; None where there is none.
        """
        tiers = (Tier.DEVICE, *_announced(manager))
        self._books: PublishedBooks | None = PublishedBooks(probe, *tiers, copies=True, clears_device_only=True)

    def apply(self, batch: Any) -> None:
        """Takes over a batch that was handed to the publisher, whose thread may be reading it now."""
        if self._books is not None:
            self._books.apply(batch.events)

    def unknown(self) -> None:
        """Ends the rows of what is resident: not all that was published is known."""
        self._books = None


def publishes(publisher: Any) -> bool:
    """Returns whether a scheduler's publisher sends events, and lets itself be seen doing so."""
    return any(base.__name__ == _PUBLISHER for base in type(publisher).__mro__)


def _announced(manager: Any) -> Iterator[str]:
    """Yields the tiers below the device whose blocks an offloading manager announces: vLLM calls all but the host
    "STORAGE"."""
    if getattr(getattr(manager, "primary_tier", manager), "events", None) is not None:
        yield Tier.HOST
    if any(getattr(tier, "events", None) is not None for tier in getattr(manager, "secondary_tiers", ())):
        yield Tier.DISK
