"""Six media, whatever is on the wire; hostile values fill neither the log nor the memory, and raise nothing."""

from __future__ import annotations

import enum
import logging
import sys
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache_otel import semconv
from kvcache_otel.events import medium as medium_module
from kvcache_otel.events.medium import Media, medium, tier
from kvcache_otel.record.labels import LONGEST, REMEMBERED
from kvcache_otel.semconv import EventMedium

if TYPE_CHECKING:
    from collections.abc import Callable

LOGGER = "kvcache_otel.events.medium"
MEMBERS = semconv.ATTRIBUTES[semconv.KVCACHE_EVENT_MEDIUM].members or frozenset()


@pytest.fixture
def media() -> Media:
    return Media()


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger=LOGGER)
    return caplog


# ------------------------------------------------------------------------------------------------ known ones

TABLE = {
    None: "untagged",
    "GPU": "device",
    "gpu": "device",
    "cuda": "device",
    "cuda:0": "device",
    "CUDA:15": "device",
    "gpu:1": "device",
    "hip": "device",
    "npu:7": "device",
    "xpu:0": "device",
    "CPU": "host",
    "cpu": "host",
    "CPU_PINNED": "host",
    "cpu_pinned": "host",
    "CPU_TIER1": "host",
    "CPU_TIER2": "host",
    "DISK": "disk",
    "FS": "disk",
    "fs": "disk",
    "STORAGE": "disk",
    "OBJ": "external",
    "EXTERNAL": "external",
    "SHARED_STORAGE": "external",
    "OBJECT_STORE": "external",
    "object_store": "external",
}


@pytest.mark.parametrize(("value", "expected"), TABLE.items())
def test_medium_that_is_known(media: Media, lines: pytest.LogCaptureFixture, value: str | None, expected: str) -> None:
    assert [media.medium(value) for _ in range(3)] == [expected] * 3
    assert lines.messages == []


@pytest.mark.parametrize(("value", "expected"), TABLE.items())
def test_what_the_process_reads_with_has_the_same_table(value: str | None, expected: str) -> None:
    assert medium(value) == expected


def test_tiers_are_those_of_the_catalogue() -> None:
    tiers = {name: tier(name) for name in sorted(MEMBERS)}
    assert tiers == {
        "device": "device",
        "host": "host",
        "disk": "disk",
        "external": "external",
        "unknown": None,
        "untagged": None,
    }
    allowed = semconv.RESIDENT_BLOCKS.values[semconv.KVCACHE_TIER]
    assert {name for name in tiers.values() if name is not None} <= allowed


class StorageMedium(str, enum.Enum):  # noqa: UP042 # As engines write it.
    """SGLang's: the names differ from what is on the wire."""

    GPU = "GPU"
    CPU = "CPU_PINNED"
    DISK = "DISK"
    EXTERNAL = "EXTERNAL"
    PEER = "NVLINK_PEER"
    ACCELERATOR = "cuda:3"


@pytest.mark.parametrize(
    ("value", "expected"),
    list(zip(StorageMedium, ("device", "host", "disk", "external", "unknown", "device"), strict=True)),
)
def test_string_enum_is_read_by_its_value_and_not_kept(media: Media, value: StorageMedium, expected: str) -> None:
    assert [media.medium(value) for _ in range(3)] == [expected] * 3
    assert {type(key) for key in media._media} == {str, type(None)}


# ---------------------------------------------------------------------------------------------- unknown ones


class Unhashable:
    """Nothing that can be looked up."""

    def __hash__(self) -> int:
        raise RuntimeError("no hash")


class Quarrelsome(str):
    """A string of somebody's own that refuses to be looked at."""

    __slots__ = ()

    __hash__ = str.__hash__

    def _refuse(self, *_: object) -> Any:
        raise RuntimeError("no")

    __eq__ = __str__ = __len__ = upper = isascii = encode = __getitem__ = _refuse  # type: ignore[assignment]


class Liar:
    """An object that says it is a string."""

    @property
    def __class__(self) -> type:  # type: ignore[override]
        return str


UNKNOWN: tuple[Callable[[], Any], ...] = (
    lambda: "NVLINK_PEER",
    lambda: "",
    lambda: " GPU",
    lambda: "GPU\n",
    lambda: "cuda:",
    lambda: "cuda:-1",
    lambda: "cuda:0:1",
    lambda: "cuda:٣",
    lambda: "f\N{LATIN SMALL LETTER LONG S}",
    lambda: "cuda:" + "0" * 1_000,
    lambda: "x" * 1_000_000,
    lambda: "\ud800",
    lambda: b"GPU",
    lambda: 0,
    lambda: 1.5,
    lambda: float("nan"),
    lambda: True,
    lambda: {"GPU": 1},
    lambda: ["GPU"],
    lambda: ("GPU",),
    lambda: {"GPU"},
    lambda: object(),
    lambda: str,
    Unhashable,
    Liar,
    lambda: Quarrelsome("NVLINK_PEER"),
)


@pytest.mark.parametrize("make", UNKNOWN)
def test_everything_else_is_unknown_and_said_once(
    media: Media, lines: pytest.LogCaptureFixture, make: Callable[[], Any]
) -> None:
    assert [media.medium(make()) for _ in range(3)] == ["unknown"] * 3
    (message,) = lines.messages
    assert message.isprintable()
    assert len(message) < 2 * LONGEST + 200


def test_string_of_somebodys_own_is_read_as_what_it_is(media: Media) -> None:
    assert media.medium(Quarrelsome("CUDA:1")) == "device"
    assert media.medium(Quarrelsome("OBJ")) == "external"


def test_words_of_the_warning(media: Media, lines: pytest.LogCaptureFixture) -> None:
    media.medium("NVLINK_PEER")
    media.medium(b"GPU")
    assert lines.messages == [
        "kvcache: kvcache.event.medium='NVLINK_PEER' is not known; recorded as 'unknown'",
        "kvcache: kvcache.event.medium=\"<class 'bytes'>\" is not known; recorded as 'unknown'",
    ]


HOSTILE: dict[str, tuple[Callable[[int], Any], str]] = {
    "short": (lambda number: f"MEDIUM_{number}", "unknown"),
    "long": (lambda number: f"{number}\n" + "x" * 100_000, "unknown"),
    "devices": (lambda number: f"cuda:{number}", "device"),
    "spellings": (
        lambda number: "".join(c.lower() if number >> i & 1 else c for i, c in enumerate("OBJECT_STORE")),
        "",
    ),
    "numbers": (lambda number: number, "unknown"),
    "maps": (lambda number: {number: "x" * 1_000}, "unknown"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_flood_fills_neither_the_log_nor_the_memory(media: Media, lines: pytest.LogCaptureFixture, kind: str) -> None:
    make, expected = HOSTILE[kind]
    for number in range(4_000):
        assert media.medium(make(number)) == (expected or "external")
    remembered = [key for key in media._media if isinstance(key, str)]
    assert len(remembered) <= medium_module._SPELLINGS + REMEMBERED
    assert sum(sys.getsizeof(text) for text in remembered) < len(remembered) * 1_000
    assert len(lines.messages) == len(media._said) <= REMEMBERED
    silent = [message for message in lines.messages if message.endswith("(further unknown values are folded silently)")]
    assert silent == lines.messages[REMEMBERED - 1 :]


@pytest.mark.parametrize("value", ["gPU", "cuda:0", "NVLINK_PEER", "x" * LONGEST])
def test_what_was_met_is_looked_up_the_next_time(media: Media, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    known = media.medium(value)
    monkeypatch.setattr(media, "_learn", None)
    assert media.medium(value) == known


def test_flood_of_one_kind_leaves_room_for_the_other(media: Media, lines: pytest.LogCaptureFixture) -> None:
    for number in range(1_000):
        media.medium(f"cuda:{number}")
    assert media.medium("NVLINK_PEER") == "unknown"
    assert len(lines.messages) == 1
    for number in range(1_000):
        media.medium(f"MEDIUM_{number}")
    assert (media.medium("gPu"), media.medium("GPU"), media.medium(None)) == ("device", "device", "untagged")


@settings(deadline=None)
@given(st.one_of(st.none(), st.text(), st.binary(), st.integers(), st.floats(), st.lists(st.text())))
def test_whatever_comes_is_one_of_six(value: object) -> None:
    assert Media().medium(value) in MEMBERS
    assert (Media().medium(value) == EventMedium.UNTAGGED) == (value is None)
