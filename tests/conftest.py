"""What every test may use."""

from __future__ import annotations

import importlib.util
import os
import shutil
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

REQUIREMENTS: dict[str, tuple[Callable[[], bool], str]] = {
    "vllm": (lambda: importlib.util.find_spec("vllm") is not None, "the vllm package (`make test-engines`)"),
    "sglang": (lambda: importlib.util.find_spec("sglang") is not None, "the sglang package (`make test-engines`)"),
    "torch": (lambda: importlib.util.find_spec("torch") is not None, "the torch package, which comes with an engine"),
    "prometheus": (lambda: shutil.which("prometheus") is not None, "a program `prometheus` on the PATH"),
    "otlp": (lambda: importlib.util.find_spec("rotel") is not None, "the rotel package, for Python 3.11"),
}
"""By name: whether something that not every machine has is here, and what it is."""


def require(name: str) -> None:
    """Skip the test, or at the top of a module the whole module, where something is not here.

    Where ``KVCACHE_OTEL_REQUIRE``, a comma-separated list, has its name, that is an error instead of a skip: a machine
    that is to run these tests cannot pass by leaving them out.

    Args:
        name: A key of `REQUIREMENTS`.
    """
    is_here, what = REQUIREMENTS[name]
    if is_here():
        return
    demanded = {item.strip() for item in os.environ.get("KVCACHE_OTEL_REQUIRE", "").split(",")}
    if name in demanded:
        raise RuntimeError(f"KVCACHE_OTEL_REQUIRE demands {name}, but this is missing: {what}")
    pytest.skip(f"needs {what}", allow_module_level=True)
