"""The vocabulary of facts: its rows are there at zero, carry the catalogue's attributes, and close."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache_otel import semconv
from kvcache_otel.identity import Identity, Rank
from kvcache_otel.record.probe import CacheProbe
from kvcache_otel.record.recorder import Recorder

IDENTITY = Identity("custom", "TestCache", Rank(tp=1, pp=2, dp=3))
CONSTANT = dict(IDENTITY.attributes())

GIGABYTE = 10**9


class Told:
    """A probe, and what its recorder has been told."""

    def __init__(self) -> None:
        self.recorder = Recorder(IDENTITY)
        self.probe = CacheProbe(self.recorder, IDENTITY)

    def rows(self, name: str) -> dict[str, Any]:
        """The rows of one metric by its own labels' values; a histogram's value is its count and sum."""
        spec = semconv.METRICS[name]
        found: dict[str, Any] = {}
        for attributes, value in self.recorder.points(spec):
            found[own_labels(attributes)] = value
        for attributes, cell in self.recorder.histograms(spec):
            counts, total = cell.read()
            found[own_labels(attributes)] = (sum(counts), total)
        return found

    def accounting_errors(self) -> dict[str, Any]:
        return {reason: value for reason, value in self.rows("kvcache.accounting.errors").items() if value}


def own_labels(attributes: dict[str, str | int]) -> str:
    return " ".join(str(value) for key, value in attributes.items() if key not in CONSTANT)


@pytest.fixture
def told() -> Told:
    return Told()


# -------------------------------------------------------------------------------------------- rows at zero

EMPTY = (0, 0.0)

Word = Callable[[CacheProbe], Any]
Rows = dict[str, dict[str, Any]]


def all_of_route(probe: CacheProbe) -> Any:
    route = probe.route("host", "disk", name="1:fs", timing="engine_report")
    return (
        route,
        route.failures("TimeoutError"),
        route.queue(),
        route.tokens("kv"),
        route.pool_moved("kv"),
        route.pins(),
    )


def all_of_prefetches(probe: CacheProbe) -> Any:
    prefetches = probe.prefetches("external", "mooncake", reasons=("deadline", "shrunk"))
    return prefetches, prefetches.deferred("host_capacity")


def settled_pool(probe: CacheProbe) -> Any:
    pool = probe.pool("device", "kv")
    pool.settle(limit=0, free=0, evictable=0)
    return pool


def at_zero(level: Any) -> Any:
    level.set(0)
    return level


# By word of the probe: what to say, and the rows that are there then, by their own labels.
WORDS: dict[str, tuple[Word, Rows]] = {
    "served": (
        lambda probe: probe.served("device", "host"),
        {"kvcache.lookup.tokens": {"device": 0, "host": 0, "none": 0}},
    ),
    "lookups": (
        lambda probe: probe.lookups("disk", "1:fs"),
        {
            "kvcache.lookup.blocks": {"disk 1:fs hit": 0, "disk 1:fs miss": 0},
            "kvcache.lookup.duration": {"disk 1:fs sync": EMPTY, "disk 1:fs async": EMPTY},
        },
    ),
    "lookups without a name": (
        lambda probe: probe.lookups("host"),
        {
            "kvcache.lookup.blocks": {"host hit": 0, "host miss": 0},
            "kvcache.lookup.duration": {"host sync": EMPTY, "host async": EMPTY},
        },
    ),
    "request_lookups": (
        lambda probe: probe.request_lookups(),
        {"kvcache.lookup.request.duration": {"sync": EMPTY, "async": EMPTY}},
    ),
    "route": (
        lambda probe: probe.route("device", "host"),
        {
            "kvcache.transfer.duration": {"device host wall_clock": EMPTY},
            "kvcache.transfer.io": {"device host wall_clock": 0},
            "kvcache.transfer.operations": {"device host": 0},
            "kvcache.transfer.active": {"device host": 0},
        },
    ),
    "route, all of it": (
        all_of_route,
        {
            "kvcache.transfer.duration": {"host disk 1:fs engine_report": EMPTY},
            "kvcache.transfer.queue.duration": {"host disk 1:fs": EMPTY},
            "kvcache.transfer.io": {"host disk 1:fs engine_report": 0},
            "kvcache.transfer.tokens": {"host disk kv": 0},
            "kvcache.transfer.pool.io": {"host disk kv": 0},
            "kvcache.transfer.operations": {"host disk 1:fs": 0, "host disk 1:fs TimeoutError": 0},
            "kvcache.transfer.active": {"host disk 1:fs": 0},
            "kvcache.transfer.active.blocks": {"host disk 1:fs": 0},
        },
    ),
    "evictions": (lambda probe: probe.evictions("device", "kv"), {"kvcache.eviction.tokens": {"device kv": 0}}),
    "eviction_passes": (
        lambda probe: probe.eviction_passes("device"),
        {"kvcache.eviction.duration": {"device": EMPTY}},
    ),
    "dropped": (
        lambda probe: probe.dropped("host", "kv", "host_pressure"),
        {"kvcache.dropped.tokens": {"host kv host_pressure": 0}},
    ),
    "skipped_stores": (
        lambda probe: probe.skipped_stores("disk", "backpressure", "1:fs"),
        {"kvcache.store.skipped.blocks": {"disk 1:fs backpressure": 0}},
    ),
    "allocation_failures": (
        lambda probe: probe.allocation_failures("host", "promotion"),
        {"kvcache.allocation.failures": {"host promotion": 0}},
    ),
    "prefetches": (
        all_of_prefetches,
        {
            "kvcache.prefetch.hit.tokens": {"external mooncake": 0},
            "kvcache.prefetch.loaded.tokens": {"external mooncake": 0},
            "kvcache.prefetch.fulfilled.tokens": {"external mooncake": 0},
            "kvcache.prefetch.unfulfilled.tokens": {"external mooncake deadline": 0, "external mooncake shrunk": 0},
            "kvcache.prefetch.deferred.tokens": {"external mooncake host_capacity": 0},
            "kvcache.prefetch.outstanding.tokens": {"external mooncake": 0},
        },
    ),
    "pool": (
        settled_pool,
        {
            "kvcache.limit": {"device kv": 0},
            "kvcache.usage": {"device kv used": 0, "device kv evictable": 0, "device kv free": 0},
        },
    ),
    "resident": (
        lambda probe: at_zero(probe.resident("host", "held")),
        {"kvcache.resident.blocks": {"host held": 0}},
    ),
    "block_size": (
        lambda probe: at_zero(probe.block_size("device")),
        {"kvcache.block.size": {"device": 0}},
    ),
}

ABOUT_OURSELVES = {"kvcache.accounting.errors", "kvcache.telemetry.dropped"}


@pytest.fixture(params=WORDS)
def word(request: pytest.FixtureRequest) -> tuple[Word, Rows]:
    return WORDS[request.param]


def test_word_has_its_rows_at_zero_and_no_others(told: Told, word: tuple[Word, Rows]) -> None:
    say, expected = word
    kept = say(told.probe)
    found = {name: rows for name in semconv.METRICS if name not in ABOUT_OURSELVES and (rows := told.rows(name))}
    assert found == expected
    assert kept is not None


def test_rows_carry_exactly_the_attributes_of_the_catalogue(told: Told, word: tuple[Word, Rows]) -> None:
    say, expected = word
    kept = say(told.probe)
    for name in expected:
        spec = semconv.METRICS[name]
        everything = [*told.recorder.points(spec), *told.recorder.histograms(spec)]
        assert everything
        for attributes, _ in everything:
            assert CONSTANT.items() <= attributes.items()
            own = [key for key in attributes if key not in CONSTANT]
            assert own == [key for key in spec.attributes if key in own], "in the catalogue's order"
            assert set(spec.attributes) - set(own) <= spec.optional
    assert kept is not None


def test_every_optional_attribute_is_said_by_some_word_and_left_out_by_another() -> None:
    keys: dict[str, set[bool]] = {}
    for say, expected in WORDS.values():
        told = Told()
        kept = say(told.probe)
        for name in expected:
            spec = semconv.METRICS[name]
            for attributes, _ in [*told.recorder.points(spec), *told.recorder.histograms(spec)]:
                for key in spec.optional:
                    keys.setdefault(key, set()).add(key in attributes)
        del kept
    of_received_views = {semconv.KVCACHE_WORKER, semconv.KVCACHE_RANK_DP}
    said = {key: ways for key, ways in keys.items() if key not in of_received_views}
    assert said == {key: {True, False} for key in (semconv.KVCACHE_TIER_NAME, semconv.ERROR_TYPE)}


def test_vocabulary_covers_every_metric_that_is_recorded_inside_an_engine() -> None:
    names = list(semconv.METRICS)
    inside = names[: names.index("kvcache.accounting.errors")]
    assert {name for _, expected in WORDS.values() for name in expected} == set(inside)


def test_every_word_of_the_probe_is_walked() -> None:
    said = {name.split(",")[0].removesuffix(" without a name") for name in WORDS}
    general = {"identity", "harvester", "doubts", "changes", "counter", "histogram", "level", "observe"}
    general |= {"gauge_failed", "failed", "lost", "accounting_error"}
    assert {name for name in dir(CacheProbe) if not name.startswith("_")} == said | general


def test_pool_and_views_have_no_row_before_the_engine_tells_them(told: Told) -> None:
    kept = told.probe.pool("device", "kv"), told.probe.resident("device", "held"), told.probe.block_size("device")
    for name in ("kvcache.usage", "kvcache.limit", "kvcache.resident.blocks", "kvcache.block.size"):
        assert told.rows(name) == {}
    assert len(kept) == 3


def test_two_probes_of_one_cache_class_share_their_rows(told: Told) -> None:
    for probe in (told.probe, CacheProbe(told.recorder, IDENTITY)):
        probe.evictions("device", "kv").add(5)
        probe.served("device").prompt(10, {"device": 4})
    assert told.rows("kvcache.eviction.tokens") == {"device kv": 10}
    assert told.rows("kvcache.lookup.tokens") == {"device": 8, "none": 12}


def test_observed_row_carries_the_probes_identity_not_the_processs() -> None:
    told = Told()
    probe = CacheProbe(told.recorder, Identity("vllm", "Other", Rank(tp=7)))
    probe.observe(semconv.BLOCK_SIZE, {semconv.KVCACHE_TIER: "host"}, lambda: 16)
    (point,) = told.recorder.points(semconv.BLOCK_SIZE)
    assert (point.attributes[semconv.KVCACHE_RANK_TP], point.attributes[semconv.KVCACHE_ENGINE]) == (7, "vllm")


# ------------------------------------------------------------------------------------------------- looking up


def test_prompt_is_told_once_by_the_tier_that_served_it(told: Told) -> None:
    served = told.probe.served("device", "host")
    served.prompt(1_000, {"device": 640, "host": 160})
    assert told.rows("kvcache.lookup.tokens") == {"device": 640, "host": 160, "none": 200}


def test_share_that_a_stale_snapshot_made_negative_is_zero_and_one_error(told: Told) -> None:
    served = told.probe.served("device", "external")
    served.prompt(200, {"device": 100 - 160, "external": 160})
    assert told.rows("kvcache.lookup.tokens") == {"device": 0, "external": 160, "none": 40}
    assert told.accounting_errors() == {"negative_delta": 1}


def test_shares_that_exceed_the_prompt_leave_nothing_computed_and_are_one_error(told: Told) -> None:
    served = told.probe.served("device", "external")
    served.prompt(100, {"device": 80, "external": 60})
    assert told.rows("kvcache.lookup.tokens") == {"device": 80, "external": 60, "none": 0}
    assert told.accounting_errors() == {"negative_delta": 1}


def test_tier_nobody_announced_gets_its_row_when_it_serves(told: Told) -> None:
    served = told.probe.served("device")
    served.prompt(100, {"peer": 30, "a tier of its own": 20})
    assert told.rows("kvcache.lookup.tokens") == {"device": 0, "peer": 30, "unknown": 20, "none": 50}


@given(st.lists(st.lists(st.integers(0, 5_000), min_size=4, max_size=4)))
def test_tiers_add_up_to_the_prompts(requests: list[list[int]]) -> None:
    told = Told()
    served = told.probe.served("device", "host", "external")
    for device, host, external, computed in requests:
        served.prompt(device + host + external + computed, {"device": device, "host": host, "external": external})
    rows = told.rows("kvcache.lookup.tokens")
    assert sum(rows.values()) == sum(map(sum, requests))
    assert rows["none"] == sum(request[3] for request in requests)
    assert told.accounting_errors() == {}


@given(st.integers(0, 1_000), st.dictionaries(st.sampled_from(["device", "host", "disk"]), st.integers(-500, 1_000)))
def test_whatever_the_shares_no_row_is_negative_and_what_does_not_close_is_an_error(
    tokens: int, shares: dict[str, int]
) -> None:
    told = Told()
    told.probe.served("device", "host").prompt(tokens, shares)
    rows = told.rows("kvcache.lookup.tokens")
    assert min(rows.values()) >= 0
    negative = sum(share < 0 for share in shares.values())
    too_much = sum(share for share in shares.values() if share > 0) > tokens
    assert sum(told.accounting_errors().values()) == negative + too_much
    assert (sum(rows.values()) == tokens) is not too_much


def test_lookups_are_told_as_an_engine_sums_them(told: Told) -> None:
    lookups = told.probe.lookups("disk", "1:fs")
    lookups.answered(128, 64)
    lookups.answered(0, 0)
    lookups.blocked.record(0.001)
    lookups.deferred.record(0.5)
    assert told.rows("kvcache.lookup.blocks") == {"disk 1:fs hit": 64, "disk 1:fs miss": 64}
    assert told.rows("kvcache.lookup.duration") == {"disk 1:fs sync": (1, 0.001), "disk 1:fs async": (1, 0.5)}


def test_more_hits_than_lookups_are_no_negative_misses(told: Told) -> None:
    told.probe.lookups("host").answered(10, 12)
    assert told.rows("kvcache.lookup.blocks") == {"host hit": 12, "host miss": 0}
    assert told.accounting_errors() == {"negative_delta": 1}


def test_hits_and_lookups_are_both_there_and_no_ratio_is(told: Told) -> None:
    lookups = told.probe.lookups("device")
    for queries, hits in ((1_000, 900), (5, 0), (0, 0)):
        lookups.answered(queries, hits)
    rows = told.rows("kvcache.lookup.blocks")
    assert (rows["device hit"], sum(rows.values())) == (900, 1_005)
    assert {spec.instrument for spec in semconv.METRICS.values() if spec.unit == "1"} == set()


# ----------------------------------------------------------------------------------------------------- moving


def test_two_overlapping_transfers_count_their_bytes_and_their_own_durations(told: Told) -> None:
    route = told.probe.route("device", "host", timing="device_event")
    route.active.add(1)  # t = 0
    route.active.add(1)  # t = 0.2
    assert told.rows("kvcache.transfer.active") == {"device host": 2}
    for _ in range(2):  # t = 1, t = 1.2
        route.moved.add(GIGABYTE)
        route.duration.record(1.0)
        route.finished.add()
        route.active.add(-1)
    assert told.rows("kvcache.transfer.io") == {"device host device_event": 2 * GIGABYTE}
    assert told.rows("kvcache.transfer.duration") == {"device host device_event": (2, 2.0)}
    assert told.rows("kvcache.transfer.operations") == {"device host": 2}
    assert told.rows("kvcache.transfer.active") == {"device host": 0}


def test_failed_transfers_are_apart_from_finished_ones(told: Told) -> None:
    route = told.probe.route("disk", "host", name="1:fs")
    route.finished.add(3)
    route.failures("TimeoutError").add()
    assert told.rows("kvcache.transfer.operations") == {"disk host 1:fs": 3, "disk host 1:fs TimeoutError": 1}


def test_transfers_by_two_clocks_are_one_route_and_two_series_of_durations(told: Told) -> None:
    by_event, by_clock = (told.probe.route("device", "host", timing=each) for each in ("device_event", "wall_clock"))
    by_event.duration.record(0.04)
    by_clock.duration.record(0.05)
    by_event.finished.add()
    by_clock.finished.add()
    assert told.rows("kvcache.transfer.duration") == {
        "device host device_event": (1, 0.04),
        "device host wall_clock": (1, 0.05),
    }
    assert told.rows("kvcache.transfer.operations") == {"device host": 2}


class FakeEvent:
    """Stands in for a device's event that it has passed; without `at_ms` one that cannot tell when."""

    def __init__(self, at_ms: float | None = None) -> None:
        self.at_ms = at_ms

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Any) -> float:
        if self.at_ms is None or end.at_ms is None:
            raise RuntimeError("events without timing")
        return end.at_ms - self.at_ms


def test_transfer_is_timed_by_its_event_pair_under_its_own_route(told: Told) -> None:
    stores, loads = told.probe.route("device", "host", timing="device_event"), told.probe.route("host", "device")
    stores.timed(FakeEvent(100.0), FakeEvent(140.0))
    assert told.probe.harvester.flush(20)
    assert told.rows("kvcache.transfer.duration") == {
        "device host device_event": (1, 0.04),
        "host device wall_clock": EMPTY,
    }
    told.probe.harvester.stop(20)
    assert loads.finished.value == 0


def test_transfer_whose_events_tell_no_time_counts_and_has_no_duration(told: Told) -> None:
    route = told.probe.route("device", "host", timing="device_event")
    route.timed(FakeEvent(), FakeEvent())
    route.finished.add()
    told.probe.harvester.stop(20)
    assert told.rows("kvcache.transfer.duration") == {"device host device_event": EMPTY}
    assert told.rows("kvcache.transfer.operations") == {"device host": 1}
    assert told.rows("kvcache.telemetry.dropped")["event_lost"] == 1


def test_pins_are_asked_for_once(told: Told) -> None:
    route = told.probe.route("host", "disk")
    assert told.rows("kvcache.transfer.active.blocks") == {}
    route.pins().set(12)
    assert route.pins() is route.pinned
    assert told.rows("kvcache.transfer.active.blocks") == {"host disk": 12}


def test_active_transfers_end_with_their_route(told: Told) -> None:
    told.probe.route("device", "host").active.add(1)
    assert told.rows("kvcache.transfer.active") == {}
    assert told.rows("kvcache.transfer.operations") == {"device host": 0}


def test_tier_that_the_engine_does_not_name_is_unknown(told: Told) -> None:
    route = told.probe.route("storage", "host")
    assert told.rows("kvcache.transfer.operations") == {"unknown host": 0}
    assert route.finished.value == 0


# ------------------------------------------------------------------------------------------------ prefetching


def test_prefetch_closes_when_part_is_declined_and_part_is_evicted(told: Told) -> None:
    prefetches = told.probe.prefetches("external", reasons=("host_capacity", "anchor_lost"))
    prefetches.hit.add(1_000)
    prefetches.outstanding.add(1_000)
    for reason, tokens in (("host_capacity", 300), ("anchor_lost", 200)):
        prefetches.unfulfilled(reason).add(tokens)
        prefetches.outstanding.add(-tokens)
    prefetches.fulfilled.add(500)
    prefetches.outstanding.add(-500)
    assert told.rows("kvcache.prefetch.unfulfilled.tokens") == {
        "external host_capacity": 300,
        "external anchor_lost": 200,
    }
    settled = prefetches.fulfilled.value + sum(told.rows("kvcache.prefetch.unfulfilled.tokens").values())
    assert (settled, told.rows("kvcache.prefetch.outstanding.tokens")) == (1_000, {"external": 0})
    assert told.accounting_errors() == {}


# ---------------------------------------------------------------------------------------------------- holding


def usage(told: Told) -> dict[str, Any]:
    return {key.removeprefix("device kv "): value for key, value in told.rows("kvcache.usage").items()}


def test_what_is_neither_free_nor_evictable_is_used(told: Told) -> None:
    pool = told.probe.pool("device", "kv")
    pool.settle(limit=1_000, free=300, evictable=200)
    assert usage(told) == {"used": 500, "evictable": 200, "free": 300}
    assert told.rows("kvcache.limit") == {"device kv": 1_000}


def test_engine_that_counts_evictable_as_free_has_no_row_for_it(told: Told) -> None:
    pool = told.probe.pool("device", "kv")
    pool.settle(limit=1_000, free=300)
    assert usage(told) == {"used": 700, "free": 300}


def test_more_free_than_there_is_leaves_nothing_used_and_is_one_error_while_it_lasts(told: Told) -> None:
    pool = told.probe.pool("device", "kv")
    for _ in range(3):
        pool.settle(limit=100, free=130)
        assert usage(told)["used"] == 0
    assert told.accounting_errors() == {"conservation": 1}


def test_books_that_broke_anew_are_another_error(told: Told) -> None:
    pool = told.probe.pool("device", "kv")
    for free, used, errors in ((130, 0, 1), (40, 60, 1), (101, 0, 2), (101, 0, 2), (100, 0, 2), (101, 0, 3)):
        pool.settle(limit=100, free=free)
        assert usage(told)["used"] == used
        assert sum(told.accounting_errors().values()) == errors


@pytest.mark.parametrize(
    ("limit", "free", "evictable"), [(100, -5, None), (100, 50, -5), (-1, 0, 0), (100, 120, -40), (100, 90, 20)]
)
def test_pool_that_tells_nonsense_is_never_negative_and_is_one_error(
    told: Told, limit: int, free: int, evictable: int | None
) -> None:
    pool = told.probe.pool("device", "kv")
    pool.settle(limit=limit, free=free, evictable=evictable)
    assert min([*usage(told).values(), *told.rows("kvcache.limit").values()]) >= 0
    assert told.accounting_errors() == {"conservation": 1}


@given(st.integers(0, 1_000), st.integers(0, 1_000), st.integers(0, 1_000))
def test_states_of_a_pool_add_up_to_its_limit(used: int, free: int, evictable: int) -> None:
    told = Told()
    pool = told.probe.pool("device", "kv")
    pool.settle(limit=used + free + evictable, free=free, evictable=evictable)
    assert usage(told) == {"used": used, "evictable": evictable, "free": free}
    assert told.accounting_errors() == {}


def test_row_of_a_pool_ends_with_the_pool(told: Told) -> None:
    told.probe.pool("device", "kv").settle(limit=100, free=100)
    assert usage(told) == {}
    assert told.rows("kvcache.limit") == {}


def test_accounting_error_told_by_an_adapter_counts_under_its_reason(told: Told) -> None:
    told.probe.accounting_error(semconv.Reason.RECOUNT)
    assert told.accounting_errors() == {"recount": 1}


class Copies:
    """What is under way, as an adapter may keep it."""

    def __init__(self) -> None:
        self.active: int | None = 3
        self.pinned: int | None = 24

    def forget(self) -> None:
        self.active = self.pinned = 0


def test_what_is_under_way_is_asked_when_it_is_read_and_ends_with_who_knows(told: Told) -> None:
    copies = Copies()
    route = told.probe.route("device", "host")
    route.ask(copies)
    assert told.rows("kvcache.transfer.active") == {"device host": 3}
    assert told.rows("kvcache.transfer.active.blocks") == {"device host": 24}
    copies.active = 2
    assert told.rows("kvcache.transfer.active") == {"device host": 2}
    del copies
    assert told.rows("kvcache.transfer.active.blocks") == {}
    assert told.rows("kvcache.transfer.active") == {"device host": 0}  # Of the route itself.


def test_a_forked_child_has_nothing_of_its_parents_pools_and_transfers(told: Told) -> None:
    copies = Copies()
    told.probe.route("device", "host").ask(copies)
    pool = told.probe.pool("device", "kv")
    pool.settle(limit=100, free=30)
    told.recorder.reset()
    assert (copies.active, copies.pinned) == (0, 0)
    assert (usage(told), told.rows("kvcache.limit")) == ({}, {})
    pool.settle(limit=100, free=40)
    assert usage(told) == {"used": 60, "free": 40}
