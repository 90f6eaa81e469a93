"""MLflow's store, read back by MLflow's own client."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from shardmark.core.errors import InputError
from shardmark.report.export import export_runs
from shardmark.report.export.source import measurement_id
from shardmark.results.store import StoredRun
from tests.golden.invented import STARTED_AT_SECONDS
from tests.unit.export.runs import HOSTILE, exportable, loss_of, ok_trial, seconds_of, started_of

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

OK, BROKEN = "ddp-w2-fp32-r0-0a1b2c3d", "fsdp-w2-fp32-r0-4e5f6a7b"


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No phoning home, folders allowed, no store of the user's."""
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    # The reader's bar would leave a thread.
    monkeypatch.setenv("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    pytest.importorskip("mlflow", reason="mlflow-skinny is not installed")


@pytest.fixture
def run(tmp_path: Path) -> StoredRun:
    return exportable(tmp_path / "first")


def client_of(place: Path) -> MlflowClient:
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=place.resolve().as_uri())


def runs_in(place: Path) -> dict[str, Run]:
    """By name, the parents' too."""
    client = client_of(place)
    experiment = client.get_experiment_by_name("invented")
    assert experiment is not None
    found = list(client.search_runs([experiment.experiment_id]))
    named = {str(run.info.run_name): run for run in found}
    assert len(named) == len(found)
    return named


def history(place: Path, run: Run, name: str) -> dict[int, tuple[float, float]]:
    """Step -> time in seconds and value."""
    found = client_of(place).get_metric_history(run.info.run_id, name)
    return {one.step: (one.timestamp / 1000, one.value) for one in found}


def test_one_run_a_trial_below_one_parent(run: StoredRun, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = export_runs([run], "mlflow", str(out))
    assert (done.trials, done.kept) == (2, 0)
    found = runs_in(out)
    assert set(found) == {"first", OK, BROKEN}
    parent = found["first"].info.run_id
    for name in (OK, BROKEN):
        assert found[name].data.tags["mlflow.parentRunId"] == parent
    artifacts = client_of(out).list_artifacts(parent)
    assert [one.path for one in artifacts] == ["environment.json", "experiment.yaml"]
    stored = Path(client_of(out).download_artifacts(parent, "experiment.yaml", str(tmp_path)))
    assert stored.read_text() == (run.path / "experiment.yaml").read_text()


def test_params_tags_and_times(run: StoredRun, tmp_path: Path) -> None:
    export_runs([run], "mlflow", str(tmp_path / "out"))
    found = runs_in(tmp_path / "out")[OK]
    params = found.data.params
    assert (params["strategy"], params["world_size"]) == ("ddp", "2")
    assert params["recipe.optimizer.lr"] == "0.01"
    assert params["recipe.global_batch"] == "64"
    assert "recipe.steps" not in params
    tags = found.data.tags
    assert (tags["shardmark.outcome"], tags["shardmark.run"]) == ("ok", "first")
    assert "shardmark.failure" not in tags
    assert found.info.status == "FINISHED"
    assert found.info.start_time == 1000 * STARTED_AT_SECONDS
    assert found.info.end_time == 1000 * (STARTED_AT_SECONDS + 21.5)


def test_metrics_with_steps(run: StoredRun, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export_runs([run], "mlflow", str(out))
    found = runs_in(out)[OK]
    (trial,) = (trial for trial in run.trials if trial.id == OK)
    values = {name: one.value for name, one in trial.metrics.items() if one is not None}
    final = {key: value for key, value in found.data.metrics.items() if "/" not in key}
    assert final == values
    steps = history(out, found, "step/train_loss")
    assert set(steps) == {0, 1, 3}
    for step, (at_seconds, loss) in steps.items():
        losses = [loss_of(rank, step) for rank in (0, 1)]
        assert loss == sum(one for one in losses if one is not None) / 2
        assert at_seconds == started_of(step) + seconds_of(1, step)
    assert set(history(out, found, "step/step_seconds")) == {1, 2, 3}
    ended = started_of(2) + 4
    assert history(out, found, "epoch/accuracy_top1")[2] == (ended, 0.75)
    assert history(out, found, "epoch/map") == {2: (ended, 0.25)}


def test_a_trial_that_did_not_end_ok(run: StoredRun, tmp_path: Path) -> None:
    export_runs([run], "mlflow", str(tmp_path / "out"))
    found = runs_in(tmp_path / "out")[BROKEN]
    assert found.data.metrics == {}
    assert found.info.status == "FAILED"
    assert found.data.tags["shardmark.outcome"] == "out_of_memory"
    assert found.data.tags["shardmark.failure"] == HOSTILE
    assert found.data.tags["shardmark.remedy"] == "a smaller batch"


def test_exporting_again_adds_what_is_new(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for trials, expected in (
        ([ok_trial(id="one")], (1, 0)),
        ([ok_trial(id="one")], (0, 1)),
        ([ok_trial(id="one"), ok_trial(id="two")], (1, 1)),
    ):
        run = exportable(tmp_path / "first", *trials)
        done = export_runs([run], "mlflow", str(out))
        assert (done.trials, done.kept) == expected
    found = runs_in(out)
    assert set(found) == {"first", "one", "two"}, "and one parent"
    parents = {found[name].data.tags["mlflow.parentRunId"] for name in ("one", "two")}
    assert parents == {found["first"].info.run_id}
    assert len(client_of(out).get_metric_history(found["one"].info.run_id, "epoch/map")) == 1


def test_the_same_trial_of_another_run_is_another_run(tmp_path: Path) -> None:
    out = tmp_path / "out"
    export_runs([exportable(tmp_path / "a", ok_trial())], "mlflow", str(out))
    later = exportable(tmp_path / "b", ok_trial(started_at_seconds=1_800_000_000.0))
    assert export_runs([later], "mlflow", str(out)).trials == 1
    client = client_of(out)
    experiment = client.get_experiment_by_name("invented")
    assert experiment is not None
    assert len(client.search_runs([experiment.experiment_id])) == 4


def test_what_an_interrupted_export_left_is_written_anew(tmp_path: Path) -> None:
    out = tmp_path / "out"
    client = client_of(out)
    experiment = client.create_experiment("invented")
    parent = client.create_run(experiment, run_name="first")
    tags = {
        "shardmark.measurement": measurement_id(ok_trial()),
        "mlflow.parentRunId": parent.info.run_id,
    }
    half = client.create_run(experiment, tags=tags, run_name="half")
    done = export_runs([exportable(tmp_path / "first", ok_trial())], "mlflow", str(out))
    assert (done.trials, done.kept) == (1, 0)
    found = runs_in(out)
    assert set(found) == {"first", OK}
    assert found[OK].data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert client.get_run(half.info.run_id).info.lifecycle_stage == "deleted"
    assert found["first"].info.status == "FINISHED"


@pytest.mark.parametrize("dies_in", ["log_artifact", "set_terminated", "log_batch"])
def test_an_export_that_died_is_taken_up_below_the_same_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_in: str
) -> None:
    """Before the parent is finished, and while the first trial is written."""
    from mlflow import MlflowClient

    run, out = exportable(tmp_path / "first"), tmp_path / "out"

    def dies(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(MlflowClient, dies_in, dies)
        with pytest.raises(KeyboardInterrupt):
            export_runs([run], "mlflow", str(out))
    (before,) = (one for name, one in runs_in(out).items() if name == "first")
    assert export_runs([run], "mlflow", str(out)).trials == 2
    found = runs_in(out)  # which has one of each name alone
    assert set(found) == {"first", OK, BROKEN}
    assert found["first"].info.run_id == before.info.run_id
    assert found["first"].info.status == "FINISHED"
    assert found["first"].info.end_time == 1000 * (STARTED_AT_SECONDS + 21.5)
    artifacts = client_of(out).list_artifacts(before.info.run_id)
    assert [one.path for one in artifacts] == ["environment.json", "experiment.yaml"]
    for name in (OK, BROKEN):
        assert found[name].data.tags["mlflow.parentRunId"] == before.info.run_id


def test_a_deleted_parent_is_made_anew(tmp_path: Path) -> None:
    out = tmp_path / "out"
    export_runs([exportable(tmp_path / "first", ok_trial(id="one"))], "mlflow", str(out))
    gone = runs_in(out)["first"].info.run_id
    client_of(out).delete_run(gone)
    grown = exportable(tmp_path / "first", ok_trial(id="one"), ok_trial(id="two"))
    assert export_runs([grown], "mlflow", str(out)).trials == 1
    found = runs_in(out)
    assert found["first"].info.run_id != gone
    assert found["two"].data.tags["mlflow.parentRunId"] == found["first"].info.run_id


def test_the_users_store_is_the_usual_one(
    run: StoredRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = (tmp_path / "users").as_uri()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    done = export_runs([run], "mlflow")
    assert (done.where, done.look) == (uri, f"mlflow ui --backend-store-uri {uri}")
    assert OK in runs_in(tmp_path / "users")


def test_the_place_must_fit(run: StoredRun, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match="is a file; name a folder, or a tracking URI"):
        export_runs([run], "mlflow", str(tmp_path / "file"))
    with pytest.raises(InputError, match=r"nonsense://here: MLflow says: .*; name a folder"):
        export_runs([run], "mlflow", "nonsense://here")


def test_long_texts_are_cut_and_long_series_are_not(tmp_path: Path) -> None:
    """More metrics than MLflow takes at once, and tags longer than it keeps."""
    from shardmark.report.export import mlflow as target
    from shardmark.results.schema import Failure, Outcome

    failure = Failure(reason="x" * 20_000)
    long = ok_trial(id="long", outcome=Outcome.FAILED, failure=failure)
    run = exportable(tmp_path / "first", long)
    export_runs([run], "mlflow", str(tmp_path / "out"))
    tag = runs_in(tmp_path / "out")["long"].data.tags["shardmark.failure"]
    assert tag == "x" * target.TAG_CHARACTERS
    parts = [[*part] for part in target._parts(range(2500), 1000)]
    assert [len(part) for part in parts] == [1000, 1000, 500]
    assert [one for part in parts for one in part] == [*range(2500)]
