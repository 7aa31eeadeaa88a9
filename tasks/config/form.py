"""The JSON schema of Prefect's form: order, folding and descriptions of the settings.

Both of Prefect's user interfaces render all properties of an object at once. They render alternatives (`anyOf`) as
tabs, and open the tab that fits the value. A group with an empty alternative before its own therefore stays folded
until a user opens it. Neither interface evaluates `if` and `then`, which the server validates before it creates a run.

The form checks single settings. Rules across settings are written once, in the validators of the models.
"""

from collections.abc import Container, Mapping
from copy import deepcopy
from typing import Any

Schema = dict[str, Any]

FOLDED, OPEN = "Defaults", "Settings"
"""Titles of a group's two tabs."""


def _plain(number: float) -> str:
    return str(int(number)) if float(number).is_integer() else str(number)


def number_bounds(schema: Mapping[str, Any]) -> str:
    """Return the bounds of a number or a length in words, or an empty string."""
    least, most = schema.get("minimum"), schema.get("maximum")
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    if schema.get("type") == "integer":
        least = above + 1 if above is not None else least
        most = below - 1 if below is not None else most
        above = below = None
    low = f"more than {_plain(above)}" if above is not None else "" if least is None else f"at least {_plain(least)}"
    high = f"less than {_plain(below)}" if below is not None else "" if most is None else f"at most {_plain(most)}"
    if least is not None and most is not None:
        return f"{_plain(least)} to {_plain(most)}"
    return ", ".join(filter(None, (low, high)))


def length_bounds(schema: Mapping[str, Any]) -> str:
    """Return the bounds of the length of a string or list in words, or an empty string."""
    for unit, least_name, most_name in (("characters", "minLength", "maxLength"), ("entries", "minItems", "maxItems")):
        least, most = schema.get(least_name, 0), schema.get(most_name)
        if most is not None:
            return f"{least} to {most} {unit}" if least > 1 else f"at most {most} {unit}"
        if least > 1:
            return f"at least {least} {unit}"
    return ""


def bounds(schema: Mapping[str, Any]) -> str:
    """Return the bounds of a property in words, and its choices if its description does not name them all."""
    description = schema.get("description", "")
    parts = [
        text
        for alternative in (schema, *schema.get("anyOf", ()))
        for text in (number_bounds(alternative), length_bounds(alternative))
        if text
    ]
    choices = [str(choice) for choice in schema.get("enum", ())]
    if choices and not all(choice in description for choice in choices):
        parts.append(f"one of {', '.join(choices)}")
    return "; ".join(parts)


def without_null(schema: Schema) -> Schema:
    """Return a property without the alternative None if that is its default, so that the form shows an empty field.

    Prefect's server accepts None for every property without a default, so a run that passes None remains valid.
    """
    alternatives = [choice for choice in schema.get("anyOf", ()) if choice != {"type": "null"}]
    if len(alternatives) != 1 or schema.get("default", ...) is not None:
        return schema
    kept = {name: value for name, value in schema.items() if name not in {"anyOf", "default"}}
    return {**alternatives[0], **kept}


def with_bounds(schema: Schema) -> Schema:
    """Return a property with its bounds at the end of its description."""
    text = bounds(schema)
    return schema | {"description": f"{schema['description']} ({text})"} if text and "description" in schema else schema


def describe(properties: Mapping[str, Schema]) -> dict[str, Schema]:
    """Return a model's properties with bounds in their descriptions, and without None if it is the default."""
    described = {}
    for name, schema in properties.items():
        if "$ref" in schema:  # a group, which the interfaces would otherwise title with the name of its class
            described[name] = {key: value for key, value in schema.items() if key != "default"} | {"title": title(name)}
        else:
            described[name] = with_bounds(without_null(schema))
    return described


def title(name: str) -> str:
    """Return a setting's name as the form shows it."""
    return name.replace("_", " ").title()


def folded(name: str, reference: Schema, group: Schema, elsewhere: frozenset[str]) -> Schema:
    """Return the schema of a group that the form shows folded.

    Args:
        name: Name of the group.
        reference: Reference to the group's definition, which validates its values.
        group: Definition of the group.
        elsewhere: Settings that the form shows outside the group.
    """
    shown = {key: deepcopy(value) for key, value in group["properties"].items() if key not in elsewhere}
    return {
        "title": title(name),
        "description": reference.get("description") or group.get("description", ""),
        "anyOf": [
            {"title": FOLDED, "type": "object", "properties": {}},
            {"title": OPEN, "type": "object", "properties": shown},
        ],
        # Both alternatives accept any value, so that errors come from the reference and name the field, not the group.
        "if": {},
        "then": {"$ref": reference["$ref"]},
    }


def form_properties(
    properties: Mapping[str, Schema],
    groups: Mapping[str, Schema],
    first_screen: Mapping[str, tuple[str, str]],
    required: Container[str],
) -> dict[str, Schema]:
    """Return a flow's properties in the order of its form: frequently changed settings, other single ones, groups.

    Args:
        properties: Properties of the flow's model.
        groups: Definitions of the properties that are groups.
        first_screen: Settings shown first, by their name in the form, with their group and their name in it.
        required: Names of those settings that a flow run must give.
    """
    shown = {}
    for name, (group, field) in first_screen.items():
        schema = deepcopy(groups[group]["properties"][field])
        default = schema.pop("default", None)
        schema.pop("minLength", None)  # a deployment may leave it empty for the user to fill in; a rule refuses its run
        written = str(default).lower() if isinstance(default, bool) else default
        unset = "; required" if name in required else "" if default is None else f"; by default {written}"
        shown[name] = schema | {"title": title(name), "description": schema["description"] + unset}
    shown |= {name: schema for name, schema in properties.items() if name not in groups}
    for name in sorted(groups, key=lambda name: name in {"storage", "spark"}):
        moved = frozenset(field for group, field in first_screen.values() if group == name)
        shown[name] = folded(name, properties[name], groups[name], moved)
    return {name: schema | {"position": position} for position, (name, schema) in enumerate(shown.items())}


def require_setting(name: str, description: str, group: str, field: str) -> Schema:
    """Return the rule that a flow run gives a setting: at the top level and not empty, or in its group.

    The required property has a name that no setting has, so that an empty value is refused like a missing one. The
    server removes `required` when it validates a deployment, except below a list such as `allOf`.
    """
    omitted = {"properties": {name: {"const": ""}, group: {"properties": {field: {"not": {}}}}}}
    return {"if": omitted, "then": {"required": [f"{name} ({description})"]}}
