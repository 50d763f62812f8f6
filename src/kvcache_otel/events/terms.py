"""What a stream is given: whom it tells, where it counts, and how long it waits."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from kvcache_otel.record.cells import Counter


class Consumer(Protocol):
    """What a stream tells, in order. Nothing here may raise, nor call the stream."""

    def apply(self, payload: bytes, /) -> object:
        """Takes over the next batch."""

    def reset(self) -> object:
        """Forgets what the batches so far added up to: the publisher started again."""

    def forget(self) -> object:
        """Forgets it too, but the publisher did not start again: all of it will be told anew, with what came before."""

    def restore(self, payload: bytes, /) -> object:
        """Takes over a batch again that had been applied before it was forgotten."""

    def ask(self, start: int, /) -> object:
        """Sends `frames.request` on a new socket, whose answers then go to `Stream.answer`.

        New, because answers do not say which request they are for.
        """

    def hang_up(self) -> object:
        """Closes that socket: nothing more is wanted from it."""


class Counts(NamedTuple):
    """Where a stream counts.

    Attributes:
        lost: Batches that were skipped and not recovered.
        recovered: Batches that were missed and that replay brought.
        duplicate: Batches that had been here before, or came when they were given up.
        resets: Times that the numbers started again.
        frame_count: Messages with too many frames or too few.
        sequence_frame: Messages whose number could not be read, or meant nothing.
    """

    lost: Counter
    recovered: Counter
    duplicate: Counter
    resets: Counter
    frame_count: Counter
    sequence_frame: Counter


class Limits(NamedTuple):
    """How long a stream waits, and for how much.

    Attributes:
        window: Batches that wait until a number counts as missing.
        patience: Seconds that they wait.
        held: Batches that wait while a replay is asked for.
        held_bytes: Bytes of batches that wait, at any time.
        silence: Seconds for which a replay may bring nothing new.
        longest: Seconds that a replay may take in all, however often it is asked for the rest.
        deaf: Seconds for which a publisher that did not answer is not asked again, once it has not for long; at first
            it is two, and then twice as long each time.
        doubt: Seconds of silence after which suspicious batches below next are a reset.
        idle: Seconds after the last batch when replay is asked, once, whether it was the last.
    """

    window: int = 64
    patience: float = 0.1
    held: int = 10_000
    held_bytes: int = 32 * 2**20
    silence: float = 5.0
    longest: float = 60.0
    deaf: float = 60.0
    doubt: float = 5.0
    idle: float = 10.0
