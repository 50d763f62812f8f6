"""A catalogue that breaks a rule is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from catalogue.loading import build
from catalogue.model import ModelError
from catalogue.parsing import parse
from catalogue.rules import RULES

Node = dict[str, Any]

PARSED: Node = yaml.safe_load((Path(__file__).resolve().parents[3] / "model" / "kvcache.yaml").read_text())


@pytest.fixture
def document() -> Node:
    """A catalogue to break."""
    return unshared(PARSED)


def unshared(node: Any) -> Any:
    """A copy without shared nodes: YAML aliases share them, and breaking one metric must not break its neighbours."""
    if isinstance(node, dict):
        return {key: unshared(value) for key, value in node.items()}
    if isinstance(node, list):
        return [unshared(value) for value in node]
    return node


def metric(document: Node, name: str) -> Node:
    return next(group for group in document["groups"] if group.get("metric_name") == name)


def attribute(document: Node, name: str) -> Node:
    return next(node for node in document["groups"][0]["attributes"] if node["id"] == name)


def own(node: Node) -> Node:
    return node["annotations"]["kvcache"]


def rename(node: Node, name: str) -> None:
    node["metric_name"], node["id"] = name, f"metric.{name}"


def problems(document: Node) -> str:
    with pytest.raises(ModelError) as caught:
        build(document)
    return str(caught.value)


# ------------------------------------------------------------------------------------------ rules for a metric

Break = Callable[[Node], object]


def renamed(name: str) -> Break:
    return lambda node: rename(node, name)


def with_field(name: str, value: object) -> Break:
    return lambda node: node.update({name: value})


def annotated(**values: object) -> Break:
    return lambda node: own(node).update(values)


def without_annotation(name: str) -> Break:
    return lambda node: own(node).pop(name)


def with_ref(ref: str, level: object = "required") -> Break:
    return lambda node: node["attributes"].append({"ref": ref, "requirement_level": level})


TOKENS, IO, DURATION = "kvcache.eviction.tokens", "kvcache.transfer.io", "kvcache.transfer.duration"
DROPPED, SIZE, LOST = "kvcache.dropped.tokens", "kvcache.block.size", "kvcache.event.batches.lost"

BROKEN_METRICS = {
    "foreign namespace": (TOKENS, renamed("gen_ai.eviction.tokens"), "namespace"),
    "no namespace": (TOKENS, renamed("tokens"), "namespace"),
    "upper case": (TOKENS, renamed("kvcache.Eviction.tokens"), "lower case"),
    "hyphen": (TOKENS, renamed("kvcache.evic-tion.tokens"), "lower case"),
    "empty component": (TOKENS, renamed("kvcache..tokens"), "lower case"),
    "group id": (TOKENS, with_field("id", "metric.kvcache.evictions"), "group's id"),
    "total": (TOKENS, renamed("kvcache.eviction.total"), "`total`"),
    "total in a word": (TOKENS, renamed("kvcache.eviction.tokens_total"), "`total`"),
    "unit in the name": (IO, renamed("kvcache.transfer.bytes"), "unit `bytes`"),
    "seconds in the name": (DURATION, renamed("kvcache.transfer.duration_seconds"), "unit `seconds`"),
    "engine in the name": (TOKENS, renamed("kvcache.sglang.eviction.tokens"), "engine `sglang`"),
    "ratio in the name": (SIZE, renamed("kvcache.hit.ratio"), "ratio"),
    "rate in the name": (SIZE, renamed("kvcache.hit_rate"), "ratio"),
    "plural without count": (IO, renamed("kvcache.transfers"), "plural"),
    "plural of something else": (TOKENS, with_field("unit", "{block}"), "{token}"),
    "plural with es": (LOST, with_field("unit", "{event}"), "{batch}"),
    "unit not UCUM": (IO, with_field("unit", "bytes"), "UCUM"),
    "rate unit": (IO, with_field("unit", "By/s"), "UCUM"),
    "unit 1": (SIZE, with_field("unit", "1"), "ratio"),
    "unknown instrument": (TOKENS, with_field("instrument", "summary"), "summary"),
    "histogram without bounds": (DURATION, without_annotation("bounds"), "bounds"),
    "counter with bounds": (TOKENS, annotated(bounds="duration"), "bounds"),
    "undefined bounds": (DURATION, annotated(bounds="sizes"), "bounds sizes"),
    "no fold": (TOKENS, without_annotation("fold"), "fold"),
    "needless fold": (LOST, annotated(fold="sum"), "no ranks"),
    "unknown fold": (TOKENS, annotated(fold="average"), "average"),
    "brief without full stop": (TOKENS, with_field("brief", "Slots freed"), "sentence"),
    "brief in lower case": (TOKENS, with_field("brief", "slots freed."), "sentence"),
    "unknown section": (TOKENS, annotated(section="misc"), "section misc"),
    "undefined attribute": (TOKENS, with_ref("kvcache.colour"), "kvcache.colour"),
    "attribute twice": (TOKENS, with_ref("kvcache.tier"), "twice"),
    "identity repeated": (TOKENS, with_ref("kvcache.rank.tp"), "anyway"),
    "vague requirement": (TOKENS, with_ref("kvcache.state", "recommended"), "recommended"),
    "no closed reasons": (DROPPED, without_annotation("values"), "closed set of reasons"),
    "no other reason": (DROPPED, annotated(values={"kvcache.reason": ["host_pressure"]}), "`other`"),
    "reason not a member": (DROPPED, annotated(values={"kvcache.reason": ["whim", "other"]}), "'whim'"),
    "reason twice": (DROPPED, annotated(values={"kvcache.reason": ["other", "other"]}), "listed twice"),
    "values of nothing": (TOKENS, annotated(values={"kvcache.state": ["free"]}), "does not carry"),
    "preset not carried": (TOKENS, annotated(zero=["kvcache.state"]), "does not carry"),
    "preset open": (LOST, annotated(zero=["kvcache.worker"]), "open"),
    "recorded by nobody known": (TOKENS, annotated(recorded_by=["llama"]), "recorded by llama"),
    "misspelt annotation": (TOKENS, annotated(folds="sum"), "folds"),
    "misspelt field": (TOKENS, with_field("units", "{token}"), "units"),
    "missing field": (TOKENS, lambda node: node.pop("unit"), "unit"),
    "not a metric": (TOKENS, with_field("type", "span"), "type metric"),
}


@pytest.mark.parametrize(("name", "break_it", "complaint"), BROKEN_METRICS.values(), ids=BROKEN_METRICS)
def test_rule_refuses_a_bad_metric(document: Node, name: str, break_it: Break, complaint: str) -> None:
    node = metric(document, name)
    break_it(node)
    lines = [line for line in problems(document).splitlines() if line.startswith(f"{node['metric_name']}: ")]
    assert any(complaint in line for line in lines), lines


def test_every_rule_is_exercised() -> None:
    """A rule that refuses none of the metrics above would be a rule without a test."""
    refusing = [refusing_rules(name, break_it) for name, break_it, _ in BROKEN_METRICS.values()]
    assert set().union(*refusing) == set(RULES)


def refusing_rules(name: str, break_it: Break) -> set[object]:
    document = unshared(PARSED)
    break_it(metric(document, name))
    try:
        model = parse(document)
    except ModelError:
        return set()
    return {rule for rule in RULES for each in model.metrics if list(rule(each, model))}


def test_a_metric_defined_twice_is_refused(document: Node) -> None:
    document["groups"].append(metric(document, TOKENS))
    assert f"{TOKENS}: defined twice" in problems(document)


def test_metrics_that_share_a_constant_are_refused(document: Node) -> None:
    twin = unshared(metric(document, "kvcache.transfer.active"))
    rename(twin, "kvcache.transfer_active")
    document["groups"].append(twin)
    assert "TRANSFER_ACTIVE: two definitions share this constant" in problems(document)


def test_all_problems_are_reported_at_once(document: Node) -> None:
    metric(document, IO)["unit"] = "bytes"
    own(metric(document, TOKENS)).pop("fold")
    assert {line.split(":")[0] for line in problems(document).splitlines()} == {IO, TOKENS}


# -------------------------------------------------------------------------------------- rules for an attribute


def _members(node: Node) -> list[Node]:
    return node["type"]["members"]


BROKEN_ATTRIBUTES = {
    "foreign namespace": ("kvcache.worker", with_field("id", "worker.name"), "kvcache.*"),
    "bad type": ("kvcache.rank.pp", with_field("type", "double"), "double"),
    "open without examples": ("kvcache.worker", lambda node: node.pop("examples"), "examples"),
    "member identifier": ("kvcache.pool", lambda node: _members(node)[0].update(id="k-v"), "k-v"),
    "member value": ("kvcache.pool", lambda node: _members(node)[0].update(value="KV"), "KV"),
    "member twice": ("kvcache.pool", lambda node: _members(node).append(_members(node)[0]), "listed twice"),
    "fallback": ("kvcache.pool", annotated(fallback="misc"), "misc"),
    "reserved member": ("kvcache.tier", annotated(only_in={"tape": [TOKENS]}), "tape"),
    "reserved for": ("kvcache.tier", annotated(only_in={"none": ["kvcache.nowhere"]}), "kvcache.nowhere"),
    "values of": ("kvcache.source.tier", annotated(values_of="kvcache.pool"), "kvcache.pool"),
    "no stability": ("kvcache.pool", lambda node: node.pop("stability"), "stability"),
}


@pytest.mark.parametrize(("name", "break_it", "complaint"), BROKEN_ATTRIBUTES.values(), ids=BROKEN_ATTRIBUTES)
def test_rule_refuses_a_bad_attribute(document: Node, name: str, break_it: Break, complaint: str) -> None:
    node = attribute(document, name)
    break_it(node)
    lines = [line for line in problems(document).splitlines() if line.startswith(f"{node['id']}: ")]
    assert any(complaint in line for line in lines), lines


def test_an_attribute_defined_twice_is_refused(document: Node) -> None:
    document["groups"][0]["attributes"].append(attribute(document, "kvcache.pool"))
    assert "kvcache.pool: defined twice" in problems(document)


def test_a_reason_that_no_metric_uses_is_refused(document: Node) -> None:
    _members(attribute(document, "kvcache.reason")).append(
        {"id": "boredom", "value": "boredom", "stability": "development", "brief": "It seemed a good idea."}
    )
    assert "kvcache.reason: no metric uses `boredom`" in problems(document)


def test_bounds_that_do_not_ascend_are_refused(document: Node) -> None:
    own(document["groups"][0])["bounds"]["duration"] = [0.1, 0.01]
    assert "bounds duration: not positive and ascending" in problems(document)


def test_an_undefined_identity_is_refused(document: Node) -> None:
    own(document["groups"][0])["identity"].append("kvcache.mood")
    assert "kvcache.mood: on every series and not defined" in problems(document)
