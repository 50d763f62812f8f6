"""What the catalogue says, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from catalogue.words import constant_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

NAMESPACE = "kvcache."
REASON = "kvcache.reason"
ENGINE = "kvcache.engine"

WATCH = "watch"
"""What records metrics without being an engine: the command that reads what engines publish."""


@dataclass(frozen=True)
class Member:
    """One value of a closed attribute."""

    id: str
    value: str
    brief: str


@dataclass(frozen=True)
class Attribute:
    """One attribute, of the catalogue or of OpenTelemetry."""

    name: str
    type: str
    brief: str
    note: str = ""
    members: tuple[Member, ...] = ()
    examples: tuple[str | int, ...] = ()
    fallback: str | None = None
    only_in: Mapping[str, Sequence[str]] | None = None
    values_of: str | None = None

    @property
    def constant(self) -> str:
        """The name of the constant of its key: `kvcache.tier` is KVCACHE_TIER."""
        return constant_of(self.name)

    @property
    def closed(self) -> bool:
        """Whether its values are a closed set. OpenTelemetry's own attributes with a few known values are open."""
        return bool(self.members) and self.name.startswith(NAMESPACE)

    @property
    def values(self) -> tuple[str, ...]:
        """The values of its members."""
        return tuple(member.value for member in self.members)


@dataclass(frozen=True)
class AttributeRef:
    """What a metric says about one of its attributes; `condition` is None where every series carries it."""

    name: str
    condition: str | None
    note: str = ""


@dataclass(frozen=True)
class Metric:
    """One metric of the catalogue, its closed sets expanded once the model is validated."""

    id: str
    name: str
    brief: str
    note: str
    instrument: str
    unit: str
    attributes: tuple[AttributeRef, ...]
    section: str
    fold: str | None
    identity: bool
    bounds: str | None
    values: Mapping[str, Sequence[str]]
    zero: tuple[str, ...]
    recorded_by: tuple[str, ...]

    @property
    def constant(self) -> str:
        """The name of its constant: `kvcache.lookup.tokens` is LOOKUP_TOKENS."""
        return constant_of(self.name.removeprefix(NAMESPACE))

    @property
    def description(self) -> str:
        """The brief as it is exported, with the fold that a reader must know before adding anything up."""
        return f"{self.brief} Fold: {FOLDS[self.fold]}." if self.fold else self.brief


@dataclass(frozen=True)
class Section:
    """A group of metrics in the documentation."""

    id: str
    title: str
    brief: str


@dataclass(frozen=True)
class Model:
    """The whole catalogue."""

    version: int
    identity: tuple[str, ...]
    bounds: Mapping[str, tuple[float, ...]]
    sections: tuple[Section, ...]
    attributes: tuple[Attribute, ...]
    metrics: tuple[Metric, ...]

    def attribute(self, name: str) -> Attribute | None:
        """The attribute of that name, the catalogue's or OpenTelemetry's, or None."""
        return next((a for a in (*self.attributes, *EXTERNAL) if a.name == name), None)

    def known(self, name: str) -> Attribute:
        """The attribute of that name, which a validated model has."""
        attribute = self.attribute(name)
        assert attribute is not None, name
        return attribute

    def used_attributes(self) -> tuple[Attribute, ...]:
        """The catalogue's attributes, then those of OpenTelemetry that a metric refers to."""
        referred = {ref.name for metric in self.metrics for ref in metric.attributes}
        return (*self.attributes, *(a for a in EXTERNAL if a.name in referred))


FOLDS = {"sum": "add the ranks", "one_rank": "read one rank"}

# Attributes that OpenTelemetry defines and this catalogue only refers to.
EXTERNAL = (
    Attribute(
        name="error.type",
        type="string",
        brief="The class of error that the operation ended with, as OpenTelemetry defines it; absent on success.",
        members=(Member("other", "_OTHER", "An error of no class that is known here."),),
        examples=("OSError", "timeout", "_OTHER"),
        fallback="_OTHER",
    ),
)


class ModelError(Exception):
    """The catalogue is not fit to generate from; `problems` says why, one line each."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))
