"""From the nodes of the YAML file to the model: form only, a field that is missing or not known is refused."""

from __future__ import annotations

from typing import Any

from catalogue.model import Attribute, AttributeRef, Member, Metric, Model, ModelError, Section

Node = dict[str, Any]


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
    own = _annotations(fields, where, "section", "fold identity bounds values zero recorded_by")
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
        recorded_by=tuple(own.get("recorded_by", ())),
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
