"""Caches of one's own: what a program calls to have its controllers, tree cores and transfers measured."""

from __future__ import annotations

import os
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

from kvcache_otel.engines.generic import faults, usual
from kvcache_otel.engines.generic.handle import Instrumented
from kvcache_otel.engines.generic.instrument import instrument
from kvcache_otel.engines.generic.rows import Tiers
from kvcache_otel.identity import Identity, Rank
from kvcache_otel.instrumentation import instrumentation
from kvcache_otel.record.labels import printable
from kvcache_otel.record.probe import CacheProbe
from kvcache_otel.record.recorder import Recorder
from kvcache_otel.record.timing import DEADLINE_S
from kvcache_otel.record.transfers import Transfers
from kvcache_otel.semconv import Engine, Pool, TimingSource

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from opentelemetry.metrics import MeterProvider

    from kvcache_otel.engines.generic.facts import Fact
    from kvcache_otel.engines.generic.gauges import Gauges
    from kvcache_otel.engines.generic.instrument import Methods
    from kvcache_otel.engines.generic.rows import Pools


# As the cells have it: what exporters cannot encode.
_TOO_MUCH = 1 << 63


def instrument_controller(
    controller: object,
    *,
    tiers: Mapping[str, Pools] | None = None,
    beside: Instrumented | None = None,
    methods: Methods | None = None,
    gauges: Gauges | None = None,
    names: Mapping[str, str] | None = None,
    cache: str | None = None,
    rank: Rank | None = None,
    deadline_s: float = DEADLINE_S,
    meter_provider: MeterProvider | None = None,
) -> Instrumented:
    """Has a cache controller measured: its methods are wrapped for this object, until it is gone or given back.

    Calls that are made by the object itself are seen too, but not those through a method that somebody took off the
    object before. Other objects of its class are not affected.

    Args:
        controller: The object; it is held weakly.
        tiers: The tiers that it has and the pools of each: ``{"device": "kv", "host": ("kv", "swa")}``. Rows for all of
            them exist from the start, at zero.
        beside: In place of tiers, names, cache and rank: the handle of another object of the same cache. What one
            begins the other may end.
        methods: What its methods tell. None for those that `measures` has marked; where none is, for those that the
            protocol `CacheController` names.
        gauges: What it can be asked for besides.
        names: The program's own names of secondary tiers, by the tier: ``{"disk": "file"}``.
        cache: What the cache is called in ``kvcache.cache.type``; None for the name of the object's class.
        rank: The rank that owns it; None for a cache that has no others.
        deadline_s: After how many seconds a transfer that does not end is counted and said.
        meter_provider: Where to export; None for the process's own provider, or what the ``OTEL_*`` variables say.

    Returns:
        The handle: what is attached, what is missing, and the way back.

    Raises:
        TypeError: It is a class, or cannot be wrapped at all; or something that is said of it is not what it should be.
        ValueError: It is instrumented already; or a tier, a pool or a reason was not declared or does not exist; or
            nothing of it would be measured.
    """
    return _instrument(
        controller,
        usual.controller,
        tiers=tiers,
        beside=beside,
        methods=methods,
        gauges=gauges,
        names=names,
        cache=cache,
        rank=rank,
        deadline_s=deadline_s,
        meter_provider=meter_provider,
    )


def instrument_tree_core(
    tree_core: object,
    *,
    tiers: Mapping[str, Pools] | None = None,
    beside: Instrumented | None = None,
    methods: Methods | None = None,
    gauges: Gauges | None = None,
    names: Mapping[str, str] | None = None,
    cache: str | None = None,
    rank: Rank | None = None,
    deadline_s: float = DEADLINE_S,
    meter_provider: MeterProvider | None = None,
) -> Instrumented:
    """Has a tree core measured; all as in `instrument_controller`, with the protocol `TreeCore`."""
    return _instrument(
        tree_core,
        usual.tree_core,
        tiers=tiers,
        beside=beside,
        methods=methods,
        gauges=gauges,
        names=names,
        cache=cache,
        rank=rank,
        deadline_s=deadline_s,
        meter_provider=meter_provider,
    )


def transfers(
    source: str,
    destination: str,
    *,
    cache: str,
    pools: Pools = Pool.KV,
    rank: Rank | None = None,
    name: str | None = None,
    timing: str = TimingSource.WALL_CLOCK,
    queued: bool = False,
    make_event: Callable[[], Any] | None = None,
    deadline_s: float = DEADLINE_S,
    meter_provider: MeterProvider | None = None,
) -> Transfers:
    """Returns the transfers from one tier to another, for a program that tells of them by itself.

    Args:
        source: The tier that is read.
        destination: The tier that is written.
        cache: What the cache is called in ``kvcache.cache.type``.
        pools: The pools whose tokens move.
        rank: As in `instrument_controller`.
        name: The program's own name of the secondary tier involved, where there is one.
        timing: Where most durations come from; see `Transfers`.
        queued: Whether the program says since when transfers were wanted.
        make_event: Makes an event with timing, for a device that torch does not know by name.
        deadline_s: As in `instrument_controller`.
        meter_provider: As in `instrument_controller`.

    Raises:
        ValueError: The catalogue does not have a tier, a pool or a kind of timing.
        TypeError: Something is not what it should be.
    """
    identity = _identity(cache, rank)

    def make_probe() -> CacheProbe:
        # Where nothing is measured it is told all the same, to nobody.
        return instrumentation.own_probe(identity, meter_provider) or CacheProbe(Recorder(identity), identity)

    made = Transfers(
        make_probe(),
        source,
        destination,
        pools=faults.names("pools=", pools),
        name=faults.text("name", name),
        timing=timing,
        queued=queued,
        make_event=make_event,
        deadline_s=deadline_s,
    )
    _made[made] = make_probe
    return made


# By whoever has them. A forked child has them too, and goes on with them: nobody reads there what the parent recorded.
_made: weakref.WeakKeyDictionary[Transfers, Callable[[], CacheProbe]] = weakref.WeakKeyDictionary()


def _forked() -> None:
    for made, make_probe in list(_made.items()):
        made.start_anew(make_probe)


os.register_at_fork(after_in_child=_forked)


def _instrument(
    owner: object,
    usual_facts: Callable[[Collection[str]], Mapping[str, Fact]],
    *,
    tiers: Mapping[str, Pools] | None,
    beside: Instrumented | None,
    methods: Methods | None,
    gauges: Gauges | None,
    names: Mapping[str, str] | None,
    cache: str | None,
    rank: Rank | None,
    deadline_s: float,
    meter_provider: MeterProvider | None,
) -> Instrumented:
    if beside is None:
        identity = _identity(type(owner).__name__ if cache is None else cache, rank)
        declared = Tiers({} if tiers is None else tiers, {} if names is None else names)
    elif any(given is not None for given in (tiers, names, cache, rank, meter_provider)):
        raise ValueError("beside= says already what tiers=, names=, cache=, rank= and meter_provider= would say")
    else:
        identity, declared = _same(beside)
    return instrument(
        owner,
        identity,
        lambda: instrumentation.own_probe(identity, meter_provider),
        tiers=declared,
        methods=methods,
        usual=usual_facts(declared.pools),
        gauges=gauges,
        deadline_s=deadline_s,
        beside=beside,
        unexported=partial(instrumentation.unexported, provided=meter_provider is not None)
        if beside is None
        else beside.unexported,
    )


def _same(beside: Instrumented) -> tuple[Identity, Tiers]:
    if not isinstance(beside, Instrumented):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"beside= must be what instrumenting another object returned, and not {printable(beside)!r}")
    if beside.tiers is None:
        raise ValueError(f"beside: {beside.identity.cache_type} is not instrumented any more")
    return beside.identity, beside.tiers


def _identity(cache: str, rank: Rank | None) -> Identity:
    if faults.text("cache", cache) is None:
        raise TypeError("cache= must be a name, and not None")
    if rank is None:
        rank = Rank()
    numbers = (rank.tp, rank.pp, rank.dp) if isinstance(rank, Rank) else (None,)  # pyright: ignore
    if not all(type(number) is int and 0 <= number < _TOO_MUCH for number in numbers):
        raise TypeError(f"rank= must be a Rank of numbers from 0 to 2**63 - 1, and not {printable(rank)}")
    return Identity(Engine.CUSTOM, cache, rank)
