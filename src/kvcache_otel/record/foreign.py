"""Somebody else's events that wait for their device: whose time they tell, and that it is that of nobody else.

An engine may take two events from its pool and record them again before they were read. Where it does so by a method of
Python's, they are read at that moment, if the device is done with them. Else, and where the same two are handed over
again, they tell another copy's time, and the first copy has none.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

from kvcache_otel.record.complaints import let_through
from kvcache_otel.record.plain import plain

if TYPE_CHECKING:
    from kvcache_otel.record.pair import Pair

_INFINITY = float("inf")

waiting: dict[int, Pair] = {}
"""The pairs that wait, by the id of the later event, which each keeps while it is in here: all of this process, since
an engine may use two events for one copy there and another back."""


def wait_for(pair: Pair, before: Any, after: Any) -> None:
    """Says that a pair, of these events, waits for its device. Who waited for the later one has been superseded."""
    waiting[id(after)] = pair
    # In place of what records them, among their own attributes. One may be the earlier event of many copies: then the
    # first of these hears of it.
    try:
        own = before.__dict__
        if "record" not in own:
            own["record"] = partial(_record_again, before, pair)
        own = after.__dict__
        if "record" not in own:
            own["record"] = partial(_record_again, after, pair)
    except Exception:  # It takes no attributes, and so does not say when it is recorded.
        pass


def supersede(pair: Pair | None) -> None:
    """Says that the events of a pair are those of another copy from now on."""
    if pair is not None:
        pair.void = True
        forget(pair)


def forget(pair: Pair) -> None:
    """Says that a pair does not wait any more."""
    number = id(pair.after)
    if waiting.get(number) is pair:  # The same events may be another's by now.
        waiting.pop(number, None)
    for event in (pair.before, pair.after):
        if _tells(event, pair):
            vars(event).pop("record", None)


def _record_again(event: Any, pair: Pair, /, *args: Any, **kwargs: Any) -> Any:
    """Records an event, on its owner's thread, that a pair waits for, or did."""
    _read(pair)
    supersede(pair)  # Before it is recorded: whoever reads it at this moment looks at that afterwards.
    supersede(waiting.get(id(event)))
    record: Any = getattr(event.__class__, "record", None)
    return event.record(*args, **kwargs) if record is None else record(event, *args, **kwargs)


def _read(pair: Pair) -> None:
    """Reads a pair, where the device is done with it, and neither event can have been recorded unheard."""
    try:
        if _tells(pair.before, pair) and _tells(pair.after, pair) and pair.after.query():
            seconds = plain(pair.before.elapsed_time(pair.after)) / 1000.0
            pair.told = seconds if 0 <= seconds < _INFINITY else None
    except BaseException as error:  # It tells no time; that is counted where it is looked for.
        let_through(error)


def _tells(event: Any, pair: Pair) -> bool:
    """Returns whether an event tells a pair when it is recorded."""
    there: Any = getattr(event, "__dict__", {}).get("record")
    return type(there) is partial and there.func is _record_again and there.args[1] is pair


# The harvester keeps what it inherits: an event must not be destroyed there.
os.register_at_fork(after_in_child=waiting.clear)
