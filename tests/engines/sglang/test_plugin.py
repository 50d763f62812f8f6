"""The plugin in SGLang's own processes, through SGLang's own plugin loader. Each test's process is a real one."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest

from tests.conftest import require

require("sglang")

from opentelemetry.exporter.prometheus._mapping import (  # noqa: E402
    map_unit,
    sanitize_attribute,
    sanitize_full_name,
)
from prometheus_client.parser import text_string_to_metric_families  # noqa: E402

from kvcache_otel import semconv  # noqa: E402
from kvcache_otel.engines.sglang.table import HOOKS  # noqa: E402
from kvcache_otel.engines.versions import is_before  # noqa: E402
from tests.engines.sglang import other_plugin  # noqa: E402
from tests.engines.sglang.processes import INSTALLED, OLDER, Ended, run_module  # noqa: E402
from tests.support.rows import KEYS  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

    from kvcache_otel.spec import MetricSpec

pytestmark = pytest.mark.engine

ASKED = "OTEL_METRICS_EXPORTER=prometheus"
EXPORTS = {"OTEL_METRICS_EXPORTER": "prometheus", "OTEL_EXPORTER_PROMETHEUS_PORT": "0"}
LATE = {hook.name: hook.target.replace(":", ".") for hook in HOOKS if "rust_tree_core" in hook.module}
"""The hooks whose module nobody imports before a cache is built, and their functions."""

NOTHING = {"threads": ["MainThread"], "listens": [], "sockets": 0, "runtime": False}
"""What a process looks like that exports nothing."""

IDENTITY = {
    semconv.KVCACHE_ENGINE: "sglang",
    semconv.KVCACHE_CACHE_TYPE: "UnifiedRadixCache",
    semconv.KVCACHE_RANK_TP: "1",
    semconv.KVCACHE_RANK_PP: "0",
    semconv.KVCACHE_RANK_DP: "1",
}
"""Of rank 3 of four, whose attention is two-fold data parallel: the second rank of the second half."""

REGISTER_SECONDS = 0.005
"""More than registering takes on a machine that has something else to do."""


@functools.cache
def process(role: str, version: str = INSTALLED) -> Ended:
    """A process of SGLang's, with metrics asked for; the same one for all tests."""
    return run_module("plugin_program", role, environ=EXPORTS, version=version)


def _targets(*, late: bool, but: Collection[str] = ()) -> list[str]:
    """The table's functions, as SGLang's registry writes them, with those that come late or without."""
    left_out = {*but, *(() if late else LATE)}
    return sorted({hook.target.replace(":", ".") for hook in HOOKS if hook.name not in left_out})


def _not_attached(states: Mapping[str, str]) -> dict[str, str]:
    assert list(states) == [hook.name for hook in HOOKS]
    return {name: state for name, state in states.items() if state != "attached"}


# -- a scheduler -------------------------------------------------------------------------------------------------------


def test_a_scheduler_has_every_hook_in_sglangs_registry_and_exports_nothing_yet() -> None:
    found = process("scheduler").result()["loaded"]
    assert _not_attached(found["states"]) == dict.fromkeys(LATE, "waiting")
    assert found["places"] == _targets(late=False)
    assert {name for name in found["modules"] if not name.startswith("kvcache_otel")} == set()
    assert (found["threads"], found["sockets"], found["runtime"]) == ([], 0, False)


def test_the_exporter_starts_in_the_process_that_builds_a_cache_and_when_it_does() -> None:
    ended = process("scheduler")
    found = ended.result()
    assert {name: found["before"][name] for name in NOTHING} == NOTHING
    used = found["used"]
    assert _not_attached(used["states"]) == {}
    assert "kvcache-prometheus" in used["threads"]
    (port,) = used["listens"]
    assert ended.ours[0] == f"kvcache: exports to Prometheus at http://localhost:{port}/metrics ({ASKED})"


def test_a_scrape_has_the_counts_of_the_cache_with_its_rank() -> None:
    """The ranks were published after the plugins had been loaded: they are read when the cache is built."""
    _assert_scraped(process("scheduler").result()["used"])


def test_hooks_in_sglangs_registry_come_off_and_come_back() -> None:
    """SGLang cannot take them off: what stays there asks nobody."""
    ended = process("scheduler")
    found = ended.result()
    detached = found["detached"]
    assert (detached["states"], detached["runtime"], detached["listens"]) == ({}, False, [])
    assert detached["own"] == {**found["used"]["own"], **_seconds(detached["own"])}, "SGLang is not affected"
    assert detached["places"] == _targets(late=False)
    again = found["again"]
    assert _not_attached(again["states"]) == {}
    assert again["places"] == _targets(late=False)
    _assert_scraped(again)
    assert len(ended.ours) == 2, ended.ours


def test_the_oldest_release_loads_plugins_no_differently() -> None:
    ended = process("scheduler", OLDER[0])
    found = ended.result()
    missing = {hook.name for hook in HOOKS if is_before(OLDER[0], hook.since)}
    for turn in ("used", "again"):
        assert _not_attached(found[turn]["states"]).keys() == missing
        renamed = {f"{hook.module}.{hook.path}": hook.formerly for hook in HOOKS if hook.formerly}
        places = [
            f"{target.rpartition('.')[0]}.{renamed[target]}" if target in renamed else target
            for target in _targets(late=False, but=missing)
        ]
        assert found[turn]["places"] == sorted(places)
        _assert_scraped(found[turn], but=missing)
    assert (found["detached"]["states"], found["detached"]["listens"]) == ({}, [])
    assert len(ended.ours) == 2, ended.ours


def _seconds(own: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in own.items() if name.endswith("seconds")}


def _assert_scraped(found: dict[str, Any], *, but: Collection[str] = ()) -> None:
    """A scrape of the one endpoint has what SGLang says of its cache, and nothing of an earlier one's.

    Args:
        found: What the program says of one turn.
        but: The hooks that this release has no function for.
    """
    (text,) = found["scraped"]
    scraped = Scraped(text)
    own, tree, pools = found["own"], found["tree"], found["pools"]
    assert (own["evicted_tokens"], own["evictions"], own["backups"], own["load_backs"]) == (64, 2, 1, 1)
    assert scraped.value(semconv.EVICTION_TOKENS, tier="device", pool="kv") == own["evicted_tokens"]
    assert scraped.value(semconv.EVICTION_DURATION, "_count", tier="device") == own["evictions"]
    for source, destination, what in (("device", "host", "backup"), ("host", "device", "load_back")):
        way = {"source": source, "destination": destination}
        timed = {**way, "timing": "device_event"}
        assert scraped.value(semconv.TRANSFER_TOKENS, **way, pool="kv") == own[f"{what}_tokens"]["kv"]
        assert scraped.value(semconv.TRANSFER_IO, **timed) == own[f"{what}_bytes"]
        assert scraped.value(semconv.TRANSFER_OPERATIONS, **way) == own[f"{what}s"]
        assert scraped.value(semconv.TRANSFER_DURATION, "_count", **timed) == own[f"{what}s"]
        assert scraped.value(semconv.TRANSFER_DURATION, "_sum", **timed) == pytest.approx(own[f"{what}_seconds"])
    for tier, blocks in (("device", tree["device_blocks"]), ("host", tree["host_blocks"])):
        for view in ("held", "published"):
            assert scraped.value(semconv.RESIDENT_BLOCKS, tier=tier, view=view) == blocks
    assert scraped.value(semconv.LIMIT, tier="device", pool="kv") == pools["device_total"]
    assert scraped.value(semconv.USAGE, tier="device", pool="kv", state="free") == pools["device_free"]
    for hook in HOOKS:
        if hook.name not in but:
            assert scraped.value(semconv.TELEMETRY_HOOK_ATTACHED, hook=hook.name) == 1
            assert scraped.value(semconv.TELEMETRY_ERRORS, hook=hook.name) == 0


class Scraped:
    """The samples of one scrape."""

    def __init__(self, text: str) -> None:
        self._samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    def value(self, spec: MetricSpec, suffix: str = "", **labels: str) -> float:
        """The value of the one row that has these labels, and the identity's."""
        name = sanitize_full_name(f"{spec.name}_{unit}" if (unit := map_unit(spec.unit)) else spec.name)
        name += suffix or ("_total" if spec.instrument == "counter" else "")
        wanted = IDENTITY | {KEYS[label]: value for label, value in labels.items()}
        attributes = {sanitize_attribute(key): value for key, value in wanted.items()}
        (value,) = [sample.value for sample in self._samples if (sample.name, sample.labels) == (name, attributes)]
        return value


def test_sglangs_own_scheduler_process_is_hooked_before_the_scheduler_exists() -> None:
    """`run_scheduler_process` itself, spawned as SGLang spawns it; the ranks are those that it has published."""
    found = process("spawned").result()
    assert _not_attached(found["states"]) == dict.fromkeys(LATE, "waiting")
    assert found["places"] == _targets(late=False)
    assert {name: found[name] for name in NOTHING} == NOTHING
    assert found["ranks"] == {"tp": 1, "pp": 0, "dp": 1, "local": 3}


# -- processes without a cache -----------------------------------------------------------------------------------------


def test_a_detokenizer_imports_and_opens_nothing_for_our_sake() -> None:
    """SGLang itself has the OpenTelemetry SDK there, for traces."""
    found = process("detokenizer").result()["let in"]
    assert {name for name in found["modules"] if not name.startswith("kvcache_otel.engines.sglang")} == set()
    assert "kvcache_otel.engines.sglang.adapter" not in found["modules"]
    assert (found["threads"], found["sockets"], found["runtime"]) == ([], 0, False)
    waiting = _not_attached(found["states"])
    assert set(waiting.values()) == {"waiting"}
    assert {"cache.init", "scheduler.idle", "core.insert_host", "storage.read", *LATE} <= waiting.keys()


def test_a_launcher_is_hooked_and_opens_nothing() -> None:
    found = process("launcher").result()
    assert _not_attached(found["states"]) == dict.fromkeys(LATE, "waiting")
    assert {name for name in found["modules"] if not name.startswith("kvcache_otel")} == set()
    assert (found["threads"], found["sockets"], found["runtime"]) == ([], 0, False)


def test_a_launcher_that_imports_the_scheduler_later_is_hooked_then_and_opens_nothing() -> None:
    found = process("detokenizer").result()["later"]
    assert _not_attached(found["states"]) == dict.fromkeys(LATE, "waiting")
    assert (found["threads"], found["sockets"], found["runtime"]) == ([], 0, False)


# -- who decides -------------------------------------------------------------------------------------------------------


def test_sglang_plugins_can_leave_us_out() -> None:
    found = process("detokenizer").result()
    assert found["not let in"]["modules"] == []
    assert found["let in"]["states"]


def test_asked_for_nothing_nothing_is_hooked_and_one_line_says_what_to_set() -> None:
    ended = process("detokenizer")
    found = ended.result()["asked for nothing"]
    assert (found["states"], found["places"], found["runtime"]) == ({}, [], False)
    assert {name for name in found["modules"] if not name.startswith("kvcache_otel")} == set()
    assert (found["threads"], found["sockets"]) == ([], 0)
    assert ended.ours == [
        "kvcache: not instrumented: nothing is exported: set OTEL_METRICS_EXPORTER (otlp, prometheus, console) "
        "or OTEL_EXPORTER_OTLP_ENDPOINT"
    ]


# -- beside another plugin ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [["other", "kvcache_otel"], ["kvcache_otel", "other"]], ids=lambda order: order[0])
def test_beside_another_plugin_both_work_and_nothing_is_counted_twice(tmp_path: Path, order: list[str]) -> None:
    """It replaces the cache's class and SGLang's collector, and has hooks of every kind on all functions of ours.

    That every number of ours is right is for the program to say, which compares them with SGLang's after every step.
    """
    other_plugin.install(tmp_path)
    first = {"PYTHONPATH": str(tmp_path)} if order[0] == "other" else {}
    ended = run_module("plugin_program", "beside", tmp_path, environ={**EXPORTS, **first})
    found = ended.result()
    assert found["type"] == "Replacement"
    assert _not_attached(found["states"]) == {}
    # It has SGLang import the module of our late hooks, so that all of them are in the registry.
    assert found["places"] == _targets(late=True)
    assert [line for line in ended.err.splitlines() if "Failed" in line] == []
    # These are registered when theirs are being applied already.
    late = {target: ["other", "kvcache_otel"] for target in LATE.values()}
    assert found["orders"] == dict.fromkeys(_targets(late=False), order) | late
    once = {target: layers for target, layers in found["layers"].items() if target not in other_plugin.REPLACED}
    assert once == dict.fromkeys(once, 4), "three of theirs, one of ours"

    calls = found["calls"]
    for name in {call.partition(",")[0] for call in calls if call.endswith("before")}:
        assert calls[f"{name}, before"] == calls[f"{name}, around"] == calls[f"{name}, after"]
    assert calls["insert, in the class"] == calls["insert, after"] == calls["begin_insert, after"] > 0
    assert calls["evict_host, in the class"] == calls["evict_host, after"] > 0
    assert calls["insert_host, after"] > 0
    assert calls["_evict, tokens"] == calls["collected evictions, tokens"] == found["own"]["evicted_tokens"] > 0


# -- in a program of one's own -----------------------------------------------------------------------------------------


def test_a_program_that_instruments_itself(tmp_path: Path) -> None:
    other_plugin.install(tmp_path)
    found = run_module("plugin_program", "alone", tmp_path).result()
    assert _not_attached(found["states"]) == {}
    total = dict.fromkeys(("evicted", "passes", "backed up", "loaded back"), 0)
    for turn in ("first", "again", "beside"):
        own = found[turn]["own"]
        total["evicted"] += own["evicted_tokens"]
        total["passes"] += own["evictions"]
        total["backed up"] += own["backup_tokens"]["kv"]
        total["loaded back"] += own["load_back_tokens"]["kv"]
        # Instrumented twice it counts once, and a provider's counters never go down.
        assert {name: found[turn][name] for name in total} == total, turn
        assert all(total.values())
    assert found["given back"] == len(HOOKS), "uninstrumented, SGLang has its own functions back"
    assert found["uninstrumented"]["own"]["evicted_tokens"] > 0
    assert [found["uninstrumented"][name] for name in ("evicted", "backed up", "loaded back")] == [None] * 3
    # What is hooked before SGLang loads its plugins leaves their places to them.
    assert found["loaded"]["places"] == []
    assert found["calls"]["insert, in the class"] == found["calls"]["insert, after"] == 1
    assert found["calls"]["_evict, tokens"] == found["beside"]["own"]["evicted_tokens"]


# -- what it costs -----------------------------------------------------------------------------------------------------


def test_registering_is_quick() -> None:
    """What SGLang does then takes the longest: for each function it looks through all names of all modules."""
    seconds = [process("scheduler").result()["loaded"]["seconds"], process("launcher").result()["seconds"]]
    took = {name: f"{1e3 * min(each[name] for each in seconds):.1f} ms" for name in seconds[0]}
    assert min(each["register_sglang"] for each in seconds) < REGISTER_SECONDS, took
