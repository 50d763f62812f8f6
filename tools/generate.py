#!/usr/bin/env python3
"""Turn the catalogue, `model/kvcache.yaml`, into everything that is derived from it.

    python tools/generate.py            write the outputs
    python tools/generate.py --check    write nothing; exit with 1 and name each output that differs

The catalogue is validated first: a metric that breaks a naming rule, or that lacks what a reader needs to interpret it,
never reaches an output. To derive one more file from the catalogue, add its path and its renderer to `OUTPUTS`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
MODEL = "model/kvcache.yaml"
COMMAND = "python tools/generate.py"

NAMESPACE = "kvcache."
REASON = "kvcache.reason"
ENGINE = "kvcache.engine"

# ----------------------------------------------------------------------------------------------------- the model


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

    @property
    def constant(self) -> str:
        """The name of its constant: `kvcache.lookup.tokens` is LOOKUP_TOKENS."""
        return _upper(self.name.removeprefix(NAMESPACE))

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


# ------------------------------------------------------------------------------------------------------- parsing

Node = dict[str, Any]


def load(path: Path) -> Model:
    """Read and validate the catalogue at `path`."""
    return build(yaml.safe_load(path.read_text(encoding="utf-8")))


def build(document: Node) -> Model:
    """The validated model of a parsed catalogue; raises ModelError with all that is wrong with it."""
    model = parse(document)
    problems = [*_model_problems(model), *(p for metric in model.metrics for p in _metric_problems(metric, model))]
    if problems:
        raise ModelError(problems)
    return replace(model, metrics=tuple(replace(m, values=_expanded_values(m, model)) for m in model.metrics))


def parse(document: Node) -> Model:
    """The model of a parsed catalogue, complete in form and not yet checked in content."""
    groups: list[Node] = _fields(document, "the file", "groups")["groups"]
    registries = [group for group in groups if group.get("type") == "attribute_group"]
    if len(registries) != 1:
        raise ModelError([f"the file: expected one attribute_group, found {len(registries)}"])
    registry = _fields(registries[0], "the registry", "id type brief attributes annotations", "display_name note")
    own = _annotations(registry, "the registry", "version identity bounds sections")
    return Model(
        version=own["version"],
        identity=tuple(own["identity"]),
        bounds={name: tuple(map(float, bounds)) for name, bounds in own["bounds"].items()},
        sections=tuple(Section(**_fields(s, "a section", "id title brief")) for s in own["sections"]),
        attributes=tuple(map(_parse_attribute, registry["attributes"])),
        metrics=tuple(_parse_metric(group) for group in groups if group is not registries[0]),
    )


def _parse_attribute(node: Node) -> Attribute:
    where = str(node.get("id", "an attribute without id"))
    fields = _fields(node, where, "id type brief stability", "note examples annotations")
    own = _annotations(fields, where, "", "fallback only_in values_of") if "annotations" in fields else {}
    kind: str | Node = fields["type"]
    return Attribute(
        name=fields["id"],
        type=kind if isinstance(kind, str) else "string",
        brief=fields["brief"],
        note=fields.get("note", ""),
        members=() if isinstance(kind, str) else tuple(_parse_member(m, where) for m in kind["members"]),
        examples=tuple(fields.get("examples", ())),
        **own,
    )


def _parse_member(node: Node, where: str) -> Member:
    fields = _fields(node, f"{where}: a member", "id value brief stability")
    return Member(fields["id"], fields["value"], fields["brief"])


def _parse_metric(node: Node) -> Metric:
    where = str(node.get("metric_name", node.get("id", "a metric without name")))
    required = "id type metric_name brief instrument unit stability annotations"
    fields = _fields(node, where, required, "note attributes")
    if fields["type"] != "metric":
        raise ModelError([f"{where}: a group must be of type metric"])
    own = _annotations(fields, where, "section", "fold identity bounds values zero")
    return Metric(
        id=fields["id"],
        name=fields["metric_name"],
        brief=fields["brief"],
        note=fields.get("note", ""),
        instrument=fields["instrument"],
        unit=fields["unit"],
        attributes=tuple(_parse_ref(ref, where) for ref in fields.get("attributes", ())),
        section=own["section"],
        fold=own.get("fold"),
        identity=own.get("identity", True),
        bounds=own.get("bounds"),
        values=own.get("values", {}),
        zero=tuple(own.get("zero", ())),
    )


def _parse_ref(node: Node, where: str) -> AttributeRef:
    fields = _fields(node, where, "ref requirement_level", "note")
    match fields["requirement_level"]:
        case "required":
            condition = None
        case "opt_in":
            condition = "if asked for"
        case {"conditionally_required": str(condition)}:
            pass
        case level:
            raise ModelError([f"{where}: {fields['ref']}: requirement level {level!r} leaves open when it is there"])
    return AttributeRef(fields["ref"], condition, fields.get("note", ""))


def _annotations(node: Node, where: str, required: str, optional: str = "") -> Node:
    """What a node says under `annotations: kvcache:`."""
    return _fields(node["annotations"].get("kvcache", {}), f"{where}: annotations", required, optional)


def _fields(node: Node, where: str, required: str, optional: str = "") -> Node:
    """The node itself, once it is certain that it has the fields it needs and none that would be ignored."""
    needed, allowed = set(required.split()), {*required.split(), *optional.split()}
    problems = [f"{where}: field {name} is missing" for name in sorted(needed - node.keys())]
    problems += [f"{where}: field {name} is not known" for name in sorted(node.keys() - allowed)]
    if problems:
        raise ModelError(problems)
    return node


def _expanded_values(metric: Metric, model: Model) -> dict[str, Sequence[str]]:
    """The closed sets that hold for this metric alone: its own, and those without members reserved for others."""
    expanded: dict[str, Sequence[str]] = {}
    for ref in metric.attributes:
        attribute = model.known(ref.name)
        reserved = {value for value, users in (attribute.only_in or {}).items() if metric.name not in users}
        if ref.name in metric.values:
            expanded[ref.name] = metric.values[ref.name]
        elif reserved:
            expanded[ref.name] = tuple(value for value in attribute.values if value not in reserved)
    return expanded


# --------------------------------------------------------------------------------------------------------- rules
#
# Each rule yields what is wrong with one metric; the metric's name is put in front of it.

Rule = Callable[[Metric, Model], Iterator[str]]

NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*(\.[a-z][a-z0-9]*(_[a-z0-9]+)*)+")
MEMBER = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
COUNTABLE = re.compile(r"\{[a-z]+(_[a-z]+)*\}")
UCUM = frozenset({"s", "By"})
UNIT_WORDS = frozenset({"byte", "bytes", "kb", "mb", "gb", "second", "seconds", "milliseconds", "ms", "us", "ns"})
RATIO_WORDS = frozenset({"ratio", "rate", "percent", "percentage", "perc", "utilization"})
INSTRUMENTS = frozenset({"counter", "updowncounter", "gauge", "histogram"})


def name_is_ours_and_dotted(metric: Metric, model: Model) -> Iterator[str]:
    """Names are in our own namespace, dotted and lower case."""
    if not metric.name.startswith(NAMESPACE):
        yield f"the name is outside the namespace {NAMESPACE}*"
    if not NAME.fullmatch(metric.name):
        yield "the name is not dotted lower case"
    if metric.id != f"metric.{metric.name}":
        yield f"the group's id is {metric.id}, not metric.{metric.name}"


def name_says_nothing_twice(metric: Metric, model: Model) -> Iterator[str]:
    """What the unit, the instrument or an attribute says is not part of a name."""
    engines = {value for value in _values_of(ENGINE, model) if value != "custom"}
    for word in re.split(r"[._]", metric.name):
        if word == "total":
            yield "the name contains `total`, which exporters add"
        if word in UNIT_WORDS:
            yield f"the name contains the unit `{word}`"
        if word in RATIO_WORDS:
            yield f"`{word}`: ratios are not exported, both of their sides are"
        if word in engines:
            yield f"the name contains the engine `{word}`"


def plural_counts_something(metric: Metric, model: Model) -> Iterator[str]:
    """A plural is used only for what the unit counts."""
    for word in metric.name.removeprefix(NAMESPACE).split("."):
        singular = _singular(word)
        if singular and metric.unit != f"{{{singular}}}":
            yield f"`{word}` is plural and the unit is not {{{singular}}}"


def unit_is_ucum(metric: Metric, model: Model) -> Iterator[str]:
    """Units are UCUM, and none is that of a ratio."""
    if metric.unit == "1":
        yield "unit 1 is that of a ratio, and ratios are not exported"
    elif metric.unit not in UCUM and not COUNTABLE.fullmatch(metric.unit):
        yield f"unit {metric.unit!r} is neither UCUM (one of {_list(sorted(UCUM))}) nor a countable {{noun}}"


def instrument_is_known(metric: Metric, model: Model) -> Iterator[str]:
    """The instrument is one of OpenTelemetry's."""
    if metric.instrument not in INSTRUMENTS:
        yield f"instrument {metric.instrument!r} is not one of {_list(sorted(INSTRUMENTS))}"


def histogram_has_bounds(metric: Metric, model: Model) -> Iterator[str]:
    """Histograms have explicit bounds, because exporters differ in what they make of none."""
    if metric.instrument == "histogram" and metric.bounds is None:
        yield "a histogram needs explicit bounds"
    if metric.instrument != "histogram" and metric.bounds is not None:
        yield "only a histogram has bounds"
    if metric.bounds is not None and metric.bounds not in model.bounds:
        yield f"bounds {metric.bounds} are not defined"


def fold_is_said(metric: Metric, model: Model) -> Iterator[str]:
    """Whoever reads a series with ranks must know whether to add them."""
    if metric.identity and metric.fold is None:
        yield "its series carry ranks and it does not say how they fold"
    if not metric.identity and metric.fold is not None:
        yield "it has a fold and its series carry no ranks"
    if metric.fold is not None and metric.fold not in FOLDS:
        yield f"fold {metric.fold!r} is not one of {_list(sorted(FOLDS))}"


def brief_is_a_sentence(metric: Metric, model: Model) -> Iterator[str]:
    """The brief is a sentence that stands alone, in a section that exists."""
    if not re.fullmatch(r"[A-Z0-9][^\n]*[^.\s]\.", metric.brief):
        yield "the brief is not one sentence that starts with a capital and ends with a full stop"
    if metric.section not in {section.id for section in model.sections}:
        yield f"section {metric.section} is not defined"


def attributes_exist(metric: Metric, model: Model) -> Iterator[str]:
    """Attributes are defined, named once and not repeated from the identity."""
    names = [ref.name for ref in metric.attributes]
    yield from (f"refers to {name} twice" for name in _duplicates(names))
    yield from (f"refers to {name}, which is not defined" for name in names if model.attribute(name) is None)
    required = {ref.name for ref in metric.attributes if ref.condition is None}
    if metric.identity:
        yield from (f"{name} is on all its series anyway" for name in model.identity if name in required)


def reason_is_closed(metric: Metric, model: Model) -> Iterator[str]:
    """Reasons are a closed set of their own for each metric."""
    if not any(ref.name == REASON for ref in metric.attributes):
        return
    reasons = metric.values.get(REASON)
    if reasons is None:
        yield "has a reason and no closed set of reasons"
    elif "other" not in reasons:
        yield "its reasons lack `other`, which everything unexpected becomes"


def values_are_members(metric: Metric, model: Model) -> Iterator[str]:
    """A metric narrows closed sets and never widens them."""
    names = {ref.name for ref in metric.attributes}
    for name, values in metric.values.items():
        if name not in names:
            yield f"has values for {name}, which it does not carry"
        yield from (f"{value!r} is no member of {name}" for value in values if value not in _values_of(name, model))
        yield from (f"{value!r} is listed twice for {name}" for value in _duplicates(values))


def zero_rows_are_finite(metric: Metric, model: Model) -> Iterator[str]:
    """Only closed attributes can be present from the start."""
    names = {ref.name for ref in metric.attributes}
    for name in metric.zero:
        if name not in names:
            yield f"presets {name}, which it does not carry"
        elif not _values_of(name, model):
            yield f"presets {name}, whose values are open"


RULES: tuple[Rule, ...] = (
    name_is_ours_and_dotted,
    name_says_nothing_twice,
    plural_counts_something,
    unit_is_ucum,
    instrument_is_known,
    histogram_has_bounds,
    fold_is_said,
    brief_is_a_sentence,
    attributes_exist,
    reason_is_closed,
    values_are_members,
    zero_rows_are_finite,
)


def _metric_problems(metric: Metric, model: Model) -> Iterator[str]:
    return (f"{metric.name}: {problem}" for rule in RULES for problem in rule(metric, model))


def _model_problems(model: Model) -> Iterator[str]:
    """What is wrong with the registry and with the metrics taken together."""
    yield from (f"{name}: defined twice" for name in _duplicates(metric.name for metric in model.metrics))
    yield from (f"{name}: defined twice" for name in _duplicates(attribute.name for attribute in model.attributes))
    constants = [*(metric.constant for metric in model.metrics), *map(_key_constant, model.used_attributes())]
    if len({m.name for m in model.metrics}) == len(model.metrics):
        yield from (f"{name}: two definitions share this constant" for name in _duplicates(constants))
    for attribute in model.attributes:
        yield from (f"{attribute.name}: {problem}" for problem in _attribute_problems(attribute, model))
    for name in model.identity:
        if model.attribute(name) is None:
            yield f"{name}: on every series and not defined"
    for name, bounds in model.bounds.items():
        if not bounds or bounds[0] <= 0 or list(bounds) != sorted(set(bounds)):
            yield f"bounds {name}: not positive and ascending"
    used = {reason for metric in model.metrics for reason in metric.values.get(REASON, ())}
    yield from (f"{REASON}: no metric uses `{value}`" for value in _values_of(REASON, model) if value not in used)


def _attribute_problems(attribute: Attribute, model: Model) -> Iterator[str]:
    if not attribute.name.startswith(NAMESPACE) or not NAME.fullmatch(attribute.name):
        yield f"the name is not dotted lower case within {NAMESPACE}*"
    if attribute.type not in ("string", "int"):
        yield f"type {attribute.type!r} is neither string nor int"
    if not attribute.closed and not attribute.examples:
        yield "its values are open and it has no examples"
    for member in attribute.members:
        if not MEMBER.fullmatch(member.id) or not MEMBER.fullmatch(member.value):
            yield f"member {member.id!r} = {member.value!r} is not lower case with underscores"
    yield from (f"member {name!r} is listed twice" for name in _duplicates(m.id for m in attribute.members))
    yield from (f"value {name!r} is listed twice" for name in _duplicates(attribute.values))
    if attribute.fallback is not None and attribute.fallback not in attribute.values:
        yield f"the fallback {attribute.fallback!r} is no member"
    metrics = {metric.name for metric in model.metrics}
    for value, users in (attribute.only_in or {}).items():
        if value not in attribute.values:
            yield f"reserves {value!r}, which is no member"
        yield from (f"reserves {value!r} for {user}, which is not defined" for user in users if user not in metrics)
    if attribute.values_of and not set(attribute.values) <= set(_values_of(attribute.values_of, model)):
        yield f"its members are not all members of {attribute.values_of}"


def _values_of(name: str, model: Model) -> tuple[str, ...]:
    attribute = model.attribute(name)
    return attribute.values if attribute else ()


def _duplicates(names: Iterable[str]) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]


def _singular(word: str) -> str | None:
    """The singular of a plural English noun, None where the word is not one."""
    if re.search(r"(ch|sh|x|ss)es$", word):
        return word[:-2]
    return word[:-1] if re.search(r"[^su]s$", word) else None


# -------------------------------------------------------------------------------------------------- Python layout
#
# A few lines of pretty-printing, so that what is written is already as `ruff format` would leave it.

WIDTH = 120
INDENT = "    "


@dataclass(frozen=True)
class Text:
    """A string literal, split into several where it does not fit on one line."""

    value: str


@dataclass(frozen=True)
class Bracket:
    """A bracketed list, on one line where that fits and with an item to a line where it does not."""

    opening: str
    items: Sequence[Expr]
    closing: str
    tall: bool = False


@dataclass(frozen=True)
class Pair:
    """A keyword argument or an entry of a dictionary."""

    key: str
    value: Expr


Expr = str | Text | Bracket | Pair


def _flat(expr: Expr) -> str | None:
    """The expression on one line, None where it never is."""
    match expr:
        case str():
            return expr
        case Text(value):
            return _quoted(value)
        case Pair(key, value):
            flat = _flat(value)
            return None if flat is None else key + flat
        case Bracket(opening, items, closing, tall):
            parts = [_flat(item) for item in items]
            if tall or None in parts:
                return None
            comma = "," if opening == "(" and len(items) == 1 else ""
            return f"{opening}{', '.join(filter(None, parts))}{comma}{closing}"


def _layout(expr: Expr, indent: str = "", before: int = 0) -> str:
    """The expression as source, `before` characters after the indent, with room for a comma behind it."""
    flat = _flat(expr)
    if flat is not None and len(indent) + before + len(flat) + 1 <= WIDTH:
        return flat
    inner = indent + INDENT
    match expr:
        case str():
            return expr
        case Pair(key, value):
            return key + _layout(value, indent, before + len(key))
        case Text(value):
            pieces = "".join(f"{inner}{piece}\n" for piece in _split(value, WIDTH - len(inner) - 2))
            return f"(\n{pieces}{indent})"
        case Bracket(opening, items, closing):
            # A lone argument is moved to a line of its own without a comma, as the formatter does.
            comma = "" if opening.endswith("frozenset(") else ","
            lines = "".join(f"{inner}{_layout(item, inner)}{comma}\n" for item in items)
            return f"{opening}\n{lines}{indent}{closing}"


def _split(text: str, width: int) -> Iterator[str]:
    """The text as adjacent string literals, each but the last with the space that joins it to the next."""
    lines = textwrap.wrap(text, width - 1, break_long_words=False, break_on_hyphens=False)
    for line in lines[:-1]:
        yield _quoted(f"{line} ")
    yield _quoted(lines[-1])


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _tuple(items: Sequence[Expr]) -> Bracket:
    return Bracket("(", items, ")")


def _frozenset(items: Sequence[Expr]) -> Bracket:
    return Bracket("frozenset(", [Bracket("{", items, "}")], ")")


def _dict(items: Sequence[Expr], *, tall: bool = False) -> Bracket:
    return Bracket("{", items, "}", tall=tall)


# ---------------------------------------------------------------------------------------------------- semconv.py


def render_semconv(model: Model) -> str:
    """The module of constants and specifications that the rest of the package imports."""
    blocks = [
        SEMCONV_HEADER,
        f"CATALOGUE_VERSION: Final = {model.version}\n",
        _render_keys(model),
        _render_value_classes(model),
        _render_attributes(model),
        _render_shared(model),
        _render_metrics(model),
        _render_index(model),
    ]
    return "\n".join(blocks)


SEMCONV_HEADER = f'''\
"""The catalogue as constants: attribute keys, their values, and the specification of each metric.

Generated from {MODEL} by tools/generate.py. Do not edit: change the catalogue and generate again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvcache_otel.spec import AttributeSpec, MetricSpec

if TYPE_CHECKING:
    from collections.abc import Mapping
'''


def _render_keys(model: Model) -> str:
    lines = [f'{_key_constant(attribute)}: Final = "{attribute.name}"\n' for attribute in model.used_attributes()]
    identity = _tuple([_upper(name) for name in model.identity])
    declaration = "IDENTITY_ATTRIBUTES: Final = "
    docs = '"""What every series that is recorded inside an engine carries."""\n'
    return f"{''.join(lines)}\n{declaration}{_layout(identity, before=len(declaration))}\n{docs}"


def _render_value_classes(model: Model) -> str:
    classes: list[str] = []
    for attribute in model.used_attributes():
        if attribute.members and attribute.values_of is None:
            sharing = [a.name for a in model.attributes if a.values_of == attribute.name]
            classes.append(_render_value_class(attribute, sharing))
    return "\n" + "\n\n".join(classes) + "\n"


def _render_value_class(attribute: Attribute, sharing: Sequence[str]) -> str:
    keys = _list([f"``{name}``" for name in (attribute.name, *sharing)], "and")
    name = "".join(word.capitalize() for word in re.split(r"[._]", attribute.name.removeprefix(NAMESPACE)))
    members = "".join(
        f'{INDENT}{member.id.upper()}: Final = "{member.value}"\n{INDENT}"""{member.brief}"""\n'
        for member in attribute.members
    )
    return f'class {name}:\n{INDENT}"""Values of {keys}."""\n\n{members}'


def _render_attributes(model: Model) -> str:
    entries = [Pair(f"{_key_constant(a)}: ", _attribute_spec(a)) for a in model.used_attributes()]
    return f"ATTRIBUTES: Final[Mapping[str, AttributeSpec]] = {_layout(_dict(entries, tall=True))}\n"


def _attribute_spec(attribute: Attribute) -> Bracket:
    members: Expr = _frozenset(_literals(attribute.values)) if attribute.closed else "None"
    arguments = [
        Pair("name=", _key_constant(attribute)),
        Pair("type=", Text(attribute.type)),
        Pair("members=", members),
        Pair("fallback=", Text(attribute.fallback) if attribute.fallback else "None"),
        Pair("brief=", Text(attribute.brief)),
    ]
    return Bracket("AttributeSpec(", arguments, ")", tall=True)


def _render_shared(model: Model) -> str:
    """Constants that several metrics refer to."""
    bounds = "".join(
        f"{_bounds_constant(name)}: Final = {_layout(_tuple(list(map(repr, bounds))), before=WIDTH)}\n"
        for name, bounds in model.bounds.items()
    )
    return f"{bounds}\n{_render_common_sets(model)}"


def _render_common_sets(model: Model) -> str:
    """The closed sets that metrics share because a member is reserved for others."""
    lines: list[str] = []
    for attribute in model.attributes:
        if attribute.only_in:
            unreserved = [value for value in attribute.values if value not in attribute.only_in]
            declaration = f"{_common_set(attribute)}: Final = "
            lines.append(declaration + _layout(_frozenset(_literals(unreserved)), before=len(declaration)) + "\n")
    return "".join(lines)


def _render_metrics(model: Model) -> str:
    return "\n".join(f"{m.constant}: Final = {_layout(_metric_spec(m, model))}\n" for m in model.metrics)


def _metric_spec(metric: Metric, model: Model) -> Bracket:
    optional = [_upper(ref.name) for ref in metric.attributes if ref.condition is not None]
    arguments = [
        Pair("name=", Text(metric.name)),
        Pair("instrument=", Text(metric.instrument)),
        Pair("unit=", Text(metric.unit)),
        Pair("brief=", Text(metric.description)),
        Pair("fold=", Text(metric.fold) if metric.fold else "None"),
    ]
    if metric.attributes:
        arguments.append(Pair("attributes=", _tuple([_upper(ref.name) for ref in metric.attributes])))
    if optional:
        arguments.append(Pair("optional=", _frozenset(optional)))
    if metric.values:
        arguments.append(Pair("values=", _dict([_value_entry(name, metric, model) for name in metric.values])))
    if metric.bounds:
        arguments.append(Pair("bounds=", _bounds_constant(metric.bounds)))
    if not metric.identity:
        arguments.append(Pair("identity=", "False"))
    return Bracket("MetricSpec(", arguments, ")", tall=True)


def _value_entry(name: str, metric: Metric, model: Model) -> Pair:
    attribute = model.known(name)
    values = metric.values[name]
    common = set(values) == set(attribute.values) - set(attribute.only_in or ())
    return Pair(f"{_upper(name)}: ", _common_set(attribute) if common else _frozenset(_literals(values)))


def _render_index(model: Model) -> str:
    metrics = _layout(Bracket("(", [m.constant for m in model.metrics], ")", tall=True), INDENT)
    presets = [Pair(f"{m.constant}.name: ", _tuple([_upper(name) for name in m.zero])) for m in model.metrics if m.zero]
    return (
        f"METRICS: Final[Mapping[str, MetricSpec]] = {{\n{INDENT}spec.name: spec\n{INDENT}for spec in {metrics}\n}}\n"
        '"""Every metric, in the order of the catalogue."""\n'
        "\n"
        f"PRESET_ATTRIBUTES: Final[Mapping[str, tuple[str, ...]]] = {_layout(_dict(presets, tall=True))}\n"
        '"""By metric, the attributes whose every combination of values is present from the start, at zero."""\n'
    )


def _literals(values: Iterable[str]) -> list[Expr]:
    return [Text(value) for value in values]


def _key_constant(attribute: Attribute) -> str:
    return _upper(attribute.name)


def _bounds_constant(name: str) -> str:
    return f"{name.upper()}_BOUNDS"


def _common_set(attribute: Attribute) -> str:
    reserved = "_OR_".join(value.upper() for value in attribute.only_in or ())
    return f"_{_upper(attribute.name.removeprefix(NAMESPACE))}_WITHOUT_{reserved}"


def _upper(name: str) -> str:
    return name.replace(".", "_").upper()


def _list(items: Sequence[str], conjunction: str = "or") -> str:
    return f" {conjunction} ".join(filter(None, [", ".join(items[:-1]), items[-1]]))


# ----------------------------------------------------------------------------------------------- docs/metrics.md

PROMETHEUS_UNITS = {"s": "_seconds", "By": "_bytes"}
PROMETHEUS_SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}


def prometheus_name(name: str) -> str:
    """A metric name or an attribute key as Prometheus spells it."""
    return re.sub(r"[^a-zA-Z0-9:]+", "_", name)


def prometheus_names(metric: Metric) -> tuple[str, ...]:
    """The series that the Python Prometheus exporter makes of a metric."""
    base = prometheus_name(metric.name) + PROMETHEUS_UNITS.get(metric.unit, "")
    return tuple(base + suffix for suffix in PROMETHEUS_SUFFIXES.get(metric.instrument, ("",)))


def render_docs(model: Model) -> str:
    """The reference of all metrics and attributes."""
    sections = [_render_section(section, model) for section in model.sections]
    blocks = [DOCS_INTRO, _render_contents(model), _render_attribute_table(model), _render_value_tables(model)]
    return "\n".join([*blocks, *sections, _render_bounds(model)])


DOCS_INTRO = f"""\
<!-- Generated from {MODEL} by tools/generate.py. Do not edit: change the catalogue and run `{COMMAND}`. -->

# Metrics

Everything that kvcache-otel can record, with its name in OpenTelemetry and in Prometheus. What an engine version can
really tell is a part of this list; `kvcache.telemetry.hook.attached` says which.

## How to read them

**Fold: which series to add.** A model that is split over ranks reports from each of them. Where the fold is *add the
ranks*, each rank holds or moves its own shard and the truth is the sum. Where it is *read one rank*, every
tensor-parallel rank reports the same logical count, and adding them multiplies it. Data-parallel replicas are caches of
their own and are always added.

```promql
# add the ranks: bytes per second that reach the device from host memory
sum(rate(kvcache_transfer_io_bytes_total{{kvcache_source_tier="host", kvcache_destination_tier="device"}}[5m]))

# read one rank: prompt tokens per second by the tier that served them
sum by (kvcache_tier) (rate(kvcache_lookup_tokens_total{{kvcache_rank_tp="0", kvcache_rank_pp="0"}}[5m]))
```

**Tiers: where KV lives.** `device`, `host` and `disk` belong to the engine's machine, `peer` is another engine's cache
and `external` is a storage service. A transfer has a source tier and a destination tier. `kvcache.tier.name` tells
several backends of one tier apart by the names they have in the engine's configuration.

**Zero, absent, unknown: three different things.** A row at zero can count and has not yet. A row that is absent cannot
be counted here: the engine version does not tell it, or that tier is not configured. A row with `unknown` or `other`
did happen, and the engine did not say in terms of this list where or why.

**No ratios.** Both sides of every ratio are exported, so that it can be taken over any window and any set of ranks: add
up first, divide last.

**Prometheus.** Names below are those of the OpenTelemetry Python exporter: dots become underscores, `s` and `By` are
spelt out, counters end in `_total`, and up-down counters and gauges have no further suffix. Attributes are translated
in the same way, so `kvcache.tier` is the label `kvcache_tier`.
"""


def _render_contents(model: Model) -> str:
    lines = ["## Contents\n\n- [Attributes](#attributes)\n"]
    for section in model.sections:
        metrics = [_link(metric.name) for metric in _metrics_in(section, model)]
        entry = "".join(f"  - {metric}\n" for metric in metrics)
        lines.append(f"- [{section.title}](#{_anchor(section.title)})\n{entry}")
    lines.append("- [Histogram bounds](#histogram-bounds)\n")
    return "".join(lines)


def _render_attribute_table(model: Model) -> str:
    rows = [(f"`{a.name}`", a.type, _described(a), _values_cell(a)) for a in model.used_attributes()]
    identity = _list([f"`{name}`" for name in model.identity], "and")
    return (
        "## Attributes\n\n"
        f"{_wrapped(f'Every series recorded inside an engine carries {identity}. {RECEIVED}')}\n"
        f"{_table(('Attribute', 'Type', 'Meaning', 'Values'), rows)}"
    )


RECEIVED = (
    "Rows about what a subscriber received carry the publisher's `kvcache.worker` and `kvcache.rank.dp` instead. "
    "The metrics below list only what they have beyond that. Closed sets stay closed: any other value is recorded as "
    "the one marked as fallback."
)


def _described(attribute: Attribute) -> str:
    return f"{attribute.brief} {attribute.note}".strip()


def _values_cell(attribute: Attribute) -> str:
    if attribute.name == REASON:
        return f"closed for each metric, see there; fallback `{attribute.fallback}`"
    if not attribute.closed:
        examples = ", ".join(f"`{example}`" for example in attribute.examples)
        return f"{'open' if attribute.type == 'string' else 'integers'}, such as {examples}"
    return ", ".join(
        f"`{value}` (fallback)" if value == attribute.fallback else f"`{value}`" for value in attribute.values
    )


def _render_value_tables(model: Model) -> str:
    return "### What the values mean\n\n" + "\n".join(
        _render_value_table(attribute, model) for attribute in model.attributes if attribute.closed
    )


def _render_value_table(attribute: Attribute, model: Model) -> str:
    if attribute.values_of:
        return f"`{attribute.name}`: as `{attribute.values_of}`.\n"
    rows = [(f"`{m.value}`", m.brief + _reserved(attribute, m)) for m in attribute.members]
    table = _table(("Value", "Meaning"), rows)
    return f"<details>\n<summary><code>{attribute.name}</code></summary>\n\n{table}\n</details>\n"


def _reserved(attribute: Attribute, member: Member) -> str:
    users = (attribute.only_in or {}).get(member.value)
    return f" Only in {_list([f'`{user}`' for user in users])}." if users else ""


def _render_section(section: Section, model: Model) -> str:
    metrics = "\n".join(_render_metric_docs(metric, model) for metric in _metrics_in(section, model))
    return f"## {section.title}\n\n{_wrapped(section.brief)}\n{metrics}"


def _render_metric_docs(metric: Metric, model: Model) -> str:
    observable = ", observable" if metric.instrument in ("updowncounter", "gauge") else ""
    names = "<br>".join(f"`{name}`" for name in prometheus_names(metric))
    fold = FOLDS[metric.fold] if metric.fold else "none"
    facts = [(metric.instrument + observable, f"`{metric.unit}`", fold, names)]
    parts = [
        f"### `{metric.name}`\n",
        _wrapped(f"{metric.brief} {metric.note}".strip()),
        _table(("Instrument", "Unit", "Fold", "In Prometheus"), facts),
    ]
    if metric.attributes:
        rows = [_ref_row(ref, metric, model) for ref in metric.attributes]
        parts.append(_table(("Attribute", "Present", "Values"), rows))
    if metric.zero:
        presets = _list([f"`{name}`" for name in metric.zero], "and")
        parts.append(_wrapped(f"Every combination of {presets} is present from the start, at zero."))
    return "\n".join(parts)


def _ref_row(ref: AttributeRef, metric: Metric, model: Model) -> tuple[str, str, str]:
    attribute = model.known(ref.name)
    values = metric.values.get(ref.name, attribute.values) if attribute.closed else ()
    cell = ", ".join(f"`{value}`" for value in values) or ("open" if attribute.type == "string" else "integers")
    return (f"`{ref.name}`", ref.condition or "always", f"{cell}. {ref.note}" if ref.note else cell)


def _render_bounds(model: Model) -> str:
    lines = ["## Histogram bounds\n"]
    for name, bounds in model.bounds.items():
        users = _list(sorted({f"`{m.unit}`" for m in model.metrics if m.bounds == name}), "and")
        lines.append(_wrapped(f"Every {name}, in {users}: {', '.join(f'{bound:g}' for bound in bounds)}."))
    return "\n".join(lines)


def _metrics_in(section: Section, model: Model) -> list[Metric]:
    return [metric for metric in model.metrics if metric.section == section.id]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def _link(name: str) -> str:
    return f"[`{name}`](#{_anchor(name)})"


def _anchor(heading: str) -> str:
    return re.sub(r"[^a-z0-9_ -]", "", heading.lower()).replace(" ", "-")


def _wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False) + "\n"


# ---------------------------------------------------------------------------------------------------- the command

Renderer = Callable[[Model], str]

OUTPUTS: tuple[tuple[str, Renderer], ...] = (
    ("src/kvcache_otel/semconv.py", render_semconv),
    ("docs/metrics.md", render_docs),
)


def drifted(model: Model, root: Path) -> Iterator[str]:
    """The outputs under `root` that are not what the model says."""
    for name, render in OUTPUTS:
        path = root / name
        if not path.exists() or path.read_text(encoding="utf-8") != render(model):
            yield name


def write(model: Model, root: Path) -> None:
    """Write every output under `root`."""
    for name, render in OUTPUTS:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(render(model), encoding="utf-8")


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(description="Generate what is derived from the catalogue.")
    parser.add_argument("--check", action="store_true", help="write nothing, fail where an output differs")
    options = parser.parse_args(arguments)
    try:
        model = load(root / MODEL)
    except ModelError as error:
        print(*(f"{MODEL}: {problem}" for problem in error.problems), sep="\n", file=sys.stderr)
        return 1
    if not options.check:
        write(model, root)
        return 0
    stale = list(drifted(model, root))
    for name in stale:
        print(f"{name} is not what {MODEL} says; run `{COMMAND}`", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
