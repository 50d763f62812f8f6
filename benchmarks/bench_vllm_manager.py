"""What the hooks cost vLLM's tiering manager: the same loop with and without them, in turns, in one run.

    $(python tools/engine_env.py vllm) -m benchmarks.bench_vllm_manager

The loops do what a scheduler does in a step that admits four requests of sixteen blocks: look up, load, store, end the
step, take statistics. (Steps that do less than that are a model's decoding, and do nothing with the manager.) Only the
time of the engine's own thread counts, as the I/O of the file-system tier is the disk's affair. Every pair of rounds
gives one ratio; the median of the ratios is judged, since these machines are noisy.
"""

from __future__ import annotations

import argparse
import functools
import gc
import statistics
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any

from tests.engines.vllm.manager_driver import ManagerDriver, fs_tier, key, make_config
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext

from kvcache_otel.engines.hooks import HookSet
from kvcache_otel.engines.vllm.adapter import VllmAdapter
from kvcache_otel.engines.vllm.table import HOOKS
from kvcache_otel.identity import Identity
from kvcache_otel.record.probe import CacheProbe
from kvcache_otel.record.recorder import Recorder
from kvcache_otel.semconv import METRICS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Loop = Callable[[ManagerDriver, int, range, int], None]

DRIVEN = 1.05
"""What the hooks may cost the driven manager's loop."""

BARE = 1.2
"""What they may cost where there is nothing but the manager's bookkeeping: a bound against surprises."""

ATTEMPTS = 3
"""A ratio that is too high is measured again: a busy machine can do that, and it does not do it every time."""

BLOCKS = 16


def driven(driver: ManagerDriver, requests: int, blocks: range, batch: int) -> None:
    """What the tests' stand-in for the scheduler does, down to the bytes of every block."""
    admitted: list[ReqContext] = []
    for number in range(requests):
        request = driver.request()
        admitted.append(request)
        wanted = [blocks[(number * BLOCKS + block) % len(blocks)] for block in range(BLOCKS)]
        hits = [block for block in wanted if driver.lookup(request, block) is LookupResult.HIT]
        if hits:
            driver.load(request, hits)
        driver.store(request, wanted)
        if len(admitted) == batch:
            driver.step(admitted)
            admitted = []
        driver.finish(request)


def bare(driver: ManagerDriver, requests: int, blocks: range, batch: int) -> None:
    """The same calls of the manager and nothing else: no keys are made, no bytes copied, no statistics added up."""
    manager, admitted, keys = driver.manager, [], [cached_key(block) for block in blocks]
    for number in range(requests):
        request = ReqContext(req_id=f"bare-{id(keys)}-{number}")
        manager.on_new_request(request)
        admitted.append(request.req_id)
        wanted = [keys[(number * BLOCKS + block) % len(keys)] for block in range(BLOCKS)]
        hits = [block for block in wanted if manager.lookup(block, request) is LookupResult.HIT]
        if hits:
            manager.prepare_load(hits, request)
            manager.complete_load(hits, request)
        output = manager.prepare_store(wanted, request)
        if output is not None and output.keys_to_store:
            manager.complete_store(output.keys_to_store, request)
        if len(admitted) == batch:
            manager.on_schedule_end(ScheduleEndContext(new_req_ids=admitted, preempted_req_ids=()))
            manager.get_stats()
            admitted = []
        manager.on_request_finished(request)


cached_key = functools.cache(key)


class Compared:
    """One manager, built with the hooks in place, and driven with and without them in turns.

    Two managers, one for each, would differ by more than the hooks do: in where their memory lies and their files.
    """

    def __init__(self, loop: Loop, tiers: Sequence[dict[str, Any]], options: argparse.Namespace, blocks: int) -> None:
        self._loop, self._options, self._blocks = loop, options, range(blocks)
        self._recorder = recorder = Recorder(Identity("vllm", "benchmark"))
        adapter = VllmAdapter(lambda identity, _rank: CacheProbe(recorder, identity), lambda: None)
        self._hooks = HookSet(HOOKS, lambda body: getattr(adapter, body))
        self._hooks.attach()
        self._driver = ManagerDriver(make_config(1024, tiers))
        self._hooks.detach()

    def round(self, number: int) -> tuple[float, float]:
        """Returns the seconds without and with the hooks; the order changes from round to round."""
        if number % 2:
            hooked = self._hooked()
            return self._timed(), hooked
        return self._timed(), self._hooked()

    def _timed(self) -> float:
        options = self._options
        began = time.thread_time()
        self._loop(self._driver, options.requests, self._blocks, options.batch)
        seconds = time.thread_time() - began
        self._driver.settle()  # What is left to the I/O threads would be in the way of the next round.
        return seconds

    def _hooked(self) -> float:
        self._hooks.attach()
        try:
            seconds = self._timed()
        finally:
            self._hooks.detach()
        self._export()
        return seconds

    def _export(self) -> None:
        # What an exporter's thread does every few seconds.
        for spec in METRICS.values():
            list(self._recorder.points(spec))
            for row in self._recorder.histograms(spec):
                row.cell.read()

    def close(self) -> None:
        """Ends the manager."""
        self._driver.settle()
        self._driver.close()


def compare(title: str, allowed: float, compared: Compared, options: argparse.Namespace) -> bool:
    """Prints one line of the table and returns whether its ratio is allowed."""
    compared.round(-1)  # Warm.
    gc.collect()
    gc.freeze()  # As vLLM's engine core does it once it is built.
    for _ in range(ATTEMPTS):
        pairs = [compared.round(number) for number in range(options.rounds)]
        ratio = statistics.median(hooked / plain for plain, hooked in pairs)
        plain, hooked = (statistics.median(column) / options.requests * 1e6 for column in zip(*pairs, strict=True))
        print(f"{title:<46}{plain:>9.1f}{hooked:>9.1f}{ratio:>8.3f}{allowed:>9}", flush=True)
        if ratio <= allowed:
            break
    gc.unfreeze()
    compared.close()
    return ratio <= allowed


def main() -> int:
    """See the module. Returns 1 where a ratio is above what is allowed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--batch", type=int, default=4, help="requests in a step (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, for CI")
    options = parser.parse_args()
    if options.quick:
        options.rounds = 10
    print(f"vLLM's tiering manager, {BLOCKS} blocks a request, {options.batch} requests a step")
    print(f"median of {options.rounds} alternating rounds; us of the engine's thread per request")
    print(f"{'':<46}{'without':>9}{'with':>9}{'ratio':>8}{'allowed':>9}")
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        fs = [fs_tier(folder)]
        rows = [
            ("driven: host tier, every block found", DRIVEN, driven, [], 512),
            ("driven: host tier, every block evicted before", DRIVEN, driven, [], 4096),
            ("driven: host and fs tier, with promotions", DRIVEN, driven, fs, 2048),
            ("bare calls: host tier, every block found", BARE, bare, [], 512),
            ("bare calls: every block evicted before", BARE, bare, [], 4096),
            ("bare calls: host and fs tier", BARE, bare, fs, 2048),
        ]
        results = [
            compare(title, allowed, Compared(loop, tiers, options, blocks), options)
            for title, allowed, loop, tiers, blocks in rows
        ]
    print("ok" if all(results) else "TOO SLOW")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
