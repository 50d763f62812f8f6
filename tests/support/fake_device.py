"""A device that is made up: streams whose work ends when the test says so, and events that know when."""

from __future__ import annotations

import threading
from typing import Any

import pytest


class FakeStream:
    """Stands in for a stream of a device. What is put on it is done in order, as far as the test lets it.

    Attributes:
        put_ms: When what was put on it last will be done, by the device's clock.
        done_ms: How far the device has come.
    """

    def __init__(self) -> None:
        self.put_ms = 0.0
        self.done_ms = -1.0

    def copy(self, milliseconds: float) -> None:
        """Puts a copy on it that takes so long."""
        self.put_ms += milliseconds

    def run(self) -> None:
        """Has the device do all that was put on it."""
        self.done_ms = self.put_ms


class FakeEvent:
    """Stands in for `torch.cuda.Event(enable_timing=True)`.

    Attributes:
        at_ms: When the device passes it; None before it is recorded.
        stream: The stream that it was recorded on last.
        recorded: How often it was.
        read: How often a time was read from or to it.
        queries: How often it was asked.
        askers: The names of the threads that asked it.
    """

    def __init__(self) -> None:
        self.at_ms: float | None = None
        self.stream: FakeStream | None = None
        self.recorded = self.read = self.queries = 0
        self.askers: set[str] = set()

    def record(self, stream: FakeStream) -> None:
        self.stream, self.at_ms = stream, stream.put_ms
        self.recorded += 1

    def query(self) -> bool:
        self.queries += 1
        self.askers.add(threading.current_thread().name)
        return self.passed

    @property
    def passed(self) -> bool:
        return self.stream is not None and self.at_ms is not None and self.at_ms <= self.stream.done_ms

    def elapsed_time(self, end: Any) -> float:
        if not self.passed or not end.passed:
            raise RuntimeError("device not ready")
        assert self.stream is end.stream, "the events of two streams are mixed up"
        self.read += 1
        end.read += 1
        return end.at_ms - self.at_ms

    def synchronize(self) -> None:
        pytest.fail("somebody waits for the device")


class FakeDevice:
    """Makes events, and remembers them.

    Attributes:
        made: Every event that was made.
    """

    def __init__(self) -> None:
        self.made: list[FakeEvent] = []

    def event(self) -> FakeEvent:
        """Makes an event."""
        self.made.append(FakeEvent())
        return self.made[-1]
