"""Methods of one object: found, wrapped for this object alone, and given back as they were."""

from __future__ import annotations

import inspect
import weakref
from contextlib import suppress
from functools import partialmethod, singledispatchmethod
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from kvcache_otel.engines.generic import classes
from kvcache_otel.engines.generic.classes import attributes_of
from kvcache_otel.engines.generic.copied import reduce_plainly
from kvcache_otel.engines.generic.stand_ins import Wrapped, is_hooked, stands_for
from kvcache_otel.engines.generic.standing import HEARD, Standing, look_up, standing
from kvcache_otel.engines.hooks import HookPoint
from kvcache_otel.record.outside import let_through

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvcache_otel.engines.hooks import Hook, State
    from kvcache_otel.record.cells import Counter

# What can be done with more than a function by signs of Python's, which are looked up on the class.
_MORE = ("__getitem__", "__len__", "__iter__", "__enter__", "__await__")

_FUNCTIONS = (FunctionType, BuiltinFunctionType)

# What is bound to an object without running any code of the engine's, and cannot be called itself.
_METHODS = (staticmethod, classmethod, partialmethod, singledispatchmethod)


class ObjectPoint(HookPoint):
    """A hook on one object. What it fails at is counted for good: the object may be gone before somebody reads.

    Attributes:
        alike: The hooks of its name in its cache, itself among them.
    """

    __slots__ = ("__weakref__", "_bodies", "_failures", "_place", "alike")

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
        self._place: Place | None = None
        self.alike = Alike()
        self.state, self.why = "missing", "it is not in its place"

    def reads(self, body: Callable[..., Any]) -> None:
        """Says what reads the fact."""
        self._bodies[:] = [body]

    def put(self, place: Place) -> None:
        """Says where it was put."""
        self._place = place
        self.placed(place.state, "")

    def unheard(self) -> str:
        """Returns why calls do not come by it any more, in words; empty where they do, or it was never put there."""
        return "" if (place := self._place) is None or (stands := place.stands()).heard is not False else stands.why

    def doubted(self) -> str:
        """Returns why calls may not come by it any more, in words; empty where it is known."""
        return "" if (place := self._place) is None or (stands := place.stands()).heard is not None else stands.why

    def listen(self, heard: Callable[[Any], None]) -> None:
        """Has the next call that comes by it told, with its object, and what stands for it, among the arguments."""
        body = self.body
        if body is None or getattr(body, "listens", False):
            return

        def listening(*args: Any, **kwargs: Any) -> Any:
            if self.body is listening:
                self.body = body
            heard(args[:2])
            return body(*args, **kwargs)

        listening.listens = True  # type: ignore[attr-defined]
        self.body = listening
        if self._place is None:  # Detached meanwhile.
            self.body = None

    def detach(self) -> None:
        """Takes it off, as `HookPoint` does; what it was around is let go at once, and so are the rows."""
        self._place = None
        super().detach()
        self._bodies[:] = [_nothing]  # Another thread may be about to call it.
        self._changed = _nothing

    def failed(self, error: Exception) -> None:
        """Counts a failure, as `HookPoint` does, and raises what is none of ours."""
        let_through(error)
        self._failures.add(1)
        super().failed(error)


def _nothing(*_: Any, **__: Any) -> None:
    pass


class Alike:
    """The hooks of one name in one cache, held weakly; each of them keeps it."""

    __slots__ = ("__weakref__", "_points")

    def __init__(self) -> None:
        self._points: tuple[weakref.ref[ObjectPoint], ...] = ()

    def add(self, point: ObjectPoint) -> None:
        """Adds one more, behind the others."""
        self._points = *(weakref.ref(other) for other in self.told()), weakref.ref(point)

    def told(self) -> list[ObjectPoint]:
        """Returns those that are there, the oldest first."""
        return [point for each in self._points if (point := each()) is not None and point.state != "detached"]


def has_attributes(owner: object) -> bool:
    """Returns whether an object has attributes of its own."""
    try:
        return isinstance(owner.__dict__, dict)  # pyright: ignore[reportUnnecessaryIsInstance]
    except Exception:  # A property of somebody's, or none at all.
        return False


class Absent(str):
    """Why there is no method, where there is nothing of its name, or what is no method at all."""


class Found(NamedTuple):
    """A method that can be wrapped.

    Attributes:
        found: It, as the object or its class has it: bound to nothing.
        bound: It, as it is found on the object.
        own: Whether it is among the attributes of the object itself.
    """

    found: Any
    bound: Callable[..., Any]
    own: bool


def find(owner: Any, name: str) -> Found | str:
    """Returns a method of an object, or why there is none that can be wrapped, in words."""
    owned: Any = type(owner)  # pyright: ignore[reportUnknownVariableType]
    kind: str = owned.__name__
    if name.startswith("__") and name.endswith("__"):
        return f"{kind}.{name} is called by Python itself, which looks at the class"
    there = attributes_of(owner).get(name, classes.NOTHING)
    _, found = classes.static(owned, name)
    if isinstance(found, property):
        return f"{kind}.{name} is a property"
    if classes.has_sign(found, "__set__"):
        return f"{kind} does not look {name} up on its objects"
    if there is classes.NOTHING and _is_asked_for(found):
        return f"{kind}.{name} is a {type(found).__name__}, which is asked for and not called"
    try:
        bound = getattr(owner, name, None)
    except Exception as error:  # A property of somebody's.
        return f"asking {kind} for {name} fails: {type(error).__name__}"
    if bound is None:
        return Absent(f"{kind} has no {name}")
    if not callable(bound):
        return Absent(f"{kind}.{name} is no method")
    if _goes_on(bound):
        return f"{kind}.{name} goes on after it has returned: tell of it from inside, with `transfers`"
    if not hasattr(bound, "__wrapped__") and any(classes.has_sign(bound, more) for more in _MORE):
        return f"{kind}.{name} is a {type(bound).__name__}, which is more than a function: it stays as it is"
    return Found(found, bound, own=False) if there is classes.NOTHING else Found(there, bound, own=True)


def _is_asked_for(found: Any) -> bool:
    """Returns whether what a class has runs code of its own when it is asked for, in place of when it is called.

    A lazy attribute is made by whoever asks first: that must be the engine.
    """
    if found is classes.NOTHING or callable(found) or not classes.has_sign(found, "__get__"):
        return False
    # A decorator says what it was put around.
    return not isinstance(found, _METHODS) and inspect.getattr_static(found, "__wrapped__", None) is None


def _goes_on(bound: Any) -> bool:
    """Returns whether a method goes on after it has returned, or the one that a decorator was put around."""
    try:
        innermost = inspect.unwrap(bound)
    except Exception:  # It goes round in circles, or is somebody's who knows better.
        innermost = bound
    asks = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    return any(ask(bound) or ask(innermost) for ask in asks)


class Place:
    """Where a method has hooks around it: on its object's class, which hands them out on this object alone."""

    __slots__ = ("_heard", "_hook", "_looked_up", "_owner", "_points", "_wrapped")

    def __init__(self, owner: Any, name: str, method: Found, points: Sequence[HookPoint]) -> None:
        """Args:
        owner: The object.
        name: The method's name.
        method: The method.
        points: The hooks around it, the innermost first.

        Raises:
            Exception: The object's class lets nobody set its attributes.
        """
        function = reduce_plainly if name == "__reduce_ex__" else _of_owner(name, method)
        self._owner = weakref.ref(owner)
        self._points = points
        self._looked_up = look_up(cast("type[Any]", type(owner)))
        self._heard: tuple[int, ...] = ()
        self._wrapped = Wrapped(method.found, function, points)
        self._hook = classes.hook_for(owner, name, self._wrapped, own=method.own)

    def is_seen(self, owner: Any) -> bool:
        """Returns whether who asks the object for the method is given it with hooks around it."""
        return is_hooked(getattr(owner, self._hook.name, None), self._wrapped)

    def state(self) -> State:
        """Returns whether it is there still: somebody may have put another method into its place."""
        heard = self.stands().heard
        return "waiting" if heard is None else "attached" if heard else "missing"

    def stands(self) -> Standing:
        """Returns whether calls still come by it; where only a call can tell, the next one is listened for."""
        owner = self._owner()
        if owner is None:
            return HEARD
        try:
            found = standing(self._hook, owner, self._wrapped, self._looked_up)
        except Exception as error:  # What is there now may be anything.
            return Standing(None, f"what is in its place since cannot be looked at: {type(error).__name__}")
        if found.heard is not None:
            self._heard = ()
        elif self._heard == found.there:
            return HEARD
        else:
            self._listen(found.there)
        return found

    def _listen(self, there: tuple[int, ...]) -> None:
        def heard(first: tuple[Any, ...]) -> None:
            owner = self._owner()
            if any(each is owner or stands_for(each, owner) for each in first):
                self._heard = there

        for point in self._points:
            if isinstance(point, ObjectPoint):
                point.listen(heard)

    def clear(self, owner: Any) -> None:
        """Takes the hooks off; the class is as it was when there is no other object of it that has them."""
        self._hook.forget(owner, self._wrapped)


def _of_owner(name: str, method: Found) -> Callable[..., Any] | None:
    """Returns a method as a function of its object and its arguments; None where it is more than a function."""
    bound, found = method.bound, method.found
    function: Any = bound.__func__ if isinstance(bound, MethodType) else bound
    if type(function) is FunctionType and function is found and not method.own:
        return function
    if type(function) not in _FUNCTIONS or not (method.own or type(found) in (staticmethod, classmethod)):
        return None

    def called(_: Any, /, *args: Any, **kwargs: Any) -> Any:
        return bound(*args, **kwargs)

    called.__dict__.update(getattr(function, "__dict__", {}))
    for attribute in ("__module__", "__qualname__", "__doc__"):
        if (value := getattr(function, attribute, None)) is not None:
            setattr(called, attribute, value)
    called.__name__ = name  # By which it is found again, when it was pickled as one of its object.
    with suppress(TypeError, ValueError):  # One that is written in C may not say.
        signature = inspect.signature(bound)
        first = inspect.Parameter("_", inspect.Parameter.POSITIONAL_ONLY)
        called.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[first, *signature.parameters.values()]
        )
    return called


def hide_from_copies(owner: Any) -> Place | None:
    """Has copies and pickles of an object be without what it carries of ours, where its class lets us."""
    _, found = classes.static(cast("type[Any]", type(owner)), "__reduce_ex__")
    if "__reduce_ex__" in attributes_of(owner):
        return None
    try:
        return Place(owner, "__reduce_ex__", Found(found, owner.__reduce_ex__, own=False), [])
    except Exception:
        return None
