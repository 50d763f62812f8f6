"""What ``kvcache-otel watch`` shows: one row for each worker and rank, from the very rows that are exported."""

from __future__ import annotations

import json
import re
import shutil
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvcache_otel import semconv
from kvcache_otel.cli.fit import fit, shortened
from kvcache_otel.cli.live import live
from kvcache_otel.cli.terminal import is_drawn
from kvcache_otel.cli.watch_output import LAST_SECONDS, Output, OutputError
from kvcache_otel.events.worker import OTHER
from kvcache_otel.semconv import Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    from rich.console import Console, ConsoleOptions

    from kvcache_otel.events.watch import Watch
    from kvcache_otel.record.recorder import Recorder
    from kvcache_otel.spec import MetricSpec

TIERS = (Tier.DEVICE, Tier.HOST, Tier.DISK, Tier.EXTERNAL, Tier.UNKNOWN)

_COUNTED: dict[str, MetricSpec] = {
    "events": semconv.EVENTS,
    "lost": semconv.EVENT_BATCHES_LOST,
    "recovered": semconv.EVENT_BATCHES_RECOVERED,
    "duplicate": semconv.EVENT_BATCHES_DUPLICATE,
    "resets": semconv.EVENT_PUBLISHER_RESETS,
}

_COLUMNS = ("worker", "rank", "engine", "state", *TIERS, *_COUNTED, "failures", "age")

_EXPENDABLE = (
    "duplicate",
    "resets",
    "recovered",
    "engine",
    Tier.UNKNOWN,
    Tier.EXTERNAL,
    Tier.DISK,
    "age",
    "events",
    Tier.HOST,
    "failures",
    "lost",
    "state",
)
"""Columns that are left out where a terminal has no room for all, the least needed first."""

_TROUBLE = ("duplicate", "resets", "recovered", "failures", "lost")
"""Columns that are all zero as a rule. One that is not is left out last, and then its sum is said."""

_LEFT = ("worker", "engine", "state")

_GAP = "  "
"""Between two columns of plain text."""

_PLAIN = re.compile(r"[\w./:*~@+\[\]-]+")

NOTHING = "-"
"""In place of a number that there is none of."""


class Row(NamedTuple):
    """One worker and rank; a worker that has not been heard has no rank yet.

    Attributes:
        cells: As text, in the order of the columns.
        name: The worker's name as its rows have it, whatever is in it.
    """

    cells: tuple[str, ...]
    name: str


class Show(Protocol):
    """Shows what there is now."""

    def __call__(self, *, last: bool) -> None:
        """Args:
        last: Whether nothing comes after it.
        """


def rows(recorder: Recorder, watch: Watch) -> list[Row]:
    """Returns what there is now, workers in the order of their names."""
    numbers: dict[tuple[str, int], dict[str, float]] = {}
    for spec, column in (
        (semconv.RESIDENT_BLOCKS, None),
        *((spec, name) for name, spec in _COUNTED.items()),
        (semconv.EVENT_LAST_AGE, "age"),
    ):
        for attributes, value in recorder.points(spec):
            owner = str(attributes[semconv.KVCACHE_WORKER]), int(attributes[semconv.KVCACHE_RANK_DP])
            name = column or str(attributes[semconv.KVCACHE_TIER])
            found = numbers.setdefault(owner, {})
            found[name] = found.get(name, 0) + value
    failures: dict[str, float] = {}
    for attributes, value in recorder.points(semconv.EVENT_DECODE_FAILURES):
        worker = str(attributes[semconv.KVCACHE_WORKER])
        failures[worker] = failures.get(worker, 0) + value
    engines = {worker.label: worker.engine or NOTHING for worker in watch.index.workers.values()}
    engines.pop(OTHER, None)  # Many.
    states = {owner: state for owner, state in watch.states().items() if owner[0] != OTHER}
    owners: dict[tuple[str, int | None], dict[str, float]] = {**numbers}
    owners |= {(worker, None): {} for worker in failures.keys() - {worker for worker, _ in numbers}}
    owners |= {owner: {} for owner in states.keys() - owners.keys()}
    return [
        # Failures are of no rank: popped, so that they are in the worker's first row alone.
        _row(
            worker, rank, engines, states.get((worker, rank), NOTHING), owners[worker, rank], failures.pop(worker, None)
        )
        for worker, rank in sorted(owners, key=lambda owner: (owner[0], -2 if owner[1] is None else owner[1]))
    ]


def _row(
    worker: str,
    rank: int | None,
    engines: dict[str, str],
    state: str,
    found: dict[str, float],
    failures: float | None,
) -> Row:
    counted = [_number(found.get(column)) for column in (*TIERS, *_COUNTED)]
    age = found.get("age")
    return Row(
        (
            _visible(worker),
            NOTHING if rank is None else str(rank),
            engines.get(worker, NOTHING),
            state,
            *counted,
            _number(failures),
            NOTHING if age is None else f"{age:.1f} s",
        ),
        worker,
    )


def _visible(name: str) -> str:
    """Returns a name without what would command a terminal: it may be a topic, which its publisher has chosen."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in name)


def _number(value: float | None) -> str:
    return NOTHING if value is None else f"{int(value):,}"


def _told(found: Sequence[Row]) -> list[int]:
    """Returns which columns say anything; the worker's and the first tier's in any case."""
    always = {"worker", "rank", Tier.DEVICE}
    return [
        place
        for place, column in enumerate(_COLUMNS)
        if column in always or any(row.cells[place] != NOTHING for row in found)
    ]


class Fitted(NamedTuple):
    """What of the rows fits.

    Attributes:
        cells: By column, its head and below it the cells.
        left_out: Columns for which there is no room, each with its sum where that is trouble.
    """

    cells: dict[str, list[str]]
    left_out: list[str]


def fitted(found: Sequence[Row], width: int, gap: int, measure: Callable[[str], int] = len) -> Fitted:
    """Returns the columns that say something, as they fit.

    Args:
        found: The rows.
        width: What there is for all, with a gap behind each.
        gap: What is between two columns.
        measure: How wide a text is.
    """
    cells = {_COLUMNS[place]: [_COLUMNS[place], *(row.cells[place] for row in found)] for place in _told(found)}
    widths = {column: gap + max(map(measure, lines)) for column, lines in cells.items()}
    trouble = {column: total for column in _TROUBLE if (total := _sum(cells.get(column, ())))}
    fitting = fit(widths, "worker", sorted(_EXPENDABLE, key=lambda column: column in trouble), width)
    cells["worker"] = [shortened(name, fitting.name - gap, measure) for name in cells["worker"]]
    left_out = [f"{column} {trouble[column]:,}" if column in trouble else column for column in fitting.left_out]
    return Fitted({column: cells[column] for column in fitting.columns}, left_out)


def _sum(cells: Sequence[str]) -> int:
    return sum(int(cell.replace(",", "")) for cell in cells[1:] if cell != NOTHING)


def table(found: Sequence[Row], width: int = sys.maxsize, measure: Callable[[str], int] = len) -> str:
    """Returns rows below their columns, as plain text, without columns that say nothing.

    Args:
        found: The rows.
        width: How wide it may be; columns that have no room are named below it.
        measure: How wide a text is.
    """
    cells, left_out = fitted(found, width + len(_GAP), len(_GAP), measure)
    for column, texts in cells.items():
        widest = max(map(measure, texts))
        blanks = [" " * (widest - measure(text)) for text in texts]
        cells[column] = [
            text + blank if column in _LEFT else blank + text for text, blank in zip(texts, blanks, strict=True)
        ]
    lines = [_GAP.join(line).rstrip() for line in zip(*cells.values(), strict=True)]
    return "\n".join([*lines, *([_no_room(left_out)] if left_out else [])])


def _no_room(left_out: Sequence[str]) -> str:
    return f"no room for: {', '.join(left_out)}"


def lines(found: Sequence[Row]) -> str:
    """Returns a line for each row that says what its numbers are, without those that there are none of."""
    return "\n".join(" ".join([f"worker={quoted(row.name)}", *_said(row)]) for row in found)


def _said(row: Row) -> Iterator[str]:
    for column, cell in zip(_COLUMNS[1:], row.cells[1:], strict=True):
        if cell != NOTHING:
            yield f"{column}={cell.removesuffix(' s').replace(',', '')}"


def quoted(name: str) -> str:
    """Returns a name as a line has it: one that is not plain as a JSON string, so that it can be read back.

    Args:
        name: Whatever it is; a publisher may have chosen it.
    """
    if _PLAIN.fullmatch(name):
        return name
    return json.dumps(name, ensure_ascii=not name.isprintable())


@contextmanager
def view(recorder: Recorder, watch: Watch, *, once: bool, asked: Callable[[], bool]) -> Generator[Show]:
    """Shows rows now and then: a live table in a terminal, lines in a pipe, one table at the end with `once`.

    Args:
        recorder: Where the rows are.
        watch: Which workers there are.
        once: Whether only the last is wanted.
        asked: Returns whether it is to end, whoever reads.
    """
    if is_drawn() and not once:
        with _live(recorder, watch) as show:
            yield show
        return
    output = Output()

    if once:

        def show_table(*, last: bool) -> None:
            if last:
                output.last(_table(rows(recorder, watch)), asked)

        yield show_table
        return

    def show_lines(*, last: bool) -> None:
        if found := rows(recorder, watch):
            output.put(lines(found))
        if last:
            output.end(LAST_SECONDS)

    yield show_lines


def _table(found: Sequence[Row]) -> str:
    """Returns the table as wide as a terminal is; whole, where it is for a program."""
    if not sys.stdout.isatty():
        return table(found)
    from rich.cells import cell_len

    return table(found, shutil.get_terminal_size().columns, cell_len)


@contextmanager
def _live(recorder: Recorder, watch: Watch) -> Generator[Show]:
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    class Drawing:
        """Rows, as they fit where they are drawn."""

        def __init__(self) -> None:
            self._found = rows(recorder, watch)

        def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table | Text]:
            cells, left_out = fitted(self._found, options.max_width, 1, cell_len)
            drawing = Table(box=None, padding=(0, 1, 0, 0))
            for column in cells:
                drawing.add_column(column, justify="left" if column in _LEFT else "right", no_wrap=True)
            for line in list(zip(*cells.values(), strict=True))[1:]:
                drawing.add_row(*map(Text, line))  # Text: a name may look like markup.
            yield drawing
            if left_out:
                yield Text(_no_room(left_out))

    with live(Drawing) as redraw:

        def show(*, last: bool) -> None:
            try:
                redraw()
            except OSError as error:
                raise OutputError(error.strerror or str(error)) from None

        yield show
