"""The ways of timing: each has the label that it is said to have, and the time that whoever made the copy knows."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from examples.reading import Reading
from examples.timing import fake_device
from examples.timing.__main__ import OURS, REPORT, THEIRS, WALL, WAYS, run
from examples.timing.fake_device import FakeDevice, FakeEvent
from examples.timing.store import Store
from examples.timing.ways import BYTES, TOKENS

from kvcache_otel.instrumentation import instrumentation

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
COPIES = 7


class ListedDevice(FakeDevice):
    """The fake device, which remembers the events that it gave to the engine."""

    def __init__(self) -> None:
        super().__init__(BYTES)
        self.events: list[FakeEvent] = []

    def event(self) -> Any:
        self.events.append(super().event())
        return self.events[-1]


class ListedStore(Store):
    """The store, which remembers what it reported, and how long it read."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.reported: list[float] = []
        self.reading = 0.0

    def read(self, name: str) -> bytes:
        began = time.monotonic()
        data = super().read(name)
        self.reading += time.monotonic() - began
        return data

    def _write(self, name: str, data: bytes) -> float:
        self.reported.append(super()._write(name, data))
        return self.reported[-1]


@pytest.fixture
def reading() -> Iterator[Reading]:
    made = Reading()
    yield made
    instrumentation.detach()
    made.close()


def test_each_way_has_its_clock_and_the_time_that_was_taken(
    reading: Reading, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_device, "BYTES_PER_SECOND", BYTES / 0.02)
    device, store = ListedDevice(), ListedStore(tmp_path)
    calls = run(device, store, COPIES, reading.provider)
    device.close()
    store.close()
    reading.settle()
    times = reading.times("kvcache.transfer.duration")
    sums = {way: times[f"{way.source} {way.destination} {way.clock}"] for way in WAYS}
    assert {count for count, _ in sums.values()} == {COPIES}
    assert sum(count for count, _ in times.values()) == COPIES * len(WAYS)
    # What the engine's own pairs say, to the last digit, and what the store reported.
    theirs = [before.elapsed_time(after) / 1000 for before, after in zip(*[iter(device.events)] * 2, strict=True)]
    assert sums[THEIRS][1] == pytest.approx(sum(theirs), rel=1e-9)
    assert sums[REPORT][1] == pytest.approx(sum(store.reported), rel=1e-9)
    # Events of ours are around the copy and nothing else: the device's clock has the copy alone.
    assert len(device.took) == 2 * COPIES
    ours = sum(device.took[::2])
    assert ours <= sums[OURS][1] < ours + 0.5
    # The wall clock is right where the call blocks; elsewhere it has the launch.
    assert 0 < store.reading <= sums[WALL][1] <= calls[WALL]
    assert calls[OURS] < sums[OURS][1] / 2
    assert calls[THEIRS] < sums[THEIRS][1] / 2
    assert set(reading.values("kvcache.transfer.operations").values()) == {COPIES}
    assert set(reading.values("kvcache.transfer.tokens").values()) == {COPIES * TOKENS}
    moved = {way: reading.values("kvcache.transfer.io")[f"{way.source} {way.destination} {way.clock}"] for way in WAYS}
    assert set(moved.values()) == {COPIES * BYTES}
    assert reading.values("kvcache.transfer.active") == {}  # Whoever told of them is gone.
    for metric in ("kvcache.telemetry.dropped", "kvcache.telemetry.errors", "kvcache.accounting.errors"):
        assert not any(reading.values(metric).values())


def test_it_runs_and_says_that_the_device_is_a_fake() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "examples.timing", "--copies", "3", "--fake"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Device: a fake device")
    assert max(map(len, done.stdout.splitlines())) <= 80
    for way in WAYS:
        assert re.search(
            rf"^{way.name} +{way.source} -> {way.destination} +{way.clock} +3 +[\d.]+ ms +[\d.]+ ms$",
            done.stdout,
            re.MULTILINE,
        )


@pytest.mark.parametrize("copies", ["0", "-1", "x", "99999999"])
def test_a_number_of_copies_that_is_none(copies: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "examples.timing", f"--copies={copies}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith(f"{copies!r} is no number from 1 to 10000")
