"""The fakes with which SGLang's hierarchical cache runs on the tensors of a CPU.

What is fake, and nothing else is:

- the one copy kernel that the cache needs, done by indexing, where SGLang has none for a CPU (`install`);
- pinned host memory, which is ordinary memory (`install`);
- the rank of the process among others that are not there (`set_ranks`);
- the events around a copy, with a clock, if a test asks for them (`timed_events`). A CPU's own events cannot be timed,
  and SGLang goes without, as it does on such a device.

The names of modules that cannot be imported without a GPU are the environment's business, not this module's.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import time
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers import dp_attention
from sglang.srt.mem_cache import l2_transfer
from sglang.srt.mem_cache.pool_host import base as host_pool
from sglang.srt.mem_cache.pool_host import mha
from sglang.srt.runtime_context import get_flags, get_parallel

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

Ranks = dict[str, Any]
"""What `set_ranks` takes: names of SGLang's `get_parallel()`, and their values."""


@functools.cache
def install() -> None:
    """Put the fake kernel and the fake pinned memory in place. Once per process; there is no way back."""
    if not hasattr(mha, "transfer_kv_direct"):
        mha.transfer_kv_direct = _copy_by_index
    host_pool.HostKVCache.__init__ = _without_pinning(host_pool.HostKVCache.__init__)


def _copy_by_index(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    del page_size  # The indices are those of tokens, whatever the pages.
    for source, destination in zip(src_layers, dst_layers, strict=True):
        destination[dst_indices] = source[src_indices]


def _without_pinning(init: Any) -> Any:
    signature = inspect.signature(init)

    @functools.wraps(init)
    def unpinned(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        bound.arguments["pin_memory"] = False
        init(*bound.args, **bound.kwargs)

    return unpinned


# -- ranks


def _topology(
    *,
    tp_rank: int = 0,
    tp_size: int = 1,
    pp_rank: int = 0,
    pp_size: int = 1,
    dp_rank: int | None = None,
    dp_size: int = 1,
    attn_dp_size: int = 1,
) -> Ranks:
    """All values that follow from a rank and the sizes, as SGLang itself derives them without context parallelism."""
    attn_tp_size = tp_size // attn_dp_size
    return {
        "tp_rank": tp_rank,
        "tp_size": tp_size,
        "pp_rank": pp_rank,
        "pp_size": pp_size,
        "dp_rank": dp_rank,
        "dp_size": dp_size,
        "attn_tp_rank": tp_rank % attn_tp_size,
        "attn_tp_size": attn_tp_size,
        "attn_dp_rank": tp_rank // attn_tp_size,
        "attn_dp_size": attn_dp_size,
        "attn_dp_enabled": attn_dp_size > 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "attn_dcp_rank": 0,
        "attn_dcp_size": 1,
        "moe_ep_rank": 0,
        "moe_ep_size": 1,
        "moe_dp_rank": 0,
        "moe_dp_size": 1,
        "moe_tp_rank": tp_rank,
        "moe_tp_size": tp_size,
        "nnodes": 1,
    }


def single() -> Ranks:
    """The only process there is."""
    return _topology()


def tensor_parallel(tp_rank: int, tp_size: int = 2) -> Ranks:
    """One rank of a model that is split within its layers."""
    return _topology(tp_rank=tp_rank, tp_size=tp_size)


def data_parallel(dp_rank: int, dp_size: int = 2, *, tp_rank: int = 0, tp_size: int = 1) -> Ranks:
    """One rank of one of several whole copies of the model, each a world of its own."""
    return _topology(tp_rank=tp_rank, tp_size=tp_size, dp_rank=dp_rank, dp_size=dp_size)


def attention_data_parallel(tp_rank: int, tp_size: int = 4, dp_size: int = 2) -> Ranks:
    """One rank of a model whose attention, and with it its KV cache, is data parallel within the tensor-parallel ranks.

    SGLang calls it DP attention. From 0.5.22 on its ``dp_size`` does not count these.
    """
    ranks = _topology(tp_rank=tp_rank, tp_size=tp_size, attn_dp_size=dp_size)
    is_counted_apart = "attn_dp_enabled" in _known(ranks)
    return {**ranks, "dp_rank": ranks["attn_dp_rank"], "dp_size": 1 if is_counted_apart else dp_size}


def pipeline_parallel(pp_rank: int, pp_size: int = 2, *, tp_rank: int = 0, tp_size: int = 1) -> Ranks:
    """One rank of a model whose layers are spread over several stages."""
    return _topology(tp_rank=tp_rank, tp_size=tp_size, pp_rank=pp_rank, pp_size=pp_size)


_overrides = contextlib.ExitStack()


def set_ranks(**over: Any) -> None:
    """Have SGLang's `get_parallel()` answer with these values, and with those of a single process for the rest.

    Holds until the next call. SGLang itself refuses values that contradict each other, from 0.5.22 on. Names that a
    release of SGLang does not have are left out; before 0.5.21 ``dp_rank`` is one.

    Args:
        over: The values, most easily all those of a function such as `tensor_parallel`.
    """
    values = {**single(), **over}
    _overrides.close()
    known = _known(values)
    _overrides.enter_context(get_parallel().override(**{name: values[name] for name in known}))
    _overrides.enter_context(get_flags().dp.override(enabled=bool(values["attn_dp_enabled"])))
    # Where they are not among the values above, the functions of this module answer.
    for name, value in (("_ATTN_DP_RANK", values["attn_dp_rank"]), ("_ATTN_DP_SIZE", values["attn_dp_size"])):
        if hasattr(dp_attention, name):
            setattr(dp_attention, name, value)


def _known(values: Mapping[str, Any]) -> list[str]:
    """Those of the names that this release of SGLang can override."""
    return [name for name in values if _is_known(name)]


@functools.cache
def _is_known(name: str) -> bool:
    try:
        # None is no rank and no size, so that the check for contradictions leaves it alone.
        with get_parallel().override(**{name: None}):
            return True
    except ValueError:
        return False


# -- time


class TimedEvent:
    """What a GPU's event does, on a device whose copies are over by the time the event is recorded.

    Stricter than it must be: what was not asked to be timed, or not recorded, has no time.
    """

    held = False
    """Whether no event is over. See `held_transfers`."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._is_timed = enable_timing
        self._recorded: float | None = None

    def record(self, _stream: Any = None) -> None:
        self._recorded = time.perf_counter()

    def query(self) -> bool:
        return not TimedEvent.held

    def synchronize(self) -> None:
        """Wait for the event, even a held one: what is waited for happens."""

    def wait(self, _stream: Any = None) -> None:
        """Have a stream wait for the event."""

    def elapsed_time(self, end: TimedEvent) -> float:
        """The milliseconds from this event to another.

        Raises:
            RuntimeError: One of them was not made with ``enable_timing``, or was not recorded.
        """
        times = [self._time(), end._time()]
        return (times[1] - times[0]) * 1000

    def _time(self) -> float:
        if not self._is_timed:
            raise RuntimeError("this event was made without timing")
        if self._recorded is None:
            raise RuntimeError("this event was not recorded")
        return self._recorded


class _TimedDevice:
    """`torch.cpu`, with events that can be timed."""

    __name__ = "cpu_with_timed_events"
    Event = TimedEvent

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)


_UNTIMED = l2_transfer.device_module


def timed_events(on: bool) -> None:
    """Have the copies between device and host timed from now on, or not.

    Holds for the process. Copies that are under way keep the events that they have.
    """
    l2_transfer.device_module = _TimedDevice() if on else _UNTIMED
    # SGLang remembers whether the device can time.
    l2_transfer._timing_events_supported.cache_clear()


@contextlib.contextmanager
def held_transfers() -> Iterator[None]:
    """Within this, no copy between device and host that is made with `timed_events` is seen to end.

    Save where SGLang blocks until one has: it does not wait here for ever.
    """
    TimedEvent.held = True
    try:
        yield
    finally:
        TimedEvent.held = False
