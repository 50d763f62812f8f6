"""What stands in for an engine's function, and asks a hook's body before it, after it or around it.

To pack arguments and unpack them again, for the function and for the body, takes longer than all else that a stand-in
does. So there are two of each: the one that is below, which is made at once, and the same with the function's very
parameters written out, which has to be compiled.
"""

from __future__ import annotations

import linecache
from functools import cache
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvcache_otel.engines.hooks import HookPoint

    Make = Callable[[HookPoint, Callable[..., Any]], Any]

# Flags of a code object that has *args or **kwargs; inspect names them, and takes longer to import than all of this.
_VARIADIC = 0x04 | 0x08


def wrapped(moment: str, point: HookPoint, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function's stand-in, at once.

    Args:
        moment: When the body is asked; see `Hook`.
        point: The hook: its body is None while nothing is to be read.
        function: The function.
    """
    return _like(function, _MAKE[moment](point, function))


def written_out(moment: str, point: HookPoint, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function's stand-in with its parameters written out, where it tells what they are.

    The body hears of all of them, defaults too: by position, unless the function takes them by name alone. To make it
    takes some tenths of a millisecond.

    Args:
        moment: As in `wrapped`.
        point: As in `wrapped`.
        function: As in `wrapped`.
    """
    parameters = _parameters(function)
    make = None if parameters is None else _compiled(moment, parameters)
    if make is None or not isinstance(function, FunctionType):
        return wrapped(moment, point, function)
    hooked = make(point, function)
    hooked.__defaults__, hooked.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    return _like(function, hooked)


# -- the stand-ins -----------------------------------------------------------------------------------------------------
# Where a body fails, its hook hears of it in a `try` of its own: suppress() would be a call more, where there may be no
# frame left for one, and an engine that is that deep has to hear it from itself.


def _after(point: HookPoint, function: Callable[..., Any]) -> Any:
    def hooked(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        body = point.body
        if body is not None:
            try:
                body(result, *args, **kwargs)
            except Exception as error:
                try:  # noqa: SIM105
                    point.failed(error)
                except RecursionError:
                    pass
        return result

    return hooked


def _before(point: HookPoint, function: Callable[..., Any]) -> Any:
    def hooked(*args: Any, **kwargs: Any) -> Any:
        body = point.body
        if body is not None:
            try:
                body(*args, **kwargs)
            except Exception as error:
                try:  # noqa: SIM105
                    point.failed(error)
                except RecursionError:
                    pass
        return function(*args, **kwargs)

    return hooked


def _around(point: HookPoint, function: Callable[..., Any]) -> Any:
    def hooked(*args: Any, **kwargs: Any) -> Any:
        body, finish = point.body, None
        if body is not None:
            try:
                finish = body(*args, **kwargs)
            except Exception as error:
                try:  # noqa: SIM105
                    point.failed(error)
                except RecursionError:
                    pass
        if finish is None:
            return function(*args, **kwargs)
        try:
            result = function(*args, **kwargs)
        except BaseException as raised:
            _finished(point, finish, raised)
            raise
        try:
            finish(result, None)
        except Exception as error:
            try:  # noqa: SIM105
                point.failed(error)
            except RecursionError:
                pass
        return result

    return hooked


def _finished(point: HookPoint, finish: Callable[..., Any], raised: BaseException) -> None:
    try:
        finish(None, raised)
    except Exception as error:
        try:  # noqa: SIM105
            point.failed(error)
        except RecursionError:
            pass


def _arguments(point: HookPoint, function: Callable[..., Any]) -> Any:
    def hooked(*args: Any, **kwargs: Any) -> Any:
        body, replaced = point.body, None
        if body is not None:
            try:
                replaced = body(*args, **kwargs)
            except Exception as error:
                try:  # noqa: SIM105
                    point.failed(error)
                except RecursionError:
                    pass
        if replaced is None:
            return function(*args, **kwargs)
        return function(*replaced)

    return hooked


_MAKE: dict[str, Make] = {"after": _after, "before": _before, "around": _around, "arguments": _arguments}


# -- their parameters --------------------------------------------------------------------------------------------------


class _Parameters(NamedTuple):
    """A function's parameters, as source: where it takes them, and where it hands them on."""

    taken: str
    given: str


# What a stand-in has a name for itself: it cannot have a parameter of that name.
_OURS = frozenset(
    [
        *("body", "error", "finish", "function", "point", "raised", "replaced", "result"),
        *("BaseException", "Exception", "RecursionError"),
    ]
)


def _parameters(function: Callable[..., Any]) -> _Parameters | None:
    if not isinstance(function, FunctionType) or function.__code__.co_flags & _VARIADIC:
        return None
    code = function.__code__
    positional, last = code.co_argcount, code.co_argcount + code.co_kwonlyargcount
    names = code.co_varnames[:last]
    if any(name in _OURS or name.startswith("_") or not name.isidentifier() for name in names):
        return None
    defaults, named = function.__defaults__ or (), function.__kwdefaults__ or {}
    optional = {*names[positional - len(defaults) : positional], *named}
    # The values come later, as the very objects.
    taken = [f"{name}=None" if name in optional else name for name in names]
    if last > positional:
        taken.insert(positional, "*")
    if code.co_posonlyargcount:
        taken.insert(code.co_posonlyargcount, "/")
    given = [*names[:positional], *(f"{name}={name}" for name in names[positional:])]
    return _Parameters(", ".join(taken), ", ".join(given))


@cache
def _compiled(moment: str, parameters: _Parameters) -> Make | None:
    """Returns what makes stand-ins with such parameters: the source above, with them in it; None where it is gone."""
    import inspect  # It takes longer to import than all of this; an engine that is at work has it.

    make = _MAKE[moment]
    try:
        source = inspect.getsource(make)
    except OSError:
        return None
    if not _is_source_of(source, make):  # Another version has been installed meanwhile.
        return None
    source = source.replace("*args: Any, **kwargs: Any", parameters.taken)
    source = source.replace("*args, **kwargs", parameters.given)
    name = f"<kvcache-otel: {moment} f({parameters.taken})>"
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name  # For tracebacks.
    return _run(source, name, make.__name__)


def _is_source_of(source: str, make: Make) -> bool:
    try:
        again = _run(source, __file__, make.__name__)
    except (SyntaxError, KeyError):
        return False
    return [each.co_code for each in _codes(again)] == [each.co_code for each in _codes(make)]


def _codes(make: Any) -> Iterator[CodeType]:
    yield make.__code__
    yield from (constant for constant in make.__code__.co_consts if isinstance(constant, CodeType))


def _run(source: str, file: str, name: str) -> Make:
    made = {**globals()}
    del made[name]
    exec(compile(source, file, "exec"), made)
    return made[name]


def _like(function: Callable[..., Any], hooked: Callable[..., Any]) -> Callable[..., Any]:
    # functools.wraps without its imports' weight; `__wrapped__` keeps inspect.signature right.
    for name in ("__module__", "__name__", "__qualname__", "__doc__", "__annotations__"):
        if (value := getattr(function, name, None)) is not None:
            setattr(hooked, name, value)
    vars(hooked).update(getattr(function, "__dict__", {}))
    hooked.__wrapped__ = function  # type: ignore[attr-defined]
    return hooked
