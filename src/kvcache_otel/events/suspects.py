"""Suspects: batches that do not follow, from a publisher that may have started again."""

from __future__ import annotations

import math
from typing import NamedTuple

from kvcache_otel.events.recall import LOST, UNKNOWN


class Suspect(NamedTuple):
    """One of them.

    Attributes:
        number: Its number.
        payload: What it is.
        came: When it came.
    """

    number: int
    payload: bytes
    came: float


class Suspects:
    """They, in the order in which they came.

    Attributes:
        evidence: How many of them prove something: numbers that were given up do not.
        proofs: How many by their bytes: their number is known to have been on another batch.
        size: Bytes of their payloads.
        since: When the last of them came, if silence after it means something; infinite where it does not.
    """

    __slots__ = ("_batches", "evidence", "proofs", "since", "size")

    def __init__(self) -> None:
        self._forget()

    def __len__(self) -> int:
        return len(self._batches)

    def has(self, number: int, payload: bytes) -> bool:
        """Returns whether a batch is one of them."""
        return any(one.number == number and one.payload == payload for one in self._batches)

    def put(self, suspect: Suspect, found: int, following: int) -> None:
        """Puts one in.

        Args:
            suspect: Which.
            found: What is known of the batch that had its number, as of `Recall.of`.
            following: The number that is next. Silence tells nothing where one of them is not below.
        """
        self._batches.append(suspect)
        self.size += len(suspect.payload)
        self.evidence += found != LOST
        self.proofs += found not in (LOST, UNKNOWN)
        below = all(one.number < following for one in self._batches)
        self.since = suspect.came if below and self.evidence else math.inf

    def followed_by(self, number: int, most: int) -> bool:
        """Returns whether a number follows the last of them, with at most so many between."""
        return bool(self._batches) and 0 < number - self._batches[-1].number <= most

    def take(self) -> list[Suspect]:
        """Takes all of them out."""
        batches = self._batches
        self._forget()
        return batches

    def _forget(self) -> None:
        self._batches: list[Suspect] = []
        self.evidence = self.proofs = self.size = 0
        self.since = math.inf
