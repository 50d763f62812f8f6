"""What is around a batch is read in every form that publishers give it; anything else is said, not guessed."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache_otel.events import frames
from kvcache_otel.semconv import Reason

SEVEN = (7).to_bytes(8, "big")
END = b"\xff" * 8


@pytest.mark.parametrize("topic", [b"", b"kv-events", b"kv@pod@model", SEVEN])
def test_a_live_message_is_topic_number_payload(topic: bytes) -> None:
    assert frames.published([topic, SEVEN, b"batch"]) == (7, b"batch")


def test_a_payload_alone_has_no_number() -> None:
    assert frames.published([b"batch"]) == (None, b"batch")


def test_numbers_are_unsigned() -> None:
    assert frames.published([b"", b"\xff" * 7 + b"\xfe", b"batch"]) == (2**64 - 2, b"batch")


@pytest.mark.parametrize("count", [0, 2, 4, 5, 1000])
def test_a_live_message_with_other_frames(count: int) -> None:
    with pytest.raises(frames.UnreadableFramesError) as caught:
        frames.published([SEVEN] * count)
    assert caught.value.reason == Reason.FRAME_COUNT


@pytest.mark.parametrize("number", [b"", b"\0" * 7, b"\0" * 9, END], ids=len)
def test_a_live_message_whose_number_is_none(number: bytes) -> None:
    with pytest.raises(frames.UnreadableFramesError) as caught:
        frames.published([b"", number, b"batch"])
    assert caught.value.reason == Reason.SEQUENCE_FRAME


FORMS = {
    "old": [b""],
    "new": [b"", b"kv-events"],
    "new, empty topic": [b"", b""],
    "new, a topic like a number": [b"", SEVEN],
    "old, no delimiter": [],
    "new, no delimiter": [b"kv-events"],
}


@pytest.mark.parametrize("before", FORMS.values(), ids=FORMS.keys())
def test_e9_answers_with_and_without_a_topic(before: list[bytes]) -> None:
    assert frames.answered([*before, SEVEN, b"batch"]) == (7, b"batch")


@pytest.mark.parametrize("before", FORMS.values(), ids=FORMS.keys())
def test_e8_the_end_of_a_replay(before: list[bytes]) -> None:
    assert frames.answered([*before, END, b""]) is None


def test_an_empty_payload_ends_nothing() -> None:
    assert frames.answered([b"", SEVEN, b""]) == (7, b"")


@pytest.mark.parametrize("message", [[], [b"batch"], [b"topic", b"", SEVEN, b"batch"], [b""] * 5])
def test_an_answer_with_other_frames(message: list[bytes]) -> None:
    with pytest.raises(frames.UnreadableFramesError) as caught:
        frames.answered(message)
    assert caught.value.reason == Reason.FRAME_COUNT


@pytest.mark.parametrize(("number", "payload"), [(b"", b"batch"), (b"\0" * 9, b""), (END, b"batch")])
def test_an_answer_whose_number_is_none(number: bytes, payload: bytes) -> None:
    with pytest.raises(frames.UnreadableFramesError) as caught:
        frames.answered([b"", number, payload])
    assert caught.value.reason == Reason.SEQUENCE_FRAME


def test_a_request_is_what_a_publisher_reads() -> None:
    assert frames.request(258) == [b"", b"\0\0\0\0\0\0\1\2"]
    assert frames.request(2**64 - 1) == [b"", END]


@settings(deadline=None)
@given(st.lists(st.binary(max_size=10) | st.just(END), max_size=6))
def test_nothing_else_is_raised(message: list[bytes]) -> None:
    for read in (frames.published, frames.answered):
        with contextlib.suppress(frames.UnreadableFramesError):
            batch = read(message)
            assert batch is None or batch[0] is None or 0 <= batch[0] < frames.END
