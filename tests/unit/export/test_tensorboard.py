"""TensorBoard's event files, read back by TensorBoard's own reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardmark.core.errors import InputError
from shardmark.report.export import export_runs
from shardmark.results.store import StoredRun, load_run
from tests.golden.invented import STARTED_AT_SECONDS
from tests.unit.export.runs import (
    QUALITIES,
    broken_trial,
    exportable,
    loss_of,
    ok_trial,
    seconds_of,
    started_of,
)

accumulator = pytest.importorskip(
    "tensorboard.backend.event_processing.event_accumulator",
    reason="tensorboard is not installed",
)

OK, BROKEN = "ddp-w2-fp32-r0-0a1b2c3d", "fsdp-w2-fp32-r0-4e5f6a7b"


@pytest.fixture
def run(tmp_path: Path) -> StoredRun:
    return exportable(tmp_path / "first")


def read(folder: Path) -> Any:
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    return events


def scalars(events: Any, tag: str) -> dict[int, tuple[float, float]]:
    """Step -> time and value."""
    return {event.step: (event.wall_time, event.value) for event in events.Scalars(tag)}


def content(events: Any, tag: str) -> Any:
    from tensorboard.plugins.hparams import metadata

    parse = {
        metadata.SESSION_START_INFO_TAG: metadata.parse_session_start_info_plugin_data,
        metadata.SESSION_END_INFO_TAG: metadata.parse_session_end_info_plugin_data,
        metadata.EXPERIMENT_TAG: metadata.parse_experiment_plugin_data,
    }[tag]
    return parse(events.SummaryMetadata(tag).plugin_data.content)


def test_series_by_step_and_epoch(run: StoredRun, tmp_path: Path) -> None:
    done = export_runs([run], "tensorboard", str(tmp_path / "out"))
    assert done.trials == 2
    events = read(tmp_path / "out" / "first" / OK)
    ends = {step: started_of(step) + seconds_of(1, step) for step in range(4)}
    losses = {step: (loss_of(0, step), loss_of(1, step)) for step in range(4)}
    assert scalars(events, "step/train_loss") == {
        step: (ends[step], (first + second) / 2)
        for step, (first, second) in losses.items()
        if first is not None and second is not None
    }
    assert 2 not in scalars(events, "step/train_loss"), "a loss was not finite"
    assert scalars(events, "step/step_seconds") == {
        step: (ends[step], seconds_of(1, step)) for step in (1, 2, 3)
    }, "the slowest rank; without the warm-up"
    assert scalars(events, "step/data_seconds")[3] == (ends[3], 0.0)
    assert "step/backward_seconds" not in events.Tags()["scalars"]
    epochs = {1: started_of(1) + 4, 2: started_of(2) + 4}
    assert scalars(events, "epoch/train_loss") == {1: (epochs[1], 1.625), 2: (epochs[2], 0.625)}
    assert scalars(events, "epoch/accuracy_top1") == {
        number: (epochs[number], quality["accuracy_top1"])
        for number, quality in enumerate(QUALITIES, 1)
    }
    assert list(scalars(events, "epoch/map")) == [2]


def test_final_metrics_and_settings(run: StoredRun, tmp_path: Path) -> None:
    from tensorboard.plugins.hparams import api_pb2

    export_runs([run], "tensorboard", str(tmp_path / "out"))
    events = read(tmp_path / "out" / "first" / OK)
    found = {
        tag.removeprefix("metrics/"): scalars(events, tag)[0]
        for tag in events.Tags()["scalars"]
        if tag.startswith("metrics/")
    }
    (trial,) = (trial for trial in run.trials if trial.id == OK)
    values = {name: one.value for name, one in trial.metrics.items() if one is not None}
    assert {name: value for name, (_, value) in found.items()} == pytest.approx(values, rel=1e-6)
    assert {at_seconds for at_seconds, _ in found.values()} == {STARTED_AT_SECONDS + 21.5}
    start = content(events, "_hparams_/session_start_info")
    assert start.start_time_secs == STARTED_AT_SECONDS
    assert start.hparams["strategy"].string_value == "ddp"
    assert start.hparams["world_size"].number_value == 2
    assert start.hparams["recipe.optimizer.lr"].number_value == 0.01
    assert start.hparams["workload.model"].string_value == "resnet18"
    assert "recipe.steps" not in start.hparams
    assert content(events, "_hparams_/session_end_info").status == api_pb2.STATUS_SUCCESS


def test_a_trial_that_did_not_end_ok_has_its_outcome_alone(run: StoredRun, tmp_path: Path) -> None:
    from tensorboard.plugins.hparams import api_pb2
    from tensorboard.util import tensor_util

    export_runs([run], "tensorboard", str(tmp_path / "out"))
    events = read(tmp_path / "out" / "first" / BROKEN)
    assert events.Tags()["scalars"] == []
    start = content(events, "_hparams_/session_start_info")
    assert start.hparams["outcome"].string_value == "out_of_memory"
    assert content(events, "_hparams_/session_end_info").status == api_pb2.STATUS_FAILURE
    (text,) = events.Tensors("trial")
    lines = tensor_util.make_ndarray(text.tensor_proto).item().decode().splitlines()
    assert all(line.startswith("    ") for line in lines), "indented, so shown as it is"
    assert "    outcome: out_of_memory" in lines
    assert '    failure: <script>alert(1)</script> | `x`, "quoted" second line' in lines


def test_the_hparams_page_shows_what_differs(run: StoredRun, tmp_path: Path) -> None:
    export_runs([run], "tensorboard", str(tmp_path / "out"))
    experiment = content(read(tmp_path / "out" / "first"), "_hparams_/experiment")
    columns = {info.name: info for info in experiment.hparam_infos}
    assert set(columns) == {"strategy", "world_size", "recipe.optimizer.lr", "outcome"}
    values = [value.string_value for value in columns["strategy"].domain_discrete.values]
    assert values == ["ddp", "fsdp"]
    metrics = {info.name.tag for info in experiment.metric_infos}
    assert "metrics/samples_per_second" in metrics
    assert "metrics/mfu" not in metrics


def test_exporting_again_leaves_one_record(run: StoredRun, tmp_path: Path) -> None:
    for _ in range(2):
        export_runs([run], "tensorboard", str(tmp_path / "out"))
    assert len([*(tmp_path / "out").rglob("*tfevents*")]) == 3
    assert len(read(tmp_path / "out" / "first" / OK).Scalars("step/step_seconds")) == 3


def test_another_measurement_of_a_trial_is_not_mixed_in(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    export_runs([exportable(tmp_path / "a" / "run")], "tensorboard", out)
    again = ok_trial(started_at_seconds=1_800_000_000.0)
    later = exportable(tmp_path / "b" / "run", again, broken_trial())
    with pytest.raises(InputError, match="holds another measurement of this trial"):
        export_runs([later], "tensorboard", out)
    assert len([*(tmp_path / "out").rglob("*tfevents*")]) == 3


def test_another_run_of_the_same_name_is_not_mixed_in(tmp_path: Path) -> None:
    out = tmp_path / "out"
    export_runs([exportable(tmp_path / "a" / "run", ok_trial(id="one"))], "tensorboard", str(out))
    before = {path: path.read_bytes() for path in out.rglob("*tfevents*")}
    other = exportable(tmp_path / "b" / "run", ok_trial(id="two"))
    with pytest.raises(InputError, match="out/run: holds trials of another run, one for one; name"):
        export_runs([other], "tensorboard", str(out))
    assert {path: path.read_bytes() for path in out.rglob("*tfevents*")} == before
    export_runs([other], "tensorboard", str(tmp_path / "elsewhere"))


def test_a_run_that_grows_or_lost_a_result_is_still_the_same(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    export_runs([exportable(tmp_path / "run", ok_trial(id="one"))], "tensorboard", out)
    grown = exportable(tmp_path / "run", ok_trial(id="one"), ok_trial(id="two"))
    assert export_runs([grown], "tensorboard", out).trials == 2
    (tmp_path / "run" / "trials" / "one" / "result.json").unlink()
    assert export_runs([load_run(tmp_path / "run")], "tensorboard", out).trials == 1


def test_a_run_may_lie_inside_anothers_folder(tmp_path: Path) -> None:
    """Two of one name together are labelled `a/run`, which may be below the label of a third."""
    out = str(tmp_path / "out")
    same = [
        exportable(tmp_path / "a" / "run", ok_trial(id="one")),
        exportable(tmp_path / "b" / "run", ok_trial(id="two")),
    ]
    export_runs(same, "tensorboard", out)
    export_runs([exportable(tmp_path / "x" / "a", ok_trial(id="three"))], "tensorboard", out)
    assert (tmp_path / "out" / "a" / "three").is_dir()


def test_the_place_must_be_a_folder(run: StoredRun, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match="cannot be written"):
        export_runs([run], "tensorboard", str(tmp_path / "file"))
