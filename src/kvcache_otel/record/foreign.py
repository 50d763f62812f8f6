"""Somebody else's events that wait for their device: whose time they tell, and that it is that of nobody else.

An engine may hand the same two events over again, or take them from a pool and record them again, before they were
read. Then they tell another copy's time, and the first copy has none.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from kvcache_otel.record.pair import Pair

waiting: dict[int, Pair] = {}
"""The pairs that wait, by the id of the later event, which each keeps while it is in here: all of this process, since
an engine may use two events for one copy there and another back."""


class _Recording:
    """Takes the place of an event's `record`, among its own attributes, until it is called or the event was read."""

    __slots__ = ("_event",)

    def __init__(self, event: Any) -> None:
        self._event = event

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        event = self._event
        supersede(event)  # First: whoever reads it at this moment looks at that afterwards.
        kind: Any = event.__class__
        return kind.record(event, *args, **kwargs)


def wait_for(pair: Pair) -> None:
    """Says that a pair waits for its device. Whoever waited for the same event does not any more.

    It is noticed too where the later event is recorded again: where only the earlier one is, it lies behind the other,
    which is no time. Events that take no attributes are not noticed.
    """
    event: Any = pair.after
    number = id(event)
    if number in waiting:
        supersede(event)
    waiting[number] = pair
    attributes = _attributes(event)
    if attributes is not None and "record" not in attributes and hasattr(event.__class__, "record"):
        attributes["record"] = _Recording(event)


def supersede(event: Any) -> None:
    """Says that an event is not what another pair waits for any more, if one does."""
    before = waiting.pop(id(event), None)
    if before is not None:
        before.void = True
        _give_back(event)


def forget(pair: Pair) -> None:
    """Says that a pair does not wait any more."""
    number = id(pair.after)
    if waiting.get(number) is pair:  # The same events may be another's by now.
        del waiting[number]
        _give_back(pair.after)


def _give_back(event: Any) -> None:
    attributes = _attributes(event)
    if attributes is not None and type(attributes.get("record")) is _Recording:
        attributes.pop("record", None)


def _attributes(event: Any) -> dict[str, Any] | None:
    attributes: Any = getattr(event, "__dict__", None)
    return cast("dict[str, Any]", attributes) if type(attributes) is dict else None


# The harvester keeps what it inherits: an event must not be destroyed there.
os.register_at_fork(after_in_child=waiting.clear)
