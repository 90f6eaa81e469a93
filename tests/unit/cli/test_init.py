"""Experiments of `init` can be planned without changes."""

from __future__ import annotations

import errno
import os
from importlib.resources import files
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from shardmark.bench.launch.input_checks import check_plan
from shardmark.cli import main
from shardmark.cli.init import CODE_FILES, Template
from shardmark.experiment.load import load_experiment
from shardmark.experiment.matrix import expand
from shardmark.scripts.command import ScriptCommand
from shardmark.scripts.record import OptimizerFacts, Record, Step


@pytest.mark.parametrize("task", [None, *Template])
def test_experiment_of_init_can_be_planned(task: Template | None, tmp_path: Path) -> None:
    options = [] if task is None else ["--task", task.value]
    assert main(["init", *options, "--out", str(tmp_path / "new")]) == 0
    plan = expand(load_experiment(tmp_path / "new" / "experiment.yaml"), "cpu")
    check_plan(plan)
    strategies = {trial.strategy.name for trial in plan.trials}
    is_script = task is Template.SCRIPT
    assert strategies == ({"ddp", "fsdp"} if is_script else {"single", "ddp", "fsdp", "zero-1"})
    (modules,) = {trial.workload.user_modules() for trial in plan.trials}
    code = CODE_FILES.get(task or Template.TOKENS)
    assert modules == (() if code is None else (str(tmp_path / "new" / code),))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[ScriptCommand]:
    """Commands whose first step a made-up record replaces."""
    commands: list[ScriptCommand] = []

    def record_first_step(
        command: ScriptCommand, _seconds: float, **_: object
    ) -> tuple[Record, str]:
        commands.append(command)
        facts = OptimizerFacts(path="torch.optim.sgd:SGD", types=[], switches=[], initial_lr=0.1)
        step = Step(settings=[{"lr": 0.1}])
        record = Record(rank=0, ranks=1, steps=[step], optimizer_facts=[facts], joined=True)
        return record, "your files are unchanged"

    monkeypatch.setattr("shardmark.experiment.proposal.record_first_step", record_first_step)
    return commands


def test_experiment_is_proposed_from_the_first_step_of_a_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], started: list[ScriptCommand]
) -> None:
    script = tmp_path / "my train.py"
    script.write_text("")
    assert main(["init", "--from", str(script), "--out", str(tmp_path / "new")]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("ran  ")
    assert printed[0].endswith("your files are unchanged")
    assert any(line.startswith("found      optimizer: {name: sgd, lr: 0.1}") for line in printed)
    assert any(line.startswith("not found  seed: ") for line in printed)
    experiment = load_experiment(tmp_path / "new" / "experiment.yaml")
    (trial, *_) = expand(experiment).trials
    assert trial.workload.user_modules() == (str(script),)
    assert [command.script for command in started] == [(str(script),)]
    assert main(["init", "--from", str(script), "--task", "rl", "--out", str(tmp_path)]) == 2


def test_a_command_has_arguments_and_ranks(tmp_path: Path, started: list[ScriptCommand]) -> None:
    command = "torchrun --nproc-per-node 3 train.py --lr 0.1"
    assert main(["init", "--from", command, "--out", str(tmp_path)]) == 0
    assert started[0].script == ("train.py", "--lr", "0.1")
    text = (tmp_path / "experiment.yaml").read_text()
    assert "world_size: [1, 3]" in text
    assert 'command: "train.py --lr 0.1"' in text
    assert main(["init", "--from", command, "--out", str(tmp_path)]) == 2
    assert len(started) == 1, "the file is there: nothing is started"
    assert main(["init", "--from", "train.py 'open", "--out", str(tmp_path / "new")]) == 2


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("flags", "answers", "expected"),
    [
        ([], "regression\n4\n{}\n", (Template.REGRESSION, 4)),
        ([], "\n\n{}\n", (Template.TOKENS, 2)),
        (["--ranks", "3", "--out", "{}"], "", (Template.TOKENS, 3)),
    ],
)
def test_init_asks_in_a_terminal_without_options(
    flags: list[str],
    answers: str,
    expected: tuple[Template, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdin", Terminal(answers.format(tmp_path)))
    assert main(["init", *(flag.format(tmp_path) for flag in flags)]) == 0
    template = files("shardmark.experiment") / "templates" / f"{expected[0]}.py"
    assert (tmp_path / "my_task.py").read_text() == template.read_text()
    experiment = load_experiment(str(tmp_path / "experiment.yaml"))
    assert {trial.world_size for trial in expand(experiment).trials} == {1, expected[1]}


def test_init_does_not_overwrite_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "experiment.yaml").write_text("mine")
    assert main(["init", "--out", str(tmp_path)]) == 2
    assert "it exists already" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["experiment.yaml"]


def test_init_on_a_read_only_disk_names_the_way_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, *_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "write_text", refuse)
    assert main(["init", "--task", "script", "--out", str(tmp_path / "new")]) == 2
    message = capsys.readouterr().err
    assert "Read-only file system" in message
    assert "name another --out" in message


def test_job_script_runs_the_experiment(tmp_path: Path) -> None:
    assert main(["init", "--sbatch", "--out", str(tmp_path)]) == 0
    *_, command = (tmp_path / "run.sbatch").read_text().splitlines()
    assert command == "exec shardmark run experiment.yaml --engine slurm --out runs/my-task"
