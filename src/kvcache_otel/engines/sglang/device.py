"""The device tier: what its pools hold, what is evicted from it and what is lost."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from kvcache_otel.engines.sglang import config
from kvcache_otel.engines.sglang.pools import PoolRows
from kvcache_otel.semconv import Pool, Tier, View

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvcache_otel.engines.hooks import Finish
    from kvcache_otel.record.cells import Counter
    from kvcache_otel.record.probe import CacheProbe


class DeviceRows:
    """What one cache holds on the device and loses from it.

    Attributes:
        pools: Its pools there.
    """

    def __init__(self, probe: CacheProbe, cache: Any) -> None:
        """Args:
        probe: The cache's probe.
        cache: SGLang's UnifiedRadixCache.
        """
        core = cache.tree_core
        self._probe = probe
        self._page = cache.page_size
        self._evictable, self._protected = core.full_evictable_size, core.full_protected_size
        self._resident = probe.resident(Tier.DEVICE, View.HELD)
        self._block_size = probe.block_size(Tier.DEVICE)
        self._block_size.set(self._page)
        self._passes = probe.eviction_passes(Tier.DEVICE)
        self._evicted = {
            component: probe.evictions(Tier.DEVICE, config.pool_of(component)) for component in cache.tree_components
        }
        # A pass counts as one, and is timed, where it frees slots of full attention, by SGLang as well.
        self._full = next(component for component in cache.tree_components if config.pool_of(component) == Pool.KV)
        self.pools = list(_pools(probe, cache))
        self._dropped: dict[str, Counter] = {}

    def watch_drops(self, reasons: tuple[str, ...]) -> None:
        """Says that there is a tier below, in which a copy can be missing, and why it may be."""
        self._dropped = {reason: self._probe.dropped(Tier.DEVICE, Pool.KV, reason) for reason in reasons}

    def hold(self) -> int:
        """Takes over how many blocks the tree holds here; returns the slots that are free to be evicted."""
        evictable = self._evictable()
        self._resident.value = (evictable + self._protected()) // self._page
        return evictable

    def unknown(self) -> None:
        """Ends what depends on being asked after every step, until it is asked again."""
        self._resident.set(None)
        for pool in self.pools:
            pool.rows.forget()

    def eviction(self, tracker: dict[Any, int]) -> Finish:
        """Says that an eviction pass begins; returns what hears of its end.

        Args:
            tracker: Where SGLang counts the slots that it frees, by component.
        """
        began = time.perf_counter()

        def ended(_: Any, __: BaseException | None) -> None:
            if tracker[self._full]:
                self._passes.record(time.perf_counter() - began)
            for component, tokens in tracker.items():
                if tokens:
                    self._evicted[component].add(tokens)

        return ended

    def dropped(self, tokens: int, reason: str, pool: str = Pool.KV) -> None:
        """Counts tokens that were destroyed with no copy left below."""
        if tokens > 0:
            counter = self._dropped.get(reason) if pool == Pool.KV else None
            (counter or self._probe.dropped(Tier.DEVICE, pool, reason)).add(tokens)


def _pools(probe: CacheProbe, cache: Any) -> Iterator[PoolRows]:
    allocator, core = cache.token_to_kv_pool_allocator, cache.tree_core
    size, free = ("size_full", "full_available_size") if cache.supports_swa() else ("size", "available_size")
    device = Tier.DEVICE
    yield PoolRows(probe, device, Pool.KV, allocator, size=size, free=free)
    if cache.supports_swa():
        size, free, evictable = "size_swa", "swa_available_size", core.swa_evictable_size
        yield PoolRows(probe, device, Pool.SWA, allocator, size=size, free=free, evictable=evictable)
    if cache.supports_mamba():
        states, evictable = cache.req_to_token_pool.mamba_allocator, core.mamba_evictable_size
        yield PoolRows(probe, device, Pool.MAMBA, states, size="size", free="available_size", evictable=evictable)
