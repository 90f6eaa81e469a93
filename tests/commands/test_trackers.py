"""The same trial in every tracker, some of which start processes: settings, series, metrics."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardmark.cli import BAD_INPUT, main
from shardmark.core.errors import InputError
from shardmark.report.export import TARGETS, export_runs, trackers
from shardmark.report.export.tables import sources_of
from shardmark.report.export.trackers import tracked
from shardmark.results.schema import Failure, Outcome
from shardmark.results.store import StoredRun
from tests.unit.export.runs import (
    BROKEN,
    HOSTILE,
    OK,
    broken_trial,
    exportable,
    loss_of,
    ok_trial,
    seconds_of,
    started_of,
)
from tests.unit.export.trackers import (
    LIBRARIES,
    READERS,
    mlflow_client,
    skip_without,
    without_the_users_settings,
)

GOLDEN = sorted((Path(__file__).parents[1] / "golden").glob("v*"))
EACH = pytest.mark.parametrize("target", LIBRARIES)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    without_the_users_settings(monkeypatch)
    target = request.node.callspec.params.get("target") if hasattr(request.node, "callspec") else ""
    skip_without(target or request.node.name.split("_")[1])


@pytest.fixture
def run(tmp_path: Path) -> StoredRun:
    return exportable(tmp_path / "first")


@EACH
def test_a_trial_as_it_was(run: StoredRun, tmp_path: Path, target: str) -> None:
    out = tmp_path / "out"
    done = export_runs([run], target, str(out))
    assert (done.trials, done.kept) == (2, 0)
    held = READERS[target](out)
    assert set(held) == {OK, BROKEN}
    ok = held[OK]
    expected = {"strategy": "ddp", "world_size": "2", "recipe.optimizer.lr": "0.01"}
    expected |= {"outcome": "ok", "run": "first", "files": str(run.path / "trials" / OK)}
    assert expected.items() <= ok.settings.items()
    assert not {"recipe.steps", "failure"} & ok.settings.keys()
    (trial,) = (trial for trial in run.trials if trial.id == OK)
    values = {name: one.value for name, one in trial.metrics.items() if one is not None}
    assert ok.final == pytest.approx(values, rel=1e-6)  # 32 bits in TensorBoard
    assert ok.series["step/train_loss"] == {
        step: (first + second) / 2
        for step in range(4)
        if (first := loss_of(0, step)) is not None and (second := loss_of(1, step)) is not None
    }, "nothing where one rank's loss was not finite"
    steps = (1, 2, 3)
    assert ok.series["step/step_seconds"] == {step: seconds_of(1, step) for step in steps}, (
        "the slowest rank, without the warm-up"
    )
    assert {step: ok.times[step] for step in steps} == {
        step: started_of(step) + seconds_of(1, step) for step in steps
    }
    assert ok.series["step/data_seconds"][3] == 0
    assert "step/backward_seconds" not in ok.series
    assert ok.series["epoch/train_loss"] == {1: 1.625, 2: 0.625}
    assert ok.series["epoch/accuracy_top1"] == {1: 0.5, 2: 0.75}
    assert ok.series["epoch/map"] == {2: 0.25}
    broken = held[BROKEN]
    assert (broken.series, broken.final) == ({}, {}), "it did not end ok"
    assert broken.settings["outcome"] == "out_of_memory"
    assert (broken.settings["failure"], broken.settings["remedy"]) == (HOSTILE, "a smaller batch")


@EACH
def test_exporting_again_leaves_one_record_and_adds_what_is_new(
    tmp_path: Path, target: str
) -> None:
    out = tmp_path / "out"
    for names, added in ((["one"], 1), (["one"], 0), (["one", "two"], 1)):
        run = exportable(tmp_path / "first", *(ok_trial(id=name) for name in names))
        done = export_runs([run], target, str(out))
        total = (len(names), 0) if target == "tensorboard" else (added, len(names) - added)
        assert (done.trials, done.kept) == total
        held = READERS[target](out)
        assert set(held) == set(names)
        assert held["one"].series["epoch/map"] == {2: 0.25}


@pytest.mark.parametrize("target", ["mlflow", "wandb"])
def test_another_measurement_of_a_trial_is_another_run(tmp_path: Path, target: str) -> None:
    out = tmp_path / "out"
    for name, started_at_seconds in (("a", 1_700_000_000.0), ("b", 1_800_000_000.0)):
        run = exportable(tmp_path / name, ok_trial(started_at_seconds=started_at_seconds))
        assert export_runs([run], target, str(out)).trials == 1


def test_tensorboard_refuses_another_measurement(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    export_runs([exportable(tmp_path / "a" / "run")], "tensorboard", out)
    again = ok_trial(started_at_seconds=1_800_000_000.0)
    with pytest.raises(InputError, match="another measurement of this trial"):
        export_runs([exportable(tmp_path / "b" / "run", again, broken_trial())], "tensorboard", out)
    assert set(READERS["tensorboard"](tmp_path / "out")) == {OK, BROKEN}


def test_mlflow_writes_anew_what_an_interrupted_export_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    run, out = exportable(tmp_path / "first"), tmp_path / "out"

    def dies(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(MlflowClient, "log_batch", dies)
        with pytest.raises(KeyboardInterrupt):
            export_runs([run], "mlflow", str(out))
    done = export_runs([run], "mlflow", str(out))
    assert (done.trials, done.kept) == (2, 0)
    assert READERS["mlflow"](out)[OK].final


def test_mlflow_takes_the_users_store(
    run: StoredRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = (tmp_path / "users").as_uri()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    done = export_runs([run], "mlflow")
    assert (done.where, done.look) == (uri, f"mlflow ui --backend-store-uri {uri}")
    assert OK in READERS["mlflow"](tmp_path / "users")
    with pytest.raises(InputError, match=r"nonsense://here: MLflow says: .*; name a folder"):
        export_runs([run], "mlflow", "nonsense://here")


def test_mlflow_cuts_long_texts_and_batches_long_series(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "METRICS_PER_BATCH", 3)
    monkeypatch.setattr(trackers, "PARAMS_PER_BATCH", 2)
    long = ok_trial(id="long", outcome=Outcome.FAILED, failure=Failure(reason="x" * 20_000))
    run = exportable(tmp_path / "first", ok_trial(id="whole"), long)
    export_runs([run], "mlflow", str(tmp_path / "out"))
    held = READERS["mlflow"](tmp_path / "out")
    assert held["long"].settings["failure"] == "x" * trackers.TAG_CHARACTERS
    whole = next(trial for trial in tracked(sources_of([run])) if trial.result.id == "whole")
    assert held["whole"].final == whole.final
    assert whole.settings.keys() <= held["whole"].settings.keys()
    (stored,) = mlflow_client(tmp_path / "out").search_runs(["0"]) or [None]
    assert stored is None, "the default experiment stays empty"


def test_wandb_heeds_the_users_project_and_refuses_a_mode_that_writes_nothing(
    run: StoredRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.unit.export.wandb_file import WandbRun

    monkeypatch.setenv("WANDB_PROJECT", "mine")
    monkeypatch.setenv("WANDB_ENTITY", "us")
    export_runs([run], "wandb", str(tmp_path / "out"))
    names = [path.name for path in (tmp_path / "out").iterdir()]
    assert all(name.startswith("offline-run-") for name in names), "nothing unfinished is left"
    (folder,) = (tmp_path / "out").glob(f"offline-run-*-{OK}-*")
    stored = WandbRun(folder)
    assert (stored.run.project, stored.run.entity) == ("mine", "us")
    (metric,) = stored.metrics
    assert (metric.glob_name, metric.step_metric) == ("epoch/*", "epoch")
    monkeypatch.setenv("WANDB_MODE", "disabled")
    with pytest.raises(InputError, match="WANDB_MODE: found 'disabled'; allowed: offline, online"):
        export_runs([run], "wandb", str(tmp_path / "none"))
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("version", GOLDEN, ids=lambda path: path.name)
def test_a_stored_run_exports_to_its_usual_place(
    version: Path,
    target: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["export", str(version), "--to", target]) == 0
    assert f"{target}: 3 trials to exports/{target}\nlook: " in capsys.readouterr().out
    assert any(path.is_file() for path in (tmp_path / "exports" / target).rglob("*"))


@pytest.mark.parametrize("target", ["mlflow", "wandb"])
def test_a_place_that_cannot_be_written_is_refused(
    target: str, run: StoredRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "afile").touch()
    out = tmp_path / "afile" / "x"
    assert main(["export", str(run.path), "--to", target, "--out", str(out)]) == BAD_INPUT
    assert f"{out}: cannot be written: {out.parent} is a file" in capsys.readouterr().err
