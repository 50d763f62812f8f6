"""Numbers of somebody else's, made Python's own before they get into a cell."""

from __future__ import annotations

from typing import Any


def plain(number: Any) -> float:
    """Returns a number as a float of Python's own: one of an array's or a tensor's would stay what it is in a sum.

    Raises:
        TypeError: It is no number. Words are none, whatever they say.
        Exception: Whatever it raises when it is asked, or that no float holds it.
    """
    if type(number) is float:
        return number
    if isinstance(number, str | bytes | bytearray):
        raise TypeError(f"{type(number).__name__} is no number")
    return float(number)
