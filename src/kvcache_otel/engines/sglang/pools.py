"""One pool of one tier, asked for what it holds; a pool that will not say has no row."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcache_otel.record.probe import CacheProbe


class PoolRows:
    """The rows of one pool."""

    def __init__(
        self,
        probe: CacheProbe,
        tier: str,
        name: str,
        limit: Callable[[], int],
        free: Callable[[], int],
        evictable: Callable[[], int] | None = None,
    ) -> None:
        """Args:
        probe: The cache's probe.
        tier: The tier that the pool belongs to.
        name: The catalogue's name of it.
        limit: Gives its size, in tokens.
        free: Gives the slots that hold nothing.
        evictable: Gives the slots that are free to be evicted; None where SGLang does not tell them from used ones.
        """
        self._probe = probe
        self._rows = probe.pool(tier, name)
        self._limit, self._free, self._evictable = limit, free, evictable
        self._what = f"the {name} pool of the {tier} tier"
        self._failed = False

    def settle(self) -> None:
        """Takes over what the pool holds now. What raises here is the pool's own trouble, and said once."""
        try:
            limit, free = self._limit(), self._free()
            evictable = None if self._evictable is None else self._evictable()
        except Exception as error:
            self._unknown(error)
            return
        self._failed = False
        self._rows.settle(limit, free, evictable)

    def _unknown(self, error: Exception) -> None:
        self._rows.forget()
        if not self._failed:
            self._failed = True
            self._probe.gauge_failed(self._what, error)
