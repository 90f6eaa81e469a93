"""A whole run on an engine without processes: planned, resumed, refused, interrupted."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardmark.config.load import from_mapping
from shardmark.core.errors import DataError, InputError
from shardmark.core.machine import Machine
from shardmark.launch.controller import run_experiment
from shardmark.results.schema import Outcome
from shardmark.results.store import load_run
from tests.unit.launch.fakes import (
    FAILED,
    INTERRUPTED,
    TIMED_OUT,
    FakeEngine,
    Remembers,
    experiment,
)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "run"


def run(
    out: Path, *overrides: str, retry: bool = False, **engine: Any
) -> tuple[FakeEngine, Remembers]:
    made, told = FakeEngine(**engine), Remembers()
    run_experiment(experiment(*overrides), out, progress=told, engine=made, retry=retry)
    return made, told


def outcomes(out: Path) -> dict[str, str]:
    return {trial.strategy: str(trial.outcome) for trial in load_run(out, verify=True).trials}


def test_every_trial_is_run_and_told_and_kept(out: Path) -> None:
    engine, told = run(out)
    assert engine.calls[:2] == ["machine cpu", "load cpu"]
    assert engine.calls[-1] == "close"
    assert engine.names == ["ddp", "single"]
    assert outcomes(out) == {"single": "ok", "ddp": "ok"}
    assert told.plans == [(2, 0, 0)]
    assert told.started == [(1, 2), (2, 2)]
    assert told.ended == [(1, 2, "ok"), (2, 2, "ok")]
    assert told.notes == []
    assert from_mapping(yaml.safe_load((out / "experiment.yaml").read_text())) == experiment()
    engine, told = run(out)
    assert engine.calls == ["machine cpu", "close"], "nothing is loaded, nothing run"
    assert told.plans == [(2, 2, 0)]


def test_what_several_trials_import_is_loaded_once_before_them(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank would import torchvision's detectors anew."""
    engine, _ = run(out, "matrix.strategy=[ddp, fsdp, fsdp-grad-op]")
    libraries = ["torch.distributed.fsdp", "torch.nn.parallel"]
    assert sorted(engine.loaded) == ["shardmark.workloads.vision.task", *libraries]
    monkeypatch.setattr("shardmark.launch.controller.check_data", lambda _: 1600)
    engine, _ = run(out.with_name("other"), "workload={name: detection}")
    assert engine.loaded.count("shardmark.workloads.detection.task") == 1


@pytest.mark.parametrize(
    ("overrides", "new", "plan"),
    [
        (("matrix.strategy=[single, ddp, fsdp]", "limits.trial_seconds=5"), ["fsdp"], (3, 2, 0)),
        (("measure.repeats=2",), ["ddp", "single"], (4, 2, 0)),
        (("matrix.world_size=[1, 2]",), [], (2, 2, 2)),
        (
            ("matrix.nodes=[1, 2]", "matrix.world_size=[2]", "engine.name=torchrun"),
            ["ddp"],
            (3, 2, 2),
        ),
    ],
    ids=["strategy", "repeat", "cells without sense", "nodes and engine"],
)
def test_more_of_the_matrix_runs_only_what_is_new(
    out: Path, overrides: tuple[str, ...], new: list[str], plan: tuple[int, int, int]
) -> None:
    run(out)
    engine, told = run(out, *overrides, nodes=2)
    assert engine.names == new
    assert told.plans == [plan]


@pytest.mark.parametrize(("kind", "end"), [("failed", FAILED), ("timed_out", TIMED_OUT)])
def test_failures_are_results_unless_they_are_to_be_repeated(
    out: Path, kind: str, end: Any
) -> None:
    run(out, ends={"ddp": end})
    assert outcomes(out) == {"single": "ok", "ddp": kind}
    assert run(out)[0].names == []
    assert run(out, retry=True)[0].names == ["ddp"]
    assert outcomes(out) == {"single": "ok", "ddp": "ok"}


def test_interrupt_is_stored_and_told_and_finished_later(out: Path) -> None:
    engine = FakeEngine({"single": INTERRUPTED, "ddp": INTERRUPTED})
    with pytest.raises(KeyboardInterrupt):
        run_experiment(experiment(), out, engine=engine)
    assert len(engine.ran) == 1, "the next trial is not begun"
    assert engine.calls[-1] == "close"
    assert [trial.outcome for trial in load_run(out).trials] == [Outcome.INTERRUPTED]
    assert run(out)[0].names == ["ddp", "single"]
    assert outcomes(out) == {"single": "ok", "ddp": "ok"}


def test_engine_is_closed_whatever_happens(out: Path) -> None:
    engine = FakeEngine({"single": OSError("gone"), "ddp": OSError("gone")})
    with pytest.raises(OSError, match="gone"):
        run_experiment(experiment(), out, engine=engine)
    assert engine.calls[-1] == "close"


def test_unavailable_is_stored_and_asked_again(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = "matrix.strategy=[zero-1, ddp]"
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda _: None)
        assert run(out, asked)[0].names == ["ddp"]
    stored = {trial.strategy: trial for trial in load_run(out).trials}["zero-1"]
    assert stored.outcome is Outcome.UNAVAILABLE
    assert stored.failure is not None
    assert stored.failure.remedy == "pip install deepspeed"
    assert (stored.metrics, stored.ranks) == ({}, ())
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    monkeypatch.setattr(shutil, "which", lambda name, path=None: f"/bin/{name}")  # noqa: ARG005
    assert run(out, asked)[0].names == ["zero-1"]


@pytest.mark.parametrize("file", ["result.json", "steps.jsonl", "log.txt"])
def test_half_a_file_is_told_and_measured_again(out: Path, file: str) -> None:
    run(out)
    (path,) = out.glob(f"trials/ddp-*/{file}")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    engine, told = run(out)
    assert engine.names == ["ddp"]
    assert told.plans == [(2, 1, 0)]
    (note,) = told.notes
    assert "measured again" in note
    assert file in note
    assert outcomes(out) == {"single": "ok", "ddp": "ok"}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("recipe.steps=5", "holds a run with recipe.steps = 4, here it is 5"),
        ("workload.model=resnet50", "workload.model = 'resnet18', here it is 'resnet50'"),
        ("measure.warmup_steps=2", "measure.warmup_steps = 1, here it is 2"),
        ("name=other", "name = 'faked', here it is 'other'"),
        ("recipe.tf32=true", "recipe.tf32 = False, here it is True"),
        ("workload.model_options={width_per_group: 32}", "workload.model_options"),
    ],
)
def test_folder_of_another_experiment_is_refused(out: Path, override: str, message: str) -> None:
    run(out)
    engine = FakeEngine()
    with pytest.raises(InputError) as caught:
        run_experiment(experiment(override), out, engine=engine)
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{out}: ")
    assert engine.calls == []


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("workload.dataset=imagefolder", "workload.data_dir=nowhere"), "nowhere"),
        (
            ("matrix.workload.dataset=[digits, imagefolder]", "workload.data_dir=nowhere"),
            "nowhere",
        ),
        (("recipe.global_batch=7",), "cannot be shared equally"),
    ],
    ids=["data", "data of another cell", "batch"],
)
def test_input_is_checked_before_anything_is_made(
    out: Path, overrides: tuple[str, ...], message: str
) -> None:
    engine = FakeEngine()
    with pytest.raises((DataError, InputError), match=message):
        run_experiment(experiment(*overrides), out, engine=engine)
    assert engine.calls == []
    assert not out.exists()


def test_checkpoints_that_cannot_be_written_are_refused_before_the_first_trial(out: Path) -> None:
    (out.parent / "file").touch()
    folder = f"limits.checkpoint_dir={out.parent}/file/below"
    with pytest.raises(InputError, match=r"limits\.checkpoint_dir: .*: Not a directory"):
        run(out, "limits.max_restarts=1", folder)
    assert load_run(out).trials == ()


def test_device_of_the_machine_is_the_trials(out: Path) -> None:
    gpus = Machine(device_type="cuda", device_count=2, cores=2)
    engine, _ = run(out, "device=auto", machine=gpus)
    assert {trial.device_type for trial in engine.ran} == {"cuda"}
    assert engine.calls[1] == "load cuda"


def test_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    engine = FakeEngine()
    with pytest.raises(InputError, match="holds other files and no run"):
        run_experiment(experiment(), tmp_path, engine=engine)
    assert engine.calls == []


def test_nodes_are_in_the_environment_or_their_trials_unavailable(out: Path) -> None:
    run(out, nodes=3)
    stored = json.loads((out / "environment.json").read_text())
    assert [node["host"] for node in stored["nodes"]] == ["host-1", "host-2"]
    lacking = out.with_name("lacking")
    run(lacking, "placement.nodes=2")
    assert outcomes(lacking) == {"single": "ok", "ddp": "unavailable"}
