"""Methods wrapped on one object, not on its class, and given back as they were.

The stand-in of a method lies in the object's own attributes and knows the object weakly, as if it were not there: an
object that nobody else refers to goes at once, with what it holds, and need not wait for a garbage collection.
"""

from __future__ import annotations

import inspect
import weakref
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from kvcache_otel.engines.hooks import HookPoint

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvcache_otel.engines.hooks import Hook
    from kvcache_otel.record.cells import Counter

# The attribute under which an object carries its instrumentation, which ends with it.
ANCHOR = "_kvcache_otel"

_NOTHING = object()


class ObjectPoint(HookPoint):
    """A hook on one object. What it fails at is counted for good: the object may be gone before somebody reads."""

    __slots__ = ("__weakref__", "_bodies", "_failures")

    def __init__(self, hook: Hook, failures: Counter, lost: Callable[[bool], None]) -> None:
        """Args:
        hook: What it is.
        failures: Counts exceptions of ours that were caught.
        lost: Called when a call was missed for the first time, and when all further calls will be.
        """
        self._bodies: list[Callable[..., Any]] = []
        bodies = self._bodies
        super().__init__(hook, lambda _: bodies[0], lambda: lost(self.state == "aside"))
        self._failures = failures
        self.state, self.why = "missing", "it is not in its place"

    def reads(self, body: Callable[..., Any]) -> None:
        """Says what reads the fact."""
        self._bodies[:] = [body]

    def failed(self, error: Exception) -> None:
        """Counts a failure, as `HookPoint` does."""
        self._failures.add(1)
        super().failed(error)


class StandIn:
    """Takes a method's place on its object. A copy of the object, or one from a pickle, has its own method again.

    Attributes:
        before: What was in its place among the object's own attributes; `_NOTHING` where nothing was.
    """

    __slots__ = ("__weakref__", "_hooked", "_name", "_owner", "_plain", "before")

    def __init__(self, owner: Any, name: str, plain: Callable[..., Any], hooked: Callable[..., Any]) -> None:
        """Args:
        owner: The object.
        name: The method's name.
        plain: The method, as a function of the object and its arguments.
        hooked: The same with hooks around it.
        """
        self._owner = weakref.ref(owner)
        self._name = name
        self._plain = plain
        self._hooked = hooked
        self.before = attributes_of(owner).get(name, _NOTHING)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        owner = self._owner()
        if owner is None:
            raise ReferenceError(f"the object whose method {self._name} was called is gone: keep a name for it")
        return self._hooked(owner, *args, **kwargs)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return MethodType(self._plain, self._owner())

    @property
    def __self__(self) -> Any:
        return self._owner()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)

    def __reduce__(self) -> Any:
        return getattr, (self._owner(), self._name)


def reduce_plainly(owner: Any, protocol: Any) -> Any:
    """Takes the place of an object's `__reduce_ex__`: what copies and pickles it finds none of ours.

    A shallow copy would otherwise carry the stand-ins, and act on the object that it was copied from.
    """
    kind: Any = type(owner)  # pyright: ignore[reportUnknownVariableType]
    reduced: Any = kind.__reduce_ex__(owner, protocol)
    parts = cast("tuple[Any, ...]", reduced) if isinstance(reduced, tuple) else ()
    if len(parts) < 2:
        return cast("object", reduced)
    function, arguments, *rest = parts
    if isinstance(arguments, tuple):  # Some hand their attributes to a function of their own.
        arguments = tuple(map(_without_ours, cast("tuple[Any, ...]", arguments)))
    if not rest:
        return function, arguments
    state = rest[0]
    if isinstance(state, tuple) and len(slots := cast("tuple[Any, ...]", state)) == 2:  # With slots, they come second.
        state = _without_ours(slots[0]), slots[1]
    return function, arguments, _without_ours(state), *rest[1:]


def _without_ours(state: Any) -> Any:
    if not isinstance(state, dict):
        return state
    attributes = cast("dict[str, Any]", state)
    if not any(name == ANCHOR or isinstance(value, StandIn) for name, value in attributes.items()):
        return attributes
    plain = {name: value.before if isinstance(value, StandIn) else value for name, value in attributes.items()}
    return {name: value for name, value in plain.items() if value is not _NOTHING and name != ANCHOR}


def attributes_of(owner: object) -> dict[str, Any]:
    """Returns an object's own attributes, past whatever its class does when one is set."""
    return owner.__dict__


def has_attributes(owner: object) -> bool:
    """Returns whether an object has attributes of its own."""
    try:
        return isinstance(owner.__dict__, dict)  # pyright: ignore[reportUnnecessaryIsInstance]
    except Exception:  # A property of somebody's, or none at all.
        return False


class Found(NamedTuple):
    """A method that can be wrapped.

    Attributes:
        plain: The method, as a function of the object and its arguments.
        bound: The method as it is found on the object.
    """

    plain: Callable[..., Any]
    bound: Callable[..., Any]


def find(owner: Any, name: str) -> Found | str:
    """Returns a method of an object, or why there is none that can be wrapped, in words."""
    owned: Any = type(owner)  # pyright: ignore[reportUnknownVariableType]
    kind: str = owned.__name__
    if name.startswith("__") and name.endswith("__"):
        return f"{kind}.{name} is called by Python itself, which looks at the class"
    try:
        bound = getattr(owner, name, None)
    except Exception as error:  # A property of somebody's.
        return f"asking {kind} for {name} fails: {type(error).__name__}"
    if bound is None:
        return f"{kind} has no {name}"
    if not callable(bound):
        return f"{kind}.{name} is no method"
    if inspect.iscoroutinefunction(bound) or inspect.isgeneratorfunction(bound) or inspect.isasyncgenfunction(bound):
        return f"{kind}.{name} goes on after it has returned: tell of it from inside, with `transfers`"
    if isinstance(getattr(owned, name, None), property):
        return f"{kind}.{name} is a property"
    if getattr(bound, "__self__", None) is owner:
        plain: Any = getattr(bound, "__func__", None) or getattr(owned, name)
    else:  # A static method, a class method, or a function that somebody has put there.
        plain = _of_owner(bound)
    return Found(plain, bound)


def _of_owner(function: Callable[..., Any]) -> Callable[..., Any]:
    def called(_: Any, /, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    called.__name__ = getattr(function, "__name__", "called")
    return called


class Place:
    """Where a stand-in was put, and what was there before."""

    __slots__ = ("_name", "_stand_in")

    def __init__(self, owner: Any, name: str, found: Found, points: Sequence[HookPoint]) -> None:
        """Args:
        owner: The object.
        name: The method's name.
        found: The method.
        points: The hooks around it, the innermost first.
        """
        hooked = found.plain
        for point in points:
            hooked = point.wrap(hooked)
        self._name = name
        self._stand_in = StandIn(owner, name, found.plain, hooked)
        attributes_of(owner)[name] = self._stand_in

    def is_seen(self, owner: Any) -> bool:
        """Returns whether who asks the object for the method is given the stand-in."""
        return getattr(owner, self._name, None) is self._stand_in

    def clear(self, owner: Any) -> None:
        """Puts back what was there; where somebody has put something else meanwhile, leaves that."""
        attributes = attributes_of(owner)
        if attributes.get(self._name) is self._stand_in:
            if self._stand_in.before is _NOTHING:
                del attributes[self._name]
            else:
                attributes[self._name] = self._stand_in.before
