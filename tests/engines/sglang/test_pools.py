"""Pools beside that of keys and values. The models that have them need a GPU: their pools are made up here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import require

require("sglang")

import torch  # noqa: E402

from kvcache_otel import semconv  # noqa: E402
from kvcache_otel.engines.sglang import config  # noqa: E402
from kvcache_otel.engines.sglang.device import DeviceRows  # noqa: E402
from kvcache_otel.engines.sglang.host import HostRows  # noqa: E402
from kvcache_otel.engines.sglang.pools import settle  # noqa: E402
from kvcache_otel.engines.sglang.storage import StorageRows  # noqa: E402
from kvcache_otel.engines.sglang.transfer import DirectionRows  # noqa: E402
from kvcache_otel.identity import Identity  # noqa: E402
from kvcache_otel.record.probe import CacheProbe  # noqa: E402
from kvcache_otel.record.recorder import Recorder  # noqa: E402
from tests.support.rows import Rows  # noqa: E402

pytestmark = pytest.mark.engine

PAGE = 4
ROUTE = {"source": "device", "destination": "host"}
READ = {"source": "external", "destination": "host", "name": "mooncake", "timing": "wall_clock"}
WRITE = {"source": "host", "destination": "external", "name": "mooncake", "timing": "wall_clock"}


class FakePool:
    """A host pool with no memory behind it."""

    def __init__(self, slots: int, free: int, token_bytes: int, page_size: int = PAGE) -> None:
        self.logical_size = slots
        self.free = free
        self.size_per_token = token_bytes
        self.page_size = page_size

    def available_size(self) -> int:
        return self.free


def _entry(name: str, pool: FakePool) -> Any:
    return SimpleNamespace(name=config_name(name), host_pool=pool)


def config_name(name: str) -> Any:
    from sglang.srt.mem_cache.hicache_storage import PoolName

    return PoolName(name)


class FakeCache:
    """A cache of a hybrid model, as far as rows look at it: three pools, and an indexer that rides on the first."""

    page_size = PAGE

    def __init__(self) -> None:
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

        self.kv, self.swa, self.mamba = FakePool(64, 60, 100), FakePool(32, 20, 50), FakePool(8, 5, 1000, 1)
        self.indexer = FakePool(64, 64, 10)
        entries = [_entry("kv", self.kv), _entry("swa", self.swa), _entry("mamba", self.mamba)]
        self.host_pool_group = SimpleNamespace(entries=entries, anchor_entry=entries[0])
        self.sidecar_pool_specs: list[Any] = []
        self.tree_components = (ComponentType.FULL, ComponentType.SWA, ComponentType.MAMBA)
        sizes = {"full": (16, 4), "swa": (8, 0), "mamba": (2, 1)}
        self.tree_core = SimpleNamespace(
            **{f"{name}_evictable_size": lambda both=both: both[0] for name, both in sizes.items()},
            **{f"{name}_protected_size": lambda both=both: both[1] for name, both in sizes.items()},
        )
        self.token_to_kv_pool_allocator = SimpleNamespace(
            size_full=128, full_available_size=lambda: 100, size_swa=40, swa_available_size=lambda: 30
        )
        self.req_to_token_pool = SimpleNamespace(mamba_allocator=SimpleNamespace(size=10, available_size=lambda: 6))
        self.cache_controller = SimpleNamespace(
            page_size=PAGE,
            storage_backend_type="mooncake",
            mem_pool_host=self.host_pool_group,
            l2_transfer_engine=SimpleNamespace(device_to_host_stream=None),
        )

    def supports_swa(self) -> bool:
        return True

    def supports_mamba(self) -> bool:
        return True

    def add_rider(self) -> None:
        """What SGLang does when the cache has been built, for a draft model or an indexer."""
        entry = _entry("indexer", self.indexer)
        self.host_pool_group.entries.append(entry)
        spec = SimpleNamespace(pool_name=entry.name, indices_from_pool=config_name("kv"))
        self.sidecar_pool_specs.append(spec)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder(Identity("sglang", "test"))


@pytest.fixture
def probe(recorder: Recorder) -> CacheProbe:
    return CacheProbe(recorder, recorder.identity)


@pytest.fixture
def rows(recorder: Recorder) -> Rows:
    return Rows(recorder)


def test_every_pool_of_the_device(probe: CacheProbe, rows: Rows) -> None:
    cache = FakeCache()
    device = DeviceRows(probe, cache)
    settle([device])
    for pool, limit, free, evictable in (("kv", 128, 100, 16), ("swa", 40, 30, 8), ("mamba", 10, 6, 2)):
        where = {"tier": "device", "pool": pool}
        assert rows.value(semconv.LIMIT, **where) == limit
        assert rows.value(semconv.USAGE, **where, state="free") == free
        assert rows.value(semconv.USAGE, **where, state="evictable") == evictable
        assert rows.value(semconv.USAGE, **where, state="used") == limit - free - evictable
    assert rows.value(semconv.RESIDENT_BLOCKS, tier="device", view="held") == (16 + 4) // PAGE
    full, swa, mamba = cache.tree_components
    tracker = {full: 0, swa: 0, mamba: 0}
    ended = device.eviction(tracker)
    tracker.update({swa: 12, mamba: 3})
    ended(None, None)
    passes = rows.histogram(semconv.EVICTION_DURATION, tier="device")
    assert passes is not None
    assert sum(passes.read()[0]) == 0  # As SGLang counts them: by what was freed of full attention.
    ended = device.eviction(tracker)
    tracker.update({full: 8, swa: 0, mamba: 0})
    ended(None, None)
    assert sum(passes.read()[0]) == 1
    for pool, tokens in (("kv", 8), ("swa", 12), ("mamba", 3)):
        assert rows.value(semconv.EVICTION_TOKENS, tier="device", pool=pool) == tokens


def test_every_pool_of_the_host_but_those_that_ride(probe: CacheProbe, rows: Rows) -> None:
    cache = FakeCache()
    host = HostRows(probe, cache)
    settle([host])
    cache.add_rider()
    settle([host])
    used = {
        str(dict(key)[semconv.KVCACHE_POOL]): value
        for key, value in rows.values(semconv.USAGE).items()
        if dict(key)[semconv.KVCACHE_STATE] == "used"
    }
    assert used == {"kv": 4, "swa": 12, "mamba": 3}
    assert rows.value(semconv.LIMIT, tier="host", pool="mamba") == 8
    assert rows.value(semconv.LIMIT, tier="host", pool="indexer") is None


def test_what_the_host_holds_and_what_it_evicts(probe: CacheProbe, rows: Rows) -> None:
    cache = FakeCache()
    host = HostRows(probe, cache)
    full, swa, mamba = cache.tree_components
    host.backup_began("node", [0] * 12, 12)
    assert rows.value(semconv.RESIDENT_BLOCKS, tier="host", view="held") == 0
    host.backup_done(["node", "of another cache"])
    host.hold()
    assert rows.value(semconv.RESIDENT_BLOCKS, tier="host", view="held") == 3
    host.freed([torch.arange(4), torch.arange(4)])
    host.hold()
    assert rows.total(semconv.EVICTION_TOKENS) == 0
    assert rows.value(semconv.RESIDENT_BLOCKS, tier="host", view="held") == 1
    host.evicted({full: 4, swa: 5, mamba: 0})
    assert rows.value(semconv.EVICTION_TOKENS, tier="host", pool="kv") == 4
    assert rows.value(semconv.EVICTION_TOKENS, tier="host", pool="swa") == 5
    assert rows.value(semconv.EVICTION_TOKENS, tier="host", pool="mamba") == 0


def test_bytes_of_a_retracted_request_count_every_pool_once(probe: CacheProbe, rows: Rows) -> None:
    cache = FakeCache()
    cache.add_rider()
    copies = DirectionRows(probe, cache, "device", "host", stream="device_to_host_stream", queued=True)
    kv, swa, indexer = (
        SimpleNamespace(host_pool=pool, host_indices=torch.arange(slots), is_draft=False)
        for pool, slots in ((cache.kv, 8), (cache.swa, 4), (cache.indexer, 8))
    )
    packed = SimpleNamespace(host_pool=cache.kv, host_indices=torch.arange(8), is_draft=True)
    finish = copies.retracting()
    completion = SimpleNamespace(timing_enabled=False, start_event=None, finish_event=None)
    copies.submitting([kv, swa, indexer, packed])(completion, None)
    assert rows.value(semconv.TRANSFER_ACTIVE, **ROUTE) == 1
    assert rows.value(semconv.TRANSFER_ACTIVE_BLOCKS, **ROUTE) == 2
    backup = SimpleNamespace(
        host_indices=range(8),
        pool_transfers=[
            SimpleNamespace(name=config_name("swa"), host_indices=range(4), indices_from_pool=None),
            SimpleNamespace(name=config_name("indexer"), host_indices=None, indices_from_pool=config_name("kv")),
        ],
    )
    finish(backup, None)
    assert rows.total(semconv.TRANSFER_IO, **ROUTE) == 8 * 100 + 4 * 50 + 8 * 10
    assert rows.value(semconv.TRANSFER_TOKENS, **ROUTE, pool="kv") == 8
    assert rows.value(semconv.TRANSFER_TOKENS, **ROUTE, pool="swa") == 4
    assert rows.value(semconv.TRANSFER_POOL_IO, **ROUTE, pool="kv") == 8 * 100
    assert rows.value(semconv.TRANSFER_POOL_IO, **ROUTE, pool="swa") == 4 * 50
    assert rows.value(semconv.TRANSFER_TOKENS, **ROUTE, pool="indexer") is None
    assert rows.value(semconv.TRANSFER_ACTIVE, **ROUTE) == 0
    assert rows.value(semconv.TRANSFER_ACTIVE_BLOCKS, **ROUTE) == 0


def test_storage_counts_the_bytes_of_every_pool(probe: CacheProbe, rows: Rows) -> None:
    cache = FakeCache()
    cache.add_rider()
    facts = config.StorageFacts(hits=True, loads=True, skips=False)
    storage = StorageRows(probe, cache.cache_controller, tells=facts)
    riding = SimpleNamespace(name=config_name("indexer"), indices_from_pool=config_name("kv"))
    apart = SimpleNamespace(name=config_name("mamba"), indices_from_pool=None)
    read = SimpleNamespace(
        hash_value=["a", "b", "c"],
        start_time=0.0,
        pool_transfers=[riding, apart],
        is_terminated=lambda: False,
        _kvcache_otel_pages=3,
    )
    storage.reading(read)(None, None)
    storage.read_besides({"mamba": 1, "swa": 0})
    assert rows.value(semconv.TRANSFER_IO, **READ) == 3 * PAGE * (100 + 10) + 1000
    assert rows.value(semconv.TRANSFER_TOKENS, source="external", destination="host", pool="kv") == 3 * PAGE
    assert rows.value(semconv.TRANSFER_POOL_IO, source="external", destination="host", pool="kv") == 3 * PAGE * 100

    written = SimpleNamespace(
        id=1,
        hash_value=["a", "b"],
        completed_tokens=2 * PAGE,
        pool_transfers=[riding, apart],
        pool_storage_result=SimpleNamespace(extra_pool_hit_pages={"indexer": 2, "mamba": 1}),
    )
    storage.writing(written)(None, None)
    whole = 2 * PAGE * (100 + 10) + 1000
    assert rows.value(semconv.TRANSFER_IO, **WRITE) == whole
    storage.writing_besides(written)(None, None)  # Another rank writes the keys and values.
    assert rows.value(semconv.TRANSFER_IO, **WRITE) == whole + 2 * PAGE * 10 + 1000
    assert rows.value(semconv.TRANSFER_TOKENS, source="host", destination="external", pool="kv") == 2 * PAGE
    assert rows.value(semconv.TRANSFER_POOL_IO, source="host", destination="external", pool="kv") == 2 * PAGE * 100


@pytest.mark.parametrize(
    ("kind", "extra", "expected"),
    [
        ("file", None, ("disk", "file")),
        ("mooncake", None, ("external", "mooncake")),
        ("hf3fs", None, ("external", "hf3fs")),
        ("nixl", {}, ("external", "nixl")),
        ("dynamic", {"backend_name": "mine"}, ("external", "mine")),
        ("dynamic", None, ("external", "dynamic")),
    ],
)
def test_the_tier_of_a_backend(kind: str, extra: dict[str, Any] | None, expected: tuple[str, str]) -> None:
    controller = SimpleNamespace(storage_backend_type=kind, storage_config=SimpleNamespace(extra_config=extra))
    assert config.storage(controller) == expected


def test_the_name_of_every_pool_of_sglangs() -> None:
    from sglang.srt.mem_cache.hicache_storage import PoolName

    names = {name.value: config.pool(name) for name in PoolName}
    assert names["kv"] == "kv"
    assert names["swa"] == names["auxiliary_swa"] == "swa"
    assert names["mamba"] == "mamba"
    assert names["indexer"] == "indexer"
    assert {names[name] for name in names if name.startswith("draft")} == {"draft"}
    assert set(names.values()) <= semconv.ATTRIBUTES[semconv.KVCACHE_POOL].members
