"""The page `docs/metrics.md`, from the catalogue."""

from __future__ import annotations

from catalogue import COMMAND, MODEL
from catalogue.markdown import anchor, link, table, wrapped
from catalogue.model import ENGINE, FOLDS, REASON, WATCH, Attribute, AttributeRef, Member, Metric, Model, Section
from catalogue.prometheus import prometheus_names
from catalogue.words import listed


def render_docs(model: Model) -> str:
    """The reference of all metrics and attributes."""
    sections = [_render_section(section, model) for section in model.sections]
    blocks = [DOCS_INTRO, _render_contents(model), _render_attribute_table(model), _render_value_tables(model)]
    return "\n".join([*blocks, *sections, _render_bounds(model)])


DOCS_INTRO = f"""\
<!-- Generated from {MODEL} by tools/generate.py. Do not edit: change the catalogue and run `{COMMAND}`. -->

# Metrics

The vocabulary of kvcache-otel, with every name in OpenTelemetry and in Prometheus. Of each metric it is said which
engines record it today; what one version of an engine cannot tell of that, `kvcache-otel doctor` lists.

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
in the same way, so `kvcache.tier` is the label `kvcache_tier`. A series without an attribute that others of its metric
have carries the label empty, which to Prometheus is the same: failures are `{{error_type!=""}}`.
"""


def _render_contents(model: Model) -> str:
    lines = ["## Contents\n\n- [Attributes](#attributes)\n"]
    for section in model.sections:
        metrics = [link(metric.name) for metric in _metrics_in(section, model)]
        entry = "".join(f"  - {metric}\n" for metric in metrics)
        lines.append(f"- [{section.title}](#{anchor(section.title)})\n{entry}")
    lines.append("- [Histogram bounds](#histogram-bounds)\n")
    return "".join(lines)


def _render_attribute_table(model: Model) -> str:
    rows = [(f"`{a.name}`", a.type, _described(a), _values_cell(a)) for a in model.used_attributes()]
    identity = listed([f"`{name}`" for name in model.identity], "and")
    return (
        "## Attributes\n\n"
        f"{wrapped(f'Every series recorded inside an engine carries {identity}. {RECEIVED}')}\n"
        f"{table(('Attribute', 'Type', 'Meaning', 'Values'), rows)}"
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
    meanings = table(("Value", "Meaning"), rows)
    return f"<details>\n<summary><code>{attribute.name}</code></summary>\n\n{meanings}\n</details>\n"


def _reserved(attribute: Attribute, member: Member) -> str:
    users = (attribute.only_in or {}).get(member.value)
    return f" Only in {listed([f'`{user}`' for user in users])}." if users else ""


def _render_section(section: Section, model: Model) -> str:
    metrics = "\n".join(_render_metric_docs(metric, model) for metric in _metrics_in(section, model))
    return f"## {section.title}\n\n{wrapped(section.brief)}\n{metrics}"


def _render_metric_docs(metric: Metric, model: Model) -> str:
    observable = ", observable" if metric.instrument in ("updowncounter", "gauge") else ""
    names = "<br>".join(f"`{name}`" for name in prometheus_names(metric))
    fold = FOLDS[metric.fold] if metric.fold else "none"
    facts = [(metric.instrument + observable, f"`{metric.unit}`", fold, names)]
    parts = [
        f"### `{metric.name}`\n",
        wrapped(f"{metric.brief} {metric.note}".strip()),
        table(("Instrument", "Unit", "Fold", "In Prometheus"), facts),
    ]
    if metric.attributes:
        rows = [_ref_row(ref, metric, model) for ref in metric.attributes]
        parts.append(table(("Attribute", "Present", "Values"), rows))
    if metric.zero:
        presets = listed([f"`{name}`" for name in metric.zero], "and")
        parts.append(wrapped(f"Every combination of {presets} is present from the start, at zero."))
    parts.append(f"Recorded by: {_recorders(metric, model)}.\n")
    return "\n".join(parts)


def _recorders(metric: Metric, model: Model) -> str:
    briefs = {member.value: member.brief.removesuffix(".") for member in model.known(ENGINE).members}
    briefs[WATCH] = "`kvcache-otel watch`"
    recorders = [briefs[recorder] for recorder in metric.recorded_by]
    return listed(recorders, "and") if recorders else "nothing, as yet"


def _ref_row(ref: AttributeRef, metric: Metric, model: Model) -> tuple[str, str, str]:
    attribute = model.known(ref.name)
    values = metric.values.get(ref.name, attribute.values) if attribute.closed else ()
    cell = ", ".join(f"`{value}`" for value in values) or ("open" if attribute.type == "string" else "integers")
    return (f"`{ref.name}`", ref.condition or "always", f"{cell}. {ref.note}" if ref.note else cell)


def _render_bounds(model: Model) -> str:
    lines = ["## Histogram bounds\n"]
    for name, bounds in model.bounds.items():
        users = listed(sorted({f"`{m.unit}`" for m in model.metrics if m.bounds == name}), "and")
        lines.append(wrapped(f"Every {name}, in {users}: {', '.join(f'{bound:g}' for bound in bounds)}."))
    return "\n".join(lines)


def _metrics_in(section: Section, model: Model) -> list[Metric]:
    return [metric for metric in model.metrics if metric.section == section.id]
