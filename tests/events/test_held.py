"""Batches that wait for those before them."""

from __future__ import annotations

from kvcache_otel.events.held import Held


def test_what_came_at_a_time_is_taken_out_by_number() -> None:
    held = Held()
    for number, came in ((7, 1.0), (3, 2.0), (9, 3.0), (5, 4.0)):
        held.put(number, b"x" * number, came)
    assert held.drop(2.0, 4.0) == [(3, b"xxx", 2.0), (9, b"x" * 9, 3.0)]
    assert (len(held), held.size, held.first, held.last, held.since) == (2, 12, 5, 7, 4.0)
    assert [held.pop(), held.pop()] == [b"x" * 5, b"x" * 7]


def test_all_are_taken_out() -> None:
    held = Held()
    held.put(4, b"abc", 1.0)
    assert held.drop(float("-inf")) == [(4, b"abc", 1.0)]
    assert (len(held), held.size, held.since, held.get(4)) == (0, 0, None, None)
    held.put(2, b"", 2.0)
    assert (held.first, held.last) == (2, 2)
