"""Drives one release of SGLang, hooked, on both of its cores, and compares our numbers with its own after every step.

    PYTHONPATH=…/versions/0.5.19 python -m tests.engines.sglang.version_program FOLDER

Prints one line of JSON: what was found, core by core. What contradicts an oracle is in it too, as a traceback.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sglang

from kvcache_otel import semconv
from tests.engines.sglang import cpu
from tests.engines.sglang.cache_driver import CORES, PAGE, RELEASE, TOKEN_BYTES, CacheDriver
from tests.engines.sglang.conftest import Instrumented
from tests.engines.sglang.expected import (
    BACKUP,
    LOAD_BACK,
    STORAGE,
    WRITE,
    assert_closes,
    assert_equals_recount,
    assert_equals_sglang,
    assert_settled,
)
from tests.engines.sglang.oracle import own_counters
from tests.engines.sglang.walk import random_walk
from tests.engines.sglang.watched import Watched, held, published

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.rows import Rows

OPERATIONS = 300

# The second has a host that is always full, and what is evicted from the device goes there.
WALKS: dict[str, dict[str, Any]] = {
    "write-through": {"seed": 1, "write_policy": "write_through", "host_ratio": 2.0},
    "write-back, small host": {"seed": 2, "write_policy": "write_back", "host_ratio": 0.5},
}

PROMPT = range(1000, 1000 + 8 * PAGE)
ANY = 99_999
"""A token behind the whole blocks of a prompt: SGLang computes the last one always."""

TELLS_HITS = RELEASE >= (0, 5, 20)
"""Whether SGLang says what storage had."""


def main() -> None:
    """See the module."""
    folder = Path(sys.argv[1])
    cpu.install()
    hooks = _hooks()
    cores = {core: _core(core, folder / core) for core in CORES}
    print(json.dumps({"version": sglang.__version__, "hooks": hooks, "cores": cores}), flush=True)


def _hooks() -> dict[str, str]:
    """The state of each hook when all modules are imported that this release has of those in the table."""
    instrumented = Instrumented()
    instrumented.hooks.attach()
    for point in instrumented.hooks.points:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(point.hook.module)
    states = {point.hook.name: point.state for point in instrumented.hooks.points}
    instrumented.hooks.detach()
    return states


def _core(core: str, folder: Path) -> dict[str, Any]:
    """What was found with one core."""
    found: dict[str, Any] = {}
    for name, options in WALKS.items():
        found[name] = _tried(lambda name=name, options=options: _walk(core, folder / name, **options))
    found["refill"] = _tried(lambda: _refill(core, folder / "refill"))
    return found


def _tried(call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A result, or the traceback, so that one core that fails does not hide the other."""
    try:
        return call()
    except Exception:
        return {"failed": traceback.format_exc()}


@contextlib.contextmanager
def _instrumented() -> Iterator[Instrumented]:
    instrumented = Instrumented()
    instrumented.hooks.attach()
    try:
        yield instrumented
    finally:
        instrumented.hooks.detach()


# -- a random walk -----------------------------------------------------------------------------------------------------


def _walk(core: str, folder: Path, *, seed: int, **options: Any) -> dict[str, Any]:
    cpu.timed_events(True)
    with _instrumented() as instrumented, CacheDriver(core=core, storage_dir=folder, **options) as driver:
        watched = Watched(driver, lambda: instrumented.rows)
        apart = dict.fromkeys(("device", "host"), 0)
        for step, operation in enumerate(random_walk(driver, seed, OPERATIONS)):
            rows = instrumented.rows
            try:
                assert_equals_recount(rows, driver)
                if TELLS_HITS:
                    assert_closes(rows)
                if not driver.in_flight():
                    assert_settled(rows, driver)
                    watched.assert_adds_up()
            except AssertionError as error:
                raise AssertionError(f"after step {step}, {operation}: {error}") from error
            for tier in apart:
                apart[tier] += published(rows, tier) != held(rows, tier)
        rows = instrumented.rows
        assert_equals_recount(rows, driver)
        assert rows.total(semconv.LOOKUP_TOKENS) == driver.served_tokens
        if TELLS_HITS:
            assert_equals_sglang(rows, driver, retracted=watched.retracted)
        else:
            _assert_equals_older_sglang(rows, driver, watched.retracted)
        watched.assert_adds_up()
        _assert_sound(instrumented, unknown_removes=watched.unknown_removes)
        return {
            "apart": apart,
            "published": {tier: published(rows, tier) for tier in apart},
            "held": {tier: held(rows, tier) for tier in apart},
            "unknown removes": watched.unknown_removes,
            "refilled": watched.refilled,
            "served": driver.served_tokens,
            "drop reasons": sorted(
                str(dict(key)[semconv.KVCACHE_REASON]) for key in rows.values(semconv.DROPPED_TOKENS)
            ),
            "own": dataclasses.asdict(own_counters(driver)),
        }


def _assert_equals_older_sglang(rows: Rows, driver: CacheDriver, retracted: tuple[int, int]) -> None:
    """`assert_equals_sglang`, as far as SGLang goes before 0.5.20."""
    theirs = own_counters(driver)
    assert rows.value(semconv.EVICTION_TOKENS, tier="device", pool="kv") == theirs.evicted_tokens
    backups = (theirs.backup_tokens, theirs.backup_bytes, theirs.backups, theirs.backup_seconds)
    load_backs = (theirs.load_back_tokens, theirs.load_back_bytes, theirs.load_backs, theirs.load_back_seconds)
    for route, besides, (tokens, size, copies, seconds) in (
        (BACKUP, retracted[0], backups),
        (LOAD_BACK, retracted[1], load_backs),
    ):
        assert rows.value(semconv.TRANSFER_TOKENS, **route, pool="kv") == tokens["kv"] + besides > 0
        assert rows.total(semconv.TRANSFER_IO, **route) == size + besides * TOKEN_BYTES
        duration = rows.histogram(semconv.TRANSFER_DURATION, **route, timing="device_event")
        assert duration is not None
        counts, total = duration.read()
        assert sum(counts) == rows.value(semconv.TRANSFER_OPERATIONS, **route) >= copies
        assert total >= seconds - 1e-9
    assert rows.total(semconv.DROPPED_TOKENS) == sum(theirs.dropped_tokens.values())
    assert rows.value(semconv.TRANSFER_TOKENS, **WRITE, pool="kv") == theirs.stored_tokens > 0
    loaded = rows.value(semconv.PREFETCH_LOADED_TOKENS, **STORAGE)
    assert loaded == (theirs.prefetched_tokens if RELEASE >= (0, 5, 19) else None)
    assert rows.values(semconv.PREFETCH_HIT_TOKENS) == {}, "what nobody tells has no row"


def _assert_sound(instrumented: Instrumented, *, unknown_removes: int) -> None:
    """`Instrumented.assert_sound`, save for removals that are known to be unknown."""
    rows = instrumented.rows
    assert {point.hook.name: point.why for point in instrumented.hooks.points if point.errors} == {}
    assert rows.total(semconv.ACCOUNTING_ERRORS) == unknown_removes, rows.values(semconv.ACCOUNTING_ERRORS)
    assert rows.total(semconv.TELEMETRY_DROPPED) == 0
    assert rows.total(semconv.TELEMETRY_ERRORS) == 0


# -- the missing host event --------------------------------------------------------------------------------------------


def _refill(core: str, folder: Path) -> dict[str, Any]:
    """Stores a prompt on all three tiers, takes it off the device and the host, and has a request fetch it again."""
    with _instrumented() as instrumented, CacheDriver(core=core, storage_dir=folder) as driver:
        driver.insert(PROMPT)
        driver.settle()
        moments = {"stored": _views(instrumented)}
        driver.evict(len(PROMPT))
        driver.evict_host(len(PROMPT))
        driver.settle()
        moments["evicted"] = _views(instrumented)
        told = len(driver.events)
        tokens = driver.prefetch([*PROMPT, ANY], "request").tokens
        driver.settle()
        moments["refilled"] = _views(instrumented)
        assert_equals_recount(instrumented.rows, driver)
        events = [(type(event).__name__, _medium(event), len(event.block_hashes)) for event in driver.events[told:]]
        driver.evict(len(PROMPT))
        driver.evict_host(len(PROMPT))
        driver.settle()
        moments["evicted again"] = _views(instrumented)
        unknown = instrumented.rows.total(semconv.ACCOUNTING_ERRORS, reason="unknown_remove")
        _assert_sound(instrumented, unknown_removes=int(unknown))
        return {"tokens": tokens, "moments": moments, "events": events, "unknown removes": unknown}


def _medium(event: Any) -> str:
    medium = event.medium
    return str(getattr(medium, "value", medium))


def _views(instrumented: Instrumented) -> dict[str, dict[str, float]]:
    rows = instrumented.rows
    return {tier: {"published": published(rows, tier), "held": held(rows, tier)} for tier in ("device", "host")}


if __name__ == "__main__":
    main()
