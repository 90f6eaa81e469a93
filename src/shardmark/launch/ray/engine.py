"""The engine `ray`: an actor for each node, in one placement group for the run.

The actor holds what Ray gives all ranks of its node, and is a node like any other: it forks them
as everywhere.  Ray starts the nodes and sees no trial.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from shardmark.config.engines import RayOptions
from shardmark.core.errors import InputError, ShardmarkError
from shardmark.core.extras import require
from shardmark.launch.engine import EngineRequest
from shardmark.launch.nodes.engine import NodesEngine, NodeStarter
from shardmark.launch.nodes.node import join
from shardmark.launch.nodes.protocol import Invitation
from shardmark.launch.nodes.registry import NodeRegistry
from shardmark.launch.nodes.secret import fresh_secret
from shardmark.trials.trial import Trial

REACH_SECONDS = 5.0
POLL_SECONDS = 1.0
END_SECONDS = 15.0
"""For node actors to end, once they have been told to."""
REMEDY = "start one by `ray start --head`, or set engine.address to HOST:PORT of its head"


class NodeNeeds(NamedTuple):
    """What the trials take of one node at most."""

    ranks: int
    devices: int
    """Ranks that use a CUDA device where there are any; a parameter server may do without."""


def needs_by_node(trials: Iterable[Trial]) -> tuple[NodeNeeds, ...]:
    """A rank of several devices counts as so many."""
    needs: dict[int, NodeNeeds] = {}
    for trial in trials:
        at_least = trial.world_size // trial.nodes
        for node, ranks in enumerate(trial.layout.ranks_by_node):
            devices = sum(not trial.layout.ranks[rank].on_cpu for rank in ranks)
            before = needs.get(node, NodeNeeds(0, 0))
            needs[node] = NodeNeeds(
                max(before.ranks, len(ranks), at_least), max(before.devices, devices, at_least)
            )
    return tuple(needs[node] for node in sorted(needs))


def bundles(
    options: RayOptions, needs: Iterable[NodeNeeds], gpus_per_rank: int
) -> list[dict[str, float]]:
    """What the placement group reserves: for each node, all that its ranks need there."""
    reserved = []
    for node in needs:
        bundle = {
            "CPU": options.cpus_per_rank * node.ranks,
            "GPU": float(gpus_per_rank * node.devices),
            **{name: amount * node.ranks for name, amount in options.resources.items()},
        }
        reserved.append({name: amount for name, amount in bundle.items() if amount})
    return reserved


def gpus_per_rank(
    options: RayOptions,
    device: str,
    needs: Sequence[NodeNeeds],
    cluster: Iterable[Mapping[str, float]],
) -> int:
    """0 or 1, with the resources of the cluster's nodes; `InputError` for a contradiction."""
    if device == "cuda" and options.gpus_per_rank == 0:
        raise InputError("engine.gpus_per_rank", "0, and device is cuda", "set 1, or device: cpu")
    if device == "cpu" or options.gpus_per_rank == 0:
        return 0
    there = sorted((resources.get("GPU", 0.0) for resources in cluster), reverse=True)
    wanted = sorted((node.devices for node in needs), reverse=True)
    enough = len(there) >= len(wanted) and all(
        has >= needed for has, needed in zip(there, wanted, strict=False)
    )
    return int(enough or device == "cuda" or options.gpus_per_rank == 1)


class NodeActor:
    """One node of a run.  Its processes end with it, however that happens."""

    def __init__(self, folder: str | None, python_path: str) -> None:
        """Works where the driver does, where there is such a folder, with its modules at hand."""
        if folder is not None and Path(folder).is_dir():
            os.chdir(folder)
        paths = [path for path in python_path.split(os.pathsep) if path]
        known = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*paths, *known]))
        sys.path += [path for path in paths if path not in sys.path]

    def serve(self, invitation: Invitation, secret: str) -> str | None:
        """Until the run is over: None, or why it could not begin or go on."""
        import ray

        gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        try:
            return join(invitation, secret).serve()
        except ShardmarkError as error:
            return str(error)


class NodeActors(NodeStarter):
    """Connects to the cluster, reserves what the run needs, and starts an actor on each node."""

    def __init__(self, options: RayOptions, request: EngineRequest) -> None:
        self._options = options
        self._request = request
        self.secret = fresh_secret()
        self._needs = needs_by_node(request.trials)
        self._ray: Any = None
        self._own_connection = False
        self._group: Any = None
        self._actors: list[Any] = []
        self._served: list[Any] = []

    def address(self, nodes: int) -> tuple[str, int]:  # noqa: ARG002  # as every starter's
        """Where Ray knows this machine.  Raises `InputError` without Ray or a cluster."""
        if self._ray is None:
            require("ray", needed_for="engine ray")
            ray = importlib.import_module("ray")
            self._own_connection = not ray.is_initialized()
            if self._own_connection:
                connect(ray, self._options)
            self._ray = ray
        return str(self._ray.util.get_node_ip_address()), 0

    def start(self, registry: NodeRegistry, title: str) -> None:  # noqa: ARG002  # as every starter's
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundled = self._reserve()
        host, port = self.address(registry.wanted)[0], registry.port
        folder = None if "working_dir" in self._options.runtime_env else str(Path.cwd())
        for number, bundle in enumerate(bundled):
            actor = (
                self._ray.remote(NodeActor)
                .options(
                    num_cpus=bundle.pop("CPU"),
                    num_gpus=bundle.pop("GPU", 0),
                    resources=bundle,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, number),
                )
                .remote(folder, os.environ.get("PYTHONPATH", ""))
            )
            invitation = Invitation.to(host, port, self._options, self._request.key, number=number)
            self._actors.append(actor)
            self._served.append(actor.serve.remote(invitation, self.secret))

    def check(self) -> None:
        for number, served in enumerate(self._served):
            ended, _ = self._ray.wait([served], timeout=0)
            if ended:
                try:
                    reason = str(self._ray.get(served) or "its actor has ended")
                except self._ray.exceptions.RayError as error:
                    reason = _first_line(getattr(error, "cause", None) or error)
                raise ShardmarkError(f"node {number} of the Ray cluster: {reason}")

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
            ray.shutdown()
            _print_messages(ray, wanted=True)

    def _reserve(self) -> list[dict[str, float]]:
        """The bundles of the placement group, once the cluster has room for it."""
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        gpus = gpus_per_rank(self._options, self._request.device, self._needs, nodes)
        bundled = bundles(self._options, self._needs, gpus)
        asked = " and ".join(_shown(bundle) for bundle in bundled)
        group = self._ray.util.placement_group(bundled, strategy="STRICT_SPREAD")
        seconds = self._options.join_seconds
        deadline = time.monotonic() + seconds
        if not group.wait(POLL_SECONDS):
            self._request.tell(f"waiting for room in the Ray cluster: {asked}")
        while not group.wait(POLL_SECONDS):  # not for longer: Ctrl-C waits for its end
            if time.monotonic() > deadline:
                self._ray.util.remove_placement_group(group)
                raise ShardmarkError(
                    f"Ray had no room within {seconds:g} s for {asked}, each on a node of its own; "
                    f"the cluster has {'; '.join(map(_shown, nodes))}, free of it is "
                    f"{_shown(self._ray.available_resources())}; free the resources, add nodes, or "
                    "set engine.cpus_per_rank, engine.gpus_per_rank"
                )
        self._group = group
        return bundled


def connect(ray: Any, options: RayOptions) -> None:
    """Connect as a driver.  `InputError` where no cluster answers, or another version does."""
    address = options.address if options.address != "auto" else os.environ.get("RAY_ADDRESS", "")
    if address.startswith("ray://"):
        raise InputError(
            "RAY_ADDRESS", f"found {address}, Ray Client", "give engine.address as HOST:PORT"
        )
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        try:  # Ray itself would try for a minute
            socket.create_connection((host.strip("[]"), int(port)), REACH_SECONDS).close()
        except OSError as error:
            silent = f"nobody answers at {address}: {error.strerror or error}"
            raise InputError("engine.address", silent, REMEDY) from None
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # As newer versions of Ray have it anyway; older ones warn of it.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    in_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(
            address=options.address,
            namespace=options.namespace,
            runtime_env=options.runtime_env or None,
            log_to_driver=False,
            logging_level=logging.CRITICAL,
        )
    except ConnectionError as error:
        none = f"no Ray cluster: {_first_line(error)}"
        raise InputError("engine.address", none, REMEDY) from None
    except (RuntimeError, ValueError, TypeError, ray.exceptions.RayError) as error:
        remedy = "the same versions of Ray and Python on all machines; see the guide"
        raise InputError("engine", f"Ray refuses: {_first_line(error)}", remedy) from None
    finally:
        if in_main:  # Ray exits at SIGTERM, where the command stores the trial under way first
            signal.signal(signal.SIGTERM, before)
    _print_messages(ray, wanted=False)


def _print_messages(ray: Any, *, wanted: bool) -> None:
    """Whether Ray prints the cluster's errors, from a thread of its own and whatever it logs.

    What they are about is told in our own way.  Ray has no public switch for them; its debugger
    uses this one.
    """
    worker: Any = getattr(getattr(ray, "_private", None), "worker", None)
    if hasattr(worker, "_worker_logs_enabled"):
        worker._worker_logs_enabled = wanted


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _shown(resources: Mapping[str, float]) -> str:
    """Without Ray's own entries, such as a node's address."""
    own = ("node:", "memory", "object_store_memory", "accelerator_type:", "bundle_group")
    told = {name: amount for name, amount in resources.items() if not name.startswith(own)}
    told = {name: amount for name, amount in told.items() if "_group_" not in name}
    return ", ".join(f"{name} {amount:g}" for name, amount in sorted(told.items())) or "nothing"


def build(options: RayOptions, request: EngineRequest) -> NodesEngine:
    """The driver's side; no connection is made yet."""
    return NodesEngine(options, NodeActors(options, request), request)


def submission(options: RayOptions, request: EngineRequest, command: Sequence[str]) -> list[str]:  # noqa: ARG001  # as every engine's
    """What would be asked of the cluster."""
    needs = needs_by_node(request.trials)
    reserved = bundles(options, needs, options.gpus_per_rank or 0)
    lines = [f"in the cluster at {options.address}: one placement group, STRICT_SPREAD"]
    for number, (node, bundle) in enumerate(zip(needs, reserved, strict=True)):
        unsaid = options.gpus_per_rank is None
        gpus = f", and {node.devices} GPUs where the device is cuda" if unsaid else ""
        lines.append(f"node {number}: {_shown(bundle)}{gpus}, for {node.ranks} ranks")
    return [*lines, *([f"runtime_env: {options.runtime_env}"] if options.runtime_env else [])]
