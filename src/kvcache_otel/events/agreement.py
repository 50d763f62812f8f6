"""Sources that contradict each other: which of them hold, and what is wrong with the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvcache_otel.events.worker import AUTO
from kvcache_otel.record.labels import printable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvcache_otel.events.source import Source


class Agreement(NamedTuple):
    """What became of sources.

    Attributes:
        sources: Those that contradict none before them. What one says of its worker holds for all of its name.
        wrong: What is wrong with each of the others.
    """

    sources: list[Source]
    wrong: list[str]


def agree(sources: Iterable[Source]) -> Agreement:
    """Tells sources that contradict each other, where the first that says something is right.

    Args:
        sources: In the order in which they were written.
    """
    held: dict[tuple[str, str], Source] = {}
    engines: dict[str, Source] = {}
    sizes: dict[str, Source] = {}
    wrong: list[str] = []
    for source in sources:
        before = held.get((source.name, source.endpoint))
        if before is not None:
            wrong.append(_twice(source, before))
            continue
        engine, size = engines.get(source.name, source), sizes.get(source.name, source)
        if source.engine not in (AUTO, engine.engine):
            wrong.append(_another(source, engine, "engine"))
        elif source.block_size not in (None, size.block_size):
            wrong.append(_another(source, size, "block_size"))
        else:
            held[source.name, source.endpoint] = source
            if source.engine != AUTO:
                engines.setdefault(source.name, source)
            if source.block_size is not None:
                sizes.setdefault(source.name, source)
    agreed = [
        source._replace(
            engine=engines.get(source.name, source).engine, block_size=sizes.get(source.name, source).block_size
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
    return (
        f"source {printable(source.name)!r} is there twice at {printable(source.endpoint)}, {how}: "
        "the second is left out"
    )


def _another(source: Source, before: Source, option: str) -> str:
    now, then = getattr(source, option), getattr(before, option)
    return (
        f"source {printable(source.name)!r} at {printable(source.endpoint)} has {option}={now}, "
        f"and at {printable(before.endpoint)} {option}={then}: sources of one name are one worker; "
        f"the one at {printable(source.endpoint)} is left out"
    )
