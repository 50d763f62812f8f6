"""A vLLM engine on the CPU that offloads KV blocks: device -> host -> disk, and back."""

from __future__ import annotations

import os
import random
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from examples.vllm_cpu.tiny_model import BLOCK_BYTES, BLOCK_TOKENS, FIRST_TEXT_TOKEN, TEXT_TOKENS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm import LLM

SPEC_MODULE = "examples.vllm_cpu.cpu_offload_spec"
MAX_TOKENS = 1024
"""The longest sequence, prompt and answer together."""

DEFAULT_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    # Ranks share the cores they find; by default each insists on a NUMA node of its own.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # vLLM and torch deprecate each other's functions, in every process.
    "PYTHONWARNINGS": "ignore::FutureWarning",
}


def prepare_environment(*, multiprocess: bool = True, ranks: int = 1) -> None:
    """Set the environment variables that the engine and the processes it starts are to find.

    A variable of `DEFAULT_ENVIRONMENT` that is set already stays as it is. The checkout goes in front of
    ``PYTHONPATH``: workers are separate processes, and import the offloading spec by the name of its module.

    Args:
        multiprocess: Whether the engine is to run in processes of its own.
        ranks: How many workers the cores are divided among. Workers whose threads outnumber the cores wait for each
            other in busy loops, and are slower by a factor of five.
    """
    for name, value in DEFAULT_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if ranks > 1:
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // ranks)))
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(multiprocess))
    checkout = str(Path(__file__).resolve().parents[2])
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != checkout]
    os.environ["PYTHONPATH"] = os.pathsep.join([checkout, *paths])


def fs_tier(root: str | Path, **options: Any) -> dict[str, Any]:
    """The configuration of vLLM's file-system tier: block files under a folder, four I/O threads, KV events.

    Args:
        root: The folder.
        options: What is to differ, or to be added, e.g. ``backpressure``.
    """
    return {
        "type": "fs",
        "root_dir": str(root),
        "n_read_threads": 2,
        "n_write_threads": 2,
        "enable_kv_events": True,
        "locality": "LOCAL",
        **options,
    }


def make_llm(
    model: str | Path,
    *,
    root: str | Path,
    tiers: Sequence[Mapping[str, Any]] | None = None,
    gpu_blocks: int = 64,
    host_blocks: int = 24,
    policy: Literal["lru", "arc"] = "lru",
    tensor_parallel_size: int = 1,
    multiprocess: bool = True,
    events: bool = False,
    events_port: int = 5557,
    offload_options: Mapping[str, Any] | None = None,
    **engine_options: Any,
) -> LLM:
    """Make an engine with vLLM's OffloadingConnector and its tiered offloading manager.

    Environment variables of this process are set on the way, see `prepare_environment`; where vLLM has been imported
    before, its log level is already decided.

    Args:
        model: A model that `tiny_model.build` wrote.
        root: The folder for the blocks of the file-system tier. Engines with the same folder share their blocks.
        tiers: The tiers behind the host, as vLLM's ``secondary_tiers`` has them. Default: `fs_tier` in ``root``. With
            none the engine has vLLM's plain host tier, without the tiered manager.
        gpu_blocks: Blocks of the device's pool; vLLM keeps one for itself. A sequence of `MAX_TOKENS` needs 32.
        host_blocks: Blocks of the host tier.
        policy: How the host tier evicts.
        tensor_parallel_size: Ranks. More than one needs ``multiprocess``.
        multiprocess: Whether engine core and workers are processes of their own, or all is in this one.
        events: Whether to publish KV events over ZMQ, at ``events_port``, with replay at the port after it.
        events_port: See there.
        offload_options: Further entries of ``kv_connector_extra_config``.
        engine_options: Further arguments of ``vllm.LLM``.

    Returns:
        The engine. `shut_down` ends it.
    """
    if tensor_parallel_size > 1 and not multiprocess:
        raise ValueError("more than one rank needs multiprocess=True")
    prepare_environment(multiprocess=multiprocess, ranks=tensor_parallel_size)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm|torch")

    from vllm import LLM, envs

    # An engine that ran in this process froze the environment as it was then.
    envs.disable_envs_cache()

    if tiers is None:
        tiers = [fs_tier(root)]
    extra_config: dict[str, Any] = {
        "spec_module_path": SPEC_MODULE,
        "spec_name": "CpuTieringSpec" if tiers else "CpuOnlySpec",
        "cpu_bytes_to_use": host_blocks * BLOCK_BYTES * tensor_parallel_size,
        "eviction_policy": policy,
    }
    if tiers:
        extra_config["secondary_tiers"] = [dict(tier) for tier in tiers]
    if events:
        extra_config["self_describing_kv_events"] = True
        engine_options["kv_events_config"] = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{events_port}",
            "replay_endpoint": f"tcp://*:{events_port + 1}",
            "topic": "kv-events",
        }
    defaults: dict[str, Any] = {
        "dtype": "bfloat16",
        "max_model_len": MAX_TOKENS,
        "enforce_eager": True,
        "block_size": BLOCK_TOKENS,
        "max_num_seqs": 4,
        "kv_cache_memory_bytes": gpu_blocks * BLOCK_BYTES,
        "tensor_parallel_size": tensor_parallel_size,
        "disable_log_stats": False,
        "use_tqdm_on_load": False,
        "seed": 0,
        "kv_transfer_config": {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {**extra_config, **(offload_options or {})},
        },
    }
    return LLM(model=str(model), **{**defaults, **engine_options})


@dataclass(frozen=True)
class Answer:
    """What the engine answered to a prompt.

    Attributes:
        token_ids: The generated tokens.
        cached_tokens: How many of the prompt's tokens came from a cache, of whatever tier.
    """

    token_ids: tuple[int, ...]
    cached_tokens: int


def prompt(seed: int, tokens: int = 325) -> list[int]:
    """A prompt that depends on nothing but the arguments; prompts of different seeds share no block.

    The default is ten blocks and five tokens.
    """
    return [FIRST_TEXT_TOKEN + byte % TEXT_TOKENS for byte in random.Random(seed).randbytes(tokens)]


def generate(llm: LLM, seed: int, tokens: int = 325, *, new_tokens: int = 4) -> Answer:
    """Have the engine answer the prompt of a seed, greedily."""
    return generate_batch(llm, [seed], tokens, new_tokens=new_tokens)[0]


def generate_batch(llm: LLM, seeds: Sequence[int], tokens: int = 325, *, new_tokens: int = 4) -> list[Answer]:
    """Have the engine answer the prompts of several seeds, together."""
    from vllm import SamplingParams

    outputs = llm.generate(
        [{"prompt_token_ids": prompt(seed, tokens)} for seed in seeds],
        SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True),
        use_tqdm=False,
    )
    return [Answer(tuple(output.outputs[0].token_ids), output.num_cached_tokens or 0) for output in outputs]


def forget_device(llm: LLM, timeout: float = 5.0) -> None:
    """Empty the device's prefix cache; host and disk keep their blocks.

    vLLM refuses while a block is in use, as it is while its copy to the host is under way: asked again until it agrees.

    Raises:
        TimeoutError: It never did.
    """
    deadline = time.monotonic() + timeout
    while not llm.reset_prefix_cache():
        if time.monotonic() > deadline:
            raise TimeoutError("the device's prefix cache could not be emptied: blocks stayed in use")
        time.sleep(0.05)


def shut_down(llm: LLM) -> None:
    """End the engine and the processes it started, and let them close what they opened."""
    llm.llm_engine.engine_core.shutdown()
