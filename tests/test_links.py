"""Links between the project's pages lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*/README.md"), ROOT / "benchmarks/README.md"]
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def test_links_lead_to_headings_that_there_are() -> None:
    found = 0
    for page in PAGES:
        for target in LINK.findall(CODE.sub("", page.read_text())):
            if "://" in target:
                continue
            name, _, anchor = target.partition("#")
            where = (page.parent / name).resolve() if name else page
            assert where.exists(), f"{page.name}: {target}"
            if anchor:
                assert anchor in headings(where), f"{page.name}: {target}"
            found += 1
    assert found > 50


def headings(page: Path) -> set[str]:
    """Returns the anchors of a page, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", CODE.sub("", page.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
