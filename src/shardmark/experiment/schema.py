"""The experiment file: the one place where a user's wishes enter.  Imports no torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

Precision = Literal["fp32", "bf16", "fp16"]


class Model(BaseModel):
    """Frozen, and unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Optimizer(Model):
    """The optimizer with every default written out; keys of the other optimizer are refused."""

    name: Literal["sgd", "adam", "adamw"] = "sgd"
    lr: PositiveFloat = 0.01
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """SGD only."""
    dampening: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """SGD only."""
    nesterov: bool = False
    """SGD only."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Adam and AdamW only."""
    eps: PositiveFloat = 1e-8
    """Adam and AdamW only."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """The same for every parameter, biases and norms included: no library's groups."""


class Schedule(Model):
    """Learning rate over the steps of the training, as a factor on `optimizer.lr`."""

    name: Literal["constant", "cosine", "step"] = "constant"
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Linear rise over so many steps first (no relation to `measure.warmup_steps`)."""
    every_steps: PositiveInt | None = None
    """`step` only: multiply by `gamma` each time so many steps have been taken."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 0.1


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
        for first, second in (("global_batch", "per_rank_batch"), ("epochs", "steps")):
            given = [name for name in (first, second) if getattr(self, name) is not None]
            if len(given) != 1:
                found = "both are given" if given else "neither is given"
                raise ValueError(f"{found}; give exactly one of {first} and {second}")
        return self


class Measure(Model):
    """What is measured, and how often."""

    warmup_steps: Annotated[int, Field(ge=0)] = 5
    """First steps of the training that are left out of every performance metric."""
    repeats: PositiveInt = 1
    sample_seconds: Annotated[float, Field(ge=0.05, le=60)] = 0.5
    """Period of the system metrics, sampled from outside the ranks."""
    probe: bool = True
    """After the training, take untimed steps that count memory, collectives and communication."""
    evaluate: Literal["epoch", "end", "never"] = "epoch"
    """When the whole validation set is evaluated; never inside a measured window."""


class Limits(Model):
    """Bounds on one trial."""

    trial_seconds: PositiveFloat = 1800


class StrategySpec(Model):
    """A strategy's name and its own options, already checked against the strategy."""

    name: str
    options: dict[str, Any] = {}


class Trial(Model):
    """One cell of the matrix, one repeat: all that a fresh process group needs to know."""

    id: str
    """Readable and unique in the run; the same for the same content."""
    experiment: str
    workload: dict[str, Any]
    recipe: Recipe
    strategy: StrategySpec
    world_size: PositiveInt
    measure: Measure
    limits: Limits
    device_type: Literal["cuda", "cpu"]
    repeat: Annotated[int, Field(ge=0)] = 0
    varied: dict[str, Any] = {}
    """The other axes' values in this cell, by dotted key, e.g. {"recipe.precision": "bf16"}."""

    @property
    def batch_per_step(self) -> int:
        """Samples per optimizer step over all ranks."""
        if self.recipe.global_batch is not None:
            return self.recipe.global_batch
        assert self.recipe.per_rank_batch is not None
        return self.recipe.per_rank_batch * self.world_size
