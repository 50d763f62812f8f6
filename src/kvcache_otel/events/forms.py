"""The forms that KV events have on the wire, as msgspec reads them: what is not needed is skipped, never built.

An event is an array or a map, and each is in a batch that is an array or a map. Fields that are not named here, and
elements past the last that is, are skipped. `ABSENT` stands for a field that is not there, which is not the same as one
that is nil: that tells publishers apart.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Final, Generic, TypeVar

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from kvcache_otel.semconv import EventType

STORED: Final = "BlockStored"
REMOVED: Final = "BlockRemoved"
CLEARED: Final = "AllBlocksCleared"

LONGEST_HASH: Final = 64
"""Bytes of a block hash, at the most: SHA-512 has no more."""

MOST_HASHES: Final = 2**20
"""Hashes of one event, at the most: a prompt of a million tokens, each of them a block."""

HIGHEST_RANK: Final = 2**31 - 1

ABSENT: Final = Raw()

Bytes = Annotated[bytes, Meta(min_length=1, max_length=LONGEST_HASH)]
LongBytes = Annotated[bytes, Meta(min_length=8, max_length=LONGEST_HASH)]
Rank = Annotated[int, Meta(ge=0, le=HIGHEST_RANK)]

H = TypeVar("H")
E = TypeVar("E")


class StoredMap(Struct, Generic[H], tag=STORED, gc=False):
    """Blocks entered a medium."""

    kind: ClassVar[str] = EventType.BLOCK_STORED
    block_hashes: Annotated[list[H], Meta(max_length=MOST_HASHES)]
    medium: str | None = None
    block_size: int | None = None
    lora_name: str | UnsetType | None = UNSET
    cache_salt: Raw = ABSENT
    extra_keys: Raw = ABSENT
    group_idx: Raw = ABSENT
    kv_cache_spec_kind: Raw = ABSENT
    locality: Raw = ABSENT


class StoredArray(Struct, Generic[H], tag=STORED, array_like=True, gc=False):
    """The same as an array. What its seventh element is depends on the publisher."""

    kind: ClassVar[str] = EventType.BLOCK_STORED
    block_hashes: Annotated[list[H], Meta(max_length=MOST_HASHES)]
    parent_block_hash: Raw = ABSENT
    token_ids: Raw = ABSENT
    block_size: int | None = None
    lora_id: Raw = ABSENT
    medium: str | None = None
    seventh: Raw = ABSENT
    eighth: Raw = ABSENT


class RemovedMap(Struct, Generic[H], tag=REMOVED, gc=False):
    """Blocks left a medium, or all of them where it names none."""

    kind: ClassVar[str] = EventType.BLOCK_REMOVED
    block_size: ClassVar[None] = None
    block_hashes: Annotated[list[H], Meta(max_length=MOST_HASHES)]
    medium: str | None = None
    group_idx: Raw = ABSENT
    locality: Raw = ABSENT


class RemovedArray(Struct, Generic[H], tag=REMOVED, array_like=True, gc=False):
    """The same as an array."""

    kind: ClassVar[str] = EventType.BLOCK_REMOVED
    block_size: ClassVar[None] = None
    block_hashes: Annotated[list[H], Meta(max_length=MOST_HASHES)]
    medium: str | None = None
    third: Raw = ABSENT


class ClearedMap(Struct, tag=CLEARED, gc=False):
    """The cache was emptied."""

    kind: ClassVar[str] = EventType.ALL_BLOCKS_CLEARED
    group_idx: ClassVar[Raw] = ABSENT
    block_hashes: ClassVar[tuple[int, ...]] = ()
    medium: ClassVar[None] = None
    block_size: ClassVar[None] = None


class ClearedArray(Struct, tag=CLEARED, array_like=True, gc=False):
    """The same as an array."""

    kind: ClassVar[str] = EventType.ALL_BLOCKS_CLEARED
    block_hashes: ClassVar[tuple[int, ...]] = ()
    medium: ClassVar[None] = None
    block_size: ClassVar[None] = None


class Other(Struct, gc=False):
    """An event of a type that is not known here."""

    kind: ClassVar[str] = EventType.OTHER
    block_hashes: ClassVar[tuple[int, ...]] = ()
    block_size: ClassVar[None] = None
    medium: str | None = None


class ArrayEnvelope(Struct, Generic[E], array_like=True):
    """A batch."""

    ts: float | None
    events: list[E]
    rank: Rank | None = None


class MapEnvelope(Struct, Generic[E]):
    """The same as a map, in which publishers call the rank by different names."""

    events: list[E]
    ts: float | None = None
    data_parallel_rank: Rank | UnsetType | None = UNSET
    attn_dp_rank: Rank | UnsetType | None = UNSET
    dp_rank: Rank | UnsetType | None = UNSET


class LooseArrayEnvelope(Struct, array_like=True):
    """A batch of which something cannot be read, in its parts."""

    ts: Raw
    events: Raw
    rank: Raw = ABSENT


class LooseMapEnvelope(Struct):
    """The same as a map."""

    events: Raw
    ts: Raw = ABSENT
    data_parallel_rank: Raw = ABSENT
    attn_dp_rank: Raw = ABSENT
    dp_rank: Raw = ABSENT


class LooseArrayEvent(Struct, array_like=True):
    """An event that cannot be read, in the parts that say why."""

    type: Raw = ABSENT
    block_hashes: Raw = ABSENT
    medium: ClassVar[Raw] = ABSENT


class LooseMapEvent(Struct):
    """The same as a map."""

    type: Raw = ABSENT
    block_hashes: Raw = ABSENT
    medium: Raw = ABSENT


def is_array(head: int) -> bool:
    """Returns whether an array begins with this byte."""
    return head & 0xF0 == 0x90 or head in (0xDC, 0xDD)


def is_map(head: int) -> bool:
    """Returns whether a map begins with this byte."""
    return head & 0xF0 == 0x80 or head in (0xDE, 0xDF)


def is_text(head: int) -> bool:
    """Returns whether a string begins with this byte."""
    return head & 0xE0 == 0xA0 or head in (0xD9, 0xDA, 0xDB)
