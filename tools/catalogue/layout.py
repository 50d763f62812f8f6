"""Python source, pretty-printed in a few lines so that it is already as `ruff format` would leave it."""

from __future__ import annotations

import json
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING

from catalogue.words import WIDTH

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

INDENT = "    "


@dataclass(frozen=True)
class Text:
    """A string literal, split into several where it does not fit on one line."""

    value: str


@dataclass(frozen=True)
class Bracket:
    """A bracketed list, on one line where that fits and with an item to a line where it does not."""

    opening: str
    items: Sequence[Expr]
    closing: str
    tall: bool = False


@dataclass(frozen=True)
class Pair:
    """A keyword argument or an entry of a dictionary."""

    key: str
    value: Expr


Expr = str | Text | Bracket | Pair


def _flat(expr: Expr) -> str | None:
    """The expression on one line, None where it never is."""
    match expr:
        case str():
            return expr
        case Text(value):
            return _quoted(value)
        case Pair(key, value):
            flat = _flat(value)
            return None if flat is None else key + flat
        case Bracket(opening, items, closing, tall):
            parts = [_flat(item) for item in items]
            if tall or None in parts:
                return None
            comma = "," if opening == "(" and len(items) == 1 else ""
            return f"{opening}{', '.join(filter(None, parts))}{comma}{closing}"


def layout(expr: Expr, indent: str = "", before: int = 0) -> str:
    """The expression as source, `before` characters after the indent, with room for a comma behind it."""
    flat = _flat(expr)
    if flat is not None and len(indent) + before + len(flat) + 1 <= WIDTH:
        return flat
    inner = indent + INDENT
    match expr:
        case str():
            return expr
        case Pair(key, value):
            return key + layout(value, indent, before + len(key))
        case Text(value):
            pieces = "".join(f"{inner}{piece}\n" for piece in _split(value, WIDTH - len(inner) - 2))
            return f"(\n{pieces}{indent})"
        case Bracket(opening, items, closing):
            # A lone argument is moved to a line of its own without a comma, as the formatter does.
            comma = "" if opening.endswith("frozenset(") else ","
            lines = "".join(f"{inner}{layout(item, inner)}{comma}\n" for item in items)
            return f"{opening}\n{lines}{indent}{closing}"


def _split(text: str, width: int) -> Iterator[str]:
    """The text as adjacent string literals, each but the last with the space that joins it to the next."""
    lines = textwrap.wrap(text, width - 1, break_long_words=False, break_on_hyphens=False)
    for line in lines[:-1]:
        yield _quoted(f"{line} ")
    yield _quoted(lines[-1])


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def tuple_of(items: Sequence[Expr]) -> Bracket:
    """A tuple of the items."""
    return Bracket("(", items, ")")


def frozenset_of(items: Sequence[Expr]) -> Bracket:
    """A frozenset of the items."""
    return Bracket("frozenset(", [Bracket("{", items, "}")], ")")


def dict_of(items: Sequence[Expr], *, tall: bool = False) -> Bracket:
    """A dictionary of the entries."""
    return Bracket("{", items, "}", tall=tall)
