"""Whether an object's calls still come by a hook: an engine may put something else in a method's place at any time.

What is there instead is not called, nor asked: that might run code of the engine's, on a reader's thread. So it is
certain only where it is the hook after all, or cannot lead to it; otherwise whoever asks has to wait for a call.
"""

from __future__ import annotations

import dis
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from kvcache_otel.engines.generic.classes import NOTHING, AttributeHook, ClassHook, attributes_of
from kvcache_otel.engines.generic.stand_ins import is_hooked

if TYPE_CHECKING:
    from kvcache_otel.engines.generic.stand_ins import Wrapped

_ON_CLASS = "another method has been put in its place on the class since"
_ON_OBJECT = "another has been put in its place on the object itself since"
_LOOKED_UP = "its class looks attributes up in another way since"

# What one thing may be put around another, as far as that is followed.
_AROUND = 16

_CALLS = frozenset(number for name, number in dis.opmap.items() if "CALL" in name)


class Standing(NamedTuple):
    """What can be said of a hook without calling the method.

    Attributes:
        heard: Whether calls come by it; None where only a call can tell.
        why: Why they do not, or may not, in words.
        there: By what it is known again, where only a call can tell.
    """

    heard: bool | None
    why: str = ""
    there: tuple[int, ...] = ()


HEARD = Standing(heard=True)


def look_up(kind: type) -> Any:
    """Returns what a class looks the attributes of its objects up with."""
    return kind.__getattribute__


def standing(hook: ClassHook, owner: Any, wrapped: Wrapped, looked_up: Any) -> Standing:
    """Returns whether calls of an object's method come by the hook in its place.

    Args:
        hook: The hook.
        owner: The object.
        wrapped: The method with hooks around it.
        looked_up: What its class looked attributes up with when the hook was put there.
    """
    kind = cast("type[Any]", type(owner))
    found = _on_class(kind, hook)
    if found is not hook:
        why = _ON_CLASS if kind is hook.kind else f"its object is a {kind.__name__} since"
        return _said(_leads(found, wrapped), why, found)
    asks = look_up(kind)
    if asks is not looked_up:
        return _said(None, _LOOKED_UP, asks)
    own = attributes_of(owner).get(hook.name, NOTHING)
    if own is NOTHING or (own is wrapped.found and type(hook) is AttributeHook):
        return HEARD
    return _said(_leads(own, wrapped), _ON_OBJECT, own)


def _said(heard: bool | None, why: str, there: Any) -> Standing:
    if heard is None:
        return Standing(None, f"{why}; no call has come by here since that was seen", (id(there), hash(why)))
    return HEARD if heard else Standing(heard=False, why=why)


def _on_class(kind: type, hook: ClassHook) -> Any:
    """Returns what who asks an object of a class for a method comes by first; the hook, if it is among these."""
    for base in kind.__mro__:
        there = found = vars(base).get(hook.name, NOTHING)
        while issubclass(type(found), ClassHook):
            if found is hook:
                return hook
            found = found.original
        if found is not NOTHING:
            return there
    return NOTHING


def _leads(found: Any, wrapped: Wrapped) -> bool | None:
    """Returns whether a call of something that was found comes by the hook; None where it cannot be seen."""
    for _ in range(_AROUND):
        if is_hooked(found, wrapped):
            return True
        if found is NOTHING or found is wrapped.found:
            return False
        kind = cast("type[Any]", type(found))
        if kind is partial:
            found = found.func
        elif kind in (MethodType, staticmethod, classmethod):
            found = found.__func__
        elif kind is FunctionType:
            return False if _CALLS.isdisjoint(found.__code__.co_code[::2]) else None
        else:
            return False if kind is BuiltinFunctionType else None
    return None
