"""Compares JSON output with the tables of fields in `docs/reference/json.md`."""

from __future__ import annotations

import re
from functools import cache
from typing import Any, NamedTuple

from tests import ROOT

PAGE = ROOT / "docs" / "reference" / "json.md"
ROW = re.compile(r"^\| `([^`]+)` \| ([^|]+) \|", re.MULTILINE)
ESTIMATE = {"value", "low", "high", "unit", "n"}
PYTHON_TYPES: dict[str, type | tuple[type, ...]] = {
    "text": str,
    "number": (int, float),
    "boolean": bool,
    "mapping": dict,
    "list": list,
}


class Field(NamedTuple):
    """A row of a table: names from the document to the value, and the kinds of the value."""

    path: tuple[str, ...]
    """Keys; `[]` stands for an element of a list, a name in capitals for any key."""
    kinds: frozenset[str]
    optional: bool


@cache
def fields_of(document: str) -> tuple[Field, ...]:
    """The documented fields of a document, by the heading of its section."""
    section = PAGE.read_text(encoding="utf-8").partition(f"\n## {document}\n")[2]
    return tuple(
        Field(
            path=tuple(path.replace("[]", ".[]").split(".")),
            kinds=frozenset(kinds.removesuffix(", optional").split(" or ")),
            optional=kinds.endswith(", optional"),
        )
        for path, kinds in ROW.findall(section.partition("\n## ")[0])
    )


def problems_of(document: str, printed: Any) -> list[str]:
    """List fields that the page does not describe, and described fields that the JSON lacks."""
    fields = fields_of(document)
    assert fields, f"no section {document!r} in {PAGE.name}"
    return list(dict.fromkeys(_problems((), printed, fields)))


def _problems(at: tuple[str, ...], value: Any, fields: tuple[Field, ...]) -> list[str]:
    name = ".".join(at) or "the document"
    exact = [field for field in fields if len(field.path) == len(at)]
    if exact and any(_is_of(value, kind) for field in exact for kind in field.kinds):
        return []
    below = [field for field in fields if len(field.path) > len(at)]
    if not below:
        kinds = sorted({kind for field in exact for kind in field.kinds})
        return [f"{name} is {value!r}, documented as {' or '.join(kinds)}"]
    depth = len(at)
    if isinstance(value, list):
        inner = tuple(field for field in below if field.path[depth] == "[]")
        if not inner:
            return [f"{name} is a list, which is not documented"]
        return [text for item in value for text in _problems((*at, "[]"), item, inner)]
    if not isinstance(value, dict):
        return [f"{name} is {value!r}, documented as a mapping or list"]
    found = []
    for key, item in value.items():
        inner = tuple(field for field in below if field.path[depth] == key)
        inner = inner or tuple(field for field in below if field.path[depth].isupper())
        found += _problems((*at, key), item, inner) if inner else [f"{name}.{key}: no such field"]
    for field in below:
        key = field.path[depth]
        if key != "[]" and not (key.isupper() or field.optional or key in value):
            found.append(f"{name} has no {key}")
    return found


def _is_of(value: Any, kind: str) -> bool:
    if kind in ("any", "null"):
        return kind == "any" or value is None
    if kind == "estimate":
        return value is None or (isinstance(value, dict) and value.keys() == ESTIMATE)
    if kind == "list of text":
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    if isinstance(value, bool):  # which Python takes for a number, too
        return kind == "boolean"
    return isinstance(value, PYTHON_TYPES[kind])
