"""What reads a fact takes what the function may be given one day: a release that adds a parameter loses no fact."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

import pytest

from kvcache_otel.engines.sglang import table as sglang
from kvcache_otel.engines.sglang.adapter import SglangAdapter
from kvcache_otel.engines.vllm import table as vllm
from kvcache_otel.engines.vllm.adapter import VllmAdapter

if TYPE_CHECKING:
    from kvcache_otel.engines.hooks import Hook

BODIES = [
    pytest.param(hook, getattr(adapter, hook.body), id=f"{name} {hook.name}")
    for name, adapter, hooks in (("sglang", SglangAdapter, sglang.HOOKS), ("vllm", VllmAdapter, vllm.HOOKS))
    for hook in hooks
]


@pytest.mark.parametrize(("hook", "body"), BODIES)
def test_a_body_takes_parameters_that_it_does_not_know(hook: Hook, body: object) -> None:
    kinds = {parameter.kind for parameter in inspect.signature(body).parameters.values()}  # type: ignore[arg-type]
    more = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    # What replaces arguments must know all of them, or one would be lost on the way.
    assert kinds & more == (set() if hook.moment == "arguments" else more)
