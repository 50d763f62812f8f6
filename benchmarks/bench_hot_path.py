"""What recording one fact costs, beside OpenTelemetry's own instruments and prometheus_client, in the same run.

    python benchmarks/bench_hot_path.py [--quick]

Exit status 1 where recording is not as much cheaper as `REQUIRED` says, or where a transfer that a device times costs
more than `AT_MOST_US` says.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
import timeit
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, NamedTuple

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client import CollectorRegistry
from prometheus_client import Counter as PrometheusCounter
from prometheus_client import Histogram as PrometheusHistogram

from kvcache_otel import semconv
from kvcache_otel.engines.generic.copies import Backup
from kvcache_otel.engines.generic.instrument import instrument
from kvcache_otel.engines.generic.rows import Tiers
from kvcache_otel.identity import Identity, Rank
from kvcache_otel.record.probe import CacheProbe
from kvcache_otel.record.recorder import Recorder
from kvcache_otel.record.transfers import Transfers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

BYTES = 4_194_304
SECONDS = 0.003


class Subject(NamedTuple):
    """One way to record a fact.

    Attributes:
        name: What it is called in the table.
        statement: The Python statement that is timed.
    """

    name: str
    statement: str


class Comparison(NamedTuple):
    """Two subjects, and by how much the first must be cheaper.

    Attributes:
        ours: Name of our subject.
        theirs: Name of the peer's.
        required: The least ratio of their cost to ours; None where it is printed only.
    """

    ours: str
    theirs: str
    required: float | None


COUNTER = "counter: Counter.add"
HISTOGRAM = "histogram: Histogram.record"
LEVEL = "gauge: Level.set"
TRANSFER = "transfer: moved, duration, finished"
OTEL_COUNTER = "OpenTelemetry Counter.add"
OTEL_HISTOGRAM = "OpenTelemetry Histogram.record"
OTEL_TRANSFER = "OpenTelemetry add, record, add"
PROMETHEUS_LABELS = "prometheus_client labels().inc"
PROMETHEUS_CHILD = "prometheus_client child.inc"
PROMETHEUS_OBSERVE = "prometheus_client child.observe"

SUBJECTS = (
    Subject(COUNTER, f"moved({BYTES})"),
    Subject(HISTOGRAM, f"duration({SECONDS})"),
    Subject(LEVEL, "level(7)"),
    Subject(TRANSFER, f"transfer.moved.add({BYTES}); transfer.duration.record({SECONDS}); transfer.finished.add()"),
    Subject(OTEL_COUNTER, f"otel_add({BYTES}, attributes)"),
    Subject(OTEL_HISTOGRAM, f"otel_record({SECONDS}, attributes)"),
    Subject(
        OTEL_TRANSFER,
        f"otel_add({BYTES}, attributes); otel_record({SECONDS}, attributes); otel_finished(1, of_operations)",
    ),
    Subject(PROMETHEUS_LABELS, f"prometheus.labels(*values).inc({BYTES})"),
    Subject(PROMETHEUS_CHILD, f"child_inc({BYTES})"),
    Subject(PROMETHEUS_OBSERVE, f"child_observe({SECONDS})"),
)

REQUIRED = (
    Comparison(COUNTER, OTEL_COUNTER, 20),
    Comparison(COUNTER, PROMETHEUS_LABELS, 10),
    Comparison(COUNTER, PROMETHEUS_CHILD, None),
    Comparison(HISTOGRAM, OTEL_HISTOGRAM, 20),
    Comparison(HISTOGRAM, PROMETHEUS_OBSERVE, None),
    Comparison(TRANSFER, OTEL_TRANSFER, None),
)


# On the engine's thread, beside the two records of events.
OURS = "timed by events of ours"
AS_BLOCK = "timed by events of ours, as a block"
BY_KEY = "timed by events of ours, ended by a key"
THEIRS = "timed by the engine's own events, done by then"
PENDING = "timed by the engine's own events, not done yet"
REPORTED = "timed by a backend's own word"
HARVESTED = "harvester, of one timed by events of ours"
WRAPPED = "wrapped method, timed by the wall clock"

AT_MOST_US = {OURS: 3.0, AS_BLOCK: 3.0, BY_KEY: 3.0, THEIRS: 3.0, PENDING: 3.0, REPORTED: 3.0, HARVESTED: 15.0}


class Scene:
    """A route from host to disk, recorded in three ways, with the same attributes everywhere."""

    def __init__(self) -> None:
        identity = Identity("vllm", "OffloadingConnector", Rank(tp=1))
        self.recorder = Recorder(identity)
        self.route = CacheProbe(self.recorder, identity).route("host", "disk", name="1:fs", timing="engine_report")
        (moved,) = self.recorder.points(semconv.TRANSFER_IO)
        (finished,) = self.recorder.points(semconv.TRANSFER_OPERATIONS)
        self.attributes = moved.attributes
        self.of_operations = finished.attributes

        self.provider = MeterProvider([InMemoryMetricReader()])
        meter = self.provider.get_meter("benchmark")
        self.otel_counter = meter.create_counter("io")
        self.otel_finished = meter.create_counter("operations")
        self.otel_histogram = meter.create_histogram(
            "duration", explicit_bucket_boundaries_advisory=semconv.DURATION_BOUNDS
        )

        names = [key.replace(".", "_") for key in self.attributes]
        self.values = [str(value) for value in self.attributes.values()]
        registry = CollectorRegistry()
        self.prometheus = PrometheusCounter("io", "Bytes moved.", names, registry=registry)
        self.observed = PrometheusHistogram(
            "duration", "Transfers.", names, registry=registry, buckets=semconv.DURATION_BOUNDS
        )

    def names(self) -> dict[str, Any]:
        """Returns what the statements may use: bound methods, as an adapter keeps them."""
        return {
            "moved": self.route.moved.add,
            "duration": self.route.duration.record,
            "level": self.route.active.set,
            "transfer": self.route,
            "otel_add": self.otel_counter.add,
            "otel_record": self.otel_histogram.record,
            "otel_finished": self.otel_finished.add,
            "attributes": self.attributes,
            "of_operations": self.of_operations,
            "prometheus": self.prometheus,
            "values": self.values,
            "child_inc": self.prometheus.labels(*self.values).inc,
            "child_observe": self.observed.labels(*self.values).observe,
        }


def measure(rounds: int, seconds: float) -> dict[str, list[float]]:
    """Returns nanoseconds per call by subject, one figure a round.

    In a round every subject has its turn, so that what slows the machine down for a while slows all of them. The loop
    around the call is not taken off; it weighs most on the cheapest, which is ours.

    Args:
        rounds: How often every subject has its turn.
        seconds: About how long a turn takes.
    """
    names = Scene().names()
    timers = {subject.name: timeit.Timer(subject.statement, globals=names) for subject in SUBJECTS}
    calls = {name: max(1, round(1_000 * seconds / timer.timeit(1_000))) for name, timer in timers.items()}
    costs: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(rounds):
        for name, timer in timers.items():
            costs[name].append(timer.timeit(calls[name]) / calls[name] * 1e9)
    return costs


class Event:
    """Stands in for a device's event: done at once, and free of charge as far as Python lets it."""

    __slots__ = ()

    def record(self, stream: object) -> None:
        """Does nothing."""

    def query(self) -> bool:
        """Returns that the device has passed it."""
        return True

    def elapsed_time(self, end: object) -> float:
        """Returns some milliseconds."""
        return SECONDS * 1000


class Awake:
    """Stands in for the harvester's thread while nothing is to be harvested."""

    asleep = ended = False


class EnginesEvent(Event):
    """The same, of an engine's own. What it costs that they are heard is ours."""

    done = True

    def record(self, stream: object) -> None:
        """Does nothing."""

    def query(self) -> bool:
        """Returns whether the device has passed it."""
        return self.done


def measure_transfers(rounds: int, transfers: int = 500) -> dict[str, list[float]]:
    """Returns microseconds per transfer that a device times, on either thread, one figure a round.

    What two events cost the engine is taken off, its own and not ours. The harvester's round runs here, so that neither
    is measured while the other wants the interpreter.

    Args:
        rounds: How often so many transfers begin, end and are harvested, in each way.
        transfers: How many.
    """
    identity = Identity("custom", "Benchmark")
    recorder = Recorder(identity)
    harvester, stream, tokens = recorder.harvester, object(), {"kv": 64}
    copies = Transfers(CacheProbe(recorder, identity), "device", "host", timing="device_event", make_event=Event)
    harvester._reader = Awake()  # type: ignore[assignment]
    event, pairs = Event(), [(EnginesEvent(), EnginesEvent()) for _ in range(transfers)]
    clock = time.perf_counter

    def ours() -> None:
        for _ in pairs:
            copies.begin(bytes=BYTES, tokens=tokens, stream=stream).end()

    def as_block() -> None:
        for _ in pairs:
            with copies.transfer(bytes=BYTES, tokens=tokens, stream=stream):
                pass

    def by_key() -> None:
        for key in range(transfers):
            copies.begin(bytes=BYTES, tokens=tokens, stream=stream, key=key)
            copies.end(key)

    def theirs() -> None:
        for pair in pairs:
            start, end = pair
            start.record(stream)
            end.record(stream)
            copies.begin().end(bytes=BYTES, tokens=tokens, events=pair)

    def reported() -> None:
        for _ in pairs:
            event.record(stream)
            event.record(stream)
            copies.begin().end(bytes=BYTES, tokens=tokens, seconds=SECONDS)

    def two_records() -> None:
        for _ in pairs:
            event.record(stream)
            event.record(stream)

    def seconds(run: Callable[[], object]) -> float:
        began = clock()
        run()
        return clock() - began

    ways = {OURS: ours, AS_BLOCK: as_block, BY_KEY: by_key, THEIRS: theirs, PENDING: theirs, REPORTED: reported}
    costs: dict[str, list[float]] = {name: [] for name in (*ways, HARVESTED)}
    for number in range(rounds + 1):
        for name, way in ways.items():
            EnginesEvent.done = name != PENDING
            engine = seconds(way) - seconds(two_records)
            EnginesEvent.done = True
            reading = seconds(lambda: harvester._round(None, None))
            assert not harvester._pairs
            if number:  # In the first there are no events yet that could be used again.
                costs[name].append(engine / transfers * 1e6)
                costs[HARVESTED] += [reading / transfers * 1e6] if name == OURS else []
    return costs


def measure_wrapped(rounds: int, calls: int = 5_000) -> list[float]:
    """Returns microseconds that a wrapped method costs more than the same unwrapped, one figure a round.

    Args:
        rounds: How often each has its turn.
        calls: How many calls are a turn.
    """
    identity = Identity("custom", "Benchmark")
    fact = Backup(tokens=lambda tokens, _: tokens, bytes=lambda _, call: call.tokens * 128)
    tiers = Tiers({"device": "kv", "host": "kv"}, {})
    wrapped, plain = Controller(), Controller()
    instrument(
        wrapped,
        identity,
        lambda: CacheProbe(Recorder(identity), identity),
        tiers=tiers,
        methods={"write": fact},
        usual={},
        gauges=None,
    )
    costs: list[float] = []
    for _ in range(rounds):
        times = [timeit.timeit("write(64)", globals={"write": each.write}, number=calls) for each in (wrapped, plain)]
        costs.append((times[0] - times[1]) / calls * 1e6)
    return costs


class Controller:
    """A controller whose copies take no time."""

    def write(self, tokens: int) -> int:
        """Returns what it was given."""
        return tokens


def ratio(costs: Mapping[str, Sequence[float]], comparison: Comparison) -> float:
    """Returns the median over the rounds of their cost divided by ours in the same round."""
    pairs = zip(costs[comparison.theirs], costs[comparison.ours], strict=True)
    return statistics.median(theirs / ours for theirs, ours in pairs)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the figures; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a few seconds instead of half a minute")
    quick = parser.parse_args(arguments).quick
    costs = measure(rounds=15, seconds=0.02) if quick else measure(rounds=51, seconds=0.05)

    versions = [f"{name} {version(name)}" for name in ("opentelemetry-sdk", "prometheus_client")]
    print(", ".join([f"Python {platform.python_version()}", *versions]))
    print(f"{len(Scene().attributes)} attributes\n\n{'one call':<38} {'ns':>8}")
    for subject in SUBJECTS:
        print(f"{subject.name:<38} {statistics.median(costs[subject.name]):>8.0f}")

    print(f"\n{'ours':<38} {'beside':<34} {'cheaper':>8} {'at least':>9}")
    missed = 0
    for comparison in REQUIRED:
        cheaper = ratio(costs, comparison)
        least = "" if comparison.required is None else f"{comparison.required:g} x"
        verdict = ""
        if comparison.required is not None and cheaper < comparison.required:
            missed += 1
            verdict = "  missed"
        print(f"{comparison.ours:<38} {comparison.theirs:<34} {cheaper:>6.1f} x {least:>9}{verdict}")

    print(f"\n{'one transfer':<58} {'us':>8} {'at most':>9}")
    transfers = {**measure_transfers(rounds=51 if quick else 301), WRAPPED: measure_wrapped(rounds=11 if quick else 51)}
    for name, figures in transfers.items():
        cost, most = statistics.median(figures), AT_MOST_US.get(name)
        verdict = "  missed" if most is not None and cost > most else ""
        missed += bool(verdict)
        print(f"{name:<58} {cost:>8.2f} {'' if most is None else f'{most:g}':>9}{verdict}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
