"""Rows of several metrics that add up, read as they were at one moment, without anybody waiting for a lock."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import TypeVar

    Rows = TypeVar("Rows")

# How often a reader begins anew where something changes all the time. One change takes some microseconds.
TRIES = 100


class Changes:
    """Counts changes of such rows when they begin and when they are done, in any number of threads.

    As a context manager it is one change. As in `cells`, no addition is lost.
    """

    __slots__ = ("_begun", "_done")

    def __init__(self) -> None:
        self._begun = self._done = 0

    def __enter__(self) -> None:
        self._begun += 1

    def __exit__(self, _: Any, __: BaseException | None, ___: TracebackType | None) -> None:
        self._done += 1

    def read(self, read: Callable[[], Rows]) -> Rows:
        """Returns what is read while nothing changes; after many tries, as it is then."""
        for _ in range(TRIES):
            begun = self._begun
            if self._done == begun:
                rows = read()
                if self._begun == begun:
                    return rows
            time.sleep(0)  # Whoever is at it may want the interpreter.
        return read()

    def reset(self) -> None:
        """Forgets those that are under way, in a forked child."""
        self._begun = self._done = 0
