"""Runs a real engine through every situation, in a process of its own, and tells what vLLM counted.

    python -m tests.engines.vllm.engine_run FOLDER [--events PORT] [--multiprocess] [--ranks N] [--stay]

Prints one line of JSON with every number of vLLM's own metrics. With ``--events`` it publishes KV events at that port.
With ``--stay`` it then waits for a line on its standard input before it shuts the engine down, so that others can look
at the living processes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from examples.vllm_cpu import engine, tiny_model

from tests.engines.vllm.backpressure import ALWAYS

if TYPE_CHECKING:
    from vllm import LLM

HOST_BLOCKS = 24
BLOCK = tiny_model.BLOCK_TOKENS
SETTLE_SECONDS = 0.25
PREFIXES = (
    "vllm:num_preemptions",
    "vllm:kv_offload",
    "vllm:prompt_tokens",
    "vllm:prefix_cache",
    "vllm:external_prefix_cache",
)


def situations(llm: LLM, blocks: Path) -> None:
    """Brings an engine with two file-system tiers into every situation.

    Args:
        llm: The engine.
        blocks: The folder of the first tier's block files.
    """
    first = engine.generate(llm, 1)
    assert engine.generate(llm, 1) == engine.Answer(first.token_ids, 320)  # device hit
    engine.generate(llm, 2)
    _settle(llm)
    engine.forget_device(llm)
    assert engine.generate(llm, 1).token_ids == first.token_ids  # host hit

    for seed in range(3, 8):  # stores, cascades, evictions from host; later ones are dropped by the second tier
        engine.generate(llm, seed)
    _settle(llm)
    engine.forget_device(llm)
    answer = engine.generate(llm, 1)  # disk hit: promotion, load
    assert answer.token_ids == first.token_ids
    assert answer.cached_tokens == 320

    for seed in range(8, 11):
        engine.generate(llm, seed)
    _settle(llm)
    engine.forget_device(llm)
    for file in blocks.glob("**/*.bin"):
        with file.open("r+b") as block:
            block.truncate(100)
    engine.generate(llm, 3)  # promotions that fail

    with _in_the_way(blocks):
        engine.generate(llm, 11)  # cascades that fail
        _settle(llm)

    engine.generate(llm, 12, (HOST_BLOCKS + 4) * BLOCK + 5)  # no room for a store that size
    for seed in (13, 14):
        engine.generate(llm, seed, 20 * BLOCK + 5)
        _settle(llm)
    for seed in range(15, 18):
        engine.generate(llm, seed)
    _settle(llm)
    engine.forget_device(llm)
    engine.generate_batch(llm, [13, 14], 20 * BLOCK + 5)  # no room for promotions of that size together
    _settle(llm)
    engine.generate_batch(llm, range(20, 32))  # more than fits on the device: evictions there
    engine.generate_batch(llm, range(50, 54), 14 * BLOCK + 5, new_tokens=4 * BLOCK)  # grow out of it: preemptions
    _settle(llm)


class _in_the_way:  # noqa: N801 # A context manager, named for how it reads.
    """Puts a file where a folder of block files was."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._aside = folder, folder.with_name(folder.name + ".aside")

    def __enter__(self) -> None:
        self._folder.rename(self._aside)
        self._folder.touch()

    def __exit__(self, *_: object) -> None:
        self._folder.unlink()
        self._aside.rename(self._folder)


def counted() -> list[dict[str, Any]]:
    """What vLLM's own metrics say, in this process: every sample's name, labels and value.

    Not by `LLM.get_metrics`, which cuts counters to whole numbers, seconds among them.
    """
    from prometheus_client import REGISTRY

    return [
        {
            "name": sample.name.removeprefix("vllm:"),
            "labels": {key: value for key, value in sample.labels.items() if key not in ("model_name", "engine")},
            "value": sample.value,
        }
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name.startswith(PREFIXES) and not sample.name.endswith(("_bucket", "_created"))
    ]


def _settle(llm: LLM) -> None:
    # An idle engine core in a process of its own steps on while something is under way; one in this process does not.
    # A prompt of less than a block makes it step, and stores nothing.
    for _ in range(2):
        time.sleep(SETTLE_SECONDS)
        engine.generate(llm, 99, BLOCK // 4)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--events", type=int)
    parser.add_argument("--multiprocess", action="store_true")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--stay", action="store_true")
    arguments = parser.parse_args()

    model = tiny_model.build(arguments.folder / "model")
    roots = [arguments.folder / "first", arguments.folder / "second"]
    llm = engine.make_llm(
        model,
        root=roots[0],
        tiers=[engine.fs_tier(roots[0]), engine.fs_tier(roots[1], backpressure=ALWAYS)],
        host_blocks=HOST_BLOCKS,
        multiprocess=arguments.multiprocess,
        events=arguments.events is not None,
        events_port=arguments.events or 0,
        tensor_parallel_size=arguments.ranks,
        kv_cache_metrics=True,
        kv_cache_metrics_sample=1.0,
    )
    situations(llm, roots[0])
    print(json.dumps(counted()), flush=True)
    if arguments.stay:
        sys.stdin.readline()
    engine.shut_down(llm)


if __name__ == "__main__":
    main()
