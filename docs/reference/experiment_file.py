"""The page of the experiment file, from the JSON schema and what the source says of its keys."""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from collections.abc import Iterator, Mapping
from itertools import groupby, pairwise
from typing import Any

from markup import code, page, paragraphs, table

from shardmark.experiment.experiment import experiment_schema
from shardmark.ranks.strategies import SHARED_OPTIONS, fixed_options, strategy_class

Schema = Mapping[str, Any]


def experiment_file() -> str:
    """Every key of the experiment file, from the JSON schema that editors use."""
    schema = experiment_schema()
    definitions: Schema = schema["$defs"]
    properties: Schema = schema["properties"]
    lines = [
        "`shardmark schema` prints the JSON schema that this page is made from, for editors. An",
        "unknown key or a wrong value ends with exit code 2 and a message that names file, key,",
        "value and what is allowed. Where a key has no default, it must be given, or its default",
        "depends on others. Top-level keys that begin with `x-` are yours: a home for anchors.",
        "",
        "## Top level",
        "",
        *key_table({"properties": properties, "required": schema.get("required", [])}, definitions),
    ]
    for key in ("recipe", "recipe.optimizer", "recipe.schedule", "measure", "measure.repeats"):
        lines += section(f"`{key}`", mapping_of(definitions, key), definitions)
    lines += section("`limits`", mapping_of(definitions, "limits"), definitions)
    for key in ("workload", "engine"):
        for options in union_members(properties[key], definitions):
            name = options["properties"]["name"]["const"]
            lines += section(f"`{key}` of the name `{name}`", options, definitions)
    lines += section("`workload.adapter`", mapping_of(definitions, "adapter"), definitions)
    lines += ["## `matrix`", "", *MATRIX.splitlines(), "", *strategies(properties, definitions)]
    return page("Experiment file", lines)


MATRIX = """\
Each key is an axis with the list of its values; every combination is a cell. `strategy` is
required. `world_size` is 2 unless it is given. Any other key above may be an axis by its dotted
name, such as `workload.model` or `recipe.precision`, and by its last part alone where no other key
ends so, such as `precision` or `lr`. `measure.repeats` and the limits are the same for all cells.
An entry of `strategy` is a name, or a mapping with the strategy's options and with keys of the
recipe for this strategy alone: `{name: fsdp-hybrid, shard_group: 2}`."""


def mapping_of(definitions: Schema, key: str) -> Schema:
    """What may stand there as a mapping."""
    found: Schema = definitions[key.rpartition(".")[2].capitalize()]
    members = found.get("anyOf", [found])
    return next(member for member in members if "properties" in member)


def section(title: str, schema: Schema, definitions: Schema) -> list[str]:
    described = [*paragraphs(schema.get("description", ""))]
    return [f"## {title}", "", *described, *key_table(schema, definitions)]


def key_table(schema: Schema, definitions: Schema) -> list[str]:
    required = schema.get("required", [])
    rows = [
        (
            code(name),
            kind(value, definitions),
            "required" if name in required else default_of(value),
            value.get("description", ""),
        )
        for name, value in schema["properties"].items()
    ]
    return table(("key", "value", "default", "meaning"), rows)


def default_of(schema: Schema) -> str:
    if "default" not in schema or isinstance(schema["default"], Mapping):
        return ""
    return code(json.dumps(schema["default"]).strip('"'))


def kind(schema: Schema, definitions: Schema) -> str:
    """What a value may be, in words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        number = "a whole number or " if "anyOf" in definitions[name] else ""
        return f"{number}a mapping: see `{name.lower()}` below"
    if "const" in schema:
        return code(schema["const"])
    if "enum" in schema:
        return ", ".join(code(json.dumps(value).strip('"')) for value in schema["enum"])
    if "oneOf" in schema:
        return "a mapping with its `name`"
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(kind(one, definitions) for one in schema["anyOf"]))
    return KINDS.get(schema.get("type", ""), "any value") + bounds(schema)


KINDS = {
    "string": "text",
    "integer": "whole number",
    "number": "number",
    "boolean": "true or false",
    "array": "list",
    "object": "mapping",
    "null": "null",
}
BOUNDS = {
    "exclusiveMinimum": "over",
    "minimum": "at least",
    "exclusiveMaximum": "below",
    "maximum": "at most",
}


def bounds(schema: Schema) -> str:
    given = [f"{word} {schema[key]:,}" for key, word in BOUNDS.items() if key in schema]
    return f" {' and '.join(given)}" if given else ""


def union_members(union: Schema, definitions: Schema) -> list[Schema]:
    references = [member["$ref"] for member in union["oneOf"] if "$ref" in member]
    return [definitions[reference.rpartition("/")[2]] for reference in references]


def strategies(properties: Schema, definitions: Schema) -> Iterator[str]:
    """Each class of strategies with its options, without those that all of them take."""
    shared = ", ".join(map(code, SHARED_OPTIONS))
    yield "## Strategies"
    yield ""
    yield f"Beside the options below, each entry of `strategy` may set {shared}, as in `recipe`."
    yield ""
    entries = union_members(properties["matrix"]["properties"]["strategy"]["items"], definitions)
    docs: dict[str, str] = {}  # an option that two classes have is described in the first
    for (one, _), members in groupby(entries, key=same_options):
        same = list(members)
        docs |= attribute_docstrings(one)
        own = {
            key: value
            for key, value in same[0]["properties"].items()
            if key != "name" and key not in SHARED_OPTIONS
        }
        yield "### " + ", ".join(code(entry["title"]) for entry in same)
        yield ""
        yield from paragraphs(inspect.getdoc(one) or "")
        yield from set_by_the_name(same[0]["title"])
        if own:
            yield from key_table(documented({"properties": own}, docs), definitions)
        else:
            yield "It has no options of its own."
            yield ""


def set_by_the_name(strategy: str) -> Iterator[str]:
    """Which option of its class the strategy's name stands for."""
    fixed = {k: v for k, v in fixed_options(strategy).items() if k not in ("name", "stage")}
    for option, value in fixed.items():
        yield f"The name stands for {code(f'{option}: {json.dumps(value)}')}."
        yield ""


def same_options(entry: Schema) -> tuple[type, list[str]]:
    """What entries have in common that are described together."""
    return strategy_class(entry["title"]), [*entry["properties"]]


def documented(schema: Schema, docs: Mapping[str, str]) -> Schema:
    """The schema with what the source says of its keys."""
    properties = {
        key: {"description": docs.get(key, ""), **value}
        for key, value in schema["properties"].items()
    }
    return {**schema, "properties": properties}


def attribute_docstrings(described: type) -> dict[str, str]:
    """Field -> the string below it in the class's source, base classes included."""
    found: dict[str, str] = {}
    for one in reversed(described.__mro__[:-1]):
        try:
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(one))).body
        except (OSError, TypeError):
            continue  # a class without source has no fields of ours
        assert isinstance(tree, ast.ClassDef)
        for field, text in pairwise(tree.body):
            match field, text:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(docstring))),
                ):
                    found[name] = inspect.cleandoc(docstring)
    return found
