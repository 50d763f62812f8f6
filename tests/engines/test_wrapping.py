"""Stand-ins take what the function takes, hand on what it is given, and tell the body all of it."""

from __future__ import annotations

import functools
import inspect
import itertools
import traceback
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache_otel.engines import wrapping
from kvcache_otel.engines.hooks import Hook, HookPoint
from kvcache_otel.engines.wrapping import wrapped, written_out

if TYPE_CHECKING:
    from collections.abc import Callable

MOMENTS = ("after", "before", "around", "arguments")
DEFAULT = object()


def point(moment: Any, body: Callable[..., Any] | None) -> HookPoint:
    made = HookPoint(Hook(name="fake", target="nowhere:f", body="body", fact="a fact", moment=moment), lambda _: print)
    made.body = body
    return made


def plain(a, b=DEFAULT, /, c=DEFAULT, *, d, e=DEFAULT):  # type: ignore[no-untyped-def] # An engine's.
    return a, b, c, d, e


def alone(self):  # type: ignore[no-untyped-def]
    return (self,)


def variadic(a, *rest, d=1, **others):  # type: ignore[no-untyped-def]
    return a, rest, d, others


def mangled(a, _b=2):  # type: ignore[no-untyped-def]
    return a, _b


@functools.wraps(plain)
def decorated(*args, **kwargs):  # type: ignore[no-untyped-def]
    return plain(*args, **kwargs)


class Callee:
    def __call__(self, a, b=3):  # type: ignore[no-untyped-def]
        return a, b

    def method(self, a, b=4):  # type: ignore[no-untyped-def]
        return a, b


FUNCTIONS = {
    "plain": plain,
    "alone": alone,
    "variadic": variadic,
    "mangled": mangled,
    "decorated": decorated,
    "an object": Callee(),
    "a bound method": Callee().method,
    "written in C": divmod,
    "partial": functools.partial(plain, 1, d=4),
    "lambda": lambda result, error, point, function: (result, error, point, function),
}


def outcome(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return function(*args, **kwargs)
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("of", FUNCTIONS)
@given(
    args=st.lists(st.integers(), max_size=5).map(tuple),
    kwargs=st.dictionaries(st.sampled_from(["a", "b", "c", "d", "e", "_b", "self", "result", "z"]), st.integers()),
)
def test_a_call_has_the_outcome_that_it_had(
    moment: str, of: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Whatever it is called with, a wrong call too, with a body and without one."""
    function = FUNCTIONS[of]
    expected = outcome(function, args, kwargs)
    for body, make in itertools.product((None, lambda *_, **__: None), (wrapped, written_out)):
        assert outcome(make(moment, point(moment, body), function), args, kwargs) == expected


@pytest.mark.parametrize("moment", MOMENTS)
def test_the_body_hears_of_every_parameter_with_the_very_defaults(moment: str) -> None:
    heard: list[Any] = []
    stand_in = written_out(moment, point(moment, lambda *args, **kwargs: heard.append((args, kwargs))), plain)
    assert stand_in(1, c=3, d=4) == (1, DEFAULT, 3, 4, DEFAULT)
    assert stand_in(1, 2, d=4) == (1, 2, DEFAULT, 4, DEFAULT)
    expected = [((1, DEFAULT, 3), {"d": 4, "e": DEFAULT}), ((1, 2, DEFAULT), {"d": 4, "e": DEFAULT})]
    if moment == "after":
        assert [args[0] for args, _ in heard] == [(1, DEFAULT, 3, 4, DEFAULT), (1, 2, DEFAULT, 4, DEFAULT)]
        heard = [(args[1:], kwargs) for args, kwargs in heard]
    assert heard == expected


def test_arguments_are_replaced_by_position() -> None:
    stand_in = written_out(
        "arguments", point("arguments", lambda *args, **_: (*args[:2], 7)), lambda a, b, c=0: (a, b, c)
    )
    assert stand_in(1, b=2) == (1, 2, 7)


@pytest.mark.parametrize("of", FUNCTIONS)
def test_a_stand_in_has_the_signature_of_its_function(of: str) -> None:
    function = FUNCTIONS[of]
    stand_in = written_out("after", point("after", None), function)
    assert inspect.signature(stand_in) == inspect.signature(function)


def test_functions_of_the_same_parameters_share_their_code_and_not_their_defaults() -> None:
    first, second = (
        written_out("after", point("after", None), function)
        for function in (lambda a, b=1: (a, b), lambda a, b=2: (a, b))
    )
    assert first.__code__ is second.__code__
    assert (first(0), second(0)) == ((0, 1), (0, 2))


def test_a_traceback_shows_the_line() -> None:
    def fails(number: int) -> None:
        raise LookupError(number)

    with pytest.raises(LookupError) as caught:
        written_out("before", point("before", None), fails)(7)
    lines = {frame.name: frame.line for frame in traceback.extract_tb(caught.tb)}
    assert lines["hooked"] == "return function(number)"


@pytest.mark.parametrize("source", [None, "def _after(point, function):\n    return print\n", "def other(): pass", "("])
def test_where_the_source_is_gone_or_of_another_version_arguments_are_packed(
    monkeypatch: pytest.MonkeyPatch, source: str | None
) -> None:
    def getsource(_: object) -> str:
        if source is None:
            raise OSError("could not get source code")
        return source

    wrapping._compiled.cache_clear()
    monkeypatch.setattr(inspect, "getsource", getsource)
    heard: list[Any] = []
    stand_in = written_out("after", point("after", lambda *args, **kwargs: heard.append((args, kwargs))), plain)
    assert stand_in(1, d=2) == (1, DEFAULT, DEFAULT, 2, DEFAULT)
    assert heard == [(((1, DEFAULT, DEFAULT, 2, DEFAULT), 1), {"d": 2})]
    monkeypatch.undo()
    wrapping._compiled.cache_clear()


def test_every_stand_in_can_be_written_out() -> None:
    for moment in MOMENTS:
        stand_in = written_out(moment, point(moment, None), plain)
        assert stand_in.__code__.co_filename.startswith("<kvcache-otel")
        assert "*" not in stand_in.__code__.co_varnames
        assert stand_in.__code__.co_argcount == 3


@pytest.mark.parametrize("name", ["body", "error", "finish", "function", "point", "raised", "replaced", "result"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_parameter_may_be_called_as_something_of_ours(moment: str, name: str) -> None:
    made: dict[str, Any] = {}
    exec(f"def f({name}, *, other=1):\n    return {name}, other", made)
    stand_in = written_out(moment, point(moment, lambda *_, **__: None), made["f"])
    assert stand_in(**{name: 7}) == (7, 1)
