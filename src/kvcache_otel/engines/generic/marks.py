"""The decorator form: a method says itself what it tells. It costs nothing until an object is instrumented."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

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
        TypeError: One of them is no fact.

    Example:
        >>> class Controller:
        ...     @measures(Eviction(tokens=lambda freed, call: freed))
        ...     def make_room(self, tokens: int) -> int: ...
    """
    for fact in facts:
        if not isinstance(fact, Fact):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"{fact!r} is no fact, as Backup(…) or Eviction(…) are")

    def mark(function: Function) -> Function:
        setattr(function, _MARK, facts)
        return function

    return mark


def marked(kind: type) -> dict[str, tuple[Fact, ...]]:
    """Returns what the methods of a class tell that are marked, by their names."""
    found: dict[str, tuple[Fact, ...]] = {}
    for name in dir(kind):
        defined: Any = inspect.getattr_static(kind, name, None)
        facts = getattr(getattr(defined, "__func__", defined), _MARK, None)
        if isinstance(facts, tuple):
            found[name] = facts  # pyright: ignore[reportUnknownVariableType]
    return found
