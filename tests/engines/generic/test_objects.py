"""Methods are wrapped on one object, hurt nobody, and are given back as they were; rows end with their object."""

from __future__ import annotations

import copy
import dataclasses
import gc
import inspect
import os
import pickle
import re
import subprocess
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvcache_otel as kv
from kvcache_otel import semconv
from kvcache_otel.engines.hooks import STEP_ASIDE_AFTER
from kvcache_otel.instrumentation import instrumentation
from kvcache_otel.instrumentor import KVCacheInstrumentor
from tests.support.fake_device import FakeEvent, FakeStream

if TYPE_CHECKING:
    from tests.engines.generic.conftest import Exported

TIERS: dict[str, Any] = {"device": "kv", "host": ("kv", "swa"), "disk": "kv"}
BACKUP = {"source": "device", "destination": "host"}


class Plain:
    """A controller that returns what it likes."""

    @staticmethod
    def fixed(tokens: int) -> int:
        return tokens

    @classmethod
    def of_class(cls, tokens: int) -> str:
        return cls.__name__ * tokens

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.blocks = 3

    def write(self, tokens: int, *, factor: int = 2) -> int:
        """Writes."""
        self.calls.append((tokens, factor))
        if tokens < 0:
            raise KeyError(tokens)
        return tokens * factor

    def write_twice(self, tokens: int) -> int:
        return self.write(tokens) + self.write(tokens)

    async def later(self) -> None: ...

    def steps(self) -> Any:
        yield 1

    @property
    def number(self) -> int:
        return 1


WRITE = kv.Backup(tokens=lambda result, _: result, bytes=lambda _, call: call.factor)


def instrument(owner: Any, exported: Exported, **options: Any) -> Any:
    return kv.instrument_controller(
        owner, **{"tiers": TIERS, "methods": {"write": WRITE}, "meter_provider": exported.provider, **options}
    )


def tokens(exported: Exported) -> Any:
    return exported.rows.value(semconv.TRANSFER_TOKENS, **BACKUP, pool="kv")


# ------------------------------------------------------------------------------------------- wrapped and given back


def test_only_this_object_is_wrapped_and_it_does_what_it_did(exported: Exported) -> None:
    wrapped, other, function = Plain(), Plain(), Plain.write
    handle = instrument(wrapped, exported)
    assert handle.attached == ("write",)
    assert (wrapped.write(3), wrapped.write(3, factor=5), wrapped.write_twice(1)) == (6, 15, 4)
    assert (other.write(100), Plain.write is function, vars(other).keys()) == (200, True, {"calls", "blocks"})
    assert tokens(exported) == 6 + 15 + 2 + 2
    assert exported.rows.value(semconv.TRANSFER_IO, **BACKUP, timing="wall_clock") == 2 + 5 + 2 + 2
    assert wrapped.calls == [(3, 2), (3, 5), (1, 2), (1, 2)]


def test_removing_gives_the_object_back_as_it_was(exported: Exported) -> None:
    owner = Plain()
    owner.extra = lambda tokens: tokens  # type: ignore[attr-defined]
    before = dict(vars(owner))
    handle = instrument(owner, exported, methods={"write": WRITE, "extra": kv.Eviction(tokens=1)})
    assert vars(owner).keys() > before.keys()
    owner.extra(1)  # type: ignore[attr-defined]
    handle.remove()
    assert vars(owner) == before
    assert list(vars(owner)) == list(before)
    assert vars(owner)["extra"] is before["extra"]
    assert owner.write.__func__ is Plain.write
    owner.write(1)
    assert tokens(exported) == 0
    handle.remove()
    assert handle.attached == ()
    instrument(owner, exported).remove()
    assert vars(owner) == before


def test_who_wrapped_it_meanwhile_keeps_that(exported: Exported) -> None:
    owner = Plain()
    handle = instrument(owner, exported)
    ours = owner.write
    theirs = lambda tokens: ours(tokens) + 1  # noqa: E731
    owner.write = theirs  # type: ignore[method-assign,assignment]
    handle.remove()
    assert (owner.write, owner.write(2)) == (theirs, 5)
    assert tokens(exported) == 0


def test_static_and_class_methods_are_called_as_they_were(exported: Exported) -> None:
    owner = Plain()
    facts = {"fixed": kv.Eviction(tokens=lambda n, call: call[0]), "of_class": kv.Eviction(tier="host", tokens=1)}
    handle = instrument(owner, exported, methods=facts)
    assert handle.missing == ()
    assert (owner.fixed(3), owner.of_class(2)) == (3, "PlainPlain")
    assert exported.rows.value(semconv.EVICTION_TOKENS, tier="device", pool="kv") == 3


def test_a_stand_in_looks_like_the_method(exported: Exported) -> None:
    owner = Plain()
    plain = inspect.signature(owner.write)
    instrument(owner, exported)
    assert inspect.signature(owner.write) == plain
    assert owner.write.__name__ == "write"
    assert owner.write.__self__ is owner


def test_the_engines_exceptions_pass_unchanged_and_count_as_failures(exported: Exported) -> None:
    owner = Plain()
    instrument(owner, exported)
    with pytest.raises(KeyError) as raised:
        owner.write(-1)
    assert raised.traceback[-1].name == "write"
    assert exported.rows.value(semconv.TRANSFER_OPERATIONS, **BACKUP, error="KeyError") == 1
    assert exported.rows.value(semconv.TRANSFER_ACTIVE, **BACKUP) == 0


@pytest.mark.parametrize("error", [ValueError("bug"), RecursionError(), TypeError()])
def test_our_exceptions_never_reach_the_engine_and_the_hook_steps_aside(
    exported: Exported, lines: pytest.LogCaptureFixture, error: Exception
) -> None:
    def raising(*_: Any) -> Any:
        raise error

    owner, asked = Plain(), 0

    def counting(*_: Any) -> Any:
        nonlocal asked
        asked += 1
        raise error

    handle = instrument(owner, exported, methods={"write": kv.Backup(tokens=counting, bytes=1)})
    for _ in range(STEP_ASIDE_AFTER + 3):
        assert owner.write(1) == 2
    assert asked == STEP_ASIDE_AFTER
    rows = exported.rows
    assert rows.value(semconv.TELEMETRY_ERRORS, hook="write") == STEP_ASIDE_AFTER
    assert rows.value(semconv.TELEMETRY_HOOK_ATTACHED, hook="write") == 0
    assert rows.value(semconv.TRANSFER_ACTIVE, **BACKUP) is None  # Nobody counts them any more.
    assert len(lines.messages) == 1
    assert "aside" in handle.report()


def test_what_a_reader_failed_at_is_not_active_for_ever(exported: Exported) -> None:
    owner = Plain()
    fact = kv.Backup(tokens=lambda result, _: result / (result - 2), bytes=1)
    instrument(owner, exported, methods={"write": fact})
    owner.write(1)
    rows = exported.rows
    assert rows.value(semconv.TELEMETRY_ERRORS, hook="write") == 1
    assert rows.value(semconv.TRANSFER_ACTIVE, **BACKUP) == 0
    assert rows.value(semconv.TRANSFER_OPERATIONS, **BACKUP) == 0


def test_what_is_active_ends_where_an_end_was_missed(exported: Exported) -> None:
    class Async(Plain):
        def done(self) -> Any:
            return [1, 2]

    owner = Async()
    facts: dict[str, Any] = {
        "write": kv.Backup(tokens=1, bytes=1, key=lambda result, _: result),
        "done": kv.CopiesDone(source="device", destination="host", keys=lambda result, _: result.missing),
    }
    instrument(owner, exported, methods=facts)
    owner.write(1)
    assert exported.rows.value(semconv.TRANSFER_ACTIVE, **BACKUP) == 1
    owner.done()
    assert exported.rows.value(semconv.TRANSFER_ACTIVE, **BACKUP) is None


@dataclasses.dataclass(frozen=True)
class Frozen:
    """A class that lets nobody set an attribute."""

    name: str = "x"

    def write(self) -> int:
        return 1


def test_a_frozen_object_can_be_wrapped_and_given_back(exported: Exported) -> None:
    owner = Frozen()
    handle = instrument(owner, exported, methods={"write": kv.Eviction(tokens=lambda n, _: n)})
    owner.write()
    assert exported.rows.value(semconv.EVICTION_TOKENS, tier="device", pool="kv") == 1
    handle.remove()
    assert vars(owner) == {"name": "x"}


CLONES = {
    "shallow": copy.copy,
    "deep": copy.deepcopy,
    "pickle": lambda owner: pickle.loads(pickle.dumps(owner)),
    "old pickle": lambda owner: pickle.loads(pickle.dumps(owner, protocol=2)),
}


class WithSlots(Plain):
    """One whose state is more than its dict."""

    __slots__ = ("more",)


class WithState(Plain):
    """One that says itself what its state is, and makes more of it."""

    def __getstate__(self) -> Any:
        return {**vars(self), "extra": 1}


@pytest.mark.parametrize("clone", CLONES.values(), ids=list(CLONES))
@pytest.mark.parametrize("kind", [Plain, WithSlots, WithState])
def test_a_copy_of_an_object_acts_on_itself_and_has_nothing_of_ours(
    exported: Exported, kind: type[Plain], clone: Any
) -> None:
    owner = kind()
    if kind is WithSlots:
        owner.more = 7  # type: ignore[attr-defined]
    instrument(owner, exported)
    other = clone(owner)
    del owner.calls[:]
    other.calls = []
    other.write(4)
    assert (owner.calls, other.calls) == ([], [(4, 2)])
    assert vars(other).keys() - {"extra"} == {"calls", "blocks"}
    assert getattr(other, "more", 7) == 7
    assert tokens(exported) == 0
    instrument(other, exported)
    other.write(1)
    assert tokens(exported) == 2


def test_a_copy_has_the_functions_that_its_original_had_of_its_own(exported: Exported) -> None:
    owner = Plain()
    owner.write = abs  # type: ignore[method-assign,assignment]
    instrument(owner, exported, methods={"write": kv.Eviction(tokens=1)})
    assert vars(copy.copy(owner))["write"] is abs


def test_a_copy_of_one_that_cannot_be_copied_fails_as_it_did(exported: Exported) -> None:
    class Own(Plain):
        def __reduce__(self) -> Any:
            raise TypeError("cannot pickle 'Own'")

    owner = Own()
    instrument(owner, exported)
    with pytest.raises(TypeError, match="cannot pickle 'Own'"):
        copy.copy(owner)


def test_a_call_in_which_nothing_happened_leaves_no_trace(exported: Exported) -> None:
    events: list[FakeEvent] = []

    def make() -> FakeEvent:
        events.append(FakeEvent())
        return events[-1]

    owner, stream = Plain(), FakeStream()
    fact = kv.Backup(
        when=lambda result, _: result > 0,
        tokens=1,
        bytes=1,
        stream=lambda call: stream if call.self is owner else None,
        make_event=make,
        requested=lambda _: 0.0,
    )
    instrument(owner, exported, methods={"write": fact})
    rows = exported.rows
    for _ in range(5):
        owner.write(0)
    assert len(events) == 1
    assert rows.value(semconv.TRANSFER_ACTIVE, **BACKUP) == 0
    queue = rows.histogram(semconv.TRANSFER_QUEUE_DURATION, **BACKUP)
    assert queue is not None
    assert sum(queue.read()[0]) == 0
    owner.write(1)
    assert rows.value(semconv.TRANSFER_ACTIVE, **BACKUP) == 1
    stream.run()
    assert rows.recorder.harvester.flush(20.0)
    assert rows.value(semconv.TRANSFER_ACTIVE, **BACKUP) == 0
    duration = rows.histogram(semconv.TRANSFER_DURATION, **BACKUP, timing="device_event")
    assert duration is not None
    assert (sum(duration.read()[0]), sum(queue.read()[0]), len(events)) == (1, 1, 2)


# ------------------------------------------------------------------------------------------------- the user's fault


class Slotted:
    """A class whose objects take no attributes."""

    __slots__ = ("__weakref__",)


class Unreferable:
    """A class whose objects have attributes and no weak references."""

    __slots__ = ("__dict__",)


FAULTS: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    (Plain, {}, TypeError, "is a class"),
    (Slotted(), {}, TypeError, "no __dict__"),
    (Unreferable(), {}, TypeError, "weakly"),
    (Plain(), {"tiers": {}}, ValueError, "no tier"),
    (Plain(), {"tiers": {"gpu": "kv"}}, ValueError, "'gpu'"),
    (Plain(), {"tiers": {"device": "cache"}}, ValueError, "'cache'"),
    (Plain(), {"tiers": {"device": ()}}, ValueError, "no pool"),
    (Plain(), {"tiers": {"none": "kv"}}, ValueError, "'none'"),
    (Plain(), {"tiers": {"device": "kv"}}, ValueError, "'host' was not declared"),
    (Plain(), {"names": {"peer": "x"}}, ValueError, "'peer' was not declared"),
    (Plain(), {"methods": {"write": 3}}, TypeError, "no fact"),
    (Plain(), {"methods": {"write": [WRITE, 3]}}, TypeError, "no fact"),
    (Plain(), {"methods": {"write": kv.Drop(tokens=1, reason="boredom")}}, ValueError, "'boredom'"),
    (
        Plain(),
        {"methods": {"write": kv.Copy(source="host", destination="host", tokens=1, bytes=1)}},
        ValueError,
        "none",
    ),
    (Plain(), {"gauges": kv.Gauges(resident={"peer": 1})}, ValueError, "'peer'"),
    (Plain(), {"gauges": kv.Gauges(pools={("host", "mamba"): kv.PoolSize(limit=1, free=1)})}, ValueError, "'mamba'"),
    (Plain(), {"gauges": kv.Gauges(active={("device", "host"): "blocks"})}, ValueError, "counted by a fact"),
    (Plain(), {"deadline_s": -1}, ValueError, "deadline_s"),
    (Plain(), {"deadline_s": "1"}, ValueError, "deadline_s"),
    (Plain(), {"tiers": ["device"]}, TypeError, "must be a mapping"),
    (Plain(), {"tiers": {"device": 5}}, TypeError, "one name or several"),
    (Plain(), {"tiers": {5: "kv"}}, ValueError, "'5'"),
    (Plain(), {"names": ["disk"]}, TypeError, "must be a mapping"),
    (Plain(), {"names": {"disk": 5}}, TypeError, "must be a name"),
    (Plain(), {"cache": ""}, TypeError, "must be a name"),
    (Plain(), {"rank": 3}, TypeError, "must be a Rank"),
    (Plain(), {"rank": kv.Rank(tp=-1)}, TypeError, "must be a Rank"),
    (Plain(), {"meter_provider": 3}, TypeError, "must be a MeterProvider"),
    (Plain(), {"methods": ["write"]}, TypeError, "must be a mapping"),
    (Plain(), {"methods": {3: WRITE}}, TypeError, "'3' is none"),
    (Plain(), {"methods": {"write": None}}, TypeError, "no fact"),
    (
        Plain(),
        {"methods": {"write": kv.Backup()}},
        TypeError,
        "write'.: Backup does not say .*: give tokens= and bytes=",
    ),
    (Plain(), {"methods": {"write": [WRITE, kv.Eviction()]}}, TypeError, "Eviction does not say how .*: give tokens="),
    (Plain(), {"methods": {"write": kv.Publication()}}, TypeError, "Publication does not say how .*: give events="),
    (
        Plain(),
        {"methods": {"write": kv.HostInsert(reasons=("other",))}},
        TypeError,
        "give loaded= and fulfilled=",
    ),
    (Plain(), {"methods": {"write": kv.Eviction(tokens=1, tier=["host"])}}, ValueError, "was not declared"),  # type: ignore
    (Plain(), {"methods": {"write": kv.Drop(tokens=1, reason=3)}}, ValueError, "no reason '3'"),
    (Plain(), {"methods": {"write": kv.Backup(tokens=1, bytes=1, stream=1, make_event=3)}}, TypeError, "make_event"),  # type: ignore
    (Plain(), {"gauges": {"resident": {}}}, TypeError, "must be Gauges"),
    (Plain(), {"gauges": kv.Gauges(resident=3)}, TypeError, "must be a mapping"),  # type: ignore[arg-type]
    (Plain(), {"gauges": kv.Gauges(resident={"device": None})}, TypeError, "no callable"),  # type: ignore[dict-item]
    (Plain(), {"gauges": kv.Gauges(resident={"device": -1})}, ValueError, "no quantity"),
    (Plain(), {"gauges": kv.Gauges(pools={"device": 3})}, TypeError, "two names"),  # type: ignore[dict-item]
    (Plain(), {"gauges": kv.Gauges(active={"kv": 3})}, TypeError, "two names"),  # type: ignore[dict-item]
    (Plain(), {"gauges": kv.Gauges(pools={("device", "kv"): 3})}, TypeError, "PoolSize"),  # type: ignore[dict-item]
]


@pytest.mark.parametrize("form", [kv.instrument_controller, kv.instrument_tree_core])
@pytest.mark.parametrize(("owner", "options", "kind", "words"), FAULTS, ids=lambda value: str(value)[:40])
def test_a_fault_of_the_users_is_said_at_the_call_and_nothing_is_changed(
    exported: Exported, owner: Any, options: dict[str, Any], kind: type[Exception], words: str, form: Any
) -> None:
    before = dict(vars(owner)) if hasattr(owner, "__dict__") else {}
    with pytest.raises(kind, match=words):
        form(owner, **{"tiers": TIERS, "methods": {"write": WRITE}, "meter_provider": exported.provider, **options})
    assert (dict(vars(owner)) if hasattr(owner, "__dict__") else {}) == before
    assert exported.names() == set()


def test_instrumenting_twice_is_said_and_the_first_stays(exported: Exported) -> None:
    owner = Plain()
    handle = instrument(owner, exported)
    with pytest.raises(ValueError, match="instrumented already"):
        instrument(owner, exported)
    with pytest.raises(ValueError, match="instrumented already"):
        kv.instrument_tree_core(owner, beside=handle, methods={"write": WRITE})
    with pytest.raises(ValueError, match="'gpu' was not declared"):
        handle.transfers("gpu", "host")
    owner.write(1)
    assert tokens(exported) == 2


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: kv.Backup(tokens=1), "bytes="),
        (lambda: kv.Drop(tokens=1), "reason="),
        (lambda: kv.Backup(tokens=1, bytes=1, seconds=len, stream="s"), "not all of them"),
        (lambda: kv.Backup(tokens=1, bytes=1, key=len, stream="s"), "CopiesDone"),
        (lambda: kv.measures(3), "no fact"),
        (lambda: kv.Backup(tokens=1, bytes=1, requested=5.0), "requested="),
        (lambda: kv.Backup(tokens=1, bytes=1, seconds=0.5), "seconds= must be a callable of the call, and not '0.5'"),
        (lambda: kv.Backup(tokens=1, bytes=1, key=5), "key= must be a callable"),
        (lambda: kv.Backup(tokens=1, bytes=1, error="no"), "error= must be a callable"),
        (lambda: kv.Eviction(tokens=1, when=True), "when= must be a callable"),
        (lambda: kv.CopiesDone(source="device", destination="host", keys=(1,)), "keys= must be a callable"),
        (lambda: kv.Backup(tokens="x", bytes=1), "tokens="),
        (lambda: kv.Eviction(tokens=1.5), "tokens="),
        (lambda: kv.Eviction(tokens={"kv": None}), "tokens="),
    ],
)
def test_a_fact_that_cannot_be_is_said_when_it_is_made(make: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        make()


@pytest.mark.parametrize("amount", [-1, {"kv": 3, "swa": -2}])
def test_an_amount_that_is_always_negative_is_said_when_the_fact_is_made(amount: Any) -> None:
    with pytest.raises(ValueError, match="negative"):
        kv.Eviction(tokens=amount)


@pytest.mark.parametrize(
    ("route", "options", "kind", "words"),
    [
        (("device", "device"), {}, ValueError, "none between tiers"),
        (("gpu", "host"), {}, ValueError, "'gpu'"),
        (("device", "none"), {}, ValueError, "'none'"),
        ((5, "host"), {}, ValueError, "'5'"),
        (("device", "host"), {"pools": 3}, TypeError, "one name or several"),
        (("device", "host"), {"pools": ()}, ValueError, "pools"),
        (("device", "host"), {"pools": "cache"}, ValueError, "'cache'"),
        (("device", "host"), {"timing": "sundial"}, ValueError, "'sundial'"),
        (("device", "host"), {"make_event": 3}, TypeError, "make_event"),
        (("device", "host"), {"deadline_s": None}, ValueError, "deadline_s"),
        (("device", "host"), {"cache": 3}, TypeError, "must be a name"),
        (("device", "host"), {"name": 3}, TypeError, "must be a name"),
        (("device", "host"), {"rank": 3}, TypeError, "must be a Rank"),
        (("device", "host"), {"meter_provider": 3}, TypeError, "must be a MeterProvider"),
    ],
    ids=str,
)
def test_a_fault_is_said_where_transfers_are_set_up(
    exported: Exported, route: Any, options: dict[str, Any], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        kv.transfers(*route, **{"cache": "Own", "meter_provider": exported.provider, **options})


def test_beside_says_all_that_is_said_elsewhere(exported: Exported) -> None:
    handle = instrument(Plain(), exported)
    with pytest.raises(ValueError, match="not instrumented any more"):  # Its object is gone.
        kv.instrument_tree_core(Plain(), beside=handle)
    keep = Plain()
    handle = instrument(keep, exported)
    with pytest.raises(ValueError, match="says already"):
        kv.instrument_tree_core(Plain(), beside=handle, tiers=TIERS)


# -------------------------------------------------------------------------------------------------- what is missing


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("absent", "has no absent"),
        ("blocks", "no method"),
        ("later", "goes on after it has returned"),
        ("steps", "goes on after it has returned"),
        ("__init__", "looks at the class"),
    ],
)
def test_what_an_object_lacks_is_reported_and_has_no_rows(
    exported: Exported, lines: pytest.LogCaptureFixture, name: str, why: str
) -> None:
    owner = Plain()
    handle = instrument(owner, exported, methods={"write": WRITE, name: kv.Eviction(tokens=1)})
    ((missing, what, said),) = handle.missing
    assert (missing, what) == (name, "what is evicted from device")
    assert why in said
    assert why in handle.report()
    assert "MISSING" in handle.report()
    assert len(lines.messages) == 1
    assert exported.rows.values(semconv.EVICTION_TOKENS) == {}
    assert exported.rows.value(semconv.TELEMETRY_HOOK_ATTACHED, hook=name) == 0
    assert exported.rows.value(semconv.TELEMETRY_HOOK_ATTACHED, hook="write") == 1
    assert vars(owner).keys() == {"calls", "blocks", "_kvcache_otel"}


def test_a_gauge_that_an_object_lacks_is_reported_and_has_no_row(exported: Exported) -> None:
    owner = Plain()
    gauges = kv.Gauges(resident={"device": "blocks", "host": "host.blocks"})
    handle = instrument(owner, exported, gauges=gauges)
    assert [item.name for item in handle.missing] == ["gauge"]
    assert "host.blocks" in handle.missing[0].why
    rows = exported.rows.values(semconv.RESIDENT_BLOCKS)
    assert list(rows.values()) == [3]


# ------------------------------------------------------------------------------------------------------ the gauges


def test_g1_rows_end_at_once_with_their_object_whoever_holds_the_handle(exported: Exported) -> None:
    gc.disable()
    try:
        owner = Plain()
        pools = {("host", "kv"): kv.PoolSize(limit=8, free=lambda owner: 8 - owner.blocks, evictable=1)}
        gauges = kv.Gauges(resident={"device": "blocks"}, pools=pools)
        handle = instrument(owner, exported, gauges=gauges)
        rows, gone = exported.rows, weakref.ref(owner)
        gauged = (semconv.RESIDENT_BLOCKS, semconv.USAGE, semconv.LIMIT, semconv.TRANSFER_ACTIVE)
        assert all(rows.values(spec) for spec in gauged)
        owner.write(1)
        del owner
        assert gone() is None
        assert not any(rows.values(spec) for spec in (*gauged, semconv.TELEMETRY_HOOK_ATTACHED))
        assert tokens(exported) == 2  # What was counted stays.
        assert handle.attached == ()
        handle.remove()
    finally:
        gc.enable()


def test_g1_an_object_that_its_own_readers_keep_ends_with_the_next_collection(exported: Exported) -> None:
    owner = Plain()
    instrument(owner, exported, gauges=kv.Gauges(resident={"device": lambda _, owner=owner: owner.blocks}))
    gone = weakref.ref(owner)
    assert exported.rows.values(semconv.RESIDENT_BLOCKS)
    del owner
    gc.collect()
    assert gone() is None
    assert not exported.rows.values(semconv.RESIDENT_BLOCKS)


def test_g2_a_pool_that_will_not_say_has_no_row_and_the_others_do(
    exported: Exported, lines: pytest.LogCaptureFixture
) -> None:
    def refuse(_: Any) -> Any:
        raise NotImplementedError("no size")

    owner = Plain()
    pools = {
        ("device", "kv"): kv.PoolSize(limit=10, free=4),
        ("host", "kv"): kv.PoolSize(limit=refuse, free=4),
        ("host", "swa"): kv.PoolSize(limit=lambda _: float("nan"), free=4),
    }
    instrument(owner, exported, gauges=kv.Gauges(pools=pools))
    rows = exported.rows
    for _ in range(3):
        assert rows.total(semconv.LIMIT) == 10
        assert rows.total(semconv.USAGE) == 10
        assert len(rows.values(semconv.USAGE)) == 2
    assert rows.value(semconv.TELEMETRY_ERRORS, hook="gauge") == 2
    assert len(lines.messages) == 2


def test_g3_more_free_than_there_is_is_0_used_and_one_accounting_error(exported: Exported) -> None:
    owner = Plain()
    owner.blocks = 12
    pools = {("device", "kv"): kv.PoolSize(limit=10, free="blocks")}
    instrument(owner, exported, gauges=kv.Gauges(pools=pools))
    rows, labels = exported.rows, {"tier": "device", "pool": "kv"}
    for _ in range(3):
        assert rows.value(semconv.USAGE, **labels, state="used") == 0
    assert rows.total(semconv.ACCOUNTING_ERRORS) == 1
    owner.blocks = 7
    assert rows.value(semconv.USAGE, **labels, state="used") == 3
    owner.blocks = 11
    assert rows.value(semconv.USAGE, **labels, state="used") == 0
    assert rows.total(semconv.ACCOUNTING_ERRORS) == 2


def test_rows_of_a_pool_are_made_of_the_same_answers(exported: Exported) -> None:
    owner = Plain()

    def wavering(owner: Plain) -> int:
        owner.blocks *= 2
        return owner.blocks

    pools = {("device", "kv"): kv.PoolSize(limit=10**12, free=wavering, evictable=wavering)}
    instrument(owner, exported, gauges=kv.Gauges(pools=pools))
    for _ in range(5):
        assert exported.rows.total(semconv.USAGE) == 10**12


def test_transfers_that_an_object_counts_itself_are_a_gauge(exported: Exported) -> None:
    owner = Plain()
    gauges = kv.Gauges(active={("host", "disk"): "blocks"}, block_size={"disk": 64})
    instrument(owner, exported, gauges=gauges, names={"disk": "file"})
    rows = exported.rows
    assert rows.value(semconv.TRANSFER_ACTIVE, source="host", destination="disk", name="file") == 3
    assert rows.value(semconv.BLOCK_SIZE, tier="disk") == 64
    owner.blocks = -1
    assert rows.value(semconv.TRANSFER_ACTIVE, source="host", destination="disk", name="file") == 0
    assert rows.value(semconv.ACCOUNTING_ERRORS, reason="underflow") == 1


# ------------------------------------------------------------------------------------------- protocols and marks


@dataclasses.dataclass
class Moved:
    tokens: Any
    bytes: int = 8


@dataclasses.dataclass
class Told:
    """All that the protocols ask for."""

    tokens: Any = None
    reason: str = "pool_full"
    hit: int = 10
    loaded: int = 9
    fulfilled: int = 6
    unfulfilled: Any = None
    prompt: int = 100
    served: Any = None


class Speaking:
    """A cache that has the names of both protocols, and returns what they say."""

    def backup(self, tokens: int) -> Moved | None:
        return Moved({"kv": tokens}) if tokens else None

    def load_back(self) -> Moved:
        return Moved(5)

    retract = restore = load_back

    def prefetch(self) -> Told:
        return Told()

    def admit(self) -> Told:
        return Told(served={"device": 30, "host": 20})

    def evict(self) -> Told:
        return Told(tokens=3)

    def evict_host(self) -> Told:
        return Told(tokens={"kv": 2, "swa": 1})

    def drop(self) -> Told:
        return Told(tokens=4)

    def insert_host(self) -> Told:
        return Told(unfulfilled={"host_capacity": 3, "nonsense": 1})


def test_who_speaks_the_protocols_says_nothing_but_its_tiers(exported: Exported) -> None:
    owner = Speaking()
    handle = kv.instrument_controller(owner, tiers=TIERS, meter_provider=exported.provider)
    assert (handle.missing, len(handle.attached)) == ((), 5)
    owner.backup(7), owner.backup(0), owner.load_back(), owner.retract(), owner.restore(), owner.prefetch()
    rows = exported.rows
    assert rows.value(semconv.TRANSFER_OPERATIONS, **BACKUP) == 2
    assert rows.value(semconv.TRANSFER_TOKENS, **BACKUP, pool="kv") == 12
    assert rows.value(semconv.TRANSFER_OPERATIONS, source="host", destination="device") == 2
    assert rows.value(semconv.PREFETCH_HIT_TOKENS, tier="disk") == 10
    assert rows.values(semconv.PREFETCH_LOADED_TOKENS) == {}  # Nobody here tells what becomes of it.
    assert rows.value(semconv.TRANSFER_ACTIVE, **BACKUP) == 0


def test_a_fact_of_the_protocol_may_be_named_among_others(exported: Exported) -> None:
    owner = Speaking()
    methods = {"evict": kv.Eviction(), "load_back": kv.Eviction(tier="host", tokens=1)}
    kv.instrument_tree_core(owner, tiers=TIERS, methods=methods, meter_provider=exported.provider)
    owner.evict(), owner.load_back()
    assert exported.rows.total(semconv.EVICTION_TOKENS) == 4


def test_a_tree_core_that_speaks_the_protocol(exported: Exported, lines: pytest.LogCaptureFixture) -> None:
    owner = Speaking()
    handle = kv.instrument_tree_core(owner, tiers=TIERS, meter_provider=exported.provider)
    assert (handle.missing, len(handle.attached)) == ((), 5)
    owner.admit(), owner.evict(), owner.evict_host(), owner.drop(), owner.insert_host()
    rows = exported.rows
    served = {tier: rows.value(semconv.LOOKUP_TOKENS, tier=tier) for tier in ("device", "host", "disk", "none")}
    assert served == {"device": 30, "host": 20, "disk": 0, "none": 50}
    assert rows.value(semconv.EVICTION_TOKENS, tier="host", pool="swa") == 1
    assert rows.value(semconv.DROPPED_TOKENS, tier="device", pool="kv", reason="pool_full") == 4
    assert rows.value(semconv.PREFETCH_FULFILLED_TOKENS, tier="disk") == 6
    assert rows.total(semconv.PREFETCH_UNFULFILLED_TOKENS) == 4
    assert [message for message in lines.messages if "'nonsense'" in message] == lines.messages[:1]


def test_what_a_thing_lacks_of_the_protocols_names_is_told(exported: Exported) -> None:
    class Some(Plain):
        def backup(self) -> None: ...

    handle = kv.instrument_controller(owner := Some(), tiers=TIERS, meter_provider=exported.provider)
    assert {item.name for item in handle.missing} == {"load_back", "retract", "restore", "prefetch"}
    assert handle.attached == ("backup",)
    assert owner is not None


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (
            {},
            "Plain has no backup; Plain has no load_back; Plain has no retract; Plain has no restore; Plain has no pre",
        ),
        ({"methods": {}}, "nothing is said of Plain: give methods= or gauges=, or mark its methods with measures()"),
        ({"methods": {"gone": kv.Eviction(tokens=1)}}, "nothing of Plain would be measured: Plain has no gone"),
        ({"methods": {"gone": kv.Eviction(tokens=1)}, "gauges": kv.Gauges()}, "Plain has no gone"),
    ],
)
def test_an_object_of_which_nothing_would_be_measured_is_refused_and_left_alone(
    exported: Exported, said: dict[str, Any], why: str
) -> None:
    owner = Plain()
    before = dict(vars(owner))
    with pytest.raises(ValueError, match=re.escape(why)) as raised:
        kv.instrument_controller(owner, tiers=TIERS, meter_provider=exported.provider, **said)
    assert "\n" not in str(raised.value)
    assert vars(owner) == before
    assert exported.names() == set()


def test_a_method_that_is_there_and_cannot_be_wrapped_is_reported_since_it_may_be_told_by_hand(
    exported: Exported,
) -> None:
    class Later(Plain):
        async def write(self) -> None: ...

    handle = instrument(owner := Later(), exported)
    assert [item.name for item in handle.missing] == ["write"]
    handle.transfers("device", "host").begin().end(bytes=5)
    assert exported.rows.value(semconv.TRANSFER_IO, source="device", destination="host", timing="wall_clock") == 5
    assert owner is not None


@pytest.mark.parametrize(
    ("fact", "why"),
    [
        (
            kv.Eviction(tokens={"swa": 1}),
            "Eviction: tokens: the pool 'swa' of the device tier was not declared; kv was",
        ),
        (
            kv.Drop(tokens={"swa": 1}, reason="pool_full"),
            "Drop: tokens: the pool 'swa' of the device tier was not declare",
        ),
        (
            kv.Backup(tokens={"kv": 1, "swa": 1}, bytes=1),
            "Backup: tokens: the pool 'swa' of the device tier was not decl",
        ),
        (
            kv.LoadBack(tokens={7: 1}, bytes=1),
            "LoadBack: tokens: the pool '7' of the host tier was not declared; kv was",
        ),
        (kv.Admission(prompt=1, served={"peer": 1}), "Admission: served: the tier 'peer' was not declared"),
        (kv.HostInsert(loaded=1, fulfilled=0, unfulfilled={"whim": 1}), "has no reason 'whim'"),
    ],
)
def test_what_is_always_so_and_was_not_declared_is_refused(exported: Exported, fact: Any, why: str) -> None:
    tiers = {"device": "kv", "host": "kv", "disk": "kv"}
    with pytest.raises(ValueError, match=re.escape(why)):
        kv.instrument_controller(Plain(), tiers=tiers, methods={"write": fact}, meter_provider=exported.provider)
    assert exported.names() == set()


def test_a_reason_that_is_always_so_is_declared_by_that(exported: Exported) -> None:
    fact = kv.HostInsert(loaded=1, fulfilled=0, unfulfilled={"device_covered": 1})
    tiers = {"host": "kv", "disk": "kv"}
    handle = kv.instrument_controller(
        owner := Plain(), tiers=tiers, methods={"write": fact}, meter_provider=exported.provider
    )
    owner.write(1)
    assert exported.rows.value(semconv.PREFETCH_UNFULFILLED_TOKENS, tier="disk", reason="device_covered") == 1
    assert handle.attached


@pytest.mark.parametrize("given", [True, {"kv": False}, 1.5, 2.0, "7"])
def test_what_is_no_whole_number_is_no_amount(given: Any) -> None:
    words = f"tokens= must be a whole number, such numbers by name, or a callable, and not {given!r}"
    with pytest.raises(TypeError, match=re.escape(words) + "$"):
        kv.Eviction(tokens=given)
    with pytest.raises(TypeError, match=re.escape(words) + "$"):
        kv.Backup(tokens=given, bytes=1)


def test_a_tier_that_is_none_is_told_which_there_are(exported: Exported) -> None:
    with pytest.raises(
        ValueError, match=r"kvcache\.tier has no 'gpu': it is one of device, disk, external, host, peer, unk"
    ):
        kv.instrument_controller(Plain(), tiers={"gpu": "kv"}, meter_provider=exported.provider)


def test_what_is_missing_is_said_once_for_a_class(exported: Exported, lines: pytest.LogCaptureFixture) -> None:
    class One(Plain): ...

    class Another(Plain): ...

    facts = {"write": kv.Eviction(tokens=1), "gone": kv.Eviction(tokens=1)}
    owners = [kind() for kind in (One, One, Another, One)]
    for owner in owners:
        instrument(owner, exported, methods=facts)
    assert [line.partition("measured: ")[2] for line in lines.messages] == [
        "gone: One has no gone",
        "gone: Another has no gone",
    ]


def test_marks_cost_nothing_until_an_object_is_instrumented(exported: Exported) -> None:
    def write(self: Any, tokens: int) -> int:
        return tokens

    marked = kv.measures(kv.Backup(tokens=lambda n, _: n, bytes=0), kv.Eviction(tokens=lambda _, __: 1))(write)
    assert marked is write

    class Marked:
        write = marked
        fixed = staticmethod(kv.measures(kv.Eviction(tier="host", tokens=5))(lambda: None))

    owner = Marked()
    handle = kv.instrument_controller(owner, tiers=TIERS, meter_provider=exported.provider)
    assert set(handle.attached) == {"write.Backup", "write.Eviction", "fixed"}
    assert owner.write(3) == 3
    owner.fixed()
    assert tokens(exported) == 3
    assert exported.rows.value(semconv.EVICTION_TOKENS, tier="device", pool="kv") == 1
    assert exported.rows.value(semconv.EVICTION_TOKENS, tier="host", pool="kv") == 5


# ------------------------------------------------------------------------------------------- in the running engine


def test_what_was_not_declared_is_counted_and_said_once(exported: Exported, lines: pytest.LogCaptureFixture) -> None:
    owner = Plain()
    facts = {
        "write": [
            kv.Eviction(tokens=lambda *_: {"mamba": 5, "kv": 1}),
            kv.Admission(prompt=100, served=lambda *_: {"device": 10, "peer": 20}),
            kv.Drop(tier="host", tokens=lambda *_: -3, reason=lambda *_: "whim", reasons=("pool_full",)),
        ]
    }
    instrument(owner, exported, methods=facts)
    for _ in range(3):
        owner.write(1)
    rows = exported.rows
    assert rows.value(semconv.EVICTION_TOKENS, tier="device", pool="kv") == 3
    assert rows.value(semconv.TELEMETRY_DROPPED, reason="other") == 3
    assert rows.value(semconv.LOOKUP_TOKENS, tier="unknown") == 60
    assert rows.total(semconv.LOOKUP_TOKENS) == 300
    assert rows.value(semconv.ACCOUNTING_ERRORS, reason="negative_delta") == 3
    assert rows.total(semconv.DROPPED_TOKENS) == 0
    assert len(lines.messages) == 4
    assert rows.total(semconv.TELEMETRY_ERRORS) == 0


@given(
    pools=st.dictionaries(st.text() | st.sampled_from(["kv", "swa"]), st.integers(-3, 3), max_size=4),
    tiers=st.dictionaries(st.text() | st.sampled_from(["device", "none"]), st.integers(-3, 3), max_size=4),
    reason=st.text() | st.none() | st.integers(),
)
@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_hostile_labels_make_no_series_and_reach_nobody(
    exported: Exported, pools: dict[str, int], tiers: dict[str, int], reason: Any
) -> None:
    owner = Plain()
    facts = {
        "write": [
            kv.Eviction(tier="host", tokens=lambda *_: pools),
            kv.Admission(prompt=3, served=lambda *_: tiers),
            kv.Drop(tokens=1, reason=lambda *_: reason),
        ]
    }
    handle = instrument(owner, exported, methods=facts)
    assert owner.write(2) == 4
    rows = exported.rows
    found = {dict(key)[semconv.KVCACHE_POOL] for key in rows.values(semconv.EVICTION_TOKENS)} | {
        dict(key)[semconv.KVCACHE_TIER] for key in rows.values(semconv.LOOKUP_TOKENS)
    }
    assert found <= {"kv", "swa", "device", "host", "disk", "none", "unknown"}
    assert len(rows.values(semconv.DROPPED_TOKENS)) <= 4
    assert rows.total(semconv.TELEMETRY_ERRORS) == 0
    handle.remove()


def test_a_thousand_caches_leave_memory_and_threads_where_they_were(exported: Exported) -> None:
    def work(times: int) -> None:
        for _ in range(times):
            owner = Plain()
            gauges = kv.Gauges(resident={"device": "blocks"}, pools={("host", "kv"): kv.PoolSize(limit=8, free=1)})
            instrument(owner, exported, gauges=gauges)
            owner.write(1)

    def objects() -> int:
        assert exported.runtime.flush(20.0)  # There is a sample for each, until it was replayed to the provider.
        gc.collect()
        return len(gc.get_objects())

    work(50)
    exported.names()
    before, threads = objects(), threading.active_count()
    work(1_000)
    assert objects() < before + 500
    assert threading.active_count() <= threads
    assert exported.rows.values(semconv.RESIDENT_BLOCKS) == {}
    assert tokens(exported) == 2_100


# --------------------------------------------------------------------------------------------------- the runtime


def test_uninstrumenting_gives_every_object_back(exported: Exported) -> None:
    owner = Plain()
    instrument(owner, exported)
    KVCacheInstrumentor().instrument()
    KVCacheInstrumentor().uninstrument()
    assert vars(owner).keys() == {"calls", "blocks"}


def test_a_provider_that_was_given_to_the_instrumentor_is_used(exported: Exported) -> None:
    KVCacheInstrumentor().instrument(meter_provider=exported.provider)
    try:
        owner = Plain()
        kv.instrument_controller(owner, tiers=TIERS, methods={"write": WRITE})
        owner.write(1)
        assert "kvcache.transfer.tokens" in exported.names()
    finally:
        KVCacheInstrumentor().uninstrument()


def test_switched_off_nothing_is_wrapped_and_it_is_said(exported: Exported, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_PYTHON_DISABLED_INSTRUMENTATIONS", "kvcache")
    owner = Plain()
    handle = instrument(owner, exported)
    assert (handle.attached, [item.name for item in handle.missing]) == ((), ["write"])
    assert vars(owner).keys() == {"calls", "blocks"}
    assert exported.names() == set()
    other = Plain()
    kv.instrument_tree_core(other, beside=handle, methods={"write": kv.Eviction(tokens=1)})
    assert vars(other).keys() == {"calls", "blocks"}
    with handle.transfers("device", "host").begin(bytes=1):
        pass
    assert handle.transfers("device", "host") is handle.transfers("device", "host")
    with pytest.raises(ValueError, match="peer"):
        handle.transfers("device", "peer")
    with kv.transfers("device", "host", cache="Own").begin(bytes=1):
        pass
    assert instrumentation.runtime is None


def test_transfers_by_hand_share_the_rows_of_the_object(exported: Exported) -> None:
    owner = Plain()
    handle = instrument(owner, exported)
    with handle.transfers("device", "host").begin(tokens=5, bytes=1):
        owner.write(1)
    assert tokens(exported) == 7
    with pytest.raises(ValueError, match="'peer'"):
        handle.transfers("device", "peer")
    with kv.transfers("host", "disk", cache="Plain", meter_provider=exported.provider).begin(bytes=3):
        pass
    assert exported.rows.value(semconv.TRANSFER_IO, source="host", destination="disk", timing="wall_clock") == 3


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_has_its_objects_back_and_may_instrument_them_anew(exported: Exported) -> None:
    owner = Plain()
    instrument(owner, exported)
    owner.write(1)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            found = [sorted(vars(owner)), owner.write(5)]
            instrument(owner, exported)
            owner.write(10)
            found.append(tokens(exported))
            os.write(write, repr(found).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        assert answer.read() == repr([["blocks", "calls"], 10, 20])
    os.waitpid(pid, 0)
    owner.write(1)
    assert tokens(exported) == 4


def test_the_package_and_its_names_import_no_torch_and_the_package_alone_no_sdk() -> None:
    program = (
        "import sys, kvcache_otel\n"
        "assert 'opentelemetry' not in sys.modules and 'kvcache_otel.own' not in sys.modules\n"
        "for name in kvcache_otel.__all__: getattr(kvcache_otel, name)\n"
        "assert 'torch' not in sys.modules\n"
        "print('well')\n"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "well\n"


def test_facts_of_one_kind_on_one_method_have_hooks_of_their_own(exported: Exported) -> None:
    class Store:
        def store(self) -> dict[str, int]:
            return {"no_space": 2, "backpressure": 3}

    def skipped(reason: str) -> kv.SkippedStore:
        return kv.SkippedStore(tier="disk", reason=reason, blocks=lambda stored, _: stored[reason])

    store = Store()
    methods = {"store": [skipped("no_space"), skipped("backpressure"), kv.Eviction(tokens=1)]}
    handle = kv.instrument_controller(store, tiers=TIERS, methods=methods, meter_provider=exported.provider)
    store.store()
    assert handle.attached == ("store.SkippedStore", "store.SkippedStore.2", "store.Eviction")
    attached = exported.rows.values(semconv.TELEMETRY_HOOK_ATTACHED)
    assert list(attached.values()) == [1, 1, 1]
    assert exported.rows.value(semconv.STORE_SKIPPED_BLOCKS, tier="disk", reason="backpressure") == 3


def test_hooks_of_caches_of_one_name_have_one_row_which_says_whether_all_are_there(exported: Exported) -> None:
    owners = [Plain(), Plain(), Plain()]
    lacking: Any = type("Plain", (), {"write": property(lambda _: print)})()
    handles = [instrument(owner, exported) for owner in owners]
    attached = {"spec": semconv.TELEMETRY_HOOK_ATTACHED, "hook": "write"}
    assert exported.rows.value(**attached) == 1
    handles[0].remove()
    assert exported.rows.value(**attached) == 1
    handles.append(instrument(lacking, exported))
    assert exported.rows.value(**attached) == 0
    del lacking
    assert exported.rows.value(**attached) == 1
    del owners[1]
    assert exported.rows.value(**attached) == 1
    handles[2].remove()
    assert exported.rows.value(**attached) is None
