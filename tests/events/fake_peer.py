"""Fake peers that speak ZeroMQ's protocol by hand, and so can send what no ZeroMQ would."""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Generator

_GREETING = b"\xff" + bytes(7) + b"\x01\x7f\x03\x00NULL" + bytes(16) + bytes(32)


def greet(client: socket.socket, kind: bytes = b"PUB") -> None:
    """Shakes hands as a socket of this kind, and waits for the other's subscription or request."""
    ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", len(kind)) + kind
    client.sendall(_GREETING + bytes([4, len(ready)]) + ready)
    client.recv(len(_GREETING), socket.MSG_WAITALL)
    _command(client)
    if kind == b"ROUTER":  # The empty frame, and the number.
        client.recv(2 + 10, socket.MSG_WAITALL)
    else:
        _command(client)


def _command(client: socket.socket) -> None:
    _, size = client.recv(2, socket.MSG_WAITALL)
    client.recv(size, socket.MSG_WAITALL)


def on_the_wire(body: bytes, *, more: bool) -> bytes:
    """A frame, as it is written."""
    size = bytes([more, len(body)]) if len(body) < 256 else bytes([2 + more]) + struct.pack(">Q", len(body))
    return size + body


def message(*frames: bytes) -> bytes:
    """A message, as it is written."""
    return b"".join(on_the_wire(body, more=n < len(frames)) for n, body in enumerate(frames, 1))


def memory(*, peak: bool) -> int:
    key = "VmHWM" if peak else "VmRSS"
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key)]
    return int(line.split()[1]) * 1024


@contextmanager
def tcp_server(serve: Any) -> Generator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        stopped = threading.Event()

        def run() -> None:
            listener.settimeout(0.05)
            while not stopped.is_set():
                try:
                    client, _ = listener.accept()
                except TimeoutError:
                    continue
                client.settimeout(1)
                with suppress(OSError):
                    serve(client)
                client.close()

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            stopped.set()
            thread.join()
