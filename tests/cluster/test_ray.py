"""The engine `ray` on a cluster of two raylets, which share this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from shardmark.base.results.schema import Outcome
from shardmark.base.results.store import StoredRun, load_run
from tests.cluster.one_machine import (
    ENDLESS,
    EXPERIMENT,
    check_lost,
    check_places,
    check_same,
    check_samples,
    check_verdicts,
    given,
    in_order,
    pid_of,
    stepping,
    under_way,
)
from tests.cluster.raylets import Raylets, raylets, why_no_ray
from tests.waiting import wait_for

pytestmark = [
    pytest.mark.skipif(why_no_ray() is not None, reason=why_no_ray() or ""),
]

MARK = "SHARDMARK_TEST_OF_RAY"
NODE_SECONDS = 6


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Raylets]:
    folder = tmp_path_factory.mktemp("ray")
    with raylets(2, cpus=2, log=folder / "raylets.log", **{MARK: str(folder)}) as made:
        yield made
    wait_for(lambda: not of_session(made))


def of_session(cluster: Raylets) -> list[str]:
    """Ray's processes; it names a session by the process that made it."""
    lines = [" ".join(one.info["cmdline"] or ()) for one in psutil.process_iter(["cmdline"])]
    return [line for line in lines if "ray/session_" in line and f"_{cluster.process.pid}/" in line]


def left() -> list[str]:
    """Our processes below a raylet, and Ray's that stand for them."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = " ".join(process.info["cmdline"] or ())
        try:
            if "shardmark.bench.launch" in words and MARK in process.environ():
                found.append(words)
        except psutil.Error:
            continue
        found += [words] if "ray::NodeActor" in words else []
    return found


def command(folder: Path, cluster: Raylets, *settings: str, **changes: Any) -> list[str]:
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump(EXPERIMENT | {"placement": {"nodes": 2}} | changes))
    words = [sys.executable, "-m", "shardmark", "run", str(path), "--out", str(folder / "run")]
    words += ["--engine", "ray", "--set", f"engine.address={cluster.address}"]
    words += ["--set", f"engine.node_seconds={NODE_SECONDS}"]
    return words + given(*settings)


class Command:
    """A run without an end, at which its trials' ranks are killed."""

    def __init__(self, folder: Path, words: list[str]) -> None:
        self.run = folder / "run"
        self.log = folder / "log.txt"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True)

    def trial(self, results: int) -> Path:
        """The folder of the trial after so many, once its ranks take steps."""

        def steps() -> bool:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            return stepping(self.run, results)

        wait_for(steps, 300)
        folder = under_way(self.run, results)
        assert folder is not None
        return folder

    def ended(self) -> int:
        code = self.process.wait(timeout=60)
        assert "(raylet)" not in self.log.read_text(), "Ray prints nothing into the progress"
        return code


def test_two_nodes_train_what_one_machine_trains(
    cluster: Raylets, tmp_path: Path, one: StoredRun
) -> None:
    """The same files, losses equal to the last bit, ranks in place, nothing said beside."""
    ran = subprocess.run(
        command(tmp_path, cluster, "measure.link_seconds=0", "measure.verify=true"),
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
    assert "ray" not in ran.stderr.lower(), ran.stderr
    two = load_run(tmp_path / "run", verify=True)
    check_same(one, two)
    check_verdicts(two)
    check_places(two)
    check_samples(two)
    wait_for(lambda: not left())


def test_request_beyond_the_cluster_is_refused(cluster: Raylets, tmp_path: Path) -> None:
    words = command(tmp_path, cluster, "engine.cpus_per_rank=64", "engine.join_seconds=2")
    ran = subprocess.run(words, check=False, capture_output=True, text=True, timeout=120)
    said = " ".join(ran.stderr.split())
    assert "Ray had no room within 2 s for CPU 128 and CPU 128, each on its own node" in said
    assert "the cluster has CPU 2" in said
    assert "Traceback" not in said
    assert not left()


def test_dead_ranks_and_actors_end_their_trial_alone(cluster: Raylets, tmp_path: Path) -> None:
    """Rank 1 dies in the first trial, its node in the second; the third, on one node, is ended."""
    matrix = {"strategy": ["ddp", "fsdp"], "placement.nodes": [2, 1]}
    changes = ENDLESS | {"matrix": matrix}
    words = command(tmp_path, cluster, "recipe.seed=0", **changes)
    made = Command(tmp_path, words)
    first = made.trial(0)
    os.kill(pid_of(first, 1), signal.SIGKILL)
    wait_for((first / "result.json").exists)
    second = made.trial(1)
    actors = psutil.Process(pid_of(second, 1)).parents()
    os.kill(
        next(p.pid for p in actors if "ray::NodeActor" in " ".join(p.cmdline())), signal.SIGKILL
    )
    wait_for((second / "result.json").exists)
    made.trial(2)
    made.process.send_signal(signal.SIGINT)
    assert made.ended() == 130
    died, lost, interrupted = in_order(made.run)
    assert died.outcome is Outcome.FAILED
    assert died.failure is not None
    assert (died.failure.rank, died.failure.node) == (1, 1)
    assert "rank 1 was ended by SIGKILL" in died.failure.reason
    check_lost(lost, 1, "its connection")
    assert interrupted.outcome is Outcome.INTERRUPTED
    wait_for(lambda: not left())
