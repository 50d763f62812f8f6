"""The host tier: what its pools and the tree hold there, and what is evicted from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcache_otel.engines.sglang import config
from kvcache_otel.engines.sglang.pools import PoolRows
from kvcache_otel.semconv import Pool, Reason, Tier, View

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvcache_otel.record.cells import Counter
    from kvcache_otel.record.probe import CacheProbe


class HostRows:
    """What one cache holds in host memory.

    Neither tree core says how much that is, and one of them cannot be walked. So it is booked where it changes: a
    backup makes a copy, which counts when it is there (SGLang announces it then); a prefetch puts one into the tree;
    and every slot that the tree gives up goes through one function.
    """

    def __init__(self, probe: CacheProbe, cache: Any) -> None:
        """Args:
        probe: The cache's probe.
        cache: SGLang's UnifiedRadixCache, with its host pools.
        """
        self._probe = probe
        self._page = cache.page_size
        self._entries, self._riders = cache.host_pool_group.entries, cache.sidecar_pool_specs
        self._pools: list[PoolRows] = []
        self._known = (0, 0)
        self._resident = probe.resident(Tier.HOST, View.HELD)
        self._block_size = probe.block_size(Tier.HOST)
        self._block_size.set(self._page)
        # SGLang names what it frees by component; blocks are those of full attention's.
        self._full = next(component for component in cache.tree_components if config.pool_of(component) == Pool.KV)
        self._evicted: dict[Any, Counter] = {
            component: probe.evictions(Tier.HOST, config.pool_of(component)) for component in cache.tree_components
        }
        self._refused = probe.allocation_failures(Tier.HOST, Reason.STORE)
        self._held = 0
        self._pending: dict[Any, int] = {}
        self._evicting = False
        self._hold()

    def backup_began(self, node: Any, slots: Any, asked: int) -> None:
        """Books the slots of a copy that is being made; nobody can use it yet.

        Args:
            node: What the backup will be acknowledged under.
            slots: The slots; None where there was no room.
            asked: Slots wanted.
        """
        if slots is None:
            self._refused.add(1)
        elif asked:
            self._pending[node] = self._pending.get(node, 0) + asked

    def backup_done(self, node: Any) -> None:
        """Books a copy that is there now."""
        self._held += self._pending.pop(node, 0)
        self._hold()

    def inserted(self, tokens: int) -> None:
        """Books what a prefetch put into the tree."""
        self._held += tokens
        self._hold()

    def eviction(self) -> Any:
        """Says that what is freed now is evicted; returns what ends that."""
        self._evicting = True
        return self._eviction_done

    def _eviction_done(self, _: Any, __: Any) -> None:
        self._evicting = False

    def freed(self, frees: dict[Any, Iterable[Any]]) -> None:
        """Books slots that the tree has given up.

        Args:
            frees: Runs of slots, by component.
        """
        for component, runs in frees.items():
            tokens = sum(map(len, runs))
            if not tokens:
                continue
            if self._evicting and component in self._evicted:
                self._evicted[component].add(tokens)
            if component == self._full:
                self._held -= tokens
                self._hold()

    def cleared(self) -> None:
        """Books that the tree is empty."""
        self._held = 0
        self._pending.clear()
        self._hold()

    def settle(self) -> None:
        """Takes over what the pools hold."""
        if self._known != (len(self._entries), len(self._riders)):
            self._learn()
        for pool in self._pools:
            pool.settle()

    def _learn(self) -> None:
        """Makes the rows of the pools that there are now; some come when the cache has been built."""
        self._known = (len(self._entries), len(self._riders))
        riders = {config.pool_name(spec.pool_name) for spec in self._riders}
        # A pool that rides on another's slots gives none away, and is as full as that one; its own number would be 0.
        self._pools = [
            _pool(self._probe, entry) for entry in self._entries if config.pool_name(entry.name) not in riders
        ]

    def _hold(self) -> None:
        self._resident.set(self._held // self._page)


def _pool(probe: CacheProbe, entry: Any) -> PoolRows:
    # Which of the slots could be evicted SGLang does not say: what is not free is used.
    host_pool = entry.host_pool
    return PoolRows(
        probe,
        Tier.HOST,
        config.pool(entry.name),
        lambda: host_pool.logical_size,
        lambda: host_pool.available_size(),
    )
