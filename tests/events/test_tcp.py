"""What is known of a TCP connection by the number of its file, against what was sent."""

from __future__ import annotations

import os
import socket
import sys
from typing import TYPE_CHECKING

import pytest

from kvcache_otel.events import tcp
from tests.support.processes import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="known on Linux alone")


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as there,
        server.accept()[0] as here,
    ):
        yield there, here


def test_what_was_received_and_what_of_it_is_unread(pair: tuple[socket.socket, socket.socket]) -> None:
    there, here = pair
    assert (tcp.received(here.fileno()), tcp.unread(here.fileno())) == (0, 0)
    there.sendall(bytes(1000))
    wait_until(lambda: tcp.received(here.fileno()) == 1000)
    assert tcp.unread(here.fileno()) == 1000
    assert len(here.recv(300)) == 300
    assert (tcp.received(here.fileno()), tcp.unread(here.fileno())) == (1000, 700)
    here.sendall(bytes(10))
    assert tcp.received(here.fileno()) == 1000


def test_what_is_no_connection() -> None:
    read, write = os.pipe()
    a, b = socket.socketpair()
    with a, b:
        for fd in (read, a.fileno()):
            assert tcp.received(fd) is None
    os.close(write)
    os.close(read)
    assert (tcp.received(read), tcp.unread(read), tcp.identity(read)) == (None, 0, None)


def test_no_other_connection_has_its_identity(pair: tuple[socket.socket, socket.socket]) -> None:
    there, here = pair
    known, number = tcp.identity(here.fileno()), here.fileno()
    assert known != tcp.identity(there.fileno())
    assert known == tcp.identity(number)
    os.dup2(there.fileno(), number)  # As if it had been closed, and another opened.
    assert tcp.identity(number) != known


def test_the_other_side_finds_it_ended(pair: tuple[socket.socket, socket.socket]) -> None:
    there, here = pair
    there.settimeout(10)
    tcp.hang_up(here.fileno())
    assert there.recv(1) == b""
