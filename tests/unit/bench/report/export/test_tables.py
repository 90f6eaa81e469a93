"""The tables that pandas, CSV and Parquet are made from."""

from __future__ import annotations

import math
from pathlib import Path
from typing import cast

import pandas as pd
import pytest

import shardmark
from shardmark.base.errors import InputError
from shardmark.base.metrics import METRICS
from shardmark.base.results.schema import Outcome
from shardmark.base.results.store import load_run
from shardmark.bench.report.export.tables import By, frame_of, series_of, sources_of
from tests.golden.invented import STARTED_AT_SECONDS
from tests.unit.bench.report.export.runs import (
    HOSTILE,
    exportable,
    loss_of,
    ok_trial,
    seconds_of,
    started_of,
    write_exportable,
)


@pytest.fixture
def run(tmp_path: Path) -> shardmark.Run:
    return shardmark.load(write_exportable(tmp_path / "first"))


def test_trials_have_identity_metrics_and_units(run: shardmark.Run) -> None:
    frame = run.to_pandas()
    ok, broken = frame.iloc[0], frame.iloc[1]
    assert (ok["experiment"], ok["run"], ok["strategy"]) == ("invented", "first", "ddp")
    assert ok["recipe.optimizer.lr"] == 0.01
    assert ok["samples_per_second"] == pytest.approx(800 / 1.1)
    assert ok["started_at_seconds"] == STARTED_AT_SECONDS
    assert pd.isna(ok["failure"])
    assert pd.isna(ok["mfu"])
    assert (broken["outcome"], broken["failure"]) == ("out_of_memory", HOSTILE)
    assert pd.isna(broken["recipe.optimizer.lr"])
    units = frame.attrs["units"]
    for name, metric in METRICS.items():
        if name in frame:
            assert units[name] == metric.unit


def test_a_trial_that_did_not_end_ok_has_no_number(run: shardmark.Run) -> None:
    """Although its result holds some, and raw files lie beside it."""
    (broken,) = (trial for trial in run.trials if trial.outcome is not Outcome.OK)
    assert any(broken.metrics.values())
    frame = run.to_pandas()
    metrics = [name for name in METRICS if name in frame]
    assert frame.loc[1, metrics].isna().all()
    by: By
    for by in ("epoch", "step", "sample"):
        assert set(run.to_pandas(by)["id"]) == {"ddp-w2-fp32-r0-0a1b2c3d"}
    with pytest.raises(InputError, match="found 'rank'; allowed: trial, epoch, step, sample"):
        run.to_pandas(cast("By", "rank"))


def test_epochs_count_from_one(run: shardmark.Run) -> None:
    frame = run.to_pandas("epoch")
    assert frame["epoch"].tolist() == [1, 2]
    assert frame["end_step"].tolist() == [2, 4]
    assert frame["train_loss"].tolist() == [1.625, 0.625]
    assert frame["accuracy_top1"].tolist() == [0.5, 0.75]
    assert math.isnan(frame["map"][0])
    assert frame["map"][1] == 0.25
    # The slowest rank: epochs of 4 s, and 0.25 s of evaluation between them.
    assert frame["epoch_seconds"].tolist() == [4.0, 4.0]
    assert frame["elapsed_seconds"].tolist() == [4.0, 8.0]
    assert frame["ended_at_seconds"].tolist() == [started_of(0) + 4, started_of(0) + 8.25]


def test_steps_are_those_of_the_file(run: shardmark.Run) -> None:
    frame = run.to_pandas("step")
    assert len(frame) == 8
    for row in frame.to_dict("records"):
        rank, step = row["rank"], row["step"]
        expected = loss_of(rank, step)
        assert math.isnan(row["loss"]) if expected is None else row["loss"] == expected
        assert row["step_seconds"] == seconds_of(rank, step)
        assert row["epoch"] == step // 2 + 1
        assert row["measured"] == (step > 0)
        assert row["data_seconds"] == 0
        assert math.isnan(row["backward_seconds"])
    assert frame.attrs["units"]["step_seconds"] == "seconds"


def test_samples_have_a_row_for_each_subject(run: shardmark.Run) -> None:
    frame = run.to_pandas("sample")
    assert "network" not in frame
    assert frame["rank"].dropna().tolist() == [0]
    frame = frame.set_index("subject")
    assert list(frame.index) == ["rank", "interface", "gpu", "machine"]
    assert frame.loc["rank", "rss_bytes"] == 2**33 + 1
    assert frame.loc["interface", "bytes_sent"] == 2**53 + 1, "a whole number stays whole"
    assert frame.loc["gpu", "power_watts"] == 300.5
    assert frame.loc["gpu", "gpu_uuid"] == "GPU-1"
    assert frame.loc["gpu", "clock_limits"] == 4
    assert frame.loc["machine", "cpu_seconds"] == 20.25
    assert frame.loc["machine", "cores"] == 2
    missing = frame.isna()
    assert missing.loc["gpu", "energy_joules"]
    assert missing.loc["interface", "rss_bytes"]


def test_a_recipe_of_steps_has_no_epochs(tmp_path: Path) -> None:
    resolved = ok_trial().trial
    resolved["recipe"] = {"global_batch": 64, "epochs": None, "steps": 4}
    run = shardmark.load(write_exportable(tmp_path / "run", ok_trial(trial=resolved)))
    assert len(run.to_pandas("epoch")) == 0
    assert run.to_pandas("step")["epoch"].isna().all()


def test_axes_keep_their_type(tmp_path: Path) -> None:
    values = {
        "recipe.tf32": (True, False),
        "recipe.global_batch": (64, 128),
        "recipe.optimizer.lr": (1, 0.5),
        "workload.model": ("resnet18", None),
        "workload.classes": (["cat"], 3),
        "outcome": (1, 2),
    }
    trials = [
        ok_trial(id=f"t{number}", varied={key: pair[number] for key, pair in values.items()})
        for number in (0, 1)
    ]
    frame = shardmark.load(write_exportable(tmp_path / "run", *trials)).to_pandas()
    assert frame["recipe.tf32"].tolist() == [True, False]
    assert str(frame["recipe.global_batch"].dtype) == "Int64"
    assert frame["recipe.optimizer.lr"].tolist() == [1.0, 0.5]
    assert pd.isna(frame["workload.model"][1])
    assert frame["workload.classes"].tolist() == ['["cat"]', "3"]
    assert frame["outcome"].tolist() == ["ok", "ok"]
    assert frame["varied.outcome"].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"step": 0}\n{"rank', "line 2 is no JSON"),
        (b"7\n", "line 1 is no object"),
        (b"\xff\n", "line 1 is no JSON"),
        (b'{"step": 0}\n{"rank": 0}\n', "line 2: step is missing"),
        (b'{"step": true}\n', "line 1: step is true"),
        (b'{"step": -1}\n', "line 1: step is -1"),
        (b'{"step": 1e300}\n', "line 1: step is 1e"),
        (b'{"step": 0, "loss": "low"}\n', 'line 1: loss is "low"'),
        (b'{"step": 0, "step_seconds": NaN}\n', "line 1: step_seconds is NaN"),
        (b'{"step": 0, "started_at_seconds": []}\n', "line 1: started_at_seconds is "),
    ],
)
def test_a_damaged_raw_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    run = exportable(tmp_path / "run")
    folder = tmp_path / "run" / "trials" / run.trials[0].id
    (folder / "steps.jsonl").write_bytes(content)
    (source,) = sources_of([run])
    for read in (
        lambda: frame_of([source], "step"),
        lambda: list(series_of(source, run.trials[0])),
    ):
        with pytest.raises(InputError, match=message) as caught:
            read()
        assert "steps.jsonl" in str(caught.value)
        assert f"remove {folder} and run" in str(caught.value)


def test_runs_of_one_name_have_distinct_labels(tmp_path: Path) -> None:
    runs = [exportable(tmp_path / name) for name in ("a/run", "b/run", "other")]
    labels = [source.label for source in sources_of(runs)]
    assert labels == ["a/run", "b/run", f"{tmp_path.name}/other"]
    assert [source.label for source in sources_of(runs[1:])] == ["run", "other"]
    assert frame_of(sources_of(runs), "trial")["run"].nunique() == 3


def test_a_run_without_results_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run" / "trials").mkdir(parents=True)
    with pytest.raises(InputError, match="no trial has a result"):
        sources_of([load_run(tmp_path / "run")])
