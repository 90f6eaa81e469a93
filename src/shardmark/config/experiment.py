"""The experiment file: the one place where a user's wishes enter.  Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from shardmark.config.sizes import MOST_RANKS
from shardmark.core.recipe import Limits, Measure, Model, Recipe

_FOLDER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class Placement(Model):
    """Where the training ranks sit; beside `world_size`, which is `nodes` x `ranks_per_node`.

    Any of the three follows from the others.
    """

    nodes: Annotated[PositiveInt, Field(le=MOST_RANKS)] | None = None
    """Machines of a trial; one if nothing says otherwise."""
    ranks_per_node: Annotated[PositiveInt, Field(le=MOST_RANKS)] | None = None
    """Training ranks on each of them; parameter servers come on top."""


SlowRanks = dict[Annotated[int, Field(ge=0)], Annotated[float, Field(ge=1, le=1000)]]


class Experiment(Model):
    """The whole file.  `matrix` has full keys, e.g. `recipe.precision` for `precision`."""

    name: str
    """Names the run's folder, too."""
    workload: dict[str, Any]
    """Checked against the workload's options; its defaults are written out unless an axis of the
    matrix is about the workload, since a default may depend on what the axis varies."""
    recipe: Recipe
    matrix: dict[str, list[Any]]
    """Dotted key -> the values to try; every combination is a cell."""
    placement: Placement = Placement()
    measure: Measure = Measure()
    limits: Limits = Limits()
    engine: dict[str, Any] = Field(default_factory=lambda: {"name": "local"})
    """Who starts the ranks, and its options; a name alone is enough where they are not needed."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    slow_ranks: SlowRanks = Field(
        default_factory=dict, json_schema_extra={"propertyNames": {"pattern": "^[0-9]+$"}}
    )
    """Rank -> factor, at least 1, by which its computing is slowed: for studies of uneven
    machines."""

    @field_validator("name")
    @classmethod
    def _folder_name(cls, name: str) -> str:
        if not _FOLDER_NAME.fullmatch(name):
            raise ValueError(
                f"found {name!r}; allowed are letters, digits, '.', '_' and '-', at most 100, "
                "a letter or digit first: the run's folder gets this name"
            )
        return name

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, data: Any) -> Any:
        from shardmark.config.axes import complete

        return complete(data) if isinstance(data, Mapping) else data

    @field_validator("workload")
    @classmethod
    def _known_workload(cls, workload: dict[str, Any]) -> dict[str, Any]:
        from shardmark.config.tables import resolve_workload

        resolve_workload(workload)
        return workload

    @field_validator("engine")
    @classmethod
    def _known_engine(cls, engine: dict[str, Any]) -> dict[str, Any]:
        from shardmark.config.tables import resolve_engine

        return resolve_engine(engine)

    @field_validator("matrix")
    @classmethod
    def _known_axes(
        cls, matrix: dict[str, list[Any]], info: ValidationInfo
    ) -> dict[str, list[Any]]:
        from shardmark.config.axis_checks import check_matrix

        check_matrix(matrix, info.data.get("workload"))
        return matrix
