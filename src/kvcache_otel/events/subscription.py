"""A subscription: the sockets to one source, and a stream for each publisher that is behind them."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import zmq
import zmq.utils.monitor

from kvcache_otel import semconv
from kvcache_otel.events import frames
from kvcache_otel.events.stream import Counts, Limits, Stream
from kvcache_otel.events.wire import LARGEST
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

PER_ROUND = 256
"""Messages of one socket before others have their turn."""

WAITING = 64
"""Messages that wait in a socket. More wait on the publisher's side, which has a limit of its own."""

REPLAYED = 10_000
"""Answers that wait in a replay's socket: as many as publishers keep."""

MOST_TOPICS = 256
"""Topics of one source that have a stream of their own; a source with more is making them up."""

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
        # Rows name the rank, which the first batch will tell.
        self.stream = Stream(self, self._counts(), replay=bool(replay), limits=limits)

    def apply(self, payload: bytes) -> None:
        """Takes over the next batch."""
        batch = self.worker.receive(payload, self.rank or 0)
        if self.rank is None and batch is not None:
            self.rank = batch.rank or 0
            before, self.stream.counts = self.stream.counts, self._counts()
            for cell, provisional in zip(self.stream.counts[:4], before[:4], strict=True):
                cell.add(provisional.value)

    def reset(self) -> None:
        """Forgets what the publisher's batches added up to."""
        _logger.warning("kvcache: source %r: its publisher has started again", printable(self.worker.name))
        if self.rank is not None:
            self.worker.reset(self.rank)

    def ask(self, start: int) -> None:
        """Asks for what was missed."""
        self.hang_up()
        with self._subscription.said("its replay"):
            self._socket = socket = self._subscription.open(zmq.DEALER, REPLAYED)
            socket.connect(self._replay)
            self._subscription.register(socket, self._answered)
            socket.send_multipart(frames.request(start), zmq.DONTWAIT)

    def hang_up(self) -> None:
        """Closes the socket that was opened for that."""
        socket, self._socket = self._socket, None
        if socket is not None:
            self._subscription.register(socket, None)
            socket.close()

    def _answered(self, now: float) -> None:
        for _ in range(PER_ROUND):
            socket = self._socket
            if socket is None:  # That was the last answer.
                return
            try:
                message = socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            self.stream.answer(message, now)

    def _counts(self) -> Counts:
        worker, recorder = self.worker, self._recorder
        failures = (
            recorder.counter(
                semconv.EVENT_DECODE_FAILURES, {semconv.KVCACHE_WORKER: worker.label, semconv.KVCACHE_REASON: reason}
            )
            for reason in (Reason.FRAME_COUNT, Reason.SEQUENCE_FRAME)
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
        self._socket = socket = self.open(zmq.SUB, WAITING)
        try:
            self._monitor = socket.get_monitor_socket(_UP | _DOWN | _AGAIN)
            socket.setsockopt(zmq.SUBSCRIBE, source.topic.encode())
            if source.binds:
                socket.bind(source.endpoint)
            else:
                socket.connect(source.endpoint)
        except BaseException:
            self._close_sockets()
            raise
        register(self._monitor, self._watch)
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
            (zmq.HEARTBEAT_IVL, 10_000),
            (zmq.HEARTBEAT_TIMEOUT, 30_000),
        ):
            socket.setsockopt(option, value)
        return socket

    def begin(self, now: float) -> None:
        """Asks for what was published before, where there is replay: an idle publisher would say nothing."""
        if not self.source.binds:
            self._named("")  # So that there is a worker, whether it is heard or not.
        if self.source.replay:
            self._feed("").stream.open(now)

    def tick(self, now: float) -> float:
        """Does what is due; returns when something will be, infinite where only a message can change anything."""
        due = float("inf")
        for feed in self.feeds.values():
            stream = feed.stream
            if stream.due <= now:
                with self.said("its stream"):
                    stream.tick(now)
            due = min(due, stream.due)
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
                self.source.name,
                what,
                type(error).__name__,
                printable(error),
            )

    def close(self) -> None:
        """Ends it."""
        for feed in self.feeds.values():
            feed.hang_up()
        self.register(self._monitor, None)
        self.register(self._socket, None)
        self._close_sockets()

    # -- what comes in -------------------------------------------------------------------------------------------------

    def _receive(self, now: float) -> None:
        socket, feeds = self._socket, self.feeds
        for _ in range(PER_ROUND):
            try:
                message = socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            with self.said("a message"):
                topic = "" if len(message) != 3 else message[0].decode("utf-8", "replace")
                feed = feeds.get(topic) or self._feed(topic)
                feed.stream.live(message, now)

    def _feed(self, topic: str) -> Feed:
        """Returns the feed of one topic. There is one replay, which sends every topic: with it, all are of one feed."""
        if self.source.replay or (topic not in self.feeds and len(self.feeds) >= MOST_TOPICS):
            topic = next(iter(self.feeds), topic)
        feed = self.feeds.get(topic)
        if feed is None:
            feed = self.feeds[topic] = Feed(
                self, self._named(topic), self._recorder, replay=self.source.replay, limits=self._limits
            )
        return feed

    def _named(self, topic: str) -> Worker:
        worker = self._worker(self.source, topic)
        self.workers.append(worker.name)
        return worker

    def _watch(self, _: float) -> None:
        for _ in range(PER_ROUND):
            try:
                event: Any = zmq.utils.monitor.recv_monitor_message(self._monitor, zmq.DONTWAIT)
            except zmq.Again:
                return
            if event["event"] & _UP:
                self.connections += 1
                self._unreachable = False
                _logger.info("kvcache: source %r is connected", self.source.name)
            elif event["event"] & _DOWN:
                self.connections = max(self.connections - 1, 0)
                _logger.warning(
                    "kvcache: source %r is disconnected: its publisher is gone, or has sent more than %d MiB at once",
                    self.source.name,
                    LARGEST // 2**20,
                )
            elif not (self.connections or self._unreachable):
                self._unreachable = True
                _logger.warning(
                    "kvcache: source %r cannot be reached at %s; it is tried again and again",
                    self.source.name,
                    self.source.endpoint,
                )

    def _close_sockets(self) -> None:
        with suppress(zmq.ZMQError):
            self._socket.disable_monitor()
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
