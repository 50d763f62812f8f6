"""What an engine publishes about its blocks, added up in its own process, on the thread that publishes."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, cast

from kvcache_otel import semconv
from kvcache_otel.events.counts import event_cells
from kvcache_otel.events.ledger import Ledger
from kvcache_otel.events.medium import medium
from kvcache_otel.record.labels import printable
from kvcache_otel.semconv import EventMedium, EventType, Reason, View

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence

    from kvcache_otel.record.cells import Counter
    from kvcache_otel.record.probe import CacheProbe

    _Known = tuple[Callable[[Sequence[Hashable]], int | None], Counter, Counter]

_logger = logging.getLogger(__name__)

_TYPES: Mapping[str, str] = {
    "BlockStored": EventType.BLOCK_STORED,
    "BlockRemoved": EventType.BLOCK_REMOVED,
    "AllBlocksCleared": EventType.ALL_BLOCKS_CLEARED,
}

# Kinds of events, and spellings of media of each, that are known by sight; an engine has a handful.
_MOST_KNOWN = 16

# Collections too, but of no hashes.
_NO_HASHES = (str, bytes, bytearray, memoryview, Mapping)


class PublishedBooks:
    """What an engine's own events add up to, tier by tier. Whoever publishes keeps it: the rows end with it.

    Nothing is guessed: what was stored without a medium, or in one that is not known, is in no tier and has no row. It
    is remembered, so that its removal contradicts nothing.
    """

    def __init__(
        self,
        probe: CacheProbe,
        *tiers: str,
        copies: bool = False,
        clears_device_only: bool = False,
        holders: bool = False,
    ) -> None:
        """Args:
        probe: The publishing cache's probe.
        tiers: The tiers whose rows are there from the start, at zero; another gets its row when an event names it.
        copies: Whether each copy of a block is announced and removed by itself, as vLLM does. Otherwise a repeated
            store changes nothing and one removal removes the block, as in SGLang.
        clears_device_only: Whether "all blocks cleared" means the device's alone. Otherwise it empties every tier.
        holders: Whether a block is announced again for each who holds it, and removed again for each, as SGLang does
            where prompts have an extra key: then a second removal contradicts nothing.
        """
        self._probe = probe
        self._said = False
        self._ledger = Ledger(
            lambda where: probe.resident(where, View.PUBLISHED),
            *tiers,
            copies=copies,
            clears_device_only=clears_device_only,
            holders=holders,
        )
        self._cells = event_cells(probe.counter, {semconv.KVCACHE_VIEW: View.PUBLISHED})
        # By class and spelling of the medium: what takes an event over, and where it is counted.
        self._known: dict[type, dict[str, _Known]] = {}

    def apply(self, events: Iterable[Any]) -> None:
        """Takes over what is about to be published. An event that cannot be read loses only itself.

        Args:
            events: In the order of publishing; read once, and left as they are.
        """
        known = self._known
        for event in events:
            # On the scheduler's thread there is no time for more than this.
            try:
                take, times, blocks = known[type(event)][event.medium]
                hashes: list[Hashable] = event.block_hashes
                if type(hashes) is not list:  # An iterator must not be used up here.
                    raise TypeError(type(hashes))
                hash(tuple(hashes))
            except Exception:  # Whatever is wrong with it is seen by who looks at it more closely.
                self._look_at(event)
                continue
            times.value += 1
            try:
                missing = take(hashes)
            except Exception as error:  # Hashes that cannot be compared.
                self._unreadable(event, error)
                continue
            blocks.value += len(hashes)
            if missing:
                self._probe.accounting_error(Reason.UNKNOWN_REMOVE, missing)
        self._ledger.settle()

    def forget(self) -> None:
        """Empties the books and ends the rows, until events are applied again."""
        self._ledger.empty()
        self._ledger.hide()

    def _look_at(self, event: Any) -> None:
        kind, named, blocks = EventType.OTHER, EventMedium.UNKNOWN, 0
        try:
            kind = _TYPES.get(type(event).__name__) or _inherited(event)
            named = medium(getattr(event, "medium", None))
            blocks = self._take(event, kind, named)
        except Exception as error:
            self._unreadable(event, error)
        else:
            self._remember(event, kind, named)
        cells = self._cells[kind, named]
        cells.events.add(1)
        cells.blocks.add(blocks)

    def _remember(self, event: Any, kind: str, named: str) -> None:
        """Knows such events by sight from now on, if nothing else of them counts than their hashes."""
        if kind not in (EventType.BLOCK_STORED, EventType.BLOCK_REMOVED):
            return
        if hasattr(event, "group_idx") or hasattr(event, "__dict__"):  # This one has a group, or the next may have.
            return
        of = cast("type[Any]", type(event))
        spelling = getattr(event, "medium", None)
        spellings = self._known.get(of, {})
        if isinstance(spelling, str) and max(len(self._known), len(spellings)) < _MOST_KNOWN:
            book = self._ledger.book(named)
            take = book.store if kind == EventType.BLOCK_STORED else book.remove
            cells = self._cells[kind, named]
            spellings[spelling] = take, cells.events, cells.blocks
            self._known[of] = spellings

    def _take(self, event: Any, kind: str, named: str) -> int:
        """Takes over one event, the whole of it or nothing, and returns how many blocks it is about."""
        if kind == EventType.BLOCK_STORED:
            hashes = _hashes(event)
            self._ledger.book(named).store(hashes)
        elif kind == EventType.BLOCK_REMOVED:
            hashes = _hashes(event)
            missing = (
                self._ledger.remove(hashes)
                if named == EventMedium.UNTAGGED
                else self._ledger.book(named).remove(hashes)
            )
            if missing:
                self._probe.accounting_error(Reason.UNKNOWN_REMOVE, missing)
        else:
            if kind == EventType.ALL_BLOCKS_CLEARED:
                self._ledger.cleared()
            return 0
        return len(hashes)

    def _unreadable(self, event: object, error: Exception) -> None:
        self._probe.accounting_error(Reason.OTHER)
        if not self._said:
            self._said = True
            what = f"{type(error).__name__}: {printable(error)}"
            _logger.warning("kvcache: a KV event was not read (%s): %r", printable(type(event)), what)


def _inherited(event: object) -> str:
    # SGLang 0.5.18 and 0.5.19 publish a BlockStoredWithMetadata where a prompt was salted.
    kinds = (_TYPES.get(base.__name__) for base in type(event).__mro__)
    return next((kind for kind in kinds if kind is not None), EventType.OTHER)


def _hashes(event: Any) -> tuple[Hashable, ...]:
    """Returns the hashes that an event carries; raises where there are none, before anything has changed."""
    hashes = event.block_hashes
    if not _can_carry(hashes):
        raise TypeError(f"block hashes in a {type(hashes).__name__}")
    taken = tuple(hashes)
    hash(taken)
    # Groups of layers hold blocks of their own under the same hash. Those of the first one go by their hash alone.
    group: int | None = getattr(event, "group_idx", None)
    return tuple((block, group) for block in taken) if group else taken


def _can_carry(hashes: object) -> bool:
    # An iterator cannot: read here, it would be empty for the engine.
    return type(hashes) is list or (isinstance(hashes, Collection) and not isinstance(hashes, _NO_HASHES))
