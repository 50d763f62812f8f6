"""Drives vLLM's real block pool and its real publisher of KV events, without a model or an engine."""

from __future__ import annotations

import itertools
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_events import KVEventBatch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import OffloadingEventsTracker
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from kvcache_otel import semconv
from tests.engines.vllm.oracle import published_events
from tests.engines.vllm.recounts import device_blocks
from tests.engines.vllm.subscriber import Subscriber

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from tests.engines.vllm.conftest import Instrumented
    from tests.engines.vllm.manager_driver import ManagerDriver

TOKENS = 16
BLOCKS = 24


class Device:
    """vLLM's own block pool and publisher, and a subscriber; of the scheduler, only what the adapter reads is there."""

    def __init__(self, instrumented: Instrumented, publisher: Any, endpoint: str | None, manager: Any = None) -> None:
        """Args:
        instrumented: What watches it.
        publisher: vLLM's publisher.
        endpoint: Where it publishes; None for no subscriber.
        manager: vLLM's offloading manager below it, as `publishing` returns it.
        """
        self.publisher = publisher
        self.subscriber = Subscriber(endpoint) if endpoint is not None else None
        self.pool = BlockPool(
            num_gpu_blocks=BLOCKS, enable_caching=True, hash_block_size=TOKENS, enable_kv_cache_events=True
        )
        self._instrumented, self._rows = instrumented, instrumented.rows
        connector = None
        if manager is not None:
            connector = SimpleNamespace(connector_scheduler=SimpleNamespace(manager=manager))
            self._tracker = OffloadingEventsTracker(manager.kv_events_config)
        self._manager = manager
        self.scheduler = SimpleNamespace(
            connector=connector,
            block_size=TOKENS,
            kv_cache_manager=SimpleNamespace(block_pool=self.pool),
            kv_cache_config=SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=None)]),
            vllm_config=SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_index=0)),
            kv_event_publisher=publisher,
        )
        instrumented.adapter.scheduler_built(None, self.scheduler)

    def step(self) -> None:
        """The end of a step, as `Scheduler.update_from_output` has it."""
        events: list[Any] = self.pool.take_events()
        if self._manager is not None:
            events.extend(self._tracker.take_events(self._manager.take_events()))
        if events:
            self.publisher.publish(KVEventBatch(ts=time.time(), events=events))
        self._instrumented.adapter.step_done(None, self.scheduler)

    def resident(self, tier: str, view: str) -> int | float | None:
        return self._rows.value(semconv.RESIDENT_BLOCKS, tier=tier, view=view)

    def assert_views_agree(self) -> None:
        """Held, published and a recount are one number."""
        recount = device_blocks(self.pool)
        assert (self.resident("device", "held"), self.resident("device", "published")) == (recount, recount)

    def assert_subscribed(self, tier: str, medium: str) -> None:
        """What the subscriber has added up is what we say was published: blocks, events and the hashes in them."""
        assert self.subscriber is not None
        self.subscriber.listen()
        assert self.subscriber.missing == 0
        assert self.resident(tier, "published") == self.subscriber.resident(medium)
        for kind, ours in (("BlockStored", "block_stored"), ("BlockRemoved", "block_removed")):
            theirs = [self.subscriber.events[kind, medium], self.subscriber.blocks[kind, medium]]
            assert published_events(self._rows, ours, tier) == theirs
        cleared = self.subscriber.events["AllBlocksCleared", None]
        assert published_events(self._rows, "all_blocks_cleared", "untagged") == [cleared, 0]


class Requests:
    """Requests of vLLM's own, of which some begin alike."""

    def __init__(self, rng: random.Random) -> None:
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(TOKENS, sha256)
        self._rng, self._numbers = rng, itertools.count()

    def make(self, blocks: int) -> Request:
        """A request of so many blocks; its beginning may be that of others."""
        shared = self._rng.randrange(4)
        prefix = self._rng.randint(0, blocks)
        tokens = [shared] * (prefix * TOKENS)
        tokens += [self._rng.randrange(10, 12)] * ((blocks - prefix) * TOKENS)
        return Request(
            request_id=str(next(self._numbers)),
            prompt_token_ids=tokens,
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            block_hasher=self._hasher,
        )


def device_walk(
    device: Device,
    rng: random.Random,
    *,
    groups: int,
    partial: bool,
    steps: int,
    check: Callable[[], None] | None = None,
) -> set[str]:
    """Allocates, caches, frees, evicts and resets at random; returns what has happened.

    Args:
        device: The device.
        rng: What decides.
        groups: Groups of layers, each with blocks of its own under the same hashes.
        partial: Whether blocks are cached before they are full.
        steps: How many operations.
        check: Called at the end of each step of the device; by default, `Device.assert_views_agree`.
    """
    check = check or device.assert_views_agree
    pool, requests = device.pool, Requests(rng)
    open_: list[tuple[Request, list[Any], int, int]] = []
    happened: set[str] = set()

    def allocate() -> None:
        count = rng.randint(1, 5)
        group = rng.randrange(groups)
        if count > pool.get_num_free_blocks():
            return
        request, blocks = requests.make(count), pool.get_new_blocks(count)
        full = rng.randint(0, count)
        pool.cache_full_blocks(request, blocks, 0, full, TOKENS, group)
        open_.append((request, blocks, full, group))
        happened.add("allocate")

    def go_on() -> None:
        if not open_:
            return
        index = rng.randrange(len(open_))
        request, blocks, full, group = open_[index]
        pool.cache_full_blocks(request, blocks, full, len(blocks), TOKENS, group)
        open_[index] = (request, blocks, len(blocks), group)
        happened.add("go on")

    def begin_a_block() -> None:
        # A block of four hashes is found under the first ones before it is full, and then under its own.
        if not partial or not pool.get_num_free_blocks():
            return
        request, (block,) = requests.make(4), pool.get_new_blocks(1)
        for hashes in rng.sample(range(1, 4), rng.randint(1, 3)):
            pool.cache_partial_block(request, block, hashes * TOKENS, 0, 4 * TOKENS)
        happened.add("partial")
        if rng.random() < 0.5:
            pool.cache_full_blocks(request, [block], 0, 1, 4 * TOKENS, 0)
            happened.add("promoted")
        elif rng.random() < 0.5 and pool.get_num_free_blocks():
            (copy,) = pool.get_new_blocks(1)
            pool.move_block_hashes(block, copy)
            pool.free_blocks([copy])
            happened.add("moved")
        pool.free_blocks([block])

    def free() -> None:
        if open_:
            _, blocks, _, _ = open_.pop(rng.randrange(len(open_)))
            pool.free_blocks(reversed(blocks))
            happened.add("free")

    def evict() -> None:
        pool.evict_blocks(set(rng.sample(range(1, BLOCKS), 2)))
        happened.add("evict")

    def reset() -> None:
        while open_:
            free()
        assert pool.reset_prefix_cache()
        happened.add("reset")

    operations = [allocate, go_on, begin_a_block, free, evict, reset]
    for _ in range(steps):
        rng.choices(operations, [8, 5, 4, 7, 1, 0.3])[0]()
        if any(isinstance(blocks, dict) for blocks in pool.cached_block_hash_to_block._cache.values()):
            happened.add("copies")
        if rng.random() < 0.5:
            device.step()
            check()
    reset()
    device.step()
    check()
    return happened


def publishing(driver: ManagerDriver) -> Any:
    """The manager of a driver, with what a `Device` wants to know of how it publishes."""
    driver.manager.kv_events_config = driver.spec.kv_events_config
    return driver.manager
