"""An engine that publishes KV events in a process of its own, and a watch of it through links that lose batches."""

from __future__ import annotations

import json
import queue
import subprocess
import threading
import time
from typing import TYPE_CHECKING, Any

from kvcache_otel import semconv
from kvcache_otel.events.index import BlockIndex, series
from kvcache_otel.events.source import parse
from kvcache_otel.events.subscription import DISCONNECTED
from kvcache_otel.events.watch import Watch
from kvcache_otel.identity import Identity
from kvcache_otel.record.recorder import Recorder
from tests.support.gate import Gate
from tests.support.rows import Rows

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from kvcache_otel.spec import MetricSpec

SECONDS = 120.0
QUIET_SECONDS = 0.7

DIRECT, LOSSY, REPLAYED = "direct", "lossy", "replayed"
"""The sources of the same engine: with nothing between, through a gate, and through one with its replay at hand."""

LOST, RECOVERED = semconv.EVENT_BATCHES_LOST, semconv.EVENT_BATCHES_RECOVERED
RESETS, DUPLICATE = semconv.EVENT_PUBLISHER_RESETS, semconv.EVENT_BATCHES_DUPLICATE


class Program:
    """A program that prints a line of JSON when it is ready, and one for each line that it is sent."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], cwd: Path, log: Path) -> None:
        """Args:
        command: The program and its arguments.
        environ: All of its variables.
        cwd: Where it runs.
        log: Where its standard error goes.
        """
        self._log = log
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                command, env=environ, cwd=cwd, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def send(self, line: str) -> None:
        """Has it go on."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def said(self) -> dict[str, Any] | None:
        """What it has said since the last time, None for nothing yet."""
        try:
            return json.loads(self._lines.get_nowait())
        except queue.Empty:
            assert self._process.poll() is None, self._log.read_text(errors="replace")[-6000:]
            return None

    def kill(self) -> None:
        """Kills it, as a machine that runs out of memory does."""
        self._process.kill()
        self._reader.join()
        self._process.communicate()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith('{"'):  # A native library may print, too.
                self._lines.put(line)


class Listener:
    """A watch of one engine by three ways, driven step by step.

    Attributes:
        drops: Whether the message with a number is dropped by either gate.
        gates: The gates of `LOSSY` and `REPLAYED`.
    """

    def __init__(self, port: int, replay_port: int) -> None:
        """Args:
        port: Where the engine publishes.
        replay_port: Where it replays.
        """
        self.drops: Callable[[int], bool] = lambda _: False
        self.gates = {name: Gate(f"tcp://127.0.0.1:{port}") for name in (LOSSY, REPLAYED)}
        self.rows = Rows(Recorder(Identity("custom", "test"), series_limit=series(8)))
        self._watch = Watch(BlockIndex(self.rows.recorder))
        replay = f"?replay={replay_port}"
        self._watch.want(
            [
                parse(f"{DIRECT}=tcp://127.0.0.1:{port}"),
                parse(f"{LOSSY}={self.gates[LOSSY].endpoint}"),
                parse(f"{REPLAYED}={self.gates[REPLAYED].endpoint}{replay}"),
            ]
        )
        for gate in self.gates.values():
            self.until(lambda gate=gate: gate.is_open)

    def step(self) -> None:
        """Lets everything take its course for a moment."""
        for gate in self.gates.values():
            gate.pass_on(self.drops)
        self._watch.poll(0.01)

    def until(self, condition: Callable[[], Any], seconds: float = SECONDS) -> Any:
        """Takes steps until a condition holds; returns what it was."""
        end = time.monotonic() + seconds
        while not (found := condition()):
            assert time.monotonic() < end, f"not within {seconds:g} s: {self.told()}"
            self.step()
        return found

    def settle(self, seconds: float = QUIET_SECONDS) -> None:
        """Takes steps until nothing comes any more."""
        before, quiet = None, 0.0
        while before != (now := self.told()) or time.monotonic() < quiet:
            if before != now:
                before, quiet = now, time.monotonic() + seconds
            self.step()

    def start(self, program: Program) -> None:
        """Waits until a program is ready, and everybody connected to it: a watch tries ever less often meanwhile."""
        self.until(program.said)
        self.until(lambda: DISCONNECTED not in self._watch.states().values())
        self.settle()

    def turn(self, program: Program, operations: int) -> dict[str, Any]:
        """Has a program work, waits until what it has published has come, and returns what it said of itself."""
        program.send(str(operations))
        said = self.until(program.said)
        self.settle()
        return said

    def received(self, worker: str, *tiers: str) -> dict[str, int | float]:
        """The blocks in each tier, by one way."""
        values = {
            tier: self.rows.value(semconv.RESIDENT_BLOCKS, tier=tier, view="received", worker=worker) for tier in tiers
        }
        return {tier: 0 if value is None else value for tier, value in values.items()}

    def count(self, spec: MetricSpec, worker: str) -> int | float:
        """The sum of one worker's rows of a metric."""
        return self.rows.total(spec, worker=worker)

    def told(self) -> dict[str, Any]:
        """All that is said of the engine, and what the gates have done."""
        specs = (semconv.EVENTS, semconv.RESIDENT_BLOCKS, LOST, RECOVERED, RESETS)
        return {
            "gates": [(gate.passed, gate.dropped) for gate in self.gates.values()],
            **{spec.name: self.rows.values(spec) for spec in specs},
        }

    def close(self) -> None:
        """Ends it."""
        self._watch.close()
        for gate in self.gates.values():
            gate.close()
