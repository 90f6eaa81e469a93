"""The experiment file: the one place where a user's wishes enter.  Imports no torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from shardmark.config.axes import BareName, check_matrix
from shardmark.config.engines import EngineOptions, LocalOptions
from shardmark.core.recipe import Limits, Measure, Model, Placement, Recipe, SlowRanks
from shardmark.workloads import TaskOptions

ENGINE_NAMES = ("local", "torchrun", "ray", "slurm")


class Experiment(Model):
    """The whole file.  `matrix` has full keys, e.g. `recipe.precision` for `precision`."""

    name: str = Field(pattern="^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")
    """Names the run's folder, too."""
    workload: TaskOptions
    recipe: Recipe
    matrix: dict[str, list[Any]]
    """Dotted key -> the values to try; every combination is a cell."""
    placement: Placement = Placement()
    measure: Measure = Measure()
    limits: Limits = Limits()
    engine: Annotated[EngineOptions, BareName(ENGINE_NAMES)] = LocalOptions()
    """Who starts the ranks, and its options; a name alone is enough where they are not needed."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    slow_ranks: SlowRanks = Field(
        default_factory=dict, json_schema_extra={"propertyNames": {"pattern": "^[0-9]+$"}}
    )
    """Rank -> factor, at least 1, by which its computing is slowed: for studies of uneven
    machines."""

    @field_validator("matrix")
    @classmethod
    def _known_axes(cls, matrix: dict[str, list[Any]]) -> dict[str, list[Any]]:
        check_matrix(matrix)
        return matrix
