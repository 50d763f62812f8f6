"""A real SGLang cache and its publisher, killed as a process, and another one in its place, as a watch sees them."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.conftest import require

require("sglang")

from tests.engines.sglang.processes import CHECKOUT  # noqa: E402
from tests.support.processes import free_ports  # noqa: E402
from tests.support.publishing import DIRECT, LOSSY, LOST, RECOVERED, REPLAYED, RESETS, Listener, Program  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.engine

WAYS = (DIRECT, LOSSY, REPLAYED)
TIERS = ("device", "host")


def _agree(listener: Listener, said: dict[str, Any], *ways: str) -> None:
    assert said["held"] == said["published"] == said["recount"]
    assert min(said["recount"].values()) > 0
    for way in ways:
        assert listener.received(way, *TIERS) == said["recount"], way


def test_a_cache_that_loses_batches_is_killed_and_another_takes_its_place(tmp_path: Path) -> None:
    port, replay_port = free_ports(2)
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OTEL_", "SGLANG_", "PROMETHEUS_", "KVCACHE_"))
    }

    def program(name: str) -> Program:
        folder = tmp_path / name
        folder.mkdir()
        command = [sys.executable, "-m", "tests.engines.sglang.publisher_program", str(folder), str(port)]
        return Program([*command, str(replay_port)], inherited, CHECKOUT, tmp_path / "log")

    listener = Listener(port, replay_port)
    running = program("first")
    try:
        listener.start(running)
        said = listener.turn(running, 100)
        _agree(listener, said, *WAYS)
        begun = said["sent"]
        listener.drops = lambda number: number >= begun and number % 3 == 1
        listener.turn(running, 100)
        listener.drops = lambda _: False
        said = listener.turn(running, 0)
        dropped = listener.gates[LOSSY].dropped
        assert listener.gates[REPLAYED].dropped == dropped > 10
        assert listener.gates[LOSSY].passed + dropped == said["sent"]
        counted = {way: [listener.count(spec, way) for spec in (LOST, RECOVERED, RESETS)] for way in WAYS}
        assert counted == {DIRECT: [0, 0, 0], LOSSY: [dropped, 0, 0], REPLAYED: [0, dropped, 0]}
        _agree(listener, said, DIRECT, REPLAYED)
        assert listener.received(LOSSY, *TIERS) != said["published"]
        running.kill()
        running = program("second")
        listener.start(running)
        said = listener.turn(running, 100)
        _agree(listener, said, *WAYS)
        assert {way: listener.count(RESETS, way) for way in WAYS} == dict.fromkeys(WAYS, 1)
        assert {way: listener.count(LOST, way) for way in WAYS} == {DIRECT: 0, LOSSY: dropped, REPLAYED: 0}
    finally:
        running.kill()
        listener.close()
