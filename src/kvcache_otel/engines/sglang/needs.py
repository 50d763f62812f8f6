"""What hooks a gauge needs. Where one of them is not there, or has missed something, its row ends: it would be wrong.

A counter needs none of this. It says less where a hook is missing; `doctor` says what, and `kvcache.telemetry.errors`
how often.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Set

_RESIDENT_HOST = frozenset({"cache.backup", "cache.backup_ack", "component.free_host", "cache.reset"})
_INSERT_HOST = {"rust": "rust_core.insert_host", "python": "core.insert_host"}

BACKUP = frozenset({"transfer.backup", "cache.backup_ack", "cache.retract", "cache.reset"})
"""What says how many backups are active."""

LOAD_BACK = frozenset({"transfer.load_back", "cache.load_back_ack", "cache.restore", "cache.reset"})
"""What says how many load-backs are active."""

OUTSTANDING = frozenset(
    {
        "prefetch.hit",
        "prefetch.resolved",
        "prefetch.covered",
        "prefetch.finished",
        "prefetch.discarded",
        "cache.reset",
        "storage.detach",
    }
)
"""What says how much of what storage had is not settled."""

READ = frozenset({"storage.read", "storage.detach"})
"""What says how many reads from storage are active, and that there is none any more."""

WRITE = frozenset({"storage.write", "storage.detach"})
"""The same of writes."""

PUBLISHED = frozenset({"cache.take_events"})
"""What says what the KV events add up to."""


def resident_host(core: str) -> Set[str]:
    """Returns what says how many blocks the host tier holds.

    Args:
        core: The tree core, ``rust`` or ``python``.
    """
    return _RESIDENT_HOST | {_INSERT_HOST[core]}


def settling(*, hicache: bool) -> str:
    """Returns the hook that says in every step what the tiers hold.

    Args:
        hicache: Whether the cache has tiers below the device.
    """
    return "cache.check_events" if hicache else "scheduler.batch_done"
