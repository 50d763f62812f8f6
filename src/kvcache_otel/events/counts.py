"""How many events there were, and how many blocks they were about, by type and medium."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvcache_otel import semconv

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcache_otel.record.cells import Counter
    from kvcache_otel.record.probe import Labels
    from kvcache_otel.spec import MetricSpec

KINDS, MEDIA = (
    tuple(sorted(semconv.ATTRIBUTES[key].members or ()))
    for key in (semconv.KVCACHE_EVENT_TYPE, semconv.KVCACHE_EVENT_MEDIUM)
)

CELLS = len(KINDS) * len(MEDIA)
"""Rows of either metric that each owner has."""


class EventCells(NamedTuple):
    """The cells of one type and medium."""

    events: Counter
    blocks: Counter


def event_cells(counter: Callable[[MetricSpec, Labels], Counter], labels: Labels) -> dict[tuple[str, str], EventCells]:
    """Returns the cells of every type and medium, which exist at zero from now on.

    Args:
        counter: Returns the counter of a series.
        labels: What its series have beside type and medium.
    """
    cells: dict[tuple[str, str], EventCells] = {}
    for kind in KINDS:
        for medium in MEDIA:
            named: Labels = {**labels, semconv.KVCACHE_EVENT_TYPE: kind, semconv.KVCACHE_EVENT_MEDIUM: medium}
            cells[kind, medium] = EventCells(counter(semconv.EVENTS, named), counter(semconv.EVENT_BLOCKS, named))
    return cells
