"""Room: which workers and ranks have rows of their own, so that no source takes what another needs.

The first of each source always has; how many more there may be is bounded for all, and for each.
"""

from __future__ import annotations

import logging

_logger = logging.getLogger(__name__)

FURTHER = 1024
"""Workers and ranks beside the first of each source that have rows of their own."""

SHARE = 256
"""Of these, what one source may have."""


BOOKS = 4096
"""Ranks of all sources that have books of their own, beside the first of each publisher; see `worker.MOST_RANKS`."""


class Room:
    """The room for the rows of one index.

    Attributes:
        owners: Workers and ranks for which there is room left.
        further: Of these, how many may be others than the first of a source.
        other: The worker in which the others are added up.
        books: Ranks beyond the first of each publisher that may still have books.
    """

    __slots__ = ("_said", "books", "further", "other", "owners")

    def __init__(self, owners: int, further: int, other: str) -> None:
        """Args:
        owners: As the attribute.
        further: As the attribute.
        other: As the attribute.
        """
        self.owners, self.further, self.other = owners, further, other
        self.books = BOOKS
        self._said = False

    def full(self) -> None:
        """Says that there is none left, once."""
        if not self._said:
            self._said = True
            _logger.warning(
                "kvcache: no room for rows of more workers and ranks; the others are added up in kvcache.worker=%r",
                self.other,
            )


class Share:
    """What one source has of it.

    Attributes:
        source: What and where the source is, as the log says it.
    """

    __slots__ = ("__weakref__", "_first", "_further", "_room", "_said", "_whole", "source")

    def __init__(self, room: Room, source: str, whole: Share | None = None) -> None:
        """Args:
        room: Of what.
        source: As the attribute.
        whole: What this is a part of; see `part`.
        """
        self.source = source
        self._room = room
        self._whole = whole
        self._first, self._further, self._said = False, 0, False

    def is_beside(self, other: Share) -> bool:
        """Returns whether both are parts of one source."""
        return (self._whole or self) is (other._whole or other)

    def part(self, what: str) -> Share:
        """Returns a share of its own for a part of the source, whose books are apart; its room is the source's.

        Args:
            what: Which part, as the log is to say it.
        """
        return Share(self._room, f"{self.source}, {what}", self)

    def take(self) -> bool:
        """Takes the room for one worker or rank more, and returns whether there was any."""
        if self._whole is not None:
            return self._whole.take()
        room = self._room
        if self._first and self._further >= SHARE:
            if not self._said:
                self._said = True
                _logger.warning(
                    "kvcache: source %s names more than %d workers and ranks; the others are added up in "
                    "kvcache.worker=%r",
                    self.source,
                    SHARE,
                    room.other,
                )
            return False
        if not room.owners or (self._first and not room.further):
            room.full()
            return False
        room.owners -= 1
        room.further -= self._first
        self._further += self._first
        self._first = True
        return True

    def give_back(self) -> None:
        """Gives back the room for one of them."""
        if self._whole is not None:
            self._whole.give_back()
            return
        self._room.owners += 1
        if self._further:
            self._further -= 1
            self._room.further += 1
        else:
            self._first = False

    def take_book(self) -> bool:
        """Takes the room for the books of one rank beyond the first of its publisher; returns whether there was any."""
        if not self._room.books:
            return False
        self._room.books -= 1
        return True

    def give_books_back(self, number: int) -> None:
        """Gives back the room for so many of them."""
        self._room.books += number
