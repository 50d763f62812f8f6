"""Programs that use the real vLLM, run as processes of their own in an environment of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

CHECKOUT = Path(__file__).resolve().parents[3]
BIN = Path(sys.executable).parent
DRIVER = "tests.engines.vllm.driver_program"
ENGINE = "tests.engines.vllm.engine_program"


class Ended(NamedTuple):
    """How a program ended.

    Attributes:
        status: Its exit status.
        out: Its standard output.
        err: Its standard error, vLLM's log in it.
        at: When, by `time.time`.
    """

    status: int
    out: str
    err: str
    at: float

    @property
    def ours(self) -> list[str]:
        """What we said on standard error, line by line, without the logger's beginning."""
        return [line[line.index("kvcache: ") :] for line in self.err.splitlines() if "kvcache: " in line]

    def result(self) -> dict[str, Any]:
        """The line of JSON that the program printed."""
        assert self.status == 0, self.err[-4000:]
        return json.loads(next(line for line in self.out.splitlines() if line.startswith('{"')))

    @property
    def exit_seconds(self) -> float:
        """How long the process took to end after it had printed its result."""
        return self.at - self.result()["done"]


def run(command: Sequence[str | os.PathLike[str]], environ: Mapping[str, str], *, timeout_s: float = 120) -> Ended:
    """Runs a program to its end; of this process's variables it gets none that has to do with the matter."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OTEL_", "VLLM_", "PROMETHEUS_", "KVCACHE_"))
    }
    ended = subprocess.run(
        command,
        env={**inherited, "VLLM_LOGGING_STREAM": "ext://sys.stderr", **environ},
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    return Ended(ended.returncode, ended.stdout, ended.stderr, time.time())
