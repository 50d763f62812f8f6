"""Facts: what one method of a cache of one's own tells, and how it is read from what it returns and was called with.

A reader is a callable of the method's result and of its `Call`, or a value that is always so. A fact of a method that
`protocols.py` names may have none at all: then the result is read by the attributes that are named there, and None says
that nothing happened.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

from kvcache_otel import semconv
from kvcache_otel.engines.generic import faults
from kvcache_otel.record.labels import printable
from kvcache_otel.record.outside import let_through

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvcache_otel.engines.generic.call import Call, Read
    from kvcache_otel.engines.generic.rows import Rows
    from kvcache_otel.engines.hooks import Finish
    from kvcache_otel.spec import MetricSpec

    Tell = Callable[[Any, Call], None]
    Begin = Callable[[Call], Finish | None]


# The readers of amounts, whichever fact has them.
QUANTITIES = ("tokens", "bytes", "hit", "loaded", "fulfilled", "unfulfilled", "prompt", "served", "blocks", "times")

# The readers of what differs from call to call: one value for all of them would be a mistake.
READERS = ("when", "key", "keys", "seconds", "error", "requested")


@dataclass(frozen=True, kw_only=True)
class Fact:
    """What one method tells.

    Attributes:
        when: Says of a call whether anything happened; None where something always does, or where the result, read by
            its own attributes, is None if not.
    """

    REQUIRED: ClassVar[tuple[str, ...]] = ()
    """The readers that are given all together, or none of them."""
    WHAT: ClassVar[str] = ""
    """What cannot be measured without it, in words, with the fact's own attributes in braces."""

    when: Read | None = None

    def __post_init__(self) -> None:
        for name in QUANTITIES:
            given = getattr(self, name, None)
            if given is not None and not callable(given):
                faults.quantity(f"{type(self).__name__}: {name}", given)
        for name in READERS:
            given = getattr(self, name, None)
            if given is not None and not callable(given):
                said = printable(given)
                raise TypeError(f"{type(self).__name__}: {name}= must be a callable of the call, and not {said!r}")
        missing = [name for name in self.REQUIRED if getattr(self, name) is None]
        if missing and len(missing) < len(self.REQUIRED):
            raise TypeError(
                f"{type(self).__name__} needs {'= and '.join(missing)}= as well: what its method returns is read by "
                "its own attributes in all of this, or in nothing of it"
            )

    @property
    def what(self) -> str:
        """What cannot be measured without it, in words."""
        return self.WHAT.format_map(vars(self))

    @property
    def reads_attributes(self) -> bool:
        """Whether what its method returns is read by its own attributes."""
        return bool(self.REQUIRED) and getattr(self, self.REQUIRED[0]) is None

    def tell(self, rows: Rows) -> Tell:
        """Returns what hears of each call that has ended well.

        Raises:
            ValueError: It names a tier that was not declared, or what the catalogue does not have.
        """
        raise NotImplementedError

    def begin(self, rows: Rows) -> Begin | None:
        """Returns what hears of each call that begins, for a fact that takes time; else None, and `tell` is asked."""
        return None

    def lost(self, rows: Rows, *, aside: bool) -> None:
        """Ends the rows that are wrong since a call was missed.

        Args:
            rows: The object's rows.
            aside: Whether all further calls will be.
        """

    def reader(self, name: str) -> Callable[[Any, Call], Any]:
        """Returns what reads one quantity."""
        return reading(getattr(self, name), name)

    def happened(self) -> Callable[[Any, Call], bool] | None:
        """Returns what says of a call whether anything happened; None where something always does."""
        if self.when is not None:
            return reading(self.when, "when")
        if self.reads_attributes:
            return lambda result, _: result is not None
        return None


def reading(given: Any, attribute: str) -> Callable[[Any, Call], Any]:
    """Returns a reader: the one that was given, one of a value that is always so, or one of the result's attribute."""
    if given is None:
        return lambda result, _: getattr(result, attribute)
    if callable(given):
        return given
    return lambda _, __: given


def optional(given: Any) -> Callable[[Any, Call], Any] | None:
    """Returns a reader as `reading` does; None where none was given."""
    return None if given is None else reading(given, "")


def kept(read: Callable[[Any, Call], Any]) -> Callable[[Any, Call], Any]:
    """Returns a reader of what is gone through, which refuses an iterator that the engine was to be given.

    What is read of one is not there any more for whoever called the method.
    """

    def reader(result: Any, call: Call) -> Any:
        found = read(result, call)
        if isinstance(result, Iterator) and isinstance(found, Iterator):  # Another one that is made of it reads it.
            raise TypeError(f"a {type(cast('Any', result)).__name__} is gone through once, by the caller: not read")
        return found

    return reader


def caught(error: BaseException) -> BaseException:
    """Returns what to raise in place of what a reader has raised, so that a hook may catch it.

    A panic of Rust code, say, is no `Exception`, and would get through to the engine. What comes from outside may.
    """
    try:
        let_through(error)
        return error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {printable(error)}")
    finally:
        del error  # As in `let_through`.


def check_reasons(spec: MetricSpec, given: str | Iterable[str]) -> tuple[str, ...]:
    """Returns reasons that a metric has.

    Raises:
        ValueError: It does not have one of them.
        TypeError: They are none at all.
    """
    reasons = faults.several("reasons=", given)
    members = spec.values[semconv.KVCACHE_REASON]
    for reason in reasons:
        if not isinstance(reason, str) or reason not in members:
            raise ValueError(
                f"{spec.name} has no reason {printable(reason)!r}: it is one of {', '.join(sorted(members))}"
            )
    return reasons
