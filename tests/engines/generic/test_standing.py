"""A hook is said to be attached while the object's calls come by it, and not for a moment longer."""

from __future__ import annotations

import functools
import types
from typing import TYPE_CHECKING, Any

import pytest

import kvcache_otel as kv
from kvcache_otel import semconv
from kvcache_otel.engines.generic.classes import AttributeHook

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.engines.generic.conftest import Exported

EVICTED = kv.Eviction(tokens=lambda result, _: result)


class Cache:
    def __init__(self) -> None:
        self.own: Callable[[int], int] = lambda count: count

    def flush(self, count: int) -> int:
        return count

    @staticmethod
    def fixed(count: int) -> int:
        return count


class Sub(Cache):
    pass


class Overrides(Cache):
    def flush(self, count: int) -> int:
        return count


class Calling(Cache):
    def flush(self, count: int) -> int:
        return super().flush(count)


class Elsewhere(Cache):
    def __getattribute__(self, name: str) -> Any:
        return (lambda count: count) if name == "flush" else super().__getattribute__(name)


class Passing(Cache):
    def __getattribute__(self, name: str) -> Any:
        return super().__getattribute__(name)


class Calls:
    def __init__(self, function: Any) -> None:
        self.function = function

    def __call__(self, count: int) -> int:
        return self.function(count)


class Stranger:
    def flush(self, count: int) -> int:
        return count

    def own(self, count: int) -> int:
        return count


def instrument(owner: object, exported: Exported, name: str) -> kv.Instrumented:
    return kv.instrument_controller(
        owner, tiers={"device": "kv"}, cache="C", methods={name: EVICTED}, meter_provider=exported.provider
    )


def assign(name: str) -> Callable[[Any], None]:
    return lambda cache: setattr(cache, name, lambda count: count)


def assign_the_genuine(cache: Any) -> None:
    cache.fixed = vars(Cache)["fixed"].original


def assign_itself(cache: Any) -> None:
    cache.flush = cache.flush


def wrap(cache: Any) -> None:
    hooked = cache.flush

    @functools.wraps(hooked)
    def around(count: int) -> int:
        return hooked(count)

    cache.flush = around


def lie(cache: Any) -> None:
    @functools.wraps(cache.flush)
    def around(count: int) -> int:
        return count

    cache.flush = around


def wrap_plainly(cache: Any) -> None:
    hooked = cache.flush
    cache.flush = lambda count: hooked(count)


def partly(cache: Any) -> None:
    cache.flush = functools.partial(cache.flush)


def bind_the_genuine(cache: Any) -> None:
    cache.flush = types.MethodType(vars(Cache)["flush"].original, cache)


def wrap_the_genuine(cache: Any) -> None:
    @functools.wraps(Cache.flush)
    def around(count: int) -> int:
        return Cache.__dict__["flush"].original(cache, count)

    cache.flush = around


def become(kind: type) -> Callable[[Any], None]:
    def change(cache: Any) -> None:
        cache.__class__ = kind

    return change


def own_of_another(cache: Any) -> None:
    """Has another object of the class instrumented by a callable of its own, of the same name as a method."""
    another: Any = Cache()
    another.flush = lambda count: count
    assert instrument(another, SHARED[-1], "flush").attached
    assert type(vars(Cache)["flush"]) is AttributeHook
    cache.another = another


SHARED: list[Exported] = []
ON_OBJECT = "another has been put in its place on the object itself since"
UNTIL = "; no call has come by here since that was seen"
IN_DOUBT = ON_OBJECT + UNTIL
IN_DOUBT_LOOKED_UP = "its class looks attributes up in another way since" + UNTIL

# Only a call can tell of these.
DOUBTED = {
    "what is put around it on the object",
    "what is put around the genuine one",
    "a wrapper that does not say so",
    "an object that can be called",
    "a subclass that calls it",
    "another way to look it up",
    "another way to look it up that finds it",
}

CHANGES: dict[str, tuple[str, Callable[[Any], None], str]] = {
    "nothing": ("flush", lambda _: None, ""),
    "nothing, of a callable of its own": ("own", lambda _: None, ""),
    "a method on the object": ("flush", assign("flush"), ON_OBJECT),
    "another callable of its own": ("own", assign("own"), ON_OBJECT),
    "the very method on the object": ("flush", assign_itself, ""),
    "the genuine one on the object": ("fixed", assign_the_genuine, ON_OBJECT),
    "what is put around it on the object": ("flush", wrap, ""),
    "what is put around the genuine one": ("flush", wrap_the_genuine, IN_DOUBT),
    "a wrapper that says that it is one": ("flush", lie, ON_OBJECT),
    "a wrapper that does not say so": ("flush", wrap_plainly, ""),
    "a partial": ("flush", partly, ""),
    "a partial of a partial": ("flush", lambda cache: (partly(cache), partly(cache))[0], ""),
    "the genuine one, bound": ("flush", bind_the_genuine, ON_OBJECT),
    "one that is written in C": ("flush", lambda cache: setattr(cache, "flush", abs), ON_OBJECT),
    "an object that can be called": ("flush", lambda cache: setattr(cache, "flush", Calls(cache.flush)), ""),
    "a subclass that calls it": ("flush", become(Calling), ""),
    "another way to look it up": ("flush", become(Elsewhere), IN_DOUBT_LOOKED_UP),
    "another way to look it up that finds it": ("flush", become(Passing), ""),
    "another class": ("flush", become(Stranger), "its object is a Stranger since"),
    "another class, of a callable of its own": ("own", become(Stranger), "its object is a Stranger since"),
    "a subclass that inherits it": ("flush", become(Sub), ""),
    "a subclass that has another": ("flush", become(Overrides), "its object is a Overrides since"),
    "a hook for a callable of another object": ("flush", own_of_another, ""),
}


@pytest.mark.parametrize("change", CHANGES)
def test_attached_is_what_hears_the_objects_calls(exported: Exported, change: str) -> None:
    name, do, why = CHANGES[change]
    cache = Cache()
    handle = instrument(cache, exported, name)
    SHARED[:] = [exported]
    do(cache)
    if change in DOUBTED:
        assert exported.rows.value(semconv.TELEMETRY_HOOK_ATTACHED, hook=name) is None
        assert handle.doubted[name].endswith(UNTIL)
        assert f"waiting    {name}" in handle.report()
    getattr(cache, name)(5)
    heard = exported.rows.value(semconv.EVICTION_TOKENS, tier="device", pool="kv") == 5
    assert heard is not bool(why), "else what is expected here is wrong"
    doubted = change in DOUBTED and not heard
    assert exported.rows.value(semconv.TELEMETRY_HOOK_ATTACHED, hook=name) == (None if doubted else int(heard))
    assert handle.doubted == ({name: why} if doubted else {})
    assert handle.attached == ((name,) if heard else ())
    assert handle.unheard == ({} if heard or doubted else {name: why})
    assert (f"attached   {name}" in handle.report()) is heard
    assert why in handle.report()
    handle.remove()
    assert (handle.unheard, handle.doubted) == ({}, {})
    assert handle._points[0].body is None


def test_what_was_heard_once_is_doubted_when_it_is_another_again(exported: Exported) -> None:
    cache: Any = Cache()
    handle = instrument(cache, exported, "flush")
    wrap_plainly(cache)
    assert handle.doubted
    copied: Any = Cache()
    vars(Cache)["flush"].__get__(cache).__func__(copied, 5)  # Of another object: nothing is heard of that.
    assert handle.doubted
    cache.flush(5)
    assert (handle.doubted, handle.attached) == ({}, ("flush",))
    wrap_plainly(cache)
    assert handle.doubted
    handle.remove()


def test_what_is_taken_back_is_attached_again(exported: Exported) -> None:
    cache: Any = Cache()
    handle = instrument(cache, exported, "flush")
    cache.flush = lambda count: count
    assert handle.attached == ()
    del cache.flush
    assert handle.attached == ("flush",)
    cache.flush(3)
    assert exported.rows.value(semconv.EVICTION_TOKENS, tier="device", pool="kv") == 3


def test_neither_the_object_nor_what_is_there_is_asked(exported: Exported) -> None:
    class Odd:
        def __call__(self, count: int) -> int:
            return count

        @property
        def __wrapped__(self) -> Any:
            raise OSError

    cache: Any = Cache()
    handle = instrument(cache, exported, "flush")
    cache.flush = Odd()
    assert handle.attached == ()
    assert handle.unheard == {}
    assert handle.doubted == {"flush": IN_DOUBT}
    assert exported.rows.value(semconv.TELEMETRY_HOOK_ATTACHED, hook="flush") is None
    assert exported.rows.total(semconv.TELEMETRY_ERRORS) == 0
