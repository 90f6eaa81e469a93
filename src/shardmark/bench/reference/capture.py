"""Captures of a few training steps: written by each rank, and joined for the comparison."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from shardmark.base.recipe import Recipe
from shardmark.base.recipe import Schedule as RecipeSchedule
from shardmark.base.shares import Shard
from shardmark.ranks.measure.step.recorder import NoSpans
from shardmark.ranks.strategies.base import RankContext, Server, Worker
from shardmark.ranks.strategies.casting import lossless_copy
from shardmark.ranks.train.epochs import BatchSource
from shardmark.ranks.train.evaluation import evaluate
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

Array = NDArray[np.floating[Any]]

CAPTURE_FILE = "rank-{}.capture.npz"

PARTS = ("gradient", "parameters after the first update", "parameters", "optimizer state")
"""Names of the groups of tensors, in the order in which a step computes them."""

BY_SHARE = (
    *("initial_sha256", "sample_ids", "weights", "losses", "draws", "skipped", "buffers"),
    "data_set",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """Results of a few steps of a strategy, or of the reference.

    Fields named in `BY_SHARE` have one entry for each distinct share of the batch, in order.
    """

    initial_sha256: tuple[str, ...]
    sample_ids: tuple[tuple[tuple[int, ...], ...], ...]
    """Ids of the samples, by share and step."""
    weights: tuple[tuple[float, ...], ...]
    """Weight of the samples, by share and step."""
    losses: tuple[tuple[float, ...], ...]
    """Loss by share and step."""
    draws: tuple[tuple[tuple[str, ...], ...], ...]
    """Random draws that the workload has recorded, by share and step."""
    skipped: tuple[tuple[int, ...], ...]
    """Steps without an update because a loss-scaled gradient was not finite, by share."""
    buffers: tuple[Mapping[str, Array], ...]
    learning_rates: tuple[float, ...]
    quality: Mapping[str, float | None]
    samples_evaluated: int
    tensors: Mapping[str, Mapping[str, Array]]
    """Tensors by group (see `PARTS`) and name; names of the optimizer state are `parameter/key`."""
    data_set: tuple[str, ...] = ()
    """Numbers of samples of the data sets, by share."""
    weight_source: str = ""
    """Description of how ranks determine weights that their batches do not know."""

    def save(self, path: Path) -> None:
        """Write the capture of one share to an `.npz` file: tensors as arrays, the rest as JSON."""
        (buffers,) = self.buffers
        parts = {**self.tensors, "buffers": buffers}
        arrays: dict[str, Any] = {
            f"{part}\t{name}": a for part, named in parts.items() for name, a in named.items()
        }
        facts = json.dumps(asdict(replace(self, tensors={}, buffers=())))
        with path.open("wb") as file:
            np.savez(file, allow_pickle=False, facts=np.array(facts), **arrays)

    @classmethod
    def load(cls, path: Path) -> Capture:
        with np.load(path) as stored:
            facts: dict[str, Any] = json.loads(str(stored["facts"]))
            named: dict[str, dict[str, Array]] = {}
            for key in stored.files:
                part, tab, name = key.partition("\t")
                if tab:
                    named.setdefault(part, {})[name] = stored[key]
        facts = {key: _as_tuples(value) for key, value in facts.items()}
        return cls(**facts | {"buffers": (named.pop("buffers", {}),), "tensors": named})

    @classmethod
    def of_shares(cls, shares: Sequence[Capture]) -> Capture:
        """Join the captures of all shares.  The first one has the unsharded tensors."""
        joined: dict[str, Any] = {
            name: tuple(chain.from_iterable(getattr(share, name) for share in shares))
            for name in BY_SHARE
        }
        return replace(shares[0], **joined)

    def seen_by_one_process(self) -> Capture:
        """Convert to the report of one process that drives all devices (DataParallel)."""
        steps = range(len(self.learning_rates))
        ids = tuple(tuple(i for rank in self.sample_ids for i in rank[step]) for step in steps)
        weights = tuple(sum(rank[step] for rank in self.weights) for step in steps)
        draws = tuple(tuple(sorted(d for rank in self.draws for d in rank[step])) for step in steps)
        losses = tuple(float(np.mean([rank[step] for rank in self.losses])) for step in steps)
        return replace(
            self,
            initial_sha256=self.initial_sha256[:1],
            data_set=self.data_set[:1],
            sample_ids=(ids,),
            weights=(weights,),
            losses=(losses,),
            draws=(draws,),
            skipped=self.skipped[:1],
            buffers=self.buffers[:1],
        )


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


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
