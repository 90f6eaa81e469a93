"""A node's process is killed in the last trial of a run: nothing of it stays."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests import ROOT
from tests.distributed.experiments import experiment
from tests.waiting import wait_for

NEXT_COMMAND = """
from contextlib import closing
from shardmark.bench.launch.local.fork_server import ForkServer
with closing(ForkServer()) as server:
    server.make_ready()
"""


def node_1(command: subprocess.Popen[bytes]) -> psutil.Process:
    for process in psutil.Process(command.pid).children():
        words = process.cmdline()
        if "shardmark.extras.engines.nodes.node" in words and json.loads(words[-1])["number"] == 1:
            return process
    raise AssertionError("node 1 runs")


@pytest.mark.parametrize("killed", ["the node's process", "all processes of the node"])
def test_temporary_files_of_a_killed_node_are_removed(tmp_path: Path, killed: str) -> None:
    """Surviving processes remove its folders at once; else the next command there, of any run."""
    temporary, run = tmp_path / "temporary", tmp_path / "run"
    temporary.mkdir()
    alone = killed == "the node's process"
    content = experiment(
        recipe={"steps": 100_000},
        measure={"probe": False, "link_seconds": 0},
        placement={"nodes": 2},
        engine={"name": "torchrun", "hosts": ["127.0.0.1"] * 2, "remote": "{command}"},
        limits={"trial_seconds": 200},
    )
    file = tmp_path / "experiment.yaml"
    file.write_text(json.dumps(content))
    variables = os.environ | {"TMPDIR": str(temporary)}
    words = [sys.executable, "-m", "shardmark", "run", str(file), "--out", str(run)]
    with (tmp_path / "log.txt").open("wb") as log:
        command = subprocess.Popen(words, cwd=ROOT, env=variables, stdout=log, stderr=log)

    def left() -> int:
        """Return the number of scratch folders."""
        return len([*temporary.glob("shardmark-scratch-*")])

    try:
        wait_for(lambda: [*run.glob("trials/*/rank-1.progress")])
        assert left() == 4, "two scratch folders of each node"
        command.send_signal(signal.SIGSTOP)  # it does not end the run meanwhile
        controller = psutil.Process(command.pid)
        everything = [*controller.children(recursive=True), controller]
        victims = [node_1(command)] if alone else everything
        for end in (signal.SIGSTOP, signal.SIGKILL):  # none sees another one end
            for victim in victims:
                os.kill(victim.pid, end)
        if alone:
            wait_for(lambda: left() == 2)
            command.send_signal(signal.SIGCONT)
            assert command.wait(60) == 1, (tmp_path / "log.txt").read_text()
        else:
            command.wait()
            assert left() == 4
            subprocess.run([sys.executable, "-c", NEXT_COMMAND], env=variables, check=True)
        assert not [*temporary.glob("shardmark-*")]
    finally:
        command.kill()
        command.wait()
