"""Sources that contradict each other: which of them hold, and what is wrong with the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvcache_otel.events.worker import AUTO
from kvcache_otel.record.labels import printable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvcache_otel.events.source import Source


_OF_A_WORKER: dict[str, object] = {"engine": AUTO, "block_size": None, "clears": ""}
"""Options that hold for all sources of a name, and how they are where nothing is said."""


class Agreement(NamedTuple):
    """What became of sources.

    Attributes:
        sources: Those that contradict none before them. What one says of its worker holds for all of its name.
        wrong: What is wrong with each of the others; what becomes of them is for whoever asked to say.
    """

    sources: list[Source]
    wrong: list[str]


def agree(sources: Iterable[Source]) -> Agreement:
    """Tells sources that contradict each other, where the first that says something is right.

    Args:
        sources: In the order in which they were written.
    """
    held: dict[tuple[str, str], Source] = {}
    first: dict[tuple[str, str], Source] = {}  # Of each name, that which says something, by name and option.
    wrong: list[str] = []
    for source in sources:
        before = held.get((source.name, source.endpoint))
        if before is not None:
            wrong.append(_twice(source, before))
            continue
        said = [option for option, silent in _OF_A_WORKER.items() if getattr(source, option) != silent]
        for option in said:
            other = first.get((source.name, option), source)
            if getattr(source, option) != getattr(other, option):
                wrong.append(_another(source, other, option))
                break
        else:
            held[source.name, source.endpoint] = source
            for option in said:
                first.setdefault((source.name, option), source)
    agreed = [
        source._replace(
            **{option: getattr(first.get((source.name, option), source), option) for option in _OF_A_WORKER}
        )
        for source in held.values()
    ]
    return Agreement(agreed, wrong)


def _twice(source: Source, before: Source) -> str:
    others = [
        f"{option}={printable(now)} where it had {option}={printable(then)}"
        for option, now, then in zip(source._fields, source, before, strict=True)
        if now != then
    ]
    how = f"the second time with {', '.join(others)}" if others else "in the same words"
    return f"source {printable(source.name)!r} is there twice at {printable(source.endpoint)}, {how}"


def _another(source: Source, before: Source, option: str) -> str:
    now, then = getattr(source, option), getattr(before, option)
    return (
        f"source {printable(source.name)!r} at {printable(source.endpoint)} has {option}={now}, "
        f"and at {printable(before.endpoint)} {option}={then}: sources of one name are one worker"
    )
