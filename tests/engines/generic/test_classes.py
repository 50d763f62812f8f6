"""Methods have hooks on their object's class: on this object alone, as methods are, and gone without a trace."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import pickle
import sys
import threading
import types
import weakref
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

import kvcache_otel as kv
from kvcache_otel import semconv
from kvcache_otel.engines.generic import classes
from kvcache_otel.engines.generic.handle import remove_all
from kvcache_otel.engines.hooks import Hook, HookPoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.engines.generic.conftest import Exported

TIERS = {"device": "kv", "host": "kv", "disk": "kv"}
EVICTED = kv.Eviction(tokens=lambda result, _: result)


class Base:
    def inherited(self, count: int, times: int = 1) -> int:
        return count * times


class Cache(Base):
    def __init__(self) -> None:
        self.flushed = 0
        self.own: Callable[[int], int] = abs

    def flush(self, count: int = 1) -> int:
        """Flushes."""
        self.flushed += count
        return count

    def down(self, depth: int) -> int:
        return self.down(depth - 1) + 1 if depth else 0

    @staticmethod
    def fixed(count: int) -> int:
        return count

    @classmethod
    def of_class(cls, count: int) -> int:
        return count + len(cls.__name__)

    @functools.lru_cache(maxsize=8)  # noqa: B019
    def cached(self, count: int) -> int:
        return count

    part = functools.partialmethod(flush, 2)


ALL = ("flush", "inherited", "fixed", "of_class", "cached", "part", "own")


class Sub(Cache):
    def flush(self, count: int = 1) -> int:
        return super().flush(count) + 100


def instrument(owner: Any, exported: Exported, *names: str, **options: Any) -> kv.Instrumented:
    methods = dict.fromkeys(names or ("flush",), EVICTED)
    return kv.instrument_controller(
        owner, **{"tiers": TIERS, "cache": "C", "methods": methods, "meter_provider": exported.provider, **options}
    )


def evicted(exported: Exported) -> Any:
    return exported.rows.total(semconv.EVICTION_TOKENS)


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Whatever a test does, the classes are then as they were."""
    kinds = (Base, Cache, Sub)

    def attributes() -> list[Any]:  # `pickle` leaves what it has found out.
        return [[item for item in vars(kind).items() if item[0] != "__slotnames__"] for kind in kinds]

    before = attributes()
    yield
    gc.collect()
    remove_all()
    assert attributes() == before


# -- objects that nobody else has --------------------------------------------------------------------------------------


def pop_and_call(caches: list[Cache]) -> int:
    return caches.pop(0).flush(3)


def take_off_and_call(caches: list[Cache]) -> int:
    return getattr(caches.pop(0), "flush")(3)  # noqa: B009


def run_in_a_thread(caches: list[Cache]) -> int:
    thread = threading.Thread(target=caches.pop(0).flush, args=(3,))
    thread.start()
    thread.join()
    return 3


def call_what_the_object_has_itself(caches: list[Cache]) -> int:
    return caches.pop(0).own(-3)


def call_a_static_method(caches: list[Cache]) -> int:
    return caches.pop(0).fixed(3)


def call_what_a_decorator_made(caches: list[Cache]) -> int:
    caches[0].cached.cache_clear()
    return caches.pop(0).part() + 1


@pytest.mark.parametrize(
    "call",
    [
        pop_and_call,
        take_off_and_call,
        run_in_a_thread,
        call_what_the_object_has_itself,
        call_a_static_method,
        call_what_a_decorator_made,
    ],
)
def test_a_method_keeps_an_object_that_nobody_else_has(exported: Exported, call: Any) -> None:
    caches = [Cache()]
    instrument(caches[0], exported, *ALL)
    gone = weakref.ref(caches[0])
    assert call(caches) == 3
    assert evicted(exported) in (2, 3)  # `part` tells of two.
    assert gone() is None


def test_an_object_is_gone_when_the_last_of_its_methods_is(exported: Exported) -> None:
    class Own(Cache):
        def flush(self, count: int = 1) -> int:
            return count

    before = dict(vars(Own))
    gc.disable()
    try:
        cache = Own()
        instrument(cache, exported)
        gone, callback = weakref.ref(cache), cache.flush
        del cache
        assert callback(3) == 3
        assert evicted(exported) == 3
        del callback
        assert gone() is None
        assert dict(vars(Own)) == before
    finally:
        gc.enable()


# -- methods, as they are seen -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_a_method_is_equal_to_itself_and_another_for_each_object(exported: Exported, name: str) -> None:
    cache, other = Cache(), Cache()
    instrument(cache, exported, *ALL)
    method = getattr(cache, name)
    if name != "part":  # Of `functools.partial` two are never equal.
        assert method == getattr(cache, name)
        assert getattr(cache, name) in {method}
    if name not in ("fixed", "of_class", "own"):  # What is of no object is the same for all.
        assert method != getattr(other, name)
    assert callable(method)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("attribute", ["__doc__", "__module__", "__name__", "__qualname__"])
def test_a_method_says_of_itself_what_it_said(exported: Exported, name: str, attribute: str) -> None:
    cache, plain = Cache(), Cache()
    before = getattr(getattr(plain, name), attribute, None)
    if (name, attribute) == ("own", "__name__"):
        before = "own"  # By which it is pickled.
    signature = inspect.signature(getattr(plain, name))
    instrument(cache, exported, *ALL)
    assert getattr(getattr(cache, name), attribute, None) == before
    assert inspect.signature(getattr(cache, name)) == signature


def test_a_method_is_one_of_its_object(exported: Exported) -> None:
    cache = Cache()
    instrument(cache, exported, *ALL)
    assert cache.flush.__self__ is cache
    assert inspect.unwrap(cache.flush.__func__) is Cache.flush
    assert weakref.WeakMethod(cache.flush)() == cache.flush
    assert inspect.ismethod(cache.flush)
    assert isinstance(cache.cached, type(Cache().cached))
    assert cache.cached.cache_info() == Cache.cached.cache_info()
    assert cache.part.func.__self__ is cache
    assert cache.part.args == (2,)


@pytest.mark.parametrize("name", ["flush", "inherited", "fixed", "of_class", "own"])
def test_a_method_is_pickled_and_copied_with_its_object(exported: Exported, name: str) -> None:
    cache = Cache()
    instrument(cache, exported, *ALL)
    for clone in (pickle.loads(pickle.dumps(getattr(cache, name))), copy.deepcopy(getattr(cache, name))):
        assert clone(3) == getattr(Cache(), name)(3)
        assert getattr(clone, "__self__", None) is not cache
    assert cache.flushed == 0
    assert evicted(exported) == 0
    before = pickle.dumps(cache)
    assert b"otel" not in before
    assert vars(pickle.loads(before)).keys() == {"flushed", "own"}


def test_a_class_and_its_other_objects_have_what_they_had(exported: Exported) -> None:
    before = {name: getattr(Cache, name, None) for name in ALL}
    cache, other = Cache(), Cache()
    theirs = {name: getattr(other, name) for name in ALL if name != "part"}
    instrument(cache, exported, *ALL)
    for name, method in theirs.items():
        assert type(getattr(other, name)) is type(method)
        assert getattr(other, name) == method
        assert getattr(Cache, name, None) is before[name] or name == "of_class"
    assert other.part() == 2
    with pytest.raises(AttributeError, match=r"^type object 'Cache' has no attribute 'own'"):
        _ = Cache.own
    del other.own
    with pytest.raises(AttributeError, match=r"^'Cache' object has no attribute 'own'"):
        _ = other.own
    with pytest.raises(AttributeError, match=r"^'Cache' object has no attribute 'own'"):
        del other.own
    other.own = len  # type: ignore[assignment]
    assert other.own is len
    assert Cache.flush(cache, 3) == 3
    assert evicted(exported) == 0


def depth(cache: Cache) -> int:
    """Returns how deep a method may call itself."""
    low, high = 0, sys.getrecursionlimit()
    while high - low > 1:
        middle = (low + high) // 2
        try:
            cache.down(middle)
            low = middle
        except RecursionError:
            high = middle
    return low


def test_a_method_may_call_itself_half_as_deep_and_on_others_as_deep_as_before(exported: Exported) -> None:
    cache, other = Cache(), Cache()
    before = depth(cache)
    kv.instrument_controller(
        cache,
        tiers=TIERS,
        methods={"down": kv.SkippedStore(tier="disk", blocks=1, reason="other")},
        meter_provider=exported.provider,
    )
    assert depth(other) in range(before - 2, before + 3)
    assert depth(cache) in range(before // 2 - 10, before)


# -- several objects ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [0, 1, 2])
@pytest.mark.parametrize("second", [0, 1, 2])
def test_objects_of_a_class_and_of_its_subclass_count_once_each(exported: Exported, first: int, second: int) -> None:
    owners = [Cache(), Cache(), Sub()]
    bystanders = [Cache(), Sub()]
    handles = [instrument(owner, exported, "flush", "inherited") for owner in owners]
    calls = [owner.flush(1) + owner.inherited(10) for owner in owners]
    assert calls == [11, 11, 111]
    assert evicted(exported) == sum(calls)
    for each in (first, second, *range(3)):
        handles[each].remove()
        before = evicted(exported)
        told = sum(owner.flush(1) for owner, handle in zip(owners, handles, strict=True) if handle.attached)
        assert evicted(exported) == before + told
        for owner in owners:
            owner.inherited(0)
    for bystander in bystanders:
        bystander.flush(1), bystander.inherited(1)
    assert type(vars(Sub)["flush"]) is types.FunctionType
    assert "inherited" not in vars(Cache)
    assert "inherited" not in vars(Sub)


def test_a_subclass_that_is_made_meanwhile_has_the_method(exported: Exported) -> None:
    cache = Cache()
    instrument(cache, exported)

    class Later(Cache):
        def inherited(self, count: int, times: int = 1) -> int:
            return self.flush(count) + super().inherited(count, times)

    assert Later().inherited(3) == 6
    assert evicted(exported) == 0
    later = Later()
    instrument(later, exported)
    assert later.inherited(3) == 6
    assert evicted(exported) == 3


def test_a_class_that_is_made_of_another_ones_attributes_meanwhile_has_its_methods(exported: Exported) -> None:
    cache = Cache()
    handle = instrument(cache, exported, *ALL)
    attributes = {name: value for name, value in vars(Cache).items() if name not in ("__dict__", "__weakref__")}
    again: Any = type("Again", (Base,), attributes)  # As `dataclass(slots=True)` makes one.
    for _ in range(2):
        other = again()
        assert (other.flush(3), other.inherited(3), other.fixed(3), other.own(-3), other.part()) == (3, 3, 3, 3, 2)
        assert (again.inherited(other, 5), again.fixed(5)) == (5, 5)
        del other.own
        with pytest.raises(AttributeError, match=r"^'Again' object has no attribute 'own'"):
            _ = other.own
        handle.remove()
    assert evicted(exported) == 0


class Alike(Cache):
    """All of its objects are equal, and none can be in a set."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


class Kind(type):
    """All classes of it are equal, none can be in a set, and nobody can set their attributes."""

    def __eq__(cls, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]

    def __setattr__(cls, name: str, value: Any) -> None:
        raise AttributeError("read-only")

    def __delattr__(cls, name: str) -> None:
        raise AttributeError("read-only")


@pytest.mark.parametrize("kind", [Alike, Kind("Strange", (Cache,), {})], ids=["Alike", "Kind"])
def test_objects_and_classes_may_compare_as_they_like(exported: Exported, kind: Any) -> None:
    before = dict(vars(kind))
    first, second = kind(), kind()
    handle = instrument(first, exported)
    second.flush(5), first.flush(3)
    assert evicted(exported) == 3
    handle.remove()
    assert dict(vars(kind)) == before
    instrument(first, exported)
    del first
    assert dict(vars(kind)) == before


def test_an_object_in_the_place_of_one_that_is_gone_tells_nothing(exported: Exported) -> None:
    numbers: set[int] = set()
    reused = 0
    for count in range(300):
        cache = Cache()
        reused += id(cache) in numbers
        numbers.add(id(cache))
        before = evicted(exported) if count % 2 else 0
        if count % 2:
            cache.flush(1)
            assert evicted(exported) == before
        else:
            handle = instrument(cache, exported)
            assert handle.attached  # Who has the handle does not keep the object.
            cache.flush(1)
    assert reused > 100
    assert evicted(exported) == 150


# -- what the engine does to its classes meanwhile ---------------------------------------------------------------------


def test_a_method_that_is_replaced_on_the_class_is_the_one_that_is_called_and_it_is_said(exported: Exported) -> None:
    cache = Cache()
    handle = instrument(cache, exported)
    attached = {"spec": semconv.TELEMETRY_HOOK_ATTACHED, "hook": "flush"}
    with mock.patch.object(Cache, "flush", lambda self, count: -count):
        assert cache.flush(3) == -3
        assert (evicted(exported), handle.attached) == (0, ())
        assert exported.rows.value(**attached) == 0
        assert "another method has been put in its place on the class since" in handle.report()
    assert cache.flush(3) == 3
    assert (evicted(exported), handle.attached) == (3, ("flush",))
    assert exported.rows.value(**attached) == 1


def test_who_wraps_it_on_the_class_keeps_that_and_it_is_counted(exported: Exported) -> None:
    cache, other = Cache(), Cache()
    handle = instrument(cache, exported)
    ours = vars(Cache)["flush"]

    class Around:
        def __init__(self) -> None:
            self.__wrapped__ = ours

        def __get__(self, instance: Any, kind: Any) -> Any:
            return lambda count: ours.__get__(instance, kind)(count) + 1

    around = Around()
    Cache.flush = around  # type: ignore[method-assign,assignment]
    try:
        assert handle.attached == ()  # Only a call can tell.
        assert (cache.flush(3), other.flush(3)) == (4, 4)
        assert (evicted(exported), handle.attached) == (3, ("flush",))
        second = instrument(other, exported)
        assert other.flush(3) == 4
        assert evicted(exported) == 3 + 4
        handle.remove()
        assert (cache.flush(3), other.flush(3)) == (4, 4)
        assert evicted(exported) == 3 + 4 + 4
        second.remove()
        assert vars(Cache)["flush"] is around
        assert (cache.flush(3), other.flush(3)) == (4, 4)
    finally:
        Cache.flush = ours  # type: ignore[method-assign]
    assert cache.flush(3) == 3
    third = instrument(cache, exported)
    cache.flush(1)
    assert evicted(exported) == 3 + 4 + 4 + 1
    third.remove()
    assert type(vars(Cache)["flush"]) is types.FunctionType


def test_a_method_that_is_replaced_on_a_base_is_the_one_that_is_called(exported: Exported) -> None:
    cache, other = Cache(), Cache()
    instrument(cache, exported, "inherited")
    with mock.patch.object(Base, "inherited", lambda self, count: count + 1):
        assert (cache.inherited(3), other.inherited(3)) == (4, 4)
        assert evicted(exported) == 4
    assert (cache.inherited(3), other.inherited(3)) == (3, 3)
    assert evicted(exported) == 4 + 3


def test_an_attribute_that_is_set_meanwhile_is_the_one_that_is_called(exported: Exported) -> None:
    cache = Cache()
    handle = instrument(cache, exported, "own")
    assert cache.own(-3) == 3
    cache.own = lambda count: count + 1
    assert cache.own(3) == 4
    assert evicted(exported) == 3
    handle.remove()
    assert cache.own(3) == 4
    assert "own" not in vars(Cache)


def test_one_name_may_be_a_method_of_one_object_and_an_attribute_of_another(exported: Exported) -> None:
    plain, special = Cache(), Cache()
    special.flush = lambda count=1: count * 2  # type: ignore[method-assign]
    handles = [instrument(plain, exported), instrument(special, exported)]
    assert (plain.flush(3), special.flush(3)) == (3, 6)
    assert evicted(exported) == 9
    handles[0].remove()
    assert (plain.flush(3), special.flush(3)) == (3, 6)
    assert evicted(exported) == 15
    handles[1].remove()
    assert (plain.flush(3), special.flush(3)) == (3, 6)
    assert evicted(exported) == 15
    assert type(vars(Cache)["flush"]) is types.FunctionType
    for special in (Cache(), Cache()):
        special.flush = lambda count=1: count * 2  # type: ignore[method-assign]
    handle = instrument(special, exported)
    second = instrument(plain, exported)
    handle.remove()
    assert plain.flush(3) == 3
    assert evicted(exported) == 18
    second.remove()


# -- where a method comes from -----------------------------------------------------------------------------------------


class Facade:
    """What it does not have is what it stands before has."""

    def __init__(self, behind: Any) -> None:
        self.behind = behind

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["behind"], name)


def test_a_method_that_is_delivered_when_it_is_asked_for_is_the_one_of_the_moment(exported: Exported) -> None:
    first, second = Cache(), Sub()
    facade, other = Facade(first), Facade(first)
    handle = instrument(facade, exported)
    assert (facade.flush(3), other.flush(3)) == (3, 3)
    assert facade.flush == first.flush
    facade.behind = second
    assert facade.flush(3) == 103
    assert evicted(exported) == 3 + 103
    assert (first.flushed, second.flushed) == (6, 3)
    assert not hasattr(Facade, "flush")
    handle.remove()
    assert facade.flush(3) == 103
    assert "flush" not in vars(Facade)


def test_what_is_delivered_is_copied_and_pickled_as_what_it_is(exported: Exported) -> None:
    facade = Facade(copy)  # A module: what it has are functions, which are pickled by their names.
    instrument(facade, exported, "copy")
    for clone in (pickle.loads(pickle.dumps(facade.copy)), copy.copy(facade.copy), copy.deepcopy(facade.copy)):
        assert clone is copy.copy
    assert facade.copy(3) == 3
    assert evicted(exported) == 3


def test_a_thing_that_is_more_than_a_function_stays_as_it_is_and_that_is_said(exported: Exported) -> None:
    class Kernel:
        """As Triton's: what is called is chosen by a grid."""

        def __call__(self, count: int) -> int:
            return count

        def __getitem__(self, grid: int) -> Any:
            return lambda count: count * grid

    class Counting:
        """One that has more to it, but no signs."""

        calls = 0

        def __call__(self, count: int) -> int:
            self.calls += 1
            return count

    cache: Any = Cache()
    cache.kernel, cache.counting = Kernel(), Counting()
    handle = instrument(cache, exported, "kernel", "counting")
    ((name, _, why),) = handle.missing
    assert (name, why) == ("kernel", "Cache.kernel is a Kernel, which is more than a function: it stays as it is")
    assert cache.kernel[2](3) == 6
    assert cache.counting(3) == 3
    assert cache.counting.calls == 1
    cache.counting.calls = 7
    assert vars(cache)["counting"].calls == 7
    del cache.counting.calls
    assert isinstance(cache.counting, Counting)
    assert cache.counting.calls == 0
    assert repr(cache.counting) == repr(vars(cache)["counting"])
    assert evicted(exported) == 3


def test_a_class_that_is_written_in_c_and_lets_nobody_set_its_methods_is_reported(exported: Exported) -> None:
    owner: Any = functools.lru_cache(maxsize=8)(abs)
    owner(3)
    before = dict(vars(owner))
    handle = instrument(owner, exported, "cache_clear")
    ((name, _, why),) = handle.missing
    assert name == "cache_clear"
    assert why.startswith("_lru_cache_wrapper lets nobody put anything in the place of cache_clear: ")
    owner.cache_clear()
    assert owner.cache_info().currsize == 0
    handle.remove()
    assert vars(owner) == before


def test_a_class_that_delivers_its_methods_itself_is_reported(exported: Exported) -> None:
    class Own(Cache):
        def __getattribute__(self, name: str) -> Any:
            return (lambda count: count + 7) if name == "flush" else super().__getattribute__(name)

    owner = Own()
    before = dict(vars(Own))
    handle = instrument(owner, exported)
    assert owner.flush(3) == 10
    ((_, _, why),) = handle.missing
    assert why == "Own does not look flush up on its class"
    handle.remove()
    assert dict(vars(Own)) == before


def test_marks_hold_for_a_second_object(exported: Exported) -> None:
    class Marked:
        @kv.measures(EVICTED)
        def trim(self, count: int) -> int:
            return count

        @kv.measures(kv.Eviction(tier="host", tokens=1))
        @staticmethod
        def fixed() -> None: ...

    class Below(Marked):
        pass

    owners = [Marked(), Below(), Marked(), Below()]
    handles = [
        kv.instrument_controller(owner, tiers=TIERS, cache="M", meter_provider=exported.provider) for owner in owners
    ]
    assert [handle.attached for handle in handles] == [("trim", "fixed")] * 4
    for owner in owners:
        owner.trim(10), owner.fixed()
    assert evicted(exported) == 44


# -- many, and at the same time ----------------------------------------------------------------------------------------


def test_a_class_whose_objects_come_and_go_is_left_alone_after_a_while(exported: Exported) -> None:
    class Short(Cache):
        changes = 0

    set_: Any = classes._set

    def counting(kind: type, name: str, value: Any) -> None:
        Short.changes += name == "flush"
        set_(kind, name, value)

    with mock.patch.object(classes, "_set", counting):
        for count in range(200):
            cache = Short()
            instrument(cache, exported)
            cache.flush(1)
            assert evicted(exported) == count + 1
        del cache
    assert Short.changes < 2 * classes.GIVEN_BACK
    assert type(vars(Short)["flush"]) is classes.ClassHook
    assert Short().flush(3) == 3
    instrument(cache := Short(), exported).remove()
    assert type(vars(Short).get("flush")) is not classes.ClassHook
    cache = Short()
    instrument(cache, exported)
    del cache
    assert type(vars(Short)["flush"]) is classes.ClassHook
    remove_all()
    assert "flush" not in vars(Short)


def test_classes_that_are_gone_leave_nothing(exported: Exported) -> None:
    gone: list[weakref.ref[type]] = []
    before = len(classes._given_back)
    for _ in range(20):

        class Passing(Cache):
            def inherited(self, count: int, times: int = 1) -> int:
                return super().inherited(count, times)  # Its function knows its class.

        cache = Passing()
        instrument(cache, exported, "flush", "inherited")
        cache.flush()
        gone.append(weakref.ref(Passing))
    del Passing, cache
    gc.collect()
    assert [each() for each in gone if each() is not None] == []
    assert len(classes._given_back) <= before
    assert not classes._emptied


@pytest.mark.parametrize("how", ["removed", "dropped"])
def test_threads_call_and_instrument_and_nobody_is_hurt(exported: Exported, how: str) -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    end, shared, wrong = threading.Event(), Sub(), list[BaseException]()

    def work(step: Callable[[], None]) -> None:
        try:
            while not end.is_set():
                step()
        except BaseException as error:
            wrong.append(error)

    def call() -> None:
        assert shared.flush(1) == 101
        assert Cache().flush(1) == 1
        assert Sub.flush(Sub(), 2) == 102

    def come_and_go() -> None:
        for owner in (Cache(), Sub()):
            handle = instrument(owner, exported, "flush", "inherited")
            assert owner.flush(1) + owner.inherited(1) in (2, 102)
            assert handle.attached == ("flush", "inherited")
            if how == "removed":
                handle.remove()

    threads = [threading.Thread(target=work, args=(step,)) for step in (call, call, come_and_go, come_and_go)]
    try:
        for thread in threads:
            thread.start()
        end.wait(1.0)
    finally:
        end.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
    assert wrong == []
    assert exported.rows.total(semconv.TELEMETRY_ERRORS) == 0


def test_what_a_hook_says_of_itself_may_change_while_it_is_asked() -> None:
    class Changing(HookPoint):
        """One that another thread detaches whenever somebody has looked."""

        looks: tuple[Any, ...] = ("detached", lambda: "attached")

        @property
        def _state(self) -> Any:  # type: ignore[override]
            *self.looks, now = self.looks
            return now

        @_state.setter
        def _state(self, state: Any) -> None: ...

    point = Changing(Hook(name="a", target="b:c", body="d", fact="e"), lambda _: abs)
    assert (point.state, point.state) == ("attached", "detached")


def test_an_object_whose_end_removes_others_does_so_in_the_midst_of_another(exported: Exported) -> None:
    class Ending(Cache):
        def __del__(self) -> None:
            for handle in self.handles:  # type: ignore[has-type]
                handle.remove()

    ended: list[bool] = []
    set_: Any = classes._set

    def at_a_bad_time(kind: type, name: str, value: Any) -> None:
        if cyclic:
            cyclic.clear()
            gc.collect()
            ended.append(gone() is None)
        set_(kind, name, value)

    first: Any = Ending()
    companion, second, other = Ending(), Cache(), Cache()
    companion.handles = []
    first.handles = [instrument(companion, exported), instrument(first, exported), instrument(second, exported)]
    first.itself = first
    gone, cyclic = weakref.ref(first), [first]
    del first
    with mock.patch.object(classes, "_set", at_a_bad_time):
        handle = instrument(other, exported, "inherited")
    assert ended == [True]
    assert (companion.flush(1), second.flush(1), other.inherited(3)) == (1, 1, 3)
    assert evicted(exported) == 3
    handle.remove()
    assert "flush" not in vars(Ending)


@pytest.mark.parametrize("names", [("flush",), ("inherited",)])
def test_copies_of_a_subclass_carry_nothing_of_ours_where_its_base_came_first(
    names: tuple[str, ...], exported: Exported
) -> None:
    base, derived = Cache(), Sub()
    for owner in (base, derived):
        instrument(owner, exported, *names)
    for other in (copy.copy(derived), copy.deepcopy(derived), pickle.loads(pickle.dumps(derived))):
        assert vars(other).keys() == {"flushed", "own"}
    assert type(derived.inherited) is types.MethodType


def test_what_a_nearer_base_is_given_afterwards_is_what_is_called(exported: Exported) -> None:
    class Near(Base):
        pass

    class Last(Near):
        pass

    owner = Last()
    handle = instrument(owner, exported, "inherited")
    assert owner.inherited(1) == 1
    Near.inherited = lambda self, count: 1000 + count  # type: ignore[method-assign,assignment]
    assert owner.inherited(1) == Last.inherited(owner, 1) == 1001
    handle.remove()
    assert owner.inherited(1) == 1001


def test_who_took_the_method_from_the_classs_own_attributes_may_call_it(exported: Exported) -> None:
    owner = Cache()
    handle = instrument(owner, exported)
    before: Any = vars(Cache)["flush"]
    with mock.patch.object(Cache, "flush", lambda self, count: before(self, count) + 5):
        assert owner.flush(2) == 7
    assert owner.flush(1) == 1
    handle.remove()
    assert owner.flush(1) == 1
