"""What makes a catalogue fit to generate from: the rules for names, units and everything a reader needs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from catalogue.model import ENGINE, FOLDS, NAMESPACE, REASON, WATCH, Attribute, Metric, Model
from catalogue.words import listed

Rule = Callable[[Metric, Model], Iterator[str]]
"""Yields what is wrong with one metric; the metric's name is put in front of it."""

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
        yield f"unit {metric.unit!r} is neither UCUM (one of {listed(sorted(UCUM))}) nor a countable {{noun}}"


def instrument_is_known(metric: Metric, model: Model) -> Iterator[str]:
    """The instrument is one of OpenTelemetry's."""
    if metric.instrument not in INSTRUMENTS:
        yield f"instrument {metric.instrument!r} is not one of {listed(sorted(INSTRUMENTS))}"


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
        yield f"fold {metric.fold!r} is not one of {listed(sorted(FOLDS))}"


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


def recorders_are_known(metric: Metric, model: Model) -> Iterator[str]:
    """Whoever records a metric is one of the catalogue's engines, or the command that watches them."""
    for recorder in metric.recorded_by:
        if recorder != WATCH and recorder not in _values_of(ENGINE, model):
            yield f"is recorded by {recorder}, which is neither a value of {ENGINE} nor {WATCH}"


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
    recorders_are_known,
)


def problems(model: Model) -> Iterator[str]:
    """All that is wrong with a model, one line each."""
    yield from _model_problems(model)
    for metric in model.metrics:
        yield from _metric_problems(metric, model)


def _metric_problems(metric: Metric, model: Model) -> Iterator[str]:
    return (f"{metric.name}: {problem}" for rule in RULES for problem in rule(metric, model))


def _model_problems(model: Model) -> Iterator[str]:
    """What is wrong with the registry and with the metrics taken together."""
    yield from (f"{name}: defined twice" for name in _duplicates(metric.name for metric in model.metrics))
    yield from (f"{name}: defined twice" for name in _duplicates(attribute.name for attribute in model.attributes))
    constants = [*(metric.constant for metric in model.metrics), *(a.constant for a in model.used_attributes())]
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
