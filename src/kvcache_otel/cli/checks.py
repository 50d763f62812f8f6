"""Looks at this process and at the way out of it: interpreter, entry points, exporters, ports and endpoints."""

from __future__ import annotations

import importlib.util
import os
import socket
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from kvcache_otel.cli.report import ExportReport, Finding, failure, note, ok, reason, warning
from kvcache_otel.export.settings import OTLP_GRPC, OTLP_HTTP, PROMETHEUS, one_line
from kvcache_otel.record import cells

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvcache_otel.export.settings import Settings

CONNECT_SECONDS = 1.0
_SOMETHING = "set OTEL_METRICS_EXPORTER to prometheus or otlp"

# vLLM has such where its scheduler and its ranks are not one process. Every scheduler of SGLang's is a rank.
_SCHEDULER = "a scheduler process without a rank"


def interpreter() -> list[Finding]:
    """Whether this interpreter can count."""
    if cells.EXACT:
        return []
    text = "this Python runs without a global lock, without which counts are lost"
    return [failure(text, "use an ordinary build of Python, or set PYTHON_GIL=1")]


def installation() -> list[Finding]:
    """Whether this interpreter can count, and whether opentelemetry-instrument finds this package."""
    findings = interpreter()
    if any(entry.name == "kvcache" for entry in entry_points(group="opentelemetry_instrumentor")):
        findings.append(
            ok("entry point kvcache in opentelemetry_instrumentor: opentelemetry-instrument finds this package")
        )
    else:
        findings.append(
            warning(
                "no entry point kvcache in opentelemetry_instrumentor: opentelemetry-instrument finds nothing here",
                "install kvcache-otel with pip into this Python",
            )
        )
    return findings


def export(settings: Settings, environ: Mapping[str, str]) -> ExportReport:
    """Where the metrics would go, and whether they would get there.

    Args:
        settings: What the environment asks for.
        environ: The same environment.
    """
    findings = [warning(problem) for problem in settings.problems]
    destinations: list[str] = []
    usable: list[str] = []
    if settings.config_file and not settings.forbidden:
        if why := _config_file(settings.config_file):
            findings.append(failure(f"{settings.variable} {why}", "correct the file or unset it"))
        else:
            destinations.append(f"what the file of {settings.variable} says")
            findings.append(ok(destinations[0]))
    elif not settings.enabled:
        findings.append(failure(settings.reason, _remedy(settings)))
    else:
        for exporter in settings.exporters:
            if why := _exporter(exporter):
                findings.append(warning(f"nothing is exported by {one_line(exporter)} ({settings.variable}): {why}"))
                continue
            usable.append(exporter)
            destinations.append(settings.describe(exporter))
            findings += [ok(destinations[-1]), *_reach(exporter, settings)]
        if not usable:
            findings.append(failure(f"{settings.variable} names no exporter that can be used", _SOMETHING))
    if PROMETHEUS in usable and environ.get("PROMETHEUS_MULTIPROC_DIR"):
        findings.append(note("PROMETHEUS_MULTIPROC_DIR is set, which does not matter: every rank has its own endpoint"))
    return ExportReport(settings.variable, usable, destinations, findings)


def provided(settings: Settings, environ: Mapping[str, str]) -> ExportReport:
    """Where the metrics of a program would go that has a MeterProvider of its own; arguments as for `export`."""
    if settings.forbidden:
        return export(settings, environ)
    destination = "by the MeterProvider that the program has"
    return ExportReport("", [], [destination], [ok(f"exported {destination}")])


def _remedy(settings: Settings) -> str:
    if settings.forbidden:
        return f"unset {settings.reason.rpartition(': ')[2].split('=')[0].split()[0]}"
    return _SOMETHING if settings.variable else ""  # The reason says it.


# -- exporters ---------------------------------------------------------------------------------------------------------


def _exporter(name: str) -> str:
    """Returns why an exporter cannot be used; empty where it can."""
    entry = next(iter(entry_points(group="opentelemetry_metrics_exporter", name=name)), None)
    if entry is None:
        return "no installed package has a metrics exporter of that name"
    try:
        entry.load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return f"it cannot be imported: {reason(error)}"
    return ""


def _reach(exporter: str, settings: Settings) -> list[Finding]:
    """What is at the other end."""
    if exporter == PROMETHEUS:
        return _prometheus(settings.prometheus_host, settings.prometheus_port)
    if exporter in (OTLP_GRPC, OTLP_HTTP):
        endpoint = settings.endpoint(exporter)
        return [_listens(exporter, endpoint), *_usual_port(exporter, endpoint)]
    return []


def _listens(exporter: str, endpoint: str) -> Finding:
    try:
        parts = urlsplit(endpoint if "://" in endpoint else f"//{endpoint}")
        secure = parts.scheme == "https" or (exporter == OTLP_GRPC and parts.scheme != "http")
        address = (parts.hostname or "localhost", parts.port or (443 if secure else 80))
        with socket.create_connection(address, CONNECT_SECONDS):
            return ok(f"something listens at {address[0]}:{address[1]}")
    except OSError as error:
        why = error.strerror or str(error) or type(error).__name__
    except ValueError as error:
        why = str(error)
    return warning(f"nothing listens at {endpoint}: {why}", "start a collector there; until then exports fail")


def _usual_port(exporter: str, endpoint: str) -> list[Finding]:
    """Says when a port is the one that collectors use for the other protocol: something listens there, and is deaf."""
    try:
        port = urlsplit(endpoint).port
    except ValueError:
        return []
    other, protocol = {OTLP_GRPC: (4318, "http/protobuf"), OTLP_HTTP: (4317, "grpc")}[exporter]
    if port != other:
        return []
    remedy = f"if so, set OTEL_EXPORTER_OTLP_PROTOCOL={protocol}"
    return [warning(f"port {port} is where collectors take the protocol {protocol}, as a rule", remedy)]


def _prometheus(host: str, port: int) -> list[Finding]:
    if port == 0:
        return [note(f"every rank and {_SCHEDULER} listens on any free port: see the log for which")]
    why = _taken(host, port)
    if why is None:
        whose = f"rank n of this machine listens on {port} + n, {_SCHEDULER} after the last of them"
        port_found = ok(f"port {port} of {host} is free: {whose}")
    elif why.errno is not None and not isinstance(why, socket.gaierror) and _taken(host, 0) is None:
        text = f"port {port} of {host} cannot be used now: {os.strerror(why.errno)}; the next free one would be"
        port_found = warning(text, "free it, or set OTEL_EXPORTER_PROMETHEUS_PORT to another")
    else:
        text = f"OTEL_EXPORTER_PROMETHEUS_HOST={one_line(host)} cannot be bound: {reason(why)}"
        return [failure(text, "set it to an address of this machine")]
    if host in ("localhost", "127.0.0.1", "::1"):
        outside = "scrapes from other machines need OTEL_EXPORTER_PROMETHEUS_HOST=0.0.0.0"
        return [port_found, note(f"the endpoint is for this machine alone; {outside}")]
    return [port_found]


def _taken(host: str, port: int) -> OSError | None:
    """Returns why a port cannot be bound; None where it can. Nothing listens on it meanwhile."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, _, _, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except UnicodeError as error:
        return OSError(str(error))
    except OSError as error:
        return error
    return None


# -- OTEL_CONFIG_FILE --------------------------------------------------------------------------------------------------


def _config_file(path: str) -> str:
    """Returns why a file yields no metrics; empty where it does. It is read, and nothing is made from it."""
    if importlib.util.find_spec("opentelemetry.configuration") is None:
        return "needs the package opentelemetry-configuration"
    from opentelemetry.configuration import load_config_file  # pyright: ignore[reportMissingTypeStubs]

    try:
        whole: Any = load_config_file(path)
    except Exception as error:
        return f"cannot be used: {reason(error)}"
    if whole.disabled:
        return "says disabled: true"
    return "" if whole.meter_provider is not None else "has no meter_provider"
