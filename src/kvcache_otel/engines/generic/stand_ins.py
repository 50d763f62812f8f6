"""What is found in the place of a method, on an object that is instrumented, where a bound method will not do."""

from __future__ import annotations

from types import MethodType
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvcache_otel.engines.hooks import HookPoint


class Wrapped:
    """One method of one object with hooks around it. The object's instrumentation keeps it, and nobody else does.

    Attributes:
        found: What is called, as the class or the object has it: another thing that is found there has no hooks.
        hooked: It with hooks around it, to be bound to the object; None where it is no function of its class.
        around: Hooks around whatever a stand-in stands for.
    """

    __slots__ = ("__weakref__", "around", "found", "hooked")

    def __init__(self, found: Any, function: Callable[..., Any] | None, points: Sequence[HookPoint]) -> None:
        """Args:
        found: As the attribute.
        function: What is to be bound to the object, without hooks; None where nothing can be.
        points: The hooks, the innermost first.
        """
        self.found = found
        self.hooked = None if function is None else _hooked(function, points)
        self.around = _hooked(_call_genuine, points)


def _hooked(function: Callable[..., Any], points: Sequence[HookPoint]) -> Callable[..., Any]:
    for point in points:
        function = point.wrap(function)
    return function


class StandIn:
    """A callable of the object's own, or whatever else it gives out as one of its methods.

    It is made for whoever asks, and keeps the object, as a bound method does. It is what it stands for in all that can
    be seen of it; only its calls are heard of.
    """

    __slots__ = ("_around", "_genuine", "_owner")

    def __init__(self, wrapped: Wrapped, owner: Any, genuine: Any) -> None:
        """Args:
        wrapped: The hooks.
        owner: The object.
        genuine: What it stands for.
        """
        _set_around(self, wrapped.around)
        _set_owner(self, owner)
        _set_genuine(self, genuine)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return _around(self)(self, *args, **kwargs)

    def __getattribute__(self, name: str) -> Any:
        genuine = _genuine(self)
        # As a function is pickled by its name, what stands for it is by what it stands for.
        return _Reduced(genuine) if name in ("__reduce__", "__reduce_ex__") else getattr(genuine, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_genuine(self), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(_genuine(self), name)

    def __eq__(self, other: object) -> bool:
        return _genuine(self) == (_genuine(other) if type(other) is StandIn else other)

    def __hash__(self) -> int:
        return hash(_genuine(self))

    def __repr__(self) -> str:
        return repr(_genuine(self))


class _Reduced:
    """Reduces a stand-in to what it stands for."""

    __slots__ = ("_genuine",)

    def __init__(self, genuine: Any) -> None:
        self._genuine = genuine

    def __call__(self, *_: Any) -> Any:
        return cast, (None, self._genuine)  # It returns the second, and everybody has it who may read a pickle.


# Past what stand-ins do when they are asked.
_slots: Any = vars(StandIn)
_around, _set_around = _slots["_around"].__get__, _slots["_around"].__set__
_owner, _set_owner = _slots["_owner"].__get__, _slots["_owner"].__set__
_genuine, _set_genuine = _slots["_genuine"].__get__, _slots["_genuine"].__set__


def _call_genuine(stand_in: StandIn, /, *args: Any, **kwargs: Any) -> Any:
    return _genuine(stand_in)(*args, **kwargs)


def is_hooked(bound: Any, wrapped: Wrapped) -> bool:
    """Returns whether what was found on an object is heard of."""
    if type(bound) is StandIn:
        return _around(bound) is wrapped.around
    return type(bound) is MethodType and bound.__func__ is wrapped.hooked


def stands_for(first: Any, owner: Any) -> bool:
    """Returns whether a call is one of an object.

    Args:
        first: What the hooks were called with in its place.
        owner: The object; None where it is gone.
    """
    return type(first) is StandIn and owner is not None and _owner(first) is owner
