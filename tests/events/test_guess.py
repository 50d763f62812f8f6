"""Engines are told apart by what only one of them writes."""

from __future__ import annotations

from typing import Any

import pytest

from kvcache_otel.events.guess import EngineGuess
from kvcache_otel.events.wire import decode
from tests.events.payloads import CLEARED, batch, encode, removed, removed_array, stored, stored_array


def without(event: dict[str, Any], *names: str, **more: Any) -> dict[str, Any]:
    return {name: value for name, value in event.items() if name not in names} | more


BARE = without(stored([1]), "lora_name")

VLLM: dict[str, Any] = {
    "lora_name nil": stored([1]),
    "group_idx": BARE | {"group_idx": 0},
    "kind": BARE | {"kv_cache_spec_kind": "mamba"},
    "locality": BARE | {"locality": None},
    "extra_keys": BARE | {"extra_keys": None},
    "group of a removal": removed([1], group_idx=0),
    "unsigned hash": removed([1, 2**63]),
    "bytes": removed([bytes(32)]),
    "medium": removed_array([1], "CPU"),
    "storage": removed_array([1], "FS"),
    "array with lora_name": stored_array([1], "GPU", None),
    "array with a name": stored_array([1], "GPU", "adapter"),
    "array with more": stored_array([1], "GPU", None, None, 0),
}
SGLANG: dict[str, Any] = {
    "no lora_name": BARE,
    "cache_salt": stored([1], lora_name="adapter", cache_salt="s"),
    "negative hash": removed([1, -1]),
    "pinned": removed_array([1], "CPU_PINNED"),
    "metadata": stored_array([1], "GPU", {"cache_salt": "s"}),
}
NOTHING: dict[str, Any] = {
    "old array": stored_array([1]),
    "removal": removed([1]),
    "removal as an array": removed_array([1]),
    "cleared": CLEARED,
    "session": stored([1], lora_name="adapter", session_id="s"),
    "other": {"type": "TierBlocksCleared", "medium": "CPU"},
    "no hashes": removed_array([], None),
}
EXPECTED = [
    *((event, "vllm") for event in VLLM.values()),
    *((event, "sglang") for event in SGLANG.values()),
    *((event, None) for event in NOTHING.values()),
]


@pytest.mark.parametrize(("event", "engine"), EXPECTED, ids=[*VLLM, *SGLANG, *NOTHING])
def test_what_an_event_tells(event: Any, engine: str | None) -> None:
    for payload in (batch(event), batch(*NOTHING.values(), event)):
        guess = EngineGuess()
        assert guess.see(decode(payload)) == (engine is not None)
        assert guess.engine == engine
        assert bool(guess.why) == (engine is not None)


@pytest.mark.parametrize(("name", "engine"), [("data_parallel_rank", "vllm"), ("attn_dp_rank", "sglang")])
def test_what_an_envelope_tells(name: str, engine: str) -> None:
    for events in ([], [None]):
        guess = EngineGuess()
        guess.see(decode(encode({"ts": 1.0, "events": events, name: None})))
        assert guess.engine == engine


def test_guess_stays_where_it_has_settled() -> None:
    guess = EngineGuess()
    assert guess.see(decode(batch(VLLM["bytes"])))
    why = guess.why
    assert not guess.see(decode(batch(*SGLANG.values())))
    assert (guess.engine, guess.why) == ("vllm", why)
