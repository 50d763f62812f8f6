"""A vLLM that is made up: every module and function that the hook table names, and nothing behind them."""

from __future__ import annotations

import sys
from collections import defaultdict
from importlib.metadata import EntryPoint, EntryPoints
from typing import TYPE_CHECKING

from kvcache_otel.engines.vllm.table import HOOKS, PLUGIN_GROUP, PLUGIN_NAME

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    import pytest


def write(folder: Path, *, version: str = "0.32.0", without: Collection[str] = (), body: str = "") -> None:
    """Writes the made-up engine.

    Args:
        folder: Where.
        version: What it says of itself.
        without: Names of hooks whose function it does not have.
        body: Code that runs when it is imported.
    """
    functions: defaultdict[str, defaultdict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for hook in HOOKS:
        owner, _, function = hook.path.partition(".")
        functions[hook.module][owner].extend([] if hook.name in without else [function])
    for module, owners in functions.items():
        file = folder.joinpath(*module.split(".")).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(_class(owner, names) for owner, names in owners.items()))
    for package in {file.parent for file in folder.glob("vllm/**/*.py")} | {folder / "vllm"}:
        for parent in (package, *package.parents):
            if folder in parent.parents:
                (parent / "__init__.py").touch()
    (folder / "vllm" / "__init__.py").write_text(f"__version__ = {version!r}\n{body}\n")


def _class(name: str, functions: list[str]) -> str:
    # Without functions there is no class either: every class has an __init__.
    return "\n".join([f"class {name}:", *(f"    def {f}(self): return {f!r}" for f in functions)]) if functions else ""


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets this process know no vLLM that was imported before, until the test ends."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)


def entry_points(*, installed: bool) -> object:
    """A stand-in for `importlib.metadata.entry_points`: ours are there or not, whatever is really installed."""
    from importlib.metadata import entry_points as real

    ours = EntryPoints(
        [
            EntryPoint(PLUGIN_NAME, "kvcache_otel.plugin:register_vllm", PLUGIN_GROUP),
            EntryPoint("kvcache", "kvcache_otel.instrumentor:KVCacheInstrumentor", "opentelemetry_instrumentor"),
        ]
    )

    def select(**parameters: str) -> EntryPoints:
        if parameters["group"] in (PLUGIN_GROUP, "opentelemetry_instrumentor"):
            return ours.select(**parameters) if installed else EntryPoints()
        return real(**parameters)

    return select
