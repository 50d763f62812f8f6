"""Discovery: which sources there are now, by a file that changes and by names that resolve to many."""

from __future__ import annotations

import codecs
import logging
import os
import queue
import re
import threading
import time
from typing import TYPE_CHECKING

from kvcache_otel.events.agreement import agree
from kvcache_otel.events.few import Few
from kvcache_otel.events.names import Lookups, addresses
from kvcache_otel.events.source import Source, SourceError, parse
from kvcache_otel.record.labels import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Sequence
    from pathlib import Path

_logger = logging.getLogger(__name__)

FILE_SECONDS = 2.0
"""Between two looks at the file."""

NAMES_SECONDS = 30.0
"""Between two times that a name is resolved."""

ANSWERS_SECONDS = 0.05
"""How long further answers are waited for when one has come, since they mostly come together."""

MOST_SOURCES = 4096
"""Sources in all; what exceeds them is left out, and said."""

UNSETTLED = 5
"""Looks that find other sources each time, after which that is said."""

UNFINISHED = 5
"""Looks that find a file the same that ends within a line, before it is taken over: the line may be half written."""

MISSED = 3
"""Answers in a row that lack an address before it is gone: many a name server gives a part of them each time, or none
while it starts, and books that are given up come back by replay alone."""

LARGEST_FILE = 4 * 2**20

_COMMENT = re.compile(r"(^|\s)#.*")


class Discovery:
    """Looks in a thread of its own, and names up in others, since a name server may take its time: none waits for
    another. What was found holds until the next look.

    A file that has changed is taken over when two looks have found the same sources in it: it may be half written. For
    the same reason one that is empty, or in which no line is a source, leaves the sources as they were.

    What cannot be read, or contradicts what is before it, is said once, and again when it says something else; the
    other sources stay.

    Attributes:
        found: The sources that there are. Before `start` none of them is from a name that is to be resolved.
        problems: What is wrong now, in words.
        complaints: How often something was found to be.
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
        self._answers: queue.Queue[tuple[Source, tuple[str, ...] | Exception] | None] = queue.Queue()
        self._lookups = Lookups[Source](resolve or addresses, self._answered)
        self._asked: set[Source] = set()
        self._unresolved = Few(_logger, logging.WARNING, "kvcache: %d more sources are not resolved")
        self._bad_lines: dict[str, None] = {}  # Of the file, the first of them,
        self._bad_beyond = 0  # and how many more.
        self._contradictions: dict[str, None] = {}
        self._hosts: dict[str, dict[str, int]] = {}  # By endpoint, and how many answers in a row each was not in.
        self._content: bytes | None = None  # Of the file, as it was taken over.
        # What the last look found instead, and how many before it have found something else each time.
        self._changed: tuple[tuple[Source, ...], tuple[str, ...], int] | None = None
        self._changes = 0
        self._seen, self._same = (b"", 0), 0  # The file and its time at the last look, and at how many looks in a row.
        self._problems: dict[object, str] = {}
        self.complaints = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvcache-otel-discovery", daemon=True)
        self.found: tuple[Source, ...] = ()
        self._take_over(())
        self._read()
        self._gather()

    def start(self) -> None:
        """Looks again and again from now on, where there is something that can change."""
        if self._file is not None or any(source.is_many for source in self._given):
            self._thread.start()

    def stop(self) -> None:
        """Ends that."""
        self._stopped.set()
        self._answers.put(None)

    def look(self, *, names: bool) -> None:
        """Looks once, and leaves what there is in `found`: first what needs no name, then what each one resolves to.

        Args:
            names: Whether names are resolved again that have been before.
        """
        self._look(names=names)
        while self._asked:
            self._take(self._answers.get())
        self._unresolved.end()

    @property
    def problems(self) -> list[str]:
        return [*filter(None, self._problems.values()), *self._bad_lines, *self._contradictions]

    def _run(self) -> None:
        names, names_at = True, time.monotonic() + self._names_seconds
        while not self._stopped.is_set():
            self._guarded("look", lambda names=names: self._look(names=names))
            end = time.monotonic() + self._file_seconds
            while (left := end - time.monotonic()) > 0 and not self._stopped.is_set():
                try:
                    answer = self._answers.get(timeout=left)
                except queue.Empty:
                    break
                self._guarded("names", lambda answer=answer: self._take(answer))
            if names := time.monotonic() >= names_at:
                names_at = time.monotonic() + self._names_seconds
            if names or not self._asked:
                self._unresolved.end()

    def _guarded(self, what: str, do: Callable[[], None]) -> None:
        try:
            do()
            self._say(what, "")
        except Exception as error:  # The sources that are known go on.
            self._say(what, f"the sources could not be looked up: {type(error).__name__}: {printable(error)}")

    def _look(self, *, names: bool) -> None:
        if self._read():
            self._gather()
        for source in self._many:
            if (names or source.endpoint not in self._hosts) and self._lookups.ask(source, *source.address):
                self._asked.add(source)

    def _take(self, answer: tuple[Source, tuple[str, ...] | Exception] | None) -> None:
        """Takes over an answer, and those that come with it."""
        self._stopped.wait(ANSWERS_SECONDS if len(self._asked) > 1 else 0.0)
        before = self._hosts.copy()
        while answer is not None:
            source, found = answer
            self._asked.discard(source)
            if source in self._many:
                self._resolved(source, found)
            try:
                answer = self._answers.get_nowait()
            except queue.Empty:
                break
        if self._hosts != before:
            self._gather()

    def _answered(self, source: Source, found: tuple[str, ...] | Exception) -> None:
        self._answers.put((source, found))

    def _take_over(self, in_file: tuple[Source, ...]) -> None:
        """Takes over what is written now; what names resolved to before stays, of those that still are."""
        self._in_file = in_file
        written, self._wrong = agree((*self._given, *in_file))
        self._written, self._beyond = written[:MOST_SOURCES], len(written[MOST_SOURCES:])
        self._many = dict.fromkeys(source for source in self._written if source.is_many)
        endpoints = {source.endpoint for source in self._many}
        self._hosts = {endpoint: hosts for endpoint, hosts in self._hosts.items() if endpoint in endpoints}
        self._problems = {
            about: problem
            for about, problem in self._problems.items()
            if not isinstance(about, Source) or about in self._many
        }

    def _gather(self) -> None:
        sources, more = agree(
            one
            for source in self._written
            for one in (
                [source.at(host) for host in self._hosts.get(source.endpoint, ())] if source.is_many else [source]
            )
        )
        contradictions = dict.fromkeys(f"{problem}; the later one is left out" for problem in (*self._wrong, *more))
        self._say_each(contradictions, self._contradictions, "%d more sources contradict others, and are left out")
        self._contradictions = contradictions
        number = len(sources) + self._beyond
        text = f"there are {number} sources; those after the first {MOST_SOURCES} are left out"
        self._say("sources", text if number > MOST_SOURCES else "")
        found = tuple(sources[:MOST_SOURCES])
        if found != self.found:
            self.found = found

    def _say_each(self, wrong: Iterable[str], before: Container[str], more: str, beyond: int = 0) -> None:
        few = Few(_logger, logging.WARNING, f"kvcache: {more}")
        for problem in wrong:
            if problem not in before:
                self.complaints += 1
                few.say("kvcache: %s", problem)
        self.complaints += beyond
        few.add(beyond)
        few.end()

    def _read(self) -> bool:
        """Reads the file, and returns whether it has others now."""
        if self._file is None:
            return False
        where = printable(self._file)
        try:
            content, at = _content(self._file)
        except OSError as error:
            what = f"there are no sources in {where!r}" if self._content is None else f"the sources in {where!r} stay"
            self._say("file", f"{what}, since it cannot be read: {printable(error)}")
            return False
        self._say("file", "")
        self._same = self._same + 1 if self._seen == (content, at) else 1
        self._seen = content, at
        if content == self._content:
            self._settled()
            return False
        lines = content.decode(
            "utf-8-sig", "surrogateescape"
        ).splitlines()  # Of one that is not UTF-8 only that is lost.
        sources: list[Source] = []
        wrong, beyond = dict[str, None](), 0
        for number, line in enumerate(lines, 1):
            text = _COMMENT.sub("", line).strip()
            if not text:
                continue
            try:
                sources.append(parse(text))
            except SourceError as error:
                if len(wrong) < MOST_SOURCES:
                    wrong[f"{where!r}, line {number}: {error}"] = None
                else:
                    beyond += 1
        changed = tuple(sources), tuple(wrong), beyond
        before = self._in_file, tuple(self._bad_lines), self._bad_beyond
        if self._content is not None and changed not in (before, self._changed):
            self._changed = changed
            self._changes += 1
            if self._changes >= UNSETTLED:
                self._say("settled", f"the sources in {where!r} stay, since there are others at every look")
            return False
        if self._content is not None and changed != before and not self._is_whole(where, content, changed):
            return False
        self._settled()
        others = max(beyond - self._bad_beyond, 0)
        more = f"{where!r}, ".replace("%", "%%") + "%d more lines are no sources"
        self._say_each(wrong, self._bad_lines, more, others)
        self._bad_lines, self._bad_beyond = wrong, beyond
        self._say("none", "" if sources or wrong or self._given else f"there are no sources in {where!r}")
        self._take_over(tuple(sources))
        self._content = content
        return True

    def _is_whole(self, where: str, content: bytes, found: tuple[tuple[Source, ...], tuple[str, ...], int]) -> bool:
        """Returns whether a file that has changed looks as if somebody had meant what is in it."""
        sources, wrong, _ = found
        why = ""
        if self._in_file and not sources:
            if wrong:
                why = f"not one of its lines is a source: {wrong[0]}"
            elif not content.strip():
                why = "it is empty; a comment alone in it says that there are none"
        self._say("whole", f"the sources in {where!r} stay, since {why}" if why else "")
        return not why and (content.endswith((b"\n", b"\r")) or self._same >= UNFINISHED)

    def _settled(self) -> None:
        self._changed, self._changes = None, 0
        self._say("settled", "")
        self._say("whole", "")

    def _resolved(self, source: Source, found: tuple[str, ...] | Exception) -> None:
        name = printable(source.name)
        if isinstance(found, Exception):  # What was found before stays.
            self._hosts.setdefault(source.endpoint, {})
            self._say(source, f"source {name!r} cannot be resolved: {printable(found)}", self._unresolved)
            return
        missed = {host: times + 1 for host, times in self._hosts.get(source.endpoint, {}).items() if times + 1 < MISSED}
        hosts = missed | dict.fromkeys(found, 0)
        self._hosts[source.endpoint] = dict(sorted(hosts.items()))
        self._say(source, "" if found else f"source {name!r} resolves to nothing", self._unresolved)

    def _say(self, what: object, problem: str, few: Few | None = None) -> None:
        if problem and self._problems.get(what) != problem:
            self.complaints += 1
            (_logger.warning if few is None else few.say)("kvcache: %s", problem)
        self._problems[what] = problem


def _content(path: Path) -> tuple[bytes, int]:
    """Returns what is in a file, and when it was changed.

    Raises:
        OSError: It cannot be read, or is no text.
    """
    if path.exists() and not path.is_file():  # One that is a pipe would never end.
        raise OSError("it is not a regular file")
    with path.open("rb") as file:
        content, at = file.read(LARGEST_FILE + 1), os.fstat(file.fileno()).st_mtime_ns
    if len(content) > LARGEST_FILE:
        raise OSError(f"it is larger than {LARGEST_FILE} bytes")
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise OSError("it is UTF-16, and not UTF-8")
    if b"\0" in content:
        raise OSError("there are zero bytes in it, so that it is no text")
    return content, at
