"""Publishes KV events over ZeroMQ as SGLang does, for routers and for ``kvcache-otel watch``.

A batch is ``[time, events, rank]`` in msgpack, each event an array that begins with its name. Each message has a topic,
the batch's number and the batch; whoever has missed some asks the replay socket for all from a number on.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING

from kvcache_otel.demo.events import BlockStored

if TYPE_CHECKING:
    from typing import Any

    from kvcache_otel.demo.events import Event

REMEMBERED = 10_000
"""Batches that can be asked for again."""

# How long the thread waits for batches, before it looks whether somebody asks for a replay.
_PATIENCE = 0.02

_LAST_PORT = 65_535

_END = (-1).to_bytes(8, "big", signed=True)


class Publisher:
    """A sink for `cache.TieredCache.sinks`. What it is given is sent by a thread of its own.

    Attributes:
        endpoint: Where this machine finds it, with the port that it was given where that was left open (``:*``).
        replay_endpoint: Where it can be asked for what was missed; None for nowhere.
        work: What its thread does.
    """

    def __init__(
        self,
        endpoint: str = "tcp://127.0.0.1:5557",
        replay_endpoint: str | None = None,
        *,
        topic: str = "",
        rank: int = 0,
    ) -> None:
        """Args:
        endpoint: Where it publishes; ``tcp://*:5557`` for all addresses of this machine.
        replay_endpoint: Where it answers, in the same way.
        topic: The topic of its messages.
        rank: The data-parallel rank that its batches name.

        Raises:
            ImportError: msgspec or pyzmq is not installed.
            ValueError: Nobody else could connect to it, or there is no such port.
            zmq.ZMQError: Somebody else publishes there, or it is no endpoint.
        """
        import msgspec
        import zmq

        for where in filter(None, (endpoint, replay_endpoint)):
            _check(where)

        context: Any = zmq.Context()
        self._waiting: queue.Queue[list[Event] | None] = queue.Queue()
        sockets: list[Any] = []
        try:
            for kind, where in ((zmq.PUB, endpoint), (zmq.ROUTER, replay_endpoint)):
                if where is not None:
                    socket = context.socket(kind)
                    sockets.append(socket)
                    socket.setsockopt(zmq.LINGER, 0)
                    socket.setsockopt(zmq.SNDHWM, 10 * REMEMBERED)
                    socket.bind(where)
        except BaseException:
            context.destroy(linger=0)
            raise
        names = [_here(socket.getsockopt_string(zmq.LAST_ENDPOINT)) for socket in sockets]
        self.endpoint: str = names[0]
        self.replay_endpoint: str | None = names[1] if replay_endpoint is not None else None
        self.work = Work(self._waiting, context, sockets, msgspec.msgpack.Encoder().encode, topic.encode(), rank)
        self._thread = threading.Thread(target=self.work.run, name="demo-publisher", daemon=True)
        self._thread.start()
        self._stop = weakref.finalize(self, self._waiting.put, None)

    def __call__(self, events: list[Event]) -> None:
        """Publishes events as a batch."""
        self._waiting.put(events)

    def flush(self) -> None:
        """Waits until all that it was given is sent, as far as there is somebody to send it to."""
        self._waiting.join()

    def close(self) -> None:
        """Sends what it was given, and ends."""
        self._stop()
        self._thread.join()


class Work:
    """What the thread does; it does not know the publisher, so that one that is dropped goes.

    Attributes:
        publishing: The socket on which batches are sent.
    """

    def __init__(
        self,
        waiting: queue.Queue[list[Event] | None],
        context: Any,
        sockets: list[Any],
        encode: Any,
        topic: bytes,
        rank: int,
    ) -> None:
        self._waiting = waiting
        self._context = context
        self.publishing = sockets[0]
        self._replaying = sockets[1] if len(sockets) > 1 else None
        self._encode = encode
        self._topic, self._rank = topic, rank
        self._number = 0
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=REMEMBERED)

    def run(self) -> None:
        """Sends batches and answers who asks for some, until it is told to end."""
        going = True
        while going:
            try:
                events = self._waiting.get(timeout=_PATIENCE if self._replaying is not None else None)
                going = events is not None
                if events:
                    self._send(events)
                self._waiting.task_done()
            except queue.Empty:
                pass
            while self._replaying is not None and self._replaying.poll(0):
                self._replay(*self._replaying.recv_multipart())
        self._context.destroy(linger=100)

    def _send(self, events: list[Event]) -> None:
        payload = self._encode([time.time(), [_form(event) for event in events], self._rank])
        self.publishing.send_multipart([self._topic, self._number.to_bytes(8, "big"), payload])
        self._sent.append((self._number, payload))
        self._number += 1

    def _replay(self, *frames: bytes) -> None:
        socket = self._replaying
        if socket is None or len(frames) != 3 or len(frames[2]) != 8:
            return
        asker, start = frames[0], int.from_bytes(frames[2], "big")
        for number, payload in self._sent:
            if number >= start:
                socket.send_multipart([asker, b"", number.to_bytes(8, "big"), payload])
        socket.send_multipart([asker, b"", _END, b""])


def _check(endpoint: str) -> None:
    """Raises ValueError where ZeroMQ would take what nobody else could connect to, or another port than this one."""
    scheme, _, address = endpoint.partition("://")
    if scheme not in ("tcp", "ipc"):
        raise ValueError("it is neither tcp://host:port nor ipc://path")
    port = address.rpartition(":")[2] if ":" in address else ""
    if scheme != "tcp" or port in ("", "*"):
        return
    if not (port.isascii() and port.isdecimal() and int(port[:20]) <= _LAST_PORT):  # ZeroMQ reads 9464 in 9464x.
        raise ValueError(f"{port} is no port from 0 to {_LAST_PORT}")


def _here(bound: str) -> str:
    """Returns where to connect to what is bound: all addresses of a machine together are none."""
    return bound.replace("tcp://0.0.0.0:", "tcp://127.0.0.1:")


def _form(event: Event) -> list[Any]:
    """Returns an event as SGLang writes it."""
    if isinstance(event, BlockStored):
        parent, tokens = event.parent_block_hash, event.token_ids
        return ["BlockStored", event.block_hashes, parent, tokens, event.block_size, None, event.medium]
    return ["BlockRemoved", event.block_hashes, event.medium]
