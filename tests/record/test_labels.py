"""Closed label sets stay closed, open ones harmless, and hostile values fill neither the log nor the memory."""

from __future__ import annotations

import enum
import logging
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache_otel import semconv
from kvcache_otel.identity import Identity, Rank
from kvcache_otel.record import labels as labels_module
from kvcache_otel.record.labels import LONGEST, REMEMBERED, Labels
from kvcache_otel.record.recorder import Recorder

LOGGER = "kvcache_otel.record.labels"
TIER, REASON, POOL, NAME = semconv.KVCACHE_TIER, semconv.KVCACHE_REASON, semconv.KVCACHE_POOL, semconv.KVCACHE_TIER_NAME


@pytest.fixture
def labels() -> Labels:
    return Labels()


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger=LOGGER)
    return caplog


# -------------------------------------------------------------------------------------------- closed values


@pytest.mark.parametrize(
    ("spec", "key"),
    [(spec, key) for spec in semconv.METRICS.values() for key in spec.attributes],
    ids=lambda item: item if isinstance(item, str) else item.name,
)
def test_every_value_of_the_catalogue_is_left_as_it_is(
    labels: Labels, lines: pytest.LogCaptureFixture, spec: semconv.MetricSpec, key: str
) -> None:
    members = spec.values.get(key, semconv.ATTRIBUTES[key].members) or ()
    assert [labels.fold(spec, key, value) for value in sorted(members)] == sorted(members)
    assert lines.messages == []


@pytest.mark.parametrize(
    ("spec", "key", "fallback"),
    [
        (semconv.LOOKUP_TOKENS, TIER, "unknown"),
        (semconv.TRANSFER_IO, semconv.KVCACHE_SOURCE_TIER, "unknown"),
        (semconv.TRANSFER_IO, semconv.KVCACHE_DESTINATION_TIER, "unknown"),
        (semconv.EVICTION_TOKENS, POOL, "other"),
        (semconv.DROPPED_TOKENS, REASON, "other"),
        (semconv.EVENTS, semconv.KVCACHE_EVENT_TYPE, "other"),
        (semconv.EVENTS, semconv.KVCACHE_EVENT_MEDIUM, "unknown"),
    ],
    ids=lambda item: getattr(item, "name", item),
)
def test_what_is_not_in_the_set_becomes_its_fallback(
    labels: Labels, spec: semconv.MetricSpec, key: str, fallback: str
) -> None:
    assert labels.fold(spec, key, "cxl") == fallback


def test_reason_of_another_metric_is_not_this_ones(labels: Labels) -> None:
    assert labels.fold(semconv.PREFETCH_DEFERRED_TOKENS, REASON, semconv.Reason.DEADLINE) == "other"
    assert labels.fold(semconv.PREFETCH_UNFULFILLED_TOKENS, REASON, semconv.Reason.DEADLINE) == "deadline"


def test_none_is_a_tier_for_lookup_tokens_alone(labels: Labels) -> None:
    assert labels.fold(semconv.LOOKUP_TOKENS, TIER, "none") == "none"
    assert labels.fold(semconv.EVICTION_TOKENS, TIER, "none") == "unknown"


@pytest.mark.parametrize("value", ["DEVICE", " device", "device ", "", None, 3, b"device"])
def test_nearly_a_member_is_not_a_member(labels: Labels, value: object) -> None:
    assert labels.fold(semconv.EVICTION_TOKENS, TIER, value) == "unknown"


def test_an_engine_that_nobody_listed_is_somebodys_own(labels: Labels) -> None:
    assert labels.fold(semconv.USAGE, semconv.KVCACHE_ENGINE, "made up") == "custom"


@pytest.mark.parametrize(
    ("spec", "key"),
    [
        (semconv.USAGE, semconv.KVCACHE_STATE),
        (semconv.TRANSFER_IO, semconv.KVCACHE_TIMING_SOURCE),
        (semconv.LOOKUP_BLOCKS, semconv.KVCACHE_LOOKUP_RESULT),
        (semconv.RESIDENT_BLOCKS, semconv.KVCACHE_VIEW),
    ],
    ids=lambda item: getattr(item, "name", item),
)
def test_where_there_is_no_fallback_there_is_no_value(labels: Labels, spec: semconv.MetricSpec, key: str) -> None:
    assert labels.fold(spec, key, "made up") is None


def test_measurement_without_a_fallback_is_counted_as_dropped(identity: Identity) -> None:
    recorder = Recorder(identity)
    usage = {TIER: "device", POOL: "kv", semconv.KVCACHE_STATE: "reserved"}
    recorder.level(semconv.USAGE, usage).set(7)
    recorder.counter(semconv.LOOKUP_BLOCKS, {TIER: "host", semconv.KVCACHE_LOOKUP_RESULT: "maybe"}).add(5)
    assert list(recorder.points(semconv.USAGE)) == []
    assert list(recorder.points(semconv.LOOKUP_BLOCKS)) == []
    assert recorder.dropped(semconv.Reason.OTHER).value == 2


# ---------------------------------------------------------------------------------------- said, and remembered


def test_folded_value_is_said_once_with_what_became_of_it(labels: Labels, lines: pytest.LogCaptureFixture) -> None:
    for _ in range(100):
        labels.fold(semconv.EVICTION_TOKENS, TIER, "cxl")
        labels.fold(semconv.USAGE, TIER, "cxl")
    assert lines.messages == ["kvcache: kvcache.tier='cxl' is not in the catalogue; recorded as 'unknown'"]


def test_value_that_cannot_be_folded_is_said_to_be_left_out(labels: Labels, lines: pytest.LogCaptureFixture) -> None:
    labels.fold(semconv.USAGE, semconv.KVCACHE_STATE, "reserved")
    assert lines.messages == ["kvcache: kvcache.state='reserved' is not in the catalogue; not recorded"]


def test_each_value_of_each_attribute_is_said(labels: Labels, lines: pytest.LogCaptureFixture) -> None:
    labels.fold(semconv.EVICTION_TOKENS, TIER, "cxl")
    labels.fold(semconv.EVICTION_TOKENS, TIER, "nvme")
    labels.fold(semconv.EVICTION_TOKENS, POOL, "cxl")
    assert len(lines.messages) == 3


def test_thousand_hostile_values_fill_neither_the_log_nor_the_memory(
    labels: Labels, lines: pytest.LogCaptureFixture
) -> None:
    for number in range(1_000):
        assert labels.fold(semconv.EVICTION_TOKENS, TIER, f"{number}\n" + "x" * 100_000) == "unknown"
    remembered = labels._said
    assert len(remembered) == REMEMBERED == len(lines.messages)
    assert sum(sys.getsizeof(text) for pair in remembered for text in pair) < REMEMBERED * 1_000
    assert lines.messages[-1].endswith("(further unknown values are folded silently)")
    assert [message for message in lines.messages[:-1] if "silently" in message] == []


def test_hostile_value_takes_one_line_of_the_log(labels: Labels, lines: pytest.LogCaptureFixture) -> None:
    labels.fold(semconv.EVICTION_TOKENS, TIER, "a\nINFO forged\r\x1b[31m")
    (message,) = lines.messages
    assert message.isprintable()


# ------------------------------------------------------------------------------------------------ open values


@pytest.mark.parametrize("value", ["1:fs", "mooncake", "/mnt/nvme 0", "ディスク", "with\nnewline", 'quo"te\\'])
def test_open_value_is_left_as_it_is(labels: Labels, lines: pytest.LogCaptureFixture, value: str) -> None:
    assert labels.fold(semconv.LOOKUP_BLOCKS, NAME, value) == value
    assert lines.messages == []


@pytest.mark.parametrize("value", ["half \ud800 of a pair", "\udcff", "\udfff\ud800"])
def test_surrogates_become_text_that_every_exporter_can_encode(labels: Labels, value: str) -> None:
    folded = labels.fold(semconv.LOOKUP_BLOCKS, NAME, value)
    assert isinstance(folded, str)
    assert "?" in folded.encode().decode()


def test_ten_megabytes_of_name_are_cut(labels: Labels) -> None:
    assert labels.fold(semconv.LOOKUP_BLOCKS, NAME, "x" * 10_000_000) == "x" * LONGEST


@given(st.one_of(st.text(), st.text(alphabet=st.characters(categories=["Cs", "Cc", "Lo"]))))
def test_open_value_is_always_short_valid_utf_8(value: str) -> None:
    folded = Labels().fold(semconv.LOOKUP_BLOCKS, NAME, value)
    assert isinstance(folded, str)
    assert len(folded) <= LONGEST
    assert folded.encode().decode() == folded


class Storage:
    """An engine's own object where a name was expected."""

    def __str__(self) -> str:
        return "storage"


class Unspeakable:
    """An object that cannot even say its name."""

    def __str__(self) -> str:
        raise RuntimeError("no name")

    __repr__ = __str__


class Backend(str, enum.Enum):  # noqa: UP042 # As engines write it.
    FILE = "file"


@pytest.mark.parametrize(("value", "text"), [(Storage(), "storage"), (7, "7"), (None, "None"), (Backend.FILE, "file")])
def test_object_becomes_plain_text(labels: Labels, value: object, text: str) -> None:
    folded = labels.fold(semconv.LOOKUP_BLOCKS, NAME, value)
    assert (folded, type(folded)) == (text, str)


def test_object_without_words_becomes_its_class(labels: Labels) -> None:
    assert labels.fold(semconv.LOOKUP_BLOCKS, NAME, Unspeakable()) == "Unspeakable"
    assert labels.fold(semconv.EVICTION_TOKENS, TIER, Unspeakable()) == "unknown"


def test_error_type_stays_open(labels: Labels, lines: pytest.LogCaptureFixture) -> None:
    for value in ("TimeoutError", "HTTP 503", semconv.ErrorType.OTHER):
        assert labels.fold(semconv.TRANSFER_OPERATIONS, semconv.ERROR_TYPE, value) == value
    assert lines.messages == []


# ---------------------------------------------------------------------------------------------------- ranks


@pytest.mark.parametrize("value", [0, 7, -1, 2**31])
def test_rank_is_an_integer(labels: Labels, value: int) -> None:
    assert labels.fold(semconv.USAGE, semconv.KVCACHE_RANK_TP, value) == value


@pytest.mark.parametrize("value", ["0", 1.0, True, None])
def test_what_is_no_integer_is_no_rank(labels: Labels, lines: pytest.LogCaptureFixture, value: object) -> None:
    assert labels.fold(semconv.USAGE, semconv.KVCACHE_RANK_TP, value) is None
    assert len(lines.messages) == 1


def test_ranks_tell_series_apart(identity: Identity) -> None:
    recorder = Recorder(identity)
    for rank in range(4):
        of_rank = Identity("vllm", "KVCacheManager", Rank(tp=rank))
        recorder.counter(semconv.TRANSFER_TOKENS, TOKENS, of_rank).add(1024)
    rows = {row.attributes[semconv.KVCACHE_RANK_TP]: row.value for row in recorder.points(semconv.TRANSFER_TOKENS)}
    assert rows == {0: 1024, 1: 1024, 2: 1024, 3: 1024}
    assert semconv.TRANSFER_TOKENS.fold == "one_rank"


TOKENS: dict[str, str | int] = {
    semconv.KVCACHE_SOURCE_TIER: "device",
    semconv.KVCACHE_DESTINATION_TIER: "host",
    POOL: "kv",
}


@pytest.fixture
def identity() -> Identity:
    return Identity("vllm", "KVCacheManager")


def test_bounds_of_the_memory_are_small() -> None:
    assert labels_module.REMEMBERED <= 16
