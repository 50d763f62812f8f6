"""What a subscriber adds up of the events that a real cache's real publisher sends, on a real socket."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
import zmq

from tests.conftest import require

require("sglang")

from sglang.srt.disaggregation.kv_events import EventPublisherFactory, KVEventBatch  # noqa: E402

from kvcache_otel import semconv  # noqa: E402
from kvcache_otel.events.index import BlockIndex, series  # noqa: E402
from kvcache_otel.events.source import parse  # noqa: E402
from kvcache_otel.events.watch import Watch  # noqa: E402
from kvcache_otel.identity import Identity  # noqa: E402
from kvcache_otel.record.recorder import Recorder  # noqa: E402
from tests.engines.sglang.cache_driver import PAGE  # noqa: E402
from tests.engines.sglang.oracle import recount  # noqa: E402
from tests.engines.sglang.walk import random_walk  # noqa: E402
from tests.support.gate import Gate  # noqa: E402
from tests.support.processes import free_port  # noqa: E402
from tests.support.rows import Rows  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.engines.sglang.cache_driver import CacheDriver
    from tests.engines.sglang.conftest import Instrumented

pytestmark = pytest.mark.engine

WORKER = "pod-0"
SECONDS = 20.0
OPERATIONS = 300
RANK = 2


class Router:
    """A publisher of SGLang's, and what watches it, through a gate that may lose batches."""

    def __init__(self, *, replay: bool) -> None:
        self.ports = free_port(), free_port()
        self.replay = replay
        self.sent = 0
        self.publisher: Any = None
        self.start()
        self.gate = Gate(f"tcp://127.0.0.1:{self.ports[0]}")
        self.recorder = Recorder(Identity("custom", "test"), series_limit=series(8))
        self.watch = Watch(BlockIndex(self.recorder))
        options = f"?replay={self.ports[1]}" if replay else ""
        self.watch.want([parse(f"{WORKER}={self.gate.endpoint}{options}")])
        self.wait(lambda: self.gate.is_open)
        self.publish([])
        # The gate is itself a subscriber that must have come; what was sent before it did is gone.
        self.wait(lambda: self._again() or self.gate.passed > 0)

    def _again(self) -> None:
        self.publish([])
        time.sleep(0.01)

    def start(self) -> None:
        """Starts the publisher; ports move with the rank, as SGLang has it."""
        endpoint, replay = (f"tcp://127.0.0.1:{port - RANK}" for port in self.ports)
        config = {"publisher": "zmq", "endpoint": endpoint, "replay_endpoint": replay, "topic": "kv", "bind": True}
        end = time.monotonic() + SECONDS
        while True:
            try:
                self.publisher = EventPublisherFactory.create(_json(config), attn_dp_rank=RANK)
                break
            except zmq.ZMQError:  # The one before is not quite gone.
                assert time.monotonic() < end
                time.sleep(0.05)
        self.sent = 0

    def publish(self, events: list[Any]) -> None:
        self.publisher.publish(KVEventBatch(ts=time.time(), events=events))
        self.sent += 1

    def wait(self, done: Callable[[], bool], drops: Callable[[int], bool] = lambda _: False) -> None:
        """Lets everything take its course until something is so."""
        end = time.monotonic() + SECONDS
        while not done():
            assert time.monotonic() < end, f"{self.gate.passed} passed, {self.gate.dropped} dropped of {self.sent}"
            self.gate.pass_on(drops)
            self.watch.poll(0.01)

    def settle(self, drops: Callable[[int], bool] = lambda _: False) -> None:
        """Waits until all that was sent has come, and what can be recovered has been."""
        before = self.gate.passed + self.gate.dropped
        quiet = time.monotonic() + 0.5
        while time.monotonic() < quiet:
            self.wait(lambda: True, drops)
            self.gate.pass_on(drops)
            self.watch.poll(0.01)
            if (now := self.gate.passed + self.gate.dropped) != before:
                before, quiet = now, time.monotonic() + 0.5

    @property
    def rows(self) -> Rows:
        return Rows(self.recorder)

    def received(self, tier: str) -> int | float | None:
        return self.rows.value(semconv.RESIDENT_BLOCKS, tier=tier, view="received", worker=WORKER)

    def counted(self, spec: Any) -> int | float:
        return self.rows.total(spec)

    def close(self) -> None:
        self.watch.close()
        self.gate.close()
        self.publisher.shutdown()


def _json(config: dict[str, Any]) -> str:
    import json

    return json.dumps(config)


@pytest.fixture
def router() -> Iterator[Callable[..., Router]]:
    made: list[Router] = []

    def make(**options: Any) -> Router:
        made.append(Router(**options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def _walk(driver: CacheDriver, router: Router, drops: Callable[[int], bool] = lambda _: False) -> None:
    """Publishes each step's events, as the scheduler does."""
    seen = len(driver.events)
    for _ in random_walk(driver, 11, OPERATIONS):
        if len(driver.events) > seen:
            router.publish(driver.events[seen:])
            seen = len(driver.events)
        router.gate.pass_on(drops)
        router.watch.poll(0)
    driver.settle()
    if len(driver.events) > seen:
        router.publish(driver.events[seen:])
    router.settle(drops)


def _views_agree(router: Router, instrumented: Instrumented, driver: CacheDriver) -> None:
    counted = recount(driver)
    for tier, held in (("device", counted.device_blocks), ("host", counted.host_blocks)):
        where = {"tier": tier}
        assert instrumented.rows.value(semconv.RESIDENT_BLOCKS, **where, view="held") == held
        assert instrumented.rows.value(semconv.RESIDENT_BLOCKS, **where, view="published") == held
        assert router.received(tier) == held, tier


@pytest.mark.parametrize("core", ["rust", "python"])
def test_received_is_published_is_held(
    make: Callable[..., CacheDriver],
    instrumented: Instrumented,
    router: Callable[..., Router],
    core: str,
    tmp_path: Path,
) -> None:
    driver, watched = make(core=core, storage_dir=tmp_path), router(replay=False)
    _walk(driver, watched)
    _views_agree(watched, instrumented, driver)
    assert watched.gate.dropped == 0
    for spec in (semconv.EVENT_BATCHES_LOST, semconv.EVENT_PUBLISHER_RESETS, semconv.EVENT_DECODE_FAILURES):
        assert watched.counted(spec) == 0
    assert watched.counted(semconv.ACCOUNTING_ERRORS) == 0
    lost = [point.attributes for point in watched.recorder.points(semconv.EVENT_BATCHES_LOST)]
    assert lost == [{semconv.KVCACHE_WORKER: WORKER, semconv.KVCACHE_RANK_DP: RANK}]
    assert watched.watch.index.workers[WORKER].engine == "sglang"
    for kind in ("block_stored", "block_removed"):
        for medium in ("device", "host"):
            ours = {"type": kind, "medium": medium}
            published = instrumented.rows.value(semconv.EVENT_BLOCKS, view="published", **ours)
            assert watched.rows.value(semconv.EVENT_BLOCKS, view="received", worker=WORKER, **ours) == published


def test_what_is_in_storage_is_announced_by_nobody(
    make: Callable[..., CacheDriver], instrumented: Instrumented, router: Callable[..., Router], tmp_path: Path
) -> None:
    """SGLang has a medium for it, and no event that names it: there is a file for each page, and no row."""
    driver, watched = make(storage_dir=tmp_path), router(replay=False)
    driver.insert(range(1000, 1000 + 6 * PAGE))
    driver.insert(range(2000, 2000 + 2 * PAGE))
    driver.settle()
    watched.publish(driver.events)
    watched.settle()
    _views_agree(watched, instrumented, driver)
    assert len(list(tmp_path.glob("*.bin"))) == 8
    media = [event.medium for event in driver.events if hasattr(event, "medium")]
    assert {getattr(medium, "value", medium) for medium in media} == {"GPU", "CPU_PINNED"}
    for rows, view in ((instrumented.rows, "held"), (instrumented.rows, "published"), (watched.rows, "received")):
        where = [dict(key) for key in rows.values(semconv.RESIDENT_BLOCKS)]
        tiers = {row[semconv.KVCACHE_TIER] for row in where if row[semconv.KVCACHE_VIEW] == view}
        assert tiers == {"device", "host"}, view
    for rows in (instrumented.rows, watched.rows):
        assert rows.total(semconv.EVENT_BLOCKS, medium="disk") == 0


def test_lost_batches_without_replay(
    make: Callable[..., CacheDriver], instrumented: Instrumented, router: Callable[..., Router]
) -> None:
    driver, watched = make(), router(replay=False)
    first = watched.sent
    _walk(driver, watched, lambda number: number > first and number % 7 == 3)
    watched.publish([])  # A last one that comes, so that nobody misses the end.
    watched.settle()
    assert watched.gate.dropped > 10
    assert watched.counted(semconv.EVENT_BATCHES_LOST) == watched.gate.dropped
    assert watched.counted(semconv.EVENT_BATCHES_RECOVERED) == 0
    published = instrumented.rows.value(semconv.RESIDENT_BLOCKS, tier="device", view="published")
    assert watched.received("device") != published


def test_lost_batches_with_replay(
    make: Callable[..., CacheDriver], instrumented: Instrumented, router: Callable[..., Router]
) -> None:
    driver, watched = make(), router(replay=True)
    first = watched.sent
    _walk(driver, watched, lambda number: number > first and number % 7 == 3)
    watched.publish([])
    watched.settle()
    assert watched.gate.dropped > 10
    assert watched.counted(semconv.EVENT_BATCHES_RECOVERED) == watched.gate.dropped
    assert watched.counted(semconv.EVENT_BATCHES_LOST) == 0
    assert watched.counted(semconv.EVENT_BATCHES_DUPLICATE) == 0
    _views_agree(watched, instrumented, driver)


def test_a_publisher_that_starts_again(
    make: Callable[..., CacheDriver], instrumented: Instrumented, router: Callable[..., Router]
) -> None:
    driver, watched = make(), router(replay=False)
    _walk(driver, watched)
    watched.publisher.shutdown()
    watched.start()
    driver.reset()
    seen = len(driver.events)
    before = watched.gate.passed
    watched.wait(lambda: watched._again() or watched.gate.passed > before)  # Connected again.
    driver.insert(list(range(64)))
    driver.settle()
    watched.publish(driver.events[seen:])
    watched.settle()
    assert watched.counted(semconv.EVENT_PUBLISHER_RESETS) == 1
    _views_agree(watched, instrumented, driver)
