"""Counts what vLLM's structures hold by walking them, whatever its counters say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.kv_offload.base import get_offload_block_hash, get_offload_group_idx, make_offload_key

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


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
    return len(host_keys(manager))


def host_keys(manager: Any) -> list[Any]:
    """The keys of the chunks of an offloading manager's host tier that are ready."""
    policy = getattr(manager, "primary_tier", manager)._policy
    lists = (policy.chunks,) if hasattr(policy, "chunks") else (policy.t1, policy.t2)
    return [key for chunks in lists for key, chunk in chunks.items() if chunk.is_ready]


def disk_keys(root: Path) -> list[Any]:
    """The keys of the chunks that have a file, as vLLM's file-system tier calls it."""
    return [
        make_offload_key(bytes.fromhex(file.stem), int(file.parent.name.rpartition("_g")[2]))
        for file in root.glob("**/*.bin")
    ]


class Chunks:
    """Which blocks are in each chunk, as far as the engine's tracker of events has known at the end of some step.

    It forgets a chunk that leaves the host; its file stays. One that it does not know is announced as its last block,
    which is what its key says.
    """

    def __init__(self, tracker: Any) -> None:
        self._tracker = tracker
        self._blocks: dict[Any, tuple[Any, ...]] = {}

    def look(self) -> None:
        """Takes over what the tracker knows now."""
        self._blocks |= {key: found.block_hashes for key, found in self._tracker._pending_event_metadata.items()}

    def blocks(self, keys: Iterable[Any]) -> int:
        """How many distinct blocks there are in some chunks."""
        return len(
            {
                (get_offload_group_idx(key), block)
                for key in keys
                for block in self._blocks.get(key, (get_offload_block_hash(key),))
            }
        )
