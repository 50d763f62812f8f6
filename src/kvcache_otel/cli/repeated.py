"""Lines of the log in the same words about one source after another: the first are said, and how many more there are.

Thousands of sources begin together, end together, and lose their network together.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

FIRST = 32
"""Lines in the same words that are said, in so many seconds:"""

SECONDS = 10.0

_ABOUT = ("kvcache: source %r", "kvcache: worker %r")


class _Said(NamedTuple):
    until: float
    lines: int
    last: logging.LogRecord


class Repeated:
    """What has been said of late, by its words."""

    def __init__(self, say: Callable[[logging.LogRecord], None], clock: Callable[[], float] = time.monotonic) -> None:
        """Args:
        say: Has a line written.
        clock: Tells the time, in seconds.
        """
        self._say, self._clock = say, clock
        self._said: dict[str, _Said] = {}

    def line(self, record: logging.LogRecord) -> None:
        """Says a line, unless there have been as many of late."""
        self.settle()
        words = str(record.msg)
        if words.startswith(_ABOUT):
            said = self._said.get(words) or _Said(self._clock() + SECONDS, 0, record)
            self._said[words] = said = _Said(said.until, said.lines + 1, record)
            if said.lines > FIRST:
                return
        self._say(record)

    def settle(self, *, at_once: bool = False) -> None:
        """Says how many there were more, where their time is over.

        Args:
            at_once: Whether it is, since nothing comes any more.
        """
        now = self._clock()
        for words, said in list(self._said.items()):
            if at_once or now >= said.until:
                del self._said[words]
                if said.lines > FIRST:
                    self._say(_more(said.last, said.lines - FIRST))


def _more(last: logging.LogRecord, lines: int) -> logging.LogRecord:
    text = last.getMessage().removeprefix("kvcache: ")
    return logging.LogRecord(
        last.name, last.levelno, last.pathname, last.lineno, "kvcache: %d more lines like this: %s", (lines, text), None
    )
