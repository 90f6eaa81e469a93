"""Largest batches from Python."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardmark.config.experiment import Experiment
    from shardmark.predict.largest_batch import LargestBatch


def largest_batches(
    experiment: str | Path | Mapping[str, Any] | Experiment,
    out: str | Path | None = None,
    *,
    memory_gib: float | None = None,
    progress: bool = True,
    **overrides: Any,
) -> list[LargestBatch]:
    """The largest batch of each strategy: predicted, then tried by up to four real runs.

    `memory_gib` is for a rank's tensors; by default what its device has, or its part of the memory
    that is available here.  Tries are trials of the run in `out`, by default a new folder in
    `runs/`; those that are there are not repeated.  Experiment and overrides are those of `run`.

    Raises `InputError` for what cannot be run; what is not known of a strategy is its `reason`.
    """
    from shardmark.api.model_source import by_name
    from shardmark.config.experiment import Experiment
    from shardmark.config.load import resolve
    from shardmark.launch.largest_batch import largest_batches as found
    from shardmark.progress.display import listener
    from shardmark.results.runs_folder import RUNS, create_run_folder, remove_if_empty

    given = None if out is None else Path(out).expanduser()
    models = (RUNS if given is None else given.parent) / "models"
    if not isinstance(experiment, Experiment):
        experiment = by_name(experiment, models)
    resolved = resolve(experiment, by_name(overrides, models))
    folder = given or create_run_folder(f"{resolved.name}-batch")
    with (
        remove_if_empty(folder if given is None else None),
        listener(folder, quiet=not progress) as told,
    ):
        memory = None if memory_gib is None else memory_gib * 2**30
        return found(resolved, folder, memory_bytes=memory, progress=told)
