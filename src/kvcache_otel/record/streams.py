"""Timed events of ours on a device's streams: made when they are first wanted, used again after they were read."""

from __future__ import annotations

import importlib
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from kvcache_otel.record.labels import printable
from kvcache_otel.record.outside import let_through
from kvcache_otel.record.pair import Pair

if TYPE_CHECKING:
    from collections.abc import Callable

# The pairs of one stream, in the order in which the device comes to them.
Lane = deque[Pair]

CURRENT: Final = "current"
"""In place of a stream: whichever is current where the event is recorded."""

# Streams that are remembered. An engine has a handful; one that makes a new one for every copy finds none remembered.
REMEMBERED = 256

# Events of one device that wait to be used again; the others are left to Python.
SPARE = 8192


class Spares:
    """The events of one device that nobody waits for any more.

    Attributes:
        free: The events.
        make: Makes an event with timing.
    """

    __slots__ = ("free", "make")

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make
        self.free: deque[Any] = deque(maxlen=SPARE)


class Stream:
    """One stream of a device, as far as it is ours.

    Attributes:
        lane: The pairs on it, in their order; None where it is not always the same stream.
    """

    __slots__ = ("_free", "_make", "_record_on", "lane")

    def __init__(self, stream: Any, spares: Spares) -> None:
        """Args:
        stream: The stream, or `CURRENT`.
        spares: The events of its device.
        """
        self._record_on: tuple[Any, ...] = () if stream is CURRENT else (stream,)
        self._free, self._make = spares.free, spares.make
        self.lane: Lane | None = None if stream is CURRENT else deque()

    def mark(self) -> Any:
        """Returns an event that was recorded on it; raises whatever the device does."""
        try:
            event = self._free.pop() if self._free else self._make()
        except IndexError:  # Another thread took the last one.
            event = self._make()
        event.record(*self._record_on)
        return event

    def give_back(self, before: Any, after: Any) -> None:
        """Takes two events back that have been read, or that nobody will read."""
        self._free.append(before)
        self._free.append(after)

    def give_back_one(self, event: Any) -> None:
        """Takes an event back that nobody will read."""
        self._free.append(event)


def _refusing(why: str) -> Callable[[], Any]:
    def refuse() -> Any:
        raise RuntimeError(why)

    return refuse


NO_STREAM: Final = Stream(CURRENT, Spares(_refusing("no stream of a device")))
"""In place of a stream that is none: what is put on it is never timed."""


class Streams:
    """The streams that copies were timed on in one process, or by whoever makes the events themselves."""

    def __init__(self, make: Callable[[], Any] | None = None) -> None:
        """Args:
        make: Makes an event with timing; None for torch's. Who makes them lives as long as this.
        """
        self._make = make
        # By id, which is cheaper than to ask a stream for its hash; who is in here keeps its id.
        self._streams: dict[int, tuple[Any, Stream]] = {}
        self._named: dict[tuple[int, int, int], Stream] = {}
        self._spares: dict[object, Spares] = {}

    def stream(self, stream: Any) -> Stream:
        """Returns what is ours of a stream.

        Args:
            stream: The stream, or `CURRENT`. Torch is imported now, where it makes the events. Where there is no torch,
                or it does not know the stream's device, every event raises that.
        """
        known = self._streams.get(id(stream))
        if known is not None:
            return known[1]
        name = _name(stream)
        if name is not None and (ours := self._named.get(name)) is not None:
            return ours
        try:
            spares = self._spares_of(stream)
        except Exception as error:  # Remembered: to look for a module that is not there takes long.
            let_through(error)
            spares = Spares(_refusing(f"{type(error).__name__}: {printable(error)}"))
        if len(self._streams) >= REMEMBERED:
            self._streams, self._named = {}, {}
        ours = Stream(stream, spares)
        self._streams[id(stream)] = stream, ours
        if name is not None:
            self._named[name] = ours
        return ours

    def part(self) -> list[object]:
        """Parts with all that it remembers, in a forked child, where a copy that began before may yet end.

        Returns:
            What it remembered, for somebody to keep: to destroy an event would ask a driver that is not there.
        """
        left: list[object] = [self._streams, self._spares]
        for _, ours in self._streams.values():
            if ours.lane is not None:
                left.append(ours.lane)
                ours.lane = deque()
        self._streams, self._named, self._spares = {}, {}, {}
        return left

    def _spares_of(self, stream: Any) -> Spares:
        key = None if self._make is not None else _device(stream)
        spares = self._spares.get(key)
        if spares is None:
            spares = self._spares[key] = Spares(self._make or _maker(key))
        return spares


def _name(stream: Any) -> tuple[int, int, int] | None:
    """Returns which of torch's streams it is: `torch.cuda.current_stream()` makes another object of it each time."""
    try:
        number = getattr(stream, "stream_id", None)
        return (number, int(stream.device_index), int(stream.device_type)) if type(number) is int else None
    except Exception as error:  # Somebody's own.
        let_through(error)
        return None


def _device(stream: Any) -> tuple[str, int | None]:
    """Returns the kind of a stream's device and its number, None for whichever is current."""
    if stream is not CURRENT:
        return stream.device.type, stream.device.index
    torch: Any = importlib.import_module("torch")
    accelerator: Any = getattr(torch, "accelerator", None)
    if accelerator is not None and (device := accelerator.current_accelerator()) is not None:
        return device.type, None
    return ("xpu", None) if hasattr(torch, "xpu") and torch.xpu.is_available() else ("cuda", None)


def _maker(device: Any) -> Callable[[], Any]:
    """Returns what makes events with timing: a device's module (`torch.cuda` for CUDA and ROCm), or torch."""
    kind, index = device
    torch: Any = importlib.import_module("torch")
    event: Any = getattr(getattr(torch, kind, None), "Event", None)
    if event is not None:
        return lambda: event(enable_timing=True)
    name = kind if index is None else f"{kind}:{index}"
    return lambda: torch.Event(name, enable_timing=True)
