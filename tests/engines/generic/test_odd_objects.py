"""Objects and calls that are legal and seldom: they work as before, or are refused in one clear line."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

import kvcache_otel as kv
from kvcache_otel import semconv

if TYPE_CHECKING:
    from tests.engines.generic.conftest import Exported

TIERS = {"device": "kv", "host": "kv", "disk": "kv"}
EVICTED = kv.Eviction(tokens=lambda result, _: result)
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
