"""Lines and the log, written on threads of their own: who does not read them must not hold up the watch."""

from __future__ import annotations

import logging
import queue
import sys
import threading
import time
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvcache_otel.cli.beside import Log, write
from kvcache_otel.cli.repeated import Repeated

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator
    from typing import TextIO

_logger = logging.getLogger(__name__)

WAITING = 8
"""Lots of lines that wait to be read; what comes while there are as many is left out, and said."""

LOGGED = 1024
"""Lines of the log that wait to be read."""

LAST_SECONDS = 0.5
"""How long the last lines wait for a reader."""

UNREAD_SECONDS = 10.0
"""How long a table waits for a reader who has stopped to read."""

LOT = 4096
"""Letters of a table that are written at a time."""

SAID_SECONDS = 60.0
"""Between two times that it is said."""


class OutputError(Exception):
    """Standard output cannot be written; its words say why."""


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

    @property
    def left(self) -> int:
        """How many lots are not written yet."""
        return self._lots.unfinished_tasks if self.gone is None else 0

    def end(self, seconds: float) -> None:
        """Waits until all is written, but no longer than so many seconds."""
        until = time.monotonic() + seconds
        while self.left and time.monotonic() < until:
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
        self._left_out, self._say_at = 0, 0.0

    def put(self, text: str) -> None:
        """Has lines written as soon as they are read.

        Raises:
            BrokenPipeError: Nobody will read them any more.
            OutputError: They cannot be written for another reason.
        """
        if isinstance(self._writer.gone, BrokenPipeError):
            _logger.warning("kvcache: whoever read the lines of watch is gone, and so it ends")
        self._check()
        if self._writer.put(text):
            return
        self._left_out += 1
        if (now := time.monotonic()) >= self._say_at:
            self._say_at = now + SAID_SECONDS
            _logger.warning(
                "kvcache: nobody reads the lines of watch: what was to be written is left out, %d times so far",
                self._left_out,
            )

    def end(self, seconds: float) -> None:
        """Waits until all is written, but no longer than so many seconds.

        Raises:
            BrokenPipeError: As in `put`.
            OutputError: As in `put`.
        """
        self._writer.end(seconds)
        self._check()

    def last(self, text: str, asked: Callable[[], bool]) -> None:
        """Has all of a text written, as long as somebody reads it.

        Args:
            text: The text, however long.
            asked: Returns whether it is to end: who does not read then is not waited for.

        Raises:
            BrokenPipeError: As in `put`.
            OutputError: As in `put`, or nobody reads it.
        """
        lots = deque(_lots(text))
        before, since = (len(lots), 0), time.monotonic()
        while lots or self._writer.left:
            if lots and self._writer.put(lots[0]):
                lots.popleft()
                continue
            self._check()
            now = time.monotonic()
            if (left := (len(lots), self._writer.left)) != before:
                before, since = left, now
            elif asked() and now - since >= LAST_SECONDS:
                return
            elif now - since >= UNREAD_SECONDS:
                raise OutputError(f"nobody has read it for {UNREAD_SECONDS:g} s, and the rest is left out")
            time.sleep(0.01)
        self._check()

    def _check(self) -> None:
        if (gone := self._writer.gone) is not None:
            raise gone if isinstance(gone, BrokenPipeError) else OutputError(gone.strerror or str(gone))


def _lots(text: str) -> Iterator[str]:
    """Yields whole lines of a text, a few at a time."""
    lot: list[str] = []
    for line in text.split("\n"):
        lot.append(line)
        if sum(map(len, lot)) >= LOT:
            yield "\n".join(lot)
            lot = []
    if lot:
        yield "\n".join(lot)


class LogHandler(logging.Handler):
    """The log, on standard error, or where it is diverted to."""

    def __init__(self) -> None:
        """Raises:
        OSError: There is no file to write it to.
        """
        super().__init__()
        self._writer = Writer(sys.stderr, LOGGED)
        self._log = Log(self._writer.put)
        self._repeated = Repeated(self._write)

    def emit(self, record: logging.LogRecord) -> None:
        """Has a line written as soon as it is read; says how many were not, or were like others before them."""
        self._repeated.line(record)

    def settle(self) -> None:
        """Says how many lines were like others before them, as soon as their time is over."""
        with self._locked():
            self._repeated.settle()

    def _write(self, record: logging.LogRecord) -> None:
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
        with self._locked():
            self._repeated.settle(at_once=True)
        self._writer.end(LAST_SECONDS)

    @contextmanager
    def _locked(self) -> Generator[None]:
        self.acquire()
        try:
            yield
        finally:
            self.release()
