"""Makes copies and times them in every way; beside it is what a clock around the call would have said.

python -m examples.timing [--copies 10] [--fake]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import kvcache_otel as kv
from examples.reading import Reading
from examples.timing import ways
from examples.timing.cuda_device import CudaDevice
from examples.timing.fake_device import FakeDevice
from examples.timing.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable

    from opentelemetry.metrics import MeterProvider

CACHE = "TimingExample"


class Way(NamedTuple):
    """One way of timing, and the direction that is timed by it here."""

    name: str
    source: str
    destination: str
    clock: str


OURS = Way("our events on a stream", "device", "host", "device_event")
THEIRS = Way("the engine's own events", "host", "device", "device_event")
REPORT = Way("a backend's report", "host", "disk", "engine_report")
WALL = Way("the wall clock", "disk", "host", "wall_clock")
WAYS = (OURS, THEIRS, REPORT, WALL)


def run(device: ways.Device, store: Store, copies: int, provider: MeterProvider) -> dict[Way, float]:
    """Makes so many copies in each way.

    Args:
        device: Where the copies of the first two are made.
        store: Where those of the others are.
        copies: How many of each.
        provider: Where the metrics go.

    Returns:
        For each way, how many seconds the calls took.
    """
    told = {
        way: kv.transfers(
            way.source,
            way.destination,
            cache=CACHE,
            timing=way.clock,
            make_event=device.make_event,
            meter_provider=provider,
        )
        for way in WAYS
    }
    calls = dict.fromkeys(WAYS, 0.0)

    def call(way: Way, copy: Callable[..., Any], *arguments: object) -> Any:
        began = time.perf_counter()
        result = copy(told[way], *arguments)
        calls[way] += time.perf_counter() - began
        return result

    for number in range(copies):
        call(OURS, ways.by_events_of_ours, device)
        call(THEIRS, ways.by_their_events, device, device.event(), device.event())
        call(REPORT, ways.by_report, store, str(number)).result()
        call(WALL, ways.by_wall_clock, store, str(number))
    return calls


def table(reading: Reading, calls: dict[Way, float]) -> str:
    """Returns what the metrics say of each way, and what the host's clock said around the calls."""
    times = reading.times("kvcache.transfer.duration")
    lines = [f"{'timed by':<23} {'route':<14} {'timing.source':<13} {'copies':>6} {'each takes':>10} {'the call':>8}"]
    for way, seconds in calls.items():
        count, total = times[f"{way.source} {way.destination} {way.clock}"]
        route = f"{way.source} -> {way.destination}"
        each, call = (f"{1000 * taken / count:,.2f} ms" for taken in (total, seconds))
        lines.append(f"{way.name:<23} {route:<14} {way.clock:<13} {count:>6} {each:>10} {call:>8}")
    return "\n".join(lines)


def find_device(*, fake: bool) -> ways.Device:
    """Returns the machine's device, or the fake one where there is none."""
    if not fake:
        try:
            return CudaDevice(ways.BYTES)
        except RuntimeError as error:
            print(f"No device here: {error}. A fake one takes its place.")
    return FakeDevice(ways.BYTES)


def _number(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 0 < int(text) <= 10_000:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 to 10000")
    return int(text)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description="The ways of timing a copy.")
    parser.add_argument("--copies", type=_number, default=10, help="copies in each way (default: %(default)s)")
    parser.add_argument("--fake", action="store_true", help="use the fake device, even where there is a real one")
    arguments = parser.parse_args()
    reading = Reading()
    with tempfile.TemporaryDirectory(prefix="kvcache-otel-timing-") as folder:
        device, store = find_device(fake=arguments.fake), Store(Path(folder))
        print(f"Device: {device.name}; each copy has {ways.BYTES / 2**20:g} MiB\n")
        calls = run(device, store, arguments.copies, reading.provider)
        device.close()
        store.close()
    reading.settle()
    print(table(reading, calls))
    reading.close()


if __name__ == "__main__":
    main()
