"""Histogram samples for a provider that is not ours: taken from the queue and recorded again, off the hot path."""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Mapping

    from opentelemetry.metrics import Histogram

    from kvcache_otel.record.cells import ReplayedHistogram

_logger = logging.getLogger(__name__)

INTERVAL_S = 1.0
# Recording takes about 10 us, so one round holds the interpreter for 50 ms at most, in slices of its switch interval.
PER_ROUND = 5_000


class Replay:
    """A thread that empties the queue about once a second, and what is left of it before each collection."""

    def __init__(self, queue: deque[tuple[ReplayedHistogram, float]], histograms: Mapping[str, Histogram]) -> None:
        """Args:
        queue: Where the samples wait.
        histograms: By metric name; samples of others are thrown away.
        """
        self._queue = queue
        self._histograms = histograms
        self._pid = os.getpid()
        self._complained = False
        # Held while samples are on their way, so that a flush does not overtake those of the thread's round.
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvcache-replay", daemon=True)
        self._thread.start()

    def flush(self) -> None:
        """Records every sample that waits now. Does nothing in a forked child."""
        if os.getpid() == self._pid:
            self._record(len(self._queue))

    def catch_up(self, timeout_s: float, *, last: bool) -> None:
        """Records what waits, inside a callback of a collection of the SDK's, which keeps no lock that this needs.

        Args:
            timeout_s: How long it may take, in seconds.
            last: Whether nothing is collected afterwards: what is left is counted as lost, in this very collection.
        """
        until = time.monotonic() + timeout_s
        if not self._lock.acquire(timeout=max(timeout_s, 0)):
            return
        try:
            for _ in range(len(self._queue)):
                if time.monotonic() >= until:
                    break
                self._record_next()
            if last and self._queue:
                self._lose()
        finally:
            self._lock.release()

    def stop(self) -> None:
        """Ends the thread and records what is left."""
        self._stop.set()
        self.flush()

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            self._record(PER_ROUND)

    def _record(self, at_most: int) -> None:
        with self._lock:
            for _ in range(at_most):
                if not self._record_next():
                    return

    def _record_next(self) -> bool:
        try:
            cell, sample = self._queue.popleft()
        except IndexError:
            return False
        histogram = self._histograms.get(cell.name)
        if histogram is not None:
            self._record_one(histogram, sample, cell.attributes)
        return True

    def _lose(self) -> None:
        lost = 0
        while self._queue:
            cell, _ = self._queue.popleft()
            cell.lose()
            lost += 1
        _logger.warning(
            "kvcache: the MeterProvider was shut down before %d histogram samples could be recorded; see "
            "kvcache.telemetry.dropped",
            lost,
        )

    def _record_one(self, histogram: Histogram, sample: float, attributes: Mapping[str, str | int]) -> None:
        try:
            histogram.record(sample, attributes)
        except Exception as error:
            if not self._complained:
                self._complained = True
                _logger.warning("kvcache: the MeterProvider refused a histogram sample: %r", error)
