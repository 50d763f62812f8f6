"""The instrumentation of one object: what is attached, what is missing, and the way back."""

from __future__ import annotations

import os
import sys
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

from kvcache_otel.engines.generic import classes, objects
from kvcache_otel.engines.generic.classes import attributes_of
from kvcache_otel.engines.generic.copied import ANCHOR
from kvcache_otel.engines.generic.gauges import make_gauges
from kvcache_otel.engines.generic.points import hook_names, make_point, watch
from kvcache_otel.engines.generic.rows import untold

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from kvcache_otel.engines.generic.facts import Fact
    from kvcache_otel.engines.generic.gauges import Gauges
    from kvcache_otel.engines.generic.rows import Rows, Tiers
    from kvcache_otel.identity import Identity
    from kvcache_otel.record.transfers import Transfers

# What Gauges are listed as, beside the names of methods.
GAUGE = "gauge"

# In the order in which they were made.
_living: weakref.WeakValueDictionary[int, Instrumented] = weakref.WeakValueDictionary()


class Measured(NamedTuple):
    """What is measured of an object.

    Attributes:
        name: The hook, which has its method's name; or `GAUGE`.
        what: What is measured, in words.
    """

    name: str
    what: str


class Missing(NamedTuple):
    """What cannot be measured of an object.

    Attributes:
        name: The hook, which has its method's name; or `GAUGE`.
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
        kind: The object's class.
        tiers: The cache's tiers; None where the object was given back, or is gone.
        measured: What is measured.
        missing: What cannot be measured, and why.
        unexported: Returns why nothing is exported, in one line; empty where something is.
    """

    def __init__(
        self,
        identity: Identity,
        kind: type,
        tiers: Tiers,
        missing: Iterable[Missing] = (),
        unexported: Callable[[], str] = lambda: "",
    ) -> None:
        """Args:
        identity: As the attribute.
        kind: As the attribute.
        tiers: As the attribute.
        missing: As the attribute.
        unexported: As the attribute.
        """
        self.identity = identity
        self.kind = kind
        self.tiers: Tiers | None = tiers
        self._declared = tiers
        self.measured: tuple[Measured, ...] = ()
        self.missing: tuple[Missing, ...] = tuple(missing)
        self.unexported = unexported
        self._owner: Callable[[], Any] = lambda: None
        self._rows: Rows | None = None
        self._untold: Rows | None = None  # Those that tell nobody.
        self._places: list[objects.Place] = []
        self._points: list[objects.ObjectPoint] = []
        self._gauges: object = ()  # Their rows end when they are let go.

    @property
    def attached(self) -> tuple[str, ...]:
        """The names of the hooks that are in place."""
        return tuple(point.hook.name for point in self._points if point.state == "attached")

    @property
    def unheard(self) -> dict[str, str]:
        """Of what is measured, the hooks that calls do not come by any more, and why: the engine has changed it."""
        by_name = {point.hook.name: why for point in self._points if (why := point.unheard())}
        return {item.name: by_name[item.name] for item in self.measured if item.name in by_name}

    @property
    def doubted(self) -> dict[str, str]:
        """Of what is measured, the hooks that calls may not come by any more, and why: the next one will tell."""
        by_name = {point.hook.name: why for point in self._points if (why := point.doubted())}
        return {item.name: by_name[item.name] for item in self.measured if item.name in by_name}

    @property
    def rows(self) -> Rows | None:
        """What its facts write to; None where it was removed, or nothing is measured in this process."""
        return self._rows

    def transfers(self, source: str, destination: str) -> Transfers:
        """Returns the transfers of one direction, to tell of some by hand: see `Transfers`.

        They tell nobody where nothing is measured in this process, or the instrumentation was removed: an engine is to
        run as it does otherwise.

        Raises:
            ValueError: A tier was not declared.
        """
        if self._rows is None:
            self._untold = self._untold or untold(self.identity, self._declared)
        rows = self._rows or self._untold
        assert rows is not None
        return rows.transfers(source, destination)

    def report(self) -> str:
        """Returns what is measured and what is not, in words, one line each; and why nothing is exported, if so."""
        rank = self.identity.rank
        lines = [f"{self.identity.cache_type}, rank tp={rank.tp} pp={rank.pp} dp={rank.dp}"]
        width = max((len(item.name) for item in (*self.measured, *self.missing)), default=0)
        by_name = {point.hook.name: point for point in self._points}
        for name, what in self.measured:
            point = by_name.get(name)
            state = "attached" if point is None else point.state
            words = (point and (point.why or point.unheard() or point.doubted())) or what
            lines.append(f"  {state:<9}  {name:<{width}}  {words}")
        lines += [f"  {'MISSING':<9}  {item.name:<{width}}  {item.why}" for item in self.missing]
        if self.missing:
            lines.append("  Not measured:")
            lines += [f"    - {what}" for what in dict.fromkeys(item.what for item in self.missing)]
        if self.tiers is not None and (why := self.unexported()):
            lines.append(f"  {why[0].upper()}{why[1:]}")
        return "\n".join(lines)

    def remove(self) -> None:
        """Gives the object back as it was, and ends its rows; a second call does nothing. Never raises."""
        owner = self._owner()
        if owner is not None:
            for place in reversed(self._places):
                place.clear(owner)
            if attributes_of(owner).get(ANCHOR) is self:
                del attributes_of(owner)[ANCHOR]
        self._end()

    def is_of(self, owner: object) -> bool:
        """Returns whether it is this object's, and not one that it was copied from."""
        return self._owner() is owner

    def __reduce__(self) -> Any:
        return type(None), ()  # A copy of the object, or one from a pickle, is not instrumented.

    def attach(
        self,
        owner: Any,
        rows: Rows,
        facts: Mapping[str, tuple[Fact, ...]],
        gauges: Gauges,
        found: Mapping[str, objects.Found | str],
    ) -> None:
        """Wraps the methods that there are, and makes the rows.

        Args:
            owner: The object.
            rows: What the facts write to.
            facts: The facts of each method.
            gauges: What else it can be asked for.
            found: Each method, or why there is none.

        Raises:
            ValueError: Somebody else has instrumented the object meanwhile.
        """
        self._owner = weakref.ref(owner, self._ending())
        self._claim(owner)
        self._rows = rows
        rows.keep()
        _living[id(self)] = self
        measured: list[Measured] = []
        missing: list[Missing] = []
        for name, several in facts.items():
            method = found[name]
            called = hook_names(name, several)
            points = [make_point(rows, owner, name, *each, method) for each in zip(called, several, strict=True)]
            place = method if isinstance(method, str) else self._put(owner, name, method, points)
            for point, fact in zip(points, several, strict=True):
                self._points.append(point)
                watch(rows, point, self)
                if isinstance(place, str):
                    point.why = place
                    missing.append(Missing(point.hook.name, fact.what, place))
                else:
                    point.put(place)
                    measured.append(Measured(point.hook.name, fact.what))
        if (hidden := objects.hide_from_copies(owner)) is not None:
            self._places.append(hidden)
        living, lacking = make_gauges(rows, owner, gauges)
        self._gauges = living
        self.measured = (*measured, *(Measured(GAUGE, gauge.what) for gauge in living))
        self.missing = (*missing, *(Missing(GAUGE, what, why) for what, why in lacking))

    def _claim(self, owner: Any) -> None:
        """Takes the object, or raises ValueError: of several threads that want it one gets it, without a lock."""
        attributes = attributes_of(owner)
        carried: Any = attributes.setdefault(ANCHOR, self)
        if carried is self:
            return
        if isinstance(carried, Instrumented) and carried.is_of(owner):
            raise ValueError(taken(owner))
        attributes[ANCHOR] = self  # It came along with a copy.

    def _put(
        self, owner: Any, name: str, method: objects.Found, points: list[objects.ObjectPoint]
    ) -> objects.Place | str:
        """Puts hooks around a method; returns why it cannot have them, in words."""
        try:
            place = objects.Place(owner, name, method, points)
        except Exception:
            return (
                f"{self.kind.__name__} lets nobody put anything in the place of {name}: "
                "instrument an object of a subclass, or tell of it from inside, with `transfers`"
            )
        if not place.is_seen(owner):
            place.clear(owner)
            return f"{self.kind.__name__} does not look {name} up on its class"
        self._places.append(place)
        return place

    def _ending(self) -> Callable[[object], None]:
        """Returns what is called when the object is gone, before what it refers to is let go."""
        this = weakref.ref(self)
        ending = sys.is_finalizing  # By then the modules may be empty, and nobody reads any more.

        def gone(_: object) -> None:
            if (alive := this()) is not None and not ending():
                alive._end()

        return gone

    def _end(self) -> None:
        for point in self._points:
            point.detach()
        rows, self._rows = self._rows, None
        if rows is not None:
            rows.release()
        self.tiers = None
        self._gauges = ()
        self._places = []
        _living.pop(id(self), None)


def taken(owner: object) -> str:
    """Returns that an object is instrumented already, in words."""
    return f"this {type(owner).__name__} is instrumented already: remove() what was returned then, first"


def living() -> list[Instrumented]:
    """Returns the instrumentations of all objects that there are, in the order in which they were made."""
    return list(_living.values())


def remove_all() -> None:
    """Gives every object back as it was."""
    for instrumented in living():
        instrumented.remove()
    classes.give_back_all()


# A forked child has the parent's objects, and nobody who would read what they tell. It may instrument them anew.
os.register_at_fork(after_in_child=remove_all)
