"""Starts the export of one process: through the MeterProvider it has, or through one of our own."""

from __future__ import annotations

import importlib
import logging
import os
import time
import uuid
import weakref
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from opentelemetry import metrics
from opentelemetry.metrics import MeterProvider, NoOpMeterProvider
from opentelemetry.sdk.metrics import AlwaysOffExemplarFilter
from opentelemetry.sdk.metrics import MeterProvider as SDKMeterProvider
from opentelemetry.sdk.metrics.export import MetricReader
from opentelemetry.sdk.metrics.view import View
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, Resource

from kvcache_otel.export.config_file import ConfigFileError, is_inherited, provider_from_file
from kvcache_otel.export.exporter import Exporter
from kvcache_otel.export.foreign import has_ended, readers_of
from kvcache_otel.export.instruments import Instruments
from kvcache_otel.export.readers import PeriodicReader, cell_reader
from kvcache_otel.export.replay import Replay
from kvcache_otel.export.settings import OTLP_GRPC, OTLP_HTTP, PROMETHEUS, one_line
from kvcache_otel.export.spoken import SpokenExporter
from kvcache_otel.record.recorder import SERIES_LIMIT

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from kvcache_otel.export.prometheus import PrometheusServer
    from kvcache_otel.export.settings import Settings
    from kvcache_otel.record.recorder import Recorder

_logger = logging.getLogger(__name__)

DEFAULT_SERVICE_NAME = "kvcache"

_instruments_of: WeakKeyDictionary[MeterProvider, Instruments] = WeakKeyDictionary()


def needs_replay(settings: Settings, meter_provider: MeterProvider | None = None) -> bool:
    """Returns whether the recorder must keep histogram samples, because the provider will not be ours.

    Args:
        settings: As for `start`.
        meter_provider: As for `start`.
    """
    if settings.forbidden:
        return False
    return meter_provider is not None or bool(settings.config_file) or process_provider() is not None


def start(
    recorder: Recorder,
    settings: Settings,
    *,
    local_rank: int = 0,
    meter_provider: MeterProvider | None = None,
) -> Exporter | None:
    """Starts to export a recorder. Raises nothing; what does not work is logged, one line for each.

    Args:
        recorder: What to export; made with ``replay=needs_replay(settings, meter_provider)``.
        settings: What the environment asks for.
        local_rank: Number of this process on its machine; added to the port of a Prometheus endpoint.
        meter_provider: Where to export instead; None = the process's own where it has one, else what `settings` say.

    Returns:
        The handle on what was started, or None where nothing was.
    """
    for problem in settings.problems:
        _logger.warning("kvcache: %s", problem)
    if settings.forbidden:
        _logger.info("kvcache: %s", settings.reason)
        return None
    try:
        exporter = _start(recorder, settings, local_rank, meter_provider)
    except Exception as error:
        _logger.warning("kvcache: nothing is exported (%s): %s", settings.variable, _text(error))
        return None
    if exporter is not None:
        for endpoint in exporter.endpoints:
            _logger.info("kvcache: exports to %s", endpoint)
    return exporter


def _start(
    recorder: Recorder, settings: Settings, local_rank: int, meter_provider: MeterProvider | None
) -> Exporter | None:
    provider = meter_provider if meter_provider is not None else process_provider()
    if provider is not None:
        kind = type(provider)
        return _through(provider, recorder, f"the process's own MeterProvider ({kind.__module__}.{kind.__qualname__})")
    if settings.config_file:
        try:
            provider = provider_from_file(settings.config_file, local_rank)
        except ConfigFileError as error:
            _logger.warning("kvcache: nothing is exported: %s %s", settings.variable, error)
            return None
        return _through(provider, recorder, f"what {settings.variable} says")
    if not settings.exporters:
        _logger.info("kvcache: %s", settings.reason)
        return None
    return _alone(recorder, settings, local_rank)


def process_provider() -> MeterProvider | None:
    """Returns the MeterProvider that somebody has set for this process, or None."""
    try:
        provider = metrics.get_meter_provider()
    except Exception as error:  # OTEL_PYTHON_METER_PROVIDER names one that cannot be made.
        _logger.warning("kvcache: the process's MeterProvider cannot be used: %s", _text(error))
        return None
    # The API's stand-in has no public name. Its instruments would come to life if a provider were set later, but then
    # export would depend on the order in which things start.
    if isinstance(provider, NoOpMeterProvider) or type(provider).__name__ == "_ProxyMeterProvider":
        return None
    if is_inherited(provider):
        return None
    # OTEL_PYTHON_METER_PROVIDER makes such a one, and what goes through it comes out nowhere.
    if (readers := readers_of(provider)) is not None and not readers:
        _logger.info("kvcache: the process's MeterProvider is not used: it has no reader")
        return None
    return provider


# -- through somebody else's provider ----------------------------------------------------------------------------------


def _through(provider: MeterProvider, recorder: Recorder, endpoint: str) -> Exporter:
    instruments = _instruments_of.get(provider)
    if instruments is None:
        instruments = _instruments_of[provider] = Instruments(provider, histograms=True)
    replay = _replay(recorder, instruments)
    instruments.bind(recorder, _catching_up(provider, recorder, replay))
    if recorder.replayed is None:
        _logger.warning("kvcache: histograms are not exported: the recorder was made without replay")
    return Exporter(
        recorder,
        instruments,
        provider,
        own=False,
        replay=replay,
        servers=(),
        endpoints=(endpoint,),
    )


def _catching_up(provider: MeterProvider, recorder: Recorder, replay: Replay | None) -> Callable[[float], None] | None:
    """Returns what records the samples that wait before each collection, the last one too.

    None for a provider that is not the SDK's: its collection may hold locks that recording takes.
    """
    if replay is None or not isinstance(provider, SDKMeterProvider):
        return None
    this = weakref.ref(provider)  # Its instruments live as long as it does.

    def catch_up(timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        ended = has_ended(this())
        if ended:  # What is read later is in no export.
            recorder.harvester.flush(timeout_s / 2)
        replay.catch_up(until - time.monotonic(), last=ended)

    return catch_up


def _replay(recorder: Recorder, instruments: Instruments) -> Replay | None:
    return Replay(recorder.replayed, instruments.histograms) if recorder.replayed is not None else None


# -- through one of our own --------------------------------------------------------------------------------------------


def _alone(recorder: Recorder, settings: Settings, local_rank: int) -> Exporter | None:
    readers: list[MetricReader] = []
    servers: list[PrometheusServer] = []
    endpoints: list[str] = []
    for name in settings.exporters:
        try:
            if name == PROMETHEUS:
                reader, server, endpoint = _prometheus(recorder, settings, local_rank)
                servers.append(server)
            else:
                reader, endpoint = _named(name, recorder, settings)
        except Exception as error:
            _logger.warning(
                "kvcache: %s: nothing is exported by %r: %s", settings.variable, one_line(name), _text(error)
            )
            continue
        readers.append(reader)
        endpoints.append(endpoint)
    if not readers:
        return None
    provider = SDKMeterProvider(
        metric_readers=readers,
        views=_views(recorder),
        resource=_resource(),
        exemplar_filter=AlwaysOffExemplarFilter(),  # Our instruments are read, so there is no trace to point at.
        shutdown_on_exit=False,  # The exporter's own handler has a deadline.
    )
    instruments = Instruments(provider, histograms=False)
    instruments.bind(recorder)
    return Exporter(
        recorder,
        instruments,
        provider,
        own=True,
        replay=_replay(recorder, instruments),
        servers=servers,
        endpoints=endpoints,
    )


def _views(recorder: Recorder) -> list[View]:
    """Returns what makes the SDK let as many series through as the recorder does; by itself it stops at 2,000."""
    if recorder.series_limit <= SERIES_LIMIT:
        return []
    try:
        return [View(instrument_name="*", aggregation_cardinality_limit=2 * recorder.series_limit)]
    except TypeError:  # An SDK before 1.45 has no limit.
        return []


def _prometheus(recorder: Recorder, settings: Settings, local_rank: int) -> tuple[MetricReader, PrometheusServer, str]:
    from kvcache_otel.export.prometheus import PrometheusReader, PrometheusServer

    reader = PrometheusReader(recorder)
    host = settings.prometheus_host
    try:
        server = PrometheusServer(reader.registry, host, settings.prometheus_port, local_rank)
    except (OSError, UnicodeError) as error:
        raise OSError(f"OTEL_EXPORTER_PROMETHEUS_HOST={one_line(host)} cannot be bound: {error}") from error
    if server.moved:
        _logger.warning("kvcache: Prometheus endpoint is %s, because %s", server.url, server.moved)
    return reader, server, f"Prometheus at {server.url} ({settings.variable})"


def _named(name: str, recorder: Recorder, settings: Settings) -> tuple[MetricReader, str]:
    """Returns a reader around the exporter of an entry point, which may also be a reader itself."""
    entry = next(iter(entry_points(group="opentelemetry_metrics_exporter", name=name)), None)
    if entry is None:
        raise LookupError("no installed package has a metrics exporter of that name")
    kind: Any = entry.load()
    if isinstance(kind, type) and issubclass(kind, MetricReader):
        return cell_reader(kind)(recorder), f"{one_line(name)} ({settings.variable})"
    what = settings.describe(name)
    reader = PeriodicReader(
        recorder,
        SpokenExporter(_made(name, kind, settings), what),
        export_interval_millis=settings.interval_s * 1000,
        export_timeout_millis=settings.timeout_s * 1000,
    )
    return reader, what


def _made(name: str, kind: Any, settings: Settings) -> Any:
    """Returns an exporter; one for OTLP does not see the values at which it would fail."""
    if name not in (OTLP_GRPC, OTLP_HTTP):
        return kind()
    arguments: dict[str, Any] = {}
    if name in settings.uncompressed:
        module = "grpc" if name == OTLP_GRPC else "opentelemetry.exporter.otlp.proto.http"
        arguments["compression"] = importlib.import_module(module).Compression.NoCompression
    with _overwritten(dict(settings.otlp_timeouts)):
        return kind(**arguments)


@contextmanager
def _overwritten(environ: dict[str, str]) -> Generator[None]:
    """Gives variables that are set other values for a moment: the gRPC exporter reads its own, whatever it is given.

    None is added or removed, which would move the environment under a thread that reads it.
    """
    before = {name: os.environ[name] for name in environ if name in os.environ}
    try:
        os.environ.update({name: environ[name] for name in before})
        yield
    finally:
        os.environ.update(before)


def _resource() -> Resource:
    """Returns the resource that the standard variables describe, with a service name and an instance id in any case."""
    try:
        resource = Resource.create()
    except Exception as error:  # A detector that the environment names.
        _logger.warning("kvcache: the environment's resource attributes are not used: %s", _text(error))
        resource = Resource({})
    missing: dict[str, str] = {}
    if str(resource.attributes.get(SERVICE_NAME, "unknown_service")).startswith("unknown_service"):
        missing[SERVICE_NAME] = DEFAULT_SERVICE_NAME
    if not resource.attributes.get(SERVICE_INSTANCE_ID):
        missing[SERVICE_INSTANCE_ID] = str(uuid.uuid4())
    return resource.merge(Resource(missing))


def _text(error: Exception) -> str:
    """Returns what an exception says, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
