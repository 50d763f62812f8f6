"""Somebody else's events that wait for their device: whose time they tell, and that it is that of nobody else.

An engine may take two events from its pool and record them again before they were read. Where their class can be heard,
what waits is read at that moment, if the device is done with it, and else it has no time. Nothing is put on an event
itself, so that its copies and pickles are nothing to us. An event that is not heard tells no time any more when it is
handed over again; one that hides its class's `record` behind one of its own is not waited for.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from kvcache_otel.record.hearing import Hearing
from kvcache_otel.record.outside import let_through
from kvcache_otel.record.plain import plain

if TYPE_CHECKING:
    from kvcache_otel.record.pair import Pair

_INFINITY = float("inf")

waiting: dict[int, Pair | list[Pair]] = {}
"""The pair that waits, or the pairs, by the id of each of their events, which they keep while they are in here: all of
this process, since an engine may use two events for one copy there and another back, and one of them for many."""


def handed_over(before: Any, after: Any) -> None:
    """Says that two events are handed over: whoever waited for the later one has no time any more.

    So has whoever waited for one that is not heard, since it may have been recorded in between.
    """
    for event in (before, after):
        for pair in _pairs(id(event)):
            if pair.after is after or not hearing.hears(event):
                supersede(pair)


def wait_for(pair: Pair, before: Any, after: Any) -> bool:
    """Says that a pair, of these events, is handed over and waits for its device.

    Returns:
        Whether it may: not where an event has a `record` of its own, and nobody would hear of it.
    """
    number, other = id(before), id(after)
    if number in waiting or other in waiting:
        handed_over(before, after)
    kind: Any = type(before)  # pyright: ignore[reportUnknownVariableType]
    record = hearing.records.get(kind)
    if record is None or kind.record is not record or type(after) is not kind:
        if hearing.is_hidden(before) or hearing.is_hidden(after):
            return False
    else:  # The same, of two that are heard already.
        try:
            if before.record.__func__ is not record or after.record.__func__ is not record:
                return False
        except AttributeError:  # It is no method.
            return False
    if number in waiting:
        _share(number, pair)
    else:
        waiting[number] = pair
    if other in waiting:
        _share(other, pair)
    else:
        waiting[other] = pair
    return True


def supersede(pair: Pair) -> None:
    """Says that the events of a pair are those of another copy from now on."""
    pair.void = True
    forget(pair)


def forget(pair: Pair) -> None:
    """Says that a pair does not wait any more."""
    _leave(id(pair.before), pair)
    _leave(id(pair.after), pair)


def let_go() -> None:
    """Gives every class of events its own `record` back. What waits still has no time: it would not be heard."""
    for number in tuple(waiting):
        for pair in _pairs(number):
            supersede(pair)
    hearing.end()


# -- who waits ---------------------------------------------------------------------------------------------------------
# Without a lock: as in `cells`, no other thread comes between a look into the table and what is done about it.


def _share(number: int, pair: Pair) -> None:
    if number not in waiting:
        waiting[number] = pair
    elif waiting[number].__class__ is list:
        waiting[number].append(pair)  # pyright: ignore
    else:
        waiting[number] = [waiting[number], pair]  # pyright: ignore


def _leave(number: int, pair: Pair) -> None:
    if number not in waiting:
        return
    if waiting[number] is pair:
        del waiting[number]
    elif waiting[number].__class__ is list and pair in waiting[number]:  # pyright: ignore
        waiting[number].remove(pair)  # pyright: ignore
        if number in waiting and not waiting[number]:
            del waiting[number]


def _pairs(number: int) -> tuple[Pair, ...]:
    there = waiting.get(number)
    return () if there is None else tuple(there) if isinstance(there, list) else (there,)


# -- what is heard -----------------------------------------------------------------------------------------------------


def _record_again(event: Any) -> None:
    """Hears, on its owner's thread, that an event will be recorded which pairs wait for, or did."""
    for pair in _pairs(id(event)):
        _read(pair)
        supersede(pair)  # Before it is recorded: whoever reads it at this moment looks at that afterwards.


def _read(pair: Pair) -> None:
    """Reads a pair, where the device is done with it, and neither event can have been recorded unheard."""
    try:
        if hearing.hears(pair.before) and hearing.hears(pair.after) and pair.after.query():
            seconds = plain(pair.before.elapsed_time(pair.after)) / 1000.0
            pair.told = seconds if 0 <= seconds < _INFINITY else None
    except BaseException as error:  # It tells no time; that is counted where it is looked for.
        let_through(error)


hearing = Hearing(waiting, _record_again)
"""What hears of the events in the table."""

# The harvester keeps what it inherits: an event must not be destroyed there.
os.register_at_fork(after_in_child=waiting.clear)
