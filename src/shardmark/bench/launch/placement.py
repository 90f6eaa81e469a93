"""The rendezvous of a trial's nodes, and checks whether they can run the trial.  No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardmark.base.errors import StrategyUnavailable
from shardmark.experiment.engines import LOOPBACK
from shardmark.ranks.trial import Trial

if TYPE_CHECKING:
    from shardmark.base.machine import Machine
    from shardmark.bench.launch.engine import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class MeetingPoint:
    """Address of node 0's store for one node of a trial; the default is a single machine."""

    node: int = 0
    """Number of this node."""
    host: str = LOOPBACK
    """Address of node 0."""
    port: int = 0
    address: str = LOOPBACK
    """Address of this node."""


def check_trial(trial: Trial, machine: Machine, engine: Engine) -> None:
    """Raise `StrategyUnavailable` if the engine's machines cannot run the trial."""
    strategy = trial.built_strategy
    strategy.check(trial.world_size, machine.times(trial.nodes), trial.recipe)
    if reason := engine.unavailable_reason(trial.nodes):
        raise StrategyUnavailable(trial.strategy.name, reason, "use another --engine or its hosts")
    needed = most_devices(trial)
    if machine.device_type == "cuda" and needed > machine.device_count:
        offered = f"a node and some node has {machine.device_count}"
        raise StrategyUnavailable(
            trial.strategy.name,
            f"it needs {needed} CUDA devices on {offered}",
            "use more nodes, or fewer ranks on each",
        )


def most_devices(trial: Trial) -> int:
    """Return the largest number of CUDA devices that the trial needs on one node."""
    if trial.device_type == "cpu":
        return 0
    layout = trial.layout
    return max(sum(not layout.ranks[r].on_cpu for r in ranks) for ranks in layout.ranks_by_node)
