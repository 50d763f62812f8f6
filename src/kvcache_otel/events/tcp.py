"""TCP connections that ZeroMQ has opened and reads from, seen from beside it, by the number of their file.

The number is ZeroMQ's: in a thread of its own it may close it at any moment, and another may be given it. Whoever acts
on what is said here compares `identity` first. Linux alone says all this; elsewhere, and of what is not TCP, it is
None.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import sys
import termios

_libc: ctypes.CDLL | None = ctypes.CDLL(None) if sys.platform == "linux" else None

_TCP, _TCP_INFO = int(socket.IPPROTO_TCP), 11  # Other systems do not have the name.
_RECEIVED, _RECEIVED_AT = struct.Struct("=Q").unpack_from, 128  # `tcpi_bytes_received`, since Linux 4.1.
_END = _RECEIVED_AT + 8
_Info = ctypes.c_char * _END  # The beginning of `struct tcp_info`.


def received(fd: int) -> int | None:
    """Returns how many bytes have come so far, be they read or not."""
    if _libc is None:
        return None
    info, length = _Info(), ctypes.c_uint(_END)
    if _libc.getsockopt(fd, _TCP, _TCP_INFO, info, ctypes.byref(length)) or length.value < _END:
        return None
    found: int = _RECEIVED(info, _RECEIVED_AT)[0]
    return found


def unread(fd: int) -> int:
    """Returns how many of them are still the kernel's; 0 where that is not known."""
    try:
        return int.from_bytes(fcntl.ioctl(fd, termios.FIONREAD, bytes(4)), sys.byteorder)
    except OSError:
        return 0


def identity(fd: int) -> int | None:
    """Returns what no other connection has, as long as this one is open."""
    try:
        return os.fstat(fd).st_ino
    except OSError:
        return None


def hang_up(fd: int) -> None:
    """Ends the connection; ZeroMQ finds it ended, and forgets what it had of it."""
    if _libc is not None:
        _libc.shutdown(fd, socket.SHUT_RDWR)
