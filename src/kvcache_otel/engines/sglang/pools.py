"""One pool of one tier, asked for what it holds; a pool that will not say has no row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
        pool: Any,
        *,
        size: str,
        free: str,
        evictable: Callable[[], int] | None = None,
    ) -> None:
        """Args:
        probe: The cache's probe.
        tier: The tier that the pool belongs to.
        name: The catalogue's name of it.
        pool: SGLang's pool, or what allocates in it.
        size: The attribute of it that says how large it is, in tokens.
        free: The method of it that says how many slots hold nothing.
        evictable: Says how many slots are free to be evicted; None where SGLang does not tell them from used ones.
        """
        self._probe = probe
        self._rows = probe.pool(tier, name)
        self._pool, self._size, self._free, self._evictable = pool, size, free, evictable
        self._what = f"the {name} pool of the {tier} tier"
        self._failed = False

    def settle(self) -> None:
        """Takes over what the pool holds now. What raises here is the pool's own trouble, and said once."""
        pool, evictable = self._pool, self._evictable
        try:  # By name, and asked anew each time: others may replace them.
            limit, free = getattr(pool, self._size), getattr(pool, self._free)()
            held = None if evictable is None else evictable()
        except Exception as error:
            self._unknown(error)
            return
        self._failed = False
        self._rows.settle(limit, free, held)

    def _unknown(self, error: Exception) -> None:
        self._rows.forget()
        if not self._failed:
            self._failed = True
            self._probe.gauge_failed(self._what, error)
