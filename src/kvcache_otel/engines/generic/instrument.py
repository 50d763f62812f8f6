"""Instruments one object of somebody's: checks what is said of it, and wraps its methods."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

from kvcache_otel.engines.generic import faults, objects
from kvcache_otel.engines.generic.classes import attributes_of
from kvcache_otel.engines.generic.copied import ANCHOR
from kvcache_otel.engines.generic.copies import Copy
from kvcache_otel.engines.generic.facts import Fact
from kvcache_otel.engines.generic.gauges import Gauges, make_gauges
from kvcache_otel.engines.generic.handle import Instrumented, Missing, taken
from kvcache_otel.engines.generic.marks import marked
from kvcache_otel.engines.generic.rows import SAID, Rows, untold
from kvcache_otel.record.labels import printable
from kvcache_otel.record.timing import DEADLINE_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcache_otel.engines.generic.rows import Tiers
    from kvcache_otel.identity import Identity
    from kvcache_otel.record.probe import CacheProbe

Methods = Mapping[str, Fact | Sequence[Fact]]

_logger = logging.getLogger(__name__)


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
    unexported: Callable[[], str] = lambda: "",
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
        unexported: As in `Instrumented`.

    Raises:
        TypeError: It is a class, or cannot be held weakly and given attributes; or a fact is none.
        ValueError: It is instrumented already; or what is said of it names what was not declared, or nothing that it
            has.
    """
    kind: type[Any] = type(owner)  # pyright: ignore[reportUnknownVariableType]
    _check(owner)
    facts = _facts(owner, methods, usual)
    gauges = Gauges() if gauges is None else gauges
    if not isinstance(gauges, Gauges):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"gauges= must be Gauges(…), and not {printable(gauges)!r}")
    _rehearse(owner, identity, tiers, facts, gauges, deadline_s)
    found = {name: objects.find(owner, name) for name in facts}
    _check_found(owner, found, gauges)
    rows = _rows(make_probe, tiers, deadline_s) if beside is None else beside.rows
    if rows is None:
        why = "nothing is measured in this process; the log says why"
        missing = [Missing(name, fact.what, why) for name, all_ in facts.items() for fact in all_]
        return Instrumented(identity, kind, tiers, missing, unexported)
    made = Instrumented(identity, kind, tiers, unexported=unexported)
    try:
        made.attach(owner, rows, facts, gauges, found)
    except BaseException:
        made.remove()
        raise
    _say_unended(kind, identity, facts, rows)
    if made.missing:
        said = "; ".join(f"{item.name}: {item.why}" for item in made.missing)
        _say(kind, f"kvcache: {identity.cache_type}: not all is measured: {said}")
    return made


def _check_found(owner: Any, found: Mapping[str, objects.Found | str], gauges: Gauges) -> None:
    """Raises ValueError where an object has nothing of what is said of it. What cannot be wrapped is told by hand."""
    if gauges != Gauges() or not all(isinstance(method, objects.Absent) for method in found.values()):
        return
    kind = type(owner).__name__
    if not found:
        raise ValueError(f"nothing is said of {kind}: give methods= or gauges=, or mark its methods with measures()")
    whys = "; ".join(str(why) for why in found.values())
    raise ValueError(f"nothing of {kind} would be measured: {whys}. Say with methods= what its methods tell")


# What was said of the objects of each class: an engine may have thousands.
_said: WeakKeyDictionary[type, set[str]] = WeakKeyDictionary()


def _say(kind: type, words: str) -> None:
    """Says something of the objects of a class, once, and no more than a few things."""
    with suppress(Exception):  # A handler of somebody's that raises, or a class that cannot be remembered.
        said = _said.setdefault(kind, set())
        if words not in said and len(said) < SAID:
            said.add(words)
            _logger.warning("%s", words)


def _say_unended(kind: type, identity: Identity, facts: Mapping[str, tuple[Fact, ...]], rows: Rows) -> None:
    """Says which copies have a key by which nobody ends them. Another object of the cache, or a program, may later."""
    for name, several in facts.items():
        for fact in several:
            if isinstance(fact, Copy) and fact.key and (fact.source, fact.destination) not in rows.found_done:
                way = f"{fact.source} to {fact.destination}"
                _say(
                    kind,
                    f"kvcache: {identity.cache_type}: {name}: no CopiesDone so far says when copies from {way} have "
                    "ended that have a key=: until something does they stay active",
                )


def _rows(make_probe: Callable[[], CacheProbe | None], tiers: Tiers, deadline_s: float) -> Rows | None:
    probe = make_probe()
    return None if probe is None else Rows(probe, tiers, deadline_s)


def _check(owner: Any) -> None:
    if issubclass(_kind(owner), type):
        raise TypeError(f"{owner.__name__} is a class: instrument an object of it, after it was made")
    kind = type(owner).__name__
    if not objects.has_attributes(owner):
        raise TypeError(f"{kind} has no __dict__: its objects take no attributes, so nothing can be wrapped on them")
    try:
        weakref.ref(owner)
    except TypeError:
        raise TypeError(f"{kind} cannot be referred to weakly: give it a __weakref__ slot") from None
    carried = attributes_of(owner).get(ANCHOR)
    if isinstance(carried, Instrumented) and carried.is_of(owner):
        raise ValueError(taken(owner))


def _kind(owner: Any) -> type:
    """Returns an object's class: what a proxy stands for, where it says that well."""
    try:
        kind: Any = owner.__class__
    except Exception:
        kind = None
    return kind if isinstance(kind, type) else type(owner)  # pyright: ignore[reportUnknownVariableType]


def _facts(owner: Any, methods: Methods | None, usual: Mapping[str, Fact]) -> dict[str, tuple[Fact, ...]]:
    marks = marked(_kind(owner))
    if methods is None:
        chosen: dict[str, Any] = dict(marks or usual)
    else:
        chosen = {**marks, **faults.mapping("methods", methods, '{"evict": Eviction(…)}')}
    facts: dict[str, tuple[Fact, ...]] = {}
    for name, given in chosen.items():
        if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"methods= has names of methods, and {printable(name)!r} is none")
        several = tuple(cast("list[Any]", given)) if isinstance(given, list | tuple) else (given,)
        if not several and name not in marks:  # Where it is, this takes the mark away.
            raise ValueError(f"methods[{name!r}]: there is no fact, as Backup(…) or Eviction(…) are")
        for fact in several:
            if not isinstance(fact, Fact):
                raise TypeError(f"methods[{name!r}]: {printable(fact)!r} is no fact, as Backup(…) or Eviction(…) are")
            if fact.reads_attributes and type(usual.get(name)) is not type(fact):
                kind, needed = type(fact).__name__, "= and ".join(fact.REQUIRED)
                raise TypeError(f"methods[{name!r}]: {kind} does not say how to read it: give {needed}=")
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
    rows = untold(identity, tiers, deadline_s)
    for several in facts.values():
        for fact in several:
            if fact.begin(rows) is None:
                fact.tell(rows)
    make_gauges(rows, owner, gauges)
