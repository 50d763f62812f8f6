"""What must not hurt: things that are missing, that others have changed, that happen in the wrong moment."""

from __future__ import annotations

import gc
import time
import weakref
from typing import TYPE_CHECKING, Any

import pytest

from tests.conftest import require

require("sglang")

from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache  # noqa: E402

from kvcache_otel import semconv  # noqa: E402
from kvcache_otel.engines.hooks import STEP_ASIDE_AFTER  # noqa: E402
from kvcache_otel.engines.sglang.pools import settle  # noqa: E402
from tests.engines.sglang import cache_driver, cpu  # noqa: E402
from tests.engines.sglang.cache_driver import PAGE, CacheDriver  # noqa: E402
from tests.engines.sglang.conftest import Instrumented  # noqa: E402
from tests.engines.sglang.expected import (  # noqa: E402
    BACKUP,
    NAME,
    READ,
    STORAGE,
    WRITE,
    assert_closes,
    assert_equals_recount,
    assert_equals_sglang,
    assert_published_is_held,
    assert_settled,
    by_reason,
)
from tests.engines.sglang.oracle import pools  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.engine

A = list(range(4 * PAGE))
B = list(range(1000, 1000 + 4 * PAGE))


# -- the known cases


def test_c5_a_hit_is_accounted_for_to_its_end(
    make: Callable[..., CacheDriver],
    instrumented: Instrumented,
    core: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """C5: storage says 1000; loading 300 is declined; 200 are evicted from the host before admission."""
    monkeypatch.setattr(cache_driver, "MAX_PROMPT", 2048)
    driver = make(core=core, storage_dir=tmp_path, device_tokens=2048, metrics=False)
    prompt = list(range(1000))
    driver.insert(prompt)
    driver.settle()
    driver.evict(len(prompt))
    driver.evict_host(len(prompt))
    driver.settle()
    group = driver.cache.host_pool_group
    hold = group.alloc(pools(driver).host["kv"].total - 700)
    request = driver.begin_prefetch([*prompt, 1], "request")
    while instrumented.rows.value(semconv.PREFETCH_HIT_TOKENS, **STORAGE) == 0:
        driver.step()
    rows = instrumented.rows
    assert rows.value(semconv.PREFETCH_OUTSTANDING_TOKENS, **STORAGE) == 700
    assert by_reason(rows, semconv.PREFETCH_UNFULFILLED_TOKENS) == {"host_capacity": 300}
    assert_closes(rows)
    driver.wait_for_prefetch(request)
    driver.match(prompt[:500])  # It splits what has come, so that a part can go.
    assert driver.evict_host(200) == 200
    driver.end_prefetch(request)
    group.free(hold)
    driver.settle()
    rows = instrumented.rows
    assert rows.value(semconv.PREFETCH_HIT_TOKENS, **STORAGE) == 1000
    assert rows.value(semconv.PREFETCH_FULFILLED_TOKENS, **STORAGE) == 500
    unfulfilled = {"host_capacity": 300, "cache_admission_shortfall": 200}
    assert by_reason(rows, semconv.PREFETCH_UNFULFILLED_TOKENS) == unfulfilled
    assert rows.value(semconv.PREFETCH_OUTSTANDING_TOKENS, **STORAGE) == 0


def test_c7_health_probes_and_decoding_read_as_what_they_are(
    make: Callable[..., CacheDriver], instrumented: Instrumented, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C7: 900 of 1000 tokens hit, then a health probe 0 of 5, then decode only: 900 of 1005, and no ratio."""
    monkeypatch.setattr(cache_driver, "MAX_PROMPT", 2048)
    driver = make(device_tokens=2048)
    prompt = list(range(1000))
    driver.insert(prompt[:900])
    driver.settle()
    before = {tier: instrumented.rows.value(semconv.LOOKUP_TOKENS, tier=tier) for tier in ("device", "none")}
    driver.admit(prompt, "long")
    driver.admit(range(5000, 5005), "health")
    for _ in range(10):
        driver.step()
    rows = instrumented.rows
    served = {tier: rows.value(semconv.LOOKUP_TOKENS, tier=tier) - before[tier] for tier in ("device", "none")}
    assert served["device"] == 900
    assert rows.total(semconv.LOOKUP_TOKENS) - sum(before.values()) == 1005
    assert not [name for name in semconv.METRICS if {"rate", "ratio"} & set(name.split("."))]


def test_g1_a_cache_that_goes_takes_its_gauges_with_it(instrumented: Instrumented, core: str, tmp_path: Path) -> None:
    driver = CacheDriver(core=core, storage_dir=tmp_path)
    driver.insert(A)
    driver.settle()
    assert instrumented.rows.value(semconv.RESIDENT_BLOCKS, tier="device", view="held")
    evicted = driver.evict(1000)
    gone = weakref.ref(driver.cache)
    driver.close()
    del driver
    gc.collect()
    assert gone() is None, "something of ours keeps the cache"
    for spec in semconv.METRICS.values():
        if spec.instrument in ("observableupdowncounter", "updowncounter", "gauge", "observablegauge"):
            assert not instrumented.rows.values(spec), spec.name
    assert instrumented.rows.value(semconv.EVICTION_TOKENS, tier="device", pool="kv") == evicted


def test_g2_a_pool_that_will_not_say_has_no_row(
    make: Callable[..., CacheDriver], instrumented: Instrumented, caplog: pytest.LogCaptureFixture
) -> None:
    class Silent:
        logical_size = 4

        def available_size(self) -> int:
            raise NotImplementedError

    driver = make()
    driver.cache.host_pool_group.entries[0].host_pool.available_size = Silent().available_size
    try:
        for _ in range(5):
            driver.step()
    finally:
        del driver.cache.host_pool_group.entries[0].host_pool.available_size
    rows = instrumented.rows
    assert rows.value(semconv.LIMIT, tier="host", pool="kv") is None
    assert rows.value(semconv.USAGE, tier="host", pool="kv", state="used") is None
    assert rows.value(semconv.USAGE, tier="device", pool="kv", state="free") is not None
    assert rows.total(semconv.TELEMETRY_ERRORS) == 1
    assert [record.message for record in caplog.records if "kv pool of the host tier" in record.message]
    driver.step()
    assert_settled(instrumented.rows, driver)
    instrumented.forgive(semconv.TELEMETRY_ERRORS)


def test_g3_more_free_than_there_is(make: Callable[..., CacheDriver], instrumented: Instrumented) -> None:
    driver = make(hicache=False)
    driver.allocator.available_size = lambda: driver.allocator.size + PAGE
    settle(driver.cache._kvcache_otel.tiers)
    settle(driver.cache._kvcache_otel.tiers)
    del driver.allocator.available_size
    rows = instrumented.rows
    assert rows.value(semconv.USAGE, tier="device", pool="kv", state="used") == 0
    assert rows.value(semconv.ACCOUNTING_ERRORS, reason="conservation") == 1
    instrumented.forgive(semconv.ACCOUNTING_ERRORS)


# -- the wrong moment


def test_a_reset_in_mid_transfer(make: Callable[..., CacheDriver], instrumented: Instrumented, core: str) -> None:
    cpu.timed_events(True)
    try:
        driver = make(core=core)
        with cpu.held_transfers():
            driver.insert(A)
            driver.step()
            assert instrumented.rows.value(semconv.TRANSFER_ACTIVE, **BACKUP) == 1
            driver.reset()
        rows = instrumented.rows
        assert rows.value(semconv.TRANSFER_ACTIVE, **BACKUP) == 0
        assert rows.value(semconv.TRANSFER_ACTIVE_BLOCKS, **BACKUP) == 0
        assert rows.value(semconv.TRANSFER_OPERATIONS, **BACKUP, error="cache_reset") == 1
        assert rows.value(semconv.TRANSFER_OPERATIONS, **BACKUP) == 0
        driver.settle()
        driver.insert(A)
        driver.settle()
        rows = instrumented.rows
        assert rows.value(semconv.TRANSFER_OPERATIONS, **BACKUP) == 1
        assert rows.value(semconv.TRANSFER_TOKENS, **BACKUP, pool="kv") == len(A)
        assert_equals_recount(rows, driver)
        assert_published_is_held(rows)
    finally:
        cpu.timed_events(False)


def test_a_reset_while_storage_is_at_work(
    make: Callable[..., CacheDriver], instrumented: Instrumented, core: str, tmp_path: Path
) -> None:
    driver = make(core=core, storage_dir=tmp_path)
    for round_ in range(20):
        prompt = range(round_ * 100, round_ * 100 + 6 * PAGE)
        driver.insert(list(prompt))
        driver.step()
        driver.begin_prefetch([*range(A[0], A[-1]), 1], f"request-{round_}")
        driver.reset()
        assert_closes(instrumented.rows)
    driver.settle()
    rows = instrumented.rows
    assert rows.value(semconv.PREFETCH_OUTSTANDING_TOKENS, **STORAGE) == 0
    for route in (WRITE, READ):
        assert rows.value(semconv.TRANSFER_ACTIVE, **route, **NAME) == 0
    assert_equals_recount(rows, driver)
    driver.insert(B)
    driver.settle()
    assert_published_is_held(instrumented.rows)


def test_a_backend_attached_and_detached_at_run_time(
    make: Callable[..., CacheDriver], instrumented: Instrumented, core: str, tmp_path: Path
) -> None:
    driver = make(core=core)
    assert not instrumented.rows.values(semconv.PREFETCH_HIT_TOKENS)
    written = 0
    for round_ in range(3):
        driver.attach_storage(tmp_path)
        assert instrumented.rows.value(semconv.PREFETCH_OUTSTANDING_TOKENS, **STORAGE) == 0
        assert instrumented.rows.value(semconv.TRANSFER_ACTIVE, **WRITE, **NAME) == 0
        driver.insert([round_ * 1000 + token for token in A])
        driver.settle()
        written += len(A)
        rows = instrumented.rows
        assert rows.value(semconv.TRANSFER_TOKENS, **WRITE, pool="kv") == written
        assert_equals_sglang(rows, driver, timing="wall_clock")
        driver.detach_storage()
        rows = instrumented.rows
        assert not rows.values(semconv.PREFETCH_OUTSTANDING_TOKENS)
        assert rows.value(semconv.TRANSFER_ACTIVE, **WRITE, **NAME) is None
        assert rows.value(semconv.TRANSFER_TOKENS, **WRITE, pool="kv") == written
        driver.insert([round_ * 1000 + 500 + token for token in A])
        driver.settle()
    assert instrumented.rows.value(semconv.TRANSFER_TOKENS, **WRITE, pool="kv") == written == driver.stored() * PAGE


def test_a_backend_detached_with_a_hit_outstanding(
    make: Callable[..., CacheDriver], instrumented: Instrumented, core: str, tmp_path: Path
) -> None:
    driver = make(core=core, storage_dir=tmp_path)
    driver.insert(A)
    driver.settle()
    driver.evict(1000)
    driver.evict_host(1000)
    driver.settle()
    request = driver.begin_prefetch([*A, 1], "request")
    driver.wait_for_prefetch(request)
    assert instrumented.rows.value(semconv.PREFETCH_OUTSTANDING_TOKENS, **STORAGE) == len(A)
    driver.settle()
    driver.detach_storage()
    rows = instrumented.rows
    assert by_reason(rows, semconv.PREFETCH_UNFULFILLED_TOKENS) == {"other": len(A)}
    assert_closes(rows)
    driver.end_prefetch(request)  # From the host, as if it had always been there.
    assert instrumented.rows.value(semconv.PREFETCH_FULFILLED_TOKENS, **STORAGE) == 0


# -- storage that fails


def test_storage_that_fails_or_raises(
    make: Callable[..., CacheDriver], instrumented: Instrumented, core: str, tmp_path: Path
) -> None:
    driver = make(core=core, storage_dir=tmp_path)
    backend = driver.cache.cache_controller.storage_backend
    driver.insert(A)
    driver.settle()

    backend.batch_set = lambda *_, **__: False
    driver.insert(B)
    driver.settle()

    def broken(*_: Any, **__: Any) -> Any:
        raise OSError("the disk is gone")

    backend.batch_set = broken
    driver.insert([token + 5000 for token in A])
    driver.settle()
    rows = instrumented.rows
    assert rows.value(semconv.TRANSFER_OPERATIONS, **WRITE, **NAME) == 1
    assert rows.value(semconv.TRANSFER_OPERATIONS, **WRITE, **NAME, error="_OTHER") == 1
    assert rows.value(semconv.TRANSFER_OPERATIONS, **WRITE, **NAME, error="OSError") == 1
    assert rows.value(semconv.TRANSFER_TOKENS, **WRITE, pool="kv") == len(A)

    driver.evict(1000)
    driver.evict_host(1000)
    driver.settle()
    backend.batch_get = broken
    driver.prefetch([*A, 1], "in vain")
    driver.settle()
    rows = instrumented.rows
    assert rows.value(semconv.TRANSFER_OPERATIONS, **READ, **NAME, error="_OTHER") == 1
    assert by_reason(rows, semconv.PREFETCH_UNFULFILLED_TOKENS) == {"storage_transfer": len(A)}
    assert_closes(rows)
    assert_equals_sglang(rows, driver, timing="wall_clock")


def test_a_read_that_gets_a_part(
    make: Callable[..., CacheDriver], instrumented: Instrumented, core: str, tmp_path: Path
) -> None:
    driver = make(core=core, storage_dir=tmp_path)
    backend = driver.cache.cache_controller.storage_backend
    driver.insert(A)
    driver.settle()
    driver.evict(1000)
    driver.evict_host(1000)
    driver.settle()
    get = backend.batch_get
    backend.batch_get = lambda keys, *rest, **more: [*get(keys, *rest, **more)[:2], *[None] * (len(keys) - 2)]
    driver.prefetch([*A, 1], "half")
    driver.settle()
    rows = instrumented.rows
    assert rows.value(semconv.TRANSFER_OPERATIONS, **READ, **NAME, error="partial") == 1
    assert rows.value(semconv.TRANSFER_TOKENS, **READ, pool="kv") == 2 * PAGE
    assert_closes(rows)
    assert_equals_sglang(rows, driver, timing="wall_clock")


# -- what is missing


def test_a_target_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(UnifiedRadixCache, "_finish_storage_prefetch")
    instrumented = Instrumented()
    instrumented.hooks.attach()
    try:
        missing = [point for point in instrumented.hooks.points if point.state == "missing"]
        assert [point.hook.name for point in missing] == ["prefetch.finished"]
        assert "_finish_storage_prefetch" in missing[0].why
        with CacheDriver() as driver:
            driver.insert(A)
            driver.settle()
            assert_equals_recount(instrumented.rows, driver)
    finally:
        instrumented.hooks.detach()


def test_bodies_that_raise_leave_the_cache_alone(
    instrumented: Instrumented, make: Callable[..., CacheDriver], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Every body of every hook, at every call."""

    def broken(*_: Any, **__: Any) -> Any:
        raise ValueError("ours")

    for point in instrumented.hooks.points:
        if point.hook.name not in ("cache.init", "cache.init_hicache"):
            monkeypatch.setattr(instrumented.adapter, point.hook.body, broken)
    driver = make(storage_dir=tmp_path)
    for _ in range(8):
        driver.insert(A)
        driver.settle()
        driver.evict(1000)
        driver.evict_host(1000)
        driver.settle()
        driver.prefetch([*A, 1], "again")
        driver.settle()
        driver.check(A)
        driver.reset()
    failed = [point for point in instrumented.hooks.points if point.errors]
    assert len(failed) > 20
    assert all(point.state == ("aside" if point.errors >= STEP_ASIDE_AFTER else "attached") for point in failed)
    monkeypatch.undo()
    for point in instrumented.hooks.points:
        point.errors = 0


def test_an_exception_of_sglangs_passes_unchanged(
    make: Callable[..., CacheDriver], instrumented: Instrumented, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = make()
    error = RuntimeError("the copy failed")

    def broken(*_: Any, **__: Any) -> Any:
        raise error

    engine = driver.cache.cache_controller.l2_transfer_engine
    engine._prepare_transfers = broken
    # SGLang waits for the stream then, which a CPU's cannot do.
    monkeypatch.setattr(type(engine.device_to_host_stream), "synchronize", lambda _: None, raising=False)
    driver.insert(A)
    with pytest.raises(RuntimeError) as raised:
        driver.step()
    assert raised.value is error
    assert any("_submission" in str(entry) for entry in raised.traceback)
    del engine._prepare_transfers
    assert instrumented.rows.value(semconv.TRANSFER_OPERATIONS, **BACKUP, error="RuntimeError") == 1
    assert instrumented.rows.value(semconv.TRANSFER_ACTIVE, **BACKUP) == 0


def test_a_disabled_cache_has_no_rows_and_says_so(instrumented: Instrumented, caplog: pytest.LogCaptureFixture) -> None:
    class Disabled:
        disable = True

    cache = Disabled()
    instrumented.adapter.cache_built(None, cache)
    assert not hasattr(cache, "_kvcache_otel")
    assert [record.message for record in caplog.records if "is disabled" in record.message]


def test_a_thread_that_takes_a_backup_at_once_has_its_wait(
    make: Callable[..., CacheDriver], instrumented: Instrumented, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    driver = make(storage_dir=tmp_path)
    controller = driver.cache.cache_controller
    put = controller.backup_queue.put

    def put_and_wait(operation: Any) -> None:
        put(operation)
        while not operation.completed_tokens:
            time.sleep(0.001)

    monkeypatch.setattr(controller.backup_queue, "put", put_and_wait)
    driver.insert(A)
    driver.settle()
    histogram = instrumented.rows.histogram(semconv.TRANSFER_QUEUE_DURATION, **WRITE, **NAME)
    assert histogram is not None
    assert sum(histogram.read()[0]) == 1


def test_a_cache_that_was_built_before_is_not_seen(
    make: Callable[..., CacheDriver], instrumented: Instrumented
) -> None:
    """Neither are one's rows kept by what happened while nobody looked."""
    driver = make()
    driver.insert(A)
    driver.settle()
    evicted = instrumented.rows.value(semconv.EVICTION_TOKENS, tier="device", pool="kv")
    instrumented.hooks.detach()
    instrumented.adapter.forget()
    instrumented.hooks.attach()
    driver.evict(1000)
    driver.step()
    gc.collect()
    assert not instrumented.rows.values(semconv.RESIDENT_BLOCKS)
    assert not instrumented.rows.values(semconv.TRANSFER_ACTIVE)
    assert instrumented.rows.value(semconv.EVICTION_TOKENS, tier="device", pool="kv") == evicted


def test_tiers_that_cannot_be_read_leave_the_device_alone(
    instrumented: Instrumented, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise ValueError("ours")

    monkeypatch.setattr("kvcache_otel.engines.sglang.cache.DirectionRows", broken)
    with CacheDriver() as driver:
        driver.insert(A)
        driver.settle()
        rows = instrumented.rows
        assert rows.value(semconv.RESIDENT_BLOCKS, tier="device", view="held") == 4
        assert rows.value(semconv.RESIDENT_BLOCKS, tier="host", view="held") is None
        assert rows.value(semconv.TRANSFER_OPERATIONS, **BACKUP) is None
    (failed,) = [point for point in instrumented.hooks.points if point.errors]
    assert failed.hook.name == "cache.init_hicache"
    failed.errors = 0


def test_events_that_can_be_taken_only_once_are_the_engines(
    make: Callable[..., CacheDriver], instrumented: Instrumented
) -> None:
    driver = make()
    events = iter([object()])
    instrumented.adapter.events_taken(events, driver.cache)
    assert len(list(events)) == 1
