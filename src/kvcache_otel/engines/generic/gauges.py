"""What a cache of one's own holds, asked when somebody reads, on the reader's thread.

A quantity is a number, the dotted name of an attribute (``"pool.free"``; what can be called is called), or a callable
of the object. It must be cheap, and harmless on another thread than the engine's: a length, a counter.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvcache_otel import semconv
from kvcache_otel.semconv import Reason, State, View

if TYPE_CHECKING:
    from kvcache_otel.engines.generic.rows import Rows
    from kvcache_otel.record.probe import CacheProbe
    from kvcache_otel.spec import MetricSpec

Quantity = int | float | str | Callable[[Any], Any]

_INFINITY = float("inf")


@dataclass(frozen=True, kw_only=True)
class PoolSize:
    """How large a pool is and how full, in tokens.

    Attributes:
        limit: Its size.
        free: What holds nothing.
        evictable: What is held and free to be evicted; None where the cache does not tell that from used or from free.
    """

    limit: Quantity
    free: Quantity
    evictable: Quantity | None = None


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


class Gauge:
    """One quantity, or several that are asked together so that they fit, and the rows made of them.

    A quantity that cannot be told has no row; that is counted and said once, until it can be told again.
    """

    __slots__ = ("__weakref__", "_asked", "_below", "_failed", "_object", "_probe", "_values", "quantities", "what")

    def __init__(self, probe: CacheProbe, what: str, owner: Any, *quantities: Quantity) -> None:
        """Args:
        probe: The cache's probe.
        what: What it is, in words.
        owner: The object that is asked.
        quantities: What is asked for.
        """
        self._probe = probe
        self._object = weakref.ref(owner)
        self.what = what
        self.quantities = quantities
        self._failed = self._below = False
        self._values: tuple[float, ...] | None = None
        self._asked: set[int] = set()

    def missing(self) -> str:
        """Returns what the object lacks of what was named, in words; empty where it lacks nothing."""
        for quantity in self.quantities:
            if isinstance(quantity, str):
                try:
                    _walk(self._object(), quantity)
                except AttributeError as error:
                    return f"{type(self._object()).__name__} has no {quantity}: {error}"
                except Exception:  # It is there, and says what is wrong when it is asked.
                    return ""
        return ""

    def row(self, number: int, spec: MetricSpec, labels: dict[str, str | int], make: Callable[..., float]) -> None:
        """Adds a row.

        Args:
            number: Which row it is.
            spec: Its metric.
            labels: Its attributes.
            make: Makes its value of the quantities.
        """
        this = weakref.ref(self)  # The recorder must keep nothing alive that the object does not.

        def read() -> float | None:
            gauge = this()
            return None if gauge is None else gauge.read(number, make)

        self._probe.observe(spec, labels, read, owner=self)

    def read(self, number: int, make: Callable[..., float]) -> float | None:
        """Returns the value of one row. All rows that are read in one go are made of the same answers."""
        if self._values is None or number in self._asked:
            self._values = self._ask()
            self._asked.clear()
        self._asked.add(number)
        values = self._values
        if values is None:
            return None
        value = make(*values)
        if value < 0:
            if not self._below:
                self._below = True
                self._probe.accounting_error(Reason.CONSERVATION if len(values) > 1 else Reason.UNDERFLOW)
            return 0
        return value

    def _ask(self) -> tuple[float, ...] | None:
        owner = self._object()
        if owner is None:
            return None
        try:
            values = tuple(_number(ask(owner, quantity)) for quantity in self.quantities)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # As `Recorder` has it: it is not about the reader's thread.
            if not self._failed:
                self._failed = True
                self._probe.gauge_failed(self.what, error)
            return None
        self._failed = False
        if min(values, default=0) >= 0 and (len(values) == 1 or _balance(*values) >= 0):
            self._below = False
        return values


def _number(value: Any) -> float:
    number = value if type(value) in (int, float) else float(value)
    if not -_INFINITY < number < _INFINITY:
        raise ValueError(f"{number!r} is no quantity")
    return int(number) if isinstance(value, int) or float(number).is_integer() else number


def ask(owner: Any, quantity: Quantity) -> Any:
    """Returns a quantity of an object; raises whatever that raises."""
    if isinstance(quantity, str):
        found = _walk(owner, quantity)
        return found() if callable(found) else found
    return quantity(owner) if callable(quantity) else quantity


def _walk(owner: Any, path: str) -> Any:
    for name in path.split("."):
        owner = getattr(owner, name)
    return owner


def _balance(limit: float, free: float, evictable: float = 0) -> float:
    return limit - free - evictable


def make_gauges(rows: Rows, owner: Any, gauges: Gauges) -> tuple[list[Gauge], list[tuple[str, str]]]:
    """Makes the rows of what an object can be asked for.

    Returns:
        The gauges, which end when they are let go, and what is missing: of which gauge, and why.

    Raises:
        ValueError: A tier or a pool was not declared, or what is active is counted already.
    """
    made: list[tuple[Gauge, list[Any]]] = []

    def one(what: str, quantity: Quantity, spec: MetricSpec, labels: dict[str, str | int]) -> None:
        made.append((Gauge(rows.probe, what, owner, quantity), [(spec, labels, lambda value: value)]))  # type: ignore

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
        for number, (spec, labels, make) in enumerate(parts):
            gauge.row(number, spec, labels, make)
    return living, missing


def _pool(probe: CacheProbe, tier: str, pool: str, owner: Any, size: PoolSize) -> tuple[Gauge, list[Any]]:
    labels: dict[str, str | int] = {semconv.KVCACHE_TIER: tier, semconv.KVCACHE_POOL: pool}
    state = semconv.KVCACHE_STATE
    parts: list[Any] = [
        (semconv.LIMIT, labels, lambda limit, *_: limit),  # type: ignore
        (semconv.USAGE, {**labels, state: State.FREE}, lambda _, free, *__: free),  # type: ignore
        (semconv.USAGE, {**labels, state: State.USED}, _balance),
    ]
    quantities = [size.limit, size.free]
    if size.evictable is not None:
        quantities.append(size.evictable)
        parts.append((semconv.USAGE, {**labels, state: State.EVICTABLE}, lambda _, __, evictable: evictable))  # type: ignore
    return Gauge(probe, f"the {pool} pool of {tier}", owner, *quantities), parts
