"""Lines and the log, written on threads of their own: who does not read them must not hold up the watch."""

from __future__ import annotations

import logging
import queue
import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvcache_otel.cli.beside import Log, write

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from typing import TextIO

_logger = logging.getLogger(__name__)

WAITING = 8
"""Lots of lines that wait to be read; what comes while there are as many is left out, and said."""

LOGGED = 1024
"""Lines of the log that wait to be read."""

LAST_SECONDS = 0.5
"""How long the last lines wait for a reader."""

SAID_SECONDS = 60.0
"""Between two times that it is said."""


class Writer:
    """Writes to a file beside the stream that has it, which would be flushed, and waited for, at exit.

    Attributes:
        gone: Why nothing can be written any more; None as long as it can.
    """

    def __init__(self, stream: TextIO, waiting: int) -> None:
        """Args:
        stream: What has the file.
        waiting: Lots of lines that may wait.

        Raises:
            OSError: It has none.
        """
        self._file = stream.fileno()
        self._encoding = stream.encoding
        self._lots: queue.Queue[bytes] = queue.Queue(waiting)
        self.gone: OSError | None = None
        threading.Thread(target=self._run, name="kvcache-otel-output", daemon=True).start()

    def put(self, text: str) -> bool:
        """Has lines written as soon as they are read; returns whether there was room for them."""
        try:
            self._lots.put_nowait(f"{text}\n".encode(self._encoding, "backslashreplace"))
        except queue.Full:
            return False
        return True

    def end(self, seconds: float) -> None:
        """Waits until all is written, but no longer than so many seconds."""
        until = time.monotonic() + seconds
        while self._lots.unfinished_tasks and self.gone is None and time.monotonic() < until:
            time.sleep(0.01)

    def _run(self) -> None:
        while self.gone is None:
            lot = self._lots.get()
            try:
                write(self._file, lot)
            except OSError as error:
                self.gone = error
            self._lots.task_done()


class Output:
    """Standard output."""

    def __init__(self) -> None:
        self._writer = Writer(sys.stdout, WAITING)
        self.end = self._writer.end
        self._left_out, self._say_at = 0, 0.0

    def put(self, text: str) -> None:
        """Has lines written as soon as they are read.

        Raises:
            BrokenPipeError: Nobody will read them any more.
            OSError: They cannot be written for another reason.
        """
        if (gone := self._writer.gone) is not None:
            if isinstance(gone, BrokenPipeError):
                _logger.warning("kvcache: whoever read the lines of watch is gone, and so it ends")
            raise gone
        if self._writer.put(text):
            return
        self._left_out += 1
        if (now := time.monotonic()) >= self._say_at:
            self._say_at = now + SAID_SECONDS
            _logger.warning(
                "kvcache: nobody reads the lines of watch: what was to be written is left out, %d times so far",
                self._left_out,
            )


class LogHandler(logging.Handler):
    """The log, on standard error, or where it is diverted to."""

    def __init__(self) -> None:
        """Raises:
        OSError: There is no file to write it to.
        """
        super().__init__()
        self._writer = Writer(sys.stderr, LOGGED)
        self._log = Log(self._writer.put)

    def emit(self, record: logging.LogRecord) -> None:
        """Has a line written as soon as it is read; says how many were not."""
        try:
            text = self.format(record)
        except Exception:
            self.handleError(record)
            return
        self._log.line(text)

    @contextmanager
    def diverted(self, put: Callable[[str], bool]) -> Generator[None]:
        """Gives lines to somebody else, who has the terminal, until the end of the block.

        Args:
            put: Takes a line, and returns whether there was room for it.
        """
        self._writer.end(LAST_SECONDS)
        self._log.put = put
        try:
            yield
        finally:
            self._log.put = self._writer.put

    def flush(self) -> None:
        """Waits until all is written, but not for long."""
        self._writer.end(LAST_SECONDS)
