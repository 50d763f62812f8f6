"""A stream whose replay is silent, at times or always, and what it learns once that answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.events.stream_driver import LIMITS, Driver, batch, parsed

if TYPE_CHECKING:
    from kvcache_otel.events.terms import Limits

SILENCE = LIMITS.silence


def connected(limits: Limits = LIMITS) -> Driver:
    """A stream whose publisher had sent nothing when it was connected."""
    driver = Driver(replay=True, limits=limits)
    driver.stream.connected(driver.now)
    driver.end()
    return driver


def reconnect(driver: Driver, after: float = 1.0) -> None:
    driver.stream.disconnected(driver.now)
    driver.wait(after)
    driver.stream.connected(driver.now)


def test_an_idle_publisher_whose_replay_was_silent_is_asked_again() -> None:
    driver = Driver(replay=True)
    driver.stream.connected(driver.now)
    rests: list[float] = []
    for _ in range(8):
        driver.wait(SILENCE)
        assert driver.asked is None
        rests.append(driver.stream.due - driver.now)
        driver.wait(rests[-1])
        assert driver.asked == 0
    assert rests == [2, 4, 8, 16, 32, 60, 60, 60]
    driver.answer(*range(12))
    driver.end()
    assert driver.applied() == [*range(12)]
    assert driver.counted() == {}


def test_nobody_is_asked_again_while_there_is_no_connection() -> None:
    driver = Driver(replay=True)
    driver.stream.connected(driver.now)
    driver.wait(SILENCE)
    driver.stream.disconnected(driver.now)
    assert driver.stream.due == float("inf")
    driver.stream.connected(driver.now)
    assert driver.asked == 0


def serve(driver: Driver, numbers: range, run: int = 0) -> None:
    """Answers requests, and those that come of an answer, as a publisher that keeps these batches."""
    while driver.asked is not None:
        requests = len(driver.requests)
        assert driver.sent is not None
        for number in numbers:
            if number >= driver.sent and driver.asked is not None and len(driver.requests) == requests:
                driver.answer(number, run=run)
        if driver.asked is not None and len(driver.requests) == requests:
            driver.end()


def wait_for_request(driver: Driver) -> None:
    for _ in range(120):
        if driver.asked is not None:
            return
        driver.wait(1)
    raise AssertionError("it is not asked")


def wait_for_silence(driver: Driver) -> None:
    """Lets requests go unanswered until nothing waits for them."""
    while driver.asked is not None:
        driver.wait(SILENCE)


@pytest.mark.parametrize("unheard", [1, 9, 11, 30])
def test_a_gap_that_was_met_with_silence_may_have_been_a_reset(unheard: int) -> None:
    driver = connected()
    driver.live(*range(10))
    driver.live(*range(unheard, unheard + 3), run=1)  # A publisher started again behind a proxy.
    driver.wait()
    wait_for_silence(driver)
    driver.live(*range(unheard + 3, unheard + 6), run=1)
    if unheard > 9:
        wait_for_request(driver)
        assert driver.sent == 9
    serve(driver, range(unheard + 6), run=1)
    driver.wait(20)
    serve(driver, range(unheard + 6), run=1)
    assert parsed(driver.runs[-1]) == [(number, 1) for number in range(unheard + 6)]
    assert driver.counts.resets.value == 1
    assert driver.counts.lost.value == {1: 1, 9: 0, 11: 1, 30: 20}[unheard]


@pytest.mark.parametrize("same", [False, True])
def test_what_came_before_the_first_live_batch_is_there_once_replay_answers(same: bool) -> None:
    driver = Driver(replay=True)
    driver.stream.connected(driver.now)
    driver.live(40, 41)
    wait_for_silence(driver)
    assert driver.applied() == [40, 41]
    driver.live(42)
    wait_for_request(driver)
    assert driver.sent == 0
    serve(driver, range(43), run=0 if same else 1)
    assert parsed(driver.runs[-1]) == [(number, 0 if same else 1) for number in range(43)]
    assert driver.counted() == ({} if same else {"resets": 1})


def test_what_came_before_and_is_all_that_replay_has() -> None:
    driver = Driver(replay=True)
    driver.stream.connected(driver.now)
    driver.live(40)
    wait_for_silence(driver)
    wait_for_request(driver)
    driver.answer(*range(30, 35))  # It is slow, and this is the end of an old buffer.
    driver.end()
    assert driver.sent == 0
    driver.answer(*range(30, 41))
    driver.end()
    assert driver.applied() == [*range(30, 41)]
    assert driver.counted() == {}


def test_connections_that_do_not_last_keep_nothing_waiting() -> None:
    driver = connected()
    driver.live(*range(10))
    number = 10
    for _ in range(200):
        reconnect(driver, 0.1)
        for _ in range(10):
            driver.live(number)
            number += 1
            driver.wait(0.13)
        assert len(driver.applied()) >= number - SILENCE / 0.13 - 10
    driver.wait(SILENCE)
    assert driver.applied() == [*range(number)]
    assert driver.counted() == {}


def test_the_first_answer_shows_that_somebody_is_there() -> None:
    driver = connected()
    driver.live(*range(10))
    driver.live(12, 13)
    driver.wait()
    driver.wait(0.9 * SILENCE)
    driver.answer(9)
    driver.wait(0.9 * SILENCE)
    driver.answer(10, 11)
    assert driver.applied() == [*range(14)]
    assert driver.counted() == {"recovered": 2}


def test_a_replay_that_sends_nothing_new_and_no_end_is_asked_less_and_less() -> None:
    driver = connected()
    driver.live(*range(10))
    reconnect(driver)
    before = len(driver.requests)
    for _ in range(600):
        if driver.asked is not None:
            driver.answer(9)
        driver.wait(1)
    assert len(driver.requests) - before < 16


def test_numbers_of_a_life_that_nobody_knows_are_not_lost() -> None:
    driver = connected()
    driver.live(*range(5))
    reconnect(driver)
    driver.live(100, 101, run=1)
    reconnect(driver)
    driver.live(0, 1, run=2)
    assert driver.runs[1:] == [[batch(0, 2), batch(1, 2)]]
    assert driver.counted() == {"resets": 1}


def test_what_waits_for_the_first_answer_is_not_the_next_publishers() -> None:
    driver = Driver(replay=True)
    driver.stream.connected(driver.now)
    driver.live(1, 2)
    reconnect(driver)
    assert driver.sent == 0
    driver.answer(0, 1, run=1)
    assert driver.sent == 0
    driver.answer(0, 1, run=1)
    driver.end()
    driver.live(2, run=1)
    assert parsed(driver.runs[0]) == [(1, 0), (2, 0)]
    assert parsed(driver.runs[1]) == [(0, 1), (1, 1), (2, 1)]
    assert driver.counted() == {"resets": 1}


def test_what_waits_for_the_first_answer_and_comes_again_is_the_same() -> None:
    driver = Driver(replay=True)
    driver.stream.connected(driver.now)
    driver.live(1, 2)
    reconnect(driver)
    driver.answer(0, 1)
    driver.answer(*range(4))
    driver.end()
    assert [parsed(run) for run in driver.runs] == [[(number, 0) for number in range(4)]]
    assert driver.counted() == {}


def test_the_next_publisher_may_answer_before_it_is_connected() -> None:
    driver = connected()
    driver.live(*range(10))
    driver.live(12)
    driver.wait()
    assert driver.sent == 9
    driver.stream.disconnected(driver.now)
    driver.wait(0.2)
    driver.answer(9, run=1)  # Another batch than ours: a reset, and all that waited was of the life before.
    driver.stream.connected(driver.now)
    driver.answer(*range(14), run=1)
    driver.end()
    assert parsed(driver.runs[-1]) == [(number, 1) for number in range(14)]
    assert driver.counted() == {"lost": 2, "resets": 1}


@pytest.mark.parametrize("same", [False, True])
def test_what_was_suspicious_before_a_connection_broke_waits_for_what_replay_says(same: bool) -> None:
    driver = connected()
    driver.live(*range(10))
    driver.live(4, run=1)
    reconnect(driver)
    driver.answer(9, run=0 if same else 1)
    if not same:
        driver.answer(*range(6), run=1)
        driver.end()
    assert driver.counted() == ({"duplicate": 1} if same else {"resets": 1})


def test_what_was_suspicious_before_a_connection_broke_is_not_the_next_publishers() -> None:
    driver = connected()
    driver.live(*range(10))
    driver.live(4, run=1)
    reconnect(driver)
    driver.answer(9, run=2)
    serve(driver, range(4), run=2)
    driver.live(4, run=2)
    assert parsed(driver.runs[-1]) == [(number, 2) for number in range(5)]
    assert driver.counted() == {"resets": 1}


def test_what_was_suspicious_before_a_connection_broke_is_a_duplicate_if_replay_is_silent() -> None:
    driver = connected()
    driver.live(*range(10))
    driver.live(4, 5, run=1)
    reconnect(driver)
    driver.wait(SILENCE)
    driver.live(6, run=1)
    assert driver.counted() == {"duplicate": 2}


def test_what_was_asked_is_not_forgotten_though_more_came_than_can_wait() -> None:
    driver = connected(LIMITS._replace(held=1200))
    driver.live(*range(10))
    reconnect(driver)
    driver.live(*range(10, 2000), run=1)
    assert len(driver.applied()) > 1100
    driver.answer(9, run=1)
    serve(driver, range(2000), run=1)
    assert parsed(driver.runs[-1]) == [(number, 1) for number in range(2000)]
    assert driver.counted() == {"resets": 1}


def test_a_replay_that_brings_something_is_asked_again_soon() -> None:
    driver = Driver(replay=True)
    driver.stream.connected(driver.now)
    for _ in range(4):
        driver.wait(SILENCE)
        wait_for_request(driver)
    driver.answer(0, 1)
    driver.wait(SILENCE)
    assert driver.stream.due == driver.now + 2.0


def test_numbers_far_above_prove_nothing_by_their_bytes() -> None:
    driver = connected()
    driver.live(*range(10))
    driver.live(*range(2**30, 2**30 + 4), run=1)
    assert driver.counted() == {}
    assert driver.sent == 9
    driver.answer(9)
    assert driver.counted() == {"sequence_frame": 4}


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("pause", [1.0, 0.1, 0.01])
def test_what_comes_live_does_not_have_a_silent_replay_asked_at_once(restarts: bool, pause: float) -> None:
    driver = Driver(replay=True)
    driver.stream.connected(driver.now)
    if restarts:
        driver.end()
        driver.live(*range(10))
        reconnect(driver)
    driver.wait(SILENCE)
    before = len(driver.requests)
    for number in range(round(60 / pause)):
        driver.live(number, run=int(restarts))
        driver.wait(pause)
    assert len(driver.requests) - before <= 6


@pytest.mark.parametrize("unheard", [0, 5, 9, 10, 12])
@pytest.mark.parametrize("silent", [False, True])
def test_a_publisher_that_starts_again_and_is_idle(unheard: int, silent: bool) -> None:
    driver = Driver(replay=True)
    driver.stream.connected(driver.now)
    serve(driver, range(1))
    driver.live(*range(1, 10))
    reconnect(driver)
    if silent:
        driver.wait(SILENCE)
    for _ in range(100):
        serve(driver, range(unheard), run=1)
        driver.wait(1)
    assert parsed(driver.runs[-1]) == [(number, 1) for number in range(unheard)]
    assert driver.counted() == {"resets": 1} | ({"recovered": unheard} if unheard else {})


@pytest.mark.parametrize("again", [False, True])
def test_a_first_answer_that_breaks_off_is_made_up_for(again: bool) -> None:
    driver = Driver(replay=True)
    driver.stream.connected(driver.now)
    driver.live(200)
    driver.answer(*range(50))
    wait_for_silence(driver)
    assert driver.applied() == [*range(50), 200]
    driver.live(201)
    wait_for_request(driver)
    if again:  # What comes live meanwhile waits.
        driver.answer(*range(100))
        driver.live(202)
    assert driver.sent == 0
    serve(driver, range(203))
    driver.live(203)
    driver.wait(20)
    serve(driver, range(204))
    assert driver.applied() == [*range(204)]
    assert driver.counts.lost.value == driver.counts.resets.value == 0


def test_good_books_are_kept_until_better_ones_are_there() -> None:
    driver = Driver(replay=True)
    driver.stream.connected(driver.now)
    driver.live(*range(100, 150))
    wait_for_silence(driver)
    for _ in range(20):
        wait_for_request(driver)
        driver.answer(*range(30))
        driver.wait(SILENCE)
        assert driver.applied() == [*range(100, 150)]
    wait_for_request(driver)
    serve(driver, range(150))
    assert driver.applied() == [*range(150)]
    assert driver.counted() == {}


def test_what_came_live_since_the_request_is_in_the_books_too() -> None:
    driver = Driver(replay=True)
    driver.stream.connected(driver.now)
    driver.live(100, 101)
    wait_for_silence(driver)
    wait_for_request(driver)
    driver.live(102, 103)
    driver.answer(*range(102))
    driver.live(104)  # It waits.
    driver.end()
    assert driver.sent == 0
    serve(driver, range(105))
    assert driver.applied() == [*range(105)]
    assert driver.counted() == {}


def test_books_are_not_begun_anew_with_less() -> None:
    driver = Driver(replay=True)
    driver.stream.connected(driver.now)
    driver.live(100, 101, 102)
    wait_for_silence(driver)
    wait_for_request(driver)
    driver.answer(99, 100, 102)
    driver.end()
    assert driver.applied() == [100, 101, 102]


def test_more_than_can_wait_of_what_came_before_is_left() -> None:
    driver = Driver(replay=True, limits=LIMITS._replace(held=20))
    driver.stream.connected(driver.now)
    driver.live(100)
    wait_for_silence(driver)
    wait_for_request(driver)
    driver.answer(*range(60))
    assert driver.applied() == [100]
    assert driver.counted() == {}
    driver.live(101)
    assert driver.applied() == [100, 101]


def test_another_batch_than_one_that_waits_is_proof() -> None:
    driver = Driver(replay=True)
    driver.live(1)
    driver.live(1, 2, run=1)
    serve(driver, range(3), run=1)
    assert [parsed(run) for run in driver.runs] == [[(1, 0)], [(0, 1), (1, 1), (2, 1)]]
    assert driver.counted() == {"resets": 1, "recovered": 1}


def test_what_waits_and_is_above_all_that_replay_has_is_of_the_life_before() -> None:
    driver = connected()
    driver.live(*range(4))
    driver.live(5)
    driver.live(1, run=1)
    assert driver.sent == 3
    serve(driver, range(2), run=1)
    driver.wait()
    serve(driver, range(2), run=1)
    assert [parsed(run) for run in driver.runs] == [[(number, 0) for number in range(4)], [(0, 1), (1, 1)]]
    assert driver.counted() == {"resets": 1, "recovered": 1}


def test_copies_on_their_way_of_what_replay_has_from_above_next_on() -> None:
    driver = connected()
    driver.live(0)
    reconnect(driver)
    driver.answer(*range(12, 32))
    driver.end()
    driver.answer(12)
    assert driver.applied() == [0, *range(12, 32)]
    driver.live(31)
    driver.wait(20)
    assert driver.counted() == {"lost": 11, "recovered": 19}


@pytest.mark.parametrize("silent", [False, True])
def test_what_came_while_in_doubt_is_of_the_life_that_is_found(silent: bool) -> None:
    driver = connected()
    driver.live(*range(4))
    reconnect(driver)
    for number in range(1, 8):
        driver.now += 0.01
        driver.live(number, run=1)
    if silent:
        wait_for_silence(driver)
        wait_for_request(driver)
    serve(driver, range(8), run=1)
    assert parsed(driver.runs[0]) == [(number, 0) for number in range(4)]
    assert parsed(driver.runs[1]) == [(number, 1) for number in range(8)]
    assert driver.counted() == {"resets": 1} | ({"lost": 1} if silent else {"recovered": 1})


@pytest.mark.parametrize("unheard", [1, 4, 5, 7])
def test_another_life_that_has_sent_less_than_came_before_the_first_batch(unheard: int) -> None:
    driver = Driver(replay=True)
    driver.stream.connected(driver.now)
    driver.live(5, 6, 7, 8)
    wait_for_silence(driver)
    reconnect(driver)
    serve(driver, range(unheard), run=1)
    assert [parsed(run) for run in driver.runs] == [
        [(number, 0) for number in range(5, 9)],
        [(number, 1) for number in range(unheard)],
    ]
    assert driver.counts.resets.value == 1
    assert driver.counts.lost.value == 0
