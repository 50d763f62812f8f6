"""A whole engine in one process, with its KV events on a socket, that works whenever it is told to.

    python -m tests.engines.vllm.publisher_program FOLDER PORT SEED

Prints a line of JSON when it is ready, and one after each turn, which a line on its standard input begins, with how
many operations it has; with none, there is one new prompt. The line says what the tiers hold by a recount, what we say
that they hold and publish, and how many batches were sent. To be run with ``VLLM_PLUGINS=none``: it hooks by itself.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from examples.vllm_cpu import engine, tiny_model

from kvcache_otel import semconv
from tests.engines.vllm.conftest import Instrumented
from tests.engines.vllm.events_program import come_to_rest, work
from tests.engines.vllm.recounts import device_blocks, disk_keys, host_chunks

TIERS = ("device", "host", "disk")


def main() -> None:
    """See the module."""
    folder, port, seed = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    instrumented = Instrumented()
    instrumented.hooks.attach()
    llm = engine.make_llm(
        tiny_model.build(folder / "model"), root=folder / seed, multiprocess=False, events=True, events_port=port
    )
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    sent: list[Any] = []
    publish = scheduler.kv_event_publisher.publish

    def published(batch: Any) -> None:
        sent.append(None)
        publish(batch)

    scheduler.kv_event_publisher.publish = published
    rng = random.Random(seed)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        if operations := int(line):
            work(llm, rng, operations)
        else:
            engine.generate(llm, 1000, 2 * tiny_model.BLOCK_TOKENS)
            come_to_rest(llm)
        instrumented.assert_sound()
        views = {
            view: {tier: instrumented.rows.value(semconv.RESIDENT_BLOCKS, tier=tier, view=view) for tier in TIERS}
            for view in ("held", "published")
        }
        recount = {
            "device": device_blocks(scheduler.kv_cache_manager.block_pool),
            "host": host_chunks(scheduler.connector.connector_scheduler.manager),
            "disk": len(disk_keys(folder / seed)),
        }
        print(json.dumps({"recount": recount, **views, "sent": len(sent)}), flush=True)


if __name__ == "__main__":
    main()
