"""The demo cache's own books equal every metric after every step of a random walk, and what must add up does."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from kvcache_otel.demo.config import POLICIES
from kvcache_otel.demo.controller import CorruptedError
from kvcache_otel.demo.instrument import LOSSES, REFUSALS, SKIPS, instrument
from tests.conftest import require
from tests.demo.oracle import differences
from tests.demo.walk import Walk

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvcache_otel.demo.books import Books
    from kvcache_otel.demo.cache import TieredCache
    from kvcache_otel.demo.pages import Page
    from kvcache_otel.demo.storage import Job
    from tests.engines.generic.conftest import Exported

STEPS = 400


def unreliable(cache: TieredCache, seed: int) -> None:
    """Makes the disk fail at times."""
    draw, storage = random.Random(seed), cache.storage

    def fails(copy: Callable[[Job], None]) -> Callable[[Job], None]:
        def called(job: Job) -> None:
            if draw.random() < 0.2:
                raise OSError("a bad sector")
            copy(job)

        return called

    storage.to_disk, storage.to_host = fails(storage.to_disk), fails(storage.to_host)  # type: ignore[method-assign]


def walk(exported: Exported, cache: TieredCache, seed: int) -> Books:
    handle = instrument(cache, exported.provider)
    assert handle.missing == ()
    steps = Walk(cache, seed)
    with cache.storage.working:
        assert differences(exported.rows, cache) == {}  # All at zero.
    for _ in range(STEPS):
        steps.step()
        with cache.storage.working:  # Whatever the thread is at, it is between two jobs.
            assert differences(exported.rows, cache) == {}
    steps.rest()
    assert differences(exported.rows, cache) == {}
    assert cache.requests == {}
    assert sum(node.locks + node.pins for node in cache.tree.nodes()) == 0
    return cache.books


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(4))
def test_the_books_are_the_rows_after_every_step(
    exported: Exported, make_cache: Callable[..., TieredCache], policy: str, seed: int
) -> None:
    selective = seed == 3
    books = walk(exported, make_cache(policy=policy, backup_after=1 + selective), seed)
    assert min(books["pages verified"], books["tokens served", "device"], books["tokens served", "host"]) > 20
    assert min(books["retractions"], books["restorations"]) > 2
    assert min(books["tokens served", "disk"], books["pages fulfilled"]) > 2 or selective


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(2))
def test_so_they_are_with_a_storage_thread(
    exported: Exported, make_cache: Callable[..., TieredCache], policy: str, seed: int
) -> None:
    books = walk(exported, make_cache(policy=policy, storage_thread=True), seed)
    assert books["copies", "host", "disk"] > 5


@pytest.mark.parametrize("threaded", [False, True])
def test_so_they_are_with_a_disk_that_fails(
    exported: Exported, make_cache: Callable[..., TieredCache], threaded: bool
) -> None:
    cache = make_cache(storage_thread=threaded)
    unreliable(cache, 5)
    books = walk(exported, cache, 5)
    assert books["copies failed", "host", "disk", "OSError"] > 0
    assert books["copies failed", "disk", "host", "OSError"] > 0 or threaded
    assert books["pages unfulfilled", "storage_transfer"] > 0 or threaded


@pytest.mark.parametrize("memory", ["plain", "numpy"])
def test_so_they_are_in_any_memory(exported: Exported, make_cache: Callable[..., TieredCache], memory: str) -> None:
    cache = make_cache(memory=memory)
    assert cache.device.memory.kind == memory
    walk(exported, cache, 8)


@pytest.mark.engine
def test_so_they_are_in_tensors(exported: Exported, make_cache: Callable[..., TieredCache]) -> None:
    require("torch")
    cache = make_cache(memory="torch")
    assert cache.device.memory.kind == "torch"
    walk(exported, cache, 8)


def check_losses(cache: TieredCache) -> None:
    """Checks that pages which leave a tier are lost where they are on no other, as the tree itself has it."""
    controller: Any = cache.controller
    leave, books = controller._leave, cache.books

    def checked(tier: str, pages: Sequence[Page], reason: str) -> None:
        before = books["pages lost", tier, reason]
        leave(tier, pages, reason)
        elsewhere = {
            *cache.storage.index,
            *(page.hash for job in cache.storage.going if job.writes for page in job.pages),
        }
        if tier == "disk":
            elsewhere = {page.hash for node in cache.tree.nodes() for page in node.pages}
        assert books["pages lost", tier, reason] - before == sum(page.hash not in elsewhere for page in pages)

    controller._leave = checked


def test_everything_happens_in_these_walks(make_cache: Callable[..., TieredCache]) -> None:
    # What the walks above cannot tell apart from telemetry that is always zero.
    happened: set[tuple[str, ...]] = set()
    for seed in range(12):
        for policy in POLICIES:
            disk = 240 if seed % 3 else 16
            cache = make_cache(policy=policy, backup_after=1 + seed % 2, queue_jobs=2 + seed, disk_tokens=disk)
            check_losses(cache)
            steps = Walk(cache, seed)
            steps.take(STEPS)
            happened |= {words for words, count in cache.books.counts.items() if count}
    losses = {(tier, reason) for tier, reasons in LOSSES.items() for reason in reasons}
    assert {words[1:] for words in happened if words[0] == "pages lost"} == losses
    assert {words[1:] for words in happened if words[0] == "refusals"} == set(REFUSALS)
    assert {words[1] for words in happened if words[0] == "pages unfulfilled"} >= {
        "below_threshold",
        "host_capacity",
        "device_covered",
        "anchor_lost",
    }
    assert {words[1] for words in happened if words[0] == "pages skipped"} == set(SKIPS)


@pytest.mark.parametrize(
    ("what", "seen"),
    [
        ("pages copied", "host to device: tokens"),
        ("pages evicted", "host: evicted"),
        ("tokens served", "disk: served"),
        ("pages fulfilled", "prefetches: fulfilled"),
        ("events", "events: block_stored device"),
    ],
)
def test_the_walk_sees_what_is_wrong(
    exported: Exported, make_cache: Callable[..., TieredCache], what: str, seen: str
) -> None:
    cache = make_cache()
    instrument(cache, exported.provider)
    steps = Walk(cache, 0)
    steps.take(STEPS)
    for words in list(cache.books.counts):
        cache.books.counts[words] += words[0] == what
    assert seen in differences(exported.rows, cache)


def test_bytes_that_are_not_what_they_were_are_seen(make_cache: Callable[..., TieredCache]) -> None:
    cache = make_cache()
    steps = Walk(cache, 0)
    memory: Any = cache.storage.pool.memory
    read = memory.read
    memory.read = lambda page: bytes([read(page)[0] ^ 1]) + read(page)[1:]
    with pytest.raises(CorruptedError, match="other bytes"):
        steps.take(2000)
