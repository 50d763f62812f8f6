"""A vLLM engine with three cache tiers under a multi-turn workload, and what kvcache-otel measures of it.

    python -m examples.vllm_cpu [--users 6] [--turns 3] [--stay]

The engine is instrumented as any vLLM is: kvcache-otel is installed, and an environment variable says where the metrics
go. This program never touches it; in the end it scrapes the Prometheus endpoint and shows what it found there.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import urllib.request
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from examples.vllm_cpu import engine, tiny_model
from examples.vllm_cpu.table import render

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm import LLM

TURN_TOKENS = 160
"""What one turn adds to a conversation: five blocks."""

HOST_BLOCKS = 40
"""Room for the first turns of the six users that there are by default, and not for their second ones."""


def converse(llm: LLM, users: int, turns: int) -> None:
    """Has users take turns: each prompt is the conversation so far. Between turns the device forgets.

    With more users than the host tier has room for, their earlier turns come back from disk.

    Args:
        llm: The engine.
        users: How many conversations there are.
        turns: How long each of them gets.
    """
    for turn in range(1, turns + 1):
        for user in range(users):
            answer = engine.generate(llm, seed=user + 1, tokens=turn * TURN_TOKENS + 5)
            _say(
                f"turn {turn}, user {user + 1}: {answer.cached_tokens} of {turn * TURN_TOKENS + 5} tokens from a cache"
            )
        _settle(llm)
        # The same prompts again, as a retry would send them: some are still on the device.
        engine.generate(llm, seed=users, tokens=turn * TURN_TOKENS + 5)
        if turn < turns:
            engine.forget_device(llm)


def _settle(llm: LLM) -> None:
    # An engine in this process steps only when it is asked something; transfers are finished by its steps.
    for _ in range(2):
        time.sleep(0.2)
        engine.generate(llm, seed=0, tokens=tiny_model.BLOCK_TOKENS // 4)


def scrape(url: str) -> str:
    """Returns what a Prometheus endpoint serves."""
    with urllib.request.urlopen(url, timeout=10) as response:
        return response.read().decode()


def _say(text: str) -> None:
    print(f"demo: {text}", file=sys.stderr, flush=True)


@contextmanager
def _clock(what: str) -> Iterator[None]:
    _say(f"{what} …")
    began = time.monotonic()
    yield
    _say(f"{what}: {time.monotonic() - began:.0f} s")


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description="A vLLM engine with three cache tiers, and what is measured of it.")
    parser.add_argument("--users", type=int, default=6, help="conversations (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=3, help="turns of each (default: %(default)s)")
    parser.add_argument("--stay", action="store_true", help="keep serving the metrics until interrupted")
    arguments = parser.parse_args()
    if find_spec("vllm") is None:
        sys.exit("examples.vllm_cpu: this Python has no vLLM: `make demo-vllm` makes one that has")

    os.environ.setdefault("OTEL_METRICS_EXPORTER", "prometheus")
    os.environ.setdefault("VLLM_CPU_FAKE_COPY_SECONDS", "0.002")
    with tempfile.TemporaryDirectory(prefix="kvcache-otel-demo-") as folder:
        with _clock("making a tiny model"):
            model = tiny_model.build(Path(folder, "model"))
        with _clock("starting vLLM with kvcache-otel"):
            llm = engine.make_llm(model, root=Path(folder, "blocks"), multiprocess=False, host_blocks=HOST_BLOCKS)
        try:
            with _clock(f"{arguments.users} users take {arguments.turns} turns"):
                converse(llm, arguments.users, arguments.turns)
            _show(arguments.stay)
        finally:
            engine.shut_down(llm)


def _show(stay: bool) -> None:
    from kvcache_otel.instrumentation import instrumentation

    exporter = instrumentation.runtime.exporter if instrumentation.runtime is not None else None
    if exporter is None or not exporter.ports:
        raise SystemExit("demo: nothing is served; run `kvcache-otel doctor` to see why")
    url = f"http://localhost:{exporter.ports[0]}/metrics"
    print(render(scrape(url)))
    print(f"\nAll of it: {url}" + ("  (Ctrl-C ends)" if stay else "  (--stay keeps it there)"))
    while stay:
        try:
            time.sleep(1)
        except KeyboardInterrupt:
            break


if __name__ == "__main__":
    main()
