"""The table of engines, and what is asked of an experiment's.  Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardmark.launch.engine import Engine, EngineRequest, RemoteCommand, Tell
from shardmark.launch.local.engine import LocalEngine
from shardmark.launch.nodes import torchrun
from shardmark.launch.nodes.protocol import run_key
from shardmark.launch.ray import engine as ray
from shardmark.launch.slurm import engine as slurm

if TYPE_CHECKING:
    from shardmark.config.experiment import Experiment
    from shardmark.trials.matrix import Plan


@dataclass(frozen=True, slots=True)
class EngineKind:
    """One engine; its options come first in each call."""

    build: Callable[[Any, EngineRequest], Engine]
    """Starts nothing yet."""
    submission: Callable[[Any, EngineRequest, Sequence[str]], list[str]]
    """What would be submitted or started by `shardmark`'s command, one line each."""
    delegate: Callable[[Any, EngineRequest, RemoteCommand], int | None] = lambda *_: None
    """The exit code, where another process does the command or controls the run: a job that is
    submitted and followed to its end, a node that serves.  None where this process is to do it."""


def _beyond_this_machine(_: Any, request: EngineRequest, __: Sequence[str]) -> list[str]:
    """Which trials the engine `local` cannot run."""
    if request.nodes == 1:
        return []
    most = "2 nodes" if request.nodes == 2 else f"2 to {request.nodes} nodes"
    others = "--engine torchrun, slurm or ray runs them"
    return [f"trials on {most} are recorded as unavailable here; {others}"]


ENGINES = {
    "local": EngineKind(lambda *_: LocalEngine(), _beyond_this_machine),
    "torchrun": EngineKind(torchrun.build, torchrun.submission, torchrun.delegate),
    "ray": EngineKind(ray.build, ray.submission),
    "slurm": EngineKind(slurm.build, slurm.submission, slurm.delegate),
}


def build_engine(experiment: Experiment, plan: Plan, tell: Tell) -> Engine:
    """The experiment's engine; nothing is started yet."""
    request = request_of(experiment, plan, tell)
    return ENGINES[experiment.engine.name].build(experiment.engine, request)


def delegate(experiment: Experiment, plan: Plan, command: RemoteCommand, tell: Tell) -> int | None:
    """The command's exit code, where another process does it; None where this one is to.

    Raises `JobEndedError` where a job was ended from outside.
    """
    request = request_of(experiment, plan, tell)
    return ENGINES[experiment.engine.name].delegate(experiment.engine, request, command)


def submission(experiment: Experiment, plan: Plan, command: Sequence[str]) -> list[str]:
    """What the engine would submit or start, for `--dry-run`."""
    request = request_of(experiment, plan, lambda _: None)
    return ENGINES[experiment.engine.name].submission(experiment.engine, request, command)


def request_of(experiment: Experiment, plan: Plan, tell: Tell) -> EngineRequest:
    """What the engines ask of the experiment; the kind of device makes no difference to it."""
    return EngineRequest(
        name=experiment.name,
        device=experiment.device,
        trials=plan.trials,
        key=run_key(experiment.model_dump(mode="json", exclude={"engine"})),
        tell=tell,
    )
