"""What vLLM publishes of its blocks: what we say of it is what a plain subscriber adds up, and what vLLM holds."""

from __future__ import annotations

import random
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.conftest import require

require("vllm")

from vllm.distributed.kv_events import EventPublisher, NullEventPublisher, ZmqEventPublisher  # noqa: E402

from kvcache_otel import semconv  # noqa: E402
from tests.engines.vllm import programs  # noqa: E402
from tests.engines.vllm.device_driver import TOKENS, Device, Requests, device_walk, publishing  # noqa: E402
from tests.engines.vllm.manager_driver import making_drivers, random_walk  # noqa: E402
from tests.engines.vllm.recounts import host_chunks  # noqa: E402
from tests.support.processes import free_ports  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.engines.vllm.conftest import Instrumented
    from tests.support.rows import Rows

pytestmark = pytest.mark.engine

PROGRAM = "tests.engines.vllm.events_program"


@pytest.fixture
def make(instrumented: Instrumented) -> Iterator[Callable[..., Device]]:
    """Makes devices that publish, and ends them."""
    made: list[Device] = []

    def make(manager: Any = None) -> Device:
        endpoint = f"inproc://kvcache-otel-test-{time.monotonic_ns()}"
        made.append(Device(instrumented, ZmqEventPublisher(0, endpoint), endpoint, manager))
        return made[-1]

    yield make
    for device in made:
        device.publisher.shutdown()
        assert device.subscriber is not None
        device.subscriber.close()


@pytest.mark.parametrize(("groups", "partial"), [(1, False), (3, False), (1, True)], ids=["one", "three", "partial"])
@pytest.mark.parametrize("seed", range(4))
def test_the_device_is_published_as_it_is_held_after_every_step(
    make: Callable[..., Device], seed: int, groups: int, partial: bool
) -> None:
    device = make()
    happened = device_walk(device, random.Random(seed), groups=groups, partial=partial, steps=800)
    assert {"allocate", "go on", "free", "evict", "reset", "copies"} <= happened
    assert ({"partial", "promoted", "moved"} <= happened) == partial
    device.assert_subscribed("device", "GPU")


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_the_host_is_published_as_it_is_held_after_every_step(
    make: Callable[..., Device], instrumented: Instrumented, tmp_path: Path, policy: str
) -> None:
    with making_drivers(tmp_path / "blocks", 8) as drivers:
        driver = drivers(policy=policy)
        device = make(publishing(driver))

        def check() -> None:
            device.step()
            ready = host_chunks(driver.manager)
            assert (device.resident("host", "held"), device.resident("host", "published")) == (ready, ready)
            instrumented.assert_sound()

        done = random_walk(driver, random.Random(policy), 400, check, without={"reset"})
        assert done["promote"] > 0
        assert done["store"] > 0
        for tier, medium in (("host", "CPU"), ("disk", "STORAGE")):
            device.assert_subscribed(tier, medium)
        assert device.resident("disk", "published")
        assert device.resident("disk", "held") is None


def test_a_reset_of_the_device_leaves_the_host_and_one_of_the_host_is_not_announced(
    make: Callable[..., Device], tmp_path: Path
) -> None:
    """What vLLM calls "all blocks cleared" is the device; that the tiers below were emptied it does not say."""
    with making_drivers(tmp_path / "blocks", 8) as drivers:
        driver = drivers()
        device = make(publishing(driver))
        blocks = device.pool.get_new_blocks(4)
        device.pool.cache_full_blocks(Requests(random.Random(5)).make(4), blocks, 0, 3, TOKENS, 0)
        device.pool.free_blocks(blocks)
        request = driver.request()
        driver.store(request, range(4))
        driver.settle()
        driver.finish(request)
        device.step()
        assert (device.resident("device", "held"), device.resident("device", "published")) == (3, 3)
        assert device.pool.reset_prefix_cache()
        # An idle engine publishes nothing before its next step.
        assert (device.resident("device", "held"), device.resident("device", "published")) == (0, 3)
        device.step()
        assert (device.resident("device", "held"), device.resident("device", "published")) == (0, 0)
        assert (device.resident("host", "held"), device.resident("host", "published")) == (4, 4)
        driver.reset()
        device.step()
        assert (device.resident("host", "held"), device.resident("host", "published")) == (0, 4)
        device.assert_subscribed("host", "CPU")
        device.assert_subscribed("device", "GPU")


def test_blocks_that_a_request_has_announced_again_stay_published(make: Callable[..., Device]) -> None:
    """A request with ``kv_cache_report_mode=full``: nothing tells that from further copies of its blocks."""
    device = make()
    request, blocks = Requests(random.Random(6)).make(3), device.pool.get_new_blocks(3)
    device.pool.cache_full_blocks(request, blocks, 0, 3, TOKENS, 0)
    device.pool.emit_cached_block_events(request, 2, TOKENS, 0)
    device.step()
    device.assert_views_agree()
    device.pool.evict_blocks({block.block_id for block in blocks})
    device.step()
    assert (device.resident("device", "held"), device.resident("device", "published")) == (0, 2)
    device.assert_subscribed("device", "GPU")


class OwnPublisher(EventPublisher):
    """A publisher that somebody has registered with vLLM."""

    def publish(self, events: Any) -> None: ...

    def shutdown(self) -> None: ...


@pytest.mark.parametrize("publisher", [NullEventPublisher(), OwnPublisher()], ids=["none", "another"])
def test_what_is_not_seen_being_published_has_no_rows(instrumented: Instrumented, publisher: Any) -> None:
    device = Device(instrumented, publisher, None)
    requests = Requests(random.Random(1))
    device.pool.cache_full_blocks(requests.make(4), device.pool.get_new_blocks(4), 0, 3, TOKENS, 0)
    device.step()
    rows: Rows = instrumented.rows
    assert device.resident("device", "held") == 3
    assert [key for key in rows.values(semconv.RESIDENT_BLOCKS) if (semconv.KVCACHE_VIEW, "published") in key] == []
    assert rows.values(semconv.EVENTS) == {}
    assert rows.values(semconv.EVENT_BLOCKS) == {}


def test_every_row_is_there_before_anything_was_published(
    make: Callable[..., Device], instrumented: Instrumented
) -> None:
    device = make()
    for spec in (semconv.EVENTS, semconv.EVENT_BLOCKS):
        values = instrumented.rows.values(spec)
        assert set(values.values()) == {0}
        assert len(values) == 24
    assert device.resident("device", "published") == 0
    assert device.resident("host", "published") is None, "nothing below the device"


def test_published_rows_end_with_their_publisher(instrumented: Instrumented) -> None:
    endpoint = "inproc://kvcache-otel-test-end"
    device = Device(instrumented, ZmqEventPublisher(0, endpoint), None)
    assert device.resident("device", "published") == 0
    device.publisher.shutdown()
    device.scheduler.kv_event_publisher = device.publisher = None
    assert device.resident("device", "published") is None
    assert device.resident("device", "held") == 0


@pytest.mark.parametrize(
    "options",
    [(), ("self_describing_kv_events=false", "blocks_per_chunk=2"), ("blocks_per_chunk=2",)],
    ids=["blocks", "chunks", "described-chunks"],
)
def test_a_whole_engine_publishes_what_it_holds(tmp_path: Path, options: tuple[str, ...]) -> None:
    """After each of its steps; and a plain subscriber, and ours, have the same at the end."""
    port = str(free_ports(2)[0])
    ended = programs.run([sys.executable, "-m", PROGRAM, tmp_path, port, *options], {"VLLM_PLUGINS": "none"})
    result = ended.result()
    before, after = result["before"], result["after"]
    assert result["steps"] > 100
    assert result["missing"] == 0
    for at in (before, after):
        assert at["subscribed"] == at["received"] == at["published"]
    held, published = before["held"], before["published"]
    assert held["device"] == published["device"] > 0
    assert before["announced"]["disk"] == published["disk"] > 0
    assert held["host"] == published["host"] > 0
    for counted in result["counted"]:
        assert counted["ours"] == counted["subscribed"]
    assert result["cleared"][0] == result["cleared"][1] > 1
    # The reset of the tiers below the device is announced by nobody.
    assert (after["held"]["host"], after["published"]["host"]) == (0, published["host"])
    assert (after["held"]["device"], after["published"]["device"]) == (0, 0)
