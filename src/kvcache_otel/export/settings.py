"""What the environment asks for, read without OpenTelemetry: every engine process does this when it starts.

Only standard variables are read. Nothing here raises, whatever the environment holds: what cannot be used is named in
`Settings.problems`, with what happens instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

INSTRUMENTATION = "kvcache"

OTLP_GRPC = "otlp_proto_grpc"
OTLP_HTTP = "otlp_proto_http"
PROMETHEUS = "prometheus"

DEFAULT_INTERVAL_S = 10.0
DEFAULT_TIMEOUT_S = 30.0
DEFAULT_PROMETHEUS_HOST = "localhost"
DEFAULT_PROMETHEUS_PORT = 9464

_EXPORTER_OF_PROTOCOL = {"grpc": OTLP_GRPC, "http/protobuf": OTLP_HTTP}
_DEFAULT_ENDPOINT = {OTLP_GRPC: "http://localhost:4317", OTLP_HTTP: "http://localhost:4318/v1/metrics"}
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_COMPRESSIONS = {OTLP_GRPC: ("gzip", "none"), OTLP_HTTP: ("gzip", "deflate", "none")}
_NOTHING_SET = (
    "nothing is exported: set OTEL_METRICS_EXPORTER (otlp, prometheus, console) or OTEL_EXPORTER_OTLP_ENDPOINT"
)


class Settings(NamedTuple):
    """What would be exported, and why. (A named tuple, because it is made in a fifth of a frozen dataclass's time.)

    Attributes:
        exporters: Names in the entry-point group ``opentelemetry_metrics_exporter``, each once; ``otlp`` is already
            resolved by its protocol. Empty with a configuration file.
        variable: The variable that decided, with its value, for operators to read; empty where none did.
        config_file: Path of the declarative configuration; empty where there is none.
        forbidden: Whether this instrumentation or the whole SDK is switched off: then not even a MeterProvider that the
            process already has is used.
        reason: Why something or nothing is exported, in one line.
        interval_s: Seconds between two exports.
        timeout_s: Seconds that one collection may take.
        otlp_endpoints: Where each OTLP exporter sends, without credentials; for operators to read, it reads its own.
        endpoint_variable: The variable that says so for all of them; empty where none does.
        otlp_timeouts: Variables at whose value an OTLP exporter would fail, and a value to have instead.
        uncompressed: The OTLP exporters that would fail at the compression asked for, and are to use none.
        prometheus_host: Address that the Prometheus endpoint binds.
        prometheus_port: Its port for local rank 0; 0 = any.
        problems: What was wrong, one line each: the variable, its value and what happens instead.
    """

    exporters: tuple[str, ...] = ()
    variable: str = ""
    config_file: str = ""
    forbidden: bool = False
    reason: str = _NOTHING_SET
    interval_s: float = DEFAULT_INTERVAL_S
    timeout_s: float = DEFAULT_TIMEOUT_S
    otlp_endpoints: tuple[tuple[str, str], ...] = ()
    endpoint_variable: str = ""
    otlp_timeouts: tuple[tuple[str, str], ...] = ()
    uncompressed: tuple[str, ...] = ()
    prometheus_host: str = DEFAULT_PROMETHEUS_HOST
    prometheus_port: int = DEFAULT_PROMETHEUS_PORT
    problems: tuple[str, ...] = ()

    @property
    def enabled(self) -> bool:
        """Whether the environment alone makes this process export."""
        return not self.forbidden and bool(self.exporters or self.config_file)

    @property
    def protocol(self) -> str:
        """The OTLP protocol, ``grpc`` or ``http/protobuf``; empty where no OTLP is exported."""
        return next((protocol for protocol, name in _EXPORTER_OF_PROTOCOL.items() if name in self.exporters), "")

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Settings:
        """Reads the standard variables."""
        return _Reader(environ).settings()

    def endpoint(self, exporter: str) -> str:
        """Returns where an OTLP exporter sends; empty for any other."""
        return dict(self.otlp_endpoints).get(exporter, "")

    def describe(self, exporter: str) -> str:
        """Returns what one of `exporters` does, in one line."""
        if exporter == PROMETHEUS:
            return f"Prometheus at {scrape_url(self.prometheus_host, self.prometheus_port)} ({self.variable})"
        if exporter in (OTLP_GRPC, OTLP_HTTP):
            transport = "gRPC" if exporter == OTLP_GRPC else "HTTP"
            told = self.variable.startswith(self.endpoint_variable)  # With its value; or there is none.
            variable = self.variable if told else self.endpoint_variable
            return f"OTLP over {transport} to {self.endpoint(exporter)} every {self.interval_s:g} s ({variable})"
        return f"{one_line(exporter)} every {self.interval_s:g} s ({self.variable})"


class _Reader:
    """Reads one environment and collects what is wrong with it."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._problems: list[str] = []

    def settings(self) -> Settings:
        if reason := self._forbidden():
            return Settings(forbidden=True, reason=reason, problems=tuple(self._problems))
        if config_file := self._text("OTEL_CONFIG_FILE"):
            if ignored := self._text("OTEL_METRICS_EXPORTER"):
                self._problem("OTEL_METRICS_EXPORTER", ignored, "is ignored, because OTEL_CONFIG_FILE is set")
            variable = f"OTEL_CONFIG_FILE={one_line(config_file)}"
            return Settings(config_file=config_file, variable=variable, reason=variable, problems=tuple(self._problems))
        exporters, variable = self._exporters()
        if not exporters:
            reason = f"nothing is exported: {variable}" if variable else _NOTHING_SET
            return Settings(variable=variable, reason=reason, problems=tuple(self._problems))
        self._check_aggregation()
        otlp = [name for name in exporters if name in _DEFAULT_ENDPOINT]
        return Settings(
            exporters=exporters,
            variable=variable,
            reason=variable,
            interval_s=self._milliseconds("OTEL_METRIC_EXPORT_INTERVAL", DEFAULT_INTERVAL_S),
            timeout_s=self._milliseconds("OTEL_METRIC_EXPORT_TIMEOUT", DEFAULT_TIMEOUT_S),
            otlp_endpoints=tuple((name, self._endpoint(name)) for name in otlp),
            endpoint_variable=next(filter(self._text, _ENDPOINTS), "") if otlp else "",
            otlp_timeouts=self._otlp_timeouts() if otlp else (),
            uncompressed=tuple(name for name in otlp if not self._compresses(name)),
            prometheus_host=self._host(),
            prometheus_port=self._port() if PROMETHEUS in exporters else DEFAULT_PROMETHEUS_PORT,
            problems=tuple(self._problems),
        )

    # -- what is asked for -----------------------------------------------------------------------------------------

    def _forbidden(self) -> str:
        disabled = self._text("OTEL_SDK_DISABLED")
        if disabled.lower() == "true":
            return f"nothing is exported: OTEL_SDK_DISABLED={disabled}"
        if disabled.lower() not in ("", "false"):
            self._problem("OTEL_SDK_DISABLED", disabled, "is neither true nor false; taken as false")
        for name in self._list("OTEL_PYTHON_DISABLED_INSTRUMENTATIONS"):
            if name in (INSTRUMENTATION, "*"):
                return f"nothing is exported: OTEL_PYTHON_DISABLED_INSTRUMENTATIONS has {name}"
        return ""

    def _exporters(self) -> tuple[tuple[str, ...], str]:
        """Returns the exporters and the variable that asked for them."""
        asked = self._text("OTEL_METRICS_EXPORTER")
        names = [_canonical(name) for name in self._list("OTEL_METRICS_EXPORTER")]
        if names:
            variable = f"OTEL_METRICS_EXPORTER={one_line(asked)}"
            some = [name for name in names if name != "none"]
            if some and len(some) < len(names):
                self._problem("OTEL_METRICS_EXPORTER", asked, "has none beside others; the others are used")
            resolved = [self._otlp() if name == "otlp" else name for name in some]
            return tuple(dict.fromkeys(resolved)), variable
        if asked:
            self._problem("OTEL_METRICS_EXPORTER", asked, "names no exporter; taken as unset")
        for variable in _ENDPOINTS:
            if endpoint := self._text(variable):
                return (self._otlp(),), f"{variable}={_without_credentials(endpoint)}"
        return (), ""

    def _otlp(self) -> str:
        for variable in ("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
            if protocol := self._text(variable):
                exporter = _EXPORTER_OF_PROTOCOL.get(protocol.lower())
                if exporter is None:
                    self._problem(variable, protocol, "is neither grpc nor http/protobuf; grpc is used")
                return exporter or OTLP_GRPC
        return OTLP_GRPC

    def _endpoint(self, exporter: str) -> str:
        """Returns where an OTLP exporter will send, as the exporter itself works it out."""
        variable = "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"
        endpoint = self._text(variable)
        path = ""
        if not endpoint:
            variable = "OTEL_EXPORTER_OTLP_ENDPOINT"
            endpoint = self._text(variable)
            path = "/v1/metrics" if exporter == OTLP_HTTP else ""
        if not endpoint:
            return _DEFAULT_ENDPOINT[exporter]
        shown = _without_credentials(endpoint)
        if not endpoint.lower().startswith(("http://", "https://")):
            if exporter == OTLP_HTTP:
                self._problem(variable, shown, "does not start with http:// or https://; no export will succeed")
            elif not self._insecure():
                self._problem(variable, shown, "does not start with http://; the connection will use TLS")
        return shown.rstrip("/") + path if path else shown

    def _insecure(self) -> bool:
        variables = ("OTEL_EXPORTER_OTLP_METRICS_INSECURE", "OTEL_EXPORTER_OTLP_INSECURE")
        return any(self._text(variable).lower() == "true" for variable in variables)

    def _otlp_timeouts(self) -> tuple[tuple[str, str], ...]:
        general = self._text("OTEL_EXPORTER_OTLP_TIMEOUT")
        instead = general if _is_timeout(general) else "10"
        replaced: list[tuple[str, str]] = []
        for variable in ("OTEL_EXPORTER_OTLP_METRICS_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT"):
            if _is_timeout(text := self._text(variable)):
                break  # The other one is not read.
            if text:
                self._problem(variable, text, f"is not a number of seconds that can be used; {instead} s is used")
            if variable in self._environ:  # Exporters fail at an empty one, too.
                replaced.append((variable, instead))
        return tuple(replaced)

    def _compresses(self, exporter: str) -> bool:
        """Returns whether an OTLP exporter can be left to read the compression that it is to use."""
        known = _COMPRESSIONS[exporter]
        for variable in ("OTEL_EXPORTER_OTLP_METRICS_COMPRESSION", "OTEL_EXPORTER_OTLP_COMPRESSION"):
            text = self._text(variable)
            if text and text.lower() not in known:
                self._problem(variable, text, f"is no compression ({', '.join(known)}); none is used")
            elif text:
                return exporter != OTLP_GRPC or text.lower() != "none"  # A word that the gRPC exporter does not know.
            if variable in self._environ:
                return False
        return True

    def _check_aggregation(self) -> None:
        variable = "OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION"
        if (aggregation := self._text(variable)) and aggregation != "explicit_bucket_histogram":
            self._problem(variable, aggregation, "does not apply: kvcache histograms have explicit bounds everywhere")

    # -- single values ---------------------------------------------------------------------------------------------

    def _text(self, variable: str) -> str:
        """Returns a variable's value; empty means unset, as OpenTelemetry says."""
        return self._environ.get(variable, "").strip()

    def _list(self, variable: str) -> list[str]:
        return [name.strip() for name in self._text(variable).split(",") if name.strip()]

    def _milliseconds(self, variable: str, default_s: float) -> float:
        if not (text := self._text(variable)):
            return default_s
        try:
            milliseconds = float(text)
        except ValueError:
            milliseconds = -1.0
        # A day is more than anybody means, and less than what a thread can wait for.
        if 1 <= milliseconds <= 86_400_000:
            return milliseconds / 1000
        self._problem(variable, text, f"is not a number of milliseconds from 1 to 86400000; {default_s:g} s is used")
        return default_s

    def _host(self) -> str:
        host = self._text("OTEL_EXPORTER_PROMETHEUS_HOST") or DEFAULT_PROMETHEUS_HOST
        return host[1:-1] if host.startswith("[") and host.endswith("]") else host  # As URLs write IP version 6.

    def _port(self) -> int:
        variable = "OTEL_EXPORTER_PROMETHEUS_PORT"
        if not (text := self._text(variable)):
            return DEFAULT_PROMETHEUS_PORT
        if text.isascii() and text.isdigit() and len(text) <= 5 and int(text) <= 65_535:
            return int(text)
        self._problem(variable, text, f"is not a port from 0 to 65535; {DEFAULT_PROMETHEUS_PORT} is used")
        return DEFAULT_PROMETHEUS_PORT

    def _problem(self, variable: str, value: str, outcome: str) -> None:
        problem = f"{variable}={one_line(value)} {outcome}"
        if problem not in self._problems:
            self._problems.append(problem)


def _canonical(name: str) -> str:
    """Returns OpenTelemetry's own spelling of its exporters; other names are left as they are."""
    lower = name.lower()
    return lower if lower in ("none", "otlp", OTLP_GRPC, OTLP_HTTP, PROMETHEUS, "console") else name


def _is_timeout(text: str) -> bool:
    try:
        return 0 < float(text) <= 86_400
    except ValueError:
        return False


def _without_credentials(endpoint: str) -> str:
    """Returns an endpoint that may be shown: one line, without the user, password and query that it may carry."""
    scheme, separator, rest = endpoint.partition("://")
    if not scheme.isalnum() or not separator:
        scheme, separator, rest = "", "", endpoint
    end = min((position for mark in "?#" if (position := rest.find(mark)) >= 0), default=len(rest))
    if "@" in rest[end:]:  # Of a password or of a query: who can tell where the host is?
        return one_line(f"{scheme}{separator}...")
    hidden = f"{rest[end]}..." if end < len(rest) else ""
    # A password may hold a slash, so all that is before the last @ is taken for one.
    return one_line(scheme + separator + rest[:end].rpartition("@")[2] + hidden)


def scrape_url(host: str, port: int) -> str:
    """Returns the address of a Prometheus endpoint."""
    shown = one_line(host)
    return f"http://{f'[{shown}]' if ':' in shown else shown}:{port}/metrics"


def one_line(text: str) -> str:
    """Returns text as it is where it is harmless, quoted where it is not, and never endless."""
    shown = text if text.isprintable() and text.isascii() else ascii(text[:200])
    return shown if len(shown) <= 200 else shown[:197] + "..."
