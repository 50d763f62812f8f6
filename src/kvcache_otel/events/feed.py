"""A feed: one publisher behind a source, and what is asked of it again when something was missed."""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import TYPE_CHECKING

import zmq

from kvcache_otel import semconv
from kvcache_otel.events import frames
from kvcache_otel.events.names import host_of
from kvcache_otel.events.stream import Stream
from kvcache_otel.events.terms import Counts, Limits
from kvcache_otel.record.cells import Counter
from kvcache_otel.record.labels import printable
from kvcache_otel.semconv import Reason

if TYPE_CHECKING:
    from kvcache_otel.events.inlet import Inlet
    from kvcache_otel.events.room import Share
    from kvcache_otel.events.subscription import Subscription
    from kvcache_otel.events.worker import Worker
    from kvcache_otel.record.recorder import Recorder

_logger = logging.getLogger(__name__)

PER_ROUND, BYTES_PER_ROUND = 256, 2**20
"""Messages of one socket before others have their turn, and their bytes."""

REPLAYED, REPLAYED_BYTES = 10_000, 2**30
"""Answers that wait in a replay's socket: as many as publishers keep, which send them all at once."""

LOSS_SECONDS = 60.0
"""Between two times that further losses are said."""

OFTEN, OFTEN_SECONDS = 4, 60
"""So many restarts within so many seconds are no engine's: that is said."""

_FRAME_FAILURES = (Reason.FRAME_COUNT, Reason.SEQUENCE_FRAME)


class Feed:
    """One publisher behind a source: its stream, which tells its worker what comes, and the socket of its replay.

    Attributes:
        worker: What is told.
        rank: Which its batches say; None before the first.
        stream: Its stream.
        sender: The connection that its last message came by.
        is_mixed: Whether another has sent the same topic at the same time.
    """

    def __init__(
        self,
        subscription: Subscription,
        worker: Worker,
        share: Share,
        recorder: Recorder,
        *,
        title: str,
        replay: str,
        limits: Limits,
    ) -> None:
        """Args:
        subscription: Whose sockets it uses.
        worker: What is told.
        share: What tells its books from those of the worker's other publishers.
        recorder: Where the rows are.
        title: What the log calls it.
        replay: Where to ask for what was missed; empty for nowhere.
        limits: How much may wait.
        """
        self._subscription = subscription
        self._share = share
        self._recorder = recorder
        self._title = title
        self._replay = replay
        self._inlet: Inlet | None = None
        self._request: int | None = None  # What it is to be asked as soon as it is known where it is.
        self.worker = worker
        self.rank: int | None = None
        self.sender, self.is_mixed = -1, False
        self._counted_at: int | None = None  # Rows name the rank, which the first batch will tell.
        self.stream = Stream(self, self._counts(None), replay=bool(replay), limits=limits)
        self._answering = self._replay_silent = False  # This time, and whether that was said.
        self._resets = deque[float](maxlen=OFTEN)  # When its publisher started again.
        self._waited = False  # Whether it is since its time is over that we hang up.
        self._lost_said, self._lost_next = 0.0, 0.0
        self._unsaid = tuple(zip(_FRAME_FAILURES, self.stream.counts[4:], strict=True))

    def apply(self, payload: bytes) -> None:
        """Takes over the next batch."""
        batch = self.worker.receive(payload, self.rank or 0, self._share)
        if batch is not None and self.rank is None:
            self.rank = batch.rank or 0
            self._count_at(self.rank)

    def tick(self, now: float) -> None:
        """Does what is due in its stream."""
        self._waited = True
        try:
            self.stream.tick(now)
        finally:
            self._waited = False

    def complain(self, now: float) -> None:
        """Says what the stream only counts: messages whose frames cannot be read, once, and losses now and then."""
        lost = self.stream.counts.lost.value
        if lost and self._counted_at is None:  # Nothing has told the rank, and it may be that nothing ever will.
            self._count_at(0)
        if lost > self._lost_said and now >= self._lost_next:
            self._lost_said, self._lost_next = lost, now + LOSS_SECONDS
            self._say(
                "kvcache: source %s, rank %d: %d batches lost so far; what is received of it may be wrong until its "
                "publisher starts again",
                self._title,
                self.rank or 0,
                lost,
            )
        for reason, cell in self._unsaid:
            if cell.value:
                self._unsaid = tuple(other for other in self._unsaid if other[0] != reason)
                self.worker.failed(reason, 0, detail="a message's frames")

    def reset(self) -> None:
        """Forgets what the publisher's batches added up to."""
        now = time.monotonic()
        self._say("kvcache: source %s: its publisher has started again", self._title)
        self._resets.append(now)
        if len(self._resets) == OFTEN and now - self._resets[0] < OFTEN_SECONDS:
            self._resets.clear()
            text = (
                "kvcache: source %s has started again %d times within %d s: if there are several publishers behind it, "
                "or its replay is another's, what is received of it is wrong"
            )
            self._subscription.tell(logging.ERROR, now, text, self._title, OFTEN, OFTEN_SECONDS, about="restarts")
        self.worker.reset(share=self._share)

    def forget(self) -> None:
        """Forgets it too, since its replay, which was silent, has what came before and tells all of it again."""
        self.worker.reset(share=self._share)

    def restore(self, payload: bytes) -> None:
        """Takes over a batch again, which was counted when it came."""
        self.worker.restore(payload, self.rank or 0, self._share)

    def leave(self) -> None:
        """Forgets it too, since the source is gone, while its worker may have others."""
        self.worker.leave(self._share)

    def ask(self, start: int) -> None:
        """Asks for what was missed."""
        self.hang_up()
        with self._subscription.said("its replay"):
            self._inlet = inlet = self._subscription.open(zmq.DEALER, REPLAYED, REPLAYED_BYTES)
            inlet.start(self._subscription.register, self._subscription.said, self._answered)
            self._answering = False
            self._request = start
            self._connect(inlet)

    def _connect(self, inlet: Inlet) -> None:
        """Sends what there is to ask, if it is known where; where that is the publisher's host, of its address."""
        found = self._subscription.names.of(self._replay)
        if self._request is None or not found:
            return
        ours = host_of(self._subscription.endpoint)
        inlet.socket.connect(next((one for one in found if host_of(one) == ours), found[0]))
        request, self._request = self._request, None
        inlet.socket.send_multipart(frames.request(request), zmq.DONTWAIT)

    def hang_up(self) -> None:
        """Closes the socket that was opened for that."""
        if self._close() and self._waited and not (self._answering or self._replay_silent):
            self._replay_silent = True
            _logger.warning(
                "kvcache: source %r: no answer from its replay at %s; what is missed counts as lost",
                printable(self._subscription.source.name),
                printable(self._replay),
            )

    def look(self, now: float) -> None:
        """Asks what could not be asked yet.

        Looks whether its replay has sent more than may wait, and breaks it off then: it is silent from now on."""
        inlet = self._inlet
        if inlet is not None and self._request is not None:
            self._connect(inlet)
        excess = None if inlet is None else inlet.look()
        if excess is not None:
            self._close()
            self.worker.count(excess.reason)
            self._subscription.tell(
                logging.WARNING,
                now,
                "kvcache: source %r: its replay at %s is broken off: %s; what is missed counts as lost",
                printable(self._subscription.source.name),
                printable(self._replay),
                excess.why,
            )

    def _close(self) -> bool:
        inlet, self._inlet, self._request = self._inlet, None, None
        if inlet is not None:
            inlet.close()
        return inlet is not None

    def _answered(self, now: float) -> None:
        taken = 0
        with self._subscription.said("its replay"):
            for _ in range(PER_ROUND):
                inlet = self._inlet
                if inlet is None or taken >= BYTES_PER_ROUND:  # That was the last answer, or others have their turn.
                    return
                try:
                    message = inlet.take()
                except zmq.Again:
                    return
                if message is None:
                    return
                taken += sum(map(len, message))
                self._answering, self._replay_silent = True, False
                self.stream.answer(message, now)

    def _say(self, text: str, *arguments: object) -> None:
        self._subscription.tell(logging.WARNING, time.monotonic(), text, *arguments, about="batches")

    def _count_at(self, rank: int) -> None:
        """Has rows of a rank say what becomes of batches. What others have said of them already stays there."""
        if self._counted_at == rank:
            return
        before, self.stream.counts = self.stream.counts, self._counts(rank)
        if self._counted_at is None:
            for cell, provisional in zip(self.stream.counts[:4], before[:4], strict=True):
                cell.add(provisional.value)
        else:
            self._lost_said = self.stream.counts.lost.value
        self._counted_at = rank

    def _counts(self, rank: int | None) -> Counts:
        worker, recorder = self.worker, self._recorder
        failures = (
            recorder.counter(
                semconv.EVENT_DECODE_FAILURES, {semconv.KVCACHE_WORKER: worker.label, semconv.KVCACHE_REASON: reason}
            )
            for reason in _FRAME_FAILURES
        )
        if rank is None:
            return Counts(*(Counter(lambda _: None) for _ in range(4)), *failures)
        labels = worker.labels(rank, self._share)
        return Counts(
            recorder.counter(semconv.EVENT_BATCHES_LOST, labels),
            recorder.counter(semconv.EVENT_BATCHES_RECOVERED, labels),
            recorder.counter(semconv.EVENT_BATCHES_DUPLICATE, labels),
            recorder.counter(semconv.EVENT_PUBLISHER_RESETS, labels),
            *failures,
        )
