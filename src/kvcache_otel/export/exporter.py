"""The handle on what a process exports."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from typing import TYPE_CHECKING, Any

from kvcache_otel.export.deadline import EXIT_DEADLINE_S, Prepared, run_within
from kvcache_otel.export.foreign import has_ended, readers_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcache_otel.export.instruments import Instruments
    from kvcache_otel.export.prometheus import PrometheusServer
    from kvcache_otel.export.replay import Replay
    from kvcache_otel.record.recorder import Recorder

_logger = logging.getLogger(__name__)

# What is left of the time to end in, for saying that an export was given up.
LAST_WORD_S = 0.1


class Exporter:
    """What `start` has started. Every method returns in time and raises nothing, whatever the collector does.

    Attributes:
        endpoints: What is exported where, and which variable asked for it; one line each.
        ports: The ports of Prometheus endpoints of ours.
    """

    def __init__(
        self,
        recorder: Recorder,
        instruments: Instruments,
        provider: Any,
        *,
        own: bool,
        replay: Replay | None,
        servers: Sequence[PrometheusServer],
        endpoints: Sequence[str],
    ) -> None:
        """Args:
        recorder: What is exported.
        instruments: What reads it.
        provider: The MeterProvider.
        own: Whether the provider is ours alone, and is shut down with us.
        replay: What feeds the histograms of a provider that is not ours.
        servers: Prometheus endpoints.
        endpoints: As in the attribute.
        """
        self.endpoints = list(endpoints)
        self.ports = [server.port for server in servers]
        self._recorder = recorder
        self._instruments = instruments
        self._provider = provider
        self._own = own
        self._replay = replay
        self._servers = servers
        self._pid = os.getpid()
        self._deadline = 0.0
        self._flushing = threading.Lock()
        self._closing = Prepared(self._close, "kvcache-stop")
        atexit.register(self._at_exit)

    def flush(self, timeout_s: float) -> bool:
        """Exports what has been recorded, now.

        Args:
            timeout_s: How long to wait for it, in seconds.

        Returns:
            Whether everything was handed over in time. A collector that answers with an error is not seen here: the
            SDK logs it.
        """
        if self._is_inherited():
            return False
        deadline = time.monotonic() + timeout_s

        def flush() -> None:
            # Taken here, where no signal handler runs: one that raises SystemExit would keep it locked for ever.
            if not self._flushing.acquire(timeout=max(deadline - time.monotonic(), 0)):
                raise TimeoutError("the flush before this one still hangs")
            try:
                self._flush(deadline)
            finally:
                self._flushing.release()

        try:
            return run_within(flush, timeout_s, "kvcache-flush")
        except RuntimeError:
            return False

    def stop(self, timeout_s: float) -> bool:
        """Exports a last time and ends everything that `start` started; a second call only waits for the first.

        Args:
            timeout_s: How long to wait for it, in seconds. What still hangs then is left to a daemon thread.

        Returns:
            Whether it ended in time.
        """
        if self._is_inherited():
            return True
        atexit.unregister(self._at_exit)
        self._deadline = self._deadline or time.monotonic() + timeout_s
        return self._closing.run(timeout_s)

    def _flush(self, deadline: float) -> None:
        if self._replay is not None:
            self._replay.flush()
        milliseconds = max(deadline - time.monotonic(), 0.001) * 1000
        for flushable in _flushable(self._provider):
            flushable.force_flush(timeout_millis=milliseconds)

    def _close(self) -> None:
        """Runs on the closing thread."""
        try:
            for server in self._servers:
                server.close()
            if self._replay is not None:
                self._replay.stop()
            if self._own:
                left = self._deadline - time.monotonic() - LAST_WORD_S
                self._provider.shutdown(timeout_millis=max(left, 0.001) * 1000)
            elif not has_ended(self._provider):
                self._flush(self._deadline)
        finally:
            self._instruments.release(self._recorder)

    def _at_exit(self) -> None:
        if self._own:
            self.stop(EXIT_DEADLINE_S)
        elif self._replay is not None and not self._is_inherited():
            # The provider's owner exports a last time after this; our series must still be there then.
            self._replay.flush()

    def _is_inherited(self) -> bool:
        return os.getpid() != self._pid


def _flushable(provider: Any) -> list[Any]:
    """Returns what to flush: the provider, or its readers one by one where a Prometheus reader is among them.

    A flushed Prometheus reader keeps what it collected, and its next scrape answers every series twice.
    """
    readers = readers_of(provider) or ()
    pushing = [reader for reader in readers if not hasattr(reader, "_collector")]
    if len(pushing) < len(readers):
        return pushing
    return [provider] if hasattr(provider, "force_flush") else []
