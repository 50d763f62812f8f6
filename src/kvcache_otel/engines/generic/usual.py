"""The facts of the methods that `protocols.py` names: what is read where nothing else is said."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcache_otel import semconv
from kvcache_otel.engines.generic.copies import Backup, LoadBack, Restoration, Retraction
from kvcache_otel.engines.generic.lookups import Admission, HostInsert, Prefetch
from kvcache_otel.engines.generic.losses import Drop, Eviction
from kvcache_otel.semconv import Tier

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from kvcache_otel.engines.generic.facts import Fact

# Why a hit may stay unfulfilled: who speaks the protocol may give any reason that the catalogue has.
_REASONS = tuple(sorted(semconv.PREFETCH_UNFULFILLED_TOKENS.values[semconv.KVCACHE_REASON]))

_STORAGE = (Tier.DISK, Tier.EXTERNAL, Tier.PEER)


def controller(tiers: Collection[str]) -> dict[str, Fact]:
    """Returns those of a `CacheController`, as far as there are tiers for them."""
    return dict(_controller(tiers))


def tree_core(tiers: Collection[str]) -> dict[str, Fact]:
    """Returns those of a `TreeCore`, as far as there are tiers for them."""
    return dict(_tree_core(tiers))


def _controller(tiers: Collection[str]) -> Iterator[tuple[str, Fact]]:
    if Tier.DEVICE in tiers and Tier.HOST in tiers:
        yield "backup", Backup()
        yield "load_back", LoadBack()
        yield "retract", Retraction()
        yield "restore", Restoration()
    if (storage := _storage(tiers)) is not None:
        yield "prefetch", Prefetch(tier=storage)


def _tree_core(tiers: Collection[str]) -> Iterator[tuple[str, Fact]]:
    yield "admit", Admission()
    if Tier.DEVICE in tiers:
        yield "evict", Eviction(tier=Tier.DEVICE)
        yield "drop", Drop(tier=Tier.DEVICE)
    if Tier.HOST in tiers:
        yield "evict_host", Eviction(tier=Tier.HOST)
    if (storage := _storage(tiers)) is not None:
        yield "insert_host", HostInsert(tier=storage, reasons=_REASONS)


def _storage(tiers: Collection[str]) -> str | None:
    return next((tier for tier in _STORAGE if tier in tiers), None)
