"""Error messages for an invalid experiment: one line a mistake, with place, value and remedy."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardmark.base.errors import InputError
from shardmark.base.system.modules import find_without_import
from shardmark.experiment.axes import MATRIX_ONLY_AXES, axis_keys
from shardmark.experiment.experiment import Experiment, experiment_schema
from shardmark.experiment.messages import Location, choices, dotted, join, near_names, show

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic_core import ErrorDetails

Schema = dict[str, Any]

TYPO_SIMILARITY = 0.85
"""Similarity from which a key is a typo of one in its section, not a key in the wrong section."""

_EXPECTED = {
    **dict.fromkeys(("model_type", "model_attributes_type", "dict_type"), "a mapping (key: value)"),
    **dict.fromkeys(("list_type", "tuple_type"), "a list in brackets, e.g. [a, b]"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    "string_type": "text",
    "too_short": "at least one value",
}
_MEMBER = re.compile(
    r"(bool|int|float|str|list|tuple)$|(constrained|function)-|(literal|list|tuple)\["
)
"""Names that pydantic gives to the members of a union of simple types."""


def explain(
    error: ValidationError, place_of: Callable[[Location], str], prefix: Location = ()
) -> InputError:
    """Convert pydantic's errors to one `InputError`, in the order of the schema.

    `place_of` returns the file and key, or the option, of a location.  `prefix` is the location of
    the validated value.
    """
    allowed_by_problem: dict[tuple[str, str], dict[str, None]] = {}
    for item in error.errors(include_url=False):
        item["loc"] = (*prefix, *item["loc"])
        location = _in_file(item)
        problem, allowed = _problem_and_allowed(item, location)
        allowed_by_problem.setdefault((place_of(location), problem), {})[allowed] = None
    errors = list[InputError]()
    for at, (first, *others) in allowed_by_problem.items():  # members of a union allow several
        any_of = [first, *(re.sub(r"^allowed (is|are) ", "", text) for text in others)]
        errors.append(InputError(*at, " or ".join(any_of)))
    return join(errors)


def _in_file(item: ErrorDetails) -> Location:
    """Return the location in the file, without the name of a union's member that pydantic adds."""
    location = list(item["loc"])
    tag = 3 if location[:2] == ["matrix", "strategy"] else 1
    if len(location) > tag and (tag == 3 or location[0] in ("workload", "engine")):
        del location[tag]
    if item["type"].startswith("union_tag"):
        location.append("name")
    if isinstance(location[-1], str) and _MEMBER.match(location[-1]):
        del location[-1]
    return tuple(location)


def _problem_and_allowed(item: ErrorDetails, location: Location) -> tuple[str, str]:
    """Describe the problem of one pydantic error, and what is allowed instead."""
    context, value, place = item.get("ctx", {}), item["input"], item["loc"]
    problem = f"found {show(value)}"
    match item["type"]:
        case "mistake":
            problem, allowed = context["problem"], context["allowed"]
        case "value_error":
            problem, _, allowed = str(context["error"]).partition("; ")
            allowed = allowed or f"change {show(value)}"
        case "missing":
            problem, allowed = "missing", "this key is required"
        case "extra_forbidden":
            noun = "axis" if location[0] == "matrix" and len(location) == 2 else "key"
            names = _keys_at(place[:-1])
            is_near = near_names(place[-1], names, 0) or get_close_matches(
                str(place[-1]), names, n=1, cutoff=TYPO_SIMILARITY
            )
            elsewhere = [] if is_near else near_names(place[-1], _all_keys(), 0)
            problem, allowed = f"no such {noun}", choices(place[-1], names)
            if elsewhere:
                problem = f"no such {noun} here"
                allowed = f"nearest: {', '.join(map(repr, elsewhere))}"
                if dotted(location) in elsewhere:
                    allowed = f"another kind of {location[0]} has it; leave it out"
            elif len(location) == 1:
                allowed += "; keys of your own, for anchors, begin with x-"
        case "union_tag_not_found":
            named = (one.get("properties", {}).get("name", {}) for one in _mappings_at(place))
            names = tuple(name["const"] for name in named if "const" in name)
            keys = list(value) if isinstance(value, Mapping) else []
            problem, allowed = "missing", choices("", names)
            if len(keys) == 1 and keys[0] in names:
                allowed = f"write {{name: {keys[0]}, ...}}, its options beside the name"
        case "union_tag_invalid":
            problem = f"found {show(context['tag'])}"
            allowed = choices(context["tag"], _quoted(context["expected_tags"]))
        case _:
            allowed = _allowed(item, location)
    return problem, allowed


CLASS = re.compile(r"^class (\w+)\(Optimizer", re.MULTILINE)


def _optimizer_of_torch(name: str) -> str | None:
    """Return `module:Class` of the optimizer of torch that has this name, in any case."""
    spec = find_without_import("torch.optim")
    files = (Path(folder) for folder in (spec and spec.submodule_search_locations) or ())
    sources = (file.read_text() for folder in files for file in folder.glob("[!_]*.py"))
    classes = (match for source in sources for match in re.findall(CLASS, source))
    wanted = re.sub(r"[-_]", "", name.lower())
    return next((f"torch.optim:{match}" for match in classes if match.lower() == wanted), None)


def _allowed(item: ErrorDetails, location: Location) -> str:
    """Describe the values that are allowed in place of one of the wrong type."""
    error_type, value = item["type"], item["input"]
    expected = _EXPECTED.get(error_type)
    if error_type == "literal_error":
        expected_values = str(item["ctx"]["expected"])
        numbers = re.findall(r"[\d.]+", expected_values)
        allowed = choices(value, _quoted(expected_values) or numbers)
    elif error_type == "string_pattern_mismatch":
        allowed = "allowed are letters, digits, '.', '_' and '-', a letter or digit first"
        allowed += f", e.g. {re.sub('[^A-Za-z0-9]+', '-', str(value)).strip('-') or 'mine'}"
    else:
        allowed = f"allowed is {expected or item['msg'].removeprefix('Input should be ')}"
    key, is_list = dotted(location), isinstance(value, list)
    path = _optimizer_of_torch(str(value)) if key == "recipe.optimizer.name" else None
    if path and f"'{str(value).lower()}'" not in str(item.get("ctx")):  # one that has a name here
        allowed = f"write {{name: own, path: {path}}}, its options beside the name"
    expects_mapping = expected == _EXPECTED["dict_type"]
    if expects_mapping and isinstance(value, str) and "name" in _keys_at(item["loc"]):
        allowed += f", e.g. {{name: {value}}}"
    elif error_type == "list_type" and isinstance(value, str | int):
        allowed = f"allowed is a list in brackets: [{value}]"
    elif is_list and key in axis_keys() and not expects_mapping:
        allowed += f"; to compare them, make it an axis: matrix: {{{key}: {show(value)}}}"
    elif is_list and expects_mapping:
        allowed += ": write its keys without brackets and dashes"
    return allowed


def _all_keys() -> list[str]:
    """Return every key of the file with its sections; only axes of `matrix` are included."""
    sections = [(name,) for name in Experiment.model_fields if name != "matrix"]
    inner = [("recipe", "optimizer"), ("recipe", "schedule")]
    listed = [dotted((*at, key)) for at in (*sections, *inner) for key in _keys_at(at)]
    return [*listed, *(f"matrix.{axis}" for axis in MATRIX_ONLY_AXES)]


def _quoted(text: object) -> list[str]:
    return re.findall(r"'([^']*)'", str(text))


def _keys_at(location: Location) -> tuple[str, ...]:
    """Return the keys of the mapping at this location, which includes names of union members."""
    keys = (key for mapping in _mappings_at(location) for key in mapping.get("properties", ()))
    return tuple(dict.fromkeys(keys))


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
    """Yield the mappings that a schema refers to, and the schema."""
    reference = schema.get("$ref", "").removeprefix("#/$defs/")
    members = [definitions[reference]] if reference else []
    for member in (*members, *schema.get("oneOf", ()), *schema.get("anyOf", ())):
        yield from _mappings(member, definitions)
    yield schema
