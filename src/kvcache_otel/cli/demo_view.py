"""How ``kvcache-otel demo`` shows what is exported: tables in a terminal, lines in a pipe."""

from __future__ import annotations

import logging
import shutil
import sys
import time
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvcache_otel.cli.demo_rows import DROPPED
from kvcache_otel.cli.extras import how
from kvcache_otel.cli.fit import fit, shortened
from kvcache_otel.cli.live import live
from kvcache_otel.cli.terminal import is_drawn
from kvcache_otel.cli.watch_output import OutputError
from kvcache_otel.semconv import Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from kvcache_otel.cli.demo_rows import LossRow, RouteRow, Seen, TierRow

_logger = logging.getLogger(__name__)

NOTHING = "-"
"""In place of a number that there is none of."""

GAP = 2
"""Between two columns."""

BAR = 14
"""Columns for how full a tier is."""

ROOMY = 32
"""Lines of a terminal that has room for empty ones."""

GLYPHS, PLAIN_GLYPHS = "█▒·", "#=."
"""For what is used, evictable and free; and where standard output knows ASCII alone."""


class Table(NamedTuple):
    """A part of the view.

    Attributes:
        head: Its columns; the first one says what it is about.
        rows: Its cells.
        left: How many columns are set to the left.
        expendable: Columns that are left out where a terminal is narrow, the least needed first.
        names: The column that may be cut.
    """

    head: tuple[str, ...]
    rows: list[tuple[str, ...]]
    left: int = 1
    expendable: tuple[str, ...] = ()
    names: int = 0


class Show(Protocol):
    """Shows what there is now."""

    def __call__(self, *, last: bool) -> None:
        """Args:
        last: Whether nothing comes after it.
        """


# -- tables ------------------------------------------------------------------------------------------------------------


def tables(seen: Seen, glyphs: str = GLYPHS) -> Iterator[Table]:
    """Yields what there is to show, 80 columns of it at the most.

    Args:
        seen: What there is.
        glyphs: What bars are made of.
    """
    bar = "{}used{}evict{}free".format(*glyphs)
    yield Table(
        ("tier", "served", "share", bar, "limit", "evicted", "held", "published"),
        [
            *(_tier(row, seen.prompt, glyphs) for row in seen.tiers),
            ("computed", _whole(seen.computed), _share(seen.computed, seen.prompt), *[""] * 5),
        ],
        expendable=(bar, "published", "held", "evicted", "limit", "share"),
    )
    yield Table(
        ("transfers", "timed by", "times", "moved", "p50 <=", "p99 <=", "moving", "now"),
        [_route(row) for row in seen.routes if row.transfers or row.active],
        left=2,
        expendable=("timed by", "moved", "now", "p50 <=", "p99 <=", "moving"),
    )
    lost = [*_failed(seen), *(_loss(row) for row in seen.losses if _matters(row))]
    what = "lost or left undone"
    yield Table((what, "why", ""), lost, left=2, expendable=(what,), names=1)
    if seen.doubts:
        yield Table(("these numbers may be wrong", ""), [(what, _whole(times)) for what, times in seen.doubts.items()])


def prefetched(seen: Seen) -> str:
    """Returns what became of what storage had; empty in a cache that asks none."""
    if not seen.prefetch:
        return ""
    told = {name: _whole(tokens) for name, tokens in seen.prefetch.items()}
    return f"storage had {told.pop('hit', NOTHING)} tokens: {', '.join(f'{n} {name}' for name, n in told.items())}"


def _glyphs() -> str:
    try:
        GLYPHS.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return PLAIN_GLYPHS
    return GLYPHS


def _tier(row: TierRow, prompt: float, glyphs: str) -> tuple[str, ...]:
    return (
        row.tier,
        _whole(row.served),
        _share(row.served, prompt),
        _bar(row, glyphs),
        *map(_whole, (row.limit, row.evicted, row.held, row.published)),
    )


def _bar(row: TierRow, glyphs: str) -> str:
    if not row.limit:
        return NOTHING
    used = round(BAR * (row.used or 0) / row.limit)
    evictable = round(BAR * ((row.used or 0) + (row.evictable or 0)) / row.limit) - used
    return (glyphs[0] * used + glyphs[1] * evictable).ljust(BAR, glyphs[2])[:BAR]


def _route(row: RouteRow) -> tuple[str, ...]:
    return (
        f"{row.source} -> {row.destination}",
        row.clock.replace("_", " "),
        _whole(row.transfers),
        _bytes(row.bytes),
        _seconds(row.p50),
        _seconds(row.p99),
        NOTHING if row.bandwidth is None else f"{_bytes(row.bandwidth)}/s",
        _whole(row.active),
    )


def _loss(row: LossRow) -> tuple[str, ...]:
    return (
        row.what,
        f"{row.tier} {row.reason}".strip(),
        f"{_whole(row.amount)} {row.unit}{'' if row.amount == 1 else 's'}",
    )


def _matters(row: LossRow) -> bool:
    return bool(row.amount) or (row.what == DROPPED and row.reason != Reason.OTHER)


def _failed(seen: Seen) -> Iterator[tuple[str, ...]]:
    routes = {(row.source, row.destination): row.failed for row in seen.routes}
    for (source, destination), times in routes.items():
        if times:
            yield "failed", f"{source} -> {destination}", f"{_whole(times)} transfers"


def fitted(table: Table, width: int) -> tuple[Table, list[str]]:
    """Returns a table that fits, and the columns that it is without: no number is cut.

    Args:
        table: The table.
        width: How wide it may be.
    """
    lines = [table.head, *table.rows]
    widths = {head: GAP + max(map(len, column)) for head, *column in zip(table.head, *lines, strict=True)}
    names = table.head[table.names]
    fitting = fit(widths, names, table.expendable, width + GAP)
    places = [table.head.index(column) for column in fitting.columns]
    shown = [
        tuple(shortened(line[place], fitting.name - GAP) if place == table.names else line[place] for place in places)
        for line in lines
    ]
    left = sum(place < table.left for place in places)
    return Table(shown[0], shown[1:], left), fitting.left_out


def text(table: Table) -> str:
    """Returns a table as plain text."""
    lines = [table.head, *table.rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        (" " * GAP)
        .join(
            cell.ljust(width) if place < table.left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        .rstrip()
        for line in lines
    )


# -- lines -------------------------------------------------------------------------------------------------------------


def lines(seen: Seen, seconds: float) -> Iterator[str]:
    """Yields lines that say what their numbers are, for programs, without those that there are none of.

    Args:
        seen: What there is.
        seconds: Since when.
    """
    yield _line(at=f"{seconds:.1f}", prompt=seen.prompt, computed=seen.computed)
    for tier in seen.tiers:
        yield _line(**tier._asdict())
    for route in seen.routes:
        named = route._asdict() | {"bytes_per_second": None if route.bandwidth is None else round(route.bandwidth)}
        named["seconds"] = round(route.seconds, 6)
        yield _line(**{{"p50": "p50_le", "p99": "p99_le"}.get(name, name): value for name, value in named.items()})
    for loss in filter(_matters, seen.losses):
        named = {"lost" if loss.what == DROPPED else "undone": loss.what.replace(" ", "_")}
        where = {"tier": loss.tier} if loss.tier else {}
        yield _line(**named, **where, reason=loss.reason, amount=loss.amount, unit=loss.unit)
    if seen.prefetch:
        yield _line(**{f"prefetch_{name}": tokens for name, tokens in seen.prefetch.items()})
    for what, times in seen.doubts.items():
        yield _line(wrong=what.replace(" ", ":"), times=times)


def _line(**named: object) -> str:
    return " ".join(f"{name}={value}" for name, value in named.items() if value is not None)


# -- showing -----------------------------------------------------------------------------------------------------------


def is_live() -> bool:
    """Returns whether there is a live view: in a terminal in which it can be drawn anew, where rich is installed."""
    return is_drawn() and find_spec("rich") is not None


@contextmanager
def view(look: Callable[[], Seen], title: Callable[[], str]) -> Generator[Show]:
    """Shows what there is now and then: live tables where there can be; elsewhere lines, and tables in the end.

    Args:
        look: Reads the rows.
        title: Says what is running, on one line.
    """
    began = time.monotonic()
    glyphs = _glyphs()
    if is_live():
        with _live(look, title, glyphs) as show:
            yield show
        return
    if is_drawn():
        print(f"kvcache-otel demo: no live view without rich: {how('demo')}", file=sys.stderr)

    def show_plainly(*, last: bool) -> None:
        seen = look()
        if last:
            parts = [title(), *map(text, tables(seen, glyphs)), prefetched(seen)]
            _print("\n" + "\n\n".join(filter(None, parts)))
        else:
            _print("\n".join(lines(seen, time.monotonic() - began)))

    yield show_plainly


def _print(what: str) -> None:
    """Prints something.

    Raises:
        BrokenPipeError: Nobody will read it any more.
        OutputError: It cannot be written for another reason.
    """
    try:
        print(what, flush=True)
    except BrokenPipeError:
        _logger.warning("whoever read the output is gone, and so it ends")
        raise
    except OSError as error:
        raise OutputError(error.strerror or str(error)) from None


@contextmanager
def _live(look: Callable[[], Seen], title: Callable[[], str], glyphs: str) -> Generator[Show]:
    from rich.console import Group
    from rich.table import Table as Drawing
    from rich.text import Text

    def drawn() -> Group:
        parts: list[Drawing | Text] = [Text(title(), style="bold")]
        apart = [Text("")] if shutil.get_terminal_size().lines >= ROOMY else []
        seen = look()
        left_out: list[str] = []
        for table in tables(seen, glyphs):
            table, without = fitted(table, shutil.get_terminal_size().columns)
            left_out += ["used, evict, free" if column[0] == glyphs[0] else column for column in without]
            drawing = Drawing(box=None, padding=(0, GAP, 0, 0), pad_edge=False, header_style="dim")
            for place, column in enumerate(table.head):
                drawing.add_column(Text(column), justify="left" if place < table.left else "right", no_wrap=True)
            for row in table.rows:
                drawing.add_row(*map(Text, row))
            parts += [*apart, drawing]
        if told := prefetched(seen):
            parts += [*apart, Text(told)]
        if left_out:
            parts += [*apart, Text(f"no room for: {', '.join(left_out)}", style="dim")]
        return Group(*parts)

    with live(drawn) as redraw:

        def show(*, last: bool) -> None:
            try:
                redraw()
            except OSError as error:
                raise OutputError(error.strerror or str(error)) from None

        yield show


# -- numbers -----------------------------------------------------------------------------------------------------------


def _whole(value: float | None) -> str:
    if value is None:
        return NOTHING
    if value < 1e6:
        return f"{value:,.0f}"
    return f"{value / 1e6:.2f} M" if value < 1e9 else f"{value / 1e9:.2f} G"


def _share(value: float | None, of: float) -> str:
    return NOTHING if value is None or not of else f"{value / of:.0%}"


def _bytes(value: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 99.5 else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:,.1f} TB"


def _seconds(value: float | None) -> str:
    if value is None:
        return NOTHING
    if value == float("inf"):
        return "above"
    return f"{value * 1e6:g} us" if value < 1e-3 else f"{value * 1e3:g} ms" if value < 1 else f"{value:g} s"
