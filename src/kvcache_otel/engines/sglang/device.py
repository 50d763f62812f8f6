"""The device tier: what its pools hold, what is evicted from it and what is lost."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from kvcache_otel.engines.sglang.pools import PoolRows
from kvcache_otel.semconv import Pool, Tier, View

if TYPE_CHECKING:
    from kvcache_otel.record.cells import Counter
    from kvcache_otel.record.probe import CacheProbe


class DeviceRows:
    """What one cache holds on the device and loses from it."""

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
        self._evicted = probe.evictions(Tier.DEVICE, Pool.KV)
        self._passes = probe.eviction_passes(Tier.DEVICE)
        self._pools = [PoolRows(probe, Tier.DEVICE, Pool.KV, *_kv(cache))]
        self._evicted_besides: dict[str, Counter] = {}
        if cache.supports_swa():
            self._pools.append(PoolRows(probe, Tier.DEVICE, Pool.SWA, *_swa(cache)))
            self._evicted_besides["swa_num_tokens_evicted"] = probe.evictions(Tier.DEVICE, Pool.SWA)
        if cache.supports_mamba():
            self._pools.append(PoolRows(probe, Tier.DEVICE, Pool.MAMBA, *_mamba(cache)))
            self._evicted_besides["mamba_num_evicted"] = probe.evictions(Tier.DEVICE, Pool.MAMBA)
        self._dropped: dict[str, Counter] = {}

    def watch_drops(self, reasons: tuple[str, ...]) -> None:
        """Says that there is a tier below, in which a copy can be missing, and why it may be."""
        self._dropped = {reason: self._probe.dropped(Tier.DEVICE, Pool.KV, reason) for reason in reasons}

    def hold(self) -> None:
        """Takes over how many blocks the tree holds here."""
        self._resident.value = (self._evictable() + self._protected()) // self._page

    def settle(self) -> None:
        """Takes over what the tree and the pools hold."""
        self.hold()
        for pool in self._pools:
            pool.settle()

    def pass_done(self, tokens: int, started: float) -> None:
        """Counts one eviction pass. SGLang counts none that freed nothing, and neither do we.

        Args:
            tokens: Slots freed.
            started: When it began, by `time.perf_counter`.
        """
        if tokens > 0:
            self._passes.record(time.perf_counter() - started)
            self._evicted.add(tokens)

    def evicted_besides(self, result: Any) -> None:
        """Counts what a pass freed in the pools beside that of full attention."""
        for name, counter in self._evicted_besides.items():
            counter.add(getattr(result, name))

    def dropped(self, tokens: int, reason: str, pool: str = Pool.KV) -> None:
        """Counts tokens that were destroyed with no copy left below."""
        if tokens > 0:
            counter = self._dropped.get(reason) if pool == Pool.KV else None
            (counter or self._probe.dropped(Tier.DEVICE, pool, reason)).add(tokens)


def _kv(cache: Any) -> tuple[Any, ...]:
    allocator, core = cache.token_to_kv_pool_allocator, cache.tree_core
    if cache.supports_swa():
        return lambda: allocator.size_full, lambda: allocator.full_available_size(), core.full_evictable_size
    return lambda: allocator.size, lambda: allocator.available_size(), core.full_evictable_size


def _swa(cache: Any) -> tuple[Any, ...]:
    allocator = cache.token_to_kv_pool_allocator
    return lambda: allocator.size_swa, lambda: allocator.swa_available_size(), cache.tree_core.swa_evictable_size


def _mamba(cache: Any) -> tuple[Any, ...]:
    allocator = cache.req_to_token_pool.mamba_allocator
    return lambda: allocator.size, lambda: allocator.available_size(), cache.tree_core.mamba_evictable_size
