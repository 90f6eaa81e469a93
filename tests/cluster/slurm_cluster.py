"""SLURM on a bench: Debian's daemons over network namespaces, gone with it.

Node 0 has munge and the scheduler, and commands are given there; the other nodes compute.  All
share this machine's files.  No control group is made: processes are found by their parents.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.cluster import namespaces
from benchmarks.cluster.bench import Bench, bench

DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch")
START_SECONDS = 60.0
KILL_SECONDS = 5
CONFIGURATION = """\
ClusterName=bench
SlurmctldHost=node0
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
ReturnToService=2
KillWait={kill_seconds}
NodeName=node[1-{nodes}] CPUs={cores} State=UNKNOWN
PartitionName=main Nodes=node[1-{nodes}] Default=YES MaxTime=60 State=UP
"""


def why_no_slurm() -> str | None:
    """Say why SLURM cannot be started here; None if it can."""
    missing = [daemon for daemon in DAEMONS if shutil.which(daemon) is None]
    if not missing:
        return None
    return f"no {', '.join(missing)}: apt-get install slurmctld slurmd slurm-client munge"


class SlurmCluster:
    """The scheduler while it runs; made by `slurm`."""

    def __init__(self, nodes: Bench, folder: Path) -> None:
        self.nodes = nodes
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}
        self._folder = folder

    def start(
        self, words: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a command where a user would give it."""
        given = {**self.environment, **(environment or {})}
        return self.nodes.start(0, words, environment=given, log=log)

    def answer(self, *words: str) -> str:
        """Run a command there, which must succeed, and return its output."""
        log = self._folder / f"answer-{time.monotonic_ns()}.txt"
        code = self.start(words, log).wait(timeout=60)
        assert code == 0, f"{words}: {log.read_text()}"
        return log.read_text()

    def jobs(self) -> list[str]:
        """The ids of all jobs that have not ended."""
        return self.answer("squeue", "--noheader", "--format=%A").split()

    def left(self) -> list[str]:
        """Processes on the nodes that compute, but for their daemon."""
        found = [p for node in self.nodes.nodes[1:] for p in namespaces.processes(node.namespace)]
        names = [_command(pid) for pid in found]
        return [name for name in names if name and not name.startswith("slurmd ")]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


@contextmanager
def slurm(folder: Path, *, nodes: int = 2) -> Iterator[SlurmCluster]:
    """So many nodes that compute, and one to submit from; root only.

    The folder, which is to be empty, holds all that the daemons write.
    """
    for number in range(1, nodes + 1):
        (folder / f"spool-node{number}").mkdir()
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    (folder / "slurm.conf").write_text(
        CONFIGURATION.format(
            folder=folder, nodes=nodes, cores=os.cpu_count(), kill_seconds=KILL_SECONDS
        )
    )
    # There is none on the nodes; asked to find out, the daemon would end.
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    with bench(nodes=nodes + 1) as made:
        cluster = SlurmCluster(made, folder)
        files = {"key-file": key} | {n: folder / f"munge.{n}" for n in ("socket", "seed-file")}
        files |= {"pid-file": folder / "munged.pid", "log-file": folder / "munged.log"}
        options = [f"--{name}={path}" for name, path in files.items()]
        cluster.start(["munged", "--foreground", "--force", *options], folder / "munged.out")
        _wait(folder, (folder / "munge.socket").exists)
        cluster.start(["slurmctld", "-D"], folder / "slurmctld.out")
        for number in range(1, nodes + 1):
            out = folder / f"slurmd-{number}.out"
            made.start(number, ["slurmd", "-D"], environment=cluster.environment, log=out)
        _wait(folder, lambda: _idle(cluster) == nodes)
        yield cluster


def _idle(cluster: SlurmCluster) -> int:
    log = cluster.environment["SLURM_CONF"] + ".sinfo"
    path = Path(log)
    path.unlink(missing_ok=True)
    cluster.start(["sinfo", "--noheader", "--Node", "--partition=main", "--format=%t"], path).wait()
    return path.read_text().split().count("idle")


def _wait(folder: Path, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not condition():
        logs = [f"{log.name}: {log.read_text()[-500:]}" for log in folder.glob("*.out")]
        assert time.monotonic() < deadline, "\n".join(logs)
        time.sleep(0.1)
