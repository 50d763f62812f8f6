"""Earlier: what a replay has of a life from its beginning on, collected until it reaches what is known of that."""

from __future__ import annotations


class Earlier:
    """Batches with rising numbers.

    Attributes:
        again: Whether they are collected for the second time, since the first time they did not reach far enough.
        is_news: Whether any of them had not been known.
        size: Bytes of their payloads.
    """

    __slots__ = ("_batches", "again", "is_news", "size")

    def __init__(self, *, again: bool = False) -> None:
        """Args:
        again: As above.
        """
        self._batches: list[tuple[int, bytes]] = []
        self.again = again
        self.is_news = False
        self.size = 0

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def last(self) -> int:
        """The highest number; -1 where there is none."""
        return self._batches[-1][0] if self._batches else -1

    def put(self, number: int, payload: bytes, *, is_news: bool) -> None:
        """Takes one, unless its number does not follow."""
        if not self._batches or number > self._batches[-1][0]:
            self._batches.append((number, payload))
            self.size += len(payload)
            self.is_news = self.is_news or is_news

    def covers(self, first: int, joined: int, following: int) -> bool:
        """Returns whether they can stand in for what was applied.

        Args:
            first: The number that was applied first.
            joined: From which number on none may lack.
            following: The number that is next.
        """
        after = sum(number >= joined for number, _ in self._batches)
        return bool(self._batches) and self._batches[0][0] <= first and after == following - joined

    def batches(self) -> list[tuple[int, bytes]]:
        """Returns them."""
        return self._batches
