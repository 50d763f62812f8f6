"""Objects and calls that are legal and seldom: they work as before, or are refused in one clear line."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import math
import pickle
import subprocess
import sys
import threading
import weakref
from decimal import Decimal
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

import kvcache_otel as kv
from kvcache_otel import semconv
from tests.support.processes import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.engines.generic.conftest import Exported

TIERS = {"device": "kv", "host": "kv", "disk": "kv"}
EVICTED = kv.Eviction(tokens=lambda result, _: result)
METHODS = {"work": EVICTED}
SKIPPED = kv.SkippedStore(tier="disk", blocks=lambda result, _: result, reason="other")


def instrument(owner: Any, exported: Exported, methods: Any) -> kv.Instrumented:
    return kv.instrument_controller(owner, tiers=TIERS, methods=methods, meter_provider=exported.provider)


# -- names of arguments ------------------------------------------------------------------------------------------------


class Named:
    """One whose methods take names that stand-ins have for themselves."""

    def after(this, count: int, self: int = 0, *, owner: Any = None, result: Any = None) -> int:  # noqa: N805
        return count + self

    around = after

    def anything(this, count: int, **named: Any) -> int:  # noqa: N805
        return count + len(named)

    @staticmethod
    def static(_: int = 1, self: int = 0) -> int:
        return _ + self


@pytest.mark.parametrize(
    ("method", "args", "kwargs"),
    [
        ("after", (5,), {"owner": "me"}),
        ("after", (5,), {"result": "me", "self": 2}),
        ("around", (5,), {"owner": "me", "result": 1, "self": 2}),
        ("anything", (5,), {"owner": 1, "result": 2, "self": 3, "point": 4}),
        ("static", (), {"_": 3, "self": 4}),
    ],
)
def test_an_argument_may_have_any_name(
    exported: Exported, method: str, args: tuple[int, ...], kwargs: dict[str, Any]
) -> None:
    owner = Named()
    instrument(owner, exported, {method: EVICTED if method == "around" else SKIPPED})
    expected = getattr(Named(), method)(*args, **kwargs)
    for _ in range(3):
        assert getattr(owner, method)(*args, **kwargs) == expected
    rows = exported.rows
    assert rows.total(semconv.EVICTION_TOKENS) + rows.total(semconv.STORE_SKIPPED_BLOCKS) == 3 * expected
    assert rows.total(semconv.TELEMETRY_ERRORS) == 0


# -- decorators --------------------------------------------------------------------------------------------------------


def passing_on(function: Any) -> Any:
    @functools.wraps(function)
    def around(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return around


def passing_on_the_rest(function: Any) -> Any:
    @functools.wraps(function)
    def around(this: Any, count: int, *args: Any, **kwargs: Any) -> Any:
        return function(this, count, *args, **kwargs)

    return around


def giving_more(function: Any) -> Any:
    @functools.wraps(function)
    def around(this: Any, factor: int, count: int = 7) -> Any:
        return function(this, count, factor)

    return around


class Decorated:
    @passing_on
    def plain(self, count: int, factor: int = 1) -> int:
        return count * factor

    @passing_on
    @passing_on_the_rest
    def rest(self, count: int, factor: int = 1) -> int:
        return count * factor

    @passing_on
    @giving_more
    def more(self, count: int, factor: int) -> int:
        return count * factor

    @passing_on
    async def later(self) -> int:
        return 1

    @passing_on
    def steps(self) -> Iterator[int]:
        yield 1

    @contextlib.contextmanager
    def pinned(self) -> Iterator[int]:
        yield 1


@pytest.mark.parametrize("name", ["plain", "rest", "more"])
@pytest.mark.parametrize("args", [{"args": (3, 5)}, {"args": (3,)}, {"kwargs": {"count": 3, "factor": 5}}])
def test_arguments_are_those_that_a_decorator_takes(exported: Exported, name: str, args: Any) -> None:
    owner = Decorated()
    fact = kv.SkippedStore(tier="disk", blocks=lambda _, call: call.count * call.factor, reason="other")
    instrument(owner, exported, {name: fact})
    expected = getattr(owner, name)(*args.get("args", ()), **args.get("kwargs", {}))
    assert exported.rows.total(semconv.STORE_SKIPPED_BLOCKS) == expected
    assert exported.rows.total(semconv.TELEMETRY_ERRORS) == 0


@pytest.mark.parametrize("name", ["later", "steps", "pinned"])
def test_what_goes_on_behind_a_decorator_is_reported_and_not_counted(exported: Exported, name: str) -> None:
    owner = Decorated()
    handle = instrument(owner, exported, {name: SKIPPED})
    ((_, _, why),) = handle.missing
    assert why == f"Decorated.{name} goes on after it has returned: tell of it from inside, with `transfers`"
    result = getattr(owner, name)()
    if name == "later":
        result.close()
    assert exported.rows.values(semconv.STORE_SKIPPED_BLOCKS) == {}


# -- the end of the interpreter ----------------------------------------------------------------------------------------

ENDING = """
import sys
import kvcache_otel as kv
from opentelemetry.sdk.metrics import MeterProvider

class Cache:
    def evict(self, count):
        return count

cache = Cache()
methods = {"evict": kv.Eviction(tokens=1)}
handle = kv.instrument_controller(cache, tiers={"device": "kv"}, methods=methods, meter_provider=MeterProvider())
if sys.argv[1] == "removed":
    handle.remove()
sys.modules["codecs"].cache, sys.modules["codecs"].handle = cache, handle  # One of the last to be emptied.
del cache
if sys.argv[1] != "held":
    del handle, sys.modules["codecs"].handle
"""


@pytest.mark.parametrize("how", ["left", "held", "removed"])
def test_an_object_that_lasts_until_the_interpreter_ends_says_nothing(how: str) -> None:
    ended = subprocess.run([sys.executable, "-c", ENDING, how], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


# -- set-up ------------------------------------------------------------------------------------------------------------


class Cache:
    def work(self, count: int) -> int:
        return count


def test_of_several_threads_that_instrument_an_object_one_does(exported: Exported) -> None:
    owner, threads = Cache(), 4
    before = dict(vars(owner))
    all_have_looked = threading.Barrier(threads)
    handles: list[kv.Instrumented] = []
    refused: list[str] = []

    class Looked(kv.Eviction):
        """Is looked at when it was seen that the object is free, and before it is taken."""

        def begin(self, rows: Any) -> Any:
            if threading.current_thread() not in seen:
                seen.add(threading.current_thread())
                all_have_looked.wait(20.0)
            return super().begin(rows)

    seen: set[threading.Thread] = set()
    fact = Looked(tokens=lambda result, _: result)

    def work() -> None:
        try:
            handles.append(instrument(owner, exported, {"work": fact}))
        except ValueError as error:
            refused.append(str(error))

    running = [threading.Thread(target=work) for _ in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert refused == ["this Cache is instrumented already: remove() what was returned then, first"] * (threads - 1)
    assert owner.work(3) == 3
    assert exported.rows.total(semconv.EVICTION_TOKENS) == 3
    (handle,) = handles
    handle.remove()
    assert vars(owner) == before


class Strict(type):
    """A class whose attributes are made on demand, which fails."""

    def __getattr__(cls, name: str) -> Any:
        raise RuntimeError(f"{name} is not ready")


def test_what_a_class_holds_may_fail_when_it_is_asked(exported: Exported) -> None:
    class Holder(Cache):
        class Config(metaclass=Strict):
            pass

        @kv.measures(EVICTED)
        def trim(self, count: int) -> int:
            return count

    owner = Holder()
    handle = kv.instrument_controller(owner, tiers=TIERS, meter_provider=exported.provider)
    assert handle.attached == ("trim",)
    assert owner.trim(3) == 3
    assert exported.rows.total(semconv.EVICTION_TOKENS) == 3


def _raise(_: Any) -> Any:
    raise RuntimeError("not ready")


@pytest.mark.parametrize("says", [lambda _: "a name", lambda _: None, _raise])
def test_an_object_may_say_of_its_class_whatever_it_likes(exported: Exported, says: Any) -> None:
    kind: Any = type("Odd", (Cache,), {"__class__": property(says)})
    owner = kind()
    instrument(owner, exported, {"work": EVICTED})
    assert owner.work(3) == 3
    assert exported.rows.total(semconv.EVICTION_TOKENS) == 3


def test_an_object_whose_attributes_cannot_be_asked_for_is_refused(exported: Exported) -> None:
    kind: Any = type("Odd", (Cache,), {"__dict__": property(_raise)})
    with pytest.raises(TypeError, match="Odd has no __dict__"):
        instrument(kind(), exported, {"work": EVICTED})


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"methods": {"work": []}}, ValueError, r"methods\['work'\]: there is no fact, as Backup"),
        ({"tiers": {"device": ("kv", "kv")}}, ValueError, "the pools of the device tier: 'kv' is there twice"),
        ({"deadline_s": math.nan}, ValueError, "deadline_s is nan, and must be a number of seconds"),
        ({"deadline_s": "5"}, ValueError, "deadline_s is '5', and must be a number of seconds"),
        ({"deadline_s": -5}, ValueError, "deadline_s is -5, and must be a number of seconds"),
        ({"rank": kv.Rank(tp=2**70)}, TypeError, "rank= must be a Rank of numbers from 0 to"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_changed(
    exported: Exported, options: dict[str, Any], kind: type[Exception], words: str
) -> None:
    owner = Cache()
    given = {"tiers": TIERS, "methods": {"work": EVICTED}, "meter_provider": exported.provider, **options}
    with pytest.raises(kind, match=words):
        kv.instrument_controller(owner, **given)
    assert vars(owner) == {}


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"cache": None}, TypeError, "cache= must be a name, and not None"),
        ({"pools": ("kv", "kv")}, ValueError, "pools=: 'kv' is there twice"),
    ],
)
def test_transfers_that_make_no_sense_are_refused(
    exported: Exported, options: dict[str, Any], kind: type[Exception], words: str
) -> None:
    given = {"cache": "Own", "meter_provider": exported.provider, **options}
    with pytest.raises(kind, match=words):
        kv.transfers("device", "host", **given)


class Real:
    """A number that is none of Python's, as numpy's float32."""

    def __init__(self, number: float) -> None:
        self.number = number

    def __float__(self) -> float:
        return float(self.number)


class Integer(Real):
    """The same, as numpy's int64."""

    def __index__(self) -> int:
        return int(self.number)


@pytest.mark.parametrize(
    "number", [Integer(5), Real(5), Fraction(5), Decimal(5)], ids=lambda number: type(number).__name__
)
def test_a_gauge_may_be_a_number_of_whatever_kind(exported: Exported, number: Any) -> None:
    owner = Cache()
    gauges = kv.Gauges(block_size={"device": number})
    kv.instrument_controller(owner, tiers=TIERS, methods={}, gauges=gauges, meter_provider=exported.provider)
    assert exported.rows.value(semconv.BLOCK_SIZE, tier="device") == 5


@pytest.mark.parametrize(
    "number",
    [True, None, 1j, b"1", Integer(-1), Real(float("nan")), Integer(2**63)],
    ids=lambda number: type(number).__name__,
)
def test_a_gauge_that_is_no_number_is_refused(exported: Exported, number: Any) -> None:
    gauges = kv.Gauges(block_size={"device": number})
    with pytest.raises((TypeError, ValueError), match=r"block size of device: .* is no "):
        kv.instrument_controller(Cache(), tiers=TIERS, methods={}, gauges=gauges, meter_provider=exported.provider)


# -- copies, and methods that were taken off ---------------------------------------------------------------------------


def rebuilt(attributes: dict[str, Any]) -> Rebuilding:
    made = object.__new__(Rebuilding)
    made.__dict__.update(attributes)
    return made


class Rebuilding(Cache):
    """One that pickles itself by a function."""

    def __init__(self) -> None:
        self.worked = 0

    def work(self, count: int) -> int:
        self.worked += count
        return count

    def __reduce__(self) -> Any:
        return rebuilt, (dict(self.__dict__),)

    def clone(self) -> Rebuilding:
        return rebuilt(self.__dict__)


@pytest.mark.parametrize("copied", [copy.copy, lambda owner: pickle.loads(pickle.dumps(owner))])
def test_a_copy_that_a_function_makes_of_the_attributes_has_nothing_of_ours(exported: Exported, copied: Any) -> None:
    owner = Rebuilding()
    instrument(owner, exported, {"work": EVICTED})
    other = copied(owner)
    other.work(3)
    assert vars(other) == {"worked": 3}
    assert owner.worked == 0
    assert exported.rows.total(semconv.EVICTION_TOKENS) == 0


def test_a_copy_that_is_made_of_the_attributes_by_hand_acts_on_itself_and_tells_nothing(exported: Exported) -> None:
    owner = Rebuilding()
    handle = instrument(owner, exported, {"work": EVICTED})
    clone = owner.clone()
    clone.work(3)
    assert (owner.worked, clone.worked) == (0, 3)
    assert exported.rows.total(semconv.EVICTION_TOKENS) == 0
    assert set(vars(clone)) == {"worked", "_kvcache_otel"}  # The owner's handle, which says nothing of this one.
    second = instrument(clone, exported, {"work": EVICTED})
    assert (clone.work(3), owner.work(4)) == (3, 4)
    assert exported.rows.total(semconv.EVICTION_TOKENS) == 7
    handle.remove()
    assert clone.work(5) == 5
    assert exported.rows.total(semconv.EVICTION_TOKENS) == 12
    second.remove()
    assert (vars(owner), vars(clone)) == ({"worked": 4}, {"worked": 11})


def test_what_the_page_says_of_methods_that_were_taken_off_before_is_so(exported: Exported) -> None:
    cache = Rebuilding()
    before = cache.work
    instrument(cache, exported, {"work": EVICTED})
    assert before != cache.work
    assert before(3) == 3
    assert exported.rows.total(semconv.EVICTION_TOKENS) == 0


# -- providers ---------------------------------------------------------------------------------------------------------


def test_providers_that_were_shut_down_keep_no_thread_and_are_let_go(exported: Exported) -> None:
    def ours() -> list[str]:
        return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("kvcache"))

    owner = Cache()
    instrument(owner, exported, {"work": EVICTED})
    before, gone = ours(), []
    for count in range(10):
        provider = MeterProvider([InMemoryMetricReader()])
        handle = kv.instrument_controller(cache := Cache(), tiers=TIERS, methods=METHODS, meter_provider=provider)
        copies = kv.transfers("device", "host", cache="Own", meter_provider=provider)
        cache.work(count)
        with copies.transfer(bytes=1):
            pass
        provider.shutdown()
        assert cache.work(count) == count  # Nobody reads it any more; the engine need not know.
        handle.remove()
        gone.append(weakref.ref(provider))
    del provider, copies, cache, handle
    kv.transfers("device", "host", cache="Own", meter_provider=exported.provider)
    wait_until(lambda: ours() == before)
    gc.collect()
    assert [each() for each in gone if each() is not None] == []
    owner.work(3)
    assert exported.rows.total(semconv.EVICTION_TOKENS) == 3
    assert "kvcache.eviction.tokens" in exported.names()


# -- iterators ---------------------------------------------------------------------------------------------------------


class Stored:
    def __init__(self) -> None:
        self.block_hashes, self.medium = [1], "GPU"


Stored.__name__ = "BlockStored"


class Iterating:
    """One that returns what can be gone through once."""

    def launch(self, job: int) -> int:
        return job

    def poll(self, kind: str) -> Any:
        return {"map": map(int, [1]), "filter": filter(None, [1]), "generator": (n for n in [1]), "list": [1]}[kind]

    def publish(self, kind: str) -> Any:
        return {"map": map(id, []), "generator": (n for n in [Stored()]), "list": [Stored()]}[kind]


ITERATED = {
    "launch": kv.Backup(tokens=1, bytes=1, key=lambda result, _: result),
    "poll": kv.CopiesDone(source="device", destination="host"),
    "publish": kv.Publication(events=lambda result, _: result),
}


@pytest.mark.parametrize("kind", ["map", "filter", "generator"])
@pytest.mark.parametrize("keys", [None, lambda result, _: result, lambda result, _: map(int, result)])
def test_an_iterator_of_keys_is_left_to_the_engine(
    exported: Exported, lines: pytest.LogCaptureFixture, kind: str, keys: Any
) -> None:
    owner = Iterating()
    done = kv.CopiesDone(source="device", destination="host", keys=keys)
    instrument(owner, exported, {**ITERATED, "poll": done})
    for _ in range(2):
        assert list(owner.poll(kind)) == [1]
    assert exported.rows.value(semconv.TELEMETRY_ERRORS, hook="poll") == 2
    (said,) = lines.messages
    assert f"a {kind} is gone through once, by the caller: not read" in said


def test_an_iterator_that_a_reader_makes_is_read(exported: Exported) -> None:
    owner = Iterating()
    done = kv.CopiesDone(source="device", destination="host", keys=lambda result, _: map(int, result))
    instrument(owner, exported, {**ITERATED, "poll": done})
    owner.launch(1)
    assert owner.poll("list") == [1]
    assert exported.rows.value(semconv.TRANSFER_OPERATIONS, source="device", destination="host") == 1
    assert exported.rows.total(semconv.TELEMETRY_ERRORS) == 0


def test_an_iterator_of_events_is_left_to_the_engine(exported: Exported) -> None:
    owner = Iterating()
    instrument(owner, exported, ITERATED)
    owner.publish("list")
    assert exported.rows.value(semconv.RESIDENT_BLOCKS, tier="device", view="published") == 1
    assert len(list(owner.publish("generator"))) == 1
    assert exported.rows.value(semconv.TELEMETRY_ERRORS, hook="publish") == 1


# -- what is not asked for -----------------------------------------------------------------------------------------


class Lazy:
    """A descriptor of somebody's that makes what it gives out."""

    def __init__(self, make: Any) -> None:
        self.make = make

    def __get__(self, instance: Any, kind: type | None = None) -> Any:
        return self.make(instance)


@pytest.mark.parametrize(
    ("descriptor", "why"),
    [
        (functools.cached_property, "Cache.work is a cached_property, which is asked for and not called"),
        (property, "Cache.work is a property"),
        (Lazy, "Cache.work is a Lazy, which is asked for and not called"),
    ],
)
def test_no_code_of_the_engines_runs_when_its_methods_are_looked_for(
    exported: Exported, descriptor: Any, why: str
) -> None:
    made = []

    def make(self: Any) -> Any:
        made.append(self)
        return lambda count: count

    kind: Any = type("Cache", (), {"work": descriptor(make)})
    facts = {"work": kv.Eviction(tokens=1)}
    handle = kv.instrument_controller(owner := kind(), tiers=TIERS, methods=facts, meter_provider=exported.provider)
    assert [(item.name, item.why) for item in handle.missing] == [("work", why)]
    assert made == []
    handle.report()
    assert made == []
    assert owner.work(5) == 5


def test_a_lazy_attribute_that_is_there_already_is_a_callable_of_the_objects_own(exported: Exported) -> None:
    class Cache:
        @functools.cached_property
        def work(self) -> Any:
            return lambda count: count

    owner = Cache()
    assert owner.work(1) == 1
    facts = {"work": kv.Eviction(tokens=lambda count, _: count)}
    handle = kv.instrument_controller(owner, tiers=TIERS, methods=facts, meter_provider=exported.provider)
    assert owner.work(5) == 5
    assert handle.attached == ("work",)
    assert exported.rows.value(semconv.EVICTION_TOKENS, tier="device", pool="kv") == 5


@pytest.mark.parametrize("single", [True, False])
def test_methods_that_cannot_be_called_on_the_class_are_found(exported: Exported, *, single: bool) -> None:
    class Cache:
        def one(self, count: int) -> int:
            return count

        work: Any = functools.singledispatchmethod(one) if single else functools.partialmethod(one)

    owner = Cache()
    facts = {"work": kv.Eviction(tokens=lambda count, _: count)}
    handle = kv.instrument_controller(owner, tiers=TIERS, methods=facts, meter_provider=exported.provider)
    assert owner.work(5) == 5
    assert handle.attached == ("work",)
    assert exported.rows.value(semconv.EVICTION_TOKENS, tier="device", pool="kv") == 5


class AttrDict(dict[str, int]):
    """What it is asked for it looks for among its items."""

    __getattr__ = dict[str, int].__getitem__
    __setattr__ = dict[str, int].__setitem__

    def evict(self, tokens: int) -> int:
        return tokens


class WithoutState:
    """Its state is not to be set where there is none."""

    def __setstate__(self, state: object) -> None:
        raise NotImplementedError

    def evict(self, tokens: int) -> int:
        return tokens


@pytest.mark.parametrize("kind", [AttrDict, WithoutState])
@pytest.mark.parametrize("copied", [copy.copy, lambda owner: pickle.loads(pickle.dumps(owner))])
def test_an_object_without_attributes_is_copied_as_before(
    exported: Exported, kind: type, copied: Callable[[object], object]
) -> None:
    owner = kind()
    kv.instrument_tree_core(
        owner, tiers={"device": "kv"}, methods={"evict": kv.Eviction(tokens=1)}, meter_provider=exported.provider
    )
    assert type(copied(owner)) is kind
    assert not vars(copied(owner))
