"""What vLLM's configuration says about a cache: its name, its rank, its tiers and what a chunk holds."""

from __future__ import annotations

from typing import Any

from kvcache_otel.identity import Identity, Rank
from kvcache_otel.semconv import Engine, Pool, Tier, TimingSource

# vLLM's CacheHitSource. What it calls external_unspecified came from a connector that does not say from which tier.
_TIER_BY_SOURCE = {"device": Tier.DEVICE, "host": Tier.HOST, "disk": Tier.DISK, "p2p": Tier.PEER}

# Before 0.32 a tier has no cache_hit_source, only its type.
_TIER_BY_TYPE = {"fs": Tier.DISK, "obj": Tier.DISK, "p2p": Tier.PEER, "example": Tier.HOST}

_KIND_OF_SPEC = {"SlidingWindow": Pool.SWA, "Mamba": Pool.MAMBA}


def tier_of_source(source: Any) -> str:
    """Returns the tier that vLLM's own name of a hit's source stands for."""
    return _TIER_BY_SOURCE.get(getattr(source, "value", source), Tier.UNKNOWN)


def tier_of_secondary(tier: Any) -> str:
    """Returns the tier that a secondary tier's manager stands for."""
    source = getattr(tier, "cache_hit_source", None)
    if source is not None:
        return tier_of_source(source)
    return _TIER_BY_TYPE.get(tier.tier_type, Tier.UNKNOWN)


def timing_of_secondary(tier: Any) -> str:
    """Returns where a secondary tier's transfer times come from.

    Tiers report what their I/O threads or their transport measured. The peer tier alone takes the time between its own
    messages for it.
    """
    return TimingSource.WALL_CLOCK if tier.tier_type == "p2p" else TimingSource.ENGINE_REPORT


def chunk_tokens(spec: Any) -> int | None:
    """Returns the tokens of one offloaded chunk, or None where the groups of layers do not agree on it."""
    sizes = {group.tokens_per_block for group in spec.config.groups}
    return sizes.pop() * spec.config.cache.blocks_per_chunk if len(sizes) == 1 else None


def announced_blocks(spec: Any) -> int:
    """Returns how many blocks vLLM announces for each offloaded chunk.

    One, but where its events describe themselves: then all blocks of the device that are in it, of full attention. With
    several groups of layers it depends on the group, and nothing is said.
    """
    config = spec.kv_events_config
    described = config.enable_kv_cache_events and config.self_describing_kv_events
    return spec.config.cache.blocks_per_chunk if described and len(spec.config.groups) == 1 else 1


def offload_pool(spec: Any) -> str:
    """Returns the pool that an offloading spec's chunks belong to."""
    return Pool.KV if len(spec.config.groups) == 1 else Pool.ALL


def device_pool(kv_cache_config: Any) -> str:
    """Returns the pool that the device's blocks belong to: one kind of layer, or all of them together."""
    kinds = {_kind(type(group.kv_cache_spec).__name__) for group in kv_cache_config.kv_cache_groups}
    return kinds.pop() if len(kinds) == 1 else Pool.ALL


def _kind(spec_name: str) -> str:
    return next((pool for word, pool in _KIND_OF_SPEC.items() if word in spec_name), Pool.KV)


def scheduler_identity(spec: Any) -> Identity:
    """Returns who an offloading manager is: one for all ranks of its replica, so it speaks as the first of them."""
    return Identity(Engine.VLLM, type(spec).__name__, Rank(dp=spec.config.parallel.data_parallel_index))


def worker_identity(spec: Any) -> Identity:
    """Returns who a worker is. vLLM counts its ranks with tensor parallelism innermost, then context, then pipeline."""
    parallel = spec.config.parallel
    tp = parallel.rank % parallel.tp_size
    pp = parallel.rank // (parallel.tp_size * parallel.pcp_size) % parallel.pp_size
    return Identity(Engine.VLLM, type(spec).__name__, Rank(tp=tp, pp=pp, dp=parallel.data_parallel_index))


def worker_port(spec: Any) -> int:
    """Returns how far from the first Prometheus port a worker's is: its place among the workers of this machine."""
    parallel = spec.config.parallel
    replica = parallel.data_parallel_rank_local
    if replica is None:
        replica = parallel.data_parallel_index
    return replica * parallel.world_size + parallel.rank


def scheduler_port(spec: Any) -> int:
    """Returns how far from the first Prometheus port a scheduler's is: behind those of all workers.

    A scheduler in one process with its worker has the worker's, which comes to life before it.
    """
    parallel = spec.config.parallel
    return parallel.data_parallel_size * parallel.world_size + parallel.data_parallel_index
