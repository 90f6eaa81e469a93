"""The content of a tracker for one trial, read back by the tracker's own reader."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.unit.bench.report.export.wandb_file import WandbRun

if TYPE_CHECKING:
    from mlflow import MlflowClient

LIBRARIES = ("tensorboard", "mlflow", "wandb", "trackio")


@dataclass(frozen=True, kw_only=True)
class TrackedTrial:
    """A trial as a tracker stores it."""

    settings: Mapping[str, str]
    series: Mapping[str, Mapping[int, float]]
    """Name -> step -> value."""
    times: Mapping[int, float]
    """Step -> Unix time of `step/step_seconds`."""
    final: Mapping[str, float]


def _read_tensorboard(out: Path) -> dict[str, TrackedTrial]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import metadata

    trials = {}
    for path in out.rglob("*tfevents*"):
        name = path.parent.name.rpartition("-")[0]
        assert name not in trials, "one run a trial"
        events = EventAccumulator(str(path.parent))
        events.Reload()
        data = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
        settings = metadata.parse_session_start_info_plugin_data(data).hparams
        scalars = {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}
        series = {
            tag: {point.step: point.value for point in points} for tag, points in scalars.items()
        }
        trials[name] = TrackedTrial(
            settings={
                key: value.string_value or f"{value.number_value:g}"
                for key, value in settings.items()
            },
            series={tag: points for tag, points in series.items() if "/" in tag},
            times={point.step: point.wall_time for point in scalars.get("step/step_seconds", ())},
            final={tag: [*points.values()][-1] for tag, points in series.items() if "/" not in tag},
        )
    return trials


def mlflow_client(place: Path) -> MlflowClient:
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=place.resolve().as_uri())


def _read_mlflow(out: Path) -> dict[str, TrackedTrial]:
    client = mlflow_client(out)
    experiment = client.get_experiment_by_name("invented")
    assert experiment is not None
    trials = {}
    for run in client.search_runs([experiment.experiment_id]):
        names = [name for name in run.data.metrics if "/" in name]
        series = {name: client.get_metric_history(run.info.run_id, name) for name in names}
        name = str(run.info.run_name)
        assert name not in trials, "one run a trial"
        assert run.info.status == ("FINISHED" if run.data.params["outcome"] == "ok" else "FAILED")
        trials[name] = TrackedTrial(
            settings=run.data.params,
            series={
                name: {point.step: point.value for point in points}
                for name, points in series.items()
            },
            times={
                point.step: point.timestamp / 1000 for point in series.get("step/step_seconds", ())
            },
            final={key: value for key, value in run.data.metrics.items() if "/" not in key},
        )
    return trials


def _read_wandb(out: Path) -> dict[str, TrackedTrial]:
    trials = {}
    for folder in (out / "wandb").glob("offline-run-*"):
        stored = WandbRun(folder)
        assert (stored.run.project, stored.run.run_group) == ("shardmark", "invented")
        series: dict[str, dict[int, float]] = {}
        for row in stored.history:
            for name, value in row.items():
                if "/" in name:
                    series.setdefault(name, {})[row["_step"]] = value
        assert stored.run.display_name not in trials, "one run a trial"
        trials[stored.run.display_name] = TrackedTrial(
            settings={key: str(value) for key, value in stored.config.items()},
            series=series,
            times={row["_step"]: row["_timestamp"] for row in stored.history if row["_step"]},
            final={
                key: value
                for key, value in stored.summary.items()
                if not key.startswith("_") and "/" not in key
            },
        )
    return trials


READERS: Mapping[str, Callable[[Path], dict[str, TrackedTrial]]] = {
    "tensorboard": _read_tensorboard,
    "mlflow": _read_mlflow,
    "wandb": _read_wandb,
}


def clear_user_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call to a server meets a closed port of this machine."""
    for name in ("MLFLOW_TRACKING_URI", "WANDB_MODE", "WANDB_PROJECT", "WANDB_ENTITY", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")


def skip_without_library(target: str) -> None:
    if target in LIBRARIES and find_spec(target) is None:  # importing it may take seconds
        pytest.skip(f"{target} is not installed")
