"""The schedule of a training: learning rate, seed, epoch and evaluation of each step."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from shardmark.base.errors import InputError
from shardmark.base.layout import Shard, StepShard
from shardmark.base.recipe import Recipe
from shardmark.base.recipe import Schedule as RecipeSchedule
from shardmark.ranks.trial import Trial
from shardmark.ranks.workloads.base import BatchPlan, Workload
from shardmark.ranks.workloads.model_building import seed_generators, user_function


def set_numerics(recipe: Recipe) -> None:
    """Set how devices compute, the same in the ranks and in the reference.

    Call it after the model is built, because user code that is imported for it may change these
    settings.  By default PyTorch lets cuDNN round convolutions to TF32.
    """
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_tf32 = recipe.tf32
    torch.backends.cudnn.allow_tf32 = recipe.tf32
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = False
    if torch.are_deterministic_algorithms_enabled():  # setting it imports a compiler
        torch.use_deterministic_algorithms(False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The steps of a trial, the ends of its epochs, and the epochs that are evaluated."""

    plan: BatchPlan
    total_steps: int
    steps_per_epoch: int
    epoch_ends: tuple[int, ...]
    """Number of steps at the end of each epoch; one entry if the recipe counts steps."""
    evaluated: tuple[bool, ...]

    @classmethod
    def for_trial(cls, trial: Trial, workload: Workload) -> Self:
        steps_per_epoch = workload.training_samples // trial.batch_per_step
        if trial.recipe.steps is not None:
            ends: tuple[int, ...] = (trial.recipe.steps,)
        else:
            assert trial.recipe.epochs is not None, "the recipe has epochs or steps"
            ends = tuple(steps_per_epoch * (i + 1) for i in range(trial.recipe.epochs))
        when = trial.measure.evaluate
        return cls(
            plan=BatchPlan(global_batch=trial.batch_per_step, seed=trial.recipe.seed),
            total_steps=ends[-1],
            steps_per_epoch=steps_per_epoch,
            epoch_ends=ends,
            evaluated=tuple(when == "epoch" or (when == "end" and e == ends[-1]) for e in ends),
        )


def learning_rate_of(recipe: Recipe, total_steps: int) -> Callable[[int], float]:
    """Return a function from the step index to the learning rate; later steps keep the last rate.

    All schedules rise linearly over the warm-up.  `cosine` (Loshchilov and Hutter, ICLR 2017,
    without restarts) and `linear` then fall towards `end_factor`, which they would reach one step
    after the last.  `step` multiplies by gamma every `every_steps` steps.  `own` is user code.
    """
    schedule, base = recipe.schedule, recipe.optimizer.lr
    span = max(1, total_steps - schedule.warmup_steps)
    user_rates = own_rates(schedule, base, span) if schedule.path is not None else ()

    def rate(step: int) -> float:
        step = min(step, total_steps - 1)
        since = step - schedule.warmup_steps
        if since < 0:
            return base * (step + 1) / schedule.warmup_steps
        if schedule.name == "own":
            return user_rates[since]
        if schedule.name == "step":
            assert schedule.every_steps is not None, "the experiment's schema asks for it"
            return float(base * schedule.gamma ** (step // schedule.every_steps))
        if schedule.name == "constant":
            return base
        left = 1 - since / span
        if schedule.name == "cosine":
            left = (1 - math.cos(math.pi * left)) / 2
        return base * (schedule.end_factor + (1 - schedule.end_factor) * left)

    return rate


def own_rates(schedule: RecipeSchedule, base: float, steps: int) -> tuple[float, ...]:
    """Return the learning rate of each step, from the user's scheduler on an empty optimizer.

    Ranks and the reference therefore use the same rates.  Raises `InputError` for a scheduler that
    cannot be built, or that needs or changes more than the learning rate.
    """
    assert schedule.path is not None, "only a user-defined schedule has a path"
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=base)
    (group,) = optimizer.param_groups
    others = {key: group[key] for key in optimizer.defaults if key != "lr"}
    options = {k: steps if value == "steps" else value for k, value in schedule.options.items()}
    rates: list[float] = []
    try:
        make = user_function(schedule.path, "recipe.schedule.path")
        scheduler: Any = make(optimizer, **options)
        optimizer.step()  # else torch warns of the wrong order
        for step in range(steps):
            if step > 0:
                scheduler.step()
            rates.append(float(group["lr"]))
    except Exception as error:  # whatever the user's code raises
        problem = f"{schedule.path} fails at step {len(rates)}: {error}"
        allowed = "a torch.optim.lr_scheduler with its options, whose step() takes no metric"
        raise InputError("recipe.schedule", problem, allowed) from error
    changed = [key for key, value in others.items() if group[key] != value]
    if changed:
        problem = f"{schedule.path} changes {' and '.join(changed)}"
        allowed = "the learning rate alone: cycle_momentum: false"
        raise InputError("recipe.schedule", problem, allowed)
    if not all(math.isfinite(rate) and rate >= 0 for rate in rates):
        problem = f"{schedule.path} gives a negative or infinite rate"
        raise InputError("recipe.schedule", problem, "finite rates of at least 0")
    return tuple(rates)


def step_seed(seed: int, step_shard: StepShard) -> int:
    """Return the seed of random numbers, such as dropout masks, for one share of one step."""
    text = f"{seed}/{step_shard.shard.index}/{step_shard.step}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1  # torch takes 63 bits


def seed_step(seed: int, step_shard: StepShard, devices: Sequence[torch.device]) -> None:
    """Seed the generators that the model uses for this share of this step.

    If one process divides a step among several devices, each device draws as a separate rank would.
    """
    on_gpu = devices[0].type == "cuda"
    seed_generators(step_seed(seed, step_shard), on_gpu=on_gpu)
    for index, device in enumerate(devices[1:], start=1):
        part = StepShard(step=step_shard.step, shard=Shard(index=index, count=len(devices)))
        torch.cuda.default_generators[device.index].manual_seed(step_seed(seed, part))
