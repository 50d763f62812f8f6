"""What the hooks cost SGLang's cache: the same loop with and without them, in turns, in one run.

    $(python tools/engine_env.py sglang) -m benchmarks.bench_sglang_cache

*Match* looks up a prompt of 2,000 tokens that the device has. *Walk* serves requests with prompts of as many: match,
make room by evicting, write keys and values, insert, take a step in which backups begin and end, and every few requests
evict more and load one back from the host. *Short prompts* are of 800 tokens. *Bare calls* is the same with nothing but
the cache's own bookkeeping, no bytes written. Either *with events* too, which are taken in every step. A page has four
tokens, which is little: there is an event for each page, and so one walk has pages of 64, as engines have.

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
from functools import partial
from itertools import count, islice
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from tests.engines.sglang import cache_driver, cpu
from tests.engines.sglang.cache_driver import CacheDriver

from kvcache_otel.engines.hooks import HookSet
from kvcache_otel.engines.sglang.adapter import SglangAdapter
from kvcache_otel.engines.sglang.table import HOOKS, PLACE
from kvcache_otel.identity import Identity
from kvcache_otel.record.probe import CacheProbe
from kvcache_otel.record.recorder import Recorder
from kvcache_otel.semconv import METRICS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Loop = Callable[[CacheDriver, int], None]

MATCH = 1.03
"""What the hooks may cost a match of 2,000 tokens."""

WALK = 1.05
"""What they may cost the walk."""

LARGE_PAGES, SMALL_PAGES = 1.15, 1.4
"""What they may cost the walk where KV events are on, with pages of 64 tokens and of four."""

SHORT, WITH_EVENTS, BARE, BARE_WITH_EVENTS = 1.08, 1.25, 1.1, 1.25
"""What they may cost where requests do less, or blocks are published: bounds against surprises. The hooks cost the
same, whatever is done between them, and a third of a microsecond for each event besides."""

WARM_UP = 10
"""Requests before those that are timed."""

ROUNDS = 60
"""Of the walk, at the least: its ratio is near what is allowed, and must be known to half a percent."""

SETTLING = 60
"""Rounds before those of the walk: a cache gets slower for some thousand requests, and then stays as it is."""

ATTEMPTS = 3
"""A ratio that is too high is measured again: a busy machine can do that, and it does not do it every time."""

LONG = array("q", range(2000))
SHARED, SHARED_PAGES = 400, 448
"""Tokens of a prompt that other prompts begin with, and so many whole pages of `LARGE_PAGE`."""

LARGE_PAGE = 64
"""Tokens of a page as engines have them."""

DEVICE_TOKENS = {400: 4096, 1600: 16384}
"""The device's tokens, by those of a prompt that are its own: room for ten of them."""


def match(driver: CacheDriver, times: int) -> None:
    """Looks up a long prompt."""
    cache, params = driver.cache, MatchPrefixParams(key=RadixKey(LONG))
    for _ in range(times):
        cache.match_prefix(params)


def walk(
    driver: CacheDriver, requests: int, *, numbers: Iterator[int], own: int, writes: bool, shared: int = SHARED
) -> None:
    """Serves requests whose prompts begin alike, by the cache's own functions.

    Args:
        driver: The cache, and what else a scheduler has.
        requests: How many.
        numbers: What makes each prompt another.
        own: Tokens of a prompt that no other has.
        writes: Whether keys and values are written, as a model would: the same for every token.
    """
    cache, allocator = driver.cache, driver.allocator
    for number in islice(numbers, requests):
        prompt = _prompt(number, own, shared)
        found = cache.match_prefix(MatchPrefixParams(key=RadixKey(prompt)))
        missing = len(prompt) - found.device_prefix_len
        if allocator.available_size() < missing:
            cache.evict_for_alloc(EvictParams(num_tokens=missing - allocator.available_size()))
        slots = allocator.alloc(missing)
        if writes:
            driver.fill(slots, number)
        head = cache.path_device_indices(found.last_device_node)[: found.device_prefix_len]
        cache.insert(
            InsertParams(key=RadixKey(prompt), value=torch.cat([head, slots]), prev_prefix_len=found.device_prefix_len)
        )
        driver.step()
        if number % 8 == 7:
            cache.evict(EvictParams(num_tokens=4 * own))
            _load_back(driver, _prompt(number - 4, own, shared))


def _prompt(number: int, own: int, shared: int) -> array[int]:
    first = 10**6 + number * own
    return array("q", [*range(shared), *range(first, first + own)])


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
        self._driver = CacheDriver(host_ratio=2.0, metrics=False, **options)
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
    for _ in range(SETTLING if rounds >= ROUNDS else 1):
        compared.round(-1)
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
    rounds = 20 if arguments.quick else arguments.rounds
    logging.disable(logging.WARNING)
    cpu.timed_events(True)
    torch.set_num_threads(1)
    print(f"SGLang's cache; median of {rounds} alternating rounds; us of the engine's thread per request")
    print(f"{'':<40}{'without':>9}{'with':>9}{'ratio':>8}{'allowed':>9}")
    results, page = [], cache_driver.PAGE
    for core in ("rust", "python"):
        for title, allowed, own, writes, events in (
            ("walk", WALK, 1600, True, False),
            ("walk, with events", SMALL_PAGES, 1600, True, True),
            ("walk, short prompts", SHORT, 400, True, False),
            ("walk, short prompts, with events", WITH_EVENTS, 400, True, True),
            ("bare calls, short prompts", BARE, 400, False, False),
            ("bare calls, short prompts, with events", BARE_WITH_EVENTS, 400, False, True),
        ):
            loop = partial(walk, numbers=count(), own=own, writes=writes)
            options = {"core": core, "device_tokens": DEVICE_TOKENS[own], "kv_events": events, "place": PLACE}
            enough = rounds if allowed > WALK else max(rounds, ROUNDS)
            results.append(compare(f"{core}: {title}", allowed, Compared(loop, 40, options), 40, enough))
        cache_driver.PAGE = LARGE_PAGE
        loop = partial(walk, numbers=count(), own=1600, writes=True, shared=SHARED_PAGES)
        options = {"core": core, "device_tokens": DEVICE_TOKENS[1600], "kv_events": True, "place": PLACE}
        title = f"{core}: walk, with events, pages of {LARGE_PAGE}"
        results.append(compare(title, LARGE_PAGES, Compared(loop, 40, options), 40, rounds))
        cache_driver.PAGE = page
        options = {"core": core, "device_tokens": 4096, "kv_events": False, "place": PLACE}
        results.append(compare(f"{core}: match", MATCH, Compared(match, 1000, options), 1000, rounds))
    print("ok" if all(results) else "TOO SLOW")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
