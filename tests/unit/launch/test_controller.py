"""A whole run on an engine without processes: planned, resumed, refused, interrupted."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import yaml

from shardmark.config.load import from_mapping
from shardmark.core.errors import DataError, InputError
from shardmark.core.machine import Machine
from shardmark.launch import controller
from shardmark.launch.controller import run_experiment
from shardmark.launch.outcome import Ending
from shardmark.results.schema import Outcome
from shardmark.results.store import StoredRun, load_run
from shardmark.workloads.detection.options import DetectionOptions
from tests.unit.launch.fakes import INTERRUPTED, FakeEngine, Remembers, experiment

FAILED = Ending(how="exited", agent_exit_code=1, failures=(), oom_kills=0)
TIMED_OUT = Ending(how="timed_out", agent_exit_code=-9, failures=(), oom_kills=0)
KINDS = {"failed": FAILED, "timed_out": TIMED_OUT, "interrupted": INTERRUPTED}


@pytest.fixture(autouse=True)
def _no_look_at_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks git and watches other processes for a while."""
    monkeypatch.setattr(controller, "environment", lambda: {"host": "here"})


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "run"


def outcomes(out: Path) -> dict[str, str]:
    return {trial.strategy: str(trial.outcome) for trial in load_run(out, verify=True).trials}


def test_every_trial_is_run_and_told(out: Path) -> None:
    engine, told = FakeEngine(), Remembers()
    assert run_experiment(experiment(), out, progress=told, engine=engine) == out
    assert engine.calls[:2] == ["machine cpu", "load cpu"]
    assert engine.calls[-1] == "close"
    assert engine.names == ["ddp", "single"]
    assert outcomes(out) == {"single": "ok", "ddp": "ok"}
    assert told.plans == [(2, 0, 0)]
    assert [(number, total) for number, total, _ in told.started] == [(1, 2), (2, 2)]
    assert told.ended == [(1, 2, "ok"), (2, 2, "ok")]
    assert told.notes == []
    stored = yaml.safe_load((out / "experiment.yaml").read_text())
    assert from_mapping(stored) == experiment()
    assert (out / "environment.json").exists()


def test_only_modules_of_planned_strategies_are_loaded(out: Path) -> None:
    engine = FakeEngine()
    run_experiment(experiment("matrix.strategy=[ddp, fsdp, fsdp-grad-op]"), out, engine=engine)
    assert sorted(engine.loaded) == ["torch.distributed.fsdp", "torch.nn.parallel"]


def test_modules_of_the_workload_are_loaded(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, before the first trial: each rank would import torchvision's detectors anew."""
    monkeypatch.setattr(DetectionOptions, "check_data", lambda _: None)
    engine = FakeEngine()
    run_experiment(experiment("workload={name: detection}"), out, engine=engine)
    assert engine.loaded.count("shardmark.workloads.detection.task") == 1


def test_finished_trials_are_kept(out: Path) -> None:
    run_experiment(experiment(), out, engine=FakeEngine())
    engine, told = FakeEngine(), Remembers()
    run_experiment(experiment(), out, progress=told, engine=engine)
    assert engine.calls == ["machine cpu", "close"], "nothing is loaded, nothing run"
    assert told.plans == [(2, 2, 0)]


def test_more_of_the_matrix_runs_only_what_is_new(out: Path) -> None:
    run_experiment(experiment(), out, engine=FakeEngine())
    engine, told = FakeEngine(), Remembers()
    more = experiment("matrix.strategy=[single, ddp, fsdp]", "limits.trial_seconds=5")
    run_experiment(more, out, progress=told, engine=engine)
    assert engine.names == ["fsdp"]
    assert told.plans == [(3, 2, 0)]
    assert set(outcomes(out)) == {"single", "ddp", "fsdp"}


def test_more_repeats_run_only_the_new_ones(out: Path) -> None:
    run_experiment(experiment(), out, engine=FakeEngine())
    engine = FakeEngine()
    run_experiment(experiment("measure.repeats=2"), out, engine=engine)
    assert [trial.repeat for trial in engine.ran] == [1, 1]


@pytest.mark.parametrize("kind", ["failed", "timed_out"])
def test_failures_are_results_unless_they_are_to_be_repeated(out: Path, kind: str) -> None:
    run_experiment(experiment(), out, engine=FakeEngine({"ddp": KINDS[kind]}))
    assert outcomes(out) == {"single": "ok", "ddp": kind}
    engine = FakeEngine()
    run_experiment(experiment(), out, engine=engine)
    assert engine.names == []
    run_experiment(experiment(), out, engine=engine, retry=True)
    assert engine.names == ["ddp"]
    assert outcomes(out) == {"single": "ok", "ddp": "ok"}


def test_interrupt_is_stored_and_told_and_finished_later(out: Path) -> None:
    engine = FakeEngine({"single": INTERRUPTED, "ddp": INTERRUPTED})
    with pytest.raises(KeyboardInterrupt):
        run_experiment(experiment(), out, engine=engine)
    assert len(engine.ran) == 1, "the next trial is not begun"
    assert engine.calls[-1] == "close"
    (first,) = load_run(out).trials
    assert first.outcome is Outcome.INTERRUPTED
    engine = FakeEngine()
    run_experiment(experiment(), out, engine=engine)
    assert engine.names == ["ddp", "single"]
    assert set(outcomes(out).values()) == {"ok"}


def test_engine_is_closed_whatever_happens(out: Path) -> None:
    engine = FakeEngine({"single": OSError("gone"), "ddp": OSError("gone")})
    with pytest.raises(OSError, match="gone"):
        run_experiment(experiment(), out, engine=engine)
    assert engine.calls[-1] == "close"


def test_unavailable_is_stored_and_asked_again(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    asked = experiment("matrix.strategy=[zero-1, ddp]")
    engine, told = FakeEngine(), Remembers()
    run_experiment(asked, out, progress=told, engine=engine)
    assert engine.names == ["ddp"]
    stored = {trial.strategy: trial for trial in load_run(out).trials}["zero-1"]
    assert stored.outcome is Outcome.UNAVAILABLE
    assert stored.failure is not None
    assert stored.failure.reason == "DeepSpeed is not installed"
    assert stored.failure.remedy == "pip install deepspeed"
    assert (stored.metrics, stored.ranks) == ({}, ())
    monkeypatch.undo()
    monkeypatch.setattr(controller, "environment", lambda: {"host": "here"})
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    monkeypatch.setattr(shutil, "which", lambda name, path=None: f"/bin/{name}")  # noqa: ARG005
    engine = FakeEngine()
    run_experiment(asked, out, engine=engine)
    assert engine.names == ["zero-1"]


def damage(out: Path, run: StoredRun, strategy: str, file: str) -> None:
    (folder,) = (out / "trials" / trial.id for trial in run.trials if trial.strategy == strategy)
    content = (folder / file).read_bytes()
    (folder / file).write_bytes(content[: len(content) // 2])


@pytest.mark.parametrize("file", ["result.json", "steps.jsonl", "log.txt"])
def test_half_a_file_is_told_and_measured_again(out: Path, file: str) -> None:
    run_experiment(experiment(), out, engine=FakeEngine())
    damage(out, load_run(out), "ddp", file)
    engine, told = FakeEngine(), Remembers()
    run_experiment(experiment(), out, progress=told, engine=engine)
    assert engine.names == ["ddp"]
    assert told.plans == [(2, 1, 0)]
    (note,) = told.notes
    assert note.endswith(": it is measured again")
    assert file in note
    assert outcomes(out) == {"single": "ok", "ddp": "ok"}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("recipe.steps=5", "holds a run with recipe.steps = 4, here it is 5"),
        ("recipe.optimizer.lr=0.5", "recipe.optimizer.lr = 0.01, here it is 0.5"),
        ("workload.model=resnet50", "workload.model = 'resnet18', here it is 'resnet50'"),
        ("measure.warmup_steps=2", "measure.warmup_steps = 1, here it is 2"),
        ("name=other", "name = 'faked', here it is 'other'"),
        ("recipe.tf32=true", "recipe.tf32 = False, here it is True"),
        (
            "workload.model_options={width_per_group: 32}",
            "workload.model_options",
        ),
    ],
)
def test_folder_of_another_experiment_is_refused(out: Path, override: str, message: str) -> None:
    run_experiment(experiment(), out, engine=FakeEngine())
    engine = FakeEngine()
    with pytest.raises(InputError) as caught:
        run_experiment(experiment(override), out, engine=engine)
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{out}: ")
    assert str(caught.value).endswith("name another --out")
    assert engine.calls == []


def test_data_are_checked_before_anything_is_made(out: Path, tmp_path: Path) -> None:
    engine = FakeEngine()
    asked = experiment("workload.dataset=imagefolder", f"workload.data_dir={tmp_path / 'nowhere'}")
    with pytest.raises((DataError, InputError), match="nowhere"):
        run_experiment(asked, out, engine=engine)
    assert engine.calls == []
    assert not out.exists()


def test_data_of_every_cell_are_checked_before_any_trial(out: Path, tmp_path: Path) -> None:
    engine = FakeEngine()
    asked = experiment(
        "matrix.workload.dataset=[digits, imagefolder]",
        f"workload.data_dir={tmp_path / 'nowhere'}",
    )
    with pytest.raises((DataError, InputError), match="nowhere"):
        run_experiment(asked, out, engine=engine)
    assert engine.calls == []


def test_batch_that_cannot_be_shared_is_told_before_any_trial(out: Path) -> None:
    engine = FakeEngine()
    with pytest.raises(InputError, match="cannot be shared equally"):
        run_experiment(experiment("recipe.global_batch=7"), out, engine=engine)
    assert engine.calls == []


def test_cells_without_sense_are_told(out: Path) -> None:
    told = Remembers()
    asked = experiment("matrix.world_size=[1, 2]")
    run_experiment(asked, out, progress=told, engine=FakeEngine())
    assert told.plans == [(2, 0, 2)]


def test_device_of_the_machine_is_the_trials(out: Path) -> None:
    gpus = Machine(device_type="cuda", device_count=2, cores=2)
    engine = FakeEngine(machine=gpus)
    run_experiment(experiment("device=auto"), out, engine=engine)
    assert {trial.device_type for trial in engine.ran} == {"cuda"}
    assert engine.calls[1] == "load cuda"


def test_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    engine = FakeEngine()
    with pytest.raises(InputError, match="holds other files and no run"):
        run_experiment(experiment(), tmp_path, engine=engine)
    assert engine.calls == []


def test_nodes_are_in_the_environment(out: Path) -> None:
    engine = FakeEngine()
    engine.nodes = 3
    run_experiment(experiment(), out, engine=engine)
    stored = json.loads((out / "environment.json").read_text())
    assert [node["host"] for node in stored["nodes"]] == ["host-1", "host-2"]


def test_nodes_and_engine_may_change_between_commands(out: Path) -> None:
    run_experiment(experiment(), out, engine=FakeEngine())
    engine = FakeEngine()
    engine.nodes = 2
    more = experiment("matrix.nodes=[1, 2]", "matrix.world_size=[2]", "engine.name=torchrun")
    run_experiment(more, out, engine=engine)
    assert [(trial.strategy.name, trial.nodes) for trial in engine.ran] == [("ddp", 2)]


def test_nodes_that_are_not_there_are_unavailable(out: Path) -> None:
    engine = FakeEngine()
    run_experiment(experiment("placement.nodes=2"), out, engine=engine)
    assert outcomes(out) == {"single": "ok", "ddp": "unavailable"}
