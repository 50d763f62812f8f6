"""A whole engine in one process, with its KV events on a socket: after every step, every view of a tier is recounted.

    python -m tests.engines.vllm.events_program FOLDER PORT [OPTION=VALUE ...]

Options are those of vLLM's ``kv_connector_extra_config``, as JSON. Prints one line of JSON: what each view says at the
end, before and after the tiers below the device were reset. To be run with ``VLLM_PLUGINS=none``: it hooks by itself.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from examples.vllm_cpu import engine, tiny_model

from kvcache_otel import semconv
from kvcache_otel.events.index import BlockIndex, series
from kvcache_otel.events.source import parse
from kvcache_otel.events.watch import Watch
from kvcache_otel.identity import Identity
from kvcache_otel.record.recorder import Recorder
from tests.engines.vllm.conftest import Instrumented
from tests.engines.vllm.oracle import published_events
from tests.engines.vllm.recounts import Chunks, device_blocks, disk_keys, host_chunks, host_keys
from tests.engines.vllm.subscriber import Subscriber
from tests.support.rows import Rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm import LLM

OPERATIONS = 25
WORKER = "engine"
WATCH_SECONDS = 1.5
MEDIA = {"device": "GPU", "host": "CPU", "disk": "STORAGE"}


class Views:
    """The views of every tier of one engine, and a recount of what it holds."""

    def __init__(
        self, llm: LLM, instrumented: Instrumented, subscriber: Subscriber, port: int, blocks: int, root: Path
    ) -> None:
        """Args:
        llm: The engine, in this process.
        instrumented: What watches it.
        subscriber: Who listens to its events.
        port: Where it publishes them; one further on, it replays them.
        blocks: How many blocks it announces for each chunk of the host tier.
        root: Where its disk tier has its files.
        """
        self._core = llm.llm_engine.engine_core.engine_core
        self._scheduler = self._core.scheduler
        self._manager = self._scheduler.connector.connector_scheduler.manager
        self._chunks = Chunks(self._scheduler.connector.connector_scheduler._events_tracker)
        self._root = root
        self._rows, self._blocks = instrumented.rows, blocks
        self._step = self._core.step_fn
        self.subscriber = subscriber
        self._received = Rows(Recorder(Identity("custom", "test"), series_limit=series(8)))
        self._watch = Watch(BlockIndex(self._received.recorder))
        self._watch.want([parse(f"{WORKER}=tcp://127.0.0.1:{port}?replay={port + 1}&topic=kv-events")])
        self.steps = 0

    def watch(self, check: Callable[[], None]) -> None:
        """Has something checked after each step of the engine."""

        def stepped() -> Any:
            result = self._step()
            self.steps += 1
            self._chunks.look()
            check()
            return result

        self._core.step_fn = stepped

    def recount(self) -> dict[str, int]:
        """What a walk over the block pool and the offloading manager finds."""
        pool = self._scheduler.kv_cache_manager.block_pool
        return {"device": device_blocks(pool), "host": host_chunks(self._manager) * self._blocks}

    def announced(self) -> dict[str, int]:
        """Distinct blocks in the chunks of which such a walk, and one over the files, finds any."""
        return {
            "host": self._chunks.blocks(host_keys(self._manager)),
            "disk": self._chunks.blocks(disk_keys(self._root)),
        }

    def say(self) -> dict[str, dict[str, int | float | None]]:
        """What each view says of each tier."""
        self.subscriber.listen()
        until = time.monotonic() + WATCH_SECONDS
        while time.monotonic() < until:
            self._watch.poll(0.1)
        return {
            "recounted": self.recount(),
            "announced": self.announced(),
            "held": self.view("held"),
            "published": self.view("published"),
            "received": {
                tier: self._received.value(semconv.RESIDENT_BLOCKS, tier=tier, view="received", worker=WORKER)
                for tier in MEDIA
            },
            "subscribed": {tier: self.subscriber.resident(medium) for tier, medium in MEDIA.items()},
        }

    def view(self, view: str) -> dict[str, int | float | None]:
        return {tier: self._rows.value(semconv.RESIDENT_BLOCKS, tier=tier, view=view) for tier in MEDIA}

    def close(self) -> None:
        """Ends the subscribers."""
        self._watch.close()
        self.subscriber.close()

    def check_held(self) -> None:
        """What we call held is what there is."""
        held = self.view("held")
        assert held.pop("disk") is None, "vLLM does not know how full it is"
        assert held == self.recount()

    def check(self) -> None:
        """What was published so far is what is held; of chunks with a beginning in common, each block once."""
        self.check_held()
        published, held = self.view("published"), self.recount()
        assert published["device"] == held["device"]
        assert published["host"] == self._chunks.blocks(host_keys(self._manager))
        if self._blocks == 1:
            assert published["host"] == held["host"]


def work(llm: LLM, rng: random.Random, operations: int) -> None:
    """Has an engine answer prompts, of which some are known and some are alike, and come to rest.

    Args:
        llm: The engine.
        rng: What decides.
        operations: How many batches of prompts.
    """
    for _ in range(operations):
        seeds = [rng.randrange(1, 9) for _ in range(rng.randint(1, 3))]
        if rng.random() < 0.3:
            seeds.append(seeds[0])  # Two of a kind at once: each computes its own copy.
        if rng.random() < 0.2:
            engine.forget_device(llm)
        engine.generate_batch(llm, seeds, rng.choice((70, 165, 325)), new_tokens=rng.randint(1, 40))
    engine.generate_batch(llm, [1, 2, 3, 3])
    come_to_rest(llm)


def come_to_rest(llm: LLM) -> None:
    """Has an engine take steps in which it stores nothing, until what was under way has ended and is published."""
    manager = llm.llm_engine.engine_core.engine_core.scheduler.connector.connector_scheduler.manager
    for _ in range(4):
        for tier in manager.secondary_tiers:
            tier.drain_jobs()
        engine.generate(llm, 99, tiny_model.BLOCK_TOKENS // 4)


def main() -> None:
    """See the module."""
    folder, port = Path(sys.argv[1]), int(sys.argv[2])
    options = {name: json.loads(value) for name, value in (option.split("=") for option in sys.argv[3:])}
    instrumented = Instrumented()
    instrumented.hooks.attach()
    subscriber = Subscriber(f"tcp://127.0.0.1:{port}", "kv-events")
    llm = engine.make_llm(
        tiny_model.build(folder / "model"),
        root=folder / "blocks",
        multiprocess=False,
        events=True,
        events_port=port,
        offload_options=options,
    )
    described = options.get("self_describing_kv_events", True)
    views = Views(
        llm, instrumented, subscriber, port, options.get("blocks_per_chunk", 1) if described else 1, folder / "blocks"
    )
    views.watch(views.check)
    work(llm, random.Random(str(options)), OPERATIONS)
    before = views.say()
    counted = [
        {
            "subscribed": [views.subscriber.events[kind, medium], views.subscriber.blocks[kind, medium]],
            "ours": published_events(instrumented.rows, ours, tier),
        }
        for kind, ours in (("BlockStored", "block_stored"), ("BlockRemoved", "block_removed"))
        for tier, medium in MEDIA.items()
    ]
    views.watch(views.check_held)
    assert llm.reset_prefix_cache(reset_connector=True)
    views.check_held()
    engine.generate(llm, 99, tiny_model.BLOCK_TOKENS // 4)
    after = views.say()
    instrumented.assert_sound()
    result = {
        "before": before,
        "after": after,
        "counted": counted,
        "cleared": [
            views.subscriber.events["AllBlocksCleared", None],
            published_events(instrumented.rows, "all_blocks_cleared", "untagged")[0],
        ],
        "missing": views.subscriber.missing,
        "steps": views.steps,
    }
    print(json.dumps(result), flush=True)
    views.close()
    engine.shut_down(llm)


if __name__ == "__main__":
    main()
