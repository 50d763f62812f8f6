"""The generated module says what the model says, and the docs name what the Prometheus exporter really shows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import CallbackOptions, Meter, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.semconv.attributes import error_attributes
from prometheus_client import CollectorRegistry, generate_latest

from kvcache_otel import semconv
from kvcache_otel.spec import AttributeSpec, MetricSpec

ROOT = Path(__file__).resolve().parent.parent
Node = dict[str, Any]

GROUPS: list[Node] = yaml.safe_load((ROOT / "model" / "kvcache.yaml").read_text())["groups"]
REGISTRY = GROUPS[0]
METRICS: dict[str, Node] = {group["metric_name"]: group for group in GROUPS[1:]}
ATTRIBUTES: dict[str, Node] = {node["id"]: node for node in REGISTRY["attributes"]}
OWN: Node = REGISTRY["annotations"]["kvcache"]

FOLD_PHRASES = {"sum": "Fold: add the ranks.", "one_rank": "Fold: read one rank."}


def own(name: str) -> Node:
    return METRICS[name]["annotations"]["kvcache"]


def members(name: str) -> set[str]:
    return {member["value"] for member in ATTRIBUTES[name]["type"]["members"]}


def refs(name: str) -> list[Node]:
    return METRICS[name].get("attributes", [])


@pytest.fixture(params=METRICS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def spec(name: str) -> MetricSpec:
    return semconv.METRICS[name]


def test_metrics_are_those_of_the_model_in_its_order() -> None:
    assert list(semconv.METRICS) == list(METRICS)


def test_every_metric_has_a_constant_named_after_it(name: str, spec: MetricSpec) -> None:
    assert getattr(semconv, name.removeprefix("kvcache.").replace(".", "_").upper()) is spec


def test_metric_equals_the_model(name: str, spec: MetricSpec) -> None:
    node = METRICS[name]
    assert (spec.name, spec.instrument, spec.unit) == (name, node["instrument"], node["unit"])
    assert spec.attributes == tuple(ref["ref"] for ref in refs(name))
    assert spec.optional == {ref["ref"] for ref in refs(name) if ref["requirement_level"] != "required"}
    assert spec.identity is own(name).get("identity", True)
    assert spec.fold == own(name).get("fold")


def test_fold_is_in_the_exported_description(name: str, spec: MetricSpec) -> None:
    phrase = FOLD_PHRASES[spec.fold] if spec.fold else ""
    assert spec.brief == f"{METRICS[name]['brief']} {phrase}".strip()


def test_bounds_are_those_of_histograms_only(name: str, spec: MetricSpec) -> None:
    expected = OWN["bounds"][own(name)["bounds"]] if spec.instrument == "histogram" else ()
    assert spec.bounds == tuple(expected)


def test_values_are_the_metrics_own_subsets(name: str, spec: MetricSpec) -> None:
    expected = {key: set(values) for key, values in own(name).get("values", {}).items()}
    if "kvcache.tier" in spec.attributes and name != "kvcache.lookup.tokens":
        expected["kvcache.tier"] = members("kvcache.tier") - {"none"}
    assert spec.values == expected


def test_none_is_a_tier_of_lookup_tokens_alone() -> None:
    allowing = [
        spec.name
        for spec in semconv.METRICS.values()
        for key in spec.attributes
        if "none" in (spec.values.get(key) or semconv.ATTRIBUTES[key].members or ())
    ]
    assert allowing == ["kvcache.lookup.tokens"]


def test_presets_are_those_of_the_model() -> None:
    assert {name: tuple(own(name)["zero"]) for name in METRICS if "zero" in own(name)} == semconv.PRESET_ATTRIBUTES


def test_attributes_are_those_of_the_model_and_error_type() -> None:
    assert list(semconv.ATTRIBUTES) == [*ATTRIBUTES, error_attributes.ERROR_TYPE]


@pytest.mark.parametrize("key", ATTRIBUTES)
def test_attribute_equals_the_model(key: str) -> None:
    node = ATTRIBUTES[key]
    closed = isinstance(node["type"], dict)
    assert semconv.ATTRIBUTES[key] == AttributeSpec(
        name=key,
        type="string" if closed else node["type"],
        members=frozenset(members(key)) if closed else None,
        fallback=node.get("annotations", {}).get("kvcache", {}).get("fallback"),
        brief=node["brief"],
    )
    assert getattr(semconv, key.replace(".", "_").upper()) == key


def test_error_type_is_opentelemetrys() -> None:
    assert semconv.ERROR_TYPE == error_attributes.ERROR_TYPE
    assert error_attributes.ErrorTypeValues.OTHER.value == semconv.ErrorType.OTHER
    spec = semconv.ATTRIBUTES[semconv.ERROR_TYPE]
    assert (spec.members, spec.fallback) == (None, semconv.ErrorType.OTHER)


@pytest.mark.parametrize(
    ("key", "values"),
    [
        (semconv.KVCACHE_ENGINE, semconv.Engine),
        (semconv.KVCACHE_TIER, semconv.Tier),
        (semconv.KVCACHE_POOL, semconv.Pool),
        (semconv.KVCACHE_STATE, semconv.State),
        (semconv.KVCACHE_REASON, semconv.Reason),
        (semconv.KVCACHE_TIMING_SOURCE, semconv.TimingSource),
        (semconv.KVCACHE_LOOKUP_RESULT, semconv.LookupResult),
        (semconv.KVCACHE_LOOKUP_MODE, semconv.LookupMode),
        (semconv.KVCACHE_EVENT_TYPE, semconv.EventType),
        (semconv.KVCACHE_EVENT_MEDIUM, semconv.EventMedium),
        (semconv.KVCACHE_VIEW, semconv.View),
    ],
)
def test_value_class_holds_the_members(key: str, values: type) -> None:
    assert {value for constant, value in vars(values).items() if constant.isupper()} == members(key)


def test_version_and_identity_are_those_of_the_model() -> None:
    assert OWN["version"] == semconv.CATALOGUE_VERSION
    assert tuple(OWN["identity"]) == semconv.IDENTITY_ATTRIBUTES
    assert tuple(OWN["bounds"]["duration"]) == semconv.DURATION_BOUNDS


# ------------------------------------------------------------------------------------- names in Prometheus

DOCS = (ROOT / "docs" / "metrics.md").read_text()
DOCUMENTED = {
    heading: set(re.findall(r"`(kvcache_\w+)`", body.split("| Attribute |")[0]))
    for heading, body in re.findall(r"^### `(kvcache\.[\w.]+)`$(.*?)(?=^##|\Z)", DOCS, re.MULTILINE | re.DOTALL)
}


def record_one(spec: MetricSpec, meter: Meter) -> None:
    """Give the metric one point, through the kind of instrument that the package uses for it."""

    def observe(options: CallbackOptions) -> list[Observation]:
        return [Observation(1, dict.fromkeys(spec.attributes, "1"))]

    match spec.instrument:
        case "counter":
            meter.create_observable_counter(spec.name, [observe], spec.unit, spec.brief)
        case "updowncounter":
            meter.create_observable_up_down_counter(spec.name, [observe], spec.unit, spec.brief)
        case "gauge":
            meter.create_observable_gauge(spec.name, [observe], spec.unit, spec.brief)
        case "histogram":
            histogram = meter.create_histogram(
                spec.name, spec.unit, spec.brief, explicit_bucket_boundaries_advisory=spec.bounds
            )
            histogram.record(1, dict.fromkeys(spec.attributes, "1"))


@pytest.fixture(scope="module")
def scraped() -> str:
    """One scrape of the real exporter after every metric of the catalogue got a point."""
    registry = CollectorRegistry()
    reader = PrometheusMetricReader(disable_target_info=True, registry=registry)
    provider = MeterProvider([reader])
    for spec in semconv.METRICS.values():
        record_one(spec, provider.get_meter("catalogue"))
    text = generate_latest(registry).decode()
    provider.shutdown()
    return text


def test_docs_have_every_metric() -> None:
    assert list(DOCUMENTED) == list(METRICS)


def test_documented_names_are_those_that_prometheus_scrapes(name: str, spec: MetricSpec, scraped: str) -> None:
    samples = set(re.findall(r"^(\w+)\{", scraped, re.MULTILINE))
    assert DOCUMENTED[name] <= samples
    stem = min(DOCUMENTED[name], key=len).removesuffix("_sum")
    assert f"# HELP {stem} {spec.brief}\n" in scraped


def test_prometheus_scrapes_nothing_that_is_not_documented(scraped: str) -> None:
    samples = set(re.findall(r"^(\w+)\{", scraped, re.MULTILINE))
    assert samples == set().union(*DOCUMENTED.values())


def test_labels_are_the_attributes_with_underscores(spec: MetricSpec, scraped: str) -> None:
    sample = next(iter(DOCUMENTED[spec.name]))
    labels = re.findall(rf"^{sample}\{{(.*)\}} ", scraped, re.MULTILINE)[0]
    keys = {key for key in re.findall(r"(\w+)=", labels) if not key.startswith("otel_scope_")} - {"le"}
    assert keys == {key.replace(".", "_") for key in spec.attributes}
