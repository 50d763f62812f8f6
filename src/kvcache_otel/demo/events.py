"""KV events: what a router is told of where prefixes are. Named as vLLM and SGLang name them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcache_otel.demo.pages import Page

MEDIA = {"device": "GPU", "host": "CPU_PINNED", "disk": "DISK"}
"""What the tiers are called on the wire."""


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Pages that are on a tier from now on, one after another."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    medium: str


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Pages that are on a tier no longer."""

    block_hashes: list[int]
    medium: str


Event = BlockStored | BlockRemoved


class EventLog:
    """What has happened since somebody asked for it last.

    Attributes:
        enabled: Whether anything is written down.
    """

    def __init__(self, *, enabled: bool) -> None:
        """Args:
        enabled: As the attribute.
        """
        self.enabled = enabled
        self._events: list[Event] = []

    def stored(self, tier: str, pages: Sequence[Page]) -> None:
        """Writes down that pages came to a tier: an event for each that do not follow upon the one before."""
        if not self.enabled:
            return
        begin = 0
        for end in range(1, len(pages) + 1):
            if end == len(pages) or pages[end].parent != pages[end - 1].hash:
                row, begin = pages[begin:end], end
                tokens = [token for page in row for token in page.tokens]
                hashes = [page.hash for page in row]
                self._events.append(BlockStored(hashes, row[0].parent, tokens, len(row[0].tokens), MEDIA[tier]))

    def removed(self, tier: str, hashes: Sequence[int]) -> None:
        """Writes down that pages are gone from a tier."""
        if self.enabled and hashes:
            self._events.append(BlockRemoved(list(hashes), MEDIA[tier]))

    def take(self) -> list[Event]:
        """Returns what has happened, and forgets it."""
        taken, self._events = self._events, []
        return taken
