"""The ways of timing a copy, one function for each. Every one makes one copy and tells of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future
    from typing import Any

    from examples.timing.store import Store
    from kvcache_otel.record.transfers import Transfers

TOKENS = 64
"""Of one copy."""

BYTES = 8 * 2**20
"""Of one copy."""


class Device(Protocol):
    """What both devices are."""

    name: str
    stream: Any
    make_event: Callable[[], Any] | None

    def to_host(self) -> None:
        """Puts a copy to host memory on the stream."""

    def to_device(self) -> None:
        """Puts a copy from host memory on the stream."""

    def event(self) -> Any:
        """Returns an event with timing."""

    def close(self) -> None:
        """Waits for all that was put on the stream."""


def by_events_of_ours(copies: Transfers, device: Device) -> None:
    """Names the stream: events are recorded there where the block begins and ends, and are read when they are done."""
    with copies.begin(bytes=BYTES, tokens=TOKENS, stream=device.stream):
        device.to_host()


def by_their_events(copies: Transfers, device: Device, before: Any, after: Any) -> None:
    """Hands over the pair that the engine records anyhow; it must not record it again before it is done."""
    copy = copies.begin(bytes=BYTES, tokens=TOKENS)
    before.record(device.stream)
    device.to_device()
    after.record(device.stream)
    copy.end(events=(before, after))


def by_report(copies: Transfers, store: Store, name: str) -> Future[float]:
    """Takes the backend's own word, when it has one."""
    copy = copies.begin(bytes=BYTES, tokens=TOKENS)

    def ended(done: Future[float]) -> None:
        if (error := done.exception()) is not None:
            copy.end(error=error)
        else:
            copy.end(seconds=done.result())

    written = store.write(name, bytes(BYTES))
    written.add_done_callback(ended)
    return written


def by_wall_clock(copies: Transfers, store: Store, name: str) -> None:
    """Times the block, which is right for what does not return before it is done."""
    with copies.begin(bytes=BYTES, tokens=TOKENS):
        store.read(name)
