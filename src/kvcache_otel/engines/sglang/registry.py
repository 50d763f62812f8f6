"""Hooks put in their places by SGLang's own HookRegistry, while it loads plugins.

Its order matters to others: it replaces whole classes first, on behalf of other plugins, and puts the hooks of all of
them around what is there then. It applies what is registered once, after it has loaded every plugin, imports whatever a
target names, cannot take a hook off again and ignores a target that it has seen before. So a hook of ours is registered
when its module has been imported, is known to have its function, and stays for good; what it asks can change.

Before and after that time, hooks are put in their places as elsewhere. Registered then, ours would have to be applied
at once, and with it whatever else waits for its turn; SGLang may be about to apply that, and would put it there twice.
What others register later for the same function, it would ignore.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from kvcache_otel.engines.hooks import HookPoint, State

_REGISTRY = "sglang.srt.plugins.hook_registry"
_WHY = "SGLang's plugin loader did not put it in its place; its own log says why"


class _Place:
    """One function of SGLang that is ours to watch, for as long as the process lives."""

    def __init__(self, target: str, point: HookPoint) -> None:
        self._target = target
        self._point = point
        self._hooked: Callable[..., Any] | None = None
        self._original: Callable[..., Any] | None = None

    def give_to(self, point: HookPoint) -> bool:
        """Lets a hook have the place, where it can; the one before was detached."""
        if self._original is not None:
            return self._stand_in(self._hooked, point, self._original)
        self._point, self._hooked = point, None
        return True

    def __call__(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What SGLang calls in the function's stead, through a wrapper of its own."""
        hooked = self._hooked
        if hooked is None:
            point = self._point
            hooked = point.wrap(original)
            if point is self._point:  # It was not given to another meanwhile.
                self._hooked = hooked
                with suppress(Exception):  # What somebody has done to the class is not the engine's affair.
                    self._shorten(original)
        return hooked(*args, **kwargs)

    def _shorten(self, original: Callable[..., Any]) -> None:
        """Takes SGLang's wrapper, and this object, out of the way where they hold our hook and nobody else's.

        They are two calls more for each of the engine's, half of what a hook costs.
        """
        registry: Any = sys.modules[_REGISTRY]
        hooks: dict[str, Any] = registry.HookRegistry._hooks
        theirs = self._found()
        holds_ours = any(cell.cell_contents == self.__call__ for cell in getattr(theirs, "__closure__", None) or ())
        if holds_ours and theirs.__wrapped__ is original and len(hooks[self._target]) == 1:
            self._original = original
            self._stand_in(theirs, self._point, original)

    def _stand_in(self, before: Any, point: HookPoint, original: Callable[..., Any]) -> bool:
        if self._found() is not before:  # Somebody has put theirs around it.
            return False
        self._point, self._hooked = point, point.wrap(original)
        owner, name = self._owner()
        setattr(owner, name, self._hooked)
        return True

    def _found(self) -> Any:
        """Returns what stands in the function's place, where it does: what a class inherits stands elsewhere."""
        owner, name = self._owner()
        own: dict[str, Any] = owner.__dict__
        return own.get(name)

    def _owner(self) -> tuple[Any, str]:
        return self._point.find(sys.modules[self._point.hook.module])


_places: dict[str, _Place] = {}


def place(point: HookPoint, module: ModuleType) -> None:
    """Registers a hook with SGLang while that matters to others, or puts it in its place as elsewhere.

    Args:
        point: The hook.
        module: Its module, imported.
    """
    try:
        registered = _register(point, module)
    except Exception:  # SGLang's registry is not what it was.
        registered = False
    if not registered:
        point.attach(module)


def _register(point: HookPoint, module: ModuleType) -> bool:
    """Returns whether the hook has a place in SGLang's registry."""
    registry: Any = sys.modules.get(_REGISTRY)
    if registry is None:  # Then nobody has registered anything.
        return False
    owner, name = point.find(module)
    if owner is None:
        return False
    target = ".".join((point.hook.module, *point.hook.path.split(".")[:-1], name))
    if target in _places:
        if not _places[target].give_to(point):
            return False
    else:
        hooks: Any = registry.HookRegistry
        replaced = _waits(hooks, target.rpartition(".")[0])
        if target in hooks._patched or not (replaced or _loading(registry) or _waits(hooks, target)):
            return False
        ours = _Place(target, point)
        source = registry.HookSource("kvcache_otel", "kvcache-otel")
        hooks.register(target, ours.__call__, registry.HookType.AROUND, source=source)
        _places[target] = ours
        if replaced and not _loading(registry):
            hooks.apply_hooks()  # SGLang is replacing classes now, which it may do twice, and would not come to ours.
    point.placed(lambda: _state(target), _WHY)
    return True


def _loading(registry: Any) -> bool:
    """Whether SGLang is running its plugins now; it applies all hooks afterwards."""
    return registry._current_plugin_source.get() is not None


def _waits(hooks: Any, target: str) -> bool:
    """Whether others have registered something that SGLang has yet to apply, or is applying now."""
    return bool(hooks._hooks.get(target)) and target not in hooks._patched


def _state(target: str) -> State:
    registry: Any = sys.modules.get(_REGISTRY)
    if registry is None:
        return "missing"
    if target in registry.HookRegistry._patched:
        return "attached"
    return "waiting" if _loading(registry) else "missing"
