"""The engine `slurm`: runs inside an allocation and starts one step for each trial."""

from __future__ import annotations

import os
import platform
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from shardmark.base.errors import InputError, ShardmarkError
from shardmark.base.system.environment_variables import SECRET_VARIABLE
from shardmark.bench.launch.engine import EngineRequest
from shardmark.bench.launch.started_command import StartedCommand
from shardmark.experiment.engines import LOOPBACK, SlurmOptions
from shardmark.extras.engines.nodes.addresses import listening_address
from shardmark.extras.engines.nodes.engine import NodesEngine, NodeStarter
from shardmark.extras.engines.nodes.protocol import JoinOptions, new_secret
from shardmark.extras.engines.nodes.registry import NodeRegistry

SCONTROL_SECONDS = 60.0
"""Time limit for an answer of `scontrol`."""
NOTICE_SECONDS = 2.0
"""Time within which SLURM shows that it ends a job, after the job's ranks have ended."""
END_SECONDS = 15.0
"""Time limit for a step to end after its node processes were told to end."""
OTHER_TASKS = (
    *("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
    *("SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK"),
    *("SLURM_NTASKS_PER_GPU", "SLURM_CPUS_PER_GPU", "SLURM_DISTRIBUTION", "SLURM_EXACT"),
)
"""Variables that describe the job's tasks.  A step must not inherit them: each of its tasks would
get only a part of the node."""
SCRIPT_REMEDY = (
    "give the command in a job script: `shardmark init --sbatch` writes one, see"
    " docs/guides/slurm.md"
)


class Steps(NodeStarter):
    """Starts a node process on each of the allocation's first nodes by `srun`."""

    def __init__(self, options: SlurmOptions, key: Mapping[str, str], job: str) -> None:
        self._options = options
        self._key = key
        self._job = job
        self.secret = new_secret()
        self._srun: StartedCommand | None = None
        self.new_nodes_for_each_trial = options.step == "trial"

    def address(self, nodes: int) -> tuple[str, int]:
        interface = self._options.interface
        host = own_name(self._options) if nodes > 1 else LOOPBACK
        option = "engine.host"
        return listening_address(host, nodes=nodes, interface=interface, option=option), 0

    def start(self, registry: NodeRegistry, title: str) -> None:
        nodes, port = registry.num_nodes, registry.port
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
            if job_state(self._job) not in (None, "RUNNING"):
                return True
            time.sleep(NOTICE_SECONDS / 4)
        return False

    def close(self) -> None:
        if self._srun is not None:
            self._srun.close(END_SECONDS)
            self._srun = None


def step_words(
    options: SlurmOptions, nodes: int, key: Mapping[str, str], *, title: str, host: str, port: int
) -> list[str]:
    """Return the `srun` command of a step on the allocation's first `nodes` nodes.

    The step may overlap with the step in which the controller itself runs.
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
    join_options = JoinOptions.to(
        host, port, options, key, number_variable="SLURM_PROCID", with_files=True
    )
    return [*words, *options.srun, *python, *join_options.words()]


def own_name(options: SlurmOptions) -> str:
    """Return the name by which the other nodes reach this one, which is the first node."""
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
    """Build the controlling side on the first node of an allocation; starts nothing yet."""
    return NodesEngine(options, Steps(options, request.key, _allocation(request.nodes)), request)


def serve_as_node(_: SlurmOptions, request: EngineRequest) -> int | None:
    """Return 0 for every task of a step but the first, which controls the run."""
    if "SLURM_JOB_ID" in os.environ and os.environ.get("SLURM_PROCID", "0") != "0":
        request.notify("the first task of this step controls the run; this one has nothing to do")
        return 0
    return None


def submission(options: SlurmOptions, request: EngineRequest, command: Sequence[str]) -> list[str]:
    """Return the command, and the `srun` command of a trial."""
    step = step_words(options, request.nodes, {}, title="TRIAL", host="FIRST-NODE", port=0)
    trials = "each trial" if options.step == "trial" else "all trials"
    return [
        f"in an allocation of at least {request.nodes} nodes: {shlex.join(command)}",
        f"{trials}: {shlex.join(step)}",
    ]


def _allocation(nodes: int) -> str:
    """Return the id of the job in which this process controls a run.

    Raises `InputError` where it cannot control one.
    """
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        raise InputError("engine.name", "slurm, outside an allocation", SCRIPT_REMEDY)
    allocated = int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))
    if nodes > allocated:
        raise InputError(
            "SLURM_JOB_NUM_NODES",
            f"the allocation has {allocated}, and the experiment takes {nodes} nodes",
            f"allocate them: sbatch --nodes={nodes}",
        )
    on_first_node = os.environ.get("SLURM_NODEID", "0") == "0"
    if not on_first_node or "SLURMD_NODENAME" not in os.environ:
        raise InputError(
            "SLURM_NODEID",
            "this is not the allocation's first node",
            "give the command there: srun --overlap --nodes=1 --ntasks=1 --relative=0"
            " --cpu-bind=none shardmark ...",
        )
    return job


def job_state(job: str) -> str | None:
    """Return the job's state, such as `RUNNING`; None where the scheduler does not answer."""
    try:
        shown = subprocess.run(
            ("scontrol", "show", "job", "--oneliner", job),
            check=True,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SCONTROL_SECONDS,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # the terminal's Ctrl-C is for this process alone
        )
    except (OSError, subprocess.SubprocessError):
        return None
    state = re.search(r"(?:^|\s)JobState=(\S+)", shown.stdout)
    return state[1] if state else None
