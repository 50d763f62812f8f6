"""What is published is what is held, over a real socket too, and with batches that are lost on the way."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import zmq

from kvcache_otel import semconv
from kvcache_otel.demo.books import recount
from kvcache_otel.demo.instrument import instrument
from kvcache_otel.demo.publisher import Publisher
from tests.demo.walk import Walk
from tests.events.fake_publisher import Driven
from tests.support.processes import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvcache_otel.demo.cache import TieredCache
    from kvcache_otel.demo.events import Event
    from tests.engines.generic.conftest import Exported

ANY, WORKER = "tcp://127.0.0.1:*", "demo"
BEFORE_SUBSCRIBING = 40


@pytest.fixture
def driven() -> Iterator[Driven]:
    made = Driven()
    yield made
    made.close()


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    made = Publisher(ANY, ANY, rank=3)
    yield made
    made.close()


def rank_rows(driven: Driven, tiers: dict[str, int]) -> dict[tuple[int, str], int]:
    return {(3, tier): blocks for tier, blocks in tiers.items()}


def subscribe(driven: Driven, publisher: Publisher, cache: TieredCache, options: str = "") -> None:
    """Subscribes, and publishes until the first batch has come."""
    driven.want(f"{WORKER}={publisher.endpoint}?engine=auto{options}")
    steps = Walk(cache, 99)

    def heard() -> bool:
        steps.step()
        return driven.heard(WORKER) > 0

    driven.until(heard)
    steps.rest()


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_what_is_received_is_published_is_held(
    exported: Exported, make_cache: Callable[..., TieredCache], driven: Driven, publisher: Publisher, policy: str
) -> None:
    cache = make_cache(policy=policy)
    instrument(cache, exported.provider)
    cache.sinks.append(publisher)
    subscribe(driven, publisher, cache, f"&replay={publisher.replay_endpoint}")
    steps = Walk(cache, 7)
    for _ in range(10):
        steps.take(50)
        held = recount(cache).held
        published = {tier: exported.rows.value(semconv.RESIDENT_BLOCKS, tier=tier, view="published") for tier in held}
        assert published == held
        driven.until(lambda held=held: driven.resident(WORKER) == rank_rows(driven, held))
    steps.rest()
    sent = cache.books.total("events")
    driven.until(lambda: driven.heard(WORKER) == sent)
    received = driven.rows(semconv.EVENT_BLOCKS, semconv.KVCACHE_EVENT_TYPE, semconv.KVCACHE_EVENT_MEDIUM)
    told = exported.rows.values(semconv.EVENT_BLOCKS)
    kind, medium = semconv.KVCACHE_EVENT_TYPE, semconv.KVCACHE_EVENT_MEDIUM
    assert received == {(dict(key)[kind], dict(key)[medium]): value for key, value in told.items()}
    assert driven.failures(WORKER) == {}
    assert {worker.engine for worker in driven.watch.index.workers.values()} == {"sglang"}
    assert set(driven.batches(WORKER)[3]) <= {"recovered"}


class Losing:
    """A sink in front of a publisher, whose next batches get a number and are not sent."""

    def __init__(self, publisher: Publisher) -> None:
        self.lost = 0
        self.lose = False
        sending: Any = publisher.work
        send = sending.publishing.send_multipart
        sending.publishing = self
        self._send = send

    def send_multipart(self, frames: list[bytes]) -> None:
        if self.lose:
            self.lost += 1
        else:
            self._send(frames)


@pytest.mark.parametrize("replay", [True, False])
def test_what_is_lost_on_the_way_is_recovered_by_replay_or_counted(
    make_cache: Callable[..., TieredCache], driven: Driven, publisher: Publisher, replay: bool
) -> None:
    cache = make_cache()
    losing = Losing(publisher)
    cache.sinks.append(publisher)
    subscribe(driven, publisher, cache, f"&replay={publisher.replay_endpoint}" if replay else "")
    before = driven.batches(WORKER)[3]
    batches: list[list[Event]] = []
    cache.sinks.append(batches.append)
    steps = Walk(cache, 7)
    steps.take(100)
    publisher.flush()
    losing.lose = True
    at = len(batches)
    steps.take(100)
    publisher.flush()
    losing.lose = False
    assert losing.lost == len(batches) - at > 10
    steps.take(100)
    what = "recovered" if replay else "lost"
    driven.until(lambda: driven.batches(WORKER)[3].get(what, 0) - before.get(what, 0) == losing.lost)
    held = rank_rows(driven, recount(cache).held)
    if replay:
        driven.until(lambda: driven.resident(WORKER) == held)
    else:
        heard = sum(len(batch) for batch in batches[:at])
        driven.until(lambda: driven.heard(WORKER) >= heard)
        assert driven.resident(WORKER) != held


def test_who_comes_late_is_given_what_was_before(
    make_cache: Callable[..., TieredCache], driven: Driven, publisher: Publisher
) -> None:
    cache = make_cache()
    cache.sinks.append(publisher)
    Walk(cache, 3).take(100)
    context: zmq.Context[Any] = driven.context
    asking = context.socket(zmq.DEALER)
    asking.connect(publisher.replay_endpoint or "")
    publisher.flush()
    numbers = {start: replayed(asking, start) for start in (0, 5, 10_000)}
    asking.close(linger=0)
    assert numbers[0] == list(range(len(numbers[0])))
    assert numbers[5] == numbers[0][5:]
    assert numbers[10_000] == []


def replayed(asking: Any, start: int) -> list[int]:
    asking.send_multipart([b"nonsense"])  # Which is not answered.
    asking.send_multipart([b"", start.to_bytes(8, "big")])
    numbers: list[int] = []
    while asking.poll(5000):
        _, number, payload = asking.recv_multipart()
        if not payload:
            assert number == b"\xff" * 8
            return numbers
        numbers.append(int.from_bytes(number, "big"))
    raise AssertionError("there was no end")


@pytest.mark.parametrize("replay", [ANY, None])
def test_one_that_is_dropped_ends_its_thread(replay: str | None) -> None:
    dropped = Publisher(ANY, replay)
    dropped([])
    names = [thread.name for thread in threading.enumerate()]
    assert names.count("demo-publisher") == 1
    del dropped
    wait_until(lambda: "demo-publisher" not in [thread.name for thread in threading.enumerate()])


def test_a_place_that_is_taken_is_said_at_once(publisher: Publisher) -> None:
    with pytest.raises(zmq.ZMQError, match="in use"):
        Publisher(publisher.endpoint)
    with pytest.raises(zmq.ZMQError, match="in use"):
        Publisher(ANY, publisher.replay_endpoint)
    with pytest.raises(zmq.ZMQError):
        Publisher("tcp://nowhere")
    with pytest.raises(ValueError, match="neither tcp://host:port nor ipc://path"):
        Publisher("nowhere")
    other = Publisher(ANY)
    assert other.endpoint != publisher.endpoint
    assert other.replay_endpoint is None
    other.close()
    other.close()
