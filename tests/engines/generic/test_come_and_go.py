"""Thousands of caches, one after the other: each has its rows, at the other end too, and none leaves anything."""

from __future__ import annotations

import gc
import sys
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, NumberDataPoint
from opentelemetry.sdk.metrics.view import View

import kvcache_otel as kv
from kvcache_otel import semconv
from kvcache_otel.engines.generic import points
from kvcache_otel.instrumentation import instrumentation

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.engines.generic.conftest import Exported

CACHES = 5000


class Cache:
    def __init__(self) -> None:
        self.blocks = 7

    def evict(self, tokens: int) -> int:
        return tokens

    def store(self, size: int) -> int:
        return size


def one(provider: MeterProvider, name: str) -> tuple[Cache, kv.Instrumented]:
    """Makes a cache, has it measured, and uses it."""
    cache = Cache()
    handle = kv.instrument_tree_core(
        cache,
        tiers={"device": "kv", "host": "kv"},
        cache=name,
        methods={
            "evict": kv.Eviction(tokens=lambda gone, _: gone),
            "store": kv.Backup(tokens=lambda size, _: size, bytes=lambda size, _: size),
        },
        gauges=kv.Gauges(resident={"device": "blocks"}),
        meter_provider=provider,
    )
    cache.evict(3)
    cache.store(2)
    return cache, handle


class End:
    """The other end of a provider of the test's own."""

    def __init__(self, views: Sequence[View] = ()) -> None:
        self.reader = InMemoryMetricReader()
        self.provider = MeterProvider([self.reader], views=views)

    def rows(self, name: str) -> dict[str, set[Any]]:
        """The values of a cache's rows, by metric, but for histograms."""
        data = self.reader.get_metrics_data()
        assert data is not None
        return {
            metric.name: values
            for metric in data.resource_metrics[0].scope_metrics[0].metrics
            if (
                values := {
                    point.value
                    for point in metric.data.data_points
                    if isinstance(point, NumberDataPoint)
                    and (point.attributes or {}).get(semconv.KVCACHE_CACHE_TYPE) == name
                }
            )
        }

    def folded(self) -> list[str]:
        """The metrics of which the SDK does not tell all rows apart any more."""
        data = self.reader.get_metrics_data()
        assert data is not None
        return [
            metric.name
            for metric in data.resource_metrics[0].scope_metrics[0].metrics
            if any("otel.metric.overflow" in (point.attributes or {}) for point in metric.data.data_points)
        ]


@pytest.fixture
def end(exported: Exported) -> Iterator[End]:
    made = End()
    yield made
    instrumentation.detach()
    made.provider.shutdown()


def test_the_last_of_thousands_has_all_the_rows_that_the_first_had(end: End) -> None:
    first, _ = one(end.provider, "first")
    rows = end.rows("first")
    assert len(rows) == 10
    before = 0
    for number in range(CACHES):
        one(end.provider, f"cache{number}")
        if number % 100 == 0:
            end.reader.get_metrics_data()
        if number == 1000:
            gc.collect()
            before = sys.getallocatedblocks()
    last, _ = one(end.provider, "last")
    assert end.rows("last") == rows
    assert end.rows("first") == rows
    assert end.folded() == []
    gc.collect()
    assert sys.getallocatedblocks() - before < CACHES, "something is left of each cache"
    runtime = instrumentation._others[id(end.provider)][1]
    assert runtime.recorder is not None
    assert len(points._alike[runtime.recorder.harvester]) == 4
    assert (first.blocks, last.blocks) == (7, 7)


def test_a_cache_that_was_given_back_makes_room_whoever_keeps_it_and_its_handle(end: End) -> None:
    kept = []
    for number in range(300):
        kept.append(one(end.provider, f"cache{number}"))
        kept[-1][1].remove()
    last = one(end.provider, "last")
    assert end.rows("last")[semconv.ACCOUNTING_ERRORS.name] == {0}
    assert last[1].attached == ("evict", "store")
    assert kept[0][1].report()


def test_what_a_view_leaves_of_the_labels_is_kept_as_long_as_one_row_has_it(exported: Exported) -> None:
    end = End([View(instrument_name=semconv.EVICTION_TOKENS.name, attribute_keys={semconv.KVCACHE_TIER})])
    for number in range(300):
        one(end.provider, f"cache{number}")
        if number % 50 == 0:
            end.reader.get_metrics_data()
    data: Any = end.reader.get_metrics_data()
    [metric] = [
        metric
        for metric in data.resource_metrics[0].scope_metrics[0].metrics
        if metric.name == semconv.EVICTION_TOKENS.name
    ]
    assert [dict(point.attributes or {}) for point in metric.data.data_points] == [{semconv.KVCACHE_TIER: "device"}]
    instrumentation.detach()
    end.provider.shutdown()


def test_what_is_under_way_keeps_the_rows_that_it_will_be_counted_in(end: End) -> None:
    copies = kv.transfers("device", "host", cache="copying", meter_provider=end.provider)
    copy = copies.begin(bytes=5)
    del copies
    for number in range(300):
        one(end.provider, f"cache{number}")
    copy.end()
    assert end.rows("copying")[semconv.TRANSFER_IO.name] == {5}
