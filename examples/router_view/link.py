"""A link between a publisher and its subscribers that loses some of the batches: a proxy, on a thread."""

from __future__ import annotations

import threading

import zmq

POLL_MS = 50


class LossyLink:
    """Passes batches on, but for those that it loses.

    Attributes:
        endpoint: Where subscribers find it.
        subscribers: How many have come.
        loses: Whether it loses any.
        lost: How many batches it has lost.
    """

    def __init__(self, publisher: str, one_of: int) -> None:
        """Args:
        publisher: The endpoint of the publisher.
        one_of: Of so many batches in a row, one is lost.
        """
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._in, self._out = self._context.socket(zmq.SUB), self._context.socket(zmq.XPUB)
        self._in.setsockopt(zmq.SUBSCRIBE, b"")
        self._in.connect(publisher)
        self._out.setsockopt(zmq.XPUB_VERBOSE, 1)  # Told of every subscriber, not of the first alone.
        port = self._out.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{port}"
        self.subscribers = self.lost = 0
        self.loses = True
        self._one_of = one_of
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lossy-link", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends it."""
        self._closing.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def _run(self) -> None:
        poller = zmq.Poller()
        for socket in (self._in, self._out):
            poller.register(socket, zmq.POLLIN)
        while not self._closing.is_set():
            ready = dict(poller.poll(POLL_MS))
            if self._out in ready:
                self.subscribers += self._out.recv()[:1] == b"\x01"
            if self._in in ready:
                topic, number, batch = self._in.recv_multipart()
                if self.loses and int.from_bytes(number, "big") % self._one_of == self._one_of - 1:
                    self.lost += 1
                else:
                    self._out.send_multipart([topic, number, batch])
