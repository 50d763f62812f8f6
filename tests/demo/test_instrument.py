"""The demo cache is instrumented like anybody's: given back as it was, once at a time, and timed by its device."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

import pytest

import kvcache_otel as kv
from kvcache_otel import semconv
from kvcache_otel.demo.cache import TieredCache
from kvcache_otel.demo.config import Config
from kvcache_otel.demo.instrument import instrument
from kvcache_otel.demo.memory import Lane
from tests.demo.oracle import differences
from tests.demo.walk import Walk
from tests.support.fake_device import FakeDevice, FakeStream
from tests.support.processes import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvcache_otel.demo.memory import Pool
    from tests.engines.generic.conftest import Exported

GAUGES = (semconv.RESIDENT_BLOCKS, semconv.USAGE, semconv.LIMIT, semconv.TRANSFER_ACTIVE)


def attributes(cache: TieredCache) -> list[dict[str, Any]]:
    return [dict(vars(part)) for part in (cache, cache.controller, cache.storage, cache.prefetcher, cache.tree)]


def test_it_is_given_back_as_it_was(exported: Exported, make_cache: Callable[..., TieredCache]) -> None:
    cache = make_cache()
    before = attributes(cache)
    handle = instrument(cache, exported.provider)
    assert attributes(cache) != before
    steps = Walk(cache, 1)
    steps.take(100)
    assert differences(exported.rows, cache) == {}
    handle.uninstrument()
    handle.uninstrument()
    assert [set(part) for part in attributes(cache)] == [set(part) for part in before]
    for part in (cache, cache.controller, cache.storage, cache.prefetcher):
        methods = [name for name in dir(type(part)) if callable(getattr(type(part), name)) and name in vars(part)]
        assert methods == []
    assert all(exported.rows.values(spec) == {} for spec in GAUGES)
    counted = exported.rows.total(semconv.LOOKUP_TOKENS)
    assert counted == cache.books["tokens prompted"]
    steps.take(100)
    assert exported.rows.total(semconv.LOOKUP_TOKENS) == counted < cache.books["tokens prompted"]


def test_it_may_be_instrumented_again_but_not_twice(exported: Exported, make_cache: Callable[..., TieredCache]) -> None:
    cache = make_cache()
    handle = instrument(cache, exported.provider)
    with pytest.raises(ValueError, match="instrumented already"):
        instrument(cache, exported.provider)
    handle.uninstrument()
    gauges = kv.Gauges(block_size={"disk": 16})
    kv.instrument_controller(cache.storage, tiers={"disk": "kv"}, gauges=gauges, meter_provider=exported.provider)
    before = attributes(cache)
    with pytest.raises(ValueError, match="this Storage is instrumented already"):  # The third of four.
        instrument(cache, exported.provider)
    assert attributes(cache) == before


def test_everything_is_attached_and_said(exported: Exported, make_cache: Callable[..., TieredCache]) -> None:
    handle = instrument(make_cache(), exported.provider, rank=kv.Rank(tp=2, dp=1))
    assert handle.missing == ()
    report = handle.report()
    assert "TieredCache, rank tp=2 pp=0 dp=1" in report
    assert "MISSING" not in report
    points = exported.rows.recorder.points(semconv.LIMIT)
    assert {point.attributes[semconv.KVCACHE_RANK_TP] for point in points} == {2}


@pytest.mark.parametrize("disk_tokens", [0, 3])
def test_two_tiers_have_no_rows_of_a_third(
    exported: Exported, make_cache: Callable[..., TieredCache], disk_tokens: int
) -> None:
    cache = make_cache(disk_tokens=disk_tokens, events=False)
    handle = instrument(cache, exported.provider)
    steps = Walk(cache, 2)
    steps.take(300)
    assert handle.missing == ()
    rows = exported.rows
    tiers = {dict(key)[semconv.KVCACHE_TIER] for key in rows.values(semconv.RESIDENT_BLOCKS)}
    views = {dict(key)[semconv.KVCACHE_VIEW] for key in rows.values(semconv.RESIDENT_BLOCKS)}
    assert (tiers, views) == ({"device", "host"}, {"held"})
    assert rows.values(semconv.PREFETCH_HIT_TOKENS) == rows.values(semconv.EVENTS) == {}
    assert rows.total(semconv.LOOKUP_TOKENS) == cache.books["tokens prompted"] > 0
    assert rows.total(semconv.TELEMETRY_ERRORS) == rows.total(semconv.ACCOUNTING_ERRORS) == 0


def test_a_cache_that_is_dropped_goes_and_ends_its_rows(exported: Exported) -> None:
    cache = TieredCache(Config(device_tokens=64, host_tokens=64))
    handle = instrument(cache, exported.provider)
    assert exported.rows.values(semconv.USAGE)
    gone = weakref.ref(cache)
    del cache
    gc.collect()
    assert gone() is None
    assert exported.rows.values(semconv.USAGE) == exported.rows.values(semconv.RESIDENT_BLOCKS) == {}
    handle.uninstrument()


class FakeLane(Lane):
    """Stands in for a device's stream: copies that take their time by the device's clock, which a test winds on."""

    def __init__(self) -> None:
        self.stream = FakeStream()

    def copy(self, destination: Pool, pages: Sequence[int], source: Pool, sources: Sequence[int]) -> None:
        destination.memory.copy(pages, source.memory, sources)
        self.stream.copy(2.0)

    def wait(self) -> None:
        pass


def on_a_fake_device(cache: TieredCache) -> FakeStream:
    lane = FakeLane()
    cache.lane = cache.controller.lane = lane
    return lane.stream


def test_copies_on_a_stream_are_timed_by_the_device(exported: Exported, make_cache: Callable[..., TieredCache]) -> None:
    cache, device = make_cache(), FakeDevice()
    stream = on_a_fake_device(cache)
    handle = instrument(cache, exported.provider, make_event=device.event)
    assert handle.missing == ()
    rows, route = exported.rows, {"source": "device", "destination": "host"}
    steps = Walk(cache, 4)
    while cache.books["copies", "device", "host"] + cache.books["copies", "host", "device"] < 20:
        steps.step()
        going = cache.books["copies", "device", "host"]
        assert rows.value(semconv.TRANSFER_ACTIVE, **route) == going  # The device has not come to any yet.
        assert rows.value(semconv.TRANSFER_OPERATIONS, **route) == 0
    stream.run()
    wait_until(lambda: differences(rows, cache, timing="device_event") == {})
    for source, destination in (("device", "host"), ("host", "device")):
        duration = rows.histogram(
            semconv.TRANSFER_DURATION, source=source, destination=destination, timing="device_event"
        )
        assert duration is not None
        counts, total = duration.read()[:2]
        assert sum(counts) == cache.books["copies", source, destination] > 0
        assert total == pytest.approx(0.002 * sum(counts))
    assert 0 < len(device.made) <= 40
