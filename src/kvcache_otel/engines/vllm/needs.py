"""What hooks a gauge needs. Where one of them is not there, or has missed something, its row ends: it would be wrong.

A counter needs none of this. It says less where a hook is missing; `doctor` says what, and `kvcache.telemetry.errors`
how often.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple, Protocol
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from collections.abc import Callable, Set

_logger = logging.getLogger(__name__)


class Need(NamedTuple):
    """What some gauges need.

    Attributes:
        what: The gauges, in words.
        hooks: The names of the hooks.
        booked: Whether what was missed once stays wrong. Otherwise the next step puts it right.
    """

    what: str
    hooks: frozenset[str]
    booked: bool


DEVICE = Need(
    "kvcache.usage, kvcache.limit and kvcache.resident.blocks of the device tier",
    frozenset({"scheduler.update"}),
    booked=False,
)

HOST = Need(
    "kvcache.usage, kvcache.limit and kvcache.resident.blocks of the host tier",
    frozenset({"cpu.get_stats"}),
    booked=False,
)

SECONDARY = Need(
    "kvcache.transfer.active and kvcache.transfer.active.blocks of the secondary tiers",
    frozenset({"tiering.get_stats"}),
    booked=False,
)

COPIES = Need(
    "kvcache.transfer.active between device and host",
    frozenset({"worker.transfer_async", "worker.get_finished", "worker.shutdown"}),
    booked=True,
)

PUBLISHED = Need("kvcache.resident.blocks as published", frozenset({"publisher.publish"}), booked=True)


class Gauges(Protocol):
    """Rows that can end."""

    def unknown(self) -> None:
        """Ends the gauges among them for good."""


class Watch:
    """Ends gauges whose hooks cannot be relied upon."""

    def __init__(self) -> None:
        self._lost: Callable[[], Set[str]] = frozenset
        self._failed: Callable[[], Set[str]] = frozenset
        self._gauges: WeakKeyDictionary[Gauges, Need] = WeakKeyDictionary()

    def ask(self, lost: Callable[[], Set[str]], failed: Callable[[], Set[str]]) -> None:
        """Says who knows which hooks can be relied upon.

        Args:
            lost: Returns the names of those that see nothing.
            failed: Returns the names of those that have missed something.
        """
        self._lost, self._failed = lost, failed

    def add(self, gauges: Gauges, need: Need) -> None:
        """Watches gauges, for as long as somebody else keeps them."""
        self._gauges[gauges] = need
        self.look()

    def look(self) -> None:
        """Ends what cannot be right any more."""
        lost, failed = self._lost(), self._failed()
        for gauges, need in list(self._gauges.items()):
            if missing := need.hooks & (lost | failed if need.booked else lost):
                del self._gauges[gauges]
                gauges.unknown()
                _logger.warning(
                    "kvcache: no rows of %s: they would be wrong, since the hook %s has missed something",
                    need.what,
                    ", ".join(sorted(missing)),
                )
