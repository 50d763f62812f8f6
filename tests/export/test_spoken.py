"""One line when exports stop getting through, one when they do again."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any

import pytest
from opentelemetry.sdk.metrics import Counter
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    MetricExporter,
    MetricExportResult,
    MetricsData,
)

from kvcache_otel.export.spoken import SpokenExporter
from tests.support.processes import free_port

NOTHING = MetricsData(resource_metrics=[])


class Scripted(MetricExporter):
    """An exporter whose outcomes are given beforehand; an exception is raised."""

    def __init__(self, *outcomes: MetricExportResult | Exception) -> None:
        super().__init__(preferred_temporality={Counter: AggregationTemporality.DELTA})
        self.outcomes = list(outcomes)
        self.calls: list[tuple[str, Any]] = []

    def export(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any) -> MetricExportResult:
        self.calls.append(("export", timeout_millis))
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        self.calls.append(("flush", timeout_millis))
        return False

    def shutdown(self, timeout_millis: float = 30_000, **kwargs: Any) -> None:
        self.calls.append(("shutdown", timeout_millis))


OK, FAILED = MetricExportResult.SUCCESS, MetricExportResult.FAILURE


def test_each_change_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    exporter = SpokenExporter(Scripted(OK, FAILED, FAILED, FAILED, OK, OK, FAILED), "OTLP to there (VARIABLE=there)")
    results = [exporter.export(NOTHING) for _ in range(7)]
    assert results == [OK, FAILED, FAILED, FAILED, OK, OK, FAILED]
    levels = [record.levelname for record in caplog.records]
    assert levels == ["WARNING", "INFO", "WARNING"]
    assert all("VARIABLE=there" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("before", [FAILED, OK])
def test_a_last_export_that_does_not_get_through_is_said_to_be_the_last(
    caplog: pytest.LogCaptureFixture, before: MetricExportResult
) -> None:
    """One that waits to be tried again is told to give up before it has failed."""
    exporter = SpokenExporter(Scripted(before, FAILED), "there")
    exporter.export(NOTHING)
    exporter.shutdown()
    exporter.export(NOTHING)
    *_, last = [record.getMessage() for record in caplog.records]
    assert last.startswith("kvcache: the last export did not get through in time to there: ")
    assert len(caplog.records) == (1 if before is OK else 2)


def test_an_export_that_is_given_up_at_the_end_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    scripted = Scripted(FAILED)
    exporter = SpokenExporter(scripted, "there")
    export = scripted.export

    def ended_meanwhile(*args: Any, **kwargs: Any) -> MetricExportResult:
        exporter.shutdown()
        assert len(caplog.records) == 1  # The process may not live to see it return.
        return export(*args, **kwargs)

    scripted.export = ended_meanwhile  # type: ignore[method-assign]
    exporter.export(NOTHING)
    [line] = caplog.messages
    assert line.startswith("kvcache: the last export did not get through in time")


def test_exports_that_get_through_end_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    exporter = SpokenExporter(Scripted(OK), "there")
    exporter.export(NOTHING)
    exporter.shutdown()
    assert caplog.records == []


def test_nothing_is_promised_of_another_export(caplog: pytest.LogCaptureFixture) -> None:
    cumulative = Scripted(FAILED)
    cumulative._preferred_temporality = {Counter: AggregationTemporality.CUMULATIVE}
    SpokenExporter(cumulative, "there").export(NOTHING)
    [line] = caplog.messages
    assert "has it all, if there is one before the process ends" in line


def test_an_exception_is_a_failure_and_passes(caplog: pytest.LogCaptureFixture) -> None:
    exporter = SpokenExporter(Scripted(ConnectionError("gone"), ConnectionError("gone")), "there")
    for _ in range(2):
        with pytest.raises(ConnectionError, match="gone"):
            exporter.export(NOTHING)
    assert len(caplog.records) == 1


def test_everything_else_is_the_exporters_own() -> None:
    scripted = Scripted(OK)
    exporter = SpokenExporter(scripted, "there")
    assert exporter._preferred_temporality == {Counter: AggregationTemporality.DELTA}
    exporter.export(NOTHING, timeout_millis=5)
    assert exporter.force_flush(timeout_millis=6) is False
    exporter.shutdown(timeout_millis=7)
    assert scripted.calls == [("export", 5), ("flush", 6), ("shutdown", 7)]


def test_a_collector_that_is_not_there_is_said_with_the_variable(caplog: pytest.LogCaptureFixture) -> None:
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

    nowhere = f"http://127.0.0.1:{free_port()}/v1/metrics"
    exporter = SpokenExporter(OTLPMetricExporter(endpoint=nowhere, timeout=1), f"OTLP to {nowhere} (VARIABLE)")
    with suppress(OSError):  # Older exporters leave it to the reader to catch it.
        assert exporter.export(NOTHING) is FAILED
    ours = [record for record in caplog.records if record.name.startswith("kvcache_otel")]
    assert [record.levelname for record in ours] == ["WARNING"]
    assert f"{nowhere} (VARIABLE); the engine is not affected" in ours[0].getMessage()
    exporter.shutdown()
