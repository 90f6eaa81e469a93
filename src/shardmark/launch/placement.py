"""Where the nodes of a trial meet, and whether they can run it.  No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardmark.config.engines import LOOPBACK
from shardmark.core.errors import StrategyUnavailable
from shardmark.trials.trial import Trial

if TYPE_CHECKING:
    from shardmark.core.machine import Machine
    from shardmark.launch.engine import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class MeetingPoint:
    """Node 0's store, as one node of a trial sees it; by default this machine is alone."""

    node: int = 0
    """This one's number."""
    host: str = LOOPBACK
    """Node 0's own address."""
    port: int = 0
    address: str = LOOPBACK
    """This node's own."""


def check_trial(trial: Trial, machine: Machine, engine: Engine) -> None:
    """Raise `StrategyUnavailable` where machines like this one cannot run it, or are not there."""
    strategy = trial.built_strategy
    strategy.check(trial.world_size, machine.times(trial.nodes), trial.recipe)
    if lacking := engine.lacks(trial.nodes):
        raise StrategyUnavailable(trial.strategy.name, lacking, "use another --engine or its hosts")
    needed = most_devices(trial)
    if machine.device_type == "cuda" and needed > machine.device_count:
        offered = f"a node and some node offers {machine.device_count}"
        raise StrategyUnavailable(
            trial.strategy.name,
            f"it needs {needed} CUDA devices on {offered}",
            "use more nodes, or fewer ranks on each",
        )


def most_devices(trial: Trial) -> int:
    """CUDA devices that the trial needs on its fullest node, one for each rank that uses one."""
    if trial.device_type == "cpu":
        return 0
    layout = trial.layout
    return max(sum(not layout.ranks[r].on_cpu for r in ranks) for ranks in layout.ranks_by_node)
