"""The experiment file: the one place where a user's wishes enter.  Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from shardmark.experiment.optimization import Model, Optimizer, Schedule
from shardmark.experiment.sizes import MOST_RANKS

__all__ = [
    "EXCLUSIVE",
    "Experiment",
    "Limits",
    "Measure",
    "Model",
    "Optimizer",
    "Placement",
    "Precision",
    "Recipe",
    "Schedule",
    "StrategySpec",
    "Trial",
]

Precision = Literal["fp32", "bf16", "fp16"]

EXCLUSIVE = (("global_batch", "per_rank_batch"), ("epochs", "steps"))
"""Keys of the recipe of which exactly one is given."""

_FOLDER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class Recipe(Model):
    """How to train: the same in every trial, unless one of these keys is an axis of the matrix."""

    global_batch: PositiveInt | None = None
    """Samples per optimizer step over all ranks.  Exactly one of this and `per_rank_batch`."""
    per_rank_batch: PositiveInt | None = None
    """Samples per optimizer step and rank: weak scaling, which changes the mathematics."""
    epochs: PositiveInt | None = None
    """Passes over the training set.  Exactly one of this and `steps`."""
    steps: PositiveInt | None = None
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    precision: Precision = "fp32"
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    gradient_accumulation: PositiveInt = 1
    """Micro-batches per optimizer step and rank; `global_batch` counts all of them."""
    gradient_clipping: PositiveFloat | None = None
    """Largest 2-norm of all gradients together; null clips nothing, in every strategy."""
    activation_checkpointing: bool = False
    cpu_offload: bool = False
    tf32: bool = False
    """Allow TensorFloat-32 in CUDA matrix products and convolutions."""
    threads_per_rank: PositiveInt | None = None
    """CPU threads of each rank's operators; null shares the machine's cores out evenly."""

    @model_validator(mode="after")
    def _exactly_one(self) -> Recipe:
        for first, second in EXCLUSIVE:
            given = [name for name in (first, second) if getattr(self, name) is not None]
            if len(given) != 1:
                found = "both are given" if given else "neither is given"
                raise ValueError(f"{found}; give exactly one of {first} and {second}")
        return self


class Measure(Model):
    """What is measured, and how often."""

    warmup_steps: Annotated[int, Field(ge=0)] = 5
    """First steps of the training that are left out of every performance metric."""
    repeats: Annotated[int, Field(ge=1, le=1000)] = 1
    sample_seconds: Annotated[float, Field(ge=0.05, le=60)] = 0.5
    """Period of the system metrics, sampled from outside the ranks."""
    probe: bool = True
    """After the training, take untimed steps that count memory, collectives and communication."""
    verify: bool = True
    """Before the first trial, prove with a few steps that the strategies train the same thing."""
    evaluate: Literal["epoch", "end", "never"] = "epoch"
    """When the whole validation set is evaluated; never inside a measured window."""
    link_seconds: Annotated[float, Field(ge=0, le=600)] | None = None
    """Time for measuring the links between the ranks once, before the first trial; 0 leaves it out.
    null: 8 where trials have several nodes, else 0."""


class Limits(Model):
    """Bounds on one trial."""

    trial_seconds: PositiveFloat = 1800
    """All restarts included."""
    max_restarts: Annotated[int, Field(ge=0, le=1000)] = 0
    """How often the ranks are started anew after some have died; 0 writes no checkpoints."""
    checkpoint_steps: PositiveInt = 100
    """Steps between two checkpoints, from which restarted ranks go on."""
    checkpoint_dir: str | None = None
    """Folder for checkpoints, below which each node has its own; null: the trial's folder, and on
    other nodes the one for temporary files.  They are removed when the trial has ended."""
    node_return_seconds: Annotated[float, Field(ge=0, le=86400)] = 0
    """With `max_restarts`: how long a trial waits for a lost node, or another in its place."""


class Placement(Model):
    """Where the training ranks sit; beside `world_size`, which is `nodes` x `ranks_per_node`.

    Any of the three follows from the others.
    """

    nodes: Annotated[PositiveInt, Field(le=MOST_RANKS)] | None = None
    """Machines of a trial; one if nothing says otherwise."""
    ranks_per_node: Annotated[PositiveInt, Field(le=MOST_RANKS)] | None = None
    """Training ranks on each of them; parameter servers come on top."""


class StrategySpec(Model):
    """A strategy's name and its own options, already checked against the strategy."""

    name: str
    options: dict[str, Any] = Field(default_factory=dict)


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
        from shardmark.experiment.axes import complete

        return complete(data) if isinstance(data, Mapping) else data

    @field_validator("workload")
    @classmethod
    def _known_workload(cls, workload: dict[str, Any]) -> dict[str, Any]:
        from shardmark.experiment.tables import resolve_workload

        resolve_workload(workload)
        return workload

    @field_validator("engine")
    @classmethod
    def _known_engine(cls, engine: dict[str, Any]) -> dict[str, Any]:
        from shardmark.experiment.tables import resolve_engine

        return resolve_engine(engine)

    @field_validator("matrix")
    @classmethod
    def _known_axes(
        cls, matrix: dict[str, list[Any]], info: ValidationInfo
    ) -> dict[str, list[Any]]:
        from shardmark.experiment.axis_checks import check_matrix

        check_matrix(matrix, info.data.get("workload"))
        return matrix


class Trial(Model):
    """One cell of the matrix, one repeat: all that a fresh process group needs to know."""

    id: str
    """Readable and unique in the run; the same for the same content."""
    experiment: str
    workload: dict[str, Any]
    recipe: Recipe
    strategy: StrategySpec
    world_size: PositiveInt
    nodes: PositiveInt = 1
    """Machines that the training ranks are shared out to equally, neighbours together."""
    measure: Measure
    limits: Limits
    device_type: Literal["cuda", "cpu"]
    slow_ranks: dict[int, float] = Field(default_factory=dict)
    repeat: Annotated[int, Field(ge=0)] = 0
    varied: dict[str, Any] = Field(default_factory=dict)
    """The other axes' values in this cell, by dotted key, e.g. {"recipe.precision": "bf16"}."""

    @property
    def batch_per_step(self) -> int:
        """Samples per optimizer step over all ranks."""
        if self.recipe.global_batch is not None:
            return self.recipe.global_batch
        assert self.recipe.per_rank_batch is not None
        return self.recipe.per_rank_batch * self.world_size
