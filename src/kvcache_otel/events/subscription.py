"""A subscription: the socket to one source, and a feed for each publisher that is behind it."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import zmq

from kvcache_otel import semconv
from kvcache_otel.events import tcp
from kvcache_otel.events.feed import BYTES_PER_ROUND, PER_ROUND, Feed
from kvcache_otel.events.inlet import DOWN, GREETED, STRANGE, UP, Inlet
from kvcache_otel.events.names import is_named
from kvcache_otel.events.wire import LARGEST
from kvcache_otel.record.labels import printable
from kvcache_otel.semconv import Reason

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcache_otel.events.inlet import Excess
    from kvcache_otel.events.names import Names
    from kvcache_otel.events.room import Share
    from kvcache_otel.events.source import Source
    from kvcache_otel.events.terms import Limits
    from kvcache_otel.events.worker import Worker
    from kvcache_otel.record.recorder import Recorder

_logger = logging.getLogger(__name__)

SECONDS_PER_ROUND = 0.05
"""How long the messages of one socket may take before others have their turn."""

SILENT_SECONDS = 30.0
"""How long a source may be connected and say nothing, or nothing of the topic that is wanted, before that is said."""

WAITING, WAITING_BYTES = 64, 2**28
"""Messages that wait in a socket. More wait on the publisher's side, which has a limit of its own. A publisher whose
messages are so long that these have more bytes is broken off."""

LEAST_HELD = 2**20
"""Bytes of batches that each stream may let wait; all of them may have more."""

MOST_TOPICS, LONGEST_TOPIC = 256, 256
"""Topics of one source that have a stream of their own, and their bytes that count; a source with more is making them
up."""

BROKEN_OFF_SECONDS, LONGEST_OFF_SECONDS = 1.0, 60.0
"""After which we connect again ourselves. Where it was ZeroMQ that broke off, since it could not read or would not take
what came, it does not; where it was we, each time we wait twice as long."""

NAMED_SECONDS, LONGEST_NAMED_SECONDS = 0.1, 5.0
"""After which we look again what its host's name is, where that is not known or nobody is there; then twice as long."""

DUE_SECONDS = 0.01
"""Between two times that one stream has something due, at the least: the loop must not spin."""

LINES, LINES_SECONDS = 10, 60.0
"""What is said of one source's connections in so many seconds, and of its batches: a publisher may come and go at full
speed, or send numbers that make no sense."""

DISCONNECTED, SILENT = "down", "silent"
"""What may be wrong with a source: nobody is connected; somebody is, and nothing has come live."""


class Subscription:
    """The sockets to one source.

    Attributes:
        source: Where to.
        endpoint: The same, with an address in place of a name; empty as long as that is not known.
        names: Knows what hosts are.
        share: What it may have of the room for rows.
        connections: Publishers that are connected now.
        greeted: Whether one has ever been that speaks ZeroMQ.
        feeds: The publishers that have been heard, by topic.
        workers: What they are called, each as often as it is used.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        source: Source,
        recorder: Recorder,
        worker: Callable[[Source, str, Share], Worker],
        share: Share,
        register: Callable[[Source, zmq.Socket[bytes], Callable[[float], None] | None], None],
        limits: Limits,
        names: Names,
        *,
        retry_seconds: float,
    ) -> None:
        """Args:
        context: ZeroMQ's.
        source: Where to.
        recorder: Where the rows are.
        worker: Returns the worker of a source and one of its topics, which has room of a share.
        share: What it may have of the room for rows.
        register: Sees to it that the function of a source's socket is called when something has come; None for no
            more.
        limits: How much each stream may let wait.
        names: Knows what hosts are.
        retry_seconds: Between two times that it is tried to be connected, at the most.

        Raises:
            zmq.ZMQError: There is no such endpoint.
        """
        self.source = source
        self.endpoint = ""
        self.names = names
        self.share = share
        self._register = register
        self._retry_seconds = retry_seconds
        self.connections = 0
        self.greeted = False
        self.feeds: dict[str, Feed] = {}
        self.workers: list[str] = []
        self._context, self._recorder, self._worker, self._limits = context, recorder, worker, limits
        self._said: set[str] = set()
        self._unreachable = False
        self._own: Worker | None = None
        self._broken_off = float("inf")  # When we connect again; infinite where ZeroMQ does so itself.
        self._resting = float("inf")  # The same, where it was we who broke off.
        self._named_at = float("inf")  # When we look again what its host's name is.
        self._named_rest = NAMED_SECONDS
        self._rest, self._rested = BROKEN_OFF_SECONDS, 0.0
        self._lines: dict[str, tuple[int, float]] = {}  # What was said of late, and until when that is.
        self._silent_until = float("inf")  # When it is said that nothing has come; infinite once something has.
        self._wanted = source.topic.encode()
        self._probing = False
        self._foreign: str | None = None  # The topic that is sent instead.
        self._inlet = self._connected()

    def open(self, kind: int, waiting: int, most: int) -> Inlet:
        """Returns a new socket that waits for nobody when it is closed, and takes nothing without bounds."""
        return Inlet(self._context, kind, waiting=waiting, most=most, retry_seconds=self._retry_seconds)

    def register(self, socket: zmq.Socket[bytes], reader: Callable[[float], None] | None) -> None:
        """Has a socket's function called when something has come; None for no more."""
        self._register(self.source, socket, reader)  # Which it is now: it may have gone on as another.

    def begin(self) -> None:
        """Lets its worker be there, whether it is heard or not."""
        if not self.source.binds:
            self._blamed()

    def tick(self, now: float) -> float:
        """Does what is due; returns when something will be, infinite where only a message can change anything."""
        if min(self._broken_off, self._resting) <= now:
            with self.said("its connection"):
                self._connect_again(now)
        if self._silent_until <= now:
            self._silent_until = float("inf")
            with self.said("its silence"):
                self._silent(now)
        if self._named_at <= now:
            with self.said("its name"):
                self._look_up(now)
        due = min(self._broken_off, self._resting, self._silent_until, self._named_at)
        for feed in self.feeds.values():
            stream = feed.stream
            if stream.due <= now:
                with self.said("its stream"):
                    feed.tick(now)
                due = min(due, max(stream.due, now + DUE_SECONDS))
            else:
                due = min(due, stream.due)
            feed.complain(now)
        return due

    def look(self, now: float) -> None:
        """Looks whether more waits inside ZeroMQ than may, and breaks that connection off."""
        with self.said("its connection"):
            excess = self._inlet.look()
            if excess is not None:
                self._break_off(excess, now)
            for feed in self.feeds.values():
                feed.look(now)

    def said(self, what: str) -> _Said:
        """Returns a context in which an exception is counted, said once, and goes no further."""
        return _Said(self, what)

    def failed(self, what: str, error: BaseException) -> None:
        """Counts a failure of ours, and says it once."""
        self._recorder.counter(semconv.TELEMETRY_ERRORS, {semconv.KVCACHE_TELEMETRY_HOOK: "watch"}).add(1)
        if what not in self._said:
            self._said.add(what)
            _logger.warning(
                "kvcache: source %r: %s failed, further failures are in kvcache.telemetry.errors alone: %s: %s",
                printable(self.source.name),
                what,
                type(error).__name__,
                printable(error),
            )

    def close(self) -> None:
        """Ends it."""
        for feed in self.feeds.values():
            feed.hang_up()
        self._inlet.close()

    # -- what comes in -------------------------------------------------------------------------------------------------

    def _receive(self, now: float) -> None:
        inlet, feeds, wanted, taken, began = self._inlet, self.feeds, self._wanted, 0, time.monotonic()
        if not wanted:
            self._silent_until = float("inf")
        with self.said("its socket"):
            for _ in range(PER_ROUND):
                try:
                    message = inlet.take()
                except zmq.Again:
                    return
                if message is None:
                    return
                taken += sum(map(len, message))
                with self.said("a message"):
                    topic = "" if len(message) != 3 else message[0][:LONGEST_TOPIC].decode("utf-8", "replace")
                    if wanted and not self._is_wanted(message[0], topic, now):
                        continue
                    feed = feeds.get(topic) or self._feed(topic)
                    if inlet.sender != feed.sender:
                        self._sent_by(inlet.sender, feed, now)
                    feed.stream.live(message, now)
                if taken >= BYTES_PER_ROUND or time.monotonic() - began >= SECONDS_PER_ROUND:
                    return

    def _feed(self, topic: str) -> Feed:
        """Returns the feed of one topic. There is one replay, which sends every topic: with it, all are of one feed."""
        if self.source.replay or (topic not in self.feeds and len(self.feeds) >= MOST_TOPICS):
            topic = next(iter(self.feeds), topic)
        feed = self.feeds.get(topic)
        if feed is None:
            held = max(self._limits.held_bytes // (len(self.feeds) + 1), min(LEAST_HELD, self._limits.held_bytes))
            limits = self._limits._replace(held_bytes=held)
            # Of several topics, each is a publisher. Where they connect to us, each is a worker besides.
            several = self.feeds and not self.source.binds
            share = self.share.part(f"topic {printable(topic)!r}") if several else self.share
            worker = self._named(topic)
            title = repr(printable(worker.name))
            if topic and not (self.source.binds or self.source.replay):  # Then a worker has several.
                title = f"{title}, topic {printable(topic)!r}"
            feed = self.feeds[topic] = Feed(
                self, worker, share, self._recorder, title=title, replay=self.source.replay, limits=limits
            )
        return feed

    def _sent_by(self, sender: int, feed: Feed, now: float) -> None:
        """Says that two publishers send the same topic, if both are connected: nothing tells their batches apart."""
        before, feed.sender = feed.sender, sender
        if not feed.is_mixed and self._inlet.is_connected(before):
            feed.is_mixed = True
            self._recorder.counter(semconv.TELEMETRY_ERRORS, {semconv.KVCACHE_TELEMETRY_HOOK: "watch.sources"}).add(1)
            self.tell(
                logging.ERROR,
                now,
                "kvcache: source %r: several publishers send the same topic, and what is received of them is wrong; a "
                "topic for each keeps them apart",
                printable(feed.worker.name),
            )

    def _named(self, topic: str) -> Worker:
        worker = self._worker(self.source, topic, self.share)
        self.workers.append(worker.name)
        return worker

    def _blamed(self) -> Worker:
        """Returns the worker of failures that are no feed's."""
        if self._own is None:
            self._own = self._named("")
        return self._own

    # -- a topic that nobody sends -------------------------------------------------------------------------------------

    def _silent(self, now: float) -> None:
        """Says that nothing has come. Where a topic was asked for, looks what comes otherwise, until something does."""
        name = printable(self.source.name)
        if self._wanted:
            self._probe(True)
            if self._foreign is not None:  # That was said.
                return
            text = "kvcache: source %r has sent nothing of the topic %r for %d s: its engine is idle, or sends another"
            self.tell(logging.WARNING, now, text, name, printable(self.source.topic), SILENT_SECONDS)
        else:
            text = "kvcache: source %r has sent nothing for %d s: its engine is idle"
            self.tell(logging.WARNING, now, text, name, SILENT_SECONDS)

    def _probe(self, on: bool) -> None:
        if on != self._probing:
            self._probing = on
            # What waits in the socket when it is off again may still be of any topic: ZeroMQ has looked at one ahead.
            self._inlet.socket.setsockopt(zmq.SUBSCRIBE if on else zmq.UNSUBSCRIBE, b"")

    def _is_wanted(self, frame: bytes, topic: str, now: float) -> bool:
        """Returns whether a message is of the topic that is wanted, by its first frame; counts and says it if not."""
        if frame.startswith(self._wanted):
            self._silent_until = float("inf")
            self._probe(False)
            return True
        if self._probing:
            self._probe(False)
            self._silent_until = now + SILENT_SECONDS
        self._blamed().count(Reason.OTHER)
        if topic != self._foreign:
            self._foreign = topic
            self.tell(
                logging.WARNING,
                now,
                "kvcache: source %r: nothing of the topic %r that was asked for; its publisher sends %r",
                printable(self.source.name),
                printable(self.source.topic),
                printable(topic),
            )
        return False

    # -- its connections -----------------------------------------------------------------------------------------------

    def _connected(self) -> Inlet:
        inlet = self.open(zmq.SUB, WAITING, WAITING_BYTES)
        try:
            inlet.socket.setsockopt(zmq.SUBSCRIBE, self._wanted)
            if self.source.binds:
                inlet.socket.bind(self.source.endpoint)
            elif not (found := self.names.of(self.source.endpoint)):
                self.endpoint, self._named_at = "", 0.0
            else:
                self.endpoint = self.endpoint if self.endpoint in found else found[0]
                inlet.socket.connect(self.endpoint)
        except BaseException:
            inlet.close()
            raise
        inlet.start(self.register, self.said, self._receive, self._changed)
        return inlet

    def _look_up(self, now: float) -> None:
        """Connects as soon as it is known where; where nobody is, to where its name leads now, one after another."""
        self._named_at = float("inf")
        if self.connections or self._resting != float("inf"):
            return
        found = self.names.of(self.source.endpoint)
        if not self.endpoint and found:
            self.endpoint, self._unreachable, self._named_rest = found[0], False, NAMED_SECONDS
            self._inlet.socket.connect(self.endpoint)
        elif not found:
            if (problem := self.names.problem(self.source.endpoint)) and not self._unreachable:
                self._unreachable = True
                text = "kvcache: source %r cannot be resolved: %s; it is tried again and again"
                self.tell(logging.WARNING, now, text, printable(self.source.name), problem)
            self._named_later(now)
        elif found != (self.endpoint,) and not self._inlet.socket.poll(0):  # What has come is read before.
            place = found.index(self.endpoint) + 1 if self.endpoint in found else 0
            self._inlet.close()
            self._resting = now + BROKEN_OFF_SECONDS  # If this fails.
            self.endpoint = found[place % len(found)]
            self._inlet = self._connected()
            self._resting = float("inf")

    def _named_later(self, now: float) -> None:
        self._named_at = now + self._named_rest
        self._named_rest = min(2 * self._named_rest, LONGEST_NAMED_SECONDS)

    def _changed(self, event: int, now: float) -> None:
        if event & GREETED:
            self.greeted = True
            if self.source.replay:  # An idle publisher would say nothing.
                self._feed("").stream.connected(now)
            return
        if event & STRANGE:
            self._blamed().failed(Reason.OTHER, detail="nothing: a connection ended before it spoke ZeroMQ")
            return
        name = printable(self.source.name)
        self._broken_off = float("inf")
        if event & UP:
            self.connections += 1
            self._unreachable = False
            self._named_rest = NAMED_SECONDS
            self._foreign = None
            if not self._probing and (self._wanted or not self._heard):
                self._silent_until = now + SILENT_SECONDS
            self.tell(logging.INFO, now, "kvcache: source %r is connected at %s", name, printable(self.source.endpoint))
            return
        if event & DOWN:
            self.connections = max(self.connections - 1, 0)
            if not self.connections:
                self._silent_until = float("inf")
                for feed in self.feeds.values():
                    feed.stream.disconnected(now)
            if not self.source.binds:
                self._broken_off = now + BROKEN_OFF_SECONDS
            self.tell(
                logging.WARNING,
                now,
                "kvcache: source %r is disconnected at %s",
                name,
                printable(self.source.endpoint),
            )
            return
        if self._named_at == float("inf") and is_named(self.source.endpoint):
            self._named_later(now)
        if not (self.connections or self._unreachable):
            self._unreachable = True
            self.tell(
                logging.WARNING,
                now,
                "kvcache: source %r cannot be reached at %s; it is tried again and again",
                name,
                printable(self.source.endpoint),
            )

    @property
    def state(self) -> str:
        """What is wrong with it: `DISCONNECTED`, `SILENT`, or nothing."""
        return DISCONNECTED if not self.connections else "" if self._heard else SILENT

    @property
    def _heard(self) -> bool:
        return any(feed.stream.heard is not None for feed in self.feeds.values())

    def _break_off(self, excess: Excess, now: float) -> None:
        self._blamed().count(excess.reason)
        text = "kvcache: source %r is broken off at %s: %s"
        arguments = (printable(self.source.name), printable(self.source.endpoint), excess.why)
        if self.source.binds:  # There are others.
            tcp.hang_up(excess.fd)
            self.tell(logging.WARNING, now, text, *arguments)
            return
        self._rest = min(2 * self._rest, LONGEST_OFF_SECONDS) if now < self._rested else BROKEN_OFF_SECONDS
        self._resting = now + self._rest
        self._rested = self._resting + LONGEST_OFF_SECONDS
        self.connections, self._probing = 0, False
        self._broken_off = self._silent_until = float("inf")
        self._inlet.close()
        self.tell(logging.WARNING, now, text + "; connected again in %g s", *arguments, self._rest)

    def _connect_again(self, now: float) -> None:
        if self._resting == float("inf"):
            # ZeroMQ would connect again to a publisher that is gone: it was ZeroMQ that has broken off.
            self._blamed().count(Reason.OTHER)
            self.tell(
                logging.WARNING,
                now,
                "kvcache: source %r at %s was broken off by ZeroMQ, since a frame had more than %d MiB, or "
                "what came was not ZeroMQ's; connected again",
                printable(self.source.name),
                printable(self.source.endpoint),
                LARGEST // 2**20,
            )
            self._probing = False
            self._inlet.close()  # To disconnect a socket that has a message half read can abort us.
        self._broken_off, self._resting = float("inf"), now + BROKEN_OFF_SECONDS  # If this fails.
        self._inlet = self._connected()
        self._resting = float("inf")

    def tell(self, level: int, now: float, text: str, *arguments: object, about: str = "connections") -> None:
        """Logs a line, unless there have been many of late about the same."""
        lines, until = self._lines.get(about, (0, 0.0))
        if now >= until:
            lines, until = 0, now + LINES_SECONDS
        lines += 1
        self._lines[about] = lines, until
        if lines == LINES:
            text += f" (no more of its {about} for a minute)"
        if lines <= LINES:
            _logger.log(level, text, *arguments)


class _Said:
    def __init__(self, subscription: Subscription, what: str) -> None:
        self._subscription, self._what = subscription, what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        self._subscription.failed(self._what, error)
        return True
