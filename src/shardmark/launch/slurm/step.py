"""A step of the job: `srun` starts a node process on each of its nodes."""

from __future__ import annotations

import os
import platform
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

from shardmark.config.engines import SlurmOptions
from shardmark.core.errors import InputError, ShardmarkError
from shardmark.launch.nodes.roster import Roster
from shardmark.launch.slurm.state import cancel, steps_named

END_SECONDS = 15.0
"""For a step to end, once its node processes have been told to."""
NUMBER_VARIABLE = "SLURM_PROCID"
OTHER_TASKS = (
    *("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
    *("SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK"),
    *("SLURM_NTASKS_PER_GPU", "SLURM_CPUS_PER_GPU", "SLURM_DISTRIBUTION", "SLURM_EXACT"),
)
"""What a job may say of its tasks, each of which would then get a part of the node."""


class Step:
    """Node processes for the first nodes of the allocation, while a roster needs them."""

    def __init__(
        self, options: SlurmOptions, nodes: int, key: Mapping[str, str], *, job: str, title: str
    ) -> None:
        self._options = options
        self._nodes = nodes
        self._key = key
        self._job = job
        self._title = title
        self._started: tuple[subprocess.Popen[bytes], IO[bytes]] | None = None

    def start(self, roster: Roster) -> None:
        words = step_words(
            self._options,
            self._nodes,
            self._key,
            title=self._title,
            host=own_name(self._options),
            port=roster.port,
        )
        log = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the process)
        environment = {k: v for k, v in os.environ.items() if k not in OTHER_TASKS}
        try:
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,  # the terminal's Ctrl-C reaches the controller alone
            )
        except OSError as error:
            log.close()
            raise InputError(
                "engine.name",
                f"slurm, and srun cannot be run: {error.strerror or error}",
                "is SLURM's client installed on the nodes?",
            ) from None
        self._started = (process, log)

    def check(self) -> None:
        if self._started is None or self._started[0].poll() is None:
            return
        process, log = self._started
        log.seek(0)
        lines = log.read().decode(errors="replace").strip().splitlines()[-3:]
        raise ShardmarkError(
            f"the step {self._title} ended with code {process.returncode} before its nodes had "
            f"come: {' | '.join(lines) or 'no output'}"
        )

    def close(self) -> None:
        """Wait for the step, which its node processes end; then with more and more force."""
        if self._started is None:
            return
        process, log = self._started
        self._started = None
        if not _ended(process, END_SECONDS):
            process.terminate()  # it hands that on to its tasks
            if not _ended(process, END_SECONDS):
                for step in steps_named(self._job, self._title):
                    cancel(step)
                if not _ended(process, END_SECONDS):
                    process.kill()
                    process.wait()
        log.close()


def step_words(
    options: SlurmOptions,
    nodes: int,
    key: Mapping[str, str],
    *,
    title: str,
    host: str,
    port: int | str,
) -> list[str]:
    """The `srun` of a step on so many nodes: the first ones, the controller's being first of all.

    It may share the nodes with the step in which the controller itself may run.
    """
    words = [
        *("srun", f"--job-name={title}", f"--nodes={nodes}", f"--ntasks={nodes}"),
        *("--ntasks-per-node=1", "--relative=0", "--overlap", "--cpu-bind=none", "--export=ALL"),
        *("--kill-on-bad-exit=0", "--wait=0", "--input=none", "--unbuffered"),
    ]
    if options.gpus_per_node is not None:
        words.append(f"--gpus-per-node={options.gpus_per_node}")
    if options.container is not None:
        folder = Path.cwd()
        mounts = ",".join([f"{folder}:{folder}", *options.container_mounts])
        words += [f"--container-image={options.container}", f"--container-mounts={mounts}"]
        words.append(f"--container-workdir={folder}")
    words += [*options.srun, *interpreter(options), "-m", "shardmark.launch.nodes.joining"]
    words += ["--host", host, "--port", str(port), "--number-from", NUMBER_VARIABLE, "--here"]
    words += ["--join-seconds", f"{options.join_seconds:g}"]
    for name, value in key.items():
        words += ["--key", f"{name}={value}"]
    if options.interface is not None:
        words += ["--interface", options.interface]
    return words


def interpreter(options: SlurmOptions) -> list[str]:
    """The words of the command that is Python on a node."""
    if options.python is not None:
        return shlex.split(options.python)
    return ["python3"] if options.container is not None else [sys.executable]


def own_name(options: SlurmOptions) -> str:
    """By which the other nodes reach this one, the first."""
    if options.host is not None:
        return options.host
    names = [os.environ.get("SLURMD_NODENAME"), platform.node()]
    for name in filter(None, names):
        with suppress(OSError):
            socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
            return name
    raise InputError(
        "engine.host",
        f"missing, and {' and '.join(filter(None, names))} has no address here",
        "a name or an address of the first node that every node knows",
    )


def _ended(process: subprocess.Popen[bytes], seconds: float) -> bool:
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=seconds)
    return process.returncode is not None
