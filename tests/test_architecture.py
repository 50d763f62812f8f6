"""The floors of `docs/architecture.md`: a module imports only from floors below its own, or from its own room."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "kvcache_otel"
STAIRS = (
    ("version", "spec"),
    ("semconv",),
    ("identity",),
    ("record",),
    ("events",),
    ("export",),
    ("engines",),
    ("", "instrumentation", "instrumentor", "own", "package", "plugin", "runtime"),
    ("demo",),
    ("cli",),
    ("__main__",),
)
"""Rooms by the first name below the package, from the ground up; finer than the page has them. The empty one is the
package itself."""

FLOORS = {room: floor for floor, rooms in enumerate(STAIRS) for room in rooms}
WIRING = FLOORS[""]
"""Where modules of one floor may know each other: they hold the process together."""

MODULES = sorted(PACKAGE.rglob("*.py"))


def _room(module: str) -> str:
    return module.removeprefix("kvcache_otel").removeprefix(".").partition(".")[0]


def _imports(path: Path) -> set[str]:
    imported: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names] if node.module == "kvcache_otel" else []
            imported.update(names or [node.module or ""])
        elif isinstance(node, ast.Import):
            imported.update(alias.name for alias in node.names)
    return {name for name in imported if name.partition(".")[0] == "kvcache_otel"}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_only_from_below(path: Path) -> None:
    own = _room(".".join(("kvcache_otel", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"))
    for name in _imports(path):
        room = _room(name)
        assert room == own or FLOORS[room] < FLOORS[own] or FLOORS[own] == FLOORS[room] == WIRING, f"{path}: {name}"


def test_adapters_know_no_exporter_and_exporters_no_engine() -> None:
    for path in MODULES:
        room = path.relative_to(PACKAGE).parts[0]
        rooms = {_room(name) for name in _imports(path)}
        if room == "engines":
            assert "export" not in rooms
        if room == "export":
            assert "engines" not in rooms


def test_only_one_module_of_the_demo_knows_of_telemetry() -> None:
    knowing = {
        path.stem
        for path in MODULES
        if path.parent.name == "demo" and {_room(name) for name in _imports(path)} - {"demo"}
    }
    assert knowing == {"instrument"}


def test_every_room_is_on_the_page() -> None:
    page = (PACKAGE.parents[1] / "docs" / "architecture.md").read_text()
    for path in MODULES:
        relative = path.relative_to(PACKAGE)
        known = relative.name == "__init__.py" or relative.parts[0] == "cli" or relative.stem == "version"
        assert known or path.name in page, f"{relative} is not in docs/architecture.md"
