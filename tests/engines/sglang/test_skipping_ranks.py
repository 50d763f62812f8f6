"""Ranks whose keys and values another one writes to storage, since all of them have the same (MLA)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tests.conftest import require

require("sglang")

import torch  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer  # noqa: E402
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import StorageOperation  # noqa: E402

from kvcache_otel import semconv  # noqa: E402
from tests.engines.sglang.cache_driver import PAGE, TOKEN_BYTES, CacheDriver  # noqa: E402
from tests.engines.sglang.expected import BACKUP, NAME, WRITE  # noqa: E402
from tests.engines.sglang.oracle import own_counters  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.engines.sglang.conftest import Instrumented
    from tests.support.rows import Rows

    Make = Callable[..., CacheDriver]

pytestmark = pytest.mark.engine

PROMPTS = [range(start, start + 4 * PAGE) for start in (0, 1000, 2000)]
STATES = 2
"""Pages of states that a backup has."""

STATE_BYTES = 1000


def _as_rank(driver: CacheDriver, rank: int) -> None:
    """Lets a driver's storage be that of one rank of a model that has the same keys and values on all of them."""
    controller = driver.cache.cache_controller
    controller.storage_config.is_mla_model, controller.storage_config.tp_rank = True, rank
    assert controller.backup_skip == (rank != 0)


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_rank_that_writes_counts_writes(
    make: Make, instrumented: Instrumented, core: str, rank: int, tmp_path: Path
) -> None:
    driver = make(core=core, storage_dir=tmp_path)
    _as_rank(driver, rank)
    for prompt in PROMPTS:
        driver.insert(prompt)
        driver.settle()
    rows = instrumented.rows
    backups = 0 if rank else len(PROMPTS)
    blocks = 4 * backups
    assert driver.stored() == blocks
    assert _operations(rows) == {"": backups, "partial": 0, "_OTHER": 0}
    assert _samples(rows, semconv.TRANSFER_QUEUE_DURATION, **WRITE, **NAME) == backups
    assert _samples(rows, semconv.TRANSFER_DURATION, **WRITE, **NAME, timing="wall_clock") == backups
    assert rows.value(semconv.TRANSFER_ACTIVE, **WRITE, **NAME) == 0
    stored = own_counters(driver).stored_tokens
    assert rows.value(semconv.TRANSFER_TOKENS, **WRITE, pool="kv") == stored == blocks * PAGE
    assert rows.total(semconv.TRANSFER_IO, **WRITE) == blocks * PAGE * TOKEN_BYTES
    assert rows.value(semconv.TRANSFER_TOKENS, **BACKUP, pool="kv") == 4 * PAGE * len(PROMPTS)


@pytest.mark.parametrize(
    ("written", "outcome"), [((True, True), ""), ((True, False), "partial"), ((False, False), "_OTHER")]
)
def test_what_is_a_ranks_own_counts_by_itself(
    make: Make, instrumented: Instrumented, core: str, written: tuple[bool, ...], outcome: str, tmp_path: Path
) -> None:
    """States of a linear attention, which each rank has a part of: their bytes, and no keys and values."""
    driver = make(core=core, storage_dir=tmp_path)
    _as_rank(driver, 1)
    controller = driver.cache.cache_controller
    room = {"logical_size": 8, "available_size": lambda: 8, "destroy": lambda: None}
    states = SimpleNamespace(size_per_token=STATE_BYTES, page_size=1, **room)
    controller.mem_pool_host.entries.append(SimpleNamespace(name=PoolName.MAMBA, host_pool=states))
    active: list[Any] = []

    def write(transfers: list[Any], **_: Any) -> dict[Any, list[bool]]:
        active.append(instrumented.rows.value(semconv.TRANSFER_ACTIVE, **WRITE, **NAME))
        return {transfer.name: list(written) for transfer in transfers}

    controller.storage_backend.batch_set_v2 = write
    transfer = PoolTransfer(name=PoolName.MAMBA, host_indices=torch.arange(STATES), keys=["2", "3"])
    hashes = ["0", "1", "2", "3"]
    operation = StorageOperation(
        torch.arange(4 * PAGE), list(range(4 * PAGE)), hash_value=hashes, pool_transfers=[transfer]
    )
    controller._page_backup(operation)
    rows = instrumented.rows
    assert operation.completed_tokens == (4 * PAGE if all(written) else 0), "SGLang says so of its keys and values too"
    assert driver.stored() == 0
    assert active == [1]
    assert rows.value(semconv.TRANSFER_ACTIVE, **WRITE, **NAME) == 0
    assert _operations(rows) == {"": 0, "partial": 0, "_OTHER": 0, outcome: 1}
    assert rows.total(semconv.TRANSFER_IO, **WRITE) == STATE_BYTES * sum(written)
    assert _samples(rows, semconv.TRANSFER_DURATION, **WRITE, **NAME, timing="wall_clock") == any(written)
    assert rows.value(semconv.TRANSFER_TOKENS, **WRITE, pool="kv") == 0
    assert rows.value(semconv.TRANSFER_POOL_IO, **WRITE, pool="kv") == 0


def _operations(rows: Rows) -> dict[str, int | float]:
    """Writes to storage, by how they failed."""
    wanted = {semconv.KVCACHE_SOURCE_TIER: "host", semconv.KVCACHE_DESTINATION_TIER: "disk"}.items()
    return {
        str(dict(key).get(semconv.ERROR_TYPE, "")): value
        for key, value in rows.values(semconv.TRANSFER_OPERATIONS).items()
        if wanted <= dict(key).items()
    }


def _samples(rows: Rows, spec: Any, **labels: str) -> int:
    histogram = rows.histogram(spec, **labels)
    assert histogram is not None
    return sum(histogram.read()[0])
