"""One cell of the matrix, resolved: the base of the experiment with the cell's values in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from shardmark.config import tables
from shardmark.config.axes import StrategyEntry
from shardmark.config.experiment import Experiment, SlowRanks
from shardmark.config.keys import assigned, names_at
from shardmark.config.problems import Location, dotted, explain, show
from shardmark.config.sizes import Size
from shardmark.core.recipe import Measure, Optimizer, Recipe
from shardmark.trials.trial import StrategySpec

Section = TypeVar("Section")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What one trial does, whatever the repeat."""

    workload: dict[str, Any]
    recipe: Recipe
    measure: Measure
    strategy: StrategySpec
    overrides: dict[str, Any]
    """Keys of the recipe that the strategy's entry set for itself."""
    world_size: int
    nodes: int
    values: dict[str, Any]
    """Full axis key -> value, without strategy and the sizes."""
    batch_parts: int
    """Equal parts that the global batch is cut into, micro-batches not counted."""
    slow_ranks: dict[int, float]

    @property
    def title(self) -> str:
        return describe(self.strategy, Size(world_size=self.world_size, nodes=self.nodes))


def describe(strategy: StrategySpec, size: Size | None) -> str:
    """`fsdp-hybrid (shard_group=2) on 4 ranks`, or `... on 4 ranks of 2 nodes`."""
    options = ", ".join(f"{key}={value}" for key, value in strategy.options.items())
    text = f"{strategy.name} ({options})" if options else strategy.name
    return text if size is None else f"{text} on {size}"


def resolve_cell(
    experiment: Experiment, entry: StrategyEntry, size: Size, values: dict[str, Any]
) -> Cell:
    """Raises `InputError` where the values do not go together."""
    resolve = partial(_resolve, experiment, values)
    recipe = _with_values(experiment.recipe.model_dump(mode="json"), "recipe", values)
    if "recipe.optimizer.name" in values:
        recipe["optimizer"] = _without_foreign_defaults(recipe["optimizer"], values)
    measure = _with_values(experiment.measure.model_dump(mode="json"), "measure", values)
    workload = _with_values(experiment.workload, "workload", values)
    slow = TypeAdapter(SlowRanks).validate_python(values.get("slow_ranks", experiment.slow_ranks))
    strategy = tables.build_strategy(entry.name, entry.options)
    return Cell(
        workload=resolve("workload", workload, tables.resolve_workload),
        recipe=resolve("recipe", {**recipe, **entry.overrides}, Recipe.model_validate),
        measure=resolve("measure", measure, Measure.model_validate),
        strategy=StrategySpec(name=entry.name, options=entry.options),
        overrides=entry.overrides,
        world_size=size.world_size,
        nodes=size.nodes,
        values=values,
        batch_parts=len(strategy.layout(size.world_size, size.nodes).training_ranks),
        slow_ranks=slow,
    )


def _with_values(base: dict[str, Any], section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in values.items():
        first, *path = key.split(".")
        if first == section:
            base = assigned(base, path, value)
    return base


def _without_foreign_defaults(
    optimizer: dict[str, Any], values: Mapping[str, Any]
) -> dict[str, Any]:
    """The base has its own optimizer's defaults written out, which the cell's may not have."""
    defaults = {name: field.default for name, field in Optimizer.model_fields.items()}
    foreign = [
        key
        for key in Optimizer.foreign_keys(optimizer["name"])
        if f"recipe.optimizer.{key}" not in values
    ]
    return {
        key: value
        for key, value in optimizer.items()
        if key not in foreign
        or (tuple(value) if isinstance(value, list) else value) != defaults[key]
    }


def _resolve(
    experiment: Experiment,
    values: Mapping[str, Any],
    section: str,
    data: dict[str, Any],
    validate: Callable[[dict[str, Any]], Section],
) -> Section:
    own = {key: value for key, value in values.items() if key.startswith(f"{section}.")}
    cell = ", ".join(f"{key}={show(value)}" for key, value in own.items())

    def where(location: Location) -> str:
        place = f"{experiment.name}: {dotted((section, *location))}"
        return f"{place} in the cells with {cell}" if cell else place

    try:
        return validate(data)
    except ValidationError as error:
        raise explain(error, where, lambda inner: names_at((section, *inner), data)) from None
