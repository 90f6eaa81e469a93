"""The engine `slurm`: one allocation for a run, and a step of it for each trial."""

from __future__ import annotations

import os
import platform
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from shardmark.config.engines import LOOPBACK, SlurmOptions
from shardmark.core.environment_variables import SECRET_VARIABLE
from shardmark.core.errors import InputError, ShardmarkError
from shardmark.launch.engine import EngineRequest, RemoteCommand
from shardmark.launch.nodes.addresses import listening_address
from shardmark.launch.nodes.engine import NodesEngine, NodeStarter
from shardmark.launch.nodes.protocol import Invitation
from shardmark.launch.nodes.registry import NodeRegistry
from shardmark.launch.nodes.secret import fresh_secret
from shardmark.launch.slurm.job import (
    command_words,
    flags,
    job_state,
    run_in_job,
    sbatch_options,
)
from shardmark.launch.started_command import StartedCommand

NOTICE_SECONDS = 2.0
"""For a job that is being ended to be known as such, once its ranks have been."""
END_SECONDS = 15.0
"""For a step to end, once its node processes have been told to."""
OTHER_TASKS = (
    *("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
    *("SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK"),
    *("SLURM_NTASKS_PER_GPU", "SLURM_CPUS_PER_GPU", "SLURM_DISTRIBUTION", "SLURM_EXACT"),
)
"""What a job may say of its tasks, each of which would then get a part of the node."""


class Steps(NodeStarter):
    """Has `srun` start a node process on each of the allocation's first nodes."""

    def __init__(self, options: SlurmOptions, key: Mapping[str, str], job: str) -> None:
        self._options = options
        self._key = key
        self._job = job
        self.secret = fresh_secret()
        self._srun: StartedCommand | None = None
        self.anew_for_each_trial = options.step == "trial"

    def address(self, nodes: int) -> tuple[str, int]:
        interface = self._options.interface
        host = own_name(self._options) if nodes > 1 else LOOPBACK
        option = "engine.host"
        return listening_address(host, nodes=nodes, interface=interface, option=option), 0

    def start(self, registry: NodeRegistry, title: str) -> None:
        nodes, port = registry.wanted, registry.port
        host, _ = self.address(nodes)
        words = step_words(self._options, nodes, self._key, title=title, host=host, port=port)
        variables = {k: v for k, v in os.environ.items() if k not in OTHER_TASKS}
        variables[SECRET_VARIABLE] = self.secret
        self._srun = StartedCommand(words, option="engine.name", environment=variables)

    def check(self) -> None:
        failure = self._srun.failure() if self._srun is not None else None
        if failure is not None:
            raise ShardmarkError(f"the step of SLURM {failure}")

    def is_ending(self) -> bool:
        deadline = time.monotonic() + NOTICE_SECONDS
        while time.monotonic() < deadline:
            state = job_state(self._job)
            if state is not None and state.state != "RUNNING":
                return True
            time.sleep(NOTICE_SECONDS / 4)
        return False

    def close(self) -> None:
        if self._srun is not None:
            self._srun.close(END_SECONDS)
            self._srun = None


def step_words(
    options: SlurmOptions,
    nodes: int,
    key: Mapping[str, str],
    *,
    title: str,
    host: str,
    port: int,
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
    python = [sys.executable]
    if options.container is not None:
        folder = Path.cwd()
        mounts = ",".join([f"{folder}:{folder}", *options.container_mounts])
        words += [f"--container-image={options.container}", f"--container-mounts={mounts}"]
        words.append(f"--container-workdir={folder}")
        python = ["python3"]
    if options.python is not None:
        python = shlex.split(options.python)
    invitation = Invitation.to(
        host, port, options, key, number_variable="SLURM_PROCID", with_files=True
    )
    return [*words, *options.srun, *python, *invitation.words()]


def own_name(options: SlurmOptions) -> str:
    """By which the other nodes reach this one, the first."""
    if options.host is not None:
        return options.host
    names = [name for name in (os.environ.get("SLURMD_NODENAME"), platform.node()) if name]
    for name in names:
        with suppress(OSError):
            socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
            return name
    raise InputError(
        "engine.host",
        f"missing, and {' and '.join(names)} has no address here",
        "a name or an address of the first node that every node knows",
    )


def build(options: SlurmOptions, request: EngineRequest) -> NodesEngine:
    """The controlling side, on the first node of an allocation; nothing is started yet."""
    return NodesEngine(options, Steps(options, request.key, _allocation(request.nodes)), request)


def delegate(options: SlurmOptions, request: EngineRequest, command: RemoteCommand) -> int | None:
    """The command's exit code, where it is done in a job or by a process on the first node."""
    if "SLURM_JOB_ID" not in os.environ:
        return run_in_job(options, request, command)
    if "SLURMD_NODENAME" not in os.environ:
        return _on_first_node(command)
    if os.environ.get("SLURM_PROCID", "0") != "0":
        request.tell("the first task of this step controls the run; this one has nothing to do")
        return 0
    return None


def submission(options: SlurmOptions, request: EngineRequest, command: Sequence[str]) -> list[str]:
    """The script that would be submitted, and the step of each trial."""
    step = step_words(options, request.nodes, {}, title="TRIAL", host="FIRST-NODE", port=0)
    return [
        *(f"#SBATCH {flag}" for flag in flags(sbatch_options(options, request))),
        *options.setup,
        shlex.join(command),
        f"{'each trial' if options.step == 'trial' else 'all trials'}: {shlex.join(step)}",
    ]


def _allocation(nodes: int) -> str:
    """The id of the job that this process controls a run in; raises `InputError` if it cannot."""
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        raise InputError(
            "engine.name",
            "slurm, outside an allocation",
            "the commands run and verify submit a job; from Python, start inside one (sbatch)",
        )
    allocated = int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))
    if nodes > allocated:
        raise InputError(
            "SLURM_JOB_NUM_NODES",
            f"the allocation has {allocated}, and the experiment takes {nodes} nodes",
            f"allocate them: sbatch --nodes={nodes}; outside an allocation they are asked for",
        )
    if os.environ.get("SLURM_NODEID", "0") != "0":
        raise InputError(
            "SLURM_NODEID", "this is not the allocation's first node", "give the command there"
        )
    return job


def _on_first_node(command: RemoteCommand) -> int:
    """From the shell of `salloc`, which may be on another machine than the allocation's nodes."""
    words = ["srun", "--overlap", "--nodes=1", "--ntasks=1", "--relative=0", "--cpu-bind=none"]
    words += ["--export=ALL", sys.executable, "-P", "-m", "shardmark", *command_words(command)]
    started = subprocess.Popen(words, start_new_session=True)  # srun has its own idea of Ctrl-C
    try:
        return started.wait()
    except KeyboardInterrupt:
        started.terminate()  # handed on to the task, which stores the trial under way
        started.wait()
        raise
