"""Finds the largest batch of every strategy: predicts it, then tests it by real steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from shardmark.base.errors import InputError, ShardmarkError
from shardmark.base.recipe import Measure, Repeats, Schedule
from shardmark.base.results.schema import NOT_MEASURED, Outcome, TrialResult
from shardmark.base.results.store import load_run
from shardmark.bench.launch.listener import ProgressListener
from shardmark.bench.launch.run_options import RunOptions
from shardmark.bench.launch.session import RunSession
from shardmark.bench.launch.trial import TrialRunner
from shardmark.experiment.experiment import Experiment
from shardmark.experiment.matrix import expand
from shardmark.predict.batch.predicted import LargestBatch, Try, largest, next_samples, passes_of
from shardmark.predict.memory import USUAL, rank_memory
from shardmark.predict.models import Models
from shardmark.ranks.measure.kernel_files import cgroup_limits
from shardmark.ranks.measure.system.gpus import all_cuda_devices, visible_cuda_devices
from shardmark.ranks.trial import Trial, trial_id

WARMUP_STEPS, STEPS = 1, 3
"""The optimizer allocates its state in the first step."""
HOST_SHARE = 0.9
"""Fraction of the available memory that ranks on a CPU may use."""


def largest_batches(
    experiment: Experiment,
    out: Path,
    *,
    memory_bytes: float | None = None,
    listener: ProgressListener | None = None,
) -> list[LargestBatch]:
    """Find the largest batch of each cell whose rank needs at most `memory_bytes` for tensors.

    By default `memory_bytes` is the memory of the device.  The trials are stored in the run `out`;
    those that it has already are not repeated.  Raises `InputError` for an experiment or a folder
    that cannot be used.
    """
    if experiment.engine.name != "local":
        raise InputError("engine", f"found {experiment.engine.name}", "allowed is local")
    listener = listener or ProgressListener()
    plan = expand(experiment)
    plan = replace(plan, trials=tuple(trial for trial in plan.trials if not trial.repeat))
    with RunSession.open(experiment, out, RunOptions(), listener, plan=plan) as session:
        cells, runner = session.plan.trials, session.runner
        runner.load(cells)
        stored = {result.id: result for result in load_run(out).trials}
        searches = [
            _Search(
                cell=cell,
                room_bytes=room_bytes(cell, memory_bytes),
                limited=memory_bytes is not None or cell.device_type == "cpu",
                runner=runner,
                stored=stored,
                place=(number, len(cells)),
            )
            for number, cell in enumerate(cells, start=1)
        ]
        models = Models()
        return [search.run(models) for search in searches]


def room_bytes(cell: Trial, memory_bytes: float | None) -> float:
    """Return the memory for a rank's tensors; CUDA's context and fragmentation are subtracted."""
    if memory_bytes is not None:
        return memory_bytes
    if cell.device_type == "cpu":
        limit = cgroup_limits().memory_bytes
        available = psutil.virtual_memory().available
        return HOST_SHARE * min(available, limit or available) / cell.layout.processes
    cards = [card.memory_bytes or 0 for card in visible_cuda_devices(all_cuda_devices())]
    return (min(cards, default=0) - USUAL.context_bytes) / USUAL.reserved


def tried_trial(cell: Trial, samples: int) -> Trial:
    """Return a trial of a few steps of the cell, with `samples` samples in a rank's pass."""
    batch = samples * passes_of(cell)
    changes = {"global_batch": None, "per_rank_batch": batch, "epochs": None, "steps": STEPS}
    measure = Measure(
        warmup_steps=WARMUP_STEPS,
        warmup_seconds=0,
        window_seconds=0,
        repeats=Repeats(at_least=1, at_most=1),
        max_remeasure=0,
        verify=False,
        evaluate="never",
    )
    trial = cell.model_copy(
        update={
            "recipe": cell.recipe.model_copy(update={**changes, "schedule": Schedule()}),
            "measure": measure,
            "varied": {**cell.varied, "recipe.per_rank_batch": batch},
        }
    )
    return trial.model_copy(update={"id": trial_id(trial)})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Search:
    """A search for the largest batch of one cell."""

    cell: Trial
    room_bytes: float
    limited: bool
    """True if the search itself compares the peak with `room_bytes`, since no device does."""
    runner: TrialRunner
    stored: Mapping[str, TrialResult]
    place: tuple[int, int]
    """Number of the cell, and number of all cells."""

    def run(self, models: Models) -> LargestBatch:
        cell, room = self.cell, self.room_bytes
        batch = LargestBatch(cell=cell, room_bytes=room)
        try:
            bytes_of = self._predictor(models)
            available = models.training_samples(cell.workload)
            if available is not None:
                most = available // (cell.layout.shares * passes_of(cell))
                batch = replace(batch, most=most)
            batch = replace(batch, predicted=min(batch.most, largest(bytes_of, room)))
            while True:
                samples = next_samples(bytes_of, room, batch.tries, batch.most)
                if samples is None:
                    return batch
                measured = self._measure(tried_trial(cell, samples), samples)
                batch = replace(batch, tries=(*batch.tries, measured))
        except ShardmarkError as error:
            return replace(batch, reason=str(error))

    def _predictor(self, models: Models) -> Callable[[int], float]:
        """Return a function that predicts the bytes of a rank's tensors from its samples."""
        cell = self.cell
        cell.built_strategy.check(cell.world_size, self.runner.machine, cell.recipe)
        profile = models.profile_of(cell, cell.world_size, cell.nodes, device_type=cell.device_type)

        def bytes_of(samples: int) -> float:
            memory = rank_memory(
                profile,
                cell.built_strategy,
                tried_trial(cell, samples).recipe,
                cell.world_size,
                nodes=cell.nodes,
                device_type=cell.device_type,
            )
            return memory.peak_bytes

        return bytes_of

    def _measure(self, trial: Trial, samples: int) -> Try:
        """Return the stored result of the trial, or run it.

        Raises `ShardmarkError` if it failed, `KeyboardInterrupt` if it was interrupted.
        """
        result = self.stored.get(trial.id)
        if result is None or result.outcome in NOT_MEASURED:
            listener = self.runner.listener
            listener.trial_started(*self.place, trial)
            result = self.runner.run(trial, order=self.place[0])
            listener.trial_ended(*self.place, result)
        if result.outcome is Outcome.INTERRUPTED:
            raise KeyboardInterrupt
        if result.outcome is Outcome.OUT_OF_MEMORY:
            return Try(samples=samples, peak_bytes=None, fits=False)
        peak = result.metrics.get("peak_memory_bytes")
        if result.outcome is not Outcome.OK or peak is None:
            reason = result.failure.reason if result.failure else "no peak was measured"
            problem = f"{samples} samples of a rank: {result.outcome}: {reason}"
            raise InputError(trial.title, problem, "see its trial in the run's folder")
        fits = not self.limited or peak.value <= self.room_bytes
        return Try(samples=samples, peak_bytes=peak.value, fits=fits)
