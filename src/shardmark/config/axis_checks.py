"""What can be wrong with the matrix itself, before its cells are made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import InitErrorDetails

from shardmark.config import tables
from shardmark.config.axes import StrategyEntry, canonical, parse_entry
from shardmark.config.experiment import Placement, SlowRanks
from shardmark.config.keys import assigned, axis_keys, full_key, meanings, names_at
from shardmark.config.problems import (
    Location,
    choices,
    found_and_allowed,
    mistake,
    refuse,
    show,
)
from shardmark.config.sizes import MOST_RANKS
from shardmark.core.errors import InputError
from shardmark.core.recipe import Measure, Recipe

_SECTIONS: dict[str, type[BaseModel]] = {
    "recipe": Recipe,
    "placement": Placement,
    "measure": Measure,
}
_Mistakes = Iterator[InitErrorDetails]


def check_matrix(matrix: Mapping[str, list[Any]], workload: Mapping[str, Any] | None) -> None:
    """Raise pydantic's `ValidationError` for keys and values that cannot be an axis.

    Without a workload, which is then wrong itself, its axes are not looked at.
    """
    mistakes = list(_Check(matrix, workload).mistakes())
    if mistakes:
        refuse(mistakes)


@dataclass(frozen=True, slots=True)
class _Check:
    matrix: Mapping[str, list[Any]]
    workload: Mapping[str, Any] | None

    def mistakes(self) -> _Mistakes:
        if "strategy" not in self.matrix:
            allowed = f"give a list of some of {', '.join(tables.strategy_names())}"
            yield mistake(("strategy",), "missing", allowed, self.matrix)
        known = axis_keys(self.workload, [entry.name for entry in self.entries()])
        for key, values in self.matrix.items():
            if self.workload is None and key.startswith("workload."):
                continue
            about_key = list(self.about_key(key, known))
            yield from about_key or self.about_values(key, values)

    def entries(self) -> Iterator[StrategyEntry]:
        """The strategy entries that name a strategy of the table."""
        for value in self.matrix.get("strategy", []):
            name = value.get("name") if isinstance(value, Mapping) else value
            if isinstance(name, str) and name in tables.strategy_names():
                yield parse_entry(value)

    def about_key(self, key: str, known: tuple[str, ...]) -> _Mistakes:
        outer = [other for other in self.matrix if key.startswith(f"{other}.")]
        if full_key(key) != key:
            yield mistake((key,), f"the same axis as {full_key(key)}", "give it once", key)
        elif len(meanings(key)) > 1:
            allowed = f"allowed is one of {', '.join(meanings(key))}"
            yield mistake((key,), "this short key has several meanings", allowed, key)
        elif key not in known:
            yield mistake((key,), "no such axis", choices(key, known), key)
        elif outer and outer != ["strategy"]:
            yield mistake((key,), f"{outer[0]} is an axis, too, and sets it", "keep one", key)

    def about_values(self, key: str, values: list[Any]) -> _Mistakes:
        if not values:
            yield mistake((key,), "an empty list", "give at least one value", values)
        seen: dict[str, int] = {}
        for index, value in enumerate(values):
            first = seen.setdefault(_identity(key, value), index)
            if first != index:
                found = f"{show(value)} is given twice, first as [{first}]"
                yield mistake((key, index), found, "give it once", value)
            else:
                yield from self.about_value(key, (key, index), value)

    def about_value(self, key: str, at: Location, value: Any) -> _Mistakes:
        section, _, rest = key.partition(".")
        path = rest.split(".")
        if key == "strategy":
            yield from self.about_entry(at, value)
        elif key == "world_size":
            if type(value) is not int or not 1 <= value <= MOST_RANKS:
                allowed = f"allowed is a whole number from 1 to {MOST_RANKS}"
                yield mistake(at, f"found {show(value)}", allowed, value)
        elif key == "slow_ranks":
            yield from _below("", [], at, lambda: TypeAdapter(SlowRanks).validate_python(value))
        elif section == "strategy":
            yield from self.about_option(at, rest, value)
        elif section == "workload":
            workload = assigned(self.workload or {}, path, value)
            yield from _below(section, path, at, lambda: tables.resolve_workload(workload))
        else:
            model = _SECTIONS[section]
            data = assigned({}, path, value)
            yield from _below(section, path, at, lambda: model.model_validate(data))

    def about_entry(self, at: Location, value: Any) -> _Mistakes:
        names = tables.strategy_names()
        name = value.get("name") if isinstance(value, Mapping) else value
        if isinstance(value, Mapping) and "name" not in value:
            yield mistake(at, f"found {show(value)} without a name", choices("", names), value)
        elif not isinstance(name, str):
            allowed = "allowed is a strategy's name or a mapping with its name and options"
            yield mistake(at, f"found {show(name)}", allowed, value)
        elif name not in names:
            yield mistake(at, f"found {show(name)}", choices(name, names), value)
        else:
            yield from self.about_known_entry(at, parse_entry(value))

    def about_known_entry(self, at: Location, entry: StrategyEntry) -> _Mistakes:
        for key, value in entry.overrides.items():
            if f"recipe.{key}" in self.matrix:
                found = f"{show(value)}, but recipe.{key} is an axis of the matrix"
                yield mistake((*at, key), found, "keep one of the two", value)
            validate = partial(Recipe.model_validate, {key: value})
            yield from _below("recipe", [key], (*at, key), validate)
        for key, value in entry.options.items():
            if f"strategy.{key}" in self.matrix:
                found = f"{show(value)}, but strategy.{key} is an axis of the matrix"
                yield mistake((*at, key), found, "keep one of the two", value)
        yield from _from_table(at, entry.name, entry.options)

    def about_option(self, at: Location, option: str, value: Any) -> _Mistakes:
        for entry in self.entries():
            if option in tables.strategy_options(entry.name):
                yield from _from_table(at, entry.name, {option: value})


def _identity(key: str, value: object) -> str:
    if key == "strategy" and isinstance(value, Mapping) and set(value) == {"name"}:
        value = value["name"]
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return canonical(value)


def _from_table(at: Location, name: str, options: Mapping[str, Any]) -> _Mistakes:
    try:
        tables.build_strategy(name, options)
    except InputError as error:
        where, found, allowed = error.args
        yield mistake(at, f"{where}: {found}", allowed, options)


def _below(
    section: str, path: list[str], at: Location, validate: Callable[[], object]
) -> _Mistakes:
    """The mistakes that validation finds at or below the path, moved to the place of the axis.

    Others are not the value's: the rest of the section is checked elsewhere, or with each cell.
    """
    try:
        validate()
    except ValidationError as error:
        for item in error.errors(include_url=False):
            location = item["loc"]
            if list(location[: len(path)]) == path:
                names = names_at((section, *location[:-1]), None)
                found, allowed = found_and_allowed(item, names)
                yield mistake((*at, *location[len(path) :]), found, allowed, item["input"])
