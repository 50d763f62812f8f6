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
    "removal as an array, with a group": removed_array([1], "GPU", 0),
    "removal as an array, without a group": removed_array([1], "GPU", None),
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
    "removal as an array, with a reason": removed_array([1], "GPU", "evicted"),
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


# What releases have written, batch by batch: whole envelopes, and the fields in the order and number that they had.
# None is where two engines have written the same: then copies count, which can be forgotten later and not be made up.
OLD_ARRAY = ["BlockStored", [1, 2], None, [1] * 32, 16, None]
FORMS: dict[str, tuple[Any, str | None]] = {
    "vllm, first releases": ([1.5, [OLD_ARRAY]], None),
    "vllm, with ranks": ([1.5, [OLD_ARRAY], None], None),
    "vllm, with ranks, hashes without a sign": ([1.5, [["BlockStored", [2**64 - 1], 2**63, [1], 1, None]], 0], "vllm"),
    "vllm, with a medium": ([1.5, [[*OLD_ARRAY, "GPU"]], 0], None),
    "vllm, offloading": ([1.5, [["BlockStored", [1], None, [], 0, None, "CPU"]], 0], "vllm"),
    "vllm, with lora_name": ([1.5, [[*OLD_ARRAY, "GPU", None]], 0], "vllm"),
    "vllm, with a lora": ([1.5, [[*OLD_ARRAY, "GPU", "sql"]], 0], "vllm"),
    "vllm, with extra_keys": ([1.5, [[*OLD_ARRAY, "GPU", None, [None, ["m", 0]]]], 0], "vllm"),
    "vllm, with group_idx": ([1.5, [[*OLD_ARRAY, "GPU", None, None, 1]], 0], "vllm"),
    "vllm, with kinds": ([1.5, [[*OLD_ARRAY, "GPU", None, None, 1, "sliding_window", 128]], 0], "vllm"),
    "vllm, removed": ([1.5, [["BlockRemoved", [1], "GPU"]], 0], None),
    "vllm, removed from a group": ([1.5, [["BlockRemoved", [1], "GPU", 0, "full_attention", None]], 0], "vllm"),
    "vllm, bytes": ([1.5, [["BlockRemoved", [bytes(32)]]]], "vllm"),
    "vllm, a map around maps": (
        {"ts": 1.5, "events": [{"type": "AllBlocksCleared"}], "data_parallel_rank": 0},
        "vllm",
    ),
    "vllm, a map around arrays": ({"ts": 1.5, "events": [OLD_ARRAY], "data_parallel_rank": None}, "vllm"),
    "vllm, maps": ([1.5, [stored([1])], 0], "vllm"),
    "vllm, maps with a lora": ([1.5, [stored([1], lora_name="sql", extra_keys=[["sql"]])], 0], "vllm"),
    "vllm, maps with locality": ([1.5, [stored([1], "FS", locality="REMOTE")], 0], "vllm"),
    "vllm, maps, removed": ([1.5, [removed([1], "CPU")], 0], "vllm"),
    "sglang, first releases": ([1.5, [OLD_ARRAY], None], None),
    "sglang, first releases, signed": ([1.5, [["BlockStored", [-2], None, [[1, 2]], 1, None]], None], "sglang"),
    "sglang, with a medium": ([1.5, [[*OLD_ARRAY, "GPU"]], 0], None),
    "sglang, with a medium, signed": ([1.5, [["BlockStored", [-2], -1, [1], 1, None, "GPU"]], 0], "sglang"),
    "sglang, host": ([1.5, [[*OLD_ARRAY, "CPU_PINNED"]], 0], "sglang"),
    "sglang, host, first proposal": ([1.5, [[*OLD_ARRAY, "CPU_TIER1"]], 0], "sglang"),
    "sglang, storage": ([1.5, [["BlockRemoved", [1], "DISK"]], 0], "sglang"),
    "sglang, far storage": ([1.5, [["BlockRemoved", [1], "EXTERNAL"]], 0], "sglang"),
    "sglang, salted": ([1.5, [[*OLD_ARRAY, "GPU", {"cache_salt": "s", "session_id": "x"}]], 0], "sglang"),
    "sglang, removed": ([1.5, [["BlockRemoved", [1], "GPU"]], 0], None),
    "sglang, removed, no medium": ([1.5, [["BlockRemoved", [1], None]], 0], None),
    "sglang, maps": ([1.5, [BARE], 0], "sglang"),
    "sglang, maps, salted": ([1.5, [BARE | {"cache_salt": "s", "session_id": "x"}], 0], "sglang"),
    "sglang, maps for dynamo": ([1.5, [BARE | {"lora_name": "sql"}], 0], None),
    "sglang, maps for dynamo, signed": ([1.5, [stored([-1], lora_name="sql")], 0], "sglang"),
    "sglang, maps, host": ([1.5, [BARE | {"medium": "CPU_PINNED", "lora_name": "sql"}], 0], "sglang"),
    "sglang, its name for the rank": ({"ts": 1.5, "events": [OLD_ARRAY], "attn_dp_rank": 0}, "sglang"),
    "cleared": ([1.5, [["AllBlocksCleared"]], 0], None),
    "cleared, a map": ([1.5, [CLEARED], None], None),
    "another's, hidden in a shared store": ([1.5, [["BlockStored", [1], 0, [], 0, None, "SHARED_STORAGE"]]], None),
    "another's, with an offset": ([1.5, [[*OLD_ARRAY, "GPU", 7]], 0], None),
}


@pytest.mark.parametrize(("payload", "engine"), FORMS.values(), ids=FORMS)
def test_what_releases_have_written(payload: Any, engine: str | None) -> None:
    batch = decode(encode(payload))
    assert not batch.failures
    guess = EngineGuess()
    guess.see(batch)
    assert guess.engine == engine


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
