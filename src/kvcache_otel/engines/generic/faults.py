"""What a program says of its cache, looked at before anything is changed, so that a fault is said in words of ours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

from kvcache_otel.record.labels import printable

if TYPE_CHECKING:
    from typing import TypeVar

    Key = TypeVar("Key")
    Value = TypeVar("Value")


def mapping(what: str, given: Mapping[Key, Value], like: str) -> Mapping[Key, Value]:
    """Returns a mapping.

    Args:
        what: What it is called.
        given: What was given.
        like: An example of what may be.

    Raises:
        TypeError: It is none.
    """
    if isinstance(given, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        return given
    raise TypeError(f"{what}= must be a mapping, as in {what}={like}, and not {printable(given)!r}")


def text(what: str, given: str | None) -> str | None:
    """Returns a name that is not empty, or None.

    Raises:
        TypeError: It is no text, or empty.
    """
    if given is None or (isinstance(given, str) and given):  # pyright: ignore[reportUnnecessaryIsInstance]
        return given
    raise TypeError(f"{what} must be a name, and not {printable(given)!r}")


def names(what: str, given: Any) -> tuple[Any, ...]:
    """Returns what `several` does, where each is another.

    Raises:
        TypeError: It is neither one text nor several.
        ValueError: One is there twice.
    """
    all_ = several(what, given)
    twice = [name for number, name in enumerate(all_) if name in all_[:number]]
    if twice:
        raise ValueError(f"{what}: {printable(twice[0])!r} is there twice")
    return all_


def several(what: str, given: Any) -> tuple[Any, ...]:
    """Returns one text, or all of several, as a tuple.

    Raises:
        TypeError: It is neither.
    """
    if isinstance(given, str):
        return (given,)
    if isinstance(given, Iterable):
        return tuple(cast("Iterable[Any]", given))
    raise TypeError(f"{what} must be one name or several, and not {printable(given)!r}")


def quantity(what: str, given: Any) -> None:
    """Looks at a quantity that is always so: a whole number of at least 0, or such numbers by name.

    Raises:
        TypeError: It is nothing of the kind.
        ValueError: It is negative.
    """
    words = printable(given)
    values = cast("Mapping[Any, Any]", given).values() if isinstance(given, Mapping) else (given,)
    for value in values:
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            shown = repr(words) if isinstance(given, str) else words
            raise TypeError(f"{what}= must be a whole number, such numbers by name, or a callable, and not {shown}")
        if value.__index__() < 0:
            raise ValueError(f"{what}= is negative: {words}")
