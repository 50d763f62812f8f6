"""How names and lists are written in everything that is generated."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

WIDTH = 120
"""No line of prose or of code is longer, where it can be broken."""


def constant_of(name: str) -> str:
    """The Python constant that stands for a name: `kvcache.tier` is KVCACHE_TIER."""
    return name.replace(".", "_").upper()


def listed(items: Sequence[str], conjunction: str = "or") -> str:
    """The items as a sentence lists them: `a, b or c`."""
    return f" {conjunction} ".join(filter(None, [", ".join(items[:-1]), items[-1]]))
