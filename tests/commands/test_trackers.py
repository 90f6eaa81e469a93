"""The same trial in every tracker, some of which start processes: settings, series, metrics."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from shardmark.base.errors import InputError
from shardmark.base.results.store import StoredRun
from shardmark.base.text import counted
from shardmark.bench.report.export import trackers
from shardmark.bench.report.export.tables import series_of
from shardmark.bench.report.export.trackers import TRACKERS, export_runs
from shardmark.cli import BAD_INPUT, main
from tests.unit.bench.report.export.runs import (
    BROKEN,
    HOSTILE,
    OK,
    exportable,
    loss_of,
    ok_trial,
    seconds_of,
    started_of,
)
from tests.unit.bench.report.export.trackers import (
    READERS,
    clear_user_settings,
    skip_without_library,
)

GOLDEN = sorted((Path(__file__).parents[1] / "golden").glob("v*"))
EACH = pytest.mark.parametrize("target", READERS)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    clear_user_settings(monkeypatch)
    target = request.node.callspec.params.get("target") if hasattr(request.node, "callspec") else ""
    skip_without_library(target or request.node.name.split("_")[1])


def told(target: str, place: object, added: int, existing: int) -> str:
    """The first line of an export."""
    rest = f"; {existing} exist there and are not changed" if existing else ""
    return f"{target}: {counted(added, 'trial')} to {place}{rest}"


@pytest.fixture
def run(tmp_path: Path) -> StoredRun:
    return exportable(tmp_path / "first")


@EACH
def test_trackers_hold_settings_series_and_metrics(
    run: StoredRun, tmp_path: Path, target: str
) -> None:
    out = tmp_path / "out"
    done = export_runs([run], target, str(out))
    assert done[0] == told(target, out, 2, 0)
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
    assert ok.series["epoch/train_loss"] == {1: 1.625, 3: 0.625}
    assert ok.series["epoch/accuracy_top1"] == {1: 0.5, 3: 0.75}
    assert ok.series["epoch/map"] == {3: 0.25}
    broken = held[BROKEN]
    assert (broken.series, broken.final) == ({}, {}), "it did not end ok"
    assert broken.settings["outcome"] == "out_of_memory"
    assert (broken.settings["failure"], broken.settings["remedy"]) == (HOSTILE, "a smaller batch")


@EACH
def test_exporting_again_adds_only_new_trials(tmp_path: Path, target: str) -> None:
    out = tmp_path / "out"
    for names, added in ((["one"], 1), (["one"], 0), (["one", "two"], 1)):
        run = exportable(tmp_path / "first", *(ok_trial(id=name) for name in names))
        done = export_runs([run], target, str(out))
        assert done[0] == told(target, out, added, len(names) - added)
        held = READERS[target](out)
        assert set(held) == set(names)
        assert held["one"].series["epoch/map"] == {3: 0.25}


@EACH
def test_another_measurement_of_a_trial_is_another_run(tmp_path: Path, target: str) -> None:
    out = tmp_path / "out"
    for name, started_at_seconds in (("a", 1_700_000_000.0), ("b", 1_800_000_000.0)):
        run = exportable(tmp_path / name, ok_trial(started_at_seconds=started_at_seconds))
        assert export_runs([run], target, str(out))[0] == told(target, out, 1, 0)


@EACH
def test_exporting_again_replaces_an_interrupted_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    run, out = exportable(tmp_path / "first"), tmp_path / "out"

    def stopped(*arguments: Any) -> Iterator[tuple[int, dict[str, float]]]:
        yield from islice(series_of(*arguments), 2)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(trackers, "series_of", stopped)
        with pytest.raises(KeyboardInterrupt):
            export_runs([run], target, str(out))
    for existing in (0, 2):
        done = export_runs([run], target, str(out))
        assert done[0] == told(target, out, 2 - existing, existing)
        held = READERS[target](out)
        assert set(held) == {OK, BROKEN}
        assert held[OK].final


def test_mlflow_uses_the_tracking_uri_of_the_environment(
    run: StoredRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = (tmp_path / "users").as_uri()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    done = export_runs([run], "mlflow")
    assert done[0] == told("mlflow", uri, 2, 0)
    assert OK in READERS["mlflow"](tmp_path / "users")
    with pytest.raises(InputError, match=r"nonsense://here: mlflow says: .*; name another place"):
        export_runs([run], "mlflow", "nonsense://here")


def test_wandb_heeds_the_users_project_and_refuses_a_mode_that_writes_nothing(
    run: StoredRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.unit.bench.report.export.wandb_file import WandbRun

    monkeypatch.setenv("WANDB_PROJECT", "mine")
    monkeypatch.setenv("WANDB_ENTITY", "us")
    export_runs([run], "wandb", str(tmp_path / "out"))
    (folder,) = (tmp_path / "out" / "wandb").glob(f"offline-run-*-{OK}-*")
    stored = WandbRun(folder)
    assert (stored.run.project, stored.run.entity) == ("mine", "us")
    monkeypatch.setenv("WANDB_MODE", "disabled")
    with pytest.raises(InputError, match="WANDB_MODE: found 'disabled'; allowed: offline, online"):
        export_runs([run], "wandb", str(tmp_path / "none"))
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("target", ["csv", *TRACKERS])
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
