"""What a method was called with, for whoever reads a fact from it."""

from __future__ import annotations

import inspect
from types import MethodType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import SupportsIndex

    # How a fact is read: from what a method has returned and what it was called with.
    Read = Callable[[Any, "Call"], Any]
    # Or a value that is always so; None reads what was returned by its own attributes.
    Given = Read | SupportsIndex | Mapping[str, SupportsIndex] | str | None


class Parameters:
    """The parameters of a method, looked up once.

    Attributes:
        positions: Where each is among the positional arguments, the object itself left out.
        defaults: What it is where it is not given.
    """

    __slots__ = ("defaults", "positions")

    def __init__(self, method: Callable[..., Any]) -> None:
        """Args:
        method: The method, bound to its object.
        """
        self.positions: dict[str, int] = {}
        self.defaults: dict[str, Any] = {}
        try:
            parameters = _parameters(method)
        except Exception:  # One that is written in C may not say, and what stands for another may say anything.
            return
        for position, parameter in enumerate(parameters):
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
                self.positions[parameter.name] = position
            if parameter.default is not parameter.empty:
                self.defaults[parameter.name] = parameter.default


def _parameters(method: Callable[..., Any]) -> list[inspect.Parameter]:
    """Returns what a method takes: with a decorator around it, what that takes, which may give it more than it gets.

    Where the decorator's function begins as the method does, and says ``*args`` for the rest, the method knows better.
    """
    taken = list(inspect.signature(method, follow_wrapped=False).parameters.values())
    wrapped = getattr(method, "__wrapped__", None)
    if not callable(wrapped):
        return taken
    if isinstance(method, MethodType):
        wrapped = MethodType(wrapped, method.__self__)
    within = _parameters(wrapped)
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    names = [each.name for each in taken if each.kind not in variadic]
    same = names == [each.name for each in within[: len(names)]]
    return within if same and len(names) < len(taken) else taken


class Call:
    """One call of a method: its arguments, by name (``call.node``) or by position (``call[0]``).

    Attributes:
        self: The object whose method it is.
    """

    __slots__ = ("_args", "_kwargs", "_parameters", "self")

    def __init__(self, owner: Any, parameters: Parameters, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Args:
        owner: The object whose method it is.
        parameters: The method's.
        args: The positional arguments, the object itself left out.
        kwargs: The others.
        """
        self.self = owner
        self._parameters = parameters
        self._args = args
        self._kwargs = kwargs

    def __getitem__(self, position: int) -> Any:
        if position < len(self._args):
            return self._args[position]
        for name, place in self._parameters.positions.items():
            if place == position:
                return getattr(self, name)
        raise IndexError(f"the method was called with fewer arguments than {position + 1}")

    def __getattr__(self, name: str) -> Any:
        if name in self._kwargs:
            return self._kwargs[name]
        position = self._parameters.positions.get(name)
        if position is not None and position < len(self._args):
            return self._args[position]
        try:
            return self._parameters.defaults[name]
        except KeyError:
            raise AttributeError(f"the method was not called with {name!r}") from None
