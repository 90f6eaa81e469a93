"""`shardmark run` without running anything: exit codes, messages, the plan."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardmark import cli
from shardmark.analysis.compare.comparison import compare
from shardmark.cli.compare import render
from shardmark.cli.progress import Quiet
from shardmark.config.experiment import Experiment
from shardmark.core.errors import ShardmarkError
from shardmark.launch import controller
from shardmark.results.schema import Failure, Outcome
from shardmark.results.store import load_run
from tests.golden.invented import invented_trial, write_run

Fake = Callable[..., Path]
Answer = Callable[..., tuple[int, str, str]]


@pytest.fixture
def answer(capsys: pytest.CaptureFixture[str]) -> Answer:
    def ask(*arguments: str) -> tuple[int, str, str]:
        code = cli.main(["run", *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return ask


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What `run_experiment` was called with; it stores two invented trials."""
    calls: list[dict[str, Any]] = []

    def fake(experiment: Experiment, out: Path, **options: Any) -> Path:
        calls.append({"experiment": experiment, "out": out, **options})
        return write_run(out, [invented_trial("single", 1), invented_trial("ddp", 2)])

    monkeypatch.setattr(controller, "run_experiment", fake)
    return calls


def ends(monkeypatch: pytest.MonkeyPatch, *outcomes: Outcome) -> None:
    """The run has one trial of each outcome."""

    def fake(_: Experiment, out: Path, **__: Any) -> Path:
        failure = Failure(reason="it broke", remedy="mend it")
        trials = [
            invented_trial(
                repeat=number, outcome=outcome, failure=None if outcome == "ok" else failure
            )
            for number, outcome in enumerate(outcomes)
        ]
        return write_run(out, trials)

    monkeypatch.setattr(controller, "run_experiment", fake)


def test_run_ends_with_the_table_and_its_place(
    answer: Answer, calls: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is told can be pasted."""
    monkeypatch.setenv("HOME", str(tmp_path))
    changes = ("--set", "epochs=1", "--set", "matrix.strategy=[ddp]")
    code, printed, err = answer("quickstart", *changes, "--retry", "--out", "~/a run")
    assert (code, err) == (0, "")
    assert "strategy" in printed
    assert f"report: shardmark report '{tmp_path}/a run'\n" in printed
    (call,) = calls
    assert (call["out"], call["retry"]) == (tmp_path / "a run", True)
    assert call["experiment"].recipe.epochs == 1
    assert call["experiment"].matrix["strategy"] == ["ddp"]


@pytest.mark.parametrize("option", ["--quiet", "-q"])
def test_quiet_prints_the_table_alone_and_runs_are_numbered(
    answer: Answer,
    calls: list[dict[str, Any]],
    tmp_path: Path,
    option: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("runs/quickstart", "runs/quickstart-2"):
        code, printed, err = answer("quickstart", option)
        assert (code, err) == (0, "")
        assert printed == render(compare([load_run(Path(folder))], None))
    assert isinstance(calls[0]["progress"], Quiet)


@pytest.mark.parametrize(
    ("outcomes", "code"),
    [
        ((Outcome.OK, Outcome.OUT_OF_MEMORY, Outcome.UNAVAILABLE), 0),
        ((Outcome.OK, Outcome.FAILED), 1),
        ((Outcome.TIMED_OUT, Outcome.OK), 1),
    ],
)
def test_exit_code_tells_of_failures(
    answer: Answer,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    outcomes: tuple[Outcome, ...],
    code: int,
) -> None:
    ends(monkeypatch, *outcomes)
    found, printed, _ = answer("quickstart", "--out", str(tmp_path / "run"))
    assert found == code
    assert "files: " in printed, "the table comes all the same"


def interrupted(*_: Any, **__: Any) -> Path:
    raise KeyboardInterrupt


def terminated(*_: Any, **__: Any) -> Path:
    os.kill(os.getpid(), signal.SIGTERM)
    raise AssertionError("the signal's handler raises before")


def refused(*_: Any, **__: Any) -> Path:
    raise ShardmarkError("torch cannot be imported")


@pytest.mark.parametrize(
    ("stop", "code", "message"),
    [
        (interrupted, 130, "interrupted; go on with: shardmark run quickstart"),
        (terminated, 130, "interrupted; go on with: shardmark run quickstart"),
        (refused, 2, "error: torch cannot be imported\n"),
    ],
)
def test_what_ends_a_run_has_its_exit_code(
    *,
    answer: Answer,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    stop: Callable[..., Path],
    code: int,
    message: str,
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(controller, "run_experiment", stop)
    ended, printed, err = answer("quickstart", "--out", str(tmp_path / "run"))
    assert ended == code
    assert err.startswith(message)
    assert "Traceback" not in printed + err
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Missing argument"),
        (["quickstart", "--outt", "x"], "No such option"),
        (["a", "b"], "unexpected extra argument"),
        (["quickstrat"], "error: quickstrat: no such file, and no such preset; allowed is a file"),
        (["quickstart", "--set", "recipe.epochs"], "recipe.epochs"),
        (["quickstart", "--set", "recipe.epoch=3"], "nearest: 'epochs'"),
        (["quickstart", "--set", "recipe.epochs=many"], "many"),
        (["quickstart", "--set", "matrix.strategy=[dpd]"], "found 'dpd'; allowed are single, dp"),
        (["quickstart", "--set", "matrix.strategy=[{name: ddp, bucket: 5}]"], "bucket_mb"),
    ],
)
def test_bad_input_is_a_message(
    answer: Answer, calls: list[dict[str, Any]], arguments: list[str], message: str
) -> None:
    code, printed, err = answer(*arguments)
    assert (code, printed) == (2, "")
    assert message in err
    assert "Traceback" not in err
    assert calls == []


def test_dry_run_prints_the_plan_and_reads_no_data(
    answer: Answer, calls: list[dict[str, Any]], tmp_path: Path
) -> None:
    file = tmp_path / "mine.yaml"
    mapping = {
        "name": "mine",
        "workload": {
            "name": "classification",
            "dataset": "imagefolder",
            "data_dir": str(tmp_path / "nowhere"),
        },
        "recipe": {"global_batch": 8, "steps": 2},
        "matrix": {"strategy": ["single", "ddp"], "world_size": [1, 2]},
        "device": "cpu",
    }
    file.write_text(json.dumps(mapping))
    code, printed, err = answer(str(file), "--dry-run")
    assert (code, err) == (0, "")
    lines = printed.splitlines()
    rows = [line.split("  ") for line in lines[:2]]
    columns = [[part.strip() for part in row if part.strip()] for row in rows]
    assert [row[0] for row in columns] == ["1", "2"]
    assert {(row[1].rpartition("-")[0], *row[2:]) for row in columns} == {
        ("single-w1-fp32-r0", "single", "1 rank", "repeat 1 of 1"),
        ("ddp-w2-fp32-r0", "ddp", "2 ranks", "repeat 1 of 1"),
    }
    assert lines[2:] == [
        "left out: single on 2 ranks: single is one device",
        "left out: ddp on 1 rank: one rank has nobody to share the work with",
        "2 trials, 2 cells left out",
    ]
    assert calls == []
    assert {path.name for path in tmp_path.iterdir()} == {"mine.yaml"}


def test_dry_run_tells_cells_apart(answer: Answer) -> None:
    """All that a cell varies in, in columns that two spaces or more part."""
    changes = (
        "matrix.strategy=[{name: fsdp-hybrid, shard_group: 2}]",
        "matrix.world_size=[4]",
        "matrix.recipe.precision=[fp32,bf16]",
        "measure.repeats=2",
    )
    options = [word for change in changes for word in ("--set", change)]
    code, printed, err = answer("quickstart", "--dry-run", *options)
    assert (code, err) == (0, "")
    *lines, last = printed.splitlines()
    assert last == "4 trials, 0 cells left out"
    rows = [re.split(" {2,}", line.strip()) for line in lines]
    assert {tuple(row[2:]) for row in rows} == {
        (
            "fsdp-hybrid",
            "4 ranks",
            f"repeat {repeat} of 2",
            "shard_group=2",
            f"recipe.precision={p}",
        )
        for repeat in (1, 2)
        for p in ("fp32", "bf16")
    }
    assert len({row[1] for row in rows}) == 4


def test_dry_run_says_what_this_machine_lacks(answer: Answer) -> None:
    """Of one node; of several, `local` says that it has none of them."""
    changes = (
        "matrix.strategy=[ddp]",
        "matrix.world_size=[2]",
        "matrix.nodes=[1, 2]",
        "matrix.recipe.precision=[fp16, bf16]",
    )
    options = [word for change in (*changes, "device=cpu") for word in ("--set", change)]
    code, printed, _ = answer("quickstart", "--dry-run", *options)
    assert code == 0
    assert "  nodes=2" in printed
    assert "placement.nodes" not in printed
    fp16 = "fp16 with loss scaling needs a CUDA device; set recipe.precision to bf16 or fp32"
    assert printed.splitlines()[-2:] == [
        "local: trials on 2 nodes are recorded as unavailable here; "
        "--engine torchrun, slurm or ray runs them",
        f"local: 1 trial is recorded as unavailable here: {fp16}",
    ]
    _, printed, _ = answer("quickstart", "--dry-run", *options, "--set", "engine.name=slurm")
    assert fp16 not in printed, "other machines have what they have"


def test_dry_run_refuses_what_cannot_be_planned(answer: Answer) -> None:
    code, _, err = answer("quickstart", "--dry-run", "--set", "recipe.global_batch=7")
    assert code == 2
    assert "7 samples cannot be shared equally" in err
