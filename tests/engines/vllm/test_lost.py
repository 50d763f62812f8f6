"""A real vLLM engine with offloading, and batches of its KV events that are lost on purpose on their way to a watch.

One engine is watched by three ways at once: with nothing between, through a gate, and through one with its replay at
hand. Then it is killed, and another one takes its place. Both have come to rest before anything is compared.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from tests.conftest import require

require("vllm")

from tests.engines.vllm.programs import CHECKOUT  # noqa: E402
from tests.support.processes import free_ports  # noqa: E402
from tests.support.publishing import (  # noqa: E402
    DIRECT,
    DUPLICATE,
    LOSSY,
    LOST,
    RECOVERED,
    REPLAYED,
    RESETS,
    Listener,
    Program,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.engine

PROGRAM = "tests.engines.vllm.publisher_program"
TIERS = ("device", "host", "disk")
WAYS = (DIRECT, LOSSY, REPLAYED)


class Seen(NamedTuple):
    """What there was at rest: what the engine said, and by each way what was received and what became of batches."""

    said: dict[str, Any]
    received: dict[str, dict[str, int | float]]
    batches: dict[str, dict[str, int | float]]
    dropped: dict[str, int]
    passed: dict[str, int]


def _see(listener: Listener, said: dict[str, Any]) -> Seen:
    specs = {"lost": LOST, "recovered": RECOVERED, "resets": RESETS, "duplicate": DUPLICATE}
    return Seen(
        said,
        {way: listener.received(way, *TIERS) for way in WAYS},
        {way: {name: listener.count(spec, way) for name, spec in specs.items()} for way in WAYS},
        {name: gate.dropped for name, gate in listener.gates.items()},
        {name: gate.passed for name, gate in listener.gates.items()},
    )


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Seen]]:
    """The whole story, told once: one engine that loses batches, and another in its place."""
    folder = tmp_path_factory.mktemp("engine")
    port, replay_port = free_ports(2)
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OTEL_", "VLLM_", "PROMETHEUS_", "KVCACHE_"))
    } | {"VLLM_PLUGINS": "none", "VLLM_LOGGING_STREAM": "ext://sys.stderr"}

    def program(seed: str) -> Program:
        command = [sys.executable, "-m", PROGRAM, str(folder), str(port), seed]
        return Program(command, environ, CHECKOUT, folder / "log")

    listener = Listener(port, replay_port)
    running = program("first")
    try:
        listener.start(running)
        found: dict[str, Seen] = {}
        found["before"] = _see(listener, listener.turn(running, 4))
        begun = found["before"].said["sent"]
        listener.drops = lambda number: number >= begun and number % 3 == 1
        listener.turn(running, 6)
        listener.drops = lambda _: False
        found["dropped"] = _see(listener, listener.turn(running, 0))  # Its first batch tells that others are missing.
        running.kill()
        running = program("second")
        listener.start(running)
        found["restarted"] = _see(listener, listener.turn(running, 4))
        yield found
    finally:
        running.kill()
        listener.close()


@pytest.mark.parametrize("when", ["before", "dropped", "restarted"])
def test_what_is_received_is_published_is_held(seen: dict[str, Seen], when: str) -> None:
    said = seen[when].said
    held = {tier: blocks for tier, blocks in said["held"].items() if blocks is not None}
    assert held == {tier: said["recount"][tier] for tier in ("device", "host")}
    assert said["published"] == said["recount"]
    assert min(said["published"].values()) > 0
    for way in WAYS if when != "dropped" else (DIRECT, REPLAYED):
        assert seen[when].received[way] == said["published"], way


def test_nothing_is_said_to_be_lost_that_was_not(seen: dict[str, Seen]) -> None:
    for way in WAYS:
        assert set(seen["before"].batches[way].values()) == {0}
    assert seen["before"].passed == dict.fromkeys((LOSSY, REPLAYED), seen["before"].said["sent"])
    assert seen["dropped"].batches[DIRECT] == seen["before"].batches[DIRECT]


def test_without_replay_what_is_dropped_is_lost_and_received_is_not_published(seen: dict[str, Seen]) -> None:
    now = seen["dropped"]
    assert now.dropped[LOSSY] >= 5
    assert now.passed[LOSSY] + now.dropped[LOSSY] == now.said["sent"]
    assert now.batches[LOSSY] == {"lost": now.dropped[LOSSY], "recovered": 0, "resets": 0, "duplicate": 0}
    assert now.received[LOSSY] != now.said["published"]


def test_with_replay_what_is_dropped_is_recovered(seen: dict[str, Seen]) -> None:
    now = seen["dropped"]
    assert now.dropped[REPLAYED] == now.dropped[LOSSY]
    assert now.batches[REPLAYED] == {"lost": 0, "recovered": now.dropped[REPLAYED], "resets": 0, "duplicate": 0}


def test_an_engine_that_is_killed_and_started_again_is_one_reset(seen: dict[str, Seen]) -> None:
    before, now = seen["dropped"], seen["restarted"]
    for way in WAYS:
        assert now.batches[way] == {**before.batches[way], "resets": 1}
