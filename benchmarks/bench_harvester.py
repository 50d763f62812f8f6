"""What the thread that reads device events costs where copies come one by one: its processor time, and its looks.

    python -m benchmarks.bench_harvester [--quick]

Exit status 1 where it wakes up more often than `AT_MOST_LOOKS` says.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from typing import TYPE_CHECKING, NamedTuple

from kvcache_otel.identity import Identity
from kvcache_otel.record.probe import CacheProbe
from kvcache_otel.record.recorder import Recorder
from kvcache_otel.record.transfers import Transfers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcache_otel.record.timing import Harvester

# Looks a second, however the copies come. Each costs some 50 to 200 us of a processor that was at something else.
AT_MOST_LOOKS = 30


class Device:
    """A stream whose copies take as long as they are said to, by the wall clock."""

    ends = 0.0


class Event:
    """An event of such a stream."""

    __slots__ = ("at",)

    def record(self, stream: Device) -> None:
        """Is passed when what is on the stream now is done."""
        self.at = max(stream.ends, time.monotonic())

    def query(self) -> bool:
        """Returns whether it is."""
        return time.monotonic() >= self.at

    def elapsed_time(self, end: Event) -> float:
        """Returns the milliseconds to a later one."""
        return (end.at - self.at) * 1000


class Cost:
    """What a harvester cost.

    Attributes:
        copies: Copies that were read.
        cpu_s: The processor time of its thread.
        looks: How often it woke up.
        wall_s: How long all that took.
    """

    def __init__(self, copies: int, cpu_s: float, looks: int, wall_s: float) -> None:
        self.copies, self.cpu_s, self.looks, self.wall_s = copies, cpu_s, looks, wall_s


class Traffic(NamedTuple):
    """Copies one by one.

    Attributes:
        apart_s: From the beginning of one to that of the next.
        takes_s: How long each takes.
    """

    apart_s: float
    takes_s: float


TRAFFIC = (
    Traffic(0.001, 0.0005),
    Traffic(0.010, 0.001),
    Traffic(0.010, 0.009),
    Traffic(0.100, 0.005),
    Traffic(0.100, 0.050),
    Traffic(1.0, 0.030),
)


def measure(traffic: Traffic, seconds: float) -> Cost:
    """Returns what the harvester costs while copies come.

    Args:
        traffic: How they come.
        seconds: For how long.
    """
    identity = Identity("custom", "Benchmark")
    recorder = Recorder(identity)
    harvester, device, looks = recorder.harvester, Device(), [0]
    ask = harvester._round

    def counted(*arguments: object, **named: object) -> object:
        looks[0] += 1
        return ask(*arguments, **named)  # type: ignore[arg-type]

    harvester._round = counted  # type: ignore[assignment,method-assign]
    copies = Transfers(CacheProbe(recorder, identity), "device", "host", timing="device_event", make_event=Event)
    began = time.monotonic()
    number = 0
    while (now := time.monotonic()) - began < seconds:
        with copies.transfer(bytes=1, stream=device):
            device.ends = max(device.ends, now) + traffic.takes_s
        number += 1
        time.sleep(max(0.0, began + number * traffic.apart_s - time.monotonic()))
    cpu, wall = _cpu_s(harvester), time.monotonic() - began
    harvester.stop(5)
    return Cost(number, cpu, looks[0], wall)


def _cpu_s(harvester: Harvester) -> float:
    reader = harvester._reader
    assert reader is not None
    ident = reader._thread.ident
    assert ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(ident))


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the figures; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two seconds for each row instead of ten")
    seconds = 2.0 if parser.parse_args(arguments).quick else 10.0
    print(f"Python {platform.python_version()}\n")
    print(f"{'copies apart':>12} {'each takes':>11} {'us a copy':>10} {'looks a second':>15} {'of a core':>10}")
    missed = 0
    for traffic in TRAFFIC:
        cost = measure(traffic, seconds)
        a_second = cost.looks / cost.wall_s
        verdict = "  missed" if a_second > AT_MOST_LOOKS else ""
        missed += bool(verdict)
        print(
            f"{traffic.apart_s * 1000:>9g} ms {traffic.takes_s * 1000:>8g} ms {cost.cpu_s / cost.copies * 1e6:>10.1f} "
            f"{a_second:>15.1f} {cost.cpu_s / cost.wall_s:>10.2%}{verdict}"
        )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
