"""A publisher's numbers: gaps, duplicates, resets, and what replay brings, in order and counted once."""

from __future__ import annotations

import math

import pytest

from kvcache_otel.events.frames import END
from kvcache_otel.events.terms import Limits
from tests.events.stream_driver import LIMITS, Driver, batch, frame

FAR = 2**24


# -- cases -------------------------------------------------------------------------------------------------------------


def test_e5_a_gap_is_lost() -> None:
    driver = Driver()
    driver.live(0, 1, 2, 5)
    assert driver.applied() == [0, 1, 2]
    driver.wait()
    assert driver.applied() == [0, 1, 2, 5]
    assert driver.counted() == {"lost": 2}


def test_e6_a_sequence_that_starts_again_is_a_reset() -> None:
    driver = Driver()
    driver.live(0, 1, 2, 0)
    assert len(driver.runs) == 2
    assert driver.applied() == [0]
    driver.live(1, 2)
    assert driver.applied() == [0, 1, 2]
    assert driver.counted() == {"resets": 1}


def test_e7_replay_brings_what_a_gap_is_missing() -> None:
    driver = Driver(replay=True)
    driver.live(0, 1, 2, 5)
    driver.wait()
    assert driver.asked == 3
    driver.live(6)
    driver.answer(3, 4, 5, 6)
    driver.end()
    driver.live(7)
    assert driver.applied() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert driver.counted() == {"recovered": 2}
    assert driver.asked is None


@pytest.mark.parametrize("delimiter", [[], [b""], [b"", b""], [b"", b"kv-events"]], ids=repr)
def test_e8_the_end_marker_is_the_end(delimiter: list[bytes]) -> None:
    driver = Driver(replay=True)
    driver.live(0, 3)
    driver.wait()
    driver.stream.answer([*delimiter, frame(END), b""], driver.now)
    assert driver.applied() == [0, 3]
    assert driver.counted() == {"lost": 2}
    assert driver.asked is None


@pytest.mark.parametrize("before", [[b""], [b"", b"kv-events"]], ids=["old", "new"])
def test_e9_old_and_new_answers(before: list[bytes]) -> None:
    driver = Driver(replay=True)
    driver.live(0, 2)
    driver.wait()
    driver.stream.answer([*before, frame(1), b"1 of run 0"], driver.now)
    assert driver.applied() == [0, 1, 2]
    assert driver.counted() == {"recovered": 1}


# -- order -------------------------------------------------------------------------------------------------------------


def test_batches_out_of_order_are_put_in_order() -> None:
    driver = Driver()
    driver.live(0, 3, 2, 4, 1, 5)
    assert driver.applied() == [0, 1, 2, 3, 4, 5]
    driver.wait(1)
    assert driver.counted() == {}
    assert driver.stream.due == math.inf


def test_the_first_batches_may_be_out_of_order_too() -> None:
    driver = Driver()
    driver.live(1, 0, 2)
    assert driver.applied() == [0, 1, 2]
    late = Driver()
    late.live(8, 7, 9)
    late.wait()
    assert late.applied() == [7, 8, 9]
    assert driver.counted() == late.counted() == {}


def test_a_window_that_is_full_waits_no_longer() -> None:
    driver = Driver()
    driver.live(0, *range(2, 65))
    assert driver.applied() == [0]
    driver.live(65)
    assert driver.applied() == [0, *range(2, 66)]
    assert driver.counted() == {"lost": 1}


def test_bytes_that_wait_are_bounded() -> None:
    driver = Driver(limits=Limits(held_bytes=1000))
    driver.live(0)
    driver.stream.live([b"", frame(2), b"2 of run " + b"0" * 1000], driver.now)
    assert driver.applied() == [0, 2]
    assert driver.counted() == {"lost": 1}


def test_each_gap_has_its_time() -> None:
    """It counts from when the batch behind the gap has come: many gaps do not add up to a long wait."""
    driver = Driver()
    driver.live(0, 2)
    driver.wait(LIMITS.patience * 0.6)
    driver.live(4)
    driver.wait(LIMITS.patience * 0.6)
    assert driver.applied() == [0, 2]
    driver.live(3)
    assert driver.applied() == [0, 2, 3, 4]
    assert driver.counted() == {"lost": 1}
    driver.live(6, 8, 10)
    driver.wait()
    assert driver.applied() == [0, 2, 3, 4, 6, 8, 10]
    assert driver.counted() == {"lost": 4}


def test_due_is_when_tick_does_something() -> None:
    driver = Driver(replay=True)
    assert driver.stream.due == math.inf
    driver.live(0, 2)
    assert driver.stream.due == driver.now + LIMITS.patience
    driver.wait(LIMITS.patience * 0.9)
    assert driver.asked is None
    driver.wait(LIMITS.patience * 0.2)
    assert driver.asked == 1
    assert driver.stream.due == driver.now + LIMITS.silence
    driver.wait(LIMITS.silence)
    assert driver.asked is None
    assert driver.stream.due == driver.now + 2.0  # It is asked again.


def test_a_publisher_that_counts_nothing() -> None:
    driver = Driver()
    driver.stream.live([b"7 of run 0"], driver.now)
    driver.stream.live([b"7 of run 0"], driver.now)
    assert driver.applied() == [7, 7]
    assert driver.stream.heard == driver.now
    assert driver.counted() == {}


def test_unreadable_frames_are_counted_and_change_nothing() -> None:
    driver = Driver()
    assert driver.stream.heard is None
    driver.live(0)
    then = driver.now
    driver.wait(1)
    for message in ([], [b"", b"batch"], [b""] * 4):
        driver.stream.live(message, driver.now)
    driver.stream.live([b"", b"1", b"batch"], driver.now)
    driver.live(1)
    assert driver.applied() == [0, 1]
    assert driver.counted() == {"frame_count": 3, "sequence_frame": 1}
    assert then < driver.stream.heard == driver.now


def test_a_gap_behind_another_that_closes_has_its_own_time() -> None:
    driver = Driver()
    driver.live(0, 2)
    driver.wait(LIMITS.patience * 0.6)
    driver.live(4, 1)
    driver.wait(LIMITS.patience * 0.6)
    assert driver.applied() == [0, 1, 2]
    driver.wait(LIMITS.patience * 0.6)
    assert driver.applied() == [0, 1, 2, 4]
    assert driver.counted() == {"lost": 1}


# -- duplicates and resets ---------------------------------------------------------------------------------------------


def test_a_batch_again_is_a_duplicate() -> None:
    driver = Driver()
    driver.live(0, 0, 1, 1, 2, 3, 1, 2, 4)
    assert driver.applied() == [0, 1, 2, 3, 4]
    assert driver.counted() == {"duplicate": 4}


def test_the_number_just_before_on_the_same_batch_is_a_duplicate() -> None:
    driver = Driver()
    driver.live(0, 1, 1)
    assert driver.counted() == {"duplicate": 1}
    assert driver.stream.due == math.inf


def test_the_number_just_before_on_another_batch_is_a_reset_once_nothing_follows() -> None:
    driver = Driver()
    driver.live(0, 1)
    driver.live(1, run=1)
    assert driver.counted() == {}
    driver.wait(LIMITS.doubt)
    driver.wait()
    assert driver.counted() == {"resets": 1, "lost": 1}
    assert driver.runs == [[batch(0), batch(1)], [b"1 of run 1"]]


@pytest.mark.parametrize("first", [1, 2])
@pytest.mark.parametrize("following", [4, 3])
def test_a_number_before_on_another_batch_is_a_reset_if_the_next_follows(first: int, following: int) -> None:
    """The new life was not heard until its numbers had nearly reached those of the old one."""
    driver = Driver()
    driver.live(0, 1, 2)
    driver.live(first, following, run=1)
    assert driver.counted() == {"resets": 1}
    driver.wait()
    driver.wait()
    assert driver.runs == [[batch(0), batch(1), batch(2)], [batch(first, 1), batch(following, 1)]]


@pytest.mark.parametrize("again", [False, True])
def test_a_number_before_on_another_batch_is_what_replay_says(again: bool) -> None:
    driver = Driver(replay=True)
    driver.live(0)
    driver.live(1, 2)
    driver.live(2, run=1)
    driver.live(3, run=int(again))
    assert (driver.asked, driver.sent) == (3, 2)
    assert driver.counted() == {}
    assert driver.applied() == [0, 1, 2]
    driver.answer(2, run=int(again))
    if again:
        driver.answer(0, 1, 2, 3, run=1)
        assert driver.runs[1:] == [[batch(number, 1) for number in range(4)]]
        assert driver.counted() == {"resets": 1, "recovered": 2}
    else:
        assert driver.applied() == [0, 1, 2, 3]
        assert driver.counted() == {"duplicate": 1}
        assert driver.asked is None


@pytest.mark.parametrize("first", [2, 4])
def test_a_reset_behind_a_connection_that_was_lost_is_seen_by_the_last_batch(first: int) -> None:
    driver = Driver(replay=True)
    driver.live(0, 1)
    driver.stream.connected(driver.now)
    driver.live(first, run=1)
    assert driver.applied() == [0, 1]
    driver.answer(1, run=1)
    assert driver.counted() == {"resets": 1}
    driver.answer(*range(first + 1), run=1)  # What came before the first that arrived is asked for as ever.
    driver.live(first + 1, run=1)
    assert driver.runs[1:] == [[batch(number, 1) for number in range(first + 2)]]
    assert driver.counted() == {"resets": 1, "recovered": first}


def test_a_connection_that_was_lost_costs_one_request_and_no_more() -> None:
    driver = Driver(replay=True)
    driver.live(0, 1)
    driver.stream.connected(driver.now)
    driver.live(2, 3)
    assert (driver.requests, driver.sent) == ([2], 1)
    driver.answer(1, 2)
    assert driver.applied() == [0, 1, 2, 3]
    driver.live(4)
    driver.stream.connected(driver.now)  # And nobody answers.
    driver.live(5)
    assert driver.applied() == [0, 1, 2, 3, 4]
    driver.wait(LIMITS.silence)
    driver.live(6, 8)
    driver.wait()
    assert driver.applied() == [*range(7), 8]  # Nor is asked, for a while.
    driver.stream.connected(driver.now)  # Somebody else may be there now.
    assert driver.requests == [2, 5, 9]
    assert driver.counted() == {"lost": 1}


@pytest.mark.parametrize("first", [2, 3])
def test_a_publisher_that_has_forgotten_the_last_batch_is_believed(first: int) -> None:
    driver = Driver(replay=True)
    driver.live(0, 1)
    driver.stream.connected(driver.now)
    driver.live(3)
    driver.answer(*range(first, 4))
    driver.end()
    assert driver.applied() == [0, 1, *range(first, 4)]
    assert driver.counted() == ({"recovered": 1} if first == 2 else {"lost": 1})


def test_a_lost_connection_without_replay_changes_nothing() -> None:
    driver = Driver()
    driver.live(0, 1)
    driver.stream.connected(driver.now)
    driver.live(2)
    assert driver.applied() == [0, 1, 2]


def test_more_than_can_wait_ends_the_doubt_about_a_connection() -> None:
    driver = Driver(replay=True, limits=LIMITS._replace(held=3))
    driver.live(0)
    driver.stream.connected(driver.now)
    driver.live(1, 2, 3)
    assert driver.applied() == [0]
    driver.live(4)
    assert driver.applied() == [0, 1, 2, 3, 4]
    assert driver.counted() == {}


def test_a_waiting_batch_again_is_a_duplicate() -> None:
    driver = Driver()
    driver.live(0, 2, 2)
    assert driver.counted() == {"duplicate": 1}
    driver.live(2, run=1)
    driver.live(1)
    assert driver.runs == [[batch(0), batch(1), batch(2)]]
    assert driver.counted() == {"duplicate": 2}


def test_what_comes_after_it_was_lost_is_a_duplicate() -> None:
    driver = Driver()
    driver.live(0, 3)
    driver.wait()
    driver.live(1, 2, 4)
    assert driver.applied() == [0, 3, 4]
    assert driver.counted() == {"lost": 2, "duplicate": 2}


def test_long_ago_batches_again_are_duplicates() -> None:
    driver = Driver()
    driver.live(*range(200), 5, 6, 200, 7, 201)
    assert driver.applied() == [*range(202)]
    assert driver.counted() == {"duplicate": 3}


def test_another_first_batch_is_a_reset() -> None:
    driver = Driver()
    driver.live(0)
    driver.live(0, run=1)
    driver.live(1, run=1)
    assert driver.runs == [[b"0 of run 0"], [b"0 of run 1", b"1 of run 1"]]
    assert driver.counted() == {"resets": 1}


@pytest.mark.parametrize("before", [10, 64, 1000])
def test_a_reset_whose_first_batches_did_not_arrive(before: int) -> None:
    driver = Driver()
    driver.live(*range(before))
    driver.live(2, 3, run=1)
    assert len(driver.runs) == 1
    driver.live(4, run=1)
    driver.wait()
    driver.live(5, run=1)
    assert driver.runs[1:] == [[b"2 of run 1", b"3 of run 1", b"4 of run 1", b"5 of run 1"]]
    assert driver.counted() == {"resets": 1, "lost": 2}


def test_late_batches_prove_no_reset() -> None:
    driver = Driver()
    driver.live(0, 1, 6, 7)
    driver.wait()
    driver.live(2, 3, 4, 5, 8)
    assert driver.applied() == [0, 1, 6, 7, 8]
    assert driver.counted() == {"lost": 4, "duplicate": 4}


def test_numbers_that_were_lost_may_belong_to_a_reset() -> None:
    driver = Driver()
    driver.live(0, 1, 3, *range(5, 20))
    driver.wait()
    driver.wait()
    driver.live(2, 3, 4, 5, run=1)
    assert len(driver.runs) == 1
    driver.live(2, 6, run=1)
    driver.wait()
    assert driver.runs[1:] == [[batch(number, 1) for number in range(2, 7)]]
    assert driver.counted() == {"lost": 4, "resets": 1, "duplicate": 1}


def test_suspicious_bytes_are_bounded() -> None:
    driver = Driver(limits=Limits(held_bytes=100))
    driver.live(*range(200))
    driver.stream.live([b"", frame(5), b"5 of run " + b"0" * 100], driver.now)
    assert driver.counted() == {"duplicate": 1}
    driver.live(6, 7, 8, run=1)
    assert driver.counted() == {"duplicate": 1, "resets": 1}


@pytest.mark.parametrize("number", [0, 35])
def test_a_publisher_that_starts_again_while_the_first_batch_waits(number: int) -> None:
    driver = Driver(replay=True)
    driver.live(100)
    driver.live(number, number + 1, number + 2, run=1)
    driver.end()
    for _ in range(2 if number else 0):  # It is asked whether it has any, and what came before them.
        driver.end()
    assert driver.runs == [[batch(100)], [batch(number + more, 1) for more in range(3)]]
    assert driver.counted() == {"resets": 1} | ({"lost": 35} if number else {})


@pytest.mark.parametrize("heard", [[1], [1, 2], [40], [900, 950]])
def test_a_publisher_that_starts_again_and_falls_silent(heard: list[int]) -> None:
    """Nobody received its first batches, and too few came after them to prove anything by themselves."""
    driver = Driver()
    driver.live(*range(1000))
    driver.live(*heard, run=1)
    driver.wait(LIMITS.doubt - 0.1)
    assert driver.counted() == {}
    driver.wait(0.1)
    assert driver.counted() == {"resets": 1}
    driver.wait()
    driver.wait()
    assert driver.runs[1:] == [[batch(number, 1) for number in heard]]
    assert driver.counted()["resets"] == 1


@pytest.mark.parametrize("keeps", [False, True])
def test_a_low_number_has_replay_asked_if_it_knows_the_last_batch(keeps: bool) -> None:
    driver = Driver(replay=True)
    driver.live(*range(1000))
    if keeps:
        driver.stream.connected(driver.now)
        driver.answer(999)
        driver.end()
        driver.wait(2)  # For a moment it is taken at its word.
    driver.live(2, run=1)
    assert (driver.asked, driver.sent) == (1000, 999)
    driver.end()  # No batch from 999 on.
    if not keeps:  # It may keep none: it is asked for any, and has some.
        assert driver.counted() == {}
        assert (driver.asked, driver.sent) == (1000, 0)
        driver.answer(0, run=1)
    assert driver.asked == 0
    driver.answer(0, 1, 2, run=1)
    driver.end()
    assert driver.applied() == [0, 1, 2]
    assert driver.counted() == {"resets": 1, "recovered": 2}


def test_a_low_number_of_a_publisher_that_keeps_nothing_for_replay() -> None:
    driver = Driver(replay=True)
    driver.live(*range(1000))
    driver.live(2, run=1)
    driver.end()
    driver.end()
    driver.wait(LIMITS.doubt - 0.1)
    assert driver.counted() == {}
    driver.wait(0.1)
    assert driver.counted() == {"resets": 1}


def test_silence_after_what_proves_nothing_is_no_reset() -> None:
    driver = Driver()
    driver.live(*range(1000))
    driver.live(FAR + 2000)  # Far above.
    driver.wait(10 * LIMITS.doubt)
    driver.live(1000)
    driver.live(999, 990)  # Here before.
    driver.wait(10 * LIMITS.doubt)
    assert driver.counted() == {"sequence_frame": 1, "duplicate": 2}
    assert driver.stream.due == math.inf


def test_the_sequence_that_goes_on_ends_the_doubt() -> None:
    driver = Driver()
    driver.live(*range(1000))
    driver.live(5, run=1)
    driver.wait(LIMITS.doubt / 2)
    driver.live(1000)
    driver.wait(LIMITS.doubt)
    assert driver.applied() == [*range(1001)]
    assert driver.counted() == {"duplicate": 1}


def test_a_replay_of_another_sequence_swallows_nothing_live() -> None:
    """Its socket is that of another rank, say."""
    driver = Driver(replay=True)
    driver.stream.connected(driver.now)
    driver.answer(*range(40_000, 40_100), run=1)
    driver.end()
    driver.live(*range(3000, 3060))
    assert driver.asked == 0
    driver.answer(*range(40_000, 40_100), run=1)
    driver.end()
    assert driver.applied() == [*range(3000, 3060)]
    assert driver.counted() == {"resets": 1, "lost": 3000}


@pytest.mark.parametrize("old", [40, 200])
@pytest.mark.parametrize("compared", [False, True])
def test_a_publisher_that_starts_again_and_is_past_the_old_numbers(old: int, compared: bool) -> None:
    """Nobody received it until then. Its replay tells the batch that we had last from that of the same number now."""
    driver = Driver(replay=True)
    driver.live(*range(old))
    driver.live(old + 20, old + 21, run=1)
    driver.wait()
    assert (driver.asked, driver.sent) == (old, old - 1)
    if compared:
        driver.answer(old - 1, run=1)
        assert driver.runs[1:] == [[]]
        assert (driver.asked, driver.sent) == (0, 0)
        driver.answer(*range(old + 22), run=1)
        assert driver.runs[1:] == [[batch(number, 1) for number in range(old + 22)]]
        assert driver.counted() == {"resets": 1, "recovered": old + 20}
    else:
        driver.answer(old - 1)
        driver.answer(*range(old, old + 20))
        assert driver.applied() == [*range(old + 22)]
        assert driver.counted() == {"recovered": 20}


def test_what_was_lost_last_is_not_compared() -> None:
    driver = Driver(replay=True)
    driver.live(0, 1, 3)
    driver.wait()
    driver.end()
    driver.live(5)
    driver.wait()
    assert (driver.asked, driver.sent) == (4, 3)
    driver.answer(4)
    driver.live(8)
    driver.wait()
    driver.end()
    assert driver.counted() == {"lost": 3, "recovered": 1}


@pytest.mark.parametrize("first", [0, 1])
def test_a_publisher_that_starts_again_right_after_the_first_replay(first: int) -> None:
    driver = Driver(replay=True)
    driver.stream.connected(driver.now)
    driver.answer(*range(100))
    driver.end()
    driver.live(*range(first, 60), run=1)
    if driver.asked is not None:
        driver.answer(*range(60), run=1)
        driver.end()
    assert driver.runs[-1] == [batch(number, 1) for number in range(60)]
    assert driver.counted() == {"resets": 1} | ({"recovered": 1} if first else {})


def test_low_numbers_that_fall_or_stand_are_no_reset() -> None:
    driver = Driver()
    driver.live(*range(1000))
    driver.live(500, 499, 498, 497, 497, 700, 765, 766, 831, run=1)
    driver.live(1000)
    assert driver.counted() == {"duplicate": 9}
    assert driver.applied() == [*range(1001)]


def test_low_numbers_before_a_reset_are_duplicates() -> None:
    driver = Driver()
    driver.live(*range(1000))
    driver.live(5, 6, 0, run=1)
    assert driver.runs[1:] == [[batch(0, 1)]]
    assert driver.counted() == {"duplicate": 2, "resets": 1}


def test_a_reset_while_a_gap_is_open() -> None:
    driver = Driver(replay=True)
    driver.live(*range(50))
    driver.live(60, 61)
    driver.wait()
    driver.live(0, run=1)
    assert driver.asked is None
    assert len(driver.runs[0]) == 52
    assert driver.runs[1] == [b"0 of run 1"]
    assert driver.counted() == {"lost": 10, "resets": 1}


def test_a_reset_hidden_by_what_waits() -> None:
    driver = Driver(limits=Limits(patience=math.inf))
    driver.live(0, 5, 6, 7, 8)
    driver.live(5, 6, 7, 8, run=1)
    driver.live(9, run=1)
    assert len(driver.runs) == 2
    assert driver.counted() == {"lost": 4, "resets": 1}


def test_after_a_reset_replay_brings_what_came_before_its_first_batch() -> None:
    driver = Driver(replay=True)
    driver.live(*range(100))
    driver.live(2, 3, 4, run=1)
    assert driver.asked == 0
    driver.answer(0, 1, 2, 3, 4, run=1)
    assert driver.applied() == [0, 1, 2, 3, 4]
    assert driver.counted() == {"resets": 1, "recovered": 2}


# -- absurd numbers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [2**63, 2**64 - 2, 2**64 - 1, FAR + 2])
@pytest.mark.parametrize("replay", [False, True])
def test_an_absurd_number_loses_nothing(number: int, replay: bool) -> None:
    driver = Driver(replay=replay)
    driver.live(0, number, 1, 2)
    driver.wait(100)
    assert driver.applied() == [0, 1, 2]
    assert driver.counted() == {"sequence_frame": 1}


def test_a_sequence_that_goes_on_elsewhere_is_a_reset() -> None:
    driver = Driver()
    driver.live(0, 2**63, 2**63 + 1, 2**63 + 3)
    assert driver.applied() == []
    driver.wait()
    assert driver.applied() == [2**63, 2**63 + 1, 2**63 + 3]
    assert driver.counted() == {"resets": 1, "lost": 1}


@pytest.mark.parametrize("replay", [False, True])
def test_an_absurd_number_at_first(replay: bool) -> None:
    driver = Driver(replay=replay)
    driver.live(2**63, 57, 58, 59)
    driver.wait()
    for _ in range(3 if replay else 0):
        driver.end()
    assert driver.applied() == [57, 58, 59]
    assert driver.counted() == {"resets": 1, "lost": 57}


def test_the_last_number_there_is() -> None:
    driver = Driver()
    driver.live(2**64 - 3)
    driver.wait()
    driver.live(2**64 - 2, 2**64 - 1, 0, 1)
    assert driver.applied() == [0, 1]
    assert driver.counted() == {"sequence_frame": 1, "resets": 1}


def test_the_longest_gap_that_is_believed() -> None:
    driver = Driver()
    driver.live(0, FAR + 1)
    driver.wait()
    assert driver.applied() == [0, FAR + 1]
    assert driver.counted() == {"lost": FAR}


# -- joining late ------------------------------------------------------------------------------------------------------


def test_what_came_before_the_first_batch_is_not_lost() -> None:
    driver = Driver()
    driver.live(50)
    assert driver.applied() == []
    driver.wait()
    driver.live(51, 53)
    driver.wait()
    assert driver.applied() == [50, 51, 53]
    assert driver.counted() == {"lost": 1}


@pytest.mark.parametrize("oldest", [0, 20])
def test_what_came_before_the_first_batch_is_asked_for(oldest: int) -> None:
    driver = Driver(replay=True)
    driver.live(50)
    assert driver.asked == 0
    driver.live(51)
    driver.answer(*range(oldest, 52))
    driver.live(52)
    assert driver.applied() == [*range(oldest, 53)]
    assert driver.counted() == {}


def test_a_gap_right_after_joining() -> None:
    driver = Driver(replay=True)
    driver.live(50, 53)
    driver.answer(48, 49, 50, 51, 52, 53)
    assert driver.applied() == [48, 49, 50, 51, 52, 53]
    assert driver.counted() == {"recovered": 2}


@pytest.mark.parametrize("answers", [[], [50], [51], [51, 52]])
def test_nothing_left_of_what_came_before(answers: list[int]) -> None:
    driver = Driver(replay=True)
    driver.live(50, 51)
    driver.answer(*answers)
    if not answers:
        driver.end()
    assert driver.asked is None
    assert driver.applied() == [50, 51]
    assert driver.counted() == {}


def test_a_publisher_that_says_nothing_is_asked_what_it_said() -> None:
    driver = Driver(replay=True)
    driver.stream.connected(driver.now)
    assert driver.asked == 0
    driver.answer(7, 8, 9)
    assert driver.applied() == [7, 8, 9]
    driver.end()
    assert driver.asked is None
    driver.live(8, 9)  # On their way while the replay was answered.
    driver.live(10, 12)
    driver.live(10)  # Again.
    driver.wait()
    driver.answer(11)
    assert driver.applied() == [7, 8, 9, 10, 11, 12]
    assert driver.counted() == {"duplicate": 1, "recovered": 1}


def test_a_publisher_that_just_started() -> None:
    driver = Driver(replay=True)
    driver.stream.connected(driver.now)
    driver.answer(*range(100))
    driver.live(0)  # On its way: not a reset.
    assert driver.asked is None
    driver.live(*range(1, 102))
    assert driver.applied() == [*range(102)]
    assert driver.counted() == {}


def test_what_was_on_its_way_comes_once() -> None:
    driver = Driver(replay=True)
    driver.stream.connected(driver.now)
    driver.answer(*range(100))
    driver.live(50, 50, 51, 99, 100)
    assert driver.applied() == [*range(101)]
    assert driver.counted() == {"duplicate": 1}


def test_another_batch_than_replay_brought_is_not_on_its_way() -> None:
    driver = Driver(replay=True)
    driver.stream.connected(driver.now)
    driver.answer(*range(10))
    driver.live(0, 1, run=1)
    assert driver.runs[1:] == [[batch(0, 1), batch(1, 1)]]
    assert driver.counted() == {"resets": 1}


def test_low_numbers_long_after_something_was_on_its_way_are_a_reset() -> None:
    driver = Driver(replay=True)
    driver.stream.connected(driver.now)
    driver.answer(*range(200))
    driver.live(10)
    driver.wait(LIMITS.silence)
    driver.live(20, 21, 22, run=1)
    assert driver.counted() == {"resets": 1}


def test_a_batch_that_follows_the_first_replay_ends_it() -> None:
    driver = Driver(replay=True)
    driver.stream.connected(driver.now)
    driver.answer(0, 1)
    driver.live(2)
    assert driver.asked is None
    driver.live(4)
    driver.wait()
    driver.answer(3, 4)
    assert driver.applied() == [0, 1, 2, 3, 4]
    assert driver.counted() == {"recovered": 1}


def test_a_batch_that_the_first_replay_has_not_reached() -> None:
    driver = Driver(replay=True)
    driver.stream.connected(driver.now)
    driver.answer(0, 1)
    driver.live(5, 7)
    driver.answer(2, 3, 4, 5, 6)
    assert driver.asked is None
    assert driver.applied() == [*range(8)]
    assert driver.counted() == {"recovered": 1}


def test_low_numbers_long_after_the_first_replay_are_a_reset() -> None:
    driver = Driver(replay=True)
    driver.stream.connected(driver.now)
    driver.answer(*range(100))
    driver.end()
    driver.wait(LIMITS.silence)
    driver.live(0, 1, run=1)
    assert driver.runs[1:] == [[b"0 of run 1", b"1 of run 1"]]
    assert driver.counted() == {"resets": 1}


def test_a_publisher_that_is_not_there_yet() -> None:
    driver = Driver(replay=True)
    driver.stream.connected(driver.now)
    driver.wait(LIMITS.silence)
    assert driver.asked is None
    driver.live(2)
    assert driver.asked == 0
    driver.answer(0, 1)
    assert driver.applied() == [0, 1, 2]
    assert driver.counted() == {}


def test_what_was_sent_after_the_first_request_is_asked_for_again() -> None:
    driver = Driver(replay=True)
    driver.stream.connected(driver.now)
    driver.live(3)
    driver.end()  # As it was before 0.
    assert driver.asked == 0
    driver.answer(0, 1, 2)
    assert driver.applied() == [0, 1, 2, 3]
    assert driver.counted() == {}


@pytest.mark.parametrize("gone", [False, True])
def test_a_hole_in_what_came_before_is_not_lost(gone: bool) -> None:
    driver = Driver(replay=True)
    driver.stream.connected(driver.now)
    driver.answer(0, 1, 4, 5)
    driver.end()
    assert driver.asked == 2
    driver.live(4)  # On its way, like 5.
    if gone:
        driver.answer(4, 5)
    driver.end()
    assert driver.asked is None
    assert driver.applied() == [0, 1, 4, 5]
    driver.live(6, 8)
    driver.wait()
    driver.end()
    assert driver.applied() == [0, 1, 4, 5, 6, 8]
    assert driver.counted() == {"lost": 1}


def test_a_hole_that_nothing_fills_before_anything_came_live() -> None:
    driver = Driver(replay=True)
    driver.stream.connected(driver.now)
    driver.answer(0, 1, 4, 5)
    driver.end()
    driver.answer(4, 5)
    driver.end()
    driver.live(6)
    assert driver.applied() == [0, 1, 4, 5, 6]
    assert driver.counted() == {}


def test_what_is_missing_after_the_first_replay_counts() -> None:
    driver = Driver(replay=True)
    driver.stream.connected(driver.now)
    driver.answer(0, 1)
    driver.end()
    driver.live(4)
    driver.wait()
    driver.answer(3)
    assert driver.applied() == [0, 1, 3, 4]
    assert driver.counted() == {"lost": 1, "recovered": 1}


def test_an_absurd_number_in_the_first_replay_is_passed_over() -> None:
    driver = Driver(replay=True)
    driver.stream.connected(driver.now)
    driver.answer(0, 1, 2**40, 2)
    driver.end()
    assert driver.asked is None
    assert driver.applied() == [0, 1, 2]


def test_a_first_batch_while_a_request_goes_unanswered() -> None:
    driver = Driver(replay=True)
    driver.stream.connected(driver.now)
    driver.wait(LIMITS.silence - 1)
    driver.live(2)
    driver.wait(1)
    assert driver.asked is None
    assert driver.requests == [0]
    assert driver.applied() == [2]
    assert driver.counted() == {}


def test_what_waited_before_the_connection_was_lost_is_not_of_the_next_life() -> None:
    driver = Driver(replay=True)
    driver.live(*range(5))
    driver.live(6, 7)
    driver.stream.disconnected(driver.now)
    driver.now += 0.01
    driver.stream.connected(driver.now)
    assert driver.applied() == [*range(5)]
    driver.live(9, run=1)
    driver.answer(4, run=1)
    assert driver.asked == 0
    driver.answer(*range(10), run=1)
    assert driver.runs[1:] == [[batch(number, 1) for number in range(10)]]
    assert driver.counted() == {"resets": 1, "lost": 1, "recovered": 9}  # Lost is the one that those waited for.


def test_what_waits_for_the_first_answer_may_be_of_a_life_before() -> None:
    driver = Driver(replay=True)
    driver.stream.connected(driver.now)
    driver.live(40, 41, 42)
    driver.stream.disconnected(driver.now)
    driver.now += 1
    driver.stream.connected(driver.now)
    driver.answer(*range(41), run=1)
    assert driver.asked == 0
    driver.answer(*range(56), run=1)
    driver.end()
    driver.live(56, run=1)
    assert driver.runs[1:] == [[batch(number, 1) for number in range(57)]]
    assert driver.counted() == {"resets": 1}


@pytest.mark.parametrize("late", [False, True])
def test_what_waits_and_is_another_batch_in_the_replay_is_a_reset(late: bool) -> None:
    """It came from the publisher before, whose connection may be known to be lost only after that was read."""
    driver = Driver(replay=True)
    driver.live(*range(5))
    if not late:
        driver.live(6, 7)
    driver.stream.disconnected(driver.now)
    driver.now += 1
    driver.stream.connected(driver.now)
    if late:
        driver.live(6, 7)
    driver.answer(6, run=1)  # It does not keep what would tell it sooner.
    assert driver.asked == 0
    driver.answer(*range(6, 12), run=1)
    driver.end()
    driver.live(12, run=1)
    assert driver.runs[1:] == [[batch(number, 1) for number in range(6, 13)]]
    assert driver.counted() == {"resets": 1, "lost": 6}


def test_what_a_new_connection_has_not_told_is_not_forgotten_with_the_next() -> None:
    driver = Driver(replay=True)
    driver.live(*range(5))
    for numbers in (range(7, 1000), range(1000, 2000)):
        driver.stream.disconnected(driver.now)
        driver.stream.connected(driver.now)
        driver.wait(LIMITS.silence)
        driver.live(*numbers, run=1)
        driver.wait()
    driver.stream.disconnected(driver.now)
    driver.stream.connected(driver.now)
    assert driver.sent == 4
    driver.answer(4, run=1)
    driver.answer(*range(2000), run=1)
    driver.end()
    assert driver.runs[1:] == [[batch(number, 1) for number in range(2000)]]
    assert driver.counts.resets.value == 1


@pytest.mark.parametrize("again", [False, True])
def test_whether_it_has_started_again_is_asked_until_it_is_answered(again: bool) -> None:
    """Its replay is slow just after it has started, and its numbers go on where the old ones were."""
    driver = Driver(replay=True)
    driver.live(*range(5))
    driver.stream.disconnected(driver.now)
    driver.stream.connected(driver.now)
    driver.live(7, 8, run=int(again))
    driver.wait(LIMITS.silence)
    driver.wait()
    assert driver.applied() == [0, 1, 2, 3, 4, 7, 8]
    assert (driver.asked, driver.counted()) == (None, {"lost": 2})
    driver.live(9, run=int(again))
    driver.wait(2)
    assert (driver.asked, driver.sent) == (10, 4)
    driver.live(10, run=int(again))
    assert driver.applied()[-1] == 10
    driver.answer(4, run=int(again))
    if not again:
        assert driver.counted() == {"lost": 2}
        assert driver.asked is None
        return
    driver.answer(*range(11), run=1)
    driver.live(11, run=1)
    assert driver.runs[1:] == [[batch(number, 1) for number in range(12)]]
    assert driver.counted() == {"lost": 2, "resets": 1}


def test_a_publisher_that_was_silent_once_is_asked_again_soon_and_then_less_often() -> None:
    driver = with_gap()
    pauses: list[float] = []
    for number in range(13, 27, 2):
        driver.wait(LIMITS.silence)
        assert driver.asked is None
        began = driver.now
        driver.live(number)
        while driver.asked is None:
            driver.wait(0.5)
            number += 2
            driver.live(number)
        pauses.append(driver.now - began)
    assert pauses == sorted(pauses)
    assert pauses[0] < 3
    assert pauses[-1] > 55


@pytest.mark.parametrize("sent", [False, True])
def test_a_publisher_that_starts_again_and_says_nothing_live(sent: bool) -> None:
    driver = Driver(replay=True)
    driver.live(0, 1)
    driver.stream.connected(driver.now)
    driver.answer(1)
    driver.end()
    driver.stream.disconnected(driver.now)
    driver.stream.connected(driver.now)
    assert (driver.asked, driver.sent) == (2, 1)
    driver.end()  # There is no 1 any more.
    assert driver.counted() == {"resets": 1}
    assert driver.asked == 0
    if sent:
        driver.answer(0, run=1)
    driver.end()
    assert driver.runs[1:] == [[batch(0, 1)] if sent else []]
    driver.live(*range(sent, 3), run=1)
    assert driver.runs[1:] == [[batch(number, 1) for number in range(3)]]
    assert driver.counted() == {"resets": 1}
    assert driver.asked is None


def test_what_was_missed_while_disconnected_is_recovered_though_nothing_comes_live() -> None:
    driver = Driver(replay=True)
    driver.live(0, 1)
    driver.stream.connected(driver.now)
    driver.answer(1, 2, 3, 4)
    driver.end()
    assert driver.applied() == [0, 1, 2, 3, 4]
    driver.live(4)  # Was on its way: it was not missed, and those before it were.
    assert driver.counted() == {"recovered": 2}
    driver.wait(LIMITS.silence)
    assert driver.counted() == {"recovered": 2}
    driver.live(4, 5)
    assert driver.applied() == [*range(6)]
    assert driver.counted() == {"recovered": 2, "duplicate": 1}


def test_what_was_missed_and_followed_is_recovered_after_a_while() -> None:
    driver = Driver(replay=True)
    driver.live(0)
    driver.stream.connected(driver.now)
    driver.answer(0, 1, 2)
    driver.live(3)
    assert driver.asked is None
    assert driver.applied() == [0, 1, 2, 3]
    driver.wait(LIMITS.silence)
    assert driver.counted() == {"recovered": 2}
    assert driver.stream.due == math.inf


def test_what_was_sent_last_and_missed_is_asked_for_when_nothing_comes() -> None:
    driver = Driver(replay=True, limits=LIMITS._replace(idle=10.0))
    driver.live(0, 1)
    driver.wait(5)
    driver.live(2)
    driver.wait(5)
    assert driver.asked is None
    driver.wait(5)
    assert (driver.asked, driver.sent) == (3, 2)
    driver.answer(2, 3, 4)
    driver.end()
    assert driver.applied() == [*range(5)]
    driver.wait(LIMITS.silence)
    assert driver.counted() == {"recovered": 2}
    for _ in range(10):  # Once is enough.
        driver.wait(10)
    assert len(driver.requests) == 1
    driver.live(5)
    driver.wait(10)
    assert len(driver.requests) == 2
    driver.live(6)  # It is neither waited for what it says, nor is that wanted any more.
    assert driver.applied() == [*range(7)]
    assert driver.asked is None


def test_nobody_is_asked_for_being_silent_while_there_is_no_connection() -> None:
    driver = Driver(replay=True, limits=LIMITS._replace(idle=10.0))
    driver.live(0)
    driver.stream.disconnected(driver.now)
    driver.wait(100)
    assert driver.requests == []


def test_a_connection_without_replay_changes_nothing() -> None:
    driver = Driver()
    driver.stream.connected(driver.now)
    driver.live(0)
    driver.stream.connected(driver.now)
    driver.live(1)
    assert driver.applied() == [0, 1]
    assert driver.requests == []


# -- replay that goes wrong --------------------------------------------------------------------------------------------


def with_gap(limits: Limits = LIMITS) -> Driver:
    """3 to 9 are missing and asked for; 10 and 11 wait."""
    driver = Driver(replay=True, limits=limits)
    driver.live(0, 1, 2, 10, 11)
    driver.wait()
    assert driver.asked == 3
    return driver


def test_no_answer() -> None:
    driver = with_gap()
    driver.wait(LIMITS.silence - 1)
    driver.live(12, 15)
    assert driver.applied() == [0, 1, 2]
    driver.wait(1)
    assert driver.asked is None
    assert driver.applied() == [0, 1, 2, 10, 11, 12, 15]
    assert driver.counted() == {"lost": 9}


def test_a_publisher_that_does_not_answer_is_left_alone_for_a_while() -> None:
    driver = with_gap()
    driver.wait(LIMITS.silence)
    driver.live(13)
    driver.wait()
    assert driver.asked is None
    driver.wait(LIMITS.deaf)
    driver.live(15)
    driver.wait()
    assert driver.asked == 14
    assert driver.counted() == {"lost": 8}


def test_an_answer_that_comes_too_late() -> None:
    driver = with_gap()
    driver.wait(LIMITS.silence)
    driver.answer(3, 4, 5)
    driver.end()
    driver.live(12)
    assert driver.applied() == [0, 1, 2, 10, 11, 12]
    assert driver.counted() == {"lost": 7}


def test_the_publisher_has_the_last_ones_only() -> None:
    driver = with_gap()
    driver.answer(8)
    assert driver.applied() == [0, 1, 2, 8]
    driver.answer(9)
    assert driver.applied() == [0, 1, 2, 8, 9, 10, 11]
    assert driver.counted() == {"lost": 5, "recovered": 2}


def test_the_publisher_has_nothing_any_more() -> None:
    driver = with_gap()
    driver.answer(50)
    assert driver.applied() == [0, 1, 2, 10, 11]
    assert driver.counted() == {"lost": 7}
    assert driver.asked is None


@pytest.mark.parametrize("marker", [True, False])
def test_an_answer_that_ends_early_is_asked_for_again(marker: bool) -> None:
    driver = with_gap()
    driver.answer(3, 4)
    for start in (5, 6):
        driver.end() if marker else driver.wait(LIMITS.silence)
        assert driver.asked == start
        driver.answer(5)
    driver.end() if marker else driver.wait(LIMITS.silence)
    assert driver.asked is None
    assert driver.applied() == [0, 1, 2, 3, 4, 5, 10, 11]
    assert driver.counted() == {"lost": 4, "recovered": 3}


def test_an_answer_with_a_hole_is_asked_for_the_rest() -> None:
    driver = with_gap()
    driver.answer(3, 4, 8, 9, 10, 11)
    driver.end()
    assert driver.asked == 5
    driver.answer(5, 6, 7)
    assert driver.applied() == [*range(12)]
    assert driver.counted() == {"recovered": 7}


def test_what_is_gone_when_asked_again_is_lost_at_once() -> None:
    driver = with_gap()
    driver.answer(3, 4)
    driver.end()
    driver.answer(8)
    assert driver.applied() == [0, 1, 2, 3, 4, 8]
    assert driver.counted() == {"lost": 3, "recovered": 3}


@pytest.mark.parametrize("marker", [True, False])
def test_an_answer_that_never_ends(marker: bool) -> None:
    driver = with_gap(Limits(longest=8.0))
    driver.wait(4)
    driver.answer(3)
    if marker:
        driver.end()
    driver.live(12, 15)
    driver.wait(3.9)
    assert driver.applied() == [0, 1, 2, 3]
    assert driver.requests == ([3, 4] if marker else [3])
    driver.wait(0.1)
    assert driver.applied() == [0, 1, 2, 3, 10, 11, 12, 15]
    assert driver.asked is None
    assert driver.counted() == {"lost": 8, "recovered": 1}


def test_a_publisher_that_answered_in_part_is_asked_again_next_time() -> None:
    driver = with_gap(Limits(longest=8.0))
    driver.wait(4)
    driver.answer(3)
    driver.wait(4)
    driver.live(13)
    driver.wait()
    assert driver.asked == 12


def test_old_numbers_and_those_that_will_come_live_are_passed_over() -> None:
    driver = with_gap()
    driver.answer(0, 1, 2)
    driver.answer(*range(4, 15))
    assert driver.applied() == [0, 1, 2, *range(4, 12)]
    driver.live(12, 13)
    assert driver.applied() == [0, 1, 2, *range(4, 14)]
    assert driver.counted() == {"lost": 1, "recovered": 6}


def test_old_numbers_do_not_keep_a_stream_waiting() -> None:
    driver = with_gap()
    for _ in range(11):  # The first shows that somebody is there.
        assert driver.applied() == [0, 1, 2]
        driver.wait(LIMITS.silence / 10)
        driver.answer(0, 1, 2)
    assert driver.applied() == [0, 1, 2, 10, 11]
    assert driver.counted() == {"lost": 7}


def test_garbage_is_counted_and_changes_nothing() -> None:
    driver = with_gap()
    for message in ([], [b"batch"], [b""] * 5):
        driver.stream.answer(message, driver.now)
    driver.stream.answer([b"", b"3", b"batch"], driver.now)
    driver.stream.answer([b"", frame(END), b"batch"], driver.now)
    driver.answer(*range(3, 10))
    assert driver.applied() == [*range(12)]
    assert driver.counted() == {"frame_count": 3, "sequence_frame": 2, "recovered": 7}


def test_answers_are_counted_once() -> None:
    driver = with_gap()
    driver.answer(3, 3, 5, 5, 4, *range(3, 12))
    assert driver.applied() == [*range(12)]
    assert driver.counted() == {"recovered": 7}


def test_a_batch_that_comes_live_after_all() -> None:
    driver = with_gap()
    driver.live(3)
    driver.answer(3, 4, 5, 6, 7, 8, 9)
    driver.live(4)
    assert driver.applied() == [*range(12)]
    assert driver.counted() == {"recovered": 6, "duplicate": 1}


def test_another_gap_that_the_answer_may_have_missed_is_asked_for() -> None:
    driver = with_gap()
    driver.live(12, 15)
    driver.answer(*range(3, 13))
    assert driver.applied() == [*range(13)]
    driver.end()
    assert driver.asked == 13
    driver.answer(13, 14, 15)
    assert driver.applied() == [*range(16)]
    assert driver.counted() == {"recovered": 9}


def test_a_gap_that_opened_later_is_asked_for_though_the_first_is_lost() -> None:
    driver = with_gap()
    driver.live(12, 15)
    driver.end()
    assert driver.asked == 13
    assert driver.counted() == {"lost": 7}


def test_two_gaps_that_the_publisher_does_not_have() -> None:
    driver = Driver(replay=True)
    driver.live(0, 2, 4)
    driver.wait()
    driver.end()
    assert driver.applied() == [0, 2, 4]
    assert driver.requests == [1]
    assert driver.counted() == {"lost": 2}


def test_too_many_batches_give_the_replay_up() -> None:
    driver = with_gap(Limits(held=100))
    driver.live(*range(12, 110))
    assert driver.applied() == [0, 1, 2]
    driver.live(110)
    assert driver.applied() == [0, 1, 2, *range(10, 111)]
    assert driver.asked is None
    assert driver.counted() == {"lost": 7}


def test_too_many_bytes_give_the_replay_up() -> None:
    driver = with_gap(Limits(held_bytes=2000))
    driver.stream.live([b"", frame(12), b"12 of run " + b"0" * 2000], driver.now)
    assert driver.applied() == [0, 1, 2, 10, 11, 12]
    assert driver.asked is None
    assert driver.counted() == {"lost": 7}
