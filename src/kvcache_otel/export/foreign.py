"""Readers that the SDK made from somebody's configuration, and what keeps them from doing harm here."""

from __future__ import annotations

import dataclasses
import logging
import os
from typing import TYPE_CHECKING, Any

from opentelemetry.sdk.metrics.export import ExponentialHistogram, MetricsData

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_logger = logging.getLogger(__name__)


def readers_of(provider: Any) -> Sequence[Any] | None:
    """Returns the readers of somebody's provider; None where it does not show them. The SDK has no public name."""
    for owner, name in (
        (provider, "_metric_readers"),
        (getattr(provider, "_sdk_config", None), "metric_readers"),  # In older SDKs.
    ):
        if (readers := getattr(owner, name, None)) is not None:
            return list(readers)
    return None


def has_ended(provider: Any) -> bool:
    """Returns whether somebody's provider was shut down; False where it does not say. The SDK has no public name."""
    return getattr(provider, "_shutdown", False) is True


def silence_in_children(provider: Any) -> None:
    """Makes the readers of a provider receive nothing in a forked child, as `CellReader` does."""
    pid = os.getpid()

    def silence(receive: Callable[..., None]) -> Callable[..., None]:
        def received(*args: Any, **kwargs: Any) -> None:
            if os.getpid() == pid:
                receive(*args, **kwargs)

        return received

    for reader in readers_of(provider) or ():
        if (receive := getattr(reader, "_receive_metrics", None)) is not None:
            reader._receive_metrics = silence(receive)


def spare_prometheus(provider: Any) -> None:
    """Keeps exponential histograms from the Prometheus readers of a provider: one would fail the whole scrape."""
    said = False

    def spare(receive: Callable[..., None]) -> Callable[..., None]:
        def received(metrics_data: Any, *args: Any, **kwargs: Any) -> None:
            nonlocal said
            spared, left_out = _without_exponential(metrics_data)
            if left_out and not said:
                said = True
                _logger.warning(
                    "kvcache: Prometheus is not served %s: OTEL_CONFIG_FILE makes exponential histograms of them, "
                    "which the exporter cannot render; the rest is served",
                    ", ".join(left_out),
                )
            receive(spared, *args, **kwargs)

        return received

    for reader in readers_of(provider) or ():
        is_prometheus = any(kind.__name__ == "PrometheusMetricReader" for kind in type(reader).__mro__)
        if is_prometheus and (receive := getattr(reader, "_receive_metrics", None)) is not None:
            reader._receive_metrics = spare(receive)


def _without_exponential(data: MetricsData | None) -> tuple[MetricsData | None, list[str]]:
    """Returns collected data without its exponential histograms, and their names."""
    if data is None:
        return None, []
    left_out = [
        metric.name
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        if isinstance(metric.data, ExponentialHistogram)
    ]
    if not left_out:
        return data, []
    resources = [
        dataclasses.replace(
            resource,
            scope_metrics=[
                dataclasses.replace(scope, metrics=[metric for metric in scope.metrics if metric.name not in left_out])
                for scope in resource.scope_metrics
            ],
        )
        for resource in data.resource_metrics
    ]
    return MetricsData(resource_metrics=resources), left_out
