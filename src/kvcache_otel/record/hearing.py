"""Hears when events are recorded that are in somebody's table: by a `record` of ours around their class's own."""

from __future__ import annotations

from functools import update_wrapper
from types import FunctionType, MethodDescriptorType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# What binds its object and does nothing else when it is asked for.
_METHODS = (FunctionType, MethodDescriptorType)

# Flags of a code object that has *args or **kwargs.
_VARIADIC = 0x04 | 0x08

# How often a class is given a `record` of ours: somebody may put another in its place again and again.
TIMES = 16


class _Place(NamedTuple):
    """Where a `record` of ours is.

    Attributes:
        owner: The class that has it among its attributes.
        before: What was there; None where it was inherited.
        record: What is there now.
    """

    owner: type
    before: Any
    record: Any


class Hearing:
    """The classes of events that are heard, for as long as they are.

    Attributes:
        records: What records the events of a class while they are heard; None where they cannot be. It keeps the class.
    """

    __slots__ = ("_again", "_places", "_table", "_times", "records")

    def __init__(self, table: Mapping[int, object], again: Callable[[Any], None]) -> None:
        """Args:
        table: Has the ids of the events that somebody wants to hear of.
        again: Called on the thread that records one of these, first.
        """
        self._table, self._again = table, again
        self.records: dict[type, Any] = {}
        self._places: list[_Place] = []
        self._times: dict[type, int] = {}

    def hears(self, event: Any) -> bool:
        """Returns whether it is heard when an event is recorded by its class's method."""
        kind = cast("type[Any]", type(event))
        record = self.records.get(kind)
        return record is not None and kind.record is record

    def is_hidden(self, event: Any) -> bool:
        """Hears of an event's class, where it can; returns whether the event has a `record` of its own before it."""
        kind = cast("type[Any]", type(event))
        record = self.records.get(kind)
        if record is None or kind.record is not record:
            record = self._hear(kind)
        return record is not None and getattr(event.record, "__func__", None) is not record

    def end(self) -> None:
        """Gives every class back what it had. Where somebody has put theirs around ours, calls go through."""
        while self._places:
            owner, before, record = self._places.pop()
            if vars(owner).get("record") is record:
                if before is None:
                    del cast("Any", owner).record
                else:
                    cast("Any", owner).record = before
        self.records.clear()
        self._times.clear()

    def _hear(self, kind: type[Any]) -> Any:
        if kind in self.records and self.records[kind] is None:
            return None
        self.records[kind] = None
        self._times[kind] = self._times.get(kind, 0) + 1
        if self._times[kind] > TIMES:
            return None
        for owner in kind.__mro__:
            found = vars(owner).get("record")
            if found is not None:
                if any(found is place.record for place in self._places):  # That of another class of events.
                    self.records[kind] = found
                elif type(found) in _METHODS:
                    self.records[kind] = self._put(owner, found) or self._put(kind, found)
                break
        return self.records[kind]

    def _put(self, owner: Any, found: Callable[..., Any]) -> Any:
        """Puts a `record` of ours in a class's place; returns None where the class lets nobody."""
        record = update_wrapper(_around(found, self._table, self._again), found)
        before: Any = cast("Any", vars(owner)).get("record")
        try:
            owner.record = record
        except Exception:  # One that is written in C.
            return None
        self._places.append(_Place(owner, before, record))
        return record


def _around(found: Callable[..., Any], table: Mapping[int, object], again: Callable[[Any], None]) -> Any:
    """Returns what stands in for a method: each record of each event of its class goes through it.

    Where the method tells its parameters they are written out: to pack them costs more than all the rest.
    """

    def record(event: Any, /, *args: Any, **kwargs: Any) -> Any:
        if table and id(event) in table:
            again(event)
        return found(event, *args, **kwargs)

    if not isinstance(found, FunctionType) or found.__code__.co_flags & _VARIADIC or found.__kwdefaults__:
        return record
    code = found.__code__
    event, *others = names = code.co_varnames[: code.co_argcount] or ("",)
    if code.co_kwonlyargcount or not all(name.isidentifier() and name not in _OURS for name in names):
        return record
    taken = [event, *(["/"] if code.co_posonlyargcount == 1 else []), *others]
    if code.co_posonlyargcount > 1:
        taken.insert(code.co_posonlyargcount, "/")
    source = _SOURCE.format(taken=", ".join(taken), given=", ".join(names), event=event)
    made: dict[str, Any] = {"found": found, "table": table, "again": again}
    exec(compile(source, "<kvcache-otel: record>", "exec"), made)
    written: FunctionType = made["record"]
    written.__defaults__ = found.__defaults__
    return written


_SOURCE = """def record({taken}):
    if table and id({event}) in table:
        again({event})
    return found({given})
"""

# What it has a name for itself: it cannot have a parameter of that name.
_OURS = frozenset(("found", "table", "again", "id", "record"))
