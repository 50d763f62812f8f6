"""Drives SGLang's real radix cache and its real hierarchical cache, without a model or an engine.

Real: the tree, in Python or in Rust, the allocator and the memory of the device, host memory, the controller of the
copies, the storage threads and the files that they write, admission by `PrefillAdder`, KV events, and SGLang's own
collectors. Stood in for: the scheduler, by `CacheDriver`, which calls all this in the order in which the scheduler
does, and the model, by numbers that follow from the tokens. What a CPU lacks is in `tests.engines.sglang.cpu`.

`tests.engines.sglang.oracle` tells what happened, by witnesses that do not depend on each other.

Works with SGLang 0.5.18 to 0.5.23, as far as each goes: the Rust core is there from 0.5.19 on, attaching a storage at
run time too, a host that is but a buffer from 0.5.20 on, and what retracted requests have on the host from 0.5.21 on.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import inspect
import json
import os
import re
import time
import zlib
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self
from unittest import mock

import numpy as np
import sglang
import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Summary
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.managers.schedule_policy import PrefillAdder
from sglang.srt.managers.scheduler_components.metrics_reporter import PrefillStats
from sglang.srt.mem_cache import common
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.observability.metrics_collector import RadixCacheMetricsCollector, StorageMetricsCollector
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from tests.engines.sglang import cpu

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PAGE = 4
"""Tokens of a page: what SGLang stores, evicts and tells events of. A block, in our words."""

LAYERS = 2
HEADS = 2
HEAD_DIM = 8
TOKEN_BYTES = LAYERS * 2 * HEADS * HEAD_DIM * torch.float32.itemsize
"""Bytes of a token's keys and values, on the device as on the host."""

MAX_PROMPT = 512
"""The longest prompt, in tokens."""

MODEL = "tiny"

RELEASE = tuple(int(part) for part in re.findall(r"\d+", sglang.__version__)[:3])
"""The release of SGLang, such as (0, 5, 23)."""

CORES = ("python", "rust") if RELEASE >= (0, 5, 19) else ("python",)
"""The cores that the release has."""


def content(tokens: Sequence[int]) -> np.ndarray:
    """A number for each token of whole pages, which depends on all tokens before it, as keys and values do."""
    numbers = np.empty(_whole_pages(tokens), dtype=np.float32)
    digest = 0
    for start in range(0, len(numbers), PAGE):
        digest = zlib.crc32(array("q", tokens[start : start + PAGE]), digest)
        # Small enough for a quarter to fit beside it in 32 bits.
        numbers[start : start + PAGE] = digest % 2**20 + np.arange(PAGE)
    return numbers


def _whole_pages(tokens: Sequence[int]) -> int:
    return len(tokens) // PAGE * PAGE


def _pages_for(tokens: int) -> int:
    """The tokens of as many pages as these tokens take."""
    return -(-tokens // PAGE) * PAGE


def _accepted(struct: type, values: dict[str, Any]) -> dict[str, Any]:
    """Those of the values that this release of SGLang has a field for."""
    fields = getattr(struct, "__struct_fields__", None)
    names = set(fields) if fields is not None else {field.name for field in dataclasses.fields(struct)}
    return {name: value for name, value in values.items() if name in names}


def _collectors(registry: CollectorRegistry) -> dict[str, type]:
    """SGLang's own collectors, in a registry of their own: by SGLang's names for their roles."""
    metrics = {
        f"_{metric.__name__.lower()}_cls": staticmethod(functools.partial(metric, registry=registry))
        for metric in (Counter, Gauge, Histogram, Summary)
    }
    return {
        "radix_cache": type("RadixCacheMetricsCollector", (RadixCacheMetricsCollector,), metrics),
        "storage": type("StorageMetricsCollector", (StorageMetricsCollector,), metrics),
    }


class Match(NamedTuple):
    """What the cache has of some tokens.

    Attributes:
        device: Tokens on the device, from the first on.
        host: Tokens on the host only, after those.
        result: SGLang's answer.
    """

    device: int
    host: int
    result: Any


class Prefetched(NamedTuple):
    """What became of a request that asked the storage.

    Attributes:
        tokens: Tokens that came from the storage to the host, and that the tree did not have by then.
        stats: What the batch of the request says of its hits. None if the request was not admitted.
    """

    tokens: int
    stats: PrefillStats | None


class Retracted(NamedTuple):
    """A request whose keys and values are on the host, outside of the tree, until it may go on."""

    request: Req
    tokens: list[int]
    backup: Any


class CacheDriver:
    """One cache, and a stand-in for the scheduler that uses it.

    Several may live in a process. Before a driver does anything, it makes its own configuration and ranks those that
    SGLang sees; its storage threads see whichever were last.

    Attributes:
        cache: SGLang's cache.
        allocator: What allocates on the device.
        core: ``python`` or ``rust``.
        registry: Where SGLang's own collectors of this cache are.
        events: All KV events so far, as far as steps were taken since.
        newest_node: The highest id of a node that SGLang has told of.
        served_tokens: Tokens of the prompts of all requests that were admitted.
        retracted: What retracted requests have on the host, outside of the tree.
    """

    _active: CacheDriver | None = None

    def __init__(
        self,
        *,
        core: Literal["python", "rust"] = "rust",
        write_policy: Literal["write_through", "write_through_selective", "write_back"] = "write_through",
        device_tokens: int = 128,
        host_ratio: float = 2.0,
        storage_dir: Path | str | None = None,
        prefetch_policy: Literal["best_effort", "wait_complete", "timeout"] = "wait_complete",
        prefetch_threshold: int = PAGE,
        host_memory_mode: Literal["cache", "buffer_only"] = "cache",
        metrics: bool = True,
        kv_events: bool = True,
        ranks: cpu.Ranks | None = None,
        hicache: bool = True,
    ) -> None:
        """Build the cache.

        Args:
            core: Which of SGLang's trees.
            write_policy: When what is on the device goes to the host.
            device_tokens: Tokens that the device has room for.
            host_ratio: How many times as many the host has.
            storage_dir: Where the file storage keeps its files. None for no storage.
            prefetch_policy: When a request stops waiting for the storage.
            prefetch_threshold: Tokens below which the storage is not asked.
            host_memory_mode: ``buffer_only`` if the host is but a buffer between the device and the storage.
            metrics: Whether SGLang's own metrics are on, as by ``--enable-metrics``.
            kv_events: Whether KV events are recorded, whatever the rank.
            ranks: Which process of how many this is, as for `cpu.set_ranks`. The cache waits for none of the others.
            hicache: False for a cache that has the device only.
        """
        cpu.install()
        self.core = core
        self.ranks = ranks or cpu.single()
        self.events: list[Any] = []
        self.registry = CollectorRegistry()
        self.newest_node = self.served_tokens = 0
        self.retracted: list[Retracted] = []
        self._storage_dir = None if storage_dir is None else Path(storage_dir)
        self._has_host = hicache
        self._is_closed = False
        storage = {
            "hicache_storage_backend": "file",
            "hicache_storage_prefetch_policy": prefetch_policy,
            "hicache_storage_backend_extra_config": json.dumps({"prefetch_threshold": prefetch_threshold}),
        }
        self._server_args = ServerArgs(
            **_accepted(
                ServerArgs,
                {
                    "model_path": "dummy",
                    "served_model_name": MODEL,
                    "page_size": PAGE,
                    "device": "cpu",
                    "enable_metrics": metrics,
                    "stat_loggers": _collectors(self.registry),
                    "hicache_ratio": host_ratio,
                    "hicache_io_backend": "direct",
                    "hicache_mem_layout": "layer_first",
                    "hicache_write_policy": write_policy,
                    "hicache_host_memory_mode": host_memory_mode,
                    **(storage if storage_dir else {}),
                },
            )
        )
        self._take_over()
        self._memory = MHATokenToKVPool(
            size=device_tokens,
            page_size=PAGE,
            dtype=torch.float32,
            head_num=HEADS,
            head_dim=HEAD_DIM,
            layer_num=LAYERS,
            device="cpu",
            enable_memory_saver=False,
        )
        self.allocator = PagedTokenToKVPoolAllocator(
            size=device_tokens,
            page_size=PAGE,
            dtype=torch.float32,
            device="cpu",
            kvcache=self._memory,
            need_sort=False,
        )
        self._rows = ReqToTokenPool(size=8, max_context_len=MAX_PROMPT, device="cpu", enable_memory_saver=False)
        params = CacheInitParams(
            **_accepted(
                CacheInitParams,
                {
                    "disable": False,
                    "req_to_token_pool": self._rows,
                    "token_to_kv_pool_allocator": self.allocator,
                    "page_size": PAGE,
                    "tree_components": (ComponentType.FULL,),
                    "enable_kv_cache_events": kv_events,
                    "enable_metrics": metrics,
                    "tree_core_backend": core,
                },
            )
        )
        # Before 0.5.21 the environment chose the core.
        with mock.patch.dict(os.environ, {"SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": core}), _files_in(storage_dir):
            self.cache = UnifiedRadixCache(params=params)
            if hicache:
                self.cache.init_hicache(self._server_args, params)
        # SGLang leaves less than ten tokens on the host. Tests are small.
        self.cache.load_back_threshold = 0
        is_rust = type(self.cache.tree_core).__name__.startswith("Rust")
        assert is_rust == (core == "rust"), f"SGLang chose another core than {core}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End the cache: its threads stop, its host memory goes. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._take_over()
        shutdown = getattr(self.cache, "shutdown", None)
        if shutdown is not None:
            atexit.unregister(shutdown)
            shutdown()
        elif self.cache.enable_storage:
            self.cache.detach_storage_backend()
        if self._has_host:
            self.cache.release_host_resources()
        CacheDriver._active = None

    def _take_over(self) -> None:
        """Make this driver's configuration and ranks those that SGLang sees."""
        if CacheDriver._active is not self:
            set_global_server_args_for_scheduler(self._server_args)
            cpu.set_ranks(**self.ranks)
            CacheDriver._active = self

    @property
    def is_cache_mode(self) -> bool:
        """Whether the host is a tier, and not but a buffer."""
        return getattr(self.cache, "host_memory_mode", "cache") == "cache"

    # -- the tree

    def match(self, tokens: Sequence[int]) -> Match:
        """Ask the tree for tokens. This makes them the last to be evicted, and may split a node."""
        self._take_over()
        result = self.cache.match_prefix(MatchPrefixParams(key=_key(tokens)))
        self.newest_node = max(self.newest_node, result.last_device_node, result.best_match_node)
        device = getattr(result, "device_prefix_len", None)
        if device is None:  # before 0.5.22
            device = len(result.device_indices)
        return Match(device, result.host_hit_length, result)

    def insert(self, tokens: Sequence[int]) -> int:
        """Compute the whole pages of tokens that the device does not have, and put them into the tree.

        Evicts first if there is no room, as the scheduler does.

        Returns:
            How many tokens were computed.

        Raises:
            RuntimeError: There is no room, whatever is evicted.
        """
        tokens = tokens[: _whole_pages(tokens)]
        found = self.match(tokens)
        with self._locked(found.result.last_device_node):
            new = self._allocate(len(tokens) - found.device)
            if new is None:
                raise RuntimeError(f"no room on the device for {len(tokens) - found.device} tokens: {self.in_flight()}")
            self._write(new, content(tokens)[found.device :])
            inserted = self.cache.insert(
                InsertParams(key=_key(tokens), value=torch.cat([self._path(found), new]), prev_prefix_len=found.device)
            )
        newest = getattr(inserted, "last_device_node", None)
        self.newest_node = max(self.newest_node, newest or 0)
        return len(new)

    def load_back(self, tokens: Sequence[int]) -> int:
        """Start to copy what of some tokens is on the host only back to the device. A later step sees it end.

        Returns:
            How many tokens are on their way.
        """
        found = self.match(tokens)
        if found.host == 0:
            return 0
        is_loading = self.cache.load_back(found.result.best_match_node)
        self.cache.ready_to_load_host_cache()
        return found.host if is_loading else 0

    def evict(self, tokens: int) -> int:
        """Evict at least so many tokens from the device, if it has as many that can be. Returns how many."""
        self._take_over()
        return self.cache.evict(EvictParams(num_tokens=tokens)).num_tokens_evicted

    def evict_host(self, tokens: int) -> int:
        """Like `evict`, from the host."""
        self._take_over()
        return self.cache.evict_host(tokens)

    def reset(self) -> None:
        """Forget everything, as SGLang does when its cache is flushed. Requests and what was retracted are void."""
        self._take_over()
        self.cache.reset()
        self._rows.clear()
        self.allocator.clear()
        self.retracted.clear()

    def check(self, tokens: Sequence[int]) -> int:
        """Compare what the device holds of tokens with what was computed for them. It asks the tree, as `match` does.

        Returns:
            How many tokens were compared.

        Raises:
            AssertionError: They are not the same.
        """
        found = self.match(tokens)
        self._assert_holds(self._path(found), content(tokens)[: found.device])
        return found.device

    # -- time

    def step(self) -> list[Any]:
        """What the scheduler does in each step: start copies, see which have ended, and take the KV events.

        Returns:
            The events, which are added to `events` too.
        """
        self._take_over()
        if self._has_host:
            flush = getattr(self.cache, "flush_pending_backups", None)
            if flush is not None:
                flush()
            self.cache.check_hicache_events()
        events = list(self.cache.take_events())
        self.events.extend(events)
        return events

    def in_flight(self) -> dict[str, int]:
        """How many operations of each kind have begun and not ended, those that the next step will end among them."""
        controller = self.cache.cache_controller
        if controller is None:
            return {}
        counts = {
            name: len(getattr(owner, name))
            for owner, names in (
                (
                    self.cache,
                    ("ongoing_write_through", "ongoing_load_back", "ongoing_backup", "ongoing_prefetch"),
                ),
                (controller, ("write_queue", "load_queue", "ack_write_queue", "ack_load_queue")),
            )
            for name in names
        }
        if self.cache.enable_storage:
            queues = ("backup_queue", "prefetch_queue", "ack_backup_queue", "host_mem_release_queue")
            counts.update((name, getattr(controller, name).qsize()) for name in queues)
        pipeline = getattr(self.cache, "buffer_pipeline", None)
        if pipeline is not None:
            for name in (
                "pending_write_queue",
                "ongoing_write_through",
                "ongoing_backup",
                "ongoing_buffer_load_back",
                "pending_hit_allocs",
            ):
                counts[f"buffer_{name}"] = len(getattr(pipeline, name, ()))
        return {name: count for name, count in counts.items() if count}

    def settle(self, timeout: float = 10.0) -> None:
        """Step until nothing is in flight.

        Raises:
            TimeoutError: Something is for ever.
        """
        deadline = time.monotonic() + timeout
        self.step()
        while self.in_flight():
            if time.monotonic() > deadline:
                raise TimeoutError(f"operations stay in flight: {self.in_flight()}")
            self._wait_a_step()

    def _wait_a_step(self) -> None:
        time.sleep(0.0005)
        self.step()

    # -- requests

    def admit(self, tokens: Sequence[int], request_id: str) -> PrefillStats | None:
        """Serve a request to its end: admit it, load what the host has of its prompt, compute the rest, keep it all.

        Args:
            tokens: The prompt. Its last token is computed always.
            request_id: The name of the request.

        Returns:
            What SGLang counts for the batch that the request is in, or None if there is no room for it.
        """
        self._take_over()
        batches = self._serve(self._request(tokens, request_id), None)
        return batches[0] if batches else None

    def admit_in_chunks(self, tokens: Sequence[int], request_id: str, chunk_tokens: int) -> list[PrefillStats]:
        """Like `admit`, with at most so many tokens computed in a batch. Returns what is counted for each batch."""
        self._take_over()
        return self._serve(self._request(tokens, request_id), chunk_tokens)

    def prefetch(self, tokens: Sequence[int], request_id: str, timeout: float = 10.0) -> Prefetched:
        """Serve a request like `admit`, but first fetch from the storage what neither device nor host has.

        Raises:
            TimeoutError: The storage does not answer.
        """
        request = self.begin_prefetch(tokens, request_id)
        self.wait_for_prefetch(request, timeout)
        return self.end_prefetch(request)

    def begin_prefetch(self, tokens: Sequence[int], request_id: str) -> Req:
        """The first part of `prefetch`: the request is queued, and the storage asked."""
        self._take_over()
        request = self._request(tokens, request_id)
        request.init_next_round_input(self.cache)
        found = _prefix_tokens(request) + request.host_hit_length
        request.storage_prefetch_last_match_len = found
        anchor = request.last_host_node
        if not self.is_cache_mode and self.cache.is_root(anchor):
            anchor = request.last_node
        last_hash = self.cache.tree_core.get_last_hash_value(anchor)
        may_be_stored = self.cache.is_backuped(anchor) if self.is_cache_mode else last_hash is not None
        # Behind what the storage cannot have it has nothing.
        if self.cache.is_root(anchor) or may_be_stored:
            prompt = request.full_untruncated_fill_ids
            arguments = {"matched_prefix_tokens": prompt[:found]} if RELEASE >= (0, 5, 19) else {}
            self.cache.prefetch_from_storage(
                _handle(request), anchor, prompt[found : len(prompt) - 1], last_hash, None, **arguments
            )
        return request

    def is_prefetched(self, request: Req) -> bool:
        """Whether the request waits for the storage no longer. To be asked once in a step, as the scheduler does."""
        self._take_over()
        return self.cache.check_prefetch_progress(_handle(request))

    def wait_for_prefetch(self, request: Req, timeout: float = 10.0) -> None:
        """Step until the request waits for the storage no longer.

        Raises:
            TimeoutError: The storage does not answer.
        """
        deadline = time.monotonic() + timeout
        while not self.is_prefetched(request):
            if time.monotonic() > deadline:
                raise TimeoutError(f"a prefetch stays in flight: {self.in_flight()}")
            self._wait_a_step()

    def end_prefetch(self, request: Req) -> Prefetched:
        """The last part of `prefetch`: the request is served."""
        self._take_over()
        handle = _handle(request)
        if hasattr(self.cache, "pop_prefetch_loaded_span"):
            tokens, start = self.cache.pop_prefetch_loaded_span(handle)
            if tokens > 0:
                request.storage_hit_length = tokens
                request.storage_hit_start = start
                request.host_hit_is_storage = False
        else:  # before 0.5.20
            tokens = self.cache.pop_prefetch_loaded_tokens(handle)
            request.storage_hit_length = tokens
        batches = self._serve(request, None)
        return Prefetched(tokens, batches[0] if batches else None)

    def abort(self, request: Req) -> None:
        """The client of a queued request has gone."""
        self._take_over()
        self.cache.release_aborted_request(_handle(request))

    def _request(self, tokens: Sequence[int], request_id: str) -> Req:
        sampling = SamplingParams(temperature=0, max_new_tokens=1)
        sampling.normalize(None)
        return Req(
            rid=request_id,
            origin_input_text="",
            origin_input_ids=array("q", tokens),
            sampling_params=sampling,
        )

    def _serve(self, request: Req, chunk_tokens: int | None) -> list[PrefillStats]:
        """Admit a request, compute it batch by batch, and release it.

        Returns:
            What is counted for each batch. Nothing if the request was not admitted; it is given up then.
        """
        request.init_next_round_input(self.cache)
        adder = self._adder(chunk_tokens)
        pipeline = getattr(self.cache, "buffer_pipeline", None)
        if pipeline is None or pipeline.prepare_staged_prefetch(request):
            adder.add_one_req(request, has_chunked_req=False, truncation_align_size=None)
        if adder.can_run_list:
            self.served_tokens += len(request.origin_input_ids)
            retries = getattr(self.cache, "storage_prefetch_retries", None)
            if retries is not None:
                retries.cancel(request.rid)
        else:
            self.abort(request)
        batches = []
        rest = adder.new_chunked_req
        while adder.can_run_list:
            # Loading starts before the batch's own pages are allocated.
            self.cache.ready_to_load_host_cache()
            self._compute(request)
            batches.append(PrefillStats.from_adder(adder, []))
            if rest is None:
                self._release(request)
                break
            self._checkpoint(request)
            self.step()
            request.init_next_round_input()
            adder = self._adder(chunk_tokens)
            rest = adder.add_chunked_req(request)
        return batches

    def _adder(self, chunk_tokens: int | None) -> PrefillAdder:
        return PrefillAdder(PAGE, self.cache, self.allocator, None, 0.7, MAX_PROMPT, chunk_tokens)

    def _compute(self, request: Req) -> None:
        """Give an admitted request its pages, and have the model fill them."""
        start = _prefix_tokens(request)
        prompt = list(request.full_untruncated_fill_ids)
        end = _extend_end(request)
        new = self._allocate(_pages_for(end - start))
        assert new is not None, "SGLang admitted a request that does not fit"
        self._rows.alloc([request])
        if hasattr(self.cache, "prefix_device_indices"):
            prefix = self.cache.prefix_device_indices(request)
        else:
            prefix = request.prefix_indices
        self._register(request, torch.cat([prefix[:start], new[: end - start]]))
        numbers = content(prompt[:end])[start:]
        self._write(new[: len(numbers)], numbers)

    def _register(self, request: Req, indices: torch.Tensor) -> None:
        """Write down which slots a request has."""
        self._rows.write((_row(request), slice(0, len(indices))), indices.to(torch.int32))
        if hasattr(request.kv, "kv_committed_len"):
            request.kv.kv_allocated_len = request.kv.kv_committed_len = len(indices)
        else:  # before 0.5.19
            from sglang.srt.managers.schedule_batch import ReqKvInfo

            request.kv = ReqKvInfo(kv_allocated_len=len(indices), swa_evicted_seqlen=0)
            request.kv_committed_len = len(indices)

    def _checkpoint(self, request: Req) -> None:
        """Put what of a request is computed so far into the tree."""
        if hasattr(common, "checkpoint_kv_cache"):
            common.checkpoint_kv_cache(request, self.cache)
        else:  # before 0.5.22
            self.cache.cache_unfinished_req(request, chunked=True)

    def _release(self, request: Req) -> None:
        """A request has finished: the tree keeps its whole pages."""
        request.finished_reason = FINISH_LENGTH(length=0)
        common.release_kv_cache(request, self.cache, **{_KEEP: True})

    # -- retraction

    @property
    def can_retract(self) -> bool:
        """Whether this release backs retracted requests up in host memory in the way that is stood in for here."""
        return RELEASE >= (0, 5, 19) and hasattr(self.cache, "supports_retraction_backup")

    def retract_backup(self, tokens: Sequence[int], request_id: str) -> Retracted | None:
        """A request that has computed these tokens, and shares none with the tree, must give way to others.

        Returns:
            What it has on the host now, or None if there is no room for it.
        """
        self._take_over()
        tokens = list(tokens)
        # The token that was sampled last has no keys and values yet.
        request = self._request([*tokens, 0], request_id)
        slots = self._private(request, tokens)
        self._write(slots[: _whole_pages(tokens)], content(tokens))
        backup = self._retraction("backup_kv_cache", "retraction_backup")(request)
        self._drop(request, slots)
        if backup is None:
            return None
        self.retracted.append(Retracted(request, tokens, backup))
        return self.retracted[-1]

    def retract_restore(self, retracted: Retracted) -> None:
        """The request goes on, and its keys and values come back. They are compared. Then it is gone.

        Raises:
            AssertionError: They are not what they were.
        """
        self._take_over()
        slots = self._private(retracted.request, retracted.tokens)
        self._retraction("restore_kv_cache", "retraction_restore")(retracted.request, retracted.backup)
        self._assert_holds(slots[: _whole_pages(retracted.tokens)], content(retracted.tokens))
        self._drop(retracted.request, slots)
        self._forget(retracted)

    def retract_discard(self, retracted: Retracted) -> None:
        """The request never goes on: its client has gone."""
        self._take_over()
        self._retraction("discard_kv_cache_backup", "retraction_discard")(retracted.backup)
        self._forget(retracted)

    def _retraction(self, name: str, formerly: str) -> Any:
        """One of the cache's functions, under the name that it has had since 0.5.21 or the one before."""
        return getattr(self.cache, name, None) or getattr(self.cache, formerly)

    @property
    def retracted_tokens(self) -> int:
        """Tokens of host memory that retracted requests have: those of whole pages."""
        return sum(_pages_for(len(retracted.tokens)) for retracted in self.retracted)

    def _forget(self, retracted: Retracted) -> None:
        self.retracted = [other for other in self.retracted if other is not retracted]

    def _private(self, request: Req, tokens: Sequence[int]) -> torch.Tensor:
        """Give a request pages outside of the tree, and return their slots."""
        slots = self._allocate(_pages_for(len(tokens)))
        if slots is None:
            raise RuntimeError(f"no room on the device for {len(tokens)} tokens: {self.in_flight()}")
        self._rows.alloc([request])
        self._register(request, slots[: len(tokens)])
        return slots

    def _drop(self, request: Req, slots: torch.Tensor) -> None:
        self.allocator.free(slots)
        self._rows.free(request)
        request.kv.mark_kv_released()

    # -- storage

    def attach_storage(
        self, storage_dir: Path | str, prefetch_threshold: int = PAGE, write_policy: str | None = None
    ) -> None:
        """Attach the file storage while the cache runs, with another write policy if so. Nothing may be in flight."""
        self._take_over()
        self._storage_dir = Path(storage_dir)
        with _files_in(storage_dir):
            is_attached, why = self.cache.attach_storage_backend(
                storage_backend="file",
                storage_backend_extra_config_json=json.dumps({"prefetch_threshold": prefetch_threshold}),
                served_model_name=MODEL,
                hicache_storage_prefetch_policy="wait_complete",
                hicache_write_policy=write_policy,
            )
        assert is_attached, why

    def detach_storage(self) -> None:
        """Detach the storage while the cache runs. Nothing may be in flight."""
        self._take_over()
        is_detached, why = self.cache.detach_storage_backend()
        assert is_detached, why

    def stored(self) -> int:
        """How many files the storage has, each of them with a block. Those of other caches count too."""
        return 0 if self._storage_dir is None else sum(1 for _ in self._storage_dir.glob("*.bin"))

    # -- device memory

    def _allocate(self, tokens: int) -> torch.Tensor | None:
        """Slots for the tokens of whole pages, evicting what must go. None if that does not help."""
        common.evict_from_tree_cache(self.cache, tokens)
        return self.allocator.alloc(tokens)

    def _path(self, found: Match) -> torch.Tensor:
        """The slots of a match."""
        if hasattr(found.result, "device_indices"):  # before 0.5.22
            return found.result.device_indices
        return self.cache.path_device_indices(found.result.last_device_node)

    @contextlib.contextmanager
    def _locked(self, node: Any) -> Iterator[None]:
        """Nothing from the root to this node is evicted meanwhile."""
        lock = self.cache.inc_lock_ref(node).to_dec_params()
        try:
            yield
        finally:
            self.cache.dec_lock_ref(node, lock)

    def _parts(self) -> Iterator[tuple[torch.Tensor, float]]:
        """The device's tensors, and what in each is added to `content`."""
        for layer in range(LAYERS):
            yield self._memory.k_buffer[layer], layer / 4
            yield self._memory.v_buffer[layer], layer / 4 + 0.5

    def fill(self, slots: torch.Tensor, number: float) -> None:
        """Write one number to slots, whatever their tokens are. Costs less than computing what `check` expects."""
        for tensor, offset in self._parts():
            tensor[slots] = number + offset

    def _write(self, slots: torch.Tensor, numbers: np.ndarray) -> None:
        values = torch.from_numpy(numbers).reshape(-1, 1, 1)
        for tensor, offset in self._parts():
            tensor[slots] = values + offset

    def _assert_holds(self, slots: torch.Tensor, numbers: np.ndarray) -> None:
        assert len(slots) == len(numbers), f"{len(slots)} slots hold {len(numbers)} tokens"
        values = torch.from_numpy(numbers).reshape(-1, 1, 1)
        for tensor, offset in self._parts():
            held = tensor[slots]
            assert torch.equal(held, (values + offset).expand_as(held)), "the device holds something else"


_KEEP = "checkpoint" if "checkpoint" in inspect.signature(common.release_kv_cache).parameters else "is_insert"
"""How `release_kv_cache` is told that the tree is to keep what the request has."""


def _key(tokens: Sequence[int]) -> RadixKey:
    return RadixKey(array("q", tokens))


def _handle(request: Req) -> Any:
    """What SGLang's cache calls a request."""
    return getattr(request, "cache_request_handle", request.rid)


def _prefix_tokens(request: Req) -> int:
    prefix = getattr(request, "prefix_len", None)
    return len(request.prefix_indices) if prefix is None else prefix


def _extend_end(request: Req) -> int:
    end = getattr(request, "extend_end", None)
    return request.extend_range.end if end is None else end


def _row(request: Req) -> int:
    held = request.kv if hasattr(request.kv, "req_pool_idx") else request
    return held.req_pool_idx


def _files_in(storage_dir: Path | str | None) -> contextlib.AbstractContextManager[object]:
    """Have a file storage that is made meanwhile keep its files there."""
    if storage_dir is None:
        return contextlib.nullcontext()
    return mock.patch.dict(os.environ, {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(storage_dir)})


@contextlib.contextmanager
def making_drivers(**defaults: Any) -> Iterator[Any]:
    """Makes drivers, and closes them in the end.

    Args:
        defaults: What every driver is made with unless a call says otherwise.
    """
    with contextlib.ExitStack() as stack:
        yield lambda **options: stack.enter_context(CacheDriver(**{**defaults, **options}))
