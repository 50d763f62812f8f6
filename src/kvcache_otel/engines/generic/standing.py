"""Whether an object's calls still come by a hook: an engine may put something else in a method's place at any time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from kvcache_otel.engines.generic.classes import NOTHING, AttributeHook, ClassHook, attributes_of
from kvcache_otel.engines.generic.stand_ins import is_hooked

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcache_otel.engines.generic.stand_ins import Wrapped

_ON_CLASS = "another method has been put in its place on the class since"
_ON_OBJECT = "another has been put in its place on the object itself since"

# What one thing may be put around another, as far as that is followed.
_AROUND = 16


def unheard(hook: ClassHook, owner: Any, wrapped: Wrapped) -> str:
    """Returns why calls of an object's method are not heard of, in words; empty where they are.

    The object is not asked for the method: that might run code of the engine's, on a reader's thread.

    Args:
        hook: The hook in the method's place.
        owner: The object.
        wrapped: The method with hooks around it.
    """
    kind = cast("type[Any]", type(owner))
    if not _on_class(kind, hook):
        return _ON_CLASS if kind is hook.kind else f"its object is a {kind.__name__} since"
    own = attributes_of(owner).get(hook.name, NOTHING)
    if own is NOTHING or (own is wrapped.found and type(hook) is AttributeHook):
        return ""
    return "" if _leads(own, lambda found: is_hooked(found, wrapped)) else _ON_OBJECT


def _on_class(kind: type, hook: ClassHook) -> bool:
    """Returns whether who asks an object of a class for a method comes by the hook."""
    for base in kind.__mro__:
        found = vars(base).get(hook.name, NOTHING)
        if _leads(found, lambda each: each is hook):
            return True
        while issubclass(type(found), ClassHook):
            found = found.original
        if found is not NOTHING:
            return False
    return False


def _leads(found: Any, there: Callable[[Any], bool]) -> bool:
    """Returns whether something is what is looked for, or was put around it."""
    for _ in range(_AROUND):
        if found is None or there(found):
            break
        found = getattr(found, "__wrapped__", None)
    return found is not None and there(found)
