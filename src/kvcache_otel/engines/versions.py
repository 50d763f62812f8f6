"""How an engine's version stands to those that its hook table was written for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Literal

    Range = tuple[str, str]
    Support = Literal["full", "partial", "outside", "unknown"]


def support(version: str, supported: Range, full: Range) -> Support:
    """Returns how much of an engine is known: all, a part, nothing for certain; ``unknown`` for no readable version.

    Args:
        version: The engine's own, ``0.32.0+cpu``.
        supported: The first and the last minor version that the table was written for.
        full: Those of them that have every hook.
    """
    minor = _minor(version)
    if minor is None:
        return "unknown"
    if _within(minor, full):
        return "full"
    return "partial" if _within(minor, supported) else "outside"


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
    """Returns whether a version is of an earlier minor version than another; false where it cannot be read."""
    minor, bound = _minor(version), _minor(other)
    return minor is not None and bound is not None and minor < bound


def _within(minor: tuple[int, int], versions: Range) -> bool:
    first, last = _minor(versions[0]), _minor(versions[1])
    return first is not None and last is not None and first <= minor <= last


def _minor(version: str) -> tuple[int, int] | None:
    major, _, rest = version.partition(".")
    minor = rest[: next((index for index, letter in enumerate(rest) if not letter.isdecimal()), len(rest))]
    if not (version.isascii() and major.isdecimal() and minor):
        return None
    return int(major), int(minor)
