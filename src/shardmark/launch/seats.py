"""Which rank of a trial sits on which node.  Imports no torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardmark.core.errors import StrategyUnavailable
from shardmark.trials.trial import Trial

if TYPE_CHECKING:
    from shardmark.core.machine import Machine
    from shardmark.launch.engine import Engine


PLACE_FILE = "place.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What the agent of one node knows beyond the trial."""

    node: int = 0
    endpoint: str = "localhost:0"
    """Where the launchers of all nodes meet, on node 0."""
    address: str = "localhost"
    """Where others reach this node."""

    def write(self, directory: Path) -> None:
        (directory / PLACE_FILE).write_text(json.dumps(asdict(self)))


def read_place(directory: Path) -> Place:
    """The place that was written for the trial; by default this machine alone."""
    file = directory / PLACE_FILE
    return Place(**json.loads(file.read_text())) if file.exists() else Place()


def seats_of(trial: Trial) -> tuple[tuple[int, ...], ...]:
    """The ranks of each node, in order of local rank."""
    strategy = trial.built_strategy
    nodes = strategy.nodes_of(trial.world_size, trial.nodes)
    return tuple(
        tuple(rank for rank, node in enumerate(nodes) if node == number)
        for number in range(trial.nodes)
    )


def check_trial(trial: Trial, machine: Machine, engine: Engine) -> None:
    """Raise `StrategyUnavailable` where machines like this one cannot run it, or are not there."""
    strategy = trial.built_strategy
    strategy.check(trial.world_size, machine.times(trial.nodes), trial.recipe)
    kept = strategy.resume_blocker(trial.recipe) if trial.limits.max_restarts else None
    if kept is not None:
        raise StrategyUnavailable(trial.strategy.name, kept, "set limits.max_restarts to 0")
    lacking = engine.lacks(trial.nodes)
    if lacking is not None:
        raise StrategyUnavailable(trial.strategy.name, lacking, "use another --engine or its hosts")
    needed = most_devices(trial)
    if machine.device_type == "cuda" and needed > machine.device_count:
        raise StrategyUnavailable(
            trial.strategy.name,
            f"it needs {needed} CUDA devices on a node and some node offers {machine.device_count}",
            "use more nodes, or fewer ranks on each",
        )


def most_devices(trial: Trial) -> int:
    """CUDA devices that the trial needs on its fullest node, one for each rank that uses one."""
    strategy = trial.built_strategy
    return max(
        sum(strategy.rank_device(r, trial.world_size, trial.device_type) == "cuda" for r in ranks)
        for ranks in seats_of(trial)
    )
