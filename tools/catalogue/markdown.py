"""Pieces of a Markdown page."""

from __future__ import annotations

import re
import textwrap
from typing import TYPE_CHECKING

from catalogue.words import WIDTH

if TYPE_CHECKING:
    from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table, its cells escaped."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def link(name: str) -> str:
    """A link to the heading that is this name."""
    return f"[`{name}`](#{anchor(name)})"


def anchor(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^a-z0-9_ -]", "", heading.lower()).replace(" ", "-")


def wrapped(text: str) -> str:
    """A paragraph, broken into lines."""
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False) + "\n"
