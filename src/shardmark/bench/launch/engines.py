"""The table of engines.  Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardmark.base.system.plugins import by_name
from shardmark.bench.launch.engine import Engine, EngineRequest, Notify, run_key
from shardmark.bench.launch.local.engine import LocalEngine
from shardmark.scripts.start import isolation_refusal

if TYPE_CHECKING:
    from shardmark.experiment.experiment import Experiment
    from shardmark.experiment.matrix import TrialPlan


@dataclass(frozen=True, slots=True)
class EngineKind:
    """Functions of one engine; their first argument is the engine's options."""

    build: Callable[[Any, EngineRequest], Engine]
    """Builds the engine, without starting anything."""
    submission: Callable[[Any, EngineRequest, Sequence[str]], list[str]]
    """Returns lines for `--dry-run`: the commands that the engine would start."""
    serve_as_node: Callable[[Any, EngineRequest], int | None] = lambda *_: None
    """Serves as a node until the run ends and returns the command's exit code; returns None where
    this process controls the run."""


def _beyond_this_machine(_: Any, request: EngineRequest, __: Sequence[str]) -> list[str]:
    """Return a line about the trials that the engine `local` cannot run, if there are any."""
    if request.nodes == 1:
        return []
    counts = "2 nodes" if request.nodes == 2 else f"2 to {request.nodes} nodes"
    others = "--engine torchrun, slurm or ray runs them"
    return [f"trials on {counts} are recorded as unavailable here; {others}"]


ENGINES = {
    "local": EngineKind(lambda *_: LocalEngine(), _beyond_this_machine),
    "torchrun": EngineKind(
        by_name("shardmark.extras.engines.nodes.torchrun:build"),
        by_name("shardmark.extras.engines.nodes.torchrun:submission"),
        by_name("shardmark.extras.engines.nodes.torchrun:serve_as_node"),
    ),
    "ray": EngineKind(
        by_name("shardmark.extras.engines.ray.engine:build"),
        by_name("shardmark.extras.engines.ray.engine:submission"),
    ),
    "slurm": EngineKind(
        by_name("shardmark.extras.engines.slurm.engine:build"),
        by_name("shardmark.extras.engines.slurm.engine:submission"),
        by_name("shardmark.extras.engines.slurm.engine:serve_as_node"),
    ),
}

PROTECTED = (
    "your files stay as they are: each start of a script writes to a private copy of them, which is"
    " removed when it ends"
)


def build_engine(experiment: Experiment, plan: TrialPlan, notify: Notify) -> Engine:
    """Build the experiment's engine, without starting any trial.

    Raises `InputError` for scripts if this machine cannot protect the user's files from them.
    """
    scripts = [trial.script for trial in plan.trials if trial.script is not None]
    if not all(script.writes_are_fine for script in scripts):
        if refusal := isolation_refusal():
            raise refusal
        notify(PROTECTED)
    request = request_of(experiment, plan, notify)
    return ENGINES[experiment.engine.name].build(experiment.engine, request)


def serve_as_node(experiment: Experiment, plan: TrialPlan, notify: Notify) -> int | None:
    """Serve as a node of a run that another process controls, and return the exit code.

    Return None where this process controls the run.
    """
    request = request_of(experiment, plan, notify)
    return ENGINES[experiment.engine.name].serve_as_node(experiment.engine, request)


def submission(experiment: Experiment, plan: TrialPlan, command: Sequence[str]) -> list[str]:
    """Return lines for `--dry-run`: the commands that the engine would start."""
    request = request_of(experiment, plan, lambda _: None)
    return ENGINES[experiment.engine.name].submission(experiment.engine, request, command)


def request_of(experiment: Experiment, plan: TrialPlan, notify: Notify) -> EngineRequest:
    """Return the properties of the experiment that its engine needs."""
    return EngineRequest(
        name=experiment.name,
        device=experiment.device,
        trials=plan.trials,
        key=run_key(experiment.model_dump(mode="json", exclude={"engine"})),
        notify=notify,
    )
