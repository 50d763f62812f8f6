"""A cache's own books equal every metric, after every step of a random walk, and what must add up does."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

import kvcache_otel as kv
from kvcache_otel import semconv
from tests.engines.generic.little_cache import BYTES, PAGE, LittleCache
from tests.support.processes import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.engines.generic.conftest import Exported
    from tests.support.rows import Rows

TIERS: dict[str, Any] = {"device": "kv", "host": "kv", "disk": "kv"}

METHODS: dict[str, Any] = {
    "write_back": kv.Backup(
        when=lambda blocks, _: blocks is not None,
        tokens=lambda blocks, _: len(blocks) * PAGE,
        bytes=lambda blocks, _: len(blocks) * PAGE * BYTES,
    ),
    "bring": kv.LoadBack(
        tokens=lambda count, _: {"kv": count * PAGE},
        bytes=lambda count, _: count * PAGE * BYTES,
        seconds=lambda *_: 0.002,
    ),
    "store": kv.Copy(
        source="host",
        destination="disk",
        tokens=lambda _, call: len(call.blocks) * PAGE,
        bytes=lambda _, call: len(call[0]) * PAGE * BYTES,
        key=lambda job, _: job,
    ),
    "poll": kv.CopiesDone(source="host", destination="disk"),
    "ask_storage": kv.Prefetch(hit=lambda answer, _: answer[1] * PAGE),
    "make_room": kv.Eviction(tokens=lambda gone, _: len(gone) * PAGE),
    "trim_host": kv.Eviction(tier="host", tokens=lambda gone, _: gone * PAGE),
    "lose": kv.Drop(tokens=lambda _, call: len(call.blocks) * PAGE, reason="host_pressure"),
    "arrive": kv.HostInsert(
        loaded=lambda result, _: result["arrived"] * PAGE,
        fulfilled=lambda result, _: result["usable"] * PAGE,
        unfulfilled=lambda result, _: {"host_capacity": (result["arrived"] - result["usable"]) * PAGE},
        reasons=("host_capacity",),
    ),
    "serve": kv.Admission(
        prompt=lambda _, call: len(call.prompt) * PAGE,
        served=lambda served, _: {tier: blocks * PAGE for tier, blocks in served.items()},
    ),
}

GAUGES = kv.Gauges(
    resident={"device": lambda cache: len(cache.device), "host": lambda cache: len(cache.host)},
    block_size={"device": PAGE, "host": PAGE},
    pools={
        ("device", "kv"): kv.PoolSize(
            limit=lambda cache: cache.device_blocks * PAGE,
            free=lambda cache: (cache.device_blocks - len(cache.device)) * PAGE,
            evictable=lambda cache: len(cache.device) * PAGE,
        ),
        ("host", "kv"): kv.PoolSize(limit=40, free=lambda cache: 40 - len(cache.host) * PAGE),
    },
)

ROUTES = (("device", "host", "backup"), ("host", "device", "load"), ("host", "disk", "store"))


def differences(rows: Rows, cache: LittleCache) -> dict[str, tuple[Any, Any]]:
    """Returns what the rows say, and the truth, where they are not the same."""
    truth, told = cache.truth, dict[str, tuple[Any, Any]]()
    for source, destination, what in ROUTES:
        route = {"source": source, "destination": destination}
        timing = "engine_report" if what == "load" else "wall_clock"
        told[f"{what}s"] = rows.value(semconv.TRANSFER_OPERATIONS, **route), truth[f"{what}s"]
        told[f"{what} tokens"] = rows.value(semconv.TRANSFER_TOKENS, **route, pool="kv"), truth[f"{what} tokens"]
        moved = rows.value(semconv.TRANSFER_IO, **route, timing=timing)
        told[f"{what} bytes"] = moved, truth[f"{what} tokens"] * BYTES
        duration = rows.histogram(semconv.TRANSFER_DURATION, **route, timing=timing)
        told[f"{what} durations"] = sum(duration.read()[0]) if duration else None, truth[f"{what}s"]
        active = cache.storing if what == "store" else 0
        told[f"{what} active"] = rows.value(semconv.TRANSFER_ACTIVE, **route), active
    failures = rows.value(semconv.TRANSFER_OPERATIONS, source="device", destination="host", error="MemoryError")
    told["backup failures"] = failures or 0, truth["backup failures"]
    for tier in ("device", "host"):
        told[f"{tier} evicted"] = (
            rows.value(semconv.EVICTION_TOKENS, tier=tier, pool="kv"),
            truth[f"{tier} evicted tokens"],
        )
        told[f"{tier} served"] = rows.value(semconv.LOOKUP_TOKENS, tier=tier), truth[f"served {tier}"]
        held = len(getattr(cache, tier))
        told[f"{tier} resident"] = rows.value(semconv.RESIDENT_BLOCKS, tier=tier, view="held"), held
        told[f"{tier} block size"] = rows.value(semconv.BLOCK_SIZE, tier=tier), PAGE
        limit = getattr(cache, f"{tier}_blocks") * PAGE
        told[f"{tier} limit"] = rows.value(semconv.LIMIT, tier=tier, pool="kv"), limit
        told[f"{tier} usage"] = rows.total(semconv.USAGE, tier=tier, pool="kv"), limit
        free = rows.value(semconv.USAGE, tier=tier, pool="kv", state="free")
        told[f"{tier} free"] = free, limit - held * PAGE
    passes = rows.histogram(semconv.EVICTION_DURATION, tier="device")
    told["device passes"] = sum(passes.read()[0]) if passes else None, truth["device evictions"]
    dropped = rows.value(semconv.DROPPED_TOKENS, tier="device", pool="kv", reason="host_pressure")
    told["dropped"] = dropped, truth["dropped tokens"]
    told["prompt"] = rows.total(semconv.LOOKUP_TOKENS), truth["prompt"]
    for word in ("hit", "loaded", "fulfilled"):
        spec = semconv.METRICS[f"kvcache.prefetch.{word}.tokens"]
        told[f"prefetch {word}"] = rows.value(spec, tier="disk"), truth[f"{word} tokens"]
    unfulfilled = rows.total(semconv.PREFETCH_UNFULFILLED_TOKENS, tier="disk")
    told["prefetch unfulfilled"] = unfulfilled, truth["unfulfilled tokens"]
    outstanding = rows.value(semconv.PREFETCH_OUTSTANDING_TOKENS, tier="disk")
    told["prefetch outstanding"] = outstanding, sum(len(hit) * PAGE for _, hit in cache.fetched.values())
    closes = rows.total(semconv.PREFETCH_FULFILLED_TOKENS) + unfulfilled + (outstanding or 0)
    told["prefetches close"] = closes, rows.total(semconv.PREFETCH_HIT_TOKENS)
    told["errors"] = rows.total(semconv.TELEMETRY_ERRORS), 0
    told["contradictions"] = rows.total(semconv.ACCOUNTING_ERRORS), 0
    told["given up"] = rows.total(semconv.TELEMETRY_DROPPED), 0
    return {what: pair for what, pair in told.items() if pair[0] != pair[1]}


def step(cache: LittleCache, draw: random.Random) -> None:
    """Does something."""
    blocks = draw.sample(range(40), draw.randint(1, 12))
    what = draw.randrange(8)
    if what == 0:
        cache.serve(blocks[:8])
    elif what == 1:
        with suppress(MemoryError):
            cache.write_back(
                list(cache.device)[: draw.randint(0, 12)] if draw.random() < 0.8 else list(range(100, 111))
            )
    elif what == 2:
        cache.bring(blocks, urgent=True)
    elif what == 3:
        cache.store(blocks=list(cache.host)[:3]) if draw.random() < 0.5 else cache.store(list(cache.host)[:3])
    elif what == 4:
        cache.poll()
    elif what == 5:
        cache.ask_storage(blocks)
    elif what == 6 and cache.fetched:
        cache.arrive(draw.choice(list(cache.fetched)))
    else:
        cache.make_room(draw.randint(0, 3))


def whole(cache: LittleCache, exported: Exported) -> list[Any]:
    return [
        kv.instrument_controller(cache, tiers=TIERS, methods=METHODS, gauges=GAUGES, meter_provider=exported.provider)
    ]


@pytest.mark.parametrize("seed", range(4))
def test_the_books_of_the_cache_are_the_rows_after_every_step(exported: Exported, seed: int) -> None:
    cache, draw = LittleCache(10, 10), random.Random(seed)
    (handle,) = whole(cache, exported)
    assert handle.missing == ()
    rows = exported.rows
    assert differences(rows, cache) == {}  # All at zero.
    for _ in range(300):
        step(cache, draw)
        assert differences(rows, cache) == {}
    assert min(cache.truth[word] for word in ("backups", "loads", "stores", "dropped tokens", "hit tokens")) > 0
    assert cache.truth["backup failures"] > 0
    assert cache.truth["unfulfilled tokens"] > 0


def test_so_they_are_with_a_storage_thread(exported: Exported) -> None:
    cache, draw = LittleCache(10, 10, storage_thread=True), random.Random(9)
    whole(cache, exported)
    for _ in range(500):
        step(cache, draw)
        assert differences(exported.rows, cache) == {}
    cache.close()
    cache.poll()
    assert cache.storing == 0
    assert differences(exported.rows, cache) == {}
    assert cache.truth["stores"] > 10


def test_the_walk_sees_what_is_wrong(exported: Exported) -> None:
    cache, draw = LittleCache(10, 10), random.Random(1)
    methods = {**METHODS, "trim_host": kv.Eviction(tier="host", tokens=lambda gone, _: gone)}
    kv.instrument_controller(cache, tiers=TIERS, methods=methods, gauges=GAUGES, meter_provider=exported.provider)
    for _ in range(300):
        step(cache, draw)
    assert set(differences(exported.rows, cache)) == {"host evicted"}


def test_what_is_recorded_comes_out_of_the_provider(exported: Exported) -> None:
    cache, draw = LittleCache(10, 10), random.Random(2)
    whole(cache, exported)
    for _ in range(100):
        step(cache, draw)
    wanted = {"kvcache.transfer.io", "kvcache.lookup.tokens", "kvcache.usage", "kvcache.prefetch.outstanding.tokens"}
    wait_until(lambda: wanted | {"kvcache.transfer.duration"} <= exported.names())


class Tree:
    """A tree beside a controller, that ends what the other has begun."""

    def __init__(self) -> None:
        self.done: list[int] = []

    def insert(self, tokens: int) -> int:
        return tokens

    def acknowledge(self) -> list[int]:
        done, self.done = self.done, []
        return done


class Controller:
    """Begins copies and prefetches, and ends none."""

    def start(self, number: int) -> int:
        return number

    def ask(self, tokens: int) -> int:
        return tokens


@pytest.mark.parametrize("order", [1, -1])
def test_what_one_object_begins_another_of_the_same_cache_may_end(exported: Exported, order: int) -> None:
    controller, tree = Controller(), Tree()
    begins: dict[str, Any] = {
        "start": kv.Backup(tokens=1, bytes=2, key=lambda number, _: number),
        "ask": kv.Prefetch(hit=lambda tokens, _: tokens),
    }
    ends: dict[str, Any] = {
        "acknowledge": kv.CopiesDone(source="device", destination="host", seconds=lambda key, _: key / 10),
        "insert": kv.HostInsert(loaded=lambda n, _: n, fulfilled=lambda n, _: n, unfulfilled=lambda *_: {}),
    }
    makers: list[Callable[..., Any]] = [
        lambda **about: kv.instrument_controller(controller, methods=begins, **about),
        lambda **about: kv.instrument_tree_core(tree, methods=ends, **about),
    ]
    first, second = makers[::order]
    handle = first(tiers=TIERS, cache="Both", meter_provider=exported.provider)
    other = second(beside=handle)
    rows, route = exported.rows, {"source": "device", "destination": "host"}
    for number in (1, 2, 3):
        controller.start(number)
    controller.ask(100)
    assert rows.value(semconv.TRANSFER_ACTIVE, **route) == 3
    assert rows.value(semconv.PREFETCH_OUTSTANDING_TOKENS, tier="disk") == 100
    tree.done = [3, 1]
    tree.acknowledge()
    tree.insert(60)
    assert rows.value(semconv.TRANSFER_ACTIVE, **route) == 1
    assert rows.value(semconv.PREFETCH_OUTSTANDING_TOKENS, tier="disk") == 40
    duration = rows.histogram(semconv.TRANSFER_DURATION, **route, timing="engine_report")
    assert duration is not None
    assert duration.read()[1] == pytest.approx(0.4)
    tree.insert(60)  # More than was ever hit.
    assert rows.value(semconv.PREFETCH_OUTSTANDING_TOKENS, tier="disk") == 0
    assert rows.value(semconv.ACCOUNTING_ERRORS, reason="underflow") == 1
    handle.remove()
    assert rows.value(semconv.TRANSFER_ACTIVE, **route) == 1
    other.remove()
    assert rows.value(semconv.TRANSFER_ACTIVE, **route) is None
    with pytest.raises(ValueError, match="not instrumented any more"):
        kv.instrument_controller(Controller(), beside=handle)
