"""The watch: every source's sockets in one loop, on one thread."""

from __future__ import annotations

import logging
import math
import threading
import time
from itertools import islice
from typing import TYPE_CHECKING, Any

import zmq

from kvcache_otel.events.few import Few
from kvcache_otel.events.names import Names
from kvcache_otel.events.subscription import LEAST_HELD, Subscription
from kvcache_otel.events.terms import Limits
from kvcache_otel.record.labels import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvcache_otel.events.index import BlockIndex
    from kvcache_otel.events.room import Share
    from kvcache_otel.events.source import Source
    from kvcache_otel.events.worker import Worker

_logger = logging.getLogger(__name__)

HELD_BYTES = 2**30
"""Bytes of batches that wait for others, over all sources."""

MOST_HELD = 32 * 2**20
"""Of these, what one source may have, and `LEAST_HELD` at the least."""

SILENCE = 2.0
"""Seconds that live batches wait for a replay that brings nothing new. Publishers answer between two batches."""

SLOW = 0.25
"""Seconds that a round may take before what is due is put off to the next."""

LOOK_SECONDS = 0.1
"""Between two looks at how much waits inside ZeroMQ: a connection brings a gigabyte a second, and a look takes
microseconds."""

EVERY_SECONDS = 1.0
"""Between two times that every source is asked what is due."""

BOUND_SECONDS = 1.0
"""Between two times that the blocks of all are bounded, and books made smaller that have more memory than they need. To
look takes a microsecond for each that something has come for."""

RETRY_SECONDS, RETRIES = 5.0, 100
"""Between two times that a source is tried which cannot be reached, once it has been for a while; and how many of them
are in a second, at the most."""

CLOSE_SECONDS = 0.5
"""How long the end waits for ZeroMQ's own thread."""

AGAIN_SECONDS, AGAIN_AT_ONCE = 1.0, 64
"""Between two times that sources are tried that cannot be subscribed to, since a port may still be in use; and how many
of them, in turn."""


class Watch:
    """Subscribes to sources, and keeps the index that their events add up to.

    Attributes:
        index: The index.
        subscriptions: Those that there are now, by source.
    """

    def __init__(
        self, index: BlockIndex, *, clock: Callable[[], float] = time.monotonic, names: Names | None = None
    ) -> None:
        """Args:
        index: Where the books are.
        clock: Tells the time, in seconds.
        names: Knows what hosts are; None for what the system's resolver knows.
        """
        self.index = index
        self.subscriptions: dict[Source, Subscription] = {}
        self._clock = clock
        self._names = names or Names()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 65_536)  # Three for each source. Not `setsockopt`: that is of sockets.
        self._readers: dict[Any, tuple[Callable[[float], None], Source]] = {}
        # What is polled; None where these have changed. Not a `zmq.Poller`, which looks at all of them to forget one.
        self._polled: list[tuple[Any, int]] | None = None
        self._users: dict[str, int] = {}
        self._whose: dict[str, tuple[str, str]] = {}
        self._refused: dict[Source, None] = {}
        self._few = Few(_logger, logging.ERROR, "kvcache: %d more sources are left out as long as this lasts")
        self._again = float("inf")
        self._dues: dict[Source, float] = {}  # When something is to be done, and
        self._due = float("inf")  # the first of these, or what is due to all.
        self._touched: dict[Source, None] = {}  # Something came of them: what is due may be another time now.
        self._look_at = self._bound_at = self._every_at = 0.0
        self._anybody = False  # Whether something may wait inside ZeroMQ.
        self._late = False

    def want(self, sources: Iterable[Source]) -> None:
        """Subscribes to these sources and to no others. What cannot be subscribed to is said once, and tried again.

        A source that is connected as before goes on with its books, unless its events have meant something else.

        Args:
            sources: Those that there are; none of them a name that is still to be resolved.
        """
        wanted = dict.fromkeys(sources)
        connections = {source.connection: source for source in wanted}
        for source in [source for source in self.subscriptions if source not in wanted]:
            now = connections.get(source.connection)
            if now is None or not self._goes_on(source, now):
                self._end(source)
        self._refused = {source: None for source in self._refused if source in wanted}
        for source in wanted:
            if source not in self.subscriptions and source not in self._refused:
                self._begin(source, len(wanted))
        self._few.end()

    def poll(self, seconds: float) -> None:
        """Takes what has come and does what is due, once; waits for so long where there is nothing.

        Args:
            seconds: How long to wait, at most.
        """
        began = float("inf")
        wait = min(seconds, max(self._due - self._clock(), 0.0))
        polled = self._polled
        if polled is None:
            polled = self._polled = [(socket, zmq.POLLIN) for socket in self._readers]
        for socket, _ in zmq.zmq_poll(polled, math.ceil(wait * 1000)):
            began = min(began, self._clock())
            if (found := self._readers.get(socket)) is not None:  # Another has closed it meanwhile, otherwise.
                reader, source = found
                self._touched[source] = None
                reader(self._clock())
                self._look(self._clock())
        now = self._clock()
        self._look(now)
        if now - began >= SLOW and not self._late:
            # What was waited for may have come meanwhile: it is read before anything is given up.
            self._late, self._due = True, 0.0
            return
        self._late = False
        if now >= self._again:
            for source in list(islice(self._refused, AGAIN_AT_ONCE)):
                self._begin(source, len(self.subscriptions) + len(self._refused))
            self._again = now + AGAIN_SECONDS if self._refused else float("inf")
        self._tick(now)

    def _tick(self, now: float) -> None:
        """Does what is due, without asking thousands of sources of which nothing has come whether something is."""
        if now >= self._every_at:
            self._every_at = now + EVERY_SECONDS
            due = self.subscriptions.keys()
        else:
            due = self._touched | dict.fromkeys(source for source, at in self._dues.items() if at <= now)
        for source in due:
            if (subscription := self.subscriptions.get(source)) is not None:
                self._dues[source] = subscription.tick(now)
        self._touched = {}
        self._due = min(self._dues.values(), default=float("inf"))
        self._due = min(self._due, self._again, self._look_at if self._anybody else float("inf"))

    def _look(self, now: float) -> None:
        if now >= self._look_at:
            self._look_at, self._anybody = now + LOOK_SECONDS, False
            for source, subscription in self.subscriptions.items():
                if subscription.connections or subscription.feeds:  # Nothing waits of those that cannot be reached.
                    self._anybody = True
                    self._touched[source] = None  # It may be broken off.
                    subscription.look(now)
        if now >= self._bound_at:
            self._bound_at = now + BOUND_SECONDS
            self.index.bound()
            self.index.fit()

    @property
    def greeted(self) -> bool:
        """Whether any of the sources there are now has ever been connected."""
        return any(subscription.greeted for subscription in self.subscriptions.values())

    def states(self) -> dict[tuple[str, int | None], str]:
        """Returns what is wrong with sources, by what their rows call their worker, and the rank of its batches.

        Returns:
            `DISCONNECTED` or `SILENT`, where it is one of them. The rank is None where no batch has told it.
        """
        states: dict[tuple[str, int | None], str] = {}
        for subscription in self.subscriptions.values():
            if not (state := subscription.state):
                continue
            ranks = {(feed.worker.label, feed.rank) for feed in subscription.feeds.values()}
            for owner in ranks or {(self.index.workers[name].label, None) for name in subscription.workers}:
                states[owner] = min(states.get(owner, state), state)  # "down" is worse.
        return states

    def close(self) -> None:
        """Ends every subscription, and with it every row."""
        for source in list(self.subscriptions):
            self._end(source)
        self.index.close()
        # ZeroMQ's own thread closes what we have closed; of thousands of sockets that takes it seconds.
        closing = threading.Thread(target=self._context.term, name="kvcache-otel-close", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)

    def _begin(self, source: Source, of: int) -> None:
        limits = Limits(silence=SILENCE, held_bytes=min(max(HELD_BYTES // of, LEAST_HELD), MOST_HELD))
        try:
            subscription = Subscription(
                self._context,
                source,
                self.index.recorder,
                self._worker,
                self.index.share(f"{printable(source.name)!r} at {printable(source.endpoint)}"),
                self._register,
                limits,
                self._names,
                retry_seconds=max(RETRY_SECONDS, of / RETRIES),
            )
        except Exception as error:
            if source in self._refused:
                del self._refused[source]  # It is the last in turn.
            else:
                self.index.wrong_source()
                self._few.say(
                    "kvcache: source %r is left out as long as this lasts: %s: %s",
                    printable(source.name),
                    printable(source.endpoint),
                    printable(error),
                )
            self._refused[source] = None
            self._again = self._clock() + AGAIN_SECONDS
            self._due = min(self._due, self._again)
            return
        self._refused.pop(source, None)
        self.subscriptions[source] = subscription
        subscription.begin()
        self._dues[source] = self._due = 0.0

    def _goes_on(self, source: Source, now: Source) -> bool:
        """Has a subscription go on as a source with the same connection; returns whether its books can, too."""
        subscription = self.subscriptions[source]
        for name in subscription.workers:
            worker = self.index.workers.get(name)
            if worker is not None and not worker.change(now.engine, now.block_size, now.clears_device_only):
                _logger.warning(
                    "kvcache: source %r is said to mean something else by its events: it begins anew",
                    printable(now.name),
                )
                return False
        self.subscriptions[now] = self.subscriptions.pop(source)
        self._dues[now] = self._dues.pop(source, 0.0)
        subscription.source = now
        for socket, (reader, of) in self._readers.items():
            if of == source:
                self._readers[socket] = reader, now
        return True

    def _end(self, source: Source) -> None:
        subscription = self.subscriptions.pop(source)
        self._dues.pop(source, None)
        subscription.close()
        for name in subscription.workers:
            self._users[name] -= 1
            if not self._users[name]:
                del self._users[name], self._whose[name]
                self.index.release(name)
        for feed in subscription.feeds.values():
            feed.leave()  # Its worker may have other sources; then only these ranks' books end.

    def _worker(self, source: Source, topic: str, share: Share) -> Worker:
        # Publishers that connect to us are told apart by their topics. Sources of one name are ranks of one worker.
        topic = topic if source.binds else ""
        name = f"{source.name}/{printable(topic)}" if topic else source.name
        while self._whose.setdefault(name, (source.name, topic)) != (source.name, topic):
            name += "~"  # Another's name, which somebody imitates.
        self._users[name] = self._users.get(name, 0) + 1
        worker = self.index.workers.get(name)
        if worker is None:
            worker = self.index.add(
                name,
                engine=source.engine,
                block_size=source.block_size,
                clears_device_only=source.clears_device_only,
                share=share,
            )
        return worker

    def _register(self, source: Source, socket: zmq.Socket[bytes], reader: Callable[[float], None] | None) -> None:
        if reader is not None:
            self._readers[socket] = reader, source
        else:
            self._readers.pop(socket, None)
        self._polled = None
