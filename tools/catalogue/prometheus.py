"""How Prometheus spells what the catalogue names."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from catalogue.model import Metric

PROMETHEUS_UNITS = {"s": "_seconds", "By": "_bytes"}
PROMETHEUS_SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}


def prometheus_name(name: str) -> str:
    """A metric name or an attribute key as Prometheus spells it."""
    return re.sub(r"[^a-zA-Z0-9:]+", "_", name)


def prometheus_names(metric: Metric) -> tuple[str, ...]:
    """The series that the Python Prometheus exporter makes of a metric."""
    base = prometheus_name(metric.name) + PROMETHEUS_UNITS.get(metric.unit, "")
    return tuple(base + suffix for suffix in PROMETHEUS_SUFFIXES.get(metric.instrument, ("",)))
