"""Where pages are: tensors, arrays, plain bytes or a file; and pools, that know which of them are free."""

from __future__ import annotations

import os
import tempfile
import weakref
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class Memory:
    """Pages of bytes, by their number. This one has them in a bytearray, and is all that it takes."""

    kind = "plain"

    def __init__(self, pages: int, page_bytes: int) -> None:
        """Args:
        pages: How many there are.
        page_bytes: Bytes of each.
        """
        self.page_bytes = page_bytes
        self.make(pages)

    def make(self, pages: int) -> None:
        """Takes the memory."""
        self._bytes = bytearray(pages * self.page_bytes)

    def read(self, page: int) -> bytes:
        """Returns the bytes of a page."""
        return bytes(self._bytes[page * self.page_bytes : (page + 1) * self.page_bytes])

    def write(self, page: int, data: bytes) -> None:
        """Sets the bytes of a page."""
        self._bytes[page * self.page_bytes : (page + 1) * self.page_bytes] = data

    def copy(self, pages: Sequence[int], source: Memory, sources: Sequence[int]) -> None:
        """Copies pages of another memory into pages of this one."""
        for page, of in zip(pages, sources, strict=True):
            self.write(page, source.read(of))


class FileMemory(Memory):
    """Pages in a file that has no name, and so goes with the process at the latest."""

    kind = "file"

    def __init__(self, pages: int, page_bytes: int, directory: str | Path | None) -> None:
        """Args:
        pages: As in `Memory`.
        page_bytes: As in `Memory`.
        directory: Where the file is; None for the system's place.
        """
        self._directory = directory
        super().__init__(pages, page_bytes)

    def make(self, pages: int) -> None:
        self._file, path = tempfile.mkstemp(prefix="kvcache-demo-", dir=self._directory)
        os.unlink(path)
        self.close = weakref.finalize(self, os.close, self._file)

    def read(self, page: int) -> bytes:
        return os.pread(self._file, self.page_bytes, page * self.page_bytes)

    def write(self, page: int, data: bytes) -> None:
        os.pwrite(self._file, data, page * self.page_bytes)


class NumpyMemory(Memory):
    """Pages in the rows of an array."""

    kind = "numpy"

    def make(self, pages: int) -> None:
        self._numpy: Any = import_module("numpy")
        self.rows: Any = self._numpy.zeros((pages, self.page_bytes), dtype=self._numpy.uint8)

    def read(self, page: int) -> bytes:
        return self.rows[page].tobytes()

    def write(self, page: int, data: bytes) -> None:
        self.rows[page] = self._numpy.frombuffer(data, dtype=self._numpy.uint8)

    def copy(self, pages: Sequence[int], source: Memory, sources: Sequence[int]) -> None:
        if isinstance(source, NumpyMemory):
            self.rows[list(pages)] = source.rows[list(sources)]
        else:
            super().copy(pages, source, sources)


class TorchMemory(Memory):
    """Pages in the rows of a tensor, on the device or in host memory. Without a device both are host memory."""

    kind = "torch"

    _torch: Any
    rows: Any

    def __init__(self, pages: int, page_bytes: int, *, on_device: bool) -> None:
        """Args:
        pages: As in `Memory`.
        page_bytes: As in `Memory`.
        on_device: Whether they are on the device.
        """
        self._on_device = on_device
        super().__init__(pages, page_bytes)

    def make(self, pages: int) -> None:
        self._torch = torch = import_module("torch")
        cuda = bool(torch.cuda.is_available())
        self.rows = torch.zeros(
            (pages, self.page_bytes),
            dtype=torch.uint8,
            device="cuda" if cuda and self._on_device else "cpu",
            pin_memory=cuda and not self._on_device,  # Or a copy could not go on beside the engine.
        )

    def read(self, page: int) -> bytes:
        return bytes(self.rows[page].tolist())

    def write(self, page: int, data: bytes) -> None:
        self.rows[page].copy_(self._torch.frombuffer(bytearray(data), dtype=self._torch.uint8))

    def copy(self, pages: Sequence[int], source: Memory, sources: Sequence[int]) -> None:
        if not isinstance(source, TorchMemory):
            super().copy(pages, source, sources)
            return
        for page, of in zip(pages, sources, strict=True):  # Of all at once a CPU would make work for many threads.
            self.rows[page].copy_(source.rows[of], non_blocking=True)


class Lane:
    """What copies between device and host run on: a stream of the device, where there is one, beside the engine's own.

    Attributes:
        stream: The stream; None where copies have ended when they return.
    """

    def __init__(self, memory: Memory) -> None:
        """Args:
        memory: The device's.
        """
        self.stream: Any = None
        if isinstance(memory, TorchMemory) and memory.rows.is_cuda:
            self._cuda: Any = import_module("torch").cuda
            self.stream = self._cuda.Stream()

    def copy(self, destination: Pool, pages: Sequence[int], source: Pool, sources: Sequence[int]) -> None:
        """Copies pages from one pool to another, or puts that on the stream."""
        if self.stream is None:
            destination.memory.copy(pages, source.memory, sources)
            return
        computing = self._cuda.current_stream()
        self.stream.wait_stream(computing)  # Until what is copied has been computed.
        with self._cuda.stream(self.stream):
            destination.memory.copy(pages, source.memory, sources)
        computing.wait_stream(self.stream)  # Until it is copied, before its pages are written anew.

    def wait(self) -> None:
        """Waits until all that was copied is where it belongs: only who looks at bytes in host memory has to."""
        if self.stream is not None:
            self.stream.synchronize()


class Pool:
    """The pages of one tier.

    Attributes:
        limit: How many there are.
        memory: Where they are.
    """

    def __init__(self, limit: int, memory: Memory) -> None:
        """Args:
        limit: As the attribute.
        memory: As the attribute.
        """
        self.limit = limit
        self.memory = memory
        self._free = list(range(limit))

    @property
    def free(self) -> int:
        """How many are free."""
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """Returns so many free pages, which are free no longer; None where there are fewer."""
        if count > len(self._free):
            return None
        at = len(self._free) - count
        taken = self._free[at:]
        del self._free[at:]
        return taken

    def give(self, pages: Sequence[int]) -> None:
        """Takes pages back."""
        self._free.extend(pages)


def make_memory(kind: str, pages: int, page_bytes: int, *, on_device: bool) -> Memory:
    """Returns memory for the pages of device or host.

    Args:
        kind: As `config.Config.memory`.
        pages: How many.
        page_bytes: Bytes of each.
        on_device: Whether it is the device's.
    """
    if kind == "auto":
        kind = next((name for name in ("torch", "numpy") if find_spec(name) is not None), "plain")
    if kind == "torch":
        return TorchMemory(pages, page_bytes, on_device=on_device)
    return (NumpyMemory if kind == "numpy" else Memory)(pages, page_bytes)
