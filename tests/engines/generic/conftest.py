"""A provider that the tests read from, and objects that are all given back."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from kvcache_otel.instrumentation import instrumentation
from tests.support.rows import Rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvcache_otel.runtime import Runtime


class Exported:
    """A provider of the test's own.

    Attributes:
        provider: The provider.
    """

    def __init__(self) -> None:
        self._reader = InMemoryMetricReader()
        self.provider = MeterProvider([self._reader])

    @property
    def runtime(self) -> Runtime:
        """What exports it."""
        _, runtime = instrumentation._others[id(self.provider)]
        return runtime

    @property
    def rows(self) -> Rows:
        """What is recorded for it."""
        assert self.runtime.recorder is not None
        return Rows(self.runtime.recorder)

    def names(self) -> set[str]:
        """The metrics that come out at the other end."""
        data = self._reader.get_metrics_data()
        if data is None:
            return set()
        scopes = [scope for resource in data.resource_metrics for scope in resource.scope_metrics]
        return {metric.name for scope in scopes for metric in scope.metrics if metric.data.data_points}


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> Iterator[Exported]:
    for variable in ("OTEL_SDK_DISABLED", "OTEL_PYTHON_DISABLED_INSTRUMENTATIONS", "OTEL_METRICS_EXPORTER"):
        monkeypatch.delenv(variable, raising=False)
    made = Exported()
    yield made
    instrumentation.detach()
    made.provider.shutdown()


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING, logger="kvcache_otel")
    return caplog
