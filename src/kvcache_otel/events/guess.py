"""Which engine a stream of KV events comes from, by what only one of them writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from msgspec import UNSET

from kvcache_otel.events import forms
from kvcache_otel.semconv import Engine, EventType

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvcache_otel.events.wire import Batch, Event

_MEDIA = {
    "CPU": Engine.VLLM,
    "FS": Engine.VLLM,
    "OBJ": Engine.VLLM,
    "STORAGE": Engine.VLLM,
    "CPU_PINNED": Engine.SGLANG,
    "CPU_TIER1": Engine.SGLANG,
    "CPU_TIER2": Engine.SGLANG,
    "DISK": Engine.SGLANG,
    "EXTERNAL": Engine.SGLANG,
}

_UNSIGNED = 2**63
_NIL = 0xC0


class _Evidence(NamedTuple):
    engine: str
    why: str


class EngineGuess:
    """Settles on the first evidence and stays with it. Session ids are none: both engines write them.

    Attributes:
        engine: ``vllm`` or ``sglang``; None until there is evidence.
        why: What settled it, in words.
    """

    __slots__ = ("engine", "why")

    def __init__(self) -> None:
        self.engine: str | None = None
        self.why = ""

    def see(self, batch: Batch) -> bool:
        """Looks at a batch, and returns whether that settled it."""
        if self.engine is not None:
            return False
        evidence = _of_batch(batch)
        if evidence is None:
            return False
        self.engine, self.why = evidence
        return True


def _of_batch(batch: Batch) -> _Evidence | None:
    if batch.engine is not None:
        return _Evidence(batch.engine, "its name for the rank")
    found = (_of_fields(event) or _of_hashes(event.block_hashes) or _of_medium(event) for event in batch.events)
    return next((evidence for evidence in found if evidence is not None), None)


def _of_fields(event: Event) -> _Evidence | None:
    if isinstance(event, forms.StoredMap):
        for name in ("group_idx", "kv_cache_spec_kind", "locality", "extra_keys"):
            if getattr(event, name) is not forms.ABSENT:
                return _Evidence(Engine.VLLM, name)
        if event.cache_salt is not forms.ABSENT:
            return _Evidence(Engine.SGLANG, "cache_salt")
        # vLLM always writes it, as nil where there is none; SGLang never does that.
        if event.lora_name is None:
            return _Evidence(Engine.VLLM, "lora_name")
        return _Evidence(Engine.SGLANG, "no lora_name") if event.lora_name is UNSET else None
    if isinstance(event, forms.RemovedMap):
        there = event.group_idx is not forms.ABSENT or event.locality is not forms.ABSENT
        return _Evidence(Engine.VLLM, "group_idx or locality") if there else None
    if isinstance(event, forms.RemovedArray):
        there = event.third is not forms.ABSENT and not forms.is_text(memoryview(event.third)[0])
        return _Evidence(Engine.VLLM, "group_idx after the medium") if there else None
    if isinstance(event, forms.StoredArray) and event.seventh is not forms.ABSENT:
        head = memoryview(event.seventh)[0]
        if forms.is_map(head):
            return _Evidence(Engine.SGLANG, "metadata after the medium")
        if event.eighth is not forms.ABSENT or head == _NIL or forms.is_text(head):
            return _Evidence(Engine.VLLM, "lora_name after the medium")
    return None


def _of_hashes(hashes: Iterable[int]) -> _Evidence | None:
    for block in hashes:
        if block < 0:
            return _Evidence(Engine.SGLANG, "a negative hash")
        if block >= _UNSIGNED:
            return _Evidence(Engine.VLLM, "a hash of 64 bits without a sign, or of bytes")
    return None


def _of_medium(event: Event) -> _Evidence | None:
    if event.kind == EventType.OTHER or event.medium is None:
        return None
    engine = _MEDIA.get(event.medium)
    return None if engine is None else _Evidence(engine, f"the medium {event.medium}")
