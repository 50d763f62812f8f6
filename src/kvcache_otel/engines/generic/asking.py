"""Quantities of an object that are asked for when somebody reads, on the reader's thread."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from kvcache_otel.record.labels import printable
from kvcache_otel.semconv import Reason

if TYPE_CHECKING:
    from kvcache_otel.record.probe import CacheProbe
    from kvcache_otel.spec import MetricSpec

Quantity = int | float | str | Callable[[Any], Any]

# As the cells have it: what exporters cannot encode.
_TOO_MUCH = 1 << 63


class Row(NamedTuple):
    """One row that is made of a gauge's quantities.

    Attributes:
        spec: Its metric.
        labels: Its attributes.
        make: Makes its value of the quantities.
    """

    spec: MetricSpec
    labels: dict[str, str | int]
    make: Callable[..., float]


class Gauge:
    """One quantity, or several that are asked together so that they fit, and the rows made of them.

    A quantity that cannot be told has no row; that is counted and said once, until it can be told again.
    """

    __slots__ = (
        "__weakref__",
        "_asked",
        "_below",
        "_failed",
        "_object",
        "_parts",
        "_probe",
        "_values",
        "quantities",
        "what",
    )

    def __init__(self, probe: CacheProbe, what: str, owner: Any, *quantities: Quantity, parts: int = 0) -> None:
        """Args:
        probe: The cache's probe.
        what: What it is, in words.
        owner: The object that is asked.
        quantities: What is asked for.
        parts: Of how many quantities the answer is made, where there is one for all; 0 where each is asked for.

        Raises:
            TypeError: One of them is no quantity.
            ValueError: One that is always so is negative, or no number.
        """
        quantities = tuple(_checked(what, quantity) for quantity in quantities)
        self._probe = probe
        self._object = weakref.ref(owner)
        self.what = what
        self.quantities = quantities
        self._parts = parts
        self._failed = self._below = False
        self._values: tuple[float, ...] | None = None
        self._asked: set[int] = set()

    def missing(self) -> str:
        """Returns what the object lacks of what was named, in words; empty where it lacks nothing."""
        for quantity in self.quantities:
            if isinstance(quantity, str):
                try:
                    _walk(self._object(), quantity)
                except AttributeError as error:
                    return f"{type(self._object()).__name__} has no {quantity}: {error}"
                except Exception:  # It is there, and says what is wrong when it is asked.
                    return ""
        return ""

    def show(self, number: int, row: Row) -> None:
        """Adds a row, which has a number among those of this gauge."""
        this = weakref.ref(self)  # The recorder must keep nothing alive that the object does not.

        def read() -> float | None:
            gauge = this()
            return None if gauge is None else gauge.read(number, row.make)

        self._probe.observe(row.spec, row.labels, read, owner=self)

    def read(self, number: int, make: Callable[..., float]) -> float | None:
        """Returns the value of one row. All rows that are read in one go are made of the same answers."""
        if self._values is None or number in self._asked:
            self._values = self._ask()
            self._asked.clear()
        self._asked.add(number)
        values = self._values
        if values is None:
            return None
        value = make(*values)
        if value < 0:
            if not self._below:
                self._below = True
                self._probe.accounting_error(Reason.CONSERVATION if len(values) > 1 else Reason.UNDERFLOW)
            return 0
        return value

    def _ask(self) -> tuple[float, ...] | None:
        owner = self._object()
        if owner is None:
            return None
        try:
            answers = [ask(owner, quantity) for quantity in self.quantities]
            values = tuple(map(_number, _apart(answers[0], self._parts) if self._parts else answers))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # As `Recorder` has it: it is not about the reader's thread.
            if not self._failed:
                self._failed = True
                self._probe.gauge_failed(self.what, error)
            return None
        self._failed = False
        if min(values, default=0) >= 0 and (len(values) == 1 or balance(*values) >= 0):
            self._below = False
        return values


def _checked(what: str, quantity: Any) -> Quantity:
    """Returns a quantity, as a number of Python's where it is one of numpy's."""
    if callable(quantity) or isinstance(quantity, str):
        return quantity
    said = printable(quantity)
    if isinstance(quantity, bool) or not (hasattr(quantity, "__index__") or hasattr(quantity, "__float__")):
        raise TypeError(f"{what}: {said!r} is no number, no name of an attribute and no callable")
    try:
        number = quantity if type(quantity) is int else _number(quantity)
    except Exception:
        number = -1
    if not 0 <= number < _TOO_MUCH:
        raise ValueError(f"{what}: {said} is no quantity")
    return number


def _number(value: Any) -> float:
    if isinstance(value, str | bytes):  # float() would read them.
        raise TypeError(f"{printable(value)!r} is no quantity")
    number = value if type(value) in (int, float) else float(value)
    if not -_TOO_MUCH < number < _TOO_MUCH:
        raise ValueError(f"{number!r} is no quantity")
    return int(number) if isinstance(value, int) or float(number).is_integer() else number


def _apart(answer: Any, parts: int) -> Any:
    if not isinstance(answer, tuple) or len(cast("tuple[Any, ...]", answer)) != parts:
        raise TypeError(f"{printable(cast('Any', answer))!r} is not {parts} quantities")
    return cast("tuple[Any, ...]", answer)


def ask(owner: Any, quantity: Quantity) -> Any:
    """Returns a quantity of an object; raises whatever that raises."""
    if isinstance(quantity, str):
        found = _walk(owner, quantity)
        return found() if callable(found) else found
    return quantity(owner) if callable(quantity) else quantity


def _walk(owner: Any, path: str) -> Any:
    for name in path.split("."):
        owner = getattr(owner, name)
    return owner


def first(value: float, *_: float) -> float:
    """Returns the only quantity, or the limit of a pool."""
    return value


def second(_: float, value: float, *__: float) -> float:
    """Returns what is free of a pool."""
    return value


def third(_: float, __: float, value: float) -> float:
    """Returns what is evictable of a pool."""
    return value


def balance(limit: float, free: float, evictable: float = 0) -> float:
    """Returns what is neither."""
    return limit - free - evictable
