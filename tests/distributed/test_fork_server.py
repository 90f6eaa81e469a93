"""Trials start with loaded libraries and fresh variables, and leave no process behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from shardmark.bench.launch.local import fork_server
from shardmark.bench.launch.local.fork_server import PRELOADED, ForkServer, living
from shardmark.bench.launch.trial_artifacts import AGENT_LOG
from tests import ROOT
from tests.waiting import wait_for

AGENT = "tests.distributed.telling_agent"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ForkServer]:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(fork_server, "AGENT", AGENT)
    monkeypatch.setattr(fork_server, "PRELOADED", (AGENT,))
    with closing(ForkServer()) as made:
        yield made


def told_in(folder: Path) -> dict[str, Any]:
    wait_for((folder / "told.json").exists)
    told: dict[str, Any] = json.loads((folder / "told.json").read_text())
    (folder / "told.json").unlink()
    return told


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def gone(*pids: int) -> bool:
    processes = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    return not psutil.wait_procs(processes, timeout=60)[1]


def test_trials_share_loaded_modules_only(server: ForkServer, tmp_path: Path) -> None:
    server.load(["colorsys", "no_such_module"], "cpu")
    told = []
    for number in (1, 2):
        server.begin(tmp_path, "measure", {"SHARDMARK_TEST": str(number)})
        assert server.ended(30) == 3
        told.append(told_in(tmp_path))
    assert [trial["variable"] for trial in told] == ["1", "2"]
    assert all(trial["loaded"] and trial["frozen"] > 1000 for trial in told)
    assert told[0]["server"] == told[1]["server"] != os.getpid()
    assert told[0]["pid"] != told[1]["pid"]
    assert "SHARDMARK_TEST" not in os.environ


@pytest.mark.parametrize("how", ["reaped", "closed", "killed"])
def test_processes_of_a_trial_end(server: ForkServer, tmp_path: Path, how: str) -> None:
    """However it ends, the next one runs."""
    server.load(["colorsys"], "cpu")
    server.begin(tmp_path, "links", {})
    told = told_in(tmp_path)
    if how == "reaped":
        assert server.ended(0.01) is None
        assert server.reap() == -signal.SIGKILL
    elif how == "closed":
        server.close()
    else:
        os.kill(told["server"], signal.SIGKILL)
        assert server.ended(30) == -signal.SIGKILL
        assert "forked from has died: ended with code -9" in (tmp_path / AGENT_LOG).read_text()
    if how == "reaped":
        assert not lives(told["pid"])
        assert not lives(told["child"]), "it was waited for"
    assert gone(told["pid"], told["child"])
    assert not Path(told["temporary"]).parent.exists(), "libraries of killed ranks leave files"
    server.begin(tmp_path, "measure", {})
    assert server.ended(30) == 3
    again = told_in(tmp_path)
    assert again["loaded"]
    assert (again["server"] == told["server"]) == (how == "reaped")
    assert how == "reaped" or gone(told["server"])


def test_loading_makes_no_call_to_the_cuda_runtime(
    server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counting devices with a MIG slice would ask the runtime: forked ranks could not use it."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-4b1cc6a1-0000-0000-0000-000000000000")
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    server.load([*PRELOADED, "shardmark.ranks.strategies.deepspeed.preload"], "cuda")
    server.begin(tmp_path, "measure", {})
    assert server.ended(30) == 3
    assert told_in(tmp_path)["bad_fork"] is False


def test_zombies_are_not_living_processes(tmp_path: Path) -> None:
    """A dead process that was not collected (state Z) holds no memory."""
    states = {11: "R", 12: "D", 13: "Z", 14: "S"}
    for pid, state in states.items():
        (tmp_path / str(pid)).mkdir()
        group = 7 if pid < 14 else 8
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (a) rank) {state} 1 {group} 0 0")
    assert living(7, tmp_path) == [11, 12]
    assert living(8, tmp_path) == [14]
    assert living(9, tmp_path) == []


def test_await_end_waits_for_the_last_process(monkeypatch: pytest.MonkeyPatch) -> None:
    alive = [[11, 12], [12], []]
    monkeypatch.setattr(fork_server, "living", lambda *_: alive.pop(0))
    monkeypatch.setattr(time, "sleep", lambda _: None)
    fork_server.await_end(7)
    assert alive == []


def test_process_dies_if_its_parent_died_first() -> None:
    """Before the kernel could be asked to tell."""
    here = "from shardmark.base.system.processes import die_with_parent"
    words = [sys.executable, "-c", f"{here}; die_with_parent(1); print('lives on')"]
    ended = subprocess.run(words, capture_output=True, check=False)
    assert (ended.returncode, ended.stdout) == (-signal.SIGKILL, b"")


def test_script_without_a_main_guard_is_not_run_again(tmp_path: Path) -> None:
    """The fork server of `multiprocessing` would: a user's script calls `shardmark.run` at once."""
    (tmp_path / "script.py").write_text(
        "from pathlib import Path\n"
        "from shardmark.bench.launch.local import fork_server\n"
        f"fork_server.AGENT, fork_server.PRELOADED = {AGENT!r}, ({AGENT!r},)\n"
        "server = fork_server.ForkServer()\n"
        "server.load([], 'cpu')\n"
        f"server.begin(Path({str(tmp_path)!r}), 'measure', {{}})\n"
        "print('ended', server.ended(30))\n"
        "server.close()\n"
    )
    path = os.pathsep.join(filter(None, [str(ROOT), *sys.path]))
    finished = subprocess.run(
        [sys.executable, tmp_path / "script.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.stdout == "ended 3\n", finished.stderr
