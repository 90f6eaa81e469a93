"""JSON schema of the experiment file, for editors: completion and checks while it is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shardmark.config import tables
from shardmark.config.experiment import Experiment
from shardmark.config.keys import NOT_VARIED, VARIED_SECTIONS, meanings, model_keys

if TYPE_CHECKING:
    from pydantic import BaseModel

Schema = dict[str, Any]


def experiment_schema() -> Schema:
    """The whole file; strategies, workloads and their options come from the tables."""
    schema = Experiment.model_json_schema()
    definitions: Schema = schema.setdefault("$defs", {})
    entries = [_entry_schema(name, definitions) for name in tables.strategy_names()]
    workloads = [
        _named_schema(name, model, definitions) for name, model in tables.workload_models().items()
    ]
    schema["properties"]["workload"] = {"oneOf": workloads}
    engines = [
        _named_schema(name, model, definitions) for name, model in tables.engine_models().items()
    ]
    names = {"enum": list(tables.engine_models())}
    schema["properties"]["engine"] = {
        "oneOf": [names, *engines],
        "description": schema["properties"]["engine"]["description"],
    }
    schema["properties"]["matrix"] = _matrix_schema(
        entries, workloads, definitions, schema["properties"]["slow_ranks"]
    )
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "Shardmark experiment"
    return schema


def _hoist(schema: Schema, definitions: Schema) -> Schema:
    """The schema with its own definitions moved to the file's."""
    definitions.update(schema.pop("$defs", {}))
    return schema


def _entry_schema(name: str, definitions: Schema) -> Schema:
    """A strategy with options, as a mapping."""
    schema = _hoist(tables.strategy_schema(name), definitions)
    options = {key: schema["properties"][key] for key in tables.strategy_options(name)}
    recipe = definitions["Recipe"]["properties"]
    shared = {key: _without_default(recipe[key]) for key in tables.shared_options()}
    return {
        "type": "object",
        "title": name,
        "description": schema.get("description", ""),
        "properties": {"name": {"const": name}, **options, **shared},
        "required": ["name"],
        "additionalProperties": False,
    }


def _named_schema(name: str, model: type[BaseModel], definitions: Schema) -> Schema:
    schema = _hoist(model.model_json_schema(), definitions)
    schema["properties"] = {**schema.get("properties", {}), "name": {"const": name}}
    required = [key for key in schema.get("required", []) if key != "name"]
    return {**schema, "title": name, "required": ["name", *required], "additionalProperties": False}


def _matrix_schema(
    entries: Sequence[Schema], workloads: Sequence[Schema], definitions: Schema, slow: Schema
) -> Schema:
    names = list(tables.strategy_names())
    axes: dict[str, Schema] = {
        "strategy": {"oneOf": [{"enum": names}, *entries]},
        "world_size": {"type": "integer", "exclusiveMinimum": 0},
        "slow_ranks": slow,
    }
    for section, model in VARIED_SECTIONS:
        for key in model_keys(model, section):
            if key not in NOT_VARIED:
                axes[key] = _at(definitions[model.__name__], key.split(".")[1:], definitions)
    shorts = {key.rpartition(".")[2]: key for key in axes if "." in key}
    axes |= {short: axes[key] for short, key in shorts.items() if meanings(short) == (key,)}
    for section, group in (("strategy", entries), ("workload", workloads)):
        for key, choices in _by_option(group).items():
            axes[f"{section}.{key}"] = {"anyOf": choices}
    lists = {
        key: {"type": "array", "minItems": 1, "uniqueItems": True, "items": _without_default(item)}
        for key, item in axes.items()
    }
    description = Experiment.model_json_schema()["properties"]["matrix"].get("description", "")
    return {
        "type": "object",
        "description": description,
        "properties": lists,
        "required": ["strategy"],
        "additionalProperties": False,
    }


def _by_option(group: Sequence[Schema]) -> dict[str, list[Schema]]:
    """Option -> its different schemas in a group of strategies or workloads."""
    shared = (*tables.shared_options(), "name")
    found: dict[str, list[Schema]] = {}
    for schema in group:
        for key, option in schema["properties"].items():
            bare = _without_default(option)
            if key not in shared and bare not in found.setdefault(key, []):
                found[key].append(bare)
    return {key: choices for key, choices in found.items() if choices}


def _at(schema: Schema, path: Sequence[str], definitions: Mapping[str, Any]) -> Schema:
    """The schema of a nested field, references followed."""
    for part in path:
        reference = schema.get("$ref", "").removeprefix("#/$defs/")
        schema = (definitions[reference] if reference else schema)["properties"][part]
    return schema


def _without_default(schema: Schema) -> Schema:
    return {key: value for key, value in schema.items() if key != "default"}
