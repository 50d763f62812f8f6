"""Our rows as they left the engine's processes, by way of a real Prometheus or a real OTLP receiver."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from opentelemetry.exporter.prometheus._mapping import map_unit, sanitize_attribute, sanitize_full_name

from kvcache_otel import semconv
from tests.engines.vllm.engine_oracle import ANY
from tests.support.rows import KEYS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kvcache_otel.spec import MetricSpec
    from tests.engines.vllm.engine_oracle import Expected
    from tests.support.otlp_receiver import Row
    from tests.support.prometheus_server import Prometheus


class Exported(NamedTuple):
    """One row: the metric's name in OpenTelemetry, its attributes as text, its value or sum, and its count."""

    name: str
    attributes: dict[str, str]
    value: float
    count: float


def over_otlp(received: Iterable[Row]) -> list[Exported]:
    """The last word of every process on every series."""
    last: dict[tuple[object, ...], Exported] = {}
    for row in received:
        attributes = {key: str(value) for key, value in row.attributes.items()}
        key = (row.name, tuple(sorted(attributes.items())), row.resource["service.instance.id"])
        value = row.sum if row.kind == "histogram" else row.value
        assert value is not None
        last[key] = Exported(row.name, attributes, value, row.count)
    return list(last.values())


def over_prometheus(server: Prometheus, specs: Iterable[MetricSpec]) -> list[Exported]:
    """What PromQL says of every series of every target."""
    rows: list[Exported] = []
    for spec in specs:
        name = prometheus_name(spec)
        suffix = "_sum" if spec.instrument == "histogram" else ""
        for sample in server.query(name + suffix):
            attributes = _attributes(sample.labels)
            count = 0.0
            if suffix:
                labels = ",".join(f'{key}="{value}"' for key, value in sample.labels.items() if key != "__name__")
                (counted,) = server.query(f'{name}_count{{{labels},instance="{sample.instance}"}}')
                count = counted.value
            rows.append(Exported(spec.name, attributes, sample.value, count))
    return rows


def prometheus_name(spec: MetricSpec) -> str:
    """A metric's name in Prometheus, without a histogram's suffix."""
    unit = map_unit(spec.unit)
    name = sanitize_full_name(spec.name) + (f"_{unit}" if unit else "")
    return name + "_total" if spec.instrument == "counter" else name


def matching(rows: Iterable[Exported], expected: Expected) -> list[Exported]:
    """The rows that one expectation is about."""
    return [row for row in rows if row.name == expected.spec.name and _fits(row.attributes, expected)]


def _fits(attributes: Mapping[str, str], expected: Expected) -> bool:
    for short, value in expected.labels.items():
        if KEYS[short] not in attributes or value not in (ANY, attributes[KEYS[short]]):
            return False
    return not any(KEYS[short] in attributes for short in expected.without)


_BY_LABEL = {sanitize_attribute(key): key for key in semconv.ATTRIBUTES}


def _attributes(labels: Mapping[str, str]) -> dict[str, str]:
    # A label that a family's other series have is there, empty.
    return {_BY_LABEL.get(label, label): value for label, value in labels.items() if value and label != "__name__"}
