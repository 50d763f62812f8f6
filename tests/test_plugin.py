"""What an engine's plugin system runs in every process: it hooks what it was asked to, quickly, and never raises."""

from __future__ import annotations

import importlib
import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import kvcache_otel
from kvcache_otel import plugin
from kvcache_otel.engines.post_import import PostImport
from kvcache_otel.export.settings import Settings
from kvcache_otel.instrumentation import Instrumentation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Register = Callable[[], None]

NAMES = {"vllm": "vLLM", "sglang": "SGLang"}
GROUPS = {"vllm": "vllm.general_plugins", "sglang": "sglang.srt.plugins"}
LOGGER = "kvcache_otel"
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


@pytest.fixture(params=sorted(NAMES))
def engine(request: pytest.FixtureRequest) -> str:
    """Each engine in its turn."""
    return request.param


@pytest.fixture
def register(engine: str) -> Register:
    """The engine's entry point."""
    return getattr(plugin, f"register_{engine}")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment that asks for nothing."""
    for variable in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(variable)


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[Instrumentation]:
    """An instrumentation of this test's own in place of the process's."""
    own = Instrumentation()
    monkeypatch.setattr(plugin, "instrumentation", own)
    monkeypatch.setattr(plugin, "_provider_exists", lambda: False)
    yield own
    own.detach()


@pytest.fixture(autouse=True)
def loggers() -> Iterator[None]:
    """What the plugin does to loggers is undone."""
    touched = [logging.getLogger(name) for name in (LOGGER, *NAMES)]
    before = [(logger, list(logger.handlers), logger.level, logger.propagate) for logger in touched]
    yield
    for logger, handlers, level, propagate in before:
        logger.handlers[:] = handlers
        logger.setLevel(level)
        logger.propagate = propagate


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger=LOGGER)
    return caplog


def watchers() -> list[Any]:
    return [finder for finder in sys.meta_path if isinstance(finder, PostImport)]


def open_files() -> set[str]:
    return {os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.exists()}


# ------------------------------------------------------------------------------------------- asked for nothing


def test_nothing_set_hooks_nothing_opens_nothing_and_says_what_to_set(
    register: Register, process: Instrumentation, lines: pytest.LogCaptureFixture
) -> None:
    files, threads = open_files(), threading.active_count()
    register()
    assert (process.hooks, process.runtime, watchers()) == ({}, None, [])
    assert (open_files(), threading.active_count()) == (files, threads)
    (record,) = lines.records
    assert record.levelno == logging.INFO
    assert "OTEL_METRICS_EXPORTER" in record.getMessage()
    assert "OTEL_EXPORTER_OTLP_ENDPOINT" in record.getMessage()


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("OTEL_SDK_DISABLED", "true"),
        ("OTEL_SDK_DISABLED", "TRUE"),
        ("OTEL_PYTHON_DISABLED_INSTRUMENTATIONS", "kvcache"),
        ("OTEL_PYTHON_DISABLED_INSTRUMENTATIONS", "requests, kvcache,flask"),
        ("OTEL_PYTHON_DISABLED_INSTRUMENTATIONS", "*"),
    ],
)
@pytest.mark.parametrize("provider", [False, True])
def test_switched_off_hooks_nothing_and_says_what_switched_it_off(
    register: Register,
    process: Instrumentation,
    lines: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    value: str,
    provider: bool,
) -> None:
    monkeypatch.setattr(plugin, "_provider_exists", lambda: provider)
    monkeypatch.setenv(ENDPOINT, "http://collector:4317")
    monkeypatch.setenv(variable, value)
    register()
    assert (process.hooks, watchers()) == ({}, [])
    (message,) = lines.messages
    assert variable in message


def test_exporter_none_hooks_nothing_but_for_a_provider_that_the_process_has(
    engine: str,
    register: Register,
    process: Instrumentation,
    lines: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(ENDPOINT, "http://collector:4317")
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    register()
    assert process.hooks == {}
    assert "OTEL_METRICS_EXPORTER" in lines.text
    monkeypatch.setattr(plugin, "_provider_exists", lambda: True)
    register()
    assert list(process.hooks) == [engine]


# ---------------------------------------------------------------------------------------------------- asked for


@pytest.mark.parametrize(
    ("variable", "value"),
    [(ENDPOINT, "http://collector:4317"), ("OTEL_METRICS_EXPORTER", "prometheus"), ("OTEL_CONFIG_FILE", "otel.yaml")],
)
def test_asked_for_hooks_the_engine_and_starts_nothing(
    engine: str,
    register: Register,
    process: Instrumentation,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    value: str,
) -> None:
    monkeypatch.setenv(variable, value)
    files, threads = open_files(), threading.active_count()
    register()
    assert list(process.hooks) == [engine]
    assert process.hooks[engine].attached
    assert bool(watchers()) is (engine not in sys.modules)
    assert (process.runtime, open_files(), threading.active_count()) == (None, files, threads)


def test_process_with_a_provider_of_its_own_is_hooked_with_nothing_set(
    engine: str, register: Register, process: Instrumentation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin, "_provider_exists", lambda: True)
    register()
    assert list(process.hooks) == [engine]


def test_other_instrumentations_being_disabled_does_not_disable_this_one(
    engine: str, register: Register, process: Instrumentation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENDPOINT, "http://collector:4317")
    monkeypatch.setenv("OTEL_PYTHON_DISABLED_INSTRUMENTATIONS", "requests,kvcache_of_somebody")
    register()
    assert list(process.hooks) == [engine]


def test_registered_twice_is_registered_once(
    engine: str, register: Register, process: Instrumentation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENDPOINT, "http://collector:4317")
    register()
    points, watching = process.hooks[engine].points, watchers()
    register()
    assert process.hooks[engine].points is points
    assert watchers() == watching


# ------------------------------------------------------------------------------------------------------ logging


def test_lines_go_where_the_engines_go_and_once(
    engine: str, register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []

    class Shown(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            shown.append(record.getMessage())

    mine, theirs = logging.getLogger(LOGGER), logging.getLogger(engine)
    theirs.addHandler(Shown())
    theirs.setLevel(logging.INFO)
    mine.propagate = False  # As good as a root logger without handlers.
    for _ in range(2):
        register()
    assert len(mine.handlers) == 1
    assert len(shown) == 2
    assert all("not instrumented" in line for line in shown)


def test_logging_that_somebody_has_set_up_is_left_alone(engine: str, register: Register) -> None:
    mine, theirs = logging.getLogger(LOGGER), logging.getLogger(engine)
    theirs.addHandler(logging.NullHandler())
    own = logging.NullHandler()
    mine.addHandler(own)
    mine.setLevel(logging.ERROR)
    register()
    assert (mine.handlers[-1], len(mine.handlers), mine.level) == (own, 1, logging.ERROR)


# --------------------------------------------------------------------------------------------------- never raises


class UnspeakableError(Exception):
    """An exception that cannot even be shown."""

    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__


@pytest.mark.parametrize("error", [RuntimeError("broken"), MemoryError(), RecursionError()], ids=lambda e: repr(e))
def test_settings_that_cannot_be_read_are_one_warning(
    engine: str,
    register: Register,
    process: Instrumentation,
    lines: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    def broken(environ: object) -> Settings:
        raise error

    monkeypatch.setattr(Settings, "from_environ", broken)
    register()
    assert process.hooks == {}
    (record,) = lines.records
    assert record.levelno == logging.WARNING
    assert repr(error) in record.getMessage()
    assert f"{NAMES[engine]} runs as if it were not there" in record.getMessage()


def test_finder_that_raises_is_one_warning_at_most(
    engine: str, register: Register, lines: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        @staticmethod
        def find_spec(name: str, path: Any = None, target: Any = None) -> None:
            raise RuntimeError(f"cannot look for {name}")

    monkeypatch.setenv(ENDPOINT, "http://collector:4317")
    monkeypatch.delitem(sys.modules, f"kvcache_otel.engines.{engine}.table", raising=False)
    monkeypatch.delitem(sys.modules, f"kvcache_otel.engines.{engine}", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Broken, *sys.meta_path])
    register()
    assert [record.levelno for record in lines.records] == [logging.WARNING]
    assert f"cannot look for kvcache_otel.engines.{engine}" in lines.messages[0]


@pytest.mark.parametrize("error", [RuntimeError("broken"), UnspeakableError()], ids=["words", "no words"])
def test_failure_that_cannot_even_be_logged_does_not_reach_the_engine(
    register: Register, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    class Broken(logging.Handler):
        def handle(self, record: logging.LogRecord) -> bool:
            raise OSError("log disk is full")

    def broken(environ: object) -> Settings:
        raise error

    logging.getLogger(LOGGER).addHandler(Broken())
    monkeypatch.setattr(Settings, "from_environ", broken)
    register()


HOSTILE = {
    "nonsense": {"OTEL_METRICS_EXPORTER": "\x00,,;", "OTEL_EXPORTER_OTLP_PROTOCOL": "carrier pigeon"},
    "endless": {"OTEL_METRICS_EXPORTER": "x" * 100_000},
    "no encoding": {"OTEL_METRICS_EXPORTER": "\udcff\udc80", ENDPOINT: "\udcff"},
    "numbers": {"OTEL_METRICS_EXPORTER": "prometheus", "OTEL_EXPORTER_PROMETHEUS_PORT": "-1e9"},
    "intervals": {ENDPOINT: "http://c:4317", "OTEL_METRIC_EXPORT_INTERVAL": "nan", "OTEL_METRIC_EXPORT_TIMEOUT": "∞"},
    "commas": {"OTEL_PYTHON_DISABLED_INSTRUMENTATIONS": ",,,\n,"},
    "endpoint": {ENDPOINT: "http://user:secret@[::1"},
    "no file": {"OTEL_CONFIG_FILE": "/does/not/exist\n.yaml"},
}


@pytest.mark.parametrize("what", HOSTILE)
def test_whatever_the_environment_registering_does_not_raise_nor_fail(
    register: Register, lines: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(os, "environ", HOSTILE[what])
    register()
    assert not [message for message in lines.messages if "the plugin itself failed" in message]
    assert "secret" not in lines.text


# ------------------------------------------------------------------------------------- in a fresh interpreter

ROOT = Path(kvcache_otel.__file__).parent.parent
HEAVY = ("opentelemetry.sdk.", "sglang.", "torch.", "vllm.")


def fresh(code: str, **environ: str) -> Any:
    """What a new interpreter's last line of output says, as JSON."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    finished = subprocess.run(
        [sys.executable, "-c", code],
        env={**inherited, "PYTHONPATH": str(ROOT), **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout.splitlines()[-1])


LOADED = "import json, sys; print(json.dumps(sorted(sys.modules)))"
REGISTER = "import kvcache_otel.plugin; kvcache_otel.plugin.register_{}()"


@pytest.mark.parametrize(
    ("code", "environ"),
    [
        ("import kvcache_otel", {}),
        (REGISTER, {}),
        (REGISTER, {ENDPOINT: "http://localhost:4317"}),
        (REGISTER, {"OTEL_METRICS_EXPORTER": "prometheus"}),
    ],
    ids=["importing", "registering, nothing set", "registering, OTLP", "registering, Prometheus"],
)
def test_no_engine_and_no_sdk_is_imported(engine: str, code: str, environ: dict[str, str]) -> None:
    loaded = fresh(f"{code.format(engine)}; {LOADED}", **environ)
    assert "kvcache_otel" in loaded
    assert [name for name in loaded if f"{name}.".startswith(HEAVY) or name == "opentelemetry"] == []


def test_neither_the_adapter_nor_the_runtime_is_imported_before_a_cache_is_built(engine: str) -> None:
    loaded = fresh(f"{REGISTER.format(engine)}; {LOADED}", **{ENDPOINT: "http://localhost:4317"})
    ours = {name for name in loaded if name.startswith("kvcache_otel.")}
    assert f"kvcache_otel.engines.{engine}.table" in ours
    assert ours.isdisjoint({"kvcache_otel.runtime", "kvcache_otel.semconv", f"kvcache_otel.engines.{engine}.adapter"})
    assert [name for name in ours for other in NAMES if other != engine and name.endswith(f".{other}")] == []


TIMED = """
import json, time
began = time.perf_counter()
import kvcache_otel.plugin
loaded = time.perf_counter()
kvcache_otel.plugin.register_{}()
registered = time.perf_counter()
from kvcache_otel.instrumentation import instrumentation
print(json.dumps([(loaded - began) * 1e3, (registered - loaded) * 1e3, len(instrumentation.hooks)]))
"""


@pytest.mark.parametrize("environ", [{}, {ENDPOINT: "http://localhost:4317"}], ids=["nothing set", "OTLP"])
def test_registering_takes_less_than_a_millisecond(engine: str, environ: dict[str, str]) -> None:
    runs = [fresh(TIMED.format(engine), **environ) for _ in range(9)]
    assert {hooked for _, _, hooked in runs} == {len(environ)}
    load, register = min(run[0] for run in runs), min(run[1] for run in runs)
    figures = f"the best of {len(runs)}: load {load:.2f} ms, register {register:.2f} ms"
    print(figures)
    assert register < 1.0, figures


def test_entry_point_is_the_function_that_the_project_declares(engine: str, register: Register) -> None:
    import tomllib

    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["project"]
    module, _, function = project["entry-points"][GROUPS[engine]]["kvcache_otel"].partition(":")
    assert getattr(importlib.import_module(module), function) is register


def test_both_engines_in_one_process_have_hooks_of_their_own(
    process: Instrumentation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENDPOINT, "http://collector:4317")
    plugin.register_vllm()
    plugin.register_sglang()
    assert list(process.hooks) == ["vllm", "sglang"]
    assert all(hooks.attached for hooks in process.hooks.values())
