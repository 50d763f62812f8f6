"""A way for KV events to get lost: a proxy between a publisher and a subscriber that drops what it is told to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import zmq

if TYPE_CHECKING:
    from collections.abc import Callable


class Gate:
    """Passes a publisher's messages on, but for those that are dropped.

    Attributes:
        endpoint: Where a subscriber finds it.
        passed: Messages that it has passed on.
        dropped: Messages that it has not.
    """

    def __init__(self, publisher: str) -> None:
        """Args:
        publisher: Where the publisher is.
        """
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._in, self._out = context.socket(zmq.SUB), context.socket(zmq.XPUB)
        for socket in (self._in, self._out):
            socket.setsockopt(zmq.LINGER, 0)
        self._in.setsockopt(zmq.RCVHWM, 0)
        self._out.setsockopt(zmq.SNDHWM, 0)
        self._in.setsockopt(zmq.SUBSCRIBE, b"")
        self._in.connect(publisher)
        self._out.bind("tcp://127.0.0.1:0")
        self.endpoint: str = self._out.getsockopt_string(zmq.LAST_ENDPOINT)
        self.passed = self.dropped = 0

    @property
    def is_open(self) -> bool:
        """Whether a subscriber has come; asked until it has."""
        return bool(self._out.poll(0)) and bool(self._out.recv())

    def pass_on(self, drops: Callable[[int], bool] = lambda _: False) -> None:
        """Passes on what has come.

        Args:
            drops: Whether the message with a number is dropped.
        """
        while self._in.poll(0):
            message: Any = self._in.recv_multipart()
            if drops(int.from_bytes(message[1], "big")):
                self.dropped += 1
            else:
                self.passed += 1
                self._out.send_multipart(message)

    def close(self) -> None:
        """Closes both sides."""
        self._in.close()
        self._out.close()
