"""Batches that wait for those before them."""

from __future__ import annotations

from heapq import heappop, heappush


class Held:
    """Batches by their number, taken out from the lowest on.

    Attributes:
        last: The highest number, while there is one.
        size: Bytes of their payloads.
    """

    __slots__ = ("_order", "_payloads", "last", "size")

    def __init__(self) -> None:
        self._payloads: dict[int, bytes] = {}
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

    def put(self, number: int, payload: bytes) -> None:
        """Puts a batch in, whose number is not in yet."""
        self.last = max(self.last, number) if self._order else number
        self._payloads[number] = payload
        heappush(self._order, number)
        self.size += len(payload)

    def pop(self) -> bytes:
        """Takes out the batch with the lowest number."""
        payload = self._payloads.pop(heappop(self._order))
        self.size -= len(payload)
        return payload
