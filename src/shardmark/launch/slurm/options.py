"""Options of the engine `slurm`, and what they ask of `sbatch`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from shardmark.config.engines import SlurmOptions


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
