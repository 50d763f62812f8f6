"""`kvcache-otel watch` as a process beside this one, and what it says."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

PROGRAM = (sys.executable, "-c", "import sys; from kvcache_otel.cli import main; sys.exit(main())")
"""The command `kvcache-otel`, also where it is not on the path."""


class Watching:
    """The process. In a pipe it prints lines: ``worker=lossy rank=0 device=12 lost=3 …``.

    Attributes:
        said: What it has said last of each worker, by the names on the line.
    """

    def __init__(self, *sources: str, every: float = 0.2) -> None:
        """Args:
        sources: As on its command line.
        every: Seconds between two times that it says what there is.
        """
        self.said: dict[str, dict[str, str]] = {}
        self._process = subprocess.Popen(
            [*PROGRAM, "watch", "--every", str(every), *sources],
            env={**os.environ, "OTEL_METRICS_EXPORTER": "none"},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._thread = threading.Thread(target=self._read, name="watching", daemon=True)
        self._thread.start()

    def number(self, worker: str, name: str) -> int:
        """Returns what it has said last of a worker; 0 where it has not."""
        return int(self.said.get(worker, {}).get(name, 0))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self._process.terminate()
        self._process.wait()
        self._thread.join()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as out:
            for line in out:
                said = dict(part.split("=", 1) for part in line.split())
                self.said[said["worker"]] = said
