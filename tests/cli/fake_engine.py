"""An engine that is made up: every module and function that its hook table names, and nothing behind them."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections import defaultdict
from importlib.metadata import EntryPoint, EntryPoints
from typing import TYPE_CHECKING, Any

from kvcache_otel.engines import versions
from kvcache_otel.instrumentation import ENGINES

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    import pytest

VERSIONS = {"vllm": "0.32.0", "sglang": "0.5.23"}
"""A version of each engine that has every hook."""


def table(engine: str) -> Any:
    """Returns an engine's hook table."""
    package, _ = ENGINES[engine]
    return importlib.import_module(f"{package}.table")


def write(
    folder: Path, engine: str = "vllm", *, version: str = "", without: Collection[str] = (), body: str = ""
) -> None:
    """Writes the made-up engine.

    Args:
        folder: Where.
        engine: Which one.
        version: What it says of itself; where empty, one of `VERSIONS`.
        without: Names of hooks whose function it does not have. A module that would have none is not there either.
        body: Code that runs when it is imported.
    """
    functions: defaultdict[str, defaultdict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for hook in table(engine).HOOKS:
        if hook.name not in without:
            owner, _, function = hook.path.rpartition(".")
            functions[hook.module][owner].append(function)
    (folder / engine).mkdir(parents=True, exist_ok=True)
    for module, owners in functions.items():
        file = folder.joinpath(*module.split(".")).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(_source(owner, names) for owner, names in owners.items()))
    for package in {file.parent for file in folder.glob(f"{engine}/**/*.py")} | {folder / engine}:
        for parent in (package, *package.parents):
            if folder in parent.parents:
                (parent / "__init__.py").touch()
    (folder / engine / "__init__.py").write_text(f"__version__ = {version or VERSIONS[engine]!r}\n{body}\n")


def _source(owner: str, functions: list[str]) -> str:
    if not owner:  # The module itself has them.
        return "\n".join(f"def {f}(): return {f!r}" for f in functions)
    return "\n".join([f"class {owner}:", *(f"    def {f}(self): return {f!r}" for f in functions)])


def later(engine: str, version: str) -> list[str]:
    """Returns the names of the hooks whose functions came after a version."""
    return [hook.name for hook in table(engine).HOOKS if versions.is_before(version, hook.since)]


def imported() -> list[str]:
    """Returns the names of every engine's modules that are imported."""
    return [name for name in sys.modules if name.partition(".")[0] in ENGINES]


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets this process know no engine that was imported before, until the test ends."""
    for name in imported():
        monkeypatch.delitem(sys.modules, name)


def hide_real_ones(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Lets no engine be looked for, until the test ends, but for those that are made up in a folder."""
    find = importlib.util.find_spec

    def find_made_up(name: str, *rest: Any) -> Any:
        return None if name in ENGINES and not (folder / name).exists() else find(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", find_made_up)


def entry_points(*, installed: bool) -> object:
    """A stand-in for `importlib.metadata.entry_points`: ours are there or not, whatever is really installed."""
    from importlib.metadata import entry_points as real

    tables = {engine: table(engine) for engine in ENGINES}
    ours = EntryPoints(
        [
            *(
                EntryPoint(table.PLUGIN_NAME, f"kvcache_otel.plugin:register_{engine}", table.PLUGIN_GROUP)
                for engine, table in tables.items()
            ),
            EntryPoint("kvcache", "kvcache_otel.instrumentor:KVCacheInstrumentor", "opentelemetry_instrumentor"),
        ]
    )

    def select(**parameters: str) -> EntryPoints:
        if parameters["group"] in ours.groups:
            return ours.select(**parameters) if installed else EntryPoints()
        return real(**parameters)

    return select
