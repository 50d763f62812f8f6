"""A whole engine in one process answers a few prompts from every tier, and tells what it answered.

    python -m tests.engines.vllm.engine_program FOLDER

Prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from examples.vllm_cpu import engine, tiny_model

if TYPE_CHECKING:
    from vllm import LLM


def main() -> None:
    """See the module."""
    folder = Path(sys.argv[1])
    llm = engine.make_llm(tiny_model.build(folder / "model"), root=folder / "blocks", multiprocess=False)
    began = time.monotonic()
    answers = [engine.generate(llm, seed) for seed in (1, 1, 2, 3)]
    _settle(llm)
    engine.forget_device(llm)
    answers += [engine.generate(llm, seed) for seed in (1, 2, 3)]
    served = time.monotonic() - began
    began = time.monotonic()
    engine.shut_down(llm)
    stopped = time.monotonic() - began
    print(
        json.dumps(
            {
                "answers": [(answer.token_ids, answer.cached_tokens) for answer in answers],
                "serving_seconds": served,
                "shutdown_seconds": stopped,
                "done": time.time(),
            }
        ),
        flush=True,
    )


def _settle(llm: LLM) -> None:
    # Until all blocks are on the host, and the engine, which does nothing between its steps, has noticed.
    for _ in range(2):
        time.sleep(0.25)
        engine.generate(llm, 99, tiny_model.BLOCK_TOKENS // 4)


if __name__ == "__main__":
    main()
