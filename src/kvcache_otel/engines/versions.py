"""How an engine's version stands to those that its hook table was written for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Literal

    Range = tuple[str, str]
    Support = Literal["full", "partial", "outside", "unknown"]


# Digits of a number that count; Python refuses to read thousands.
LONGEST = 9


def support(version: str, supported: Range, full: Range) -> Support:
    """Returns how much of an engine is known: all, a part, nothing for certain; ``unknown`` for no readable version.

    Args:
        version: The engine's own, ``0.32.0+cpu``.
        supported: The first and the last version that the table was written for, as far as it matters: ``0.32`` is
            every 0.32.
        full: Those of them that have every hook.
    """
    if _numbers(version) is None:
        return "unknown"
    if _within(version, full):
        return "full"
    return "partial" if _within(version, supported) else "outside"


def warning(name: str, version: str, supported: Range, full: Range) -> str:
    """Returns what an operator must know of an engine's version, in one line; empty where there is nothing to say."""
    versions = f"{supported[0]} to {supported[1]}"
    consequence = "what is found is hooked all the same, but nobody has checked its numbers"
    match support(version, supported, full):
        case "outside":
            return f"{name} {version} is outside {versions}, the versions that are supported: {consequence}"
        case "unknown":
            return f"{name} says {version!r} for its version, which cannot be compared with {versions}: {consequence}"
        case _:
            return ""


def is_before(version: str, other: str) -> bool:
    """Returns whether a version is before another, as far as that one goes; false where it cannot be read."""
    return (order := _order(version, other)) is not None and order < 0


def _within(version: str, versions: Range) -> bool:
    first, last = _order(version, versions[0]), _order(version, versions[1])
    return first is not None and last is not None and first >= 0 >= last


def _order(version: str, bound: str) -> int | None:
    """Returns whether a version is before (-1), at (0) or after (1) a bound, as far as the bound goes."""
    numbers, limit = _numbers(version), _numbers(bound)
    if numbers is None or limit is None:
        return None
    numbers = (*numbers, *(0 for _ in limit))[: len(limit)]
    return (numbers > limit) - (numbers < limit)


def _numbers(version: str) -> tuple[int, ...] | None:
    """Returns the numbers that a version begins with; None where these are fewer than two."""
    numbers: list[int] = []
    for part in version.split(".") if version.isascii() else ():
        digits = part[: next((index for index, letter in enumerate(part) if not letter.isdecimal()), len(part))]
        if not digits:
            break
        numbers.append(int(digits[:LONGEST]))
        if digits != part:
            break
    return tuple(numbers) if len(numbers) > 1 else None
