"""`shardmark run` without running anything: exit codes, messages, the plan."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardmark import cli
from shardmark.errors import ShardmarkError
from shardmark.experiment.schema import Experiment
from shardmark.launch import controller
from shardmark.results.schema import Failure, Outcome
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
    answer: Answer, calls: list[dict[str, Any]], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    code, printed, err = answer("quickstart", "--out", str(out))
    assert (code, err) == (0, "")
    assert "\nstrategy  ranks" in printed
    assert printed.endswith(f"\nfiles: {out}   again: shardmark compare {out}\n")
    (call,) = calls
    assert call["out"] == out
    assert call["retry"] is False
    assert call["experiment"].name == "quickstart"


def test_options_reach_the_run(answer: Answer, calls: list[dict[str, Any]], tmp_path: Path) -> None:
    changes = ("--set", "recipe.epochs=1", "--set", "matrix.strategy=[ddp]")
    assert answer("quickstart", *changes, "--retry", "--out", str(tmp_path / "run"))[0] == 0
    (call,) = calls
    assert call["retry"] is True
    assert call["experiment"].recipe.epochs == 1
    assert call["experiment"].matrix["strategy"] == ["ddp"]


def test_home_in_out_is_expanded(
    answer: Answer,
    calls: list[dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert answer("quickstart", "--out", "~/run")[0] == 0
    assert calls[0]["out"] == tmp_path / "run"


def test_default_folder_is_a_new_one(
    answer: Answer,
    calls: list[dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, printed, _ = answer("quickstart")
    assert code == 0
    assert calls[0]["out"].parent == Path("runs")
    assert f"files: {calls[0]['out']}" in printed


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


def test_interrupt_is_130(answer: Answer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(*_: Any, **__: Any) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(controller, "run_experiment", interrupted)
    assert answer("quickstart", "--out", str(tmp_path / "run"))[0] == 130


def test_sigterm_is_an_interrupt_while_it_runs(
    answer: Answer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = signal.getsignal(signal.SIGTERM)

    def terminated(*_: Any, **__: Any) -> Path:
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("the signal's handler raises before")

    monkeypatch.setattr(controller, "run_experiment", terminated)
    assert answer("quickstart", "--out", str(tmp_path / "run"))[0] == 130
    assert signal.getsignal(signal.SIGTERM) is before


def test_our_own_errors_are_messages(
    answer: Answer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails(*_: Any, **__: Any) -> Path:
        raise ShardmarkError("torch cannot be imported")

    monkeypatch.setattr(controller, "run_experiment", fails)
    code, printed, err = answer("quickstart", "--out", str(tmp_path / "run"))
    assert (code, err) == (2, "error: torch cannot be imported\n")
    assert "Traceback" not in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["quickstrat"], "error: quickstrat: no such file, and no such preset; allowed is a file"),
        (["quickstart", "--set", "recipe.epochs"], "recipe.epochs"),
        (["quickstart", "--set", "recipe.epoch=3"], "nearest: 'recipe.epochs'"),
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
    assert err.startswith("error: ")
    assert message in err
    assert "Traceback" not in err
    assert calls == []


@pytest.mark.parametrize("arguments", [[], ["quickstart", "--outt", "x"], ["a", "b"]])
def test_usage_errors(answer: Answer, calls: list[dict[str, Any]], arguments: list[str]) -> None:
    assert answer(*arguments)[0] == 2
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
    assert [line.split()[0] for line in lines[:2]] == ["1", "2"]
    assert {line.split()[1].rpartition("-")[0] for line in lines[:2]} == {
        "single-w1-fp32-r0",
        "ddp-w2-fp32-r0",
    }
    assert lines[2:] == [
        "left out: single on 2 ranks: single is one device",
        "left out: ddp on 1 rank: one rank has nobody to share the work with",
        "2 trials, 2 cells left out",
    ]
    assert calls == []
    assert {path.name for path in tmp_path.iterdir()} == {"mine.yaml"}


def test_dry_run_refuses_what_cannot_be_planned(answer: Answer) -> None:
    code, _, err = answer("quickstart", "--dry-run", "--set", "recipe.global_batch=7")
    assert code == 2
    assert "7 samples cannot be shared equally" in err
