"""Whose exception it is that comes up in our code: ours and that of what we called, or one from outside.

Signal handlers run wherever the main thread happens to be, and what they raise is meant for the engine: so they end its
process, or break off what takes too long. It is looked at when something was raised, and never before.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import TracebackType

# Flags of a code object that has *args.
_VARIADIC = 0x04

_PACKAGE = __name__.partition(".")[0]


def let_through(error: BaseException) -> None:
    """Raises what comes from outside. All else is ours, a panic of Rust code too."""
    if is_from_outside(error):
        try:
            raise error
        finally:
            del error  # It refers to this frame, and would keep all that is in the others.


def is_from_outside(error: BaseException) -> bool:
    """Returns whether an exception that was caught here is neither ours nor that of what was called from here.

    That is what a signal handler has raised, or another thread has had raised in this one between two steps of ours
    (`PyThreadState_SetAsyncExc`, as some timeouts do). What the latter interrupts in somebody else's code cannot be
    told from what that code raises itself.
    """
    if isinstance(error, SystemExit | KeyboardInterrupt):
        return True
    step = error.__traceback__
    while step is not None:
        # Not ours: before 3.13 a frame keeps the values that it was asked for, and ours have the exception among them.
        if not _is_ours(step) and _is_handler(step):
            return True
        if step.tb_next is None:
            return _is_ours(step) and _comes_from_nowhere(error)
        step = step.tb_next
    return False


def _is_handler(step: TracebackType) -> bool:
    """Returns whether a function was called by Python itself: with a number, and the very frame that it interrupted."""
    frame = step.tb_frame
    code, interrupted = frame.f_code, frame.f_back
    number = code.co_argcount + bool(code.co_flags & _VARIADIC)
    if not number or interrupted is None:
        return False
    values = frame.f_locals
    given: list[Any] = [values.get(name) for name in code.co_varnames[: code.co_argcount]]
    if code.co_flags & _VARIADIC:
        given += values.get(code.co_varnames[code.co_argcount + code.co_kwonlyargcount]) or ()
    return any(each is interrupted and isinstance(before, int) for before, each in pairwise(given))


def _is_ours(step: TracebackType) -> bool:
    return str(step.tb_frame.f_globals.get("__name__", "")).partition(".")[0] == _PACKAGE


def _comes_from_nowhere(error: BaseException) -> bool:
    """Returns whether nothing that our own lines do raises such a thing: a class of Python's own, or one with words."""
    module = str(type(error).__module__).partition(".")[0]
    return not error.args and module not in ("builtins", _PACKAGE)
