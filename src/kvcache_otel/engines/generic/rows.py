"""All rows of one cache, made from what was declared about it."""

from __future__ import annotations

import logging
import operator
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from kvcache_otel import semconv
from kvcache_otel.engines.generic import faults
from kvcache_otel.engines.generic.prefetches import PrefetchBooks
from kvcache_otel.record.labels import declared, printable
from kvcache_otel.record.outside import let_through
from kvcache_otel.record.probe import CacheProbe
from kvcache_otel.record.recorder import Recorder
from kvcache_otel.record.timing import DEADLINE_S, check_deadline
from kvcache_otel.record.transfers import Transfers
from kvcache_otel.semconv import Reason, TimingSource

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcache_otel.events.published import PublishedBooks
    from kvcache_otel.identity import Identity
    from kvcache_otel.record.cells import Counter

_logger = logging.getLogger(__name__)

# Different things to be said of one cache.
SAID = 16

# A pool, or several of them.
Pools = str | tuple[str, ...] | list[str]


class Tiers:
    """The tiers of one cache and their pools, as declared.

    Attributes:
        pools: The pools of each tier.
        names: The engine's own names of secondary tiers.
    """

    def __init__(self, tiers: Mapping[str, Pools], names: Mapping[str, str]) -> None:
        """Args:
        tiers: The pools of each tier, by the tier.
        names: The engine's own name of a secondary tier, by the tier.

        Raises:
            ValueError: The catalogue does not have a tier or a pool, or a tier has no pool, or there is none.
            TypeError: Something is not what it should be.
        """
        faults.mapping("tiers", tiers, '{"device": "kv"}')
        if not tiers:
            raise ValueError('no tier is declared: say which there are, as in tiers={"device": "kv", "host": "kv"}')
        self.pools: dict[str, tuple[str, ...]] = {}
        for tier, pools in tiers.items():
            if tier == semconv.Tier.NONE:
                raise ValueError("the tier 'none' is for what no tier served: it has no pools")
            declared(semconv.KVCACHE_TIER, tier, but=semconv.Tier.NONE)
            several = faults.names(f"the pools of the {tier} tier", pools)
            if not several:
                raise ValueError(f"the tier {tier!r} has no pool: name one, as 'kv'")
            self.pools[tier] = tuple(declared(semconv.KVCACHE_POOL, pool) for pool in several)
        self.names = dict(faults.mapping("names", names, '{"disk": "file"}'))
        for tier, name in self.names.items():
            self.of(tier, "names")
            faults.text(f"names: what {tier} is called", name)

    def of(self, tier: str, what: str) -> tuple[str, ...]:
        """Returns the pools of a tier.

        Args:
            tier: The tier.
            what: Who asks, for the error.

        Raises:
            ValueError: It was not declared.
        """
        if not isinstance(tier, str) or tier not in self.pools:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"{what}: the tier {printable(tier)!r} was not declared; {', '.join(self.pools)} were")
        return self.pools[tier]

    def check_pools(self, tier: str, what: str, tokens: object) -> None:
        """Looks at tokens that are always so: by pools of a tier, where they are by pool.

        Raises:
            ValueError: One of these pools was not declared.
        """
        pools = self.of(tier, what)
        for pool in cast("Mapping[object, Any]", tokens) if isinstance(tokens, Mapping) else ():
            if pool not in pools:
                said = f"the pool {printable(pool)!r} of the {tier} tier was not declared"
                raise ValueError(f"{what}: {said}; {', '.join(pools)} {'was' if len(pools) == 1 else 'were'}")

    def name(self, *tiers: str) -> str | None:
        """Returns the engine's own name of the first of some tiers that has one."""
        return next((self.names[tier] for tier in tiers if tier in self.names), None)


class Rows:
    """What the facts of one cache write to, from one object or several. What several facts share is made once.

    Attributes:
        probe: The cache's probe.
        tiers: Its tiers.
        deadline_s: How long a transfer may take until it is said that it does not end, in seconds.
        published: What its events add up to, as far as all of them are told.
        found_done: The directions whose copies with a key are found done by a `CopiesDone`.
    """

    def __init__(self, probe: CacheProbe, tiers: Tiers, deadline_s: float) -> None:
        """Args:
        probe: The cache's probe.
        tiers: Its tiers.
        deadline_s: How long a transfer may take until it is said that it does not end, in seconds.

        Raises:
            ValueError: That is no number of seconds.
        """
        check_deadline(deadline_s)
        self.probe = probe
        self.tiers = tiers
        self.deadline_s = deadline_s
        self.published: list[PublishedBooks] = []
        self.found_done: set[tuple[str, str]] = set()
        self._transfers: dict[tuple[str, str], Transfers] = {}
        self._prefetches: dict[str, PrefetchBooks] = {}
        self._said: set[str] = set()
        self._keepers = 0

    def transfers(
        self,
        source: str,
        destination: str,
        *,
        timing: str = TimingSource.WALL_CLOCK,
        queued: bool = False,
        make_event: Callable[[], Any] | None = None,
    ) -> Transfers:
        """Returns the transfers of one direction; see `Transfers`. The first that asks says how most are timed.

        Raises:
            ValueError: A tier was not declared, or both are the same, or events of one direction are made in two ways.
            TypeError: What makes events cannot be called.
        """
        pools = self.tiers.of(source, "source")
        self.tiers.of(destination, "destination")
        transfers = self._transfers.get((source, destination))
        if transfers is None:
            transfers = self._transfers[source, destination] = Transfers(
                self.probe,
                source,
                destination,
                pools=pools,
                name=self.tiers.name(source, destination),
                timing=timing,
                queued=queued,
                make_event=make_event,
                deadline_s=self.deadline_s,
            )
        elif make_event is not None:
            transfers.make_events_by(make_event)
        return transfers

    @property
    def directions(self) -> set[tuple[str, str]]:
        """The directions that there are transfers of."""
        return set(self._transfers)

    def prefetches(self, tier: str) -> PrefetchBooks:
        """Returns the books of prefetches from one storage tier.

        Raises:
            ValueError: The tier was not declared.
        """
        self.tiers.of(tier, "a prefetch")
        books = self._prefetches.get(tier)
        if books is None:
            books = self._prefetches[tier] = PrefetchBooks(self.probe, tier, self.tiers.name(tier))
        return books

    def by_pool(self, tier: str, counter: Callable[[str, str], Counter]) -> Callable[[Any], int]:
        """Returns what adds tokens to the counters of a tier's pools, and returns how many there were.

        Args:
            tier: The tier.
            counter: Gives the counter of a tier and a pool.

        Raises:
            ValueError: The tier was not declared.
        """
        counters = {pool: counter(tier, pool) for pool in self.tiers.of(tier, "a fact")}
        first = next(iter(counters.values()))

        def add(tokens: Any) -> int:
            if not isinstance(tokens, Mapping):
                amount = operator.index(tokens)
                first.add(amount)
                return amount
            by_pool = cast("Mapping[str, Any]", tokens)
            amounts = [(pool, operator.index(count)) for pool, count in by_pool.items()]  # All of them, or none.
            total = 0
            for pool, amount in amounts:
                if (known := counters.get(pool)) is None:
                    self.undeclared(f"the pool {printable(pool)!r} of the {tier} tier")
                    continue
                known.add(amount)
                total += amount
            return total

        return add

    def undeclared(self, what: str) -> None:
        """Counts a measurement of what was not declared, and says so once."""
        self.probe.lost(Reason.OTHER)
        self.say(f"{what} was not declared; see kvcache.telemetry.dropped")

    def say(self, words: str) -> None:
        """Says something once, and no more than a few things."""
        if words not in self._said and len(self._said) < SAID:
            self._said.add(words)
            try:
                _logger.warning("kvcache: %s: %s", self.probe.identity.cache_type, words)
            except Exception as error:  # A log that raises is no affair of the engine's.
                let_through(error)

    def keep(self) -> None:
        """Says that one more object tells of this cache."""
        self._keepers += 1

    def release(self) -> None:
        """Says that one of them does not any more. After the last, what is about now ends; what was counted stays."""
        self._keepers -= 1
        if self._keepers <= 0:
            for transfers in self._transfers.values():
                transfers.close()
            for prefetches in self._prefetches.values():
                prefetches.unknown()
            self.end_published()

    def end_published(self) -> None:
        """Ends the rows of what is resident by the events: not all of them are told any more."""
        for books in self.published:
            books.forget()
        self.published.clear()


def untold(identity: Identity, tiers: Tiers, deadline_s: float = DEADLINE_S) -> Rows:
    """Returns rows that nobody reads.

    Raises:
        ValueError: That is no number of seconds.
    """
    return Rows(CacheProbe(Recorder(identity), identity), tiers, deadline_s)
