"""Books: the blocks that events say are in one place."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    Hashes = Sequence[Hashable]

_logger = logging.getLogger(__name__)

# Bytes of a dict for each block in it, beyond which it is made smaller. A block's hash takes 48 bytes more. A dict that
# only grows has 60 at the most, one that grows while blocks leave it up to 120. Made smaller, it has half of what it
# had, and grows again after a seventh of its blocks at the soonest.
_ROOMY = 68

# Bytes of a dict that is not worth it.
_SMALL = 2**16

# Blocks of which it is remembered that they were announced again, 100 MB of them at the most.
_MOST_AGAIN = 2**20


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

    def fit(self) -> None:
        """Gives memory back where the dict has much more than its blocks need, as after many others have left it."""
        blocks = self.blocks
        if blocks.__sizeof__() > max(_SMALL, _ROOMY * len(blocks)):
            compact = dict(blocks)
            blocks.clear()
            blocks.update(compact)  # An empty dict takes over how another is laid out.


class HoldersBook(Book):
    """The blocks in one place, as `Book` has them, of a publisher that announces a block again for each who holds it.

    Whoever listens takes the first removal for final, and so do these books. The publisher goes on and removes it for
    the others, which contradicts nothing: it had announced them. Where there are too many to remember, that is said,
    and no removal is a contradiction until the books are empty.
    """

    __slots__ = ("_again", "_forgot")

    def __init__(self, blocks: dict[Hashable, int] | None = None) -> None:
        super().__init__(blocks)
        self._again: dict[Hashable, int] = {}  # How often a block was announced that was in already.
        self._forgot = False

    def store(self, hashes: Hashes) -> None:
        blocks = self.blocks
        for block in hashes:
            if block in blocks:
                self._announced_again(block)
            else:
                blocks[block] = 1

    def remove(self, hashes: Hashes) -> int:
        pop, missing = self.blocks.pop, 0
        for block in hashes:
            if pop(block, None) is None and not self._had_another(block):
                missing += 1
        return missing

    def discard(self, hashes: Hashes) -> set[Hashable]:
        found = super().discard(hashes)
        for block in found:
            self._again.pop(block, None)
        return found

    def clear(self) -> None:
        super().clear()
        self._again.clear()
        self._forgot = False

    def _announced_again(self, block: Hashable) -> None:
        if len(self._again) >= _MOST_AGAIN:  # Somebody announces again and again, and never removes.
            self._again.clear()
            if not self._forgot:
                self._forgot = True
                _logger.warning(
                    "kvcache: more than %d blocks are announced for several who hold them: until the books are empty, "
                    "removals of what is not there are not counted as errors",
                    _MOST_AGAIN,
                )
        self._again[block] = self._again.get(block, 0) + 1

    def _had_another(self, block: Hashable) -> bool:
        """Takes back one announcement of a block that is not in any more; returns whether there was one."""
        left = self._again.pop(block, 0)
        if left > 1:
            self._again[block] = left - 1
        return left > 0 or self._forgot


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
