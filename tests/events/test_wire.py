"""Whatever form a payload has is read; one bad event loses only itself; nothing else is raised, or fills the memory."""

from __future__ import annotations

import random
import sys
import tracemalloc
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache_otel import semconv
from kvcache_otel.events import forms, wire
from kvcache_otel.events.wire import LARGEST, Batch, PayloadDecoder, WireError, decode
from tests.events.payloads import CLEARED, batch, encode, removed, removed_array, stored, stored_array

if TYPE_CHECKING:
    from collections.abc import Callable

REASONS = semconv.EVENT_DECODE_FAILURES.values[semconv.KVCACHE_REASON]
BIG = 2**63 + 5
BYTES = bytes(range(32))

Told = list[tuple[str, Any, list[int]]]


def told(read: Batch) -> Told:
    return [(event.kind, event.medium, list(event.block_hashes)) for event in read.events]


def reason(payload: Any) -> str:
    with pytest.raises(WireError) as caught:
        decode(payload)
    assert caught.value.reason in REASONS
    return caught.value.reason


# -------------------------------------------------------------------------------------------------- known forms

ENVELOPES: dict[str, Callable[[list[Any]], Any]] = {
    "array": lambda events: [1.5, events, 3],
    "array with more": lambda events: [1.5, events, 3, "more", {"of": "it"}],
    "vLLM map": lambda events: {"ts": 1.5, "events": events, "data_parallel_rank": 3},
    "SGLang map": lambda events: {"ts": 1.5, "events": events, "attn_dp_rank": 3, "more": [1]},
    "map in another order": lambda events: {"dp_rank": 3, "events": events, "ts": 1.5},
}
EVENTS: dict[str, list[Any]] = {
    "maps": [stored([1, 2]), removed([1], "CPU"), CLEARED],
    "maps with more": [
        stored([1, 2], extra_keys=[None, ["x"]], group_idx=0, kv_cache_spec_kind="mamba", locality="LOCAL", new=[{}]),
        removed([1], "CPU", group_idx=0, new={}),
        CLEARED | {"new": 1},
    ],
    "arrays": [stored_array([1, 2]), removed_array([1], "CPU"), ["AllBlocksCleared"]],
    "arrays with more": [
        stored_array([1, 2], "GPU", None, [None, ["x", ["y", 1]]], 0, "full_attention", 128, 7),
        removed_array([1], "CPU", 0, "full_attention", 128),
        ["AllBlocksCleared", None],
    ],
    "metadata": [
        stored_array([1, 2], "GPU", {"cache_salt": "s"}),
        removed_array([1], "CPU"),
        ["AllBlocksCleared"],
    ],
    "mixed": [stored_array([1, 2]), removed([1], "CPU"), ["AllBlocksCleared"]],
    "mixed the other way": [stored([1, 2]), removed_array([1], "CPU"), CLEARED],
}


@pytest.mark.parametrize("envelope", ENVELOPES)
@pytest.mark.parametrize("events", EVENTS)
def test_e11_arrays_and_maps_and_both(envelope: str, events: str) -> None:
    decoder = PayloadDecoder()
    payload = encode(ENVELOPES[envelope](EVENTS[events]))
    for form in (payload, bytearray(payload), memoryview(payload)):
        read = decoder.decode(form)
        assert told(read) == [
            ("block_stored", "GPU", [1, 2]),
            ("block_removed", "CPU", [1]),
            ("all_blocks_cleared", None, []),
        ]
        assert (read.timestamp, read.rank, read.failures) == (1.5, 3, {})
        assert [event.block_size for event in read.events] == [16, None, None]


@pytest.mark.parametrize("first", EVENTS)
@pytest.mark.parametrize("second", EVENTS)
def test_source_may_change_its_form(first: str, second: str) -> None:
    decoder = PayloadDecoder()
    for name in (first, second, first):
        assert told(decoder.decode(batch(*EVENTS[name]))) == told(decode(batch(*EVENTS[first])))


def test_engine_that_the_envelope_tells() -> None:
    engines = {name: decode(encode(make([stored([1])]))).engine for name, make in ENVELOPES.items()}
    assert engines == {
        "array": None,
        "array with more": None,
        "vLLM map": "vllm",
        "SGLang map": "sglang",
        "map in another order": None,
    }


@pytest.mark.parametrize("envelope", [lambda events: [1, events], lambda events: {"events": events}])
def test_batch_without_a_rank(envelope: Callable[[Any], Any]) -> None:
    assert decode(encode(envelope([stored([1])]))).rank is None
    read = decode(encode(envelope([stored([1]), None])))
    assert (read.rank, told(read)) == (None, [("block_stored", "GPU", [1])])


@pytest.mark.parametrize("ts", [None, float("nan"), float("inf"), "now", [1], {}])
def test_batch_whose_time_is_none(ts: Any) -> None:
    read = decode(encode([ts, [stored([1])], 0]))
    assert (read.timestamp, told(read)) == (None, [("block_stored", "GPU", [1])])


@pytest.mark.parametrize("length", range(2, 8))
def test_short_arrays_and_what_they_leave_out(length: int) -> None:
    read = decode(batch(stored_array([1, 2])[:length], removed_array([1])[:2]))
    medium = "GPU" if length == 7 else None
    assert told(read) == [("block_stored", medium, [1, 2]), ("block_removed", None, [1])]
    assert read.events[0].block_size == (16 if length > 4 else None)


def test_short_maps() -> None:
    read = decode(batch({"type": "BlockStored", "block_hashes": [1]}, {"block_hashes": [1], "type": "BlockRemoved"}))
    assert told(read) == [("block_stored", None, [1]), ("block_removed", None, [1])]


@pytest.mark.parametrize(
    "event",
    [
        {"type": "TierBlocksCleared", "medium": "CPU", "block_hashes": [1]},
        {"type": "", "medium": "CPU"},
        {"type": "blockstored", "medium": "CPU", "block_hashes": "x"},
    ],
)
def test_type_that_is_not_known(event: Any) -> None:
    assert told(decode(batch(event, stored([1])))) == [("other", "CPU", []), ("block_stored", "GPU", [1])]


def test_type_that_is_not_known_in_an_array() -> None:
    assert told(decode(batch(["TierBlocksCleared", "CPU"], ["x" * 10_000]))) == [("other", None, [])] * 2


@pytest.mark.parametrize("tokens", [[], [[1, 2], [3, 4]], ["a", None, {}], 7, {"a": 1}, None])
def test_token_ids_of_any_form(tokens: Any) -> None:
    event = stored([1], token_ids=tokens)
    array = stored_array([1])
    array[3] = tokens
    assert told(decode(batch(event))) == told(decode(batch(array))) == [("block_stored", "GPU", [1])]


@pytest.mark.parametrize("make", [stored, stored_array])
def test_token_ids_are_never_built(make: Callable[..., Any]) -> None:
    payload = batch(make([1], size=1_000_000))
    decode(payload)
    tracemalloc.start()
    decode(payload)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20_000


@pytest.mark.parametrize("size", [0, 1, 16, 2**40, -1, None])
def test_block_size(size: Any) -> None:
    assert decode(batch(stored([1], block_size=size))).events[0].block_size == size


# ------------------------------------------------------------------------------------------------------- hashes

DISTINCT = (
    *(0, 1, 255, 256, 257, -1, -2, -(2**63), 2**63 - 1, 2**63, BIG, 2**64 - 1),
    *(bytes(length) for length in range(1, 65)),
    *(bytes(length - 1) + b"\x01" for length in range(1, 65)),
    *(b"\x01" + bytes(length - 1) for length in range(2, 65)),
    BYTES,
)


@pytest.mark.parametrize("make", [stored, stored_array])
def test_e15_each_hash_is_one_identity(make: Callable[..., Any]) -> None:
    """Alone, so that a batch is read in one go, and all together, so that it cannot be."""
    alone = [decode(batch(make([block]))).events[0].block_hashes[0] for block in DISTINCT]
    together = decode(batch(make(DISTINCT))).events[0].block_hashes
    assert list(together) == alone
    assert len(set(alone)) == len(DISTINCT)
    assert all(block == alone[place] for place, block in enumerate(DISTINCT) if isinstance(block, int))
    assert {type(block) for block in alone} == {int}


def test_e15_negative_and_unsigned_of_the_same_bits_are_two() -> None:
    (event,) = decode(batch(stored([-1, 2**64 - 1]))).events
    assert list(event.block_hashes) == [-1, 2**64 - 1]


# ---------------------------------------------------------------------------------------------------- bad events

SHAPES: tuple[Any, ...] = (
    stored([1], {"a": 1}),
    stored_array([1], {"a": 1}),
    removed([1], {"a": 1}),
    removed_array([1], {"a": 1}),
    stored([1], lora_name={"a": 1}),
    stored([1]) | {"type": {"a": 1}},
    [{"a": 1}, [1]],
    stored([1], 7),
    stored([1], block_size="16"),
    [*stored_array([1])[:4], 1.5],
    {"type": "BlockStored"},
    {"type": "BlockRemoved", "block_hashes": None},
    {"type": "BlockRemoved", "block_hashes": {}},
    {"block_hashes": [1]},
    {1: 2},
    {"type": None, "block_hashes": [1]},
    {"type": "Tier", "medium": {}},
    {"event_id": 1, "data": {"type": "stored"}},
    ["BlockStored"],
    ["BlockRemoved", 7],
    [],
    {},
    [[]],
    None,
    7,
    1.5,
    True,
    "BlockStored",
    b"BlockStored",
)


@pytest.mark.parametrize("bad", SHAPES)
@pytest.mark.parametrize("good", [stored([2]), stored_array([2])])
def test_e10_bad_event_loses_only_itself(bad: Any, good: Any) -> None:
    for events in ([good, bad], [bad, good]):
        read = decode(batch(*events))
        assert told(read) == [("block_stored", "GPU", [2])]
        assert read.failures == {"event_shape": 1}


NO_HASHES: tuple[Any, ...] = (None, True, 1.0, 0.5, "ab", "a" * 64, b"", bytes(65), [1], {}, {"a": 1})


@pytest.mark.parametrize("bad", NO_HASHES)
@pytest.mark.parametrize("make", [stored, stored_array, removed, removed_array])
def test_hash_of_no_form_that_is_known(bad: Any, make: Callable[..., Any]) -> None:
    read = decode(batch(make([1, bad, 2]), stored([3]), make([bad])))
    assert told(read) == [("block_stored", "GPU", [3])]
    assert read.failures == {"block_hash": 2}


def test_extension_is_no_hash() -> None:
    ext = b"\xd4\x01\x00"
    payload = batch(removed_array([7]), None).replace(b"\x91\x07", b"\x91" + ext)
    assert decode(payload).failures == {"block_hash": 1, "event_shape": 1}


def test_text_that_is_none_loses_only_its_event() -> None:
    payload = batch(stored([1], "XXXX"), stored([2])).replace(b"XXXX", b"\xff\xfe\xff\xfe")
    read = decode(payload)
    assert told(read) == [("block_stored", "GPU", [2])]
    assert read.failures == {"event_shape": 1}


@settings(deadline=None)
@given(st.lists(st.sampled_from([*EVENTS["maps with more"], *EVENTS["arrays with more"], stored([BYTES])])))
def test_taken_apart_is_the_same_as_read_in_one_go(events: list[Any]) -> None:
    alone = [decode(batch(event)) for event in events]
    together = decode(batch(*events, None))
    assert told(together) == [line for read in alone for line in told(read)]
    assert together.failures == {"event_shape": 1}


# -------------------------------------------------------------------------------------------------- bad payloads


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        (b"", "msgpack"),
        (b"\xc1", "msgpack"),
        (b"\x93", "msgpack"),
        (batch(stored([1]))[:-1], "msgpack"),
        (batch(stored([1])) + b"\x00", "msgpack"),
        (b"\xdd\xff\xff\xff\xff", "msgpack"),
        (b"\xdf\xff\xff\xff\xff", "msgpack"),
        (b"\x93\xc0\xdd\xff\xff\xff\xff", "msgpack"),
        (b"\x93\xc0\x91\x92\xabBlockStored\xdd\xff\xff\xff\xff", "msgpack"),
        (b"\xc6\xff\xff\xff\xff", "msgpack"),
        (encode(None), "batch_shape"),
        (encode(7), "batch_shape"),
        (encode("x" * 50), "batch_shape"),
        (encode([]), "batch_shape"),
        (encode([1.0]), "batch_shape"),
        (encode([1.0, None, 0]), "batch_shape"),
        (encode([1.0, {"type": "BlockStored"}, 0]), "batch_shape"),
        (encode([1.0, "events", 0]), "batch_shape"),
        (encode({}), "batch_shape"),
        (encode({"ts": 1.0}), "batch_shape"),
        (encode({1: 2}), "batch_shape"),
        (encode({"ts": 1.0, "events": 7}), "batch_shape"),
        *((encode([1.0, [], rank]), "batch_shape") for rank in ("0", True, 1.5, -1, 2**31, 2**64 - 1, [0], {})),
        (encode({"events": [], "attn_dp_rank": "0"}), "batch_shape"),
    ],
)
def test_payload_of_which_nothing_can_be_read(payload: bytes, expected: str) -> None:
    assert reason(payload) == expected


@pytest.mark.parametrize("payload", [None, 7, "text", [1], object(), memoryview(b"\x93\x01\x90\xc0")[::2]])
def test_what_are_no_bytes(payload: Any) -> None:
    assert reason(payload) == "other"


def traced(call: Callable[[], object]) -> int:
    tracemalloc.start()
    call()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


def test_message_of_100_megabytes_is_not_looked_into() -> None:
    payload = encode([1.0, [stored([1])], 0]) + bytes(100_000_000)
    assert traced(lambda: reason(payload)) < 1_000_000
    assert reason(bytes(LARGEST + 1)) == "other"
    assert reason(bytes(LARGEST)) != "other"


NESTED = 1_000_000


@pytest.mark.parametrize(
    "payload",
    [
        b"\x92" * NESTED,
        b"\x92" * NESTED + b"\xc0" * (NESTED + 1),
        b"\x81\xa1a" * NESTED + b"\xc0",
        b"\x93\xc0\x91" + b"\x91" * NESTED + b"\xc0\xc0",
        b"\x93\xc0\x91\x94\xabBlockStored\x91\x01\xc0" + b"\x91" * NESTED + b"\xc0\xc0",
        b"\x82\xa6events\x90\xa1x" + b"\x91" * NESTED + b"\xc0",
    ],
)
def test_deep_nesting(payload: bytes) -> None:
    assert reason(payload) == "other"


@pytest.mark.parametrize("byte", [b"\xc0", b"\x80", b"\x90", b"\x01", b"\xa0"])
def test_flood_of_events_that_are_none(byte: bytes) -> None:
    payload = b"\x93\xc0\xdd" + (LARGEST - 100).to_bytes(4, "big") + byte * (LARGEST - 100) + b"\xc0"
    assert traced(lambda: reason(payload)) < 1_000_000
    assert reason(payload) == "batch_shape"


def test_flood_within_one_event() -> None:
    wide = b"\xdd" + (LARGEST - 100).to_bytes(4, "big") + b"\xc0" * (LARGEST - 100)
    payload = b"\x93\xc0\x91" + wide + b"\xc0"
    assert traced(lambda: decode(payload)) < 1_000_000
    assert decode(payload).failures == {"event_shape": 1}


def test_most_events_are_the_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MOST_EVENTS", 20)
    assert decode(batch(*[None] * 20)).failures == {"event_shape": 20}
    assert reason(batch(*[None] * 21)) == "batch_shape"


# ------------------------------------------------------------------------------------------------------- fuzzers


def survives(decoder: PayloadDecoder, payload: bytes) -> None:
    try:
        read = decoder.decode(payload)
    except WireError as error:
        assert error.reason in REASONS  # noqa: PT017 # Where there is one.
        return
    assert read.failures.keys() <= REASONS
    assert all(times > 0 for times in read.failures.values())
    assert read.rank is None or 0 <= read.rank < 2**31
    for event in read.events:
        assert event.kind in (semconv.ATTRIBUTES[semconv.KVCACHE_EVENT_TYPE].members or ())
        assert event.medium is None or isinstance(event.medium, str)
        assert all(type(block) is int for block in event.block_hashes)


leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(max_size=6),
    st.binary(max_size=70),
    st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "GPU", "CPU_PINNED", BYTES]),
)
names = st.one_of(st.sampled_from([*stored([]), "events", "ts", "attn_dp_rank", "data_parallel_rank"]), st.text())
things = st.recursive(
    leaves,
    lambda inner: st.one_of(st.lists(inner, max_size=8), st.dictionaries(names, inner, max_size=8)),
    max_leaves=20,
)
events = st.one_of(
    things,
    st.builds(lambda *parts: ["BlockStored", *parts], st.lists(leaves, max_size=4), things, things, things, things),
    st.builds(lambda more: stored([1]) | more, st.dictionaries(names, things, max_size=4)),
    st.builds(lambda more: removed([1]) | more, st.dictionaries(names, things, max_size=4)),
    st.lists(leaves, max_size=4).map(lambda hashes: removed_array(hashes)),
)
payloads = st.one_of(
    st.binary(),
    things.map(encode),
    st.tuples(leaves, st.lists(events, max_size=6), leaves).map(encode),
    st.builds(lambda read, more: encode({"events": read} | more), st.lists(events), st.dictionaries(names, things)),
)


@settings(deadline=None)
@given(st.lists(payloads, max_size=4))
def test_nothing_raises_out_of_the_decoder(fuzzed: list[bytes]) -> None:
    decoder = PayloadDecoder()
    for payload in fuzzed:
        survives(decoder, payload)


SEEDS = [encode(make(events)) for make in ENVELOPES.values() for events in EVENTS.values()]
SEEDS += [batch(stored([BYTES, bytes(8)]), removed([BYTES])), batch(stored_array(list(range(20)), "CPU"))]
MARKS = (
    0x80,
    0x8F,
    0x90,
    0x9F,
    0xA0,
    0xC0,
    0xC1,
    0xC4,
    0xC7,
    0xCA,
    0xCB,
    0xCF,
    0xD3,
    0xD4,
    0xD9,
    0xDC,
    0xDD,
    0xDF,
    0xFF,
)


def mutated(draw: random.Random) -> bytes:
    payload = bytearray(draw.choice(SEEDS))
    for _ in range(draw.randint(1, 4)):
        place = draw.randrange(len(payload) + 1)
        match draw.randrange(6):
            case 0:
                payload[place : place + 1] = bytes([draw.choice(MARKS)])
            case 1:
                payload[place : place + 1] = draw.randbytes(1)
            case 2:
                del payload[place : place + draw.randint(1, 12)]
            case 3:
                payload[place:place] = draw.randbytes(draw.randint(1, 12))
            case 4:
                other = draw.choice(SEEDS)
                payload[place : place + 20] = other[place : place + draw.randrange(40)]
            case _:
                payload[place:place] = bytes([draw.choice(MARKS)]) * draw.randint(1, 5)
    return bytes(payload)


@pytest.mark.parametrize("seed", range(8))
def test_nothing_raises_out_of_the_decoder_whatever_the_bytes(seed: int) -> None:
    draw, decoder = random.Random(seed), PayloadDecoder()
    for _ in range(4_000):
        survives(decoder, mutated(draw))


@pytest.mark.parametrize("hashes", [[7, 2**64 - 1, -3], [BYTES, bytes(32)]], ids=["ints", "bytes"])
@pytest.mark.parametrize("broken", [False, True], ids=["whole", "taken apart"])
def test_blocks_of_another_group_are_others(hashes: list[Any], broken: bool) -> None:
    """Under the same hash each group of layers has a block of its own. Group 0 is what names none."""
    more = [["NoEvent"]] if broken else []
    kinds = [stored(hashes), *(stored(hashes, group_idx=group) for group in (None, 0, 1, 2, 127)), *more]
    events = decode(encode([1.0, kinds, 0])).events
    plain, nil, zero, *others = (tuple(event.block_hashes) for event in events[:6])
    assert plain == nil == zero
    found = [block for group in (plain, *others) for block in group]
    assert len(set(found)) == len(found) == 4 * len(hashes)
    (event,) = decode(encode([1.0, [removed(hashes, group_idx=2)], 0])).events
    assert tuple(event.block_hashes) == others[1]


@pytest.mark.parametrize("first", [0, 10])
def test_a_batch_of_nothing_but_bad_events_is_given_up(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left of it counts as what was wrong with the last that was looked at."""
    looked: list[Any] = []
    event = wire._event
    monkeypatch.setattr(wire, "_event", lambda part: (looked.append(part), event(part))[1])
    good = [stored([number]) for number in range(first)]
    read = decode(encode([1.0, [*good, *([[1, 2, 3]] * 5000)], 0]))
    assert len(read.events) == first
    assert read.failures == {"event_shape": 5000}
    assert len(looked) <= first + wire.MOST_FAILURES + 1


def test_a_hash_too_many() -> None:
    hashes = [1] * (forms.MOST_HASHES + 1)
    assert decode(encode([1.0, [stored(hashes[1:])], 0])).failures == {}
    assert decode(encode([1.0, [stored(hashes)], 0])).failures == {"block_hash": 1}


def test_no_hashes_can_be_chosen_that_end_up_in_one_place() -> None:
    """Ints that differ by multiples of the number that Python takes them by have the same hash."""
    count = 4000
    chosen = [(number * sys.hash_info.modulus).to_bytes(32, "big") for number in range(1, count + 1)]
    (event,) = decode(batch(stored(chosen))).events
    assert len({hash(block) for block in event.block_hashes}) == count


def test_no_ints_of_many_groups_can_be_chosen_that_end_up_in_one_place() -> None:
    """A few ints of 64 bits have one hash; with their groups added, they would have been a thousand."""
    modulus, groups = sys.hash_info.modulus, range(1, 128)
    chosen = {group: (7 - group - (1 << 80)) * pow(256, -1, modulus) % modulus for group in groups}
    each = 7  # There are more: as many multiples of the modulus as fit.
    events = [
        stored([first + number * modulus for number in range(each)], group_idx=group) for group, first in chosen.items()
    ]
    blocks = [block for event in decode(batch(*events)).events for block in event.block_hashes]
    hashes = Counter(map(hash, blocks))
    assert len(set(blocks)) == len(groups) * each
    assert max(hashes.values()) <= 2 * each
