"""Weights & Biases offline: what its service wrote, read with its own record classes."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardmark.core.errors import InputError
from shardmark.report.export import export_runs
from shardmark.results.store import StoredRun
from tests.unit.export.runs import (
    HOSTILE,
    exportable,
    loss_of,
    ok_trial,
    seconds_of,
    started_of,
)
from tests.unit.export.wandb_file import WandbRun

pytest.importorskip("wandb", reason="wandb is not installed")

OK, BROKEN = "ddp-w2-fp32-r0-0a1b2c3d", "fsdp-w2-fp32-r0-4e5f6a7b"


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of the user's settings; whoever calls a server meets a closed door of this machine."""
    for name in ("WANDB_MODE", "WANDB_PROJECT", "WANDB_ENTITY", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:1")


@pytest.fixture
def run(tmp_path: Path) -> StoredRun:
    return exportable(tmp_path / "first")


def read(out: Path, trial: str) -> WandbRun:
    (folder,) = out.glob(f"offline-run-*-{trial}-*")
    return WandbRun(folder)


def test_a_run_a_trial_with_settings_and_series(run: StoredRun, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = export_runs([run], "wandb", str(out))
    assert (done.trials, done.kept) == (2, 0)
    found = read(out, OK)
    assert (found.run.project, found.run.run_group) == ("shardmark", "invented")
    assert (found.run.display_name, found.run.job_type) == (OK, "ddp")
    assert {*found.run.tags} == {"ddp", "ok"}
    assert found.exit_code == 0
    config = found.config
    assert (config["world_size"], config["recipe.optimizer.lr"]) == (2, 0.01)
    assert (config["run"], config["outcome"]) == ("first", "ok")
    assert "recipe.steps" not in config
    (metric,) = found.metrics
    assert (metric.glob_name, metric.step_metric) == ("epoch/*", "epoch")
    by_step = {row["_step"]: row for row in found.history}
    assert [*by_step] == [0, 1, 2, 3]
    for step, row in by_step.items():
        losses = [loss_of(rank, step) for rank in (0, 1)]
        known = [loss for loss in losses if loss is not None]
        expected = sum(known) / 2 if len(known) == 2 else None
        assert row.get("step/train_loss") == expected
        assert row.get("step/step_seconds") == (seconds_of(1, step) if step else None)
        assert row["_timestamp"] == started_of(step) + seconds_of(1, step)
        assert "step/backward_seconds" not in row
    assert (by_step[1]["epoch"], by_step[1]["epoch/accuracy_top1"]) == (1, 0.5)
    assert (by_step[3]["epoch"], by_step[3]["epoch/accuracy_top1"]) == (2, 0.75)
    assert "epoch/map" not in by_step[1]
    assert by_step[3]["epoch/map"] == 0.25
    assert "epoch" not in by_step[2]


def test_final_metrics_are_the_summary(run: StoredRun, tmp_path: Path) -> None:
    export_runs([run], "wandb", str(tmp_path / "out"))
    found = read(tmp_path / "out", OK).summary
    (trial,) = (trial for trial in run.trials if trial.id == OK)
    for name, one in trial.metrics.items():
        assert found.get(name) == (None if one is None else one.value), name


def test_a_trial_that_did_not_end_ok(run: StoredRun, tmp_path: Path) -> None:
    export_runs([run], "wandb", str(tmp_path / "out"))
    found = read(tmp_path / "out", BROKEN)
    assert found.history == []
    assert {key for key in found.summary if not key.startswith("_")} == {"outcome"}
    assert found.summary["outcome"] == "out_of_memory"
    assert found.config["failure"] == HOSTILE
    assert found.exit_code == 1


def test_exporting_again_keeps_what_is_there(tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = exportable(tmp_path / "first", ok_trial(id="one"))
    assert export_runs([first], "wandb", str(out)).trials == 1
    before = sorted(path.name for path in out.iterdir())
    more = exportable(tmp_path / "first", ok_trial(id="one"), ok_trial(id="two"))
    done = export_runs([more], "wandb", str(out))
    assert (done.trials, done.kept) == (1, 1)
    after = sorted(path.name for path in out.iterdir())
    assert len(after) == 2
    assert {*before} < {*after}, "nothing of an unfinished export is left beside them"


def test_the_users_project_is_heeded(
    run: StoredRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    monkeypatch.setenv("WANDB_ENTITY", "us")
    export_runs([run], "wandb", str(tmp_path / "out"))
    found = read(tmp_path / "out", OK).run
    assert (found.project, found.entity) == ("mine", "us")


def test_a_mode_that_writes_nothing_is_refused(
    run: StoredRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    with pytest.raises(InputError, match="WANDB_MODE: found 'disabled'; allowed: offline, online"):
        export_runs([run], "wandb", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_the_place_must_be_a_folder(run: StoredRun, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match="is a file; name a folder"):
        export_runs([run], "wandb", str(tmp_path / "file"))
    with pytest.raises(InputError, match=r"cannot be written: .*/file is a file"):
        export_runs([run], "wandb", str(tmp_path / "file" / "below"))
