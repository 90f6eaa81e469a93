"""Predictions on other machines, and the largest batches on this one, from Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from shardmark.experiment.experiment import Experiment
    from shardmark.predict.batch.predicted import LargestBatch
    from shardmark.predict.plan import Plan


def plan(
    experiment: str | Path | Mapping[str, Any] | Experiment,
    on: str | Sequence[str],
    *,
    nodes: int | str | Sequence[int] = 1,
    run: str | Path | None = None,
    price_per_hour: float | Sequence[float] | None = None,
    search: bool = False,
    work: float | None = None,
    padding: float | None = None,
    mean_length: float | None = None,
    reference_model: bool = False,
    stack: Literal["eager", "fused"] | None = None,
    measured: str | None = None,
    measured_batch: int | None = None,
    measured_model: str | None = None,
    **overrides: Any,
) -> Plan:
    """Predict memory, speed and cost of each strategy of an experiment, or of a model; run nothing.

    A model is named as on the command line (`"resnet50"`, `"hf:Qwen/Qwen3-8B"`), and arguments are
    the options of `shardmark plan`; `on` may be a list of machines, `nodes` a number, a list or
    `"1..128"`, `price_per_hour` one price of a card or a list of one for each machine.  `work` is
    the number of tokens or samples to price, `run` the folder of `--from`.  With `search`,
    `Plan.search` has the best layouts, and `Plan.winner` the fastest as an experiment.
    Experiment and overrides are those of `run`.

    Raises `InputError` for unknown hardware; a strategy without a prediction is a row with its
    `reason`.
    """
    from shardmark.base.results.store import load_run
    from shardmark.experiment.load import override_of
    from shardmark.experiment.model_source import resolve_experiment
    from shardmark.predict.model_name import is_experiment
    from shardmark.predict.models import Models
    from shardmark.predict.plan import make_plan, parse_nodes
    from shardmark.predict.request import PlanRequest

    counts = nodes if isinstance(nodes, str | int) else ",".join(map(str, nodes))
    prices = [price_per_hour] if isinstance(price_per_hour, int | float) else price_per_hour or ()
    named = isinstance(experiment, str) and not is_experiment(experiment)
    request = PlanRequest(
        subject=str(experiment) if named else resolve_experiment(experiment, overrides),
        machines=(str(on),) if isinstance(on, str | Path) else tuple(map(str, on)),
        nodes=parse_nodes(str(counts)),
        overrides=tuple(override_of(*item) for item in overrides.items()) if named else (),
        run=None if run is None else load_run(Path(run).expanduser()),
        prices_per_hour=tuple(prices),
        search=search,
        work=work,
        padding=padding,
        mean_length=mean_length,
        reference_model=reference_model,
        stack=stack,
        measured=measured,
        measured_batch=measured_batch,
        measured_model=measured_model,
    )
    return make_plan(request, Models())


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
