"""A live display in a terminal to which others write too. It needs rich, which is imported when it is wanted.

It is drawn on a thread of its own. A terminal that is stopped (Ctrl-S), or that is slow, holds up that thread alone:
what was to be drawn meanwhile is left out, and what was logged waits, within bounds.
"""

from __future__ import annotations

import io
import logging
import sys
import threading
from contextlib import ExitStack, contextmanager, redirect_stderr
from typing import TYPE_CHECKING, Any, cast

from kvcache_otel.cli.beside import Beside, Log
from kvcache_otel.cli.watch_output import LAST_SECONDS, LOGGED, LogHandler

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator
    from typing import IO, TextIO

    from rich.console import Console, ConsoleOptions
    from rich.segment import Segment


@contextmanager
def live(draw: Callable[[], Any]) -> Generator[Callable[[], None]]:
    """Shows something until the end of the block, and leaves there what was shown last.

    Args:
        draw: Returns what there is to show now, as rich can draw it on another thread.

    Yields:
        What has it drawn anew, as soon as the terminal takes it; it raises OSError where there is none any more.
    """
    display = _Display(draw())
    with ExitStack() as stack:
        stack.callback(display.end)
        if sys.stderr.isatty():
            stack.enter_context(_above(display.put))
        yield lambda: display.show(draw())


class _Display:
    """What is shown, on a thread of its own."""

    def __init__(self, first: Any) -> None:
        """Args:
        first: What is shown at first.
        """
        self._first = first
        self._newest: Any = None  # What is to be shown next.
        self._lines: list[str] = []  # What is to appear above it.
        self._ended = False
        self._failed: BaseException | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="kvcache-otel-display", daemon=True)
        self._thread.start()

    def show(self, what: Any) -> None:
        """Has something shown in place of what is; what was to be shown before and was not yet never is."""
        if self._failed is not None:
            raise self._failed
        with self._changed:
            self._newest = what
            self._changed.notify()

    def put(self, line: str) -> bool:
        """Has a line appear above it; returns whether there was room for it."""
        with self._changed:
            if self._ended or len(self._lines) >= LOGGED:
                return False
            self._lines.append(line)
            self._changed.notify()
        return True

    def end(self) -> None:
        """Ends it when the newest is shown; waits for that, but not for long."""
        with self._changed:
            self._ended = True
            self._changed.notify()
        self._thread.join(LAST_SECONDS)

    def _run(self) -> None:
        try:
            self._draw()
        except BaseException as error:  # rich raises SystemExit, too. Whoever wants to show something more is told.
            self._failed = error

    def _draw(self) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        console = Console(file=cast("IO[str]", Beside(sys.stdout)))
        apart: dict[str, Any] = {"auto_refresh": False, "redirect_stdout": False, "redirect_stderr": False}
        shown = self._first
        with Live(console=console, **apart) as display:
            display.update(_Whole(shown), refresh=True)
            while (due := self._due()) is not None:
                lines, newest = due
                if lines:
                    console.print(Text("\n".join(lines)))
                if newest is not None:
                    shown = newest
                    display.update(_Whole(shown), refresh=True)
            display.update(shown)

    def _due(self) -> tuple[list[str], Any] | None:
        """Waits until there is something to do, and returns it; None for nothing any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._lines or self._newest is not None or self._ended)
            if not self._lines and self._newest is None:
                return None
            due = self._lines, self._newest
            self._lines, self._newest = [], None
        return due


class _Whole:
    """What is shown as far as the terminal is high, and an empty line, on which the cursor waits.

    The terminal writes ^C where the cursor is: behind a full line that would go on in the next one, and what is drawn
    then would not begin where it should.
    """

    def __init__(self, what: Any) -> None:
        self._what = what

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        from rich.segment import Segment

        lines = console.render_lines(self._what, options, pad=False)
        room = max(options.size.height - 1, 1)
        if len(lines) > room:
            lines = [*lines[: room - 1], [Segment("...")]]
        for line in lines:
            yield from line
            yield Segment.line()
        yield Segment.line()


@contextmanager
def _above(put: Callable[[str], bool]) -> Generator[None]:
    """Lets what is logged appear above the display, where both are on one terminal, and not within it."""
    above = cast("TextIO", _Above(put))
    handlers: list[Any] = list(logging.getLogger().handlers)
    with ExitStack() as stack:
        for handler in handlers:
            if isinstance(handler, LogHandler):
                stack.enter_context(handler.diverted(put))
            elif getattr(handler, "stream", None) is sys.__stderr__:
                stack.callback(handler.setStream, sys.__stderr__)
                handler.setStream(above)
        stack.enter_context(redirect_stderr(above))
        yield


class _Above(io.TextIOBase):
    """In place of standard error."""

    def __init__(self, put: Callable[[str], bool]) -> None:
        self._log = Log(put)
        self._begun = ""

    def isatty(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            self._log.line(line)
        return len(text)
