"""Histogram cells in what an OpenTelemetry reader collects.

An OTel histogram costs a lock and a measurement object for each sample; a cell has already counted it. So a reader of
ours takes the counters and gauges from the SDK as usual, and adds the histograms to them on the way to its exporter.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import time
from typing import TYPE_CHECKING, Any, cast

from opentelemetry.sdk.metrics import Histogram as HistogramInstrument
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricReader,
    MetricsData,
    PeriodicExportingMetricReader,
    ScopeMetrics,
)
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from kvcache_otel import semconv
from kvcache_otel.export.instruments import SCOPE_NAME
from kvcache_otel.version import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcache_otel.record import cells
    from kvcache_otel.record.recorder import HistogramRow, Recorder
    from kvcache_otel.spec import MetricSpec

_logger = logging.getLogger(__name__)


class HistogramCollector:
    """What one reader has seen of the histogram cells."""

    def __init__(self, recorder: Recorder, temporality: AggregationTemporality) -> None:
        """Args:
        recorder: Whose histograms are read.
        temporality: Whether points hold all samples since now, or those since the collection before.
        """
        self._recorder = recorder
        self._temporality = temporality
        self._delta = temporality is AggregationTemporality.DELTA
        self._start_ns = time.time_ns()
        self._seen: dict[cells.Histogram, tuple[list[int], float]] = {}
        # A flush and the reader's own round may overlap, and no sample may be in both of their deltas.
        self._lock = threading.Lock()

    def collect(self) -> list[Metric]:
        """Returns every histogram that has rows now.

        Cumulative rows without samples are included: they say that the series exists. Delta rows without samples are
        left out, as in the SDK.
        """
        with self._lock:
            now_ns = time.time_ns()
            metrics = [
                Metric(
                    name=spec.name,
                    description=spec.brief,
                    unit=spec.unit,
                    data=Histogram(data_points=points, aggregation_temporality=self._temporality),
                )
                for spec in semconv.METRICS.values()
                if spec.instrument == "histogram" and (points := self._points(spec, now_ns))
            ]
            if self._delta:
                self._start_ns = now_ns
            return metrics

    def _points(self, spec: MetricSpec, now_ns: int) -> list[HistogramDataPoint]:
        points = (self._point(row, now_ns) for row in self._recorder.histograms(spec))
        return [point for point in points if point.count or not self._delta]

    def _point(self, row: HistogramRow, now_ns: int) -> HistogramDataPoint:
        counts, total = row.cell.read()
        if self._delta:
            counts, total = self._since_last(row.cell, counts, total)
        return HistogramDataPoint(
            attributes=row.attributes,
            start_time_unix_nano=self._start_ns,
            time_unix_nano=now_ns,
            count=sum(counts),
            sum=total,
            bucket_counts=counts,
            explicit_bounds=row.cell.bounds,
            # A cell does not know them. OTLP has a field for that: the absent one.
            min=cast("float", None),
            max=cast("float", None),
        )

    def _since_last(self, cell: cells.Histogram, counts: list[int], total: float) -> tuple[list[int], float]:
        before = self._seen.get(cell)
        self._seen[cell] = counts, total
        if before is None or sum(before[0]) > sum(counts):  # The cell is new, or has started again.
            return counts, total
        difference = [now - then for now, then in zip(counts, before[0], strict=True)]
        # Without this, the rounding of a long sum would show up as a sum of no samples, even a negative one.
        return difference, max(total - before[1], 0.0) if any(difference) else 0.0


class CellReader(MetricReader):
    """Goes before any other class of reader and adds the histogram cells to what that one receives.

    They are read before the counters: what has a duration was counted before, so no collection has more of the one than
    of the other.

    In a forked child it receives nothing: the SDK restarts its readers there, with the parent's values and the parent's
    identity, and the process that owns a cache makes a reader of its own.
    """

    def __init__(self, recorder: Recorder, *args: Any, **kwargs: Any) -> None:
        """Args:
        recorder: Whose histograms are added.
        args: For the reader's own class.
        kwargs: For the reader's own class.
        """
        self._pid = os.getpid()
        self._complained = False
        self._recorder = recorder
        self._taken = threading.local()  # Each collection is one thread's, and two may overlap.
        super().__init__(*args, **kwargs)
        self._histograms = HistogramCollector(recorder, self._histogram_temporality())

    # The SDK says that nobody should replace it, and has no other way to be heard before it asks for the counters.
    def collect(self, *args: Any, **kwargs: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Collects as the reader does it, and histogram cells before all else."""
        if os.getpid() == self._pid:
            self._recorder.freshen()
            self._taken.metrics = self._take()
        try:
            super().collect(*args, **kwargs)
        finally:
            self._taken.metrics = ()

    def _receive_metrics(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any) -> None:
        if os.getpid() != self._pid:
            return
        metrics_data = _with_metrics(metrics_data, getattr(self._taken, "metrics", ()))
        cast("Any", super())._receive_metrics(metrics_data, timeout_millis=timeout_millis, **kwargs)

    def _take(self) -> Sequence[Metric]:
        try:
            return self._histograms.collect()
        except Exception as error:  # The reader's thread would end with it, and all export with the thread.
            if not self._complained:
                self._complained = True
                _logger.warning("kvcache: histograms are not exported: %r", error)
            return ()

    def _at_fork_reinit(self) -> None:
        """Takes the place of the SDK's restart of a periodic reader in a forked child."""

    def _histogram_temporality(self) -> AggregationTemporality:
        by_class: dict[type, AggregationTemporality] = getattr(self, "_instrument_class_temporality", {})
        found = (temporality for kind, temporality in by_class.items() if issubclass(kind, HistogramInstrument))
        return next(found, AggregationTemporality.CUMULATIVE)


class PeriodicReader(CellReader, PeriodicExportingMetricReader):
    """Pushes counters, gauges and histogram cells every so often."""


def cell_reader(kind: type[MetricReader]) -> type[Any]:
    """Returns a class of reader that does what `kind` does and takes a recorder before the arguments of `kind`."""
    return type(kind.__name__, (CellReader, kind), {})


def _with_metrics(data: MetricsData, metrics: Sequence[Metric]) -> MetricsData:
    """Returns the collected data with more metrics in our scope, next to our other ones where there are any."""
    if not metrics or not data.resource_metrics:
        return data
    first, *others = data.resource_metrics
    scopes = list(first.scope_metrics)
    for position, ours in enumerate(scopes):
        if ours.scope.name == SCOPE_NAME:
            scopes[position] = dataclasses.replace(ours, metrics=[*ours.metrics, *metrics])
            break
    else:
        scope = InstrumentationScope(SCOPE_NAME, __version__)
        scopes.append(ScopeMetrics(scope=scope, metrics=metrics, schema_url=scope.schema_url or ""))
    return MetricsData(resource_metrics=[dataclasses.replace(first, scope_metrics=scopes), *others])
