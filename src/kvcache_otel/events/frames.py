"""Frames: what a publisher of KV events puts around a batch, live and in a replay."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcache_otel.semconv import Reason

if TYPE_CHECKING:
    from collections.abc import Sequence

END = 2**64 - 1
"""The number that ends a replay, and so is no batch's: -1 in 64 bits."""

_NUMBER_BYTES = 8


class UnreadableFramesError(Exception):
    """Frames that are in no form that is known.

    Attributes:
        reason: Why, one of `Reason`.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def published(frames: Sequence[bytes]) -> tuple[int | None, bytes]:
    """Returns the number and the payload of a live message: ``[topic, number, payload]``, or a payload alone.

    Returns:
        The number, None where the publisher counts nothing, and the payload.

    Raises:
        UnreadableFramesError: There are more frames or fewer, or the number is none.
    """
    count = len(frames)
    if count == 3:
        number = frames[1]
        if len(number) == _NUMBER_BYTES:
            value = int.from_bytes(number, "big")
            if value != END:
                return value, frames[2]
        raise UnreadableFramesError(Reason.SEQUENCE_FRAME)
    if count == 1:
        return None, frames[0]
    raise UnreadableFramesError(Reason.FRAME_COUNT)


def request(start: int) -> list[bytes]:
    """Returns what a DEALER sends to a publisher's replay socket, to be given the batches from one number on."""
    return [b"", start.to_bytes(_NUMBER_BYTES, "big")]


def answered(frames: Sequence[bytes]) -> tuple[int, bytes] | None:
    """Returns the number and the payload of a message from a publisher's replay socket, as a DEALER receives it.

    The last two frames are number and payload. Before them is an empty delimiter, a topic, both or neither, depending
    on the publisher's age and on who took the delimiter off.

    Returns:
        Number and payload, or None where the message ends the replay.

    Raises:
        UnreadableFramesError: There are more frames or fewer, or the number is none.
    """
    count = len(frames)
    if not 2 <= count <= 4 or (count == 4 and frames[0]):
        raise UnreadableFramesError(Reason.FRAME_COUNT)
    number, payload = frames[-2], frames[-1]
    if len(number) == _NUMBER_BYTES:
        value = int.from_bytes(number, "big")
        if value != END:
            return value, payload
        if not payload:
            return None
    raise UnreadableFramesError(Reason.SEQUENCE_FRAME)
