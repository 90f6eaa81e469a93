"""The table of engines: their names, their options, and how one is made.  Imports no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from shardmark.experiment.axes import canonical
from shardmark.experiment.matrix import expand
from shardmark.experiment.optimization import Model
from shardmark.launch import torchrun
from shardmark.launch._engine import Engine
from shardmark.launch.joining import own_versions
from shardmark.launch.local import LocalEngine, LocalOptions

if TYPE_CHECKING:
    from shardmark.experiment.schema import Experiment

Options = TypeVar("Options", bound=Model)
Tell = Callable[[str], None]
Key = Mapping[str, str]
"""What all nodes of a run must have in common."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind(Generic[Options]):
    """One engine."""

    summary: str
    options: type[Options]
    build: Callable[[Options, int, Key, Tell], Engine]
    """From options, most nodes of a trial, key, and whom to tell what happens."""
    elsewhere: Callable[[Options, int, Key, Tell], bool]
    """Do this command's part where another process controls the run, and say so: a node that
    serves, or a job that was submitted and followed to its end.  False for the controller."""
    submission: Callable[[Options, int, Sequence[str]], list[str]]
    """What would be submitted or started, one line each, of `shardmark`'s command."""


ENGINES: dict[str, Kind[Any]] = {
    "local": Kind(
        summary="processes of this machine",
        options=LocalOptions,
        build=lambda *_: LocalEngine(),
        elsewhere=lambda *_: False,
        submission=lambda *_: [],
    ),
    "torchrun": Kind(
        summary="hosts without a scheduler: the same command on each, or one over a list of them",
        options=torchrun.TorchrunOptions,
        build=torchrun.build,
        elsewhere=torchrun.serve,
        submission=torchrun.submission,
    ),
}


def build_engine(experiment: Experiment, tell: Tell) -> Engine:
    """The experiment's engine; nothing is started yet."""
    kind, options = _chosen(experiment)
    return kind.build(options, most_nodes(experiment), run_key(experiment), tell)


def elsewhere(experiment: Experiment, tell: Tell) -> bool:
    """Whether another process controls the run; this one's part in it is then over."""
    kind, options = _chosen(experiment)
    return kind.elsewhere(options, most_nodes(experiment), run_key(experiment), tell)


def submission(experiment: Experiment, command: Sequence[str]) -> list[str]:
    """What the engine would submit or start, for `--dry-run`."""
    kind, options = _chosen(experiment)
    return kind.submission(options, most_nodes(experiment), command)


def most_nodes(experiment: Experiment) -> int:
    """Of any trial; the kind of device makes no difference to it."""
    return max(trial.nodes for trial in expand(experiment, "cpu").trials)


def run_key(experiment: Experiment) -> dict[str, str]:
    """The experiment, as a hash, and the versions that must be the same on every node."""
    content = canonical(experiment.model_dump(mode="json", exclude={"engine"}))
    return {"experiment": hashlib.sha256(content.encode()).hexdigest()[:16], **own_versions()}


def _chosen(experiment: Experiment) -> tuple[Kind[Any], Model]:
    kind = ENGINES[experiment.engine["name"]]
    given = {key: value for key, value in experiment.engine.items() if key != "name"}
    return kind, kind.options.model_validate(given)
