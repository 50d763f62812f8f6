"""Of many lines about the same, few are said, and then how many more there are."""

from __future__ import annotations

import logging

import pytest

from kvcache_otel.events.few import FEW, Few


@pytest.mark.parametrize(
    ("lines", "more"), [(0, []), (1, []), (FEW, []), (FEW + 1, ["1 more"]), (10_000, ["9990 more"])]
)
def test_the_first_few_and_how_many_more(caplog: pytest.LogCaptureFixture, lines: int, more: list[str]) -> None:
    few = Few(logging.getLogger("few"), logging.ERROR, "%d more")
    for _ in range(2):  # It begins anew.
        caplog.clear()
        for number in range(lines):
            few.say("line %d", number)
        few.end()
        assert caplog.messages == [*(f"line {number}" for number in range(min(lines, FEW))), *more]
        assert {record.levelno for record in caplog.records} <= {logging.ERROR}
