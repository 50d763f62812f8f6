"""Whose rows are whose: ranks of every kind, one cache each, in one process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.conftest import require

require("sglang")

from kvcache_otel import semconv  # noqa: E402
from kvcache_otel.engines.sglang import config  # noqa: E402
from tests.engines.sglang import cpu  # noqa: E402
from tests.engines.sglang.cache_driver import PAGE, CacheDriver  # noqa: E402
from tests.engines.sglang.expected import assert_equals_sglang  # noqa: E402
from tests.support.rows import Rows  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.engines.sglang.conftest import Instrumented

pytestmark = pytest.mark.engine

Labels = tuple[int, int, int]
"""The ranks of tensor, pipeline and data parallelism."""

TOPOLOGIES: dict[str, list[tuple[cpu.Ranks, Labels]]] = {
    "alone": [(cpu.single(), (0, 0, 0))],
    "pure TP": [(cpu.tensor_parallel(rank, 4), (rank, 0, 0)) for rank in range(4)],
    "pure DP": [(cpu.data_parallel(dp, 2, tp_rank=tp, tp_size=2), (tp, 0, dp)) for dp in range(2) for tp in range(2)],
    "PP": [(cpu.pipeline_parallel(pp, 2, tp_rank=tp, tp_size=2), (tp, pp, 0)) for pp in range(2) for tp in range(2)],
    "DP attention": [
        (cpu.attention_data_parallel(rank, 4, 2), labels)
        for rank, labels in enumerate([(0, 0, 0), (1, 0, 0), (0, 0, 1), (1, 0, 1)])
    ],
}


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_every_row_of_a_rank_has_its_labels(
    make: Callable[..., CacheDriver], instrumented: Instrumented, core: str, name: str, tmp_path: Path
) -> None:
    """Those of the host and those of storage carry the same."""
    for ranks, labels in TOPOLOGIES[name]:
        storage = tmp_path / "-".join(map(str, labels))
        storage.mkdir()  # SGLang leaves it to the first rank.
        driver = make(core=core, ranks=ranks, storage_dir=storage)
        # As many blocks as nobody else has, so that rows that got mixed up would show.
        prompt = list(range((2 + labels[0] + 4 * labels[1] + 8 * labels[2]) * PAGE))
        driver.insert(prompt)
        driver.settle()
        driver.evict(1000)
        driver.evict_host(1000)
        driver.settle()
        driver.prefetch([*prompt, 1], "again")
        driver.settle()
        rows = Ranked(instrumented, labels)
        assert_equals_sglang(rows, driver, timing="wall_clock")
        assert {dict(key)[semconv.KVCACHE_CACHE_TYPE] for key in rows.whole(semconv.LIMIT)} == {"UnifiedRadixCache"}
        assert {dict(key)[semconv.KVCACHE_ENGINE] for key in rows.whole(semconv.LIMIT)} == {"sglang"}
        for spec in (semconv.TRANSFER_IO, semconv.PREFETCH_LOADED_TOKENS, semconv.EVICTION_TOKENS):
            assert rows.total(spec), spec.name
    seen = {_labels(point.attributes) for spec in semconv.METRICS.values() for point in _points(instrumented, spec)}
    assert seen == {labels for _, labels in TOPOLOGIES[name]}


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_no_two_ranks_of_a_machine_want_the_same_port(instrumented: Instrumented, name: str) -> None:
    for ranks, _ in TOPOLOGIES[name]:
        with CacheDriver(ranks=ranks, hicache=False):
            pass
    assert instrumented.ports == list(range(len(TOPOLOGIES[name])))


def test_ports_start_again_on_every_machine() -> None:
    ports: list[int] = []
    for rank in range(4):
        cpu.set_ranks(**{**cpu.tensor_parallel(rank, 4), "nnodes": 2})
        ports.append(config.local_rank())
    cpu.set_ranks(**cpu.single())
    assert ports == [0, 1, 0, 1]


def test_shards_of_context_parallel_ranks_are_told_apart() -> None:
    """Under DP attention they have the same attention rank, and a shard of the KV each."""
    identities = set()
    for cp in range(2):
        ranks = {**cpu.attention_data_parallel(0, 8, 2), "attn_tp_size": 2, "attn_cp_size": 2, "attn_cp_rank": cp}
        for tp in range(2):
            cpu.set_ranks(**{**ranks, "attn_tp_rank": tp, "tp_rank": 2 * cp + tp})
            identities.add(config.identity(object()).rank)
    cpu.set_ranks(**cpu.single())
    assert sorted(rank.tp for rank in identities) == [0, 1, 2, 3]


def test_c1_four_ranks_back_up_the_same_tokens(make: Callable[..., CacheDriver], instrumented: Instrumented) -> None:
    """C1: four series of 1024 tokens, to read one of; the bytes beside them are to be added."""
    for rank in range(4):
        driver = make(ranks=cpu.tensor_parallel(rank, 4), device_tokens=1024, host_ratio=1.0)
        driver.insert(list(range(1024)))
        driver.settle()
    route = {"source": "device", "destination": "host"}
    by_rank = [Ranked(instrumented, (rank, 0, 0)) for rank in range(4)]
    assert [rows.value(semconv.TRANSFER_TOKENS, **route, pool="kv") for rows in by_rank] == [1024] * 4
    assert semconv.TRANSFER_TOKENS.fold == "one_rank"
    token_bytes = driver.cache.host_pool_group.anchor_entry.host_pool.size_per_token
    assert sum(rows.total(semconv.TRANSFER_IO, **route) for rows in by_rank) == 4 * 1024 * token_bytes
    assert semconv.TRANSFER_IO.fold == "sum"


class Ranked(Rows):
    """The rows of one rank among those of several."""

    def __init__(self, instrumented: Instrumented, labels: Labels) -> None:
        super().__init__(instrumented.rows.recorder)
        self._labels = labels

    def values(self, spec: Any) -> dict[frozenset[tuple[str, str | int]], int | float]:
        return {
            frozenset(item for item in key if item[0] not in semconv.IDENTITY_ATTRIBUTES): value
            for key, value in self.whole(spec).items()
        }

    def whole(self, spec: Any) -> dict[frozenset[tuple[str, str | int]], int | float]:
        """The same with the attributes of the identity."""
        points = self.recorder.points(spec)
        return {frozenset(p.attributes.items()): p.value for p in points if _labels(p.attributes) == self._labels}

    def histogram(self, spec: Any, **labels: str) -> Any:
        wanted = frozenset((self._keys[name], value) for name, value in labels.items())
        for row in self.recorder.histograms(spec):
            own = frozenset(item for item in row.attributes.items() if item[0] not in semconv.IDENTITY_ATTRIBUTES)
            if own == wanted and _labels(row.attributes) == self._labels:
                return row.cell
        return None

    @property
    def _keys(self) -> dict[str, str]:
        from tests.support.rows import KEYS

        return KEYS


def _labels(attributes: dict[str, Any]) -> Any:
    names = (semconv.KVCACHE_RANK_TP, semconv.KVCACHE_RANK_PP, semconv.KVCACHE_RANK_DP)
    return tuple(attributes.get(name) for name in names)


def _points(instrumented: Instrumented, spec: Any) -> Any:
    # What is about the process speaks as that one.
    if spec in (semconv.ACCOUNTING_ERRORS,) or spec.name.startswith("kvcache.telemetry."):
        return []
    return list(instrumented.recorder.points(spec))
