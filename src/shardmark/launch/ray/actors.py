"""What Ray runs on the nodes: an actor for each node, and one for each rank that it starts."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shardmark.core.errors import ShardmarkError
from shardmark.launch.engine import Task
from shardmark.launch.local.fork_server import ForkServer
from shardmark.launch.nodes.cluster import free_port
from shardmark.launch.nodes.joining import join, own_versions
from shardmark.launch.ray.judging import Testimony
from shardmark.launch.ray.nursery import RayNursery
from shardmark.launch.ray.plan import Room

AGENT = "shardmark.launch.ray.agent"
POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class RankNeeds:
    """What Ray is to give each rank's actor."""

    cpus: float
    gpus: int
    resources: Mapping[str, float] = field(default_factory=dict)


class NodeActor:
    """Stands for one node, as the process of `launch.node` does elsewhere.

    It is the owner of the actors of its ranks: when it ends, however that happens, Ray ends them.
    """

    def __init__(
        self,
        *,
        number: int,
        room: Room,
        needs: RankNeeds,
        group: Any,
        folder: str | None,
        python_path: str,
    ) -> None:
        self._surroundings = (folder, python_path)
        _settle(*self._surroundings)
        self._number = number
        self._needs = needs
        self._group = group
        self._kept = Path(tempfile.mkdtemp(prefix="shardmark-judge-"))
        self._ranks = RayNursery(self._rank_actor, room, Testimony(self._kept))

    def serve(
        self,
        *,
        address: tuple[str, int],
        key: Mapping[str, str],
        interface: str | None,
        join_seconds: float,
    ) -> str | None:
        """Until the run is over: None, or why it could not begin or go on."""
        try:
            node = join(
                address,
                number=self._number,
                here=False,
                interface=interface,
                key={**key, **own_versions()},
                join_seconds=join_seconds,
                nursery=self._ranks,
            )
            return node.serve()
        except ShardmarkError as error:
            return str(error)
        finally:
            shutil.rmtree(self._kept, ignore_errors=True)

    def free_port(self, address: str) -> int:
        """A port of this node that nobody listens on."""
        return free_port(address)

    def keep(self, message: dict[str, object], piece: bytes) -> None:
        """Hold a piece of a file for the judge."""
        Testimony(self._kept).keep(message, piece)

    def heal(self) -> str | None:
        """Replace the actors that have died since the last trial; or why that cannot be."""
        try:
            self._ranks.heal()
        except ShardmarkError as error:
            return str(error)
        return None

    def _rank_actor(self, *, with_device: bool) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        options = ray.remote(RankActor).options(
            num_cpus=self._needs.cpus,
            num_gpus=self._needs.gpus if with_device else 0,
            resources=dict(self._needs.resources),
            max_concurrency=2,  # one runs a trial, the other is told to end it
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, self._number),
        )
        return options.remote(*self._surroundings)


class RankActor:
    """Holds what one rank is given, and has a fresh process forked for it in each trial.

    Ray's own process has many threads and cannot be forked: the nursery is a child of it, which
    has imported the libraries, as everywhere.
    """

    def __init__(self, folder: str | None, python_path: str) -> None:
        _settle(folder, python_path)
        self._nursery = ForkServer()
        self._ending: set[str] = set()

    def devices(self) -> str:
        """The GPUs that Ray has given the actor, as CUDA_VISIBLE_DEVICES names them."""
        import ray

        return ",".join(ray.get_runtime_context().get_accelerator_ids().get("GPU", []))

    def machine(self, device: str) -> dict[str, Any]:
        """What `device` means for this rank.  `InputError` if it cannot be had."""
        return asdict(self._nursery.machine(device))

    def load(self, modules: Sequence[str], device_type: str) -> None:
        """Have the libraries imported.  `ShardmarkError` where there is no torch."""
        self._nursery.load([*modules, AGENT], device_type)

    def run(self, directory: str, task: Task, variables: Mapping[str, str]) -> int:
        """Be the rank that the variables tell; the exit code of its guardian."""
        self._nursery.begin(Path(directory), task, variables, agent=AGENT)
        while (exit_code := self._nursery.ended(POLL_SECONDS)) is None:
            if directory in self._ending:
                return self._nursery.reap()
        return exit_code

    def end(self, directory: str) -> None:
        """Kill the rank of the trial in that folder, now or as soon as it has begun."""
        self._ending.add(directory)

    def close(self) -> None:
        self._nursery.close()


def _settle(folder: str | None, python_path: str) -> None:
    """Work where the driver does, where there is such a folder, with its modules at hand."""
    if folder is not None and Path(folder).is_dir():
        os.chdir(folder)
    paths = [path for path in python_path.split(os.pathsep) if path]
    known = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*paths, *known]))
    sys.path += [path for path in paths if path not in sys.path]
