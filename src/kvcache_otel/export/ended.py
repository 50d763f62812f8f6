"""Rows that have ended, forgotten by the SDK too.

An SDK keeps each set of attributes that it has ever seen of an instrument, and after 2,000 tells no others apart.
It has no public way to forget one.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from kvcache_otel import semconv

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from kvcache_otel.record.recorder import Recorder

_Set = frozenset[tuple[str, Any]]


def forget_ended(provider: Any, scope: str, recorder: Recorder) -> None:
    """Has a provider forget the rows of ours that there are none of any more.

    Safe while it collects. An SDK that keeps them in another place than those we know forgets nothing.

    Args:
        provider: The MeterProvider.
        scope: The instrumentation scope of our instruments.
        recorder: Whose rows there are.
    """
    with suppress(AttributeError):
        for instrument, match in _matches(provider):
            spec = semconv.METRICS.get(instrument.name)
            if spec is not None and instrument.instrumentation_scope.name == scope:
                _forget(match, recorder.labels(spec))


def _forget(match: Any, rows: Iterable[Mapping[str, Any]]) -> None:
    """Leaves these rows of what a reader keeps of an instrument."""
    seen = _seen(match)
    living = {seen(frozenset(labels.items())) for labels in rows}
    with match._lock:
        kept = match._attributes_aggregation
        for key, aggregation in list(kept.items()):
            labels: dict[str, Any] = aggregation._attributes or {}
            if frozenset(labels.items()) not in living:
                del kept[key]


def _matches(provider: Any) -> Iterator[tuple[Any, Any]]:
    """Yields each instrument of a provider with what one of its readers keeps of it, as one view shows it."""
    storages = getattr(getattr(provider, "_measurement_consumer", None), "_reader_storages", {})
    for storage in list(storages.values()):
        for instrument, matches in list(getattr(storage, "_instrument_view_instrument_matches", {}).items()):
            for match in list(matches):
                yield instrument, match


def _seen(match: Any) -> Callable[[_Set], _Set]:
    """Returns what a view makes of a set of attributes."""
    shown = match._view._attribute_keys
    if shown is None:
        return lambda labels: labels
    return lambda labels: frozenset((key, value) for key, value in labels if key in shown)
