"""A device that copies, as `gpu_timing` wants it: torch's."""

from __future__ import annotations

import importlib
import time
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

TO_HOST, TO_DEVICE = "device to host", "host to device"
WAYS = (TO_HOST, TO_DEVICE)


class Device(Protocol):
    """A device that copies, and a clock of the host beside it.

    Attributes:
        name: What it is.
        make_event: What `Transfers` makes its events with; None for what it takes by itself.
    """

    name: str
    make_event: Callable[[], Any] | None

    def clock(self) -> float:
        """Returns the host's time in seconds."""
        ...

    def stream(self) -> Any:
        """Returns a new stream."""
        ...

    def event(self) -> Any:
        """Returns a new event that can be timed."""
        ...

    def copy(self, way: str, stream: Any, size: int) -> None:
        """Puts a copy on a stream, and returns as soon as it is there."""
        ...

    def arrives(self, way: str) -> bool:
        """Returns whether the bytes of a whole copy are where they should be after it."""
        ...


class Torch:
    """The device that is torch's current one."""

    make_event = None
    clock = staticmethod(time.perf_counter)

    def __init__(self, torch: Any, size: int) -> None:
        """Args:
        torch: The module.
        size: Bytes of the largest copy.
        """
        self._torch = torch
        runtime = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
        self.name = f"{torch.cuda.get_device_name()}, {runtime}, torch {torch.__version__}"
        # Each direction has its own, so that neither waits for the other.
        self._from: dict[str, Any] = {}
        self._to: dict[str, Any] = {}
        for way in WAYS:
            on_device = torch.empty(size, dtype=torch.uint8, device="cuda")
            on_host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            self._from[way], self._to[way] = (on_device, on_host) if way == TO_HOST else (on_host, on_device)

    def stream(self) -> Any:
        """Returns a new stream."""
        return self._torch.cuda.Stream()

    def event(self) -> Any:
        """Returns a new event that can be timed."""
        return self._torch.cuda.Event(enable_timing=True)

    def copy(self, way: str, stream: Any, size: int) -> None:
        """Puts a copy on a stream, and returns as soon as it is there."""
        with self._torch.cuda.stream(stream):
            self._to[way][:size].copy_(self._from[way][:size], non_blocking=True)

    def arrives(self, way: str) -> bool:
        """Returns whether the bytes of a whole copy are where they should be after it."""
        source, destination, stream = self._from[way], self._to[way], self.stream()
        source.random_()
        destination.zero_()
        self._torch.cuda.synchronize()  # These were put on the usual stream.
        self.copy(way, stream, source.numel())
        stream.synchronize()
        return bool(self._torch.equal(source.cpu(), destination.cpu()))


def find() -> Any:
    """Returns torch where it has a GPU; else why not, in words."""
    try:
        torch: Any = importlib.import_module("torch")
    except Exception as error:  # It may be there, and what it needs may not.
        return f"torch cannot be imported ({type(error).__name__}: {error})"
    return torch if torch.cuda.is_available() else f"torch {torch.__version__} sees none"
