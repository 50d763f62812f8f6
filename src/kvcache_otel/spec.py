"""The shape of a catalogue entry: what `semconv.py` is made of, and all that the package knows of a metric."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

Instrument = Literal["counter", "histogram", "updowncounter", "gauge"]
Fold = Literal["sum", "one_rank"]


@dataclass(frozen=True, slots=True)
class AttributeSpec:
    """One attribute of the catalogue.

    Attributes:
        name: The attribute's key, e.g. ``kvcache.tier``.
        type: ``string`` or ``int``.
        members: The closed set of values, or None where the values are open.
        fallback: The member that a value outside the set folds to, or None where there is none.
        brief: What it says, in one sentence.
    """

    name: str
    type: Literal["string", "int"]
    members: frozenset[str] | None
    fallback: str | None
    brief: str


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric of the catalogue.

    Attributes:
        name: The metric's name, e.g. ``kvcache.transfer.duration``.
        instrument: What kind of instrument it is. ``updowncounter`` and ``gauge`` are always observable.
        unit: UCUM unit.
        brief: What one unit of it means, with the fold, as exported in the metric's description.
        fold: How ranks combine: ``sum`` = add them, ``one_rank`` = read one, None = the question does not arise.
        attributes: Keys of its own attributes, in label order; the constant ones of a process not included.
        optional: Those of `attributes` that a series may lack (``error.type`` on success, a tier without a name).
        values: Closed sets that hold for this metric alone (its reasons), narrower than the attribute's own.
        bounds: Explicit bucket bounds of a histogram, in its unit; empty for the others.
        identity: Whether its series carry the engine, cache type and rank of the process.
    """

    name: str
    instrument: Instrument
    unit: str
    brief: str
    fold: Fold | None
    attributes: tuple[str, ...] = ()
    optional: frozenset[str] = frozenset()
    values: Mapping[str, frozenset[str]] = field(default_factory=dict[str, frozenset[str]], hash=False)
    bounds: tuple[float, ...] = ()
    identity: bool = True
