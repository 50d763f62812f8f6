"""The adapter on SGLang's real cache, with either tree core: every number has an oracle."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import pytest

from tests.conftest import require

require("sglang")

from kvcache_otel import semconv  # noqa: E402
from tests.engines.sglang import cpu  # noqa: E402
from tests.engines.sglang.cache_driver import PAGE, CacheDriver  # noqa: E402
from tests.engines.sglang.expected import (  # noqa: E402
    BACKUP,
    LOAD_BACK,
    NAME,
    READ,
    STORAGE,
    WRITE,
    assert_closes,
    assert_equals_recount,
    assert_equals_sglang,
    assert_published_is_held,
    assert_settled,
)
from tests.engines.sglang.oracle import pools  # noqa: E402
from tests.engines.sglang.walk import random_walk  # noqa: E402
from tests.engines.sglang.watched import Watched  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvcache_otel.spec import MetricSpec
    from tests.engines.sglang.conftest import Instrumented
    from tests.support.rows import Rows

pytestmark = pytest.mark.engine

OPERATIONS = 2000

A = list(range(1000, 1000 + 4 * PAGE))
B = list(range(2000, 2000 + 4 * PAGE))
UNKNOWN = list(range(9000, 9000 + 4 * PAGE))


@pytest.fixture
def timed() -> Iterator[None]:
    """Copies between device and host have an event pair with a clock, a fake of what a GPU has."""
    cpu.timed_events(True)
    yield
    cpu.timed_events(False)


def _situations(driver: CacheDriver) -> None:
    """Brings a cache of 64 tokens on the device into every situation that its tiers allow."""
    driver.insert(A)
    driver.settle()
    driver.insert([*A[: 2 * PAGE], *B[: 2 * PAGE]])  # splits A
    driver.settle()
    driver.evict(1000)
    driver.settle()
    if driver.cache.cache_controller is None:
        return
    driver.load_back(A)
    driver.settle()
    driver.check(A)
    driver.insert(B)
    driver.evict(1000)  # What is backed up now, and what was not before, makes room.
    driver.settle()
    driver.evict_host(1000)
    hold = driver.cache.host_pool_group.alloc(pools(driver).host["kv"].total - pools(driver).host["kv"].used)
    driver.insert(UNKNOWN)
    driver.step()
    if driver.is_cache_mode:
        driver.evict(1000)  # There is no room for a copy.
    driver.cache.host_pool_group.free(hold)
    driver.settle()
    driver.reset()
    driver.insert(A)
    driver.settle()


def _storage_situations(driver: CacheDriver) -> None:
    """Brings a cache with storage into the situations of a prefetch."""
    driver.insert(A)
    driver.settle()
    driver.evict(1000)
    driver.evict_host(1000)
    driver.settle()
    driver.prefetch([*A, 7, 8, 9], "all")  # Storage has all of it.
    driver.settle()
    driver.prefetch([*UNKNOWN, 7, 8, 9], "none")
    driver.evict(1000)
    driver.evict_host(1000)
    driver.settle()
    driver.prefetch([*A, *UNKNOWN, 7, 8, 9], "a part")
    driver.evict(1000)
    driver.evict_host(1000)
    driver.settle()
    driver.abort(driver.begin_prefetch([*A, 1, 2, 3], "aborted"))
    driver.settle()


@pytest.mark.usefixtures("timed")
@pytest.mark.parametrize("write_policy", ["write_through", "write_back"])
def test_every_number_equals_sglangs(
    make: Callable[..., CacheDriver], instrumented: Instrumented, core: str, write_policy: str
) -> None:
    driver = make(core=core, write_policy=write_policy, device_tokens=64, host_ratio=1.0)
    _situations(driver)
    rows = instrumented.rows
    assert_equals_sglang(rows, driver)
    assert_equals_recount(rows, driver)
    assert_settled(rows, driver)
    for route in (BACKUP, LOAD_BACK):
        assert rows.value(semconv.TRANSFER_TOKENS, **route, pool="kv")
        assert rows.total(semconv.TRANSFER_IO, **route, timing="device_event")
        assert _samples(rows, semconv.TRANSFER_QUEUE_DURATION, **route)
    assert rows.value(semconv.EVICTION_TOKENS, tier="host", pool="kv")
    assert rows.total(semconv.DROPPED_TOKENS)
    assert rows.value(semconv.ALLOCATION_FAILURES, tier="host", reason="store")


@pytest.mark.usefixtures("timed")
@pytest.mark.parametrize("write_policy", ["write_through", "write_back"])
def test_both_cores_give_the_same_numbers(write_policy: str, tmp_path: Path) -> None:
    from tests.engines.sglang.conftest import Instrumented

    numbers: list[dict[str, Any]] = []
    for core in ("python", "rust"):
        instrumented = Instrumented()
        instrumented.hooks.attach()
        try:
            with CacheDriver(core=core, write_policy=write_policy, storage_dir=tmp_path / core) as driver:
                for _ in random_walk(driver, seed=5, operations=150):
                    pass
                numbers.append(_numbers(instrumented.rows))
            instrumented.assert_sound()
        finally:
            instrumented.hooks.detach()
    assert numbers[0] == numbers[1]
    assert len(numbers[0]) > 40


@pytest.mark.usefixtures("timed")
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("write_policy", ["write_through", "write_back"])
def test_a_random_walk(
    make: Callable[..., CacheDriver], instrumented: Instrumented, core: str, write_policy: str, seed: int
) -> None:
    driver = make(core=core, write_policy=write_policy)
    watched = Watched(driver, lambda: instrumented.rows)
    for step, operation in enumerate(random_walk(driver, seed, OPERATIONS)):
        rows = instrumented.rows
        try:
            assert_equals_recount(rows, driver)
            assert_settled(rows, driver)
            assert_published_is_held(rows)
        except AssertionError as error:
            raise AssertionError(f"after step {step}, {operation}: {error}") from error
    assert_equals_sglang(instrumented.rows, driver, retracted=watched.retracted)
    assert all(watched.retracted)


@pytest.mark.usefixtures("timed")
@pytest.mark.parametrize("prefetch_policy", ["wait_complete", "best_effort", "timeout"])
def test_a_random_walk_with_storage_on_its_threads(
    make: Callable[..., CacheDriver], instrumented: Instrumented, core: str, prefetch_policy: str, tmp_path: Path
) -> None:
    driver = make(core=core, storage_dir=tmp_path, prefetch_policy=prefetch_policy)
    watched = Watched(driver, lambda: instrumented.rows)
    for step, operation in enumerate(random_walk(driver, 3, 400)):
        rows = instrumented.rows
        try:
            assert_closes(rows)
            assert_equals_recount(rows, driver)
            if not driver.in_flight():
                assert_published_is_held(rows)
        except AssertionError as error:
            raise AssertionError(f"after step {step}, {operation}: {error}") from error
    rows = instrumented.rows
    assert_equals_sglang(rows, driver, retracted=watched.retracted)
    assert rows.value(semconv.PREFETCH_OUTSTANDING_TOKENS, **STORAGE) == 0
    if prefetch_policy != "best_effort":  # With that one a request is admitted before storage has answered, as a rule.
        assert rows.value(semconv.PREFETCH_FULFILLED_TOKENS, **STORAGE)


@pytest.mark.usefixtures("timed")
def test_storage(make: Callable[..., CacheDriver], instrumented: Instrumented, core: str, tmp_path: Path) -> None:
    driver = make(core=core, storage_dir=tmp_path)
    _storage_situations(driver)
    rows = instrumented.rows
    assert_equals_sglang(rows, driver)
    assert_closes(rows)
    for route in (WRITE, READ):
        tokens = rows.value(semconv.TRANSFER_TOKENS, **route, pool="kv")
        assert tokens
        token_bytes = driver.cache.host_pool_group.anchor_entry.host_pool.size_per_token
        moved = rows.value(semconv.TRANSFER_IO, **route, **NAME, timing="wall_clock")
        assert moved == tokens * token_bytes
        operations = rows.value(semconv.TRANSFER_OPERATIONS, **route, **NAME)
        assert operations == rows.total(semconv.TRANSFER_OPERATIONS, **route)
        assert _samples(rows, semconv.TRANSFER_DURATION, **route, **NAME, timing="wall_clock") == operations
        assert _samples(rows, semconv.TRANSFER_QUEUE_DURATION, **route, **NAME) == operations
        assert rows.value(semconv.TRANSFER_ACTIVE, **route, **NAME) == 0
    # A file for every block: what was written is what is there.
    assert rows.value(semconv.TRANSFER_TOKENS, **WRITE, pool="kv") == driver.stored() * PAGE


@pytest.mark.usefixtures("timed")
def test_the_host_as_a_buffer_only(
    make: Callable[..., CacheDriver], instrumented: Instrumented, core: str, tmp_path: Path
) -> None:
    driver = make(core=core, storage_dir=tmp_path, host_memory_mode="buffer_only", host_ratio=4.0)
    watched = Watched(driver, lambda: instrumented.rows)
    for _ in random_walk(driver, seed=7, operations=200):
        assert_closes(instrumented.rows)
        assert_equals_recount(instrumented.rows, driver)
    rows = instrumented.rows
    assert_equals_sglang(rows, driver, retracted=watched.retracted)
    assert rows.value(semconv.RESIDENT_BLOCKS, tier="host", view="held") == 0
    assert rows.value(semconv.TRANSFER_TOKENS, **WRITE, pool="kv")
    assert rows.value(semconv.TRANSFER_TOKENS, **READ, pool="kv")


@pytest.mark.parametrize("host_memory_mode", ["cache", "buffer_only"])
def test_nothing_depends_on_sglangs_own_metrics(host_memory_mode: str, core: str, tmp_path: Path) -> None:
    from tests.engines.sglang.conftest import Instrumented

    numbers: list[dict[str, Any]] = []
    for metrics in (True, False):
        instrumented = Instrumented()
        instrumented.hooks.attach()
        try:
            with CacheDriver(
                core=core, storage_dir=tmp_path / str(metrics), metrics=metrics, host_memory_mode=host_memory_mode
            ) as driver:
                for _ in random_walk(driver, seed=11, operations=150):
                    assert_closes(instrumented.rows)
                numbers.append(_numbers(instrumented.rows))
            instrumented.assert_sound()
        finally:
            instrumented.hooks.detach()
    assert numbers[0] == numbers[1]
    assert numbers[0]["kvcache.prefetch.fulfilled.tokens kvcache.tier=disk kvcache.tier.name=file"]


def test_prompt_tokens_by_the_tier_that_served_them(
    make: Callable[..., CacheDriver], instrumented: Instrumented, core: str, tmp_path: Path
) -> None:
    driver = make(core=core, storage_dir=tmp_path)
    driver.insert(A)
    driver.settle()
    driver.evict(1000)
    driver.evict_host(1000)
    driver.settle()
    stats = [driver.prefetch([*A, 1, 2, 3], "from storage").stats, driver.admit([*A, 4], "from device")]
    driver.settle()
    driver.evict(1000)
    stats.append(driver.admit([*A, 5, 6], "from host"))
    stats += driver.admit_in_chunks([*UNKNOWN, 7], "computed in chunks", PAGE)
    rows = instrumented.rows
    served = {tier: rows.value(semconv.LOOKUP_TOKENS, tier=tier) for tier in ("device", "host", "disk", "none")}
    assert served == {
        "device": sum(one.log_device_hit_tokens for one in stats),
        "host": sum(one.log_host_hit_tokens for one in stats),
        "disk": sum(one.log_storage_hit_tokens for one in stats),
        "none": sum(one.log_input_tokens - one.reprocessed_log_input_tokens for one in stats),
    }
    assert all(served.values())
    prompts = [len(A) + 3, len(A) + 1, len(A) + 2, len(UNKNOWN) + 1]
    assert sum(served.values()) == sum(prompts)


def test_each_request_of_a_batch_counts_once(make: Callable[..., CacheDriver], instrumented: Instrumented) -> None:
    """SGLang sums over a batch, and the hooks hear of the sum with every request."""
    driver = make()
    driver.admit([*A, 1], "first")
    before = {tier: instrumented.rows.value(semconv.LOOKUP_TOKENS, tier=tier) for tier in ("device", "none")}
    adder = driver._adder(None)
    requests = [driver._request([*A, token], f"request {token}") for token in (2, 3, 4)]
    for request in requests:
        request.init_next_round_input(driver.cache)
        adder.add_one_req(request, has_chunked_req=False, truncation_align_size=None)
    assert len(adder.can_run_list) == len(requests)
    for request in requests:
        driver.cache.unlock(request.lock)
    rows = instrumented.rows
    served = {tier: rows.value(semconv.LOOKUP_TOKENS, tier=tier) - before[tier] for tier in before}
    assert served == {"device": adder.log_device_hit_tokens, "none": adder.log_input_tokens}
    assert served == {"device": 3 * len(A), "none": 3}


def test_retracted_requests_count_once(make: Callable[..., CacheDriver], instrumented: Instrumented) -> None:
    driver = make()
    driver.admit([*A, 1], "first")
    before = instrumented.rows.total(semconv.LOOKUP_TOKENS)
    adder = driver._adder(None)
    request = driver._request([*A, 1], "again")
    request.retracted_stain = True
    request.init_next_round_input(driver.cache)
    adder.add_one_req(request, has_chunked_req=False, truncation_align_size=None)
    driver.cache.unlock(request.lock)
    assert instrumented.rows.total(semconv.LOOKUP_TOKENS) == before == len(A) + 1


@pytest.mark.usefixtures("timed")
def test_copies_of_retracted_requests(make: Callable[..., CacheDriver], instrumented: Instrumented, core: str) -> None:
    driver = make(core=core)
    tokens = list(range(3 * PAGE - 2))
    kept, gone = (driver.retract_backup(tokens, name) for name in ("kept", "gone"))
    assert kept is not None
    assert gone is not None
    driver.retract_restore(kept)
    driver.retract_discard(gone)
    rows = instrumented.rows
    assert_equals_sglang(rows, driver, retracted=(6 * PAGE, 3 * PAGE))
    for route, copies in ((BACKUP, 2), (LOAD_BACK, 1)):
        assert rows.value(semconv.TRANSFER_OPERATIONS, **route) == copies
        assert _samples(rows, semconv.TRANSFER_DURATION, **route, timing="device_event") == copies
        assert not _samples(rows, semconv.TRANSFER_QUEUE_DURATION, **route)
    assert_settled_after(driver, rows)


def assert_settled_after(driver: CacheDriver, rows: Rows) -> None:
    """A step later the pools' rows are right too."""
    driver.step()
    assert_settled(rows, driver)


def test_a_plain_cache_has_a_device_tier_only(
    make: Callable[..., CacheDriver], instrumented: Instrumented, core: str
) -> None:
    driver = make(core=core, hicache=False)
    _situations(driver)
    rows = instrumented.rows
    assert_equals_sglang(rows, driver)
    assert rows.value(semconv.RESIDENT_BLOCKS, tier="device", view="held") == 0
    labels = [dict(key) for spec in semconv.METRICS.values() for key in rows.values(spec)]
    assert all("host" not in one.values() for one in labels if semconv.KVCACHE_EVENT_MEDIUM not in one)
    assert not rows.values(semconv.TRANSFER_OPERATIONS)
    assert not rows.values(semconv.DROPPED_TOKENS)


def test_without_kv_events_nothing_is_published_and_all_is_held(
    make: Callable[..., CacheDriver], instrumented: Instrumented, core: str
) -> None:
    driver = make(core=core, kv_events=False)
    driver.insert(A)
    driver.settle()
    rows = instrumented.rows
    assert_equals_recount(rows, driver)
    assert rows.value(semconv.RESIDENT_BLOCKS, tier="host", view="held") == 4
    assert {dict(key)[semconv.KVCACHE_VIEW] for key in rows.values(semconv.RESIDENT_BLOCKS)} == {"held"}
    assert not rows.values(semconv.EVENTS)
    assert driver.cache._kvcache_otel.published is None


def test_full_hits_and_dropped_refills_publish_nothing(
    make: Callable[..., CacheDriver], instrumented: Instrumented, core: str, tmp_path: Path
) -> None:
    """They are no difference between what is held and what is published."""
    driver = make(core=core, storage_dir=tmp_path)
    driver.insert(A)
    driver.settle()
    events = len(driver.events)
    driver.admit([*A, 1], "full hit")
    driver.evict(1000)
    driver.settle()
    driver.insert([*A, *B])
    driver.settle()
    assert_published_is_held(instrumented.rows)
    driver.evict(1000)
    driver.evict_host(1000)
    driver.settle()
    first, second = (driver.begin_prefetch([*A, *B, 1], name) for name in ("first", "second"))
    while not (driver.is_prefetched(first) and driver.is_prefetched(second)):
        driver.step()
    for request in (first, second):  # The second finds on the host what the first has brought.
        driver.end_prefetch(request)
    driver.settle()
    rows = instrumented.rows
    assert_published_is_held(rows)
    assert_equals_recount(rows, driver)
    assert_closes(rows)
    assert len(driver.events) > events


def _samples(rows: Rows, spec: MetricSpec, **labels: str) -> int:
    histogram = rows.histogram(spec, **labels)
    return 0 if histogram is None else sum(histogram.read()[0])


def _numbers(rows: Rows) -> dict[str, Any]:
    """All that does not depend on a clock."""
    gc.collect()
    numbers: dict[str, Any] = {}
    for spec in semconv.METRICS.values():
        for key, value in rows.values(spec).items():
            numbers[_label(spec, key)] = value
        for row in rows.recorder.histograms(spec):
            key = frozenset(item for item in row.attributes.items() if item[0] not in semconv.IDENTITY_ATTRIBUTES)
            numbers[_label(spec, key)] = sum(row.cell.read()[0])
    return numbers


def _label(spec: MetricSpec, key: frozenset[tuple[str, str | int]]) -> str:
    return " ".join([spec.name, *(f"{name}={value}" for name, value in sorted(key))])
