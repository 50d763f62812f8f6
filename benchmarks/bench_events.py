"""What an index of KV events costs: memory per resident block, and blocks decoded and applied per second of one core.

    python -m benchmarks.bench_events [--quick]

Exit status 1 where a block takes more memory than `MEMORY`, or where the index is slower than both `RATE` and `SHARE`
of what a plain loop does with the same bytes: msgspec to dicts and lists, and a dict of sets.

Each form of events has a process of its own. The books fill up first, and memory is what that process has grown by;
then each block makes room for another, while the index gives memory back as often as the watch has it do so, and
memory is measured again. Then the index and the loop take the same batches in turns, as many removals as stores, so
that the index stays full. The loop's sets are never full, which is to its advantage.
"""

from __future__ import annotations

import argparse
import gc
import logging
import multiprocessing
import os
import platform
import random
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

import msgspec

from kvcache_otel.events.index import BlockIndex, series
from kvcache_otel.events.watch import BOUND_SECONDS
from kvcache_otel.identity import Identity
from kvcache_otel.record.recorder import Recorder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Hash = int | bytes

MEMORY = 120
"""Bytes a resident block may take."""

RATE = 1_200_000
"""Blocks a second that are fast enough, whatever the plain loop does."""

SHARE = 0.8
"""What of the plain loop's rate is fast enough where that is slower."""

RANKS = 4
EVENTS = 8
"""Events of a batch."""

ATTEMPTS = 3
"""A rate that is too low is measured again: a busy machine can do that, and it does not do it every time."""

encode = msgspec.msgpack.Encoder().encode


class Form:
    """One way to write events: which engine does it, how many blocks and tokens an event has, and what hashes are."""

    def __init__(
        self, title: str, engine: str, blocks: int, tokens: int, make: Callable[[random.Random], Hash]
    ) -> None:
        self.title = title
        self.engine = engine
        self.blocks = blocks
        self.tokens = tokens
        self.make = make

    def stored(self, hashes: Sequence[Hash], tokens: Sequence[int]) -> Any:
        """Returns the event that blocks were stored."""
        if self.engine == "sglang":
            return ["BlockStored", hashes, hashes[0], tokens, self.tokens, None, "GPU"]
        return {
            "type": "BlockStored",
            "block_hashes": hashes,
            "parent_block_hash": hashes[0],
            "token_ids": tokens,
            "block_size": self.tokens,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [None] * len(hashes),
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }

    def removed(self, hashes: Sequence[Hash]) -> Any:
        """Returns the event that they are gone."""
        if self.engine == "sglang":
            return ["BlockRemoved", hashes, "GPU"]
        return {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU", "group_idx": 0}

    def batches(self, count: int, rank: int, draw: random.Random) -> Iterator[bytes]:
        """Yields batches that store so many blocks between them. Without tokens: they leave nothing behind."""
        left = count
        while left > 0:
            events: list[Any] = []
            while left > 0 and len(events) < EVENTS:
                hashes = [self.make(draw) for _ in range(min(self.blocks, left))]
                left -= len(hashes)
                events.append(self.stored(hashes, ()))
            yield encode([time.time(), events, rank])

    def turnover(self, count: int, rank: int, seed: int) -> Iterator[bytes]:
        """Yields batches that put another block in the place of each that `batches` stored, drawing from this seed."""
        before, draw = random.Random(seed), random.Random(seed + 1)
        left = count
        while left > 0:
            events: list[Any] = []
            while left > 0 and len(events) < 2 * EVENTS:
                size = min(self.blocks, left)
                left -= size
                events.append(self.removed([self.make(before) for _ in range(size)]))
                events.append(self.stored([self.make(draw) for _ in range(size)], ()))
            yield encode([time.time(), events, rank])

    def pairs(self, count: int, rank: int, draw: random.Random) -> list[tuple[bytes, bytes]]:
        """Returns batches that store blocks, each with the one that removes them again: so many blocks in all."""
        batches: list[tuple[bytes, bytes]] = []
        for _ in range(count // (2 * EVENTS * self.blocks)):
            groups = [[self.make(draw) for _ in range(self.blocks)] for _ in range(EVENTS)]
            tokens = [[draw.randrange(150_000) for _ in range(self.tokens * self.blocks)] for _ in groups]
            stored = [self.stored(*event) for event in zip(groups, tokens, strict=True)]
            removed = [self.removed(hashes) for hashes in groups]
            batches.append((encode([time.time(), stored, rank]), encode([time.time(), removed, rank])))
        return batches


FORMS = (
    Form("vLLM, maps, 16 blocks an event", "vllm", 16, 16, lambda draw: draw.getrandbits(64)),
    Form("vLLM, maps, hashes of 32 bytes", "vllm", 16, 16, lambda draw: draw.randbytes(32)),
    Form("SGLang, arrays, 1 block an event", "sglang", 1, 64, lambda draw: draw.getrandbits(64) - 2**63),
)


class Plain:
    """The plain loop: everything is decoded, token ids too, and goes into sets."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[str, int, str], set[Hash]] = {}
        self._decode = msgspec.msgpack.Decoder().decode

    def receive(self, worker: str, payload: bytes) -> None:
        """Takes over one batch."""
        _, events, rank = self._decode(payload)
        for event in events:
            if isinstance(event, dict):
                kind, hashes, medium = event["type"], event["block_hashes"], event["medium"]
            else:
                kind, hashes, medium = event[0], event[1], event[-1]
            blocks = self.blocks.get((worker, rank, medium))
            if blocks is None:
                blocks = self.blocks[worker, rank, medium] = set()
            if kind == "BlockStored":
                blocks.update(hashes)
            else:
                blocks.difference_update(hashes)


def rss() -> int:
    """Returns the bytes of memory that this process has."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(form: Form, options: argparse.Namespace) -> bool:
    """Prints the lines of one form, and returns whether its figures are allowed."""
    logging.disable(logging.INFO)
    draw = random.Random(1)
    each = options.blocks // (options.workers * RANKS)
    list(form.batches(each, 0, draw))  # What Python and msgspec keep for themselves.
    gc.collect()
    before = rss()
    index = BlockIndex(Recorder(Identity("custom", "benchmark"), series_limit=series(options.workers * RANKS)))
    workers = [index.add(f"worker-{number}") for number in range(options.workers)]
    places = [(worker, rank) for worker in workers for rank in range(RANKS)]
    resident = each * len(places)

    def memory() -> float:
        gc.collect()
        return (rss() - before) / resident

    # What is resident is not remembered here, it is drawn again from its seed.
    for number, (worker, rank) in enumerate(places):
        for payload in form.batches(each, rank, random.Random(2 * number)):
            worker.receive(payload)
    filled, fit_at = memory(), 0.0
    for number, (worker, rank) in enumerate(places):
        for payload in form.turnover(each, rank, 2 * number):
            worker.receive(payload)
        if time.monotonic() >= fit_at:
            index.fit()
            fit_at = time.monotonic() + BOUND_SECONDS
    index.fit()
    replaced = memory()
    held = sum(sum(worker.blocks().values()) for worker in workers)
    if held != resident:
        raise AssertionError(f"{held} blocks are resident, not {resident}")

    plain = Plain()
    rounds = [
        [
            (worker, batch)
            for pair in form.pairs(options.round, number % RANKS, draw)
            for worker in (workers[draw.randrange(len(workers))],)
            for batch in pair
        ]
        for number in range(options.rounds)
    ]
    for attempt in range(ATTEMPTS):
        rates = [compare(index, batches, plain, number + attempt, form) for number, batches in enumerate(rounds)]
        ours, theirs = (statistics.median(column) for column in zip(*rates, strict=True))
        share = statistics.median(our / their for our, their in rates)
        fast = ours >= RATE or share >= SHARE
        if fast:
            break
    small = max(filled, replaced) <= MEMORY
    print(
        f"{form.title:<36}{resident:>11,}{filled:>9.1f}{replaced:>10.1f}"
        f"{ours / 1e6:>9.2f}{theirs / 1e6:>9.2f}{share:>8.2f}"
        f"{'' if small else '  TOO LARGE'}{'' if fast else '  TOO SLOW'}",
        flush=True,
    )
    return small and fast


def compare(
    index: BlockIndex, batches: Sequence[tuple[Any, bytes]], plain: Plain, number: int, form: Form
) -> tuple[float, float]:
    """Returns the blocks a second of the index and of the plain loop; which goes first changes from round to round."""

    def indexed() -> float:
        began = time.thread_time()
        for worker, payload in batches:
            worker.receive(payload)
        index.fit()  # More often than the watch does.
        return len(batches) * EVENTS * form.blocks / (time.thread_time() - began)

    def looped() -> float:
        began = time.thread_time()
        for worker, payload in batches:
            plain.receive(worker.name, payload)
        return len(batches) * EVENTS * form.blocks / (time.thread_time() - began)

    if number % 2:
        theirs = looped()
        return indexed(), theirs
    return indexed(), looped()


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module. Returns 1 where a figure is not allowed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", type=int, default=20_000_000, help="resident blocks (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=200, help="each with four ranks (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--round", type=int, default=100_000, help="blocks in a round (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a twentieth of the workers and blocks, for CI")
    options = parser.parse_args(arguments)
    if options.quick:
        options.blocks //= 20
        options.workers = max(1, options.workers // 20)
        options.rounds = 7
    print(f"Python {platform.python_version()}, msgspec {msgspec.__version__}")
    print(f"{options.workers} workers of {RANKS} ranks; median of {options.rounds} rounds of {options.round:,} blocks")
    print(
        f"at most {MEMORY} bytes a block; at least {RATE / 1e6} million blocks a second, or {SHARE} of the plain loop\n"
    )
    print(f"{'':<36}{'resident':>11}{'bytes a block':>19}{'million blocks a second':>26}")
    print(f"{'':<36}{'blocks':>11}{'filled':>9}{'replaced':>10}{'index':>9}{'plain':>9}{'ratio':>8}", flush=True)
    context = multiprocessing.get_context("spawn")
    results: list[bool] = []
    for number in range(len(FORMS)):
        with context.Pool(1) as pool:
            results.append(pool.apply(_measured, (number, options)))
    print("ok" if all(results) else "NOT GOOD ENOUGH")
    return 0 if all(results) else 1


def _measured(number: int, options: argparse.Namespace) -> bool:
    return measure(FORMS[number], options)


if __name__ == "__main__":
    sys.exit(main())
