"""The driver reaches each situation that matters, as vLLM's own statistics and a recount tell it."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from tests.conftest import require

require("vllm")

from examples.vllm_cpu.cpu_offload_spec import CpuTieringSpec, copy_seconds  # noqa: E402
from vllm.v1.kv_offload.base import LookupResult, Medium  # noqa: E402

from tests.engines.vllm.manager_driver import (  # noqa: E402
    CHUNK_BYTES,
    JobKind,
    ManagerDriver,
    Worker,
    backpressure,
    content,
    key,
    making_drivers,
    random_walk,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.engine

HIT, MISS, HIT_PENDING, RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.HIT_PENDING, LookupResult.RETRY
HOST, DISK = "0:primary", "1:fs"
CAPACITY = 8


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., ManagerDriver]]:
    """Makes drivers of a host tier of eight blocks and a file-system tier, and closes them in the end."""
    with making_drivers(tmp_path / "blocks", CAPACITY) as make:
        yield make


@pytest.fixture
def driver(make: Callable[..., ManagerDriver]) -> ManagerDriver:
    return make()


def store_and_settle(driver: ManagerDriver, blocks: range) -> list[bytes]:
    """Store blocks for a request of their own, and wait until they are on disk. Returns the keys that were evicted."""
    request = driver.request()
    output = driver.store(request, blocks)
    driver.finish(request)
    driver.settle()
    assert output is not None
    return list(output.evicted_keys)


def test_store_goes_on_to_disk(driver: ManagerDriver) -> None:
    request = driver.request()
    pending = driver.begin_store(request, range(4))
    assert pending is not None
    assert driver.recount().write_pending == 4
    assert driver.lookup(request, 0) is HIT_PENDING
    driver.complete_store(pending)
    recount = driver.recount()
    assert (recount.referenced, recount.jobs, recount.job_blocks) == (4, {JobKind(DISK, False): 1}, {(DISK, False): 4})
    driver.settle()
    recount = driver.recount()
    assert (recount.evictable, recount.used, recount.free) == (4, 0, CAPACITY - 4)
    assert driver.totals.counter("tiering_write_bytes", DISK) == 4 * CHUNK_BYTES
    assert driver.totals.counter("tiering_write_time", DISK) > 0
    assert driver.totals.histogram("cpu_allocation_size") == [4]
    assert driver.totals.gauge("cpu_cache_usage_perc") == 0
    assert [file.read_bytes() for file in map(driver.block_file, range(4))] == [content(block) for block in range(4)]
    assert len(driver.files()) == 4
    media = Counter((event.medium, event.removed, len(event.keys)) for event in driver.take_events())
    assert media == {(Medium.CPU, False, 4): 1, (Medium.STORAGE, False, 4): 1}


def test_store_whose_copy_fails_leaves_nothing(driver: ManagerDriver) -> None:
    driver.store(driver.request(), range(3), success=False)
    driver.settle()
    assert driver.recount().resident == 0
    assert driver.totals.counter("tiering_write_bytes", DISK) == 0


def test_host_hit(driver: ManagerDriver) -> None:
    store_and_settle(driver, range(4))
    request = driver.request()
    assert driver.resolve(request, [0, 1, 2, 3, 50]) == [HIT] * 4 + [MISS]
    assert driver.load(request, range(4)) == [content(block) for block in range(4)]
    driver.step([request])
    driver.resolve(request, range(4))  # admitted: counts no more
    driver.finish(request)
    driver.step()
    assert driver.totals.counter("tiering_chunk_queries", HOST) == 5
    assert driver.totals.counter("tiering_chunk_hits", HOST) == 4
    assert driver.totals.counter("tiering_chunk_queries", DISK) == 1
    assert driver.totals.counter("tiering_chunk_hits", DISK) == 0
    assert len(driver.totals.histogram("tiering_lookup_async_delay_seconds", DISK)) == 1


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_eviction(make: Callable[..., ManagerDriver], policy: str) -> None:
    driver = make(policy=policy)
    assert store_and_settle(driver, range(CAPACITY)) == []
    reader = driver.request()
    driver.resolve(reader, range(4))
    driver.load(reader, range(4))
    driver.finish(reader)
    # Blocks 0 to 3 were used since, so the others go.
    assert set(store_and_settle(driver, range(100, 104))) == {key(block) for block in range(4, 8)}
    recount = driver.recount()
    assert (recount.evictable, recount.free) == (CAPACITY, 0)
    removed = [event for event in driver.take_events() if event.removed]
    assert [(event.medium, len(event.keys)) for event in removed] == [(Medium.CPU, 4)]


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_promotion(make: Callable[..., ManagerDriver], policy: str) -> None:
    driver = make(policy=policy)
    store_and_settle(driver, range(4))
    store_and_settle(driver, range(10, 10 + CAPACITY))
    request = driver.request()
    driver.queue_promotion(request, range(4))
    recount = driver.recount()
    assert (recount.write_pending, recount.queued_promotions, recount.jobs) == (4, 4, {})
    driver.step()
    assert driver.resolve(request, range(4)) == [HIT] * 4
    assert driver.load(request, range(4)) == [content(block) for block in range(4)]
    driver.finish(request)
    driver.settle()
    assert driver.recount().queued_promotions == 0
    assert driver.totals.counter("tiering_read_bytes", DISK) == 4 * CHUNK_BYTES
    assert driver.totals.counter("tiering_chunk_hits", DISK) == 4
    assert driver.totals.counter("tiering_promotion_job_failures", DISK) == 0


def test_promotion_that_fails_half_way(driver: ManagerDriver) -> None:
    store_and_settle(driver, range(4))
    store_and_settle(driver, range(10, 10 + CAPACITY))
    request = driver.request()
    assert driver.fail_promotion(request, range(4), broken=2) == [HIT, HIT, MISS, MISS]
    driver.finish(request)
    driver.settle()
    assert driver.totals.counter("tiering_promotion_job_failures", DISK) == 1
    assert driver.totals.counter("tiering_read_bytes", DISK) == 2 * CHUNK_BYTES
    assert [driver.is_on_disk(block) for block in range(4)] == [True, True, False, True]
    assert driver.recount().write_pending == 0


def test_promotion_that_fails_altogether(driver: ManagerDriver) -> None:
    store_and_settle(driver, range(2))
    store_and_settle(driver, range(10, 10 + CAPACITY))
    assert driver.fail_promotion(driver.request(), range(2), broken=0) == [MISS, MISS]
    driver.settle()
    assert driver.totals.counter("tiering_promotion_job_failures", DISK) == 1
    assert driver.totals.counter("tiering_read_bytes", DISK) == 0


def test_cascade_that_fails(driver: ManagerDriver) -> None:
    request = driver.request()
    assert driver.fail_cascade(request, [30, 31]) is not None
    driver.finish(request)
    assert driver.totals.counter("tiering_cascade_job_failures", DISK) == 1
    assert driver.totals.counter("tiering_write_bytes", DISK) == 0
    assert driver.recount().evictable == 2
    assert driver.files() == []
    # The way is free again.
    store_and_settle(driver, range(40, 42))
    assert driver.totals.counter("tiering_write_bytes", DISK) == 2 * CHUNK_BYTES


def test_no_room_for_a_store(driver: ManagerDriver) -> None:
    store_and_settle(driver, range(CAPACITY))
    with driver.pin():
        driver.step()
        assert driver.totals.gauge("cpu_cache_usage_perc") == 1
        assert driver.totals.gauge("cpu_cache_read_usage_perc") == 1
        assert driver.recount().referenced == CAPACITY
        assert driver.store(driver.request(), [100]) is None
    assert driver.recount().referenced == 0
    assert driver.store(driver.request(), [100]) is not None


def test_no_room_for_a_promotion(driver: ManagerDriver) -> None:
    store_and_settle(driver, range(2))
    store_and_settle(driver, range(10, 10 + CAPACITY))
    with driver.pin():
        assert driver.resolve(driver.request(), [0, 1]) == [MISS, MISS]
    driver.step()
    assert driver.totals.counter("tiering_promotion_allocation_failures") == 2
    assert driver.totals.counter("tiering_chunk_hits", DISK) == 2
    assert driver.totals.counter("tiering_read_bytes", DISK) == 0


def test_backpressure(make: Callable[..., ManagerDriver]) -> None:
    driver = make(fs={"backpressure": backpressure()})
    for first in range(0, 10, 2):
        store_and_settle(driver, range(first, first + 2))
    assert driver.totals.counter("tiering_write_bytes", DISK) == 4 * CHUNK_BYTES
    assert driver.totals.counter("tiering_backpressure_stores_dropped", DISK) == 3
    assert driver.totals.counter("tiering_backpressure_blocks_dropped", DISK) == 6
    assert (driver.totals.gauge("tiering_backpressure_store_latency_ema", DISK) or 0) > 0
    driver.reset()
    store_and_settle(driver, range(20, 22))
    assert driver.totals.counter("tiering_write_bytes", DISK) == 6 * CHUNK_BYTES


def test_reset_empties_the_host_and_keeps_the_disk(driver: ManagerDriver) -> None:
    request = driver.request()
    driver.store(request, range(4))
    driver.begin_store(request, range(4, 6))
    driver.pin([0])
    driver.reset()
    assert driver.recount().free == CAPACITY
    assert len(driver.files()) == 4
    driver.step()
    assert driver.totals.gauge("cpu_cache_usage_perc") == 0
    reader = driver.request()
    assert driver.resolve(reader, range(4)) == [HIT] * 4
    driver.settle()
    assert driver.totals.counter("tiering_read_bytes", DISK) == 4 * CHUNK_BYTES


def test_real_worker_there_and_back(make: Callable[..., ManagerDriver]) -> None:
    driver = make(spec_class=CpuTieringSpec)
    worker = Worker(driver)
    for block in range(4):
        worker.write(block, 10 + block)

    request = driver.request()
    output = driver.manager.prepare_store([key(block) for block in range(4)], request)
    assert output is not None
    assert worker.submit_store(0, range(4), output.store_spec)
    assert worker.get_finished() == []
    worker.wait([0])
    (stored,) = worker.get_finished()
    assert (stored.job_id, stored.success, stored.transfer_size) == (0, True, 4 * CHUNK_BYTES)
    assert stored.transfer_time is not None
    assert stored.transfer_time >= copy_seconds()
    driver.manager.complete_store(output.keys_to_store, request)
    driver.settle()

    store_and_settle(driver, range(300, 300 + CAPACITY))  # out of the host tier
    assert driver.resolve(request, range(4)) == [HIT] * 4
    assert worker.submit_load(1, driver.manager.prepare_load([key(block) for block in range(4)], request), range(8, 12))
    worker.wait([1])
    (loaded,) = worker.get_finished()
    assert (loaded.job_id, loaded.success, loaded.transfer_size) == (1, True, 4 * CHUNK_BYTES)
    driver.manager.complete_load([key(block) for block in range(4)], request)
    assert [worker.read(block) for block in range(8, 12)] == [10, 11, 12, 13]
    driver.settle()
    assert driver.totals.counter("tiering_read_bytes", DISK) == 4 * CHUNK_BYTES
    worker.close()


@pytest.mark.parametrize("policy", ["lru", "arc"])
@pytest.mark.parametrize("pressed", [False, True], ids=["free", "pressed"])
@pytest.mark.parametrize("seed", range(3))
def test_random_walk_visits_everything(
    make: Callable[..., ManagerDriver], policy: str, pressed: bool, seed: int
) -> None:
    driver = make(policy=policy, fs={"backpressure": backpressure()} if pressed else {})
    checks = 0

    def check() -> None:
        nonlocal checks
        checks += 1
        recount = driver.recount()
        assert recount.used == round((driver.totals.gauge("cpu_cache_usage_perc") or 0) * CAPACITY)
        assert recount.write_pending == round((driver.totals.gauge("cpu_cache_write_usage_perc") or 0) * CAPACITY)
        for name, is_promotion in (("promotion", True), ("cascade", False)):
            jobs = recount.jobs.get(JobKind(DISK, is_promotion), 0)
            assert jobs == driver.totals.gauge(f"tiering_active_{name}_jobs", DISK)

    done = random_walk(driver, random.Random(seed), 250, check)
    assert checks == 251
    # Under back-pressure little reaches the disk, so that what needs blocks there may not be possible.
    possible = 15 if not pressed else 13
    assert len(done) >= possible, done
    assert driver.recount().used == 0
    assert not driver.recount().jobs
    if not pressed:
        for name in ("promotion_job_failures", "cascade_job_failures", "read_bytes", "write_bytes"):
            assert driver.totals.counter(f"tiering_{name}", DISK) > 0, name
        assert driver.totals.counter("tiering_promotion_allocation_failures") > 0
    else:
        assert driver.totals.counter("tiering_backpressure_blocks_dropped", DISK) > 0
