"""Which columns of a table fit into a terminal: those that matter most, whole, and names cut where they say least."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

SHORTEST_NAME = 16
"""What a name may have at the least before a column is left out for it, if it is as long."""


class Fit(NamedTuple):
    """What fits.

    Attributes:
        columns: The columns that do.
        left_out: Those that do not.
        name: How wide names may be.
    """

    columns: list[str]
    left_out: list[str]
    name: int


def fit(widths: Mapping[str, int], names: str, expendable: Sequence[str], width: int) -> Fit:
    """Chooses columns.

    Args:
        widths: How wide each column is, with what is between it and the next.
        names: The column that may be narrower than that.
        expendable: Columns that may be left out, the least needed first.
        width: What there is for all.
    """
    left = dict(widths)
    longest = left.pop(names)
    least = min(longest, SHORTEST_NAME)
    for column in expendable:
        if sum(left.values()) + least <= width:
            break
        left.pop(column, None)
    name = min(longest, max(width - sum(left.values()), least))
    kept = [column for column in widths if column == names or column in left]
    return Fit(kept, [column for column in widths if column not in kept], name)


def shortened(name: str, width: int, measure: Callable[[str], int] = len) -> str:
    """Returns a name that is no wider than it may be; its ends stay, which tell most names apart.

    Args:
        name: The name.
        width: How wide it may be.
        measure: How wide a text is.
    """
    if measure(name) <= width:
        return name
    for kept in range(min(len(name), width) - 1, 0, -1):
        end = kept // 2
        short = f"{name[: kept - end]}…{name[len(name) - end :]}"
        if measure(short) <= width:
            return short
    return "…"
