"""The host tier: what its pools and the tree hold there, and what is evicted from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcache_otel.engines.sglang import config
from kvcache_otel.engines.sglang.bounds import MOST, TooMany
from kvcache_otel.engines.sglang.pools import PoolRows
from kvcache_otel.record.cells import unread
from kvcache_otel.semconv import Reason, Tier, View

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvcache_otel.record.cells import Counter
    from kvcache_otel.record.probe import CacheProbe


class HostRows:
    """What one cache holds in host memory.

    Neither tree core says how much that is, and one of them cannot be walked. So it is booked where it changes: a
    backup makes a copy, which counts when it is there (SGLang announces it then); a prefetch puts one into the tree;
    and all slots that the tree gives up go through one function.

    Attributes:
        pools: Its pools there, but for those that ride on another's slots.
    """

    def __init__(self, probe: CacheProbe, cache: Any) -> None:
        """Args:
        probe: The cache's probe.
        cache: SGLang's UnifiedRadixCache, with its host pools.
        """
        self._probe = probe
        self._page = cache.page_size
        self._entries, self._riders = cache.host_pool_group.entries, cache.sidecar_pool_specs
        self.pools: list[PoolRows] = []
        self._known = 0
        self._resident = probe.resident(Tier.HOST, View.HELD)
        self._block_size = probe.block_size(Tier.HOST)
        self._block_size.set(self._page)
        self._evicted: dict[Any, Counter] = {
            component: probe.evictions(Tier.HOST, config.pool_of(component)) for component in cache.tree_components
        }
        self._refused = probe.allocation_failures(Tier.HOST, Reason.STORE)
        self._held = 0
        self._pending: dict[Any, int] = {}
        self._too_many = TooMany(probe, "backups")
        self.hold()

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
            if len(self._pending) >= MOST:
                self._too_many.forgotten(len(self._pending))
                self._pending.clear()
                self.resident_unknown()
            self._pending[node] = self._pending.get(node, 0) + asked

    def backup_done(self, nodes: Iterable[Any]) -> None:
        """Books copies that are there now, under what they were acknowledged."""
        if self._pending:
            for node in nodes:
                self._held += self._pending.pop(node, 0)

    def inserted(self, tokens: int) -> None:
        """Books what a prefetch put into the tree."""
        self._held += tokens

    def evicted(self, tokens: dict[Any, int]) -> None:
        """Counts what one eviction freed, by component."""
        for component, count in tokens.items():
            if count and component in self._evicted:
                self._evicted[component].add(count)

    def freed(self, runs: Iterable[Any]) -> None:
        """Books runs of slots that the tree has given up."""
        for run in runs:
            self._held -= run.numel()

    def cleared(self) -> None:
        """Books that the tree is empty."""
        self._held = 0
        self._pending.clear()

    def hold(self) -> None:
        """Takes over how many blocks the tree holds here, and pools that have come since the cache was built."""
        held = self._held // self._page
        if held != self._resident.value:
            self._resident.set(held)
        if len(self._entries) + len(self._riders) != self._known:
            self._learn()

    def unknown(self) -> None:
        """Ends what depends on being asked after every step, until it is asked again."""
        self._resident.set(None)
        for pool in self.pools:
            pool.rows.forget()

    def resident_unknown(self) -> None:
        """Ends the row of the blocks that the tree holds: not all that changes them is told any more."""
        self._resident = unread()

    def _learn(self) -> None:
        """Makes the rows of the pools that there are now; SGLang only ever adds some."""
        self._known = len(self._entries) + len(self._riders)
        riders = {config.pool_name(spec.pool_name) for spec in self._riders}
        # A pool that rides on another's slots gives none away, and is as full as that one; its own number would be 0.
        self.pools = [
            _pool(self._probe, entry) for entry in self._entries if config.pool_name(entry.name) not in riders
        ]


def _pool(probe: CacheProbe, entry: Any) -> PoolRows:
    # Which of the slots could be evicted SGLang does not say: what is not free is used.
    name = config.pool(entry.name)
    return PoolRows(probe, Tier.HOST, name, entry.host_pool, size="logical_size", free="available_size")
