"""Ahead: batches that a replay brought before they came live, of which a copy may still be on its way."""

from __future__ import annotations

from array import array
from bisect import bisect_left


class Ahead:
    """Numbers, rising, each with the mark of its batch.

    A copy that comes is no duplicate, and its batch was not missed; one whose successor comes first was.
    """

    __slots__ = ("_first", "_marks", "_numbers")

    def __init__(self) -> None:
        self._numbers, self._marks = array("Q"), array("q")
        self._first = 0  # Those before it have come, or were missed.

    def __bool__(self) -> bool:
        return self._first < len(self._numbers)

    def put(self, number: int, mark: int) -> bool:
        """Takes a batch that a replay brought. Returns False where a higher number was before it: then it is missed."""
        if self._numbers and number <= self._numbers[-1]:
            return False
        self._numbers.append(number)
        self._marks.append(mark)
        return True

    def take(self, number: int, mark: int, since: float) -> int | None:
        """Takes out a batch whose copy has come, and those before it.

        Returns:
            How many of these, from the number `since` on, were missed; None where there is no such batch.
        """
        place = bisect_left(self._numbers, number, self._first)
        if place == len(self._numbers) or (self._numbers[place], self._marks[place]) != (number, mark):
            return None
        missed = self._count(since, place)
        self._first = place + 1
        return missed

    def rest(self, since: float) -> int:
        """Takes out all, and returns how many were missed, from the number `since` on."""
        missed = self._count(since, len(self._numbers))
        self._numbers, self._marks, self._first = array("Q"), array("q"), 0
        return missed

    def _count(self, since: float, end: int) -> int:
        return max(end - bisect_left(self._numbers, since, self._first), 0)
