"""The catalogue as everything else may use it: read, checked, and its closed sets expanded."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import yaml

from catalogue.model import Metric, Model, ModelError
from catalogue.parsing import Node, parse
from catalogue.rules import problems

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def load(path: Path) -> Model:
    """Read and validate the catalogue at `path`."""
    return build(yaml.safe_load(path.read_text(encoding="utf-8")))


def build(document: Node) -> Model:
    """The validated model of a parsed catalogue; raises ModelError with all that is wrong with it."""
    model = parse(document)
    if wrong := [*problems(model)]:
        raise ModelError(wrong)
    return replace(model, metrics=tuple(replace(m, values=_expanded_values(m, model)) for m in model.metrics))


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
