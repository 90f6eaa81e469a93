"""`--set key=value`: changes the file's data before they are checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardmark.config.axes import named_engine
from shardmark.config.keys import assigned, engine_keys, fixed_keys, full_key, workload_keys
from shardmark.config.problems import choices, dotted, show
from shardmark.core.errors import InputError
from shardmark.core.recipe import EXCLUSIVE
from shardmark.core.strict_yaml import parse_yaml


@dataclass(frozen=True, slots=True)
class Override:
    """One `--set`."""

    path: tuple[str, ...]
    """Keys from the outside in; an axis is one key, dots and all."""
    value: Any

    @property
    def option(self) -> str:
        return f"--set {dotted(self.path)}"


def parse_override(text: str) -> Override:
    """`recipe.steps=10`; the value is read as YAML."""
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not all(key.split(".")):
        raise InputError(f"--set {text}", "not key=value", "allowed is e.g. recipe.steps=10")
    section, _, rest = key.partition(".")
    if section == "matrix" and rest:
        path: tuple[str, ...] = ("matrix", full_key(rest))
    else:
        path = tuple(key.split("."))
    return Override(path, parse_yaml(value, f"--set {key}"))


def apply_overrides(data: Mapping[str, Any], overrides: Sequence[Override]) -> dict[str, Any]:
    """A copy of the file's data with the overrides, in order; the last of equal keys holds.

    A key of the file that excludes an overridden one is dropped: `recipe.steps=10` drops `epochs`.
    """
    changed = named_engine(data)
    for override in overrides:
        if override.path == ("engine", "name"):
            changed = _without_other_engine(changed, override.value)
        if override.path[0] == "matrix" and len(override.path) > 1:
            changed = _without_short_key(changed, override.path[1])
        _check_holders(changed, override)
        changed = assigned(changed, override.path, override.value)
    for override in overrides:
        _check_key(changed, override)
        _check_not_an_axis(changed, override)
    return _without_excluded(changed, overrides)


def _without_short_key(data: dict[str, Any], axis: str) -> dict[str, Any]:
    matrix = data.get("matrix")
    if not isinstance(matrix, Mapping):
        return data
    return {**data, "matrix": {k: v for k, v in matrix.items() if full_key(str(k)) != axis}}


def _without_other_engine(data: dict[str, Any], name: Any) -> dict[str, Any]:
    """The options of the file's engine say nothing about another."""
    engine = data.get("engine")
    same = isinstance(engine, Mapping) and engine.get("name") == name
    return data if same else {key: value for key, value in data.items() if key != "engine"}


def _check_holders(data: Mapping[str, Any], override: Override) -> None:
    holder: Any = data
    for depth, key in enumerate(override.path[:-1], start=1):
        holder = holder.get(key)
        if holder is None:
            return
        if not isinstance(holder, Mapping):
            found = f"{dotted(override.path[:depth])} is {show(holder)}"
            raise InputError(override.option, found, "it has no keys inside that could be set")


def _check_key(data: Mapping[str, Any], override: Override) -> None:
    key = dotted(override.path)
    workload = data.get("workload")
    known = [*fixed_keys(), *workload_keys(workload), *engine_keys(data.get("engine"))]
    if override.path[0] == "matrix" or key in known:
        return
    if override.path[0] == "workload" and len(workload_keys(workload)) == 1:
        return  # The workload's name is wrong, which is said when it is checked.
    short = full_key(key)
    allowed = f"allowed is {short}" if short != key else choices(key, known)
    raise InputError(override.option, "no such key", allowed)


def _check_not_an_axis(data: Mapping[str, Any], override: Override) -> None:
    key, matrix = dotted(override.path), data.get("matrix")
    for axis in matrix if isinstance(matrix, Mapping) else ():
        full = full_key(str(axis))
        if full == key or key.startswith(f"{full}."):
            found = f"{full} is an axis of the matrix, which would hide this"
            raise InputError(override.option, found, f"set matrix.{full} to a list instead")


def _without_excluded(data: dict[str, Any], overrides: Sequence[Override]) -> dict[str, Any]:
    recipe = data.get("recipe")
    given = {override.path: override.value for override in overrides}
    if not isinstance(recipe, Mapping) or ("recipe",) in given:
        return data
    dropped = {
        excluded
        for pair in EXCLUSIVE
        for kept, excluded in (pair, pair[::-1])
        if given.get(("recipe", kept)) is not None and ("recipe", excluded) not in given
    }
    return {**data, "recipe": {k: v for k, v in recipe.items() if k not in dropped}}
