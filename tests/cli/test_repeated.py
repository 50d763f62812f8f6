"""Of lines in the same words the log has the first, and how many more; of others it has all."""

from __future__ import annotations

import logging

import pytest

from kvcache_otel.cli.repeated import FIRST, SECONDS, Repeated

REACHED, RELEASED = "kvcache: source %r cannot be reached", "kvcache: worker %r released, with %d blocks"


class Told:
    def __init__(self) -> None:
        self.now = 0.0
        self.records: list[logging.LogRecord] = []
        self.repeated = Repeated(self.records.append, lambda: self.now)

    def line(self, words: str, *arguments: object) -> None:
        self.repeated.line(logging.LogRecord("log", logging.WARNING, "", 0, words, arguments, None))

    def taken(self) -> list[str]:
        said = [record.getMessage() for record in self.records]
        assert {record.levelno for record in self.records} <= {logging.WARNING}
        self.records.clear()
        return said


@pytest.mark.parametrize("lines", [0, 1, FIRST, FIRST + 1, 4096])
def test_the_first_and_how_many_more(lines: int) -> None:
    told = Told()
    for _ in range(2):  # It begins anew.
        for number in range(lines):
            told.line(REACHED, f"s{number}")
        assert told.taken() == [REACHED % f"s{number}" for number in range(min(lines, FIRST))]
        told.repeated.settle()
        assert told.taken() == []
        told.now += SECONDS
        told.repeated.settle()
        more = f"kvcache: {lines - FIRST} more lines like this: source 's{lines - 1}' cannot be reached"
        assert told.taken() == ([more] if lines > FIRST else [])


def test_other_words_are_others_and_what_is_not_about_a_source_is_said_each_time() -> None:
    told = Told()
    for number in range(FIRST + 1):
        told.line(REACHED, f"s{number}")
        told.line(RELEASED, f"s{number}", 7)
        told.line("kvcache: %s", number)
    said = told.taken()
    assert len(said) == FIRST + FIRST + FIRST + 1
    assert said.count("kvcache: 7") == 1
    told.repeated.settle(at_once=True)
    assert told.taken() == [
        f"kvcache: 1 more lines like this: source 's{FIRST}' cannot be reached",
        f"kvcache: 1 more lines like this: worker 's{FIRST}' released, with 7 blocks",
    ]


def test_what_is_kept_back_comes_before_the_next_line() -> None:
    told = Told()
    for number in range(FIRST + 3):
        told.line(REACHED, f"s{number}")
    told.taken()
    told.now += SECONDS
    told.line("kvcache: other")
    assert [line.rpartition("kvcache: ")[2] for line in told.taken()] == [
        f"3 more lines like this: source 's{FIRST + 2}' cannot be reached",
        "other",
    ]
