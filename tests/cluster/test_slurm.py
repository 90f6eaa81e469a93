"""The engine `slurm` on Debian's SLURM: jobs that finish, are cancelled and lose a node."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from benchmarks.cluster import namespaces

from shardmark.base.results.schema import Outcome
from shardmark.base.results.store import StoredRun, load_run
from tests.cluster.needs import why_no_bench
from tests.cluster.one_machine import (
    ENDLESS,
    EXPERIMENT,
    by_strategy,
    check_same,
    given,
    in_order,
    stepping,
)
from tests.cluster.slurm_cluster import SlurmCluster, slurm, why_no_slurm
from tests.waiting import wait_for

WHY_NOT = why_no_bench() or why_no_slurm()
pytestmark = [
    pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or ""),
    pytest.mark.timeout(1800),
]

LONG_SECONDS = 600
"""Time to load the libraries, also where others use the machine."""
TWO_TRIALS: dict[str, Any] = {
    "placement": {"nodes": 2},
    "engine": {"name": "slurm"},
    "matrix": {"strategy": ["single", "ddp"]},
    "measure": EXPERIMENT["measure"] | {"link_seconds": 0},
}


@pytest.fixture(scope="module")
def daemons() -> Iterator[SlurmCluster]:
    """Start a cluster for all tests; its path is short, since it has sockets."""
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder, slurm(Path(folder)) as made:
        yield made


@pytest.fixture
def cluster(daemons: SlurmCluster) -> Iterator[SlurmCluster]:
    yield daemons
    left = daemons.jobs()
    if left:
        daemons.answer("scancel", *left)  # so that the next test finds the nodes free
    wait_for(lambda: not daemons.jobs())
    assert left == [], "no job is left"
    wait_for(lambda: not daemons.left())


def command(tmp_path: Path, *settings: str, **changes: Any) -> list[str]:
    """On two nodes; the network interface is to be found, not to be told."""
    experiment = tmp_path / "experiment.yaml"
    experiment.write_text(yaml.safe_dump(EXPERIMENT | TWO_TRIALS | changes))
    unset = ["env", "-u", "GLOO_SOCKET_IFNAME", "-u", "NCCL_SOCKET_IFNAME"]
    words = [*unset, sys.executable, "-m", "shardmark", "run", str(experiment)]
    return [*words, *given(*settings), "--out", str(tmp_path / "run")]


def submit(cluster: SlurmCluster, tmp_path: Path, words: list[str]) -> subprocess.Popen[bytes]:
    """Submit the command as a job script; the returned process ends with the job."""
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/sh\nexec {shlex.join(words)} > {tmp_path / 'log.txt'} 2>&1\n")
    options = ("--nodes=2", "--ntasks-per-node=1", "--exclusive", "--output=/dev/null")
    return cluster.start(["sbatch", "--wait", *options, str(script)], tmp_path / "sbatch.txt")


def test_cancelled_job_is_finished_by_another_one(
    cluster: SlurmCluster, tmp_path: Path, one: StoredRun
) -> None:
    """Each trial is a step; the same files as one machine's, losses equal to the last bit."""
    words, out, log = command(tmp_path), tmp_path / "run", tmp_path / "log.txt"
    first = submit(cluster, tmp_path, words)
    wait_for(lambda: any((out / "trials").glob("single-*/result.json")), LONG_SECONDS)
    cluster.answer("scancel", *cluster.jobs())
    first.wait(timeout=LONG_SECONDS)
    (single,) = (trial for trial in load_run(out).trials if trial.strategy == "single")
    assert single.outcome is Outcome.OK

    names = set[str]()
    second = submit(cluster, tmp_path, words)
    while second.poll() is None:
        names |= set(cluster.answer("squeue", "--steps", "--noheader", "--format=%j").split())
        time.sleep(0.5)
    printed = log.read_text()
    assert second.returncode == 0, printed
    assert "2 trials, 1 finished already" in printed
    assert "\nstrategy " in printed, "the table, as with any engine"
    two = load_run(out, verify=True)
    assert by_strategy(two)["single"] == single, "what was measured stays"
    assert by_strategy(two)["ddp"].id in names, "a step of its own"
    check_same(one, two)
    places = [(rank.rank, rank.host, rank.node) for rank in by_strategy(two)["ddp"].ranks]
    assert places == [(0, "node1", 0), (1, "node2", 1)]
    environment = json.loads((two.path / "environment.json").read_text())
    assert [node["host"] for node in environment["nodes"]] == ["node1", "node2"]


def test_lost_node_ends_its_trial_alone(cluster: SlurmCluster, tmp_path: Path) -> None:
    """The trial after a lost node has a step of its own, for which the node is there again."""
    out = tmp_path / "run"
    job = submit(cluster, tmp_path, command(tmp_path, **ENDLESS))
    wait_for(lambda: stepping(out, 0), LONG_SECONDS)
    (process,) = running(cluster, 2, b"shardmark.extras.engines.nodes.node")
    os.kill(process, signal.SIGKILL)
    wait_for(lambda: stepping(out, 1), LONG_SECONDS)
    cluster.answer("scancel", *cluster.jobs())
    job.wait(timeout=LONG_SECONDS)
    wait_for(lambda: not cluster.jobs(), LONG_SECONDS)  # its client may end before the job does
    printed = (tmp_path / "log.txt").read_text()
    assert printed.rstrip().splitlines()[-1].startswith("interrupted; continue with: shardmark run")
    first, second = in_order(out)
    assert first.outcome is Outcome.FAILED
    assert first.failure is not None
    assert first.failure.node == 1
    assert "node 1 (node2) was lost: its connection" in first.failure.reason
    assert second.outcome is Outcome.INTERRUPTED, "the scheduler's ending it is no failure"


def running(cluster: SlurmCluster, node: int, words: bytes) -> list[int]:
    """Processes of a node whose command has the words."""
    found = namespaces.processes(cluster.nodes.nodes[node].namespace)
    return [pid for pid in found if words in Path(f"/proc/{pid}/cmdline").read_bytes()]
