"""Instruments one object of somebody's: wraps its methods, makes its rows, and gives it back as it was."""

from __future__ import annotations

import logging
import os
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from kvcache_otel import semconv
from kvcache_otel.engines.generic import objects
from kvcache_otel.engines.generic.call import Call, Parameters
from kvcache_otel.engines.generic.facts import Fact
from kvcache_otel.engines.generic.gauges import Gauges, make_gauges
from kvcache_otel.engines.generic.marks import marked
from kvcache_otel.engines.generic.rows import Rows
from kvcache_otel.engines.hooks import Hook
from kvcache_otel.record.probe import CacheProbe
from kvcache_otel.record.recorder import Recorder
from kvcache_otel.record.timing import DEADLINE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from kvcache_otel.engines.generic.facts import Begin, Tell
    from kvcache_otel.engines.generic.rows import Tiers
    from kvcache_otel.engines.hooks import HookPoint
    from kvcache_otel.identity import Identity
    from kvcache_otel.record.transfers import Transfers

    Methods = Mapping[str, Fact | Sequence[Fact]]

_logger = logging.getLogger(__name__)

# The attribute under which an object carries its instrumentation, which ends with it.
ANCHOR = "_kvcache_otel"

_living: weakref.WeakSet[Instrumented] = weakref.WeakSet()


class Missing(NamedTuple):
    """What cannot be measured of an object.

    Attributes:
        name: The method, or the gauge.
        what: What is not measured, in words.
        why: Why.
    """

    name: str
    what: str
    why: str


class Instrumented:
    """The instrumentation of one object. The object keeps it; who holds it does not keep the object.

    Attributes:
        identity: The cache and rank that its rows are about.
        tiers: The cache's tiers; None where the object was given back, or is gone.
        attached: The names of the hooks that are in place.
        missing: What cannot be measured, and why.
    """

    def __init__(self, identity: Identity, tiers: Tiers, missing: Iterable[Missing] = ()) -> None:
        """Args:
        identity: As the attribute.
        tiers: As the attribute.
        missing: As the attribute.
        """
        self.identity = identity
        self.tiers: Tiers | None = tiers
        self.attached: tuple[str, ...] = ()
        self.missing: tuple[Missing, ...] = tuple(missing)
        self._words: list[tuple[str, str]] = []
        self._owner: Callable[[], Any] = lambda: None
        self._rows: Rows | None = None
        self._places: list[objects.Place] = []
        self._points: list[HookPoint] = []
        self._gauges: Any = ()

    def transfers(self, source: str, destination: str) -> Transfers:
        """Returns the transfers of one direction, to tell of some by hand: see `Transfers.begin`.

        Raises:
            ValueError: A tier was not declared.
            RuntimeError: The instrumentation was removed, or nothing is measured in this process.
        """
        if self._rows is None:
            raise RuntimeError(f"{self.identity.cache_type} is not instrumented any more, or was not at all")
        return self._rows.transfers(source, destination)

    def report(self) -> str:
        """Returns what is measured and what is not, in words, one line each."""
        rank = self.identity.rank
        lines = [f"{self.identity.cache_type}, rank tp={rank.tp} pp={rank.pp} dp={rank.dp}"]
        width = max((len(name) for name, _ in [*self._words, *((item.name, "") for item in self.missing)]), default=0)
        by_name = {point.hook.name: point for point in self._points}
        for name, what in self._words:
            point = by_name.get(name)
            state = "attached" if point is None or point.state == "attached" else point.state
            lines.append(f"  {state:<9}  {name:<{width}}  {what if state == 'attached' else point and point.why}")
        lines += [f"  {'MISSING':<9}  {item.name:<{width}}  {item.why}" for item in self.missing]
        if self.missing:
            lines.append("  Not measured:")
            lines += [f"    - {what}" for what in dict.fromkeys(item.what for item in self.missing)]
        return "\n".join(lines)

    def remove(self) -> None:
        """Gives the object back as it was, and ends its rows; a second call does nothing. Never raises."""
        owner = self._owner()
        if owner is not None:
            for place in reversed(self._places):
                place.clear(owner)
            if objects.attributes_of(owner).get(ANCHOR) is self:
                del objects.attributes_of(owner)[ANCHOR]
        self._end()

    def is_of(self, owner: object) -> bool:
        """Returns whether it is this object's, and not one that it was copied from."""
        return self._owner() is owner

    def __reduce__(self) -> Any:
        return _nothing, ()  # A copy of the object, or one from a pickle, is not instrumented.

    def _end(self) -> None:
        for point in self._points:
            point.detach()
        rows, self._rows = self._rows, None
        if rows is not None:
            rows.release()
        self.tiers = None
        self._gauges = ()
        self._places = []
        self.attached = ()
        _living.discard(self)

    def attach(
        self, owner: Any, rows: Rows, facts: Mapping[str, tuple[Fact, ...]], gauges: Gauges, found: Mapping[str, Any]
    ) -> None:
        """Wraps the methods that there are, and makes the rows.

        Args:
            owner: The object.
            rows: What the facts write to.
            facts: The facts of each method.
            gauges: What else it can be asked for.
            found: Each method, or why there is none.
        """
        missing: list[Missing] = list(self.missing)
        this = weakref.ref(self)
        # Called when the object is gone, before what it refers to is let go.
        self._owner = weakref.ref(owner, lambda _: (alive := this()) and alive._end())  # type: ignore[func-returns-value]
        self._rows = rows
        rows.keep()
        _living.add(self)
        objects.attributes_of(owner)[ANCHOR] = self
        for name, several in facts.items():
            method = found[name]
            points = [_point(rows, name, fact, len(several) > 1) for fact in several]
            why = method
            if isinstance(method, objects.Found):
                for point, fact in zip(points, several, strict=True):
                    point.reads(_body(rows, fact, method.bound))
                place = objects.Place(owner, name, method, points)
                why = "" if place.is_seen(owner) else f"{type(owner).__name__} does not look {name} up on its objects"
                if why:
                    place.clear(owner)
                else:
                    self._places.append(place)
            for point, fact in zip(points, several, strict=True):
                self._points.append(point)
                _watch(rows, point, self)
                if why:
                    point.why = why
                    missing.append(Missing(point.hook.name, fact.WHAT, why))
                else:
                    point.placed(lambda: "attached", "")
                    self._words.append((point.hook.name, fact.WHAT))
        self.attached = tuple(name for name, _ in self._words)
        self._gauges, lacking = make_gauges(rows, owner, gauges)
        self._words += [("gauge", gauge.what) for gauge in self._gauges]
        self.missing = (*missing, *(Missing("gauge", what, why) for what, why in lacking))

    @property
    def rows(self) -> Rows | None:
        """What its facts write to; None where it was removed, or nothing is measured in this process."""
        return self._rows


def _nothing() -> None:
    """What the copy of an instrumentation is."""


def instrument(
    owner: Any,
    identity: Identity,
    make_probe: Callable[[], CacheProbe | None],
    *,
    tiers: Tiers,
    methods: Methods | None,
    usual: Mapping[str, Fact],
    gauges: Gauges | None,
    deadline_s: float = DEADLINE_S,
    beside: Instrumented | None = None,
) -> Instrumented:
    """Instruments one object.

    Args:
        owner: The object.
        identity: The cache and rank that its rows are about.
        make_probe: Gives the cache's probe; None where nothing is to be measured in this process.
        tiers: The tiers and their pools.
        methods: The facts of each method; None for those that are marked, or else those of the protocol.
        usual: The protocol's methods and their facts.
        gauges: What else the object can be asked for.
        deadline_s: As in `Rows`.
        beside: Another object of the same cache: they write to the same rows.

    Raises:
        TypeError: It is a class, or cannot be held weakly and given attributes; or a fact is none.
        ValueError: It is instrumented already; or what is said of it names what was not declared.
    """
    _check(owner)
    facts = _facts(owner, methods, usual)
    gauges = gauges or Gauges()
    _rehearse(owner, identity, tiers, facts, gauges, deadline_s)
    rows = _rows(make_probe, tiers, deadline_s) if beside is None else beside.rows
    if rows is None:
        why = "nothing is measured in this process; the log says why"
        missing = [Missing(name, fact.WHAT, why) for name, all_ in facts.items() for fact in all_]
        return Instrumented(identity, tiers, missing)
    made = Instrumented(identity, tiers)
    try:
        made.attach(owner, rows, facts, gauges, {name: objects.find(owner, name) for name in facts})
    except BaseException:
        made.remove()
        raise
    if made.missing:
        with suppress(Exception):
            said = "; ".join(f"{item.name}: {item.why}" for item in made.missing)
            _logger.warning("kvcache: %s: not all is measured: %s", identity.cache_type, said)
    return made


def _rows(make_probe: Callable[[], CacheProbe | None], tiers: Tiers, deadline_s: float) -> Rows | None:
    probe = make_probe()
    return None if probe is None else Rows(probe, tiers, deadline_s)


def _check(owner: Any) -> None:
    if isinstance(owner, type):
        raise TypeError(f"{owner.__name__} is a class: instrument an object of it, after it was made")
    kind = type(owner).__name__
    if not isinstance(getattr(owner, "__dict__", None), dict):
        raise TypeError(f"{kind} has no __dict__: its objects take no attributes, so nothing can be wrapped on them")
    try:
        weakref.ref(owner)
    except TypeError:
        raise TypeError(f"{kind} cannot be referred to weakly: give it a __weakref__ slot") from None
    carried = objects.attributes_of(owner).get(ANCHOR)
    if isinstance(carried, Instrumented) and carried.is_of(owner):
        raise ValueError(f"this {kind} is instrumented already: remove() what was returned then, first")


def _facts(owner: Any, methods: Methods | None, usual: Mapping[str, Fact]) -> dict[str, tuple[Fact, ...]]:
    if methods is None:
        chosen: dict[str, Any] = dict(marked(owner.__class__) or usual)
    else:
        chosen = {**marked(owner.__class__), **methods}
    facts: dict[str, tuple[Fact, ...]] = {}
    for name, given in chosen.items():
        several: tuple[Any, ...] = (given,) if isinstance(given, Fact) else tuple(given)
        for fact in several:
            if not isinstance(fact, Fact):
                raise TypeError(f"methods[{name!r}]: {fact!r} is no fact, as Backup(…) or Eviction(…) are")
        facts[name] = several
    return facts


def _rehearse(
    owner: Any,
    identity: Identity,
    tiers: Tiers,
    facts: Mapping[str, tuple[Fact, ...]],
    gauges: Gauges,
    deadline_s: float,
) -> None:
    """Makes all rows once where nobody reads them, so that what is wrong is said before anything is changed."""
    rows = Rows(CacheProbe(Recorder(identity), identity), tiers, deadline_s)
    for several in facts.values():
        for fact in several:
            if fact.begin(rows) is None:
                fact.tell(rows)
    make_gauges(rows, owner, gauges)


def _point(rows: Rows, name: str, fact: Fact, several: bool) -> objects.ObjectPoint:
    kind = type(fact).__name__
    called = f"{name}.{kind}" if several else name
    moment = "around" if type(fact).begin is not Fact.begin else "after"
    hook = Hook(name=called, target=f":{name}", body=kind, fact=fact.WHAT, moment=moment)
    labels: dict[str, str | int] = {semconv.KVCACHE_TELEMETRY_HOOK: called}
    return objects.ObjectPoint(
        hook,
        rows.probe.counter(semconv.TELEMETRY_ERRORS, labels),
        lambda aside: fact.lost(rows, aside=aside),
    )


def _body(rows: Rows, fact: Fact, method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns what reads a fact, as a hook calls it: with the object first among the arguments."""
    parameters = Parameters(method)
    begin: Begin | None = fact.begin(rows)
    if begin is not None:
        return lambda owner, *args, **kwargs: begin(Call(owner, parameters, args, kwargs))  # type: ignore
    tell: Tell = fact.tell(rows)
    return lambda result, owner, *args, **kwargs: tell(result, Call(owner, parameters, args, kwargs))  # type: ignore


def _watch(rows: Rows, point: objects.ObjectPoint, owner: Instrumented) -> None:
    labels: dict[str, str | int] = {semconv.KVCACHE_TELEMETRY_HOOK: point.hook.name}
    this = weakref.ref(owner)

    def attached() -> int | None:
        return None if this() is None or point.state == "detached" else int(point.state == "attached")

    rows.probe.observe(semconv.TELEMETRY_HOOK_ATTACHED, labels, attached, owner=owner)


def remove_all() -> None:
    """Gives every object back as it was."""
    for instrumented in list(_living):
        instrumented.remove()


# A forked child has the parent's objects, and nobody who would read what they tell. It may instrument them anew.
os.register_at_fork(after_in_child=remove_all)
