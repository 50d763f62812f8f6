"""Counts what vLLM's structures hold by walking them, whatever its counters say."""

from __future__ import annotations

from typing import Any


def device_blocks(pool: Any) -> int:
    """How many hashes a block pool's blocks are cached under, each counted once, whatever its copies."""
    cached: set[Any] = set()
    for block in pool.blocks:
        if block.block_hash is not None:
            cached.add(block.block_hash)
        cached |= pool.cached_block_hashes_by_block.get(block.block_id, set())
    return len(cached)


def host_chunks(manager: Any) -> int:
    """How many chunks of an offloading manager's host tier are ready."""
    policy = getattr(manager, "primary_tier", manager)._policy
    lists = (policy.chunks,) if hasattr(policy, "chunks") else (policy.t1, policy.t2)
    return sum(chunk.is_ready for chunks in lists for chunk in chunks.values())
