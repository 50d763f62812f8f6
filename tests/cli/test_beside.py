"""Lines for somebody who may not read them: none is lost unsaid, and none holds up whoever writes."""

from __future__ import annotations

import os
import pty
import termios
import threading
import time
from typing import TYPE_CHECKING, Any, cast

import pytest

from kvcache_otel.cli.beside import Beside, Log, write
from kvcache_otel.cli.live import live
from kvcache_otel.cli.watch_output import LAST_SECONDS
from tests.support.processes import wait_until

if TYPE_CHECKING:
    from typing import TextIO


class FakeStream:
    """A stream with a file, which says what a test wants of it."""

    encoding = "ascii"

    def __init__(self, file: int) -> None:
        self._file = file

    def fileno(self) -> int:
        return self._file

    def isatty(self) -> bool:
        return True


@pytest.fixture
def pipe() -> Any:
    reading, writing = os.pipe()
    yield reading, writing
    os.close(reading)
    os.close(writing)


def test_lines_that_are_left_out_are_said_with_the_next(pipe: tuple[int, int]) -> None:
    room, given = [True, False, False, True, True], list[str]()

    def put(line: str) -> bool:
        if there := room.pop(0):
            given.append(line)
        return there

    log = Log(put)
    for line in "abcde":
        log.line(line)
    assert given == ["a", "d (2 lines of the log were left out before: nobody read them)", "e"]


def test_all_is_written_where_another_has_made_the_file_not_to_wait(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    os.set_blocking(writing, False)
    data, read = os.urandom(500_000), bytearray()

    def consume() -> None:
        while len(read) < len(data):
            read.extend(os.read(reading, 4096))

    reader = threading.Thread(target=consume)
    reader.start()
    write(writing, data)
    reader.join(20)
    assert bytes(read) == data


def test_a_stream_beside_a_stream_is_its_file(pipe: tuple[int, int]) -> None:
    beside = Beside(cast("TextIO", FakeStream(pipe[1])))
    assert (beside.fileno(), beside.isatty(), beside.encoding) == (pipe[1], True, "ascii")
    assert beside.write("aé\n") == 3
    assert os.read(pipe[0], 100) == b"a\\xe9\n"


def test_a_terminal_that_stands_still_is_not_waited_for_and_one_that_is_gone_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = pty.openpty()
    termios.tcflow(theirs, termios.TCOOFF)  # As Ctrl-S does.
    monkeypatch.setattr("sys.stdout", FakeStream(theirs))
    monkeypatch.setattr("sys.stderr", FakeStream(theirs))
    ended = time.monotonic()
    try:
        with live(lambda: "x") as redraw:
            for _ in range(100):
                redraw()
            ended = time.monotonic()
        assert LAST_SECONDS <= time.monotonic() - ended < LAST_SECONDS + 8
        with live(lambda: "y") as redraw:
            os.close(ours)

            def gone() -> bool:
                try:
                    redraw()
                except OSError:
                    return True
                return False

            wait_until(gone)
    finally:
        os.close(theirs)
