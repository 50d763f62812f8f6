"""The driver and its witnesses tell the truth by themselves: nothing of ours is measured here."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest

from tests.conftest import require

require("sglang")

from sglang.srt.mem_cache import l2_transfer  # noqa: E402
from sglang.srt.runtime_context import get_parallel  # noqa: E402

from tests.engines.sglang import cpu  # noqa: E402
from tests.engines.sglang.cache_driver import (  # noqa: E402
    CORES,
    PAGE,
    RELEASE,
    TOKEN_BYTES,
    CacheDriver,
    content,
    making_drivers,
)
from tests.engines.sglang.oracle import (  # noqa: E402
    OwnCounters,
    own_counters,
    pending_nodes,
    pools,
    printed,
    recount,
    walk,
)
from tests.engines.sglang.walk import random_walk  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.engines.sglang.oracle import Pools, Recount

pytestmark = pytest.mark.engine

Make = Any
"""Makes drivers, and closes them in the end."""

DEVICE_TOKENS = 128


def since(*release: int) -> pytest.MarkDecorator:
    """Leave a test out where SGLang is older than a release."""
    return pytest.mark.skipif(release > RELEASE, reason=f"needs SGLang {'.'.join(map(str, release))}")


def prompt(number: int, blocks: int = 8) -> list[int]:
    """So many blocks, which share nothing with those of another number."""
    return list(range(number * 1000, number * 1000 + blocks * PAGE))


ANY = [99_999]
"""The rest of a prompt behind its whole blocks."""


@pytest.fixture(params=CORES)
def core(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def make(core: str) -> Iterator[Make]:
    """Makes drivers of a core."""
    with making_drivers(core=core, device_tokens=DEVICE_TOKENS) as make:
        yield make


@pytest.fixture
def timed() -> Iterator[None]:
    """Copies are timed during the test."""
    cpu.timed_events(True)
    try:
        yield
    finally:
        cpu.timed_events(False)


def held(driver: CacheDriver) -> tuple[int, int, int]:
    """Blocks on the device, on the host, and on their way there."""
    counted = recount(driver)
    return counted.device_blocks, counted.host_blocks, counted.pending_blocks


def assert_at_rest(driver: CacheDriver) -> None:
    """Nothing is in flight, and the witnesses agree on what the pools hold."""
    assert driver.in_flight() == {}
    assert_consistent(driver)
    driver.cache.sanity_check()


def assert_consistent(driver: CacheDriver) -> None:
    """The pools hold what the walk over the tree finds, and what retracted requests have."""
    counted, given = recount(driver), pools(driver)
    assert counted.device_blocks * PAGE == given.device_evictable + given.device_protected
    assert counted.device_blocks * PAGE == given.device_total - given.device_free
    if given.host and driver.is_cache_mode:
        blocks = counted.host_blocks + counted.pending_blocks
        assert given.host["kv"].used == blocks * PAGE + driver.retracted_tokens
    if given.host and not driver.is_cache_mode:
        assert counted.host_blocks + counted.pending_blocks == 0


def kinds(driver: CacheDriver, since: int = 0) -> list[tuple[str, int]]:
    """What the events of a driver say, without which blocks."""
    return [(_kind(event), len(getattr(event, "block_hashes", ()))) for event in driver.events[since:]]


def _kind(event: Any) -> str:
    medium = getattr(event, "medium", None)
    name = type(event).__name__
    return name if medium is None else f"{name} {getattr(medium, 'value', medium)}"


# -- the tree


def test_what_is_inserted_is_found(make: Make) -> None:
    driver = make()
    assert driver.insert(prompt(1)) == 32
    assert driver.match(prompt(1))[:2] == (32, 0)
    assert driver.match([*prompt(1, 4), *prompt(2, 4)])[:2] == (16, 0)
    assert driver.match(prompt(2))[:2] == (0, 0)
    assert driver.check(prompt(1)) == 32
    assert held(driver)[0] == 8
    assert recount(driver).nodes == 2, "the match has split the node"


def test_what_is_shared_is_computed_once(make: Make) -> None:
    driver = make()
    driver.insert(prompt(1))
    assert driver.insert([*prompt(1, 4), *prompt(2, 4)]) == 16
    assert driver.insert(prompt(1)) == 0
    driver.settle()
    assert held(driver) == (12, 12, 0)
    assert_at_rest(driver)


def test_an_insertion_makes_room(make: Make) -> None:
    driver = make()
    for number in range(6):
        driver.insert(prompt(number))
        driver.step()
    assert held(driver) == (32, 48, 0)
    assert driver.match(prompt(0))[:2] == (0, 32)
    assert own_counters(driver).evicted_tokens == 64
    assert_at_rest(driver)


def test_a_changed_content_is_noticed(make: Make) -> None:
    driver = make()
    driver.insert(prompt(1))
    slots = driver._path(driver.match(prompt(1)))
    driver._memory.v_buffer[1][slots[5]] += 1
    with pytest.raises(AssertionError, match="something else"):
        driver.check(prompt(1))


def test_the_content_depends_on_all_tokens_before() -> None:
    numbers = content(prompt(1))
    other = content([7, *prompt(1)[1:]])
    assert len(numbers) == 32
    assert not (numbers == other).any()


# -- host


def test_write_through_copies_at_once(make: Make) -> None:
    driver = make()
    driver.insert(prompt(1))
    assert held(driver) == (8, 0, 8), "the copy is not complete"
    assert_consistent(driver)
    driver.step()
    assert held(driver) == (8, 8, 0)
    counters = own_counters(driver)
    assert counters.backup_tokens == {"kv": 32}
    assert counters.backup_bytes == 32 * TOKEN_BYTES
    assert kinds(driver)[-2:] == [("BlockStored GPU", 8), ("BlockStored CPU_PINNED", 8)]
    assert_at_rest(driver)


def test_a_node_is_split_while_it_is_copied(make: Make) -> None:
    driver = make()
    driver.insert(prompt(1))
    driver.insert([*prompt(1, 4), *prompt(2, 4)])
    assert held(driver) == (12, 0, 12)
    driver.step()
    assert held(driver) == (12, 12, 0)
    assert_at_rest(driver)


def test_write_through_selective_waits_for_a_second_use(make: Make) -> None:
    driver = make(write_policy="write_through_selective")
    driver.insert(prompt(1))
    driver.settle()
    assert held(driver) == (8, 0, 0)
    driver.insert(prompt(1))
    driver.settle()
    assert held(driver) == (8, 8, 0)
    assert_at_rest(driver)


def test_write_back_copies_what_is_evicted(make: Make) -> None:
    driver = make(write_policy="write_back")
    driver.insert(prompt(1))
    driver.settle()
    assert held(driver) == (8, 0, 0)
    assert driver.evict(32) == 32
    assert held(driver) == (0, 8, 0)
    assert own_counters(driver).backup_tokens == {"kv": 32}
    assert_at_rest(driver)


@since(0, 5, 20)
def test_write_back_drops_what_the_host_has_no_room_for(make: Make) -> None:
    driver = make(write_policy="write_back", host_ratio=0.25)
    driver.insert(prompt(1))
    driver.evict(32)
    lock = driver.cache.inc_host_lock_ref(driver.match(prompt(1)).result.best_match_node)
    driver.insert(prompt(2))
    assert driver.evict(32) == 32
    driver.cache.dec_host_lock_ref(lock.node_id, lock.to_dec_params())
    assert held(driver) == (0, 8, 0)
    assert own_counters(driver).dropped_tokens == {"host_pressure": 32}
    assert_at_rest(driver)


@since(0, 5, 21)
def test_write_through_drops_what_the_host_had_no_room_for(make: Make) -> None:
    driver = make(host_ratio=0.25)
    retracted = driver.retract_backup(prompt(9), "retracted")
    assert retracted is not None
    driver.insert(prompt(1))
    driver.settle()
    assert held(driver) == (8, 0, 0)
    assert driver.evict(32) == 32
    assert held(driver) == (0, 0, 0)
    assert own_counters(driver).dropped_tokens == {"write_through_unbacked_eviction": 32}


def test_eviction_leaves_the_host(make: Make) -> None:
    driver = make()
    driver.insert(prompt(1))
    driver.settle()
    assert driver.evict(8) == 32, "a node goes as a whole"
    assert held(driver) == (0, 8, 0)
    assert driver.match(prompt(1))[:2] == (0, 32)
    counters = own_counters(driver)
    assert (counters.evicted_tokens, counters.evictions) == (32, 1)
    driver.step()
    assert kinds(driver)[-1] == ("BlockRemoved GPU", 8)
    assert_at_rest(driver)


def test_load_back_brings_the_same(make: Make) -> None:
    driver = make()
    driver.insert(prompt(1))
    driver.settle()
    driver.evict(32)
    # What is loaded goes elsewhere than it was.
    driver.insert(prompt(2, 3))
    assert driver.load_back(prompt(1)) == 32
    assert driver.in_flight()["ongoing_load_back"] == 1
    driver.settle()
    assert held(driver) == (11, 11, 0)
    assert driver.check(prompt(1)) == 32
    counters = own_counters(driver)
    assert counters.load_back_tokens == {"kv": 32}
    assert counters.load_back_bytes == 32 * TOKEN_BYTES
    assert driver.load_back(prompt(1)) == 0
    assert_at_rest(driver)


def test_host_eviction(make: Make) -> None:
    driver = make()
    driver.insert(prompt(1))
    driver.settle()
    driver.evict(32)
    assert driver.evict_host(32) == 32
    driver.step()
    assert kinds(driver)[-1] == ("BlockRemoved CPU_PINNED", 8)
    assert recount(driver).nodes == 0
    assert_at_rest(driver)


def test_a_reset_forgets_everything(make: Make, tmp_path: Path) -> None:
    driver = make(storage_dir=tmp_path)
    driver.insert(prompt(1))
    driver.settle()
    driver.insert(prompt(2))
    driver.evict(32)
    driver.reset()
    assert held(driver) == (0, 0, 0)
    driver.step()
    assert kinds(driver)[-1] == ("AllBlocksCleared", 0)
    assert_at_rest(driver)
    driver.insert(prompt(2))
    driver.settle()
    assert held(driver) == (8, 8, 0)
    assert_at_rest(driver)


def test_a_cache_without_a_host(make: Make) -> None:
    driver = make(hicache=False)
    driver.insert(prompt(1))
    driver.settle()
    assert held(driver) == (8, 0, 0)
    assert pools(driver).host == {}
    assert driver.load_back(prompt(1)) == 0
    stats = driver.admit(prompt(1) + ANY, "request")
    assert (stats.log_device_hit_tokens, stats.log_host_hit_tokens) == (32, 0)
    assert driver.evict(32) == 32
    assert held(driver) == (0, 0, 0)
    driver.insert(prompt(2))
    driver.reset()
    assert_at_rest(driver)


# -- requests


def test_admission_tells_the_tiers_apart(make: Make) -> None:
    driver = make()
    driver.insert(prompt(1))
    driver.settle()
    driver.evict(32)
    driver.insert(prompt(1, 4))
    stats = driver.admit([*prompt(1), *prompt(2, 2), *ANY], "request")
    assert (stats.log_device_hit_tokens, stats.log_host_hit_tokens, stats.log_storage_hit_tokens) == (16, 16, 0)
    assert stats.log_hit_tokens == 32
    driver.settle()
    assert driver.check([*prompt(1), *prompt(2, 2)]) == 40
    assert held(driver) == (10, 10, 0)
    assert_at_rest(driver)


def test_a_prompt_in_chunks(make: Make) -> None:
    driver = make()
    driver.insert(prompt(1, 4))
    batches = driver.admit_in_chunks([*prompt(1, 4), *prompt(2, 8), *ANY], "request", chunk_tokens=16)
    assert [batch.log_hit_tokens for batch in batches] == [16, 0, 0]
    assert [batch.log_input_tokens for batch in batches][:2] == [16, 16]
    driver.settle()
    assert driver.check([*prompt(1, 4), *prompt(2, 8)]) == 48
    assert held(driver) == (12, 12, 0)
    assert_at_rest(driver)


def test_a_request_that_does_not_fit_is_given_up(make: Make) -> None:
    driver = make()
    assert driver.admit(prompt(1, 40), "request") is None
    assert held(driver) == (0, 0, 0)
    assert_at_rest(driver)


@since(0, 5, 21)
def test_a_retracted_request_keeps_what_it_has_on_the_host(make: Make) -> None:
    driver = make()
    driver.insert(prompt(1))
    driver.settle()
    tokens = [*prompt(2, 4), 1, 2, 3]
    retracted = driver.retract_backup(tokens, "request")
    assert driver.retracted_tokens == 20, "it has whole pages"
    assert held(driver) == (8, 8, 0)
    assert_at_rest(driver)
    driver.insert(prompt(3))
    driver.retract_restore(retracted)
    driver.settle()
    assert driver.retracted_tokens == 0
    assert_at_rest(driver)
    assert own_counters(driver).backup_tokens == {"kv": 64}, "SGLang does not count these copies"
    driver.retract_discard(driver.retract_backup(tokens, "another"))
    assert_at_rest(driver)


@since(0, 5, 21)
def test_there_is_no_room_for_a_retracted_request(make: Make) -> None:
    driver = make(host_ratio=0.25)
    assert driver.retract_backup(prompt(1), "request") is not None
    assert driver.retract_backup(prompt(2), "another") is None
    assert_at_rest(driver)


# -- storage


def test_the_storage_gets_what_the_host_gets(make: Make, tmp_path: Path) -> None:
    driver = make(storage_dir=tmp_path)
    driver.insert(prompt(1))
    driver.settle()
    assert driver.stored() == 8
    assert own_counters(driver).stored_tokens == 32
    assert_at_rest(driver)


def empty(driver: CacheDriver) -> None:
    """Have the storage alone keep what there is."""
    driver.settle()
    driver.evict(DEVICE_TOKENS)
    driver.evict_host(4 * DEVICE_TOKENS)
    assert recount(driver).nodes == 0


def test_a_prefetch_brings_what_the_storage_has(make: Make, tmp_path: Path) -> None:
    driver = make(storage_dir=tmp_path)
    driver.insert(prompt(1))
    empty(driver)
    tokens, stats = driver.prefetch([*prompt(1), *prompt(2, 2), *ANY], "request")
    assert tokens == 32
    assert (stats.log_device_hit_tokens, stats.log_host_hit_tokens, stats.log_storage_hit_tokens) == (0, 0, 32)
    driver.settle()
    assert driver.check([*prompt(1), *prompt(2, 2)]) == 40
    assert own_counters(driver).prefetched_tokens == 32
    assert_at_rest(driver)


def test_a_prefetch_of_what_the_storage_does_not_have(make: Make, tmp_path: Path) -> None:
    driver = make(storage_dir=tmp_path)
    assert driver.prefetch(prompt(1) + ANY, "request").tokens == 0
    driver.settle()
    assert own_counters(driver).prefetched_tokens == 0
    assert driver.check(prompt(1)) == 32
    assert_at_rest(driver)


@since(0, 5, 20)
def test_what_became_of_what_the_storage_has(make: Make, tmp_path: Path) -> None:
    driver = make(storage_dir=tmp_path, prefetch_threshold=2 * PAGE)
    driver.insert(prompt(1))
    driver.insert(prompt(2, 1))
    empty(driver)

    request = driver.begin_prefetch(prompt(1) + ANY, "evicted before it was admitted")
    while not driver.is_prefetched(request):
        driver.step()
    assert driver.evict_host(DEVICE_TOKENS) == 32
    assert driver.end_prefetch(request).tokens == 32
    counters = own_counters(driver)
    assert (counters.prefetch_hit_tokens, counters.prefetched_tokens) == (32, 32)
    shortfall = "cache_admission_shortfall" if RELEASE >= (0, 5, 21) else "shrunk"
    assert counters.prefetch_unfulfilled_tokens == {shortfall: 32}

    driver.prefetch([*prompt(2, 1), *prompt(3, 4), *ANY], "too little")
    counters = own_counters(driver)
    assert (counters.prefetch_hit_tokens, counters.prefetched_tokens) == (36, 32)
    assert counters.prefetch_unfulfilled_tokens == {shortfall: 32, "below_threshold": 4}

    empty(driver)
    driver.abort(driver.begin_prefetch(prompt(1) + ANY, "aborted"))
    driver.settle()
    assert_at_rest(driver)


@since(0, 5, 19)
def test_a_storage_comes_and_goes(make: Make, tmp_path: Path) -> None:
    driver = make()
    driver.insert(prompt(1))
    driver.settle()
    driver.attach_storage(tmp_path)
    driver.insert(prompt(2))
    driver.settle()
    assert driver.stored() == 8
    driver.detach_storage()
    driver.insert(prompt(3))
    driver.settle()
    assert driver.stored() == 8
    driver.attach_storage(tmp_path)
    empty(driver)
    assert driver.prefetch(prompt(2) + ANY, "request").tokens == 32
    driver.settle()
    assert own_counters(driver).stored_tokens >= 32
    assert_at_rest(driver)


@since(0, 5, 20)
def test_a_host_that_is_but_a_buffer(make: Make, tmp_path: Path) -> None:
    driver = make(storage_dir=tmp_path, host_memory_mode="buffer_only", host_ratio=4.0)
    driver.insert(prompt(1))
    driver.settle()
    assert driver.stored() == 8
    assert held(driver) == (8, 0, 0)
    assert pools(driver).host["kv"].used == 0
    driver.evict(32)
    assert recount(driver).nodes == 0
    stats = driver.prefetch(prompt(1) + ANY, "request").stats
    assert stats.log_storage_hit_tokens == 32
    driver.settle()
    assert driver.check(prompt(1)) == 32
    counters = own_counters(driver)
    assert (counters.stored_tokens, counters.prefetched_tokens) == (32, 32)
    assert counters.load_back_tokens == {"kv": 32}
    assert_at_rest(driver)


# -- SGLang's metrics and events


def test_metrics_and_events_can_be_off(make: Make) -> None:
    driver = make(metrics=False, kv_events=False)
    driver.insert(prompt(1))
    driver.settle()
    driver.evict(32)
    driver.step()
    assert own_counters(driver) == OwnCounters()
    assert driver.events == []


# -- ranks


def test_drivers_of_several_ranks(make: Make, tmp_path: Path) -> None:
    first = make(ranks=cpu.tensor_parallel(0, 2), storage_dir=tmp_path)
    second = make(ranks=cpu.tensor_parallel(1, 2), storage_dir=tmp_path)
    for driver, blocks in ((first, 8), (second, 4), (first, 8)):
        driver.insert(prompt(1, blocks))
        assert get_parallel().tp_rank == (driver is second)
        driver.settle()
        assert held(driver) == (blocks, blocks, 0)
    assert first.stored() == 12, "each has its own files"
    assert own_counters(first).backup_tokens == {"kv": 32}
    assert own_counters(second).backup_tokens == {"kv": 16}
    assert first.cache.storage_metrics_collector.labels["tp_rank"] == 0
    assert second.cache.storage_metrics_collector.labels["tp_rank"] == 1


RANKS: dict[str, tuple[Callable[[], cpu.Ranks], dict[str, Any], tuple[int, int | None]]] = {
    "single": (cpu.single, {}, (0, None)),
    "tensor parallel": (lambda: cpu.tensor_parallel(3, 4), {"tp_size": 4}, (3, None)),
    "data parallel": (lambda: cpu.data_parallel(1, 2, tp_rank=1, tp_size=2), {"tp_size": 2, "dp_size": 2}, (1, 1)),
    "data-parallel attention": (
        lambda: cpu.attention_data_parallel(3, 4, 2),
        {"tp_size": 4, "dp_size": 2, "enable_dp_attention": True},
        (3, 1),
    ),
    "pipeline parallel": (
        lambda: cpu.pipeline_parallel(1, 2, tp_rank=1, tp_size=2),
        {"tp_size": 2, "pp_size": 2},
        (3, None),
    ),
}
"""By name: our ranks, what SGLang is started with for them, and the world and DP rank that its launcher tells."""


@since(0, 5, 22)
@pytest.mark.parametrize("name", RANKS)
def test_ranks_are_those_that_sglang_derives(name: str) -> None:
    from sglang.srt.runtime_context import SpawnRanks, create_context
    from sglang.srt.server_args import ServerArgs

    ranks, arguments, (world_rank, dp_rank) = RANKS[name]
    server_args = ServerArgs(model_path="dummy", device="cpu", **arguments)
    derived = create_context(
        server_args, role="scheduler", ranks=SpawnRanks(world_rank=world_rank, dp_rank=dp_rank)
    ).parallel
    cpu.set_ranks(**ranks())
    try:
        values = {name: getattr(get_parallel(), name) for name in ranks()}
        assert values == {name: getattr(derived, name) for name in ranks()}
    finally:
        cpu.set_ranks()


@since(0, 5, 22)
def test_contradicting_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="tp_rank"):
        cpu.set_ranks(tp_rank=2, tp_size=2)
    cpu.set_ranks()


# -- copies


@pytest.mark.usefixtures("timed")
def test_copies_are_timed(make: Make) -> None:
    driver = make()
    driver.insert(prompt(1))
    driver.settle()
    driver.evict(32)
    driver.load_back(prompt(1))
    driver.settle()
    counters = own_counters(driver)
    assert (counters.backups, counters.load_backs) == (1, 1)
    assert counters.backup_seconds > 0
    assert counters.load_back_seconds > 0


def test_copies_are_not_timed_on_a_cpu(make: Make) -> None:
    driver = make()
    driver.insert(prompt(1))
    driver.settle()
    counters = own_counters(driver)
    assert (counters.backup_tokens, counters.backups, counters.backup_seconds) == ({"kv": 32}, 0, 0)


@pytest.mark.usefixtures("timed")
def test_a_copy_in_flight_ends_when_it_is_seen_to(make: Make) -> None:
    driver = make()
    with cpu.held_transfers():
        driver.insert(prompt(1))
        driver.step()
        assert held(driver) == (8, 0, 8)
        assert driver.evict(32) == 0, "it is locked"
        assert_consistent(driver)
    driver.step()
    assert held(driver) == (8, 8, 0)
    driver.evict(32)
    with cpu.held_transfers():
        driver.load_back(prompt(1))
        driver.step()
        assert driver.in_flight() == {"ongoing_load_back": 1, "ack_load_queue": 1}
        assert held(driver) == (8, 8, 0)
        assert pools(driver).device_protected == 32
    driver.settle()
    assert_at_rest(driver)


@pytest.mark.usefixtures("timed")
def test_an_event_that_was_not_recorded_has_no_time() -> None:
    start, finish, is_timed = l2_transfer.make_timing_event_pair()
    assert is_timed
    start.record()
    with pytest.raises(RuntimeError, match="not recorded"):
        start.elapsed_time(finish)
    finish.record()
    assert start.elapsed_time(finish) >= 0
    untimed = l2_transfer.device_module.Event()
    untimed.record()
    with pytest.raises(RuntimeError, match="without timing"):
        start.elapsed_time(untimed)


# -- walks

VARIANTS: dict[str, dict[str, Any]] = {
    "write-through": {},
    "write-through, small host": {"host_ratio": 0.5},
    "write-through selective": {"write_policy": "write_through_selective"},
    "write-back": {"write_policy": "write_back", "host_ratio": 1.5},
    "write-back, small host": {"write_policy": "write_back", "host_ratio": 0.5},
    "no host": {"hicache": False},
    "storage": {"storage": True},
    "storage, small host": {"storage": True, "host_ratio": 0.5},
    "buffer": {"storage": True, "host_memory_mode": "buffer_only", "host_ratio": 4.0},
}
"""By name: how a driver is made."""

OPERATIONS = 300


def variant(name: str, tmp_path: Path) -> dict[str, Any]:
    """The arguments of a variant."""
    options = dict(VARIANTS[name])
    if "host_memory_mode" in options and RELEASE < (0, 5, 20):
        pytest.skip("the driver knows no buffer of this release")
    if options.pop("storage", False):
        options["storage_dir"] = tmp_path
    return options


@pytest.mark.parametrize("name", VARIANTS)
def test_the_witnesses_agree_on_a_walk(make: Make, tmp_path: Path, name: str) -> None:
    driver = make(**variant(name, tmp_path))
    for _ in random_walk(driver, seed=1, operations=OPERATIONS):
        if driver.is_cache_mode or not driver.in_flight():
            assert_consistent(driver)
        nodes = walk(driver)
        if driver.core == "rust":
            assert sorted(nodes) == sorted(printed(driver))
        else:
            arena = driver.cache.tree_core._node_arena
            assert len(nodes) == len(arena) - 1
            marked = {node.id for node in nodes if arena[node.id].write_through_pending_id is not None}
            assert marked == pending_nodes(driver)
    assert_at_rest(driver)


def test_the_look_at_the_ids_misses_none_that_came_and_went(make: Make) -> None:
    driver = make()
    for number in range(300):
        driver.insert(prompt(number, 2))
        driver.step()
        driver.evict(DEVICE_TOKENS)
        if number % 50:
            driver.evict_host(4 * DEVICE_TOKENS)
    driver.insert(prompt(1))
    driver.settle()
    assert_at_rest(driver)
    if driver.core == "rust":
        assert sorted(walk(driver)) == sorted(printed(driver))


State = tuple[str, "Recount", "Pools"]


@since(0, 5, 21)
@pytest.mark.parametrize("name", VARIANTS)
def test_both_cores_do_the_same_on_a_walk(tmp_path: Path, name: str) -> None:
    states: dict[str, list[State]] = {}
    events: dict[str, list[Any]] = {}
    counters: dict[str, OwnCounters] = {}
    with making_drivers(device_tokens=DEVICE_TOKENS) as make:
        for core in CORES:
            driver = make(core=core, **variant(name, tmp_path / core))
            states[core] = [
                (operation, _at_rest(driver), pools(driver))
                for operation in random_walk(driver, seed=2, operations=OPERATIONS)
            ]
            events[core] = driver.events
            counters[core] = dataclasses.replace(own_counters(driver), backup_seconds=0, load_back_seconds=0)
    assert states["python"] == states["rust"]
    assert events["python"] == events["rust"]
    assert counters["python"] == counters["rust"]


def _at_rest(driver: CacheDriver) -> Recount:
    """What the tree holds when the storage's threads have done what they can."""
    driver.settle()
    return recount(driver)


def test_a_walk_follows_from_its_seed(make: Make) -> None:
    walks = [list(random_walk(make(), seed=seed, operations=100)) for seed in (3, 3, 4)]
    assert walks[0] == walks[1] != walks[2]
