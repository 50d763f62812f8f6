"""An inlet: a socket of ours, who is connected to it, and how much of each connection waits inside ZeroMQ.

ZeroMQ bounds a frame, and how many whole messages wait. It does not bound a message: one that never ends stays in
memory, frame by frame, and nobody is told. So we look from beside it: what a connection has received, less what has
been taken out, is what waits.
"""

from __future__ import annotations

import itertools
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import zmq
import zmq.utils.monitor

from kvcache_otel.events import tcp
from kvcache_otel.events.wire import LARGEST
from kvcache_otel.semconv import Reason

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    Register = Callable[[zmq.Socket[bytes], Callable[[float], None] | None], None]

UP, DOWN, AGAIN = zmq.EVENT_CONNECTED | zmq.EVENT_ACCEPTED, zmq.EVENT_DISCONNECTED, zmq.EVENT_CONNECT_RETRIED
GREETED, STRANGE = zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
"""What a monitor tells: a connection is there, is gone, could not be made; the other side speaks ZeroMQ, or has gone
without having said so."""

UNFINISHED = LARGEST + 4 * 2**20
"""Bytes of a message that is not whole, at the most. One that can be read has one long frame, and the others of it are
short. Where all frames are empty, which takes two bytes, ZeroMQ needs 64 for each."""

KEPT = 5
"""Frames of a message that are kept: one more than any that can be read has."""

MOST_FRAMES = 1024
"""Frames of a message whose sender is not listened to any longer."""

_SKIPPED = 4096  # Frames that are thrown away in one turn.

_EVENTS = 4096  # Of connections, in one turn: more than come meanwhile, since what waits of them has no bound.

_numbers = itertools.count()

_SETTLED = 2**16  # Bytes too much in what waits that are not worth correcting.


class Excess(NamedTuple):
    """More than may wait.

    Attributes:
        fd: Of which connection.
        reason: Why, one of `Reason`.
        why: The same, in words.
    """

    fd: int
    reason: str
    why: str


class _Connection:
    __slots__ = ("delivered", "identity", "settled")

    def __init__(self, identity: int | None) -> None:
        self.identity = identity
        self.settled = 0  # Bytes that do not wait any more.
        self.delivered = True  # Whether a whole message came since the last look.


class Inlet:
    """One socket.

    Attributes:
        socket: It.
        sender: The connection that the last message came from; -1 where that is not known.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        kind: int,
        *,
        waiting: int,
        most: int,
        retry_seconds: float,
    ) -> None:
        """Args:
        context: ZeroMQ's.
        kind: Of socket.
        waiting: Whole messages that may wait.
        most: Bytes of them that may wait.
        retry_seconds: Between two times that it is tried to be connected, at the most.

        Raises:
            zmq.ZMQError: There can be no more sockets.
        """
        self._most = most
        self._connections: dict[int, _Connection] = {}
        self._begun: list[bytes] = []  # The first frames of a message the rest of which is being thrown away.
        self.sender = -1
        self._frames = self._size = 0
        self._endless = -1
        self._register: Register | None = None
        self._said: Callable[[str], AbstractContextManager[None]] = _unsaid
        self._changed: Callable[[int, float], None] = _ignore
        self._monitor: zmq.Socket[bytes] | None = None
        self.socket = socket = context.socket(kind)
        try:
            for option, value in (
                (zmq.LINGER, 0),
                (zmq.IPV6, 1),
                (zmq.RCVHWM, waiting),
                (zmq.MAXMSGSIZE, LARGEST),
                (zmq.RECONNECT_IVL, 100),
                (zmq.RECONNECT_IVL_MAX, round(retry_seconds * 1000)),
                # Not ZeroMQ's own heartbeats: they take a slow reader for a dead peer, and can abort us (libzmq 3937).
                (zmq.TCP_KEEPALIVE, 1),
                (zmq.TCP_KEEPALIVE_IDLE, 30),
                (zmq.TCP_KEEPALIVE_INTVL, 10),
                (zmq.TCP_KEEPALIVE_CNT, 3),
            ):
                socket.setsockopt(option, value)
            # By hand: as pyzmq makes it, it may be full. Then ZeroMQ's only thread waits for us to read it, and holds a
            # lock while it does so that we wait for to end it. Without a bound it never waits.
            address = f"inproc://monitor-{next(_numbers)}"
            socket.monitor(address, UP | DOWN | AGAIN | GREETED | STRANGE)
            self._monitor = monitor = context.socket(zmq.PAIR)
            monitor.setsockopt(zmq.LINGER, 0)
            monitor.setsockopt(zmq.RCVHWM, 0)
            monitor.connect(address)
        except BaseException:
            self.close()
            raise

    def start(
        self,
        register: Register,
        said: Callable[[str], AbstractContextManager[None]],
        receive: Callable[[float], None],
        changed: Callable[[int, float], None] | None = None,
    ) -> None:
        """Lets it be read from now on.

        Args:
            register: Sees to it that a socket's function is called when something has come; None for no more.
            said: Returns a context from which no exception comes.
            receive: Takes what has come.
            changed: Told what becomes of connections: one of `UP`, `DOWN`, `AGAIN`, `GREETED` and `STRANGE`, and when.
        """
        self._register, self._said = register, said
        if changed is not None:
            self._changed = changed
        if self._monitor is not None:  # First: a connection is to be known when its first message comes.
            register(self._monitor, self._watch)
        register(self.socket, receive)

    def close(self) -> None:
        """Ends it."""
        self._connections.clear()
        for socket in (self._monitor, self.socket):
            if socket is not None and self._register is not None:
                self._register(socket, None)
        with suppress(zmq.ZMQError):
            self.socket.disable_monitor()
        if self._monitor is not None:  # After that: ZeroMQ would wait for another to connect to it.
            self._monitor.close()
        self.socket.close()

    def take(self) -> list[bytes] | None:
        """Takes a message out.

        Returns:
            Its frames, of too many the first `KEPT`; None where some of these many were thrown away, and more are left.

        Raises:
            zmq.Again: There is none.
        """
        if self._begun:
            return self._skip()
        socket = self.socket
        first = socket.recv(zmq.DONTWAIT, copy=False)
        try:
            self.sender = int(first.get(zmq.SRCFD))
        except zmq.ZMQError:
            self.sender = -1
        frames = [first.bytes]
        while socket.getsockopt(zmq.RCVMORE):
            if len(frames) == KEPT:
                self._begun, self._frames, self._size = frames, KEPT, 0
                return self._skip()
            frames.append(socket.recv(zmq.DONTWAIT))
        self._settle(sum(map(_on_the_wire, frames)))
        return frames

    def is_connected(self, fd: int) -> bool:
        """Returns whether this is a connection."""
        return fd in self._connections

    def look(self) -> Excess | None:
        """Looks whether more waits than may, and returns of which connection."""
        if self._begun:  # In the midst of a message ZeroMQ bears no disconnecting.
            return None
        found = None
        if (fd := self._endless) >= 0:
            self._endless = -1
            connection = self._connections.get(fd)
            if connection is not None and tcp.identity(fd) == connection.identity:
                found = Excess(fd, Reason.FRAME_COUNT, f"it has sent a message of more than {MOST_FRAMES:,} frames")
        for fd, connection in self._connections.items():
            received = tcp.received(fd)
            if received is not None and received - connection.settled > _SETTLED:
                found = found or self._weigh(fd, connection)
            connection.delivered = False
        if found is not None:  # Once: until it is gone, it would be found again.
            del self._connections[found.fd]
        return found

    # -- what waits ----------------------------------------------------------------------------------------------------

    def _weigh(self, fd: int, connection: _Connection) -> Excess | None:
        waiting = (tcp.received(fd) or 0) - tcp.unread(fd) - connection.settled
        if tcp.identity(fd) != connection.identity:  # It is gone; its monitor will tell.
            return None
        if self.socket.poll(0):
            if waiting > self._most:
                return Excess(fd, Reason.OTHER, f"more than {self._most // 2**20} MiB wait to be read")
        elif connection.delivered:
            # What came before that message does not wait; it was no message, or ZeroMQ has thrown it away.
            connection.settled += waiting
        elif waiting > UNFINISHED:
            return Excess(
                fd, Reason.FRAME_COUNT, f"it has sent {UNFINISHED // 2**20} MiB in many frames, and no whole message"
            )
        return None

    def _skip(self) -> list[bytes] | None:
        socket = self.socket
        for _ in range(_SKIPPED):
            self._size += _on_the_wire(socket.recv(zmq.DONTWAIT))
            self._frames += 1
            if not socket.getsockopt(zmq.RCVMORE):
                break
        else:
            return None
        frames, self._begun = self._begun, []
        if self._frames > MOST_FRAMES:
            self._endless = self.sender
        self._settle(self._size + sum(map(_on_the_wire, frames)))
        return frames

    def _settle(self, size: int) -> None:
        connection = self._connections.get(self.sender)
        if connection is not None:
            connection.settled += size
            connection.delivered = True

    # -- connections ---------------------------------------------------------------------------------------------------

    def _watch(self, now: float) -> None:
        monitor = self._monitor
        if monitor is None:
            return
        with self._said("its monitor"):
            for _ in range(_EVENTS):
                try:
                    message: Any = zmq.utils.monitor.recv_monitor_message(monitor, zmq.DONTWAIT)
                except zmq.Again:
                    return
                event, fd = int(message["event"]), int(message["value"])
                if event & UP and tcp.received(fd) is not None:
                    self._connections[fd] = _Connection(tcp.identity(fd))
                elif event & DOWN:
                    self._connections.pop(fd, None)
                self._changed(event, now)


def _on_the_wire(frame: bytes) -> int:
    return len(frame) + (2 if len(frame) < 256 else 9)


def _unsaid(_: str) -> AbstractContextManager[None]:
    return nullcontext()


def _ignore(event: int, now: float) -> None:
    pass
