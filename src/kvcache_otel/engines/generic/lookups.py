"""Facts about where prompts come from: admissions, and prefetches from storage."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from kvcache_otel import semconv
from kvcache_otel.engines.generic.facts import Fact, check_reasons
from kvcache_otel.record.labels import printable
from kvcache_otel.semconv import Reason, Tier

if TYPE_CHECKING:
    from kvcache_otel.engines.generic.call import Call, Given
    from kvcache_otel.engines.generic.facts import Tell
    from kvcache_otel.engines.generic.rows import Rows


@dataclass(frozen=True, kw_only=True)
class Prefetch(Fact):
    """A prefetch that asked storage, whatever becomes of it: see `HostInsert`.

    Attributes:
        tier: The storage tier.
        hit: Tokens that storage said it had.
    """

    REQUIRED = ("hit",)
    WHAT = "what storage says it has: {tier}"

    tier: str = Tier.DISK
    hit: Given = None

    def lost(self, rows: Rows, *, aside: bool) -> None:
        rows.prefetches(self.tier).unknown()

    def tell(self, rows: Rows) -> Tell:
        books = rows.prefetches(self.tier)
        books.tells_hits()
        happened, hit = self.happened(), self.reader("hit")

        def asked(result: Any, call: Call) -> None:
            if happened is None or happened(result, call):
                books.hit(operator.index(hit(result, call)))

        return asked


@dataclass(frozen=True, kw_only=True)
class HostInsert(Fact):
    """The end of a prefetch: what it brought goes into the host tier, or does not. hit = fulfilled + unfulfilled.

    Attributes:
        tier: The storage tier that it came from.
        loaded: Tokens that arrived in host memory.
        fulfilled: Of the hit, tokens that became usable prefix.
        unfulfilled: Of the hit, tokens that did not, by reason.
        reasons: The reasons that there can be; their rows exist from the start.
    """

    REQUIRED = ("loaded", "fulfilled", "unfulfilled")
    WHAT = "what becomes of prefetches from {tier}"

    tier: str = Tier.DISK
    loaded: Given = None
    fulfilled: Given = None
    unfulfilled: Given = None
    reasons: tuple[str, ...] = ()

    def lost(self, rows: Rows, *, aside: bool) -> None:
        rows.prefetches(self.tier).unknown()

    def tell(self, rows: Rows) -> Tell:
        books = rows.prefetches(self.tier)
        reasons = check_reasons(semconv.PREFETCH_UNFULFILLED_TOKENS, self.reasons)
        if isinstance(given := self.unfulfilled, Mapping):  # Always so, and thus declared by that.
            reasons += check_reasons(semconv.PREFETCH_UNFULFILLED_TOKENS, cast("Mapping[str, Any]", given))
        books.tells_ends(reasons)
        happened = self.happened()
        loaded, fulfilled, unfulfilled = map(self.reader, self.REQUIRED)

        def inserted(result: Any, call: Call) -> None:
            if happened is not None and not happened(result, call):
                return
            arrived, usable = operator.index(loaded(result, call)), operator.index(fulfilled(result, call))
            lost: Mapping[str, Any] = unfulfilled(result, call) or {}
            by_reason = {reason: operator.index(tokens) for reason, tokens in lost.items()}
            for reason in books.ended(arrived, usable, by_reason):
                rows.say(f"the reason {printable(reason)!r} was not declared, and counts as 'other'")

        return inserted


@dataclass(frozen=True, kw_only=True)
class Admission(Fact):
    """The admission of a request, once for each: what the tiers served of its prompt, and what is to be computed.

    Attributes:
        prompt: Tokens of the prompt.
        served: Tokens by the tier that served them.
    """

    REQUIRED = ("prompt", "served")
    WHAT = "which tier served a prompt"

    prompt: Given = None
    served: Given = None

    def tell(self, rows: Rows) -> Tell:
        tiers = frozenset(rows.tiers.pools)
        always = self.served
        for tier in cast("Mapping[str, Any]", always) if isinstance(always, Mapping) else ():
            rows.tiers.of(tier, "Admission: served")
        admitted = rows.probe.served(*tiers)
        happened, prompt, served = self.happened(), self.reader("prompt"), self.reader("served")

        def told(result: Any, call: Call) -> None:
            if happened is not None and not happened(result, call):
                return
            shares: dict[str, int] = {}
            for tier, share in served(result, call).items():
                known = tier
                if tier not in tiers:  # It was served, so the sum over tiers must have it.
                    rows.probe.accounting_error(Reason.OTHER)
                    rows.say(f"the tier {printable(tier)!r} was not declared, and counts as 'unknown'")
                    known = Tier.UNKNOWN
                shares[known] = shares.get(known, 0) + operator.index(share)
            admitted.prompt(operator.index(prompt(result, call)), shares)

        return told
