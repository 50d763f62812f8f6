"""Whose rows there are, so that caches that are gone give their places to others.

What a cache has counted stays after it, as long as nobody needs the place: a counter that ends looks like one that has
started again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakSet

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvcache_otel.identity import Identity

Row = tuple[object, ...]
Key = tuple[object, ...]
"""What the rows of one cache have in common, as it is exported."""


class Places:
    """The rows of every cache. Used at set-up, under the recorder's lock."""

    __slots__ = ("_caches",)

    def __init__(self) -> None:
        self._caches: dict[Key, _Cache] = {}

    def keep(self, key: Key, identity: Identity, keeper: object) -> None:
        """Says who tells of a cache: when all who do are gone, so is the cache.

        Args:
            key: The cache.
            identity: Its identity. Several may be one when they are exported.
            keeper: Who tells of it; held weakly.
        """
        cache = self._caches.pop(key, None) or _Cache()
        self._caches[key] = cache  # Behind the others, which may be gone for longer.
        cache.identities.add(identity)
        if cache.keepers is None:
            cache.keepers = WeakSet()
        cache.keepers.add(keeper)

    def take(self, key: Key, name: str, row: Row) -> None:
        """Says that a cache has one more row of a metric."""
        self._caches.setdefault(key, _Cache()).rows.setdefault(name, []).append(row)

    def gone(self, name: str, is_told: Callable[[str, Row], bool]) -> Key | None:
        """Returns a cache that is gone and has rows of a metric; None where there is none.

        It is the one that is gone longest, but for those of which not all has been exported.

        Args:
            name: The metric.
            is_told: Returns whether all that a row of a metric has counted was exported.
        """
        untold: Key | None = None
        for key, cache in self._caches.items():
            if cache.is_gone and name in cache.rows:
                if all(is_told(metric, row) for metric, rows in cache.rows.items() for row in rows):
                    return key
                untold = untold or key
        return untold

    def give_back(self, key: Key) -> tuple[Mapping[str, list[Row]], set[Identity]]:
        """Forgets a cache; returns the rows that it had, by metric, and its identities."""
        cache = self._caches.pop(key)
        return cache.rows, cache.identities


class _Cache:
    """One cache.

    Attributes:
        keepers: Who tells of it; None for one that nobody was said to keep: its rows last.
        identities: Its identities.
        rows: Its rows, by metric.
    """

    __slots__ = ("identities", "keepers", "rows")

    def __init__(self) -> None:
        self.keepers: WeakSet[object] | None = None
        self.identities: set[Identity] = set()
        self.rows: dict[str, list[Row]] = {}

    @property
    def is_gone(self) -> bool:
        return self.keepers is not None and not self.keepers
