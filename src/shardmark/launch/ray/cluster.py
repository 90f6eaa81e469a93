"""The driver's part in a Ray cluster: connects, reserves, starts a node actor on each node."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardmark.config.engines import RayOptions
from shardmark.core.errors import InputError, ShardmarkError
from shardmark.launch.nodes.roster import Member, Roster
from shardmark.launch.ray.actors import NodeActor, RankNeeds
from shardmark.launch.ray.connection import connected, disconnected, ray_module, reason_of
from shardmark.launch.ray.plan import Room, bundles

POLL_SECONDS = 1.0
END_SECONDS = 15.0
"""For node actors to end, once they have been told to."""
THREADS = 4
"""Of a node actor: one serves the run, the others answer the driver meanwhile."""


class RayCluster:
    """Starts the nodes of a `ClusterEngine` as actors."""

    def __init__(
        self, options: RayOptions, *, key: Mapping[str, str], tell: Callable[[str], None]
    ) -> None:
        self._options = options
        self._key = dict(key)
        self._tell = tell
        self._ray: Any = None
        self._own_connection = False
        self._rooms: Sequence[Room] = ()
        self._gpus = 0
        self._group: Any = None
        self._actors: list[Any] = []
        self._served: list[Any] = []

    def connect(self) -> None:
        """Raises `InputError` where Ray or the cluster is missing."""
        if self._ray is None:
            ray = ray_module()
            self._own_connection = not ray.is_initialized()
            if self._own_connection:
                connected(ray, self._options)
            self._ray = ray

    def resources(self) -> list[dict[str, float]]:
        """Of each node that is alive, all of them."""
        return [dict(node["Resources"]) for node in self._ray.nodes() if node["Alive"]]

    def ask_for(self, rooms: Sequence[Room], gpus: int) -> None:
        """What `start` is to reserve."""
        self._rooms, self._gpus = rooms, gpus

    def make_roster(self) -> Roster:
        address = str(self._ray.util.get_node_ip_address())
        try:
            return Roster(
                (address, 0),
                wanted=len(self._rooms),
                key=self._key,
                patience=self._options.node_seconds,
            )
        except OSError as error:
            raise InputError(
                "engine.address",
                f"this machine is {address} for Ray and cannot listen there: {error.strerror}",
                "run the command on a machine of the cluster",
            ) from None

    def start(self, roster: Roster) -> None:
        self._group = self._reserved()
        address, port = roster.place.rsplit(":", 1)
        needs = RankNeeds(
            cpus=self._options.cpus_per_rank, gpus=self._gpus, resources=self._options.resources
        )
        for number, room in enumerate(self._rooms):
            actor = (
                self._ray.remote(NodeActor)
                .options(
                    num_cpus=0,
                    max_concurrency=THREADS,
                    scheduling_strategy=self._in_bundle(number),
                )
                .remote(
                    number=number,
                    room=room,
                    needs=needs,
                    group=self._group,
                    folder=None if "working_dir" in self._options.runtime_env else str(Path.cwd()),
                    python_path=os.environ.get("PYTHONPATH", ""),
                )
            )
            self._actors.append(actor)
            self._served.append(
                actor.serve.remote(
                    address=(address, int(port)),
                    key=self._key,
                    interface=self._options.interface,
                    join_seconds=self._options.join_seconds,
                )
            )

    def check(self) -> None:
        """Raise `ShardmarkError` if a node actor has ended."""
        for number, served in enumerate(self._served):
            ended, _ = self._ray.wait([served], timeout=0)
            if ended:
                raise ShardmarkError(f"node {number} of the Ray cluster: {self._reason(served)}")

    def meet(self, members: Sequence[Member]) -> tuple[str, int]:
        """An address of node 0 that others reach, and a port that is free there."""
        address = members[0].address
        return address, int(self._of_first_node("free_port", address))

    def heal(self, nodes: int) -> None:
        """See to it that all ranks of the first nodes have their actors; nothing of a lost node."""
        asked = [actor.heal.remote() for actor in self._actors[:nodes]]
        for number, answer in enumerate(asked):
            problem: str | None = None
            with suppress(self._ray.exceptions.RayActorError):  # the roster tells
                try:
                    problem = self._ray.get(answer, timeout=self._options.join_seconds)
                except self._ray.exceptions.GetTimeoutError:
                    waited = f"{self._options.join_seconds:g} s"
                    problem = f"a dead actor of a rank was not replaced within {waited}"
            if problem is not None:
                raise ShardmarkError(f"node {number} of the Ray cluster: {problem}")

    def keep_on_first_node(self, message: dict[str, object], piece: bytes) -> None:
        """Raises `ShardmarkError` if node 0 is gone."""
        self._of_first_node("keep", message, piece)

    def close(self) -> None:
        """End the actors, give back what was reserved, and leave the cluster."""
        if self._ray is None:
            return
        ray, self._ray = self._ray, None
        with suppress(ray.exceptions.RayError, ConnectionError):
            if self._served:
                ray.wait(self._served, num_returns=len(self._served), timeout=END_SECONDS)
            for actor in self._actors:
                ray.kill(actor)
            if self._group is not None:
                ray.util.remove_placement_group(self._group)
        self._actors, self._served, self._group = [], [], None
        if self._own_connection:
            disconnected(ray)

    def _of_first_node(self, method: str, *given: Any) -> Any:
        """What its actor answers."""
        try:
            return self._ray.get(getattr(self._actors[0], method).remote(*given))
        except self._ray.exceptions.RayError as error:
            raise ShardmarkError(f"node 0 of the Ray cluster: {reason_of(error)}") from None

    def _reserved(self) -> Any:
        """The placement group, once the cluster has room for it."""
        asked = bundles(self._options, self._rooms, self._gpus)
        group = self._ray.util.placement_group(asked, strategy="STRICT_SPREAD", name="shardmark")
        deadline = time.monotonic() + self._options.join_seconds
        told = False
        while not group.wait(POLL_SECONDS):
            if not told:
                self._tell(f"waiting for room in the Ray cluster: {self._asked()}")
                told = True
            if time.monotonic() > deadline:
                self._ray.util.remove_placement_group(group)
                raise ShardmarkError(
                    f"Ray had no room within {self._options.join_seconds:g} s for {self._asked()}; "
                    f"{self._there()}; free the resources, add nodes, or set "
                    "engine.cpus_per_rank, engine.gpus_per_rank"
                )
        return group

    def _asked(self) -> str:
        asked = bundles(self._options, self._rooms, self._gpus)
        shown = " and ".join(_shown(bundle) for bundle in asked)
        return f"{shown}, each on a node of its own" if len(asked) > 1 else shown

    def _there(self) -> str:
        nodes = [
            f"{node['NodeManagerHostname']} {_shown(node['Resources'])}"
            for node in self._ray.nodes()
            if node["Alive"]
        ]
        free = _shown(self._ray.available_resources())
        count = f"{len(nodes)} node{'' if len(nodes) == 1 else 's'}"
        return f"the cluster has {count} ({'; '.join(nodes)}), free of it is {free}"

    def _in_bundle(self, number: int) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return PlacementGroupSchedulingStrategy(self._group, number)

    def _reason(self, served: Any) -> str:
        try:
            return str(self._ray.get(served) or "its actor has ended")
        except self._ray.exceptions.RayError as error:
            return reason_of(error)


def _shown(resources: Mapping[str, float]) -> str:
    """Without Ray's own entries, such as a node's address."""
    own = ("node:", "memory", "object_store_memory", "accelerator_type:", "bundle_group")
    told = {name: amount for name, amount in resources.items() if not name.startswith(own)}
    told = {name: amount for name, amount in told.items() if "_group_" not in name}
    return ", ".join(f"{name} {amount:g}" for name, amount in sorted(told.items())) or "nothing"
