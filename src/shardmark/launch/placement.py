"""Which rank of a trial runs on which node, and whether the nodes can run it.  No torch."""

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


RENDEZVOUS_FILE = "rendezvous.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Where the launchers of a trial's nodes meet, and which of the nodes this one is."""

    node: int = 0
    endpoint: str = "localhost:0"
    """HOST:PORT, on node 0."""
    address: str = "localhost"
    """Where others reach this node."""

    def write(self, directory: Path) -> None:
        (directory / RENDEZVOUS_FILE).write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, directory: Path) -> Rendezvous:
        """What was written for the trial; by default this machine alone."""
        file = directory / RENDEZVOUS_FILE
        return cls(**json.loads(file.read_text())) if file.exists() else cls()


def ranks_by_node(trial: Trial) -> tuple[tuple[int, ...], ...]:
    """The ranks of each node, in order of local rank."""
    return trial.layout.ranks_by_node


def check_trial(trial: Trial, machine: Machine, engine: Engine) -> None:
    """Raise `StrategyUnavailable` where machines like this one cannot run it, or are not there."""
    strategy = trial.built_strategy
    strategy.check(trial.world_size, machine.times(trial.nodes), trial.recipe)
    blocker = strategy.resume_blocker(trial.recipe) if trial.limits.max_restarts else None
    if blocker is not None:
        raise StrategyUnavailable(trial.strategy.name, blocker, "set limits.max_restarts to 0")
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
    if trial.device_type == "cpu":
        return 0
    layout = trial.layout
    return max(sum(not layout.ranks[r].on_cpu for r in ranks) for ranks in layout.ranks_by_node)
