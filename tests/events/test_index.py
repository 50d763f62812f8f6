"""What was received adds up, by worker, rank and tier, as each engine means it; hostile publishers hurt no other."""

from __future__ import annotations

import gc
import logging
import random
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache_otel import semconv
from kvcache_otel.events import index as index_module
from kvcache_otel.events import room as room_module
from kvcache_otel.events import worker as worker_module
from kvcache_otel.events.counts import CELLS, KINDS, MEDIA
from kvcache_otel.events.index import BlockIndex, series
from kvcache_otel.events.owner import Owner
from kvcache_otel.events.worker import MORE, MOST_RANKS, OTHER, Worker
from kvcache_otel.identity import Identity
from kvcache_otel.record.labels import LONGEST
from kvcache_otel.record.probe import CacheProbe
from kvcache_otel.record.recorder import Recorder
from tests.events.payloads import CLEARED, batch, encode, removed, removed_array, stored, stored_array
from tests.events.test_wire import mutated, payloads

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvcache_otel.events.wire import Batch
    from kvcache_otel.spec import MetricSpec

IDENTITY = Identity("custom", "TestIndex")
WORKER, RANK, TIER = semconv.KVCACHE_WORKER, semconv.KVCACHE_RANK_DP, semconv.KVCACHE_TIER
TYPE, MEDIUM, REASON = semconv.KVCACHE_EVENT_TYPE, semconv.KVCACHE_EVENT_MEDIUM, semconv.KVCACHE_REASON
ABOUT_WORKERS = [spec for spec in semconv.METRICS.values() if WORKER in spec.attributes]


class Received:
    """An index, and what its recorder has been told."""

    def __init__(self, owners: int = 40) -> None:
        self.now = 0.0
        self.recorder = Recorder(IDENTITY, series_limit=series(owners))
        self.index = BlockIndex(self.recorder, clock=lambda: self.now)

    def rows(self, spec: MetricSpec, *keys: str) -> dict[Any, int | float]:
        """The rows of a metric by some labels, which must be all that they have."""
        found: dict[Any, int | float] = {}
        for point in self.recorder.points(spec):
            labels = dict(point.attributes)
            assert labels.pop(semconv.KVCACHE_VIEW, "received") == "received"
            key = tuple(labels.pop(key) for key in keys)
            assert labels == {}
            found[key[0] if len(keys) == 1 else key] = point.value
        return found

    @property
    def resident(self) -> dict[tuple[str, int, str], int | float]:
        return self.rows(semconv.RESIDENT_BLOCKS, WORKER, RANK, TIER)

    def cells(self, spec: MetricSpec) -> dict[tuple[str, int, str, str], int | float]:
        return {key: value for key, value in self.rows(spec, WORKER, RANK, TYPE, MEDIUM).items() if value}

    @property
    def errors(self) -> dict[str, int | float]:
        points = self.recorder.points(semconv.ACCOUNTING_ERRORS)
        return {str(point.attributes[REASON]): point.value for point in points if point.value}

    @property
    def failures(self) -> dict[tuple[str, str], int | float]:
        return {key: value for key, value in self.rows(semconv.EVENT_DECODE_FAILURES, WORKER, REASON).items() if value}


class One:
    """An index with one worker, which speaks for rank 0."""

    def __init__(self, engine: str, **options: Any) -> None:
        self.all = Received()
        self.worker = self.all.index.add("w", engine=engine, **options)

    def send(self, *events: Any) -> Batch | None:
        return self.worker.receive(batch(*events))

    @property
    def resident(self) -> dict[str, int | float]:
        return {where: value for (_, _, where), value in self.all.resident.items()}

    @property
    def errors(self) -> dict[str, int | float]:
        return self.all.errors


@pytest.fixture
def received() -> Received:
    return Received()


@pytest.fixture(params=["vllm", "sglang", "auto"])
def one(request: pytest.FixtureRequest) -> One:
    return One(request.param)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="kvcache_otel.events")
    return caplog


# ------------------------------------------------------------------------------------------- what is resident


@pytest.mark.parametrize("hash_", [7, -7, 2**63, bytes(32)])
def test_e1_vllm_announces_each_copy(hash_: Any) -> None:
    one = One("vllm")
    one.send(stored([hash_]), stored([hash_]))
    assert one.resident == {"device": 1}, "distinct blocks"
    one.send(removed([hash_]))
    assert one.resident == {"device": 1}
    one.send(removed([hash_]))
    assert (one.resident, one.errors) == ({"device": 0}, {})


@pytest.mark.parametrize("hash_", [7, -7, 2**63, bytes(32)])
def test_e2_repeated_store_is_idempotent_for_sglang(hash_: Any) -> None:
    one = One("sglang")
    one.send(stored([hash_]), stored([hash_]))
    one.send(removed([hash_]))
    assert (one.resident, one.errors) == ({"device": 0}, {})


def test_e3_removed_and_never_stored(one: One) -> None:
    one.send(removed([7]))
    assert (one.resident, one.errors) == ({"device": 0}, {"unknown_remove": 1})
    one.send(stored([1, 2], "CPU"), removed([1, 3, 4], "CPU"))
    assert (one.resident, one.errors) == ({"device": 0, "host": 1}, {"unknown_remove": 3})


def test_e4_removal_from_one_tier_leaves_the_other(one: One) -> None:
    one.send(stored([7], "CPU"), removed([7], "GPU"))
    assert (one.resident, one.errors) == ({"device": 0, "host": 1}, {"unknown_remove": 1})


@pytest.mark.parametrize("untagged", [removed([7], None), {"type": "BlockRemoved", "block_hashes": [7]}])
def test_e4_untagged_removal_clears_every_tier_of_that_owner(one: One, untagged: Any) -> None:
    everywhere = ("GPU", "GPU", "CPU", "FS", "OBJ", "NVLINK_PEER", None)
    one.send(*(stored([7, 8], medium) for medium in everywhere))
    one.worker.receive(batch(stored([7, 8]), rank=1))
    one.send(untagged)
    left = {"device": 1, "host": 1, "disk": 1, "external": 1, "unknown": 2}
    assert one.all.resident == {("w", 0, where): value for where, value in left.items()} | {("w", 1, "device"): 2}
    assert one.errors == {}
    one.send(untagged)
    assert one.errors == {"unknown_remove": 1}


def test_e12_media() -> None:
    one = One("auto")
    table: dict[Any, str] = {
        None: "untagged",
        **dict.fromkeys(("GPU", "gpu", "cuda:0"), "device"),
        **dict.fromkeys(("CPU", "CPU_PINNED", "CPU_TIER1"), "host"),
        **dict.fromkeys(("DISK", "FS", "STORAGE"), "disk"),
        **dict.fromkeys(("OBJ", "EXTERNAL"), "external"),
        "NVLINK_PEER": "unknown",
    }
    one.send({"type": "BlockStored", "block_hashes": [1]})
    before = len(one.all.rows(semconv.EVENTS, WORKER, RANK, TYPE, MEDIUM))
    one.send(*(stored([place], medium) for place, medium in enumerate(table)))
    assert one.all.cells(semconv.EVENTS) == {
        ("w", 0, "block_stored", named): times + (named == "untagged")
        for named, times in Counter(table.values()).items()
    }
    assert len(one.all.rows(semconv.EVENTS, WORKER, RANK, TYPE, MEDIUM)) == before == CELLS
    assert one.resident == {"device": 3, "host": 3, "disk": 3, "external": 2, "unknown": 3}


def test_e13_ranks_of_one_topic_are_owners_of_their_own(one: One) -> None:
    for rank in range(4):
        one.worker.receive(batch(stored([7]), rank=rank))
    assert one.all.resident == {("w", rank, "device"): 1 for rank in range(4)}
    one.worker.receive(batch(removed([7]), rank=2))
    assert one.all.resident == {("w", rank, "device"): int(rank != 2) for rank in range(4)}


def test_rank_is_the_sources_where_the_batch_names_none(received: Received) -> None:
    worker = received.index.add("w")
    worker.receive(batch(stored([7]), rank=None), 5)
    worker.receive(batch(stored([8]), rank=6), 5)
    assert received.resident == {("w", 5, "device"): 1, ("w", 6, "device"): 1}
    assert worker.ranks == (5, 6)


@pytest.mark.parametrize("cleared", [CLEARED, ["AllBlocksCleared"]])
@pytest.mark.parametrize("device_only", [False, True])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_e14_cleared_is_every_tier_or_the_device_alone(engine: str, device_only: bool, cleared: Any) -> None:
    one = One(engine, clears_device_only=device_only)
    one.send(*(stored([7, 8], medium) for medium in ("GPU", "CPU", "FS", None)))
    one.worker.receive(batch(stored([7]), rank=1))
    one.send(cleared)
    left = 2 if device_only else 0
    tiers = {("w", 0, where): left for where in ("host", "disk")}
    assert one.all.resident == {("w", 0, "device"): 0, ("w", 0, "unknown"): 0, **tiers, ("w", 1, "device"): 1}
    assert one.errors == {}


@pytest.mark.parametrize("engine", ["vllm", "sglang", "auto"])
def test_cleared_may_be_what_the_engine_means_by_it(engine: str) -> None:
    one = One(engine, clears_device_only=None)
    one.send(*(stored([7, 8], medium) for medium in ("GPU", "CPU")))
    if engine == "auto":
        assert one.worker.engine == "vllm"  # By the medium CPU.
    one.send(CLEARED)
    assert one.resident == {"device": 0, "host": 0 if engine == "sglang" else 2}


def test_e15_int_and_bytes_are_never_mixed_up(one: One) -> None:
    hashes = [-1, 2**64 - 1, 2**63 + 1, -(2**63), 1, b"\x01", bytes(31) + b"\x01", b"\x01" + bytes(31), bytes(8)]
    for block in hashes:
        one.send(stored([block]))
    one.send(stored(hashes, "CPU"))
    assert one.resident == {"device": len(hashes), "host": len(hashes)}
    for left, block in reversed(list(enumerate(hashes))):
        one.send(removed([block], "CPU"), removed([block]))
        assert one.resident == {"device": left, "host": left}
    assert one.errors == {}


def test_g4_row_at_zero_stays_there(one: One) -> None:
    one.send(stored([7]), removed([7]))
    one.send(removed([7]))
    assert (one.resident, one.errors) == ({"device": 0}, {"unknown_remove": 1})


def test_g4_by_count_a_removal_from_an_owner_and_tier_at_zero(received: Received) -> None:
    """By count, as the probe takes it. A removal by its hash says more: that it is unknown, which is E3."""
    probe = CacheProbe(received.recorder, IDENTITY)
    empty, other = (probe.resident("host", "held") for _ in range(2))  # Two owners whose rows are one.

    def row() -> int | float:
        [point] = received.recorder.points(semconv.RESIDENT_BLOCKS)
        return point.value

    empty.set(0)
    other.set(3)
    empty.add(-1)
    assert (row(), received.errors) == (3, {"underflow": 1}), "nothing is taken from the other owner"
    empty.add(2)
    other.add(-3)
    assert (row(), received.errors) == (2, {"underflow": 1})
    other.add(-1)
    assert (row(), received.errors) == (2, {"underflow": 2})


def test_g4_level_that_underflows_says_so(one: One) -> None:
    one.send(stored([7]))
    (_, level) = one.worker.owner(0)._ledger._rows[0]
    level.add(-5)
    assert (one.resident, one.errors) == ({"device": 0}, {"underflow": 1})
    one.send(stored([8]))
    assert one.resident == {"device": 2}


def test_publishers_reset_empties_the_books_of_its_rank(one: One) -> None:
    for rank in (0, 1, 2):
        one.worker.receive(batch(stored([7], "GPU"), stored([7, 8], "CPU"), rank=rank))
    one.worker.reset(1)
    ranks = {(rank, where): value * (rank != 1) for rank in (0, 1, 2) for where, value in (("device", 1), ("host", 2))}
    assert one.all.resident == {("w", *key): value for key, value in ranks.items()}
    one.worker.reset(9)
    one.worker.reset()
    assert set(one.all.resident.values()) == {0}
    assert one.errors == {}


# ------------------------------------------------------------------------------------------------------- rows


def test_owner_has_its_rows_at_zero_from_when_it_is_seen(received: Received) -> None:
    assert not any(list(received.recorder.points(spec)) for spec in ABOUT_WORKERS)
    worker = received.index.add("w")
    assert received.rows(semconv.EVENTS, WORKER, RANK, TYPE, MEDIUM) == received.resident == {}
    worker.receive(batch(rank=3))
    for spec in (semconv.EVENTS, semconv.EVENT_BLOCKS):
        rows = received.rows(spec, WORKER, RANK, TYPE, MEDIUM)
        assert rows == {("w", 3, kind, medium): 0 for kind in KINDS for medium in MEDIA}
    assert received.resident == {("w", 3, "device"): 0}
    reasons = semconv.EVENT_DECODE_FAILURES.values[REASON]
    assert received.rows(semconv.EVENT_DECODE_FAILURES, WORKER, REASON) == {("w", reason): 0 for reason in reasons}


def test_events_and_their_blocks_are_counted(one: One) -> None:
    one.send(stored([1, 2, 3]), stored_array([4], "CPU"), removed_array([1, 2]), removed([9], None), CLEARED)
    one.send({"type": "TierBlocksCleared", "medium": "CPU"}, {"type": "Unheard"}, stored([], "FS"))
    assert one.all.cells(semconv.EVENTS) == {
        ("w", 0, "block_stored", "device"): 1,
        ("w", 0, "block_stored", "host"): 1,
        ("w", 0, "block_stored", "disk"): 1,
        ("w", 0, "block_removed", "device"): 1,
        ("w", 0, "block_removed", "untagged"): 1,
        ("w", 0, "all_blocks_cleared", "untagged"): 1,
        ("w", 0, "other", "host"): 1,
        ("w", 0, "other", "untagged"): 1,
    }
    assert one.all.cells(semconv.EVENT_BLOCKS) == {
        ("w", 0, "block_stored", "device"): 3,
        ("w", 0, "block_stored", "host"): 1,
        ("w", 0, "block_removed", "device"): 2,
        ("w", 0, "block_removed", "untagged"): 1,
    }
    assert one.resident == {"device": 0, "host": 0, "disk": 0}, "and what named no tier opened none"


def test_index_is_maintained_until_it_is_closed(received: Received) -> None:
    assert received.rows(semconv.INDEX_MAINTAINED) == {(): 1}
    received.index.add("w").receive(batch(stored([1])))
    received.index.close()
    assert received.rows(semconv.INDEX_MAINTAINED) == {(): 0}
    assert not any(list(received.recorder.points(spec)) for spec in ABOUT_WORKERS)


def test_no_index_no_index_rows() -> None:
    recorder = Recorder(IDENTITY)
    assert not any(list(recorder.points(spec)) for spec in (*ABOUT_WORKERS, semconv.INDEX_MAINTAINED))


def test_time_since_the_last_batch(received: Received) -> None:
    worker = received.index.add("w")
    worker.owner(0)
    assert received.rows(semconv.EVENT_LAST_AGE, WORKER, RANK) == {}
    worker.receive(batch(rank=1))
    received.now += 2.5
    assert received.rows(semconv.EVENT_LAST_AGE, WORKER, RANK) == {("w", 1): 2.5}
    worker.receive(batch(None, rank=1))
    received.now -= 1
    assert received.rows(semconv.EVENT_LAST_AGE, WORKER, RANK) == {("w", 1): 0}


def test_failures_are_counted_and_each_reason_is_said_once(one: One, lines: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        assert one.worker.receive(b"\xc1") is None
        assert one.worker.receive(encode(7)) is None
        one.send(None, 7, stored(["x"]), stored([5]))
        one.worker.failed("frame_count")
        one.worker.failed("nonsense")
    assert one.all.failures == {
        ("w", "msgpack"): 3,
        ("w", "batch_shape"): 3,
        ("w", "event_shape"): 6,
        ("w", "block_hash"): 3,
        ("w", "frame_count"): 3,
        ("w", "other"): 3,
    }
    said = [message for message in lines.messages if "cannot be read" in message]
    assert len(said) == 5
    assert all("'w'" in message for message in said)
    assert one.resident == {"device": 1}


# ------------------------------------------------------------------------------------------------- block size


def sizes(received: Received) -> dict[tuple[str, int, str], int | float]:
    return received.rows(semconv.BLOCK_SIZE, WORKER, RANK, TIER)


def test_block_size_is_learned_and_its_change_said_once(one: One, lines: pytest.LogCaptureFixture) -> None:
    one.send(
        stored([1], size=0), stored([2], block_size=None), stored([3], block_size=-4), stored([3], block_size=2**40)
    )
    assert sizes(one.all) == {}
    one.send(stored([1], size=16), stored([2], "CPU", size=64), stored([1], size=0))
    assert sizes(one.all) == {("w", 0, "device"): 16, ("w", 0, "host"): 64}
    for size in (32, 16, 32):
        one.send(stored([1], size=size))
    assert sizes(one.all) == {("w", 0, "device"): 32, ("w", 0, "host"): 64}
    (said,) = [message for message in lines.messages if "block size" in message]
    assert "'w'" in said
    assert "from 16 to 32" in said
    assert one.resident == {"device": 3, "host": 1}


def test_block_size_that_is_given(lines: pytest.LogCaptureFixture) -> None:
    one = One("vllm", block_size=16)
    one.send(stored([1], size=0))
    assert sizes(one.all) == {("w", 0, "device"): 16}
    one.send(stored([1], size=32))
    assert sizes(one.all) == {("w", 0, "device"): 32}
    assert len([message for message in lines.messages if "block size" in message]) == 1


def test_workers_of_different_block_sizes_have_rows_of_their_own(received: Received) -> None:
    for size in (16, 32):
        received.index.add(f"w{size}").receive(batch(stored([1], size=size)))
    assert sizes(received) == {("w16", 0, "device"): 16, ("w32", 0, "device"): 32}


# ------------------------------------------------------------------------------------------------------- auto

UNTOLD = stored_array([5])
VLLM = stored([2**63], "GPU")
SGLANG = stored_array([-5], "CPU_PINNED")


def test_auto_keeps_what_is_held_when_it_settles_on_copies(lines: pytest.LogCaptureFixture) -> None:
    one = One("auto")
    one.send(UNTOLD, UNTOLD)
    assert one.worker.engine is None
    one.send(VLLM)
    assert (one.worker.engine, one.resident) == ("vllm", {"device": 2})
    one.send(removed_array([5]))
    assert one.resident == {"device": 2}, "a copy is left"
    one.send(removed_array([5]))
    assert (one.resident, one.errors) == ({"device": 1}, {})
    one.send(SGLANG)
    assert one.worker.engine == "vllm"
    assert [message for message in lines.messages if "'w' is" in message] == [
        "kvcache: worker 'w' is vllm, by lora_name"
    ]


def test_auto_keeps_what_is_held_when_it_settles_on_blocks() -> None:
    one = One("auto")
    one.send(UNTOLD, UNTOLD)
    one.worker.receive(batch(UNTOLD, UNTOLD, rank=1))
    one.send(SGLANG)
    assert (one.worker.engine, one.resident["device"]) == ("sglang", 1)
    one.send(removed_array([5]))
    one.worker.receive(batch(removed_array([5]), rank=1))
    assert one.all.resident == {("w", 0, "device"): 0, ("w", 0, "host"): 1, ("w", 1, "device"): 0}
    one.send(UNTOLD, UNTOLD, removed_array([5]))
    assert (one.resident["device"], one.errors) == (0, {})


def test_engine_that_is_given_is_not_guessed() -> None:
    one = One("sglang")
    one.send(VLLM, VLLM, removed([2**63]))
    assert (one.worker.engine, one.resident) == ("sglang", {"device": 0})


# ------------------------------------------------------------------------------------------------ worker's end


def test_release_is_one_operation_and_one_line(received: Received, lines: pytest.LogCaptureFixture) -> None:
    gone, stays = received.index.add("gone"), received.index.add("stays")
    for worker in (gone, stays):
        for rank in range(3):
            worker.receive(batch(stored(list(range(100))), stored([1, 2], "CPU"), None, rank=rank))
    of_batches = received.recorder.counter(semconv.EVENT_BATCHES_LOST, gone.labels(0))
    lines.clear()
    received.index.release("gone")
    for spec in ABOUT_WORKERS:
        assert {point.attributes[WORKER] for point in received.recorder.points(spec)} <= {"stays"}
    assert sum(received.resident.values()) == 306
    assert lines.messages == ["kvcache: worker 'gone' released, with 306 blocks, ranks: 3"]
    gone.receive(batch(stored([1])))
    gone.failed("other")
    gone.release()
    received.index.release("gone")
    of_batches.add(1)
    assert len(lines.messages) == 1
    assert {key[0] for key in received.resident} == {"stays"}
    assert received.errors == {}


def test_worker_that_comes_back_starts_at_zero(received: Received) -> None:
    received.index.add("w").receive(batch(stored([1, 2])))
    received.index.release("w")
    received.index.add("w").receive(batch(stored([3])))
    assert received.resident == {("w", 0, "device"): 1}
    assert received.cells(semconv.EVENT_BLOCKS) == {("w", 0, "block_stored", "device"): 1}


def test_g5_release_of_broken_books_is_one_line(received: Received, lines: pytest.LogCaptureFixture) -> None:
    worker = received.index.add("w")
    for rank in range(3):
        worker.receive(batch(stored(list(range(50))), stored([1], "CPU"), rank=rank))
        worker.owner(rank)._ledger.books["device"].blocks.popitem()
    lines.clear()
    worker.release()
    (record,) = lines.records
    assert record.levelno == logging.ERROR
    assert received.errors == {"recount": 1}
    assert received.resident == {}


def test_nothing_is_left_of_workers_that_come_and_go(received: Received) -> None:
    for number in range(200):
        worker = received.index.add(f"pod-{number}")
        worker.receive(batch(stored([1, 2, 3]), rank=number))
        worker.release()
    del worker
    gc.collect()
    assert not any(isinstance(thing, Worker | Owner) for thing in gc.get_objects())
    assert all(not received.recorder._tables[spec.name] for spec in ABOUT_WORKERS)
    assert received.index._room.owners == received.index._room.further == 40
    assert received.recorder.dropped("label_overflow").value == 0


def test_nothing_is_left_of_workers_without_room() -> None:
    received = Received(owners=0)
    for number in range(50):
        worker = received.index.add(f"pod-{number}")
        worker.receive(batch(stored([1, 2, 3])))
        worker.release()
    del worker
    gc.collect()
    assert not any(isinstance(thing, Worker | Owner) for thing in gc.get_objects())
    assert received.resident == received.rows(semconv.EVENT_LAST_AGE, WORKER, RANK) == {}


# --------------------------------------------------------------------------------------------- hostile workers


def test_names_that_no_label_can_be(received: Received) -> None:
    names = ["\ud800", "a\nb", "", "x" * 5_000, "x" * 5_000 + "y", "x" * LONGEST, OTHER, "unnamed", "?"]
    for number, name in enumerate(names):
        received.index.add(name).receive(batch(stored(list(range(number + 1)))))
    labels = [key[0] for key in received.resident]
    assert len(set(labels)) == len(names)
    assert list(received.resident.values()) == list(range(1, len(names) + 1))
    assert all(label and len(label) <= LONGEST and label.encode() for label in labels)
    for left in range(len(names) - 1, -1, -1):
        received.index.release(names[left])
        assert len(received.resident) == left


def test_name_is_one_workers(received: Received) -> None:
    received.index.add("w")
    with pytest.raises(ValueError, match="'w'"):
        received.index.add("w")


def test_workers_for_whom_there_is_no_room_are_added_up(lines: pytest.LogCaptureFixture) -> None:
    received = Received(owners=3)
    for number in range(10):
        received.index.add(f"w{number}").receive(batch(stored([1, 2]), None, rank=number))
    own = {(f"w{number}", number, "device"): 2 for number in range(3)}
    assert received.resident == own | {(OTHER, MORE, "device"): 14}
    assert received.cells(semconv.EVENTS)[OTHER, MORE, "block_stored", "device"] == 7
    assert received.failures[OTHER, "event_shape"] == 7
    assert received.index.workers["w9"].labels(9) == {WORKER: OTHER, RANK: MORE}
    assert len([message for message in lines.messages if "no room" in message]) == 1
    received.index.release("w9")
    assert received.resident == own | {(OTHER, MORE, "device"): 12}
    received.index.release("w0")
    received.index.add("new").receive(batch(stored([1])))
    assert received.resident[("new", 0, "device")] == 1
    assert received.recorder.dropped("label_overflow").value == 0


def test_ranks_that_a_publisher_makes_up(received: Received, caplog: pytest.LogCaptureFixture) -> None:
    clever, honest = received.index.add("clever"), received.index.add("honest")
    for rank in range(2 * MOST_RANKS):
        clever.receive(batch(stored([rank]), rank=rank))
    honest.receive(batch(stored([1, 2])))
    assert len(clever.ranks) == 2 * MOST_RANKS
    assert received.resident["honest", 0, "device"] == 2
    assert sum(value for (name, _, _), value in received.resident.items() if name != "honest") == 2 * MOST_RANKS
    assert len(received.resident) == 41
    clever.receive(batch(stored([2 * MOST_RANKS - 1]), rank=2 * MOST_RANKS))  # It counts for each who holds it.
    assert sum(value for (name, _, _), value in received.resident.items() if name != "honest") == 2 * MOST_RANKS + 1
    assert received.recorder.dropped("label_overflow").value == 0
    assert not [text for text in caplog.messages if "ranks" in text and "added up" not in text]


def test_ranks_for_whose_books_there_is_no_room_are_counted_and_said(
    received: Received, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "MOST_RANKS", 5)
    monkeypatch.setattr(room_module, "BOOKS", 3)
    received = Received()
    clever, honest = received.index.add("clever", engine="vllm"), received.index.add("honest", engine="vllm")
    for rank in range(10):
        clever.receive(batch(stored([1, 2]), removed([1]), rank=rank))
    for rank in range(5):  # However much another has taken.
        honest.receive(batch(stored([1]), rank=rank))
    own = {("clever", rank, "device"): 1 for rank in range(8)} | {("honest", rank, "device"): 1 for rank in range(5)}
    assert received.resident == own, "the others have no row that says that they hold nothing"
    events, blocks = received.cells(semconv.EVENTS), received.cells(semconv.EVENT_BLOCKS)
    assert (events["clever", MORE, "block_stored", "device"], blocks["clever", MORE, "block_stored", "device"]) == (
        2,
        4,
    )
    assert blocks["clever", MORE, "block_removed", "device"] == 2
    assert received.recorder.dropped("label_overflow").value == 4
    clever.receive(batch(CLEARED, rank=9))
    assert received.resident == own, "whoever has no books clears nobody's"
    assert received.cells(semconv.EVENTS)["clever", MORE, "all_blocks_cleared", "untagged"] == 1
    clever.reset()
    clever.forget("device")
    assert received.resident == own | {("clever", rank, "device"): 0 for rank in range(8)}
    assert received.errors == {}
    [line] = [text for text in caplog.messages if "names more than 5 ranks" in text]
    assert "'clever'" in line
    assert clever.close() == (0, True)
    for rank in range(8):  # What it had is there for others.
        honest.receive(batch(stored([2]), rank=rank))
    assert {rank for name, rank, _ in received.resident if name == "honest"} == set(range(8))
    assert received.recorder.dropped("label_overflow").value == 4


def test_room_for_books_is_given_back_with_a_source(received: Received, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "MOST_RANKS", 2)
    monkeypatch.setattr(room_module, "BOOKS", 4)
    received = Received()
    worker = received.index.add("w", engine="vllm")
    for _ in range(3):
        share = received.index.share("another")
        for rank in range(8):
            worker.receive(batch(stored([1]), rank=rank), share=share)
        assert sum(value for (_, rank, _), value in received.resident.items() if rank != MORE) == 6
        worker.leave(share)
        assert received.resident == {}


def test_all_blocks_are_counted_as_they_come_and_go(received: Received) -> None:
    """The sum that bounds them is never taken by walking; against a walk, whatever happens to books."""
    rng = random.Random(4)
    names = [f"w{number}" for number in range(5)]
    done: set[str] = set()
    others = {name: received.index.share(f"another of {name}") for name in names}
    for _ in range(2_000):
        name, rank = rng.choice(names), rng.randrange(3)
        worker = received.index.workers.get(name) or received.index.add(name, engine=rng.choice(["auto", "sglang"]))
        share = rng.choice([None, others[name]])
        hashes = [rng.randrange(60) for _ in range(rng.randint(1, 8))]
        medium = rng.choice(["GPU", "CPU", "nowhere", None])
        what = rng.choices(
            ["store", "remove", "clear", "reset", "forget", "leave", "release", "settle"], [9, 5, 1, 1, 1, 1, 1, 1]
        )[0]
        done.add(what)
        if what == "store":
            worker.receive(batch(stored(hashes, medium), rank=rank), share=share)
        elif what == "remove":
            worker.receive(batch(removed(hashes, medium), rank=rank), share=share)
        elif what == "clear":
            worker.receive(batch(CLEARED, rank=rank), share=share)
        elif what == "reset":
            worker.reset(rank)
        elif what == "forget":
            worker.forget(rng.choice(["device", "host", "untagged"]))
        elif what == "leave":
            worker.leave(share or worker._share)
        elif what == "release":
            received.index.release(name)
        else:
            worker.change("vllm", None, True)
        assert received.index.resident.blocks == sum(
            sum(worker.blocks().values()) for worker in received.index.workers.values()
        )
    assert len(done) == 8
    received.index.close()
    assert received.index.resident.blocks == 0


def test_workers_of_which_nothing_has_come_are_not_looked_at_every_second(
    received: Received, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = [received.index.add(f"w{number}") for number in range(3)]
    for worker in workers:
        worker.receive(batch(stored([1])))
    looked: list[Worker] = []
    for name in ("blocks", "fit"):
        function = getattr(Worker, name)
        monkeypatch.setattr(Worker, name, lambda self, function=function: (looked.append(self), function(self))[1])
    received.index.bound()
    received.index.fit()
    assert len(looked) == len(workers)
    workers[1].receive(batch(stored([2])))
    received.index.bound()
    received.index.fit()
    assert looked[3:] == [workers[1]]
    received.index.release("w1")
    received.index.fit()
    assert len(looked) == 4


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("blocks", [12_000, 19_500])  # As full as a dict can be, and one that has just grown.
def test_memory_of_blocks_that_were_replaced_is_given_back(engine: str, blocks: int) -> None:
    received = Received()
    worker = received.index.add("w", engine=engine)
    draw = random.Random(7)
    held = [draw.getrandbits(64) for _ in range(blocks)]
    worker.receive(batch(stored(held)))
    book = worker.owner(0)._ledger.books["device"]
    most = 0
    for _ in range(3):
        for first in range(0, len(held), 100):
            old = held[first : first + 100]
            held[first : first + 100] = new = [draw.getrandbits(64) for _ in old]
            worker.receive(batch(removed(old), stored(new)))
            most = max(most, sys.getsizeof(book.blocks))
        received.index.fit()
        assert sys.getsizeof(book.blocks) <= 69 * len(held)
        assert book.blocks == dict.fromkeys(held, 1)
    assert most > 69 * len(held) or blocks == 19_500  # There was something to give back.

    worker.receive(batch(removed(held[1_200:])))
    del held[1_200:]
    received.index.fit()
    assert sys.getsizeof(book.blocks) <= 69 * len(held)
    assert book.blocks == dict.fromkeys(held, 1)
    worker.receive(batch(stored(held[:100]), removed(held[100:110])))
    assert received.resident["w", 0, "device"] == 1_190
    assert received.errors == {}


def test_blocks_without_end_are_forgotten_where_there_are_the_most(
    received: Received, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(index_module, "MOST_BLOCKS", 40)
    endless, honest = received.index.add("endless", engine="sglang"), received.index.add("honest")
    honest.receive(batch(stored([1, 2])))
    for rank in range(3):
        endless.receive(batch(stored(list(range(10)), "DISK"), stored([7]), rank=rank))
    received.index.bound()
    assert received.resident["endless", 2, "disk"] == 10
    honest.receive(batch(stored(list(range(8)))))
    received.index.bound()
    assert received.resident == {
        ("honest", 0, "device"): 8,
        **{("endless", rank, "device"): 1 for rank in range(3)},
        **{("endless", rank, "disk"): 0 for rank in range(3)},
    }
    assert received.recorder.dropped("other").value == 30
    [line] = [text for text in caplog.messages if "forgotten" in text]
    assert "'endless' has 30 blocks in medium 'disk'" in line
    endless.receive(batch(stored([1], "DISK"), rank=1))
    assert received.resident["endless", 1, "disk"] == 1
    assert endless.close() == (4, True)


# -------------------------------------------------------------------------------------------- against a recount

WIRE: dict[Any, str] = {
    None: "untagged",
    "GPU": "device",
    "cuda:0": "device",
    "CPU": "host",
    "CPU_PINNED": "host",
    "FS": "disk",
    "DISK": "disk",
    "OBJ": "external",
    "NVLINK_PEER": "unknown",
}
HASHES: tuple[Any, ...] = (*range(-3, 8), 2**63, 2**64 - 1, bytes(32), bytes(31) + b"\x01", b"\x07")


class Recount:
    """What events add up to, counted anew each time from how many copies of a block are where."""

    def __init__(self, *, copies: bool, device_only: bool) -> None:
        self.copies, self.device_only = copies, device_only
        self.held: Counter[tuple[int, str, Any]] = Counter()
        self.named: set[tuple[int, str]] = set()
        self.events: Counter[tuple[int, str, str]] = Counter()
        self.blocks: Counter[tuple[int, str, str]] = Counter()
        self.unknown = 0

    def see(self, rank: int) -> None:
        self.named.add((rank, "device"))

    def count(self, rank: int, kind: str, medium: str, blocks: int) -> None:
        self.events[rank, kind, medium] += 1
        self.blocks[rank, kind, medium] += blocks

    def stored(self, rank: int, medium: str, hashes: list[Any]) -> None:
        self.count(rank, "block_stored", medium, len(hashes))
        self.named.add((rank, medium))
        for block in hashes:
            self.held[rank, medium, block] = self.held[rank, medium, block] + 1 if self.copies else 1

    def removed(self, rank: int, medium: str, hashes: list[Any]) -> None:
        self.count(rank, "block_removed", medium, len(hashes))
        if medium != "untagged":
            self.named.add((rank, medium))
        found: set[Any] = set()
        for block in hashes:
            if medium == "untagged":
                there = [key for key in self.held if key[0] == rank and key[2] == block and self.held[key]]
                found.update({block} if there else ())
                for key in there:
                    self.held[key] = 0
                self.unknown += not there
            elif self.held[rank, medium, block]:
                self.held[rank, medium, block] -= 1
            else:
                self.unknown += 1

    def cleared(self, rank: int, *, all_of_it: bool = False) -> None:
        for key in self.held:
            if key[0] == rank and (all_of_it or not self.device_only or key[1] in ("device", "untagged")):
                self.held[key] = 0

    @property
    def resident(self) -> dict[tuple[str, int, str], int]:
        rows: Counter[tuple[str, int, str]] = Counter()
        for rank, medium in self.named:
            held = sum(copies > 0 for key, copies in self.held.items() if key[:2] == (rank, medium))
            rows["w", rank, "unknown" if medium == "untagged" else medium] += held
        return dict(rows)


def step(draw: random.Random, recount: Recount, rank: int) -> Iterator[Any]:
    """Yields one operation's events, and counts them."""
    medium = draw.choice(list(WIRE)) if draw.random() < 0.7 else "GPU"
    hashes = draw.choices(HASHES, k=draw.randrange(5))
    as_array = draw.random() < 0.5
    match draw.choices(("store", "remove", "clear", "other", "bad"), (10, 10, 1, 1, 1))[0]:
        case "store":
            recount.stored(rank, WIRE[medium], hashes)
            yield (stored_array if as_array else stored)(hashes, medium)
        case "remove":
            recount.removed(rank, WIRE[medium], hashes)
            yield (removed_array if as_array else removed)(hashes, medium)
        case "clear":
            recount.count(rank, "all_blocks_cleared", "untagged", 0)
            recount.cleared(rank)
            yield ["AllBlocksCleared"] if as_array else CLEARED
        case "other":
            recount.count(rank, "other", WIRE[medium], 0)
            yield {"type": "TierBlocksCleared", "medium": medium}
        case _:
            yield draw.choice([None, stored(["x"]), {}, [["BlockStored"]]])


@pytest.mark.parametrize("seed", range(16))
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_occupancy_equals_a_recount_after_every_step(engine: str, seed: int) -> None:
    draw = random.Random(seed)
    device_only = seed % 4 == 3
    one = One(engine, clears_device_only=device_only)
    recount = Recount(copies=engine == "vllm", device_only=device_only)
    for _ in range(400):
        rank = draw.randrange(3)
        recount.see(rank)
        one.worker.owner(rank)
        if draw.random() < 0.01:
            one.worker.reset(rank)
            recount.cleared(rank, all_of_it=True)
        else:
            steps = [event for _ in range(draw.choice((1, 1, 1, 3))) for event in step(draw, recount, rank)]
            one.worker.receive(batch(*steps, rank=rank))
        assert one.all.resident == recount.resident
        assert one.errors == ({"unknown_remove": recount.unknown} if recount.unknown else {})
    assert one.all.cells(semconv.EVENTS) == {("w", *key): value for key, value in recount.events.items()}
    assert one.all.cells(semconv.EVENT_BLOCKS) == {("w", *key): value for key, value in (+recount.blocks).items()}


@pytest.mark.parametrize("seed", range(16))
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_what_is_restored_is_in_the_books_and_is_counted_no_more(engine: str, seed: int) -> None:
    draw = random.Random(seed)
    device_only = seed % 4 == 3
    one = One(engine, clears_device_only=device_only)
    recount = Recount(copies=engine == "vllm", device_only=device_only)
    payloads: list[bytes] = []
    for _ in range(200):
        rank = draw.randrange(3)
        recount.see(rank)
        payloads.append(batch(*(event for _ in range(3) for event in step(draw, recount, rank)), rank=rank))
        one.worker.receive(payloads[-1])
    payloads.insert(draw.randrange(200), b"no batch")

    def counted() -> tuple[Any, ...]:
        return one.all.cells(semconv.EVENTS), one.all.cells(semconv.EVENT_BLOCKS), one.errors, one.all.failures

    before = counted()
    one.worker.reset()
    assert set(one.all.resident.values()) == {0}
    for payload in payloads:
        one.worker.restore(payload)
    assert one.all.resident == recount.resident
    assert counted() == before
    one.worker.close()
    one.worker.restore(payloads[0])


# ------------------------------------------------------------------------------------------------------- fuzzers


def sound(received: Received) -> None:
    for spec in semconv.METRICS.values():
        if spec.instrument != "histogram":
            assert all(point.value >= 0 for point in received.recorder.points(spec))
    assert received.errors.keys() <= {"unknown_remove"}


@pytest.fixture
def _quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("_quiet")
@settings(deadline=None)
@given(st.lists(payloads, max_size=6), st.sampled_from(["auto", "vllm", "sglang"]))
def test_garbage_raises_nothing_and_leaves_nothing_negative(fuzzed: list[bytes], engine: str) -> None:
    one = One(engine)
    for payload in fuzzed:
        one.worker.receive(payload)
    sound(one.all)


@pytest.mark.usefixtures("_quiet")
@pytest.mark.parametrize("engine", ["auto", "vllm", "sglang"])
def test_broken_bytes_raise_nothing_and_leave_nothing_negative(engine: str) -> None:
    draw, one = random.Random(engine), One(engine)
    for _ in range(5_000):
        one.worker.receive(mutated(draw))
    sound(one.all)
    one.worker.release()
    assert one.errors.keys() <= {"unknown_remove"}
