"""The catalogue as OpenTelemetry instruments that read the recorder."""

from __future__ import annotations

import logging
import os
import threading
from typing import TYPE_CHECKING

from opentelemetry.metrics import CallbackOptions, Histogram, Meter, Observation

from kvcache_otel import semconv
from kvcache_otel.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from opentelemetry.metrics import MeterProvider

    from kvcache_otel.record.recorder import Point, Recorder
    from kvcache_otel.spec import MetricSpec

_logger = logging.getLogger(__name__)

SCOPE_NAME = "kvcache_otel"

# How much of a collection's time may go by before its first metric is read.
CATCH_UP_SHARE = 0.5

# The metric that a collection asks for first: instruments are asked in the order in which they were made.
_FIRST = next(iter(semconv.METRICS.values()))

# Metrics whose rows add up, in the same order: the first that is asked for has all of them read.
_TOGETHER = (
    semconv.PREFETCH_HIT_TOKENS,
    semconv.PREFETCH_FULFILLED_TOKENS,
    semconv.PREFETCH_UNFULFILLED_TOKENS,
    semconv.PREFETCH_OUTSTANDING_TOKENS,
)


class Instruments:
    """The instruments of one meter.

    OpenTelemetry never gives an instrument back, and never adds a callback to one that exists. So the callbacks read
    whichever recorder is bound now, and none after `release` or in a forked child: there the series end.

    Attributes:
        histograms: Ordinary histograms by name, for `replay`; empty where a reader adds the cells.
    """

    def __init__(self, provider: MeterProvider, *, histograms: bool) -> None:
        """Args:
        provider: Whose meter makes the instruments.
        histograms: Whether histograms are made too.
        """
        self._recorder: Recorder | None = None
        self._catch_up: Callable[[float], None] | None = None
        self._pid = 0
        self._failed: set[str] = set()
        self._read = threading.local()  # Each collection is one thread's.
        meter = provider.get_meter(SCOPE_NAME, __version__)
        for spec in semconv.METRICS.values():
            self._observe(meter, spec)
        self.histograms: Mapping[str, Histogram] = _histograms(meter) if histograms else {}

    def bind(self, recorder: Recorder, catch_up: Callable[[float], None] | None = None) -> None:
        """Reads this recorder from now on, in this process.

        Args:
            recorder: The recorder.
            catch_up: Called first in each collection, with the seconds that it may take.
        """
        self._recorder, self._catch_up = recorder, catch_up
        self._pid = os.getpid()

    def release(self, recorder: Recorder) -> None:
        """Ends every series, unless another recorder has been bound since."""
        if self._recorder is recorder:
            self._recorder = self._catch_up = None

    def _observe(self, meter: Meter, spec: MetricSpec) -> None:
        create = {
            "counter": meter.create_observable_counter,
            "updowncounter": meter.create_observable_up_down_counter,
            "gauge": meter.create_observable_gauge,
        }.get(spec.instrument)
        if create is not None:
            create(spec.name, [self._callback(spec)], unit=spec.unit, description=spec.brief)

    def _callback(self, spec: MetricSpec) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(options: CallbackOptions) -> Iterable[Observation]:
            observations: list[Observation] = []
            recorder = self._recorder
            if recorder is None or os.getpid() != self._pid:
                return observations
            try:
                if spec is _FIRST:
                    recorder.freshen()
                    if self._catch_up is not None:
                        self._catch_up(CATCH_UP_SHARE * options.timeout_millis / 1000)
                for attributes, value in self._points(recorder, spec):
                    observations.append(Observation(value, attributes))
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # SystemExit would end the reader's thread, and nothing else.
                self._say_failed(recorder, spec, error)
            return observations

        return observe

    def _points(self, recorder: Recorder, spec: MetricSpec) -> Iterable[Point]:
        if spec not in _TOGETHER:
            return recorder.points(spec)
        if spec is _TOGETHER[0]:
            self._read.rows = recorder.together(_TOGETHER)
        rows: dict[str, list[Point]] = getattr(self._read, "rows", {})
        read = rows.pop(spec.name, None)
        return recorder.points(spec) if read is None else read

    def _say_failed(self, recorder: Recorder, spec: MetricSpec, error: BaseException) -> None:
        recorder.counter(semconv.TELEMETRY_ERRORS, {semconv.KVCACHE_TELEMETRY_HOOK: "export"}).add(1)
        if spec.name not in self._failed:
            self._failed.add(spec.name)
            _logger.warning("kvcache: %s is exported in part only: %r", spec.name, error)


def _histograms(meter: Meter) -> dict[str, Histogram]:
    return {
        spec.name: meter.create_histogram(
            spec.name, unit=spec.unit, description=spec.brief, explicit_bucket_boundaries_advisory=list(spec.bounds)
        )
        for spec in semconv.METRICS.values()
        if spec.instrument == "histogram"
    }
