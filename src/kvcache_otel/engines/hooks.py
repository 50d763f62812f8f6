"""Hooks as data: what is hooked, where, in which versions; attached, detached, guarded and reported here.

A hook never hurts. What the engine's function returns or raises passes through untouched; what our body raises is
caught, counted and said once, and after a few times in a row the hook steps aside. What a signal handler of the
engine's raises is let through, wherever it happens to be.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from kvcache_otel.engines.post_import import PostImport
from kvcache_otel.engines.versions import is_before
from kvcache_otel.engines.wrapping import wrapped, written_out
from kvcache_otel.record.outside import let_through

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Set
    from types import ModuleType
    from typing import Literal

    Moment = Literal["after", "before", "around", "arguments"]
    State = Literal["waiting", "attached", "missing", "aside", "detached"]
    Finish = Callable[[Any, BaseException | None], None]

_logger = logging.getLogger(__name__)

STEP_ASIDE_AFTER = 5


class Hook:
    """One function of an engine that knows a fact. (A plain class: dataclasses take longer to make than all the rest.)

    Attributes:
        name: Its short name, as ``kvcache.telemetry.hook`` carries it.
        target: Where it is: ``package.module:Class.method``.
        body: The name of the adapter's method that reads the fact. It is called with the function's result first
            (``after``), or with its arguments alone (the other moments): as it was called, the first times; then with
            all of its parameters, see `written_out`.
        fact: What cannot be measured where it is missing, in words for `doctor`.
        since: The first engine version that has it; empty where every supported version does.
        needless_before: Whether versions before that do nothing of the kind, or tell it to another hook: it costs them
            no fact.
        formerly: What it was called in versions before; empty where it always had its name.
        moment: ``after`` or ``before`` the function; ``around`` it, for a body that returns what is to be called with
            its result, or None, and its exception, or None (or returns None, where this call is of no interest);
            ``arguments`` for a body that returns the positional arguments to call it with, or None to leave them.
    """

    __slots__ = ("body", "fact", "formerly", "moment", "name", "needless_before", "since", "target")

    def __init__(
        self,
        *,
        name: str,
        target: str,
        body: str,
        fact: str,
        since: str = "",
        needless_before: bool = False,
        formerly: str = "",
        moment: Moment = "after",
    ) -> None:
        self.name = name
        self.target = target
        self.body = body
        self.fact = fact
        self.since = since
        self.needless_before = needless_before
        self.formerly = formerly
        self.moment: Moment = moment

    @property
    def module(self) -> str:
        """The name of the module that defines it."""
        return self.target.partition(":")[0]

    @property
    def path(self) -> str:
        """The dotted path inside the module."""
        return self.target.partition(":")[2]


class HookPoint:
    """A hook in this process: its state, its errors, and the way back.

    Attributes:
        hook: What it is.
        state: ``waiting`` for its module to be imported, ``attached``, ``missing`` in this version, ``aside`` after too
            many failures, or ``detached``.
        why: Why it is not attached, in words.
        errors: Exceptions of ours that were caught here.
        body: What reads the fact; None while nothing is to be read.
    """

    __slots__ = (
        "_bind",
        "_changed",
        "_function",
        "_in_a_row",
        "_name",
        "_original",
        "_owner",
        "_resolve",
        "_state",
        "_wrapper",
        "body",
        "errors",
        "hook",
        "why",
    )

    def __init__(
        self, hook: Hook, resolve: Callable[[str], Callable[..., Any]], changed: Callable[[], None] = lambda: None
    ) -> None:
        """Args:
        hook: What it is.
        resolve: Gives the adapter's method by name; asked at the first call, so that attaching loads no adapter.
        changed: Called when a fact was lost here.
        """
        self.hook = hook
        self._changed = changed
        self._state: State | Callable[[], State] = "waiting"
        self.why = f"{hook.module} has not been imported"
        self.errors = 0
        self.body: Callable[..., Any] | None = None
        self._resolve = resolve
        self._in_a_row = 0
        self._owner: Any = None
        self._name = ""
        self._original: Any = None
        self._wrapper: Any = None
        self._function: Callable[..., Any] | None = None
        self._bind: Callable[[Any], Any] = _as_it_is

    @property
    def state(self) -> State:
        state = self._state  # Once: it may be detached meanwhile.
        return state() if callable(state) else state

    @state.setter
    def state(self, state: State) -> None:
        self._state = state

    def attach(self, module: ModuleType) -> None:
        """Puts the hook around the function, or says why it cannot."""
        try:
            self._attach(module)
        except Exception as error:  # Raised here, it would fail the engine's import.
            self.state, self.why = "missing", f"{self.hook.path} cannot be replaced: {_words(error)}"

    def _attach(self, module: ModuleType) -> None:
        owner, name = self.find(module)
        if owner is None:
            return
        function: Any = getattr(owner, name)
        bind: Callable[[Any], Any] = _as_it_is
        if isinstance(owner, type):
            # Called through an instance, the wrapper must be given what the function was given, and nothing more.
            defined: Any = next(vars(base)[name] for base in owner.__mro__ if name in vars(base))
            kind: Any = defined.__class__
            if issubclass(kind, classmethod):
                function, bind = defined.__func__, classmethod
            elif issubclass(kind, staticmethod) or not hasattr(kind, "__get__"):
                bind = staticmethod
        self._original = vars(owner).get(name)  # None where it is inherited: then detaching removes ours.
        self._owner, self._name = owner, name
        self._wrapper = bind(wrapped(self.hook.moment, self, function))
        setattr(owner, name, self._wrapper)
        self._function, self._bind = function, bind
        self.body = self._careful
        self.state, self.why = "attached", ""

    def find(self, module: ModuleType) -> tuple[Any, str]:
        """Returns what the function is an attribute of, None where there is no such function, and its name there."""
        owner: Any = module
        *parents, name = self.hook.path.split(".")
        for parent in parents:
            owner = getattr(owner, parent, None)
        for called in (name, self.hook.formerly):
            if called and callable(getattr(owner, called, None)):
                return owner, called
        self.state, self.why = "missing", f"{module.__name__} has no {self.hook.path}"
        return None, name

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function's stand-in, which asks the body at the hook's moment; it takes a moment to be compiled."""
        return written_out(self.hook.moment, self, function)

    def placed(self, state: Callable[[], State], why: str) -> None:
        """Says that the engine itself puts the stand-in in its place.

        Args:
            state: Says how far it is with that.
            why: Why it is not there, in words, where it is not.
        """
        self._state, self.why, self.body = state, why, self._careful

    def detach(self) -> None:
        """Gives the engine its own function back; where somebody wrapped ours, leaves a wrapper that does nothing."""
        self.body = None
        if self._wrapper is not None and self._owner.__dict__.get(self._name) is self._wrapper:
            if self._original is None:
                delattr(self._owner, self._name)
            else:
                setattr(self._owner, self._name, self._original)
        self.state, self.why = "detached", "detached"
        self._owner = self._original = self._wrapper = self._function = None

    def _careful(self, /, *args: Any, **kwargs: Any) -> Any:
        """The body's stand-in at the first call, and after a failure until it succeeds: the hot path need not ask."""
        reader = self._resolve(self.hook.body)
        result = reader(*args, **kwargs)
        if self.hook.moment == "around" and result is not None:
            return self._carefully(reader, result)  # It has succeeded when it has read the end of the call too.
        if self.hook.moment == "around" and self._in_a_row:
            return None  # A call of no interest has no end, and says nothing of those that have failed.
        self._succeeded(reader)
        return result

    def _carefully(self, reader: Callable[..., Any], finish: Callable[..., Any]) -> Callable[..., Any]:
        def finished(result: Any, error: BaseException | None) -> None:
            finish(result, error)
            self._succeeded(reader)

        return finished

    def _succeeded(self, reader: Callable[..., Any]) -> None:
        self._in_a_row = 0
        if self.body is not None:  # Nobody detached it meanwhile.
            self.body = reader
            if self._function is not None:
                self._write_out()

    def _write_out(self) -> None:
        """Puts the faster stand-in in the place of the one that took no time to make, while the engine was imported."""
        function, owner, name, first = self._function, self._owner, self._name, self._wrapper
        self._function = None
        if function is None or owner is None or owner.__dict__.get(name) is not first:
            return  # Somebody has put theirs around it.
        self._wrapper = faster = self._bind(self.wrap(function))
        setattr(owner, name, faster)
        if self.body is None:  # Detached meanwhile.
            setattr(owner, name, first)

    def failed(self, error: Exception) -> None:
        """Counts a failure of ours; says the first; steps aside after a few in a row. Raises what is none of ours."""
        let_through(error)
        self.errors += 1
        self._in_a_row += 1
        if self.body is not None:  # Nobody detached it meanwhile.
            self.body = self._careful
        if self._in_a_row >= STEP_ASIDE_AFTER and self.body is not None:
            self.body = None
            self.state = "aside"
            self.why = f"stepped aside after {self._in_a_row} failures in a row, last: {_words(error)}"
        try:
            self._changed()
        except Exception as of_adapter:  # Whoever hears of it is as fallible as the hook.
            let_through(of_adapter)
        if self.errors == 1:
            try:
                _logger.warning(
                    "kvcache: the hook %s failed and was skipped: %s. The engine is not affected; the hook steps aside "
                    "after %d failures in a row (kvcache.telemetry.errors counts them)",
                    self.hook.name,
                    _words(error),
                    STEP_ASIDE_AFTER,
                    exc_info=_logger.isEnabledFor(logging.DEBUG),
                )
            except Exception as of_log:  # A log that raises must not hurt the engine either.
                let_through(of_log)


def _as_it_is(function: Any) -> Any:
    return function


def _words(error: Exception) -> str:
    try:
        return repr(error)
    except BaseException as of_repr:  # A repr of somebody's may raise whatever a reader may.
        let_through(of_repr)
        return type(error).__name__


class HookSet:
    """The hooks of one engine in this process."""

    def __init__(
        self,
        hooks: Iterable[Hook],
        resolve: Callable[[str], Callable[..., Any]],
        place: Callable[[HookPoint, ModuleType], None] = HookPoint.attach,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """Args:
        hooks: The engine's table.
        resolve: Gives a body of the engine's adapter by name, at the first call that needs it.
        place: Puts a hook into its module, for an engine that has a way of its own to be hooked. Must not raise.
        changed: Called when a hook has lost a fact.
        """
        self._hooks = tuple(hooks)
        self._place = place
        self._changed = changed
        self._resolve = resolve
        self._imports = PostImport()
        self.points: tuple[HookPoint, ...] = ()

    @property
    def attached(self) -> bool:
        """Whether `attach` was called, and `detach` was not since."""
        return bool(self.points)

    def lost(self, version: str) -> Set[str]:
        """Returns the names of the hooks that see nothing of what the engine does.

        Args:
            version: The engine's own; what came with a later one is not missed.
        """
        return {
            point.hook.name
            for point in self.points
            if (state := point.state) == "aside" or (state == "missing" and not is_before(version, point.hook.since))
        }

    def failed(self) -> Set[str]:
        """Returns the names of the hooks that have missed something: what they book is not all there is."""
        return {point.hook.name for point in self.points if point.errors}

    def attach(self) -> None:
        """Hooks what is imported already, and the rest when it is; a second call does nothing."""
        if self.points:
            return
        self.points = tuple(HookPoint(hook, self._resolve, self._changed) for hook in self._hooks)
        for point in self.points:
            self._imports.when_imported(point.hook.module, lambda module, point=point: self._place(point, module))

    def detach(self) -> None:
        """Gives the engine its own functions back; a second call does nothing."""
        self._imports.forget()
        for point in reversed(self.points):  # Where two are on one function, the outer one comes off first.
            point.detach()
        self.points = ()
