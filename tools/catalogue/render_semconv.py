"""The module `kvcache_otel.semconv`, from the catalogue."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from catalogue import MODEL
from catalogue.layout import INDENT, Bracket, Expr, Pair, Text, dict_of, frozenset_of, layout, tuple_of
from catalogue.model import NAMESPACE, Attribute, Metric, Model
from catalogue.words import WIDTH, constant_of, listed

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


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
    lines = [f'{attribute.constant}: Final = "{attribute.name}"\n' for attribute in model.used_attributes()]
    identity = tuple_of([constant_of(name) for name in model.identity])
    declaration = "IDENTITY_ATTRIBUTES: Final = "
    docs = '"""What every series that is recorded inside an engine carries."""\n'
    return f"{''.join(lines)}\n{declaration}{layout(identity, before=len(declaration))}\n{docs}"


def _render_value_classes(model: Model) -> str:
    classes: list[str] = []
    for attribute in model.used_attributes():
        if attribute.members and attribute.values_of is None:
            sharing = [a.name for a in model.attributes if a.values_of == attribute.name]
            classes.append(_render_value_class(attribute, sharing))
    return "\n" + "\n\n".join(classes) + "\n"


def _render_value_class(attribute: Attribute, sharing: Sequence[str]) -> str:
    keys = listed([f"``{name}``" for name in (attribute.name, *sharing)], "and")
    name = "".join(word.capitalize() for word in re.split(r"[._]", attribute.name.removeprefix(NAMESPACE)))
    members = "".join(
        f'{INDENT}{member.id.upper()}: Final = "{member.value}"\n{INDENT}"""{member.brief}"""\n'
        for member in attribute.members
    )
    return f'class {name}:\n{INDENT}"""Values of {keys}."""\n\n{members}'


def _render_attributes(model: Model) -> str:
    entries = [Pair(f"{a.constant}: ", _attribute_spec(a)) for a in model.used_attributes()]
    return f"ATTRIBUTES: Final[Mapping[str, AttributeSpec]] = {layout(dict_of(entries, tall=True))}\n"


def _attribute_spec(attribute: Attribute) -> Bracket:
    members: Expr = frozenset_of(_literals(attribute.values)) if attribute.closed else "None"
    arguments = [
        Pair("name=", attribute.constant),
        Pair("type=", Text(attribute.type)),
        Pair("members=", members),
        Pair("fallback=", Text(attribute.fallback) if attribute.fallback else "None"),
        Pair("brief=", Text(attribute.brief)),
    ]
    return Bracket("AttributeSpec(", arguments, ")", tall=True)


def _render_shared(model: Model) -> str:
    """Constants that several metrics refer to."""
    bounds = "".join(
        f"{_bounds_constant(name)}: Final = {layout(tuple_of(list(map(repr, bounds))), before=WIDTH)}\n"
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
            lines.append(declaration + layout(frozenset_of(_literals(unreserved)), before=len(declaration)) + "\n")
    return "".join(lines)


def _render_metrics(model: Model) -> str:
    return "\n".join(f"{m.constant}: Final = {layout(_metric_spec(m, model))}\n" for m in model.metrics)


def _metric_spec(metric: Metric, model: Model) -> Bracket:
    optional = [constant_of(ref.name) for ref in metric.attributes if ref.condition is not None]
    arguments = [
        Pair("name=", Text(metric.name)),
        Pair("instrument=", Text(metric.instrument)),
        Pair("unit=", Text(metric.unit)),
        Pair("brief=", Text(metric.description)),
        Pair("fold=", Text(metric.fold) if metric.fold else "None"),
    ]
    if metric.attributes:
        arguments.append(Pair("attributes=", tuple_of([constant_of(ref.name) for ref in metric.attributes])))
    if optional:
        arguments.append(Pair("optional=", frozenset_of(optional)))
    if metric.values:
        arguments.append(Pair("values=", dict_of([_value_entry(name, metric, model) for name in metric.values])))
    if metric.bounds:
        arguments.append(Pair("bounds=", _bounds_constant(metric.bounds)))
    if not metric.identity:
        arguments.append(Pair("identity=", "False"))
    return Bracket("MetricSpec(", arguments, ")", tall=True)


def _value_entry(name: str, metric: Metric, model: Model) -> Pair:
    attribute = model.known(name)
    values = metric.values[name]
    common = set(values) == set(attribute.values) - set(attribute.only_in or ())
    return Pair(f"{constant_of(name)}: ", _common_set(attribute) if common else frozenset_of(_literals(values)))


def _render_index(model: Model) -> str:
    metrics = layout(Bracket("(", [m.constant for m in model.metrics], ")", tall=True), INDENT)
    presets = [
        Pair(f"{m.constant}.name: ", tuple_of([constant_of(name) for name in m.zero])) for m in model.metrics if m.zero
    ]
    return (
        f"METRICS: Final[Mapping[str, MetricSpec]] = {{\n{INDENT}spec.name: spec\n{INDENT}for spec in {metrics}\n}}\n"
        '"""Every metric, in the order of the catalogue."""\n'
        "\n"
        f"PRESET_ATTRIBUTES: Final[Mapping[str, tuple[str, ...]]] = {layout(dict_of(presets, tall=True))}\n"
        '"""By metric, the attributes whose every combination of values is present from the start, at zero."""\n'
    )


def _literals(values: Iterable[str]) -> list[Expr]:
    return [Text(value) for value in values]


def _bounds_constant(name: str) -> str:
    return f"{name.upper()}_BOUNDS"


def _common_set(attribute: Attribute) -> str:
    reserved = "_OR_".join(value.upper() for value in attribute.only_in or ())
    return f"_{constant_of(attribute.name.removeprefix(NAMESPACE))}_WITHOUT_{reserved}"
