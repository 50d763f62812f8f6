"""What the hooks cost vLLM's tiering manager: the same loop with and without them, in turns, in one run.

    $(python tools/engine_env.py vllm) -m benchmarks.bench_vllm_manager

The loop does what a scheduler does in a step that admits four requests of sixteen blocks: look up, load, store, end the
step, take statistics. (Steps that do less than that are a model's decoding, and do nothing with the manager.)
Only the time of the engine's own thread counts, as the I/O of the file-system tier is the disk's affair. Every pair of
rounds gives one ratio; the median of the ratios is judged, since these machines are noisy.
"""

from __future__ import annotations

import argparse
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
    from collections.abc import Sequence

ALLOWED = 1.05
BLOCKS = 16


def loop(manager: Any, requests: int, keys: Sequence[Any], name: str, batch: int) -> float:
    """Serves requests, so many in a step, and returns the seconds that this thread was busy with it."""
    began = time.thread_time()
    admitted: list[str] = []
    for number in range(requests):
        request = ReqContext(req_id=f"{name}-{number}")
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
    return time.thread_time() - began


class Compared:
    """Two managers alike, one of them built and driven with the hooks in place."""

    def __init__(self, tiers: Sequence[dict[str, Any]], batch: int) -> None:
        self._batch = batch
        self._recorder = recorder = Recorder(Identity("vllm", "benchmark"))
        adapter = VllmAdapter(lambda identity, _rank: CacheProbe(recorder, identity), lambda: None)
        self._hooks = HookSet(HOOKS, lambda body: getattr(adapter, body))
        self._plain = ManagerDriver(make_config(1024, tiers[:1]))
        self._hooks.attach()
        self._hooked = ManagerDriver(make_config(1024, tiers[1:]))
        self._hooks.detach()

    def round(self, requests: int, keys: Sequence[Any], number: int) -> tuple[float, float]:
        """Returns the seconds without and with the hooks; the order changes from round to round."""
        name = f"round-{number}"

        def plain() -> float:
            try:
                return loop(self._plain.manager, requests, keys, name, self._batch)
            finally:
                self._plain.settle()  # What is left to the I/O threads would be in the way of the next round.

        def hooked() -> float:
            self._hooks.attach()
            try:
                return loop(self._hooked.manager, requests, keys, name, self._batch)
            finally:
                self._hooked.settle()
                self._hooks.detach()
                self._export()

        if number % 2:
            second, first = hooked(), plain()
            return first, second
        return plain(), hooked()

    def _export(self) -> None:
        # What an exporter's thread does every few seconds.
        for spec in METRICS.values():
            list(self._recorder.points(spec))
            for row in self._recorder.histograms(spec):
                row.cell.read()

    def close(self) -> None:
        """Ends both managers."""
        for driver in (self._plain, self._hooked):
            driver.settle()
            driver.close()


def compare(title: str, tiers: Sequence[dict[str, Any]], options: argparse.Namespace, blocks: int) -> float:
    """Prints one line of the table and returns its ratio."""
    rounds, requests = options.rounds, options.requests
    compared = Compared(tiers, options.batch)
    keys = [key(block) for block in range(blocks)]
    compared.round(requests, keys, -1)  # Warm.
    pairs = [compared.round(requests, keys, number) for number in range(rounds)]
    compared.close()
    ratio = statistics.median(hooked / plain for plain, hooked in pairs)
    plain, hooked = (statistics.median(column) / requests * 1e6 for column in zip(*pairs, strict=True))
    print(f"{title:<44}{plain:>10.1f}{hooked:>10.1f}{ratio:>9.3f}")
    return ratio


def main() -> int:
    """See the module. Returns 1 where a ratio is above what is allowed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--requests", type=int, default=160)
    parser.add_argument("--batch", type=int, default=4, help="requests in a step (default: %(default)s)")
    arguments = parser.parse_args()
    print(f"vLLM's tiering manager, {BLOCKS} blocks a request, {arguments.batch} requests a step")
    print(f"median of {arguments.rounds} alternating rounds")
    print(f"{'':<44}{'without':>10}{'with':>10}{'ratio':>9}\n{'':<44}{'us/req':>10}{'us/req':>10}")
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        fs = [fs_tier(f"{folder}/plain"), fs_tier(f"{folder}/hooked")]
        ratios = [
            compare("host tier, every block found there", [], arguments, blocks=512),
            compare("host tier, every block evicted before", [], arguments, blocks=4096),
            compare("host and fs tier, stores and promotions", fs, arguments, blocks=2048),
        ]
    verdict = "ok" if max(ratios) <= ALLOWED else "TOO SLOW"
    print(f"worst {max(ratios):.3f}, allowed {ALLOWED}: {verdict}")
    return 0 if max(ratios) <= ALLOWED else 1


if __name__ == "__main__":
    sys.exit(main())
