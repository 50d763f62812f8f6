"""Rows of several metrics that add up, read as they were at one moment, without anybody waiting for a lock."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    Rows = TypeVar("Rows")

# How often a reader begins anew where something changes all the time. One change takes some microseconds.
TRIES = 100


class Changes:
    """Counts changes of such rows when they begin and when they are done, in any number of threads.

    Whoever makes one adds to `begun` first in a ``try``, and to `done` first in its ``finally``: no signal handler can
    raise there and leave the one without the other, as it can where a context manager is left. As in `cells`, no
    addition is lost.

    Attributes:
        begun: Changes that have begun.
        done: Those of them that are done.
    """

    __slots__ = ("begun", "done")

    def __init__(self) -> None:
        self.begun = self.done = 0

    def read(self, read: Callable[[], Rows]) -> Rows:
        """Returns what is read while nothing changes; after many tries, as it is then."""
        for _ in range(TRIES):
            begun = self.begun
            if self.done == begun:
                rows = read()
                if self.begun == begun:
                    return rows
            time.sleep(0)  # Whoever is at it may want the interpreter.
        return read()

    def reset(self) -> None:
        """Forgets those that are under way, in a forked child."""
        self.begun = self.done = 0
