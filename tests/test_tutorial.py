"""The tutorial is pasted and run, and says what it says it says; its tables are those of the code."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING

import kvcache_otel as kv
from kvcache_otel import semconv
from kvcache_otel.engines.generic.facts import Fact

if TYPE_CHECKING:
    from kvcache_otel.spec import MetricSpec

ROOT = Path(__file__).parents[1]
TUTORIAL = (ROOT / "docs" / "your-own-engine.md").read_text()
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(kind: str) -> list[str]:
    """Returns the tutorial's blocks of one kind, in their order."""
    return [match[2] for match in BLOCK.finditer(TUTORIAL) if match[1] == kind]


def run(folder: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    return subprocess.run(
        command, cwd=folder, env={**kept, **variables}, capture_output=True, text=True, timeout=60, check=False
    )


def test_what_is_pasted_from_the_tutorial_runs_and_says_what_it_says(tmp_path: Path) -> None:
    """With nothing beside it: what it needs it must bring."""
    (tmp_path / "pasted.py").write_text("\n\n".join(blocks("python")))
    ran = run(tmp_path, sys.executable, "pasted.py")
    assert (ran.returncode, "Traceback" in ran.stderr) == (0, False), ran.stderr
    assert ran.stdout == "".join(blocks("text"))
    assert len(blocks("text")) == 6


def test_the_tutorials_doctor_says_what_is_measured_of_its_cache(tmp_path: Path) -> None:
    above = TUTORIAL[: TUTORIAL.index("```sh\n")]
    (tmp_path / "mypackage").mkdir()
    (tmp_path / "mypackage" / "cache.py").write_text("\n\n".join(block for block in blocks("python") if block in above))
    [line] = [line for line in blocks("sh")[0].splitlines() if "doctor" in line]
    variable, program, *arguments = line.split()
    ran = run(tmp_path, str(Path(sys.executable).with_name(program)), *arguments, **dict([variable.split("=")]))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    report = [" ".join(line.split()) for line in ran.stdout.splitlines()]
    assert "attached make_room Controller.make_room" in report
    assert "MISSING shrink Controller has no shrink" in report
    assert "- what is evicted from host (hook shrink)" in report


def test_the_lines_are_about_as_many_as_is_said() -> None:
    [measure] = [block for block in blocks("python") if block.startswith("import kvcache_otel as kv\n\n\ndef measure")]
    assert 15 <= len([line for line in measure.splitlines() if line.strip()]) <= 22
    for page in (TUTORIAL, (ROOT / "README.md").read_text()):
        assert "about twenty lines" in page


# -- its tables --------------------------------------------------------------------------------------------------------


def table(head: str) -> list[list[str]]:
    """Returns the cells of a table of the tutorial, row by row."""
    rows = TUTORIAL[TUTORIAL.index(head) :].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


FACTS = {name: it for name in kv.__all__ if isinstance(it := getattr(kv, name), type) and issubclass(it, Fact)}


def test_the_table_of_facts_has_every_fact_with_what_it_needs_and_may_have() -> None:
    told: dict[str, tuple[set[str], dict[str, str]]] = {}
    for names, _, needs, may in table("| fact | on a method that"):
        options = dict(option.partition("=")[::2] for option in quoted(may) if option not in FACTS)
        for other in (option for option in quoted(may) if option in FACTS):
            options = told[other][1] | options
        told.update(dict.fromkeys(quoted(names), (set(quoted(needs)), options)))
    assert set(told) == set(FACTS)
    for name, (needs, options) in told.items():
        kind = FACTS[name]
        has = {field.name: field.default for field in fields(kind) if field.name != "when"}
        needed = {key for key, default in has.items() if default is MISSING} | set(kind.REQUIRED)
        assert needs == needed, name
        assert set(options) == set(has) - needed, name
        for key, default in options.items():
            assert not default or has[key] == ast.literal_eval(default), (name, key)


def test_the_closed_lists_are_those_of_the_catalogue() -> None:
    def of(spec: MetricSpec) -> set[str]:
        return set(spec.values[semconv.KVCACHE_REASON])

    told = {what: set(quoted(names)) for what, names in table("| what | one of |")}
    assert told == {
        "a tier": set(semconv.ATTRIBUTES[semconv.KVCACHE_TIER].members or ()) - {"none"},
        "a pool": set(semconv.ATTRIBUTES[semconv.KVCACHE_POOL].members or ()),
        "why it was dropped (`Drop`)": of(semconv.DROPPED_TOKENS),
        "why it was not stored (`SkippedStore`)": of(semconv.STORE_SKIPPED_BLOCKS),
        "what the space was for (`AllocationFailure`)": of(semconv.ALLOCATION_FAILURES),
        "why a hit was of no use (`HostInsert`)": set(),  # A link.
    }
