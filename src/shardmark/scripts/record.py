"""Records of the first optimizer steps of an audited script, written by each of its processes."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PARTIAL = ".part"
START = ".start"
"""Suffix of the file with a rank's full parameters before the first step."""
BATCHES = ".batches"
GRAPH = "graph"
"""Reduction of a mean that the graph of a loss shows."""


def save(value: Any, path: Path) -> None:
    """Write the file under another name first, so that a reader never sees a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(path.suffix + PARTIAL)
    torch.save(value, partial)
    os.replace(partial, path)  # noqa: PTH105


@dataclass(slots=True, kw_only=True)
class LossCall:
    """A call of one of torch's loss functions."""

    function: str
    reduction: str
    weight: float
    """Number of targets that count: ignored ones are left out."""
    value: float
    """The result; the sum of its elements with `reduction="none"`."""
    counted: Tensor | None = None
    """A flag for each target of the first step that tells whether it counts; None if all do."""
    options: dict[str, float | str] = field(default_factory=dict)
    """Other arguments of the call, such as `label_smoothing`."""
    couples: bool = False
    """True if the loss of one target depends on the model's outputs for several samples."""


@dataclass(slots=True, kw_only=True)
class Term:
    """A term of a loss: results of a function that is not linear, which linear ones add up."""

    function: str
    count: int
    """Number of these results; 1 for a mean of torch's loss functions, and 0 for their sums."""
    factors: list[float]
    """Numbers that multiply them, from the loss on."""
    is_mean: bool = False
    """True if one of torch's loss functions takes their mean."""

    @property
    def key(self) -> str:
        """The function with the weight of its results, to find the term again."""
        return f"{self.function} {prod(self.factors):.4g}"


@dataclass(slots=True, kw_only=True)
class Forward:
    """A call of an outermost module that computes gradients."""

    module: str
    """Name of the module's class."""
    inputs: list[Tensor]
    """A checksum of every row of each input tensor."""
    outputs: list[Tensor]
    from_end: list[Tensor] = field(default_factory=list)
    """The same of rows that are read backwards: zeros that pad them on the left change none."""
    rows: int
    """Size of the first dimension of the first input tensor; 0 without one."""
    step: int
    """Number of optimizer steps before the call."""
    micro: int = 0
    """Number of backward passes of this step before the call; -1 in a step of another part."""
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    """Shapes of the input tensors, without their first dimension."""

    @property
    def samples(self) -> list[float]:
        """A checksum of each row over all input tensors that have as many rows as the first."""
        tensors = [sums for sums in self.inputs if len(sums) == self.rows]
        weighted = [(number + 1) * sums for number, sums in enumerate(tensors)]
        return [float(f"{value:.9g}") for value in sum(weighted, torch.zeros(self.rows)).tolist()]


@dataclass(slots=True, kw_only=True)
class Micro:
    """A micro-batch: what happened until the end of a call of `backward`."""

    loss: float | None = None
    """The number that `backward` was called on."""
    losses: list[LossCall] = field(default_factory=list)
    means: list[LossCall] = field(default_factory=list)
    """The mean that the loss is a multiple of, if its graph shows one."""
    terms: list[Term] = field(default_factory=list)
    gradients: dict[int, Tensor] = field(default_factory=dict)
    """Gradients of this process's rows alone, before any communication, by parameter."""
    synchronised: bool | None = None
    """True if DDP reduces the gradients of this micro-batch, as its forward pass decides; None
    without DDP."""
    place: str = ""
    """Lines of the script that call `backward`."""
    scale: float | None = None
    """Factor by which DeepSpeed's engine multiplies the script's loss; None without it."""
    loaders: list[int] = field(default_factory=list)
    """Numbers of the loaders that gave a batch since the last call of `backward`."""
    gathers: list[str] = field(default_factory=list)
    """Places where the script gathers tensors that need gradients by a call that returns none."""
    exchanges: list[str] = field(default_factory=list)
    """Places where ranks exchange results of the model by functions that return gradients."""


@dataclass(slots=True, kw_only=True)
class Clip:
    """A call of one of torch's functions that clip gradients."""

    norm: float | None
    limit: float
    function: str = "clip_grad_norm_"
    scaled: bool
    """True if the gradients still had the scale of a `GradScaler`."""
    scale: float
    micros: int
    """Number of micro-batches of the step that had their backward pass before the call."""
    gradients: list[Tensor | None] = field(default_factory=list)
    """Gradients before the call, in the order of the optimizer's parameters."""


@dataclass(slots=True, kw_only=True)
class Step:
    """A step of the optimizers that step after the same backward passes."""

    part: int = 0
    """Number of these optimizers' part, as in `Record.parts`."""
    gradients: list[Tensor | None] = field(default_factory=list)
    """Gradients that the optimizer uses, by parameter."""
    local_norms: list[float] = field(default_factory=list)
    """Norm of what this process holds of each of these gradients: its shard, or the gradient."""
    sizes: list[tuple[float, int]] = field(default_factory=list)
    """Norm and number of elements of the gradient that DeepSpeed's engine has, then of those that
    the optimizer inside gets in each of its steps; empty without DeepSpeed."""
    reduced: list[Tensor | None] = field(default_factory=list)
    """Gradients after the step, if the optimizer changed them, as one does that reduces them."""
    after: list[Tensor] = field(default_factory=list)
    """Parameters after the step."""
    moved: dict[int, float] = field(default_factory=dict)
    """Checksums of the parameters that the script has changed since the previous step."""
    settings: list[dict[str, float]] = field(default_factory=list)
    """Numbers of each parameter group of the optimizer, such as `lr` and `weight_decay`."""
    state_is_new: bool = False
    """True if the optimizer's state is empty, although the step before left one."""
    evaluations: int = 0
    """Number of times that the optimizer computed the gradient."""
    in_backward: bool = False
    """True if an optimizer stepped inside of a backward pass, as hooks on gradients do."""
    micros: list[Micro] = field(default_factory=list)
    clips: list[Clip] = field(default_factory=list)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    """Floating-point buffers when the first forward pass of this step began: of the model, and of
    modules without parameters that a loss depends on."""

    @property
    def last_clips(self) -> list[Clip]:
        """Calls after the last backward pass: others clip a part of the step's gradient."""
        return [clip for clip in self.clips if clip.micros == len(self.micros)]

    @property
    def unclipped(self) -> list[Tensor | None]:
        """Gradients before the first of these calls that clips them; empty without one."""
        by_call = [clip.gradients for clip in self.last_clips]
        of_parameters = zip(*by_call, self.gradients, strict=False) if by_call else ()
        return [next((g for g in calls if g is not None), None) for calls in of_parameters]

    @property
    def rates(self) -> list[float]:
        """Learning rate of each parameter group."""
        return [group["lr"] for group in self.settings if "lr" in group]


@dataclass(slots=True, kw_only=True)
class OptimizerFacts:
    """Facts of an optimizer that takes the first step."""

    path: str
    """Module and class, as `torch.optim.sgd:SGD`."""
    types: list[str]
    """Types of its parameters, as `float32`."""
    state_types: dict[str, str] = field(default_factory=dict)
    """Types of its state after the first step, by key, as `exp_avg`."""
    switches: list[str]
    """Options that are true, such as `nesterov`."""
    initial_lr: float | None
    """Learning rate of the first group, before any schedule changes it."""


@dataclass(slots=True, kw_only=True)
class Loader:
    """An iteration over a `DataLoader`."""

    batch_size: int | None
    length: int | None = None
    samples: int | None = None
    """Length of the data set, without the `Subset`s around it."""
    available: Sequence[int] = ()
    """Indices of its samples that these have; empty if they are too many, or drawn by weights."""
    sampler: str = ""
    """Class of the innermost sampler."""
    shuffles: bool = False
    """True if its options say that it shuffles, and its indices do not ascend."""
    sampler_settings: dict[str, int] = field(default_factory=dict)
    """Seed, epoch, rank and number of ranks, where the sampler has them as attributes."""
    indices: list[int] | None = None
    """Indices of the samples that the sampler gives in this epoch; None if they are unknown."""
    largest_batch: int = 0
    """Number of indices in the largest batch of these."""
    trains: bool = False
    """True if there are backward passes between its batches: else it may be an evaluation."""
    first_sample: float | None = None
    """Checksum of sample 0, where a sampler divides the data; None if it is random."""
    number: int = -1
    """Number of the loader in the order of creation."""
    batches: int = 0
    """Number of batches that the script took."""
    sums: list[float] = field(default_factory=list)
    """A checksum of the first rows of each of these batches."""


@dataclass(slots=True, kw_only=True)
class Draw:
    """The result of an operator that draws random numbers."""

    place: str
    value: Tensor
    forward: int = 0
    """Number of recorded forward passes before the draw; 0 for a draw without gradients."""
    own_seed: bool = False
    """True if the script seeded it after the initial weights."""


@dataclass(slots=True, kw_only=True)
class Record:
    """Everything that a process has recorded."""

    rank: int
    ranks: int
    names: list[str] = field(default_factory=list)
    """Names of the optimizers' parameters, in their order."""
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    """Shapes of the full parameters."""
    groups: list[int] = field(default_factory=list)
    """Position of each parameter's group in the settings of a step."""
    parts: list[int] = field(default_factory=list)
    """Part of each parameter: optimizers that step after backward passes of their own, as those of
    a GAN, are several parts."""
    optimizers: list[int] = field(default_factory=list)
    """Optimizers of a step in the order of their steps: numbers among the living ones."""
    optimizer_facts: list[OptimizerFacts] = field(default_factory=list)
    """Facts of these optimizers."""
    seed: int | None = None
    """Seed of torch's generator; None if the script sets none."""
    schedules: list[str] = field(default_factory=list)
    """Classes of the script's schedules of learning rates."""
    schedule_settings: dict[str, float] = field(default_factory=dict)
    """Numbers that configure these schedules, as `StepLR.step_size`."""
    flat_slices: dict[int, list[int]] = field(default_factory=dict)
    """Ranks that hold the slices of a parameter, in their order, by its number (FSDP1)."""
    small_groups: dict[str, int] = field(default_factory=dict)
    """Size of the process group that a library reduces over, where it lacks some ranks."""
    every: int = 1
    """Distance of the recorded elements of parameters and gradients: all of small models."""
    before: list[Tensor] = field(default_factory=list)
    """Parameters before the first step."""
    start: list[float] = field(default_factory=list)
    """Checksum of each full parameter before the first step."""
    initial: list[float | None] = field(default_factory=list)
    """Checksum of each full parameter before the first forward pass, from which a script may change
    it until the step, as by a weight decay of its own; None for distributed tensors."""
    steps: list[Step] = field(default_factory=list)
    forwards: list[Forward] = field(default_factory=list)
    calls: dict[str, list[float]] = field(default_factory=dict)
    """Sums of squares of the input and the output of each module with parameters, and the number of
    elements of its inputs, by name, in the order of their first calls.  Of the first step; they do
    not depend on the order of samples."""
    loaders: list[Loader] = field(default_factory=list)
    draws: list[Draw] = field(default_factory=list)
    """Draws outside of forward passes."""
    own_seed: bool = False
    """True if the script seeded any draw after the initial weights."""
    draws_elsewhere: bool = False
    """True if it draws from Python's or numpy's generator after its first forward pass begins."""
    forward_draws: dict[int, list[Tensor]] = field(default_factory=dict)
    """Draws in each forward pass."""
    padded_left: bool = False
    """True if a replay pads rows of the ranks on the left to one length."""
    unmatched: list[str] = field(default_factory=list)
    """Draws of a replay for which the ranks have no draw of that shape."""
    epsilon: float = 0.0
    """Rounding error of the least precise type of floating-point number in a forward pass."""
    frameworks: list[str] = field(default_factory=list)
    grown: bool = False
    """True if a draw of a replay has the rows of all ranks: the script asked for those of one."""
    gradient_hooks: bool = False
    """True if the script has hooks on gradients, which may change them before any reduction."""
    batch_norm: dict[tuple[Any, ...], list[tuple[int, float]]] = field(default_factory=dict)
    """Number of rows, and a checksum of the means that batch norm takes from these rows of one
    rank, by the module's name, a flag for gradients, and the step and micro-batch of the call."""
    twins: list[tuple[str, str]] = field(default_factory=list)
    """Pairs of parameters of different modules with equal values at the start."""
    orphans: list[str] = field(default_factory=list)
    """Parameters with a gradient that no optimizer has, and that do not change."""
    copied: list[float] = field(default_factory=list)
    """Checksums at the start of others that do: the optimizer has copies, as masters in fp32."""
    frozen: list[str] = field(default_factory=list)
    """Parameters of the model that no optimizer has."""
    dropout: dict[str, float] = field(default_factory=dict)
    """Probability of each module that drops elements in its forward pass, by name."""
    average: list[Tensor] = field(default_factory=list)
    """A second set of the parameters, as the script averages them over steps; empty without one."""
    fed: int = 0
    """Number of batches that a guided start took from another script's records."""
    strangers: int = 0
    """Number of parameters of the optimizer that the model does not have."""
    joined: bool = False
    """True if the process was in a process group when it took a step."""
    compiled_at: str = ""
    """Line that leads to the first call of torch.compile, which has no effect; empty without."""
    graphs: int = 0
    """Number of graphs that torch.compile made: the hooks do not see the modules inside."""
    servers: list[str] = field(default_factory=list)
    """Packages of the script that generate samples outside of torch's operators here."""
    on_gpu: bool = False
    """True if the process has used a GPU."""
    accelerate_alone: bool = False
    """True if Accelerate (or the Trainer, which uses it) knows one process alone, without a GPU."""
    collectives: int = 0
    """Number of calls of torch.distributed's functions that exchange tensors."""
    skipped: int | None = None
    """Number of windows of the first epoch that were skipped; None if none was to be."""
    window: int = 0
    """Number of micro-batches in each of them; 0 where several optimizers have their own."""
    resumed_at: int = 0
    """Number of steps in the optimizer's state before the first recorded one."""
    backward_passes: int = 0
    refusal: str = ""
    """Reason why the script cannot be audited."""
    ended_early: bool = False
    asked_lengths: bool = False
    """True if the script asks for the number of batches of a loader, as schedules count them."""
    totals: list[int] = field(default_factory=list)
    """Numbers of steps after which the script's schedules of learning rates end."""

    def save(self, path: Path) -> None:
        save(self, path)

    @classmethod
    def load(cls, path: Path) -> Record:
        record: Record = torch.load(path, map_location="cpu", weights_only=False)
        return record


def part_of(record: Record, part: int) -> Record:
    """The parameters and steps of one part, as if the script had no other optimizers."""
    if part == 0 and not any(record.parts):
        return record
    places = [place for place, of_part in enumerate(record.parts) if of_part == part]
    numbers = {place: number for number, place in enumerate(places)}

    def chosen(values: Sequence[Any]) -> list[Any]:
        return [values[place] for place in places if place < len(values)]

    def of_place(values: Mapping[int, Any]) -> dict[int, Any]:
        return {numbers[place]: value for place, value in values.items() if place in numbers}

    def of_step(step: Step) -> Step:
        lists = ("gradients", "reduced", "after")
        tensors: dict[str, Any] = {name: chosen(getattr(step, name)) for name in lists}
        return replace(
            step,
            **tensors,
            moved=of_place(step.moved),
            micros=[replace(m, gradients=of_place(m.gradients)) for m in step.micros],
            clips=[replace(clip, gradients=chosen(clip.gradients)) for clip in step.clips],
        )

    per_parameter = ("names", "shapes", "groups", "before", "start")
    facts: dict[str, Any] = {name: chosen(getattr(record, name)) for name in per_parameter}
    numbers_of_steps = [n for n, step in enumerate(record.steps) if step.part == part]
    last = max(numbers_of_steps, default=-1)
    return replace(
        record,
        **facts,
        window=0,
        flat_slices=of_place(record.flat_slices),
        steps=[of_step(record.steps[number]) for number in numbers_of_steps],
        forwards=[  # those since the part's step before, also for steps of other parts
            replace(
                f,
                step=bisect_left(numbers_of_steps, f.step),
                micro=f.micro if f.step in numbers_of_steps else -1,
            )
            for f in record.forwards
            if f.step <= last
        ],
        twins=[pair for pair in record.twins if {*pair} <= {*facts["names"]}],
    )


def joined_tensors(
    ranks: Sequence[Record], by_rank: Sequence[Sequence[Tensor | None]]
) -> list[Tensor | None]:
    """Tensors of rank 0, or the ranks' slices behind each other where each has a slice (FSDP1)."""
    joined = list(by_rank[0])
    for number, holders in ranks[0].flat_slices.items():
        slices = [by_rank[rank][number] for rank in holders]
        present = [tensor.flatten() for tensor in slices if tensor is not None]
        joined[number] = torch.cat(present) if present else None
    return joined
