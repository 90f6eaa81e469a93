"""The engine `ray`: starts an actor for each node, in one placement group for the run.

The actor has the resources of all ranks of its node, and runs the same node process as other
engines, which forks the ranks.
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

from shardmark.base.errors import InputError, ShardmarkError
from shardmark.base.system.extras import require
from shardmark.bench.launch.engine import EngineRequest
from shardmark.experiment.engines import RayOptions
from shardmark.extras.engines.nodes.engine import NodesEngine, NodeStarter
from shardmark.extras.engines.nodes.node import join
from shardmark.extras.engines.nodes.protocol import JoinOptions, new_secret
from shardmark.extras.engines.nodes.registry import NodeRegistry
from shardmark.ranks.trial import Trial

REACH_SECONDS = 5.0
POLL_SECONDS = 1.0
END_SECONDS = 15.0
"""Time limit for node actors to end after they were told to."""
REMEDY = "start one by `ray start --head`, or set engine.address to HOST:PORT of its head"


class NodeNeeds(NamedTuple):
    """Most resources that any trial takes of one node."""

    ranks: int
    devices: int
    """Ranks that use a CUDA device; a parameter server may use none."""


def needs_by_node(trials: Iterable[Trial]) -> tuple[NodeNeeds, ...]:
    """Return the needs of each node; a rank with several devices counts as several ranks."""
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
    """Return the resources that the placement group reserves for each node."""
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
    """Return 0 or 1 GPUs for each rank; raise `InputError` for contradictory options.

    `cluster` has the resources of each of the cluster's nodes.
    """
    if device == "cuda" and options.gpus_per_rank == 0:
        raise InputError("engine.gpus_per_rank", "0, and device is cuda", "set 1, or device: cpu")
    if device == "cpu" or options.gpus_per_rank == 0:
        return 0
    available = sorted((resources.get("GPU", 0.0) for resources in cluster), reverse=True)
    required = sorted((node.devices for node in needs), reverse=True)
    enough = len(available) >= len(required) and all(
        gpus >= devices for gpus, devices in zip(available, required, strict=False)
    )
    return int(enough or device == "cuda" or options.gpus_per_rank == 1)


class NodeActor:
    """A node of a run.  Its processes end with the actor."""

    def __init__(self, folder: str | None, python_path: str) -> None:
        """Change to the driver's folder if it exists, and add its module paths."""
        if folder is not None and Path(folder).is_dir():
            os.chdir(folder)
        paths = [path for path in python_path.split(os.pathsep) if path]
        previous = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*paths, *previous]))
        sys.path += [path for path in paths if path not in sys.path]

    def serve(self, join_options: JoinOptions, secret: str) -> str | None:
        """Serve until the run is over; return None, or why the node failed."""
        import ray

        gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        try:
            return join(join_options, secret).serve()
        except ShardmarkError as error:
            return str(error)


class NodeActors(NodeStarter):
    """Connects to the cluster, reserves resources, and starts an actor on each node."""

    def __init__(self, options: RayOptions, request: EngineRequest) -> None:
        self._options = options
        self._request = request
        self.secret = new_secret()
        self._needs = needs_by_node(request.trials)
        self._ray: Any = None
        self._connected = False
        """True if this object connected to Ray, and has to disconnect from it."""
        self._group: Any = None
        self._actors: list[Any] = []
        self._served: list[Any] = []

    def address(self, nodes: int) -> tuple[str, int]:  # noqa: ARG002  # the protocol's signature
        """Return Ray's address of this machine.  Raises `InputError` without Ray or a cluster."""
        if self._ray is None:
            require("ray", needed_for="engine ray")
            ray = importlib.import_module("ray")
            self._connected = not ray.is_initialized()
            if self._connected:
                connect(ray, self._options)
            self._ray = ray
        return str(self._ray.util.get_node_ip_address()), 0

    def start(self, registry: NodeRegistry, title: str) -> None:  # noqa: ARG002  # the protocol's signature
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundled = self._reserve()
        host, port = self.address(registry.num_nodes)[0], registry.port
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
            join_options = JoinOptions.to(
                host, port, self._options, self._request.key, number=number
            )
            self._actors.append(actor)
            self._served.append(actor.serve.remote(join_options, self.secret))

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
        """End the actors, release the resources, and disconnect from the cluster."""
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
        if self._connected:
            ray.shutdown()
            _print_messages(ray, enabled=True)

    def _reserve(self) -> list[dict[str, float]]:
        """Create the placement group when the cluster has room for it, and return its bundles."""
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        gpus = gpus_per_rank(self._options, self._request.device, self._needs, nodes)
        bundled = bundles(self._options, self._needs, gpus)
        requested = " and ".join(_shown(bundle) for bundle in bundled)
        group = self._ray.util.placement_group(bundled, strategy="STRICT_SPREAD")
        seconds = self._options.join_seconds
        deadline = time.monotonic() + seconds
        if not group.wait(POLL_SECONDS):
            self._request.notify(f"waiting for room in the Ray cluster: {requested}")
        while not group.wait(POLL_SECONDS):  # short waits, since Ctrl-C takes effect between them
            if time.monotonic() > deadline:
                self._ray.util.remove_placement_group(group)
                raise ShardmarkError(
                    f"Ray had no room within {seconds:g} s for {requested}, each on its own node; "
                    f"the cluster has {'; '.join(map(_shown, nodes))}, free of it is "
                    f"{_shown(self._ray.available_resources())}; free the resources, add nodes, or "
                    "set engine.cpus_per_rank, engine.gpus_per_rank"
                )
        self._group = group
        return bundled


def connect(ray: Any, options: RayOptions) -> None:
    """Connect as a driver.  Raises `InputError` without a cluster of the same version."""
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
            problem = f"nobody answers at {address}: {error.strerror or error}"
            raise InputError("engine.address", problem, REMEDY) from None
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # The default of newer versions of Ray; older ones print a warning.
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
        problem = f"no Ray cluster: {_first_line(error)}"
        raise InputError("engine.address", problem, REMEDY) from None
    except (RuntimeError, ValueError, TypeError, ray.exceptions.RayError) as error:
        remedy = "the same versions of Ray and Python on all machines; see the guide"
        raise InputError("engine", f"Ray refuses: {_first_line(error)}", remedy) from None
    finally:
        if in_main:  # Ray's handler would exit before the command stores the current trial
            signal.signal(signal.SIGTERM, before)
    _print_messages(ray, enabled=False)


def _print_messages(ray: Any, *, enabled: bool) -> None:
    """Set whether Ray prints errors of the cluster, which the engine reports itself.

    Ray has no public switch for them; its debugger uses this one.
    """
    worker: Any = getattr(getattr(ray, "_private", None), "worker", None)
    if hasattr(worker, "_worker_logs_enabled"):
        worker._worker_logs_enabled = enabled


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _shown(resources: Mapping[str, float]) -> str:
    """Format resources, without internal entries of Ray such as a node's address."""
    internal = ("node:", "memory", "object_store_memory", "accelerator_type:", "bundle_group")
    amounts = {
        name: amount
        for name, amount in resources.items()
        if not name.startswith(internal) and "_group_" not in name
    }
    return ", ".join(f"{name} {amount:g}" for name, amount in sorted(amounts.items())) or "nothing"


def build(options: RayOptions, request: EngineRequest) -> NodesEngine:
    """Build the driver's side; make no connection yet."""
    return NodesEngine(options, NodeActors(options, request), request)


def submission(options: RayOptions, request: EngineRequest, command: Sequence[str]) -> list[str]:  # noqa: ARG001  # the table's signature
    """Return the resources that the engine would request, one node a line."""
    needs = needs_by_node(request.trials)
    reserved = bundles(options, needs, options.gpus_per_rank or 0)
    lines = [f"in the cluster at {options.address}: one placement group, STRICT_SPREAD"]
    for number, (node, bundle) in enumerate(zip(needs, reserved, strict=True)):
        automatic = options.gpus_per_rank is None
        gpus = f", and {node.devices} GPUs where the device is cuda" if automatic else ""
        lines.append(f"node {number}: {_shown(bundle)}{gpus}, for {node.ranks} ranks")
    return [*lines, *([f"runtime_env: {options.runtime_env}"] if options.runtime_env else [])]
