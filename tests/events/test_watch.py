"""Many sources in one loop, over real sockets: every count is what the publishers count, and none stops another."""

from __future__ import annotations

import gc
import logging
import os
import random
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
import zmq

from kvcache_otel import semconv
from kvcache_otel.events import inlet as inlet_module
from kvcache_otel.events import subscription as subscription_module
from kvcache_otel.events import watch as watch_module
from kvcache_otel.events.feed import Feed
from kvcache_otel.events.few import FEW
from kvcache_otel.events.source import Source, parse
from kvcache_otel.events.subscription import MOST_TOPICS, Subscription
from kvcache_otel.events.worker import MOST_RANKS, OTHER
from tests.events.between import Proxy, Relay
from tests.events.fake_peer import memory, tcp_server
from tests.events.fake_publisher import (
    MEDIUM,
    RANK,
    TIER,
    TYPE,
    WORKER,
    Driven,
    Expected,
    FakePublisher,
    frame,
    traffic,
)
from tests.events.payloads import CLEARED, batch, encode, removed, removed_array, stored, stored_array
from tests.support.processes import free_port, wait_until

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

ZERO: dict[str, int] = {}
ABOUT_WORKERS = [spec for spec in semconv.METRICS.values() if WORKER in spec.attributes]


@pytest.fixture
def driven() -> Iterator[Driven]:
    driven = Driven()
    yield driven
    driven.close()


@pytest.fixture(autouse=True)
def _logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def said(caplog: pytest.LogCaptureFixture, *words: str) -> list[str]:
    """What was logged that has these words."""
    return [message for message in caplog.messages if all(word in message for word in words)]


def workers(driven: Driven) -> set[str]:
    """Every worker that any row is about."""
    return {
        str(point.attributes[WORKER])
        for spec in ABOUT_WORKERS
        for point in driven.recorder.points(spec)
        if WORKER in point.attributes
    }


def wrong_sources(driven: Driven) -> int | float:
    """How often a source was found to be wrong."""
    hook = semconv.KVCACHE_TELEMETRY_HOOK
    return driven.rows(semconv.TELEMETRY_ERRORS, hook).get("watch.sources", 0)


# -- counts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copies", [True, False])
def test_several_sources_each_to_its_books(driven: Driven, copies: bool) -> None:
    rng = random.Random(1)
    publishers = [driven.publisher(copies=copies, rank=rank) for rank in (0, 0, 3)]
    engine = "vllm" if copies else "sglang"
    driven.want(*(f"w{n}={publisher.endpoint}?engine={engine}" for n, publisher in enumerate(publishers)))
    assert driven.watch.index.workers.keys() == {"w0", "w1", "w2"}
    driven.subscribed(*publishers)
    assert driven.resident("w0") == {}
    for _ in range(150):
        rng.choice(publishers).publish(*traffic(rng))
        if rng.random() < 0.3:
            driven.step(0)
    driven.until(lambda: all(driven.agrees(f"w{n}", each.expected, each.rank) for n, each in enumerate(publishers)))
    for n, publisher in enumerate(publishers):
        assert driven.batches(f"w{n}") == {publisher.rank: ZERO}
        assert driven.failures(f"w{n}") == ZERO
        assert driven.rows(semconv.BLOCK_SIZE, RANK, TIER, worker=f"w{n}")[publisher.rank, "device"] == 16
    errors = driven.rows(semconv.ACCOUNTING_ERRORS, semconv.KVCACHE_REASON)
    assert errors["unknown_remove"] == sum(publisher.expected.unknown for publisher in publishers) > 0
    assert sum(errors.values()) == errors["unknown_remove"]


def test_rows_of_batches_are_at_zero_from_the_first_batch_on_and_not_before(driven: Driven) -> None:
    publisher = driven.publisher(rank=5)
    driven.want(f"w={publisher.endpoint}")
    driven.subscribed(publisher)
    assert driven.batches("w") == {}
    assert driven.rows(semconv.EVENT_LAST_AGE, RANK, worker="w") == {}
    publisher.publish()
    driven.until(lambda: driven.batches("w"))
    assert driven.batches("w") == {5: ZERO}
    assert set(driven.rows(semconv.EVENT_LAST_AGE, RANK, worker="w")) == {5}


def test_e13_four_ranks_of_one_publisher(driven: Driven) -> None:
    publisher = driven.publisher()
    driven.want(f"w={publisher.endpoint}?engine=vllm")
    driven.subscribed(publisher)
    for rank in (2, 0, 1, 3):
        publisher.publish(stored([7]), rank=rank)
    driven.until(lambda: driven.resident("w") == {(rank, "device"): 1 for rank in range(4)})
    # One sequence of numbers cannot say of which rank a batch is that did not come: it is the first one's.
    assert driven.batches("w") == {2: ZERO}


def test_e13_four_ranks_on_four_ports_are_one_worker(driven: Driven) -> None:
    ranks = [driven.publisher(rank=rank) for rank in range(4)]
    driven.want(*(f"w={publisher.endpoint}?engine=vllm" for publisher in ranks))
    driven.subscribed(*ranks)
    for publisher in ranks:
        publisher.publish(stored([7]))
        for _ in range(publisher.rank):
            publisher.publish(stored([8]), drop=True)
        publisher.publish(stored([9]))
    driven.until(lambda: driven.resident("w") == {(rank, "device"): 2 for rank in range(4)})
    assert driven.batches("w") == {0: ZERO, 1: {"lost": 1}, 2: {"lost": 2}, 3: {"lost": 3}}
    assert driven.watch.index.workers.keys() == {"w"}


def test_a_reset_clears_every_rank_of_its_publisher_and_no_other(driven: Driven) -> None:
    many, other = driven.publisher(), driven.publisher(rank=9)
    driven.want(f"w={many.endpoint}?engine=vllm", f"w={other.endpoint}?engine=vllm")
    driven.subscribed(many, other)
    for rank in range(4):
        many.publish(stored([1, 2, 3]), rank=rank)
    other.publish(stored([4]))
    driven.until(lambda: sum(driven.resident("w").values()) == 13)
    many.send(b"", frame(0), batch(stored([5]), rank=1))
    driven.until(lambda: driven.resident("w")[1, "device"] == 1)
    assert driven.resident("w") == {
        (0, "device"): 0,
        (1, "device"): 1,
        (2, "device"): 0,
        (3, "device"): 0,
        (9, "device"): 1,
    }
    assert driven.batches("w") == {0: {"resets": 1}, 9: ZERO}


@pytest.mark.parametrize("rank", [None, 3])
def test_sources_of_one_name_and_one_rank_are_added_up_and_said(
    driven: Driven, caplog: pytest.LogCaptureFixture, rank: int | None
) -> None:
    rng = random.Random(8)
    one, other = driven.publisher(), driven.publisher()
    texts = [f"w={publisher.endpoint}?engine=sglang" for publisher in (one, other)]
    of = rank or 0
    expected = {publisher: Expected(copies=False) for publisher in (one, other)}

    def send(publisher: FakePublisher, *events: dict[str, Any]) -> None:
        publisher.send(b"", frame(publisher.number), batch(*events, rank=rank) if rank else encode([1.5, events]))
        publisher.number += 1
        expected[publisher].apply(events)

    def resident() -> dict[tuple[int, str], int]:
        both = [each.resident() for each in expected.values()]
        return {(of, tier): sum(each.get(tier, 0) for each in both) for tier in {*both[0], *both[1]}}

    driven.want(*texts)
    driven.subscribed(one, other)
    for _ in range(50):
        for publisher in (one, other):
            send(publisher, *traffic(rng))
    driven.until(lambda: driven.resident("w") == resident())
    assert {rank for rank, _, _ in driven.rows(semconv.EVENTS, RANK, TYPE, MEDIUM, worker="w")} == {of}
    [line] = said(caplog, "their rows are added up")
    assert f"'w' at {one.endpoint}" in line
    assert f"'w' at {other.endpoint}" in line
    assert f"are both worker 'w', rank {of}, " in line
    assert driven.rows(semconv.TELEMETRY_ERRORS, semconv.KVCACHE_TELEMETRY_HOOK) == {"watch.sources": 1}
    one.number, expected[one] = 0, Expected(copies=False)  # It starts again: the other's books stay.
    send(one, stored([1, 2]))
    driven.until(lambda: driven.batches("w")[of].get("resets") == 1)
    tiers = driven.resident("w").keys()
    assert driven.resident("w") == dict.fromkeys(tiers, 0) | resident()
    driven.want(texts[1])
    expected[one] = Expected(copies=False)
    assert driven.resident("w") == dict.fromkeys(tiers, 0) | resident()
    driven.want(*texts)  # It goes on where it was, and is said to be the same again.
    driven.until(lambda: one.subscriptions.count(b"\x01") == 2)
    send(one, stored([7, 8, 9]))
    driven.until(lambda: driven.resident("w") == dict.fromkeys(tiers, 0) | resident())
    assert driven.rows(semconv.TELEMETRY_ERRORS, semconv.KVCACHE_TELEMETRY_HOOK) == {"watch.sources": 2}
    assert len(said(caplog, "their rows are added up")) == 1


def test_rows_of_a_source_end_with_it_though_its_worker_has_another(driven: Driven) -> None:
    stays, leaves = driven.publisher(rank=0), driven.publisher(rank=1)
    texts = [f"w={publisher.endpoint}?engine=vllm" for publisher in (stays, leaves)]
    driven.want(*texts)
    driven.subscribed(stays, leaves)
    for publisher in (stays, leaves):
        publisher.publish(stored([1, 2]), stored([3], "CPU"))
    specs = [spec for spec in ABOUT_WORKERS if semconv.KVCACHE_RANK_DP in spec.attributes]

    def ranks() -> dict[str, set[Any]]:
        return {spec.name: {row.attributes[RANK] for row in driven.recorder.points(spec)} for spec in specs}

    driven.until(lambda: driven.agrees("w", stays.expected) and driven.agrees("w", leaves.expected, 1))
    assert set(map(frozenset, ranks().values())) == {frozenset({0, 1})}
    driven.want(texts[0])
    assert set(map(frozenset, ranks().values())) == {frozenset({0})}
    assert driven.agrees("w", stays.expected)


@pytest.mark.parametrize(
    ("options", "left"),
    [("?engine=vllm", {"host"}), ("?engine=vllm&clears=all", set()), ("?engine=sglang&clears=device", {"host"})],
)
def test_what_a_source_says_that_all_blocks_cleared_clears(driven: Driven, options: str, left: set[str]) -> None:
    publisher = driven.publisher()
    driven.want(f"w={publisher.endpoint}{options}")
    driven.subscribed(publisher)
    publisher.publish(stored([1, 2]), stored([3, 4], "CPU"))
    driven.until(lambda: driven.resident("w") == {(0, "device"): 2, (0, "host"): 2})
    publisher.publish(CLEARED)
    driven.until(lambda: driven.resident("w").get((0, "device")) == 0)
    assert {tier for (_, tier), blocks in driven.resident("w").items() if blocks} == left


CHANGES = {
    "another rank says it": ("", "{}\nw={}?block_size=16", True),
    "the engine that it is": ("?engine=vllm", "{}?engine=auto", True),
    "the engine that is found out": ("", "{}?engine=vllm", True),
    "another engine": ("?engine=vllm", "{}?engine=sglang", False),
    "what its engine clears": ("?engine=vllm", "{}?engine=vllm&clears=device", True),
    "what it has not cleared": ("?engine=vllm", "{}?engine=vllm&clears=all", False),
    "its topic": ("", "{}?topic=kv", False),
}


@pytest.mark.parametrize(("before", "after", "stays"), CHANGES.values(), ids=CHANGES)
def test_a_source_goes_on_unless_what_its_books_hang_on_changes(
    driven: Driven, before: str, after: str, stays: bool
) -> None:
    publisher, other = driven.publisher(topic=b"kv"), driven.publisher(rank=1)
    bystander = driven.publisher()
    apart = f"apart={bystander.endpoint}"
    driven.want(f"w={publisher.endpoint}{before}", apart)
    driven.subscribed(publisher, bystander)
    publisher.publish(stored([1, 2, 3]))
    bystander.publish(stored([1]))
    driven.until(lambda: driven.agrees("w", publisher.expected) and driven.agrees("apart", bystander.expected))
    kept = list(driven.watch.subscriptions.values())
    driven.want(*f"w={after.format(publisher.endpoint, other.endpoint)}".splitlines(), apart)
    now = list(driven.watch.subscriptions.values())
    assert [one in now for one in kept] == [stays, True]
    assert driven.watch.subscriptions.keys() == {subscription.source for subscription in now}
    if not stays:
        publisher.expected = Expected()
        driven.until(lambda: sum(one.startswith(b"\x01") for one in publisher.subscriptions) > 1)
    publisher.publish(stored([4]), removed([4]), stored([5]))
    driven.until(lambda: driven.agrees("w", publisher.expected))
    assert driven.agrees("apart", bystander.expected)
    driven.want()
    assert not driven.watch.index.workers


def test_what_is_due_to_a_source_that_has_changed_is_done_after_a_new_connection_too(
    driven: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though nobody asks every source now and then: what comes of a new socket says what may be due."""
    for module, name, value in (
        (watch_module, "EVERY_SECONDS", 3600.0),
        (watch_module, "LOOK_SECONDS", 3600.0),
        (subscription_module, "BROKEN_OFF_SECONDS", 0.1),
        (inlet_module, "LARGEST", 1000),
    ):
        monkeypatch.setattr(module, name, value)
    publisher = driven.publisher()
    driven.want(f"w={publisher.endpoint}")
    driven.subscribed(publisher)
    publisher.publish(stored([1]))
    driven.until(lambda: driven.agrees("w", publisher.expected))
    driven.want(f"w={publisher.endpoint}?engine=vllm")
    publisher.send(b"", frame(0), bytes(2000))  # ZeroMQ breaks it off.
    driven.until(lambda: publisher.subscriptions.count(b"\x01") == 2)
    publisher.publish(stored([2]), drop=True)
    publisher.publish(stored([3]))
    driven.until(lambda: driven.batches("w") == {0: {"lost": 1}}, 5.0)


def test_a_rank_ends_with_the_only_source_that_told_it_and_begins_with_another(
    driven: Driven, caplog: pytest.LogCaptureFixture
) -> None:
    before, stays, after = driven.publisher(rank=1), driven.publisher(rank=0), driven.publisher(rank=1)
    texts = [f"w={publisher.endpoint}?engine=vllm" for publisher in (before, stays, after)]
    for wanted, publisher in ((texts[:2], before), (texts[1:], after)):
        driven.want(*wanted)
        driven.subscribed(publisher, stays)
        publisher.publish(stored([1, 2, 3]), stored([1]))
        driven.until(lambda: driven.resident("w").get((1, "device")) == 3)
        publisher.publish(removed([1, 2, 3]))  # What is left of 1 is its second copy.
        driven.until(lambda: driven.resident("w").get((1, "device")) == 1)
    events = driven.rows(semconv.EVENTS, RANK, TYPE, MEDIUM, worker="w")
    assert events[1, "block_stored", "device"] == 2, "those of the other source"
    assert not said(caplog, "added up")
    room = driven.watch.index._room  # pyright: ignore[reportPrivateUsage]
    assert room.owners == 1024 - 1, "it needs no more room than before"
    driven.want()
    assert workers(driven) == set()
    assert room.owners == 1024


def test_ranks_without_end_are_bounded_and_reset_together(driven: Driven) -> None:
    driven.watch.index._room.books = 10  # pyright: ignore[reportPrivateUsage]
    publisher = driven.publisher()
    driven.want(f"w={publisher.endpoint}?engine=vllm")
    driven.subscribed(publisher)
    for rank in range(MOST_RANKS + 20):
        publisher.publish(stored([1]), rank=rank)
    driven.until(lambda: driven.heard("w") + driven.heard(OTHER) == MOST_RANKS + 20)
    [feed] = next(iter(driven.watch.subscriptions.values())).feeds.values()
    assert len(feed.worker.ranks) == MOST_RANKS + 10 + 1
    assert sum(driven.rows(semconv.RESIDENT_BLOCKS, WORKER, RANK, TIER).values()) == MOST_RANKS + 10
    assert driven.recorder.dropped("label_overflow").value == 10
    publisher.send(b"", frame(0), batch(rank=0))
    driven.until(lambda: driven.batches("w")[0] == {"resets": 1})
    assert set(driven.rows(semconv.RESIDENT_BLOCKS, WORKER, RANK, TIER).values()) == {0}


def test_ages(driven: Driven) -> None:
    publisher = driven.publisher()
    driven.want(f"w={publisher.endpoint}")
    driven.subscribed(publisher)
    publisher.publish(stored([1]))
    driven.until(lambda: driven.rows(semconv.EVENT_LAST_AGE, RANK, worker="w"))
    came = time.monotonic()

    def age() -> float:
        return driven.rows(semconv.EVENT_LAST_AGE, RANK, worker="w")[0]

    driven.until(lambda: age() > 0.3)
    assert age() <= time.monotonic() - came + 1
    publisher.publish(stored([2]))
    driven.until(lambda: age() < 0.3)


def test_a_given_block_size_and_engine(driven: Driven) -> None:
    publisher = driven.publisher()
    driven.want(f"w={publisher.endpoint}?engine=sglang&block_size=64")
    driven.subscribed(publisher)
    publisher.send(b"", frame(0), batch(stored_array([1], size=0), stored_array([1], size=0), removed_array([1])))
    driven.until(lambda: driven.heard("w") == 3)
    assert driven.resident("w") == {(0, "device"): 0}
    assert driven.rows(semconv.BLOCK_SIZE, RANK, TIER, worker="w") == {(0, "device"): 64}


def test_the_index_is_maintained_until_the_end_and_then_has_no_rows(driven: Driven) -> None:
    publisher = driven.publisher()
    driven.want(f"w={publisher.endpoint}")
    driven.subscribed(publisher)
    publisher.publish(stored([1]))
    driven.until(lambda: driven.resident("w"))
    assert driven.rows(semconv.INDEX_MAINTAINED) == {(): 1}
    driven.close()
    assert driven.rows(semconv.INDEX_MAINTAINED) == {(): 0}
    assert workers(driven) == set()


def test_what_is_recorded_is_what_the_catalogue_says_of_watch(driven: Driven) -> None:
    model = yaml.safe_load((Path(__file__).parents[2] / "model" / "kvcache.yaml").read_text())
    said_of_it = {
        group["metric_name"]: {attribute["ref"] for attribute in group.get("attributes", ())}
        for group in model["groups"]
        if "watch" in group.get("annotations", {}).get("kvcache", {}).get("recorded_by", ())
    }
    publisher = driven.publisher()
    driven.watch.want([Source("odd", "ipc://" + "x" * 200), parse(f"w={publisher.endpoint}")])
    driven.subscribed(publisher)
    publisher.publish(stored([1]))
    driven.until(lambda: driven.heard("w"))
    found = {
        spec.name: set(point.attributes) for spec in semconv.METRICS.values() for point in driven.recorder.points(spec)
    }
    assert found.keys() == said_of_it.keys()
    identity = set(dict(driven.recorder.identity.attributes()))
    for name, attributes in found.items():  # A row about a worker is about nobody else; others are about this process.
        assert attributes <= said_of_it[name] | (set() if WORKER in attributes else identity), name


# -- down, up, restarted -----------------------------------------------------------------------------------------------


def test_a_source_that_is_down_at_first(driven: Driven, caplog: pytest.LogCaptureFixture) -> None:
    port, other = free_port(), driven.publisher()
    driven.want(f"late=tcp://127.0.0.1:{port}", f"other={other.endpoint}")
    driven.subscribed(other)
    other.publish(stored([1]))
    driven.until(lambda: driven.agrees("other", other.expected))
    driven.until(lambda: said(caplog, "'late'", "cannot be reached", f"tcp://127.0.0.1:{port}"))
    late = driven.publisher(port=port)
    driven.subscribed(late)
    late.publish(stored([1, 2]))
    driven.until(lambda: driven.agrees("late", late.expected))
    assert len(said(caplog, "cannot be reached")) == 1
    assert len(said(caplog, "'late' is connected")) == 1
    assert driven.failures("late") == ZERO


def test_a_publisher_that_is_killed_and_started_again(driven: Driven, caplog: pytest.LogCaptureFixture) -> None:
    rng = random.Random(2)
    other, first = driven.publisher(), driven.publisher()
    driven.want(f"w={first.endpoint}?engine=vllm", f"other={other.endpoint}?engine=vllm")
    driven.subscribed(first, other)
    for _ in range(20):
        first.publish(*traffic(rng))
        other.publish(*traffic(rng))
    driven.until(lambda: driven.agrees("w", first.expected) and driven.agrees("other", other.expected))
    before = sum(driven.resident("w").values())
    assert before > 0
    driven.drop(first)
    driven.until(lambda: said(caplog, "'w' is disconnected"))
    assert sum(driven.resident("w").values()) == before
    again = driven.publisher(port=first.port)
    driven.subscribed(again)
    again.publish()
    driven.until(lambda: driven.batches("w")[0] == {"resets": 1})
    assert sum(driven.resident("w").values()) == 0
    hashes = [rng.randrange(40) for _ in range(30)]
    again.publish(stored(hashes))
    driven.until(lambda: driven.resident("w")[0, "device"] == len(set(hashes)))
    other.publish(stored([100]))
    driven.until(lambda: driven.agrees("other", other.expected))
    assert driven.batches("w") == {0: {"resets": 1}}
    assert driven.batches("other") == {0: ZERO}
    assert len(said(caplog, "'w': its publisher has started again")) == 1


@pytest.mark.parametrize("unheard", [1, 10, 15], ids=["below", "the very next", "above"])
def test_a_publisher_that_starts_again_unheard_is_found_out_by_its_replay(driven: Driven, unheard: int) -> None:
    """By the time somebody hears it, its numbers may be anywhere, the one that would have come next included."""
    first = driven.publisher(replay="new")
    ports = {"port": first.port, "replay_port": first.replay_port}
    driven.want(f"w={first.endpoint}?engine=vllm&replay=tcp://127.0.0.1:{first.replay_port}")
    driven.subscribed(first)
    for number in range(10):
        first.publish(stored([number]))
    driven.until(lambda: driven.agrees("w", first.expected))
    driven.drop(first)
    again = driven.publisher(replay="new", **ports)
    for number in range(unheard):
        again.publish(stored([100 + number]), drop=True)
    driven.subscribed(again)
    again.publish(stored([200]))
    driven.until(lambda: driven.batches("w")[0])
    driven.until(lambda: driven.resident("w")[0, "device"] == unheard + 1)
    driven.until(lambda: driven.batches("w") == {0: {"resets": 1, "recovered": unheard}})


@pytest.mark.parametrize("published", [0, 5])
def test_a_publisher_that_starts_again_and_falls_silent_is_found_out_by_its_replay(
    driven: Driven, published: int
) -> None:
    first = driven.publisher(replay="old")
    ports = {"port": first.port, "replay_port": first.replay_port}
    driven.want(f"w={first.endpoint}?engine=vllm&replay={first.replay_port}")
    driven.subscribed(first)
    for number in range(10):
        first.publish(stored([number]))
    driven.until(lambda: driven.agrees("w", first.expected))
    if not published:  # That it has nothing means something where its replay has answered before.
        [stream] = [feed.stream for each in driven.watch.subscriptions.values() for feed in each.feeds.values()]
        stream.connected(time.monotonic())
        driven.until(lambda: first.requests == 2)
        driven.until(lambda: stream.due > time.monotonic() + 5)
    driven.drop(first)
    again = driven.publisher(replay="old", **ports)
    for number in range(published):
        again.publish(stored([100 + number]), drop=True)
    driven.until(lambda: driven.batches("w")[0])
    driven.until(lambda: driven.resident("w")[0, "device"] == published)
    driven.until(lambda: driven.batches("w") == {0: {"resets": 1} | ({"recovered": published} if published else {})})


def test_an_engine_that_starts_after_its_watch_and_falls_silent(driven: Driven) -> None:
    port, replay_port = free_port(), free_port()
    driven.want(f"w=tcp://127.0.0.1:{port}?engine=vllm&replay={replay_port}")
    for _ in range(20):
        driven.step()
    late = driven.publisher(port=port, replay="new", replay_port=replay_port)
    for number in range(10):
        late.publish(stored([number]), drop=True)
    driven.until(lambda: driven.resident("w").get((0, "device")) == 10)
    assert driven.batches("w") == {0: ZERO}


def test_what_is_sent_while_nobody_is_connected_is_recovered_though_nothing_follows(driven: Driven) -> None:
    publisher = driven.publisher(replay="new")
    relay = Relay(publisher.port)
    driven.want(f"w=tcp://127.0.0.1:{relay.port}?engine=vllm&replay=tcp://127.0.0.1:{publisher.replay_port}")
    driven.subscribed(publisher)
    for number in range(10):
        publisher.publish(stored([number]))
    driven.until(lambda: driven.agrees("w", publisher.expected))
    relay.cut()
    publisher.publish(stored([10, 11]), drop=True)
    publisher.publish(removed([0, 1, 2]), drop=True)
    driven.until(lambda: driven.agrees("w", publisher.published))
    driven.until(lambda: driven.batches("w") == {0: {"recovered": 2}})
    relay.close()


def test_a_publisher_that_comes_and_goes_does_not_fill_the_log(
    driven: Driven, caplog: pytest.LogCaptureFixture
) -> None:
    [connections, lines] = [0, subscription_module.LINES]
    with tcp_server(lambda client: client.close()) as port:
        driven.want(f"w=tcp://127.0.0.1:{port}")
        [subscription] = driven.watch.subscriptions.values()
        for _ in range(50):
            connections += 1
            subscription._changed(zmq.EVENT_CONNECTED, 1000.0)  # pyright: ignore[reportPrivateUsage]
            subscription._changed(zmq.EVENT_DISCONNECTED, 1000.0)  # pyright: ignore[reportPrivateUsage]
        assert len(said(caplog, "'w'")) == lines
        assert len(said(caplog, "no more of its connections for a minute")) == 1
        subscription._changed(zmq.EVENT_CONNECTED, 1061.0)  # pyright: ignore[reportPrivateUsage]
        assert len(said(caplog, "'w'")) == lines + 1


# -- lost and recovered ------------------------------------------------------------------------------------------------


def test_without_replay_what_is_dropped_is_lost_and_the_views_differ(driven: Driven) -> None:
    rng = random.Random(3)
    publisher = driven.publisher()
    driven.want(f"w={publisher.endpoint}?engine=vllm")
    driven.subscribed(publisher)
    publisher.publish(stored([1]))
    for _ in range(200):
        publisher.publish(stored([rng.randrange(10**6)]), *traffic(rng), drop=rng.random() < 0.2)
    publisher.publish(stored([2]))
    driven.until(lambda: driven.agrees("w", publisher.expected))
    assert publisher.dropped > 20
    assert driven.batches("w") == {0: {"lost": publisher.dropped}}
    assert not driven.agrees("w", publisher.published)


@pytest.mark.parametrize("form", ["old", "new"])
@pytest.mark.parametrize("topic", [b"", b"kv@pod@model"])
def test_with_replay_what_is_dropped_is_recovered_and_the_views_agree(driven: Driven, form: str, topic: bytes) -> None:
    rng = random.Random(4)
    publisher = driven.publisher(replay=form, topic=topic)
    driven.want(f"w={publisher.endpoint}?engine=vllm&replay={publisher.replay_port}")
    driven.subscribed(publisher)
    publisher.publish(stored([1]))
    driven.until(lambda: driven.heard("w") == 1)
    for _ in range(200):
        publisher.publish(stored([rng.randrange(10**6)]), *traffic(rng), drop=rng.random() < 0.2)
        if rng.random() < 0.1:
            driven.step(0)
    publisher.publish(stored([2]))
    driven.until(lambda: driven.agrees("w", publisher.published))
    assert publisher.dropped > 20
    assert not driven.agrees("w", publisher.expected)
    assert driven.batches("w") == {0: {"recovered": publisher.dropped}}
    assert driven.failures("w") == ZERO


@pytest.mark.parametrize("form", ["old", "new"])
def test_what_was_published_before_is_replayed_though_the_publisher_is_idle(driven: Driven, form: str) -> None:
    rng = random.Random(5)
    publisher = driven.publisher(replay=form, rank=1)
    for _ in range(40):
        publisher.publish(*traffic(rng))
    driven.want(f"w={publisher.endpoint}?engine=vllm&replay={publisher.replay_port}")
    driven.until(lambda: driven.agrees("w", publisher.published, 1))
    assert driven.batches("w") == {1: ZERO}
    driven.subscribed(publisher)
    publisher.publish(stored([1000]))
    driven.until(lambda: driven.agrees("w", publisher.published, 1))
    assert driven.batches("w") == {1: ZERO}


def test_a_replay_that_nobody_answers_ends_and_what_is_missing_is_lost(
    driven: Driven, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [1000.0]
    monkeypatch.setattr(driven.watch, "_clock", lambda: now[0])
    publisher = driven.publisher()
    driven.want(f"w={publisher.endpoint}?replay={free_port()}")
    driven.subscribed(publisher)
    publisher.publish(stored([1]))
    publisher.publish(stored([2]), drop=True)
    publisher.publish(stored([3]))

    def lost() -> bool:
        now[0] += 0.5
        return driven.batches("w") == {0: {"lost": 1}}

    driven.until(lost)
    assert driven.resident("w") == {(0, "device"): 2}
    assert len(said(caplog, "'w': no answer from its replay at tcp://127.0.0.1:")) == 1


def test_a_replay_that_we_do_not_wait_for_is_not_said_to_be_silent(
    driven: Driven, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = driven.publisher(replay="new")
    driven.want(f"w={publisher.endpoint}?replay={publisher.replay_port}")
    driven.subscribed(publisher)
    publisher.publish(stored([1]))
    driven.until(lambda: driven.heard("w") == 1)
    driven.publishers.remove(publisher)  # It answers nothing from now on.
    one, two, three = (batch(stored([number])) for number in (2, 3, 4))
    publisher.send(b"", frame(2), two)
    [feed] = next(iter(driven.watch.subscriptions.values())).feeds.values()
    asked: Any = feed
    driven.until(lambda: asked._inlet is not None)
    publisher.send(b"", frame(1), one)
    driven.until(lambda: asked._inlet is None)
    publisher.send(b"", frame(4), three)
    driven.until(lambda: asked._inlet is not None)
    driven.want()
    publisher.close()
    assert said(caplog, "no answer") == []


def test_losses_have_a_row_though_nothing_could_be_read(driven: Driven) -> None:
    publisher = driven.publisher(rank=3)
    driven.want(f"w={publisher.endpoint}?engine=vllm")
    driven.subscribed(publisher)
    for number in (5, 9, 12):
        publisher.send(b"", frame(number), b"\xc1")
    driven.until(lambda: driven.batches("w") == {0: {"lost": 5}})
    for number in (13, 15):
        publisher.send(b"", frame(number), batch(stored([number]), rank=3))
    driven.until(lambda: driven.batches("w") == {0: {"lost": 5}, 3: {"lost": 1}})
    assert sum(driven.failures("w").values()) == 3


# -- what is hostile ---------------------------------------------------------------------------------------------------


@contextmanager
def _flood(port_of: list[int], send: Any) -> Generator[None]:
    """Sends from a thread of its own, as fast as it can."""
    stop, ready = threading.Event(), threading.Event()

    def run() -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        publisher = context.socket(zmq.PUB)
        publisher.setsockopt(zmq.SNDHWM, 100)
        port_of.append(publisher.bind_to_random_port("tcp://127.0.0.1"))
        ready.set()
        rng = random.Random(6)
        while not stop.is_set():
            send(publisher, rng)
        context.destroy(linger=0)

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(10)
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _garbage(publisher: zmq.Socket[bytes], rng: random.Random) -> None:
    frames = [rng.randbytes(rng.choice((0, 1, 8, 300, 20_000))) for _ in range(rng.choice((1, 2, 3, 3, 3, 4, 9)))]
    if len(frames) == 3 and rng.random() < 0.7:
        frames[1] = frame(rng.choice((rng.randrange(100), rng.randrange(2**64))))
    publisher.send_multipart(frames)


def test_garbage_at_full_speed_hurts_no_other(driven: Driven, caplog: pytest.LogCaptureFixture) -> None:
    rng, ports = random.Random(7), []
    good = [driven.publisher() for _ in range(2)]
    with _flood(ports, _garbage):
        driven.want(
            f"bad=tcp://127.0.0.1:{ports[0]}", *(f"w{n}={each.endpoint}?engine=vllm" for n, each in enumerate(good))
        )
        driven.subscribed(*good)
        driven.until(lambda: sum(driven.failures("bad").values()) > 500)
        for _ in range(100):
            for publisher in good:
                publisher.publish(*traffic(rng))
            driven.step(0)
        driven.until(lambda: all(driven.agrees(f"w{n}", each.expected) for n, each in enumerate(good)))
        failures = driven.failures("bad")
        assert {"frame_count", "sequence_frame", "msgpack"} <= failures.keys()
        driven.until(lambda: sum(driven.failures("bad").values()) > sum(failures.values()))
    assert driven.batches("w0") == driven.batches("w1") == {0: ZERO}
    assert driven.failures("w0") == driven.failures("w1") == ZERO
    assert len(said(caplog, "'bad' sends what cannot be read")) == len(driven.failures("bad"))
    assert len(caplog.messages) < 60


def test_long_messages_at_full_speed_let_others_have_their_turn(driven: Driven) -> None:
    ports: list[int] = []
    good = driven.publisher()
    payload = encode([1.5, [stored(list(range(100_000)))], 0])

    def send(publisher: zmq.Socket[bytes], _: random.Random) -> None:
        publisher.send_multipart([b"", frame(1), payload])

    with _flood(ports, send):
        driven.want(f"bad=tcp://127.0.0.1:{ports[0]}", f"good={good.endpoint}?engine=vllm")
        driven.subscribed(good)
        driven.until(lambda: driven.heard("bad") or driven.batches("bad"))
        longest = 0.0
        for number in range(10):
            good.publish(stored([number]))
            began = time.thread_time()
            driven.step(0)
            longest = max(longest, time.thread_time() - began)
        driven.until(lambda: driven.agrees("good", good.expected))
    assert longest < 1.0


BIG = """
import sys, zmq
socket = zmq.Context().socket(zmq.XPUB)
socket.setsockopt(zmq.LINGER, 0)
socket.setsockopt(zmq.XPUB_VERBOSE, 1)
print(socket.bind_to_random_port("tcp://127.0.0.1"), flush=True)
number = 0
for line in sys.stdin:
    if line == "join\\n":
        while socket.recv() != b"\\x01":
            pass
        print("joined", flush=True)
        continue
    payload = bytes.fromhex(line) if line.strip() else bytes(100 * 2**20)
    socket.send_multipart([b"", number.to_bytes(8, "big"), payload])
    number += 1
"""


def test_a_message_of_100_mb_is_not_taken_and_the_source_comes_back(
    driven: Driven, caplog: pytest.LogCaptureFixture
) -> None:
    other = driven.publisher()
    process = subprocess.Popen([sys.executable, "-c", BIG], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdin is not None
        assert process.stdout is not None

        def tell(line: str) -> None:
            assert process.stdin is not None
            process.stdin.write(line + "\n")
            process.stdin.flush()

        def join() -> None:
            assert process.stdout is not None
            tell("join")
            answer = threading.Thread(target=process.stdout.readline)
            answer.start()
            driven.until(lambda: not answer.is_alive())

        driven.want(f"big=tcp://127.0.0.1:{process.stdout.readline().strip()}?engine=vllm", f"other={other.endpoint}")
        join()
        driven.subscribed(other)
        tell(batch(stored([1])).hex())
        driven.until(lambda: driven.resident("big") == {(0, "device"): 1})
        before = memory(peak=False)
        Path("/proc/self/clear_refs").write_text("5")
        tell("")
        driven.until(lambda: said(caplog, "'big' at", "was broken off by ZeroMQ, since a frame had more than 16 MiB"))
        other.publish(stored([1]))
        driven.until(lambda: driven.agrees("other", other.expected))
        join()  # ZeroMQ itself would not come back.
        tell(batch(stored([2])).hex())
        driven.until(lambda: driven.resident("big") == {(0, "device"): 2})
        assert memory(peak=True) - before < 60 * 2**20
        assert driven.batches("big") == {0: {"lost": 1}}
        assert driven.failures("big") == {"other": 1}
        assert len(said(caplog, "'big' at ", "was broken off by ZeroMQ", "more than 16 MiB")) == 1
        assert driven.batches("other") == {0: ZERO}
    finally:
        process.kill()
        process.communicate()


def test_a_port_that_speaks_http(driven: Driven, caplog: pytest.LogCaptureFixture) -> None:
    times: list[float] = []

    def serve(client: socket.socket) -> None:
        times.append(time.monotonic())
        client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 1000)

    other = driven.publisher()
    with tcp_server(serve) as port:
        driven.want(f"http=tcp://127.0.0.1:{port}", f"other={other.endpoint}")
        driven.subscribed(other)
        driven.until(lambda: len(times) >= 3)
        other.publish(stored([1]))
        driven.until(lambda: driven.agrees("other", other.expected) and driven.failures("http"))
    assert times[2] - times[0] > 0.15
    assert len(said(caplog, "'http' sends what cannot be read")) == len(driven.failures("http"))


def test_a_stranger_that_greets_and_then_sends_nonsense_is_tried_again_but_not_all_the_time(
    driven: Driven, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscription_module, "BROKEN_OFF_SECONDS", 0.1)
    greeting = b"\xff" + bytes(7) + b"\x01\x7f\x03\x00NULL" + bytes(16) + bytes(32)
    ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 3) + b"PUB"
    times: list[float] = []

    def serve(client: socket.socket) -> None:
        times.append(time.monotonic())
        client.sendall(greeting + bytes([4, len(ready)]) + ready)
        client.recv(1000)
        client.sendall(b"\xff" * 100_000)
        while client.recv(1000):  # It is not we who break off.
            pass

    other = driven.publisher()
    with tcp_server(serve) as port:
        driven.want(f"w=tcp://127.0.0.1:{port}", f"other={other.endpoint}")
        driven.subscribed(other)
        driven.until(lambda: len(times) >= 4 and driven.failures("w").get("other", 0) >= 3)
        other.publish(stored([1]))
        driven.until(lambda: driven.agrees("other", other.expected))
    assert times[3] - times[0] > 0.25
    assert len(said(caplog, "'w' at ", "was broken off by ZeroMQ")) >= 3
    assert driven.failures("other") == ZERO


def test_formats_that_change_under_way(driven: Driven) -> None:
    publisher = driven.publisher()
    driven.want(f"w={publisher.endpoint}?engine=vllm")
    driven.subscribed(publisher)
    payloads = [
        batch(stored([1])),
        encode([1.5, [stored_array([2])]]),
        encode({"ts": 1.5, "events": [stored([3])], "data_parallel_rank": 0}),
        b"no msgpack \xc1",
        encode(["x", {"BlockStored": 1}]),
        batch(stored([4]), {"type": {}}),
        encode([1.5, [stored_array([5]), ["BlockStored", "x"]], 0]),
        b"",
    ]
    for number, payload in enumerate(payloads):
        publisher.send(b"", frame(number), payload)
    driven.until(lambda: driven.resident("w") == {(0, "device"): 5} and sum(driven.failures("w").values()) == 5)
    publisher.send(b"", frame(len(payloads)), batch(stored([6], size=32)))
    driven.until(lambda: driven.resident("w") == {(0, "device"): 6})
    assert driven.failures("w") == {"msgpack": 2, "batch_shape": 1, "event_shape": 2}
    assert driven.batches("w") == {0: ZERO}


def test_a_block_size_that_changes_is_said_once(driven: Driven, caplog: pytest.LogCaptureFixture) -> None:
    publisher = driven.publisher()
    driven.want(f"w={publisher.endpoint}?block_size=16")
    driven.subscribed(publisher)
    for size in (16, 32, 16, 64):
        publisher.publish(stored([size], size=size))
    driven.until(lambda: driven.rows(semconv.BLOCK_SIZE, RANK, TIER, worker="w") == {(0, "device"): 64})
    assert len(said(caplog, "'w' has changed its block size in the device tier, from 16 to 32 tokens")) == 1
    assert len(said(caplog, "block size")) == 1
    assert driven.resident("w") == {(0, "device"): 3}


# -- topics ------------------------------------------------------------------------------------------------------------


def test_a_topic_that_nobody_sends_and_one_that_is_wanted(driven: Driven) -> None:
    publisher = driven.publisher(topic=b"kv@a")
    other = FakePublisher(driven.context, topic=b"x")
    driven.want(
        f"all={publisher.endpoint}", f"some={publisher.endpoint}?topic=kv@", f"none={publisher.endpoint}?topic=zz"
    )
    driven.until(lambda: sorted(publisher.subscriptions) == [b"\x01", b"\x01kv@", b"\x01zz"])
    publisher.publish(stored([1]))
    publisher.send(b"other", frame(0), batch(stored([2, 3])))
    driven.until(lambda: driven.resident("all") == {(0, "device"): 3} and driven.agrees("some", publisher.expected))
    assert driven.resident("none") == {}
    assert driven.batches("none") == {}
    assert driven.rows(semconv.EVENT_LAST_AGE, RANK, worker="none") == {}
    assert driven.failures("none") == ZERO
    assert driven.rows(semconv.EVENT_DECODE_FAILURES, semconv.KVCACHE_REASON, worker="none")
    other.close()


def test_publishers_that_connect_to_us_are_told_apart_by_their_topics(driven: Driven) -> None:
    port, rng = free_port(), random.Random(8)
    driven.want(f"in=tcp://*:{port}?engine=vllm")
    assert driven.watch.index.workers.keys() == set()
    publishers = [driven.publisher(connect=f"tcp://127.0.0.1:{port}", topic=topic) for topic in (b"kv@a", b"kv@b", b"")]
    driven.subscribed(*publishers)
    for publisher in publishers:
        publisher.publish()  # What is dropped before the first is not missed.
    for _ in range(30):
        for publisher in publishers:
            publisher.publish(*traffic(rng), drop=publisher.topic == b"kv@b" and rng.random() < 0.3)
    for publisher in publishers:
        publisher.publish(stored([1]))
    named = {"in/kv@a": publishers[0], "in/kv@b": publishers[1], "in": publishers[2]}
    driven.until(lambda: all(driven.agrees(name, each.expected) for name, each in named.items()))
    assert driven.watch.index.workers.keys() == named.keys()
    assert {name: driven.batches(name) for name in named} == {
        "in/kv@a": {0: ZERO},
        "in/kv@b": {0: {"lost": publishers[1].dropped}},
        "in": {0: ZERO},
    }
    driven.want()
    assert workers(driven) == set()


def test_publishers_that_send_the_same_topic_are_said_and_counted(
    driven: Driven, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    driven.want(f"in=tcp://*:{port}?engine=vllm")
    first, again = (driven.publisher(connect=f"tcp://127.0.0.1:{port}", topic=b"kv") for _ in range(2))
    driven.subscribed(first, again)
    first.publish(stored([1]))
    driven.until(lambda: driven.resident("in/kv"))
    driven.drop(first)
    [subscription] = driven.watch.subscriptions.values()
    driven.until(lambda: subscription.connections == 1)
    again.publish(stored([2]))
    driven.until(lambda: driven.batches("in/kv") == {0: {"resets": 1}})
    assert (said(caplog, "several publishers"), wrong_sources(driven)) == ([], 0)
    third = driven.publisher(connect=f"tcp://127.0.0.1:{port}", topic=b"kv")
    driven.subscribed(third)
    third.publish(stored([3]))
    again.publish(stored([4]))
    driven.until(lambda: said(caplog, "'in/kv': several publishers send the same topic"))
    assert wrong_sources(driven) == 1


def test_topics_of_one_source_have_books_of_their_own(driven: Driven, caplog: pytest.LogCaptureFixture) -> None:
    """A proxy has brought them together, and what was asked for is what both topics begin with."""
    proxy = Proxy()
    one, other = (driven.publisher(connect=proxy.front, topic=topic) for topic in (b"kv@1", b"kv@10"))
    driven.want(f"w={proxy.back}?engine=vllm&topic=kv@1")
    driven.subscribed(one, other)
    one.publish(stored([1, 2, 3]))
    other.publish(stored([3, 4]))
    driven.until(lambda: driven.resident("w") == {(0, "device"): 5})
    driven.drop(other)
    again = driven.publisher(connect=proxy.front, topic=b"kv@10")
    driven.subscribed(again)
    again.publish(stored([9]))
    driven.until(lambda: driven.batches("w") == {0: {"resets": 1}})
    driven.until(lambda: driven.resident("w") == {(0, "device"): 4})
    [line] = said(caplog, "topics of one source, ", "topic 'kv@10', are both worker 'w', rank 0")
    assert line.endswith("a source for each topic, with a name of its own, keeps them apart")
    assert said(caplog, "source 'w', topic 'kv@10': its publisher has started again")
    for publisher in (one, again):
        publisher.publish(stored([100]), drop=True)
        publisher.publish(stored([101]))
    driven.until(lambda: driven.batches("w")[0].get("lost") == 2)
    driven.until(lambda: len(said(caplog, "batches lost so far")) == 2)
    assert said(caplog, "source 'w', topic 'kv@1', rank 0: 1 batches lost so far")
    assert said(caplog, "source 'w', topic 'kv@10', rank 0: ")
    assert wrong_sources(driven) == 1
    driven.want()
    assert workers(driven) == set()
    proxy.close()


def test_a_source_that_starts_again_and_again_is_said_to_be_several(
    driven: Driven, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = driven.publisher()
    driven.want(f"w={publisher.endpoint}?engine=vllm")
    driven.subscribed(publisher)
    for number in range(6):
        publisher.send(b"", frame(0), batch(stored([number])))
        publisher.send(b"", frame(1), batch(stored([10 + number])))
    driven.until(lambda: driven.batches("w") == {0: {"resets": 5}})
    assert len(said(caplog, "'w' has started again 4 times within 60 s")) == 1


def test_topics_without_end_are_bounded(driven: Driven) -> None:
    port = free_port()
    driven.want(f"in=tcp://*:{port}")
    publisher = driven.publisher(connect=f"tcp://127.0.0.1:{port}")
    driven.subscribed(publisher)
    [subscription] = driven.watch.subscriptions.values()
    for number in range(MOST_TOPICS + 50):
        publisher.send(b"%d" % number + b"x" * 100_000, frame(0), batch(stored([1])))
    publisher.send(b"0" + b"x" * 100_000, b"no number", b"")
    publisher.send(b"0" + b"x" * 100_000, frame(2**64 - 1), b"")
    first = f"in/{'0' + 'x' * 127}"[:128]
    driven.until(lambda: driven.failures(first) == {"sequence_frame": 2})
    assert len(subscription.feeds) == MOST_TOPICS
    assert len(driven.watch.index.workers) == MOST_TOPICS
    assert max(map(len, subscription.feeds)) <= 256


def test_a_topic_that_imitates_another_source_has_books_of_its_own(driven: Driven) -> None:
    port, victim = free_port(), driven.publisher()
    driven.want(f"in=tcp://*:{port}", f"in/pod={victim.endpoint}?engine=vllm")
    imitators = [
        driven.publisher(connect=f"tcp://127.0.0.1:{port}", topic=topic)
        for topic in (b"pod", b"t" * 200 + b"1", b"t" * 200 + b"2")
    ]
    driven.subscribed(victim, *imitators)
    victim.publish(stored([1, 2, 3]))
    driven.until(lambda: driven.agrees("in/pod", victim.expected))
    for imitator in imitators:
        imitator.publish(stored([7]))
    driven.until(lambda: len(driven.watch.index.workers) == 4)
    driven.until(lambda: sum(driven.rows(semconv.RESIDENT_BLOCKS, WORKER, RANK, TIER).values()) == 6)
    assert driven.agrees("in/pod", victim.expected)
    assert len(workers(driven)) == 4
    driven.want(f"in=tcp://*:{port}")
    assert len(workers(driven)) == 3
    driven.want()
    assert workers(driven) == set()


# -- sources that come and go ------------------------------------------------------------------------------------------


def test_sources_are_replaced_while_it_runs_and_a_release_ends_rows(driven: Driven) -> None:
    a, b, c = (driven.publisher() for _ in range(3))
    texts = [f"{name}={each.endpoint}?engine=vllm" for name, each in (("a", a), ("b", b), ("c", c))]
    driven.want(*texts[:2])
    driven.subscribed(a, b)
    for publisher in (a, b):
        publisher.publish(stored([1, 2]))
    driven.until(lambda: driven.agrees("a", a.expected) and driven.agrees("b", b.expected))
    driven.want(*texts[1:])
    assert workers(driven) == {"b", "c"}
    driven.subscribed(c)
    for publisher in (a, b, c):
        publisher.publish(stored([3]))
    driven.until(lambda: driven.agrees("b", b.expected) and driven.agrees("c", c.expected))
    assert workers(driven) == {"b", "c"}
    before = driven.watch.index.workers["b"]
    driven.want(*texts[1:], *texts[1:])
    assert driven.watch.index.workers["b"] is before
    # Another topic is another connection: it begins anew.
    driven.want(texts[1] + "&topic=x", texts[2])
    assert driven.watch.index.workers["b"] is not before
    assert driven.resident("b") == {}
    driven.want()
    assert workers(driven) == set()
    assert driven.rows(semconv.INDEX_MAINTAINED) == {(): 1}


def test_one_rank_of_a_worker_goes_and_the_other_stays(driven: Driven) -> None:
    ranks = [driven.publisher(rank=rank) for rank in (0, 1)]
    texts = [f"w={publisher.endpoint}?engine=vllm" for publisher in ranks]
    driven.want(*texts)
    driven.subscribed(*ranks)
    for publisher in ranks:
        publisher.publish(stored([1, 2]))
    driven.until(lambda: driven.resident("w") == {(0, "device"): 2, (1, "device"): 2})
    driven.want(texts[1])
    assert driven.resident("w") == {(1, "device"): 2}
    ranks[1].publish(stored([3]))
    driven.until(lambda: driven.agrees("w", ranks[1].expected, 1))
    assert driven.batches("w")[1] == ZERO
    driven.want()
    assert workers(driven) == set()


def test_a_port_that_is_in_use_is_said_once_and_taken_when_it_is_free(
    driven: Driven, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_module, "AGAIN_SECONDS", 0.05)
    other = driven.publisher()
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        driven.want(f"in=tcp://*:{port}", f"other={other.endpoint}")
        [refusal] = said(caplog, "'in' is left out")
        assert f"tcp://*:{port}" in refusal
        assert "Address already in use" in refusal
        driven.subscribed(other)
        other.publish(stored([1]))
        driven.until(lambda: driven.agrees("other", other.expected))
        tries = time.monotonic() + 0.3
        driven.until(lambda: time.monotonic() > tries)
    publisher = driven.publisher(connect=f"tcp://127.0.0.1:{port}", topic=b"t")
    driven.subscribed(publisher)
    publisher.publish(stored([1]))
    driven.until(lambda: driven.agrees("in/t", publisher.expected))
    assert len(said(caplog, "is left out")) == 1


@pytest.mark.parametrize(("sources", "seconds"), [(1, 5.0), (50, 5.0), (100, 10.0)])
def test_many_sources_that_cannot_be_reached_are_tried_less_often(
    driven: Driven, monkeypatch: pytest.MonkeyPatch, sources: int, seconds: float
) -> None:
    monkeypatch.setattr(watch_module, "RETRIES", 10)
    driven.want(*(f"s{number}=tcp://127.0.0.1:1" for number in range(sources)))
    inlets: list[Any] = [vars(subscription)["_inlet"] for subscription in driven.watch.subscriptions.values()]
    assert {inlet.socket.getsockopt(zmq.RECONNECT_IVL_MAX) for inlet in inlets} == {seconds * 1000}
    assert len(inlets) == sources


def test_sources_that_are_left_out_are_tried_again_a_few_at_a_time(
    driven: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_module, "AGAIN_SECONDS", 0.01)
    monkeypatch.setattr(watch_module, "AGAIN_AT_ONCE", 7)
    tried: list[str] = []

    class Tried(Subscription):
        def __init__(self, context: Any, source: Source, *more: Any, **named: Any) -> None:
            tried.append(source.name)
            super().__init__(context, source, *more, **named)

    monkeypatch.setattr(watch_module, "Subscription", Tried)
    blocker = driven.context.socket(zmq.PULL)
    port = blocker.bind_to_random_port("tcp://*")
    odd = [Source(f"odd{number}", "ipc://" + "x" * 200) for number in range(50)]
    driven.watch.want([*odd[:25], parse(f"taken=tcp://*:{port}"), *odd[25:]])
    assert len(tried) == 51
    blocker.close()
    tried.clear()

    def taken() -> bool:
        before = len(tried)
        driven.watch.poll(0.02)
        assert len(tried) - before <= 7
        return len(driven.watch.subscriptions) == 1

    driven.until(taken)
    driven.until(lambda: tried.count("odd0") > 2)
    turns = [tried.count(f"odd{number}") for number in range(50)]
    assert max(turns) - min(turns) <= 1, "each has its turn"


def test_other_options_for_publishers_that_connect_to_us(driven: Driven) -> None:
    port = free_port()
    driven.want(f"in=tcp://*:{port}")
    publisher = driven.publisher(connect=f"tcp://127.0.0.1:{port}", topic=b"t")
    driven.subscribed(publisher)
    driven.want(f"in=tcp://*:{port}?engine=vllm&topic=t")  # The port is free a moment later.
    driven.until(lambda: len(publisher.subscriptions) > 1)
    publisher.publish(stored([1]))
    driven.until(lambda: driven.agrees("in/t", publisher.expected))


@pytest.mark.parametrize("endpoint", ["ipc:///nowhere/" + "x" * 200, "ipc:///\udcff"])
def test_an_endpoint_that_zeromq_does_not_take_is_left_out(
    driven: Driven, caplog: pytest.LogCaptureFixture, endpoint: str
) -> None:
    other = driven.publisher()
    driven.watch.want([Source("odd", endpoint), parse(f"other={other.endpoint}")])
    driven.subscribed(other)
    other.publish(stored([1]))
    driven.until(lambda: driven.agrees("other", other.expected))
    assert len(said(caplog, "'odd' is left out")) == 1
    assert "odd" not in driven.watch.index.workers
    driven.want(f"other={other.endpoint}")
    assert driven.agrees("other", other.expected)


def test_lines_of_the_log_are_short_whatever_sources_are_called(
    driven: Driven, caplog: pytest.LogCaptureFixture
) -> None:
    long = "x" * 10_000
    driven.want(
        f"tcp://{long}:1",
        f"{'n' * 128}=ipc://{long}",
        f"tcp://127.0.0.1:{free_port()}?topic={long}",
        f"tcp://127.0.0.1:{free_port()}?replay=tcp://{long}:1",
    )
    driven.until(lambda: said(caplog, "cannot be resolved") and len(said(caplog, "cannot be reached")) == 2)
    assert len(said(caplog, "is left out")) == 1
    assert max(map(len, caplog.messages)) < 1_000


def test_ten_thousand_sources_that_zeromq_does_not_take_are_not_as_many_lines(
    driven: Driven, caplog: pytest.LogCaptureFixture
) -> None:
    other = driven.publisher()
    odd = [Source(f"odd{number}", "tcp://[::1%nowhere]:nothing") for number in range(10_000)]
    driven.watch.want([*odd, parse(f"other={other.endpoint}")])
    driven.subscribed(other)
    assert len(said(caplog, "is left out as long as this lasts: tcp://[::1%nowhere]:nothing")) == FEW
    assert said(caplog, "more sources") == [f"kvcache: {10_000 - FEW} more sources are left out as long as this lasts"]
    assert driven.rows(semconv.TELEMETRY_ERRORS, semconv.KVCACHE_TELEMETRY_HOOK) == {"watch.sources": 10_000}
    other.publish(stored([1]))
    driven.until(lambda: driven.agrees("other", other.expected), 60)
    assert len(said(caplog, "left out")) == FEW + 1, "it is said once, however often it is tried"


def test_200_sources(driven: Driven) -> None:
    rng = random.Random(9)
    publishers = [driven.publisher(rank=number % 4) for number in range(200)]
    driven.want(*(f"w{n // 4}={each.endpoint}?engine=vllm" for n, each in enumerate(publishers)))
    driven.subscribed(*publishers)
    for _ in range(5):
        for publisher in publishers:
            publisher.publish(*traffic(rng))
    resident = {
        (f"w{n // 4}", each.rank, tier): blocks
        for n, each in enumerate(publishers)
        for tier, blocks in each.expected.resident().items()
    }
    events = {
        (f"w{n // 4}", each.rank, *key): times
        for n, each in enumerate(publishers)
        for key, times in each.expected.events().items()
    }
    total = sum(events.values())
    driven.until(lambda: sum(driven.rows(semconv.EVENTS, WORKER, RANK, TYPE, MEDIUM).values()) == total, 30)
    assert driven.rows(semconv.EVENTS, WORKER, RANK, TYPE, MEDIUM) == events
    assert driven.rows(semconv.RESIDENT_BLOCKS, WORKER, RANK, TIER) == resident
    assert len(driven.watch.index.workers) == 50
    for worker in range(50):
        assert driven.batches(f"w{worker}") == dict.fromkeys(range(4), ZERO)
    driven.want()
    assert workers(driven) == set()


def test_sockets_are_not_what_bounds_sources(driven: Driven, caplog: pytest.LogCaptureFixture) -> None:
    number = 500
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < 8 * number:
        pytest.skip(f"a process may have {most} files at the most")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    try:
        texts = [f"w{n}=tcp://127.0.0.1:{n + 1}" for n in range(number - 1)]
        publisher = driven.publisher()
        driven.want(*texts, f"last={publisher.endpoint}?engine=vllm")
        assert len(driven.watch.subscriptions) == number
        assert said(caplog, "left out") == []
        driven.subscribed(publisher)
        publisher.publish(stored([1]))
        driven.until(lambda: driven.agrees("last", publisher.expected))
        driven.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def _files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_sources_that_come_and_go_a_thousand_times_leave_nothing(driven: Driven) -> None:
    publisher = driven.publisher(replay="new")
    texts = [
        f"a={publisher.endpoint}?replay={publisher.replay_port}",
        f"b={publisher.endpoint}",
        f"c=tcp://*:{free_port()}",
        "d=tcp://127.0.0.1:1?replay=2",
    ]
    driven.want(*texts)
    driven.subscribed(publisher)
    driven.want()
    driven.step(0)
    gc.collect()
    gc.disable()  # It would close what has been forgotten.
    try:
        wait_until(lambda: _files() < 1000)
        before, rows = _files(), _series(driven)
        for _ in range(250):
            for text in texts:
                driven.want(text)
            driven.want()
            driven.step(0)
        wait_until(lambda: _files() <= before + 4)  # Sockets are closed in the background.
    finally:
        gc.enable()
    watch: Any = driven.watch
    assert not watch._users
    assert not watch._whose
    assert not watch._readers
    assert not watch._dues
    assert not driven.watch.index.workers
    assert _series(driven) == rows
    assert driven.watch.index._room.owners == 1024  # pyright: ignore[reportPrivateUsage]


def _series(driven: Driven) -> dict[str, int]:
    return {spec.name: sum(1 for _ in driven.recorder.points(spec)) for spec in ABOUT_WORKERS}


# -- the loop ----------------------------------------------------------------------------------------------------------


def _rounds(driven: Driven, seconds: float = 0.6) -> int:
    """Polls of a quarter of a second in so much time; more than a few mean that the loop spins."""
    rounds, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        driven.watch.poll(0.25)
        rounds += 1
    return rounds


def test_nothing_to_do_takes_no_time(driven: Driven) -> None:
    publishers = [driven.publisher() for _ in range(5)]
    driven.want(*(f"w{n}={each.endpoint}" for n, each in enumerate(publishers)))
    driven.subscribed(*publishers)
    driven.until(lambda: all(each.connections == 1 for each in driven.watch.subscriptions.values()))
    used = time.thread_time()
    assert _rounds(driven) <= 9  # And a look at what waits inside ZeroMQ, ten times a second.
    assert time.thread_time() - used < 0.2


def test_a_stream_that_waits_does_not_make_it_spin(driven: Driven) -> None:
    publisher = driven.publisher()
    driven.want(f"w={publisher.endpoint}?replay={free_port()}", f"x={publisher.endpoint}")
    driven.until(lambda: len(publisher.subscriptions) == 2)
    publisher.publish(stored([1]))
    publisher.publish(stored([2]), drop=True)
    publisher.publish(stored([3]))
    driven.until(lambda: driven.batches("x") == {0: {"lost": 1}})
    assert _rounds(driven) <= 15


def test_a_stream_that_fails_does_not_make_it_spin_or_end(
    driven: Driven, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, good = driven.publisher(), driven.publisher()
    driven.want(f"bad={bad.endpoint}", f"good={good.endpoint}?engine=vllm")
    driven.subscribed(bad, good)
    bad.publish(stored([1]))
    driven.until(lambda: driven.heard("bad"))
    subscription = driven.watch.subscriptions[parse(f"bad={bad.endpoint}")]
    [feed] = subscription.feeds.values()

    def fail(*_: object) -> None:
        raise RuntimeError("odd")

    monkeypatch.setattr(feed.stream, "tick", fail)
    feed.stream.due = 0.0
    assert 3 < _rounds(driven) <= 80
    monkeypatch.setattr(feed.stream, "live", fail)
    bad.publish(stored([2]))
    good.publish(stored([2]))
    driven.until(lambda: driven.agrees("good", good.expected))
    errors = driven.rows(semconv.TELEMETRY_ERRORS, semconv.KVCACHE_TELEMETRY_HOOK)
    driven.until(lambda: said(caplog, "'bad': a message failed"))
    assert len(said(caplog, "'bad': its stream failed", "RuntimeError: odd")) == 1
    assert errors["watch"] > 3
    assert driven.failures("good") == ZERO


def test_whatever_a_socket_raises_the_loop_goes_on(
    driven: Driven, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, good = driven.publisher(replay="new"), driven.publisher()
    text = f"bad={bad.endpoint}?replay={bad.replay_port}"
    driven.want(text, f"good={good.endpoint}?engine=vllm")
    driven.subscribed(bad, good)
    subscription: Any = driven.watch.subscriptions[parse(text)]

    class Broken:
        def recv(self, _: int, *, copy: bool) -> bytes:
            raise zmq.ZMQError(zmq.ETERM)

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

    real = subscription._inlet.socket
    monkeypatch.setattr(subscription._inlet, "socket", Broken())
    bad.publish(stored([1]))
    good.publish(stored([2]))
    driven.until(lambda: driven.agrees("good", good.expected) and said(caplog, "'bad': its socket failed"))
    assert len(said(caplog, "'bad': its socket failed")) == 1
    monkeypatch.undo()
    driven.until(lambda: driven.resident("bad") == {(0, "device"): 1})


def test_whatever_a_monitor_raises_the_loop_goes_on(
    driven: Driven, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = driven.publisher()
    driven.want(f"w={publisher.endpoint}?engine=vllm")

    def fail(*_: object) -> None:
        raise RuntimeError("odd")

    with monkeypatch.context() as patched:
        patched.setattr(zmq.utils.monitor, "recv_monitor_message", fail)
        driven.until(lambda: said(caplog, "'w': its monitor failed", "RuntimeError: odd"))
    driven.subscribed(publisher)
    publisher.publish(stored([2]))
    driven.until(lambda: driven.agrees("w", publisher.expected))


def test_e1_e2_copies_count_by_engine(driven: Driven) -> None:
    publisher = driven.publisher()
    driven.want(f"v={publisher.endpoint}?engine=vllm", f"s={publisher.endpoint}?engine=sglang")
    driven.until(lambda: len(publisher.subscriptions) == 2)
    publisher.publish(stored([1]), stored([1]), removed([1]))
    driven.until(lambda: driven.heard("v") == driven.heard("s") == 3)
    assert driven.resident("v") == {(0, "device"): 1}
    assert driven.resident("s") == {(0, "device"): 0}


def test_all_cleared(driven: Driven) -> None:
    publisher = driven.publisher()
    driven.want(f"v={publisher.endpoint}?engine=vllm", f"s={publisher.endpoint}?engine=sglang")
    driven.until(lambda: len(publisher.subscriptions) == 2)
    publisher.publish(stored([1, 2]), CLEARED, stored([3]))
    driven.until(lambda: driven.agrees("v", publisher.expected) and driven.agrees("s", publisher.expected))
    assert driven.resident("v") == driven.resident("s") == {(0, "device"): 1}


def test_the_expectation_counts_as_it_should() -> None:
    expected = Expected()
    expected.apply([stored([1, 1]), stored([1], "CPU"), removed([1]), removed([2]), removed([9], None)])
    assert expected.resident() == {"device": 1, "host": 1}
    assert expected.unknown == 2
    expected.apply([removed([1], None)])
    assert expected.resident() == {"device": 0, "host": 0}


def test_a_source_that_says_nothing(
    driven: Driven, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscription_module, "SILENT_SECONDS", 0.3)
    silent, loud = driven.publisher(), driven.publisher()
    driven.want(f"silent={silent.endpoint}?topic=nobody", f"loud={loud.endpoint}")
    driven.subscribed(loud)
    loud.publish(stored([1]))
    driven.until(lambda: said(caplog, "'silent' has sent nothing", "'nobody'"))
    for _ in range(20):
        driven.step()
    assert len(said(caplog, "has sent nothing")) == 1


def test_what_has_come_is_read_before_anything_is_given_up(driven: Driven, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another source has held the loop up for longer than a replay may be silent."""
    publisher, other = driven.publisher(replay="new"), driven.publisher()
    driven.want(f"w={publisher.endpoint}?engine=vllm&replay={publisher.replay_port}", f"slow={other.endpoint}")
    driven.subscribed(publisher, other)
    publisher.publish(stored([1]))
    driven.until(lambda: driven.heard("w") == 1)
    ask, apply, asked = Feed.ask, Feed.apply, list[int]()

    def asking(feed: Feed, start: int) -> None:
        ask(feed, start)
        asked.append(start)

    def applying(feed: Feed, payload: bytes) -> None:
        if feed.worker.name == "slow":
            time.sleep(0.2)
            publisher.serve()
            time.sleep(watch_module.SILENCE)
        apply(feed, payload)

    monkeypatch.setattr(Feed, "ask", asking)
    monkeypatch.setattr(Feed, "apply", applying)
    for number in range(8):
        publisher.publish(stored([number]), drop=number in (3, 4))
    end = time.monotonic() + 10
    while not asked and time.monotonic() < end:  # The publisher does not answer yet.
        driven.watch.poll(0.02)
    other.publish(stored([1]))
    time.sleep(0.1)
    driven.watch.poll(0.02)
    driven.until(lambda: driven.agrees("w", publisher.published))
    assert driven.batches("w") == {0: {"recovered": 2}}
