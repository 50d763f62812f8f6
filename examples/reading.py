"""What a MeterProvider has been told, in this process: the examples have nobody else who would read it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, NumberDataPoint

from kvcache_otel import semconv

if TYPE_CHECKING:
    from collections.abc import Iterator

    from opentelemetry.sdk.metrics.export import HistogramDataPoint

SETTLE_SECONDS = 10.0
"""For durations to come after their transfers. They take a second: in a provider like this, a thread brings them."""


class Reading:
    """A provider of its own, and what comes out of it.

    Attributes:
        provider: The provider.
    """

    def __init__(self) -> None:
        self._reader = InMemoryMetricReader()
        self.provider = MeterProvider([self._reader])

    def values(self, metric: str) -> dict[str, float]:
        """Returns the rows of a counter or a gauge by the values of their own labels: ``{"host device": 5}``."""
        return {key: point.value for key, point in self._points(metric) if isinstance(point, NumberDataPoint)}

    def times(self, metric: str) -> dict[str, tuple[int, float]]:
        """Returns the rows of a histogram in the same way: how many samples there are, and their sum."""
        return {
            key: (point.count, point.sum)
            for key, point in self._points(metric)
            if not isinstance(point, NumberDataPoint)
        }

    def settle(self) -> None:
        """Waits until every transfer that has ended well has its duration.

        Raises:
            TimeoutError: They do not come.
        """
        deadline = time.monotonic() + SETTLE_SECONDS
        while self._ended() != sum(count for count, _ in self.times("kvcache.transfer.duration").values()):
            if time.monotonic() > deadline:
                raise TimeoutError("there are transfers without a duration")
            time.sleep(0.05)

    def table(self, *metrics: str) -> str:
        """Returns what some metrics say, one line for each row that is not 0."""
        lines: list[str] = []
        for metric in metrics:
            lines.append(metric)
            lines += [f"  {key:<28} {value:>12,g}" for key, value in sorted(self.values(metric).items()) if value]
            lines += [
                f"  {key:<28} {total * 1000:>9,.2f} ms for {count} of them"
                for key, (count, total) in sorted(self.times(metric).items())
                if count
            ]
        return "\n".join(lines)

    def close(self) -> None:
        """Ends the provider."""
        self.provider.shutdown()

    def _ended(self) -> float:
        # One that has failed has one label more: error.type.
        rows = self._points("kvcache.transfer.operations")
        return sum(point.value for _, point in rows if "error.type" not in (point.attributes or ()))  # type: ignore

    def _points(self, metric: str) -> Iterator[tuple[str, NumberDataPoint | HistogramDataPoint]]:
        data = self._reader.get_metrics_data()
        for resource in data.resource_metrics if data else ():
            for found in (found for scope in resource.scope_metrics for found in scope.metrics):
                for point in found.data.data_points if found.name == metric else ():
                    labels = dict(point.attributes or {})
                    keys = (key for key in semconv.METRICS[metric].attributes if key not in semconv.IDENTITY_ATTRIBUTES)
                    yield " ".join(str(labels[key]) for key in keys if key in labels), point  # type: ignore
