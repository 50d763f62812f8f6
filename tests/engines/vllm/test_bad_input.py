"""Whatever the environment holds, vLLM runs as if we were not there, and one line says what is wrong."""

from __future__ import annotations

import logging
import os
import re
import socket
import sys
import time
import urllib.request
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from tests.conftest import require

require("vllm")

import vllm  # noqa: E402
from opentelemetry import metrics  # noqa: E402
from opentelemetry.test.globals_test import reset_metrics_globals  # noqa: E402

from kvcache_otel.instrumentation import instrumentation  # noqa: E402
from kvcache_otel.plugin import register_vllm  # noqa: E402
from tests.engines.vllm.manager_driver import CHUNK_BYTES, ManagerDriver, content, fs_tier, make_config  # noqa: E402
from tests.engines.vllm.programs import DRIVER, ENGINE, run  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.engine

BLOCKS = range(4)
UNREACHABLE = "http://127.0.0.1:1"
# What an exiting process may wait for a collector that does not answer, and what else an exit takes.
EXIT_SECONDS = 6.0


class Driven(NamedTuple):
    """What a manager did in the environment of a test.

    Attributes:
        written: Bytes that vLLM says it wrote to disk.
        loaded: The blocks, read back.
        lines: What we said, warnings and worse; but for what gets through to a collector, which is a matter of time.
        seconds: How long it all took.
    """

    written: float
    loaded: list[bytes]
    lines: list[str]
    seconds: float


@pytest.fixture
def drive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Iterator[Callable[..., Driven]]:
    """Registers the plugin as vLLM does, and has a manager store, cascade and load, in this process."""
    for variable in list(os.environ):
        if variable.startswith("OTEL_"):
            monkeypatch.delenv(variable)
    reset_metrics_globals()
    caplog.set_level(logging.INFO)

    def drive(**environ: str) -> Driven:
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        began = time.monotonic()
        register_vllm()
        with ManagerDriver(make_config(8, [fs_tier(tmp_path / "blocks")])) as driver:
            request = driver.request()
            driver.store(request, BLOCKS)
            driver.settle()
            loaded = driver.load(request, BLOCKS)
            driver.finish(request)
            driver.step()
            written = driver.totals.counter("tiering_write_bytes", "1:fs")
        lines = [
            record.getMessage()
            for record in caplog.records
            if record.name.startswith("kvcache_otel") and record.levelno >= logging.WARNING
            # An exporter of the test before this one may say it only now.
            if record.name != "kvcache_otel.export.spoken"
        ]
        return Driven(written, loaded, lines, time.monotonic() - began)

    yield drive
    instrumentation.detach()
    reset_metrics_globals()


def _assert_served(driven: Driven, *lines: str) -> None:
    """vLLM did all it should, and we said exactly these lines."""
    assert driven.written == len(BLOCKS) * CHUNK_BYTES
    assert driven.loaded == [content(block) for block in BLOCKS]
    assert len(driven.lines) == len(lines), driven.lines
    for said, expected in zip(driven.lines, lines, strict=True):
        assert re.fullmatch(expected, said), said
    assert driven.seconds < 3


def _exporter() -> Any:
    assert instrumentation.runtime is not None
    return instrumentation.runtime.exporter


def test_an_exporter_that_does_not_exist(drive: Callable[..., Driven]) -> None:
    driven = drive(OTEL_METRICS_EXPORTER="nonsense")
    _assert_served(
        driven, r"kvcache: OTEL_METRICS_EXPORTER=nonsense: nothing is exported by 'nonsense': .* no installed .*"
    )
    assert _exporter() is None


def test_an_interval_that_is_none(drive: Callable[..., Driven]) -> None:
    driven = drive(OTEL_METRICS_EXPORTER="otlp", OTEL_METRIC_EXPORT_INTERVAL="soon")
    _assert_served(driven, r"kvcache: OTEL_METRIC_EXPORT_INTERVAL=soon is not a number .*; 10 s is used")
    assert "every 10 s" in _exporter().endpoints[0]


def test_a_protocol_that_does_not_exist(drive: Callable[..., Driven]) -> None:
    driven = drive(OTEL_METRICS_EXPORTER="otlp", OTEL_EXPORTER_OTLP_PROTOCOL="carrier-pigeon")
    _assert_served(driven, r"kvcache: OTEL_EXPORTER_OTLP_PROTOCOL=carrier-pigeon is neither .*; grpc is used")
    assert "OTLP over gRPC" in _exporter().endpoints[0]


def test_a_port_that_is_taken(drive: Callable[..., Driven]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        taken = holder.getsockname()[1]
        # A scheduler's port is behind that of its one worker.
        driven = drive(OTEL_METRICS_EXPORTER="prometheus", OTEL_EXPORTER_PROMETHEUS_PORT=str(taken - 1))
        (port,) = _exporter().ports
        assert port != taken
        url = f"http://localhost:{port}/metrics"
        _assert_served(driven, rf"kvcache: Prometheus endpoint is {url}, because port {taken} of localhost .* in use")
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            assert f"{len(BLOCKS) * CHUNK_BYTES}.0" in answer.read().decode()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "absent|No such file|not found"),
        ("meter_provider: [}\n", "pars|expected"),
        ("file_format: '1.0'\n", "has no meter_provider"),
    ],
    ids=["missing", "broken", "empty"],
)
def test_a_configuration_file_that_yields_nothing(
    drive: Callable[..., Driven], tmp_path: Path, content: str | None, why: str
) -> None:
    file = tmp_path / "otel.yaml"
    if content is not None:
        file.write_text(content)
    driven = drive(OTEL_CONFIG_FILE=str(file))
    _assert_served(driven, rf"kvcache: nothing is exported: OTEL_CONFIG_FILE={file} .*({why}).*")
    assert _exporter() is None
    assert type(metrics.get_meter_provider()).__name__ == "_ProxyMeterProvider"


@pytest.mark.parametrize("version", ["0.99.0", "0.27.1", "dev"])
def test_a_vllm_that_nobody_has_checked_is_hooked_all_the_same(
    drive: Callable[..., Driven], monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    driven = drive(OTEL_METRICS_EXPORTER="prometheus", OTEL_EXPORTER_PROMETHEUS_PORT="0")
    _assert_served(driven, rf"kvcache: vLLM .*{version}.* 0\.28 to 0\.33.*hooked all the same.*")
    assert {point.state for point in instrumentation.hooks["vllm"].points} <= {"attached", "waiting"}
    assert _exporter() is not None


def test_a_vllm_that_everybody_knows_is_nothing_to_speak_of(drive: Callable[..., Driven]) -> None:
    _assert_served(drive(OTEL_METRICS_EXPORTER="prometheus", OTEL_EXPORTER_PROMETHEUS_PORT="0"))


def test_a_python_without_a_global_lock(drive: Callable[..., Driven], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    driven = drive(OTEL_METRICS_EXPORTER="prometheus", OTEL_EXPORTER_PROMETHEUS_PORT="0")
    _assert_served(driven, r"kvcache: not instrumented: this Python has no global lock, .*")
    assert instrumentation.hooks == {}


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_a_collector_that_nobody_reaches_keeps_no_process_from_ending(tmp_path: Path, protocol: str) -> None:
    ended = run(
        [sys.executable, "-m", DRIVER, tmp_path / "blocks", "--register"],
        {
            "OTEL_EXPORTER_OTLP_ENDPOINT": UNREACHABLE,
            "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
            "OTEL_METRIC_EXPORT_INTERVAL": "100",
        },
    )
    result = ended.result()
    assert result["written"] == len(BLOCKS) * CHUNK_BYTES
    assert result["seconds"] < 3
    assert ended.exit_seconds < EXIT_SECONDS
    where, *unreached = ended.ours
    assert f"(OTEL_EXPORTER_OTLP_ENDPOINT={UNREACHABLE})" in where
    _assert_said_once(unreached)
    assert "Traceback" not in ended.err


def _assert_said_once(unreached: list[str]) -> None:
    """While it ran, if the exporter has given up by then, which takes ten seconds; and of the last export."""
    said = (
        rf"kvcache: nothing gets through to OTLP over \w+ to {UNREACHABLE}.*",
        rf"kvcache: the last export did not get through in time to OTLP over \w+ to {UNREACHABLE}.*",
    )
    assert len(unreached) <= len(said), unreached
    for line, pattern in zip(unreached, said[-len(unreached) :], strict=False):
        assert re.fullmatch(pattern, line), line


def test_a_whole_engine_answers_as_if_we_were_not_there(tmp_path: Path) -> None:
    """Everything at once: one exporter does not exist, the other reaches nobody, and the interval is none."""
    verbose = {"VLLM_LOGGING_LEVEL": "INFO"}
    plain = run([sys.executable, "-m", ENGINE, tmp_path / "plain"], {**verbose, "VLLM_PLUGINS": "none"})
    ended = run(
        [sys.executable, "-m", ENGINE, tmp_path / "instrumented"],
        {
            **verbose,
            "OTEL_METRICS_EXPORTER": "nonsense,otlp",
            "OTEL_EXPORTER_OTLP_ENDPOINT": UNREACHABLE,
            "OTEL_METRIC_EXPORT_INTERVAL": "soon",
        },
    )
    without, with_us = plain.result(), ended.result()
    assert plain.ours == []
    assert with_us["answers"] == without["answers"]
    assert max(cached for _, cached in with_us["answers"]) == 320
    assert with_us["serving_seconds"] < without["serving_seconds"] + 5
    assert with_us["shutdown_seconds"] < without["shutdown_seconds"] + 3
    assert ended.exit_seconds < EXIT_SECONDS
    expected = [
        r"kvcache: OTEL_METRIC_EXPORT_INTERVAL=soon is not .*; 10 s is used",
        r"kvcache: OTEL_METRICS_EXPORTER=nonsense,otlp: nothing is exported by 'nonsense': .*",
        rf"kvcache: exports to OTLP over gRPC to {UNREACHABLE} every 10 s \(OTEL_EXPORTER_OTLP_ENDPOINT\)",
    ]
    _assert_said_once(ended.ours[len(expected) :])
    for said, line in zip(ended.ours, expected, strict=False):
        assert re.fullmatch(line, said), said
