"""A hook of one fact on one object's method: what it reads, and what is exported of it."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from kvcache_otel import semconv
from kvcache_otel.engines.generic.call import Call, Parameters
from kvcache_otel.engines.generic.copies import CopiesDone
from kvcache_otel.engines.generic.facts import Fact, caught, kept
from kvcache_otel.engines.generic.objects import Alike, Found, ObjectPoint
from kvcache_otel.engines.generic.stand_ins import stands_for
from kvcache_otel.engines.hooks import Hook

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvcache_otel.engines.generic.facts import Begin, Tell
    from kvcache_otel.engines.generic.rows import Rows
    from kvcache_otel.engines.hooks import Finish
    from kvcache_otel.identity import Identity
    from kvcache_otel.record.timing import Harvester


def hook_names(name: str, facts: Sequence[Fact]) -> list[str]:
    """Returns what the hooks of a method's facts are called: as the method, where it tells one fact only."""
    if len(facts) == 1:
        return [name]
    kinds = [type(fact).__name__ for fact in facts]
    earlier = [kinds[:number].count(kind) for number, kind in enumerate(kinds)]
    return [f"{name}.{kind}" + (f".{count + 1}" if count else "") for kind, count in zip(kinds, earlier, strict=True)]


def make_point(rows: Rows, owner: object, name: str, called: str, fact: Fact, method: Found | str) -> ObjectPoint:
    """Returns the hook of a fact.

    Args:
        rows: What the fact writes to.
        owner: The object.
        name: The method's name.
        called: What the hook is called.
        fact: The fact.
        method: The method, or why there is none: then the hook reads nothing, and has no rows but its own.
    """
    kind = type(fact).__name__
    moment = "around" if type(fact).begin is not Fact.begin else "after"
    hook = Hook(name=called, target=f":{name}", body=kind, fact=fact.what, moment=moment)
    labels: dict[str, str | int] = {semconv.KVCACHE_TELEMETRY_HOOK: called}
    point = ObjectPoint(
        hook,
        rows.probe.counter(semconv.TELEMETRY_ERRORS, labels),
        lambda aside: fact.lost(rows, aside=aside),
    )
    if isinstance(method, Found):
        point.reads(_body(rows, fact, weakref.ref(owner), Parameters(method.bound)))
    return point


def watch(rows: Rows, point: ObjectPoint, owner: object) -> None:
    """Has it exported whether a hook is in place, for as long as there is who has it.

    Several objects of one cache, or caches of one name, have one row: it is 1 where all of them have the hook. There is
    none while that cannot be told.

    Args:
        rows: The rows of its cache.
        point: The hook.
        owner: Who has it.
    """
    labels: dict[str, str | int] = {semconv.KVCACHE_TELEMETRY_HOOK: point.hook.name}
    this = weakref.ref(point)  # Its readers may keep the object, which keeps the owner.
    there = _alike.setdefault(rows.probe.harvester, WeakValueDictionary())
    point.alike = there.setdefault((rows.probe.identity, point.hook.name), Alike())
    point.alike.add(point)

    def attached() -> int | None:
        point = this()
        told = [] if point is None else point.alike.told()
        if not told or told[0] is not point:
            return None
        states = {each.state for each in told}
        return None if states <= {"attached", "waiting"} and "waiting" in states else int(states == {"attached"})

    rows.probe.observe(semconv.TELEMETRY_HOOK_ATTACHED, labels, attached, owner=owner)


# The hooks of one name in one cache, as long as there is one; whatever is recorded together has one harvester.
_alike: WeakKeyDictionary[Harvester, WeakValueDictionary[tuple[Identity, str], Alike]] = WeakKeyDictionary()


def _body(rows: Rows, fact: Fact, this: Callable[[], Any], parameters: Parameters) -> Callable[..., Any]:
    """Returns what reads a fact, as a hook calls it: with the object first among the arguments, or what stands for it.

    Who copies a bound method deeply has one with hooks of ours and another object: nothing is told of that.
    """
    if isinstance(fact, CopiesDone):
        fact = replace(fact, keys=kept(fact.keys or _itself))
    begin = fact.begin(rows)
    return _telling(fact.tell(rows), this, parameters) if begin is None else _beginning(begin, this, parameters)


def _itself(result: Any, _: Call) -> Any:
    return result


def _telling(tell: Tell, this: Callable[[], Any], parameters: Parameters) -> Callable[..., None]:
    def told(result: Any, first: Any, /, *args: Any, **kwargs: Any) -> None:
        if (owner := this()) is first or stands_for(first, owner):
            try:
                tell(result, Call(owner, parameters, args, kwargs))
            except BaseException as error:
                raise caught(error) from None

    return told


def _beginning(begin: Begin, this: Callable[[], Any], parameters: Parameters) -> Callable[..., Finish | None]:
    def begun(first: Any, /, *args: Any, **kwargs: Any) -> Finish | None:
        if (owner := this()) is not first and not stands_for(first, owner):
            return None
        try:
            return begin(Call(owner, parameters, args, kwargs))
        except BaseException as error:
            raise caught(error) from None

    return begun
