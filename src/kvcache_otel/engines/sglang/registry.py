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
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from kvcache_otel.engines.hooks import HookPoint, State

_REGISTRY = "sglang.srt.plugins.hook_registry"
_WHY = "SGLang's plugin loader did not put it in its place; its own log says why"


class _Place:
    """One function of SGLang that is ours to watch, for as long as the process lives."""

    def __init__(self, point: HookPoint) -> None:
        self._point = point
        self._hooked: Callable[..., Any] | None = None

    def give_to(self, point: HookPoint) -> None:
        """Lets a hook have the place; the one before was detached."""
        self._point, self._hooked = point, None

    def __call__(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What SGLang calls in the function's stead."""
        hooked = self._hooked
        if hooked is None:
            point = self._point
            hooked = point.wrap(original)
            if point is self._point:  # It was not given to another meanwhile.
                self._hooked = hooked
        return hooked(*args, **kwargs)


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
    target = f"{point.hook.module}.{point.hook.path}"
    registry: Any = sys.modules.get(_REGISTRY)
    if registry is None:  # Then nobody has registered anything.
        return False
    if target in _places:
        _places[target].give_to(point)
    else:
        hooks: Any = registry.HookRegistry
        owner, _ = point.find(module)
        replaced = _waits(hooks, target.rpartition(".")[0])
        if owner is None or target in hooks._patched or not (replaced or _loading(registry) or _waits(hooks, target)):
            return False
        ours = _Place(point)
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
