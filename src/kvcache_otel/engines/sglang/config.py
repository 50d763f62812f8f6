"""What SGLang's own configuration says: ranks, pools, and what kind of tier a storage backend is."""

from __future__ import annotations

import importlib
from contextlib import suppress
from typing import Any, NamedTuple

from kvcache_otel.identity import Identity, Rank
from kvcache_otel.semconv import Engine, Pool, Reason, Tier

# The backend that keeps its pages on this machine's disk. All others are stores of their own, wherever their bytes are.
_ON_DISK = "file"

# The backend that takes a class of the user's, which has a name of its own.
_DYNAMIC = "dynamic"

_POOLS = {"kv": Pool.KV, "swa": Pool.SWA, "auxiliary_swa": Pool.SWA, "mamba": Pool.MAMBA, "indexer": Pool.INDEXER}


def identity(cache: Any) -> Identity:
    """Returns who a cache is: its class, and the rank whose shard of the KV it holds.

    Under DP attention that is the rank in the attention group, whose context-parallel ranks hold shards of their own;
    under pure data parallelism each replica has ranks of its own, and the replica's index tells them apart.
    """
    parallel = _parallel()
    if _attention_is_parallel(parallel):
        tp = _rank(parallel, "attn_cp_rank") * _size(parallel, "attn_tp_size") + _rank(parallel, "attn_tp_rank")
        dp = _rank(parallel, "attn_dp_rank")
    else:
        tp, dp = _rank(parallel, "tp_rank"), _rank(parallel, "dp_rank")
    return Identity(Engine.SGLANG, type(cache).__name__, Rank(tp=tp, pp=_rank(parallel, "pp_rank"), dp=dp))


def local_rank() -> int:
    """Returns which of the schedulers on this machine this process is."""
    parallel = _parallel()
    width = _size(parallel, "tp_size") * _size(parallel, "pp_size")
    rank = _rank(parallel, "pp_rank") * _size(parallel, "tp_size") + _rank(parallel, "tp_rank")
    if not _attention_is_parallel(parallel):
        rank += _rank(parallel, "dp_rank") * width
    return rank % max(width // _size(parallel, "nnodes"), 1) if _size(parallel, "nnodes") > 1 else rank


def pool_name(name: Any) -> str:
    """Returns SGLang's own name of a pool, from its enum or from what it made of it."""
    return str(getattr(name, "value", name))


def pool(name: Any) -> str:
    """Returns the catalogue's name of one of SGLang's pools."""
    text = pool_name(name)
    if text in _POOLS:
        return _POOLS[text]
    if text.startswith("draft"):
        return Pool.DRAFT
    return Pool.INDEXER if "_indexer" in text and not text.endswith("_state") else Pool.OTHER


def pool_of(component: Any) -> str:
    """Returns the catalogue's name of the pool of one of the tree's components."""
    name = str(getattr(component, "name", component)).lower()
    return Pool.KV if name == "full" else pool(name)


def storage(controller: Any) -> tuple[str, str]:
    """Returns the tier of a controller's storage backend, and SGLang's name of the backend."""
    kind = str(controller.storage_backend_type)
    tier = Tier.DISK if kind == _ON_DISK else Tier.EXTERNAL
    if kind == _DYNAMIC:
        extra: Any = getattr(getattr(controller, "storage_config", None), "extra_config", None)
        with suppress(AttributeError):  # The user's own, and of whatever kind.
            kind = str(extra.get("backend_name", kind))
    return tier, kind


def is_sharded(controller: Any) -> bool:
    """Whether the ranks share the tokens among them, so that one copies fewer than it counts."""
    return bool(getattr(controller, "is_kv_sharded", False))


def core(cache: Any) -> str:
    """Returns which of SGLang's tree cores a cache has: ``rust`` or ``python``."""
    return "rust" if "rust" in type(cache.tree_core).__module__ else "python"


def rounds_up() -> bool:
    """Whether SGLang's sum of what is computed of prompts is of whole pages, as before 0.5.20."""
    adder = importlib.import_module("sglang.srt.managers.schedule_policy").PrefillAdder
    return not hasattr(adder, "_account_prefill_cache_admission")


def computed_last(adder: Any) -> int:
    """Returns the tokens that are computed of the request that was added last to a batch, where sums are rounded up."""
    request = adder.can_run_list[-1]
    return 0 if request.retracted_stain else request.extend_range.length


class StorageFacts(NamedTuple):
    """What a version of SGLang tells of a cache's storage; what it does not has no rows.

    Attributes:
        hits: What storage said it had, and what became of it.
        loads: What a prefetch brought into host memory.
        skips: What was not written. Only where host memory is a buffer for writing is anything given up.
    """

    hits: bool
    loads: bool
    skips: bool


def storage_facts(cache: Any) -> StorageFacts:
    """Returns what a cache can tell of its storage."""
    return StorageFacts(
        hits=hasattr(cache, "_record_storage_prefetch_hit"),
        loads=hasattr(cache, "_check_hybrid_prefetch_result"),
        skips=getattr(cache, "buffer_pipeline", None) is not None,
    )


def drop_reasons(cache: Any) -> tuple[str, ...]:
    """Returns why a cache may lose tokens of the device tier, without a copy in host memory.

    Returns:
        The reasons; none where SGLang loses some and does not count them.
    """
    if cache.cache_controller.write_policy == "write_back":
        return (Reason.HOST_PRESSURE,)
    unbacked = getattr(cache, "_tracks_write_through_unbacked_evictions", None)
    if unbacked is not None and unbacked():
        return (Reason.HOST_PRESSURE, Reason.WRITE_THROUGH_UNBACKED_EVICTION)
    return ()


def publishes(cache: Any) -> bool:
    """Whether a cache records KV events. SGLang lets one rank of each replica do so."""
    core = cache.tree_core
    recorder = getattr(core, "kv_events", None)
    if recorder is not None:
        return bool(recorder.enabled)
    return bool(getattr(core, "enable_kv_cache_events", False))


def _parallel() -> Any:
    return importlib.import_module("sglang.srt.runtime_context").get_parallel()


def _attention_is_parallel(parallel: Any) -> bool:
    return _size(parallel, "attn_dp_size") > 1


def _rank(parallel: Any, name: str) -> int:
    # None where that kind of parallelism is off, no such name in a version that does not have it. What raises otherwise
    # must not be taken for rank 0: then there are no rows, which is better than those of another rank.
    return int(getattr(parallel, name, None) or 0)


def _size(parallel: Any, name: str) -> int:
    return max(_rank(parallel, name), 1)
