"""The probe: the engine-neutral vocabulary of facts about a KV cache.

An adapter asks its probe for the rows that its engine can produce when a cache is built; from then on they exist, at
zero. In the engine's hot path it calls the methods of those rows: each is one call that writes a cell.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Protocol

from kvcache_otel import semconv
from kvcache_otel.semconv import LookupMode, LookupResult, Reason, State, TimingSource

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcache_otel.identity import Identity
    from kvcache_otel.record.cells import Counter, Histogram, Level
    from kvcache_otel.record.recorder import Recorder
    from kvcache_otel.record.timing import DeviceEvent
    from kvcache_otel.spec import MetricSpec

Labels = dict[str, str | int]

# As in `cells`: what goes past them must be checked here.
_TOO_MUCH = 2**63


class CacheProbe:
    """What an adapter tells about one cache of one rank.

    Attributes:
        harvester: Where event pairs wait for their device; `Route.timed` hands them over.
        doubts: Counts what there is to doubt about this cache's numbers.
        changes: Around changes of rows that add up.
    """

    __slots__ = ("_recorder", "changes", "doubts", "harvester", "identity")

    def __init__(self, recorder: Recorder, identity: Identity) -> None:
        """Args:
        recorder: The process's recorder.
        identity: The engine, cache and rank that every row of this probe carries.
        """
        self._recorder = recorder
        self.harvester = recorder.harvester
        self.changes = recorder.changes
        self.identity = identity
        self.doubts = recorder.doubts(identity)

    # -- looking up ------------------------------------------------------------------------------------------------

    def served(self, *tiers: str) -> Served:
        """Returns the rows for the prompt tokens of admitted requests, by the tier that served them.

        Args:
            tiers: The tiers that can serve a prompt in this cache. ``none`` (computed) is always among the rows.
        """
        return Served(self, tiers)

    def lookups(self, tier: str, name: str | None = None) -> Lookups:
        """Returns the rows for block lookups in one tier."""
        return Lookups(self, _tier(tier, name))

    def request_lookups(self) -> RequestLookups:
        """Returns the rows for a request's lookup over all its blocks and tiers."""
        return RequestLookups(self)

    # -- moving ----------------------------------------------------------------------------------------------------

    def route(
        self, source: str, destination: str, *, name: str | None = None, timing: str = TimingSource.WALL_CLOCK
    ) -> Route:
        """Returns the rows for the transfers from one tier to another.

        Args:
            source: The tier that is read.
            destination: The tier that is written.
            name: The engine's own name of the secondary tier involved, where there is one.
            timing: Where the durations come from.
        """
        return Route(self, source, destination, name, timing)

    # -- losing ----------------------------------------------------------------------------------------------------

    def evictions(self, tier: str, pool: str) -> Counter:
        """Returns the counter of tokens whose slots eviction freed."""
        return self.counter(semconv.EVICTION_TOKENS, {semconv.KVCACHE_TIER: tier, semconv.KVCACHE_POOL: pool})

    def eviction_passes(self, tier: str) -> Histogram:
        """Returns the histogram of eviction passes, in seconds."""
        return self.histogram(semconv.EVICTION_DURATION, {semconv.KVCACHE_TIER: tier})

    def dropped(self, tier: str, pool: str, reason: str) -> Counter:
        """Returns the counter of tokens destroyed with no copy left in a lower tier."""
        labels: Labels = {semconv.KVCACHE_TIER: tier, semconv.KVCACHE_POOL: pool, semconv.KVCACHE_REASON: reason}
        return self.counter(semconv.DROPPED_TOKENS, labels)

    def skipped_stores(self, tier: str, reason: str, name: str | None = None) -> Counter:
        """Returns the counter of blocks that were not written to a lower tier."""
        return self.counter(semconv.STORE_SKIPPED_BLOCKS, {**_tier(tier, name), semconv.KVCACHE_REASON: reason})

    def allocation_failures(self, tier: str, reason: str) -> Counter:
        """Returns the counter of times that a tier could not give the space that was asked for."""
        return self.counter(semconv.ALLOCATION_FAILURES, {semconv.KVCACHE_TIER: tier, semconv.KVCACHE_REASON: reason})

    # -- prefetching -----------------------------------------------------------------------------------------------

    def prefetches(self, tier: str, name: str | None = None, *, reasons: tuple[str, ...] = ()) -> Prefetches:
        """Returns the rows for prefetches from one storage tier.

        Args:
            tier: The storage tier.
            name: The engine's own name of it, where there is one.
            reasons: Why a hit may stay unfulfilled in this engine; these rows exist from the start.
        """
        return Prefetches(self, _tier(tier, name), reasons)

    # -- holding ---------------------------------------------------------------------------------------------------

    def pool(self, tier: str, pool: str) -> Pool:
        """Returns the rows for what a pool holds and can hold."""
        return Pool(self, tier, pool)

    def resident(self, tier: str, view: str) -> Level:
        """Returns the level of distinct blocks in a tier, as one view of it has them."""
        return self.level(semconv.RESIDENT_BLOCKS, {semconv.KVCACHE_TIER: tier, semconv.KVCACHE_VIEW: view})

    def block_size(self, tier: str) -> Level:
        """Returns the level of tokens per block in a tier."""
        return self.level(semconv.BLOCK_SIZE, {semconv.KVCACHE_TIER: tier})

    def observe(
        self,
        spec: MetricSpec,
        labels: Labels,
        read: Callable[[], int | float | None],
        *,
        owner: object = None,
        forget: Callable[[], None] = lambda: None,
    ) -> None:
        """Adds a gauge row that is asked when it is collected; see `Recorder.observe`."""
        self._recorder.observe(spec, labels, read, owner=owner, identity=self.identity, forget=forget)

    def accounting_error(self, reason: str, times: int = 1) -> None:
        """Counts bookkeeping that contradicted itself, so many times."""
        self.doubts.accounting_error(reason, times)

    def gauge_failed(self, what: str, error: BaseException) -> None:
        """Counts a quantity that an engine would not tell, and says so once; see `Recorder.gauge_failed`."""
        self._recorder.gauge_failed(what, error, self.identity)

    def failed(self, hook: str, what: str, error: BaseException) -> None:
        """Counts an exception of ours that was caught, and says so once; see `Recorder.failed`."""
        self._recorder.failed(hook, what, error, self.identity)

    def lost(self, reason: str, times: int = 1) -> None:
        """Counts measurements that were given up."""
        self.doubts.lost(reason, times)

    # -- any metric of the catalogue -------------------------------------------------------------------------------

    def counter(self, spec: MetricSpec, labels: Labels) -> Counter:
        """Returns the counter of one series of any counter in the catalogue."""
        return self._recorder.counter(spec, labels, self.identity)

    def histogram(self, spec: MetricSpec, labels: Labels) -> Histogram:
        """Returns the histogram of one series of any histogram in the catalogue."""
        return self._recorder.histogram(spec, labels, self.identity)

    def level(self, spec: MetricSpec, labels: Labels) -> Level:
        """Returns a level of one series of any gauge in the catalogue."""
        return self._recorder.level(spec, labels, self.identity)


class Served:
    """Prompt tokens of admitted requests, by the tier that served them."""

    __slots__ = ("_by_tier", "_probe", "computed")

    def __init__(self, probe: CacheProbe, tiers: tuple[str, ...]) -> None:
        self._probe = probe
        self._by_tier: dict[str, Counter] = {}
        for tier in tiers:
            self.tier(tier)
        self.computed = self.tier(semconv.Tier.NONE)

    def tier(self, tier: str) -> Counter:
        """Returns the counter of tokens that one tier served."""
        counter = self._by_tier.get(tier)
        if counter is None:
            counter = self._by_tier[tier] = self._probe.counter(semconv.LOOKUP_TOKENS, {semconv.KVCACHE_TIER: tier})
        return counter

    def prompt(self, tokens: int, served: dict[str, int]) -> None:
        """Tells an admitted request, once: its prompt and what the tiers gave; the rest is computed.

        A share that a stale snapshot made negative counts as 0 and as one accounting error, and so does a computed
        share that the others leave no room for.

        Args:
            tokens: Length of the prompt.
            served: Tokens by tier.
        """
        computed = tokens
        for tier, share in served.items():
            self.tier(tier).add(share)
            if share > 0:
                computed -= share
        self.computed.add(computed)


class Lookups:
    """Block lookups in one tier: once per request, tier and block, nothing after the request was admitted.

    Attributes:
        hits: Blocks found.
        misses: Blocks not found.
        blocked: Seconds that a lookup blocked its caller.
        deferred: Seconds from the first "retry later" to the answer.
    """

    __slots__ = ("blocked", "deferred", "hits", "misses")

    def __init__(self, probe: CacheProbe, labels: Labels) -> None:
        result, mode = semconv.KVCACHE_LOOKUP_RESULT, semconv.KVCACHE_LOOKUP_MODE
        self.hits = probe.counter(semconv.LOOKUP_BLOCKS, {**labels, result: LookupResult.HIT})
        self.misses = probe.counter(semconv.LOOKUP_BLOCKS, {**labels, result: LookupResult.MISS})
        self.blocked = probe.histogram(semconv.LOOKUP_DURATION, {**labels, mode: LookupMode.SYNC})
        self.deferred = probe.histogram(semconv.LOOKUP_DURATION, {**labels, mode: LookupMode.ASYNC})

    def answered(self, queries: int, hits: int) -> None:
        """Tells of lookups that were answered, as an engine sums them: how many, and how many found their block."""
        if 0 <= hits <= queries < _TOO_MUCH:
            self.hits.value += hits
            self.misses.value += queries - hits
        else:  # Let the cells say what is wrong with it.
            self.hits.add(hits)
            self.misses.add(queries - hits)


class RequestLookups:
    """A request's lookup over all its blocks and tiers.

    Attributes:
        blocked: Seconds that the lookup blocked its caller.
        deferred: Seconds from the first deferral to the answer.
    """

    __slots__ = ("blocked", "deferred")

    def __init__(self, probe: CacheProbe) -> None:
        mode = semconv.KVCACHE_LOOKUP_MODE
        self.blocked = probe.histogram(semconv.LOOKUP_REQUEST_DURATION, {mode: LookupMode.SYNC})
        self.deferred = probe.histogram(semconv.LOOKUP_REQUEST_DURATION, {mode: LookupMode.ASYNC})


class Route:
    """Transfers from one tier to another.

    Attributes:
        duration: Seconds that the data moved, one sample a transfer.
        moved: Bytes moved.
        finished: Transfers that ended well.
        active: Transfers begun and not finished.
        pinned: Blocks of the nearer tier that those transfers pin.
    """

    __slots__ = ("_harvester", "_labels", "_probe", "active", "duration", "finished", "moved", "pinned")

    def __init__(self, probe: CacheProbe, source: str, destination: str, name: str | None, timing: str) -> None:
        self._probe = probe
        self._harvester = probe.harvester
        self._labels: Labels = {semconv.KVCACHE_SOURCE_TIER: source, semconv.KVCACHE_DESTINATION_TIER: destination}
        if name is not None:
            self._labels[semconv.KVCACHE_TIER_NAME] = name
        timed: Labels = {**self._labels, semconv.KVCACHE_TIMING_SOURCE: timing}
        self.duration = probe.histogram(semconv.TRANSFER_DURATION, timed)
        self.moved = probe.counter(semconv.TRANSFER_IO, timed)
        self.finished = probe.counter(semconv.TRANSFER_OPERATIONS, self._labels)
        self.active = probe.level(semconv.TRANSFER_ACTIVE, self._labels)
        self.active.set(0)
        self.pinned: Level | None = None

    def timed(self, start: DeviceEvent, end: DeviceEvent) -> None:
        """Hands over the event pair around a transfer, which gets its duration when the device is done with it.

        Args:
            start: Recorded before the copy, on its stream.
            end: Recorded after it. Neither may be recorded again before the pair has been read.
        """
        self._harvester.add(start, end, self.duration, self._probe.doubts)

    def labels(self) -> Labels:
        """Returns the attributes that all its rows have."""
        return dict(self._labels)

    def failures(self, error_type: str) -> Counter:
        """Returns the counter of transfers that failed in one way."""
        return self._probe.counter(semconv.TRANSFER_OPERATIONS, {**self._labels, semconv.ERROR_TYPE: error_type})

    def queue(self) -> Histogram:
        """Returns the histogram of seconds from being requested to moving, for an engine where both are known."""
        return self._probe.histogram(semconv.TRANSFER_QUEUE_DURATION, self._labels)

    def tokens(self, pool: str) -> Counter:
        """Returns the counter of tokens moved of one pool."""
        return self._probe.counter(semconv.TRANSFER_TOKENS, self._of_pool(pool))

    def pool_moved(self, pool: str) -> Counter:
        """Returns the counter of bytes moved of one pool, a part of `moved`."""
        return self._probe.counter(semconv.TRANSFER_POOL_IO, self._of_pool(pool))

    def _of_pool(self, pool: str) -> Labels:
        labels = {key: value for key, value in self._labels.items() if key != semconv.KVCACHE_TIER_NAME}
        return {**labels, semconv.KVCACHE_POOL: pool}

    def ask(self, owner: UnderWay) -> None:
        """Lets somebody be asked what is under way when it is collected, in place of being told each time.

        Args:
            owner: Whom; the rows end when it is gone.
        """
        this = weakref.ref(owner)

        def active() -> int | None:
            return None if (asked := this()) is None else asked.active

        def pinned() -> int | None:
            return None if (asked := this()) is None else asked.pinned

        def forget() -> None:
            if (asked := this()) is not None:
                asked.forget()

        self._probe.observe(semconv.TRANSFER_ACTIVE, self._labels, active, owner=owner, forget=forget)
        self._probe.observe(semconv.TRANSFER_ACTIVE_BLOCKS, self._labels, pinned, owner=owner)

    def pins(self) -> Level:
        """Returns the level of blocks that active transfers pin, for an engine that knows it; 0 from now on."""
        if self.pinned is None:
            self.pinned = self._probe.level(semconv.TRANSFER_ACTIVE_BLOCKS, self._labels)
            self.pinned.set(0)
        return self.pinned


class UnderWay(Protocol):
    """What knows which transfers of one direction are under way."""

    @property
    def active(self) -> int | None:
        """Transfers begun and not finished; None where nobody can say."""
        ...

    @property
    def pinned(self) -> int | None:
        """Blocks of the nearer tier that they pin."""
        ...

    def forget(self) -> None:
        """Forgets them, in a forked child."""
        ...


class Prefetches:
    """Prefetches from one storage tier: hit = fulfilled + unfulfilled + outstanding, always.

    Attributes:
        hit: Tokens that storage said it had.
        loaded: Tokens that arrived in host memory.
        fulfilled: Of the hit, tokens that became usable prefix.
        outstanding: Of the hit, tokens not settled yet.
    """

    __slots__ = ("_labels", "_probe", "fulfilled", "hit", "loaded", "outstanding")

    def __init__(self, probe: CacheProbe, labels: Labels, reasons: tuple[str, ...]) -> None:
        self._probe, self._labels = probe, labels
        self.hit = probe.counter(semconv.PREFETCH_HIT_TOKENS, labels)
        self.loaded = probe.counter(semconv.PREFETCH_LOADED_TOKENS, labels)
        self.fulfilled = probe.counter(semconv.PREFETCH_FULFILLED_TOKENS, labels)
        self.outstanding = probe.level(semconv.PREFETCH_OUTSTANDING_TOKENS, labels)
        self.outstanding.set(0)
        for reason in reasons:
            self.unfulfilled(reason)

    def unfulfilled(self, reason: str) -> Counter:
        """Returns the counter of hit tokens that did not become usable prefix, for one reason."""
        return self._probe.counter(
            semconv.PREFETCH_UNFULFILLED_TOKENS, {**self._labels, semconv.KVCACHE_REASON: reason}
        )

    def deferred(self, reason: str) -> Counter:
        """Returns the counter of tokens whose prefetch was put off, for one reason."""
        return self._probe.counter(semconv.PREFETCH_DEFERRED_TOKENS, {**self._labels, semconv.KVCACHE_REASON: reason})


# A pool's limit, what is free of it and what is evictable.
_Told = tuple[int, int, int | None]


def _limit(told: _Told) -> int:
    return told[0]


def _used(told: _Told) -> int:
    limit, free, evictable = told
    return min(limit - free - (evictable or 0), limit)


def _evictable(told: _Told) -> int | None:
    return told[2]


def _free(told: _Told) -> int:
    return told[1]


class Pool:
    """What a pool holds and can hold, in tokens: used (referenced by a request or pinned by a transfer), evictable and
    free. It is told often and read seldom, so what follows from the numbers is worked out when they are read.
    """

    __slots__ = ("__weakref__", "_balanced", "_probe", "_told")

    def __init__(self, probe: CacheProbe, tier: str, pool: str) -> None:
        self._probe = probe
        self._balanced = True
        self._told: _Told | None = None
        labels: Labels = {semconv.KVCACHE_TIER: tier, semconv.KVCACHE_POOL: pool}
        self._row(semconv.LIMIT, labels, _limit)
        for state, read in ((State.USED, _used), (State.EVICTABLE, _evictable), (State.FREE, _free)):
            self._row(semconv.USAGE, {**labels, semconv.KVCACHE_STATE: state}, read)

    def _row(self, spec: MetricSpec, labels: Labels, read: Callable[[_Told], int | None]) -> None:
        this = weakref.ref(self)

        def value() -> int | None:
            told = None if (pool := this()) is None else pool._told
            number = None if told is None else read(told)
            return None if number is None else max(number, 0)

        def forget() -> None:
            if (pool := this()) is not None:
                pool.forget()

        self._probe.observe(spec, labels, value, owner=self, forget=forget)

    def settle(self, limit: int, free: int, evictable: int | None = None) -> None:
        """Tells what the pool holds now; what is neither free nor evictable is used.

        Where that leaves less than nothing, used is 0 and one accounting error is counted for as long as it lasts; so
        it is where any of them is negative.

        Args:
            limit: The pool's size, in tokens.
            free: Tokens' worth of slots that hold nothing.
            evictable: Tokens held and free to be evicted; None where the engine does not tell them from free ones, or
                from used ones.
        """
        held = evictable or 0
        if limit - free < held or free < 0 or held < 0:
            if self._balanced:
                self._probe.accounting_error(Reason.CONSERVATION)
                self._balanced = False
        elif not self._balanced:
            self._balanced = True
        self._told = limit, free, evictable

    def forget(self) -> None:
        """Ends the rows, while what the pool holds is not known."""
        self._told = None


def _tier(tier: str, name: str | None) -> Labels:
    labels: Labels = {semconv.KVCACHE_TIER: tier}
    if name is not None:
        labels[semconv.KVCACHE_TIER_NAME] = name
    return labels
