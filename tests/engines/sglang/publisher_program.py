"""A real cache and its real publisher of KV events in one process, which uses the cache whenever it is told to.

    python -m tests.engines.sglang.publisher_program FOLDER PORT REPLAY_PORT

Prints a line of JSON when it is ready, and one after each turn, which a line on its standard input begins, with how
many operations it has. The line says what the tiers hold by a recount, what we say that they hold and publish, and how
many batches were sent.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from sglang.srt.disaggregation.kv_events import EventPublisherFactory, KVEventBatch

from kvcache_otel import semconv
from tests.engines.sglang.cache_driver import CacheDriver
from tests.engines.sglang.conftest import Instrumented
from tests.engines.sglang.oracle import recount
from tests.engines.sglang.walk import random_walk

TIERS = ("device", "host")


def main() -> None:
    """See the module."""
    folder, port, replay_port = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    instrumented = Instrumented()
    instrumented.hooks.attach()
    config = {
        "publisher": "zmq",
        "endpoint": f"tcp://*:{port}",
        "replay_endpoint": f"tcp://*:{replay_port}",
        "topic": "kv",
    }
    publisher = EventPublisherFactory.create(json.dumps(config), attn_dp_rank=0)
    with CacheDriver(storage_dir=folder) as driver:
        seen = sent = 0

        def publish() -> None:
            nonlocal seen, sent
            if len(driver.events) > seen:
                publisher.publish(KVEventBatch(ts=time.time(), events=driver.events[seen:]))
                seen, sent = len(driver.events), sent + 1

        def told() -> dict[str, Any]:
            views = {
                view: {tier: instrumented.rows.value(semconv.RESIDENT_BLOCKS, tier=tier, view=view) for tier in TIERS}
                for view in ("held", "published")
            }
            found = recount(driver)
            return {
                "recount": {"device": found.device_blocks, "host": found.host_blocks},
                **views,
                "sent": sent,
            }

        print(json.dumps({"ready": True}), flush=True)
        for seed, line in enumerate(sys.stdin):
            for _ in random_walk(driver, seed, int(line)):
                publish()
            # Something new, which the last batch tells.
            driver.insert(range(10_000 * (seed + 1), 10_000 * (seed + 1) + 16))
            driver.settle()
            publish()
            instrumented.assert_sound()
            print(json.dumps(told()), flush=True)


if __name__ == "__main__":
    main()
