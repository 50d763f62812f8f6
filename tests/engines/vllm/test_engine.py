"""A whole engine, instrumented through its entry point and read by a real Prometheus and a real OTLP receiver."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import yaml

from tests.conftest import require

for part in ("vllm", "prometheus", "otlp"):
    require(part)

from kvcache_otel import semconv  # noqa: E402
from tests.engines.vllm.engine_oracle import Expected, Sample, Theirs, expected  # noqa: E402
from tests.engines.vllm.exported import matching, over_otlp, over_prometheus  # noqa: E402
from tests.engines.vllm.subscriber import Subscriber  # noqa: E402
from tests.support.otlp_receiver import otlp_receiver  # noqa: E402
from tests.support.processes import free_ports  # noqa: E402
from tests.support.prometheus_server import prometheus_server  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.engines.vllm.exported import Exported

pytestmark = [pytest.mark.engine, pytest.mark.prometheus, pytest.mark.otlp]

CHECKOUT = Path(__file__).resolve().parents[3]
SECONDARY = {"1:fs": "disk", "2:fs": "disk"}
SCRAPES_S = 3.0
ENGINE_SECONDS = 240


class Mode(NamedTuple):
    """How the engine runs.

    Attributes:
        name: For the test's name.
        arguments: Of `engine_run`.
        protocol: Of OTLP.
        processes: How many processes of the engine own a part of the cache.
        interval_s: Seconds between two exports over OTLP.
    """

    name: str
    arguments: tuple[str, ...]
    protocol: str
    processes: int
    interval_s: float = 1.0


IN_PROCESS = Mode("in-process", (), "http/protobuf", 1)
# Nothing is pushed before the end: what arrives is what the processes say in vLLM's shutdown functions.
MULTIPROCESS = Mode("multiprocess", ("--multiprocess",), "grpc", 2, interval_s=3600)
TWO_RANKS = Mode("two-ranks", ("--multiprocess", "--ranks", "2"), "grpc", 3)


class Run(NamedTuple):
    """What one run of an engine left.

    Attributes:
        mode: How it ran.
        theirs: vLLM's own numbers.
        pulled: Our rows, as Prometheus scraped them.
        pushed: Our rows, as the OTLP receiver got them.
        log: What the engine's processes wrote.
        subscriber: Who has listened to its KV events from the start.
    """

    mode: Mode
    theirs: Theirs
    pulled: list[Exported]
    pushed: list[Exported]
    log: str
    subscriber: Subscriber


@pytest.fixture(scope="module", params=[IN_PROCESS, MULTIPROCESS, TWO_RANKS], ids=lambda mode: mode.name)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    mode: Mode = request.param
    folder = tmp_path_factory.mktemp(mode.name)
    *ports, events, _ = free_ports(mode.processes + 2)
    subscriber = Subscriber(f"tcp://127.0.0.1:{events}", "kv-events")
    with otlp_receiver() as receiver:
        environ = {
            "OTEL_METRICS_EXPORTER": "otlp,prometheus",
            "OTEL_EXPORTER_OTLP_PROTOCOL": mode.protocol,
            "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.grpc_endpoint
            if mode.protocol == "grpc"
            else receiver.http_endpoint,
            "OTEL_METRIC_EXPORT_INTERVAL": str(int(mode.interval_s * 1000)),
            "OTEL_EXPORTER_PROMETHEUS_PORT": str(ports[0]),
            "OTEL_SERVICE_NAME": "engine-under-test",
        }
        with (
            prometheus_server([f"127.0.0.1:{port}" for port in ports]) as server,
            _engine(folder, mode, environ, events) as engine,
        ):
            samples = [Sample(**sample) for sample in engine.counted()]
            time.sleep(SCRAPES_S)  # At least two of them.
            pulled = over_prometheus(server, semconv.METRICS.values())
            assert [target["health"] for target in server.targets()] == ["up"] * mode.processes
            subscriber.listen()
            subscriber.close()
            engine.leave()
        pushed = over_otlp(receiver.metrics())
    return Run(mode, Theirs(samples), pulled, pushed, (folder / "log").read_text(), subscriber)


class _Engine:
    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process, self._log = process, log

    def counted(self) -> list[dict[str, Any]]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("[{"):
                return json.loads(line)
        raise AssertionError(f"the engine ended without a word:\n{self._log.read_text()[-4000:]}")

    def leave(self) -> None:
        self._process.communicate("\n", timeout=60)
        assert self._process.returncode == 0, self._log.read_text()[-4000:]


@contextmanager
def _engine(folder: Path, mode: Mode, environ: dict[str, str], events: int) -> Iterator[_Engine]:
    log = folder / "log"
    command = ["timeout", "--kill-after=10", str(ENGINE_SECONDS), sys.executable, "-m", "tests.engines.vllm.engine_run"]
    with log.open("w") as errors:
        process = subprocess.Popen(
            [*command, str(folder), "--stay", "--events", str(events), *mode.arguments],
            env={**os.environ, "VLLM_LOGGING_LEVEL": "INFO", "VLLM_LOGGING_STREAM": "ext://sys.stderr", **environ},
            cwd=CHECKOUT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        try:
            yield _Engine(process, log)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(30)


def _assert_equal(rows: list[Exported], wanted: Expected) -> None:
    found = matching(rows, wanted)
    assert found, f"no row for {wanted}"
    total, count = math.fsum(row.value for row in found), sum(row.count for row in found)
    if wanted.spec.instrument == "histogram":
        assert math.isclose(total, wanted.value, rel_tol=1e-9, abs_tol=1e-12), (wanted, found)
        assert wanted.count is None or count == wanted.count, (wanted, found)
    else:
        assert total == wanted.value, (wanted, found)


@pytest.mark.parametrize("way", ["pulled", "pushed"])
def test_every_number_that_vllm_also_has_equals_vllms(run: Run, way: str) -> None:
    for wanted in expected(run.theirs, SECONDARY):
        _assert_equal(getattr(run, way), wanted)


def test_every_situation_came_up(run: Run) -> None:
    """Otherwise all the equalities could be between zeros."""
    theirs = run.theirs
    happened = {
        "device hit": theirs("prompt_tokens_cached_by_source_total", source="device"),
        "host hit": theirs("prompt_tokens_cached_by_source_total", source="host"),
        "disk hit": theirs("prompt_tokens_cached_by_source_total", source="disk"),
        "promotion failure": theirs("kv_offload_tiering_promotion_job_failures_total", tier="1:fs"),
        "cascade failure": theirs("kv_offload_tiering_cascade_job_failures_total", tier="1:fs"),
        "no room for a store": theirs("kv_offload_allocation_failure_total"),
        "no room for a promotion": theirs("kv_offload_tiering_promotion_allocation_failures_total"),
        "back-pressure": theirs("kv_offload_tiering_backpressure_blocks_dropped_total", tier="2:fs"),
        "preemption": theirs("num_preemptions_total"),
        "host eviction": _total(run.pulled, semconv.EVICTION_TOKENS.name, **{semconv.KVCACHE_TIER: "host"}),
        "device eviction": _total(run.pulled, semconv.EVICTION_TOKENS.name, **{semconv.KVCACHE_TIER: "device"}),
    }
    assert [situation for situation, number in happened.items() if not number > 0] == []


DIRECTIONS = [
    {"source": "device", "destination": "host"},
    {"source": "host", "destination": "device"},
    {"source": "host", "destination": "disk", "name": "1:fs"},
    {"source": "disk", "destination": "host", "name": "1:fs"},
    {"source": "host", "destination": "disk", "name": "2:fs"},
]
MOVED = [
    *[(spec, way) for way in DIRECTIONS for spec in (semconv.TRANSFER_IO, semconv.TRANSFER_DURATION)],
    *[(semconv.TRANSFER_OPERATIONS, way) for way in DIRECTIONS],
    *[(semconv.TRANSFER_QUEUE_DURATION, way) for way in DIRECTIONS if "name" in way],
    *[(semconv.TRANSFER_OPERATIONS, {**way, "error": "*"}) for way in DIRECTIONS[2:4]],
    *[(semconv.LOOKUP_TOKENS, {"tier": tier}) for tier in ("device", "host", "disk", "none")],
    *[(semconv.LOOKUP_BLOCKS, {"tier": tier, "result": word}) for tier in ("host", "disk") for word in ("hit", "miss")],
    *[(semconv.LOOKUP_DURATION, {"tier": "disk", "mode": mode}) for mode in ("sync", "async")],
    *[(semconv.LOOKUP_REQUEST_DURATION, {"mode": mode}) for mode in ("sync", "async")],
    *[(semconv.EVICTION_TOKENS, {"tier": tier}) for tier in ("device", "host")],
    *[(semconv.ALLOCATION_FAILURES, {"reason": reason}) for reason in ("store", "promotion")],
    (semconv.STORE_SKIPPED_BLOCKS, {"name": "2:fs", "reason": "backpressure"}),
    *[(spec, {"tier": tier}) for spec in (semconv.LIMIT, semconv.BLOCK_SIZE) for tier in ("device", "host")],
    *[(semconv.RESIDENT_BLOCKS, {"tier": tier, "view": "held"}) for tier in ("device", "host")],
]


@pytest.mark.parametrize(
    ("spec", "labels"), MOVED, ids=lambda item: item.name if hasattr(item, "name") else "-".join(item.values())
)
def test_every_direction_of_the_adapter_moves_its_rows(run: Run, spec: Any, labels: dict[str, str]) -> None:
    """C6: a counter that stays 0 although its direction is used would be worse than none."""
    rows = matching(run.pulled, Expected(spec, labels, 0))
    assert rows
    assert sum(row.value for row in rows) > 0
    if spec.instrument == "histogram":
        assert sum(row.count for row in rows) > 0


def test_what_is_recorded_is_what_the_catalogue_says_of_vllm(run: Run) -> None:
    model = yaml.safe_load((CHECKOUT / "model" / "kvcache.yaml").read_text())
    ours = {
        group["metric_name"]
        for group in model["groups"]
        if "vllm" in group.get("annotations", {}).get("kvcache", {}).get("recorded_by", ())
    }
    assert {row.name for row in run.pulled} == ours


def test_pulled_and_pushed_say_the_same(run: Run) -> None:
    def by_series(rows: list[Exported]) -> dict[object, tuple[float, float]]:
        # The API's process shares no rows with the others; ranks differ in their labels.
        return {(row.name, frozenset(row.attributes.items())): (row.value, row.count) for row in rows}

    assert by_series(run.pulled) == by_series(run.pushed)


def test_nothing_went_wrong_in_the_hooks(run: Run) -> None:
    assert _total(run.pushed, semconv.TELEMETRY_ERRORS.name) == 0
    assert _total(run.pushed, semconv.ACCOUNTING_ERRORS.name) == 0
    assert _total(run.pushed, semconv.TELEMETRY_DROPPED.name) == 0
    attached = [row for row in run.pushed if row.name == semconv.TELEMETRY_HOOK_ATTACHED.name]
    # In one process there is no worker process to say goodbye to.
    absent = {"worker_proc.shutdown"} if run.mode is IN_PROCESS else set()
    assert {row.attributes[semconv.KVCACHE_TELEMETRY_HOOK] for row in attached} == _hook_names() - absent
    assert {row.value for row in attached} == {1}
    assert "kvcache: the hook" not in run.log


def test_lookups_are_the_prompt_and_an_idle_engine_moves_nothing(run: Run) -> None:
    assert _total(run.pulled, semconv.LOOKUP_TOKENS.name) == run.theirs("prompt_tokens_total")
    assert _total(run.pulled, semconv.TRANSFER_ACTIVE.name) == 0
    assert _total(run.pulled, semconv.TRANSFER_ACTIVE_BLOCKS.name) == 0


@pytest.mark.parametrize(("tier", "medium"), [("device", "GPU"), ("host", "CPU"), ("disk", "STORAGE")])
def test_published_is_what_a_plain_subscriber_adds_up_and_what_is_held(run: Run, tier: str, medium: str) -> None:
    def resident(view: str) -> list[float]:
        labels = {semconv.KVCACHE_TIER: tier, semconv.KVCACHE_VIEW: view}.items()
        rows = [row for row in run.pulled if row.name == semconv.RESIDENT_BLOCKS.name]
        return [row.value for row in rows if labels <= row.attributes.items()]

    (published,) = resident("published")
    assert published == run.subscriber.resident(medium) > 0
    assert resident("held") == ([] if tier == "disk" else [published]), "vLLM does not know how full a disk is"
    for kind, ours in (("BlockStored", "block_stored"), ("BlockRemoved", "block_removed")):
        labels = {semconv.KVCACHE_EVENT_TYPE: ours, semconv.KVCACHE_EVENT_MEDIUM: tier}
        assert _total(run.pulled, semconv.EVENTS.name, **labels) == run.subscriber.events[kind, medium]
        assert _total(run.pulled, semconv.EVENT_BLOCKS.name, **labels) == run.subscriber.blocks[kind, medium]
    assert run.subscriber.missing == 0


def test_each_rank_has_rows_and_durations_of_its_own(run: Run) -> None:
    ranks = 2 if run.mode is TWO_RANKS else 1
    for rows in (run.pulled, run.pushed):
        stores = [
            row
            for row in rows
            if row.name == semconv.TRANSFER_DURATION.name and row.attributes[semconv.KVCACHE_SOURCE_TIER] == "device"
        ]
        assert sorted(row.attributes[semconv.KVCACHE_RANK_TP] for row in stores) == [str(rank) for rank in range(ranks)]
        assert all(row.count > 0 and row.value > 0 for row in stores)
        assert len({row.value for row in stores}) == ranks, "ranks do not copy each other's times"


def test_every_process_says_what_it_serves_and_why(run: Run) -> None:
    assert run.log.count("OTEL_METRICS_EXPORTER=otlp,prometheus") >= run.mode.processes


def _total(rows: list[Exported], name: str, **attributes: str) -> float:
    wanted = attributes.items()
    return sum(row.value for row in rows if row.name == name and wanted <= row.attributes.items())


def _hook_names() -> set[str]:
    from kvcache_otel.engines.vllm.table import HOOKS

    return {hook.name for hook in HOOKS}
