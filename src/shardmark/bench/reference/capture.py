"""Captures of a few training steps: written by each rank, and joined for the comparison."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from shardmark.base.evidence.captures import PARTS, Array, Capture
from shardmark.base.layout import Shard
from shardmark.base.recipe import Recipe
from shardmark.base.recipe import Schedule as RecipeSchedule
from shardmark.ranks.measure.step.recorder import NoSpans
from shardmark.ranks.strategies.base import RankContext, Server, Worker
from shardmark.ranks.strategies.casting import lossless_copy
from shardmark.ranks.train.evaluation import evaluate
from shardmark.ranks.train.loop import BatchSource
from shardmark.ranks.train.rank import serve
from shardmark.ranks.train.record import RankReport, weights_sha256
from shardmark.ranks.train.schedule import (
    Schedule,
    learning_rate_of,
    own_rates,
    seed_step,
    set_numerics,
)
from shardmark.ranks.trial import Trial
from shardmark.ranks.workloads import build_workload
from shardmark.ranks.workloads.base import BatchPlan, Workload

if TYPE_CHECKING:
    import torch
    from torch import Tensor


CAPTURE_FILE = "rank-{}.capture.npz"


class GradientSpans:
    """Captures the gradients of a step before its optimizer runs."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.gradients: dict[str, Tensor] = {}

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        if name == "optimizer":
            self.gradients = self._worker.full_gradients()
        yield


def capture_steps(
    worker: Worker,
    workload: Workload,
    recipe: Recipe,
    *,
    plan: BatchPlan,
    shard: Shard,
    steps: int,
    devices: Sequence[torch.device],
) -> Capture:
    """Take the steps and capture their results.  Collective."""
    initial = weights_sha256(worker.each_parameter())
    worker.group.barrier()  # no rank changes the weights before all ranks have hashed them
    worker.checks_every_step = True
    rate = learning_rate_of(recipe, steps)
    losses: list[float] = []
    sample_ids, weights, rates, draws = [], [], [], []
    drawn = workload.watch_draws()
    tensors: dict[str, Mapping[str, Array]] = {part: {} for part in PARTS}
    skipped: list[int] = []
    source = BatchSource(
        worker=worker, workload=workload, plan=plan, shard=shard, device=devices[0]
    )
    for step_shard, batch in source.until(steps):
        rates.append(rate(step_shard.step))
        worker.set_learning_rate(rates[-1])
        seed_step(recipe.seed, step_shard, devices)
        spans = NoSpans() if tensors["gradient"] else GradientSpans(worker)
        losses.append(float(worker.step(batch, spans)))
        sample_ids.append(batch.sample_ids)
        weights.append(worker.share_weight(batch))
        draws.append(drawn())
        is_skipped = worker.skipped_steps() > len(skipped)
        if is_skipped:
            skipped.append(step_shard.step)
        if isinstance(spans, GradientSpans) and _all_updated(worker, recipe, is_skipped):
            tensors["gradient"] = arrays(spans.gradients)
            tensors["parameters after the first update"] = arrays(worker.full_parameters())
    tensors["parameters"] = arrays(worker.full_parameters())
    tensors["optimizer state"] = arrays(flat_state(worker.full_optimizer_state()))
    evaluation = evaluate(worker, workload, shard, devices[0])
    return Capture(
        initial_sha256=(initial,),
        data_set=(data_set_of(workload),),
        sample_ids=(tuple(sample_ids),),
        weights=(tuple(weights),),
        losses=(tuple(losses),),
        draws=(tuple(draws),),
        learning_rates=tuple(rates),
        skipped=(tuple(skipped),),
        buffers=(arrays(worker.buffers()),),
        quality=evaluation.quality,
        samples_evaluated=workload.validation_samples,
        tensors=tensors if shard.index == 0 else {},
        weight_source=str(worker.settings().get("weights", "")),
    )


def data_set_of(workload: Workload) -> str:
    """Describe the sizes of the task's data sets, before samples are chosen for a short run."""
    training, validation = workload.available_samples
    return f"{training} samples to train, {validation} to validate"


def _all_updated(worker: Worker, recipe: Recipe, is_skipped: bool) -> bool:
    """True if no rank skipped the step.  Collective: ranks that disagree would deadlock."""
    if recipe.precision != "fp16":
        return not is_skipped
    return not any(worker.group.gather(is_skipped))


def arrays(tensors: Mapping[str, Tensor]) -> dict[str, Array]:
    """Copy tensors to real arrays: complex numbers to pairs, integers and booleans to fp64."""
    return {name: _real(lossless_copy(tensor)).numpy() for name, tensor in tensors.items()}


def _real(tensor: Tensor) -> Tensor:
    import torch

    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    return tensor if tensor.is_floating_point() else tensor.double()


def flat_state(state: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Optimizer state by `parameter/key`, without counters, which have no shape."""
    return {
        f"{name}/{key}": value
        for name, keys in state.items()
        for key, value in keys.items()
        if value.dim() > 0
    }


def capture_rank(trial: Trial, directory: Path, context: RankContext, report: RankReport) -> None:
    """Run a rank for `verify`: take a few steps and write their capture."""
    if trial.recipe.schedule.path is not None:  # raises an error for an unusable schedule
        own_rates(trial.recipe.schedule, trial.recipe.optimizer.lr, trial.recipe.steps or 1)
    trial = at_constant_rate(trial)
    workload = build_workload(trial.workload, trial.recipe.seed)
    schedule = Schedule.for_trial(trial, workload)
    report.settings = dict(trial.built_strategy.settings(trial.recipe))
    shard = trial.layout.ranks[context.rank].share
    worker = trial.built_strategy.start(workload, trial.recipe, context)
    set_numerics(trial.recipe)
    if isinstance(worker, Server):
        serve(worker, report, context.device)
        return
    assert shard is not None, "a rank without a share is a server"
    capture = capture_steps(
        worker,
        workload,
        trial.recipe,
        plan=schedule.plan,
        shard=shard,
        steps=schedule.total_steps,
        devices=context.all_devices,
    )
    capture.save(directory / CAPTURE_FILE.format(context.rank))
    report.exchange = worker.exchange()
    worker.close()


def at_constant_rate(trial: Trial) -> Trial:
    """Replace a user-defined schedule, whose first rates may be too small to show an error."""
    if trial.recipe.schedule.path is None:
        return trial
    recipe = trial.recipe.model_copy(update={"schedule": RecipeSchedule(name="constant")})
    return trial.model_copy(update={"recipe": recipe})


def read_capture(trial: Trial, directory: Path) -> Capture:
    """Read the captures of the trial's ranks, one for each distinct share."""
    counting = {
        rank.share.index: number
        for number, rank in enumerate(trial.layout.ranks)
        if rank.share is not None and rank.counts_loss
    }
    return Capture.of_shares(
        [
            Capture.load(directory / CAPTURE_FILE.format(counting[share]))
            for share in sorted(counting)
        ]
    )
