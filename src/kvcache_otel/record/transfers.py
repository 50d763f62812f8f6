"""The transfers from one tier to another: what is under way, what has ended, and what it is timed by.

Four clocks, and `kvcache.timing.source` says which: events of ours on a device's stream, or somebody else's
(``device_event``), a backend's own word (``engine_report``), or the time from beginning to end (``wall_clock``).
"""

from __future__ import annotations

import operator
import time
import weakref
from collections.abc import Mapping
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any

from kvcache_otel import semconv
from kvcache_otel.record import foreign
from kvcache_otel.record.cells import unread
from kvcache_otel.record.complaints import Complaints
from kvcache_otel.record.keys import LATER, Keys
from kvcache_otel.record.labels import declared, printable
from kvcache_otel.record.outside import is_from_outside, let_through
from kvcache_otel.record.pair import Outcome
from kvcache_otel.record.plain import plain
from kvcache_otel.record.streams import NO_STREAM
from kvcache_otel.record.timing import DEADLINE_S, LIMIT, check_deadline
from kvcache_otel.record.transfer import Transfer
from kvcache_otel.record.underway import Underway
from kvcache_otel.semconv import ErrorType, Reason, TimingSource

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

    from kvcache_otel.record.cells import Counter, Histogram
    from kvcache_otel.record.probe import CacheProbe, Route
    from kvcache_otel.record.transfer import Events, Failure, Tokens

_INFINITY = float("inf")

# Kinds of errors that have a row of their own, in one direction: each is a series for ever.
ERROR_TYPES = 16


# Looked up once: a class is asked for its attributes each time.
_DEVICE_EVENT = TimingSource.DEVICE_EVENT


class Transfers:
    """One direction of one cache. Setting it up may raise; from then on nothing does.

    Attributes:
        doubts: Counts what there is to doubt about the cache's numbers.

    Example:
        >>> copies = kvcache_otel.transfers("device", "host", cache="MyCache", timing="device_event")
        >>> with copies.transfer(bytes=block.nbytes, tokens={"kv": 64}, stream=side_stream):
        ...     host.copy_(device, non_blocking=True)
    """

    def __init__(
        self,
        probe: CacheProbe,
        source: str,
        destination: str,
        *,
        pools: Iterable[str] = (semconv.Pool.KV,),
        name: str | None = None,
        timing: str = TimingSource.WALL_CLOCK,
        queued: bool = False,
        make_event: Callable[[], Any] | None = None,
        deadline_s: float = DEADLINE_S,
        limit: int = LIMIT,
    ) -> None:
        """Args:
        probe: The cache's probe.
        source: The tier that is read.
        destination: The tier that is written.
        pools: The pools whose tokens move.
        name: The engine's own name of the secondary tier involved, where there is one.
        timing: Where most durations come from: these rows exist from the start, the others when they are needed.
        queued: Whether somebody says since when transfers were asked for.
        make_event: Makes an event with timing, for a device that torch does not know by name.
        deadline_s: After how many seconds a transfer that has not ended, or a device that is not done with it, is
            counted and said. It stays active.
        limit: Transfers that may be under way, as far as they are looked after.

        Raises:
            ValueError: A tier, a pool or a kind of timing that the catalogue does not have, one tier as both, or no
                time at all to wait.
            TypeError: What makes events cannot be called.
        """
        declared(semconv.KVCACHE_SOURCE_TIER, source)
        declared(semconv.KVCACHE_DESTINATION_TIER, destination)
        declared(semconv.KVCACHE_TIMING_SOURCE, timing)
        if source == destination:
            raise ValueError(f"a copy from {source} to {destination} is none between tiers")
        pools = tuple(pools)
        if not pools:
            raise ValueError("name the pools whose tokens move: at least one of them")
        check_deadline(deadline_s)
        self._set_up: dict[str, Any] = {"source": source, "destination": destination, "pools": pools, "name": name}
        self._set_up |= {"timing": timing, "queued": queued, "deadline_s": deadline_s, "limit": limit}
        self._complaints = Complaints(probe, f"{source} to {destination}")
        self.doubts = probe.doubts
        self._harvester = probe.harvester
        self._make_route: Callable[[str], Route] = lambda of: probe.route(source, destination, name=name, timing=of)
        self._usual = self._make_route(timing)
        self._routes = {timing: self._usual}
        self._active = self._usual.active
        self._failures: dict[str, Counter] = {}
        self._tokens: dict[str, Counter] = {
            pool: self._usual.tokens(declared(semconv.KVCACHE_POOL, pool)) for pool in pools
        }
        self._first_pool = pools[0]
        self._queue: Histogram | None = self._usual.queue() if queued else None
        self._make_event: Callable[[], Any] | None = None
        self._streams = self._harvester.streams
        if make_event is not None:
            self.make_events_by(make_event)
        self._deadline_s = deadline_s
        self._underway = Underway(self._complaints, deadline_s, limit)
        this = weakref.ref(self)
        self._keys = Keys(self._complaints, deadline_s, limit, partial(_end_forgotten, this))
        labels: dict[str, str | int] = {
            semconv.KVCACHE_SOURCE_TIER: source,
            semconv.KVCACHE_DESTINATION_TIER: destination,
        }
        if name is not None:
            labels[semconv.KVCACHE_TIER_NAME] = name
        # Adds nothing to what is active: whoever wants to know that also wants to know what is overdue.
        probe.observe(semconv.TRANSFER_ACTIVE, labels, lambda: _look_after(this()), owner=self)

    def make_events_by(self, make_event: Callable[[], Any]) -> None:
        """Says what makes an event with timing, for a device that torch does not know by name.

        Raises:
            TypeError: It cannot be called.
            ValueError: They are made in another way already.
        """
        if not callable(make_event):
            raise TypeError("make_event= must be a callable that makes an event")
        if self._make_event not in (None, make_event):
            raise ValueError(
                f"events of transfers from {self._complaints.where} are made by another make_event= already"
            )
        if self._make_event is None:
            self._make_event, self._streams = make_event, self._harvester.streams_by(make_event)

    def start_anew(self, make_probe: Callable[[], CacheProbe]) -> None:
        """Has it tell another probe from the next beginning on, in a forked child: what began before is the parent's.

        Args:
            make_probe: Gives the probe, when that is needed: most children begin nothing.
        """
        left = copy(self)
        left._active = unread()  # The parent's: here it has no row that an end could be missing from.
        self._underway.hand_to(left)
        self._keys.clear()
        anew = partial(self._begin_anew, make_probe)
        vars(self).update(begin=anew, transfer=anew)

    def _begin_anew(self, make_probe: Callable[[], CacheProbe], **said: Any) -> Transfer:
        try:
            if vars(self).pop("begin", None) is not None:  # Of several threads one does it.
                del vars(self)["transfer"]
                self.__init__(make_probe(), make_event=self._make_event, **self._set_up)
        except BaseException as error:
            let_through(error)
            self._complaints.broken(error)
        return self.begin(**said)

    # -- in the engine's hot path --------------------------------------------------------------------------------------

    def begin(
        self,
        *,
        bytes: int = 0,
        tokens: Tokens = None,
        stream: Any = None,
        requested: float | None = None,
        key: Hashable | None = None,
    ) -> Transfer:
        """Says that a transfer begins: the first half of a pair, whose other is `end`. Never raises.

        Args:
            bytes: Bytes that it moves, where that is known already.
            tokens: Tokens that it moves, by pool or of the first pool, where that is known already.
            stream: The stream of a device, or `CURRENT`: events of ours are recorded there, now and at the end.
            requested: Since when it was wanted, by `time.monotonic`.
            key: What `end` will call it, or `LATER`: `keep` will say so.

        Returns:
            The transfer: end it, or use it as a context manager.
        """
        transfer = Transfer(self, bytes, tokens, None)
        try:
            if stream is not None:
                try:
                    transfer.stream = ours = self._streams.stream(stream)
                    transfer.before = ours.mark()
                except BaseException as error:  # No torch, no device, no such flag: it depends on all of them.
                    let_through(error)
                    self._complaints.untimed(error)
                    transfer.stream = transfer.stream or NO_STREAM
            self._active.add(1)  # Before another thread may end it by its key.
            transfer.active = True  # No signal handler runs between the two; see `cells`.
            underway = self._underway
            underway.begun.append(transfer)
            if len(underway.begun) >= underway.look_at:
                underway.look_over()
            if key is LATER:
                self._keys.expect(transfer)
            elif key is not None and (before := self._keys.keep(transfer, key)) is not None:
                self._displaced(before)
            if requested is not None:  # Last: it may be no time at all.
                self.waited(transfer.began - requested)
        except BaseException as error:
            if is_from_outside(error):  # Nobody is given it, and nobody ends it.
                self._take_back(transfer, key)
                raise
            self._complaints.broken(error)
        return transfer

    transfer = begin
    """The same, in the words of a block: ``with copies.transfer(bytes=4096): …`` lasts as long as the transfer."""

    def end(
        self,
        key: Hashable,
        *,
        bytes: int | None = None,
        tokens: Tokens = None,
        seconds: float | None = None,
        events: Events = None,
        lent: bool = False,
        at: float | None = None,
        error: Failure = None,
    ) -> None:
        """Says that the transfer has ended which began under a key; see `Transfer.end`. Never raises."""
        try:
            transfer = self._keys.pop(key)
            if transfer is not None:
                transfer.end(bytes=bytes, tokens=tokens, seconds=seconds, events=events, lent=lent, at=at, error=error)
                return
            said = {"bytes": bytes, "tokens": tokens, "seconds": seconds, "events": events, "lent": lent, "at": at}
            self._keys.end_early(key, said | {"error": error})
        except BaseException as unhashable:  # Or events that were lent and cannot be read.
            let_through(unhashable)
            self._complaints.broken(unhashable)

    def keep(self, transfer: Transfer, key: Hashable) -> None:
        """Says what `end` will call a transfer that has begun.

        Args:
            transfer: The transfer.
            key: Its key. Who has it already has not ended, and cannot any more.
        """
        before = self._keys.keep(transfer, key)
        if before is not None:
            self._displaced(before)

    @property
    def open_keys(self) -> int:
        """How many transfers wait to be ended by their key."""
        return len(self._keys)

    def end_active(self) -> None:
        """Ends the row of what is active: not every beginning and end is told any more."""
        self._active.set(None)
        self._active = self._usual.active = unread()  # Nobody keeps the other, whoever moves it at this moment.

    def close(self) -> None:
        """Ends that row, and forgets what is under way: nobody tells any more."""
        self.end_active()
        self._underway.clear()
        self._keys.clear()

    def forget(self, error: str) -> None:
        """Ends all transfers that wait to be ended by their key, as failed: the engine has forgotten them.

        Args:
            error: What `error.type` says of them.
        """
        while (transfer := self._keys.pop_any()) is not None:
            transfer.end(error=error)

    # -- what a transfer says of itself --------------------------------------------------------------------------------

    def finish(self, transfer: Transfer) -> None:
        """Times a transfer that has ended well, and counts it: now, or when its device is done with it."""
        if transfer.events is not None:
            self.finish_by(transfer, transfer.events)
        elif transfer.seconds is not None:
            self._timed(transfer, TimingSource.ENGINE_REPORT, transfer.seconds)
        elif (stream := transfer.stream) is not None:
            route = self._routes.get(_DEVICE_EVENT) or self._route(_DEVICE_EVENT)
            if transfer.after is None:
                self.mark_end(transfer)
            if transfer.before is not None:
                transfer.duration = route.duration
                if transfer.tokens is not None:
                    transfer.tokens = _kept(transfer.tokens)
                if self._harvester.hand_over(transfer, stream.lane, self._deadline_s):
                    return
                stream.give_back(transfer.before, transfer.after)  # Nobody will read them.
            self._count(transfer, route)
        else:
            at: Any = time.monotonic() if transfer.at is None else transfer.at
            try:
                at -= transfer.began
            except Exception as error:  # What it is then is no time either, and that is said.
                let_through(error)
            self._timed(transfer, TimingSource.WALL_CLOCK, at)

    def end_forgotten(self, said: dict[str, Any]) -> None:
        """Counts a transfer that has ended and of which nothing is known but that it had begun.

        Args:
            said: As in `Keys.end_early`.
        """
        self._active.add(-1)
        if said["error"] is not None:
            self._failures_of(said["error"]).add(1)
        else:
            self._usual.finished.add(1)
        if said["bytes"] is not None:
            self._usual.moved.add(operator.index(said["bytes"]))
        if said["tokens"] is not None:
            self._count_tokens(said["tokens"])

    def failed(self, transfer: Transfer, error: Failure, moved: int | None, tokens: Tokens) -> None:
        """Counts a transfer that has failed, and what it moved nevertheless."""
        self.is_over(transfer)
        self._failures_of(error).add(1)
        if moved is not None:
            self._usual.moved.add(operator.index(moved))
        if tokens is not None:
            self._count_tokens(tokens)

    def finished_on_device(self, transfer: Transfer, outcome: Outcome) -> None:
        """Counts a transfer whose device was asked."""
        if transfer.events is not None:
            foreign.forget(transfer)
        elif outcome is Outcome.READ and transfer.stream is not None:
            transfer.stream.give_back(transfer.before, transfer.after)
        try:
            self._count(transfer, self._route(TimingSource.DEVICE_EVENT))
        except BaseException as error:
            let_through(error)
            self._complaints.broken(error)

    def given_up(self, transfer: Transfer) -> None:
        """Keeps no events of a transfer whose device was not done in time."""
        if transfer.events is not None:
            foreign.forget(transfer)

    def cancelled(self, transfer: Transfer) -> None:
        """Takes a transfer back that was none."""
        self.is_over(transfer)
        if transfer.stream is not None and transfer.before is not None:
            transfer.stream.give_back_one(transfer.before)
            if transfer.after is not None:
                transfer.stream.give_back_one(transfer.after)
            transfer.before = transfer.after = None

    def mark_end(self, transfer: Transfer) -> None:
        """Records an event of ours after a transfer, where there is one before it."""
        stream = transfer.stream
        if stream is not None and transfer.before is not None:
            try:
                transfer.after = stream.mark()
            except BaseException as error:
                let_through(error)
                self._complaints.untimed(error)
                transfer.before = None

    def is_over(self, transfer: Transfer) -> None:
        """Takes a transfer off what is active, if it is in there."""
        if transfer.active:
            self._active.add(-1)
            transfer.active = False

    def waited(self, seconds: float) -> None:
        """Tells how long a transfer waited between being wanted and its beginning."""
        if self._queue is None:
            self._queue = self._usual.queue()
        self._queue.record(plain(seconds))

    def ended_twice(self) -> None:
        """Counts an end too many."""
        self._complaints.contradicted("ended twice", Reason.MISSING_ROW)

    def broken(self, error: BaseException) -> None:
        """Counts an exception of ours, or of what somebody said about a transfer."""
        self._complaints.broken(error)

    def broken_off(self, transfer: Transfer, error: BaseException) -> None:
        """Counts an exception of ours, or of what somebody said about a transfer, and raises what is neither.

        Then the transfer is over all the same. What of it was not counted by then never is.
        """
        if not is_from_outside(error):
            self._complaints.broken(error)
            return
        self.is_over(transfer)
        self._complaints.interrupted()
        try:
            raise error
        finally:
            del error  # It refers to this frame, which would keep the transfer.

    # -- inside --------------------------------------------------------------------------------------------------------

    def _failures_of(self, error: Failure) -> Counter:
        """Returns the counter of what went wrong: the first few kinds of it have one each, the others one together."""
        kind = error if isinstance(error, str) else (error if isinstance(error, type) else type(error)).__name__
        kind = printable(kind) or ErrorType.OTHER
        counter = self._failures.get(kind)
        if counter is None:
            if len(self._failures) >= ERROR_TYPES:
                self._complaints.say(
                    "errors", f"more than {ERROR_TYPES} kinds of errors; others are {ErrorType.OTHER!r}"
                )
                kind = ErrorType.OTHER
            counter = self._failures[kind] = self._usual.failures(kind)
        return counter

    def _take_back(self, transfer: Transfer, key: Hashable | None) -> None:
        self.is_over(transfer)
        transfer.ended = True
        self._keys.take_out(transfer, key)

    def _displaced(self, transfer: Transfer) -> None:
        if not transfer.ended:
            self.is_over(transfer)
            transfer.ended = True
            self._complaints.contradicted("did not end before others began in its place", Reason.OTHER)

    def finish_by(self, transfer: Transfer, events: Any) -> None:
        """Reads somebody else's events, at once where they are done with: they may be recorded again afterwards."""
        route = self._routes.get(_DEVICE_EVENT) or self._route(_DEVICE_EVENT)
        seconds: float | None = None
        try:
            before, after = events
            done = after.query()
            if not done and not transfer.lent:
                transfer.before, transfer.after = before, after
                if not foreign.wait_for(transfer, before, after):
                    raise RuntimeError("the device is not done with them, and they have a `record` of their own")
                transfer.duration = route.duration
                if transfer.tokens is not None:
                    transfer.tokens = _kept(transfer.tokens)
                if self._harvester.hand_over(transfer, None, self._deadline_s):
                    return
                foreign.forget(transfer)
            else:
                if foreign.waiting:
                    foreign.handed_over(before, after)
                if not done:
                    raise RuntimeError("the device is not done with them, and they are lent only")
                milliseconds = before.elapsed_time(after)
                seconds = (milliseconds if type(milliseconds) is float else plain(milliseconds)) / 1000.0
                if not 0 <= seconds < _INFINITY:
                    apart, seconds = seconds, None
                    raise ValueError(f"{apart!r} s apart")
        except BaseException as error:
            foreign.forget(transfer)
            let_through(error)
            self._complaints.untimed(error)
        try:
            self._count(transfer, route)
        finally:
            if seconds is not None:
                route.duration.record(seconds)

    def _timed(self, transfer: Transfer, source: str, seconds: float) -> None:
        route = self._routes.get(source) or self._route(source)
        try:
            self._count(transfer, route)  # First: whoever reads meanwhile finds no duration of what is not counted.
        finally:  # Whatever it was said to have moved, it has ended.
            route.duration.record(plain(seconds))

    def _count(self, transfer: Transfer, route: Route) -> None:
        if transfer.active:  # As `is_over` does it, a call less.
            self._active.add(-1)
            transfer.active = False
        route.finished.add(1)
        moved = transfer.bytes
        route.moved.add(moved if type(moved) is int else operator.index(moved))
        if transfer.tokens is not None:
            self._count_tokens(transfer.tokens)
        transfer.before = transfer.after = transfer.events = None  # Whoever keeps it keeps none of the device's.

    def _count_tokens(self, tokens: Any) -> None:
        # To ask an abstract class takes longest of all.
        if type(tokens) is int or (type(tokens) is not dict and not isinstance(tokens, Mapping)):
            self._tokens[self._first_pool].add(operator.index(tokens))
            return
        amounts: Any = tokens  # pyright: ignore[reportUnknownVariableType]
        if len(amounts) > 1 and not all(type(count) is int for count in amounts.values()):
            amounts = {pool: operator.index(count) for pool, count in amounts.items()}  # All are counted, or none.
        for pool, count in amounts.items():
            counter = self._tokens.get(pool)
            if counter is None:
                self._complaints.undeclared(pool)
            else:
                counter.add(count if type(count) is int else operator.index(count))

    def _route(self, source: str) -> Route:
        route = self._routes.get(source)
        if route is None:
            route = self._routes[source] = self._make_route(source)
            route.active.set(None)  # The usual one tells it, for all of them.
        return route

    def look_after(self) -> None:
        """Counts what should have ended; on any thread."""
        self._underway.look_after()
        self._keys.look_after()
        self._harvester.look_after()


def _kept(tokens: Any) -> Tokens:
    """Returns what is said of pools, as it is now: whoever said it may use the same dict for the next transfer."""
    if type(tokens) is dict or (type(tokens) is not int and isinstance(tokens, Mapping)):
        return {**tokens}  # pyright: ignore[reportUnknownVariableType]
    return tokens


def _end_forgotten(this: Callable[[], Transfers | None], said: dict[str, Any]) -> None:
    if (transfers := this()) is not None:
        try:
            transfers.end_forgotten(said)
        except BaseException as error:  # Whoever gives another its key is not to hear of it.
            let_through(error)
            transfers.broken(error)


def _look_after(transfers: Transfers | None) -> None:
    if transfers is not None:
        transfers.look_after()
