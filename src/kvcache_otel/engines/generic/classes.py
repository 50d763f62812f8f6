"""Hooks in the place of a class's methods, which hear of calls on those of its objects that are instrumented.

A hook lies in the class's own attributes while one of its objects is instrumented, and is a descriptor: whoever asks an
instrumented object for the method is given it with hooks around it, bound to the object as methods are; whoever asks
another object, or the class, is given what was there before. It knows the objects by their identity, since they may
compare as they like, and keeps nothing of them: a reader of somebody's may refer to its object, which has to go all the
same.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections import deque
from contextlib import suppress
from types import MappingProxyType, MethodType
from typing import TYPE_CHECKING, Any, cast

from kvcache_otel.engines.generic.stand_ins import StandIn, Wrapped

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

NOTHING = object()
"""What is found where nothing is."""

# How often a class is given back by itself, when its last instrumented object is gone: each time the interpreter has to
# learn anew where its attributes are, and some day gives up on it. After that its hooks stay, and let calls through.
GIVEN_BACK = 16

_EMPTY: Mapping[str, Any] = MappingProxyType({})


class ClassHook:
    """Takes a method's place on a class.

    Attributes:
        kind: The class.
        name: The method's name.
        original: What was in its place among the class's own attributes; `NOTHING` where it is inherited, or is not the
            class's at all.
    """

    __slots__ = ("__weakref__", "_entries", "_entry", "_genuine", "_nearer", "_where", "kind", "name", "original")

    def __init__(self, kind: type, name: str) -> None:
        """Args:
        kind: As the attribute.
        name: As the attribute.
        """
        self.name = name
        self.original: Any = vars(kind).get(name, NOTHING)
        self.kind = kind
        self._entries: dict[int, weakref.ref[Wrapped]] = {}
        self._entry = self._entries.get
        self._where: Mapping[str, Any] = {name: self.original}
        self._nearer: tuple[Mapping[str, Any], ...] = ()  # Where the engine may put another some day.
        self._genuine: Callable[[Any, Any], Any]
        if self.original is NOTHING:
            bases: list[Mapping[str, Any]] = [vars(base) for base in kind.__mro__[1:]]
            # A hook of ours that lies on a base may be about a method that is inherited there too.
            places = (place for place, having in enumerate(bases) if genuine(having.get(name, NOTHING)) is not NOTHING)
            place = next(places, len(bases))
            self._nearer, self._where = tuple(bases[:place]), next(iter(bases[place : place + 1]), _EMPTY)
            self._genuine = self._inherited
        elif has_sign(self.original, "__get__"):
            self._genuine = self.original.__get__
        else:
            self._genuine = self._as_it_is

    def __get__(self, instance: Any, kind: type | None = None) -> Any:
        entry = self._entry(id(instance))
        if entry is None or (wrapped := entry()) is None:
            return self._genuine(instance, kind)
        try:
            found = self._where[self.name]
        except KeyError:
            found = NOTHING
        for having in self._nearer:
            if (nearer := genuine(having.get(self.name, NOTHING))) is not NOTHING:
                found = nearer
                break
        hooked = wrapped.hooked
        if hooked is not None and (found is wrapped.found or genuine(found) is wrapped.found):
            return MethodType(hooked, instance)
        return StandIn(wrapped, instance, self._given(instance, kind))

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Calls what the class has without it: somebody has taken it from the class's own attributes."""
        return self._genuine(None, self.kind)(*args, **kwargs)

    @property
    def __wrapped__(self) -> Any:
        return self.original

    @property
    def in_place(self) -> bool:
        """Whether the class has it, itself or in what somebody has put around it."""
        found: Any = vars(self.kind).get(self.name)
        for _ in range(16):
            if found is None or found is self:
                break
            found = getattr(found, "__wrapped__", None)
        return found is self

    def hear(self, owner: Any, wrapped: Wrapped) -> None:
        """Hears of an object's calls from now on, for as long as somebody keeps what is around them."""
        number, this = id(owner), weakref.ref(self)
        ending = sys.is_finalizing  # By then the modules may be empty.

        def gone(entry: weakref.ref[Wrapped]) -> None:
            if not ending() and (hook := this()) is not None:
                hook._forget(number, entry)

        self._entries[number] = weakref.ref(wrapped, gone)

    def forget(self, owner: Any, wrapped: Wrapped) -> None:
        """Hears of an object's calls no more, and gives the class back where it was the last."""
        entry = self._entry(id(owner))
        if entry is not None and entry() is wrapped:
            with _lock:
                self._entries.pop(id(owner), None)
                self._give_back()
            _tidy()

    def _forget(self, number: int, entry: weakref.ref[Wrapped]) -> None:
        if self._entry(number) is entry:
            del self._entries[number]
            if not self._entries:
                _emptied.append(self)
                _tidy()

    def put(self) -> None:
        """Takes the method's place.

        Raises:
            Exception: The class lets nobody set its attributes.
        """
        if vars(self.kind).get(self.name) is not self:
            _set(self.kind, self.name, self)

    def give_back_if_empty(self, *, by_itself: bool) -> None:
        """Puts back what was in its place, where no object of the class is heard of."""
        if by_itself and not self._entries and self.in_place and _worn(self.kind) >= GIVEN_BACK:
            _left.add(self)
        else:
            self._give_back()

    def _give_back(self) -> None:
        """Where somebody has put something around it, leaves that: calls go through."""
        if self._entries or vars(self.kind).get(self.name) is not self:
            return
        before = self.original
        while issubclass(type(before), ClassHook) and not before._entries:  # It was emptied while it was covered.
            before = before.original
        if before is NOTHING:
            _delete(self.kind, self.name)
        else:
            _set(self.kind, self.name, before)

    # -- what the class has without it ---------------------------------------------------------------------------------

    def _as_it_is(self, _: Any, __: Any) -> Any:
        return self.original

    def _inherited(self, instance: Any, kind: Any) -> Any:
        # Asked each time: a base may be given another method by the engine, and this class has to have it then.
        try:
            above = cast("Any", super(self.kind, kind if instance is None else instance))
        except TypeError:  # Somebody has made another class of this one's attributes.
            return self._bound_to(instance, kind)
        try:
            return getattr(above, self.name)
        except AttributeError:
            if static(self.kind, self.name)[1] is not NOTHING:
                raise
            kind = self.kind if kind is None else kind
            said = f"type object {kind.__name__!r}" if instance is None else f"{kind.__name__!r} object"
            raise AttributeError(f"{said} has no attribute {self.name!r}", name=self.name, obj=instance) from None

    def _bound_to(self, instance: Any, kind: Any) -> Any:
        _, found = static(kind, self.name)
        if found is NOTHING:
            raise AttributeError(
                f"{kind.__name__!r} object has no attribute {self.name!r}", name=self.name, obj=instance
            )
        return found.__get__(instance, kind) if has_sign(found, "__get__") else found

    def _given(self, instance: Any, kind: Any) -> Any:
        """Returns what the engine would have been given, by the class's own `__getattr__` too."""
        try:
            return self._genuine(instance, kind)
        except AttributeError:
            if not has_sign(instance, "__getattr__"):
                raise
            return instance.__getattr__(self.name)


class AttributeHook(ClassHook):
    """The same for callables that are among the attributes of an object itself: these come first then, as before."""

    __slots__ = ()

    def __get__(self, instance: Any, kind: type | None = None) -> Any:
        if instance is None:
            return super().__get__(instance, kind)
        try:
            value = instance.__dict__[self.name]
        except KeyError:
            return super().__get__(instance, kind)
        entry = self._entry(id(instance))
        if entry is None or (wrapped := entry()) is None or value is not wrapped.found:
            return value
        hooked = wrapped.hooked
        return StandIn(wrapped, instance, value) if hooked is None else MethodType(hooked, instance)

    def __set__(self, instance: Any, value: Any) -> None:
        attributes_of(instance)[self.name] = value

    def __delete__(self, instance: Any) -> None:
        if attributes_of(instance).pop(self.name, NOTHING) is NOTHING:
            raise AttributeError(f"{type(instance).__name__!r} object has no attribute {self.name!r}", name=self.name)


def attributes_of(owner: object) -> dict[str, Any]:
    """Returns an object's own attributes, past whatever its class does when one is set."""
    return owner.__dict__


def has_sign(thing: Any, name: str) -> bool:
    """Returns whether something has what Python itself looks up on its class."""
    return hasattr(cast("type[Any]", type(thing)), name)


def genuine(found: Any) -> Any:
    """Returns what a class has, past hooks of ours; `NOTHING` where it has but these."""
    while issubclass(type(found), ClassHook):  # What something says of its class itself may be anything.
        found = found.original
    return found


def static(kind: type, name: str) -> Any:
    """Returns the class that has an attribute among its own, of a class and its bases, and the attribute.

    It is not bound to anything; None and `NOTHING` where there is none.
    """
    for base in kind.__mro__:
        if (found := genuine(vars(base).get(name, NOTHING))) is not NOTHING:
            return base, found
    return None, NOTHING


def hook_for(owner: Any, name: str, wrapped: Wrapped, *, own: bool) -> ClassHook:
    """Puts a hook into the place of a method, on its object's class, and returns it.

    Args:
        owner: The object.
        name: The method's name.
        wrapped: The method with hooks around it.
        own: Whether it is among the attributes of the object itself.

    Raises:
        Exception: The class lets nobody set its attributes.
    """
    kind = cast("type[Any]", type(owner))
    with _lock:
        there = vars(kind).get(name)
        hook = there if type(there) is AttributeHook or (type(there) is ClassHook and not own) else None
        if hook is None:
            hook = AttributeHook(kind, name) if own else ClassHook(kind, name)
        hook.hear(owner, wrapped)  # First: it would be given back by whoever finds it empty.
        hook.put()
    _tidy()
    return hook


def give_back_all() -> None:
    """Gives back those classes that have kept hooks without an object."""
    with _lock:
        for hook in list(_left):
            hook.give_back_if_empty(by_itself=False)
        _left.clear()


# -- classes and their attributes --------------------------------------------------------------------------------------
# An object may go while a collection runs, in any thread and any line: whoever hears of it then waits for nobody, and
# leaves what is to be done to who is at it. That may be the same thread, in the midst of it: so each step may be taken
# twice, and an object is heard of before the hook's place is looked at.

_lock = threading.RLock()
_emptied: deque[ClassHook] = deque()
_left: weakref.WeakSet[ClassHook] = weakref.WeakSet()
_given_back: dict[int, tuple[weakref.ref[type], int]] = {}


def _tidy() -> None:
    while _emptied and _lock.acquire(blocking=False):
        try:
            _emptied.popleft().give_back_if_empty(by_itself=True)
        except IndexError:
            pass  # Another thread was faster.
        finally:
            _lock.release()


def _worn(kind: type) -> int:
    """Returns how often a class has been given back on its own account, before this time."""
    number = id(kind)  # Classes too may compare as they like.
    forget = _given_back.pop
    known, times = _given_back.get(number) or (weakref.ref(kind, lambda _: forget(number, None)), 0)
    _given_back[number] = known, times + 1
    return times


def _set(kind: type, name: str, value: Any) -> None:
    try:
        type.__setattr__(kind, name, value)  # Past what its metaclass does when one is set.
    except TypeError:  # One that is written in C may not be passed by.
        setattr(kind, name, value)


def _delete(kind: type, name: str) -> None:
    with suppress(AttributeError):
        try:
            type.__delattr__(kind, name)
        except TypeError:
            delattr(kind, name)


def _forked() -> None:
    global _lock
    _lock = threading.RLock()  # Whoever held it is not in this process.


os.register_at_fork(after_in_child=_forked)
