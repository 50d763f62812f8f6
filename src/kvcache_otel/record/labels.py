"""Label values: closed sets stay closed, open ones stay harmless, and what was folded is said once."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvcache_otel import semconv
from kvcache_otel.record.outside import let_through

if TYPE_CHECKING:
    from kvcache_otel.spec import MetricSpec

_logger = logging.getLogger(__name__)

REMEMBERED = 16
LONGEST = 128


class Labels:
    """Checks label values against the catalogue. Used at set-up, never on a hot path."""

    def __init__(self) -> None:
        self._said: set[tuple[str, str]] = set()

    def fold(self, spec: MetricSpec, key: str, value: object) -> str | int | None:
        """Returns the value to export for one attribute of one metric.

        Args:
            spec: The metric.
            key: The attribute's key, one of `spec.attributes` or of the identity.
            value: The value an adapter gave.

        Returns:
            The value itself where the set is open or has it; the set's fallback (``other``, ``unknown``) where it has
            not; None where there is no fallback either, and the measurement must be dropped.
        """
        attribute = semconv.ATTRIBUTES[key]
        if attribute.type == "int":
            return value if isinstance(value, int) and not isinstance(value, bool) else self._unfit(key, value, None)
        text = printable(value)
        members = spec.values.get(key, attribute.members)
        if members is None or text in members:
            return text
        fallback = attribute.fallback
        return self._unfit(key, text, fallback if fallback is not None and fallback in members else None)

    def _unfit(self, key: str, value: object, fallback: str | None) -> str | None:
        seen = (key, printable(value))
        if seen not in self._said and len(self._said) < REMEMBERED:
            self._said.add(seen)
            outcome = f"recorded as {fallback!r}" if fallback is not None else "not recorded"
            last = " (further unknown values are folded silently)" if len(self._said) == REMEMBERED else ""
            _logger.warning("kvcache: %s=%r is not in the catalogue; %s%s", key, seen[1], outcome, last)
        return fallback


def printable(value: object) -> str:
    """Returns text that every exporter can encode: valid UTF-8, no endless names."""
    try:
        text = value if isinstance(value, str) else str(value)
    except Exception as error:
        let_through(error)
        text = type(value).__name__
    return text[:LONGEST].encode("utf-8", "replace").decode()


def declared(key: str, value: object, *, but: str = "") -> str:
    """Returns a value that somebody has written down for an attribute, where the catalogue has it.

    Args:
        key: The attribute's key, of one with a closed set.
        value: The value.
        but: One that the catalogue has, and that cannot be written down here.

    Raises:
        ValueError: The catalogue does not have it.
    """
    members = (semconv.ATTRIBUTES[key].members or frozenset()) - {but}
    if not isinstance(value, str) or value not in members:
        raise ValueError(f"{key} has no {printable(value)!r}: it is one of {', '.join(sorted(members))}")
    return value
