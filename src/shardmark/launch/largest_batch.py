"""The largest batch of every strategy: predicted first, then tried by real steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from shardmark.config.experiment import Experiment
from shardmark.core.errors import InputError, ShardmarkError
from shardmark.core.recipe import Measure, Repeats, Schedule
from shardmark.launch.controller import modules_of, taken_up
from shardmark.launch.listener import ProgressListener, Silent
from shardmark.launch.trial import TrialRunner
from shardmark.measure.system.cgroup import cgroup_limits
from shardmark.measure.system.gpus import all_cuda_devices, visible_cuda_devices
from shardmark.predict.largest_batch import (
    LargestBatch,
    Try,
    largest,
    next_samples,
    passes_of,
)
from shardmark.predict.memory import CONTEXT_BYTES, FRAGMENTATION, rank_memory
from shardmark.predict.models import Models
from shardmark.results.schema import NOT_MEASURED, Outcome, TrialResult
from shardmark.results.store import load_run
from shardmark.trials.matrix import expand
from shardmark.trials.trial import Trial, trial_id

WARMUP_STEPS, STEPS = 1, 3
"""The optimizer has its state after the first one."""
HOST_SHARE = 0.9
"""Of the memory that is available to ranks on a CPU: without any a machine no longer answers."""


def largest_batches(
    experiment: Experiment,
    out: Path,
    *,
    memory_bytes: float | None = None,
    progress: ProgressListener | None = None,
) -> list[LargestBatch]:
    """Of each cell, within so many bytes of a rank's tensors, or within what devices have.

    All tries are trials of the run in `out`; those that are there already are not repeated.  Raises
    `InputError` for an experiment or a folder that cannot be used.
    """
    if experiment.engine.name != "local":
        raise InputError("engine", f"found {experiment.engine.name}", "batches are tried by local")
    listener = progress or Silent()
    plan = expand(experiment)
    cells = tuple(trial for trial in plan.trials if not trial.repeat)
    with taken_up(experiment, replace(plan, trials=cells), out, listener) as (placed, runner):
        runner.engine.load(modules_of(cells), runner.machine.device_type)
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
            for number, cell in enumerate(placed.trials, start=1)
        ]
        models = Models()
        return [search.found(models) for search in searches]


def room_bytes(cell: Trial, memory_bytes: float | None) -> float:
    """For a rank's tensors; on a CUDA device what context and gaps leave."""
    if memory_bytes is not None:
        return memory_bytes
    if cell.device_type == "cpu":
        limit = cgroup_limits().memory_bytes
        there = psutil.virtual_memory().available
        return HOST_SHARE * min(there, limit or there) / cell.layout.processes
    cards = [card.memory_bytes or 0 for card in visible_cuda_devices(all_cuda_devices())]
    return (min(cards, default=0) - CONTEXT_BYTES) / FRAGMENTATION


def tried_trial(cell: Trial, samples: int) -> Trial:
    """A few real steps of the cell with so many samples in a rank's pass."""
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
    """Of one cell."""

    cell: Trial
    room_bytes: float
    limited: bool
    """No device refuses what is beyond the room."""
    runner: TrialRunner
    stored: Mapping[str, TrialResult]
    place: tuple[int, int]
    """Number of the cell, and of all."""

    def found(self, models: Models) -> LargestBatch:
        cell, room = self.cell, self.room_bytes
        found = LargestBatch(cell=cell, room_bytes=room)
        try:
            bytes_of = self._predicted(models)
            there = models.training_samples(cell.workload)
            if there is not None:
                found = replace(found, most=there // (cell.layout.shares * passes_of(cell)))
            found = replace(found, predicted=min(found.most, largest(bytes_of, room)))
            while True:
                samples = next_samples(bytes_of, room, found.tries, found.most)
                if samples is None:
                    return found
                fresh = self._tried(tried_trial(cell, samples), samples)
                found = replace(found, tries=(*found.tries, fresh))
        except ShardmarkError as error:
            return replace(found, reason=str(error))

    def _predicted(self, models: Models) -> Callable[[int], float]:
        """Bytes of a rank's tensors, by samples of its pass.  Raises `ShardmarkError`."""
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

    def _tried(self, trial: Trial, samples: int) -> Try:
        """By a trial that is stored, or run now.  Raises `ShardmarkError` for one that failed,
        `KeyboardInterrupt` for one that was interrupted."""
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
            why = None if result.failure is None else result.failure.reason
            found = (
                f"{samples} samples of a rank: {result.outcome}: {why or 'no peak was measured'}"
            )
            raise InputError(trial.title, found, "see its trial in the run's folder")
        fits = not self.limited or peak.value <= self.room_bytes
        return Try(samples=samples, peak_bytes=peak.value, fits=fits)
