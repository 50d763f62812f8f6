"""The engines that can be instrumented in this process, and the one thing that holds hooks and runtime together.

Attaching imports neither the adapter nor the runtime: that happens when the first hook is called, in a process that
does have a cache.
"""

from __future__ import annotations

import importlib
import threading
from typing import TYPE_CHECKING, Any

from kvcache_otel.engines.hooks import HookSet

if TYPE_CHECKING:
    from collections.abc import Callable

    from opentelemetry.metrics import MeterProvider

    from kvcache_otel.export.settings import Settings
    from kvcache_otel.runtime import Runtime


# The engines that this package knows: where each one's hook table is, and what its adapter is called.
ENGINES = {"vllm": ("kvcache_otel.engines.vllm", "VllmAdapter")}


class Instrumentation:
    """The instrumentation of this process. `instrumentation` is the one there is; tests make their own."""

    def __init__(self) -> None:
        self.hooks: dict[str, HookSet] = {}
        self._runtime: Runtime | None = None
        self._settings: Settings | None = None
        self._meter_provider: MeterProvider | None = None
        self._adapters: dict[str, Any] = {}
        self._lock = threading.RLock()

    @property
    def runtime(self) -> Runtime | None:
        """The process's runtime; None before the first hook was called."""
        return self._runtime

    def attach(self, engine: str, settings: Settings, *, meter_provider: MeterProvider | None = None) -> None:
        """Hooks an engine; a second call does nothing.

        Args:
            engine: One of `ENGINES`.
            settings: What to export, and where to.
            meter_provider: The provider to use; None for the process's own, or one made from the settings.
        """
        with self._lock:
            if engine in self.hooks:
                return
            self._settings, self._meter_provider = settings, meter_provider
            package, _ = ENGINES[engine]
            table = importlib.import_module(f"{package}.table")
            self.hooks[engine] = HookSet(table.HOOKS, lambda body: getattr(self._adapter(engine), body))
            self.hooks[engine].attach()

    def detach(self) -> None:
        """Gives every engine its own functions back and ends exporting; a second call does nothing."""
        with self._lock:
            hooks, self.hooks = self.hooks, {}
            runtime, self._runtime = self._runtime, None
            self._adapters.clear()
        for hook_set in hooks.values():
            hook_set.detach()
        if runtime is not None:
            runtime.stop()

    def _adapter(self, engine: str) -> Any:
        with self._lock:
            if engine not in self._adapters:
                package, name = ENGINES[engine]
                adapter: Callable[..., Any] = getattr(importlib.import_module(f"{package}.adapter"), name)
                runtime = self._alive()
                self._adapters[engine] = adapter(runtime.probe, runtime.flush)
            return self._adapters[engine]

    def _alive(self) -> Runtime:
        if self._runtime is None:
            from kvcache_otel.runtime import Runtime

            assert self._settings is not None
            self._runtime = Runtime(self._settings, tuple(self.hooks.values()), meter_provider=self._meter_provider)
        return self._runtime


instrumentation = Instrumentation()
