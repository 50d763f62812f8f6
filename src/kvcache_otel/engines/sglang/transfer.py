"""Copies between device and host: merged backups and load-backs, and those of retracted requests."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Any

from kvcache_otel.engines.sglang import config
from kvcache_otel.engines.sglang.bounds import MOST, TooMany
from kvcache_otel.engines.sglang.clock import CopyClock
from kvcache_otel.semconv import TimingSource

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcache_otel.engines.hooks import Finish
    from kvcache_otel.record.cells import Counter
    from kvcache_otel.record.probe import CacheProbe, Route

# What `error.type` says of copies that a reset of the cache has forgotten. They ran; nobody waits for them any more.
RESET = "cache_reset"


# A copy that is on its stream: since when, by `time.monotonic`; events of ours around it, where SGLang does not time
# it; and the slots that it pins, which are counted when somebody reads. A plain tuple: one is made for each.
_Copy = tuple[float, tuple[Any, Any] | None, Sequence[Any]]


class DirectionRows:
    """One direction of one cache.

    SGLang merges what was asked for since the last step into one copy, times it with an event pair where the device
    can, and acknowledges it when the scheduler finds it done. A retracted request's copy is made at once, waited for
    and not acknowledged.
    """

    def __init__(
        self,
        probe: CacheProbe,
        cache: Any,
        source: str,
        destination: str,
        *,
        stream: str,
        queued: bool,
        refused: Counter | None = None,
    ) -> None:
        """Args:
        probe: The cache's probe.
        cache: SGLang's UnifiedRadixCache, with its cache controller.
        source: The tier that is read.
        destination: The tier that is written.
        stream: The transfer engine's attribute that holds the stream of this direction.
        queued: Whether copies wait for others to be merged with, and somebody says since when.
        refused: Counts what found no room, where nobody else does.
        """
        self._page = cache.page_size
        self._clock = CopyClock(cache.cache_controller.l2_transfer_engine, stream)
        self._make_route: Callable[[str], Route] = lambda timing: probe.route(source, destination, timing=timing)
        self._routes: dict[str, Route] = {}
        self._counts_active = True
        self._copies: dict[int, _Copy] = {}
        self._usual = self._route(TimingSource.DEVICE_EVENT if self._clock.ticks else TimingSource.WALL_CLOCK)
        self._ticks = self._clock.ticks
        self._harvest = probe.harvester.add
        self._usual.ask(self)
        self._queue = self._usual.queue() if queued else None
        self._pools: dict[str, _PoolRows] = {}
        self._host_pools = None if config.is_sharded(cache.cache_controller) else cache.host_pool_group.entries
        riding = {config.pool_name(spec.pool_name) for spec in cache.sidecar_pool_specs}
        for entry in cache.host_pool_group.entries:
            if (name := config.pool_name(entry.name)) not in riding:
                self._pool(name)
        self._refused = refused
        self._requested: list[float] = []
        self._too_many = TooMany(probe, f"copies from {source} to {destination}")
        self._retraction: list[tuple[Any, int]] | None = None
        # Of the copy that is being submitted, one at a time: when it was, the slots that it pins, an event before it.
        self._submitting: tuple[float, Sequence[Any], Any] = (0.0, (), None)

    # -- what a reader asks, on its own thread -------------------------------------------------------------------------

    @property
    def active(self) -> int | None:
        """Copies that are on their stream; None where not all of them are known."""
        return len(self._copies) if self._counts_active else None

    @property
    def pinned(self) -> int | None:
        """Blocks that they pin."""
        while self._counts_active:
            with suppress(RuntimeError):  # A copy has begun or ended meanwhile.
                return sum(len(slots) // self._page for _, _, slots in list(self._copies.values()))
        return None

    def forget(self) -> None:
        """Forgets them, in a forked child."""
        self._copies.clear()

    # -- what SGLang does, in its order --------------------------------------------------------------------------------

    def requested(self) -> None:
        """Says that a copy is asked for, and waits to be submitted."""
        if len(self._requested) >= MOST:
            self._too_many.forgotten(len(self._requested))
            self._requested.clear()
        self._requested.append(monotonic())

    def requesting(self) -> Finish:
        """Says that a copy is asked for; returns what hears whether there was room for it."""
        self.requested()
        return self._answered

    def _answered(self, slots: Any, error: BaseException | None) -> None:
        if slots is not None:
            return
        if self._requested:
            self._requested.pop()
        if error is None and self._refused is not None:
            self._refused.add(1)

    def submitting(self, transfers: list[Any]) -> Finish:
        """Says that a copy is put on its stream; returns what hears how that went."""
        now = monotonic()
        if self._requested and self._retraction is None:
            if self._queue is not None:
                for since in self._requested:
                    self._queue.record(now - since)
            self._requested.clear()
        slots = transfers[0].host_indices if transfers else ()
        self._submitting = now, slots, self._clock.begin() if self._clock.ours else None
        return self._submitted if self._retraction is None else self._submitted_apart(transfers)

    def _submitted(self, completion: Any, error: BaseException | None) -> None:
        if error is not None:
            self._usual.failures(type(error).__name__).add(1)
            return
        now, slots, begun = self._submitting
        copies = self._copies
        if len(copies) >= MOST:
            self._too_many.forgotten(len(copies))
            copies.clear()
            self.active_unknown()
        copies[id(completion.finish_event)] = now, None if begun is None else self._clock.end(begun), slots

    def _submitted_apart(self, transfers: list[Any]) -> Finish:
        def submitted(completion: Any, error: BaseException | None) -> None:
            self._submitted(completion, error)
            if error is None and self._retraction is not None:
                self._retraction.append((completion, _bytes(transfers)))

        return submitted

    def done(self, timed: Any, moved: int, tokens: dict[Any, int]) -> None:
        """Counts a copy that somebody has waited for.

        Args:
            timed: SGLang's acknowledgement or completion of it, with its events.
            moved: Bytes.
            tokens: Tokens, by SGLang's name of the pool.
        """
        finish = timed.finish_event
        copy = self._copies.pop(id(finish), None)
        told = timed.timing_enabled and self._ticks
        route = self._usual if told else self._route_of(copy)
        route.moved.add(moved)
        route.finished.add(1)
        if told:
            self._harvest(timed.start_event, finish, route.duration)
        elif copy is not None:
            self._ended(copy, route)
        for name, count in tokens.items():
            pool = self._pools.get(name) or self._pool(name)
            pool.tokens.add(count)
            if pool.moved is not None:
                pool.moved.add(count * pool.host_pool.size_per_token)

    def retracting(self, backup: Any = None) -> Finish:
        """Says that a retracted request is copied; returns what hears how that went.

        Args:
            backup: What is copied back, where it is; else the result says what was copied.
        """
        self._retraction = []

        def copied(result: Any, error: BaseException | None) -> None:
            completions, self._retraction = self._retraction or [], None
            for completion, moved in completions:
                if error is not None:
                    self._copies.pop(id(completion.finish_event), None)
                    self._usual.failures(type(error).__name__).add(1)
                else:
                    self.done(completion, moved, _tokens_by_pool(backup or result))

        return copied

    def reset(self) -> None:
        """Says that the cache has forgotten what was asked for and what is under way."""
        self._requested.clear()
        if self._copies:
            self._usual.failures(RESET).add(len(self._copies))
            self._copies.clear()

    def active_unknown(self) -> None:
        """Ends the rows of what is active: not every copy's beginning and end is told any more."""
        self._counts_active = False
        for route in list(self._routes.values()):
            route.active.set(None)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _route_of(self, copy: _Copy | None) -> Route:
        """Returns the rows that a copy belongs to which SGLang has not timed."""
        by_events = copy is not None and copy[1] is not None
        return self._route(TimingSource.DEVICE_EVENT if by_events else TimingSource.WALL_CLOCK)

    @staticmethod
    def _ended(copy: _Copy, route: Route) -> None:
        """Times a copy that SGLang has not timed."""
        began, events, _ = copy
        if events is not None:
            route.timed(*events)
        else:
            route.duration.record(monotonic() - began)

    def _route(self, timing: str) -> Route:
        route = self._routes.get(timing)
        if route is None:
            route = self._routes[timing] = self._make_route(timing)
            if not self._counts_active:
                route.active.set(None)
        return route

    def _pool(self, name: str) -> _PoolRows:
        rows = self._pools.get(name)
        if rows is None:
            entries = (entry for entry in self._host_pools or () if config.pool_name(entry.name) == name)
            host_pool = next((entry.host_pool for entry in entries), None)
            rows = self._pools[name] = _PoolRows(self._usual, config.pool(name), host_pool)
        return rows


class _PoolRows:
    """What is copied of one pool: tokens, and bytes where the pool tells how many a token has."""

    __slots__ = ("host_pool", "moved", "tokens")

    def __init__(self, route: Route, pool: str, host_pool: Any) -> None:
        """Args:
        route: The direction.
        pool: The catalogue's name of the pool.
        host_pool: SGLang's; None where a rank copies a part of the tokens that it counts.
        """
        self.tokens = route.tokens(pool)
        self.moved = None if host_pool is None else route.pool_moved(pool)
        self.host_pool: Any = host_pool


def _bytes(transfers: list[Any]) -> int:
    # A draft that is packed into another pool's rows travels with them and is in their size.
    return sum(
        len(transfer.host_indices) * transfer.host_pool.size_per_token
        for transfer in transfers
        if not getattr(transfer, "is_draft", False)
    )


def _tokens_by_pool(backup: Any) -> dict[Any, int]:
    tokens = {"kv": len(backup.host_indices)}
    for transfer in backup.pool_transfers or ():
        if transfer.indices_from_pool is None and transfer.host_indices is not None:
            name = config.pool_name(transfer.name)
            tokens[name] = tokens.get(name, 0) + len(transfer.host_indices)
    return tokens
