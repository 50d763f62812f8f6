"""The device tier: vLLM's block pool, its prefix cache, and where a prompt was served from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcache_otel.engines.vllm import config
from kvcache_otel.semconv import Tier, View

if TYPE_CHECKING:
    from kvcache_otel.record.probe import CacheProbe


_COUNTED = "_kvcache_otel_counted"


class DeviceRows:
    """What one engine's device tier holds, loses and serves."""

    def __init__(self, probe: CacheProbe, scheduler: Any, tiers: tuple[str, ...]) -> None:
        """Args:
        probe: The process's probe.
        scheduler: vLLM's Scheduler, built.
        tiers: The tiers below the device that can serve a prompt.
        """
        pool = config.device_pool(scheduler.kv_cache_config)
        self._block_pool = scheduler.kv_cache_manager.block_pool
        self._connector = scheduler.connector
        self._tokens: int = scheduler.block_size
        self._served = probe.served(Tier.DEVICE, *tiers)
        self._pool = probe.pool(Tier.DEVICE, pool)
        self._evicted = probe.evictions(Tier.DEVICE, pool)
        self._resident = probe.resident(Tier.DEVICE, View.HELD)
        self._block_size = probe.block_size(Tier.DEVICE)
        self._block_size.set(self._tokens)
        self._known = True
        self.settle()

    def settle(self) -> None:
        """Takes over what the pool counts. vLLM keeps cached blocks that nobody uses among the free ones.

        Resident is what its events announce: a block's hash once for each group of layers that has it, however many
        copies there are.
        """
        if not self._known:
            return
        pool = self._block_pool
        blocks = pool.num_gpu_blocks - 1  # One is the null block, which holds nothing.
        self._pool.settle(blocks * self._tokens, pool.get_num_free_blocks() * self._tokens)
        self._resident.set(len(pool.cached_block_hash_to_block))

    def unknown(self) -> None:
        """Ends the gauges that depend on being set in every step: they are not any more."""
        self._known = False
        self._pool.forget()
        self._resident.set(None)

    def block_evicted(self) -> None:
        """Counts a cached block that made room."""
        self._evicted.add(self._tokens)

    def admitted(self, request: Any, local: int) -> None:
        """Counts an admitted request's prompt by the tier that served it; one that was preempted was counted before.

        Args:
            request: vLLM's Request.
            local: Tokens found in the device's prefix cache.
        """
        if request.num_preemptions > 0 or hasattr(request, _COUNTED):
            return
        setattr(request, _COUNTED, True)  # One whose load fails may be admitted again without being preempted.
        stats = request.prefill_stats
        external: int = stats.num_external_cached_tokens if stats is not None else 0
        served = {Tier.DEVICE: local}
        if external:
            served.update(self._sources(request, external))
        self._served.prompt(request.num_prompt_tokens, served)

    def _sources(self, request: Any, external: int) -> dict[str, int]:
        split = getattr(self._connector, "get_external_cache_hit_sources", None)  # Since 0.32.
        sources: dict[str, int] = {}
        if split is not None:
            for source, tokens in split(request, external).items():
                tier = config.tier_of_source(source)
                sources[tier] = sources.get(tier, 0) + tokens
        # As vLLM does it: a split that does not add up says nothing about the tiers.
        return sources if sum(sources.values()) == external else {Tier.UNKNOWN: external}
