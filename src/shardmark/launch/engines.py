"""The table of engines: their names, their options, and how one is made.  Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from shardmark.config.engines import LocalOptions, RayOptions, SlurmOptions, TorchrunOptions
from shardmark.core.recipe import Model
from shardmark.launch.engine import Engine, Errand, Tell
from shardmark.launch.local import engine as local
from shardmark.launch.local.engine import LocalEngine
from shardmark.launch.nodes import torchrun
from shardmark.launch.nodes.joining import own_versions
from shardmark.launch.nodes.run_key import EXPERIMENT, sections
from shardmark.launch.ray import engine as ray_engine
from shardmark.launch.ray.plan import rooms
from shardmark.launch.slurm import engine as slurm
from shardmark.trials.matrix import expand

if TYPE_CHECKING:
    from shardmark.config.experiment import Experiment

Options = TypeVar("Options", bound=Model)
Key = Mapping[str, str]
"""What all nodes of a run must have in common."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind(Generic[Options]):
    """One engine."""

    summary: str
    options: type[Options]
    build: Callable[[Options, Any, Key, Tell], Engine]
    """From options, `size`, key, and whom to tell what happens."""
    elsewhere: Callable[[Options, Any, Key, Tell], bool]
    """Do this command's part where another process controls the run, and say so: a node that
    serves, or a job that was submitted and followed to its end.  False for the controller."""
    submission: Callable[[Options, Any, Sequence[str]], list[str]]
    """What would be submitted or started, one line each, of `shardmark`'s command."""
    do_elsewhere: Callable[[Options, Any, Errand, Tell], int | None] = lambda *_: None
    """Have the whole command done somewhere else, by a job that is submitted and followed to its
    end: the command's exit code.  None where this process itself is to do it."""
    size: Callable[[Experiment], Any] = lambda experiment: most_nodes(experiment)  # noqa: PLW0108  # defined below
    """What the engine has to know of the experiment; by default most nodes of a trial."""


ENGINES: dict[str, Kind[Any]] = {
    "local": Kind(
        summary="processes of this machine",
        options=LocalOptions,
        build=lambda *_: LocalEngine(),
        elsewhere=lambda *_: False,
        submission=local.submission,
    ),
    "torchrun": Kind(
        summary="hosts without a scheduler: the same command on each, or one over a list of them",
        options=TorchrunOptions,
        build=torchrun.build,
        elsewhere=torchrun.serve,
        submission=torchrun.submission,
    ),
    "ray": Kind(
        summary="a Ray cluster: a placement group for the run, an actor for each rank",
        options=RayOptions,
        build=ray_engine.build,
        elsewhere=lambda *_: False,
        submission=ray_engine.submission,
        size=lambda experiment: rooms(expand(experiment, "cpu").trials),
    ),
    "slurm": Kind(
        summary="one job for the run, a step of it for each trial",
        options=SlurmOptions,
        build=slurm.build,
        elsewhere=lambda *_: False,
        submission=slurm.submission,
        do_elsewhere=slurm.do_elsewhere,
        size=lambda experiment: slurm.Size(most_nodes(experiment), experiment.name),
    ),
}


def build_engine(experiment: Experiment, tell: Tell) -> Engine:
    """The experiment's engine; nothing is started yet."""
    kind, options = _chosen(experiment)
    return kind.build(options, kind.size(experiment), run_key(experiment), tell)


def elsewhere(experiment: Experiment, tell: Tell) -> bool:
    """Whether another process controls the run; this one's part in it is then over."""
    kind, options = _chosen(experiment)
    return kind.elsewhere(options, kind.size(experiment), run_key(experiment), tell)


def do_elsewhere(experiment: Experiment, errand: Errand, tell: Tell) -> int | None:
    """The command's exit code, if the engine has it done by a job; None if it is to be done here.

    Raises `JobEndedError` where the job was ended from outside.
    """
    kind, options = _chosen(experiment)
    return kind.do_elsewhere(options, kind.size(experiment), errand, tell)


def submission(experiment: Experiment, command: Sequence[str]) -> list[str]:
    """What the engine would submit or start, for `--dry-run`."""
    kind, options = _chosen(experiment)
    return kind.submission(options, kind.size(experiment), command)


def most_nodes(experiment: Experiment) -> int:
    """Of any trial; the kind of device makes no difference to it."""
    return expand(experiment).most_nodes


def run_key(experiment: Experiment) -> dict[str, str]:
    """Hashes of the experiment's sections, and the versions that must be the same on every node."""
    return {
        EXPERIMENT: sections(experiment.model_dump(mode="json", exclude={"engine"})),
        **own_versions(),
    }


def _chosen(experiment: Experiment) -> tuple[Kind[Any], Model]:
    return ENGINES[experiment.engine.name], experiment.engine
