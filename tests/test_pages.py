"""What the project's pages name is there: the pages and headings that they link to, metrics, labels and options."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from kvcache_otel import semconv
from kvcache_otel.cli import command
from kvcache_otel.engines.vllm.table import HOOKS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*/README.md"), ROOT / "benchmarks/README.md"]
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^(?:[A-Z_]+=\S+ )*kvcache-otel (.*?)(?: +#.*)?$", re.MULTILINE)

NAME = re.compile(r"(?<![\w./:-])kvcache[._][a-z_.]*[a-z](?![\w(-]|\.[a-z])")

OTHERS = {"kvcache_otel", "kvcache.resident.block"}
"""What looks like a name of the catalogue: the package, and a name that a page says was not taken."""


def headings(page: Path) -> set[str]:
    """Returns the anchors of a page, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", CODE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_lead_to_pages_and_headings_that_there_are() -> None:
    found = 0
    for page in PAGES:
        for target in LINK.findall(CODE.sub("", page.read_text())):
            if "://" in target:
                continue
            name, _, anchor = target.partition("#")
            where = (page.parent / name).resolve() if name else page
            assert where.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in headings(where), f"{page.name}: {target}"
            found += 1
    assert found > 50


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_metrics_and_labels_are_those_of_the_catalogue(page: Path) -> None:
    """In OpenTelemetry's spelling and in Prometheus'; names that are cut off with an ellipsis are not looked at."""
    known = {*semconv.METRICS, *semconv.ATTRIBUTES, *map(prometheus, semconv.ATTRIBUTES), *OTHERS}
    for name in semconv.METRICS:
        known |= {prometheus(name) + end for end in ends(name)}
    for name in NAME.findall(page.read_text()):
        assert name in known or name.startswith("kvcache_otel."), f"{page.name}: {name}"


def prometheus(name: str) -> str:
    return name.replace(".", "_")


def ends(name: str) -> tuple[str, ...]:
    """Returns how a metric's names end in Prometheus."""
    spec = semconv.METRICS[name]
    unit = {"s": "_seconds", "By": "_bytes"}.get(spec.unit, "")
    if spec.instrument == "histogram":
        return tuple(unit + part for part in ("", "_bucket", "_sum", "_count"))
    return (f"{unit}_total",) if spec.instrument == "counter" else (unit,)


def test_commands_have_the_options_that_they_are_shown_with(monkeypatch: pytest.MonkeyPatch) -> None:
    for each in command.COMMANDS:
        monkeypatch.setattr(each, "run", lambda options: 0)
    shown = [line for page in PAGES for line in COMMAND.findall(page.read_text())]
    for line in shown:
        assert command.run(shlex.split(line)) == 0, line
    assert len(shown) > 8


def test_vllm_has_as_many_hooks_as_its_page_says() -> None:
    assert f" {len(HOOKS)} of its functions are hooked" in " ".join((ROOT / "docs" / "vllm.md").read_text().split())
