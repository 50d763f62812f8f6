"""A storage backend that writes on a thread of its own, and says how long that took."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


class Store:
    """Files in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._thread = ThreadPoolExecutor(1, "store")

    def write(self, name: str, data: bytes) -> Future[float]:
        """Writes a file in the background; the result is how many seconds it took, without the wait for its turn."""
        return self._thread.submit(self._write, name, data)

    def read(self, name: str) -> bytes:
        """Reads a file, and returns when it is there."""
        return (self._folder / name).read_bytes()

    def close(self) -> None:
        """Ends the thread, when all is written."""
        self._thread.shutdown()

    def _write(self, name: str, data: bytes) -> float:
        began = time.perf_counter()
        (self._folder / name).write_bytes(data)
        return time.perf_counter() - began
