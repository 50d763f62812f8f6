"""Facts about what is evicted, lost, not stored or refused."""

from __future__ import annotations

import operator
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvcache_otel import semconv
from kvcache_otel.engines.generic.facts import Fact, caught, check_reasons
from kvcache_otel.record.labels import printable
from kvcache_otel.semconv import Reason, Tier

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcache_otel.engines.generic.call import Call, Given, Read
    from kvcache_otel.engines.generic.facts import Begin, Tell
    from kvcache_otel.engines.generic.rows import Rows
    from kvcache_otel.engines.hooks import Finish


@dataclass(frozen=True, kw_only=True)
class Eviction(Fact):
    """An eviction pass. One that frees something is timed.

    Attributes:
        tier: The tier whose slots it frees.
        tokens: Tokens freed: by pool, or a number of the tier's first pool.
    """

    REQUIRED = ("tokens",)
    WHAT = "what is evicted from {tier}"

    tier: str = Tier.DEVICE
    tokens: Given = None

    def begin(self, rows: Rows) -> Begin:
        rows.tiers.check_pools(self.tier, "Eviction: tokens", self.tokens)
        add = rows.by_pool(self.tier, rows.probe.evictions)
        passes = rows.probe.eviction_passes(self.tier)
        happened, tokens = self.happened(), self.reader("tokens")

        def begun(call: Call) -> Finish:
            began = time.perf_counter()

            def ended(result: Any, raised: BaseException | None) -> None:
                took = time.perf_counter() - began
                try:
                    if raised is not None or (happened is not None and not happened(result, call)):
                        return
                    if add(tokens(result, call)) > 0:
                        passes.record(took)
                except BaseException as error:
                    raise caught(error) from None

            return ended

        return begun


@dataclass(frozen=True, kw_only=True)
class Drop(Fact):
    """The destruction of KV of which no copy is left in a lower tier.

    Attributes:
        tier: The tier that loses it.
        tokens: Tokens destroyed: by pool, or a number of the tier's first pool.
        reason: Why.
        reasons: The reasons that there can be; their rows exist from the start.
    """

    REQUIRED = ("tokens", "reason")
    WHAT = "what {tier} loses for good"

    tier: str = Tier.DEVICE
    tokens: Given = None
    reason: Read | str | None = None
    reasons: tuple[str, ...] = (Reason.HOST_PRESSURE, Reason.WRITE_THROUGH_UNBACKED_EVICTION, Reason.POOL_FULL)

    def tell(self, rows: Rows) -> Tell:
        rows.tiers.check_pools(self.tier, "Drop: tokens", self.tokens)
        reasons = self.reasons if self.reason is None or callable(self.reason) else (self.reason,)
        adds = {
            reason: rows.by_pool(self.tier, lambda tier, pool, reason=reason: rows.probe.dropped(tier, pool, reason))
            for reason in (*check_reasons(semconv.DROPPED_TOKENS, reasons), Reason.OTHER)
        }
        happened, tokens, why = self.happened(), self.reader("tokens"), self.reader("reason")

        def dropped(result: Any, call: Call) -> None:
            if happened is None or happened(result, call):
                add = adds.get(reason := why(result, call))
                if add is None:
                    rows.say(f"the reason {printable(reason)!r} was not declared, and counts as 'other'")
                    add = adds[Reason.OTHER]
                add(tokens(result, call))

        return dropped


@dataclass(frozen=True, kw_only=True)
class SkippedStore(Fact):
    """Blocks that were not written to a lower tier.

    Attributes:
        tier: The lower tier.
        blocks: How many.
        reason: Why: ``backpressure``, ``no_space``, ``already_stored`` or ``other``; always the same.
    """

    WHAT = "what is not written to {tier}: {reason}"

    tier: str
    blocks: Given
    reason: str

    def tell(self, rows: Rows) -> Tell:
        rows.tiers.of(self.tier, "a skipped store")
        (reason,) = check_reasons(semconv.STORE_SKIPPED_BLOCKS, (self.reason,))
        counter = rows.probe.skipped_stores(self.tier, reason, rows.tiers.name(self.tier))
        return _counting(self, counter.add, self.reader("blocks"))


@dataclass(frozen=True, kw_only=True)
class AllocationFailure(Fact):
    """A tier that could not give the space that was asked for.

    Attributes:
        tier: The tier.
        reason: What the space was for: ``store``, ``promotion``, ``load`` or ``other``; always the same.
        times: How often, in one call.
    """

    WHAT = "where {tier} had no space: {reason}"

    tier: str
    reason: str
    times: Given = 1

    def tell(self, rows: Rows) -> Tell:
        rows.tiers.of(self.tier, "an allocation failure")
        (reason,) = check_reasons(semconv.ALLOCATION_FAILURES, (self.reason,))
        return _counting(self, rows.probe.allocation_failures(self.tier, reason).add, self.reader("times"))


def _counting(fact: Fact, add: Callable[[int], None], amount: Callable[[Any, Call], Any]) -> Tell:
    happened = fact.happened()

    def counted(result: Any, call: Call) -> None:
        if happened is None or happened(result, call):
            add(operator.index(amount(result, call)))

    return counted
