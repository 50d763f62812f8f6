"""The recorder of one process: every series of the catalogue, by metric and labels, read by whoever exports."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from numbers import Integral
from typing import TYPE_CHECKING, NamedTuple

from kvcache_otel import semconv
from kvcache_otel.record.cells import (
    Counter,
    DiscardedCounter,
    DiscardedHistogram,
    DiscardedLevel,
    Histogram,
    Level,
    ReplayedHistogram,
)
from kvcache_otel.record.doubts import Doubts
from kvcache_otel.record.labels import Labels, printable
from kvcache_otel.record.outside import let_through
from kvcache_otel.record.timing import Harvester
from kvcache_otel.record.together import Changes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from kvcache_otel.identity import Identity
    from kvcache_otel.spec import MetricSpec

_logger = logging.getLogger(__name__)

# Half of what the SDK lets through for one metric before it folds series itself, unseen.
SERIES_LIMIT = 1000

ENDING = frozenset({semconv.KVCACHE_WORKER})
"""Attributes whose rows end together, when what they are about is gone."""

Attributes = dict[str, str | int]
Cell = Counter | Histogram | Level


class Point(NamedTuple):
    """One row of a counter or a gauge, as it is now."""

    attributes: Attributes
    value: int | float


class HistogramRow(NamedTuple):
    """One row of a histogram; `cell.read()` gives its buckets and its sum."""

    attributes: Attributes
    cell: Histogram


class Reader(NamedTuple):
    """A value that is asked for when it is collected."""

    read: Callable[[], int | float | None]
    alive: Callable[[], object]
    failed: list[str]
    forget: Callable[[], None]
    doubts: Doubts


class _Series:
    """The cells behind one label set of one metric.

    Counters and histograms have one cell for ever. Levels have one for each owner, held weakly and added up when read:
    when the last owner is gone the row ends.
    """

    __slots__ = ("attributes", "cell", "levels", "readers")

    def __init__(self, attributes: Attributes) -> None:
        self.attributes = attributes
        self.cell: Counter | Histogram | None = None
        self.levels: Sequence[weakref.ref[Level]] = ()
        self.readers: Sequence[Reader] = ()


class Recorder:
    """Every cell of one process.

    Binding (`counter`, `histogram`, `level`, `observe`) happens when a cache is set up; it takes a lock and may be
    slow. The cells it returns are what hot paths use.

    Attributes:
        identity: The process's own, on what is about none of its caches.
        replayed: Samples that wait for the histograms of somebody else's provider, or None where the provider is ours.
        harvester: Event pairs that wait for their device; without a thread until there is one.
        changes: Changes of rows that add up, and are read together.
        series_limit: Series that each metric may have.
    """

    def __init__(self, identity: Identity, *, replay: bool = False, series_limit: int = SERIES_LIMIT) -> None:
        """Args:
        identity: The process's own.
        replay: Whether histogram samples must be kept for a provider that is not ours.
        series_limit: Series per metric; what goes beyond is counted in ``kvcache.telemetry.dropped``.
        """
        self.identity = identity
        self.replayed: deque[tuple[ReplayedHistogram, float]] | None = deque() if replay else None
        self.series_limit = series_limit
        self._labels = Labels()
        self._lock = threading.RLock()
        self._tables: dict[str, dict[tuple[object, ...], _Series]] = {name: {} for name in semconv.METRICS}
        # By attribute, value and metric, so that the rows of one are found without looking at those of thousands.
        self._ending: dict[str, dict[str | int, dict[str, list[tuple[object, ...]]]]] = {key: {} for key in ENDING}
        self._overflowed: set[str] = set()
        self._said: set[str] = set()
        self.changes = Changes()
        self._doubts: dict[Identity, Doubts] = {}
        self._own = self.doubts(identity)
        self.harvester = Harvester(self._own)

    # -- binding ---------------------------------------------------------------------------------------------------

    def counter(self, spec: MetricSpec, labels: Attributes, identity: Identity | None = None) -> Counter:
        """Returns the counter of one series, which exists at zero from now on."""
        series = self._series(spec, labels, identity)
        if isinstance(series, Counter):
            return DiscardedCounter(series)
        with self._lock:
            if series.cell is None:
                series.cell = Counter(self.doubts(identity).refuse)
        assert isinstance(series.cell, Counter)
        return series.cell

    def histogram(self, spec: MetricSpec, labels: Attributes, identity: Identity | None = None) -> Histogram:
        """Returns the histogram of one series, which exists without samples from now on."""
        series = self._series(spec, labels, identity)
        if isinstance(series, Counter):
            return DiscardedHistogram(series)
        with self._lock:
            if series.cell is None:
                series.cell = self._new_histogram(spec, series.attributes, self.doubts(identity))
        assert isinstance(series.cell, Histogram)
        return series.cell

    def level(self, spec: MetricSpec, labels: Attributes, identity: Identity | None = None) -> Level:
        """Returns a new level of one series, without a row until it is set; the caller keeps it alive."""
        series = self._series(spec, labels, identity)
        if isinstance(series, Counter):
            return DiscardedLevel(series)
        level = Level(self.doubts(identity).underflow)
        with self._lock:
            living = [other for other in series.levels if other() is not None]
            series.levels = [*living, weakref.ref(level)]
        return level

    def observe(
        self,
        spec: MetricSpec,
        labels: Attributes,
        read: Callable[[], int | float | None],
        *,
        owner: object = None,
        identity: Identity | None = None,
        forget: Callable[[], None] = lambda: None,
    ) -> None:
        """Adds a value that is asked when it is collected, on the reader's thread: `read` must be cheap and harmless.

        Args:
            spec: The metric.
            labels: Its attributes.
            read: Returns the value, or None where there is none now.
            owner: The row ends when this object is gone; None for a row that lasts.
            identity: As in the other binding methods.
            forget: Called in a forked child, for a value that is about its parent.
        """
        series = self._series(spec, labels, identity)
        if isinstance(series, Counter):
            series.add(1)
            return
        alive: Callable[[], object] = weakref.ref(owner) if owner is not None else lambda: True
        with self._lock:
            living = [other for other in series.readers if other.alive() is not None]
            series.readers = [*living, Reader(read, alive, [], forget, self.doubts(identity))]

    def end(self, key: str, value: str | int, also: Attributes | None = None) -> None:
        """Ends every row that has this value for an attribute; what is written to its cells from now on is lost.

        Args:
            key: The attribute, one of `ENDING`.
            value: Its value.
            also: What else these rows have; None for all of them.
        """
        with self._lock:
            ending = self._ending[key].pop(value, {})
            for name, rows in ending.items():
                table = self._tables[name]
                gone = {row for row in rows if also is None or also.items() <= table[row].attributes.items()}
                for row in gone:
                    del table[row]
                if len(gone) < len(rows):
                    self._ending[key].setdefault(value, {})[name] = [row for row in rows if row not in gone]

    # -- what went wrong -------------------------------------------------------------------------------------------

    def doubts(self, identity: Identity | None = None) -> Doubts:
        """Returns what counts the doubts about one cache, whose rows exist at zero from now on.

        Args:
            identity: The cache's; None for what is about none. Where there is no room for more rows, the process's own
                are told of it.
        """
        identity = identity or self.identity
        known = self._doubts.get(identity)
        if known is not None:
            return known
        with self._lock:
            known = self._doubts.get(identity)
            if known is not None:
                return known
            rows, more = self._tables[semconv.ACCOUNTING_ERRORS.name], _reasons(semconv.ACCOUNTING_ERRORS)
            if self._doubts and len(rows) + len(more) > self.series_limit:
                return self._own
            made = self._doubts[identity] = Doubts(identity, self._say)  # First: its own rows refuse by it too.
            made.wrong = self._by_reason(semconv.ACCOUNTING_ERRORS, identity)
            made.dropped = self._by_reason(semconv.TELEMETRY_DROPPED, identity)
            return made

    def _by_reason(self, spec: MetricSpec, identity: Identity) -> dict[str, Counter]:
        return {reason: self.counter(spec, {semconv.KVCACHE_REASON: reason}, identity) for reason in _reasons(spec)}

    def accounting_error(self, reason: str, times: int = 1) -> None:
        """Counts bookkeeping that contradicted itself, so many times, and is about no cache of this process."""
        self._own.accounting_error(reason, times)

    def gauge_failed(self, what: str, error: BaseException, identity: Identity | None = None) -> None:
        """Counts a quantity that could not be read, and says so once.

        Args:
            what: The quantity, in words.
            error: What was raised instead.
            identity: As in `failed`.
        """
        self.failed("gauge", f"no row from {what} while it fails", error, identity)

    def failed(self, hook: str, what: str, error: BaseException, identity: Identity | None = None) -> None:
        """Counts an exception of ours that was caught, and says so once.

        Args:
            hook: Where it was, as ``kvcache.telemetry.hook``.
            what: What is not measured because of it, in words.
            error: What was raised.
            identity: The cache that it is about; None for none.
        """
        self.counter(semconv.TELEMETRY_ERRORS, {semconv.KVCACHE_TELEMETRY_HOOK: hook}, identity).add(1)
        said = f"{type(error).__name__}: {printable(error)}"
        try:
            self._say(f"{hook} {what}", "kvcache: %s: %r", what, said)
        except Exception as of_log:  # It may be said on the engine's thread: a log that raises must not hurt it.
            let_through(of_log)

    def dropped(self, reason: str) -> Counter:
        """Returns the counter of measurements that were given up for one reason, and are about no cache."""
        return self._own.dropped[reason]

    def _say(self, what: str, message: str, *arguments: object) -> None:
        if what not in self._said:
            self._said.add(what)
            _logger.warning(message, *arguments)

    # -- reading ---------------------------------------------------------------------------------------------------

    def freshen(self) -> None:
        """Has what is under way looked after, before anything of a collection is read; on any thread.

        What nobody ends is given up then, and pairs are read that their device is done with. Nobody is kept for long.
        """
        for series in self._rows(semconv.TRANSFER_ACTIVE):
            for _ in self._asked(series):
                pass  # Who is asked how many there are looks after them.
        self.harvester.freshen()

    def points(self, spec: MetricSpec) -> Iterator[Point]:
        """Yields the rows of a counter or gauge as they are now, label sets each once."""
        for series in self._rows(spec):
            asked = list(self._asked(series))  # First: who is asked may look after what the levels count.
            # Each level is read once: the engine may end the row at any moment.
            read = (level.value for reference in series.levels if (level := reference()) is not None)
            values = [value for value in read if value is not None]
            values.extend(asked)
            if isinstance(series.cell, Counter):
                values.append(series.cell.value)
            if values:
                # Two caches with the same labels add up; of a plain gauge there is no sum, and the newest counts.
                value = values[-1] if spec.instrument == "gauge" else sum(values)
                yield Point(series.attributes, _number(value))

    def together(self, specs: Iterable[MetricSpec]) -> dict[str, list[Point]]:
        """Returns the rows of several metrics by their names, as they were at one moment."""
        return self.changes.read(lambda: {spec.name: list(self.points(spec)) for spec in specs})

    def histograms(self, spec: MetricSpec) -> Iterator[HistogramRow]:
        """Yields the rows of a histogram."""
        for series in self._rows(spec):
            if isinstance(series.cell, Histogram):
                yield HistogramRow(series.attributes, series.cell)

    def reset(self) -> None:
        """Starts every series again from nothing: what a forked child must do."""
        self._lock = threading.RLock()
        self.harvester.reset()
        self.changes.reset()
        for table in self._tables.values():
            for series in table.values():
                if series.cell is not None:
                    series.cell.reset()
                for reference in series.levels:
                    if (level := reference()) is not None:
                        level.reset()
                for reader in series.readers:
                    reader.forget()
        if self.replayed is not None:
            self.replayed.clear()

    # -- inside ----------------------------------------------------------------------------------------------------

    def _rows(self, spec: MetricSpec) -> Iterable[_Series]:
        with self._lock:
            return list(self._tables[spec.name].values())

    def _asked(self, series: _Series) -> Iterator[int | float]:
        for reader in series.readers:
            if reader.alive() is None:
                with self._lock:
                    series.readers = [other for other in series.readers if other is not reader]
                continue
            try:
                value = reader.read()
                number = None if value is None else _number(value)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # SystemExit, CancelledError: they are not about the reader's thread.
                self._reader_failed(reader, error)
                continue
            reader.failed.clear()
            if number is not None:
                yield number

    def _reader_failed(self, reader: Reader, error: BaseException) -> None:
        if not reader.failed:  # Counted when it starts to fail, not at every collection while it does.
            reader.failed.append(type(error).__name__)
            self.gauge_failed(getattr(reader.read, "__qualname__", "gauge"), error, reader.doubts.identity)

    def _series(self, spec: MetricSpec, labels: Attributes, identity: Identity | None) -> _Series | Counter:
        """Returns the series, or the counter of what is dropped where there may be none."""
        attributes: Attributes = {}
        own = spec.identity and semconv.KVCACHE_WORKER not in labels  # A worker is somebody else.
        given = dict((identity or self.identity).attributes()) | labels if own else labels
        keys = (*semconv.IDENTITY_ATTRIBUTES, *spec.attributes) if own else spec.attributes
        if unknown := given.keys() - set(keys):
            raise KeyError(f"{spec.name} has no {', '.join(sorted(unknown))}")
        for key in keys:
            if key not in given:
                if key in spec.optional:
                    continue
                raise KeyError(f"{spec.name} needs {key}")
            folded = self._labels.fold(spec, key, given[key])
            if folded is None:
                return self._charged(identity).dropped[semconv.Reason.OTHER]
            attributes[key] = folded
        with self._lock:
            table = self._tables[spec.name]
            row = tuple(attributes.get(key) for key in keys)
            series = table.get(row)
            if series is None:
                if len(table) >= self.series_limit:
                    return self._overflow(spec, identity)
                series = table[row] = _Series(attributes)
                for key in ENDING & attributes.keys():
                    self._ending[key].setdefault(attributes[key], {}).setdefault(spec.name, []).append(row)
            return series

    def _charged(self, identity: Identity | None) -> Doubts:
        """Returns the doubts about a cache, as far as they have rows: none are made here, where one was refused."""
        return self._doubts.get(identity or self.identity, self._own)

    def _overflow(self, spec: MetricSpec, identity: Identity | None) -> Counter:
        if spec.name not in self._overflowed:
            self._overflowed.add(spec.name)
            _logger.warning(
                "kvcache: %s has %d series; more are not recorded, see kvcache.telemetry.dropped",
                spec.name,
                self.series_limit,
            )
        return self._charged(identity).dropped[semconv.Reason.LABEL_OVERFLOW]

    def _new_histogram(self, spec: MetricSpec, attributes: Attributes, doubts: Doubts) -> Histogram:
        if self.replayed is None:
            return Histogram(spec.bounds, doubts.refuse)
        return ReplayedHistogram(
            spec.bounds,
            doubts.refuse,
            name=spec.name,
            attributes=attributes,
            queue=self.replayed,
            dropped=doubts.dropped[semconv.Reason.QUEUE_FULL],
        )


def _reasons(spec: MetricSpec) -> list[str]:
    return sorted(spec.values[semconv.KVCACHE_REASON])


def _number(value: int | float) -> int | float:
    """Returns a number that every exporter can encode: Python's own, and an int only where 64 bits hold it."""
    if type(value) not in (int, float):
        value = int(value) if isinstance(value, Integral) else float(value)
    if -(2**63) <= value < 2**63:
        return value
    try:
        return float(value)
    except OverflowError:
        return float("inf")
