"""Hooks on modules of an engine that is made up here: they are put on and taken off, and the engine never notices."""

from __future__ import annotations

import functools
import importlib
import importlib.resources
import importlib.util
import inspect
import logging
import sys
import textwrap
import threading
import traceback
import types
from typing import TYPE_CHECKING, Any

import pytest

from kvcache_otel.engines.hooks import STEP_ASIDE_AFTER, Hook, HookPoint, HookSet
from kvcache_otel.engines.post_import import PostImport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from types import ModuleType

LOGGER = "kvcache_otel.engines.hooks"

FAKE_CORE = '''
"""A made-up engine."""


class Larger:
    def __call__(self, *numbers):
        return max(10, *numbers)


class Base:
    def inherited(self, number):
        return number + 1


class Cache(Base):
    def lookup(self, number, *, factor=1):
        """Look a number up."""
        return number * factor

    def fail(self, number):
        return self._deeper(number)

    def _deeper(self, number):
        try:
            raise KeyError("the cause")
        except KeyError as cause:
            raise LookupError(number) from cause

    def enqueue(self, job, n_tasks, tasks=()):
        return (job, n_tasks, list(tasks))

    @staticmethod
    def static(number):
        return number + 2

    @classmethod
    def of_class(cls, number):
        return (cls.__name__, number)

    callable_object = Larger()

    @property
    def size(self):
        return 5

    def decorated(self):
        return "decorated"

    decorated.engine_mark = 7


class Slotted(Cache):
    __slots__ = ()

    class Inner:
        def method(self):
            return "inner"


def function(number=0):
    return number + 3
'''


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the package `fake_engine`, which has not been imported."""
    package = tmp_path / "fake_engine"
    package.mkdir()
    (package / "__init__.py").write_text("PACKAGE = True\n")
    (package / "core.py").write_text(FAKE_CORE)
    (package / "data.txt").write_text("resource")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    before = list(sys.meta_path)
    yield package
    sys.meta_path[:] = before
    for name in [name for name in sys.modules if name.partition(".")[0] == "fake_engine"]:
        del sys.modules[name]


def module(source: str, package: Path, name: str) -> None:
    (package / f"{name}.py").write_text(textwrap.dedent(source))
    importlib.invalidate_caches()


def core() -> ModuleType:
    return importlib.import_module("fake_engine.core")


class Seen:
    """An adapter whose every body notes what it was given."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.resolved: list[str] = []
        self.bodies: dict[str, Callable[..., Any]] = {}

    def resolve(self, body: str) -> Callable[..., Any]:
        self.resolved.append(body)
        return self.bodies.get(body, self.note)

    def note(self, *args: Any, **kwargs: Any) -> None:
        self.calls.append((*args, kwargs) if kwargs else args)


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture
def hook_on(engine: Path, seen: Seen) -> Iterator[Callable[..., HookSet]]:
    made: list[HookSet] = []

    def make(*paths: str, moment: Any = "after", where: str = "fake_engine.core") -> HookSet:
        hooks = [
            Hook(name=f"fake.{path}", target=f"{where}:{path}", body="note", fact="a fact", moment=moment)
            for path in paths
        ]
        made.append(HookSet(hooks, seen.resolve))
        made[-1].attach()
        return made[-1]

    yield make
    for hooks in made:
        hooks.detach()


def raising(error: BaseException) -> Callable[..., Any]:
    def body(*args: Any, **kwargs: Any) -> Any:
        raise error

    return body


# ------------------------------------------------------------------------------------------ attach, detach


def test_attaching_before_the_import_waits_for_it(hook_on: Callable[..., HookSet], seen: Seen) -> None:
    (point,) = hook_on("Cache.lookup").points
    assert (point.state, point.why) == ("waiting", "fake_engine.core has not been imported")
    assert "fake_engine" not in sys.modules
    cache = core().Cache()
    assert (point.state, point.why) == ("attached", "")
    assert cache.lookup(4, factor=3) == 12
    assert seen.calls == [(12, cache, 4, {"factor": 3})]


def test_attaching_after_the_import_hooks_at_once(hook_on: Callable[..., HookSet], seen: Seen) -> None:
    cache = core().Cache()
    (point,) = hook_on("Cache.lookup").points
    assert point.state == "attached"
    assert cache.lookup(4) == 4
    assert seen.calls == [(4, cache, 4)]


@pytest.mark.parametrize("position", ["first", "last"])
def test_attaching_while_the_module_imports_itself_hooks_when_it_is_done(
    engine: Path, hook_on: Callable[..., HookSet], seen: Seen, monkeypatch: pytest.MonkeyPatch, position: str
) -> None:
    """A module whose import runs the code that attaches, as an engine's plugin loading may."""
    attach = "import builtins; builtins.attach_now()\n"
    (engine / "core.py").write_text(attach + FAKE_CORE if position == "first" else FAKE_CORE + attach)
    made: list[HookSet] = []
    monkeypatch.setattr("builtins.attach_now", lambda: made.append(hook_on("Cache.lookup", "function")), raising=False)
    cache = core().Cache()
    assert [point.state for point in made[0].points] == ["attached", "attached"]
    assert (cache.lookup(4), core().function(1)) == (4, 4)
    assert seen.calls == [(4, cache, 4), (4, 1)]
    spec = core().__spec__
    assert spec is not None
    assert type(spec) is importlib.machinery.ModuleSpec


def test_attaching_while_another_thread_imports_hooks_when_it_is_done(
    engine: Path, hook_on: Callable[..., HookSet], monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go_on = threading.Event(), threading.Event()

    def pause() -> None:
        began.set()
        assert go_on.wait(30)

    monkeypatch.setattr("builtins.pause_import", pause, raising=False)
    (engine / "core.py").write_text("import builtins; builtins.pause_import()\n" + FAKE_CORE)
    importing = threading.Thread(target=core)
    importing.start()
    assert began.wait(30)
    first, second = hook_on("Cache.lookup").points[0], hook_on("function").points[0]
    assert (first.state, second.state) == ("waiting", "waiting")
    go_on.set()
    importing.join()
    assert (first.state, second.state) == ("attached", "attached")


def test_failed_import_under_way_leaves_the_hook_waiting_for_the_next(
    engine: Path, hook_on: Callable[..., HookSet], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[HookSet] = []
    monkeypatch.setattr("builtins.attach_now", lambda: made.append(hook_on("function")), raising=False)
    (engine / "core.py").write_text("import builtins; builtins.attach_now()\nraise ValueError('broken')\n")
    with pytest.raises(ValueError, match="broken"):
        core()
    assert made[0].points[0].state == "waiting"
    (engine / "core.py").write_text(FAKE_CORE)
    importlib.invalidate_caches()
    core()
    assert made[0].points[0].state == "attached"


def test_attached_twice_is_attached_once(hook_on: Callable[..., HookSet], seen: Seen) -> None:
    hooks = hook_on("Cache.lookup", "function")
    points = hooks.points
    core()
    hooks.attach()
    assert hooks.points is points
    assert core().function(1) == 4
    assert seen.calls == [(4, 1)]


def test_attaching_imports_and_resolves_nothing(hook_on: Callable[..., HookSet], seen: Seen) -> None:
    hook_on("Cache.lookup", "function")
    core()
    assert seen.resolved == []
    core().function()
    core().function()
    assert seen.resolved == ["note"]


HOOKABLE = (
    "Cache.lookup",
    "Cache.inherited",
    "Cache.static",
    "Cache.of_class",
    "Cache.callable_object",
    "Slotted.lookup",
    "Slotted.Inner.method",
    "function",
)


def found(path: str) -> tuple[bool, Any]:
    """Whether the owner itself defines the function, and what it defines; not what access makes of it."""
    owner: Any = core()
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    return name in vars(owner), vars(owner).get(name)


@pytest.mark.parametrize("path", HOOKABLE)
def test_detaching_gives_the_very_same_object_back(hook_on: Callable[..., HookSet], seen: Seen, path: str) -> None:
    before = found(path)
    hooks = hook_on(path)
    assert found(path) != before
    hooks.detach()
    assert found(path)[0] == before[0]
    assert found(path)[1] is before[1]
    assert (hooks.attached, seen.calls) == (False, [])


def test_detached_engine_is_not_told_of_later_imports(hook_on: Callable[..., HookSet], seen: Seen) -> None:
    hooks = hook_on("function")
    hooks.detach()
    core().function()
    assert seen.calls == []
    assert not [finder for finder in sys.meta_path if isinstance(finder, PostImport)]


def test_detaching_twice_and_attaching_again_works(hook_on: Callable[..., HookSet], seen: Seen) -> None:
    hooks = hook_on("function")
    original = core().function.__wrapped__
    for _ in range(3):
        hooks.detach()
        hooks.detach()
        assert core().function is original
        hooks.attach()
        assert hooks.points[0].state == "attached"
    core().function(1)
    assert seen.calls == [(4, 1)]


def test_whoever_wrapped_ours_keeps_it_and_ours_does_nothing_any_more(
    hook_on: Callable[..., HookSet], seen: Seen
) -> None:
    hooks = hook_on("Cache.lookup")
    cache_class = core().Cache
    ours = cache_class.lookup

    @functools.wraps(ours)
    def theirs(self: Any, number: int) -> int:
        return ours(self, number) + 100

    cache_class.lookup = theirs
    (point,) = hooks.points
    hooks.detach()
    assert cache_class.lookup is theirs
    assert cache_class().lookup(1) == 101
    assert (point.state, seen.calls) == ("detached", [])
    hooks.attach()
    assert cache_class().lookup(1) == 101
    assert len(seen.calls) == 1, "one hook is live, however many wrappers there are"


@pytest.mark.parametrize("path", ["Cache.lookup", "Cache.static", "Cache.of_class", "Cache.inherited", "function"])
def test_the_faster_stand_in_comes_with_the_first_call_and_is_taken_off_as_well(
    hook_on: Callable[..., HookSet], seen: Seen, path: str
) -> None:
    owner_name, _, name = path.rpartition(".")
    owner = getattr(core(), owner_name) if owner_name else core()
    before = vars(owner).get(name)
    hooks = hook_on(path)
    first = vars(owner)[name]
    called = getattr(core().Cache() if owner_name else core(), name)
    called(1)
    faster = vars(owner)[name]
    assert faster is not first
    assert type(faster) is type(first)
    assert getattr(faster, "__func__", faster).__code__.co_filename.startswith("<kvcache-otel")
    getattr(core().Cache() if owner_name else core(), name)(1)
    assert len(seen.calls) == 2
    assert vars(owner)[name] is faster
    hooks.detach()
    assert vars(owner).get(name) is before


def test_where_somebody_has_wrapped_ours_the_first_stand_in_stays(hook_on: Callable[..., HookSet], seen: Seen) -> None:
    hook_on("function")
    ours = core().function

    def theirs(*args: Any) -> Any:
        return ours(*args)

    core().function = theirs
    assert (core().function(1), core().function(2)) == (4, 5)
    assert core().function is theirs
    assert seen.calls == [(4, 1), (5, 2)]


def test_a_hook_that_is_detached_in_its_first_call_leaves_nothing_that_does_something(
    hook_on: Callable[..., HookSet], seen: Seen
) -> None:
    plain = core().function
    hooks = hook_on("function")
    seen.bodies["note"] = lambda *_: hooks.detach()
    core().function(1)
    assert core().function is plain


def test_two_hooks_on_one_function_are_both_taken_off(hook_on: Callable[..., HookSet]) -> None:
    original = core().function
    hooks = hook_on("function", "function")
    assert core().function is not original
    hooks.detach()
    assert core().function is original


# ------------------------------------------------------------------------------- what cannot be hooked


@pytest.mark.parametrize("path", ["gone", "Gone.lookup", "Cache.gone", "Cache.lookup.gone", "Cache.size", "__name__"])
def test_what_is_not_there_is_missing_and_says_why(hook_on: Callable[..., HookSet], path: str) -> None:
    hooks = hook_on(path, "function")
    cache = core().Cache()
    missing, attached = hooks.points
    assert (missing.state, missing.why) == ("missing", f"fake_engine.core has no {path}")
    assert attached.state == "attached"
    assert (cache.size, cache.lookup(2)) == (5, 2)
    hooks.detach()


def test_module_that_does_not_exist_keeps_waiting(hook_on: Callable[..., HookSet]) -> None:
    (point,) = hook_on("function", where="fake_engine.gone").points
    with pytest.raises(ModuleNotFoundError, match=r"fake_engine\.gone"):
        importlib.import_module("fake_engine.gone")
    assert point.state == "waiting"


UNHOOKABLE = {
    "a class that refuses": """
        class Meta(type):
            def __setattr__(cls, name, value):
                raise AttributeError("not here")
        class Owner(metaclass=Meta):
            def method(self): return 1
        """,
    "an object without a dictionary": """
        class Kind:
            __slots__ = ()
            def method(self): return 1
        Owner = Kind()
        """,
    "a type of C": "Owner = dict\n",
    "a lazy module that fails": """
        def __getattr__(name):
            raise ImportError("needs a package that is not here")
        """,
}


@pytest.mark.parametrize("what", UNHOOKABLE)
def test_what_cannot_be_replaced_is_missing_and_fails_no_import(
    engine: Path, hook_on: Callable[..., HookSet], what: str
) -> None:
    module(UNHOOKABLE[what], engine, "odd")
    path = "Owner.copy" if what == "a type of C" else "Owner.method"
    hooks = hook_on(path, where="fake_engine.odd")
    importlib.import_module("fake_engine.odd")
    (point,) = hooks.points
    assert (point.state, point.body) == ("missing", None)
    assert point.why.startswith(f"{path} cannot be replaced: ")
    hooks.detach()


# -------------------------------------------------------------------- what the engine sees: nothing at all


def test_static_methods_class_methods_and_callable_objects_are_called_as_before(
    hook_on: Callable[..., HookSet], seen: Seen
) -> None:
    hook_on("Cache.static", "Cache.of_class", "Cache.callable_object")
    fake = core()
    cache = fake.Slotted()
    assert (fake.Cache.static(1), cache.static(1)) == (3, 3)
    assert (fake.Cache.of_class(1), cache.of_class(1)) == (("Cache", 1), ("Slotted", 1))
    assert (fake.Cache.callable_object(3), cache.callable_object(30)) == (10, 30)
    assert seen.calls[:2] == [(3, 1), (3, 1)]
    assert seen.calls[2:4] == [(("Cache", 1), fake.Cache, 1), (("Slotted", 1), fake.Slotted, 1)]
    assert seen.calls[4:] == [(10, 3), (30, 30)]


def test_hook_on_an_inherited_function_leaves_the_base_alone(hook_on: Callable[..., HookSet], seen: Seen) -> None:
    hook_on("Cache.inherited")
    fake = core()
    assert fake.Base().inherited(1) == 2
    assert seen.calls == []
    cache = fake.Cache()
    assert cache.inherited(1) == 2
    assert seen.calls == [(2, cache, 1)]


@pytest.mark.parametrize("moment", ["after", "before", "around", "arguments"])
def test_function_still_looks_like_itself(hook_on: Callable[..., HookSet], moment: str) -> None:
    plain = core().Cache.lookup
    signature, source = inspect.signature(plain), inspect.getsource(plain)
    hook_on("Cache.lookup", "Cache.decorated", moment=moment)
    hooked = core().Cache.lookup
    assert hooked is not plain
    assert (hooked.__name__, hooked.__qualname__, hooked.__module__) == ("lookup", "Cache.lookup", "fake_engine.core")
    assert (hooked.__doc__, inspect.signature(hooked), inspect.getsource(hooked)) == (plain.__doc__, signature, source)
    assert core().Cache.decorated.engine_mark == 7


@pytest.mark.parametrize("moment", ["after", "before", "around", "arguments"])
def test_exception_of_the_engine_passes_unchanged(hook_on: Callable[..., HookSet], seen: Seen, moment: str) -> None:
    hooks = hook_on("Cache.fail", moment=moment)
    with pytest.raises(LookupError) as caught:
        core().Cache().fail(7)
    error = caught.value
    assert (type(error), error.args) == (LookupError, (7,))
    assert isinstance(error.__cause__, KeyError)
    assert error.__context__ is error.__cause__
    frames = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    assert frames[-2:] == ["fail", "_deeper"]
    assert frames[:-2].count("hooked") == 1
    assert len(seen.calls) == (moment != "after")
    assert hooks.points[0].errors == 0


def test_exception_object_is_the_engines_very_own(engine: Path, hook_on: Callable[..., HookSet], seen: Seen) -> None:
    module("ERROR = SystemError('mine')\ndef function():\n    raise ERROR\n", engine, "raises")
    hook_on("function", where="fake_engine.raises")
    raises = importlib.import_module("fake_engine.raises")
    with pytest.raises(SystemError) as caught:
        raises.function()
    assert caught.value is raises.ERROR
    assert (caught.value.__context__, caught.value.__cause__) == (None, None)


@pytest.mark.parametrize("moment", ["before", "around", "arguments"])
def test_exception_of_ours_is_not_the_context_of_the_engines(
    hook_on: Callable[..., HookSet], seen: Seen, moment: str
) -> None:
    seen.bodies["note"] = raising(ValueError("of our own"))
    hook_on("Cache.fail", moment=moment)
    with pytest.raises(LookupError) as caught:
        core().Cache().fail(7)
    assert "of our own" not in "".join(traceback.format_exception(caught.value))


# ------------------------------------------------------------------------------------- a body that fails


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger=LOGGER)
    return caplog


@pytest.mark.parametrize("moment", ["after", "before", "around", "arguments"])
def test_body_that_always_raises_leaves_the_results_alone_and_steps_aside(
    hook_on: Callable[..., HookSet], seen: Seen, lines: pytest.LogCaptureFixture, moment: str
) -> None:
    calls = 0

    def body(*args: Any, **kwargs: Any) -> None:
        nonlocal calls
        calls += 1
        raise ZeroDivisionError(f"call {calls}")

    seen.bodies["note"] = body
    (point,) = hook_on("Cache.lookup", moment=moment).points
    cache = core().Cache()
    assert [cache.lookup(number, factor=2) for number in range(50)] == [2 * number for number in range(50)]
    assert (calls, point.errors) == (STEP_ASIDE_AFTER, STEP_ASIDE_AFTER)
    assert (point.state, point.body) == ("aside", None)
    assert point.why == f"stepped aside after {STEP_ASIDE_AFTER} failures in a row, last: ZeroDivisionError('call 5')"
    assert len(lines.messages) == 1
    assert "fake.Cache.lookup" in lines.messages[0]
    assert "ZeroDivisionError('call 1')" in lines.messages[0]


def test_body_that_recovers_starts_its_row_anew(
    hook_on: Callable[..., HookSet], seen: Seen, lines: pytest.LogCaptureFixture
) -> None:
    def body(result: int, number: int) -> None:
        if number % STEP_ASIDE_AFTER:
            raise ValueError(number)

    seen.bodies["note"] = body
    (point,) = hook_on("function").points
    for number in range(100):
        core().function(number)
    assert (point.state, point.errors) == ("attached", 80)
    assert len(lines.messages) == 1
    for _ in range(STEP_ASIDE_AFTER):
        core().function(1)
    assert point.state == "aside"


def test_failure_during_which_the_hook_was_detached_does_not_revive_it(
    hook_on: Callable[..., HookSet], seen: Seen
) -> None:
    def body(*args: Any) -> None:
        seen.note(*args)
        hooks.detach()
        raise ValueError("detached meanwhile, on whatever thread")

    seen.bodies["note"] = body
    hooks = hook_on("function")
    kept_by_somebody = core().function
    for number in range(3):
        assert kept_by_somebody(number) == number + 3
    assert len(seen.calls) == 1


def test_success_during_which_the_hook_was_detached_does_not_revive_it(
    hook_on: Callable[..., HookSet], seen: Seen
) -> None:
    seen.bodies["note"] = lambda *args: (seen.note(*args), hooks.detach())
    hooks = hook_on("function")
    kept_by_somebody = core().function
    for number in range(3):
        assert kept_by_somebody(number) == number + 3
    assert len(seen.calls) == 1


def test_adapter_that_cannot_be_loaded_is_a_failing_body(hook_on: Callable[..., HookSet], seen: Seen) -> None:
    seen.resolve = raising(ImportError("no adapter"))  # type: ignore[method-assign]
    hooks = HookSet([Hook(name="h", target="fake_engine.core:function", body="b", fact="f")], seen.resolve)
    hooks.attach()
    assert [core().function(number) for number in range(9)] == list(range(3, 12))
    assert (hooks.points[0].state, hooks.points[0].errors) == ("aside", STEP_ASIDE_AFTER)
    hooks.detach()


def test_what_hooks_have_missed_is_known_and_told(engine: Path, seen: Seen) -> None:
    told: list[tuple[set[str], set[str]]] = []
    hooks = HookSet(
        [
            Hook(name="there", target="fake_engine.core:function", body="b", fact="f"),
            Hook(name="gone", target="fake_engine.core:nothing", body="b", fact="f"),
            Hook(name="later", target="fake_engine.core:nothing_yet", body="b", fact="f", since="2.1"),
            Hook(name="unused", target="fake_engine.nobody_imports:this", body="b", fact="f"),
        ],
        seen.resolve,
        changed=lambda: told.append((set(hooks.lost("2.0")), set(hooks.failed()))),
    )
    hooks.attach()
    core().function(1)
    assert hooks.lost("2.0") == {"gone"}
    assert hooks.lost("2.1") == {"gone", "later"}
    assert hooks.lost("") == {"gone", "later"}  # A version that cannot be read is no excuse.
    assert hooks.failed() == set()
    seen.bodies["b"] = raising(ValueError("ours"))
    hooks.points[0].body = hooks.points[0]._careful
    for number in range(STEP_ASIDE_AFTER + 2):
        core().function(number)
    assert told == [({"gone"}, {"there"})] * (STEP_ASIDE_AFTER - 1) + [({"gone", "there"}, {"there"})]
    hooks.detach()


def test_whoever_is_told_may_fail_too(engine: Path, seen: Seen) -> None:
    seen.bodies["b"] = raising(ValueError("ours"))
    hook = Hook(name="h", target="fake_engine.core:function", body="b", fact="f")
    hooks = HookSet([hook], seen.resolve, changed=raising(RuntimeError("theirs")))
    hooks.attach()
    assert [core().function(number) for number in range(9)] == list(range(3, 12))
    assert hooks.points[0].state == "aside"
    hooks.detach()


class UnspeakableError(Exception):
    """An exception that cannot even be shown."""

    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__


class PanickingError(UnspeakableError):
    """One that panics when it is shown: what it raises then is no `Exception`."""

    def __str__(self) -> str:
        raise GeneratorExit

    __repr__ = __str__


@pytest.mark.parametrize("kind", [UnspeakableError, PanickingError])
def test_exception_without_words_does_not_hurt(
    hook_on: Callable[..., HookSet], seen: Seen, lines: pytest.LogCaptureFixture, kind: type[Exception]
) -> None:
    seen.bodies["note"] = raising(kind())
    (point,) = hook_on("function").points
    assert [core().function(number) for number in range(9)] == list(range(3, 12))
    assert (point.state, point.errors) == ("aside", STEP_ASIDE_AFTER)
    assert point.why.endswith(f"last: {kind.__name__}")
    assert len(lines.messages) == 1


def test_logging_handler_that_raises_does_not_hurt(hook_on: Callable[..., HookSet], seen: Seen) -> None:
    class Broken(logging.Handler):
        def handle(self, record: logging.LogRecord) -> bool:
            raise OSError("log disk is full")

    handler = Broken()
    logging.getLogger(LOGGER).addHandler(handler)
    try:
        seen.bodies["note"] = raising(ValueError())
        hook_on("function")
        assert [core().function(number) for number in range(9)] == list(range(3, 12))
    finally:
        logging.getLogger(LOGGER).removeHandler(handler)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()], ids=lambda error: type(error).__name__)
def test_end_of_the_process_is_let_through(hook_on: Callable[..., HookSet], seen: Seen, error: BaseException) -> None:
    seen.bodies["note"] = raising(error)
    (point,) = hook_on("function").points
    with pytest.raises(type(error)):
        core().function()
    assert (point.state, point.errors) == ("attached", 0)


# ------------------------------------------------------------------------------------------------ moments


def test_before_is_told_before_the_function_runs(hook_on: Callable[..., HookSet], seen: Seen) -> None:
    order: list[str] = []
    cache = core().Cache()
    type(cache).lookup = lambda self, number: order.append("engine")
    seen.bodies["note"] = lambda *args: order.append(f"ours {args[1]}")
    hook_on("Cache.lookup", moment="before")
    cache.lookup(4)
    assert order == ["ours 4", "engine"]


def test_arguments_may_be_replaced(hook_on: Callable[..., HookSet], seen: Seen) -> None:
    def body(pool: Any, job: int, n_tasks: int, tasks: Any) -> tuple[Any, ...]:
        return pool, job, n_tasks, [f"watched {task}" for task in tasks]

    seen.bodies["note"] = body
    hook_on("Cache.enqueue", moment="arguments")
    cache = core().Cache()
    assert cache.enqueue(1, 2, ["a", "b"]) == (1, 2, ["watched a", "watched b"])
    assert cache.enqueue(1, n_tasks=2, tasks=iter("c")) == (1, 2, ["watched c"])


@pytest.mark.parametrize("body", [lambda *args, **kwargs: None, raising(ValueError())], ids=["none", "raising"])
def test_arguments_that_are_not_replaced_are_left(
    hook_on: Callable[..., HookSet], seen: Seen, body: Callable[..., Any]
) -> None:
    seen.bodies["note"] = body
    hook_on("Cache.enqueue", moment="arguments")
    assert core().Cache().enqueue(1, n_tasks=2, tasks=["a"]) == (1, 2, ["a"])


def test_after_gets_the_result_itself(hook_on: Callable[..., HookSet], seen: Seen) -> None:
    hook_on("Cache.enqueue")
    result = core().Cache().enqueue(1, 2)
    assert seen.calls[0][0] is result


# ------------------------------------------------------------------------------------- around: begin and finish


class Around:
    """A body that says when it was called, and how; what it returns notes how the call ended."""

    def __init__(self) -> None:
        self.begun: list[tuple[Any, ...]] = []
        self.ended: list[tuple[Any, Any]] = []
        self.begin_error: BaseException | None = None
        self.finish_error: BaseException | None = None
        self.of_interest = True

    def begin(self, *args: Any, **kwargs: Any) -> Callable[..., Any] | None:
        self.begun.append((*args, kwargs) if kwargs else args)
        if self.begin_error is not None:
            raise self.begin_error
        return self.finish if self.of_interest else None

    def finish(self, result: Any, error: BaseException | None) -> None:
        self.ended.append((result, error))
        if self.finish_error is not None:
            raise self.finish_error


@pytest.fixture
def around(seen: Seen) -> Around:
    body = Around()
    seen.bodies["note"] = body.begin
    return body


def test_around_is_told_the_arguments_before_and_the_result_itself_after(
    hook_on: Callable[..., HookSet], around: Around
) -> None:
    cache, order = core().Cache(), []
    type(cache).enqueue = lambda self, job, n_tasks: order.append((len(around.begun), len(around.ended))) or [job]
    hook_on("Cache.enqueue", moment="around")
    result = cache.enqueue(1, n_tasks=2)
    assert result == [1]
    assert order == [(1, 0)]
    assert around.begun == [(cache, 1, {"n_tasks": 2})]
    assert around.ended == [(result, None)]
    assert around.ended[0][0] is result


def test_around_is_told_the_exception_itself(hook_on: Callable[..., HookSet], around: Around) -> None:
    hook_on("Cache.fail", moment="around")
    with pytest.raises(LookupError) as caught:
        core().Cache().fail(7)
    assert around.ended == [(None, caught.value)]


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()], ids=lambda e: type(e).__name__)
def test_around_is_told_of_the_end_of_the_process(
    engine: Path, hook_on: Callable[..., HookSet], around: Around, error: BaseException
) -> None:
    module("def function(error):\n    raise error\n", engine, "raises")
    hook_on("function", moment="around", where="fake_engine.raises")
    with pytest.raises(type(error)) as caught:
        importlib.import_module("fake_engine.raises").function(error)
    assert caught.value is error
    assert around.ended == [(None, error)]


def test_around_calls_that_are_of_no_interest_have_no_end(hook_on: Callable[..., HookSet], around: Around) -> None:
    around.of_interest = False
    (point,) = hook_on("function", "Cache.fail", moment="around").points[:1]
    assert [core().function(number) for number in range(3)] == [3, 4, 5]
    with pytest.raises(LookupError):
        core().Cache().fail(7)
    assert (len(around.begun), around.ended) == (4, [])
    assert (point.state, point.errors) == ("attached", 0)


def test_around_what_has_begun_badly_has_no_end(
    hook_on: Callable[..., HookSet], around: Around, lines: pytest.LogCaptureFixture
) -> None:
    around.begin_error = ValueError("begin")
    (point,) = hook_on("function", moment="around").points
    assert [core().function(number) for number in range(9)] == list(range(3, 12))
    assert (point.state, point.errors) == ("aside", STEP_ASIDE_AFTER)
    assert (len(around.begun), around.ended) == (STEP_ASIDE_AFTER, [])
    assert len(lines.messages) == 1


@pytest.mark.parametrize("path", ["function", "Cache.fail"])
def test_around_what_has_ended_badly_is_counted_and_steps_aside(
    hook_on: Callable[..., HookSet], around: Around, lines: pytest.LogCaptureFixture, path: str
) -> None:
    around.finish_error = ZeroDivisionError("finish")
    (point,) = hook_on(path, moment="around").points
    for number in range(9):
        if path == "function":
            assert core().function(number) == number + 3
            continue
        with pytest.raises(LookupError) as caught:
            core().Cache().fail(number)
        assert caught.value.args == (number,)
        assert caught.value.__context__ is caught.value.__cause__
        assert "finish" not in "".join(traceback.format_exception(caught.value))
    assert (point.state, point.errors) == ("aside", STEP_ASIDE_AFTER)
    assert point.why == (f"stepped aside after {STEP_ASIDE_AFTER} failures in a row, last: ZeroDivisionError('finish')")
    assert (len(around.begun), len(around.ended)) == (STEP_ASIDE_AFTER, STEP_ASIDE_AFTER)
    assert len(lines.messages) == 1


def test_around_both_ends_may_fail_and_are_counted_together(hook_on: Callable[..., HookSet], around: Around) -> None:
    (point,) = hook_on("function", moment="around").points
    core().function()
    for number in range(STEP_ASIDE_AFTER):
        assert (point.state, point.errors) == ("attached", number)
        around.begin_error, around.finish_error = (ValueError(), None) if number % 2 else (None, ValueError())
        core().function()
    assert (point.state, point.errors) == ("aside", STEP_ASIDE_AFTER)


def test_around_an_end_that_is_well_starts_the_row_anew(hook_on: Callable[..., HookSet], around: Around) -> None:
    (point,) = hook_on("function", moment="around").points
    for number in range(20):
        around.finish_error = ValueError() if number % STEP_ASIDE_AFTER else None
        core().function()
    assert (point.state, point.errors) == ("attached", 16)


def test_around_calls_of_no_interest_do_not_hide_that_each_other_fails(
    hook_on: Callable[..., HookSet], around: Around
) -> None:
    around.finish_error = ValueError()
    (point,) = hook_on("function", moment="around").points
    for number in range(2 * STEP_ASIDE_AFTER):
        around.of_interest = bool(number % 2)
        core().function()
    assert (point.state, point.errors) == ("aside", STEP_ASIDE_AFTER)


def test_around_a_body_that_does_well_is_not_looked_up_again(
    hook_on: Callable[..., HookSet], seen: Seen, around: Around
) -> None:
    (point,) = hook_on("function", moment="around").points
    for _ in range(3):
        core().function()
    assert (seen.resolved, point.body) == (["note"], around.begin)
    around.of_interest = False
    for _ in range(3):
        core().function()
    assert seen.resolved == ["note"]


def test_around_a_body_without_interest_is_not_looked_up_again(
    hook_on: Callable[..., HookSet], seen: Seen, around: Around
) -> None:
    around.of_interest = False
    hook_on("function", moment="around")
    for _ in range(3):
        core().function()
    assert seen.resolved == ["note"]


@pytest.mark.parametrize("fails", [False, True])
def test_around_what_is_detached_between_begin_and_end_is_not_revived(
    hook_on: Callable[..., HookSet], around: Around, fails: bool
) -> None:
    cache = core().Cache()
    type(cache).lookup = lambda self, number: (hooks.detach(), number)[1]
    around.finish_error = ValueError("too late") if fails else None
    hooks = hook_on("Cache.lookup", moment="around")
    (point,) = hooks.points
    kept_by_somebody = type(cache).lookup
    assert [kept_by_somebody(cache, number) for number in range(3)] == [0, 1, 2]
    assert (len(around.begun), around.ended) == (1, [(0, None)])
    assert (point.state, point.body, point.errors) == ("detached", None, int(fails))


def test_around_what_has_stepped_aside_between_begin_and_end_is_not_revived(
    hook_on: Callable[..., HookSet], around: Around
) -> None:
    """Calls within a call, as on other threads: the outer one ends well after the inner ones have all failed."""
    cache = core().Cache()

    def lookup(self: Any, number: int) -> int:
        if number:
            around.begin_error = ValueError()
            for _ in range(STEP_ASIDE_AFTER):
                self.lookup(0)
        return number

    type(cache).lookup = lookup
    (point,) = hook_on("Cache.lookup", moment="around").points
    assert cache.lookup(1) == 1
    assert around.ended == [(1, None)]
    assert (point.state, point.body) == ("aside", None)


@pytest.mark.parametrize("moment", ["begin", "finish"])
def test_around_the_end_of_the_process_is_let_through(
    hook_on: Callable[..., HookSet], around: Around, moment: str
) -> None:
    setattr(around, f"{moment}_error", SystemExit(3))
    (point,) = hook_on("function", moment="around").points
    with pytest.raises(SystemExit):
        core().function()
    assert (point.state, point.errors) == ("attached", 0)


@pytest.mark.parametrize("moment", ["after", "before", "around", "around, its end", "arguments"])
def test_an_engine_that_has_run_too_deep_hears_it_from_itself_alone(
    hook_on: Callable[..., HookSet], seen: Seen, moment: str
) -> None:
    """It recurses until there is no frame left: first for us, who need more of them, then for itself."""
    failed: list[str] = []

    def deep(frames: int = 20) -> None:
        if frames:
            deep(frames - 1)

    def body(*args: Any) -> Any:
        try:
            return deep() if moment != "around, its end" else lambda result, error: body_of_the_end()
        except RecursionError:
            failed.append("begin")
            raise

    def body_of_the_end() -> None:
        try:
            deep()
        except RecursionError:
            failed.append("end")
            raise

    def lookup(self: Any, number: int) -> int:
        try:
            return self.lookup(number + 1)
        except RecursionError:
            return number

    cache = core().Cache()
    type(cache).lookup = lookup
    deepest = cache.lookup(0)
    seen.bodies["note"] = body
    hook_on("Cache.lookup", moment=moment.partition(",")[0])
    for _ in range(3):
        assert deepest // 4 < cache.lookup(0) < deepest
    assert failed


# ------------------------------------------------------------------------------------------------ places


def test_a_place_is_asked_for_when_a_module_is_there(engine: Path, seen: Seen) -> None:
    hook = Hook(name="h", target="fake_engine.core:function", body="note", fact="f")
    asked: list[tuple[HookPoint, ModuleType]] = []
    hooks = HookSet([hook], seen.resolve, lambda point, module: asked.append((point, module)))
    hooks.attach()
    assert asked == []
    fake = core()
    assert asked == [(hooks.points[0], fake)]
    assert hooks.points[0].state == "waiting"
    assert not hasattr(fake.function, "__wrapped__")
    hooks.detach()


class Placed:
    """An engine that puts hooks in their places itself, when it likes, and never takes them off."""

    def __init__(self) -> None:
        self.state: Any = "waiting"
        self.function: Callable[..., Any] = core().function

    def place(self, point: HookPoint, module: ModuleType) -> None:
        owner, name = point.find(module)
        if owner is not None:
            self.function = point.wrap(getattr(owner, name))
            point.placed(lambda: self.state, "the engine says why")


@pytest.fixture
def placed(engine: Path, seen: Seen) -> Iterator[tuple[Placed, HookSet]]:
    place = Placed()
    hook = Hook(name="h", target="fake_engine.core:function", body="note", fact="f")
    hooks = HookSet([hook], seen.resolve, place.place)
    hooks.attach()
    yield place, hooks
    hooks.detach()


def test_what_the_engine_has_placed_has_the_state_that_it_says(placed: tuple[Placed, HookSet], seen: Seen) -> None:
    place, hooks = placed
    (point,) = hooks.points
    for state in ("waiting", "attached", "missing", "attached"):
        place.state = state
        assert (point.state, point.why) == (state, "the engine says why")
    assert place.function(1) == 4
    assert seen.calls == [(4, 1)]


def test_what_the_engine_has_placed_stays_and_does_nothing_once_it_is_detached(
    placed: tuple[Placed, HookSet], seen: Seen
) -> None:
    place, hooks = placed
    (point,), place.state = hooks.points, "attached"
    original = core().function
    hooks.detach()
    assert core().function is original
    assert place.function(1) == 4
    assert (point.state, point.why, seen.calls) == ("detached", "detached", [])


def test_what_the_engine_has_placed_steps_aside_like_any_other(placed: tuple[Placed, HookSet], seen: Seen) -> None:
    place, hooks = placed
    (point,), place.state = hooks.points, "attached"
    seen.bodies["note"] = raising(ValueError())
    assert [place.function(number) for number in range(9)] == list(range(3, 12))
    assert (point.state, point.errors) == ("aside", STEP_ASIDE_AFTER)
    assert point.why.startswith("stepped aside after")


@pytest.mark.parametrize("path", ["gone", "Gone.lookup", "Cache.gone", "Cache.size"])
def test_what_is_not_found_is_missing_and_says_why(engine: Path, path: str) -> None:
    point = HookPoint(Hook(name="h", target=f"fake_engine.core:{path}", body="b", fact="f"), raising(AssertionError()))
    owner, name = point.find(core())
    assert (owner, name) == (None, path.rpartition(".")[2])
    assert (point.state, point.why) == ("missing", f"fake_engine.core has no {path}")


def test_what_is_found_is_not_hooked_yet(engine: Path) -> None:
    hook = Hook(name="h", target="fake_engine.core:Cache.lookup", body="b", fact="f")
    point = HookPoint(hook, raising(AssertionError()))
    assert point.find(core()) == (core().Cache, "lookup")
    assert (point.state, point.body) == ("waiting", None)


# ------------------------------------------------------------------------------------------------ imports


def watched(name: str) -> tuple[PostImport, list[ModuleType]]:
    imports, called = PostImport(), []
    imports.when_imported(name, called.append)
    return imports, called


def test_module_knows_nothing_of_having_been_watched(engine: Path) -> None:
    _, called = watched("fake_engine.core")
    fake = core()
    assert called == [fake]
    assert type(fake.__loader__).__name__ == "SourceFileLoader"
    assert fake.__spec__ is not None
    assert fake.__spec__.loader is fake.__loader__
    assert inspect.getsource(fake.Cache).startswith("class Cache(Base):")
    assert importlib.import_module("fake_engine.core") is fake


def test_package_still_has_its_resources_and_submodules(engine: Path) -> None:
    _, package = watched("fake_engine")
    _, submodule = watched("fake_engine.core")
    fake = core()
    assert (package, submodule) == ([sys.modules["fake_engine"]], [fake])
    assert importlib.resources.files("fake_engine").joinpath("data.txt").read_text() == "resource"
    assert sys.modules["fake_engine"].core is fake


def test_looking_for_a_module_is_not_importing_it(engine: Path) -> None:
    _, called = watched("fake_engine.core")
    spec = importlib.util.find_spec("fake_engine.core")
    assert spec is not None
    assert spec.origin == str(engine / "core.py")
    assert spec.loader is not None
    assert "class Cache" in spec.loader.get_source("fake_engine.core")  # type: ignore[attr-defined]
    assert called == []
    assert called == [] != [core()]
    assert len(called) == 1


def test_import_error_of_the_module_passes_and_a_later_import_still_hooks(engine: Path) -> None:
    module("import fake_engine.not_there\n", engine, "broken")
    _, called = watched("fake_engine.broken")
    for _ in range(2):
        with pytest.raises(ModuleNotFoundError) as caught:
            importlib.import_module("fake_engine.broken")
        assert caught.value.name == "fake_engine.not_there"
    assert (called, "fake_engine.broken" in sys.modules) == ([], False)
    module("FIXED = True\n", engine, "broken")
    fixed = importlib.import_module("fake_engine.broken")
    assert called == [fixed]
    assert fixed.FIXED


def test_syntax_error_of_the_module_passes(engine: Path) -> None:
    module("def broken(:\n", engine, "broken")
    _, called = watched("fake_engine.broken")
    with pytest.raises(SyntaxError) as caught:
        importlib.import_module("fake_engine.broken")
    assert caught.value.filename == str(engine / "broken.py")
    assert called == []


def test_threads_that_import_at_once_see_the_module_hooked(engine: Path, hook_on: Callable[..., HookSet]) -> None:
    (point,) = hook_on("function").points
    together = threading.Barrier(8)
    states: list[str] = []

    def run() -> None:
        together.wait()
        core().function()
        states.append(point.state)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert states == ["attached"] * 8


def test_several_watchers_of_one_module_are_all_called(engine: Path) -> None:
    calls = [watched("fake_engine.core")[1] for _ in range(3)]
    fake = core()
    assert calls == [[fake]] * 3
    assert type(fake.__loader__).__name__ == "SourceFileLoader"


def test_forgotten_watcher_is_not_called_and_leaves_the_finders(engine: Path) -> None:
    before = list(sys.meta_path)
    imports, called = watched("fake_engine.core")
    assert len(sys.meta_path) == len(before) + 1
    imports.forget()
    imports.forget()
    assert sys.meta_path == before
    core()
    assert called == []


def test_forgotten_watcher_may_watch_again(engine: Path) -> None:
    imports, called = watched("fake_engine.core")
    imports.forget()
    imports.when_imported("fake_engine.core", called.append)
    assert called == [] != [core()]
    assert len(called) == 1


def test_finder_that_asks_importlib_again_is_no_endless_loop(engine: Path) -> None:
    asked: list[str] = []

    class Asking:
        @staticmethod
        def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
            if name == "fake_engine.core" and not asked:
                asked.append(name)
                return importlib.util.find_spec(name)
            return None

    _, called = watched("fake_engine.core")
    sys.meta_path.insert(1, Asking)  # type: ignore[arg-type]
    fake = core()
    assert (asked, called) == (["fake_engine.core"], [fake])


def test_module_of_c_is_watched_like_any_other(engine: Path) -> None:
    saved = sys.modules.pop("_heapq", None)
    try:
        _, called = watched("_heapq")
        assert called == [] != [importlib.import_module("_heapq")]
        assert len(called) == 1
    finally:
        if saved is not None:
            sys.modules["_heapq"] = saved


# -------------------------------------------------------------------------------------------- descriptions


def test_hook_knows_its_module_and_its_path() -> None:
    hook = Hook(name="cache.lookup", target="engine.core.cache:Cache.lookup", body="looked_up", fact="lookups")
    assert (hook.module, hook.path) == ("engine.core.cache", "Cache.lookup")
    assert (hook.moment, hook.since) == ("after", "")
    assert HookPoint(hook, raising(AssertionError())).state == "waiting"


def test_a_function_that_had_another_name_is_hooked_under_it() -> None:
    class Cache:
        def old(self) -> int:
            return 1

    module = types.ModuleType("made_up")
    module.Cache = Cache  # type: ignore[attr-defined]
    seen: list[Any] = []
    hook = Hook(name="x", target="made_up:Cache.new", body="x", fact="", formerly="old")
    point = HookPoint(hook, lambda _: lambda result, *_: seen.append(result))
    original = Cache.old
    point.attach(module)
    assert point.state == "attached"
    assert Cache().old() == 1
    assert seen == [1]
    point.detach()
    assert Cache.old is original
