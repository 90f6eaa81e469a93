"""Largest batches, from Python."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardmark.experiment.experiment import Experiment
    from shardmark.predict.batch.predicted import LargestBatch


def largest_batches(
    experiment: str | Path | Mapping[str, Any] | Experiment,
    out: str | Path | None = None,
    *,
    memory_gib: float | None = None,
    progress: bool = True,
    **overrides: Any,
) -> list[LargestBatch]:
    """Find the largest batch of each strategy: predict it, then test it by up to four trials.

    `memory_gib` is the memory for a rank's tensors; by default the memory of its device, or its
    share of the memory that is available on this machine.  `out` is the folder of the trials, by
    default a new one in `runs/`; trials that are in it are not repeated.  Experiment and overrides
    are those of `run`.

    Raises `InputError` for what cannot be run; a strategy without an answer has a `reason`.
    """
    from shardmark.base.results.runs_folder import run_folder
    from shardmark.bench.launch.run_options import RunOptions
    from shardmark.bench.progress.display import listener
    from shardmark.experiment.model_source import resolve_experiment
    from shardmark.predict.batch.trials import largest_batches as find_largest_batches

    path = None if out is None else Path(out).expanduser()
    resolved = resolve_experiment(experiment, overrides, path)
    memory_bytes = None if memory_gib is None else memory_gib * 2**30
    with (
        run_folder(path, f"{resolved.name}-batch") as folder,
        listener(folder, RunOptions(quiet=not progress)) as progress_listener,
    ):
        return find_largest_batches(
            resolved, folder, memory_bytes=memory_bytes, listener=progress_listener
        )
