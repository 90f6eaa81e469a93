"""JSON schema of the experiment file, for editors: completion and checks while it is written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardmark.config.axes import SECTIONS, full_key, matrix_model
from shardmark.config.experiment import Experiment
from shardmark.config.problems import Location

Schema = dict[str, Any]


def experiment_schema() -> Schema:
    """The whole file; axes have their full keys and, where they are clear, their short ones."""
    schema = Experiment.model_json_schema()
    matrix = matrix_model().model_json_schema(by_alias=True)
    schema["$defs"] |= matrix.pop("$defs")
    axes = {
        key: {name: part for name, part in axis.items() if name not in ("default", "title")}
        for key, axis in matrix["properties"].items()
    }
    for key in [key for key in axes if key.partition(".")[0] in SECTIONS]:
        short = key.rpartition(".")[2]
        if full_key(short) == key:
            axes[short] = axes[key]
    described = schema["properties"]["matrix"]["description"]
    schema["properties"]["matrix"] = {**matrix, "properties": axes, "description": described}
    schema["patternProperties"] = {"^x-": {"description": "Yours: an anchor's home."}}
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "Shardmark experiment"
    return schema


def keys_at(location: Location) -> tuple[str, ...]:
    """The keys allowed in the mapping at that place, as pydantic locates it: with unions' names."""
    keys = (key for mapping in _mappings_at(location) for key in mapping.get("properties", ()))
    return tuple(dict.fromkeys(keys))


def names_at(location: Location) -> tuple[str, ...]:
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
