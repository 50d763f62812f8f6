"""What stands in for an engine's function: one with its very parameters, made as dataclasses make their ``__init__``.

To pack arguments and unpack them again, for the function and for the body, takes longer than all else that a stand-in
does. So parameters are written out where the function tells what they are, and packed where it does not.
"""

from __future__ import annotations

import linecache
from functools import cache
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcache_otel.engines.hooks import HookPoint

# Flags of a code object that has *args or **kwargs; inspect names them, and takes longer to import than all of this.
_VARIADIC = 0x04 | 0x08

# A body is None while nothing is to be read. What it raises is told to its hook in a `try` of its own: suppress() would
# be a call more, where there may be no frame left for one, and an engine that is that deep has to hear it from itself.
_FAILED = """
        except Exception as _error_:
            try:
                _point_.failed(_error_)
            except RecursionError:
                pass
"""

_MOMENTS = {
    "after": """
        _result_ = _function_({arguments})
        _body_ = _point_.body
        try:
            if _body_ is not None:
                _body_(_result_, {arguments})
        {failed}
        return _result_
""",
    "before": """
        _body_ = _point_.body
        try:
            if _body_ is not None:
                _body_({arguments})
        {failed}
        return _function_({arguments})
""",
    "around": """
        _body_, _finish_ = _point_.body, None
        try:
            if _body_ is not None:
                _finish_ = _body_({arguments})
        {failed}
        if _finish_ is None:
            return _function_({arguments})
        try:
            _result_ = _function_({arguments})
        except BaseException as _raised_:
            _finished_(_point_, _finish_, _raised_)
            raise
        try:
            _finish_(_result_, None)
        {failed}
        return _result_
""",
    "arguments": """
        _body_, _replaced_ = _point_.body, None
        try:
            if _body_ is not None:
                _replaced_ = _body_({arguments})
        {failed}
        if _replaced_ is None:
            return _function_({arguments})
        return _function_(*_replaced_)
""",
}

_MAKER = """
def _make_(_point_, _function_):
    def hooked({parameters}):
        {moment}
    return hooked
"""


class _Parameters(NamedTuple):
    """A function's parameters, as source: where it has them, and where it hands them on."""

    taken: str
    given: str


_ANY = _Parameters("*args, **kwargs", "*args, **kwargs")


def wrapped(moment: str, point: HookPoint, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function's stand-in, which asks a hook's body at its moment; see `Hook` for what these are."""
    make = _maker(moment, _parameters(function))
    hooked = make(point, function)
    if isinstance(function, FunctionType):
        hooked.__defaults__, hooked.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    return _like(function, hooked)


def _parameters(function: Callable[..., Any]) -> _Parameters:
    if not isinstance(function, FunctionType) or function.__code__.co_flags & _VARIADIC:
        return _ANY
    code = function.__code__
    positional, only = code.co_argcount, code.co_argcount + code.co_kwonlyargcount
    names: tuple[str, ...] = code.co_varnames[:only]
    if any(name.startswith("_") or not name.isidentifier() for name in names):  # Mangled, or one of ours.
        return _ANY
    defaults, named = function.__defaults__ or (), function.__kwdefaults__ or {}
    optional = {*names[positional - len(defaults) : positional], *named}
    # The values come later, as the very objects.
    taken = [f"{name}=None" if name in optional else name for name in names]
    if only > positional:
        taken.insert(positional, "*")
    if code.co_posonlyargcount:
        taken.insert(code.co_posonlyargcount, "/")
    given = [*names[:positional], *(f"{name}={name}" for name in names[positional:])]
    return _Parameters(", ".join(taken), ", ".join(given))


@cache
def _maker(moment: str, parameters: _Parameters) -> Callable[[HookPoint, Callable[..., Any]], Any]:
    body = _MOMENTS[moment].format(arguments=parameters.given, failed=_FAILED.strip())
    source = _MAKER.format(parameters=parameters.taken, moment=body.strip())
    name = f"<kvcache-otel: {moment} f({parameters.taken})>"
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name  # For tracebacks.
    made: dict[str, Any] = {"_finished_": _finished}
    exec(compile(source, name, "exec"), made)
    return made["_make_"]


def _finished(point: HookPoint, finish: Callable[..., Any], raised: BaseException) -> None:
    try:
        finish(None, raised)
    except Exception as error:
        try:  # noqa: SIM105 # See above.
            point.failed(error)
        except RecursionError:
            pass


def _like(function: Callable[..., Any], hooked: Callable[..., Any]) -> Callable[..., Any]:
    # functools.wraps without its imports' weight; `__wrapped__` keeps inspect.signature right.
    for name in ("__module__", "__name__", "__qualname__", "__doc__", "__annotations__"):
        if (value := getattr(function, name, None)) is not None:
            setattr(hooked, name, value)
    vars(hooked).update(getattr(function, "__dict__", {}))
    hooked.__wrapped__ = function  # type: ignore[attr-defined]
    return hooked
