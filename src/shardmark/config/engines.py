"""Options of the engines that start ranks.  Imports no torch."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from shardmark.core.recipe import Model


class LocalOptions(Model):
    """Ranks are processes on this machine.  The engine has no options."""

    name: Literal["local"] = "local"


class NodeOptions(Model):
    """Options of every engine that runs on several nodes."""

    interface: str | None = None
    """Network interface for gloo and NCCL; null: the interface that reaches the controller."""
    join_seconds: PositiveFloat = 300.0
    """Time limit for all nodes to join, and for a run to get resources of the cluster."""
    node_seconds: Annotated[float, Field(ge=2, le=3600)] = 20.0
    """A node that sends no message for this time is lost, and its trial ends."""


LOOPBACK = "127.0.0.1"
SSH = "ssh -o BatchMode=yes -o ServerAliveInterval=5 {host} {quoted}"


class TorchrunOptions(NodeOptions):
    """Nodes that run the same command, or that one command starts on `hosts`."""

    name: Literal["torchrun"] = "torchrun"
    rendezvous: str | None = None
    """HOST:PORT of node 0, to which the other nodes connect; with `hosts`, port 0 selects a free
    port."""
    node_rank: Annotated[int, Field(ge=0)] | None = None
    """Number of this node, also read from SHARDMARK_NODE_RANK.  Otherwise the node with the address
    HOST is node 0, and the others are numbered in the order in which they connect."""
    hosts: tuple[str, ...] = ()
    """Host names of all nodes, beginning with this one, which starts processes on the others."""
    remote: str = SSH
    """Command that runs a program on `{host}`: `{quoted}` is the program with its arguments as one
    word for a remote shell, `{command}` the separate words."""
    python: str | None = None
    """Python interpreter on the other hosts; null: the path of this interpreter."""

    @field_validator("rendezvous")
    @classmethod
    def _host_and_port(cls, rendezvous: str | None) -> str | None:
        host, _, port = (rendezvous or "node:1").rpartition(":")
        if not host or not port.isdecimal() or int(port) > 65535:
            raise ValueError(f"found {rendezvous!r}; allowed is HOST:PORT, e.g. 10.0.0.1:29400")
        return rendezvous

    @model_validator(mode="after")
    def _reaches_hosts(self) -> TorchrunOptions:
        if self.hosts and not any(part in self.remote for part in ("{quoted}", "{command}")):
            raise ValueError(
                f"remote is {self.remote!r}; it needs {{quoted}} or {{command}}, and {{host}}"
            )
        for host in self.hosts:
            if host.startswith("-"):
                raise ValueError(f"hosts has {host!r}; what begins with - is an option of ssh")
        if self.hosts and self.node_rank is not None:
            raise ValueError(
                "hosts and node_rank are given; give hosts in one command on the first of them, or "
                "node_rank in a command on every node"
            )
        return self

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of node 0, without a name lookup."""
        if self.rendezvous is None:
            return (self.hosts[0] if self.hosts else LOOPBACK), 0
        host, _, port = self.rendezvous.rpartition(":")
        return host.strip("[]"), int(port)


_CLOCK = re.compile(r"(?:\d+-)?\d{1,3}:[0-5]\d:[0-5]\d")

_OPTION = re.compile(r"[a-z][a-z-]*")

_RESERVED = ("nodes", "ntasks", "ntasks-per-node", "array", "output", "error", "wrap", "parsable")
"""Options of `sbatch` that the engine sets."""


class SlurmOptions(NodeOptions):
    """One job for a run, with all its trials, each a step of it."""

    name: Literal["slurm"] = "slurm"
    partition: str | None = None
    """Partition (queue) of the job; null: the cluster's default."""
    account: str | None = None
    """Whom the job is charged to."""
    qos: str | None = None
    """Quality of service."""
    time: PositiveInt | str | None = None
    """Time limit of the whole job: minutes, HH:MM:SS or D-HH:MM:SS; null: the partition's."""
    constraint: str | None = None
    """Features that the nodes must have, such as `a100`."""
    gpus_per_node: PositiveInt | None = None
    """GPUs of each node; null asks for none by number."""
    cpus_per_task: PositiveInt | None = None
    """Cores of each node (one task is started on each); null: with `exclusive`, all."""
    mem: str | NonNegativeInt | None = None
    """Memory of each node, such as `64G`; `0` is all of it, null the cluster's default."""
    exclusive: bool = True
    """Whole nodes: others' work beside it would be measured, too."""
    sbatch: dict[str, str | int | bool] = Field(default_factory=dict)
    """More options of `sbatch` by their long names: `{reservation: friday, no-kill: true}`."""
    srun: tuple[str, ...] = ()
    """More arguments of each `srun`."""
    setup: tuple[str, ...] = ()
    """Lines of shell for the job before anything else, such as `module load cuda`."""
    container: str | None = None
    """Image in which the ranks run: `srun --container-image`, which is pyxis's."""
    container_mounts: tuple[str, ...] = ()
    """HOST:CONTAINER folders of it, beside the current folder, which is there at the same path."""
    python: str | None = None
    """Command of the interpreter on the nodes; null: this one's path, in a container `python3`."""
    step: Literal["trial", "run"] = "trial"
    """`trial`: each trial is a step of its own, with its own accounting and control group; `run`:
    one step has all, which saves the loading of libraries before each trial."""
    host: str | None = None
    """Name or address of the first node by which the others reach it; null: what SLURM calls it."""

    @field_validator("time")
    @classmethod
    def _clock(cls, time: int | str | None) -> int | str | None:
        if isinstance(time, str) and time.isdecimal() and int(time) > 0:
            return int(time)
        if isinstance(time, str) and not _CLOCK.fullmatch(time):
            raise ValueError(f"found {time!r}; allowed are minutes, HH:MM:SS and D-HH:MM:SS")
        return time

    @field_validator("sbatch")
    @classmethod
    def _long_names(cls, sbatch: dict[str, str | int | bool]) -> dict[str, str | int | bool]:
        for name in sbatch:
            if not _OPTION.fullmatch(name):
                raise ValueError(f"found {name!r}; allowed are long options without their dashes")
            if name in _RESERVED:
                raise ValueError(f"found {name!r}, which the engine says itself")
        return sbatch


AUTO = "auto"


class RayOptions(NodeOptions):
    """Address of a Ray cluster, and the resources of each rank."""

    name: Literal["ray"] = "ray"
    address: str = AUTO
    """HOST:PORT of the cluster's head; `auto`: RAY_ADDRESS if it is set, otherwise the cluster of
    this machine."""
    cpus_per_rank: PositiveFloat = 1.0
    """Cores that Ray reserves for a rank; the rank can still use more."""
    gpus_per_rank: Annotated[int, Field(ge=0, le=1)] | None = None
    """GPUs of each rank; null: 1 with device cuda, and with device auto if the cluster has GPUs."""
    resources: dict[str, PositiveFloat] = Field(default_factory=dict)
    """Custom Ray resources of each rank, by name."""
    runtime_env: dict[str, Any] = Field(default_factory=dict)
    """Ray's runtime environment of the actors."""
    namespace: str | None = None
    """Ray's namespace of the actors; null: a new one for each run."""

    @field_validator("address")
    @classmethod
    def _of_a_head(cls, address: str) -> str:
        host, _, port = address.rpartition(":")
        is_complete = host and "/" not in host and port.isdecimal() and 0 < int(port) < 65536
        if address != AUTO and not is_complete:
            raise ValueError(
                f"found {address!r}; allowed are {AUTO} and HOST:PORT of the head, e.g. "
                "10.0.0.1:6379.  Ray Client (ray://) cannot be used: run the command on a machine "
                "of the cluster, or submit it by `ray job submit`"
            )
        return address


EngineOptions = Annotated[
    LocalOptions | TorchrunOptions | RayOptions | SlurmOptions, Field(discriminator="name")
]
"""Options of an engine; `launch.engines` builds the engine."""
