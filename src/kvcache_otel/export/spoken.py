"""Says when a push exporter stops getting through, and when it does again: one line each, not one for every attempt."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from opentelemetry.sdk.metrics.export import AggregationTemporality, MetricExporter, MetricExportResult

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricsData

_logger = logging.getLogger(__name__)


class SpokenExporter(MetricExporter):
    """Passes everything on to another exporter, and says what becomes of it.

    The SDK's own exporters log their failures, in words that name neither the variable at fault nor what it means.
    """

    def __init__(self, exporter: Any, what: str) -> None:
        """Args:
        exporter: The exporter.
        what: Where it exports to and which variable asked for it, in words.
        """
        super().__init__(
            preferred_temporality=getattr(exporter, "_preferred_temporality", None),
            preferred_aggregation=getattr(exporter, "_preferred_aggregation", None),
        )
        self._exporter = exporter
        self._what = what
        self._failing = self._ending = self._lost = False
        self._underway = 0
        temporalities = (self._preferred_temporality or {}).values()
        self._sends_deltas = AggregationTemporality.DELTA in temporalities

    def export(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any) -> MetricExportResult:
        """Exports, and says when the outcome is another than the last time."""
        self._underway += 1
        try:
            result = self._exporter.export(metrics_data, timeout_millis=timeout_millis, **kwargs)
        except Exception:
            self._say(failing=True)
            raise
        finally:
            self._underway -= 1
        self._say(failing=result is not MetricExportResult.SUCCESS)
        return result

    def force_flush(self, *args: Any, **kwargs: Any) -> bool:
        """As the exporter does it."""
        return self._exporter.force_flush(*args, **kwargs)

    def shutdown(self, *args: Any, **kwargs: Any) -> None:
        """As the exporter does it; says so where nothing got through in the end."""
        self._ending = True
        if self._failing or self._underway:  # It waits to be tried again, and gives that up now.
            self._say_lost()
        self._exporter.shutdown(*args, **kwargs)

    def _say(self, *, failing: bool) -> None:
        if failing == self._failing:
            return
        self._failing = failing
        if failing and self._ending:
            self._say_lost()
        elif failing:
            _logger.warning(
                "kvcache: nothing gets through to %s; the engine is not affected, counting goes on, and %s "
                "(`kvcache-otel doctor` looks at the endpoint)",
                self._what,
                "what is counted until exports get through is lost, as they are deltas"
                if self._sends_deltas
                else "the next export that gets through has it all, if there is one before the process ends",
            )
        else:
            _logger.info("kvcache: exports get through again to %s", self._what)

    def _say_lost(self) -> None:
        if self._lost:
            return
        self._lost = True
        _logger.warning(
            "kvcache: the last export did not get through in time to %s: what was counted since one did is lost "
            "(`kvcache-otel doctor` looks at the endpoint)",
            self._what,
        )
