"""One of SGLang's processes, with SGLang's own plugin loader: what is imported, hooked, opened and counted in it.

    python -m tests.engines.sglang.plugin_program ROLE [FOLDER]

Prints one line of JSON. Nothing of ours is imported at the top: what a process imports for our sake is looked at here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import logging
import multiprocessing
import os
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from kvcache_otel.spec import MetricSpec
    from tests.engines.sglang.cache_driver import CacheDriver
    from tests.support.rows import Rows

EXPORTS = {"OTEL_METRICS_EXPORTER": "prometheus", "OTEL_EXPORTER_PROMETHEUS_PORT": "0"}
PROMPT = range(1000, 1032)


def main() -> None:
    """See the module."""
    logging.basicConfig(level=logging.INFO)
    role, *arguments = sys.argv[1:]
    print(json.dumps(ROLES[role](*map(Path, arguments))), flush=True)


# -- looking at a process ----------------------------------------------------------------------------------------------


def opened() -> dict[str, Any]:
    """The threads of Python and the sockets of this process."""
    connections = psutil.Process().net_connections(kind="inet")
    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "listens": [each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN],
        "sockets": len(connections),
    }


@contextlib.contextmanager
def watching() -> Iterator[dict[str, Any]]:
    """What is imported, started and opened within this."""
    modules, before = set(sys.modules), opened()
    found: dict[str, Any] = {}
    yield found
    found["modules"] = sorted(set(sys.modules) - modules)
    after = opened()
    found["threads"] = [name for name in after["threads"] if name not in before["threads"]]
    found["sockets"] = after["sockets"] - before["sockets"]


def load() -> dict[str, Any]:
    """Has SGLang load its plugins; returns what that has changed, and how long our parts of it took."""
    from sglang.srt import plugins

    seconds: dict[str, float] = {}
    with watching() as found:
        began = time.perf_counter()
        from kvcache_otel import plugin

        seconds["load"] = time.perf_counter() - began
        with _timed(plugin, "register_sglang", seconds), _timed(plugins.HookRegistry, "apply_hooks", seconds):
            plugins.load_plugins()
    return {**found, **hooks(), "seconds": seconds}


@contextlib.contextmanager
def _timed(owner: Any, name: str, seconds: dict[str, float]) -> Iterator[None]:
    """Measures a function's last call within this."""
    function, original = getattr(owner, name), vars(owner)[name]

    def timed() -> None:
        began = time.perf_counter()
        function()
        seconds[name] = time.perf_counter() - began

    setattr(owner, name, timed)
    try:
        yield
    finally:
        setattr(owner, name, original)


def hooks() -> dict[str, Any]:
    """Our hooks, and what SGLang knows of them."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    from kvcache_otel.instrumentation import instrumentation

    ours = instrumentation.hooks.get("sglang")
    return {
        "states": {point.hook.name: point.state for point in ours.points} if ours is not None else {},
        "places": sorted(
            target
            for target, entries in HookRegistry._hooks.items()
            if target in HookRegistry._patched
            for _, _, source in entries
            if source.plugin_name == "kvcache_otel"
        ),
        "runtime": instrumentation.runtime is not None,
    }


# -- processes without a cache -----------------------------------------------------------------------------------------


def launcher() -> dict[str, Any]:
    """`Engine`: the process that starts all others, which imports the scheduler too, and then loads plugins."""
    importlib.import_module("sglang.srt.entrypoints.engine")
    assert "sglang.srt.managers.scheduler" in sys.modules
    return load()


def detokenizer() -> dict[str, Any]:
    """A process that imports no scheduler, as it is asked for nothing, not let in, and let in; then imports one.

    The last is what a launcher does that loads plugins first, such as ``python -m sglang.launch_server``.
    """
    importlib.import_module("sglang.srt.managers.detokenizer_manager")
    from sglang.srt import plugins

    def again(environ: Mapping[str, str]) -> dict[str, Any]:
        for name in (*EXPORTS, "SGLANG_PLUGINS"):
            os.environ.pop(name, None)
        os.environ.update(environ)
        plugins._plugins_loaded = False
        with watching() as found:
            plugins.load_plugins()
        return found

    found = {"not let in": again({**EXPORTS, "SGLANG_PLUGINS": "other"})}
    found["asked for nothing"] = {**again({"SGLANG_PLUGINS": "kvcache_otel"}), **hooks()}
    found["let in"] = {**again({**EXPORTS, "SGLANG_PLUGINS": "other, kvcache_otel"}), **hooks()}
    with watching() as later:
        importlib.import_module("sglang.srt.entrypoints.engine")
    later.pop("modules")
    return {**found, "later": {**later, **hooks()}}


def spawned() -> dict[str, Any]:
    """The real `run_scheduler_process` in a spawned child: the scheduler of rank 3, up to its first own line."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_run_scheduler_process, args=(theirs,))
    child.start()
    theirs.close()
    try:
        return ours.recv()
    finally:
        child.join(30)


def _run_scheduler_process(pipe: Any) -> None:
    from sglang.srt.managers import scheduler
    from sglang.srt.server_args import ServerArgs

    class Stopped(BaseException):
        """Not even SGLang catches it."""

    def init(*_: Any, **__: Any) -> None:
        from kvcache_otel.engines.sglang import config

        found.update(opened())
        found.update(hooks())
        rank = config.identity(object()).rank
        found["ranks"] = {"tp": rank.tp, "pp": rank.pp, "dp": rank.dp, "local": config.local_rank()}
        raise Stopped

    found: dict[str, Any] = {}
    scheduler.Scheduler.__init__ = init
    server_args = ServerArgs(
        model_path="dummy",
        served_model_name="dummy",
        device="cpu",
        page_size=4,
        tp_size=4,
        dp_size=2,
        enable_dp_attention=True,
    )
    with contextlib.suppress(Stopped):
        scheduler.run_scheduler_process(server_args, None, 0, 3, 0, 1, None)
    pipe.send(found)


# -- processes with a cache --------------------------------------------------------------------------------------------


def scheduler() -> dict[str, Any]:
    """A scheduler: the plugins are loaded, the ranks published, a cache built, used and its process's endpoint scraped.

    Then all of that once more without our hooks, and once more with them.
    """
    importlib.import_module("sglang.srt.managers.scheduler")
    found = {"loaded": load()}

    from kvcache_otel.instrumentation import instrumentation
    from kvcache_otel.plugin import register_sglang
    from tests.engines.sglang import cpu
    from tests.support.processes import wait_until

    cpu.timed_events(True)
    cpu.set_ranks(**cpu.attention_data_parallel(3, 4, 2))
    found["before"] = {**opened(), **hooks()}
    found["used"] = _used()
    instrumentation.detach()
    wait_until(lambda: not opened()["listens"])  # What takes longer than it would wait for ends on a thread of its own.
    found["detached"] = _used()
    register_sglang()
    found["again"] = _used()
    return found


def _used() -> dict[str, Any]:
    """What a cache's process looks like as soon as it is built, what it exports, and what SGLang itself says of it."""
    from kvcache_otel.instrumentation import instrumentation
    from tests.engines.sglang import cpu
    from tests.engines.sglang.cache_driver import CORES, CacheDriver
    from tests.engines.sglang.oracle import own_counters, pools, recount

    with CacheDriver(core=CORES[-1], ranks=cpu.attention_data_parallel(3, 4, 2)) as driver:
        found = {**opened(), **hooks()}
        driver.insert(PROMPT)
        driver.settle()
        driver.evict(len(PROMPT))
        driver.load_back(PROMPT)
        driver.settle()
        driver.evict(len(PROMPT))
        driver.step()
        if instrumentation.runtime is not None:
            instrumentation.runtime.flush()  # A thread of ours reads how long copies took.
        found["scraped"] = [_scrape(port) for port in found["listens"]]
        for name, numbers in (("own", own_counters(driver)), ("tree", recount(driver)), ("pools", pools(driver))):
            found[name] = dataclasses.asdict(numbers)
    return found


def _scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://localhost:{port}/metrics", timeout=10) as answer:
        return answer.read().decode()


def beside(folder: Path) -> dict[str, Any]:
    """A scheduler with another plugin, whose folder is on the path already or is put at its end."""
    importlib.import_module("sglang.srt.managers.scheduler")
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    from tests.engines.sglang import other_plugin

    before = _layers()
    found = {"loaded": load()}
    after = _layers()
    from tests.engines.sglang.oracle import own_counters

    driver = _walk(_own_rows, folder / "blocks")
    found["type"] = type(driver.cache).__name__
    found["layers"] = {target: after[target] - layers for target, layers in before.items()}
    found["orders"] = _orders()
    return {**found, "calls": other_plugin.calls, "own": dataclasses.asdict(own_counters(driver)), **hooks()}


def _layers() -> dict[str, int]:
    """How many functions are around each function of our table, of those whose module is imported."""
    from kvcache_otel.engines.sglang.table import HOOKS

    layers: dict[str, int] = {}
    for hook in HOOKS:
        if hook.module in sys.modules:
            function, count = _function(hook.target), 0
            while hasattr(function, "__wrapped__"):
                function, count = function.__wrapped__, count + 1
            layers[hook.target.replace(":", ".")] = count
    return layers


def _orders() -> dict[str, list[str]]:
    """Whose hooks are on each function that has several plugins', the innermost first."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    orders = {
        target: list(dict.fromkeys(source.plugin_name for _, _, source in entries))
        for target, entries in HookRegistry._hooks.items()
    }
    return {target: names for target, names in orders.items() if len(names) > 1}


def _own_rows() -> Rows:
    from kvcache_otel.instrumentation import instrumentation
    from tests.support.rows import Rows

    assert instrumentation.runtime is not None
    recorder = instrumentation.runtime.recorder
    assert recorder is not None
    assert recorder.harvester.flush(10), "a finished copy was not read"
    return Rows(recorder)


def _walk(rows: Callable[[], Rows], folder: Path) -> CacheDriver:
    """Uses a cache with three tiers, and compares all of our numbers with SGLang's. The driver is closed."""
    from kvcache_otel import semconv
    from tests.engines.sglang import cpu
    from tests.engines.sglang.cache_driver import CacheDriver
    from tests.engines.sglang.expected import assert_closes, assert_equals_recount, assert_equals_sglang
    from tests.engines.sglang.walk import random_walk
    from tests.engines.sglang.watched import Watched

    cpu.timed_events(True)
    with CacheDriver(storage_dir=folder) as driver:
        watched = Watched(driver, rows)
        for _ in random_walk(driver, seed=1, operations=200):
            assert_equals_recount(rows(), driver)
            assert_closes(rows())
        assert_equals_sglang(rows(), driver, retracted=watched.retracted)
        watched.assert_adds_up()
        assert rows().total(semconv.TELEMETRY_ERRORS) == 0
        assert rows().total(semconv.ACCOUNTING_ERRORS) == 0
    return driver


# -- a program of one's own --------------------------------------------------------------------------------------------


def alone(folder: Path) -> dict[str, Any]:
    """A program that instruments itself, twice in a row, takes that back, does it again, and then loads plugins."""
    importlib.import_module("sglang.srt.managers.scheduler")
    importlib.import_module("sglang.srt.mem_cache.rust_tree_core.adapter")
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    from kvcache_otel import KVCacheInstrumentor
    from kvcache_otel.engines.sglang.table import HOOKS
    from tests.engines.sglang import other_plugin

    reader = InMemoryMetricReader()
    provider = MeterProvider(metric_readers=[reader], shutdown_on_exit=False)
    original = {hook.target: _function(hook.target) for hook in HOOKS}
    KVCacheInstrumentor().instrument(meter_provider=provider)
    KVCacheInstrumentor().instrument(meter_provider=provider)
    found: dict[str, Any] = {"states": hooks()["states"], "first": _turn(reader)}
    KVCacheInstrumentor().uninstrument()
    found["given back"] = sum(_function(target) is function for target, function in original.items())
    found["uninstrumented"] = _turn(reader)
    KVCacheInstrumentor().instrument(meter_provider=provider)
    found["again"] = _turn(reader)
    sys.path.append(str(folder))
    found["loaded"] = load()
    found["beside"] = _turn(reader)
    return {**found, "calls": other_plugin.calls}


def _turn(reader: Any) -> dict[str, Any]:
    """Uses a cache of its own; returns what SGLang says of that one, and what somebody else's provider says of all."""
    from kvcache_otel import semconv
    from kvcache_otel.instrumentation import instrumentation
    from tests.engines.sglang.cache_driver import CacheDriver
    from tests.engines.sglang.oracle import own_counters

    with CacheDriver() as driver:
        driver.insert(PROMPT)
        driver.settle()
        driver.evict(len(PROMPT))
        driver.load_back(PROMPT)
        driver.settle()
        if instrumentation.runtime is not None:
            instrumentation.runtime.flush()
        points = _points(reader)
        return {
            "own": dataclasses.asdict(own_counters(driver)),
            "evicted": _sum(points, semconv.EVICTION_TOKENS, {semconv.KVCACHE_TIER: "device"}),
            "passes": _count(points, semconv.EVICTION_DURATION),
            "backed up": _sum(points, semconv.TRANSFER_TOKENS, {semconv.KVCACHE_DESTINATION_TIER: "host"}),
            "loaded back": _sum(points, semconv.TRANSFER_TOKENS, {semconv.KVCACHE_DESTINATION_TIER: "device"}),
        }


def _points(reader: Any) -> dict[str, list[Any]]:
    data = reader.get_metrics_data()
    scopes = [scope for resource in (data.resource_metrics if data else ()) for scope in resource.scope_metrics]
    return {metric.name: list(metric.data.data_points) for scope in scopes for metric in scope.metrics}


def _sum(points: Mapping[str, list[Any]], spec: MetricSpec, labels: Mapping[str, str]) -> float | None:
    values = [point.value for point in points.get(spec.name, ()) if labels.items() <= point.attributes.items()]
    return sum(values) if values else None


def _count(points: Mapping[str, list[Any]], spec: MetricSpec) -> int:
    return sum(point.count for point in points.get(spec.name, ()))


def _function(target: str) -> Any:
    module, _, path = target.partition(":")
    found: Any = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    return found


ROLES: dict[str, Callable[..., dict[str, Any]]] = {
    "alone": alone,
    "beside": beside,
    "detokenizer": detokenizer,
    "launcher": launcher,
    "scheduler": scheduler,
    "spawned": spawned,
}

if __name__ == "__main__":
    main()
