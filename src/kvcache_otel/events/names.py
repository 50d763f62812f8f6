"""Names of hosts, looked up beside the loop: ZeroMQ would do so on its only thread, and stop every source meanwhile."""

from __future__ import annotations

import socket
import threading
import time
from ipaddress import ip_address
from typing import TYPE_CHECKING, NamedTuple

from kvcache_otel.record.labels import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

HOLDS_SECONDS = 5.0
"""How long an answer is not asked for again."""

MOST_AT_ONCE = 64
"""Names that are looked up at a time, each on a thread of its own: one that is not answered holds up no other."""

MOST_KNOWN = 8192
"""Answers that are kept."""


def addresses(host: str, port: int) -> Iterable[str]:
    """Returns the addresses that the system's resolver knows of a host, the preferred first.

    Raises:
        OSError: It knows none.
        ValueError: It can be no name.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return dict.fromkeys(str(address[0]) for *_, address in found)


class _Answer(NamedTuple):
    endpoints: tuple[str, ...]
    problem: str
    until: float


class Names:
    """What endpoints are, with addresses in place of names."""

    def __init__(self, resolve: Callable[[str, int], Iterable[str]] | None = None) -> None:
        """Args:
        resolve: Returns the addresses of a host, for a port; None for the system's resolver.
        """
        self._resolve = resolve or addresses
        self._answers: dict[str, _Answer] = {}
        self._asked: set[str] = set()

    def of(self, endpoint: str) -> tuple[str, ...]:
        """Returns the endpoints that an endpoint is, as far as that is known now; sees to it that it soon is.

        Args:
            endpoint: As ZeroMQ would take it; one that has no name is its own answer.
        """
        if not is_named(endpoint):
            return (endpoint,)
        answer = self._answers.get(endpoint)
        stale = answer is None or time.monotonic() >= answer.until
        if stale and endpoint not in self._asked and len(self._asked) < MOST_AT_ONCE:
            self._asked.add(endpoint)
            try:
                threading.Thread(target=self._look_up, args=(endpoint,), name="kvcache-otel-name", daemon=True).start()
            except RuntimeError:  # There can be no more threads now.
                self._asked.discard(endpoint)
        return () if answer is None else answer.endpoints

    def problem(self, endpoint: str) -> str:
        """Returns why the last answer was none; empty where it was one, or none has come yet."""
        answer = self._answers.get(endpoint)
        return "" if answer is None else answer.problem

    def _look_up(self, endpoint: str) -> None:
        before = self._answers.get(endpoint)
        endpoints, problem = () if before is None else before.endpoints, ""
        host, _, port = endpoint.partition("://")[2].rpartition(":")
        try:
            found = tuple(self._resolve(host, int(port)))
            endpoints = tuple(f"tcp://{f'[{one}]' if ':' in one else one}:{port}" for one in found) or endpoints
            problem = "" if found else "it resolves to nothing"
        except Exception as error:
            problem = printable(error)
        while len(self._answers) >= MOST_KNOWN:
            self._answers.pop(next(iter(self._answers)), None)
        self._answers[endpoint] = _Answer(endpoints, problem, time.monotonic() + HOLDS_SECONDS)
        self._asked.discard(endpoint)


def host_of(endpoint: str) -> str:
    """Returns the host of a TCP endpoint, without the brackets of an IPv6 address."""
    return endpoint.partition("://")[2].rpartition(":")[0].strip("[]")


def is_named(endpoint: str) -> bool:
    """Returns whether the host of an endpoint is a name that must be looked up."""
    if not endpoint.startswith("tcp://") or (host := host_of(endpoint)) == "*":
        return False
    try:
        ip_address(host)
    except ValueError:
        return True
    return False
