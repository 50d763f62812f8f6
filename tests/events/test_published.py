"""Published events add up to what is resident, as each engine means them; a bad one loses only itself."""

from __future__ import annotations

import enum
import gc
import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache_otel import semconv
from kvcache_otel.events import books
from kvcache_otel.events.published import PublishedBooks
from kvcache_otel.identity import Identity
from kvcache_otel.record.cells import Level
from kvcache_otel.record.probe import CacheProbe
from kvcache_otel.record.recorder import Recorder
from tests.support.rows import Rows

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from kvcache_otel.spec import MetricSpec

LOGGER = "kvcache_otel.events.published"
IDENTITY = Identity("custom", "TestCache")
TYPES = semconv.ATTRIBUTES[semconv.KVCACHE_EVENT_TYPE].members or frozenset()
MEDIA = semconv.ATTRIBUTES[semconv.KVCACHE_EVENT_MEDIUM].members or frozenset()


Way = dict[str, bool]
WAYS: list[Way] = [{}, {"copies": True}, {"holders": True}]
"""Each way of announcing a block that is there already."""


class StorageMedium(str, enum.Enum):  # noqa: UP042 # As SGLang writes it.
    GPU = "GPU"
    CPU = "CPU_PINNED"


@dataclass
class BlockStored:
    block_hashes: Any
    medium: Any = None
    parent_block_hash: Any = None
    token_ids: list[int] = field(default_factory=list[int])
    block_size: int = 1
    lora_id: int | None = None


class BlockStoredWithMetadata(BlockStored):
    """What SGLang publishes of a salted prompt."""


@dataclass
class BlockRemoved:
    block_hashes: Any
    medium: Any = None


class AllBlocksCleared:
    pass


class BlockMoved:
    """An event that is not known yet."""

    block_hashes = (1, 2)
    medium = "GPU"


class Publisher:
    """Books, and what their recorder has been told."""

    def __init__(
        self, *tiers: str, copies: bool = False, clears_device_only: bool = False, holders: bool = False
    ) -> None:
        self.recorder = Recorder(IDENTITY)
        self.rows = Rows(self.recorder)
        self.probe = CacheProbe(self.recorder, IDENTITY)
        self.books = PublishedBooks(
            self.probe,
            *(tiers or ("device", "host")),
            copies=copies,
            clears_device_only=clears_device_only,
            holders=holders,
        )

    def publish(self, *events: Any) -> None:
        self.books.apply(list(events))

    @property
    def resident(self) -> dict[str, int | float]:
        found: dict[str, int | float] = {}
        for labels, value in self.rows.values(semconv.RESIDENT_BLOCKS).items():
            named = dict(labels)
            assert named.pop(semconv.KVCACHE_VIEW) == "published"
            found[str(named.pop(semconv.KVCACHE_TIER))] = value
            assert named == {}
        return found

    def cells(self, spec: MetricSpec) -> dict[tuple[str, str], int | float]:
        found: dict[tuple[str, str], int | float] = {}
        for labels, value in self.rows.values(spec).items():
            named = dict(labels)
            assert named.pop(semconv.KVCACHE_VIEW) == "published"
            key = str(named.pop(semconv.KVCACHE_EVENT_TYPE)), str(named.pop(semconv.KVCACHE_EVENT_MEDIUM))
            found[key] = value
            assert named == {}
        return found

    @property
    def events(self) -> dict[tuple[str, str], int | float]:
        return {key: value for key, value in self.cells(semconv.EVENTS).items() if value}

    @property
    def blocks(self) -> dict[tuple[str, str], int | float]:
        return {key: value for key, value in self.cells(semconv.EVENT_BLOCKS).items() if value}

    @property
    def errors(self) -> dict[str, int | float]:
        rows = self.rows.values(semconv.ACCOUNTING_ERRORS)
        return {str(dict(labels)[semconv.KVCACHE_REASON]): value for labels, value in rows.items() if value}


@pytest.fixture
def sglang() -> Publisher:
    return Publisher()


@pytest.fixture
def vllm() -> Publisher:
    return Publisher(copies=True)


@pytest.fixture(params=WAYS, ids=["one of each", "copies", "holders"])
def publisher(request: pytest.FixtureRequest) -> Publisher:
    return Publisher(**request.param)


# ------------------------------------------------------------------------------------------------------ rows


def test_rows_are_there_at_zero_before_anything_is_published(publisher: Publisher) -> None:
    assert publisher.resident == {"device": 0, "host": 0}
    for spec in (semconv.EVENTS, semconv.EVENT_BLOCKS):
        assert publisher.cells(spec) == {(kind, medium): 0 for kind in TYPES for medium in MEDIA}
        assert semconv.PRESET_ATTRIBUTES[spec.name] == (semconv.KVCACHE_EVENT_TYPE, semconv.KVCACHE_EVENT_MEDIUM)
    assert publisher.errors == {}


def test_another_tier_has_its_row_from_the_first_event_that_names_it(publisher: Publisher) -> None:
    publisher.publish(BlockStored([1], "FS"), BlockRemoved([2], "OBJ"))
    assert publisher.resident == {"device": 0, "host": 0, "disk": 1, "external": 0}


def test_rows_end_with_the_books(publisher: Publisher) -> None:
    publisher.publish(BlockStored([1], "GPU"), BlockStored([1], "FS"))
    del publisher.books
    gc.collect()
    assert publisher.resident == {}
    assert publisher.events == {("block_stored", "device"): 1, ("block_stored", "disk"): 1}


def test_rows_end_when_they_are_forgotten_and_begin_empty(publisher: Publisher) -> None:
    publisher.publish(BlockStored([1, 2], "GPU"), BlockStored([1], "NVLINK_PEER"))
    publisher.books.forget()
    assert publisher.resident == {}
    assert publisher.errors == {}
    publisher.publish(BlockStored([3], "GPU"))
    assert publisher.resident == {"device": 1, "host": 0}


def test_books_of_two_caches_add_up(sglang: Publisher) -> None:
    other = PublishedBooks(sglang.probe, "device", "host")
    sglang.publish(BlockStored([1, 2], "GPU"))
    other.apply([BlockStored([1], "GPU")])
    assert sglang.resident == {"device": 3, "host": 0}
    assert sglang.events == {("block_stored", "device"): 2}
    assert sglang.blocks == {("block_stored", "device"): 3}


def test_levels_are_set_once_a_batch_and_only_where_something_changed(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int | float | None] = []
    really = Level.set

    def tell(level: Level, value: int | float | None) -> None:
        told.append(value)
        really(level, value)

    monkeypatch.setattr(Level, "set", tell)
    publisher.publish(*(BlockStored([number], "GPU") for number in range(64)))
    assert told == [64]
    publisher.publish()
    publisher.publish(BlockStored([64], "NVLINK_PEER"), BlockRemoved([99], "CPU_PINNED"), BlockMoved())
    publisher.publish(BlockStored([70], "GPU"), BlockRemoved([70], "GPU"))
    assert told == [64]
    publisher.publish(AllBlocksCleared())
    assert told == [64, 0]


def test_series_that_may_not_exist_hurt_nobody() -> None:
    recorder = Recorder(IDENTITY, series_limit=7)
    books = PublishedBooks(CacheProbe(recorder, IDENTITY), "device", "host")
    books.apply([BlockStored([1], "GPU"), BlockRemoved([1], "GPU")])
    # There was no room for block_stored, in either metric.
    assert recorder.dropped(semconv.Reason.LABEL_OVERFLOW).value == 2
    assert [point.value for point in recorder.points(semconv.RESIDENT_BLOCKS)] == [0, 0]


# -------------------------------------------------------------------------------------------- what is resident


def test_repeated_store_is_idempotent(sglang: Publisher) -> None:
    sglang.publish(BlockStored([7], "GPU"), BlockStored([7], "GPU"))
    assert sglang.resident["device"] == 1
    sglang.publish(BlockRemoved([7], "GPU"))
    assert sglang.resident["device"] == 0
    assert sglang.errors == {}


@pytest.fixture
def holders() -> Publisher:
    """SGLang with extra keys."""
    return Publisher(holders=True)


def test_the_first_removal_is_final_and_those_of_other_holders_contradict_nothing(holders: Publisher) -> None:
    holders.publish(*(BlockStored([7, 8], "GPU") for _ in range(3)), BlockStored([7], "CPU_PINNED"))
    assert holders.resident == {"device": 2, "host": 1}
    holders.publish(BlockRemoved([7], "GPU"))
    assert holders.resident == {"device": 1, "host": 1}, "as every subscriber has it"
    holders.publish(BlockRemoved([7], "GPU"), BlockRemoved([7], "GPU"), BlockRemoved([7], "CPU_PINNED"))
    assert holders.errors == {}
    holders.publish(BlockRemoved([7], "GPU"), BlockRemoved([7], "CPU_PINNED"))
    assert holders.errors == {"unknown_remove": 2}, "more removals than announcements"
    assert holders.resident == {"device": 1, "host": 0}


def test_a_block_that_is_announced_anew_is_in_again(holders: Publisher) -> None:
    holders.publish(BlockStored([7], "GPU"), BlockStored([7], "GPU"), BlockRemoved([7], "GPU"), BlockStored([7], "GPU"))
    assert holders.resident["device"] == 1
    holders.publish(BlockRemoved([7], "GPU"), BlockRemoved([7], "GPU"))
    assert holders.resident["device"] == 0
    assert holders.errors == {}


@pytest.mark.parametrize("forgetting", [AllBlocksCleared(), BlockRemoved([7], None)])
def test_what_is_cleared_has_no_other_holder(holders: Publisher, forgetting: Any) -> None:
    holders.publish(BlockStored([7], "GPU"), BlockStored([7], "GPU"), forgetting)
    assert holders.resident["device"] == 0
    holders.publish(BlockRemoved([7], "GPU"))
    assert holders.errors == {"unknown_remove": 1}


def test_who_announces_and_never_removes_is_not_remembered_for_ever(
    holders: Publisher, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(books, "_MOST_AGAIN", 4)
    holders.publish(*(BlockStored(list(range(9)), "GPU") for _ in range(2)))
    assert len([text for text in caplog.messages if "more than 4 blocks are announced" in text]) == 1
    holders.publish(*(BlockRemoved(list(range(9)), "GPU") for _ in range(2)))
    assert holders.resident["device"] == 0
    assert holders.errors == {}, "which of them were announced again is not known any more"
    holders.publish(AllBlocksCleared(), BlockRemoved([1], "GPU"))
    assert holders.errors == {"unknown_remove": 1}, "the books have begun anew"


@pytest.mark.parametrize("grouped_first", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_group_on_some_events_of_a_class_alone(way: Way, grouped_first: bool) -> None:
    publisher = Publisher(**way)
    plain, grouped = BlockStored([1], "GPU"), BlockStored([1], "GPU")
    grouped.group_idx = 1  # type: ignore[attr-defined]
    publisher.publish(plain)
    publisher.publish(*((grouped, plain) if grouped_first else (plain, grouped)))
    assert publisher.resident["device"] == 2


@dataclass(slots=True)
class SlottedStored:
    """As SGLang's: nothing can be put on it that its class does not declare."""

    block_hashes: Any
    medium: Any = None


class Odd:
    """A hash that can be asked for its own, and not be compared."""

    def __hash__(self) -> int:
        return 7

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("cannot be compared")


@pytest.mark.parametrize("way", WAYS)
def test_events_that_are_known_by_sight(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    SlottedStored.__name__ = "BlockStored"
    publisher = Publisher(**way)
    publisher.publish(SlottedStored([1], StorageMedium.GPU))
    looked: list[Any] = []
    look_at = PublishedBooks._look_at
    monkeypatch.setattr(PublishedBooks, "_look_at", lambda self, event: (looked.append(event), look_at(self, event)))
    used_up = iter([9])
    bad = (SlottedStored([2, []], "GPU"), SlottedStored(used_up, "GPU"), SlottedStored("34", "GPU"))
    publisher.publish(SlottedStored([2, 3, 3], "GPU"), *bad, SlottedStored([7, Odd(), Odd()], "GPU"))
    assert looked == [*bad]
    assert next(used_up) == 9, "it is the engine's to read"
    assert publisher.errors == {"other": 4}
    assert publisher.rows.total(semconv.EVENTS) == 6
    assert publisher.rows.total(semconv.EVENT_BLOCKS) == 4


def test_each_copy_is_removed_by_itself(vllm: Publisher) -> None:
    vllm.publish(BlockStored([7], "GPU"), BlockStored([7], "GPU"))
    assert vllm.resident["device"] == 1, "distinct blocks"
    vllm.publish(BlockRemoved([7], "GPU"))
    assert vllm.resident["device"] == 1
    vllm.publish(BlockRemoved([7], "GPU"))
    assert vllm.resident["device"] == 0
    assert vllm.errors == {}


def test_removed_and_never_stored(publisher: Publisher) -> None:
    publisher.publish(BlockRemoved([7], "GPU"))
    assert publisher.resident == {"device": 0, "host": 0}
    assert publisher.errors == {"unknown_remove": 1}


def test_each_block_that_was_not_stored_is_one_error(publisher: Publisher) -> None:
    publisher.publish(BlockStored([1, 2], "GPU"), BlockRemoved([1, 3, 4], "GPU"))
    assert publisher.resident["device"] == 1
    assert publisher.errors == {"unknown_remove": 2}


def test_removal_from_one_tier_leaves_the_other(publisher: Publisher) -> None:
    publisher.publish(BlockStored([7], StorageMedium.CPU), BlockRemoved([7], StorageMedium.GPU))
    assert publisher.resident == {"device": 0, "host": 1}
    assert publisher.errors == {"unknown_remove": 1}


def test_untagged_removal_clears_every_tier(publisher: Publisher) -> None:
    publisher.publish(*(BlockStored([7, 8], medium) for medium in ("GPU", "GPU", "CPU", "FS", "OBJ", "PEER", None)))
    publisher.publish(BlockRemoved([7]))
    assert publisher.resident == {"device": 1, "host": 1, "disk": 1, "external": 1}
    assert publisher.errors == {}
    publisher.publish(BlockRemoved([7]))
    assert publisher.resident == {"device": 1, "host": 1, "disk": 1, "external": 1}
    assert publisher.errors == {"unknown_remove": 1}


@pytest.mark.parametrize("medium", [None, "NVLINK_PEER", 5, b"GPU"])
def test_block_in_no_known_tier_has_no_row_and_may_be_removed(publisher: Publisher, medium: Any) -> None:
    publisher.publish(BlockStored([7, 8], medium))
    assert publisher.resident == {"device": 0, "host": 0}
    publisher.publish(BlockRemoved([7], medium), BlockRemoved([8]))
    assert publisher.resident == {"device": 0, "host": 0}
    assert publisher.errors == {}


@pytest.mark.parametrize("batches", [1, 2])
def test_cleared_is_every_tier(publisher: Publisher, batches: int) -> None:
    stored = [BlockStored([7, 7], medium) for medium in ("GPU", "CPU", "FS", None, "NVLINK_PEER")]
    if batches == 2:
        publisher.publish(*stored)
        publisher.publish(AllBlocksCleared())
    else:
        publisher.publish(*stored, AllBlocksCleared())
    assert publisher.resident == {"device": 0, "host": 0, "disk": 0}
    assert publisher.events[("all_blocks_cleared", "untagged")] == 1
    assert publisher.errors == {}
    publisher.publish(*(BlockRemoved([7], medium) for medium in ("GPU", "CPU", "FS", None, "NVLINK_PEER")))
    assert publisher.errors == {"unknown_remove": 5}


@pytest.mark.parametrize("copies", [False, True])
def test_cleared_may_mean_the_device_alone(copies: bool) -> None:
    publisher = Publisher(copies=copies, clears_device_only=True)
    publisher.publish(BlockStored([7], "GPU"), BlockStored([7], "CPU"), BlockStored([8], None), AllBlocksCleared())
    assert publisher.resident == {"device": 0, "host": 1}
    publisher.publish(BlockRemoved([7], "CPU"))
    assert publisher.errors == {}
    publisher.publish(BlockRemoved([8], None))  # Of a release that names no medium: it was the device's.
    assert publisher.errors == {"unknown_remove": 1}


HASHES = (0, 1, -1, -2, -(2**63), 2**63, 2**63 + 1, 2**64 - 1, bytes(32), b"\x01" * 32, b"\x00" * 31 + b"\x01", b"1")


def test_each_hash_is_one_identity(publisher: Publisher) -> None:
    publisher.publish(BlockStored(list(HASHES), "GPU"))
    assert publisher.resident["device"] == len(HASHES)
    for left, block in reversed(list(enumerate(HASHES))):
        publisher.publish(BlockRemoved([block], "GPU"))
        assert publisher.resident["device"] == left
    assert publisher.errors == {}


def test_removals_that_an_engine_joins_into_one_are_the_same(publisher: Publisher) -> None:
    publisher.publish(BlockStored([7], "GPU"), BlockRemoved([7, 7], "GPU"))
    joined = publisher.resident, publisher.errors
    publisher.publish(BlockStored([7], "GPU"), BlockRemoved([7], "GPU"), BlockRemoved([7], "GPU"))
    assert joined == ({"device": 0, "host": 0}, {"unknown_remove": 1})
    assert (publisher.resident, publisher.errors) == ({"device": 0, "host": 0}, {"unknown_remove": 2})


# -------------------------------------------------------------------------------------------- what is counted


def test_events_and_their_blocks_are_counted_by_type_and_medium(publisher: Publisher) -> None:
    publisher.publish(
        BlockStored([1, 2, 3], StorageMedium.GPU),
        BlockStored([1, 2], StorageMedium.CPU),
        BlockStored([4], None),
        BlockRemoved([1, 2, 3], "GPU"),
        BlockRemoved([1], "NVLINK_PEER"),
        AllBlocksCleared(),
        BlockMoved(),
    )
    assert publisher.blocks == {
        ("block_stored", "device"): 3,
        ("block_stored", "host"): 2,
        ("block_stored", "untagged"): 1,
        ("block_removed", "device"): 3,
        ("block_removed", "unknown"): 1,
    }
    expected = {**dict.fromkeys(publisher.blocks, 1), ("all_blocks_cleared", "untagged"): 1, ("other", "device"): 1}
    assert publisher.events == expected


def test_event_of_a_derived_class_is_what_it_derives_from(publisher: Publisher) -> None:
    publisher.publish(BlockStoredWithMetadata([1, 2], "GPU"))
    assert publisher.events == {("block_stored", "device"): 1}
    assert publisher.resident["device"] == 2


@pytest.mark.parametrize("collection", [tuple, set, frozenset, lambda hashes: dict.fromkeys(hashes).keys()])
def test_hashes_come_in_any_collection(publisher: Publisher, collection: Callable[[list[int]], Any]) -> None:
    publisher.publish(BlockStored(collection([1, 2, 3]), "GPU"), BlockRemoved(collection([2]), "GPU"))
    assert publisher.resident["device"] == 2
    assert publisher.errors == {}


def test_event_about_no_blocks_is_an_event(publisher: Publisher) -> None:
    publisher.publish(BlockStored([], "GPU"), BlockRemoved([], "GPU"), BlockRemoved([]))
    assert sum(publisher.events.values()) == 3
    assert publisher.blocks == publisher.errors == {}


def test_events_are_left_as_they_are(publisher: Publisher) -> None:
    stored = BlockStored([1, 2], "GPU")
    events = [stored]
    publisher.books.apply(events)
    assert events == [stored] == [BlockStored([1, 2], "GPU")]
    stored.block_hashes.append(3)  # As an engine does that joins its events.
    publisher.publish()
    assert publisher.resident["device"] == 2


# ----------------------------------------------------------------------------------------------- bad events


class Unspeakable:
    """Raises whatever is asked of it."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no {name}")

    def __hash__(self) -> int:
        raise RuntimeError("no hash")

    def __len__(self) -> int:
        raise RuntimeError("no length")

    def __iter__(self) -> Any:
        raise RuntimeError("no blocks")

    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__


NO_HASHES: tuple[Callable[[], Any], ...] = (
    lambda: None,
    lambda: 5,
    lambda: "abc",
    lambda: b"abc",
    lambda: bytearray(b"abc"),
    lambda: {1: 2},
    lambda: iter([1, 2]),
    lambda: [8, [9]],
    lambda: [8, {}],
    lambda: (8, bytearray(8)),
    lambda: [8, Unspeakable()],
    Unspeakable,
    object,
)


@pytest.mark.parametrize("kind", [BlockStored, BlockRemoved])
@pytest.mark.parametrize("make", NO_HASHES)
def test_event_without_hashes_loses_only_itself(
    publisher: Publisher, caplog: pytest.LogCaptureFixture, kind: Callable[..., Any], make: Callable[[], Any]
) -> None:
    publisher.publish(BlockStored([1, 8], "GPU"))
    publisher.publish(BlockStored([2], "GPU"), kind(make(), "GPU"), kind(make(), "CPU"), BlockStored([3], "GPU"))
    assert publisher.resident == {"device": 4, "host": 0}
    name = "block_stored" if kind is BlockStored else "block_removed"
    assert publisher.events[(name, "host")] == 1
    assert sum(publisher.events.values()) == 5
    assert publisher.blocks == {("block_stored", "device"): 4}
    assert publisher.errors == {"other": 2}
    (message,) = [record.getMessage() for record in caplog.records if record.name == LOGGER]
    assert kind.__name__ in message
    assert message.isprintable()


def test_iterator_is_left_for_the_engine(publisher: Publisher) -> None:
    hashes = iter([1, 2, 3])
    publisher.publish(BlockStored(hashes, "GPU"))
    assert list(hashes) == [1, 2, 3]


def test_event_without_its_attributes_is_counted_by_its_type(publisher: Publisher) -> None:
    bare = type("BlockRemoved", (), {})()
    publisher.publish(bare)
    assert publisher.events == {("block_removed", "untagged"): 1}
    assert publisher.errors == {"other": 1}


def test_event_whose_medium_cannot_be_read_empties_nothing(publisher: Publisher) -> None:
    def refuse(_self: object) -> Any:
        raise RuntimeError("no medium")

    removed = type("BlockRemoved", (), {"block_hashes": [1], "medium": property(refuse)})()
    publisher.publish(BlockStored([1], "GPU"), removed)
    assert publisher.resident["device"] == 1
    assert publisher.events == {("block_stored", "device"): 1, ("block_removed", "unknown"): 1}
    assert publisher.errors == {"other": 1}


@pytest.mark.parametrize(
    "event", [None, 5, "BlockStored", b"", ["BlockStored", [1]], {"type": "BlockStored"}, object()]
)
def test_what_is_no_event_is_of_another_type(publisher: Publisher, event: object) -> None:
    publisher.publish(event, BlockStored([1], "GPU"))
    assert publisher.events == {("other", "untagged"): 1, ("block_stored", "device"): 1}
    assert publisher.resident["device"] == 1


def test_signal_of_the_engine_passes(publisher: Publisher) -> None:
    def interrupt(_self: object) -> Any:
        raise KeyboardInterrupt

    stored = type("BlockStored", (), {"block_hashes": property(interrupt), "medium": "GPU"})()
    with pytest.raises(KeyboardInterrupt):
        publisher.publish(stored)


@pytest.fixture
def _quiet() -> Any:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


anything = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=4),
        st.binary(max_size=4),
        st.sampled_from(["GPU", "CPU", "FS", "OBJ", StorageMedium.CPU]),
        st.builds(Unspeakable),
        st.just(len),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.integers(), inner, max_size=3)),
    max_leaves=6,
)
garbage = st.one_of(
    anything,
    st.builds(BlockStored, anything, anything),
    st.builds(BlockRemoved, anything, anything),
    st.builds(BlockStored, st.lists(st.integers(0, 3)), st.sampled_from(["GPU", "CPU", None])),
    st.builds(BlockRemoved, st.lists(st.integers(0, 3)), st.sampled_from(["GPU", "CPU", None])),
    st.builds(AllBlocksCleared),
)


@pytest.mark.usefixtures("_quiet")
@settings(deadline=None)
@given(st.lists(st.lists(garbage, max_size=8), max_size=6), st.sampled_from(WAYS))
def test_garbage_raises_nothing_and_leaves_nothing_negative(batches: list[list[Any]], way: Way) -> None:
    publisher = Publisher(**way)
    for batch in batches:
        publisher.books.apply(batch)
    assert sum(publisher.events.values()) == sum(map(len, batches))
    assert set(publisher.cells(semconv.EVENTS)) == {(kind, medium) for kind in TYPES for medium in MEDIA}
    assert set(publisher.resident) <= {"device", "host", "disk", "external"}
    assert all(value >= 0 for value in publisher.resident.values())
    assert publisher.errors.keys() <= {"other", "unknown_remove"}


# ---------------------------------------------------------------------------------------------- random walks

WIRE: dict[Any, str] = {
    None: "untagged",
    "GPU": "device",
    "cuda:0": "device",
    StorageMedium.CPU: "host",
    "FS": "disk",
    "EXTERNAL": "external",
    "NVLINK_PEER": "unknown",
}


class Oracle:
    """A plain recount: how many copies of each block each medium has, and how many more were announced."""

    def __init__(self, *, copies: bool = False, holders: bool = False) -> None:
        self.copies = copies
        self.holders = holders
        self.held: dict[str, Counter[Hashable]] = {medium: Counter() for medium in MEDIA}
        self.more: dict[str, Counter[Hashable]] = {medium: Counter() for medium in MEDIA}
        self.seen = {"device", "host"}
        self.events: Counter[tuple[str, str]] = Counter()
        self.blocks: Counter[tuple[str, str]] = Counter()
        self.unknown = 0

    def apply(self, event: Any) -> None:
        if isinstance(event, AllBlocksCleared):
            self.events["all_blocks_cleared", "untagged"] += 1
            for counts in (*self.held.values(), *self.more.values()):
                counts.clear()
            return
        medium = WIRE[event.medium]
        kind = "block_stored" if isinstance(event, BlockStored) else "block_removed"
        self.events[kind, medium] += 1
        self.blocks[kind, medium] += len(event.block_hashes)
        self.seen.add(medium)
        for block in event.block_hashes:
            if kind == "block_stored":
                self.more[medium][block] += self.holders and bool(self.held[medium][block])
                self.held[medium][block] = self.held[medium][block] + 1 if self.copies else 1
            elif medium == "untagged":
                there = [name for name, held in self.held.items() if held[block]]
                self.unknown += not there
                for name in there:
                    self.held[name][block] = self.more[name][block] = 0
            elif self.held[medium][block]:
                self.held[medium][block] -= 1
            elif self.more[medium][block]:
                self.more[medium][block] -= 1
            else:
                self.unknown += 1

    @property
    def resident(self) -> dict[str, int]:
        return {
            medium: sum(copies > 0 for copies in held.values())
            for medium, held in self.held.items()
            if medium in self.seen - {"untagged", "unknown"}
        }


some_hashes = st.lists(st.sampled_from((*range(-2, 6), 2**63, bytes(32), b"\x01" * 32)), max_size=6)
some_event = st.one_of(
    st.builds(BlockStored, some_hashes, st.sampled_from(list(WIRE))),
    st.builds(BlockRemoved, some_hashes, st.sampled_from(list(WIRE))),
    st.builds(BlockStored, some_hashes, st.just("GPU")),
    st.builds(BlockRemoved, some_hashes, st.just("GPU")),
    st.builds(AllBlocksCleared),
)


def agrees(publisher: Publisher, oracle: Oracle) -> None:
    assert publisher.resident == oracle.resident
    assert publisher.errors == ({"unknown_remove": oracle.unknown} if oracle.unknown else {})


@settings(deadline=None)
@given(st.lists(some_event, max_size=60), st.sampled_from(WAYS))
def test_books_agree_with_a_recount_after_every_event(events: list[Any], way: Way) -> None:
    publisher, oracle = Publisher(**way), Oracle(**way)
    for event in events:
        publisher.publish(event)
        oracle.apply(event)
        agrees(publisher, oracle)
    assert publisher.events == dict(oracle.events)
    assert publisher.blocks == dict(+oracle.blocks)


@settings(deadline=None)
@given(st.lists(some_event, max_size=60), st.sampled_from(WAYS))
def test_batch_is_the_sum_of_its_events(events: list[Any], way: Way) -> None:
    publisher, oracle = Publisher(**way), Oracle(**way)
    publisher.publish(*events)
    for event in events:
        oracle.apply(event)
    agrees(publisher, oracle)


@settings(deadline=None)
@given(st.lists(some_event, max_size=60))
def test_nothing_is_remembered_of_blocks_that_are_gone(events: list[Any]) -> None:
    publisher = Publisher(copies=True)
    publisher.publish(*events)
    for event in events:
        if not isinstance(event, AllBlocksCleared):
            publisher.publish(BlockRemoved(event.block_hashes))
    for book in publisher.books._ledger.books.values():
        assert not book.blocks
