"""Shardmark from Python: the package's names, and a run as a table of trials."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd
import pytest
from tests.golden.invented import invented_trial, write_run

import shardmark
from shardmark.core.metrics import TRIAL_METRICS
from shardmark.results.schema import Outcome

EXPERIMENT = {
    "name": "from-python",
    "workload": {"name": "classification", "model": "resnet18", "dataset": "digits"},
    "recipe": {"global_batch": 64, "steps": 10},
    "matrix": {"strategy": ["single"], "world_size": [1]},
}


def test_every_public_name_is_there() -> None:
    for name in shardmark.__all__:
        assert getattr(shardmark, name) is not None
        assert name in dir(shardmark)
    with pytest.raises(AttributeError, match="module 'shardmark' has no attribute 'nonsense'"):
        _ = shardmark.nonsense


def test_load_reads_a_run(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", [invented_trial("single", 1), invented_trial("ddp", 2)])
    (path / "trials" / "ddp-2-0" / "log.txt").unlink()
    run = shardmark.load(str(path))
    assert (run.path, run.name) == (path, "invented")
    assert [trial.strategy for trial in run.trials] == ["single"]
    assert [damaged.reason for damaged in run.damaged] == ["log.txt is missing"]
    (row,) = run.compare().rows
    assert row.verdict == "baseline"
    with pytest.raises(shardmark.InputError, match="measured were single"):
        run.compare("ddp")


def test_frame_has_one_row_a_trial(tmp_path: Path) -> None:
    varied = {"recipe.precision": "bf16", "recipe.global_batch": 64}
    trials = [
        invented_trial(varied=varied, precision="bf16"),
        invented_trial("fsdp", 4, outcome=Outcome.TIMED_OUT),
    ]
    frame = shardmark.load(write_run(tmp_path / "run", trials)).to_pandas()
    assert list(frame["strategy"]) == ["ddp", "fsdp"]
    assert list(frame["precision"]) == ["bf16", "fp32"]
    assert list(frame["outcome"]) == ["ok", "timed_out"]
    assert list(frame["world_size"]) == [2, 4]
    assert "recipe.precision" not in frame
    assert frame["recipe.global_batch"][0] == 64
    assert pd.isna(frame["recipe.global_batch"][1])
    assert set(TRIAL_METRICS) <= set(frame.columns)
    assert {str(frame[name].dtype) for name in TRIAL_METRICS} == {"float64"}
    assert frame["samples_per_second"][0] == pytest.approx(800 / 1.1)
    assert frame["mfu"].isna().all()


def test_frame_of_an_empty_run(tmp_path: Path) -> None:
    frame = shardmark.load(write_run(tmp_path / "run", [])).to_pandas()
    assert len(frame) == 0
    assert {"id", "outcome", "step_seconds"} <= set(frame.columns)


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Path]]:
    """A controller that stores one trial, and what it was asked to run."""
    calls: list[tuple[str, Path]] = []

    def run_experiment(experiment: Any, out: Path) -> Path:
        calls.append((experiment.name, out))
        return write_run(tmp_path / out, [invented_trial()])

    controller = ModuleType("shardmark.launch.controller")
    controller.__dict__["run_experiment"] = run_experiment
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "shardmark.launch.controller", controller)
    return calls


def test_run_takes_a_mapping(asked: list[tuple[str, Path]], tmp_path: Path) -> None:
    run = shardmark.run(EXPERIMENT, out=tmp_path / "out")
    assert len(run.trials) == 1
    assert asked == [("from-python", tmp_path / "out")]


def test_run_takes_a_file_or_an_experiment(asked: list[tuple[str, Path]], tmp_path: Path) -> None:
    from shardmark.config.load import from_mapping, to_yaml

    experiment = from_mapping(EXPERIMENT)
    file = tmp_path / "file.yaml"
    file.write_text(to_yaml(experiment))
    for given in (experiment, file, str(file)):
        shardmark.run(given, name="changed", measure={"repeats": 2})
    folders = [f"runs/changed{number}" for number in ("", "-2", "-3")]
    assert asked == [("changed", Path(folder)) for folder in folders]


def test_a_run_is_told_in_one_line(tmp_path: Path) -> None:
    trials = [invented_trial(repeat=repeat) for repeat in range(3)]
    run = shardmark.load(write_run(tmp_path / "run", trials))
    assert repr(run) == f"<Run '{tmp_path}/run': 3 ok>"


def test_keywords_change_keys_of_the_file() -> None:
    from shardmark.config.load import resolve

    changed = resolve(
        EXPERIMENT,
        {"steps": 7, "recipe": {"optimizer": {"lr": 0.5}}, "matrix": {"precision": ["bf16"]}},
    )
    assert (changed.recipe.steps, changed.recipe.optimizer.lr) == (7, 0.5)
    assert changed.matrix["recipe.precision"] == ["bf16"]
    with pytest.raises(shardmark.InputError, match="no such key"):
        resolve(EXPERIMENT, {"stepz": 7})


def test_run_refuses_an_unknown_experiment(asked: list[tuple[str, Path]]) -> None:
    with pytest.raises(shardmark.InputError, match="no such file, and no such preset"):
        shardmark.run("nonsense")
    assert not asked
