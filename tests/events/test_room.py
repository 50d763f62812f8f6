"""Rows of their own: the first of each source has them, whatever others take; a source takes no more than its share."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from kvcache_otel.events.index import BlockIndex
from kvcache_otel.events.room import SHARE, Room, Share
from kvcache_otel.events.worker import MORE, OTHER
from tests.events.payloads import batch, removed, stored
from tests.events.test_index import Received

if TYPE_CHECKING:
    import pytest


def test_the_first_of_each_source_has_room_when_the_others_have_used_up_all() -> None:
    room = Room(owners=10 + 2 * SHARE, further=2 * SHARE, other=OTHER)
    greedy = [Share(room, "greedy") for _ in range(3)]
    assert [sum(share.take() for _ in range(10_000)) for share in greedy] == [SHARE + 1, SHARE + 1, 1]
    late = Share(room, "late")
    assert [late.take(), late.take()] == [True, False]
    greedy[0].give_back()
    assert [late.take(), late.take()] == [True, False]


def test_room_that_is_given_back_is_there_again() -> None:
    rng = random.Random(1)
    room = Room(owners=40, further=20, other=OTHER)
    shares = [Share(room, str(number)) for number in range(20)]
    taken = dict.fromkeys(shares, 0)
    for _ in range(5_000):
        share = rng.choice(shares)
        if rng.random() < 0.5:
            first, further = taken[share] == 0, sum(max(0, count - 1) for count in taken.values())
            assert share.take() is (first or further < 20)
            taken[share] += first or further < 20
        elif taken[share]:
            share.give_back()
            taken[share] -= 1
        assert room.owners == 40 - sum(taken.values())
        assert room.further == 20 - sum(max(0, count - 1) for count in taken.values())


def test_who_is_added_when_others_have_used_up_all_has_rows(caplog: pytest.LogCaptureFixture) -> None:
    received = Received(owners=100)
    received.index = BlockIndex(received.recorder, further=30)
    for name in ("bad", "worse"):
        worker = received.index.add(name)
        for rank in range(50):
            worker.receive(batch(stored([1]), rank=rank))
    late = received.index.add("late")
    for rank in (7, 8):
        late.receive(batch(stored([1, 2, 3]), rank=rank))
    own = {key: value for key, value in received.resident.items() if key[0] != OTHER}
    assert own == {("bad", rank, "device"): 1 for rank in range(31)} | {
        ("worse", 0, "device"): 1,
        ("late", 7, "device"): 3,
    }
    assert received.resident[OTHER, MORE, "device"] == 19 + 49 + 3
    assert len([message for message in caplog.messages if "no room" in message]) == 1
    received.index.release("bad")
    late.receive(batch(stored([1]), rank=9))
    assert received.resident["late", 9, "device"] == 1


def test_a_source_that_makes_up_workers_and_ranks_is_said(caplog: pytest.LogCaptureFixture) -> None:
    received = Received(owners=1000)
    share = received.index.share("'any' at tcp://*:5557")
    for name in ("any/a", "any/b", "any/c"):
        worker = received.index.add(name, share=share)
        for rank in range(100):
            worker.receive(batch(stored([1]), rank=rank))
    own = {key for key in received.resident if key[0] != OTHER}
    assert len(own) == SHARE + 1
    assert received.resident[OTHER, MORE, "device"] == 300 - SHARE - 1
    assert caplog.messages == [
        f"kvcache: source 'any' at tcp://*:5557 names more than {SHARE} workers and ranks; the others are added up in "
        f"kvcache.worker={OTHER!r}"
    ]
    received.index.add("other").receive(batch(stored([1, 2])))
    assert received.resident["other", 0, "device"] == 2


def test_books_of_sources_that_come_and_go_add_up_by_worker_and_rank_and_leave_nothing() -> None:
    rng = random.Random(4)
    received = Received(owners=500)
    index = received.index
    books: dict[str, dict[Share, dict[int, set[int]]]] = {}  # By worker, source and rank.
    for _ in range(3_000):
        name = rng.choice("abcd")
        sources = books.setdefault(name, {})
        done = rng.random()
        if name not in index.workers or (done < 0.1 and len(sources) < 4):
            share = index.share(name)
            if name not in index.workers:
                index.add(name, engine="sglang", share=share)
            sources[share] = {}
            continue
        worker, share = index.workers[name], rng.choice(list(sources))
        if done < 0.8:
            rank, blocks = rng.randrange(3), [rng.randrange(20) for _ in range(rng.randrange(1, 6))]
            gone = rng.random() < 0.4
            worker.receive(batch((removed if gone else stored)(blocks), rank=rank), share=share)
            held = sources[share].setdefault(rank, set())
            held.difference_update(blocks) if gone else held.update(blocks)
        elif done < 0.9:
            worker.reset(share=share)
            sources[share] = {rank: set() for rank in sources[share]}
        elif len(sources) > 1:
            worker.leave(share)
            del sources[share]
        else:
            worker.release()
            sources.clear()
        assert received.resident == {
            (worker, rank, "device"): sum(len(held.get(rank, ())) for held in sources.values())
            for worker, sources in books.items()
            for rank in {rank for held in sources.values() for rank in held}
        }
        assert not received.errors.keys() - {"unknown_remove"}
    index.close()
    assert received.resident == {}
    room = index._room  # pyright: ignore[reportPrivateUsage]
    assert room.owners == room.further == 500
