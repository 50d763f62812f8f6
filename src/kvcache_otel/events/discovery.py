"""Discovery: which sources there are now, by a file that changes and by names that resolve to many."""

from __future__ import annotations

import logging
import re
import threading
from typing import TYPE_CHECKING

from kvcache_otel.events.names import addresses
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

UNSETTLED = 5
"""Looks that find other sources each time, after which that is said."""

LARGEST_FILE = 4 * 2**20

NAMED = 8
"""Lines that cannot be read whose numbers are said, beside the first."""

_COMMENT = re.compile(r"(^|\s)#.*")


class Discovery:
    """Looks in a thread of its own, since a name server may take its time. What was found holds until the next look.

    A file that has changed is taken over when two looks have found the same sources in it: it may be half written.

    What cannot be read is said once, and again when it says something else; the other sources stay.

    Attributes:
        found: The sources that there are. Before `start` none of them is from a name that is to be resolved.
        problems: What is wrong now, in words.
        complaints: How often something was said to be.
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
        self._resolve = resolve or addresses
        self._in_file: tuple[Source, ...] = ()
        self._hosts: dict[Source, tuple[str, ...]] = {}
        self._content: bytes | None = None  # Of the file, as it was taken over.
        self._changed: tuple[tuple[Source, ...], str] | None = None  # What the last look found instead,
        self._changes = 0  # and how many before it have found something else each time.
        self._problems: dict[object, str] = {}
        self.complaints = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvcache-otel-discovery", daemon=True)
        self.found: tuple[Source, ...] = ()
        self._read()
        self._gather()

    def start(self) -> None:
        """Looks again and again from now on, where there is something that can change."""
        if self._file is not None or any(source.is_many for source in self._given):
            self._thread.start()

    def stop(self) -> None:
        """Ends that."""
        self._stopped.set()

    def look(self, *, names: bool) -> None:
        """Looks once, and leaves what there is in `found`: first what needs no name, then what each one resolves to.

        Args:
            names: Whether names are resolved again that have been before.
        """
        self._read()
        self._gather()
        for source in self._many():
            before = self._hosts.get(source)
            if (before is None or names) and before != self._resolved(source, before or ()):
                self._gather()

    def _many(self) -> Iterable[Source]:
        return dict.fromkeys(source for source in (*self._given, *self._in_file) if source.is_many)

    def _gather(self) -> None:
        sources: dict[tuple[str, str], Source] = {}
        for source in (*self._given, *self._in_file):
            hosts = self._hosts.get(source, ()) if source.is_many else ()
            for one in [source.at(host) for host in hosts] if source.is_many else (source,):
                sources.setdefault((one.name, one.endpoint), one)
        more = f"there are {len(sources)} sources; those after the first {MOST_SOURCES} are left out"
        self._say("sources", more if len(sources) > MOST_SOURCES else "")
        found = tuple(sources.values())[:MOST_SOURCES]
        if found != self.found:
            self.found = found

    @property
    def problems(self) -> list[str]:
        return [problem for problem in self._problems.values() if problem]

    def _run(self) -> None:
        waited, names = 0.0, True
        while True:
            try:
                self.look(names=names)
                self._say("look", "")
            except Exception as error:  # The sources that are known go on.
                self._say("look", f"the sources could not be looked up: {type(error).__name__}: {printable(error)}")
            if self._stopped.wait(self._file_seconds):
                return
            waited += self._file_seconds
            names = waited >= self._names_seconds
            waited = 0.0 if names else waited

    def _read(self) -> None:
        if self._file is None:
            return
        where = printable(self._file)
        try:
            if self._file.exists() and not self._file.is_file():  # One that is a pipe would never end.
                raise OSError("it is not a regular file")
            with self._file.open("rb") as file:
                content = file.read(LARGEST_FILE + 1)
            if len(content) > LARGEST_FILE:
                raise OSError(f"it is larger than {LARGEST_FILE} bytes")
            lines = content.decode("utf-8-sig", "surrogateescape").splitlines()  # Only that line is lost.
        except (OSError, ValueError) as error:
            what = f"there are no sources in {where!r}" if self._content is None else f"the sources in {where!r} stay"
            self._say("file", f"{what}, since it cannot be read: {printable(error)}")
            return
        self._say("file", "")
        if content == self._content:
            self._settled()
            return
        sources: dict[Source, None] = {}
        first, wrong = "", list[int]()
        for number, line in enumerate(lines, 1):
            text = _COMMENT.sub("", line).strip()
            if not text:
                continue
            try:
                sources[parse(text)] = None
            except SourceError as error:
                first = first or f"line {number}: {error}"
                wrong.append(number)
        problem = f"{where!r}, {first}{_also(wrong[1:])}" if wrong else ""
        changed = tuple(sources), problem
        before = self._in_file, self._problems.get("lines", "")
        if self._content is not None and changed not in (before, self._changed):
            self._changed = changed
            self._changes += 1
            if self._changes >= UNSETTLED:
                self._say("settled", f"the sources in {where!r} stay, since there are others at every look")
            return
        self._settled()
        self._say("lines", problem)
        self._say("none", "" if sources or wrong or self._given else f"there are no sources in {where!r}")
        self._in_file, self._content = tuple(sources), content
        known = set(self._many())
        self._hosts = {source: hosts for source, hosts in self._hosts.items() if source in known}
        self._problems = {
            about: problem
            for about, problem in self._problems.items()
            if not isinstance(about, Source) or about in known
        }

    def _settled(self) -> None:
        self._changed, self._changes = None, 0
        self._say("settled", "")

    def _resolved(self, source: Source, before: tuple[str, ...]) -> tuple[str, ...]:
        name, hosts = printable(source.name), before
        try:
            hosts = tuple(sorted(set(self._resolve(*source.address))))
            self._say(source, "" if hosts else f"source {name!r} resolves to nothing")
        except (OSError, ValueError) as error:
            self._say(source, f"source {name!r} cannot be resolved: {printable(error)}")
        self._hosts[source] = hosts
        return hosts

    def _say(self, what: object, problem: str) -> None:
        if problem and self._problems.get(what) != problem:
            self.complaints += 1
            _logger.warning("kvcache: %s", problem)
        self._problems[what] = problem


def _also(lines: Sequence[int]) -> str:
    named = ", ".join(map(str, lines[:NAMED]))
    more = f" and {len(lines) - NAMED} more" if len(lines) > NAMED else ""
    return f" (and lines {named}{more})" if lines else ""
