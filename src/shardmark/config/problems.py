"""Says what is wrong with an experiment: one line a mistake, with file, key, value and remedy."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from shardmark.config.axes import OWN_AXES, axis_keys
from shardmark.config.experiment import Experiment, experiment_schema
from shardmark.config.messages import Location, choices, dotted, join, near_names, show
from shardmark.core.errors import InputError

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic_core import ErrorDetails

Schema = dict[str, Any]

_WANTED = {
    **dict.fromkeys(("model_type", "model_attributes_type", "dict_type"), "a mapping (key: value)"),
    **dict.fromkeys(("list_type", "tuple_type"), "a list in brackets, e.g. [a, b]"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    "string_type": "text",
    "too_short": "at least one value",
}


def explain(
    error: ValidationError, where: Callable[[Location], str], prefix: Location = ()
) -> InputError:
    """Pydantic's findings as one `InputError`, in pydantic's order, which is the schema's.

    `where` says in which file and key (or option) a location is; `prefix` is the location of what
    was validated.
    """
    lines: dict[str, InputError] = {}
    for item in error.errors(include_url=False):
        item["loc"] = (*prefix, *item["loc"])
        location = _in_file(item)
        line = InputError(where(location), *_found_and_allowed(item, location))
        lines.setdefault(str(line), line)
    return join(list(lines.values()))


def _in_file(item: ErrorDetails) -> Location:
    """Where the user wrote it: pydantic puts in the name of a union's member."""
    location = list(item["loc"])
    tag = 3 if location[:2] == ["matrix", "strategy"] else 1
    if len(location) > tag and (tag == 3 or location[0] in ("workload", "engine")):
        del location[tag]
    if item["type"].startswith("union_tag"):
        location.append("name")
    return tuple(location)


def _found_and_allowed(item: ErrorDetails, location: Location) -> tuple[str, str]:
    """One finding of pydantic in our words."""
    context, value, place = item.get("ctx", {}), item["input"], item["loc"]
    found = f"found {show(value)}"
    match item["type"]:
        case "mistake":
            found, allowed = context["found"], context["allowed"]
        case "value_error":
            found, _, allowed = str(context["error"]).partition("; ")
            allowed = allowed or f"change {show(value)}"
        case "missing":
            found, allowed = "missing", "this key is required"
        case "extra_forbidden":
            what = "axis" if location[0] == "matrix" and len(location) == 2 else "key"
            names = _keys_at(place[:-1])
            here = near_names(place[-1], names, 0)
            there = [] if here else near_names(place[-1], _all_keys(), 0)
            found, allowed = f"no such {what}", choices(place[-1], names)
            if there:
                found, allowed = f"no such {what} here", f"nearest: {', '.join(map(repr, there))}"
            elif len(location) == 1:
                allowed += "; keys of your own, for anchors, begin with x-"
        case "union_tag_not_found":
            names, keys = _names_at(place), list(value) if isinstance(value, Mapping) else []
            found, allowed = "missing", choices("", names)
            if len(keys) == 1 and keys[0] in names:
                allowed = f"write {{name: {keys[0]}, ...}}, its options beside the name"
        case "union_tag_invalid":
            found = f"found {show(context['tag'])}"
            allowed = choices(context["tag"], _quoted(context["expected_tags"]))
        case _:
            allowed = _allowed(item, location)
    return found, allowed


def _allowed(item: ErrorDetails, location: Location) -> str:
    """What a value of the wrong kind should be."""
    kind, value = item["type"], item["input"]
    if kind == "literal_error":
        allowed = choices(value, _quoted(item["ctx"]["expected"]))
    elif kind == "string_pattern_mismatch":
        allowed = "allowed are letters, digits, '.', '_' and '-', a letter or digit first"
        allowed += f", e.g. {re.sub('[^A-Za-z0-9]+', '-', str(value)).strip('-') or 'mine'}"
    else:
        allowed = f"allowed is {_WANTED.get(kind) or item['msg'].removeprefix('Input should be ')}"
    key, listed = dotted(location), isinstance(value, list)
    mapping = _WANTED.get(kind) == _WANTED["dict_type"]
    if mapping and isinstance(value, str) and "name" in _keys_at(item["loc"]):
        allowed += f", e.g. {{name: {value}}}"
    elif kind == "list_type" and isinstance(value, str | int):
        allowed = f"allowed is a list in brackets: [{value}]"
    elif listed and key in axis_keys() and not mapping:
        allowed += f"; to compare them, make it an axis: matrix: {{{key}: {show(value)}}}"
    elif listed and mapping:
        allowed += ": write its keys without brackets and dashes"
    return allowed


def _all_keys() -> list[str]:
    """Every key of the file with its sections, those of axes without `matrix` left out."""
    sections = [(name,) for name in Experiment.model_fields if name != "matrix"]
    inner = [("recipe", "optimizer"), ("recipe", "schedule")]
    listed = [dotted((*at, key)) for at in (*sections, *inner) for key in _keys_at(at)]
    return [*listed, *(f"matrix.{axis}" for axis in OWN_AXES)]


def _quoted(text: object) -> list[str]:
    return re.findall(r"'([^']*)'", str(text))


def _keys_at(location: Location) -> tuple[str, ...]:
    """The keys allowed in the mapping at that place, as pydantic locates it: with unions' names."""
    keys = (key for mapping in _mappings_at(location) for key in mapping.get("properties", ()))
    return tuple(dict.fromkeys(keys))


def _names_at(location: Location) -> tuple[str, ...]:
    """The names of the members of the union at that place."""
    named = (mapping.get("properties", {}).get("name", {}) for mapping in _mappings_at(location))
    return tuple(name["const"] for name in named if "const" in name)


def _mappings_at(location: Location) -> list[Schema]:
    root = experiment_schema()
    mappings = [root]
    for part in location:
        mappings = [
            mapping
            for outer in mappings
            for inner in _inside(outer, part)
            for mapping in _mappings(inner, root["$defs"])
        ]
    return mappings


def _inside(schema: Schema, part: str | int) -> Iterator[Schema]:
    properties = schema.get("properties", {})
    if isinstance(part, int):
        yield schema.get("items", {})
    elif part in properties:
        yield properties[part]
    elif properties.get("name", {}).get("const") == part:
        yield schema


def _mappings(schema: Schema, definitions: Schema) -> Iterator[Schema]:
    """The schema itself, or what it refers to."""
    reference = schema.get("$ref", "").removeprefix("#/$defs/")
    members = [definitions[reference]] if reference else []
    for member in (*members, *schema.get("oneOf", ()), *schema.get("anyOf", ())):
        yield from _mappings(member, definitions)
    yield schema
