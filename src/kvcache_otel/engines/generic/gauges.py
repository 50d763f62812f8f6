"""What a cache of one's own can be asked for, and the rows that are made of it.

A quantity is a number, the dotted name of an attribute (``"pool.free"``; what can be called is called), or a callable
of the object. It must be cheap, and harmless on another thread than the engine's: a length, a counter.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from kvcache_otel import semconv
from kvcache_otel.engines.generic import faults
from kvcache_otel.engines.generic.asking import Gauge, Quantity, Row, balance, first, second, third
from kvcache_otel.record.labels import printable
from kvcache_otel.semconv import State, View

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvcache_otel.engines.generic.rows import Rows
    from kvcache_otel.record.probe import CacheProbe
    from kvcache_otel.spec import MetricSpec


@dataclass(frozen=True, kw_only=True)
class PoolSize:
    """How large a pool is and how full, in tokens.

    Attributes:
        limit: Its size.
        free: What holds nothing.
        evictable: What is held and free to be evicted; None where the cache does not tell that from used or from free.
        at_once: In place of these: a callable of the object that returns limit, free and evictable, as they were at one
            moment. An engine that goes on while it is asked has moved something between one answer and the next.
    """

    limit: Quantity | None = None
    free: Quantity | None = None
    evictable: Quantity | None = None
    at_once: Callable[[Any], tuple[int, int, int]] | None = None

    def __post_init__(self) -> None:
        single = (self.limit, self.free, self.evictable)
        if self.at_once is None and (self.limit is None or self.free is None):
            raise TypeError("PoolSize needs limit= and free=, or at_once=")
        if self.at_once is not None and (any(one is not None for one in single) or not callable(self.at_once)):
            raise TypeError("at_once= is a callable that tells limit, free and evictable: give nothing else")
        numbers = [0 if one is None else one for one in single if not callable(one) and not isinstance(one, str)]
        if self.at_once is None and len(numbers) == len(single) and all(hasattr(one, "__float__") for one in numbers):
            limit, free, evictable = numbers
            if free + evictable > limit:
                raise ValueError(f"PoolSize: of limit={printable(limit)}, {printable(free + evictable)} are not used")


def _quantities() -> dict[Any, Any]:
    return {}


@dataclass(frozen=True, kw_only=True)
class Gauges:
    """What an object can be asked for.

    Attributes:
        resident: Distinct blocks held, by tier.
        block_size: Tokens in a block, by tier.
        pools: The pools' sizes, by tier and pool.
        active: Transfers under way, by source and destination tier, of an object that counts them itself.
    """

    resident: Mapping[str, Quantity] = field(default_factory=_quantities)
    block_size: Mapping[str, Quantity] = field(default_factory=_quantities)
    pools: Mapping[tuple[str, str], PoolSize] = field(default_factory=_quantities)
    active: Mapping[tuple[str, str], Quantity] = field(default_factory=_quantities)


def _check(gauges: Gauges) -> None:
    """Raises TypeError where something is not what it should be."""
    for what, like in (("resident", '{"device": "blocks"}'), ("block_size", '{"device": 16}')):
        faults.mapping(what, getattr(gauges, what), like)
    for what, like in (("pools", '{("device", "kv"): PoolSize(…)}'), ("active", '{("device", "host"): "copying"}')):
        for key in faults.mapping(what, getattr(gauges, what), like):
            words = printable(key)
            if not isinstance(key, tuple) or len(cast("tuple[Any, ...]", key)) != 2:
                raise TypeError(f"{what}= has two names in each key, as in {what}={like}, and not {words!r}")
    for key, size in gauges.pools.items():
        if not isinstance(size, PoolSize):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"pools: what is said of {key} must be a PoolSize(…), and not {printable(size)!r}")


def make_gauges(rows: Rows, owner: Any, gauges: Gauges) -> tuple[list[Gauge], list[tuple[str, str]]]:
    """Makes the rows of what an object can be asked for.

    Returns:
        The gauges, which end when they are let go, and what is missing: of which gauge, and why.

    Raises:
        ValueError: A tier or a pool was not declared, or what is active is counted already.
        TypeError: Something is not what it should be.
    """
    _check(gauges)
    made: list[tuple[Gauge, list[Row]]] = []

    def one(what: str, quantity: Quantity, spec: MetricSpec, labels: dict[str, str | int]) -> None:
        made.append((Gauge(rows.probe, what, owner, quantity), [Row(spec, labels, first)]))

    for tier, quantity in gauges.resident.items():
        rows.tiers.of(tier, "resident")
        labels: dict[str, str | int] = {semconv.KVCACHE_TIER: tier, semconv.KVCACHE_VIEW: View.HELD}
        one(f"blocks resident on {tier}", quantity, semconv.RESIDENT_BLOCKS, labels)
    for tier, quantity in gauges.block_size.items():
        rows.tiers.of(tier, "block_size")
        one(f"block size of {tier}", quantity, semconv.BLOCK_SIZE, {semconv.KVCACHE_TIER: tier})
    for (source, destination), quantity in gauges.active.items():
        rows.tiers.of(source, "active")
        rows.tiers.of(destination, "active")
        if (source, destination) in rows.directions:
            raise ValueError(f"active: transfers from {source} to {destination} are counted by a fact already")
        labels = {semconv.KVCACHE_SOURCE_TIER: source, semconv.KVCACHE_DESTINATION_TIER: destination}
        if (name := rows.tiers.name(source, destination)) is not None:
            labels[semconv.KVCACHE_TIER_NAME] = name
        one(f"transfers from {source} to {destination}", quantity, semconv.TRANSFER_ACTIVE, labels)
    for (tier, pool), size in gauges.pools.items():
        if pool not in rows.tiers.of(tier, "pools"):
            raise ValueError(f"pools: the pool {pool!r} of the {tier} tier was not declared")
        made.append(_pool(rows.probe, tier, pool, owner, size))

    missing: list[tuple[str, str]] = []
    living: list[Gauge] = []
    for gauge, parts in made:
        if why := gauge.missing():
            missing.append((gauge.what, why))
            continue
        living.append(gauge)
        for number, row in enumerate(parts):
            gauge.show(number, row)
    return living, missing


def _pool(probe: CacheProbe, tier: str, pool: str, owner: Any, size: PoolSize) -> tuple[Gauge, list[Row]]:
    labels: dict[str, str | int] = {semconv.KVCACHE_TIER: tier, semconv.KVCACHE_POOL: pool}
    state = semconv.KVCACHE_STATE
    parts = [
        Row(semconv.LIMIT, labels, first),
        Row(semconv.USAGE, {**labels, state: State.FREE}, second),
        Row(semconv.USAGE, {**labels, state: State.USED}, balance),
    ]
    evictable = Row(semconv.USAGE, {**labels, state: State.EVICTABLE}, third)
    what = f"the {pool} pool of {tier}"
    if size.at_once is not None:
        return Gauge(probe, what, owner, size.at_once, parts=3), [*parts, evictable]
    told = [quantity for quantity in (size.limit, size.free, size.evictable) if quantity is not None]
    return Gauge(probe, what, owner, *told), [*parts, evictable][: len(told) + 1]
