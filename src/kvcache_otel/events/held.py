"""Batches that wait for those before them."""

from __future__ import annotations

import math
from heapq import heappop, heappush


class Held:
    """Batches by their number, taken out from the lowest on.

    Attributes:
        last: The highest number, while there is one.
        size: Bytes of their payloads.
    """

    __slots__ = ("_order", "_payloads", "_times", "last", "size")

    def __init__(self) -> None:
        self._payloads: dict[int, bytes] = {}
        self._times: dict[int, float] = {}
        self._order: list[int] = []
        self.last = -1
        self.size = 0

    def __len__(self) -> int:
        return len(self._order)

    def get(self, number: int) -> bytes | None:
        """Returns the payload of a batch, or None where it is not in."""
        return self._payloads.get(number)

    @property
    def first(self) -> int:
        """The lowest number; there must be one."""
        return self._order[0]

    @property
    def since(self) -> float | None:
        """When the batch with the lowest number came; None where there is none."""
        return self._times[self._order[0]] if self._order else None

    def put(self, number: int, payload: bytes, now: float) -> None:
        """Puts a batch in, whose number is not in yet."""
        self._times[number] = now
        self.last = max(self.last, number) if self._order else number
        self._payloads[number] = payload
        heappush(self._order, number)
        self.size += len(payload)

    def pop(self) -> bytes:
        """Takes out the batch with the lowest number."""
        number = heappop(self._order)
        del self._times[number]
        payload = self._payloads.pop(number)
        self.size -= len(payload)
        return payload

    def drop(self, start: float, end: float = math.inf) -> list[tuple[int, bytes, float]]:
        """Takes out the batches that came within some time, and returns them by number, each with when it came.

        Args:
            start: From when on.
            end: Before when.
        """
        numbers = sorted(number for number, came in self._times.items() if start <= came < end)
        dropped = [(number, self._payloads.pop(number), self._times.pop(number)) for number in numbers]
        self.size -= sum(len(payload) for _, payload, _ in dropped)
        self._order = sorted(self._times)
        self.last = self._order[-1] if self._order else -1
        return dropped
