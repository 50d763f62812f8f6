"""Books: the blocks that events say are in one place."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable

    Hashes = tuple[Hashable, ...]


class Book:
    """The blocks in one place, of a publisher whose repeated store changes nothing and whose removal is final.

    Attributes:
        blocks: Their hashes.
    """

    __slots__ = ("blocks",)

    def __init__(self) -> None:
        self.blocks: set[Hashable] = set()

    def store(self, hashes: Hashes) -> None:
        """Puts blocks in."""
        self.blocks.update(hashes)

    def remove(self, hashes: Hashes) -> int:
        """Takes blocks out, one after the other, and returns how many of them were not in."""
        blocks = self.blocks
        before = len(blocks)
        blocks.difference_update(hashes)
        return len(hashes) - (before - len(blocks))

    def discard(self, hashes: Hashes) -> set[Hashable]:
        """Takes blocks out, with all their copies, and returns those that were in."""
        found = self.blocks.intersection(hashes)
        self.blocks.difference_update(found)
        return found

    def clear(self) -> None:
        """Takes everything out."""
        self.blocks.clear()


class CopiesBook(Book):
    """The blocks in one place, of a publisher that announces each copy: a block is in while one of them is left."""

    __slots__ = ("_more",)

    def __init__(self) -> None:
        super().__init__()
        self._more: dict[Hashable, int] = {}  # Copies beyond the first, of the few blocks that have any.

    def store(self, hashes: Hashes) -> None:
        new = set(hashes)
        if len(new) == len(hashes) and self.blocks.isdisjoint(new):
            self.blocks.update(new)
            return
        for block in hashes:
            if block in self.blocks:
                self._more[block] = self._more.get(block, 0) + 1
            else:
                self.blocks.add(block)

    def remove(self, hashes: Hashes) -> int:
        more = self._more
        if more.keys().isdisjoint(hashes):
            return super().remove(hashes)
        missing = 0
        for block in hashes:
            left = more.get(block, 0) - 1
            if left > 0:
                more[block] = left
            elif left == 0:
                del more[block]
            else:
                missing += super().remove((block,))
        return missing

    def discard(self, hashes: Hashes) -> set[Hashable]:
        found = super().discard(hashes)
        for block in self._more.keys() & found:
            del self._more[block]
        return found

    def clear(self) -> None:
        super().clear()
        self._more.clear()
