"""The ledger: the blocks of one owner in every medium, booked when an event says so, and the rows that show it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcache_otel.events.books import Book, CopiesBook, HoldersBook
from kvcache_otel.events.medium import tier
from kvcache_otel.semconv import EventMedium

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from kvcache_otel.events.books import Hashes
    from kvcache_otel.record.cells import Level


# Releases that name no medium have no other tier.
_OF_THE_DEVICE = (EventMedium.DEVICE, EventMedium.UNTAGGED)


class Tally:
    """What many ledgers have together.

    Attributes:
        blocks: In all of their books, as they were settled last.
    """

    __slots__ = ("blocks",)

    def __init__(self) -> None:
        self.blocks = 0


class Ledger:
    """Blocks by medium. Those without a medium, or in one that is not known, have a book too: their removal contradicts
    nothing.

    Attributes:
        books: By medium, those that an event or the owner has named.
        clears_device_only: Whether "all blocks cleared" means the device's alone.
    """

    __slots__ = ("_new_book", "_row", "_rows", "_settled", "_tally", "_unplaced", "books", "clears_device_only")

    def __init__(
        self,
        row: Callable[[str], Level],
        *tiers: str,
        copies: bool,
        clears_device_only: bool,
        holders: bool = False,
        unplaced: str | None = None,
        tally: Tally | None = None,
    ) -> None:
        """Args:
        row: Returns a new level for the blocks in a tier.
        tiers: The tiers whose rows are there from the start, at zero; another gets its row when an event names it.
        copies: Whether each copy of a block is announced and removed by itself.
        clears_device_only: Whether "all blocks cleared" means the device's alone.
        holders: Whether a block is announced, and removed, for each who holds it, and gone with the first removal.
        unplaced: The tier that shows blocks without a medium, or in one that is not known; None for no row.
        tally: Where its blocks that have a row are added to those of others; None for nowhere.
        """
        self._row = row
        self._new_book = CopiesBook if copies else HoldersBook if holders else Book
        self.clears_device_only = clears_device_only
        self._unplaced = unplaced
        self._tally = tally or Tally()
        self._settled = 0  # Of these, what is this one's.
        self._rows: list[tuple[dict[Hashable, int], Level]] = []
        self.books: dict[str, Book] = {}
        for name in tiers:
            self.book(name)
        self.settle()

    def book(self, medium: str) -> Book:
        """Returns the book of a medium, which is opened where there is none."""
        book = self.books.get(medium)
        if book is None:
            book = self.books[medium] = self._new_book()
            shown = tier(medium) or self._unplaced
            if shown is not None:
                self._rows.append((book.blocks, self._row(shown)))
        return book

    def remove(self, hashes: Hashes) -> int:
        """Takes blocks out of every medium, where none is named; returns how many were in none."""
        found: set[Hashable] = set()
        for book in self.books.values():
            found |= book.discard(hashes)
        return len(hashes) - len(found)

    def cleared(self) -> None:
        """Takes out what "all blocks cleared" is about."""
        for medium, book in self.books.items():
            if medium in _OF_THE_DEVICE or not self.clears_device_only:
                book.clear()

    def settle(self) -> None:
        """Shows what is in the books now."""
        total = 0
        for blocks, level in self._rows:
            resident = len(blocks)
            total += resident
            if level.value != resident:
                level.set(resident)
        if total != self._settled:
            self._tally.blocks += total - self._settled
            self._settled = total

    def fit(self) -> None:
        """Gives memory back that the books do not need; see `Book.fit`."""
        for book in self.books.values():
            book.fit()

    def agrees(self) -> bool:
        """Returns whether the rows show what is in the books; true after `settle`, unless the books are broken."""
        return all(level.value in (None, len(blocks)) for blocks, level in self._rows)

    def empty(self) -> None:
        """Empties the books; the rows show it when they are settled."""
        for book in self.books.values():
            book.clear()

    def hide(self) -> None:
        """Ends the rows, until they are settled again."""
        for _, level in self._rows:
            level.set(None)

    def close(self) -> None:
        """Ends the rows and empties the books, for good."""
        self.hide()
        self.empty()
        self._tally.blocks -= self._settled
        self._settled = 0

    def count_copies(self, copies: bool) -> None:
        """Changes whether copies count. What is held stays held; copies that do not count any more are forgotten."""
        self._new_book = CopiesBook if copies else Book
        for medium, book in self.books.items():
            self.books[medium] = self._new_book(book.blocks)

    def total(self) -> int:
        """Returns how many blocks there are, each counted once for every medium."""
        return sum(len(book.blocks) for book in self.books.values())
