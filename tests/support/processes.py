"""A child process that is there while a test needs it."""

from __future__ import annotations

import secrets
import socket
import subprocess
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence
    from pathlib import Path


FIRST_PORT, LAST_PORT = 20_000, 32_000
"""Below the ports that the system gives to whoever connects somewhere: one of those would not stay free for long."""


def free_port() -> int:
    """Returns a TCP port that was free a moment ago."""
    return free_ports(1)[0]


def free_ports(number: int) -> list[int]:
    """Returns so many TCP ports in a row that were free a moment ago."""
    while True:
        first = FIRST_PORT + secrets.randbelow(LAST_PORT - FIRST_PORT)
        ports = list(range(first, first + number))
        if all(map(_is_free, ports)):
            return ports


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True


def wait_until(condition: Callable[[], object], timeout_s: float = 20.0, what: str = "") -> None:
    """Waits until a condition holds; an exception of it counts as "not yet".

    Raises:
        TimeoutError: It did not hold in time; the last exception is the cause.
    """
    deadline = time.monotonic() + timeout_s
    last: Exception | None = None
    while time.monotonic() < deadline:
        try:
            if condition():
                return
        except Exception as error:
            last = error
        time.sleep(0.05)
    raise TimeoutError(f"not within {timeout_s:g} s: {what or condition}") from last


@contextmanager
def running(command: Sequence[str], log: Path, ready: Callable[[], object]) -> Generator[subprocess.Popen[bytes]]:
    """Runs a program until the end of the block.

    Args:
        command: Program and arguments.
        log: Where its output goes; quoted when it does not get ready.
        ready: As in `wait_until`.

    Yields:
        The process.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        try:
            wait_until(lambda: process.poll() is not None or ready(), what=command[0])
        except TimeoutError as error:
            raise TimeoutError(f"{command[0]} is not ready:\n{log.read_text(errors='replace')}") from error
        if process.poll() is not None:
            raise RuntimeError(f"{command[0]} ended with {process.returncode}:\n{log.read_text(errors='replace')}")
        yield process
    finally:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
