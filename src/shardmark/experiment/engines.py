"""Options of the engines that start ranks.  Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from shardmark.base.recipe import Model


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


JOB_OPTIONS = frozenset(
    {"partition", "account", "qos", "time", "constraint", "cpus_per_task", "mem", "exclusive"}
    | {"sbatch", "setup"}
)
"""Keys of earlier versions, which submitted the job themselves."""


class SlurmOptions(NodeOptions):
    """A run inside an allocation of SLURM, in which each trial is a step."""

    name: Literal["slurm"] = "slurm"
    gpus_per_node: PositiveInt | None = None
    """GPUs of each node that a step requests; null requests none by number."""
    srun: tuple[str, ...] = ()
    """More arguments of each `srun`."""
    container: str | None = None
    """Image in which the ranks run: `srun --container-image`, an option of pyxis."""
    container_mounts: tuple[str, ...] = ()
    """HOST:CONTAINER folders of the container, beside the current folder, which is mounted at the
    same path."""
    python: str | None = None
    """Command of the interpreter on the nodes; null: this interpreter's path, `python3` in a
    container."""
    step: Literal["trial", "run"] = "trial"
    """`trial`: each trial is a step with its own accounting and control group; `run`: one step runs
    all trials, so that the libraries load once."""
    host: str | None = None
    """Name or address of the first node for the other nodes; null: the name that SLURM gives it."""

    @model_validator(mode="before")
    @classmethod
    def _no_job_options(cls, options: Any) -> Any:
        if isinstance(options, Mapping) and (job_options := sorted(JOB_OPTIONS & options.keys())):
            raise ValueError(
                f"found {', '.join(job_options)}; Shardmark no longer submits jobs: write them as "
                "#SBATCH lines of a job script, as `shardmark init --sbatch` makes one"
            )
        return options


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
