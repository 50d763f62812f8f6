"""What the hooks cost SGLang's cache: the same loop with and without them, in turns, in one run.

    $(python tools/engine_env.py sglang) -m benchmarks.bench_sglang_cache

*Match* looks up a prompt of 2,000 tokens that the device has. *Walk* is what the tests' stand-in for the scheduler does
for requests of 800 tokens: match, make room by evicting, write keys and values, insert, take a step in which backups
begin and end, and every few requests load one back from the host. *Bare calls* is the same with nothing but the cache's
own bookkeeping, and no bytes written. Either *with events* too, which are taken in every step.

Only the time of the engine's own thread counts. Hooks that come and go make Python forget what it has learned of the
classes that they are on, so every round begins with a lap that is not timed. Every pair of rounds gives one ratio; the
median of the ratios is judged, since these machines are noisy.
"""

from __future__ import annotations

import argparse
import gc
import logging
import statistics
import sys
import time
from array import array
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from tests.engines.sglang import cpu
from tests.engines.sglang.cache_driver import CacheDriver

from kvcache_otel.engines.hooks import HookSet
from kvcache_otel.engines.sglang.adapter import SglangAdapter
from kvcache_otel.engines.sglang.table import HOOKS, PLACE
from kvcache_otel.identity import Identity
from kvcache_otel.record.probe import CacheProbe
from kvcache_otel.record.recorder import Recorder
from kvcache_otel.semconv import METRICS

if TYPE_CHECKING:
    from collections.abc import Callable

    Loop = Callable[[CacheDriver, int], None]

MATCH = 1.03
"""What the hooks may cost a match of 2,000 tokens."""

WALK = 1.05
"""What they may cost the walk. The bytes that a model would write are much of it: where they are fewer, the same hooks
show more, and `benchmarks/README.md` says how much."""

WITH_EVENTS, BARE, BARE_WITH_EVENTS = 1.15, 1.2, 1.25
"""What they may cost where blocks are published, and where there is nothing but bookkeeping: bounds against surprises.
A page has four tokens here, a sixteenth of what engines use, and so sixteen times as many blocks are published."""

WARM_UP = 10
"""Requests before those that are timed."""

ATTEMPTS = 3
"""A ratio that is too high is measured again: a busy machine can do that, and it does not do it every time."""

LONG = array("q", range(2000))
SHARED, OWN = 400, 400
"""Tokens of a prompt that other prompts begin with, and those that are its own."""


def match(driver: CacheDriver, times: int) -> None:
    """Looks up a long prompt."""
    cache, params = driver.cache, MatchPrefixParams(key=RadixKey(LONG))
    for _ in range(times):
        cache.match_prefix(params)


def walk(driver: CacheDriver, requests: int) -> None:
    """Serves requests whose prompts begin alike."""
    for number in range(requests):
        own = 10**6 + number * OWN
        prompt = [*range(SHARED), *range(own, own + OWN)]
        driver.match(prompt)
        driver.insert(prompt)
        driver.step()
        if number % 8 == 7:
            driver.evict(4 * OWN)
            driver.load_back([*range(SHARED), *range(own - 4 * OWN, own - 3 * OWN)])


def bare(driver: CacheDriver, requests: int) -> None:
    """The same by the cache's own functions alone."""
    cache, allocator = driver.cache, driver.allocator
    for number in range(requests):
        own = 10**6 + number * OWN
        prompt = array("q", [*range(SHARED), *range(own, own + OWN)])
        found = cache.match_prefix(MatchPrefixParams(key=RadixKey(prompt)))
        missing = len(prompt) - found.device_prefix_len
        if allocator.available_size() < missing:
            cache.evict_for_alloc(EvictParams(num_tokens=missing - allocator.available_size()))
        slots = allocator.alloc(missing)
        head = cache.path_device_indices(found.last_device_node)[: found.device_prefix_len]
        cache.insert(
            InsertParams(key=RadixKey(prompt), value=torch.cat([head, slots]), prev_prefix_len=found.device_prefix_len)
        )
        driver.step()
        if number % 8 == 7:
            _load_back(driver, array("q", [*range(SHARED), *range(own - 4 * OWN, own - 3 * OWN)]))


def _load_back(driver: CacheDriver, prompt: array[int]) -> None:
    cache = driver.cache
    found = cache.match_prefix(MatchPrefixParams(key=RadixKey(prompt)))
    if found.host_hit_length and driver.allocator.available_size() >= found.host_hit_length:
        cache.load_back(found.best_match_node)
        cache.ready_to_load_host_cache()
        cache.loading_check()


class Compared:
    """One cache, built with the hooks in place, and driven with and without them in turns."""

    def __init__(self, loop: Loop, times: int, options: dict[str, Any]) -> None:
        self._loop, self._times = loop, times
        self._recorder = recorder = Recorder(Identity("sglang", "benchmark"))
        adapter = SglangAdapter(lambda identity, _rank: CacheProbe(recorder, identity), lambda: None)
        # In SGLang's own registry, as in an engine: there they stay, and ask nobody while they are detached.
        self._hooks = HookSet(HOOKS, lambda body: getattr(adapter, body), options.pop("place"))
        self._hooks.attach()
        self._driver = CacheDriver(device_tokens=4096, host_ratio=2.0, metrics=False, **options)
        self._hooks.detach()
        self._driver.insert(LONG)
        self._driver.settle()

    def round(self, number: int) -> tuple[float, float]:
        """Returns the seconds without and with the hooks; the order changes from round to round."""
        if number % 2:
            hooked = self._hooked()
            return self._timed(), hooked
        return self._timed(), self._hooked()

    def _timed(self) -> float:
        self._driver.events.clear()
        self._loop(self._driver, WARM_UP)
        began = time.thread_time()
        self._loop(self._driver, self._times)
        seconds = time.thread_time() - began
        self._driver.settle()
        return seconds

    def _hooked(self) -> float:
        self._hooks.attach()
        try:
            seconds = self._timed()
        finally:
            self._hooks.detach()
        for spec in METRICS.values():  # What an exporter's thread does every few seconds.
            list(self._recorder.points(spec))
        return seconds

    def close(self) -> None:
        """Ends the cache."""
        self._driver.close()


def compare(title: str, allowed: float, compared: Compared, times: int, rounds: int) -> bool:
    """Prints one line of the table and returns whether its ratio is allowed."""
    compared.round(-1)  # Warm.
    gc.collect()
    gc.freeze()
    for _ in range(ATTEMPTS):
        pairs = [compared.round(number) for number in range(rounds)]
        ratio = statistics.median(hooked / plain for plain, hooked in pairs)
        plain, hooked = (statistics.median(column) / times * 1e6 for column in zip(*pairs, strict=True))
        print(f"{title:<40}{plain:>9.1f}{hooked:>9.1f}{ratio:>8.3f}{allowed:>9}", flush=True)
        if ratio <= allowed:
            break
    gc.unfreeze()
    compared.close()
    return ratio <= allowed


def main() -> int:
    """See the module. Returns 1 where a ratio is above what is allowed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, for CI")
    arguments = parser.parse_args()
    rounds = 12 if arguments.quick else arguments.rounds
    logging.disable(logging.WARNING)
    cpu.timed_events(True)
    torch.set_num_threads(1)
    print(f"SGLang's cache; median of {rounds} alternating rounds; us of the engine's thread per request")
    print(f"{'':<40}{'without':>9}{'with':>9}{'ratio':>8}{'allowed':>9}")
    results = []
    for core in ("rust", "python"):
        for title, allowed, loop, times, events in (
            ("match of 2,000 tokens", MATCH, match, 1000, False),
            ("walk", WALK, walk, 40, False),
            ("walk, with events", WITH_EVENTS, walk, 40, True),
            ("bare calls", BARE, bare, 40, False),
            ("bare calls, with events", BARE_WITH_EVENTS, bare, 40, True),
        ):
            options = {"core": core, "kv_events": events, "place": PLACE}
            compared = Compared(loop, times, options)
            results.append(compare(f"{core} core: {title}", allowed, compared, times, rounds))
    print("ok" if all(results) else "TOO SLOW")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
