"""The description of a trial.  Imports no torch."""

from __future__ import annotations

import os
import re
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from shardmark.base.cells import digest, ranks_and_nodes
from shardmark.base.layout import Layout
from shardmark.base.recipe import (
    GPU_WARMUP_SECONDS,
    GPU_WINDOW_SECONDS,
    RACE_WINDOW_SECONDS,
    Limits,
    Measure,
    Model,
    Recipe,
)
from shardmark.base.text import with_options
from shardmark.ranks.strategies import build_strategy
from shardmark.ranks.strategies.base import Strategy
from shardmark.ranks.workloads import TaskOptions
from shardmark.ranks.workloads.options import WorkloadOptions
from shardmark.ranks.workloads.script.options import ScriptOptions


class StrategySpec(Model):
    """A strategy's name and its validated options."""

    name: str
    options: dict[str, Any] = Field(default_factory=dict)

    def __str__(self) -> str:
        """Format the name and options, such as `fsdp-hybrid (shard_group=2)`."""
        return with_options(self.name, self.options)


def strategy_of(spec: StrategySpec, workload: WorkloadOptions) -> Strategy:
    """Build the strategy; a script has variants in their place."""
    if isinstance(workload, ScriptOptions):
        from shardmark.ranks.strategies.script import ScriptVariant

        return ScriptVariant(name=spec.name)
    return build_strategy(spec.name, spec.options).for_workload(workload)


class Trial(Model):
    """A repeat of a cell of the matrix, with everything that its processes need."""

    id: str
    """Readable identifier, unique in the run, that depends only on the content of the trial."""
    experiment: str
    workload: TaskOptions
    recipe: Recipe
    strategy: StrategySpec
    world_size: PositiveInt
    nodes: PositiveInt = 1
    """Number of machines, each of which runs equally many consecutive training ranks."""
    measure: Measure
    limits: Limits
    device_type: Literal["cuda", "cpu"]
    slow_ranks: dict[int, float] = Field(default_factory=dict)
    repeat: Annotated[int, Field(ge=0)] = 0
    twin: bool = False
    """True for a trial whose initial weights differ by one rounding; it is not a repeat."""
    ranks_on_cores: PositiveInt | None = None
    """Processes of a node in the run's largest cell, by which all cells divide the cores; None for
    that cell."""
    varied: dict[str, Any] = Field(default_factory=dict)
    """Values of the other axes in this cell, by dotted key: {"recipe.precision": "bf16"}."""

    @model_validator(mode="after")
    def _complete_recipe(self) -> Self:
        if self.script is None:
            self.recipe.check_complete()
        return self

    def changed(self, **fields: Any) -> Self:
        """Return the trial with other fields, and without what it has cached."""
        stored = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self)(**(stored | fields))

    @property
    def script(self) -> ScriptOptions | None:
        """The script that the trial runs, which decides most of the recipe; None for a task."""
        return self.workload if isinstance(self.workload, ScriptOptions) else None

    @cached_property
    def built_strategy(self) -> Strategy:
        """The strategy with its options, built once in a process."""
        return strategy_of(self.strategy, self.workload)

    @cached_property
    def layout(self) -> Layout:
        return self.built_strategy.layout(self.world_size, self.nodes)

    @property
    def batch_per_step(self) -> int:
        """Samples per optimizer step of all ranks together."""
        assert self.samples_per_step is not None, "a script decides its batch"
        return self.samples_per_step

    @property
    def samples_per_step(self) -> int | None:
        """The same; None if a script decides it."""
        if self.recipe.per_rank_batch is not None:
            return self.recipe.per_rank_batch * self.layout.shares
        return self.recipe.global_batch

    def threads_of(self, processes: int) -> int:
        """Return the threads of each of so many processes of this machine."""
        cores = len(os.sched_getaffinity(0))
        return self.recipe.threads_per_rank or max(1, cores // (self.ranks_on_cores or processes))

    @property
    def precision(self) -> str:
        """The recipe's precision, or `script` if a script decides it."""
        return self.recipe.precision if self.script is None else "script"

    @property
    def least_seconds(self) -> tuple[float, float]:
        """Minimum durations of the warm-up and of the measured windows."""
        warmup, window = self.measure.warmup_seconds, self.measure.window_seconds
        usual = (0.0, 0.0 if self.measure.repeats.margin is None else RACE_WINDOW_SECONDS)
        if self.device_type == "cuda":
            usual = (GPU_WARMUP_SECONDS, GPU_WINDOW_SECONDS)
        return usual[0] if warmup is None else warmup, usual[1] if window is None else window

    def user_modules(self) -> tuple[str, ...]:
        """Modules and files of the user that the trial's keys name: ranks import or start them."""
        paths = (self.recipe.optimizer.path, self.recipe.schedule.path)
        modules = (path.rpartition(":")[0] for path in paths if path is not None)
        return (*self.workload.user_modules(), *modules)

    @property
    def title(self) -> str:
        """Title of the cell, such as `fsdp-hybrid (shard_group=2) on 4 ranks of 2 nodes`."""
        twin = "twin of " if self.twin else ""
        return f"{twin}{self.strategy} on {ranks_and_nodes(self.world_size, self.nodes)}"

    @property
    def repeat_title(self) -> str:
        """Title of the repeat, such as `repeat 1 of 3 to 6`, or `twin`."""
        if self.twin:
            return "twin"
        if self.measure.repeats.margin is not None:
            return f"pair {self.repeat + 1}"
        seed = f", seed {self.recipe.seed}" if self.measure.seeds > 1 else ""
        return f"repeat {self.repeat + 1} of {self.measure.repeats}{seed}"


def trial_id(trial: Trial) -> str:
    """Return an identifier such as `fsdp-hybrid-w4-bf16-r0-1a2b3c4d`, with `-n2` on two nodes.

    The digits are a hash of the trial's content without its limits and the numbers of repeats and
    seeds, so that finished trials stay valid if these are raised.
    """
    content = trial.model_dump(
        mode="json",
        exclude={
            **dict.fromkeys(("id", "experiment", "limits", "varied", "twin"), True),
            "ranks_on_cores": trial.ranks_on_cores is None,
            "measure": {
                *("repeats", "seeds", "max_remeasure"),
                *("verify", "accept", "link_seconds", "twin"),
            },
        },
    )
    name = re.sub(r"[^a-z0-9]+", "-", trial.strategy.name.lower()).strip("-")
    size = f"w{trial.world_size}" + (f"-n{trial.nodes}" if trial.nodes > 1 else "")
    repeat = "twin" if trial.twin else f"r{trial.repeat}"
    return f"{name}-{size}-{trial.precision}-{repeat}-{digest(content)[:8]}"
