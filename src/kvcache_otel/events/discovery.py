"""Discovery: which sources there are now, by a file that changes and by names that resolve to many."""

from __future__ import annotations

import logging
import socket
import threading
from typing import TYPE_CHECKING

from kvcache_otel.events.source import Source, SourceError, parse
from kvcache_otel.record.labels import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

_logger = logging.getLogger(__name__)

FILE_SECONDS = 2.0
"""Between two looks at the file."""

NAMES_SECONDS = 30.0
"""Between two times that a name is resolved."""

MOST_SOURCES = 4096
"""Sources in all; what exceeds them is left out, and said."""

LARGEST_FILE = 4 * 2**20


class Discovery:
    """Looks in a thread of its own, since a name server may take its time. What was found holds until the next look.

    What cannot be read is said once, and again when it says something else; the other sources stay.

    Attributes:
        found: The sources that there are, names resolved.
        problems: What is wrong now, in words.
    """

    def __init__(
        self,
        given: Sequence[Source],
        file: Path | None,
        *,
        file_seconds: float = FILE_SECONDS,
        names_seconds: float = NAMES_SECONDS,
        resolve: Callable[[str, int], Iterable[str]] | None = None,
    ) -> None:
        """Args:
        given: The sources that are always there.
        file: Where more are, one a line; blank lines and those that begin with ``#`` are none. None for no file.
        file_seconds: Between two looks at the file.
        names_seconds: Between two times that a name is resolved.
        resolve: Returns the addresses of a host, for a port; None for the system's resolver.
        """
        self._given = tuple(given)
        self._file = file
        self._file_seconds, self._names_seconds = file_seconds, names_seconds
        self._resolve = resolve or _addresses
        self._in_file: tuple[Source, ...] = ()
        self._hosts: dict[Source, tuple[str, ...]] = {}
        self._problems: dict[str, str] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvcache-otel-discovery", daemon=True)
        self.found: tuple[Source, ...] = ()
        self.look(names=True)

    def start(self) -> None:
        """Looks again and again from now on, where there is something that can change."""
        if self._file is not None or any(source.is_many for source in self._given):
            self._thread.start()

    def stop(self) -> None:
        """Ends that."""
        self._stopped.set()

    def look(self, *, names: bool) -> None:
        """Looks once, and leaves what there is in `found`.

        Args:
            names: Whether names are resolved again that have been before.
        """
        self._read()
        sources: dict[tuple[str, str], Source] = {}
        known: set[Source] = set()
        for source in (*self._given, *self._in_file):
            ones: Iterable[Source] = (source,)
            if source.is_many:
                known.add(source)
                ones = self._many(source, again=names)
            for one in ones:
                sources.setdefault((one.name, one.endpoint), one)
        self._hosts = {source: hosts for source, hosts in self._hosts.items() if source in known}
        found = tuple(sources.values())
        if len(found) > MOST_SOURCES:
            self._say("sources", f"there are {len(found)} sources; those after the first {MOST_SOURCES} are left out")
        self.found = found[:MOST_SOURCES]

    @property
    def problems(self) -> list[str]:
        return [problem for problem in self._problems.values() if problem]

    def _run(self) -> None:
        waited = 0.0
        while not self._stopped.wait(self._file_seconds):
            waited += self._file_seconds
            names = waited >= self._names_seconds
            waited = 0.0 if names else waited
            try:
                self.look(names=names)
            except Exception as error:  # The sources that are known go on.
                self._say("look", f"the sources could not be looked up: {type(error).__name__}: {printable(error)}")

    def _read(self) -> None:
        if self._file is None:
            return
        where = printable(self._file)
        try:
            with self._file.open("rb") as file:
                content = file.read(LARGEST_FILE + 1)
            if len(content) > LARGEST_FILE:
                raise OSError(f"it is larger than {LARGEST_FILE} bytes")
            lines = content.decode("utf-8").splitlines()
        except (OSError, UnicodeDecodeError, ValueError) as error:
            self._say("file", f"the sources in {where!r} are as they were, since it cannot be read: {printable(error)}")
            return
        self._say("file", "")
        sources: list[Source] = []
        wrong: list[str] = []
        for number, line in enumerate(lines, 1):
            if not (text := line.strip()) or text.startswith("#"):
                continue
            try:
                sources.append(parse(text))
            except SourceError as error:
                wrong.append(f"line {number}: {error}")
        more = f" (and {len(wrong) - 1} lines more)" if len(wrong) > 1 else ""
        self._say("lines", f"{where!r}, {wrong[0]}{more}" if wrong else "")
        self._in_file = tuple(sources)

    def _many(self, source: Source, *, again: bool) -> Iterable[Source]:
        hosts = self._hosts.get(source)
        if hosts is None or again:
            try:
                hosts = tuple(sorted(set(self._resolve(*source.address))))
                self._say(source.name, "" if hosts else f"source {source.name!r} resolves to nothing")
            except (OSError, UnicodeError) as error:
                hosts = hosts or ()
                self._say(source.name, f"source {source.name!r} cannot be resolved: {printable(error)}")
            self._hosts[source] = hosts
        return [source.at(host) for host in hosts]

    def _say(self, what: str, problem: str) -> None:
        if problem and self._problems.get(what) != problem:
            _logger.warning("kvcache: %s", problem)
        self._problems[what] = problem


def _addresses(host: str, port: int) -> Iterable[str]:
    for *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        yield str(address[0])
