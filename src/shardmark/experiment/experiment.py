"""Model of the experiment file.  Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from shardmark.base.recipe import (
    RESTART_DEFAULTS,
    Limits,
    Measure,
    Model,
    Placement,
    Recipe,
    SlowRanks,
)
from shardmark.experiment.axes import (
    SHORTENED,
    VARIANT,
    BareName,
    check_matrix,
    full_key,
    matrix_model,
)
from shardmark.experiment.engines import EngineOptions, LocalOptions
from shardmark.experiment.messages import mistake, refuse, show
from shardmark.experiment.tasks import WorkloadSection
from shardmark.ranks.workloads.script.options import ScriptOptions

ENGINE_NAMES = ("local", "torchrun", "ray", "slurm")


class Experiment(Model):
    """Content of an experiment file, with full keys in `matrix`, such as `recipe.precision`."""

    name: str = Field(pattern="^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")
    """Name of the experiment, and of the run's folder."""
    workload: WorkloadSection
    recipe: Recipe
    matrix: dict[str, list[Any]]
    """Values of each axis, by dotted key; every combination of values is a cell.  For a script,
    `variant: {NAME: "ARGUMENTS"}` stands in for `strategy`."""
    placement: Placement = Placement()
    measure: Measure = Measure()
    limits: Limits = Limits()
    engine: Annotated[EngineOptions, BareName(ENGINE_NAMES)] = LocalOptions()
    """Engine that starts the ranks: its name, or a mapping with its name and options."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    slow_ranks: SlowRanks = Field(
        default_factory=dict, json_schema_extra={"propertyNames": {"pattern": "^[0-9]+$"}}
    )
    """Factor of at least 1 by which the computation of a rank is slowed down, by rank; for studies
    of unequal machines."""

    @field_validator("recipe")
    @classmethod
    def _complete_recipe(cls, recipe: Recipe, validated: ValidationInfo) -> Recipe:
        workload = validated.data.get("workload")
        if isinstance(workload, ScriptOptions):
            recipe.check_script()
            if workload.until_exit and recipe.steps is not None:
                raise ValueError("steps is set, and workload.until_exit, too; keep one of the two")
        elif workload is not None:
            recipe.check_complete()
        return recipe

    @field_validator("measure")
    @classmethod
    def _accepts_what_is_audited(cls, measure: Measure, validated: ValidationInfo) -> Measure:
        workload = validated.data.get("workload")
        if measure.accept and workload is not None and not isinstance(workload, ScriptOptions):
            raise ValueError("accept is set, which is for scripts; leave it out")
        return measure

    @field_validator("limits", mode="before")
    @classmethod
    def _no_restarts(cls, limits: Any) -> Any:
        removed = "restarts inside a trial were removed"
        instead = "remove this key; after a failure, run the same command with the same --out"
        instead += " again to go on trial by trial"
        content = limits if isinstance(limits, Mapping) else {}
        mistakes = [
            mistake((key,), f"found {show(content[key])}, and {removed}", instead, content[key])
            for key, default in RESTART_DEFAULTS.items()
            if content.get(key, default) != default
        ]
        if mistakes:
            refuse(mistakes)
        return limits

    @field_validator("matrix")
    @classmethod
    def _known_axes(
        cls, matrix: dict[str, list[Any]], validated: ValidationInfo
    ) -> dict[str, list[Any]]:
        check_matrix(matrix, validated.data.get("workload"))
        return matrix


@cache
def experiment_schema() -> dict[str, Any]:
    """Return the JSON schema of the file for editors, with full and short keys of the axes."""
    schema = Experiment.model_json_schema()
    matrix = matrix_model().model_json_schema(by_alias=True)
    schema["$defs"] |= matrix.pop("$defs")
    axes = {
        key: {name: part for name, part in axis.items() if name not in ("default", "title")}
        for key, axis in matrix["properties"].items()
    }
    for key in [key for key in axes if key.partition(".")[0] in SHORTENED]:
        short = key.rpartition(".")[2]
        if full_key(short) == key:
            axes[short] = axes[key]
    described = schema["properties"]["matrix"]["description"]
    axes[VARIANT] = {
        "type": "object",
        "additionalProperties": {"type": "string"},
        "description": "Names of a script's variants, with their arguments.",
    }
    matrix["required"].remove("strategy")
    either = [{"required": ["strategy"]}, {"required": [VARIANT]}]
    matrix |= {"properties": axes, "description": described, "anyOf": either}
    schema["properties"]["matrix"] = matrix
    schema["required"].remove("recipe")
    of_script = {"properties": {"workload": {"properties": {"name": {"const": "script"}}}}}
    schema |= {"if": of_script, "then": {}, "else": {"required": ["recipe"]}}
    schema["patternProperties"] = {"^x-": {"description": "Yours: an anchor's home."}}
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "Shardmark experiment"
    return schema
