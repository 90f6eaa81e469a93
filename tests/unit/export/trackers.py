"""What a tracker holds of one trial, read back by the tracker's own reader."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.unit.export.wandb_file import WandbRun

if TYPE_CHECKING:
    from mlflow import MlflowClient

LIBRARIES = ("tensorboard", "mlflow", "wandb", "trackio")


@dataclass(frozen=True, kw_only=True)
class Held:
    """One trial."""

    settings: Mapping[str, str]
    series: Mapping[str, Mapping[int, float]]
    """Name -> step -> value."""
    times: Mapping[int, float]
    """Step -> Unix time of `step/step_seconds`."""
    final: Mapping[str, float]


def _tensorboard(out: Path) -> dict[str, Held]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import metadata

    held = {}
    for path in out.rglob("*tfevents*"):
        name = path.parent.name.rpartition("-")[0]
        assert name not in held, "one run a trial"
        events = EventAccumulator(str(path.parent))
        events.Reload()
        data = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
        settings = metadata.parse_session_start_info_plugin_data(data).hparams
        scalars = {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}
        series = {tag: {one.step: one.value for one in each} for tag, each in scalars.items()}
        held[name] = Held(
            settings={
                key: value.string_value or f"{value.number_value:g}"
                for key, value in settings.items()
            },
            series={tag: each for tag, each in series.items() if "/" in tag},
            times={one.step: one.wall_time for one in scalars.get("step/step_seconds", ())},
            final={tag: [*each.values()][-1] for tag, each in series.items() if "/" not in tag},
        )
    return held


def mlflow_client(place: Path) -> MlflowClient:
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=place.resolve().as_uri())


def _mlflow(out: Path) -> dict[str, Held]:
    client = mlflow_client(out)
    experiment = client.get_experiment_by_name("invented")
    assert experiment is not None
    held = {}
    for run in client.search_runs([experiment.experiment_id]):
        names = [name for name in run.data.metrics if "/" in name]
        series = {name: client.get_metric_history(run.info.run_id, name) for name in names}
        name = str(run.info.run_name)
        assert name not in held, "one run a trial"
        assert run.info.status == ("FINISHED" if run.data.params["outcome"] == "ok" else "FAILED")
        held[name] = Held(
            settings=run.data.params,
            series={name: {one.step: one.value for one in each} for name, each in series.items()},
            times={one.step: one.timestamp / 1000 for one in series.get("step/step_seconds", ())},
            final={key: value for key, value in run.data.metrics.items() if "/" not in key},
        )
    return held


def _wandb(out: Path) -> dict[str, Held]:
    held = {}
    for folder in (out / "wandb").glob("offline-run-*"):
        found = WandbRun(folder)
        assert (found.run.project, found.run.run_group) == ("shardmark", "invented")
        series: dict[str, dict[int, float]] = {}
        for row in found.history:
            for name, value in row.items():
                if "/" in name:
                    series.setdefault(name, {})[row["_step"]] = value
        assert found.run.display_name not in held, "one run a trial"
        held[found.run.display_name] = Held(
            settings={key: str(value) for key, value in found.config.items()},
            series=series,
            times={row["_step"]: row["_timestamp"] for row in found.history if row["_step"]},
            final={
                key: value
                for key, value in found.summary.items()
                if not key.startswith("_") and "/" not in key
            },
        )
    return held


READERS: Mapping[str, Callable[[Path], dict[str, Held]]] = {
    "tensorboard": _tensorboard,
    "mlflow": _mlflow,
    "wandb": _wandb,
}


def without_the_users_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever calls a server meets a closed door of this machine."""
    for name in ("MLFLOW_TRACKING_URI", "WANDB_MODE", "WANDB_PROJECT", "WANDB_ENTITY", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")


def skip_without(target: str) -> None:
    if target in LIBRARIES and find_spec(target) is None:  # importing it may take seconds
        pytest.skip(f"{target} is not installed")
