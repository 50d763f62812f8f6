"""What may lie between a publisher and its subscriber: a TCP connection that breaks, a proxy of ZeroMQ's."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

import zmq


class Relay:
    """Hands bytes on in both directions until it is cut; then takes new connections.

    Attributes:
        port: Where it listens.
    """

    def __init__(self, target: int) -> None:
        """Args:
        target: The port that it hands on to.
        """
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def cut(self) -> None:
        """Breaks every connection."""
        connections, self._open = self._open, []
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends it."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self.cut()
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            there = socket.create_connection(("127.0.0.1", self._target))
            self._open += [client, there]
            for one, other in ((client, there), (there, client)):
                self._threads.append(threading.Thread(target=self._hand_on, args=(one, other)))
                self._threads[-1].start()

    @staticmethod
    def _hand_on(one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while data := one.recv(65_536):
                other.sendall(data)
        for end in (one, other):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class Proxy:
    """Brings publishers together that connect to it.

    Attributes:
        front: Where publishers connect.
        back: Where subscribers do.
    """

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        sockets = [self._context.socket(kind) for kind in (zmq.XSUB, zmq.XPUB)]
        self.front, self.back = (f"tcp://127.0.0.1:{one.bind_to_random_port('tcp://127.0.0.1')}" for one in sockets)
        self._thread = threading.Thread(target=self._run, args=sockets)
        self._thread.start()

    def close(self) -> None:
        """Ends it."""
        self._context.term()
        self._thread.join()

    @staticmethod
    def _run(front: zmq.Socket[bytes], back: zmq.Socket[bytes]) -> None:
        with suppress(zmq.ContextTerminated):
            zmq.proxy(front, back)
        for one in (front, back):
            one.close(0)
