"""`make demo-vllm`: the real engine under its workload, and the table that is made of one scrape."""

from __future__ import annotations

import re
import sys

import pytest

from tests.conftest import require

require("vllm")

from examples.vllm_cpu.__main__ import TURN_TOKENS  # noqa: E402
from examples.vllm_cpu.tiny_model import BLOCK_TOKENS  # noqa: E402

from tests.engines.vllm.programs import run  # noqa: E402

pytestmark = pytest.mark.engine

USERS, TURNS = 6, 3


def test_the_demo_shows_where_every_prompt_token_came_from() -> None:
    ended = run(
        [sys.executable, "-m", "examples.vllm_cpu", "--users", str(USERS), "--turns", str(TURNS)],
        {"OTEL_EXPORTER_PROMETHEUS_PORT": "0"},
        timeout_s=300,
    )
    assert ended.status == 0, ended.err[-4000:]
    served = {
        tier: int(tokens.replace(" ", ""))
        for tier, tokens in re.findall(
            r"^(device|host|disk|none: computed) +([\d ]*\d)  +\d+%$", ended.out, re.MULTILINE
        )
    }
    # Each turn's prompts, the last of them again, and two short ones while transfers end.
    prompts = sum((USERS + 1) * (turn * TURN_TOKENS + 5) + 2 * (BLOCK_TOKENS // 4) for turn in range(1, TURNS + 1))
    assert sum(served.values()) == prompts
    assert min(served.values()) > 0
    # What vLLM itself said of each prompt: the tiers have at least that.
    said = re.findall(r"^demo: turn \d, user \d: (\d+) of \d+ tokens from a cache$", ended.err, re.MULTILINE)
    assert len(said) == USERS * TURNS
    assert prompts - served["none: computed"] > sum(map(int, said)) > 0
    moved = re.findall(r"^(\w+ -> \w+) +(\d+) +[\d.]+ MB +\d+ [um]s +\d+ [um]s +\d+ MB/s$", ended.out, re.MULTILINE)
    assert {route for route, count in moved if int(count)} == {
        "device -> host",
        "host -> device",
        "host -> disk",
        "disk -> host",
    }
    assert re.search(r"^failed transfers +0  transfers$", ended.out, re.MULTILINE)
