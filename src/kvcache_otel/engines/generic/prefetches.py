"""What becomes of the tokens that storage said it had: hit = fulfilled + unfulfilled + outstanding."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from kvcache_otel import semconv
from kvcache_otel.record.cells import Counter
from kvcache_otel.semconv import Reason

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kvcache_otel.record.probe import CacheProbe


class PrefetchBooks:
    """The prefetches of one cache from one storage tier. Rows exist as far as somebody tells of them.

    What is outstanding is the difference of two sums that only go up, so that any number of threads may tell.
    """

    def __init__(self, probe: CacheProbe, tier: str, name: str | None) -> None:
        """Args:
        probe: The cache's probe.
        tier: The storage tier.
        name: The engine's own name of it, where there is one.
        """
        self._probe = probe
        self._labels: dict[str, str | int] = {semconv.KVCACHE_TIER: tier}
        if name is not None:
            self._labels[semconv.KVCACHE_TIER_NAME] = name
        self._asked, self._settled = Counter(lambda _: None), Counter(lambda _: None)
        self._hit: Counter | None = None
        self._loaded: Counter | None = None
        self._fulfilled: Counter | None = None
        self._unfulfilled: dict[str, Counter] = {}
        self._known = self._below = False

    def tells_hits(self) -> None:
        """Says that hits will be told."""
        if self._hit is None:
            self._hit = self._probe.counter(semconv.PREFETCH_HIT_TOKENS, self._labels)
            self._observe()

    def tells_ends(self, reasons: Iterable[str]) -> None:
        """Says that it will be told what has become of them, and for which reasons they may stay unfulfilled."""
        for reason in (*reasons, Reason.OTHER):
            labels = {**self._labels, semconv.KVCACHE_REASON: reason}
            self._unfulfilled[reason] = self._probe.counter(semconv.PREFETCH_UNFULFILLED_TOKENS, labels)
        if self._loaded is None:
            self._loaded = self._probe.counter(semconv.PREFETCH_LOADED_TOKENS, self._labels)
            self._fulfilled = self._probe.counter(semconv.PREFETCH_FULFILLED_TOKENS, self._labels)
            self._observe()

    def hit(self, tokens: int) -> None:
        """Tells what storage said it had."""
        if self._hit is not None:
            changes = self._probe.changes
            try:
                changes.begun += 1
                self._asked.add(max(tokens, 0))  # First: it is never seen to be settled before it was asked for.
                self._hit.add(tokens)
            finally:
                changes.done += 1

    def ended(self, loaded: int, fulfilled: int, unfulfilled: Mapping[str, int]) -> list[str]:
        """Tells what has become of it; returns the reasons that were not declared, and count as ``other``."""
        unknown: list[str] = []
        settled = max(fulfilled, 0)
        changes = self._probe.changes
        try:
            changes.begun += 1
            for reason, tokens in unfulfilled.items():
                if (counter := self._unfulfilled.get(reason)) is None:
                    unknown.append(reason)
                    counter = self._unfulfilled[Reason.OTHER]
                counter.add(tokens)
                settled += max(tokens, 0)
            if self._loaded is not None and self._fulfilled is not None:
                self._loaded.add(loaded)
                self._fulfilled.add(fulfilled)
            self._settled.add(settled)
        finally:
            changes.done += 1
        return unknown

    def unknown(self) -> None:
        """Ends the row of what is outstanding: not all that changes it is told any more."""
        self._known = False

    def _observe(self) -> None:
        if self._hit is None or self._loaded is None:
            return
        self._known = True
        this = weakref.ref(self)

        def outstanding() -> int | float | None:
            books = this()
            return None if books is None else books.outstanding()

        self._probe.observe(semconv.PREFETCH_OUTSTANDING_TOKENS, self._labels, outstanding, owner=self)

    def outstanding(self) -> int | float | None:
        """Returns the tokens of the hit that are not settled yet; None where that is not known."""
        if not self._known:
            return None
        left = self._asked.value - self._settled.value
        if left >= 0:
            self._below = False
            return left
        if not self._below:
            self._below = True
            self._probe.accounting_error(Reason.UNDERFLOW)
        return 0
