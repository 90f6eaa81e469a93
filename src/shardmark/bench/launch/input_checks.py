"""Checks of an experiment before anything is started.  Torch is imported only if needed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from shardmark.base.errors import InputError, StrategyUnavailable
from shardmark.experiment.matrix import TrialPlan
from shardmark.ranks.trial import Trial
from shardmark.ranks.workloads import check_data
from shardmark.ranks.workloads.models import user_function_problem


def check_plan(plan: TrialPlan) -> None:
    """Raise `DataError` or `InputError` for trials that cannot be measured."""
    for trial, samples in training_samples(plan.trials):
        recipe, warmup_steps = trial.recipe, trial.measure.warmup_steps
        if samples is not None and samples < trial.batch_per_step:
            key = "per_rank_batch" if recipe.global_batch is None else "global_batch"
            raise InputError(
                f"{trial.experiment}: recipe.{key}",
                f"{trial.batch_per_step} samples a step, and {samples} to train on",
                "give a smaller batch, or more data",
            )
        steps = _steps_of(trial, samples)
        if steps is not None and steps <= warmup_steps:
            raise InputError(
                f"{trial.experiment}: measure.warmup_steps",
                f"{warmup_steps} steps of warm-up, and {steps} in all ({trial.title})",
                "no step would be measured: train for longer, or warm up for fewer steps",
            )


def check_schedules(plan: TrialPlan) -> None:
    """Raise `InputError` for a user-defined schedule that fails in any of its steps."""
    checked: list[tuple[object, ...]] = []
    for trial, samples in training_samples(plan.trials):
        schedule, steps = trial.recipe.schedule, _steps_of(trial, samples)
        arguments = (schedule, trial.recipe.optimizer.lr, steps)
        if schedule.path is None or steps is None or arguments in checked:
            continue
        from shardmark.ranks.train.schedule import own_rates

        own_rates(schedule, trial.recipe.optimizer.lr, max(1, steps - schedule.warmup_steps))
        checked.append(arguments)


def refused_models(trials: Iterable[Trial]) -> dict[str, StrategyUnavailable]:
    """Return, by trial id, why a strategy cannot divide the model; imports torch where it has to.

    The ranks themselves check models that cannot be built without weights, and missing data.
    """
    models: list[tuple[object, Any, Any]] = []
    refused = {}
    for trial in trials:
        layout = trial.layout
        if layout.tensor * layout.pipeline * layout.sequence == 1 or trial.workload.fetches_data:
            continue
        if all(options != trial.workload for options, *_ in models):
            from shardmark.ranks.workloads import build_workload
            from shardmark.ranks.workloads.model_building import build_on_meta

            workload = build_workload(trial.workload, trial.recipe.seed)
            models.append((trial.workload, workload, build_on_meta(workload)))
        workload, model = next(rest for options, *rest in models if options == trial.workload)
        try:
            if model is not None:
                trial.built_strategy.check_model(workload, model, trial.world_size, trial.nodes)
        except StrategyUnavailable as error:
            refused[trial.id] = error
    return refused


def _steps_of(trial: Trial, samples: int | None) -> int | None:
    """Return the trial's optimizer steps; None if only the ranks know the number of samples."""
    recipe = trial.recipe
    if recipe.steps is not None or samples is None:
        return recipe.steps
    return (recipe.epochs or 0) * (samples // trial.batch_per_step)


def training_samples(trials: Iterable[Trial]) -> Iterator[tuple[Trial, int | None]]:
    """Yield each trial with its number of training samples, None if unknown.

    Raises `DataError` or `InputError` for missing data and for user code that cannot be found.
    """
    samples: list[tuple[object, int | None]] = []
    checked: set[str | None] = {None}
    for trial in trials:
        adapter = getattr(trial.workload, "adapter", None)
        for key, value, alone, remedy in (
            ("workload.adapter.base", getattr(adapter, "base", None), "nf4", "bf16 or fp32"),
            ("recipe.optimizer.state_bits", trial.recipe.optimizer.state_bits, 8, "32"),
        ):
            if value == alone:
                raise InputError(
                    f"{trial.experiment}: {key}",
                    f"found {value}, which needs bitsandbytes and a GPU; only `plan` knows it",
                    f"set it to {remedy}",
                )
        for key in ("optimizer", "schedule"):
            path = getattr(trial.recipe, key).path
            if path not in checked and (problem := user_function_problem(path)):
                place = f"{trial.experiment}: recipe.{key}.path"
                raise InputError(place, f"{path}: {problem}", "package.module:name")
            checked.add(path)
        if all(workload != trial.workload for workload, _ in samples):
            samples.append((trial.workload, check_data(trial.workload)))
        yield trial, next(count for workload, count in samples if workload == trial.workload)
