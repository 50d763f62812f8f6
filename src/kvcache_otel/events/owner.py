"""What one data-parallel rank of a worker has published, as it was received: its books and its rows."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from kvcache_otel import semconv
from kvcache_otel.events.counts import event_cells
from kvcache_otel.events.ledger import Ledger
from kvcache_otel.events.medium import medium, tier
from kvcache_otel.semconv import EventMedium, EventType, Reason, Tier, View

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvcache_otel.events.books import Book
    from kvcache_otel.events.counts import EventCells
    from kvcache_otel.events.ledger import Tally
    from kvcache_otel.events.wire import Event
    from kvcache_otel.record.cells import Level
    from kvcache_otel.record.probe import Labels
    from kvcache_otel.record.recorder import Recorder

LARGEST_BLOCK = 2**31 - 1

# Spellings of media whose place is known without asking; a publisher has a handful.
_SPELLINGS = 16

_STORED, _REMOVED = EventType.BLOCK_STORED, EventType.BLOCK_REMOVED


class _Place:
    """What the events that name one medium are written into."""

    __slots__ = ("block_size", "book", "named", "removed", "stored")

    def __init__(self, named: str, stored: EventCells, removed: EventCells) -> None:
        self.named = named
        self.stored = stored
        self.removed = removed
        self.book: Book | None = None  # Opened by the first event that puts something in, or takes something out.
        self.block_size: int | None = None


class Owner:
    """The blocks of one owner, and its rows from now on: every type and medium of event at zero, and the device tier.

    One without books only counts events.

    Attributes:
        booked: Whether it has books.
        heard: When the last batch came; None before the first.
        labels: The worker and the rank that its rows name.
    """

    __slots__ = (
        "__weakref__",
        "_by_medium",
        "_cells",
        "_ledger",
        "_places",
        "_recorder",
        "_resized",
        "_sizes",
        "booked",
        "heard",
        "labels",
    )

    def __init__(
        self,
        recorder: Recorder,
        labels: Labels,
        clock: Callable[[], float],
        resized: Callable[[str, int, int], None],
        *,
        copies: bool,
        clears_device_only: bool,
        booked: bool,
        tally: Tally,
    ) -> None:
        """Args:
        recorder: Where the rows are.
        labels: The worker and its rank.
        clock: Tells the time, in seconds.
        resized: Told of a tier whose block size has changed: from what, to what.
        copies: As in `Ledger`.
        clears_device_only: As in `Ledger`.
        booked: Whether it has books.
        tally: As in `Ledger`.
        """
        self.booked = booked
        self.heard: float | None = None
        self._recorder = recorder
        self.labels = labels
        self._resized = resized
        self._sizes: dict[str, Level] = {}
        seen: Labels = {semconv.KVCACHE_VIEW: View.RECEIVED, **labels}
        self._cells = event_cells(recorder.counter, seen)
        self._by_medium: dict[str, _Place] = {}
        self._places: dict[str | None, _Place] = {}  # By how the medium is written.
        self._ledger = Ledger(
            lambda where: recorder.level(semconv.RESIDENT_BLOCKS, {**seen, semconv.KVCACHE_TIER: where}),
            *((EventMedium.DEVICE,) if booked else ()),
            copies=copies,
            clears_device_only=clears_device_only,
            unplaced=Tier.UNKNOWN,
            tally=tally,
        )
        reference = weakref.ref(self)  # The recorder may not keep an owner alive.
        recorder.observe(semconv.EVENT_LAST_AGE, labels, lambda: _age(reference(), clock), owner=self)

    def apply(self, events: Iterable[Event]) -> int:
        """Takes over events, in their order; returns how many blocks were removed that were not there."""
        places, missing = self._places, 0
        for event in events:
            kind = event.kind
            try:
                place = places[event.medium]
            except KeyError:
                place = self._place(event.medium)
            if kind == _STORED:
                hashes = event.block_hashes
                book = place.book or self._open(place)
                book.store(hashes)
                place.stored.events.value += 1
                place.stored.blocks.value += len(hashes)
                size = event.block_size
                if size != place.block_size and size:
                    place.block_size = size
                    self.resize(tier(place.named) or Tier.UNKNOWN, size)
            elif kind == _REMOVED:
                hashes = event.block_hashes
                if event.medium is None:
                    missing += self._ledger.remove(hashes)
                else:
                    missing += (place.book or self._open(place)).remove(hashes)
                place.removed.events.value += 1
                place.removed.blocks.value += len(hashes)
            else:
                if kind == EventType.ALL_BLOCKS_CLEARED:
                    self._ledger.cleared()
                self._cells[kind, place.named].events.value += 1
        if missing:
            self._recorder.accounting_error(Reason.UNKNOWN_REMOVE, missing)
        self._ledger.settle()
        return missing

    def restore(self, events: Iterable[Event]) -> None:
        """Books events that were counted when they came for the first time, after the books were emptied."""
        ledger = self._ledger
        for event in events:
            named = medium(event.medium)
            if event.kind == _STORED:
                ledger.book(named).store(event.block_hashes)
            elif event.kind == _REMOVED and event.medium is None:
                ledger.remove(event.block_hashes)
            elif event.kind == _REMOVED:
                ledger.book(named).remove(event.block_hashes)
            elif event.kind == EventType.ALL_BLOCKS_CLEARED:
                ledger.cleared()
        ledger.settle()

    def count(self, events: Iterable[Event]) -> int:
        """Counts events whose blocks are in no book; returns how many blocks they store."""
        stored = 0
        for event in events:
            cells = self._cells[event.kind, medium(event.medium)]
            cells.events.value += 1
            if event.kind in (_STORED, _REMOVED):
                cells.blocks.value += len(event.block_hashes)
                stored += len(event.block_hashes) if event.kind == _STORED else 0
        return stored

    def _place(self, spelling: str | None) -> _Place:
        named = medium(spelling)
        place = self._by_medium.get(named)
        if place is None:
            place = self._by_medium[named] = _Place(named, self._cells[_STORED, named], self._cells[_REMOVED, named])
        if len(self._places) < _SPELLINGS:
            self._places[spelling] = place
        return place

    def _open(self, place: _Place) -> Book:
        book = place.book = self._ledger.book(place.named)
        return book

    def resize(self, where: str, size: int) -> None:
        """Takes over how many tokens the blocks in a tier have; 0 and what is no size say nothing."""
        if not 0 < size <= LARGEST_BLOCK:
            return
        level = self._sizes.get(where)
        if level is None:
            level = self._recorder.level(semconv.BLOCK_SIZE, {**self.labels, semconv.KVCACHE_TIER: where})
            self._sizes[where] = level
        elif level.value not in (None, size):
            self._resized(where, int(level.value or 0), size)
        level.set(size)

    def count_copies(self, copies: bool) -> None:
        """Changes whether copies count; see `Ledger.count_copies`."""
        self._ledger.count_copies(copies)
        for place in self._by_medium.values():
            place.book = None

    def clear_device_only(self) -> None:
        """Says that "all blocks cleared" means the device's alone."""
        self._ledger.clears_device_only = True

    def empty(self) -> None:
        """Empties the books, since the publisher has started again; the rows stay, at zero."""
        self._ledger.empty()
        self._ledger.settle()

    def blocks(self) -> dict[str, int]:
        """Returns how many blocks there are, by medium."""
        return {medium: len(book.blocks) for medium, book in self._ledger.books.items()}

    def fit(self) -> None:
        """Gives memory back that the books do not need; see `Book.fit`."""
        self._ledger.fit()

    def forget(self, medium: str) -> None:
        """Empties one book, if there is one, since there is no room for it."""
        if (book := self._ledger.books.get(medium)) is not None:
            book.clear()
            self._ledger.settle()

    def close(self) -> tuple[int, bool]:
        """Ends the rows; returns how many blocks there were, and whether the rows had said so."""
        blocks, agreed = self._ledger.total(), self._ledger.agrees()
        self._ledger.close()
        for level in self._sizes.values():
            level.set(None)
        self.heard = None
        return blocks, agreed


def _age(owner: Owner | None, clock: Callable[[], float]) -> float | None:
    if owner is None or (heard := owner.heard) is None:
        return None
    return max(0.0, clock() - heard)
