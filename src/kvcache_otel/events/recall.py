"""Recall: by what the batches that were applied last can be told from others that have their numbers."""

from __future__ import annotations

from array import array

UNKNOWN, LOST = 0, 1
"""In place of a mark: a number that is too far back or was before the first, and one that was given up."""

_KEPT = 1024
_BEGINNING = 48  # Bytes that tell a batch from others: the time when it was made, and the first event's first fields.


def mark(payload: bytes) -> int:
    """Returns what tells a batch from others, within this process."""
    found = hash(payload[:_BEGINNING])
    return found if found not in (UNKNOWN, LOST) else -1


class Recall:
    """The marks of the last numbers, without a gap: each is put or lost."""

    __slots__ = ("_marks",)

    def __init__(self) -> None:
        self._marks = array("q", bytes(8 * _KEPT))

    def put(self, number: int, payload: bytes) -> None:
        """Remembers the batch of the next number."""
        self._marks[number % _KEPT] = mark(payload)

    def lose(self, start: int, end: int) -> None:
        """Remembers that numbers from one up to another were given up."""
        for number in range(max(start, end - _KEPT), end):
            self._marks[number % _KEPT] = LOST

    def of(self, number: int, following: int) -> int:
        """Returns a number's mark, `UNKNOWN` or `LOST`.

        Args:
            number: Which; below the following.
            following: The number that is next.
        """
        return self._marks[number % _KEPT] if number >= max(following - _KEPT, 0) else UNKNOWN

    def newest(self, following: int) -> int | None:
        """Returns the highest number whose batch is known; None where there is none.

        Args:
            following: The number that is next.
        """
        for number in range(following - 1, max(following - 1 - _KEPT, -1), -1):
            if self._marks[number % _KEPT] not in (UNKNOWN, LOST):
                return number
        return None
