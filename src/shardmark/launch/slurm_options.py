"""Options of the engine `slurm`, and what they ask of `sbatch`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator

from shardmark.experiment.optimization import Model

_CLOCK = re.compile(r"(?:\d+-)?\d{1,3}:[0-5]\d:[0-5]\d")
_OPTION = re.compile(r"[a-z][a-z-]*")
_OWN = ("nodes", "ntasks", "ntasks-per-node", "array", "output", "error", "wrap", "parsable")
"""What the engine itself says to `sbatch`."""


class SlurmOptions(Model):
    """One job for a run, with all its trials, each a step of it."""

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
    interface: str | None = None
    """Network interface for gloo and NCCL; null: the one by which node 0 is reached."""
    join_seconds: PositiveFloat = 300.0
    """How long nodes wait for each other at the start of a step."""
    node_seconds: Annotated[float, Field(ge=2, le=3600)] = 20.0
    """A node of which nothing is heard for so long is lost, and the trial with it."""

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
            if name in _OWN:
                raise ValueError(f"found {name!r}, which the engine says itself")
        return sbatch


def sbatch_options(options: SlurmOptions, nodes: int, name: str) -> dict[str, str | int]:
    """The job's options by their long names; an empty value is an option that takes none."""
    asked: dict[str, str | int | bool | None] = {
        "job-name": f"shardmark-{name}",
        "nodes": nodes,
        "ntasks-per-node": 1,
        "partition": options.partition,
        "account": options.account,
        "qos": options.qos,
        "time": options.time,
        "constraint": options.constraint,
        "gpus-per-node": options.gpus_per_node,
        "cpus-per-task": options.cpus_per_task,
        "mem": options.mem,
        "exclusive": options.exclusive,
        **options.sbatch,
    }
    return {
        name: "" if value is True else value
        for name, value in asked.items()
        if value is not None and value is not False
    }


def flags(options: Mapping[str, str | int]) -> list[str]:
    """As they are given to a command."""
    return [
        f"--{name}" if value == "" else f"--{name}={shlex.quote(str(value))}"
        for name, value in options.items()
    ]
