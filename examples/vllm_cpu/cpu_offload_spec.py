"""What lets vLLM's own offloading worker run on a machine without a GPU: five fakes, and nothing else.

vLLM refuses to offload KV blocks on its CPU platform. The two classes at the end are out-of-tree offloading specs,
which it loads by module and class name. They leave its classes as they are, and replace only what these reach for:

    FakePlatformGate    ``get_worker`` refuses any platform but CUDA-alike and XPU: it does not here.
    FakeDeviceTensor    the worker asserts that KV tensors are on the device: these say so, and are in host memory.
    FakeEvent           ``torch.Event(enable_timing=True)`` does not exist on the CPU: a wall clock stands in.
    FakePlatform        nor do streams: `FakeStream` is a queue that knows until when it is busy.
    FakeOps             nor the copy kernel ``swap_blocks_batch``: it is a ``memmove`` per descriptor.

A copy is done at once, but its events say that it took `copy_seconds()`, so that transfers are under way for a while,
as with a DMA engine. How long a copy between device and host took is therefore made up. Everything that is counted
(blocks, bytes, hits, evictions, jobs, failures) is real, and so is every duration of the tiers behind the host.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.kv_offload.cpu import gpu_worker
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker


def copy_seconds() -> float:
    """How long a copy between device and host pretends to take: ``VLLM_CPU_FAKE_COPY_SECONDS``, default 0.002."""
    return float(os.environ.get("VLLM_CPU_FAKE_COPY_SECONDS", "0.002"))


class FakeDeviceTensor(torch.Tensor):
    """A tensor in host memory that claims to be on a CUDA device."""

    is_cuda = property(lambda _self: True)


class FakeStream:
    """A queue of work on a device, of which only the end is known."""

    def __init__(self) -> None:
        self.busy_until = 0.0

    def wait_stream(self, stream: FakeStream) -> None:
        self.busy_until = max(self.busy_until, stream.busy_until)

    def wait_event(self, event: FakeEvent) -> None:
        self.busy_until = max(self.busy_until, event.fires_at or 0.0)

    def synchronize(self) -> None:
        pass


class FakeEvent:
    """An event that fires once everything that was queued on its stream is done."""

    def __init__(self, *_arguments: Any, **_options: Any) -> None:
        self.fires_at: float | None = None

    def record(self, stream: FakeStream | None = None) -> None:
        self.fires_at = max(time.perf_counter(), (stream or _streams[-1]).busy_until)

    def query(self) -> bool:
        return self.fires_at is None or time.perf_counter() >= self.fires_at

    def synchronize(self) -> None:
        if self.fires_at is not None:
            time.sleep(max(0.0, self.fires_at - time.perf_counter()))

    def wait(self, stream: FakeStream | None = None) -> None:
        (stream or _streams[-1]).wait_event(self)

    def elapsed_time(self, end: FakeEvent) -> float:
        """Milliseconds, as ``torch.Event`` has it."""
        if self.fires_at is None or end.fires_at is None:
            raise RuntimeError("both events must be recorded before the time between them is asked for")
        return (end.fires_at - self.fires_at) * 1e3


_streams = [FakeStream()]
"""The streams that are current, innermost last."""


class _StandIn:
    """Passes everything on to the real thing, save for what a subclass defines."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class FakePlatform(_StandIn):
    """``vllm.platforms.current_platform``, with streams."""

    Stream = FakeStream

    @staticmethod
    def current_stream(*_arguments: Any) -> FakeStream:
        return _streams[-1]

    @staticmethod
    @contextlib.contextmanager
    def stream(stream: FakeStream) -> Iterator[None]:
        _streams.append(stream)
        try:
            yield
        finally:
            _streams.pop()


class FakeOps(_StandIn):
    """``vllm._custom_ops``, with the copy kernel."""

    @staticmethod
    def swap_blocks_batch(
        sources: torch.Tensor,
        destinations: torch.Tensor,
        sizes: torch.Tensor,
        **_options: Any,
    ) -> None:
        for source, destination, size in zip(sources.tolist(), destinations.tolist(), sizes.tolist(), strict=True):
            ctypes.memmove(destination, source, size)
        stream = _streams[-1]
        stream.busy_until = max(stream.busy_until, time.perf_counter()) + copy_seconds()


class _TorchWithEvents(_StandIn):
    """``torch``, with the event that is a wall clock."""

    Event = FakeEvent


def install() -> None:
    """Put the fakes into the one module that needs them. A second call does nothing."""
    if isinstance(gpu_worker.current_platform, FakePlatform):
        return
    gpu_worker.current_platform = FakePlatform(gpu_worker.current_platform)
    gpu_worker.ops = FakeOps(gpu_worker.ops)
    gpu_worker.torch = _TorchWithEvents(gpu_worker.torch)


class FakePlatformGate:
    """Makes the worker without asking which platform this is."""

    # Both are of the spec that this is mixed into.
    _worker: OffloadingWorker | None
    create_worker: Callable[[CanonicalKVCaches], OffloadingWorker]

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            install()
            for kv_cache in kv_caches.tensors:
                kv_cache.tensor = kv_cache.tensor.as_subclass(FakeDeviceTensor)
            self._worker = self.create_worker(kv_caches)
        return self._worker


class CpuTieringSpec(FakePlatformGate, TieringOffloadingSpec):
    """Device, host, and the tiers behind the host."""


class CpuOnlySpec(FakePlatformGate, CPUOffloadingSpec):
    """Device and host."""
