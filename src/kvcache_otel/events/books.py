"""Books: the blocks that events say are in one place."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    Hashes = Sequence[Hashable]


class Book:
    """The blocks in one place, of a publisher whose repeated store changes nothing and whose removal is final.

    Attributes:
        blocks: Their hashes, each with its number of copies where copies count. At the sizes that such books have, a
            dict takes less memory than a set, and the garbage collector does not look into one of ints or bytes.
    """

    __slots__ = ("blocks",)

    def __init__(self, blocks: dict[Hashable, int] | None = None) -> None:
        """Args:
        blocks: What is in it, taken over and not copied.
        """
        self.blocks: dict[Hashable, int] = {} if blocks is None else blocks

    def store(self, hashes: Hashes) -> None:
        """Puts blocks in."""
        blocks = self.blocks
        for block in hashes:
            blocks[block] = 1

    def remove(self, hashes: Hashes) -> int:
        """Takes blocks out, one after the other, and returns how many of them were not in."""
        pop, missing = self.blocks.pop, 0
        for block in hashes:
            if pop(block, None) is None:
                missing += 1
        return missing

    def discard(self, hashes: Hashes) -> set[Hashable]:
        """Takes blocks out, with all their copies, and returns those that were in."""
        pop = self.blocks.pop
        return {block for block in hashes if pop(block, None) is not None}

    def clear(self) -> None:
        """Takes everything out."""
        self.blocks.clear()


class CopiesBook(Book):
    """The blocks in one place, of a publisher that announces each copy: a block is in while one of them is left."""

    __slots__ = ()

    def store(self, hashes: Hashes) -> None:
        blocks = self.blocks
        copies = blocks.get
        for block in hashes:
            blocks[block] = copies(block, 0) + 1

    def remove(self, hashes: Hashes) -> int:
        blocks, missing = self.blocks, 0
        pop = blocks.pop
        for block in hashes:
            copies = pop(block, 0)
            if copies > 1:
                blocks[block] = copies - 1
            elif not copies:
                missing += 1
        return missing
