"""Whether device time is right: real CUDA (or ROCm) events around copies of known size, on streams of their own.

    python -m benchmarks.gpu_timing [--mib N] [--rounds N]

Exit status 1 where a claim of `gpu_claims` does not hold; 0 where all do, and where there is no torch or no GPU.

Copies are told of as any engine does it, by `Transfers`, and read from its histogram. What that says is compared with
a clock around a copy that the host waits for, and with events of the benchmark's own around the same copy.
"""

from __future__ import annotations

import argparse
import math
import platform
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.gpu_claims import Alone, Busy, Figures, Together, claims, table
from benchmarks.gpu_device import TO_HOST, WAYS, Torch, find
from kvcache_otel import semconv
from kvcache_otel.identity import Identity
from kvcache_otel.record.probe import CacheProbe
from kvcache_otel.record.recorder import Recorder
from kvcache_otel.record.transfers import Transfers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.gpu_device import Device
    from kvcache_otel.record.transfer import Transfer

ENOUGH_S = 10.0
"""How long a round of the harvester may take."""

AHEAD, EARLY_ROUNDS = 8, 3
"""Copies ahead of one that is looked at while the device is not done with it, and how often that is done."""

TOKENS = {"kv": 4096}

SMALLER = 4
"""How much smaller the copy is that must end first on the other of two streams."""


class Direction:
    """Transfers of one direction, and the samples that they have left in the histogram.

    Attributes:
        way: The direction.
        samples: How many samples have been taken.
        copies: How many transfers have begun.
    """

    def __init__(self, recorder: Recorder, device: Device, way: str) -> None:
        source, _, destination = way.split()
        probe = CacheProbe(recorder, Identity("custom", "Benchmark"))
        timing = semconv.TimingSource.DEVICE_EVENT
        self.way = way
        self._transfers = Transfers(probe, source, destination, timing=timing, make_event=device.make_event)
        self.samples = self.copies = 0
        (self._cell,) = (
            row.cell
            for row in recorder.histograms(semconv.TRANSFER_DURATION)
            if row.attributes[semconv.KVCACHE_SOURCE_TIER] == source
        )
        self._seconds = 0.0

    def begin(self, stream: Any, size: int) -> Transfer:
        """Begins a transfer."""
        self.copies += 1
        return self._transfers.begin(bytes=size, tokens=TOKENS, stream=stream)

    @property
    def waiting(self) -> int:
        """How many samples there are that were not taken."""
        return sum(self._cell.read()[0]) - self.samples

    def take(self) -> float:
        """Takes the new samples; returns the seconds of the only one, NaN where it is not the only one."""
        buckets, seconds = self._cell.read()
        count, before = sum(buckets) - self.samples, self._seconds
        self.samples, self._seconds = self.samples + count, seconds
        return seconds - before if count == 1 else math.nan


class Launched(NamedTuple):
    """What putting one transfer on its stream took, by the host's clock.

    Attributes:
        began: When the copy was about to be launched.
        launch: Seconds that the launch of the copy took.
        blocked: Seconds that telling of it took: the beginning and the end together.
    """

    began: float
    launch: float
    blocked: float


class Begun(NamedTuple):
    """A transfer that has begun, with events of the benchmark's own inside of its own two.

    Attributes:
        direction: Its direction.
        stream: Its stream.
        size: Its bytes.
        transfer: The transfer.
        start: The event before the copy, recorded already.
        end: The event after it.
    """

    direction: Direction
    stream: Any
    size: int
    transfer: Transfer
    start: Any
    end: Any

    def finish(self) -> None:
        """Ends it, when its copy is on the stream."""
        self.end.record(self.stream)
        self.transfer.end()


class Benchmark:
    """All measurements on one device."""

    def __init__(self, device: Device, size: int, rounds: int) -> None:
        """Args:
        device: The device.
        size: Bytes of a copy.
        rounds: How many copies are measured of each kind.
        """
        self._device, self._size, self._rounds = device, size, rounds
        self._recorder = Recorder(Identity("custom", "Benchmark"))
        self._ways = {way: Direction(self._recorder, device, way) for way in WAYS}

    def run(self) -> Figures:
        """Measures everything."""
        directions = self._ways.values()
        try:
            arrived = [way for way in WAYS if self._device.arrives(way)]
            alone = [self._alone(direction) for direction in directions]
            busy = [self._busy(direction) for direction in directions]
            looks, early = self._early(self._ways[TO_HOST])
            together, overlapped = self._together()
        finally:
            self._recorder.harvester.stop(ENOUGH_S)
        return Figures(
            device=f"{self._device.name}, Python {platform.python_version()}",
            bytes=self._size,
            arrived=arrived,
            alone=alone,
            busy=busy,
            looks=looks,
            early=early,
            together=together,
            rounds=self._rounds,
            overlapped=overlapped,
            copies=sum(direction.copies for direction in directions),
            samples=sum(direction.samples for direction in directions),
        )

    def _alone(self, direction: Direction) -> Alone:
        device, synchronised, launch = list[float](), list[float](), list[float]()
        stream = self._device.stream()
        for number in range(self._rounds + 1):
            launched = self._launch(direction, stream)
            stream.synchronize()
            waited = self._device.clock() - launched.began
            self._harvest()
            sample = direction.take()
            if number:  # The first makes the events, starts the harvester's thread, and wakes the device.
                device.append(sample)
                synchronised.append(waited)
                launch.append(launched.launch)
        return Alone(direction.way, device, synchronised, launch)

    def _busy(self, direction: Direction) -> Busy:
        stream = self._device.stream()
        self._device.copy(direction.way, stream, self._size)  # So that the device is at work from the first on.
        blocked = [self._launch(direction, stream).blocked for _ in range(self._rounds)]
        stream.synchronize()
        self._harvest()
        direction.take()
        return Busy(direction.way, blocked)

    def _early(self, direction: Direction) -> tuple[int, int]:
        """Returns how often it was looked for a sample of a copy that the device was at, and how often there was one.

        On the stream the benchmark's own event is before the transfer's last. Where there is a sample, and that event
        is not done when it is asked after that, then the transfer's was not done either when it was read.
        """
        looks = early = 0
        for _ in range(EARLY_ROUNDS):
            stream = self._device.stream()
            for _ in range(AHEAD):
                self._device.copy(direction.way, stream, self._size)
            begun = self._begin(direction, stream, self._size)
            self._device.copy(direction.way, stream, self._size)
            begun.finish()
            done = False
            while not done:
                self._harvest()
                there = direction.waiting
                done = bool(begun.end.query())
                looks += not done
                early += there > 0 and not done
            stream.synchronize()
            self._harvest()
            direction.take()
        return looks, early

    def _together(self) -> tuple[list[Together], int]:
        """Returns the copies of two streams that copy at the same time, and how often they were seen to do so.

        Both streams have a copy ahead, so that all of a round is on them before the device comes to it. One copy is
        smaller and ends first, so that a pair with an event of the other stream tells a time that is far off.
        """
        streams = [self._device.stream() for _ in WAYS]
        device: dict[str, list[float]] = {way: [] for way in WAYS}
        own: dict[str, list[float]] = {way: [] for way in WAYS}
        overlapped = 0
        for _ in range(self._rounds):
            for way, stream in zip(WAYS, streams, strict=True):
                self._device.copy(way, stream, self._size)
            larger, smaller = (
                self._begin(self._ways[way], stream, size)
                for way, stream, size in zip(WAYS, streams, (self._size, self._size // SMALLER), strict=True)
            )
            for begun in (larger, smaller):
                self._device.copy(begun.direction.way, begun.stream, begun.size)
            for begun in (smaller, larger):
                begun.finish()
            for stream in streams:
                stream.synchronize()
            self._harvest()
            for begun in (larger, smaller):
                device[begun.direction.way].append(begun.direction.take())
                own[begun.direction.way].append(begun.start.elapsed_time(begun.end) / 1000)
            overlapped += larger.start.elapsed_time(smaller.end) > 0 and smaller.end.elapsed_time(larger.end) > 0
        return [Together(way, device[way], own[way]) for way in WAYS], overlapped

    def _launch(self, direction: Direction, stream: Any) -> Launched:
        """Puts a transfer on a stream as an engine does, and takes the time of that."""
        clock = self._device.clock
        called = clock()
        transfer = direction.begin(stream, self._size)
        began = clock()
        self._device.copy(direction.way, stream, self._size)
        launched = clock()
        transfer.end()
        return Launched(began, launched - began, (began - called) + (clock() - launched))

    def _begin(self, direction: Direction, stream: Any, size: int) -> Begun:
        transfer = direction.begin(stream, size)
        begun = Begun(direction, stream, size, transfer, self._device.event(), self._device.event())
        begun.start.record(stream)
        return begun

    def _harvest(self) -> None:
        self._recorder.harvester.flush(ENOUGH_S)


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise ValueError(text)
    return number


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the figures; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mib", type=_positive, default=256, help="size of a copy in MiB (256)")
    parser.add_argument("--rounds", type=_positive, default=50, help="copies of each kind (50)")
    options = parser.parse_args(arguments)
    torch = find()
    if isinstance(torch, str):
        print(f"no GPU: {torch}")
        return 0
    size = options.mib * 2**20
    figures = Benchmark(Torch(torch, size), size, options.rounds).run()
    judged = list(claims(figures))
    print("\n".join(table(figures, judged)))
    return int(not all(claim.held for claim in judged))


if __name__ == "__main__":
    sys.exit(main())
