"""Writing to a stream's file beside the stream, which would be flushed, and waited for, at exit."""

from __future__ import annotations

import io
import os
import select
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TextIO


def write(file: int, data: bytes) -> None:
    """Writes all of it, however long that takes.

    Raises:
        OSError: It cannot be written.
    """
    left = memoryview(data)
    while left:
        try:
            left = left[os.write(file, left) :]
        except BlockingIOError:  # Another has made it so.
            select.select([], [file], [])


class Beside(io.TextIOBase):
    """The file of a stream, as a stream that keeps nothing back."""

    def __init__(self, stream: TextIO) -> None:
        """Args:
        stream: What has the file.

        Raises:
            OSError: It has none.
        """
        self._file = stream.fileno()
        self._encoding = stream.encoding
        self._terminal = stream.isatty()

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._encoding

    def fileno(self) -> int:
        return self._file

    def isatty(self) -> bool:
        return self._terminal

    def write(self, text: str, /) -> int:
        write(self._file, text.encode(self._encoding, "backslashreplace"))
        return len(text)


class Log:
    """Lines that somebody is to be given, and how many he was not: the next one says it.

    Attributes:
        put: Gives him one; returns whether there was room for it.
    """

    def __init__(self, put: Callable[[str], bool]) -> None:
        """Args:
        put: As the attribute.
        """
        self.put = put
        self._left_out = 0

    def line(self, text: str) -> None:
        """Gives a line, if there is room for it."""
        more = f" ({self._left_out} lines of the log were left out before: nobody read them)" if self._left_out else ""
        self._left_out = 0 if self.put(text + more) else self._left_out + 1
