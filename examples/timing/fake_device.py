"""A fake device, for machines without one: a thread does what is put on its stream, in order, after the call returned.

Its bytes are really copied, and its events tell when it came by. Only its speed is made up.
"""

from __future__ import annotations

import queue
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

BYTES_PER_SECOND = 2e9
"""How fast it says it copies: what the memory does not take of the time, it waits."""


class FakeStream:
    """Work for the device, done in order."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="fake-device", daemon=True)
        self._thread.start()

    def put(self, work: Callable[[], None]) -> None:
        """Puts work on it; returns at once."""
        self._work.put(work)

    def close(self) -> None:
        """Waits for what was put on it, and ends."""
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()


class FakeEvent:
    """An event with timing, as `torch.cuda.Event(enable_timing=True)` is one."""

    def __init__(self) -> None:
        self._passed: float | None = None

    def record(self, stream: FakeStream) -> None:
        """Has the device note when it has done all that is on the stream by now."""
        self._passed = None
        stream.put(self._pass)

    def query(self) -> bool:
        """Returns whether the device has come by."""
        return self._passed is not None

    def elapsed_time(self, end: FakeEvent) -> float:
        """Returns the milliseconds from this event to another."""
        if self._passed is None or end._passed is None:
            raise RuntimeError("the device is not ready")
        return (end._passed - self._passed) * 1000

    def _pass(self) -> None:
        self._passed = time.perf_counter()


class FakeDevice:
    """A device with one stream and memory of its own.

    Attributes:
        name: What it is.
        stream: Its stream.
        make_event: Makes an event with timing; torch knows none for it.
        took: The seconds of each copy that it has made, by its own clock.
    """

    name = "a fake device: a thread that copies"
    make_event = FakeEvent

    def __init__(self, size: int) -> None:
        """Args:
        size: Bytes of each copy.
        """
        self.stream: Any = FakeStream()
        self.took: list[float] = []
        self._device, self._host = bytearray(b"k" * size), bytearray(size)

    def to_host(self) -> None:
        """Puts a copy from the device to host memory on its stream."""
        self.stream.put(lambda: self._copy(self._device, self._host))

    def to_device(self) -> None:
        """Puts a copy from host memory to the device on its stream."""
        self.stream.put(lambda: self._copy(self._host, self._device))

    def event(self) -> Any:
        """Returns an event with timing."""
        return FakeEvent()

    def close(self) -> None:
        """Waits for all that was put on it, and ends."""
        self.stream.close()

    def _copy(self, source: bytearray, destination: bytearray) -> None:
        began = time.perf_counter()
        destination[:] = source
        time.sleep(max(len(source) / BYTES_PER_SECOND - (time.perf_counter() - began), 0))
        self.took.append(time.perf_counter() - began)
