"""Fake publishers of KV events, on real ZeroMQ sockets, and a watch that is driven step by step beside them."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import zmq

from kvcache_otel import semconv
from kvcache_otel.events.counts import KINDS, MEDIA
from kvcache_otel.events.frames import END
from kvcache_otel.events.index import BlockIndex, series
from kvcache_otel.events.source import parse
from kvcache_otel.events.watch import Watch
from kvcache_otel.identity import Identity
from kvcache_otel.record.recorder import Recorder
from tests.events.payloads import CLEARED, batch, removed, stored

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterable

    from kvcache_otel.spec import MetricSpec

WORKER, RANK, TIER = semconv.KVCACHE_WORKER, semconv.KVCACHE_RANK_DP, semconv.KVCACHE_TIER
TYPE, MEDIUM, REASON = semconv.KVCACHE_EVENT_TYPE, semconv.KVCACHE_EVENT_MEDIUM, semconv.KVCACHE_REASON

BATCHES = {
    "lost": semconv.EVENT_BATCHES_LOST,
    "recovered": semconv.EVENT_BATCHES_RECOVERED,
    "duplicate": semconv.EVENT_BATCHES_DUPLICATE,
    "resets": semconv.EVENT_PUBLISHER_RESETS,
}

TIERS = {"GPU": "device", "CPU": "host", "DISK": "disk"}
"""The tier of each medium that the books of tests know."""


def frame(number: int) -> bytes:
    return number.to_bytes(8, "big")


class Expected:
    """What a publisher's batches add up to, counted block by block.

    Attributes:
        copies: Whether each copy of a block counts, as vLLM means it.
    """

    def __init__(self, *, copies: bool = True) -> None:
        self.copies = copies
        self.unknown = 0
        self._blocks: dict[str, Counter[int]] = {"device": Counter()}
        self._events: Counter[tuple[str, str]] = Counter()
        self._hashes: Counter[tuple[str, str]] = Counter()

    def apply(self, events: Iterable[dict[str, Any]]) -> None:
        for event in events:
            if event == CLEARED:
                self._events["all_blocks_cleared", "untagged"] += 1
                self._blocks["device"].clear()  # Whether the other tiers are meant too is not for this to say.
                continue
            tier = TIERS.get(event["medium"])
            kind = "block_stored" if event["type"] == "BlockStored" else "block_removed"
            self._events[kind, tier or "untagged"] += 1
            self._hashes[kind, tier or "untagged"] += len(event["block_hashes"])
            if tier is not None:
                self._blocks.setdefault(tier, Counter())
            for block in event["block_hashes"]:
                if kind == "block_stored":
                    assert tier is not None
                    self._blocks[tier][block] = self._blocks[tier][block] + 1 if self.copies else 1
                else:
                    self._take(block, [tier] if tier is not None else list(self._blocks), every=tier is None)

    def _take(self, block: int, tiers: list[str], *, every: bool) -> None:
        found = [tier for tier in tiers if self._blocks[tier][block]]
        self.unknown += not found
        for tier in found:
            self._blocks[tier][block] = 0 if every else self._blocks[tier][block] - 1

    def resident(self) -> dict[str, int]:
        return {tier: sum(1 for copies in blocks.values() if copies) for tier, blocks in self._blocks.items()}

    def events(self) -> dict[tuple[str, str], int]:
        return {(kind, medium): self._events[kind, medium] for kind in KINDS for medium in MEDIA}

    def hashes(self) -> dict[tuple[str, str], int]:
        return {(kind, medium): self._hashes[kind, medium] for kind in KINDS for medium in MEDIA}


class FakePublisher:
    """Publishes batches as an engine does, on a port of its own, and counts what it sends.

    Attributes:
        expected: What has reached a subscriber that heard everything that was not dropped, and nothing else.
        published: What the engine itself believes: the dropped ones too.
        dropped: Batches that got a number and were not sent.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        *,
        port: int = 0,
        connect: str = "",
        topic: bytes = b"",
        rank: Any = 0,
        replay: str = "",
        replay_port: int = 0,
        copies: bool = True,
    ) -> None:
        """Args:
        context: ZeroMQ's.
        port: Where it binds; 0 for any port.
        connect: Where it connects instead.
        topic: Of its messages.
        rank: What its batches say.
        replay: The form of its replay's answers, ``old`` or ``new``; empty for no replay.
        replay_port: Where that binds; 0 for any port.
        copies: As in `Expected`.
        """
        self.topic, self.rank = topic, rank
        self.expected, self.published = Expected(copies=copies), Expected(copies=copies)
        self.dropped = 0
        self.number = 0
        self.requests = 0
        self._kept: list[tuple[int, bytes]] = []
        self._form = replay
        # An XPUB is a PUB that is told of its subscribers.
        self.socket = context.socket(zmq.XPUB)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.XPUB_VERBOSE, 1)
        self.socket.setsockopt(zmq.SNDHWM, 100_000)
        if connect:
            self.socket.connect(connect)
        else:
            self.port = self._bind(self.socket, port)
        self._router: zmq.Socket[bytes] | None = None
        if replay:
            self._router = context.socket(zmq.ROUTER)
            self._router.setsockopt(zmq.LINGER, 0)
            self._router.setsockopt(zmq.SNDHWM, 100_000)
            self.replay_port = self._bind(self._router, replay_port)
        self.subscriptions: list[bytes] = []

    @staticmethod
    def _bind(socket: zmq.Socket[bytes], port: int) -> int:
        deadline = time.monotonic() + 10
        while True:
            try:
                socket.bind(f"tcp://127.0.0.1:{port or '*'}")
                return int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
            except zmq.ZMQError:  # The one before closes in the background.
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)

    @property
    def endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    def publish(self, *events: dict[str, Any], drop: bool = False, rank: Any = None) -> None:
        """Publishes a batch, or only gives it its number."""
        payload = batch(*events, rank=self.rank if rank is None else rank)
        self.published.apply(events)
        if drop:
            self.dropped += 1
        else:
            self.expected.apply(events)
            self.send(self.topic, frame(self.number), payload)
        self._kept.append((self.number, payload))
        self.number += 1

    def send(self, *frames: bytes) -> None:
        self.socket.send_multipart(frames)

    def serve(self) -> None:
        """Takes note of subscribers, and answers whoever asks for a replay."""
        while self.socket.poll(0):
            self.subscriptions.append(self.socket.recv())
        while self._router is not None and self._router.poll(0):
            identity, empty, start = self._router.recv_multipart()
            assert empty == b""
            self.requests += 1
            between = [b"", self.topic] if self._form == "new" else [b""]
            for number, payload in self._kept:
                if number >= int.from_bytes(start, "big"):
                    self._router.send_multipart([identity, *between, frame(number), payload])
            self._router.send_multipart([identity, b"", *between[1:], frame(END), b""])

    def close(self) -> None:
        self.socket.close()
        if self._router is not None:
            self._router.close()


class Driven:
    """A watch that takes a step when a test says so, and publishers that do the same.

    Attributes:
        publishers: Those that take part.
    """

    def __init__(self, owners: int = 1024) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.context.setsockopt(zmq.MAX_SOCKETS, 8192)
        self.recorder = Recorder(Identity("custom", "TestWatch"), series_limit=series(owners))
        self.watch = Watch(BlockIndex(self.recorder))
        self.publishers: list[FakePublisher] = []
        self.closed = False

    def publisher(self, **options: Any) -> FakePublisher:
        publisher = FakePublisher(self.context, **options)
        self.publishers.append(publisher)
        return publisher

    def want(self, *sources: str) -> None:
        self.watch.want([parse(source) for source in sources])

    def step(self, seconds: float = 0.02) -> None:
        for publisher in self.publishers:
            publisher.serve()
        self.watch.poll(seconds)

    def until(self, condition: Callable[[], object], seconds: float = 20.0) -> None:
        """Takes steps until a condition holds."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"not within {seconds:g} s"
            self.step()

    def subscribed(self, *publishers: FakePublisher) -> None:
        """Takes steps until publishers have a subscriber."""
        self.until(lambda: all(publisher.subscriptions for publisher in publishers))

    def drop(self, publisher: FakePublisher) -> None:
        """Closes a publisher."""
        self.publishers.remove(publisher)
        publisher.close()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.watch.close()
            for publisher in self.publishers:
                publisher.close()
            self.context.destroy(linger=0)

    # -- what came of it -----------------------------------------------------------------------------------------------

    def rows(self, spec: MetricSpec, *keys: str, worker: str | None = None) -> dict[Any, int | float]:
        """The rows of a metric by some labels, of one worker or of all."""
        found: dict[Any, int | float] = {}
        for point in self.recorder.points(spec):
            if worker is None or point.attributes[WORKER] == worker:
                key = tuple(point.attributes[key] for key in keys)
                assert key not in found
                found[key if len(keys) != 1 else key[0]] = point.value
        return found

    def resident(self, worker: str) -> dict[tuple[int, str], int | float]:
        return self.rows(semconv.RESIDENT_BLOCKS, RANK, TIER, worker=worker)

    def batches(self, worker: str) -> dict[int, dict[str, int | float]]:
        """By rank, what became of batches, without zeros."""
        found: dict[int, dict[str, int | float]] = {}
        for name, spec in BATCHES.items():
            for rank, value in self.rows(spec, RANK, worker=worker).items():
                counted = found.setdefault(rank, {})
                if value:
                    counted[name] = value
        return found

    def failures(self, worker: str) -> dict[str, int | float]:
        rows = self.rows(semconv.EVENT_DECODE_FAILURES, REASON, worker=worker)
        return {reason: value for reason, value in rows.items() if value}

    def heard(self, worker: str) -> int | float:
        """Events received of one worker, whatever they were."""
        return sum(self.rows(semconv.EVENTS, RANK, TYPE, MEDIUM, worker=worker).values())

    def agrees(self, worker: str, expected: Expected, rank: int = 0) -> bool:
        """Whether every row of one owner says what was counted."""
        resident = {tier: value for (of, tier), value in self.resident(worker).items() if of == rank}
        events, hashes = (
            {(kind, medium): value for (of, kind, medium), value in rows.items() if of == rank}
            for rows in (
                self.rows(semconv.EVENTS, RANK, TYPE, MEDIUM, worker=worker),
                self.rows(semconv.EVENT_BLOCKS, RANK, TYPE, MEDIUM, worker=worker),
            )
        )
        return (resident, events, hashes) == (expected.resident(), expected.events(), expected.hashes())


def traffic(rng: random.Random) -> list[dict[str, Any]]:
    """The events of one batch, at random, about few blocks, so that they meet again."""
    events: list[dict[str, Any]] = []
    for _ in range(rng.randint(1, 4)):
        hashes = [rng.randrange(40) for _ in range(rng.randint(1, 6))]
        kind = rng.random()
        if kind < 0.65:
            events.append(stored(hashes, rng.choice(["GPU", "GPU", "CPU", "DISK"])))
        else:
            events.append(removed(hashes, rng.choice(["GPU", "GPU", "CPU", "DISK", None])))
    return events
