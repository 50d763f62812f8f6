"""Which provider is used, and one clear line for everything that cannot be."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry import metrics
from opentelemetry.metrics import MeterProvider as APIMeterProvider
from opentelemetry.metrics import NoOpMeterProvider
from opentelemetry.sdk.metrics import Histogram, MeterProvider
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    InMemoryMetricReader,
    MetricExporter,
    MetricExportResult,
    PeriodicExportingMetricReader,
)
from opentelemetry.sdk.metrics.view import ExponentialBucketHistogramAggregation, View

from kvcache_otel import semconv
from kvcache_otel.export import instruments
from kvcache_otel.export import provider as provider_module
from kvcache_otel.export import replay as replay_module
from kvcache_otel.export.provider import needs_replay, start
from kvcache_otel.export.settings import Settings
from kvcache_otel.record.cells import REPLAY_LIMIT
from tests.export.journal import IDENTITY, LOOKUP, SAMPLES, TRANSFER, Journal, points, said, value
from tests.export.test_prometheus import consecutive_free_ports
from tests.support.fake_device import FakeEvent, FakeStream

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvcache_otel.export.exporter import Exporter

NOTHING = Settings.from_environ({})
FORBIDDEN = Settings.from_environ({"OTEL_SDK_DISABLED": "true"})


class Received(MetricExporter):
    """An exporter as a package would bring one; keeps what it was given."""

    instances: list[Received] = []  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.data: list[Any] = []
        Received.instances.append(self)

    def export(self, metrics_data: Any, timeout_millis: float = 10_000, **kwargs: Any) -> MetricExportResult:
        self.data.append(metrics_data)
        return MetricExportResult.SUCCESS

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        return True

    def shutdown(self, timeout_millis: float = 30_000, **kwargs: Any) -> None:
        pass


class Broken(Received):
    """An exporter that cannot be made."""

    def __init__(self) -> None:
        raise ValueError("the collector's\naddress is wrong")


class EntryPoint:
    """Stands in for an installed entry point."""

    def __init__(self, loaded: Any) -> None:
        self._loaded = loaded

    def load(self) -> Any:
        if isinstance(self._loaded, Exception):
            raise self._loaded
        return self._loaded


@pytest.fixture
def entry_points(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Exporters by name that count as installed, beside those that are."""
    added: dict[str, Any] = {}

    def find(*, group: str, name: str) -> list[Any]:
        return (
            [EntryPoint(added[name])]
            if name in added
            else list(importlib.metadata.entry_points(group=group, name=name))
        )

    monkeypatch.setattr(provider_module, "entry_points", find)
    Received.instances.clear()
    return added


@pytest.fixture(autouse=True)
def exporters() -> Iterator[list[Exporter]]:
    started: list[Exporter] = []
    yield started
    for exporter in started:
        exporter.stop(5)


# -- nothing -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("environ", [{}, {"OTEL_METRICS_EXPORTER": "none"}])
def test_nothing_is_started_when_nothing_is_asked_for(journal: Journal, environ: dict[str, str]) -> None:
    threads = threading.active_count()
    settings = Settings.from_environ(environ)
    assert start(journal.recorder, settings) is None
    assert not needs_replay(settings)
    assert threading.active_count() == threads


def test_forbidden_means_not_even_through_a_provider(journal: Journal) -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider(metric_readers=[reader], shutdown_on_exit=False)
    assert start(journal.recorder, FORBIDDEN, meter_provider=provider) is None
    assert not needs_replay(FORBIDDEN, provider)
    assert reader.get_metrics_data() is None


def test_problems_are_logged(journal: Journal, caplog: pytest.LogCaptureFixture) -> None:
    settings = Settings.from_environ({"OTEL_METRICS_EXPORTER": ","})
    assert start(journal.recorder, settings) is None
    assert [record.message for record in said(caplog)] == [
        "kvcache: OTEL_METRICS_EXPORTER=, names no exporter; taken as unset"
    ]


# -- one of our own ----------------------------------------------------------------------------------------------------


def test_the_global_provider_is_left_alone(journal: Journal, entry_points: dict[str, Any]) -> None:
    entry_points["mine"] = Received
    started = start(journal.recorder, Settings.from_environ({"OTEL_METRICS_EXPORTER": "mine"}))
    assert started is not None
    assert type(metrics.get_meter_provider()).__name__ == "_ProxyMeterProvider"
    assert started.flush(5)
    assert started.endpoints == ["mine every 10 s (OTEL_METRICS_EXPORTER=mine)"]
    assert started.stop(5)


def test_an_exporter_of_another_package_gets_everything(journal: Journal, entry_points: dict[str, Any]) -> None:
    entry_points["mine"] = Received
    started = start(journal.recorder, Settings.from_environ({"OTEL_METRICS_EXPORTER": "mine"}))
    assert started is not None
    journal.look_up(5)
    journal.transfer(*SAMPLES)
    assert started.flush(5)
    data = Received.instances[0].data[-1]
    assert value(data, "kvcache.lookup.tokens", LOOKUP) == 5
    [point] = points(data, "kvcache.transfer.duration")
    assert list(point.bucket_counts) == Journal.recount(journal.samples)
    started.stop(5)


def test_a_reader_of_another_package_gets_everything(journal: Journal, entry_points: dict[str, Any]) -> None:
    made: list[Any] = []

    class Reader(InMemoryMetricReader):
        def __init__(self) -> None:
            super().__init__(preferred_temporality={Histogram: AggregationTemporality.DELTA})
            made.append(self)

    entry_points["mine"] = Reader
    started = start(journal.recorder, Settings.from_environ({"OTEL_METRICS_EXPORTER": "mine"}))
    assert started is not None
    journal.transfer(0.5)
    [reader] = made
    for expected in ([1], []):
        found = points(reader.get_metrics_data(), "kvcache.transfer.duration")
        assert [point.count for point in found] == expected
    started.stop(5)


@pytest.mark.parametrize(
    ("name", "loaded", "words"),
    [
        ("nonsense", None, "no installed package"),
        ("absent", ModuleNotFoundError("No module named 'grpc'"), "No module named 'grpc'"),
        ("broken", Broken, "ValueError: the collector's address is wrong"),
    ],
)
def test_an_exporter_that_fails_is_one_line_and_the_others_start(
    journal: Journal,
    entry_points: dict[str, Any],
    name: str,
    loaded: Any,
    words: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    entry_points["mine"] = Received
    if loaded is not None:
        entry_points[name] = loaded
    started = start(journal.recorder, Settings.from_environ({"OTEL_METRICS_EXPORTER": f"{name},mine"}))
    assert started is not None
    assert len(started.endpoints) == 1
    [record] = [record for record in said(caplog) if record.levelno >= logging.WARNING]
    assert record.message.startswith(f"kvcache: OTEL_METRICS_EXPORTER={name},mine: nothing is exported by '{name}'")
    assert words in record.message
    assert record.exc_info is None
    assert "\n" not in record.message
    started.stop(5)


def test_only_failing_exporters_is_no_export(journal: Journal, caplog: pytest.LogCaptureFixture) -> None:
    assert start(journal.recorder, Settings.from_environ({"OTEL_METRICS_EXPORTER": "nonsense"})) is None
    assert len(said(caplog)) == 1


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "abc"),
        ("OTEL_EXPORTER_OTLP_METRICS_TIMEOUT", "soon"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "zip"),
        ("OTEL_EXPORTER_OTLP_METRICS_COMPRESSION", "zip"),
    ],
)
def test_bad_otlp_variables_are_one_line_and_the_default_is_used(
    journal: Journal,
    protocol: str,
    variable: str,
    value: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(variable, value)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "otlp")
    started = start(journal.recorder, Settings.from_environ(os.environ))
    assert started is not None
    warnings = [record for record in said(caplog) if record.levelno >= logging.WARNING]
    [record] = [record for record in warnings if record.name == provider_module.__name__]
    assert f"{variable}={value}" in record.message
    assert os.environ[variable] == value
    started.stop(0.1)


@pytest.mark.parametrize("variable", ["OTEL_EXPORTER_OTLP_METRICS_TIMEOUT", "OTEL_EXPORTER_OTLP_COMPRESSION"])
@pytest.mark.parametrize("value", ["", "none"])
def test_values_that_are_right_though_the_exporter_fails_at_them(
    journal: Journal, variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "otlp")
    settings = Settings.from_environ(os.environ)
    assert (settings.problems == ()) is (value == "" or "COMPRESSION" in variable)
    started = start(journal.recorder, settings)
    assert started is not None
    started.stop(0.1)


@pytest.mark.parametrize("made", [True, False])
def test_a_provider_without_a_reader_is_none(
    journal: Journal, entry_points: dict[str, Any], made: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if made:
        monkeypatch.setenv("OTEL_PYTHON_METER_PROVIDER", "sdk_meter_provider")
    else:
        metrics.set_meter_provider(MeterProvider(shutdown_on_exit=False))
    entry_points["mine"] = Received
    settings = Settings.from_environ({"OTEL_METRICS_EXPORTER": "mine"})
    assert not needs_replay(settings)
    started = start(journal.recorder, settings)
    assert started is not None
    assert started.endpoints == ["mine every 10 s (OTEL_METRICS_EXPORTER=mine)"]
    started.stop(5)


def test_an_endless_path_is_shortened(caplog: pytest.LogCaptureFixture) -> None:
    settings = Settings.from_environ({"OTEL_CONFIG_FILE": "x\ny" * 2000})
    assert start(Journal(replay=True).recorder, settings) is None
    [record] = said(caplog)
    assert len(record.message) < 700
    assert "\n" not in record.message


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({}, "kvcache"),
        ({"OTEL_SERVICE_NAME": "mine"}, "mine"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=theirs,k8s.pod.uid=7"}, "theirs"),
    ],
)
def test_resource(
    journal: Journal,
    entry_points: dict[str, Any],
    environ: dict[str, str],
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for variable, text in environ.items():
        monkeypatch.setenv(variable, text)
    entry_points["mine"] = Received
    started = start(journal.recorder, Settings.from_environ({"OTEL_METRICS_EXPORTER": "mine"}))
    assert started is not None
    assert started.flush(5)
    attributes = Received.instances[0].data[-1].resource_metrics[0].resource.attributes
    assert attributes["service.name"] == name
    assert attributes["service.instance.id"]
    started.stop(5)


def test_an_instance_id_that_was_given_is_kept(
    journal: Journal, entry_points: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.instance.id=rank-3")
    entry_points["mine"] = Received
    started = start(journal.recorder, Settings.from_environ({"OTEL_METRICS_EXPORTER": "mine"}))
    assert started is not None
    assert started.flush(5)
    attributes = Received.instances[0].data[-1].resource_metrics[0].resource.attributes
    assert attributes["service.instance.id"] == "rank-3"
    started.stop(5)


def test_a_resource_detector_that_fails_costs_only_its_attributes(
    journal: Journal, entry_points: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPERIMENTAL_RESOURCE_DETECTORS", "nonsense")
    entry_points["mine"] = Received
    started = start(journal.recorder, Settings.from_environ({"OTEL_METRICS_EXPORTER": "mine"}))
    assert started is not None
    started.stop(5)


def test_a_recorder_that_replays_loses_nothing_when_the_provider_is_ours(
    entry_points: dict[str, Any],
) -> None:
    journal = Journal(replay=True)
    entry_points["mine"] = Received
    started = start(journal.recorder, Settings.from_environ({"OTEL_METRICS_EXPORTER": "mine"}))
    assert started is not None
    journal.transfer(*SAMPLES)
    assert started.flush(5)
    assert not journal.recorder.replayed
    [point] = points(Received.instances[0].data[-1], "kvcache.transfer.duration")
    assert list(point.bucket_counts) == Journal.recount(journal.samples)
    started.stop(5)


# -- somebody else's ---------------------------------------------------------------------------------------------------


@pytest.fixture(params=["given", "global"])
def theirs(request: pytest.FixtureRequest) -> tuple[InMemoryMetricReader, MeterProvider | None]:
    """A reader of a provider that was there before us, and the provider where it must be handed over."""
    reader = InMemoryMetricReader()
    provider = MeterProvider(metric_readers=[reader], shutdown_on_exit=False)
    if request.param == "given":
        return reader, provider
    metrics.set_meter_provider(provider)
    return reader, None


def test_their_provider_gets_equal_values(theirs: tuple[InMemoryMetricReader, MeterProvider | None]) -> None:
    reader, provider = theirs
    assert needs_replay(NOTHING, provider)
    journal = Journal(replay=True)
    started = start(journal.recorder, NOTHING, meter_provider=provider)
    assert started is not None
    assert "MeterProvider" in started.endpoints[0]
    for batch in (SAMPLES, (0.5,)):
        journal.look_up(5)
        journal.use(3)
        journal.transfer(*batch)
        assert started.flush(5)
        data = reader.get_metrics_data()
        assert value(data, "kvcache.lookup.tokens", LOOKUP) == journal.tokens
        assert value(data, "kvcache.usage", {}) == 3
        [point] = points(data, "kvcache.transfer.duration")
        assert list(point.bucket_counts) == Journal.recount(journal.samples)
        assert point.sum == pytest.approx(sum(journal.samples))
        assert tuple(point.explicit_bounds) == semconv.TRANSFER_DURATION.bounds
        assert dict(point.attributes) == IDENTITY | TRANSFER
    started.stop(5)


class Exports(MetricExporter):
    """Keeps what was exported last."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Any = None

    def export(self, metrics_data: Any, timeout_millis: float = 10_000, **kwargs: Any) -> MetricExportResult:
        self.last = metrics_data
        return MetricExportResult.SUCCESS

    def shutdown(self, timeout_millis: float = 30_000, **kwargs: Any) -> None:
        pass

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        return True


Pushing = Callable[[Journal], tuple[Exports, MeterProvider]]


@pytest.fixture
def pushing(exporters: list[Exporter]) -> Pushing:
    """Returns what starts to export through somebody's provider, and what that has exported."""

    def push(journal: Journal) -> tuple[Exports, MeterProvider]:
        exports = Exports()
        reader = PeriodicExportingMetricReader(exports, export_interval_millis=3_600_000)
        provider = MeterProvider(metric_readers=[reader], shutdown_on_exit=False)
        started = start(journal.recorder, NOTHING, meter_provider=provider)
        assert started is not None
        exporters.append(started)
        return exports, provider

    return push


def count(exports: Exports) -> int:
    return sum(point.count for point in points(exports.last, "kvcache.transfer.duration"))


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the thread come too late for all of it."""
    monkeypatch.setattr(replay_module, "INTERVAL_S", 3_600.0)


@pytest.mark.usefixtures("idle")
@pytest.mark.parametrize("samples", [1, 12_000, REPLAY_LIMIT])
def test_their_provider_has_every_sample_when_it_is_shut_down(pushing: Pushing, samples: int) -> None:
    journal = Journal(replay=True)
    exports, provider = pushing(journal)
    journal.transfer(*[0.5] * samples)
    provider.shutdown()
    assert (count(exports), len(journal.recorder.replayed or ())) == (samples, 0)


@pytest.mark.usefixtures("idle")
def test_a_collection_of_theirs_has_the_samples_of_before_it(pushing: Pushing) -> None:
    journal = Journal(replay=True)
    exports, provider = pushing(journal)
    for number in (1, 2, 3):
        journal.transfer(0.5, 0.5)
        provider.force_flush()
        assert count(exports) == 2 * number
    provider.shutdown()


@pytest.mark.usefixtures("idle")
def test_what_the_device_has_done_is_in_their_last_export(pushing: Pushing) -> None:
    journal = Journal(replay=True)
    exports, provider = pushing(journal)
    duration = journal.recorder.histogram(semconv.TRANSFER_DURATION, dict(TRANSFER))
    stream = FakeStream()
    for _ in range(4_000):
        events = FakeEvent(), FakeEvent()
        for event in events:
            event.record(stream)
        journal.recorder.harvester.add(*events, duration)
    stream.run()
    provider.shutdown()
    assert count(exports) == 4_000
    journal.recorder.harvester.stop(5)


@pytest.mark.usefixtures("idle")
def test_what_their_last_collection_has_no_time_for_is_counted_in_it(
    pushing: Pushing, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(instruments, "CATCH_UP_SHARE", 0.0)
    journal = Journal(replay=True)
    exports, provider = pushing(journal)
    journal.transfer(*SAMPLES)
    provider.force_flush()
    assert (count(exports), len(journal.recorder.replayed or ())) == (0, len(SAMPLES))  # It may yet be recorded.
    with caplog.at_level(logging.WARNING, "kvcache_otel"):
        provider.shutdown()
    assert value(exports.last, "kvcache.telemetry.dropped", {"kvcache.reason": "queue_full"}) == len(SAMPLES)
    assert (count(exports), len(journal.recorder.replayed or ())) == (0, 0)
    assert [record.getMessage() for record in said(caplog)] == [
        f"kvcache: the MeterProvider was shut down before {len(SAMPLES)} histogram samples could be recorded; see "
        "kvcache.telemetry.dropped"
    ]


@pytest.mark.usefixtures("idle")
def test_a_provider_that_is_not_the_sdks_is_not_recorded_into_while_it_collects() -> None:
    class Locked(APIMeterProvider):
        """Collects and records under one lock."""

        def __init__(self) -> None:
            self.reader = InMemoryMetricReader()
            self.inner = MeterProvider(metric_readers=[self.reader], shutdown_on_exit=False)

        def get_meter(self, *args: Any, **kwargs: Any) -> Any:
            return self.inner.get_meter(*args, **kwargs)

    provider, journal = Locked(), Journal(replay=True)
    started = start(journal.recorder, NOTHING, meter_provider=provider)
    assert started is not None
    journal.transfer(*SAMPLES)
    assert points(provider.reader.get_metrics_data(), "kvcache.transfer.duration") == []
    assert len(journal.recorder.replayed or ()) == len(SAMPLES)
    started.stop(5)


def test_their_views_hold() -> None:
    reader = InMemoryMetricReader()
    views = [
        View(instrument_name="kvcache.transfer.duration", aggregation=ExponentialBucketHistogramAggregation()),
        View(instrument_name="kvcache.lookup.tokens", attribute_keys={"kvcache.tier"}),
    ]
    provider = MeterProvider(metric_readers=[reader], views=views, shutdown_on_exit=False)
    journal = Journal(replay=True)
    started = start(journal.recorder, NOTHING, meter_provider=provider)
    assert started is not None
    journal.look_up(1)
    journal.transfer(1.0, 2.0)
    started.flush(5)
    data = reader.get_metrics_data()
    [point] = points(data, "kvcache.transfer.duration")
    assert (point.count, point.sum, point.min, point.max) == (2, 3.0, 1.0, 2.0)
    [point] = points(data, "kvcache.lookup.tokens")
    assert dict(point.attributes) == LOOKUP
    started.stop(5)


def test_their_provider_outlives_us_and_takes_us_again() -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider(metric_readers=[reader], shutdown_on_exit=False)
    for tokens in (3, 4):
        journal = Journal(replay=True)
        started = start(journal.recorder, NOTHING, meter_provider=provider)
        assert started is not None
        journal.look_up(tokens)
        assert value(reader.get_metrics_data(), "kvcache.lookup.tokens", LOOKUP) == tokens
        assert started.stop(5)
        reader.get_metrics_data()  # What stop has flushed.
        assert points(reader.get_metrics_data(), "kvcache.lookup.tokens") == []


def test_histograms_without_replay_are_missed_in_a_clear_word(
    journal: Journal, caplog: pytest.LogCaptureFixture
) -> None:
    provider = MeterProvider(metric_readers=[InMemoryMetricReader()], shutdown_on_exit=False)
    started = start(journal.recorder, NOTHING, meter_provider=provider)
    assert started is not None
    assert "without replay" in caplog.text
    started.stop(5)


@pytest.mark.parametrize("provider", [NoOpMeterProvider(), None])
def test_a_stand_in_is_no_provider(journal: Journal, provider: Any) -> None:
    if provider is not None:
        metrics.set_meter_provider(provider)
    assert not needs_replay(NOTHING)
    assert start(journal.recorder, NOTHING) is None


def test_flushing_through_their_prometheus_reader_leaves_nothing_behind() -> None:
    from opentelemetry.exporter.prometheus import PrometheusMetricReader
    from prometheus_client import REGISTRY, generate_latest

    reader = PrometheusMetricReader()
    provider = MeterProvider(metric_readers=[reader], shutdown_on_exit=False)
    journal = Journal(replay=True)
    started = start(journal.recorder, NOTHING, meter_provider=provider)
    assert started is not None
    journal.transfer(0.5)
    assert started.flush(5)
    lines = [line for line in generate_latest(REGISTRY).decode().splitlines() if line.startswith("kvcache_")]
    assert lines
    assert len(lines) == len({line.rpartition(" ")[0] for line in lines})
    started.stop(5)
    provider.shutdown()


def test_start_raises_nothing(journal: Journal, caplog: pytest.LogCaptureFixture) -> None:
    class Useless(MeterProvider):
        def get_meter(self, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("no meters\ntoday")

    assert start(journal.recorder, NOTHING, meter_provider=Useless(shutdown_on_exit=False)) is None
    assert "RuntimeError: no meters today" in caplog.text


# -- OTEL_CONFIG_FILE --------------------------------------------------------------------------------------------------

CONFIG = """
file_format: "1.0"
resource:
  attributes:
    - name: service.name
      value: from-the-file
tracer_provider:
  processors:
    - simple:
        exporter: {console: {}}
meter_provider:
  readers:
    - pull:
        exporter:
          prometheus/development:
            host: localhost
            port: %d
  views:
    - selector:
        instrument_name: kvcache.lookup.tokens
      stream:
        attribute_keys:
          included: [kvcache.tier]
"""


@pytest.fixture
def configured(tmp_path: Path) -> Iterator[tuple[Settings, int]]:
    pytest.importorskip("opentelemetry.configuration")
    port = consecutive_free_ports(3)
    path = tmp_path / "otel.yaml"
    path.write_text(CONFIG % port)
    yield Settings.from_environ({"OTEL_CONFIG_FILE": str(path)}), port
    shutdown = getattr(metrics.get_meter_provider(), "shutdown", None)
    if shutdown is not None:
        shutdown()


def test_config_file(configured: tuple[Settings, int]) -> None:
    from opentelemetry import trace

    settings, port = configured
    assert needs_replay(settings)
    journal = Journal(replay=True)
    tracing = trace.get_tracer_provider()
    started = start(journal.recorder, settings, local_rank=1)
    assert started is not None
    assert started.endpoints == [f"what OTEL_CONFIG_FILE={settings.config_file} says"]
    assert trace.get_tracer_provider() is tracing
    journal.look_up(5)
    journal.transfer(0.3)
    assert started.flush(5)
    with urllib.request.urlopen(f"http://localhost:{port + 1}/metrics", timeout=5) as response:
        text = response.read().decode()
    [tokens] = [line for line in text.splitlines() if line.startswith("kvcache_lookup_tokens_total{")]
    assert "kvcache_engine" not in tokens
    assert tokens.endswith(" 5.0")
    [count] = [line for line in text.splitlines() if line.startswith("kvcache_transfer_duration_seconds_count{")]
    assert count.endswith(" 1.0")
    [target] = [line for line in text.splitlines() if line.startswith("target_info{")]
    assert 'service_name="from-the-file"' in target
    assert "service_instance_id=" in target
    started.stop(5)


def test_exponential_histograms_of_a_config_file_do_not_fail_its_scrape(
    configured: tuple[Settings, int], caplog: pytest.LogCaptureFixture
) -> None:
    """P9, where somebody's view asks for them."""
    settings, port = configured
    path = Path(settings.config_file)
    aggregation = "base2_exponential_bucket_histogram: {max_scale: 20, max_size: 160}"
    view = f"    - selector: {{instrument_type: histogram}}\n      stream: {{aggregation: {{{aggregation}}}}}\n"
    path.write_text(path.read_text() + view)
    journal = Journal(replay=True)
    started = start(journal.recorder, settings)
    assert started is not None
    journal.look_up(5)
    journal.transfer(0.3)
    assert started.flush(5)
    for _ in range(2):
        with urllib.request.urlopen(f"http://localhost:{port}/metrics", timeout=5) as response:
            text = response.read().decode()
        assert "kvcache_lookup_tokens_total{" in text
        assert "kvcache_transfer_duration" not in text
    (line,) = [record.getMessage() for record in caplog.records if "exponential" in record.getMessage()]
    assert "kvcache.transfer.duration" in line
    assert "OTEL_CONFIG_FILE" in line
    started.stop(5)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "not found"),
        ("", "empty"),
        ("a: [", "YAML"),
        ('file_format: "1.0"\n', "has no meter_provider"),
        ('file_format: "1.0"\ndisabled: true\n', "says disabled: true"),
        (
            'file_format: "1.0"\nmeter_provider:\n  readers:\n    - periodic:\n        exporter: {nonsense: {}}\n',
            "nonsense",
        ),
    ],
)
def test_a_bad_config_file_is_one_line(
    tmp_path: Path, content: str | None, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("opentelemetry.configuration")
    path = tmp_path / "otel.yaml"
    if content is not None:
        path.write_text(content)
    journal = Journal(replay=True)
    assert start(journal.recorder, Settings.from_environ({"OTEL_CONFIG_FILE": str(path)})) is None
    [record] = said(caplog)
    assert record.message.startswith(f"kvcache: nothing is exported: OTEL_CONFIG_FILE={path} ")
    assert words in record.message
    assert record.exc_info is None


def test_without_the_package_a_config_file_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.configuration", None)
    settings = Settings.from_environ({"OTEL_CONFIG_FILE": str(tmp_path / "otel.yaml")})
    assert start(Journal(replay=True).recorder, settings) is None
    [record] = said(caplog)
    assert "OTEL_CONFIG_FILE=" in record.message
    assert "opentelemetry-configuration" in record.message
