"""What the axes of the matrix mean: strategy entries, short keys, values that the base lacks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from shardmark.config import tables
from shardmark.config.keys import assigned, full_key

_IN_BASE = ("recipe", "measure", "workload")
"""Sections whose keys may be axes: the base then needs a value, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyEntry:
    """One value of the axis `strategy`."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    """The strategy's own."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Keys of the recipe that this entry sets for itself, without `recipe.`."""

    def accepts(self, option: str) -> bool:
        return option in tables.strategy_options(self.name)


def parse_entry(entry: str | Mapping[str, Any]) -> StrategyEntry:
    """The entry of a matrix that has been checked."""
    if isinstance(entry, str):
        return StrategyEntry(name=entry)
    shared = tables.shared_options()
    given = {key: value for key, value in entry.items() if key != "name"}
    own = {key: value for key, value in given.items() if key not in shared}
    overrides = {key: value for key, value in given.items() if key in shared}
    return StrategyEntry(name=entry["name"], options=own, overrides=overrides)


def canonical(value: object) -> str:
    """The same text for the same content, in whatever order the keys came."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=repr)


def complete(data: Mapping[str, Any]) -> dict[str, Any]:
    """The file's data with full axis keys, each axis's first value where the base has none, and
    the workload's defaults written out.  What cannot be understood stays as it is."""
    completed = named_engine(data)
    matrix = data.get("matrix")
    axes = list(map(str, matrix)) if isinstance(matrix, Mapping) else []
    if isinstance(matrix, Mapping):
        full = {full_key(str(key)): values for key, values in matrix.items()}
        if len(full) == len(matrix):
            completed["matrix"] = matrix = full
        for key, values in matrix.items():
            path = str(key).split(".")
            if path[0] in _IN_BASE and isinstance(values, list | tuple) and values:
                completed = _with_default(completed, path, values[0])
    if isinstance(data.get("workload"), Mapping) and not any(
        axis.startswith("workload.") for axis in axes
    ):
        # Whatever is wrong with it, the validator of `workload` says, at the right place.
        with suppress(ValidationError):
            completed["workload"] = tables.resolve_workload(data["workload"])
    return completed


def named_engine(data: Mapping[str, Any]) -> dict[str, Any]:
    """A copy in which an engine that is only a name is a mapping, too."""
    engine = data.get("engine")
    return {**data, "engine": {"name": engine}} if isinstance(engine, str) else dict(data)


def _with_default(data: dict[str, Any], path: list[str], value: Any) -> dict[str, Any]:
    holder: Any = data
    for part in path[:-1]:
        holder = holder.get(part, {})
        if not isinstance(holder, Mapping):
            return data
    return data if path[-1] in holder else assigned(data, path, value)
