"""Many lines about the same: the first few are said, and then how many more there are."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import logging

FEW = 10
"""Lines that are said."""


class Few:
    """Lines about one thing, as long as it lasts."""

    def __init__(self, logger: logging.Logger, level: int, more: str) -> None:
        """Args:
        logger: Where they are logged.
        level: Their level.
        more: Says that there are more, with a ``%d`` for how many.
        """
        self._logger, self._level, self._more = logger, level, more
        self._lines = 0

    def say(self, text: str, *arguments: object) -> None:
        """Says one, unless there have been enough."""
        self._lines += 1
        if self._lines <= FEW:
            self._logger.log(self._level, text, *arguments)

    def add(self, number: int) -> None:
        """Adds some that nobody could say, after all the others."""
        self._lines += number

    def end(self) -> None:
        """Says how many were not said, and begins anew."""
        if self._lines > FEW:
            self._logger.log(self._level, self._more, self._lines - FEW)
        self._lines = 0
