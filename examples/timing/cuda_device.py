"""A real device: torch's CUDA (or ROCm, which has the same name in torch)."""

from __future__ import annotations

from typing import Any


class CudaDevice:
    """The first GPU, with a stream of its own.

    Attributes:
        name: What it is.
        stream: The stream that copies are put on.
        make_event: None: torch makes the events.
    """

    make_event = None

    def __init__(self, size: int) -> None:
        """Args:
        size: Bytes of each copy.

        Raises:
            RuntimeError: There is none.
        """
        self._torch = _torch()
        self.name: str = self._torch.cuda.get_device_name(0)
        self.stream: Any = self._torch.cuda.Stream()
        self._device = self._torch.ones(size, dtype=self._torch.uint8, device="cuda")
        self._host = self._torch.zeros(size, dtype=self._torch.uint8, pin_memory=True)
        self._torch.cuda.synchronize()

    def to_host(self) -> None:
        """Puts a copy from the device to host memory on its stream."""
        with self._torch.cuda.stream(self.stream):
            self._host.copy_(self._device, non_blocking=True)

    def to_device(self) -> None:
        """Puts a copy from host memory to the device on its stream."""
        with self._torch.cuda.stream(self.stream):
            self._device.copy_(self._host, non_blocking=True)

    def event(self) -> Any:
        """Returns an event with timing."""
        return self._torch.cuda.Event(enable_timing=True)

    def close(self) -> None:
        """Waits for all that was put on it."""
        self.stream.synchronize()


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise RuntimeError(str(error)) from error
    if not torch.cuda.is_available():
        raise RuntimeError("torch finds no GPU")
    return torch
