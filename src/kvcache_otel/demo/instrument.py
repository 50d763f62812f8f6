"""The cache as metrics: everything that telemetry knows of it, and nothing that the cache knows of telemetry.

Each line says which method tells a fact, and how to read it from what the method returns and is called with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import kvcache_otel as kv

if TYPE_CHECKING:
    from collections.abc import Callable

    from opentelemetry.metrics import MeterProvider

    from kvcache_otel.demo.cache import TieredCache
    from kvcache_otel.engines.generic.handle import Instrumented, Missing

UNFULFILLED = ("below_threshold", "host_capacity", "device_covered", "storage_transfer", "anchor_lost")
"""Why the disk's pages may not come to be of use; see `prefetch.Arrival`."""

LOSSES = {
    "device": ("host_pressure", "write_through_unbacked_eviction"),
    "host": ("pool_full",),
    "disk": ("pool_full",),
}
"""Why pages may be lost, by the tier that they leave."""

SKIPS = ("already_stored", "backpressure", "no_space")
"""Why pages may not be written to the disk."""

REFUSALS = (("device", "other"), ("device", "load"), ("host", "store"), ("host", "promotion"))
"""The tiers that may have no room, and for what."""

NAME = "file"
"""What the disk tier is called in ``kvcache.tier.name``."""


class Handle:
    """The instrumentation of one cache.

    Attributes:
        parts: That of the cache itself, its controller, its storage and its prefetcher.
    """

    def __init__(self, *parts: Instrumented) -> None:
        """Args:
        parts: As the attribute.
        """
        self.parts = parts

    @property
    def missing(self) -> tuple[Missing, ...]:
        """What cannot be measured, and why."""
        return tuple(missing for part in self.parts for missing in part.missing)

    def report(self) -> str:
        """Returns what is measured and what is not, in words."""
        return "\n".join(part.report() for part in self.parts)

    def uninstrument(self) -> None:
        """Gives the cache back as it was, and ends its rows; a second call does nothing."""
        for part in reversed(self.parts):
            part.remove()


def instrument(
    cache: TieredCache,
    meter_provider: MeterProvider | None = None,
    *,
    rank: kv.Rank | None = None,
    make_event: Callable[[], Any] | None = None,
) -> Handle:
    """Has a cache measured.

    Args:
        cache: The cache; it is held weakly.
        meter_provider: Where to export; None for the process's own provider, or what the ``OTEL_*`` variables say.
        rank: The rank that it is said to be of.
        make_event: Makes the events that time copies on its lane's stream; None for torch's.

    Returns:
        The handle, and the way back.

    Raises:
        ValueError: It is instrumented already.
    """
    size, size_bytes = cache.config.page_tokens, cache.config.page_bytes
    tiers = {"device": "kv", "host": "kv", **({"disk": "kv"} if cache.storage.pool.limit else {})}
    parts = [
        kv.instrument_tree_core(
            cache,
            tiers=tiers,
            names={"disk": NAME} if "disk" in tiers else None,
            rank=rank,
            methods=_cache_facts(cache),
            gauges=_gauges(tuple(tiers), size),
            meter_provider=meter_provider,
        )
    ]
    try:
        facts = _controller_facts(tuple(tiers), size, size_bytes, cache.lane.stream, make_event)
        parts.append(kv.instrument_controller(cache.controller, beside=parts[0], methods=facts))
        if "disk" in tiers:
            facts = _storage_facts(size, size_bytes)
            parts.append(kv.instrument_controller(cache.storage, beside=parts[0], methods=facts))
            parts.append(kv.instrument_controller(cache.prefetcher, beside=parts[0], methods=_prefetcher_facts(size)))
    except BaseException:
        Handle(*parts).uninstrument()
        raise
    return Handle(*parts)


def _cache_facts(cache: TieredCache) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "admit": kv.Admission(
            when=lambda admitted, _: admitted is not None,
            prompt=lambda admitted, _: admitted.prompt,
            served=lambda admitted, _: admitted.served,
        )
    }
    if cache.config.events:
        facts["publish"] = kv.Publication(when=lambda events, _: events, events=lambda events, _: events)
    return facts


def _controller_facts(
    tiers: tuple[str, ...], size: int, size_bytes: int, stream: Any, make_event: Callable[[], Any] | None
) -> dict[str, Any]:
    def pages(result: int, _: Any) -> int:
        return result * size

    # On a device these only launch copies. Where there is a stream, events on it tell how long they take.
    timed: dict[str, Any] = {"stream": stream, "make_event": make_event} if stream is not None else {}
    facts: dict[str, Any] = {
        "copy_to_host": kv.Backup(
            tokens=lambda _, call: len(call.device) * size,
            bytes=lambda _, call: len(call.device) * size_bytes,
            **timed,
        ),
        "copy_to_device": kv.LoadBack(
            tokens=lambda _, call: len(call.host) * size,
            bytes=lambda _, call: len(call.host) * size_bytes,
            **timed,
        ),
        "evict_device": kv.Eviction(tier="device", tokens=pages),
        "evict_host": kv.Eviction(tier="host", tokens=pages),
        "lose": [
            kv.Drop(
                tier=tier,
                when=lambda _, call, tier=tier: call.tier == tier,
                tokens=lambda _, call: call.pages * size,
                reason=lambda _, call: call.reason,
                reasons=LOSSES[tier],
            )
            for tier in tiers
        ],
        "refuse": [
            kv.AllocationFailure(
                tier=tier,
                reason=reason,
                when=lambda _, call, tier=tier, reason=reason: (call.tier, call.purpose) == (tier, reason),
            )
            for tier, reason in REFUSALS
            if reason != "promotion" or "disk" in tiers
        ],
    }
    if "disk" in tiers:
        facts |= _disk_facts(size)
    return facts


def _disk_facts(size: int) -> dict[str, Any]:
    return {
        "evict_disk": kv.Eviction(tier="disk", tokens=lambda pages, _: pages * size),
        "skip": [
            kv.SkippedStore(
                tier="disk",
                reason=reason,
                when=lambda _, call, reason=reason: call.reason == reason,
                blocks=lambda _, call: call.pages,
            )
            for reason in SKIPS
        ],
    }


def _prefetcher_facts(size: int) -> dict[str, Any]:
    return {
        "prefetch": kv.Prefetch(when=lambda fetch, _: fetch is not None, hit=lambda fetch, _: fetch.hit * size),
        "arrive": kv.HostInsert(
            loaded=lambda arrival, _: arrival.loaded * size,
            fulfilled=lambda arrival, _: arrival.fulfilled * size,
            unfulfilled=lambda arrival, _: {reason: pages * size for reason, pages in arrival.unfulfilled.items()},
            reasons=UNFULFILLED,
        ),
    }


def _storage_facts(size: int, size_bytes: int) -> dict[str, Any]:
    def copy(source: str, destination: str) -> kv.Copy:
        return kv.Copy(
            source=source,
            destination=destination,
            tokens=lambda _, call: len(call.job.pages) * size,
            bytes=lambda _, call: len(call.job.pages) * size_bytes,
            requested=lambda call: call.job.since,
        )

    return {"to_disk": copy("host", "disk"), "to_host": copy("disk", "host")}


def _gauges(tiers: tuple[str, ...], size: int) -> kv.Gauges:
    def held(tier: str) -> Callable[[TieredCache], int]:
        return lambda cache: cache.levels[tier].held

    def pool(tier: str) -> Callable[[TieredCache], tuple[int, int, int]]:
        def tokens(cache: TieredCache) -> tuple[int, int, int]:
            level = cache.levels[tier]
            return level.limit * size, level.free * size, level.evictable * size

        return tokens

    return kv.Gauges(
        resident={tier: held(tier) for tier in tiers},
        block_size=dict.fromkeys(tiers, size),
        pools={(tier, "kv"): kv.PoolSize(at_once=pool(tier)) for tier in tiers},
    )
