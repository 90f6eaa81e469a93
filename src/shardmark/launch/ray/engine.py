"""The engine `ray`: an actor for each rank, in a placement group of a bundle for each node."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardmark.config.engines import RayOptions
from shardmark.core.machine import Machine
from shardmark.launch.engine import Task
from shardmark.launch.nodes.cluster import ClusterEngine
from shardmark.launch.outcome import Ending
from shardmark.launch.ray.cluster import RayCluster
from shardmark.launch.ray.judging import send_testimony
from shardmark.launch.ray.plan import Room, bundles, gpus_of_a_rank
from shardmark.trials.trial import Trial


def build(
    options: RayOptions, asked: Sequence[Room], key: Mapping[str, str], tell: Callable[[str], None]
) -> RayEngine:
    """The driver's side; no connection is made yet."""
    return RayEngine(options, asked, key, tell)


def submission(options: RayOptions, asked: Sequence[Room], command: Sequence[str]) -> list[str]:  # noqa: ARG001  # as every engine's
    """What would be asked of the cluster."""
    nodes = f"{len(asked)} bundle{'s' if len(asked) > 1 else ''}"
    lines = [
        f"in the cluster at {options.address}: one placement group for all trials, STRICT_SPREAD, "
        f"{nodes}"
    ]
    unsaid = options.gpus_per_rank is None
    for node, room in enumerate(asked):
        (bundle,) = bundles(options, [room], options.gpus_per_rank or 0)
        gpus = f', and {{"GPU": {room.devices}}} where the device is cuda' if unsaid else ""
        actors = f"a node actor and {room.ranks} rank actor{'s' if room.ranks > 1 else ''}"
        lines.append(f"node {node}: {json.dumps(bundle)}{gpus}: {actors}")
    if options.runtime_env:
        lines.append(f"runtime_env: {json.dumps(options.runtime_env)}")
    return lines


class RayEngine:
    """Has actors of a Ray cluster start the ranks, and node actors do what node processes do."""

    samples = True

    def __init__(
        self,
        options: RayOptions,
        asked: Sequence[Room],
        key: Mapping[str, str],
        tell: Callable[[str], None],
    ) -> None:
        self._options = options
        self._asked = asked
        self._cluster = RayCluster(options, key=key, tell=tell)
        self._nodes = ClusterEngine(
            self._cluster.make_roster,
            self._cluster,
            join_seconds=options.join_seconds,
            tell=tell,
            meet=self._cluster.meet,
        )

    def machine(self, device: str) -> Machine:
        self._cluster.connect()
        gpus = gpus_of_a_rank(self._options, device, self._asked, self._cluster.resources())
        self._cluster.ask_for(self._asked, gpus)
        return self._nodes.machine("cuda" if gpus else "cpu")

    def environments(self) -> list[dict[str, Any]]:
        return self._nodes.environments()

    def lacks(self, nodes: int) -> str | None:
        return self._nodes.lacks(nodes)

    def load(self, modules: Sequence[str], device_type: str) -> None:
        self._nodes.load(modules, device_type)

    def prepare(self, trial: Trial) -> None:
        self._nodes.prepare(trial)
        self._cluster.heal(trial.nodes)

    def run(
        self,
        directory: Path,
        *,
        trial_seconds: float,
        on_tick: Callable[[], None],
        task: Task = "measure",
    ) -> Ending:
        if task == "judge":
            send_testimony(directory, self._cluster.keep_on_first_node)
        return self._nodes.run(directory, trial_seconds=trial_seconds, on_tick=on_tick, task=task)

    def close(self) -> None:
        try:
            self._nodes.close()
        finally:
            self._cluster.close()
