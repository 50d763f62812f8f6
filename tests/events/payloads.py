"""KV events as engines write them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

encode = msgspec.msgpack.Encoder().encode


def stored(hashes: Sequence[Any], medium: Any = "GPU", *, size: int = 16, **more: Any) -> dict[str, Any]:
    """A map as vLLM writes it."""
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": None,
        "token_ids": [1] * size,
        "block_size": size,
        "lora_id": None,
        "medium": medium,
        "lora_name": None,
    } | more


def removed(hashes: Sequence[Any], medium: Any = "GPU", **more: Any) -> dict[str, Any]:
    """A map as vLLM writes it."""
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium} | more


CLEARED = {"type": "AllBlocksCleared"}


def stored_array(hashes: Sequence[Any], medium: Any = "GPU", *more: Any, size: int = 16) -> list[Any]:
    """An array as SGLang used to write it, and vLLM with more behind."""
    return ["BlockStored", hashes, None, [1] * size, size, None, medium, *more]


def removed_array(hashes: Sequence[Any], medium: Any = "GPU", *more: Any) -> list[Any]:
    """The same for a removal."""
    return ["BlockRemoved", hashes, medium, *more]


def batch(*events: Any, rank: Any = 0) -> bytes:
    """A batch as an array."""
    return encode([1.5, events, rank])
