"""Export of finished trials to experiment trackers, one tracked run for each trial."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from shlex import quote
from typing import Any, Protocol

from shardmark.base.errors import InputError
from shardmark.base.files.storage import storage_error
from shardmark.base.results.files import write_files
from shardmark.base.system.extras import require
from shardmark.bench.analysis.compare.rows import plain
from shardmark.bench.report.export.tables import (
    ExportSummary,
    Record,
    Source,
    series_of,
    settings_of,
)

DEFAULTS = {
    "MLFLOW_ALLOW_FILE_STORE": "true",  # MLflow refuses folders otherwise
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",  # the default of 7 takes minutes
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
}
"""Environment variables that are set unless the user has set them."""
PLACES = {"mlflow": "MLFLOW_TRACKING_URI", "wandb": "WANDB_DIR", "trackio": "TRACKIO_DIR"}
"""Tracker -> variable that names its usual place."""


class TrackedRun(Protocol):
    """A run of a tracker, with the two methods of a run of Weights & Biases."""

    def log(self, data: dict[str, float], step: int) -> None:
        """Store values by series; `_timestamp` is their Unix time in seconds."""

    def finish(self) -> None: ...


@dataclass(frozen=True, slots=True)
class MarkedRun:
    """A run of a tracker that does not tell finished from interrupted runs by itself."""

    run: TrackedRun
    mark_finished: Callable[[], None]

    def log(self, data: dict[str, float], step: int) -> None:
        self.run.log(data, step=step)

    def finish(self) -> None:
        self.run.finish()
        self.mark_finished()


def export_trials(tracker: str, sources: Sequence[Source], out: str | None) -> ExportSummary:
    """Hand every trial to the tracker, unless the tracker already holds it.

    `out` is a folder, or for MLflow also a tracking URI; None for the tracker's usual place.
    Raises `InputError` without the tracker's library and where the tracker refuses the place.
    """
    require(tracker, needed_for=f"--to {tracker}")
    start, look = TRACKERS[tracker]
    place = out or os.environ.get(PLACES.get(tracker, "")) or f"exports/{tracker}"
    trials = [(source, trial) for source in sources for trial in source.run.trials]
    written = 0
    environment = dict(os.environ)
    os.environ.update(DEFAULTS | environment)
    try:
        for source, trial in trials:
            content = f"{trial.id} {trial.started_at_seconds!r}"
            key = f"{trial.id}-{hashlib.sha256(content.encode()).hexdigest()[:12]}"
            run = start(place, source.run.name, key, settings_of(source, trial))
            if run is not None:
                for step, values in series_of(source, trial):
                    run.log(values, step=step)
                run.finish()
                written += 1
    except OSError as error:
        raise storage_error(Path(place), error) from None
    except Exception as error:
        if type(error).__module__.partition(".")[0] != tracker:
            raise
        first_line, *_ = [*str(error).strip().splitlines(), type(error).__name__]
        message = f"{tracker} says: {first_line}"
        raise InputError(place, message, "name another place by --out") from None
    finally:
        if tracker == "wandb":
            import_module(tracker).teardown()  # ends its threads and its service process
        os.environ.clear()
        os.environ.update(environment)
    look = look.format(quote(place))
    return ExportSummary(place=place, trials=written, existing=len(trials) - written, look=look)


FINISHED_FILE = "shardmark-finished"
"""Marks the folder of a run of Weights & Biases that has all its values."""


def _start_wandb(place: str, group: str, key: str, config: Record) -> TrackedRun | None:
    """Start a run unless a finished one exists; delete what an interrupted export left."""
    import wandb

    mode = os.environ["WANDB_MODE"]
    if mode not in ("offline", "online"):
        raise InputError("WANDB_MODE", f"found {mode!r}", "allowed: offline, online")
    pattern = f"wandb/*run-*-{key}"
    for folder in Path(place).glob(pattern):
        if (folder / FINISHED_FILE).exists():
            return None
        shutil.rmtree(folder)
    Path(place).mkdir(parents=True, exist_ok=True)
    # A run would record the machine that exports, not the one that was measured.
    off: dict[str, Any] = dict.fromkeys(
        ("disable_git", "disable_code", "x_disable_stats", "x_disable_meta"), True
    )
    settings = wandb.Settings(console="off", **off)
    project, name = os.environ.get("WANDB_PROJECT", "shardmark"), config["trial"]
    run = wandb.init(project=project, group=group, name=name, id=key, config=config, dir=place,
                     settings=settings)  # fmt: skip

    def mark_finished() -> None:
        for folder in Path(place).glob(pattern):
            (folder / FINISHED_FILE).touch()

    return MarkedRun(run, mark_finished)


def _start_trackio(place: str, group: str, key: str, config: Record) -> TrackedRun | None:
    """Start a run unless a finished one exists; delete what an interrupted export left.

    A run gets its final name when it has all its values.
    """
    os.environ["TRACKIO_DIR"] = place
    trackio = import_module("trackio")
    unfinished = f"{key} (unfinished)"

    def runs_named(name: str) -> list[Any]:
        with suppress(ValueError):  # Trackio has no such project yet
            return [run for run in trackio.Api().runs(group) if run.name == name]
        return []

    def mark_finished() -> None:
        for run in runs_named(unfinished):
            run.rename(key)

    if runs_named(key):
        return None
    for run in runs_named(unfinished):
        run.delete()
    off = dict.fromkeys(("embed", "auto_log_gpu", "auto_log_cpu"), False)
    return MarkedRun(trackio.init(group, name=unfinished, config=config, **off), mark_finished)


class TensorBoardRun:
    """An event file, for which neither TensorFlow nor torch is needed."""

    def __init__(self, path: Path, config: Record) -> None:
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.summary.writer.record_writer import RecordWriter

        self.path, self.buffer = path, io.BytesIO()
        self.writer = RecordWriter(self.buffer)
        settings = {k: v if isinstance(v, int | float) else plain(v) for k, v in config.items()}
        start = config["started_at_seconds"]
        summary = hparams_pb(settings, trial_id=path.parent.name, start_time_secs=start)
        self._write(start, file_version="brain.Event:2")
        self._write(start, summary=summary)

    def _write(self, at_seconds: float, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self.writer.write(Event(wall_time=at_seconds, **content).SerializeToString())

    def log(self, data: dict[str, float], step: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        end = data.pop("_timestamp")
        values = [Summary.Value(tag=name, simple_value=value) for name, value in data.items()]
        self._write(end, step=step, summary=Summary(value=values))

    def finish(self) -> None:
        write_files({self.path: self.buffer.getvalue()})


def _start_tensorboard(place: str, group: str, key: str, config: Record) -> TrackedRun | None:
    path = Path(place) / group / key / "events.out.tfevents.shardmark"
    return None if path.exists() else TensorBoardRun(path, config)


class MLflowRun:
    """A run of MLflow; its values are sent together when it is finished."""

    def __init__(self, client: Any, experiment: str, key: str, config: Record) -> None:
        self.client, self.config, self.metrics = client, config, list[Any]()
        self.end = round(1000 * config["started_at_seconds"])
        tags = {"shardmark.key": key}
        self.run = client.create_run(experiment, self.end, tags, run_name=config["trial"])

    def log(self, data: dict[str, float], step: int) -> None:
        from mlflow.entities import Metric

        self.end = round(1000 * data.pop("_timestamp"))
        self.metrics += [Metric(name, value, self.end, step) for name, value in data.items()]

    def finish(self) -> None:
        from mlflow.entities import Param

        identifier = self.run.info.run_id
        params = [Param(name, plain(value)[:6000]) for name, value in self.config.items()]
        self.client.log_batch(identifier, self.metrics, params)
        status = "FINISHED" if self.config["outcome"] == "ok" else "FAILED"
        self.client.set_terminated(identifier, status, self.end)


def _start_mlflow(place: str, group: str, key: str, config: Record) -> TrackedRun | None:
    """Start a run unless a finished one exists; delete what an interrupted export left."""
    from mlflow import MlflowClient

    if "://" not in place and not place.startswith(("file:", "databricks")):
        Path(place).mkdir(parents=True, exist_ok=True)
        place = Path(place).resolve().as_uri()
    client = MlflowClient(tracking_uri=place)
    experiment = client.get_experiment_by_name(group)
    identifier = experiment.experiment_id if experiment else client.create_experiment(group)
    for run in client.search_runs([identifier], f"tags.`shardmark.key` = '{key}'"):
        if run.info.status != "RUNNING":
            return None
        client.delete_run(run.info.run_id)
    return MLflowRun(client, identifier, key, config)


TRACKERS: Mapping[str, tuple[Callable[[str, str, str, Record], TrackedRun | None], str]] = {
    "tensorboard": (_start_tensorboard, "tensorboard --logdir {}"),
    "mlflow": (_start_mlflow, "MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri {}"),
    "wandb": (_start_wandb, "wandb sync {}/wandb/offline-run-*"),
    "trackio": (_start_trackio, "TRACKIO_DIR={} trackio show"),
}
"""Name of the tracker and its module -> function that starts a run, and command that shows it.

The function returns None if the tracker already holds the trial."""
