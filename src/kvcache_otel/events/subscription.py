"""A subscription: the sockets to one source, and a stream for each publisher that is behind them."""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import zmq
import zmq.utils.monitor

from kvcache_otel import semconv
from kvcache_otel.events import frames
from kvcache_otel.events.stream import Counts, Limits, Stream
from kvcache_otel.events.wire import LARGEST
from kvcache_otel.events.worker import MORE
from kvcache_otel.record.cells import Counter
from kvcache_otel.record.labels import printable
from kvcache_otel.semconv import Reason

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcache_otel.events.source import Source
    from kvcache_otel.events.worker import Worker
    from kvcache_otel.record.recorder import Recorder

    Register = Callable[[zmq.Socket[bytes], Callable[[float], None] | None], None]

_logger = logging.getLogger(__name__)

PER_ROUND, BYTES_PER_ROUND, SECONDS_PER_ROUND = 256, 2**20, 0.05
"""Messages of one socket before others have their turn, their bytes, and how long they may take."""

SILENT_SECONDS = 30.0
"""How long a source may be connected and say nothing before that is said."""

WAITING = 64
"""Messages that wait in a socket. More wait on the publisher's side, which has a limit of its own."""

REPLAYED = 10_000
"""Answers that wait in a replay's socket: as many as publishers keep."""

LEAST_HELD = 2**20
"""Bytes of batches that each stream may let wait; all of them may have more."""

MOST_TOPICS, LONGEST_TOPIC = 256, 256
"""Topics of one source that have a stream of their own, and their bytes that count; a source with more is making them
up."""

BROKEN_OFF_SECONDS = 1.0
"""After which we connect again ourselves. Where it was ZeroMQ that broke off, since it could not read or would not take
what came, it does not."""

DUE_SECONDS = 0.01
"""Between two times that one stream has something due, at the least: the loop must not spin."""

LINES, LINES_SECONDS = 10, 60.0
"""What is said of one source's connections in so many seconds: a publisher may come and go at full speed."""

_FRAME_FAILURES = (Reason.FRAME_COUNT, Reason.SEQUENCE_FRAME)

_UP, _DOWN, _AGAIN = zmq.EVENT_CONNECTED | zmq.EVENT_ACCEPTED, zmq.EVENT_DISCONNECTED, zmq.EVENT_CONNECT_RETRIED


class Feed:
    """One publisher behind a source: its stream, which tells its worker what comes, and the socket of its replay."""

    def __init__(
        self, subscription: Subscription, worker: Worker, recorder: Recorder, *, replay: str, limits: Limits
    ) -> None:
        """Args:
        subscription: Whose sockets it uses.
        worker: What is told.
        recorder: Where the rows are.
        replay: Where to ask for what was missed; empty for nowhere.
        limits: How much may wait.
        """
        self._subscription = subscription
        self._recorder = recorder
        self._replay = replay
        self._socket: zmq.Socket[bytes] | None = None
        self.worker = worker
        self.rank: int | None = None
        self._ranks: set[int] = set()
        # Rows name the rank, which the first batch will tell.
        self.stream = Stream(self, self._counts(), replay=bool(replay), limits=limits)
        self._answering = self._replay_silent = False  # This time, and whether that was said.
        self._lost_said, self._lost_next = 0.0, 0.0
        self._unsaid = tuple(zip(_FRAME_FAILURES, self.stream.counts[4:], strict=True))

    def apply(self, payload: bytes) -> None:
        """Takes over the next batch."""
        batch = self.worker.receive(payload, self.rank or 0)
        if batch is None:
            return
        rank = (self.rank or 0) if batch.rank is None else batch.rank
        if rank not in self._ranks:
            self._ranks.add(rank if rank in self.worker.ranks else MORE)
        if self.rank is None:
            self.rank = rank
            before, self.stream.counts = self.stream.counts, self._counts()
            for cell, provisional in zip(self.stream.counts[:4], before[:4], strict=True):
                cell.add(provisional.value)

    def complain(self, now: float) -> None:
        """Says what the stream only counts: messages whose frames cannot be read, once, and losses now and then."""
        lost = self.stream.counts.lost.value
        if lost > self._lost_said and now >= self._lost_next:
            self._lost_said, self._lost_next = lost, now + LINES_SECONDS
            _logger.warning(
                "kvcache: source %r, rank %d: %d batches lost so far; what is received of it may be wrong until its "
                "publisher starts again",
                printable(self._subscription.source.name),
                self.rank or 0,
                lost,
            )
        for reason, cell in self._unsaid:
            if cell.value:
                self._unsaid = tuple(other for other in self._unsaid if other[0] != reason)
                self.worker.failed(reason, 0, detail="a message's frames")

    def reset(self) -> None:
        """Forgets what the publisher's batches added up to."""
        _logger.warning("kvcache: source %r: its publisher has started again", printable(self.worker.name))
        self.empty()

    def empty(self) -> None:
        """Empties the books of every rank that its batches named."""
        for rank in self._ranks:
            self.worker.reset(rank)

    def ask(self, start: int) -> None:
        """Asks for what was missed."""
        self.hang_up()
        with self._subscription.said("its replay"):
            self._socket = socket = self._subscription.open(zmq.DEALER, REPLAYED)
            socket.connect(self._replay)
            self._subscription.register(socket, self._answered)
            self._answering = False
            socket.send_multipart(frames.request(start), zmq.DONTWAIT)

    def hang_up(self) -> None:
        """Closes the socket that was opened for that."""
        socket, self._socket = self._socket, None
        if socket is not None:
            self._subscription.register(socket, None)
            socket.close()
            if not (self._answering or self._replay_silent):
                self._replay_silent = True
                _logger.warning(
                    "kvcache: source %r: no answer from its replay at %s; what is missed counts as lost",
                    printable(self._subscription.source.name),
                    self._replay,
                )

    def _answered(self, now: float) -> None:
        taken = 0
        with self._subscription.said("its replay"):
            for _ in range(PER_ROUND):
                socket = self._socket
                if socket is None or taken >= BYTES_PER_ROUND:  # That was the last answer, or others have their turn.
                    return
                try:
                    message = socket.recv_multipart(zmq.DONTWAIT)
                except zmq.Again:
                    return
                taken += sum(map(len, message))
                self._answering, self._replay_silent = True, False
                self.stream.answer(message, now)

    def _counts(self) -> Counts:
        worker, recorder = self.worker, self._recorder
        failures = (
            recorder.counter(
                semconv.EVENT_DECODE_FAILURES, {semconv.KVCACHE_WORKER: worker.label, semconv.KVCACHE_REASON: reason}
            )
            for reason in _FRAME_FAILURES
        )
        if self.rank is None:
            return Counts(*(Counter(lambda _: None) for _ in range(4)), *failures)
        labels = worker.labels(self.rank)
        return Counts(
            recorder.counter(semconv.EVENT_BATCHES_LOST, labels),
            recorder.counter(semconv.EVENT_BATCHES_RECOVERED, labels),
            recorder.counter(semconv.EVENT_BATCHES_DUPLICATE, labels),
            recorder.counter(semconv.EVENT_PUBLISHER_RESETS, labels),
            *failures,
        )


class Subscription:
    """The sockets to one source.

    Attributes:
        source: Where to.
        connections: Publishers that are connected now.
        feeds: The publishers that have been heard, by topic.
        workers: What they are called, each as often as it is used.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        source: Source,
        recorder: Recorder,
        worker: Callable[[Source, str], Worker],
        register: Register,
        limits: Limits,
    ) -> None:
        """Args:
        context: ZeroMQ's.
        source: Where to.
        recorder: Where the rows are.
        worker: Returns the worker of a source and one of its topics.
        register: Sees to it that a socket's function is called when something has come; None for no more.
        limits: How much each stream may let wait.

        Raises:
            zmq.ZMQError: There is no such endpoint.
        """
        self.source = source
        self.register = register
        self.connections = 0
        self.feeds: dict[str, Feed] = {}
        self.workers: list[str] = []
        self._context, self._recorder, self._worker, self._limits = context, recorder, worker, limits
        self._said: set[str] = set()
        self._unreachable = False
        self._own: Worker | None = None
        self._broken_off = float("inf")  # When we connect again; infinite where ZeroMQ does so itself.
        self._lines, self._lines_until = 0, 0.0
        self._silent_until = float("inf")  # When it is said that nothing has come; infinite once something has.
        self._monitor: zmq.Socket[bytes] | None = None
        self._socket = socket = self.open(zmq.SUB, WAITING)
        try:
            self._monitor = monitor = socket.get_monitor_socket(_UP | _DOWN | _AGAIN)
            socket.setsockopt(zmq.SUBSCRIBE, source.topic.encode())
            if source.binds:
                socket.bind(source.endpoint)
            else:
                socket.connect(source.endpoint)
        except BaseException:
            self._close_sockets()
            raise
        register(monitor, self._watch)
        register(socket, self._receive)

    def open(self, kind: int, waiting: int) -> zmq.Socket[bytes]:
        """Returns a new socket that waits for nobody when it is closed, and takes no message without bounds."""
        socket = self._context.socket(kind)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.IPV6, 1),
            (zmq.RCVHWM, waiting),
            (zmq.MAXMSGSIZE, LARGEST),
            (zmq.RECONNECT_IVL, 100),
            (zmq.RECONNECT_IVL_MAX, 5_000),
            # Not ZeroMQ's own heartbeats: they take a slow reader for a dead peer, and can abort us (libzmq 3937).
            (zmq.TCP_KEEPALIVE, 1),
            (zmq.TCP_KEEPALIVE_IDLE, 30),
            (zmq.TCP_KEEPALIVE_INTVL, 10),
            (zmq.TCP_KEEPALIVE_CNT, 3),
        ):
            socket.setsockopt(option, value)
        return socket

    def begin(self, now: float) -> None:
        """Asks for what was published before, where there is replay: an idle publisher would say nothing."""
        if not self.source.binds:
            self._own = self._named("")  # So that there is a worker, whether it is heard or not.
        if self.source.replay:
            self._feed("").stream.open(now)

    def tick(self, now: float) -> float:
        """Does what is due; returns when something will be, infinite where only a message can change anything."""
        if self._broken_off <= now:
            with self.said("its connection"):
                self._connect_again()
        if self._silent_until <= now:
            self._silent_until = float("inf")
            _logger.warning(
                "kvcache: source %r has sent nothing for %d s: its engine is idle, or its topic is not %r",
                printable(self.source.name),
                SILENT_SECONDS,
                printable(self.source.topic),
            )
        due = min(self._broken_off, self._silent_until)
        for feed in self.feeds.values():
            stream = feed.stream
            if stream.due <= now:
                with self.said("its stream"):
                    stream.tick(now)
                due = min(due, max(stream.due, now + DUE_SECONDS))
            else:
                due = min(due, stream.due)
            feed.complain(now)
        return due

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
        if self._monitor is not None:
            self.register(self._monitor, None)
        self.register(self._socket, None)
        self._close_sockets()

    # -- what comes in -------------------------------------------------------------------------------------------------

    def _receive(self, now: float) -> None:
        socket, feeds, taken, began = self._socket, self.feeds, 0, time.monotonic()
        self._silent_until = float("inf")
        with self.said("its socket"):
            for _ in range(PER_ROUND):
                try:
                    message = socket.recv_multipart(zmq.DONTWAIT)
                except zmq.Again:
                    return
                taken += sum(map(len, message))
                with self.said("a message"):
                    topic = "" if len(message) != 3 else message[0][:LONGEST_TOPIC].decode("utf-8", "replace")
                    feed = feeds.get(topic) or self._feed(topic)
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
            feed = self.feeds[topic] = Feed(
                self, self._named(topic), self._recorder, replay=self.source.replay, limits=limits
            )
        return feed

    def _named(self, topic: str) -> Worker:
        worker = self._worker(self.source, topic)
        self.workers.append(worker.name)
        return worker

    def _watch(self, now: float) -> None:
        monitor = self._monitor
        if monitor is None:
            return
        with self.said("its monitor"):
            for _ in range(PER_ROUND):
                try:
                    message: Any = zmq.utils.monitor.recv_monitor_message(monitor, zmq.DONTWAIT)
                except zmq.Again:
                    return
                self._changed(message["event"], now)

    def _changed(self, event: int, now: float) -> None:
        name = printable(self.source.name)
        self._broken_off = float("inf")
        if event & _UP:
            self.connections += 1
            self._unreachable = False
            if not self.feeds or not any(feed.stream.heard is not None for feed in self.feeds.values()):
                self._silent_until = now + SILENT_SECONDS
            self._tell(logging.INFO, now, "kvcache: source %r is connected at %s", name, self.source.endpoint)
        elif event & _DOWN:
            self.connections = max(self.connections - 1, 0)
            if not self.source.binds:
                self._broken_off = now + BROKEN_OFF_SECONDS
            self._tell(
                logging.WARNING,
                now,
                "kvcache: source %r is disconnected at %s: its publisher is gone, or has sent more than %d MiB at once",
                name,
                self.source.endpoint,
                LARGEST // 2**20,
            )
        elif not (self.connections or self._unreachable):
            self._unreachable = True
            self._tell(
                logging.WARNING,
                now,
                "kvcache: source %r cannot be reached at %s; it is tried again and again",
                name,
                self.source.endpoint,
            )

    def _connect_again(self) -> None:
        self._broken_off = float("inf")
        if self._own is not None:
            self._own.failed(
                Reason.OTHER, detail=f"more than {LARGEST // 2**20} MiB at once, or what is not of ZeroMQ; broken off"
            )
        with suppress(zmq.ZMQError):  # It may have forgotten the endpoint by itself.
            self._socket.disconnect(self.source.endpoint)
        self._socket.connect(self.source.endpoint)

    def _tell(self, level: int, now: float, text: str, *arguments: object) -> None:
        if now >= self._lines_until:
            self._lines, self._lines_until = 0, now + LINES_SECONDS
        self._lines += 1
        if self._lines < LINES:
            _logger.log(level, text, *arguments)
        elif self._lines == LINES:
            _logger.log(level, text + " (no more of its connections for a minute)", *arguments)

    def _close_sockets(self) -> None:
        with suppress(zmq.ZMQError):
            self._socket.disable_monitor()
        if self._monitor is not None:  # It is not closed with what it is about.
            self._monitor.close()
        self._socket.close()


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
