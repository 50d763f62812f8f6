"""Hooks through SGLang's plugin registry, of which there is a stand-in here: each is called once, ours and others'."""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import sys
import traceback
from typing import TYPE_CHECKING, Any

import pytest

from kvcache_otel.engines.hooks import STEP_ASIDE_AFTER, Hook, HookPoint, HookSet
from kvcache_otel.engines.sglang import registry
from tests.cli import fake_engine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

REGISTRY = "sglang.srt.plugins.hook_registry"
TARGET = "sglang.srt.core.Cache.lookup"

# What SGLang 0.5.18 to 0.5.23 do with hooks, as far as one sees it: the order, what is ignored, what is imported.
HOOK_REGISTRY = """
import contextvars, enum, functools, logging, pkgutil, sys, types
from collections import defaultdict, namedtuple

logger = logging.getLogger(__name__)
HookSource = namedtuple("HookSource", "plugin_name dist_name")
HookType = enum.Enum("HookType", {name.upper(): name for name in ("before", "after", "around", "replace")})
_current_plugin_source = contextvars.ContextVar("_current_plugin_source", default=None)


class HookRegistry:
    _hooks = defaultdict(list)
    _patched = set()

    @classmethod
    def register(cls, target, hook, hook_type=HookType.AFTER, *, source=None):
        if isinstance(hook, type) and hook_type is not HookType.REPLACE:
            raise TypeError("a class can only replace")
        cls._hooks[target].append((hook_type, hook, source or _current_plugin_source.get()))

    @classmethod
    def apply_hooks(cls):
        def replaces_class(hooks):
            return any(isinstance(hook, type) and kind is HookType.REPLACE for kind, hook, _ in hooks)

        for target, hooks in sorted(cls._hooks.items(), key=lambda item: (not replaces_class(item[1]), item[0])):
            if target in cls._patched:
                continue
            try:
                cls._apply_target(target, hooks)
                cls._patched.add(target)
            except Exception:
                logger.exception("Failed to apply hooks to %s", target)

    @classmethod
    def _apply_target(cls, target, hooks):
        path, _, name = target.rpartition(".")
        owner = pkgutil.resolve_name(path)
        original, bind = getattr(owner, name), None
        if isinstance(owner, type) and isinstance(raw := vars(owner).get(name), (classmethod, staticmethod)):
            original, bind = raw.__func__, type(raw)
        if isinstance(original, type) and any(kind is not HookType.REPLACE for kind, _, _ in hooks):
            raise TypeError("a class can only be replaced")
        wrapped = original
        for kind, hook, _ in sorted(hooks, key=lambda entry: entry[0] is not HookType.REPLACE):
            wrapped = hook if isinstance(hook, type) else _wrap(wrapped, hook, kind)
        if bind is not None:
            wrapped = bind(wrapped)
        setattr(owner, name, wrapped)
        if wrapped is not original:
            for module in list(sys.modules.values()):
                if isinstance(module, types.ModuleType) and module is not owner:
                    for key, value in list(vars(module).items()):
                        if value is original:
                            setattr(module, key, wrapped)


def _wrap(original, hook, kind):
    @functools.wraps(original)
    def wrapper(*args, **kwargs):
        if kind is HookType.REPLACE:
            return hook(*args, **kwargs)
        if kind is HookType.AROUND:
            return hook(original, *args, **kwargs)
        if kind is HookType.BEFORE:
            args, kwargs = hook(*args, **kwargs) or (args, kwargs)
            return original(*args, **kwargs)
        result = original(*args, **kwargs)
        changed = hook(result, *args, **kwargs)
        return result if changed is None else changed

    return wrapper
"""

LOADER = """
from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, _current_plugin_source

PLUGINS = []  # Where SGLang has entry points.
_plugins_loaded = False


def load_plugins():
    global _plugins_loaded
    if _plugins_loaded:
        return
    _plugins_loaded = True
    for name, plugin in PLUGINS:
        token = _current_plugin_source.set(HookSource(name, name))
        try:
            plugin()
        finally:
            _current_plugin_source.reset(token)
    HookRegistry.apply_hooks()
"""

CORE = '''
class Base:
    def inherited(self, number):
        return number + 1


class Cache(Base):
    def lookup(self, number, *, factor=2):
        """Look a number up."""
        return number * factor

    def insert(self, number):
        return -number

    def fail(self, number):
        try:
            raise KeyError("the cause")
        except KeyError as cause:
            raise LookupError(number) from cause

    @staticmethod
    def static(number):
        return number + 2

    @classmethod
    def of_class(cls, number):
        return (cls.__name__, number)
'''


@pytest.fixture(autouse=True)
def sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder `sglang/srt` of a made-up SGLang, which has not been imported, and in which we have no place yet."""
    fake_engine.forget(monkeypatch)
    folder = tmp_path / "sglang" / "srt"
    (folder / "plugins").mkdir(parents=True)
    for package in (folder.parent, folder):
        (package / "__init__.py").touch()
    (folder / "core.py").write_text(CORE)
    (folder / "plugins" / "__init__.py").write_text(LOADER)
    (folder / "plugins" / "hook_registry.py").write_text(HOOK_REGISTRY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_places", {})
    importlib.invalidate_caches()
    finders = list(sys.meta_path)
    yield folder
    sys.meta_path[:] = finders
    for name in fake_engine.imported():
        del sys.modules[name]


class Seen:
    """An adapter whose bodies note what they are given, and fail where they are told to."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.error: Exception | None = None

    def resolve(self, _: str) -> Callable[..., Any]:
        return self.note

    def note(self, *args: Any, **kwargs: Any) -> None:
        if self.error is not None:
            raise self.error
        self.calls.append((*args, kwargs) if kwargs else args)


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture
def hook(seen: Seen) -> Iterator[Callable[..., HookSet]]:
    """Makes hooks on functions of `core` and attaches them; they are taken off when the test ends."""
    made: list[HookSet] = []

    def hook(*paths: str, moment: Any = "after", module: str = "sglang.srt.core") -> HookSet:
        hooks = [Hook(name=path, target=f"{module}:{path}", body="note", fact="", moment=moment) for path in paths]
        made.append(HookSet(hooks, seen.resolve, registry.place))
        made[-1].attach()
        return made[-1]

    yield hook
    for hooks in made:
        hooks.detach()


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """SGLang logs no error unless the test says so by clearing them."""
    caplog.set_level(logging.DEBUG)
    yield
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


def core() -> Any:
    return importlib.import_module("sglang.srt.core")


def theirs() -> Any:
    """SGLang's registry."""
    return importlib.import_module(REGISTRY)


def load(*plugins: Callable[[], object]) -> None:
    """Lets SGLang load some plugins, in this order."""
    package = importlib.import_module("sglang.srt.plugins")
    package.PLUGINS.extend((f"plugin {number}", plugin) for number, plugin in enumerate(plugins))
    package.load_plugins()


def registered(target: str = TARGET) -> list[Any]:
    return list(theirs().HookRegistry._hooks.get(target, ()))


def registering(target: str, function: Callable[..., Any], kind: str = "AROUND") -> Callable[[], None]:
    """Another plugin, with one hook."""

    def plugin() -> None:
        module = theirs()
        module.HookRegistry.register(target, function, module.HookType[kind])

    return plugin


def adding(amount: int) -> Callable[..., Any]:
    """A hook of another plugin's that adds to the result each time it is called."""
    return lambda original, *args, **kwargs: original(*args, **kwargs) + amount


# -- while SGLang loads its plugins ------------------------------------------------------------------------------------


def test_a_module_that_is_there_is_registered_and_hooked_when_all_are_loaded(
    hook: Callable[..., HookSet], seen: Seen
) -> None:
    cache = core().Cache()
    made: list[HookSet] = []
    states: list[str] = []
    load(lambda: made.append(hook("Cache.lookup")), lambda: states.append(made[0].points[0].state))
    (point,) = made[0].points
    assert states == ["waiting"]
    assert (point.state, len(registered())) == ("attached", 1)
    assert cache.lookup(4, factor=3) == 12
    assert seen.calls == [(12, cache, 4, {"factor": 3})]
    assert registered()[0][2].dist_name == "kvcache-otel"


def test_a_module_that_another_plugin_imports_is_registered_too(hook: Callable[..., HookSet], seen: Seen) -> None:
    made: list[HookSet] = []
    load(lambda: made.append(hook("Cache.lookup")), core)
    (point,) = made[0].points
    assert (point.state, len(registered())) == ("attached", 1)
    assert core().Cache().lookup(4) == 8
    assert len(seen.calls) == 1


@pytest.mark.parametrize("first", ["ours", "theirs"])
def test_two_plugins_on_one_function_are_both_called_once(hook: Callable[..., HookSet], seen: Seen, first: str) -> None:
    core()
    plugins = [lambda: hook("Cache.lookup"), registering(TARGET, adding(100))]
    load(*(plugins if first == "ours" else reversed(plugins)))
    assert core().Cache().lookup(4) == 108
    assert len(seen.calls) == 1


def test_a_class_that_another_plugin_replaces_has_our_hook(hook: Callable[..., HookSet], seen: Seen) -> None:
    def replace() -> None:
        class Faster(core().Cache):
            def lookup(self, number: int, *, factor: int = 2) -> int:
                return super().lookup(number, factor=factor) + 1000

        registering("sglang.srt.core.Cache", Faster, "REPLACE")()

    original = core().Cache
    load(lambda: hook("Cache.lookup", "Cache.inherited"), replace)
    cache = core().Cache()
    assert type(cache) is not original
    assert (cache.lookup(4), cache.inherited(1)) == (1008, 2)
    assert seen.calls == [(1008, cache, 4, {"factor": 2}), (2, cache, 1)]


def test_a_function_that_another_plugin_replaces_has_our_hook(hook: Callable[..., HookSet], seen: Seen) -> None:
    core()
    load(lambda: hook("Cache.lookup"), registering(TARGET, lambda self, number: number + 7, "REPLACE"))
    cache = core().Cache()
    assert cache.lookup(4) == 11
    assert seen.calls == [(11, cache, 4)]


def test_a_function_that_is_not_there_is_missing_and_sglang_never_hears_of_it(hook: Callable[..., HookSet]) -> None:
    core()
    made: list[HookSet] = []
    load(lambda: made.append(hook("Cache.gone", "Gone.lookup", "Cache.lookup")))
    states = [(point.state, point.why) for point in made[0].points]
    assert states == [
        ("missing", "sglang.srt.core has no Cache.gone"),
        ("missing", "sglang.srt.core has no Gone.lookup"),
        ("attached", states[2][1]),
    ]
    assert list(theirs().HookRegistry._hooks) == [TARGET]


def test_what_sglang_cannot_put_in_its_place_is_missing_and_says_where_to_look(
    hook: Callable[..., HookSet], caplog: pytest.LogCaptureFixture
) -> None:
    """Here the class loses its function between being asked for it and the end of loading."""
    core()
    made: list[HookSet] = []
    load(lambda: made.append(hook("Cache.lookup", "Cache.insert")), lambda: delattr(core().Cache, "lookup"))
    lost, kept = made[0].points
    assert (lost.state, kept.state) == ("missing", "attached")
    assert lost.why == "SGLang's plugin loader did not put it in its place; its own log says why"
    assert core().Cache().insert(3) == -3
    (error,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert error.getMessage() == f"Failed to apply hooks to {TARGET}"
    caplog.clear()


def test_nothing_but_what_cannot_be_put_in_its_place_is_missing(
    hook: Callable[..., HookSet], caplog: pytest.LogCaptureFixture
) -> None:
    core()
    made: list[HookSet] = []
    load(lambda: made.append(hook("Cache.lookup")), lambda: delattr(core().Cache, "lookup"))
    assert made[0].points[0].state == "missing"
    caplog.clear()


def test_a_function_that_was_hooked_before_loading_ended_has_ours_around_it(
    hook: Callable[..., HookSet], seen: Seen
) -> None:
    """A plugin that does not wait for the loader: what SGLang has applied, it ignores from then on."""
    core()
    made: list[HookSet] = []
    load(
        registering(TARGET, adding(100)),
        lambda: theirs().HookRegistry.apply_hooks(),
        lambda: made.append(hook("Cache.lookup")),
    )
    cache = core().Cache()
    assert (cache.lookup(4), made[0].points[0].state) == (108, "attached")
    assert seen.calls == [(108, cache, 4)]


# -- while SGLang applies hooks, which imports modules -----------------------------------------------------------------


def test_another_plugins_hook_on_the_same_function_imports_its_module(hook: Callable[..., HookSet], seen: Seen) -> None:
    made: list[HookSet] = []
    load(lambda: made.append(hook("Cache.lookup")), registering(TARGET, adding(100)))
    cache = core().Cache()
    assert cache.lookup(4) == 108
    assert len(seen.calls) == 1
    assert made[0].points[0].state == "attached"


@pytest.mark.parametrize("other", ["fail", "insert", "of_class"])
def test_another_plugins_hook_beside_ours_imports_its_module(
    hook: Callable[..., HookSet], seen: Seen, other: str
) -> None:
    """Its hooks are called once, whether SGLang comes to them before ours or after."""
    called: list[str] = []

    def around(original: Callable[..., Any], *args: Any) -> Any:
        called.append(other)
        return original(*args)

    made: list[HookSet] = []
    load(lambda: made.append(hook("Cache.lookup")), registering(f"sglang.srt.core.Cache.{other}", around))
    cache = core().Cache()
    try:
        getattr(cache, other)(1)
    except LookupError:
        assert other == "fail"
    assert called == [other]
    assert cache.lookup(4) == 8
    assert (len(seen.calls), made[0].points[0].state) == (1, "attached")


def test_another_plugins_class_for_ours_imports_its_module(hook: Callable[..., HookSet], seen: Seen) -> None:
    class Other:
        def lookup(self, number: int) -> int:
            return number + 7

    load(
        lambda: hook("Cache.lookup", "Cache.insert"),
        registering("sglang.srt.core.Cache", Other, "REPLACE"),
        registering("sglang.srt.core.Base", Other, "REPLACE"),
        registering("sglang.srt.core.Cache.lookup", adding(100)),
    )
    cache = core().Cache()
    assert (type(cache), cache.lookup(4)) == (Other, 111)
    assert len(seen.calls) == 1


def test_another_plugins_function_for_ours_imports_its_module(hook: Callable[..., HookSet], seen: Seen) -> None:
    load(
        lambda: hook("Cache.lookup"),
        registering("sglang.srt.core.Cache.insert", adding(100)),
        registering(TARGET, lambda self, number: number + 7, "REPLACE"),
    )
    cache = core().Cache()
    assert (cache.lookup(4), cache.insert(1)) == (11, 99)
    assert seen.calls == [(11, cache, 4)]


# -- before and after --------------------------------------------------------------------------------------------------


def test_a_module_that_is_imported_later_is_hooked_at_once(hook: Callable[..., HookSet], seen: Seen) -> None:
    made: list[HookSet] = []
    load(lambda: made.append(hook("Cache.lookup", "Cache.gone")))
    found, gone = made[0].points
    assert (found.state, found.why) == ("waiting", "sglang.srt.core has not been imported")
    cache = core().Cache()
    assert (found.state, gone.state, gone.why) == ("attached", "missing", "sglang.srt.core has no Cache.gone")
    assert cache.lookup(4) == 8
    assert seen.calls == [(8, cache, 4)]


def test_a_module_that_is_imported_before_loading_leaves_the_place_to_others(
    hook: Callable[..., HookSet], seen: Seen
) -> None:
    """As under `opentelemetry-instrument`: what SGLang has applied by then, it ignores from then on."""
    hooks = hook("Cache.lookup")
    cache = core().Cache()
    assert hooks.points[0].state == "attached"
    load(registering(TARGET, adding(100)))
    assert cache.lookup(4) == 108
    assert len(seen.calls) == 1


def test_a_hook_of_somebodys_that_is_applied_later_is_around_ours(hook: Callable[..., HookSet], seen: Seen) -> None:
    load(lambda: hook("Cache.lookup"))
    cache = core().Cache()
    registering(TARGET, adding(100))()
    theirs().HookRegistry.apply_hooks()
    assert cache.lookup(4) == 108
    assert len(seen.calls) == 1


@pytest.mark.parametrize("content", ["never imported", "", "_current_plugin_source = HookRegistry = None"])
def test_without_a_registry_that_can_be_used_the_hook_is_put_in_its_place_as_elsewhere(
    sglang: Path, hook: Callable[..., HookSet], seen: Seen, content: str
) -> None:
    if content != "never imported":
        (sglang / "plugins" / "__init__.py").write_text("")
        (sglang / "plugins" / "hook_registry.py").write_text(content)
        theirs()
    before = core().Cache.lookup
    hooks = hook("Cache.lookup", "Cache.gone")
    cache = core().Cache()
    assert cache.lookup(4) == 8
    assert [point.state for point in hooks.points] == ["attached", "missing"]
    assert seen.calls == [(8, cache, 4)]
    hooks.detach()
    assert core().Cache.lookup is before
    assert (REGISTRY in sys.modules) is (content != "never imported"), "nothing is imported for our sake"


# -- coming off, and coming back ---------------------------------------------------------------------------------------


@pytest.fixture(params=["registered", "imported later"])
def point(request: pytest.FixtureRequest, hook: Callable[..., HookSet]) -> tuple[HookSet, HookPoint]:
    """A hook on `Cache.lookup`, put there by SGLang or, because its module came late, without it."""
    made: list[HookSet] = []
    if request.param == "registered":
        core()
    load(lambda: made.append(hook("Cache.lookup")))
    core()
    assert len(registered()) == (request.param == "registered")
    return made[0], made[0].points[0]


def test_what_is_detached_passes_through_and_comes_back(point: tuple[HookSet, HookPoint], seen: Seen) -> None:
    hooks, first = point
    cache, count = core().Cache(), len(registered())
    for turn in range(1, 4):
        assert cache.lookup(4) == 8
        assert len(seen.calls) == turn
        hooks.detach()
        assert cache.lookup(4) == 8
        assert len(seen.calls) == turn
        hooks.attach()
        assert hooks.points[0].state == "attached"
    assert first.state == "detached"
    assert len(registered()) == count


def test_what_was_detached_before_the_first_call_comes_back(point: tuple[HookSet, HookPoint], seen: Seen) -> None:
    hooks, _ = point
    hooks.detach()
    hooks.attach()
    assert core().Cache().lookup(4) == 8
    assert len(seen.calls) == 1


def test_what_is_detached_by_the_call_that_it_watches(point: tuple[HookSet, HookPoint], seen: Seen) -> None:
    hooks, _ = point
    note = seen.note
    seen.note = lambda *args, **_: (note(*args), hooks.detach(), hooks.attach())  # type: ignore[method-assign]
    cache = core().Cache()
    assert [cache.lookup(number) for number in range(3)] == [0, 2, 4]
    assert len(seen.calls) == 3


def test_exceptions_of_ours_are_counted_and_the_engine_goes_on(point: tuple[HookSet, HookPoint], seen: Seen) -> None:
    _, hooked = point
    seen.error = ValueError("ours")
    cache = core().Cache()
    assert [cache.lookup(number) for number in range(9)] == list(range(0, 18, 2))
    assert (hooked.state, hooked.errors) == ("aside", STEP_ASIDE_AFTER)
    assert hooked.why.startswith("stepped aside after")


@pytest.mark.parametrize("moment", ["after", "before", "around", "arguments"])
def test_exceptions_of_the_engine_pass_unchanged(hook: Callable[..., HookSet], seen: Seen, moment: str) -> None:
    core()
    made: list[HookSet] = []
    load(lambda: made.append(hook("Cache.fail", moment=moment)))
    with pytest.raises(LookupError) as caught:
        core().Cache().fail(7)
    error = caught.value
    assert error.args == (7,)
    assert isinstance(error.__cause__, KeyError)
    assert error.__context__ is error.__cause__
    assert traceback.extract_tb(error.__traceback__)[-1].name == "fail"
    assert (len(seen.calls), made[0].points[0].errors) == (moment != "after", 0)


def test_all_kinds_of_functions_are_called_as_before(hook: Callable[..., HookSet], seen: Seen) -> None:
    signature = inspect.signature(core().Cache.lookup)
    load(lambda: hook("Cache.lookup", "Cache.inherited", "Cache.static", "Cache.of_class"))
    fake = core()
    cache = fake.Cache()
    assert (cache.inherited(1), fake.Cache.static(1), cache.static(1)) == (2, 3, 3)
    assert (fake.Cache.of_class(1), cache.of_class(1)) == (("Cache", 1), ("Cache", 1))
    assert fake.Base().inherited(1) == 2
    assert seen.calls == [
        (2, cache, 1),
        (3, 1),
        (3, 1),
        (("Cache", 1), fake.Cache, 1),
        (("Cache", 1), fake.Cache, 1),
    ]
    assert inspect.signature(fake.Cache.lookup) == signature
    assert (fake.Cache.lookup.__name__, fake.Cache.lookup.__doc__) == ("lookup", "Look a number up.")


def test_no_two_hooks_of_the_table_are_on_one_function() -> None:
    """A place is one hook's."""
    targets = [hook.target for hook in fake_engine.table("sglang").HOOKS]
    assert len(set(targets)) == len(targets)


# -- SGLang's wrapper out of the way -----------------------------------------------------------------------------------


def test_a_hook_that_is_alone_is_called_without_sglangs_wrapper(hook: Callable[..., HookSet], seen: Seen) -> None:
    original = core().Cache.lookup
    made: list[HookSet] = []
    load(lambda: made.append(hook("Cache.lookup")))
    cache = core().Cache()
    assert [cache.lookup(number) for number in range(3)] == [0, 2, 4]
    assert len(seen.calls) == 3
    stand_in = vars(core().Cache)["lookup"]
    assert stand_in.__wrapped__ is original
    assert stand_in.__code__.co_filename.startswith("<kvcache-otel: after f(self, number")
    made[0].detach()
    assert cache.lookup(4) == 8
    again = hook("Cache.lookup")
    assert [cache.lookup(number) for number in range(3)] == [0, 2, 4]
    assert len(seen.calls) == 6
    assert (again.points[0].state, len(registered())) == ("attached", 1)


def test_a_hook_that_is_not_alone_leaves_the_chain_as_it_is(hook: Callable[..., HookSet], seen: Seen) -> None:
    core()
    load(lambda: hook("Cache.lookup"), registering(TARGET, adding(100)))
    chain = vars(core().Cache)["lookup"]
    assert [core().Cache().lookup(4) for _ in range(3)] == [108] * 3
    assert vars(core().Cache)["lookup"] is chain
    assert len(seen.calls) == 3


def test_a_hook_that_somebody_has_wrapped_goes_around_that(hook: Callable[..., HookSet], seen: Seen) -> None:
    core()
    made: list[HookSet] = []
    load(lambda: made.append(hook("Cache.lookup")))
    cache = core().Cache()
    cache.lookup(4)
    ours = core().Cache.lookup
    core().Cache.lookup = lambda self, number: ours(self, number) + 1
    made[0].detach()
    hook("Cache.lookup")
    assert cache.lookup(4) == 9
    assert seen.calls[1:] == [(9, cache, 4)]


def test_a_wrapper_around_sglangs_is_not_taken_for_it(hook: Callable[..., HookSet], seen: Seen) -> None:
    """Somebody else's may say that it wraps the innermost function, and must stay."""
    core()
    load(lambda: hook("Cache.lookup"))
    sglangs = core().Cache.lookup

    @functools.wraps(inspect.unwrap(sglangs))
    def theirs_around(*args: Any, **kwargs: Any) -> Any:
        return sglangs(*args, **kwargs) + 1

    core().Cache.lookup = theirs_around
    assert [core().Cache().lookup(4) for _ in range(3)] == [9] * 3
    assert len(seen.calls) == 3


def test_what_somebody_kept_of_sglangs_wrapper_counts_nothing_twice(hook: Callable[..., HookSet], seen: Seen) -> None:
    core()
    made: list[HookSet] = []
    load(lambda: made.append(hook("Cache.lookup")))
    kept = core().Cache.lookup
    core().Cache().lookup(4)
    core().Cache.lookup = functools.wraps(kept)(lambda *args, **kwargs: kept(*args, **kwargs))
    for again in range(3):
        made[-1].detach()
        made.append(hook("Cache.lookup"))
        seen.calls.clear()
        assert core().Cache().lookup(4) == 8
        assert len(seen.calls) == 1, again
