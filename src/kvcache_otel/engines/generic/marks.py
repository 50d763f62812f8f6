"""The decorator form: a method says itself what it tells. It costs nothing until an object is instrumented."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvcache_otel.engines.generic.classes import genuine
from kvcache_otel.engines.generic.facts import Fact

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    Function = TypeVar("Function", bound=Callable[..., Any])

_MARK = "__kvcache_otel__"


def measures(*facts: Fact) -> Callable[[Function], Function]:
    """Marks a method with what it tells, for `instrument_controller` and `instrument_tree_core`.

    Args:
        facts: What it tells.

    Returns:
        A decorator that returns the method itself.

    Raises:
        TypeError: There is none, or one of them is no fact; or what is marked is no method.

    Example:
        >>> class Controller:
        ...     @measures(Eviction(tokens=lambda freed, call: freed))
        ...     def make_room(self, tokens: int) -> int: ...
    """
    if not facts:
        raise TypeError("measures() needs at least one fact, as Backup(…) or Eviction(…) are")
    for fact in facts:
        if not isinstance(fact, Fact):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"{fact!r} is no fact, as Backup(…) or Eviction(…) are")

    def mark(method: Function) -> Function:
        if isinstance(method, type):
            raise TypeError(f"measures() marks methods, and {method.__name__} is a class")
        try:
            setattr(method, _MARK, facts)
        except (AttributeError, TypeError):
            raise TypeError(f"measures() marks methods, and a {type(method).__name__} takes no mark") from None
        return method

    return mark


def marked(kind: type) -> dict[str, tuple[Fact, ...]]:
    """Returns what the methods of a class tell that are marked, by their names.

    A mark holds for what a subclass puts in the method's place, unless that has one of its own.
    """
    found: dict[str, tuple[Fact, ...]] = {}
    for base in reversed(kind.__mro__):
        for name, there in list(vars(base).items()):
            defined = genuine(there)
            # A static method may carry it, or its function.
            for thing in (defined, _asked(defined, "__func__")):
                attributes = _asked(thing, "__dict__")
                facts = attributes.get(_MARK) if isinstance(attributes, Mapping) else None  # pyright: ignore
                if isinstance(facts, tuple):
                    found[name] = facts  # pyright: ignore[reportUnknownVariableType]
    return found


def _asked(thing: Any, name: str) -> Any:
    """Returns an attribute of whatever a class has, None where there is none, or asking for it fails."""
    try:
        return getattr(thing, name, None)
    except Exception:
        return None
