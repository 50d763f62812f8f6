"""The adapter on vLLM's real tiering manager: every number has an oracle."""

from __future__ import annotations

import gc
import random
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tests.conftest import require

require("vllm")

from examples.vllm_cpu.cpu_offload_spec import CpuTieringSpec  # noqa: E402
from examples.vllm_cpu.engine import fs_tier  # noqa: E402
from vllm.v1.kv_offload.base import LookupResult, Medium  # noqa: E402

from kvcache_otel import semconv  # noqa: E402
from tests.engines.vllm.manager_driver import (  # noqa: E402
    CHUNK_BYTES,
    ManagerDriver,
    Worker,
    backpressure,
    make_config,
    making_drivers,
    random_walk,
)
from tests.engines.vllm.oracle import (  # noqa: E402
    CASCADE,
    DISK,
    ON_DISK,
    ON_HOST,
    PROMOTION,
    assert_equals_recount,
    assert_equals_vllm,
    assert_samples,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.engines.vllm.conftest import Instrumented
    from tests.support.rows import Rows

pytestmark = pytest.mark.engine

CAPACITY = 8
TOKENS = 16


@pytest.fixture
def make(instrumented: Instrumented, tmp_path: Path) -> Iterator[Callable[..., ManagerDriver]]:
    """Makes drivers of an instrumented host tier and a file-system tier, and closes them in the end."""
    with making_drivers(tmp_path / "blocks", CAPACITY) as make:
        yield make


@pytest.fixture
def rows(instrumented: Instrumented) -> Rows:
    return instrumented.rows


def _situations(driver: ManagerDriver, *, beside: Path | None = None) -> int:
    """Brings a manager of eight blocks into every situation, and returns how many blocks it evicted on the way.

    Args:
        driver: The manager's.
        beside: Where another tier has its files. A block is promoted from whichever tier answers first, and one that is
            broken in the first tier must not be found there.
    """
    evicted = 0
    request = driver.request()
    driver.resolve(request, range(4))  # misses
    driver.store(request, range(4))  # store and cascade
    driver.settle()
    driver.resolve(request, range(4))
    driver.load(request, range(4))  # host hit
    driver.finish(request)

    filler = driver.request()
    output = driver.store(filler, range(10, 18))  # evicts all
    assert output is not None
    evicted += len(output.evicted_keys)
    driver.settle()
    driver.finish(filler)

    reader = driver.request()
    assert driver.resolve(reader, range(4)) == [LookupResult.HIT] * 4  # disk hit, promotion; evicts 4
    evicted += 4
    driver.load(reader, range(4))
    driver.finish(reader)

    filler = driver.request()
    output = driver.store(filler, range(20, 28))
    assert output is not None
    evicted += len(output.evicted_keys)
    driver.settle()
    driver.finish(filler)

    for file in [] if beside is None else beside.rglob("*"):
        if file.is_file():
            file.unlink()
    unlucky = driver.request()
    driver.fail_promotion(unlucky, range(4), broken=2)  # a promotion that half fails; evicts 4
    evicted += 4
    driver.finish(unlucky)

    unlucky = driver.request()
    driver.fail_cascade(unlucky, [30, 31])
    driver.finish(unlucky)
    driver.settle()

    with driver.pin():
        crowded = driver.request()
        assert driver.store(crowded, range(40, 49)) is None  # no room for a store
        assert driver.lookup(crowded, 10) is not LookupResult.HIT
        for _ in range(200):
            if driver.lookup(crowded, 10) is LookupResult.MISS:
                break  # no room for a promotion
            driver.step()
            time.sleep(0.002)
        driver.finish(crowded)
    driver.settle()
    return evicted


def _evicted_from_host(driver: ManagerDriver) -> int:
    """How many blocks vLLM published as removed from the host tier since the last call."""
    return sum(
        len(event.keys)
        for event in driver.take_events()
        # From 0.33 on a store that failed is taken back in public, too; that evicts nothing.
        if event.removed and event.medium is Medium.CPU and not getattr(event, "metadata_only", False)
    )


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_every_situation_counts_as_vllm_counts_it(instrumented: Instrumented, tmp_path: Path, policy: str) -> None:
    rows = instrumented.rows
    tiers = [fs_tier(tmp_path / "first"), fs_tier(tmp_path / "second", backpressure=backpressure())]
    with ManagerDriver(make_config(CAPACITY, tiers, policy=policy)) as driver:
        _situations(driver, beside=tmp_path / "second")
        assert_equals_vllm(rows, driver.totals)
        assert_equals_recount(rows, driver.recount(), tokens=TOKENS)
    refused = rows.value(semconv.STORE_SKIPPED_BLOCKS, tier="disk", name="2:fs", reason="backpressure")
    assert refused == driver.totals.counter("tiering_backpressure_blocks_dropped", "2:fs") > 0
    # None of it holds because nothing happened.
    assert driver.totals.counter("tiering_promotion_job_failures", DISK) == 1
    assert driver.totals.counter("tiering_cascade_job_failures", DISK) == 1
    assert driver.totals.counter("tiering_promotion_allocation_failures") >= 1
    assert driver.totals.counter("tiering_read_bytes", DISK) > 4 * CHUNK_BYTES
    # Of one job a half; where the four were found one after the other, the broken one had a job of its own.
    failures = [rows.value(semconv.TRANSFER_OPERATIONS, **PROMOTION, error=error) for error in ("partial", "_OTHER")]
    assert sum(failure or 0 for failure in failures) == 1
    assert rows.value(semconv.TRANSFER_OPERATIONS, **CASCADE, error="_OTHER") == 1


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_evictions_equal_the_removals_that_vllm_publishes(
    make: Callable[..., ManagerDriver], rows: Rows, policy: str
) -> None:
    driver = make(policy=policy)
    _situations(driver)
    removed = _evicted_from_host(driver)
    assert removed > CAPACITY
    assert rows.value(semconv.EVICTION_TOKENS, tier="host", pool="kv") == removed * TOKENS


def test_backpressure_counts_the_blocks_that_vllm_dropped(make: Callable[..., ManagerDriver], rows: Rows) -> None:
    driver = make(chunks=32, fs={"backpressure": backpressure()})
    for number in range(5):
        request = driver.request()
        driver.store(request, [100 + 2 * number, 101 + 2 * number])
        driver.settle()
        driver.finish(request)
    driver.step()
    assert driver.totals.counter("tiering_backpressure_blocks_dropped", DISK) > 0
    assert_equals_vllm(rows, driver.totals)


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_identities_hold_after_every_step_of_a_random_walk(
    make: Callable[..., ManagerDriver], rows: Rows, instrumented: Instrumented, policy: str
) -> None:
    driver = make(policy=policy)
    removed = 0

    def check() -> None:
        nonlocal removed
        assert_equals_vllm(rows, driver.totals)
        assert_equals_recount(rows, driver.recount(), tokens=TOKENS)
        removed += _evicted_from_host(driver)
        assert rows.value(semconv.EVICTION_TOKENS, tier="host", pool="kv") == removed * TOKENS
        instrumented.assert_sound()

    done = random_walk(driver, random.Random(f"walk {policy}"), 2_000, check)
    assert min(done.values()) > 0
    assert removed > 0
    for route in (PROMOTION, CASCADE):
        assert rows.value(semconv.TRANSFER_ACTIVE, **route) == 0
        assert rows.value(semconv.TRANSFER_ACTIVE_BLOCKS, **route) == 0


def test_a_lookup_repeated_because_allocation_failed_counts_once(
    make: Callable[..., ManagerDriver], rows: Rows
) -> None:
    """C3: one request looks up 64 hits of 128 blocks three times."""
    driver = make(chunks=64)
    request = driver.request()
    driver.store(request, range(64))
    driver.settle()
    driver.finish(request)

    request = driver.request()
    for _ in range(3):
        driver.resolve(request, range(128))
        driver.step()
    driver.step([request])
    assert rows.value(semconv.LOOKUP_BLOCKS, **ON_HOST, result="hit") == 64
    assert rows.value(semconv.LOOKUP_BLOCKS, **ON_HOST, result="miss") == 64
    driver.finish(request)


def test_retry_retry_hit_is_one_lookup_timed_from_the_first_retry(
    make: Callable[..., ManagerDriver], rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C4: and what is looked up after the request was admitted counts no more."""
    driver = make()
    (tier,) = driver.manager.secondary_tiers
    answers = iter([LookupResult.RETRY, LookupResult.RETRY, LookupResult.HIT])
    monkeypatch.setattr(tier, "lookup", lambda *_: next(answers))
    request = driver.request()
    began = time.monotonic()
    driver.lookup(request, 7)
    driver.step()
    time.sleep(0.02)
    driver.lookup(request, 7)
    driver.step()
    time.sleep(0.02)
    driver.lookup(request, 7)
    took = time.monotonic() - began
    driver.step([request])

    assert rows.value(semconv.LOOKUP_BLOCKS, **ON_DISK, result="hit") == 1
    assert rows.value(semconv.LOOKUP_BLOCKS, **ON_DISK, result="miss") == 0
    deferred = rows.histogram(semconv.LOOKUP_DURATION, **ON_DISK, mode="async")
    assert deferred is not None
    counts, total = deferred.read()
    assert sum(counts) == 1
    assert 0.04 <= total <= took

    monkeypatch.setattr(tier, "lookup", lambda *_: LookupResult.MISS)
    driver.lookup(request, 8)
    driver.step()
    assert rows.total(semconv.LOOKUP_BLOCKS, **ON_DISK) == 1
    driver.settle()
    driver.finish(request)


def test_rows_exist_at_zero_before_anything_happened(make: Callable[..., ManagerDriver], rows: Rows) -> None:
    make()
    zero = {
        semconv.LOOKUP_BLOCKS: 4,
        semconv.TRANSFER_IO: 2,
        semconv.TRANSFER_OPERATIONS: 5,
        semconv.TRANSFER_ACTIVE: 2,
        semconv.TRANSFER_ACTIVE_BLOCKS: 2,
        semconv.EVICTION_TOKENS: 1,
        semconv.STORE_SKIPPED_BLOCKS: 1,
        semconv.ALLOCATION_FAILURES: 2,
        semconv.RESIDENT_BLOCKS: 1,
    }
    assert {spec.name: list(rows.values(spec).values()) for spec in zero} == {
        spec.name: [0] * number for spec, number in zero.items()
    }
    assert rows.value(semconv.USAGE, tier="host", pool="kv", state="free") == CAPACITY * TOKENS
    assert rows.value(semconv.BLOCK_SIZE, tier="host") == TOKENS
    # What this manager cannot tell has no row.
    assert rows.values(semconv.PREFETCH_HIT_TOKENS) == {}
    assert rows.values(semconv.DROPPED_TOKENS) == {}


def test_the_wait_for_a_thread_is_timed_apart_from_the_transfer(
    make: Callable[..., ManagerDriver], rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread, two jobs of 50 ms at once: the second waits for the first, and is still moved in its own time."""
    driver = make(fs={"n_read_threads": 0, "n_write_threads": 1})
    pool = driver.manager.secondary_tiers[0]._pool
    enqueue = type(pool).enqueue_store
    slow = lambda task: lambda: (time.sleep(0.05), task())  # noqa: E731
    monkeypatch.setattr(
        type(pool), "enqueue_store", lambda self, job, n, tasks: enqueue(self, job, n, [slow(task) for task in tasks])
    )
    request = driver.request()
    driver.store(request, [1])
    driver.store(request, [2])
    driver.settle()
    driver.finish(request)
    waited = rows.histogram(semconv.TRANSFER_QUEUE_DURATION, **CASCADE)
    moved = rows.histogram(semconv.TRANSFER_DURATION, **CASCADE, timing="engine_report")
    assert waited is not None
    assert moved is not None
    assert sum(waited.read()[0]) == sum(moved.read()[0]) == 2
    assert 0.045 <= waited.read()[1] <= 0.09
    assert 0.1 <= moved.read()[1] <= 0.2


def test_two_caches_of_one_class_share_their_rows(
    make: Callable[..., ManagerDriver], rows: Rows, instrumented: Instrumented
) -> None:
    """P1: instrumented twice, two caches in a process: one set of hooks, no duplicate series, both caches counted."""
    instrumented.hooks.attach()
    first, second = make(), make()
    for driver, blocks in ((first, range(3)), (second, range(3, 8))):
        request = driver.request()
        driver.store(request, blocks)
        driver.settle()
        driver.finish(request)
    assert rows.value(semconv.TRANSFER_IO, **CASCADE, timing="engine_report") == 8 * CHUNK_BYTES
    assert rows.value(semconv.RESIDENT_BLOCKS, tier="host", view="held") == 8
    assert rows.value(semconv.LIMIT, tier="host", pool="kv") == 2 * CAPACITY * TOKENS


def test_transfers_between_device_and_host_are_timed_by_their_own_events(
    make: Callable[..., ManagerDriver], rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T4: vLLM takes events from a pool and gives them back; each transfer has its own time, in its own bucket."""
    store = {"source": "device", "destination": "host"}
    driver = make(spec_class=CpuTieringSpec)
    worker = Worker(driver)
    request = driver.request()
    results = []
    for job, seconds in enumerate((0.003, 0.2, 0.02)):
        monkeypatch.setattr("examples.vllm_cpu.cpu_offload_spec.copy_seconds", lambda seconds=seconds: seconds)
        pending = driver.begin_store(request, [job])
        assert pending is not None
        worker.submit_store(job, [job], pending.output.store_spec)
        assert rows.value(semconv.TRANSFER_ACTIVE, **store) == 1
        worker.wait([job])
        results += worker.get_finished()
        driver.complete_store(pending)
    driver.settle()
    driver.finish(request)
    assert rows.value(semconv.TRANSFER_ACTIVE, **store) == 0
    assert rows.value(semconv.TRANSFER_OPERATIONS, **store) == 3
    moved = rows.value(semconv.TRANSFER_IO, **store, timing="device_event")
    assert moved == sum(result.transfer_size for result in results) == 3 * CHUNK_BYTES
    times = [result.transfer_time for result in results]
    assert times == pytest.approx([0.003, 0.2, 0.02], rel=0.5)
    assert_samples(rows.histogram(semconv.TRANSFER_DURATION, **store, timing="device_event"), times)
    worker.close()


def test_an_emptied_tier_is_told_before_the_next_step(make: Callable[..., ManagerDriver], rows: Rows) -> None:
    driver = make()
    request = driver.request()
    driver.store(request, range(4))
    driver.settle()
    driver.finish(request)
    assert rows.value(semconv.RESIDENT_BLOCKS, tier="host", view="held") == 4
    driver.reset()
    assert_equals_recount(rows, driver.recount(), tokens=TOKENS)
    assert rows.value(semconv.RESIDENT_BLOCKS, tier="host", view="held") == 0


def test_rows_end_with_their_manager(instrumented: Instrumented, tmp_path: Path) -> None:
    """A manager that is dropped with a transfer under way leaves nothing behind that the next one would inherit."""
    rows = instrumented.rows
    for turn in range(3):
        driver = ManagerDriver(make_config(CAPACITY, [fs_tier(tmp_path / str(turn))]))
        request = driver.request()
        assert rows.value(semconv.TRANSFER_ACTIVE, **CASCADE) == 0
        driver.store(request, range(4))
        driver.drain()
        assert rows.value(semconv.TRANSFER_ACTIVE, **CASCADE) == 1
        driver.close()
        del driver, request
        gc.collect()
        assert rows.values(semconv.TRANSFER_ACTIVE) == {}
        assert rows.values(semconv.RESIDENT_BLOCKS) == {}
        assert rows.values(semconv.USAGE) == {}


def test_a_tier_that_was_not_there_when_its_manager_was_built_silences_no_other(
    make: Callable[..., ManagerDriver], rows: Rows
) -> None:
    driver = make()
    values = {"vllm:kv_offload_tiering_read_bytes": {("2:fs",): 7, ("1:fs",): 5}}
    for _ in range(2):
        driver.manager._kvcache_otel.take(values)
    assert rows.value(semconv.TRANSFER_IO, **PROMOTION, timing="engine_report") == 10
    assert rows.value(semconv.ACCOUNTING_ERRORS, reason="missing_row") == 1
    rows.recorder.reset()  # That was on purpose.


def _device(blocks: int, *, events: bool = False) -> tuple[SimpleNamespace, Any]:
    """vLLM's own block pool; of the scheduler around it, only what the adapter reads is there."""
    from vllm.v1.core.block_pool import BlockPool

    pool = BlockPool(num_gpu_blocks=blocks, enable_caching=True, hash_block_size=TOKENS, enable_kv_cache_events=events)
    scheduler = SimpleNamespace(
        connector=None,
        block_size=TOKENS,
        kv_cache_manager=SimpleNamespace(block_pool=pool),
        kv_cache_config=SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=None)]),
        vllm_config=SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_index=0)),
    )
    return scheduler, pool


def test_an_emptied_device_is_told_before_the_next_step(instrumented: Instrumented, rows: Rows) -> None:
    from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

    scheduler, pool = _device(blocks=9)
    instrumented.adapter.scheduler_built(None, scheduler)
    blocks = pool.get_new_blocks(4)
    for number, block in enumerate(blocks[:3]):
        name = make_block_hash_with_group_id(b"block %d" % number, 0)
        pool._insert_block_hash(name, block, num_tokens=TOKENS)
    instrumented.adapter.step_done(None, scheduler)
    where = {"tier": "device", "pool": "kv"}
    assert rows.value(semconv.USAGE, **where, state="used") == 4 * TOKENS
    assert rows.value(semconv.USAGE, **where, state="free") == 4 * TOKENS
    assert rows.value(semconv.RESIDENT_BLOCKS, tier="device", view="held") == 3

    request = SimpleNamespace(num_preemptions=0, prefill_stats=None, num_prompt_tokens=100)
    for hits in (64, 0):  # Admitted a second time because its load failed.
        instrumented.adapter.request_admitted(None, scheduler.kv_cache_manager, request, hits)
    assert rows.value(semconv.LOOKUP_TOKENS, tier="device") == 64
    assert rows.value(semconv.LOOKUP_TOKENS, tier="none") == 36

    pool.free_blocks(blocks)
    assert pool.reset_prefix_cache()
    assert rows.value(semconv.RESIDENT_BLOCKS, tier="device", view="held") == 0
    assert rows.value(semconv.USAGE, **where, state="free") == rows.value(semconv.LIMIT, **where) == 8 * TOKENS


def test_device_evictions_equal_the_removals_that_vllm_publishes(instrumented: Instrumented, rows: Rows) -> None:
    """C9, with statistics off: what was never cached is handed out without a sample; what was is one eviction."""
    from vllm.distributed.kv_events import BlockRemoved
    from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

    scheduler, pool = _device(blocks=33, events=True)
    instrumented.adapter.scheduler_built(None, scheduler)
    where = {"tier": "device", "pool": "kv"}
    for _ in range(100):
        pool.free_blocks(pool.get_new_blocks(8))
    assert rows.value(semconv.EVICTION_TOKENS, **where) == 0

    rng, removed = random.Random(9), 0
    for turn in range(300):
        blocks = pool.get_new_blocks(rng.randint(1, 8))
        for number, block in enumerate(blocks):
            if rng.random() < 0.5:
                name = make_block_hash_with_group_id(b"block %d %d" % (turn, number), 0)
                pool._insert_block_hash(name, block, num_tokens=TOKENS)
        pool.free_blocks(blocks)
        removed += sum(len(event.block_hashes) for event in pool.take_events() if isinstance(event, BlockRemoved))
        assert rows.value(semconv.EVICTION_TOKENS, **where) == removed * TOKENS
    assert removed > 100


def test_detached_vllm_has_its_own_functions_back(
    make: Callable[..., ManagerDriver], instrumented: Instrumented
) -> None:
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

    assert hasattr(CPUOffloadingManager.prepare_store, "__wrapped__")
    own = CPUOffloadingManager.prepare_store.__wrapped__
    driver = make()
    instrumented.hooks.detach()
    assert CPUOffloadingManager.prepare_store is own
    request = driver.request()
    driver.store(request, range(4))
    driver.settle()
    driver.finish(request)
    assert instrumented.rows.total(semconv.TRANSFER_OPERATIONS) == 0
