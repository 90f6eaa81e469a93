"""Behaviour that needs a separate process: its end, a closed pipe, another hash seed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from shardmark.base.cells import cell_id
from shardmark.base.errors import InputError, ShardmarkError
from shardmark.bench.launch.local.engine import LocalEngine
from shardmark.experiment.engines import TorchrunOptions
from shardmark.experiment.load import load_experiment
from shardmark.experiment.matrix import expand
from shardmark.extras.engines.nodes import torchrun
from tests import ROOT
from tests.unit.bench.launch.fakes import experiment
from tests.unit.extras.engines.nodes import request

GOLDEN = ROOT / "tests" / "golden" / "v1"
IDS = """
import json, sys
from shardmark.base.cells import cell_id
from shardmark.ranks.trial import Trial, trial_id
stored = json.loads(sys.argv[1])
print(trial_id(Trial.model_validate(stored)))
print(cell_id(stored))
"""


def python(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, sys.path))
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path, "TERM": "dumb"} | variables,
        check=False,
    )


def test_closed_pipe_is_no_error() -> None:
    """The case of `shardmark compare ... | head -1`, with more output than a pipe holds."""
    script = (
        "import os, sys; reader, writer = os.pipe(); os.close(reader); os.dup2(writer, 1);"
        " from shardmark.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    for arguments in (["list", "metrics"], ["compare", str(GOLDEN), "--format", "csv"]):
        assert python("-c", script, *arguments).stderr == ""


def test_module_can_be_run() -> None:
    finished = python("-m", "shardmark", "list", "nonsense")
    assert finished.returncode == 2
    assert finished.stderr.startswith("error: list: unknown kind 'nonsense'")


def test_ids_are_readable_and_stable_across_processes() -> None:
    trial = expand(load_experiment("quickstart", ["matrix.strategy=[ddp]"]), "cpu").trials[0]
    first, second = (
        python("-c", IDS, trial.model_dump_json(), PYTHONHASHSEED=seed).stdout.split()
        for seed in ("1", "2")
    )
    assert first == second
    assert first[0] == trial.id
    assert first[1] == cell_id(trial.model_dump(mode="json"))


@pytest.mark.parametrize(
    ("remote", "error", "said"),
    [
        ("no-such-program {command}", InputError, "engine.remote: no-such-program cannot be run"),
        ("sh -c 'echo never >&2; exit 3' {command}", ShardmarkError, r"\(b\) ended with code 3: n"),
    ],
)
def test_node_that_cannot_be_started_is_told(
    remote: str, error: type[Exception], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And node 0's process, which would wait for the others, is ended."""
    monkeypatch.chdir(tmp_path)
    given = {"hosts": ["localhost", "b"], "remote": remote, "rendezvous": "127.0.0.1:0"}
    options = TorchrunOptions.model_validate(given)
    trials = expand(experiment("placement.nodes=2", "matrix.strategy=[ddp]")).trials
    engine = torchrun.build(options, request(trials))
    with pytest.raises(error, match=said):
        engine.machine("cpu")
    engine.close()


def test_ranks_started_before_their_number_is_known_are_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's process answers too late; it ends its trial when its channel ends."""

    def interrupt(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)

    others = set(psutil.Process().children(recursive=True))  # another test's engine, if it is kept
    engine = LocalEngine()
    monkeypatch.setattr(engine._fork_server, "_receive", interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.run(tmp_path, trial_seconds=30, on_tick=lambda: None, task="compare")
    left = set(psutil.Process().children(recursive=True)) - others
    assert not left, "it has seen the end of its channel"
    engine.close()  # as the controller does in the end
