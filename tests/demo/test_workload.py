"""The workload drives the cache as a scheduler would, the same way every time, and never for longer than it may."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from kvcache_otel import semconv
from kvcache_otel.demo.books import recount
from kvcache_otel.demo.cache import TieredCache
from kvcache_otel.demo.config import POLICIES, Config
from kvcache_otel.demo.instrument import instrument
from kvcache_otel.demo.workload import Shape, Workload
from tests.demo.oracle import differences

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.engines.generic.conftest import Exported

SHAPE: dict[str, Any] = {
    "users": 6,
    "turns": 3,
    "prefix": 10,
    "turn_tokens": 7,
    "output_tokens": 9,
    "concurrency": 3,
    "decode_tokens": 3,
    "think": 3,
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("threaded", [False, True])
def test_the_books_are_the_rows_while_it_runs(
    exported: Exported, make_cache: Callable[..., TieredCache], policy: str, threaded: bool
) -> None:
    cache = make_cache(policy=policy, storage_thread=threaded, device_tokens=96)
    instrument(cache, exported.provider)
    workload = Workload(cache, Shape(**SHAPE, seed=4))
    for _ in range(300):
        workload.step()
        with cache.storage.working:
            assert differences(exported.rows, cache) == {}
    assert workload.steps == 300
    assert workload.turns > 20
    assert workload.admitted == workload.turns + len(workload.running) + len(workload.retracted)
    assert cache.books["retractions"] > 0
    assert cache.books["tokens served", "device"] > 0


def run(seed: int, **options: Any) -> tuple[Any, ...]:
    cache = TieredCache(Config(device_tokens=1024, host_tokens=1024, storage_thread=False, memory="plain", **options))
    workload = Workload(cache, Shape(seed=seed))
    for _ in range(200):
        workload.step()
    cache.close()
    return cache.books.counts, recount_of(cache), workload.turns


def recount_of(cache: TieredCache) -> list[int]:
    return sorted(page.hash for node in cache.tree.nodes() for page in node.pages)


def test_a_seed_is_one_run(make_cache: Callable[..., TieredCache]) -> None:
    assert run(1) == run(1)
    assert run(1) != run(2)


def test_conversations_go_on_where_they_were(make_cache: Callable[..., TieredCache]) -> None:
    cache = make_cache(device_tokens=4096, page_tokens=1, token_bytes=8, prefetch_tokens=0)
    workload = Workload(cache, Shape(**{**SHAPE, "users": 1, "think": 0}))
    prompts: list[list[int]] = []
    while workload.turns < 6:
        workload.step()
        for request in cache.requests.values():
            if prompts[-1:] != [request.tokens[: len(prompts[-1])]] if prompts else True:
                prompts.append(list(request.tokens))
    # 3 turns of 7 and answers of 9 upon a prefix of 10; each prompt has all before it but its own last turn.
    assert cache.books["tokens prompted"] >= 2 * (17 + 33 + 49)
    served = cache.books["tokens served", "device"]
    assert served >= (26 - 0) + (42 - 0)  # What was there of the second and third prompt.


@pytest.mark.parametrize("seed", range(3))
def test_it_goes_on_with_hardly_any_room(make_cache: Callable[..., TieredCache], seed: int) -> None:
    cache = make_cache(device_tokens=28, host_tokens=4, disk_tokens=8)
    workload = Workload(cache, Shape(**SHAPE, seed=seed, hold=2))
    for _ in range(1000):
        workload.step()
    assert workload.turns > 100
    recount(cache)


def test_hold_keeps_a_request_for_some_steps(make_cache: Callable[..., TieredCache]) -> None:
    turns = [0, 0]
    for at, hold in enumerate((0, 50)):
        workload = Workload(make_cache(), Shape(**SHAPE, hold=hold))
        for _ in range(200):
            workload.step()
        turns[at] = workload.turns
    assert 0 < 3 * turns[1] < turns[0]


def test_it_runs_for_some_seconds_at_a_rate_until_it_is_enough(make_cache: Callable[..., TieredCache]) -> None:
    workload = Workload(make_cache(), Shape(**SHAPE))
    began = time.monotonic()
    workload.run(0.5, rate=20)
    assert 0.5 <= time.monotonic() - began < 2
    assert 1 <= workload.steps <= 11
    workload.run(60, lambda: workload.steps >= 50)
    assert workload.steps == 50
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: Config(policy="write_around"),
            "policy is 'write_around', and must be one of write_through, write_back",
        ),
        (lambda: Config(memory="tape"), "memory is 'tape', and must be one of auto, torch, numpy, plain"),
        (lambda: Config(page_tokens=0), "page_tokens is 0, and must be 1 or more"),
        (lambda: Config(page_tokens=3, token_bytes=1), "a page has 3 bytes"),
        (lambda: Config(device_tokens=15), "device_tokens is 15, less than one page of 16"),
        (lambda: Config(disk_tokens=-1), "must not be negative"),
        (lambda: Shape(users=0), "users is 0, and must be 1 or more"),
        (lambda: Shape(think=-1), "think is -1, and must not be negative"),
        (lambda: Workload(TieredCache(Config(device_tokens=64))), "the device has 64 tokens, and one turn of a conver"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as raised:
        make()
    assert "\n" not in str(raised.value)


def test_whoever_reads_meanwhile_sees_levels_that_fit(
    exported: Exported, make_cache: Callable[..., TieredCache]
) -> None:
    cache = make_cache(storage_thread=True, device_tokens=96)
    instrument(cache, exported.provider)
    workload = Workload(cache, Shape(**{**SHAPE, "think": 0}))
    sums: set[tuple[str, int | float]] = set()
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            tiers: Counter[str] = Counter()
            for key, tokens in exported.rows.values(semconv.USAGE).items():
                tiers[str(dict(key)[semconv.KVCACHE_TIER])] += int(tokens)
            sums.update(tiers.items())

    reader, interval = threading.Thread(target=read), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        reader.start()
        workload.run(60, lambda: workload.steps >= 300)
    finally:
        done.set()
        reader.join()
        sys.setswitchinterval(interval)
    assert workload.steps == 300
    assert sums == {("device", 96), ("host", 64), ("disk", 240)}
    with cache.storage.working:
        assert differences(exported.rows, cache) == {}
