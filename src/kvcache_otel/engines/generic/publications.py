"""Facts about KV events as they leave a cache of one's own: what a router could know of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvcache_otel.engines.generic.facts import Fact, kept
from kvcache_otel.events.published import PublishedBooks

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvcache_otel.engines.generic.call import Call, Given
    from kvcache_otel.engines.generic.facts import Tell
    from kvcache_otel.engines.generic.rows import Rows


@dataclass(frozen=True, kw_only=True)
class Publication(Fact):
    """KV events on their way to whoever subscribes to them.

    They are read as vLLM's and SGLang's are: objects of classes that are called ``BlockStored``, ``BlockRemoved`` or
    ``AllBlocksCleared``, the first two with the attributes ``block_hashes`` and ``medium``.

    Attributes:
        events: The events, in their order.
        tiers: The tiers that they are about, whose rows exist from the start; None for all that were declared.
        copies: Whether each copy of a block is announced and removed by itself, as vLLM does.
        clears_device_only: Whether ``AllBlocksCleared`` is about the device alone.
    """

    REQUIRED = ("events",)
    WHAT = "what is published"

    events: Given = None
    tiers: tuple[str, ...] | None = None
    copies: bool = False
    clears_device_only: bool = False

    def lost(self, rows: Rows, *, aside: bool) -> None:
        rows.end_published()

    def tell(self, rows: Rows) -> Tell:
        tiers = tuple(rows.tiers.pools) if self.tiers is None else self.tiers
        for tier in tiers:
            rows.tiers.of(tier, "a publication")
        books = PublishedBooks(rows.probe, *tiers, copies=self.copies, clears_device_only=self.clears_device_only)
        rows.published.append(books)
        happened, events = self.happened(), kept(self.reader("events"))

        def published(result: Any, call: Call) -> None:
            if (happened is None or happened(result, call)) and books in rows.published:
                left: Iterable[Any] = events(result, call)
                books.apply(left)

        return published
