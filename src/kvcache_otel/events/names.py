"""Names of hosts, looked up beside the loop: ZeroMQ would do so on its only thread, and stop every source meanwhile."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from ipaddress import ip_address
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from kvcache_otel.record.labels import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

K = TypeVar("K")

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


class Lookups(Generic[K]):
    """Hosts that are looked up, on threads that end when there are no more."""

    def __init__(
        self,
        resolve: Callable[[str, int], Iterable[str]],
        answered: Callable[[K, tuple[str, ...] | Exception], None],
    ) -> None:
        """Args:
        resolve: Returns the addresses of a host, for a port.
        answered: Told the addresses, or why there are none, on one of the threads; it raises nothing.
        """
        self._resolve, self._answered = resolve, answered
        self._asked: set[K] = set()
        self._waiting: deque[tuple[K, str, int]] = deque()
        self._threads = 0
        self._lock = threading.Lock()

    def ask(self, key: K, host: str, port: int) -> bool:
        """Has a host looked up, unless it is already; returns whether it will be.

        Args:
            key: What the answer is for.
            host: The host.
            port: The port.
        """
        with self._lock:
            if key in self._asked:
                return True
            if self._threads < MOST_AT_ONCE:
                try:
                    threading.Thread(target=self._run, name="kvcache-otel-name", daemon=True).start()
                    self._threads += 1
                except RuntimeError:  # There can be no more threads now.
                    if not self._threads:
                        return False
            self._asked.add(key)
            self._waiting.append((key, host, port))
        return True

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._threads -= 1
                    return
                key, host, port = self._waiting.popleft()
            answer: tuple[str, ...] | Exception
            try:
                answer = tuple(self._resolve(host, port))
            except Exception as error:
                answer = error
            self._answered(key, answer)
            with self._lock:
                self._asked.discard(key)


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
        self._answers: dict[str, _Answer] = {}
        self._lookups = Lookups[str](resolve or addresses, self._answered)

    def of(self, endpoint: str) -> tuple[str, ...]:
        """Returns the endpoints that an endpoint is, as far as that is known now; sees to it that it soon is.

        Args:
            endpoint: As ZeroMQ would take it; one that has no name is its own answer.
        """
        if not is_named(endpoint):
            return (endpoint,)
        answer = self._answers.get(endpoint)
        if answer is None or time.monotonic() >= answer.until:
            host, _, port = endpoint.partition("://")[2].rpartition(":")
            self._lookups.ask(endpoint, host, int(port))
        return () if answer is None else answer.endpoints

    def problem(self, endpoint: str) -> str:
        """Returns why the last answer was none; empty where it was one, or none has come yet."""
        answer = self._answers.get(endpoint)
        return "" if answer is None else answer.problem

    def _answered(self, endpoint: str, found: tuple[str, ...] | Exception) -> None:
        before = self._answers.get(endpoint)
        endpoints, problem = () if before is None else before.endpoints, ""
        if isinstance(found, Exception):
            problem = printable(found)
        elif found:
            port = endpoint.rpartition(":")[2]
            endpoints = tuple(f"tcp://{f'[{one}]' if ':' in one else one}:{port}" for one in found)
        else:
            problem = "it resolves to nothing"
        while len(self._answers) >= MOST_KNOWN:
            self._answers.pop(next(iter(self._answers)), None)
        self._answers[endpoint] = _Answer(endpoints, problem, time.monotonic() + HOLDS_SECONDS)


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
