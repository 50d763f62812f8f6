"""What the environment asks for, and what is said of what it cannot ask for."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvcache_otel.export.settings import OTLP_GRPC, OTLP_HTTP, PROMETHEUS, Settings

EXPORTER = "OTEL_METRICS_EXPORTER"
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
METRICS_ENDPOINT = "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"
PROTOCOL = "OTEL_EXPORTER_OTLP_PROTOCOL"
METRICS_PROTOCOL = "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL"
INTERVAL = "OTEL_METRIC_EXPORT_INTERVAL"
TIMEOUT = "OTEL_METRIC_EXPORT_TIMEOUT"
PORT = "OTEL_EXPORTER_PROMETHEUS_PORT"
HOST = "OTEL_EXPORTER_PROMETHEUS_HOST"
DISABLED = "OTEL_SDK_DISABLED"
INSTRUMENTATIONS = "OTEL_PYTHON_DISABLED_INSTRUMENTATIONS"
AGGREGATION = "OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION"
CONFIG_FILE = "OTEL_CONFIG_FILE"


@pytest.mark.parametrize(
    ("environ", "exporters"),
    [
        ({}, ()),
        ({EXPORTER: ""}, ()),
        ({EXPORTER: "none"}, ()),
        ({EXPORTER: " None "}, ()),
        ({EXPORTER: "none", ENDPOINT: "http://collector:4317"}, ()),
        ({EXPORTER: "otlp"}, (OTLP_GRPC,)),
        ({EXPORTER: "OTLP"}, (OTLP_GRPC,)),
        ({EXPORTER: "otlp", PROTOCOL: "http/protobuf"}, (OTLP_HTTP,)),
        ({EXPORTER: "otlp", PROTOCOL: "grpc", METRICS_PROTOCOL: "http/protobuf"}, (OTLP_HTTP,)),
        ({EXPORTER: "otlp", PROTOCOL: "http/protobuf", METRICS_PROTOCOL: "grpc"}, (OTLP_GRPC,)),
        ({EXPORTER: "otlp", PROTOCOL: ""}, (OTLP_GRPC,)),
        ({EXPORTER: "otlp_proto_http", PROTOCOL: "grpc"}, (OTLP_HTTP,)),
        ({EXPORTER: "prometheus"}, (PROMETHEUS,)),
        ({EXPORTER: " otlp , prometheus,console,"}, (OTLP_GRPC, PROMETHEUS, "console")),
        ({EXPORTER: "otlp,otlp_proto_grpc,otlp"}, (OTLP_GRPC,)),
        ({EXPORTER: "My_Exporter"}, ("My_Exporter",)),
        ({EXPORTER: "prometheus", ENDPOINT: "http://collector:4317"}, (PROMETHEUS,)),
        ({ENDPOINT: "http://collector:4317"}, (OTLP_GRPC,)),
        ({METRICS_ENDPOINT: "http://collector:4318/v1/metrics", PROTOCOL: "http/protobuf"}, (OTLP_HTTP,)),
        ({ENDPOINT: ""}, ()),
    ],
)
def test_exporters(environ: dict[str, str], exporters: tuple[str, ...]) -> None:
    settings = Settings.from_environ(environ)
    assert settings.exporters == exporters
    assert settings.enabled is bool(exporters)
    assert settings.problems == ()


def test_with_nothing_set_the_reason_names_both_switches() -> None:
    settings = Settings.from_environ({})
    assert not settings.enabled
    assert not settings.forbidden
    assert EXPORTER in settings.reason
    assert ENDPOINT in settings.reason


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({DISABLED: "true"}, [DISABLED]),
        ({DISABLED: " TRUE "}, [DISABLED]),
        ({INSTRUMENTATIONS: "requests, kvcache"}, [INSTRUMENTATIONS, "kvcache"]),
        ({INSTRUMENTATIONS: "*"}, [INSTRUMENTATIONS, "*"]),
    ],
)
def test_forbidden(environ: dict[str, str], words: list[str]) -> None:
    settings = Settings.from_environ({EXPORTER: "otlp", **environ})
    assert settings.forbidden
    assert not settings.enabled
    assert all(word in settings.reason for word in words)


@pytest.mark.parametrize("environ", [{DISABLED: "false"}, {INSTRUMENTATIONS: "kvcaches,urllib"}, {DISABLED: ""}])
def test_not_forbidden(environ: dict[str, str]) -> None:
    settings = Settings.from_environ({EXPORTER: "otlp", **environ})
    assert settings.enabled
    assert settings.problems == ()


def test_none_is_not_forbidden() -> None:
    settings = Settings.from_environ({EXPORTER: "none"})
    assert not settings.forbidden
    assert settings.reason == "nothing is exported: OTEL_METRICS_EXPORTER=none"


@pytest.mark.parametrize(
    ("variable", "value", "kept", "instead"),
    [
        (DISABLED, "yes", "enabled", True),
        (EXPORTER, ",", "exporters", ()),
        (EXPORTER, "none,prometheus", "exporters", (PROMETHEUS,)),
        (PROTOCOL, "http/json", "protocol", "grpc"),
        (METRICS_PROTOCOL, "carrier-pigeon", "protocol", "grpc"),
        (INTERVAL, "soon", "interval_s", 10.0),
        (INTERVAL, "0", "interval_s", 10.0),
        (INTERVAL, "-1", "interval_s", 10.0),
        (INTERVAL, "0.0001", "interval_s", 10.0),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "abc", "otlp_timeouts", (("OTEL_EXPORTER_OTLP_TIMEOUT", "10"),)),
        ("OTEL_EXPORTER_OTLP_METRICS_TIMEOUT", "-1", "otlp_timeouts", (("OTEL_EXPORTER_OTLP_METRICS_TIMEOUT", "10"),)),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "zip", "uncompressed", (OTLP_GRPC,)),
        ("OTEL_EXPORTER_OTLP_METRICS_COMPRESSION", "deflate", "uncompressed", (OTLP_GRPC,)),
        (INTERVAL, "nan", "interval_s", 10.0),
        (INTERVAL, "inf", "interval_s", 10.0),
        (INTERVAL, "1e300", "interval_s", 10.0),
        (TIMEOUT, "5s", "timeout_s", 30.0),
        (PORT, "http", "prometheus_port", 9464),
        (PORT, "-1", "prometheus_port", 9464),
        (PORT, "65536", "prometheus_port", 9464),
        (PORT, "9464.0", "prometheus_port", 9464),
        (PORT, "9" * 5000, "prometheus_port", 9464),
        (PORT, "²", "prometheus_port", 9464),
        (AGGREGATION, "base2_exponential_bucket_histogram", "enabled", True),
        (ENDPOINT, "collector:4317", "protocol", "grpc"),
    ],
)
def test_what_cannot_be_used_is_named_with_what_happens_instead(
    variable: str, value: str, kept: str, instead: object
) -> None:
    settings = Settings.from_environ({EXPORTER: "otlp,prometheus", variable: value})
    [problem] = settings.problems
    assert problem.startswith(f"{variable}=")
    assert "\n" not in problem
    assert len(problem) < 400
    if value.isascii() and len(value) < 100:
        assert value in problem
    assert getattr(settings, kept) == instead


def test_http_without_a_scheme_is_said_to_fail() -> None:
    settings = Settings.from_environ({ENDPOINT: "collector:4318", PROTOCOL: "http/protobuf"})
    assert settings.problems == (
        "OTEL_EXPORTER_OTLP_ENDPOINT=collector:4318 does not start with http:// or https://; no export will succeed",
    )


@pytest.mark.parametrize("insecure", ["OTEL_EXPORTER_OTLP_INSECURE", "OTEL_EXPORTER_OTLP_METRICS_INSECURE"])
def test_grpc_without_a_scheme_is_fine_when_said_to_be_insecure(insecure: str) -> None:
    assert Settings.from_environ({ENDPOINT: "collector:4317", insecure: "true"}).problems == ()


def test_only_variables_that_matter_are_judged() -> None:
    assert Settings.from_environ({EXPORTER: "prometheus", PROTOCOL: "nonsense"}).problems == ()
    assert Settings.from_environ({EXPORTER: "otlp", PORT: "nonsense"}).problems == ()


def test_values() -> None:
    settings = Settings.from_environ(
        {EXPORTER: "otlp,prometheus", INTERVAL: "2500", TIMEOUT: "1000", HOST: "0.0.0.0", PORT: "0"}
    )
    assert settings.interval_s == 2.5
    assert settings.timeout_s == 1.0
    assert settings.prometheus_host == "0.0.0.0"
    assert settings.prometheus_port == 0


def test_defaults() -> None:
    settings = Settings.from_environ({EXPORTER: "prometheus"})
    assert (settings.prometheus_host, settings.prometheus_port) == ("localhost", 9464)
    assert settings.interval_s == 10.0


@pytest.mark.parametrize(
    ("environ", "endpoint"),
    [
        ({}, "http://localhost:4317"),
        ({PROTOCOL: "http/protobuf"}, "http://localhost:4318/v1/metrics"),
        ({ENDPOINT: "http://c:4317"}, "http://c:4317"),
        ({ENDPOINT: "http://c:4318/", PROTOCOL: "http/protobuf"}, "http://c:4318/v1/metrics"),
        ({METRICS_ENDPOINT: "http://c:4318/x", PROTOCOL: "http/protobuf"}, "http://c:4318/x"),
        ({METRICS_ENDPOINT: "http://m:1", ENDPOINT: "http://c:2"}, "http://m:1"),
        ({ENDPOINT: "https://user:secret@c:4317"}, "https://c:4317"),
    ],
)
def test_otlp_endpoint(environ: dict[str, str], endpoint: str) -> None:
    settings = Settings.from_environ({EXPORTER: "otlp", **environ})
    assert settings.endpoint(settings.exporters[0]) == endpoint
    assert endpoint in settings.describe(settings.exporters[0])


def test_credentials_are_never_shown() -> None:
    for value in (
        "https://user:hunter2@c:4317",
        "user:hunter2@c:4317",
        "http://user:pa/hunter2@c:4317",
        "http://user:hunter2/ss@c:4317",
        "http://user:hunter2?ss@c:4317",
        "http://user:pa?hunter2@c:4317",
        "http://c:4317?api_key=hunter2",
        "http://c:4317/v1?api_key=a@hunter2",
        "http://c:4317/v1#hunter2",
        "user:hunter2://x@c:4317",
    ):
        for protocol in ("grpc", "http/protobuf"):
            settings = Settings.from_environ({ENDPOINT: value, PROTOCOL: protocol})
            assert "hunter2" not in repr(settings)
            assert "hunter2" not in settings.describe(settings.exporters[0])


def test_each_otlp_exporter_is_shown_at_its_own_endpoint() -> None:
    settings = Settings.from_environ({EXPORTER: "otlp_proto_grpc,otlp_proto_http", ENDPOINT: "http://c:1"})
    assert "OTLP over gRPC to http://c:1 every" in settings.describe(OTLP_GRPC)
    assert "OTLP over HTTP to http://c:1/v1/metrics every" in settings.describe(OTLP_HTTP)


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_ip_version_6_as_urls_write_it(host: str) -> None:
    settings = Settings.from_environ({EXPORTER: "prometheus", HOST: host})
    assert settings.prometheus_host == "::1"
    assert "http://[::1]:9464/metrics" in settings.describe(PROMETHEUS)


@pytest.mark.parametrize("variable", [CONFIG_FILE, EXPORTER, ENDPOINT, HOST, PROTOCOL, INTERVAL])
@pytest.mark.parametrize("value", ["x" * 5000, "x\ny" * 2000, "\U0001f600" * 2000])
def test_endless_values_are_shortened(variable: str, value: str) -> None:
    settings = Settings.from_environ({EXPORTER: "otlp,prometheus", variable: value})
    for text in (*settings.problems, settings.variable, settings.reason, *map(settings.describe, settings.exporters)):
        assert len(text) < 600
        assert text.splitlines() == [text]


def test_a_configuration_file_decides_alone() -> None:
    settings = Settings.from_environ({CONFIG_FILE: "otel.yaml", EXPORTER: "prometheus", PORT: "nonsense"})
    assert settings.enabled
    assert settings.config_file == "otel.yaml"
    assert settings.exporters == ()
    [problem] = settings.problems
    assert problem == "OTEL_METRICS_EXPORTER=prometheus is ignored, because OTEL_CONFIG_FILE is set"


@pytest.mark.parametrize("variable", [ENDPOINT, METRICS_ENDPOINT])
def test_an_endpoint_is_shown_with_the_variable_that_has_it(variable: str) -> None:
    """Whoever asked for OTLP otherwise, as our own demo does: that one is to be looked at where nobody is there."""
    settings = Settings.from_environ({variable: "http://c:1"})
    assert settings.describe(OTLP_GRPC) == f"OTLP over gRPC to http://c:1 every 10 s ({variable}=http://c:1)"
    settings = Settings.from_environ({variable: "http://c:1", EXPORTER: "otlp,prometheus"})
    assert settings.describe(OTLP_GRPC) == f"OTLP over gRPC to http://c:1 every 10 s ({variable})"


def test_describe_names_the_variable() -> None:
    settings = Settings.from_environ({EXPORTER: "otlp,prometheus,console"})
    for exporter in settings.exporters:
        assert "OTEL_METRICS_EXPORTER=otlp,prometheus,console" in settings.describe(exporter)


VARIABLES = [
    EXPORTER,
    ENDPOINT,
    METRICS_ENDPOINT,
    PROTOCOL,
    METRICS_PROTOCOL,
    INTERVAL,
    TIMEOUT,
    PORT,
    HOST,
    DISABLED,
    INSTRUMENTATIONS,
    AGGREGATION,
    CONFIG_FILE,
]
VALUES = st.text() | st.sampled_from(
    ["otlp", "prometheus", "otlp,prometheus", "none", "://@", "@", "1", "1e999", "\ud800"]
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(VARIABLES), VALUES))
@example({EXPORTER: "otlp", ENDPOINT: "\udcff@"})
@example({EXPORTER: "prometheus", HOST: "\udcff\n"})
@example({EXPORTER: "\udcff"})
@example({CONFIG_FILE: "\udcff\n"})
def test_no_environment_raises(environ: dict[str, str]) -> None:
    read = Settings.from_environ(environ)
    assert read.reason
    assert read.interval_s > 0
    assert 0 <= read.prometheus_port <= 65_535
    for text in (*read.problems, read.reason, *map(read.describe, read.exporters)):
        assert text.splitlines() == [text]
        assert text.encode()


def test_reading_them_needs_no_opentelemetry() -> None:
    code = (
        "import sys, kvcache_otel.export.settings as s; s.Settings.from_environ({'OTEL_METRICS_EXPORTER': 'otlp'});"
        "print([m for m in sys.modules if m.startswith(('opentelemetry', 'grpc', 'prometheus_client'))])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
