"""The engines that can be instrumented in this process, and the one thing that holds hooks and runtime together.

Attaching imports neither the adapter nor the runtime: that happens when the first hook is called, in a process that
does have a cache.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from kvcache_otel.engines.hooks import HookSet
from kvcache_otel.engines.versions import is_before

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable

    from opentelemetry.metrics import MeterProvider

    from kvcache_otel.export.settings import Settings
    from kvcache_otel.identity import Identity
    from kvcache_otel.record.probe import CacheProbe
    from kvcache_otel.runtime import Runtime

_logger = logging.getLogger("kvcache_otel")

# The engines that this package knows, by the name of their module: where each one's hook table is, and what its adapter
# is called.
ENGINES = {
    "vllm": ("kvcache_otel.engines.vllm", "VllmAdapter"),
    "sglang": ("kvcache_otel.engines.sglang", "SglangAdapter"),
}


class Instrumentation:
    """The instrumentation of this process. `instrumentation` is the one there is; tests make their own."""

    def __init__(self) -> None:
        self.hooks: dict[str, HookSet] = {}
        self._runtime: Runtime | None = None
        self._settings: Settings | None = None
        self._meter_provider: MeterProvider | None = None
        self._adapters: dict[str, Any] = {}
        self._others: dict[int, tuple[MeterProvider, Runtime]] = {}
        self._said: set[str] = set()
        self._rehearsed: list[tuple[Identity, MeterProvider | None]] | None = None
        self._lock = threading.RLock()
        os.register_at_fork(after_in_child=self._forked)

    @property
    def runtime(self) -> Runtime | None:
        """The process's runtime; None before the first hook was called."""
        return self._runtime

    def attach(self, engine: str, settings: Settings, *, meter_provider: MeterProvider | None = None) -> None:
        """Hooks an engine; a second call does nothing, but for a provider that it names before the first cache.

        Args:
            engine: One of `ENGINES`.
            settings: What to export, and where to.
            meter_provider: The provider to use; None for the process's own, or one made from the settings.
        """
        if not _counts_exactly():
            self._warn("not instrumented: this Python has no global lock, without which counts are lost")
            return
        with self._lock:
            if meter_provider is not None and self._runtime is not None:
                self._warn("the meter_provider comes too late: a cache is being measured already")
            elif meter_provider is not None or not self.hooks:
                self._settings, self._meter_provider = settings, meter_provider
            if engine in self.hooks:
                return
            package, _ = ENGINES[engine]
            table = importlib.import_module(f"{package}.table")
            self.hooks[engine] = HookSet(
                table.HOOKS,
                lambda body: getattr(self._adapter(engine), body),
                table.PLACE,
                lambda: self._hook_failed(engine),
            )
            self.hooks[engine].attach()
            if meter_provider is not None and not settings.enabled and is_installed(engine):
                _check_processes(table)

    def own_probe(self, identity: Identity, meter_provider: MeterProvider | None = None) -> CacheProbe | None:
        """Returns the probe for a cache of the program's own; None where nothing is to be measured in this process.

        Args:
            identity: The cache's.
            meter_provider: The provider to use; None for the one that `attach` was given, the process's own, or one
                made from the environment.

        Raises:
            TypeError: That is none.
        """
        if not _counts_exactly():
            self._warn("not instrumented: this Python has no global lock, without which counts are lost")
            return None
        from opentelemetry.metrics import MeterProvider

        from kvcache_otel.export.settings import Settings
        from kvcache_otel.runtime import Runtime

        if not isinstance(meter_provider, MeterProvider | None):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"meter_provider= must be a MeterProvider, and not a {type(meter_provider).__name__}")
        self._leave_ended(meter_provider)
        with self._lock:
            settings = self._settings or Settings.from_environ(os.environ)
            if self._rehearsed is not None:
                self._rehearsed.append((identity, meter_provider))
                return _unread_probe(identity)
            if settings.forbidden:
                _logger.info("kvcache: not instrumented: %s", settings.reason)
                return None
            if meter_provider is None or meter_provider is self._meter_provider:
                self._settings = settings
                return self._alive().probe(identity)
            known = self._others.get(id(meter_provider))
            if known is None:
                made = Runtime(settings, meter_provider=meter_provider)
                known = self._others[id(meter_provider)] = meter_provider, made
            return known[1].probe(identity)

    def unexported(self, *, provided: bool) -> str:
        """Returns why nothing is exported of a cache of the program's own, in one line; empty where something is.

        Args:
            provided: Whether it was given a provider.
        """
        if self._rehearsed is not None:
            return ""
        from kvcache_otel.export.settings import Settings

        settings, runtime = self._settings or Settings.from_environ(os.environ), self._runtime
        if settings.forbidden:
            return settings.reason
        if provided or runtime is None or runtime.exporter is not None:
            return ""
        return f"nothing is exported ({settings.variable}): the log says why" if settings.enabled else settings.reason

    def _leave_ended(self, wanted: MeterProvider | None) -> None:
        """Ends what exports to providers that were shut down, but for the one that is wanted."""
        if not self._others:
            return
        from kvcache_otel.export.foreign import has_ended

        with self._lock:
            ended = [key for key, (other, _) in self._others.items() if other is not wanted and has_ended(other)]
            left = [self._others.pop(key)[1] for key in ended]
        for runtime in left:
            runtime.stop()

    @contextmanager
    def rehearsal(self) -> Generator[list[tuple[Identity, MeterProvider | None]]]:
        """Has caches of the program's own tell nobody: meanwhile nothing is exported, and nothing opened.

        Yields:
            The cache and the provider of each call of `own_probe` so far.
        """
        before, self._rehearsed = self._rehearsed, []
        try:
            yield self._rehearsed
        finally:
            self._rehearsed = before

    def detach(self) -> None:
        """Exports a last time and gives every engine its own functions back; a second call does nothing."""
        with self._lock:
            exporting = self._runtime, *(other for _, other in self._others.values())
        _stop(exporting)  # First: gauges end with the hooks, and belong to the last export as all else.
        generic: Any = sys.modules.get("kvcache_otel.engines.generic.handle")
        if hasattr(generic, "remove_all"):  # Another thread may be importing it.
            generic.remove_all()
        with self._lock:
            others, self._others = self._others, {}
            self._settings = self._meter_provider = None
            hooks, self.hooks = self.hooks, {}
            runtime, self._runtime = self._runtime, None
            adapters, self._adapters = self._adapters, {}
            self._said.clear()
        for hook_set in hooks.values():
            hook_set.detach()
        for adapter in adapters.values():
            if hasattr(adapter, "forget"):
                with suppress(
                    Exception
                ):  # What an engine's objects do when they are touched is not the caller's affair.
                    adapter.forget()
        _stop((runtime, *(other for _, other in others.values())))  # What came to life meanwhile.
        foreign: Any = sys.modules.get("kvcache_otel.record.foreign")
        if hasattr(foreign, "let_go"):
            foreign.let_go()  # Last: until then what waits was to be heard.

    def _warn(self, problem: str) -> None:
        """Says what holds for every engine once, and not once for each."""
        if problem not in self._said:
            self._said.add(problem)
            _logger.warning("kvcache: %s", problem)

    def _forked(self) -> None:
        self._lock = threading.RLock()  # Whoever held it is not in this process.

    def _adapter(self, engine: str) -> Any:
        with self._lock:
            if engine not in self.hooks:
                raise LookupError(f"{engine} was detached meanwhile")
            if engine not in self._adapters:
                package, name = ENGINES[engine]
                adapter: Callable[..., Any] = getattr(importlib.import_module(f"{package}.adapter"), name)
                borrow_handlers(engine)  # Again: some engines configure their loggers after they have loaded plugins.
                table = importlib.import_module(f"{package}.table")
                _check_version(engine, table)
                runtime = self._alive()
                made = self._adapters[engine] = adapter(runtime.probe, runtime.flush)
                if hasattr(made, "watch_hooks"):
                    hooks, version = self.hooks[engine], _version(engine)
                    if is_before(version, table.SUPPORTED[0]):  # Some call what was built from source 0.0.0.
                        version = ""
                    made.watch_hooks(lambda: hooks.lost(version), hooks.failed)
            return self._adapters[engine]

    def _hook_failed(self, engine: str) -> None:
        """Tells an engine's adapter, where it has one that wants to know, that a hook of its has missed something."""
        adapter: Any = self._adapters.get(engine)
        if hasattr(adapter, "hook_failed"):
            adapter.hook_failed()

    def _alive(self) -> Runtime:
        if self._runtime is None:
            from kvcache_otel.runtime import Runtime

            assert self._settings is not None
            self._runtime = Runtime(self._settings, tuple(self.hooks.values()), meter_provider=self._meter_provider)
        return self._runtime


def _stop(runtimes: Iterable[Runtime | None]) -> None:
    for runtime in runtimes:
        if runtime is not None:
            runtime.stop()


def is_installed(engine: str) -> bool:
    """Returns whether this Python finds an engine; it is not imported."""
    from importlib.util import find_spec

    try:
        return find_spec(engine) is not None
    except (ImportError, ValueError):  # ValueError: it is imported, and not as a module usually is.
        return engine in sys.modules


def borrow_handlers(engine: str) -> None:
    """Lets an engine's log have what we say. Engines leave the root logger alone, so nobody would see it there."""
    theirs = logging.getLogger(engine)
    if theirs.handlers and not _logger.hasHandlers():
        for handler in theirs.handlers:
            _logger.addHandler(handler)
        _logger.setLevel(theirs.level)


def _counts_exactly() -> bool:
    # As `record.cells.EXACT` has it; importing that takes longer than a process without a cache should wait for us.
    return getattr(sys, "_is_gil_enabled", lambda: True)()


def _check_processes(table: Any) -> None:
    variable, value = table.IN_ONE_PROCESS or ("", "")
    if not variable or os.environ.get(variable, "") != value:
        _logger.warning(
            "kvcache: %s runs in other processes%s, and the meter_provider given here does not follow it; "
            "the OTEL_* variables do",
            table.NAME,
            f" unless {variable}={value}" if variable else "",
        )


def _check_version(engine: str, table: Any) -> None:
    from kvcache_otel.engines.versions import warning

    if problem := warning(table.NAME, _version(engine), table.SUPPORTED, table.FULL):
        _logger.warning("kvcache: %s (`kvcache-otel doctor` lists it)", problem)


def _version(engine: str) -> str:
    try:
        return str(getattr(sys.modules.get(engine), "__version__", ""))
    except Exception:  # An engine's module may run code of its own when it is asked.
        return ""


def _unread_probe(identity: Identity) -> CacheProbe:
    from kvcache_otel.record.probe import CacheProbe
    from kvcache_otel.record.recorder import Recorder

    return CacheProbe(Recorder(identity), identity)


instrumentation = Instrumentation()
