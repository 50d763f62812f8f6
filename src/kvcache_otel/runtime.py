"""What this process records into and exports through: brought to life by the first cache, anew in a forked child."""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from typing import TYPE_CHECKING

from kvcache_otel import semconv
from kvcache_otel.export.provider import needs_replay, process_provider, start
from kvcache_otel.record.probe import CacheProbe
from kvcache_otel.record.recorder import Recorder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from opentelemetry.metrics import MeterProvider

    from kvcache_otel.engines.hooks import HookPoint, HookSet
    from kvcache_otel.export.provider import Exporter
    from kvcache_otel.export.settings import Settings
    from kvcache_otel.identity import Identity

_recorder_of: weakref.WeakKeyDictionary[MeterProvider, Recorder] = weakref.WeakKeyDictionary()

# What a dying engine process may wait for its last export. vLLM gives its children 5 s in all.
FLUSH_SECONDS = 1.0

# How much of that a device which does not answer may take from the export. One that does takes a millisecond.
HARVEST_SHARE = 0.5


class Runtime:
    """The recorder and the exporter of this process, and the hooks whose state they report."""

    def __init__(
        self, settings: Settings, hooks: Sequence[HookSet] = (), *, meter_provider: MeterProvider | None = None
    ) -> None:
        """Args:
        settings: What to export, and where to.
        hooks: The hooks whose state is to be exported.
        meter_provider: The provider to use; None for the process's own, or one made from the settings.
        """
        self._settings = settings
        self._meter_provider = meter_provider
        self._hooks = tuple(hooks)
        self._lock = threading.RLock()  # A signal handler may stop what it has interrupted.
        self._stopped = False
        self._recorder: Recorder | None = None
        self._exporter: Exporter | None = None
        this = weakref.ref(self)  # A program may have many providers, one after the other.

        def forked() -> None:
            if (runtime := this()) is not None:
                runtime._forked()

        os.register_at_fork(after_in_child=forked)

    @property
    def recorder(self) -> Recorder | None:
        """The process's recorder; None before the first cache."""
        return self._recorder

    @property
    def exporter(self) -> Exporter | None:
        """The process's exporter; None before the first cache, and where none could be started."""
        return self._exporter

    def probe(self, identity: Identity, local_rank: int = 0) -> CacheProbe:
        """Returns the probe for a cache that has been built; the first call starts the exporter.

        Args:
            identity: The cache's.
            local_rank: Which of the engine's processes on this machine owns it; moves the Prometheus port.
        """
        with self._lock:
            if self._recorder is None:
                self._recorder = self._make_recorder(identity)
                self._watch_hooks(self._recorder)
                if not self._stopped:
                    self._exporter = start(
                        self._recorder, self._settings, local_rank=local_rank, meter_provider=self._meter_provider
                    )
                    atexit.register(self._at_exit)  # Runs before what the exporter has registered.
            return CacheProbe(self._recorder, identity)

    def flush(self, timeout_s: float = FLUSH_SECONDS) -> bool:
        """Exports what there is; returns whether that was done in time. Never raises, never takes longer."""
        deadline = time.monotonic() + timeout_s
        recorder, exporter = self._recorder, self._exporter
        if recorder is not None:
            recorder.harvester.flush(timeout_s * HARVEST_SHARE)
        return exporter.flush(max(deadline - time.monotonic(), 0)) if exporter is not None else True

    def stop(self, timeout_s: float = FLUSH_SECONDS) -> None:
        """Exports what there is and ends exporting. Never raises, never takes longer."""
        deadline = time.monotonic() + timeout_s
        atexit.unregister(self._at_exit)
        with self._lock:
            self._stopped = True
            recorder, exporter = self._recorder, self._exporter
            self._recorder = self._exporter = None
        if recorder is not None:
            recorder.harvester.stop(timeout_s * HARVEST_SHARE)
        if exporter is not None:
            exporter.stop(max(deadline - time.monotonic(), 0))

    def _at_exit(self) -> None:
        if self._recorder is not None:
            self._recorder.harvester.flush(FLUSH_SECONDS * HARVEST_SHARE)

    def _make_recorder(self, identity: Identity) -> Recorder:
        """Returns a new recorder, or the one that this MeterProvider has read before.

        A provider keeps its instruments for ever, and their counters may not go down.
        """
        replay = needs_replay(self._settings, self._meter_provider)
        provider = self._meter_provider or process_provider()
        if provider is None:
            return Recorder(identity, replay=replay)
        recorder = _recorder_of.get(provider)
        if recorder is None:
            recorder = _recorder_of[provider] = Recorder(identity, replay=replay)
        return recorder

    def _watch_hooks(self, recorder: Recorder) -> None:
        for hooks in self._hooks:
            for point in hooks.points:
                labels: dict[str, str | int] = {semconv.KVCACHE_TELEMETRY_HOOK: point.hook.name}
                recorder.observe(semconv.TELEMETRY_HOOK_ATTACHED, labels, _attached(point))
                recorder.observe(semconv.TELEMETRY_ERRORS, labels, _errors(point))

    def _forked(self) -> None:
        # The child owns none of the parent's caches yet. What they counted so far was the parent's to tell, and the
        # parent's exporter does not work here.
        self._lock = threading.RLock()
        if self._recorder is not None:
            self._recorder.reset()
        _recorder_of.clear()
        self._recorder = None
        self._exporter = None


def _attached(point: HookPoint) -> Callable[[], int | None]:
    # No row while the module has not been imported: then there is nothing here that this hook could see.
    return lambda: None if point.state == "waiting" else int(point.state == "attached")


def _errors(point: HookPoint) -> Callable[[], int | None]:
    return lambda: None if point.state == "waiting" else point.errors
