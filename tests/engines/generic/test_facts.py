"""What is said of a fact where it cannot be measured: a cache has several tiers, and loses one fact of one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import kvcache_otel as kv

if TYPE_CHECKING:
    from kvcache_otel.engines.generic.facts import Fact
    from tests.engines.generic.conftest import Exported

AMOUNTS = {"tokens": 1, "bytes": 1}


@pytest.mark.parametrize(
    ("fact", "what"),
    [
        (kv.Backup(**AMOUNTS), "copies from device to host"),
        (kv.Backup(**AMOUNTS, destination="external"), "copies from device to external"),
        (kv.LoadBack(**AMOUNTS), "copies from host to device"),
        (kv.Retraction(**AMOUNTS), "copies of retracted requests from device to host"),
        (kv.Restoration(**AMOUNTS), "copies of retracted requests from host to device"),
        (kv.Copy(**AMOUNTS, source="host", destination="disk"), "copies from host to disk"),
        (kv.CopiesDone(source="disk", destination="host"), "when copies from disk to host have ended"),
        (kv.Eviction(tokens=1), "what is evicted from device"),
        (kv.Eviction(tokens=1, tier="host"), "what is evicted from host"),
        (kv.Drop(tokens=1, reason="pool_full", tier="host"), "what host loses for good"),
        (kv.Prefetch(hit=1, tier="peer"), "what storage says it has: peer"),
        (kv.HostInsert(loaded=1, fulfilled=1, unfulfilled={}), "what becomes of prefetches from disk"),
        (kv.Admission(prompt=1, served={}), "which tier served a prompt"),
        (kv.SkippedStore(tier="disk", blocks=1, reason="no_space"), "what is not written to disk: no_space"),
        (kv.AllocationFailure(tier="host", reason="store"), "where host had no space: store"),
        (kv.Publication(events=()), "what is published"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_what_is_missing_without_a_fact_names_its_tier(fact: Fact, what: str) -> None:
    assert fact.what == what


def test_a_report_names_the_tier_of_what_is_missing(exported: Exported) -> None:
    class Cache:
        def evict(self) -> int:
            return 1

    cache = Cache()
    methods = {"evict": kv.Eviction(tokens=1), "shrink": kv.Eviction(tier="host", tokens=1)}
    handle = kv.instrument_controller(
        cache, tiers={"device": "kv", "host": "kv"}, methods=methods, meter_provider=exported.provider
    )
    assert handle.report().endswith("\n  Not measured:\n    - what is evicted from host")
