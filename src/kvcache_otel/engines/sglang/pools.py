"""What the tiers hold, and each pool of them; a pool that will not say has no row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from kvcache_otel.record.outside import let_through

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvcache_otel.record.probe import CacheProbe


class PoolRows:
    """The rows of one pool, and how it is asked: by name, and anew each time, since others may replace its methods."""

    __slots__ = ("_probe", "_what", "evictable", "failed", "free", "pool", "rows", "size")

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
        self._what = f"the {name} pool of the {tier} tier"
        self.rows = probe.pool(tier, name)
        self.pool, self.size, self.free, self.evictable = pool, size, free, evictable
        self.failed = False

    def unknown(self, error: Exception) -> None:
        """Ends the rows, and says once why."""
        self.rows.forget()
        if not self.failed:
            self.failed = True
            self._probe.gauge_failed(self._what, error)


class TierRows(Protocol):
    """What a tier tells after every step."""

    @property
    def pools(self) -> Sequence[PoolRows]:
        """Its pools."""
        ...

    def hold(self) -> int | None:
        """Takes over how many blocks the tree holds there.

        Returns:
            The slots of its first pool that are free to be evicted; None where SGLang does not tell them from used
            ones.
        """
        ...


def settle(tiers: Iterable[TierRows]) -> None:
    """Takes over what tiers hold, blocks and pools. What a pool raises is its own trouble, and said once.

    All of it in one function: this runs in every step, when the processor has long forgotten the one before.
    """
    for tier in tiers:
        unused = tier.hold()
        for pool in tier.pools:
            asked, evictable = pool.pool, pool.evictable
            try:
                limit, free = getattr(asked, pool.size), getattr(asked, pool.free)()
                pool.rows.settle(limit, free, unused if evictable is None else evictable())
            except Exception as error:
                let_through(error)
                pool.unknown(error)
                continue
            if pool.failed:
                pool.failed = False
