"""A MeterProvider from OTEL_CONFIG_FILE, OpenTelemetry's declarative configuration."""

from __future__ import annotations

import atexit
import importlib
import logging
import os
import uuid
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from opentelemetry import metrics
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, Resource

from kvcache_otel.export.deadline import EXIT_DEADLINE_S, Prepared
from kvcache_otel.export.foreign import silence_in_children, spare_prometheus

if TYPE_CHECKING:
    from collections.abc import Generator

    from opentelemetry.metrics import MeterProvider

_logger = logging.getLogger(__name__)


# The provider that was made from a file, and in which process.
_made: tuple[Any, int] = (None, 0)


class ConfigFileError(Exception):
    """The file yields no MeterProvider; the text says why."""


def provider_from_file(path: str, local_rank: int) -> MeterProvider:
    """Returns the MeterProvider that a file describes, now the process's own. Its other sections are left alone.

    Args:
        path: The file.
        local_rank: Added to the port of a Prometheus reader, and where that is taken the next free one is used.

    Raises:
        ConfigFileError: It yields none.
    """
    try:
        from opentelemetry.configuration import (  # pyright: ignore[reportMissingTypeStubs]
            OpenTelemetryConfiguration,
            configure_sdk,
            load_config_file,
        )
    except ImportError as error:
        raise ConfigFileError(f"needs the package opentelemetry-configuration ({error})") from error
    try:
        with _quiet("opentelemetry.configuration"):
            whole = load_config_file(path)
        if whole.disabled:
            raise ConfigFileError("says disabled: true")
        if whole.meter_provider is None:
            raise ConfigFileError("has no meter_provider")
        _move_ports(whole.meter_provider, local_rank)
        _make_room()
        configure_sdk(
            OpenTelemetryConfiguration(
                file_format=whole.file_format, resource=whole.resource, meter_provider=whole.meter_provider
            )
        )
    except ConfigFileError:
        raise
    except Exception as error:
        raise ConfigFileError(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}") from error
    provider = metrics.get_meter_provider()
    if is_inherited(provider):
        raise ConfigFileError("was read before this process was forked, and cannot be read again")
    global _made
    _made = provider, os.getpid()
    spare_prometheus(provider)
    silence_in_children(provider)
    _identify(provider)
    _bound_exit(provider)
    return provider


def is_inherited(provider: Any) -> bool:
    """Returns whether a provider was made from a file before this process was forked: it is silent here."""
    made, pid = _made
    return made is provider and pid != os.getpid()


def _make_room() -> None:
    """Lets a forked child set a provider of its own; the API lets it be done once, and the parent has."""
    if is_inherited(metrics.get_meter_provider()):
        internal: Any = importlib.import_module("opentelemetry.metrics._internal")
        internal._METER_PROVIDER_SET_ONCE = type(internal._METER_PROVIDER_SET_ONCE)()


def _move_ports(meter_provider: Any, local_rank: int) -> None:
    """Gives each Prometheus reader of the file a port that is free for this rank."""
    for reader in meter_provider.readers:
        exporter = getattr(getattr(reader, "pull", None), "exporter", None)
        prometheus = getattr(exporter, "prometheus_development", None)
        if prometheus is None:
            continue
        from kvcache_otel.export.prometheus import free_port

        base_port = 9464 if prometheus.port is None else prometheus.port
        prometheus.port = free_port(prometheus.host or "localhost", base_port, local_rank)
        if prometheus.port != base_port:
            _logger.warning("kvcache: the Prometheus reader of OTEL_CONFIG_FILE uses port %d", prometheus.port)


def _identify(provider: Any) -> None:
    """Adds an instance id where the file yields none: without it, the series of several ranks become one."""
    sdk_config = getattr(provider, "_sdk_config", None)
    resource = getattr(sdk_config, "resource", None)
    if sdk_config is not None and resource is not None and SERVICE_INSTANCE_ID not in resource.attributes:
        sdk_config.resource = resource.merge(Resource({SERVICE_INSTANCE_ID: str(uuid.uuid4())}))


def _bound_exit(provider: Any) -> None:
    """Takes over the provider's last export, which would keep an exiting process for up to 30 s."""
    if (handler := getattr(provider, "_atexit_handler", None)) is None:
        return
    atexit.unregister(handler)

    def shut_down() -> None:
        if not getattr(provider, "_shutdown", False):  # The application may have done it, and twice is a warning.
            provider.shutdown()

    atexit.register(Prepared(shut_down, "kvcache-shutdown").run, EXIT_DEADLINE_S)


@contextmanager
def _quiet(name: str) -> Generator[None]:
    """Keeps a logger quiet where its errors are raised as well, and said by us in one line."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)
