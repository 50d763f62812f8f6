"""All rows of one cache, and the moments at which several of them change."""

from __future__ import annotations

import logging
import weakref
from typing import TYPE_CHECKING, Any

from kvcache_otel.engines.sglang import config, needs
from kvcache_otel.engines.sglang.device import DeviceRows
from kvcache_otel.engines.sglang.host import HostRows
from kvcache_otel.engines.sglang.pools import settle
from kvcache_otel.engines.sglang.storage import StorageRows
from kvcache_otel.engines.sglang.transfer import DirectionRows
from kvcache_otel.events.published import PublishedBooks
from kvcache_otel.semconv import Reason, Tier

if TYPE_CHECKING:
    from collections.abc import Set

    from kvcache_otel.record.probe import CacheProbe

_logger = logging.getLogger(__name__)

# The attribute under which a cache, and what belongs to it, carries its rows.
ROWS = "_kvcache_otel"

# What `PrefillAdder` sums over the requests that it has admitted to one batch, by the tier that served them. Those of
# retracted requests are left out of the hits by SGLang itself, and taken off what is computed here.
_ADMITTED = ("log_device_hit_tokens", "log_host_hit_tokens", "log_storage_hit_tokens")


class CacheRows:
    """What one of SGLang's caches tells. Kept by the cache, so the rows end with it.

    Attributes:
        device: The device tier.
        host: The host tier; None without HiCache.
        tiers: Both, or the one that there is; for `settle`.
        backup: Copies from device to host; None without HiCache.
        load_back: Copies from host to device; None without HiCache.
        storage: The storage backend; None while none is attached.
        published: What the cache's KV events add up to; None where it records none.
        policy: When the cache writes to the host, as it was when it was asked why tokens may be lost.
    """

    def __init__(self, probe: CacheProbe, cache: Any) -> None:
        """Args:
        probe: The cache's probe.
        cache: SGLang's UnifiedRadixCache, without the tiers below the device yet.
        """
        self._probe = probe
        self._served = probe.served(Tier.DEVICE)
        self.device = DeviceRows(probe, cache)
        self.host: HostRows | None = None
        self.backup: DirectionRows | None = None
        self.load_back: DirectionRows | None = None
        self.storage: StorageRows | None = None
        self._forgot_hits = False
        self.policy: str | None = None
        self._drops: tuple[str, ...] = ()
        self._storage_tier: str = Tier.UNKNOWN
        self._storage_facts = config.StorageFacts(hits=False, loads=False, skips=False)
        self.published = PublishedBooks(probe, Tier.DEVICE, holders=True) if config.publishes(cache) else None
        self._core = config.core(cache)
        self._rounds_up = config.rounds_up()
        self._said: set[str] = set()
        self._parts: list[weakref.ref[Any]] = []
        self._cache: weakref.ref[Any] = weakref.ref(cache)
        self.tiers: tuple[DeviceRows | HostRows, ...] = (self.device,)
        settle(self.tiers)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """A deep copy or a pickle of what carries these rows has none: they are about the one object."""
        return type(None), ()

    def belongs_to(self, *parts: Any) -> None:
        """Lets a cache, or parts of it, carry these rows: whoever is called by SGLang finds them there.

        Args:
            parts: SGLang's objects; None among them is left out.
        """
        for part in parts:
            if part is not None:
                setattr(part, ROWS, self)
                self._parts.append(weakref.ref(part))

    def end(self) -> None:
        """Takes the rows off the cache; they end when nobody else keeps them."""
        for reference in self._parts:
            part = reference()
            if part is not None and getattr(part, ROWS, None) is self:
                delattr(part, ROWS)

    def extend(self, cache: Any) -> None:
        """Adds the tiers below the device, all of them or none.

        Args:
            cache: The same cache, with HiCache set up.
        """
        probe, buffered = self._probe, getattr(cache, "buffer_pipeline", None) is not None
        host = HostRows(probe, cache)
        backup = DirectionRows(
            probe, cache, Tier.DEVICE, Tier.HOST, stream="device_to_host_stream", queued=not buffered
        )
        refused = probe.allocation_failures(Tier.DEVICE, Reason.LOAD)
        load_back = DirectionRows(
            probe, cache, Tier.HOST, Tier.DEVICE, stream="host_to_device_stream", queued=True, refused=refused
        )
        self.host, self.backup, self.load_back = host, backup, load_back
        self._served.tier(Tier.HOST)
        self.watch_drops(cache)
        self._storage_facts = config.storage_facts(cache)
        if self.published is not None:
            self.published = PublishedBooks(probe, Tier.DEVICE, Tier.HOST, holders=True)
        self.tiers = (self.device, host)
        settle(self.tiers)

    def attach_storage(self, controller: Any) -> None:
        """Adds a storage backend; whatever is attached already is detached."""
        self.detach_storage()
        self.storage = StorageRows(self._probe, controller, tells=self._storage_facts)
        if self._forgot_hits and self.storage.prefetches is not None:
            self.storage.prefetches.outstanding_unknown()  # The equation does not close any more.
        self._storage_tier = self.storage.tier
        self._served.tier(self._storage_tier)
        if (cache := self._cache()) is not None:
            self.watch_drops(cache)

    def detach_storage(self) -> None:
        """Ends the rows of the storage backend, if one is attached. What they have counted stays counted."""
        if self.storage is not None:
            self.storage.reset()
            prefetches = self.storage.prefetches
            self._forgot_hits = self._forgot_hits or (prefetches is not None and prefetches.forgot)
            self.storage = None

    def watch_drops(self, cache: Any) -> None:
        """Asks a cache why tokens may be lost: the write policy can be changed at run time."""
        self.policy = cache.cache_controller.write_policy
        before, self._drops = self._drops, config.drop_reasons(cache)
        self.device.watch_drops(self._drops)
        if set(before) - set(self._drops):
            _logger.warning(
                "kvcache: kvcache.dropped.tokens says less from now on: with the write policy %r SGLang does not count "
                "all that is lost",
                self.policy,
            )

    def admitted(self, adder: Any) -> None:
        """Counts what one `PrefillAdder` has admitted since it was asked last."""
        before: tuple[int, ...] = getattr(adder, "_kvcache_otel_admitted", (0, 0, 0, 0))
        if self._rounds_up:
            computed = before[0] + config.computed_last(adder)
        else:
            computed = adder.log_input_tokens - adder.reprocessed_log_input_tokens
        now = (computed, *(getattr(adder, name) for name in _ADMITTED))
        adder._kvcache_otel_admitted = now
        tiers = (Tier.NONE, Tier.DEVICE, Tier.HOST, self._storage_tier)
        for tier, tokens, counted in zip(tiers, now, before, strict=True):
            if tokens != counted:
                self._served.tier(tier).add(tokens - counted)

    def lose(self, lost: Set[str], failed: Set[str]) -> None:
        """Ends the gauges that would be wrong; see `needs`.

        Args:
            lost: The names of the hooks that see nothing.
            failed: The names of those that have missed something.
        """
        hooks = lost | failed
        if (settling := needs.settling(hicache=self.host is not None)) in hooks:
            for tier in self.tiers:  # Until the next step, if it sees that.
                tier.unknown()
            if settling in lost:
                self._ended("kvcache.usage, kvcache.limit and kvcache.resident.blocks", {settling})
                self.tiers = ()
        if self.host is not None and (needed := hooks & needs.resident_host(self._core)):
            self._ended("kvcache.resident.blocks of the host tier", needed)
            self.host.resident_unknown()
        if self.backup is not None and (needed := hooks & needs.BACKUP):
            self._ended("kvcache.transfer.active of backups", needed)
            self.backup.active_unknown()
        if self.load_back is not None and (needed := hooks & needs.LOAD_BACK):
            self._ended("kvcache.transfer.active of load-backs", needed)
            self.load_back.active_unknown()
        if self.storage is not None and (needed := hooks & needs.READ):
            self._ended("kvcache.transfer.active of reads from storage", needed)
            self.storage.reads_unknown()
        if self.storage is not None and (needed := hooks & needs.WRITE):
            self._ended("kvcache.transfer.active of writes to storage", needed)
            self.storage.writes_unknown()
        prefetches = None if self.storage is None else self.storage.prefetches
        if prefetches is not None and (needed := hooks & needs.OUTSTANDING):
            self._ended("kvcache.prefetch.outstanding.tokens", needed)
            prefetches.outstanding_unknown()
        if self.published is not None and (needed := hooks & needs.PUBLISHED):
            self._ended("kvcache.resident.blocks as published", needed)
            self.published = None

    def _ended(self, what: str, hooks: Set[str]) -> None:
        if what not in self._said:
            self._said.add(what)
            names = ", ".join(sorted(hooks))
            _logger.warning(
                "kvcache: no rows of %s: they would be wrong, since the hook %s has missed something", what, names
            )

    def reset(self) -> None:
        """Says that the cache was emptied, whatever was under way."""
        if self.host is not None:
            self.host.cleared()
        for copies in (self.backup, self.load_back):
            if copies is not None:
                copies.reset()
        if self.storage is not None:
            self.storage.reset()
        settle(self.tiers)
