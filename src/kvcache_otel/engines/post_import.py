"""Calls back when a module has been imported, so that nothing is imported for the sake of being hooked.

``wrapt.when_imported`` does the same; importing wrapt takes 5 to 30 ms, in every process that an engine starts, where
all of ours may take 1 ms.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    Callback = Callable[[ModuleType], None]


class PostImport:
    """A meta path finder that finds nothing itself: it lets the others find, and watches the module being executed."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[Callback]] = {}
        self._finding: set[str] = set()

    def when_imported(self, name: str, callback: Callback) -> None:
        """Calls `callback` with the module, now if it is there already, else right after it was executed.

        Args:
            name: The module's full name.
            callback: Must not raise.
        """
        module = sys.modules.get(name)
        if module is not None and not _initialising(module):
            callback(module)
            return
        self._waiting.setdefault(name, []).append(callback)
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        if module is not None:
            _watch_running(module, self)

    def forget(self) -> None:
        """Drops every callback that has not been called."""
        self._waiting.clear()
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Finds a watched module through the other finders and puts the watch around its loader."""
        if name not in self._waiting or name in self._finding:
            return None
        self._finding.add(name)
        try:
            spec = _find(self, name, path, target)
        finally:
            self._finding.discard(name)
        if spec is not None and spec.loader is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _Watch(spec.loader, self)  # type: ignore[assignment] # A loader by delegation.
        return spec

    def executed(self, module: ModuleType) -> None:
        """Calls back for a module that has just been executed."""
        for callback in self._waiting.pop(module.__name__, ()):
            callback(module)


class _Watch:
    """A loader that calls back once its module has been executed, then steps out of the way."""

    def __init__(self, loader: Loader, watcher: PostImport) -> None:
        self._loader = loader
        self._watcher = watcher

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._watcher.executed(module)


def _find(skip: PostImport, name: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
    for finder in list(sys.meta_path):
        if finder is skip:
            continue
        find_spec = getattr(finder, "find_spec", None)
        spec = find_spec(name, path, target) if find_spec is not None else None
        if spec is not None:
            return spec
    return None


def _watch_running(module: ModuleType, watcher: PostImport) -> None:
    """Watches an import that has begun without us: importlib clears a flag in the module's spec when it is done."""
    spec: Any = module.__spec__
    kind: Any = spec.__class__

    def cleared(spec: Any, flag: bool) -> None:
        spec.__class__ = kind
        spec._initializing = flag
        if spec.name in sys.modules:  # Else the import has failed.
            watcher.executed(module)

    def read(spec: Any) -> Any:
        return spec.__dict__.get("_initializing", False)

    spec.__class__ = type(kind.__name__, (kind,), {"_initializing": property(read, cleared)})
    if not spec._initializing:  # It was done meanwhile, on another thread.
        cleared(spec, False)


def _initialising(module: ModuleType) -> bool:
    # As importlib itself asks it: a module that is still being executed may lack what we look for.
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))
