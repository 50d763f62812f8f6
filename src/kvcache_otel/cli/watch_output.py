"""Lines for a pipe, written on a thread of their own: whoever does not read them must not hold up what is watched."""

from __future__ import annotations

import logging
import os
import queue
import select
import sys
import threading
import time

_logger = logging.getLogger(__name__)

WAITING = 8
"""Lots of lines that wait to be read; what comes while there are as many is left out, and said."""

SAID_SECONDS = 60.0
"""Between two times that it is said."""


class Output:
    """Standard output. It is written to beside `sys.stdout`, which would be flushed, and waited for, at exit."""

    def __init__(self) -> None:
        self._file = sys.stdout.fileno()
        self._encoding = sys.stdout.encoding
        self._lots: queue.Queue[bytes] = queue.Queue(WAITING)
        self._gone: OSError | None = None
        self._left_out, self._say_at = 0, 0.0
        threading.Thread(target=self._run, name="kvcache-otel-output", daemon=True).start()

    def put(self, text: str) -> None:
        """Has lines written as soon as they are read.

        Raises:
            BrokenPipeError: Nobody will read them any more.
            OSError: They cannot be written for another reason.
        """
        if self._gone is not None:
            if isinstance(self._gone, BrokenPipeError):
                _logger.warning("kvcache: whoever read the lines of watch is gone, and so it ends")
            raise self._gone
        try:
            self._lots.put_nowait(f"{text}\n".encode(self._encoding, "backslashreplace"))
        except queue.Full:
            self._left_out += 1
            if (now := time.monotonic()) >= self._say_at:
                self._say_at = now + SAID_SECONDS
                _logger.warning(
                    "kvcache: nobody reads the lines of watch: what was to be written is left out, %d times so far",
                    self._left_out,
                )

    def end(self, seconds: float) -> None:
        """Waits until all is written, but no longer than so many seconds."""
        until = time.monotonic() + seconds
        while self._lots.unfinished_tasks and self._gone is None and time.monotonic() < until:
            time.sleep(0.01)

    def _run(self) -> None:
        while self._gone is None:
            lot = memoryview(self._lots.get())
            try:
                while lot:
                    try:
                        lot = lot[os.write(self._file, lot) :]
                    except BlockingIOError:  # Another has made it so.
                        select.select([], [self._file], [])
            except OSError as error:
                self._gone = error
            self._lots.task_done()
