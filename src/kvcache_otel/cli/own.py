"""Looks at a cache of the program's own: has it made, reads what was instrumented of it, and gives it back."""

from __future__ import annotations

import gc
import inspect
import os
import sys
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from kvcache_otel.cli.foreign_code import NO_MODULE, quiet, try_import
from kvcache_otel.cli.report import EngineReport, HookReport, failure, note, ok, reason, warning, words
from kvcache_otel.engines.generic.handle import GAUGE, Instrumented, living, remove_all
from kvcache_otel.export.provider import process_provider
from kvcache_otel.instrumentation import instrumentation
from kvcache_otel.record.probe import CacheProbe

if TYPE_CHECKING:
    from collections.abc import Sequence

    from opentelemetry.metrics import MeterProvider

    from kvcache_otel.cli.report import Finding
    from kvcache_otel.identity import Identity

    Asked = tuple[Identity, MeterProvider | None]

_ELSEWHERE = "run the doctor with the Python, and in the folder, of the program"
_NOT_WHEN_IMPORTED = (
    "the doctor imports it, and exports nothing meanwhile: put what runs the cache or reads its metrics under "
    'if __name__ == "__main__":'
)

# Objects that a thing is made of, as far as they are looked at.
_LOOKED_AT = 1_000_000


class Examined(NamedTuple):
    """What there is to say of a cache of the program's own.

    Attributes:
        reports: Each object of it, as if it were an engine.
        provided: Whether the program has a MeterProvider of its own for all of them.
    """

    reports: list[EngineReport]
    provided: bool


class Before(NamedTuple):
    """What there was before something was made.

    Attributes:
        handles: Objects that were instrumented.
        asked: How many caches had been asked for.
    """

    handles: list[Instrumented]
    asked: int


class Made(NamedTuple):
    """What was made, for as long as somebody keeps it.

    Attributes:
        thing: What it is.
        problem: Why there is none; None where there is.
        before: What there was before it was made; None where all that its module makes is meant.
    """

    thing: Any
    problem: Finding | None = None
    before: Before | None = None


def examine(target: str) -> Examined:
    """Returns what there is to say of a cache of the program's own. Nothing is exported, and nothing stays.

    Args:
        target: Where it is: a module that makes it when it is imported, or ``module:name`` of an object or of what
            makes one when it is called without arguments.
    """
    if (here := os.getcwd()) not in sys.path:  # As Python itself has it, when it runs a module.
        sys.path.insert(0, here)
    with quiet({}), instrumentation.rehearsal() as asked:
        try:
            made = _make(target, asked)
            handles, asked = _meant(made, asked)
            seen = {handle.identity for handle in handles}
            reports = [_report(handle) for handle in handles]
            alone = {identity: None for identity, _ in asked if identity not in seen}
            reports += [_unseen(identity.cache_type, made.thing) for identity in alone]
            if made.problem is not None:
                reports = [_nothing(target, made.problem)]
            elif not reports:
                remedy = "call kvcache_otel.instrument_controller or instrument_tree_core where it is made"
                if ":" not in target:  # It may be made by a function that nobody has called.
                    remedy = f"name what makes it, as in {words(target)}:NAME; or {remedy}"
                reports = [_nothing(target, failure(f"nothing of {words(target)} is instrumented", remedy))]
            provided = bool(asked) and (process_provider() is not None or all(provider for _, provider in asked))
        finally:
            remove_all()
    return Examined(reports, provided)


# -- making it ---------------------------------------------------------------------------------------------------------


def _make(target: str, asked: Sequence[Asked]) -> Made:
    """Returns what a target names, or what it makes when it is called."""
    module, _, name = target.partition(":")
    if module.endswith(".py") and os.path.isfile(module):
        return Made(None, _file(module, name))
    if not all(part.isidentifier() for part in module.split(".")) or (":" in target and not name):
        remedy = "name it as in an import, as in mypackage.module:make_cache"
        return Made(None, failure(f"{words(target)!r} names no module and nothing in one", remedy))
    if why := try_import(module):
        return Made(None, failure(why, _ELSEWHERE if why.startswith(NO_MODULE) else _NOT_WHEN_IMPORTED))
    thing: Any = sys.modules[module]
    try:
        for part in name.split(".") if name else ():
            thing = getattr(thing, part)
    except AttributeError:
        return Made(None, failure(f"{module} has no {words(name)}", "name what makes the cache, or the cache itself"))
    except Exception as error:  # A module may have code of its own for that.
        return Made(None, failure(f"asking {module} for {words(name)} fails: {reason(error)}"))
    if not name:
        return Made(thing)
    before = Before(living(), len(asked))
    if not callable(thing) or any(handle.is_of(thing) for handle in before.handles):
        return Made(thing, None, before)
    return _call(thing, target, before)


def _file(path: str, name: str) -> Finding:
    folder, file = os.path.split(path)
    where = ", in its folder" if folder else ""
    target = file.removesuffix(".py") + (name and f":{name}")
    return failure(f"{words(path)} is a file", f"name its module{where}, as in kvcache-otel doctor {words(target)}")


def _call(maker: Any, target: str, before: Before) -> Made:
    remedy = "name a function that takes none, makes the cache and returns it"
    try:
        inspect.signature(maker).bind()
    except TypeError as error:
        return Made(None, failure(f"{target} needs arguments: {words(error)}", remedy))
    except ValueError:  # It is written in C, and does not say.
        pass
    try:
        made = maker()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return Made(None, failure(f"{target} fails: {reason(error)}"))
    if inspect.iscoroutine(made):
        made.close()
        return Made(None, failure(f"{target} returns before the cache is made: it is a coroutine", remedy))
    return Made(made, None, before)


# -- what of it was meant ----------------------------------------------------------------------------------------------


def _meant(made: Made, asked: list[Asked]) -> tuple[list[Instrumented], list[Asked]]:
    """Returns the handles and caches that were made then, or that the thing has; the module may have others."""
    handles, before = living(), made.before
    if before is None:
        return handles, asked
    has = _within(made.thing)
    handles = [handle for handle in handles if handle in has or handle not in before.handles]
    identities = {one.identity for one in (*handles, *has)}
    return handles, [each for each in asked[: before.asked] if each[0] in identities] + asked[before.asked :]


def _within(thing: Any) -> list[Instrumented | CacheProbe]:
    """Returns the handles and probes that a thing refers to, however deep; not those of its class or its module."""
    found: list[Instrumented | CacheProbe] = []
    waiting, seen = [thing], {id(thing)}
    while waiting and len(seen) < _LOOKED_AT:
        one = waiting.pop()
        if isinstance(one, Instrumented | CacheProbe):
            found.append(one)
        elif one is thing or not isinstance(one, type | ModuleType | FunctionType):
            new = [each for each in gc.get_referents(one) if gc.is_tracked(each) and id(each) not in seen]
            seen.update(map(id, new))
            waiting += new
    return found


# -- what it means -----------------------------------------------------------------------------------------------------


def _report(handle: Instrumented) -> EngineReport:
    identity, kind = handle.identity, handle.kind
    place = f"{kind.__module__}:{kind.__qualname__}"
    unheard = handle.doubted | handle.unheard
    hooks = [
        HookReport(*_named(name, what, place), name not in unheard, unheard.get(name, ""), what, "")
        for name, what in handle.measured
    ]
    hooks += [HookReport(*_named(name, what, place), False, why, what, "") for name, what, why in handle.missing]
    title = kind.__name__ if kind.__name__ == identity.cache_type else f"{kind.__name__} of {identity.cache_type}"
    rank = identity.rank
    tiers = "" if handle.tiers is None else ", ".join(map(_tier, handle.tiers.pools.items()))
    about = ok(f"cache {identity.cache_type}, rank tp={rank.tp} pp={rank.pp} dp={rank.dp}, tiers {tiers}")
    return EngineReport(title, "", "full", hooks, [about, _count(hooks)], [])


def _named(name: str, what: str, place: str) -> tuple[str, str]:
    """Returns a hook's name and target. Gauges have no names but what they are about."""
    return (what, place) if name == GAUGE else (name, f"{place}.{name.partition('.')[0]}")


def _tier(tier: tuple[str, Sequence[str]]) -> str:
    return f"{tier[0]} ({', '.join(tier[1])})"


def _count(hooks: Sequence[HookReport]) -> Finding:
    attached = sum(hook.attached for hook in hooks)
    text = f"{attached} of {len(hooks)} hooks and gauges are attached"
    if not attached:
        return failure(text, "say what its methods tell, with methods=")
    return ok(text) if attached == len(hooks) else warning(text)


def _unseen(cache: str, made: Any) -> EngineReport:
    """What there is to say of a cache that was to be measured, and of which there is no object."""
    if isinstance(made, Instrumented) and made.tiers is None:
        return _nothing(cache, failure("its object is gone already", "return the object, and not its handle alone"))
    about = note("no object of it is there: its transfers are told by hand, or nobody keeps the object")
    return EngineReport(cache, "", "full", [], [about], [])


def _nothing(name: str, why: Finding) -> EngineReport:
    return EngineReport(words(name), "", "unknown", [], [why], [])
