"""Drives vLLM's real tiered offloading manager and its real copy worker, without a model or an engine.

Real: the manager with its host tier (LRU or ARC) in shared memory, the file-system tier with its threads and block
files, back-pressure, and vLLM's own statistics. Stood in for: the scheduler, by `ManagerDriver`, which calls the
manager in the order in which the scheduler does; and the copies between device and host, by writing the bytes straight
into host memory, unless a `Worker` is used.

Two independent witnesses tell what happened: `ManagerDriver.totals`, which adds up all that vLLM said of itself, and
`ManagerDriver.recount`, which counts by walking the manager's structures, whatever its counters say.

Blocks are plain numbers here. A block's key and its bytes follow from its number.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
import uuid
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import numpy as np
import torch
from examples.vllm_cpu.engine import fs_tier
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    LookupResult,
    OffloadingEvent,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.cpu.policies.arc import ARCCachePolicy
from vllm.v1.kv_offload.cpu.policies.lru import LRUCachePolicy
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from tests.engines.vllm.backpressure import ALWAYS

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from vllm.v1.kv_offload.base import TransferResult
    from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
    from vllm.v1.kv_offload.cpu.policies.base import ChunkStatus

LAYERS = 2
PAGE_BYTES = 4096
"""Bytes of one layer's share of a block."""

CHUNK_BYTES = LAYERS * PAGE_BYTES
"""Bytes of a block: what the host tier allocates, and what a block file holds."""

UNRESOLVED = (LookupResult.RETRY, LookupResult.HIT_PENDING)
METRIC_PREFIX = "vllm:kv_offload_"
SHORT_FILE_BYTES = 100


def key(block: int) -> OffloadKey:
    """The key of a block."""
    return make_offload_key(hashlib.sha256(b"block %d" % block).digest(), 0)


def content(block: int) -> bytes:
    """The bytes of a block."""
    return bytes([(block * 37 + 11) % 251]) * CHUNK_BYTES


def backpressure(**options: Any) -> dict[str, Any]:
    """A tier's ``backpressure`` that drops every store once two have finished, with ``options`` instead."""
    return {**ALWAYS, **options}


def make_config(
    chunks: int = 8,
    tiers: Sequence[Mapping[str, Any]] = (),
    *,
    policy: Literal["lru", "arc"] = "lru",
    events: bool = True,
    rank: int = 0,
    tensor_parallel_size: int = 1,
    data_parallel_index: int = 0,
    data_parallel_size: int = 1,
    engine_id: str | None = None,
    **extra: Any,
) -> OffloadingConfig:
    """The configuration that vLLM would make for an engine.

    Args:
        chunks: Blocks that the host tier has room for.
        tiers: The tiers behind the host, e.g. `fs_tier`.
        policy: How the host tier evicts.
        events: Whether KV events are collected.
        rank: The worker's rank; 0 for the manager.
        tensor_parallel_size: The number of ranks.
        data_parallel_index: Which of the data-parallel engines this is.
        data_parallel_size: How many of them there are.
        engine_id: The engine's name; by default, one of its own.
        extra: Further entries of ``kv_connector_extra_config``.
    """
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(tokens_per_block=16, layer_names=("layer.0", "layer.1"), group_id=0),),
        worker_kv_bytes_per_block=CHUNK_BYTES,
        enable_kv_cache_events=events,
        extra_config={
            "cpu_bytes_to_use": chunks * CHUNK_BYTES * tensor_parallel_size,
            "eviction_policy": policy,
            "secondary_tiers": [dict(tier) for tier in tiers],
            **extra,
        },
        engine_id=engine_id or f"kvcache-otel-test-{uuid.uuid4().hex[:12]}",
        model=OffloadingModelConfig(name="tiny", dtype="bfloat16"),
        cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=OffloadingParallelConfig(
            rank=rank,
            world_size=tensor_parallel_size,
            tp_size=tensor_parallel_size,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=data_parallel_index,
            data_parallel_size=data_parallel_size,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=True,
        ),
    )


Series = tuple[str, tuple[str, ...]]
"""A metric's full name and its label values."""


@dataclass
class Totals:
    """All that vLLM said of itself so far, by `Series`.

    Attributes:
        counters: The sum of what each counter was increased by.
        gauges: The last value of each gauge.
        samples: Every sample of each histogram, in order.
    """

    counters: defaultdict[Series, float] = field(default_factory=lambda: defaultdict(float))
    gauges: dict[Series, float] = field(default_factory=dict)
    samples: defaultdict[Series, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, types: Mapping[str, str], values: Mapping[str, Mapping[tuple[str, ...], Any]]) -> None:
        """Add what one call of ``get_stats`` returned."""
        for name, by_labels in values.items():
            for labels, value in by_labels.items():
                match types[name]:
                    case "counter":
                        self.counters[name, labels] += value
                    case "gauge":
                        self.gauges[name, labels] = value
                    case "histogram":
                        self.samples[name, labels].extend(value)
                    case other:
                        raise AssertionError(f"{name} is a {other}: vLLM has a new type of metric")

    def counter(self, name: str, *labels: str) -> float:
        """A counter's total, 0 where vLLM never spoke of it. Names may go without ``vllm:kv_offload_``."""
        return self.counters.get((_full_name(name), labels), 0)

    def gauge(self, name: str, *labels: str) -> float | None:
        """A gauge's last value, None where vLLM never spoke of it."""
        return self.gauges.get((_full_name(name), labels))

    def histogram(self, name: str, *labels: str) -> list[float]:
        """A histogram's samples."""
        return list(self.samples.get((_full_name(name), labels), ()))


def _full_name(name: str) -> str:
    return name if name.startswith(METRIC_PREFIX) else METRIC_PREFIX + name


class JobKind(NamedTuple):
    """What `Recount.jobs` is counted by. The tier is labelled as in vLLM's metrics, e.g. ``1:fs``."""

    tier: str
    is_promotion: bool


@dataclass(frozen=True)
class Recount:
    """The manager's state, counted by walking its structures.

    Attributes:
        capacity: Blocks that the host tier has room for.
        evictable: Blocks that are ready and that nothing refers to.
        referenced: Blocks that are ready and being read.
        write_pending: Blocks that are being written, and not ready yet.
        queued_promotions: Blocks whose promotion is decided but not submitted yet; they are write-pending too.
        jobs: Transfers between the host and other tiers that are under way.
        job_blocks: The blocks of these transfers.
    """

    capacity: int
    evictable: int
    referenced: int
    write_pending: int
    queued_promotions: int
    jobs: Mapping[JobKind, int]
    job_blocks: Mapping[JobKind, int]

    @property
    def used(self) -> int:
        """Blocks that cannot be evicted now."""
        return self.referenced + self.write_pending

    @property
    def resident(self) -> int:
        """Blocks that hold or are about to hold something."""
        return self.evictable + self.used

    @property
    def free(self) -> int:
        """The rest."""
        return self.capacity - self.resident


@dataclass
class PendingStore:
    """A store for which room is made, and whose copy from the device is under way."""

    request: ReqContext
    output: PrepareStoreOutput


@dataclass
class Pins:
    """Blocks that are being read, as by a copy to the device that takes its time: nothing can evict them."""

    driver: ManagerDriver
    request: ReqContext
    keys: list[OffloadKey]

    def release(self) -> None:
        """End it. A second call does nothing."""
        if self.keys:
            self.driver.manager.complete_load(self.keys, self.request)
            self.keys = []

    def forget(self) -> None:
        """Drop it without a word to the manager, as a reset of the cache has it."""
        self.keys = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.release()


class ManagerDriver:
    """A stand-in for the scheduler: calls a real manager in the scheduler's order.

    Attributes:
        manager: vLLM's manager.
        spec: The spec that it was made by.
        totals: What vLLM said of itself, up to the last `step` or `drain`.
    """

    def __init__(
        self, config: OffloadingConfig, spec_class: type[TieringOffloadingSpec] = TieringOffloadingSpec
    ) -> None:
        self.spec = spec_class(config)
        manager = self.spec.get_manager()
        assert isinstance(manager, TieringOffloadingManager)
        self.manager = manager
        self.totals = Totals()
        self._requests = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End the manager: its threads stop, its shared memory goes."""
        self.manager.shutdown()

    # -- requests

    def request(self) -> ReqContext:
        """A new request, made known to the manager."""
        self._requests += 1
        request = ReqContext(req_id=f"request-{self._requests}")
        self.manager.on_new_request(request)
        return request

    def finish(self, request: ReqContext) -> None:
        """The request is over: it will store and look up nothing more, though its copies may still be under way."""
        self.manager.on_request_finished(request)

    # -- stores

    def store(self, request: ReqContext, blocks: Iterable[int], *, success: bool = True) -> PrepareStoreOutput | None:
        """Store blocks in the host tier, from where they go on to the tiers behind.

        Args:
            request: For which request.
            blocks: The blocks.
            success: Whether the copy from the device succeeds.

        Returns:
            What the manager made of it, or None where it found no room.
        """
        pending = self.begin_store(request, blocks)
        if pending is None:
            return None
        self.complete_store(pending, success=success)
        return pending.output

    def begin_store(self, request: ReqContext, blocks: Iterable[int]) -> PendingStore | None:
        """The first half of `store`: room is made, and the bytes are written, but the manager does not know it yet."""
        numbers = {key(block): block for block in blocks}
        output = self.manager.prepare_store(list(numbers), request)
        if output is None:
            return None
        for stored, chunk in zip(output.keys_to_store, _chunk_ids(output.store_spec), strict=True):
            self._chunk(chunk)[:] = np.frombuffer(content(numbers[stored]), dtype=np.uint8)
        return PendingStore(request, output)

    def complete_store(self, pending: PendingStore, *, success: bool = True) -> None:
        """The second half of `store`."""
        if pending.output.keys_to_store:
            self.manager.complete_store(pending.output.keys_to_store, pending.request, success)

    # -- lookups and loads

    def lookup(self, request: ReqContext, block: int) -> LookupResult:
        """Ask once for a block."""
        return self.manager.lookup(key(block), request)

    def resolve(self, request: ReqContext, blocks: Iterable[int], timeout: float = 5.0) -> list[LookupResult]:
        """Ask for blocks in each step until no answer is put off, as the scheduler does before it admits a request.

        Raises:
            TimeoutError: An answer is put off for ever.
        """
        wanted = list(blocks)
        deadline = time.monotonic() + timeout
        while True:
            results = [self.lookup(request, block) for block in wanted]
            if not any(result in UNRESOLVED for result in results):
                return results
            if time.monotonic() > deadline:
                raise TimeoutError(f"lookups stay unresolved: {results}")
            self._wait_a_step()

    def load(self, request: ReqContext, blocks: Iterable[int]) -> list[bytes]:
        """Load blocks that a lookup has found, and return their bytes."""
        keys = [key(block) for block in blocks]
        chunks = _chunk_ids(self.manager.prepare_load(keys, request))
        loaded = [self._chunk(chunk).tobytes() for chunk in chunks]
        self.manager.complete_load(keys, request)
        return loaded

    def pin(self, blocks: Iterable[int] | None = None) -> Pins:
        """Have blocks read until `Pins.release`: these, or all that are ready in the host tier."""
        return self.pin_keys(self.ready_keys() if blocks is None else [key(block) for block in blocks])

    def pin_keys(self, keys: list[OffloadKey]) -> Pins:
        """Like `pin`, by key."""
        request = self.request()
        self.manager.prepare_load(keys, request)
        self.finish(request)
        return Pins(self, request, keys)

    # -- time

    def step(self, new_requests: Sequence[ReqContext] = ()) -> None:
        """One step of the scheduler ends, and vLLM's statistics are taken.

        Args:
            new_requests: Requests that were admitted in it. Their lookups count no more.
        """
        self.manager.on_schedule_end(
            ScheduleEndContext(new_req_ids=[request.req_id for request in new_requests], preempted_req_ids=())
        )
        self.drain()

    def drain(self) -> None:
        """Take vLLM's statistics into `totals`. Taking resets them: nothing else may call ``get_stats``."""
        stats = self.manager.get_stats()
        if stats is not None:
            self.totals.add(stats.data["types"], stats.data["data"])

    def settle(self, timeout: float = 5.0) -> None:
        """Step until nothing is under way.

        Raises:
            TimeoutError: Something is for ever.
        """
        deadline = time.monotonic() + timeout
        self.step()
        while self.manager.has_pending_work():
            if time.monotonic() > deadline:
                raise TimeoutError("transfers stay under way")
            self._wait_a_step()

    def reset(self) -> None:
        """Empty the host tier. Pins and pending stores are void from here on: forget them."""
        self.manager.reset_cache()
        # From 0.33 on the scheduler also says when the workers know of it; until then nothing is promoted.
        flushed = getattr(self.manager, "on_reset_flushed", None)
        if flushed is not None:
            flushed()

    def _wait_a_step(self) -> None:
        time.sleep(0.002)
        self.step()

    # -- things that go wrong

    def block_file(self, block: int) -> Path:
        """The file in which the file-system tier keeps a block, whether it does so now or not."""
        return Path(self._fs_tier().file_mapper.get_file_name(key(block)))

    def is_on_disk(self, block: int) -> bool:
        return self.block_file(block).exists()

    def ready_keys(self) -> list[OffloadKey]:
        """The keys of all blocks that are ready in the host tier."""
        return [stored for stored, chunk in self._chunks().items() if chunk.is_ready]

    def is_in_host(self, block: int) -> bool:
        """Whether the host tier holds a block, ready or not. Counts as no lookup."""
        return key(block) in self._chunks()

    def queue_promotion(self, request: ReqContext, blocks: Iterable[int], timeout: float = 5.0) -> None:
        """Look blocks up until the file-system tier has found them and their promotion is queued, but not submitted.

        The blocks must be on disk and not in the host tier, and there must be room for them.
        """
        wanted = list(blocks)
        deadline = time.monotonic() + timeout
        while True:
            results = [self.lookup(request, block) for block in wanted]
            if LookupResult.RETRY not in results:
                assert set(results) == {LookupResult.HIT_PENDING}, results
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"lookups stay unresolved: {results}")
            # A tier answers all lookups of a step together, so none is promoted a step before the others.
            self._wait_a_step()

    def fail_promotion(self, request: ReqContext, blocks: Sequence[int], *, broken: int) -> list[LookupResult]:
        """Have the promotion of blocks fail at one of them, and wait for it.

        The file of the broken block is cut short. A lookup finds it all the same, its promotion does not: blocks before
        it in ``blocks`` are promoted, it and those after it are not, if all are promoted by one job, as they are where
        no other request has looked for one of them.

        Args:
            request: The request that looks the blocks up.
            blocks: Blocks that are on disk and not in the host tier.
            broken: The one that breaks.

        Returns:
            What became of the lookups.
        """
        os.truncate(self.block_file(broken), SHORT_FILE_BYTES)
        return self.resolve(request, blocks)

    @contextlib.contextmanager
    def failing_cascade(self, block: int) -> Iterator[None]:
        """Make the file-system tier fail to write a block: a file is where the block's folder must be.

        Whatever else is in that folder is lost.
        """
        folder = self.block_file(block).parent
        folder.parent.mkdir(parents=True, exist_ok=True)
        for file in folder.glob("*"):
            file.unlink()
        with contextlib.suppress(FileNotFoundError):
            folder.rmdir()
        folder.touch()
        try:
            yield
        finally:
            folder.unlink()

    def fail_cascade(self, request: ReqContext, blocks: Sequence[int]) -> PrepareStoreOutput | None:
        """Store blocks, have their way on to disk fail at the first, and wait for it. They stay in the host tier."""
        with self.failing_cascade(blocks[0]):
            output = self.store(request, blocks)
            self.settle()
        return output

    # -- witnesses

    def take_events(self) -> list[OffloadingEvent]:
        """The KV events since the last call."""
        return list(self.manager.take_events())

    def files(self) -> list[Path]:
        """The block files of the file-system tier."""
        base = Path(self._fs_tier().file_mapper.get_config_file_path()).parent
        return sorted(base.parent.glob(f"{base.name}*/**/*.bin"))

    def recount(self) -> Recount:
        """Count the manager's state by walking its structures."""
        chunks = list(self._chunks().values())
        ids = [chunk.chunk_id for chunk in chunks]
        assert len(set(ids)) == len(ids), "two blocks share a chunk"
        jobs: Counter[JobKind] = Counter()
        job_blocks: Counter[JobKind] = Counter()
        for metadata in self.manager._jobs.values():
            tier_type = self.manager.secondary_tiers[metadata.tier_idx].tier_type
            kind = JobKind(f"{metadata.tier_idx + 1}:{tier_type}", metadata.transfer_job.is_promotion)
            jobs[kind] += 1
            job_blocks[kind] += len(metadata.transfer_job.keys)
        return Recount(
            capacity=self.manager.primary_tier._num_chunks,
            evictable=sum(chunk.ref_cnt == 0 for chunk in chunks),
            referenced=sum(chunk.ref_cnt > 0 for chunk in chunks),
            write_pending=sum(chunk.ref_cnt < 0 for chunk in chunks),
            queued_promotions=sum(
                len(promotion.keys)
                for by_request in self.manager._pending_load_submissions.values()
                for promotion in by_request.values()
            ),
            jobs=jobs,
            job_blocks=job_blocks,
        )

    def _chunks(self) -> dict[OffloadKey, ChunkStatus]:
        match self.manager.primary_tier._policy:
            case LRUCachePolicy() as lru:
                return dict(lru.chunks)
            case ARCCachePolicy() as arc:
                assert not arc.t1.keys() & arc.t2.keys(), "ARC has a block twice"
                return {**arc.t1, **arc.t2}
            case other:
                raise AssertionError(f"no way to walk a {type(other).__name__}")

    def _chunk(self, chunk: int) -> np.ndarray:
        return np.asarray(self.manager.primary_tier.get_kv_memoryview())[chunk].view(np.uint8)[:CHUNK_BYTES]

    def _fs_tier(self) -> FileSystemTierManager:
        return next(tier for tier in self.manager.secondary_tiers if isinstance(tier, FileSystemTierManager))


def _chunk_ids(spec: Any) -> list[int]:
    return [int(chunk) for chunk in spec.chunk_ids]


@contextlib.contextmanager
def making_drivers(root: Path, capacity: int) -> Iterator[Callable[..., ManagerDriver]]:
    """Makes drivers of a host tier and a file-system tier, and closes them in the end.

    Args:
        root: The folder of the file-system tier, which they share.
        capacity: Blocks that the host tier has room for unless ``chunks`` says otherwise.
    """
    drivers: list[ManagerDriver] = []

    def make(
        *, chunks: int = capacity, fs: dict[str, Any] | None = None, spec_class: Any = None, **options: Any
    ) -> ManagerDriver:
        config = make_config(chunks, [fs_tier(root, **(fs or {}))], **options)
        drivers.append(ManagerDriver(config, spec_class) if spec_class else ManagerDriver(config))
        return drivers[-1]

    try:
        yield make
    finally:
        for driver in drivers:
            driver.close()


class Worker:
    """vLLM's real copy worker, on the fakes of `examples.vllm_cpu.cpu_offload_spec`.

    Its device has as many pages per layer as there are device blocks. It copies to and from the host memory of a driver
    that was made with ``CpuTieringSpec``.
    """

    def __init__(self, driver: ManagerDriver, device_blocks: int = 16) -> None:
        self.layers = [torch.zeros((device_blocks, PAGE_BYTES), dtype=torch.int8) for _ in range(LAYERS)]
        self.worker = driver.spec.get_worker(
            CanonicalKVCaches(
                tensors=[CanonicalKVCacheTensor(layer, PAGE_BYTES) for layer in self.layers],
                group_data_refs=[[CanonicalKVCacheRef(number, PAGE_BYTES) for number in range(LAYERS)]],
            )
        )

    def write(self, device_block: int, value: int) -> None:
        """Fill a device block with a value from 0 to 127."""
        for layer in self.layers:
            layer[device_block] = value

    def read(self, device_block: int) -> int:
        """The value that a device block is filled with."""
        values = {int(value) for layer in self.layers for value in layer[device_block].unique()}
        assert len(values) == 1, f"device block {device_block} is not filled evenly: {values}"
        return values.pop()

    def submit_store(self, job: int, device_blocks: Sequence[int], host: CPULoadStoreSpec | Any) -> bool:
        """Start a copy from the device to the chunks that ``prepare_store`` allotted."""
        return self.worker.submit_store(job, self._device_spec(device_blocks), host)

    def submit_load(self, job: int, host: CPULoadStoreSpec | Any, device_blocks: Sequence[int]) -> bool:
        """Start a copy from the chunks that ``prepare_load`` named to the device."""
        return self.worker.submit_load(job, host, self._device_spec(device_blocks))

    def get_finished(self) -> list[TransferResult]:
        """The copies that ended since the last call."""
        return list(self.worker.get_finished())

    def wait(self, jobs: Iterable[int]) -> None:
        """Wait for copies to end. `get_finished` is still to be called."""
        self.worker.wait(set(jobs))

    def close(self) -> None:
        """End the worker. To be done before its driver is closed."""
        self.worker.shutdown()

    @staticmethod
    def _device_spec(device_blocks: Sequence[int]) -> GPULoadStoreSpec:
        return GPULoadStoreSpec(list(device_blocks), group_sizes=[len(device_blocks)], block_indices=[0])


def random_walk(
    driver: ManagerDriver,
    rng: random.Random,
    steps: int,
    check: Callable[[], None],
    *,
    without: Collection[str] = (),
) -> Counter[str]:
    """Do mixed operations on a manager, and check after each.

    Bounded, and the same for the same ``rng``, save for what the timing of the manager's own threads decides. When it
    returns, nothing is under way, nothing is pinned and all requests are finished.

    Args:
        driver: A driver whose manager has a file-system tier.
        rng: What decides.
        steps: How many operations.
        check: Called after each operation, and once at the end, with ``driver.totals`` up to date.
        without: Names of operations that are not done.

    Returns:
        How often each operation was done.
    """
    walk = _Walk(driver, rng)
    for operation in list(walk.weights):
        if operation.__name__ in without:
            del walk.weights[operation]
    for _ in range(steps):
        walk.operate()
        driver.drain()
        check()
    walk.end()
    driver.drain()
    check()
    return walk.done


class _Walk:
    """The state of a random walk: what is open, and may be closed later."""

    MAX_OPEN = 3

    def __init__(self, driver: ManagerDriver, rng: random.Random) -> None:
        self.driver = driver
        self.rng = rng
        self.done: Counter[str] = Counter()
        self.capacity = driver.recount().capacity
        self.blocks = range(3 * self.capacity)
        self.fresh = iter(range(10_000, 1_000_000))
        """Blocks that were never stored before."""
        self.requests: list[ReqContext] = []
        self.stores: list[PendingStore] = []
        self.pins: list[Pins] = []
        self.asked: dict[str, list[int]] = {}
        """By request: the blocks it asked for last."""
        # What can be done, and how often it is, relative to the rest.
        self.weights: dict[Callable[[], bool], int] = {
            self.store: 8,
            self.begin_store: 4,
            self.complete_store: 5,
            self.store_too_much: 1,
            self.look_up_and_load: 8,
            self.look_up_once: 4,
            self.promote: 5,
            self.fail_promotion: 2,
            self.promote_without_room: 1,
            self.fail_cascade: 2,
            self.pin: 3,
            self.release: 4,
            self.finish: 4,
            self.step: 6,
            self.settle: 3,
            self.reset: 1,
        }

    def operate(self) -> None:
        """Do one operation, of those that are possible now."""
        while True:
            (operation,) = self.rng.choices(list(self.weights), list(self.weights.values()))
            if operation():
                self.done[operation.__name__] += 1
                return

    def end(self) -> None:
        """Close what is open."""
        while self.stores:
            self.complete_store()
        while self.pins:
            self.release()
        while self.requests:
            self.finish()
        self.driver.settle()

    # Each operation returns whether it was possible.

    def store(self) -> bool:
        request = self._a_request()
        self.driver.store(request, self._some_blocks(), success=self.rng.random() > 0.1)
        if self.rng.random() < 0.5:
            self.driver.step([request])
        return True

    def begin_store(self) -> bool:
        if len(self.stores) >= self.MAX_OPEN:
            return False
        pending = self.driver.begin_store(self._a_request(), self._some_blocks())
        if pending is not None:
            self.stores.append(pending)
        return True

    def complete_store(self) -> bool:
        if not self.stores:
            return False
        self.driver.complete_store(self._take(self.stores), success=self.rng.random() > 0.2)
        return True

    def store_too_much(self) -> bool:
        request = self.driver.request()
        assert self.driver.store(request, [next(self.fresh) for _ in range(self.capacity + 1)]) is None
        self.driver.finish(request)
        return True

    def look_up_and_load(self) -> bool:
        request = self.driver.request()
        self._resolve_and_load(request, self._some_blocks())
        self.driver.finish(request)
        return True

    def look_up_once(self) -> bool:
        request = self._a_request()
        blocks = self.asked.get(request.req_id)
        if blocks is None or self.rng.random() < 0.3:
            blocks = self._only_on_disk() if self.rng.random() < 0.5 else self._some_blocks()
        self.asked[request.req_id] = blocks
        for block in blocks:
            self.driver.lookup(request, block)
        return True

    def promote(self) -> bool:
        blocks = self._only_on_disk()
        if not blocks:
            return False
        request = self.driver.request()
        self._resolve_and_load(request, blocks)
        self.driver.finish(request)
        return True

    def fail_promotion(self) -> bool:
        # What is under way could write the broken file anew, or keep a promotion of the same block going.
        self.driver.settle()
        blocks = self._only_on_disk()
        if not self._has_room_for(len(blocks)):
            return False
        request = self.driver.request()
        self.driver.fail_promotion(request, blocks, broken=self.rng.choice(blocks))
        self.driver.finish(request)
        return True

    def promote_without_room(self) -> bool:
        while self.stores:
            self.complete_store()
        self.driver.settle()
        blocks = self._only_on_disk()
        if not blocks:
            return False
        with self.driver.pin():
            request = self.driver.request()
            free = self.driver.recount().free
            filler = self.driver.begin_store(request, [next(self.fresh) for _ in range(free)])
            assert filler is not None
            assert self.driver.resolve(request, blocks) == [LookupResult.MISS] * len(blocks)
            self.driver.complete_store(filler, success=False)
            self.driver.finish(request)
        return True

    def fail_cascade(self) -> bool:
        # Files that are being written or read now are not to fail too.
        self.driver.settle()
        if not self._has_room_for(2):
            return False
        request = self.driver.request()
        self.driver.fail_cascade(request, [next(self.fresh), next(self.fresh)])
        self.driver.finish(request)
        return True

    def pin(self) -> bool:
        if len(self.pins) >= self.MAX_OPEN:
            return False
        ready = self.driver.ready_keys()
        if not ready:
            return False
        count = len(ready) if self.rng.random() < 0.3 else self.rng.randint(1, len(ready))
        self.pins.append(self.driver.pin_keys(self.rng.sample(ready, count)))
        return True

    def release(self) -> bool:
        if not self.pins:
            return False
        self._take(self.pins).release()
        return True

    def finish(self) -> bool:
        if not self.requests:
            return False
        request = self._take(self.requests)
        self.asked.pop(request.req_id, None)
        self.driver.finish(request)
        return True

    def step(self) -> bool:
        self.driver.step([self.rng.choice(self.requests)] if self.requests and self.rng.random() < 0.5 else [])
        return True

    def settle(self) -> bool:
        self.driver.settle()
        return True

    def reset(self) -> bool:
        self.driver.reset()
        self.stores.clear()
        for pins in self.pins:
            pins.forget()
        self.pins.clear()
        return True

    # What the operations are made of.

    def _a_request(self) -> ReqContext:
        """A request that stays open for a while: a new one, or one that is."""
        if self.requests and (len(self.requests) >= self.MAX_OPEN or self.rng.random() < 0.5):
            return self.rng.choice(self.requests)
        self.requests.append(self.driver.request())
        return self.requests[-1]

    def _some_blocks(self) -> list[int]:
        """A few blocks in a row, as a request's prefix is."""
        first = self.rng.choice(self.blocks)
        return [block for block in range(first, first + self.rng.randint(1, 4)) if block in self.blocks]

    def _only_on_disk(self) -> list[int]:
        """A few blocks that are on disk and not in the host tier."""
        found = [block for block in self.blocks if not self.driver.is_in_host(block) and self.driver.is_on_disk(block)]
        return self.rng.sample(found, min(len(found), self.rng.randint(1, 3)))

    def _has_room_for(self, count: int) -> bool:
        recount = self.driver.recount()
        return 0 < count <= recount.free + recount.evictable

    def _resolve_and_load(self, request: ReqContext, blocks: Sequence[int]) -> None:
        # A block that waits for a store of this walk would stay pending; without room for all, promotions would evict
        # each other for ever.
        while self.stores:
            self.complete_store()
        if not self._has_room_for(2 * len(blocks)):
            while self.pins:
                self.release()
        results = self.driver.resolve(request, blocks)
        hits = [block for block, result in zip(blocks, results, strict=True) if result is LookupResult.HIT]
        assert self.driver.load(request, hits) == [content(block) for block in hits]

    def _take(self, items: list[Any]) -> Any:
        return items.pop(self.rng.randrange(len(items)))
