"""A thousand caches that come and go leave memory, threads and files where they were."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from kvcache_otel.demo.cache import TieredCache
from kvcache_otel.demo.config import Config
from kvcache_otel.demo.instrument import instrument
from kvcache_otel.demo.workload import Shape, Workload
from tests.support.processes import wait_until

if TYPE_CHECKING:
    from tests.engines.generic.conftest import Exported

CACHES = 1000
SHAPE = Shape(users=2, turns=2, prefix=16, turn_tokens=16, output_tokens=8, think=0)


def one(exported: Exported, number: int) -> None:
    """Makes a cache, uses it, and drops it: instrumented or not, closed or not, given back or not."""
    cache = TieredCache(Config(device_tokens=128, host_tokens=128, disk_tokens=256, memory="plain", prefetch_tokens=16))
    handle = instrument(cache, exported.provider) if number % 4 else None
    workload = Workload(cache, SHAPE)
    for _ in range(12):
        workload.step()
    assert cache.books["tokens prompted"] > 0
    if number % 3 == 0 and handle is not None:
        handle.uninstrument()
    if number % 2:
        cache.close()


class Standing(NamedTuple):
    """What there is once the threads of dropped caches have ended."""

    objects: Counter[str]
    readers: int
    threads: list[str]
    files: int
    blocks: int


def standing() -> Standing:
    """Counts objects of this package, threads, files, and blocks of memory."""
    gc.collect()
    wait_until(lambda: not any(thread.name.startswith("demo-") for thread in threading.enumerate()))
    gc.collect()
    kinds = [type(found) for found in gc.get_objects()]
    objects = Counter(kind.__qualname__ for kind in kinds if str(kind.__module__).startswith("kvcache_otel"))
    readers = objects.pop("Reader", 0)  # Of gauges that have ended: the recorder lets go of them now and then.
    threads = sorted(thread.name for thread in threading.enumerate())
    return Standing(objects, readers, threads, len(os.listdir("/proc/self/fd")), sys.getallocatedblocks())


def test_caches_that_are_dropped_leave_nothing(exported: Exported) -> None:
    for number in range(60):
        one(exported, number)
    before = standing()
    for number in range(CACHES):
        one(exported, number)
    after = standing()
    assert after.objects - before.objects == {}
    assert (after.threads, after.files) == (before.threads, before.files)
    assert after.readers < CACHES
    # Python's own tables grow and shrink by some thousands.
    assert after.blocks - before.blocks < 8 * CACHES, "something is left of each cache"
