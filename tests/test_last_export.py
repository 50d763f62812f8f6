"""The last export of a process has all that there is."""

from __future__ import annotations

from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    MetricExporter,
    MetricExportResult,
    MetricsData,
    PeriodicExportingMetricReader,
)

import kvcache_otel as kv
from kvcache_otel import semconv
from kvcache_otel.instrumentation import instrumentation


class Keeping(MetricExporter):
    """Keeps the names of the metrics that it was given last."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def export(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any) -> MetricExportResult:
        scopes = [scope for resource in metrics_data.resource_metrics for scope in resource.scope_metrics]
        self.names = {metric.name for scope in scopes for metric in scope.metrics}
        return MetricExportResult.SUCCESS

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        return True

    def shutdown(self, timeout_millis: float = 30_000, **kwargs: Any) -> None:
        pass


class Cache:
    blocks = 3

    def evict(self, tokens: int) -> int:
        return tokens


def test_the_last_export_has_the_gauges_of_caches_that_are_still_there() -> None:
    exporter = Keeping()
    provider = MeterProvider([PeriodicExportingMetricReader(exporter, export_interval_millis=1e8)])
    cache = Cache()
    kv.instrument_tree_core(
        cache,
        tiers={"device": "kv"},
        methods={"evict": kv.Eviction(tokens=lambda gone, _: gone)},
        gauges=kv.Gauges(resident={"device": "blocks"}),
        meter_provider=provider,
    )
    cache.evict(1)
    instrumentation.detach()
    assert {semconv.EVICTION_TOKENS.name, semconv.RESIDENT_BLOCKS.name} <= exporter.names
    assert semconv.TELEMETRY_HOOK_ATTACHED.name in exporter.names
    assert "evict" not in vars(cache)
    provider.shutdown()
