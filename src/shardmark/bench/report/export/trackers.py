"""Export of finished trials to CSV files or an experiment tracker, with a run for each trial."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from importlib import import_module
from pathlib import Path
from shlex import quote
from typing import Any

from shardmark.base.errors import InputError
from shardmark.base.files.storage import storage_error
from shardmark.base.results.files import write_files
from shardmark.base.results.store import StoredRun
from shardmark.base.system.extras import require
from shardmark.base.text import counted
from shardmark.bench.analysis.compare.rows import plain
from shardmark.bench.report.export.tables import (
    Record,
    export_csv,
    series_of,
    settings_of,
    sources_of,
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
Log = Callable[[dict[str, float], int], object]
"""Stores values by series at a step; `_timestamp` is their Unix time in seconds."""


def export_runs(runs: Sequence[StoredRun], target: str, out: str | None = None) -> list[str]:
    """Write the runs as CSV files, or hand every trial to a tracker that does not hold it yet.

    `out` is a folder, for CSV also a file, for MLflow also a tracking URI; None for the usual
    place.  Returns lines on what was written, and how to look at it.  Raises `InputError` without
    the tracker's library and where the target refuses the place.
    """
    sources = sources_of(runs)
    if target == "csv":
        return export_csv(sources, out)
    require(target, needed_for=f"--to {target}")
    tracked, look = TRACKERS[target]
    place = out or os.environ.get(PLACES.get(target, "")) or f"exports/{target}"
    trials = [(source, trial) for source in sources for trial in source.run.trials]
    written = 0
    environment = dict(os.environ)
    os.environ.update(DEFAULTS | environment)
    try:
        for source, trial in trials:
            content = f"{trial.id} {trial.started_at_seconds!r}"
            key = f"{trial.id}-{hashlib.sha256(content.encode()).hexdigest()[:12]}"
            with tracked(place, source.run.name, key, settings_of(source, trial)) as log:
                if log is not None:
                    for step, values in series_of(source, trial):
                        log(values, step)
                    written += 1
    except OSError as error:
        raise storage_error(Path(place), error) from None
    except Exception as error:
        if type(error).__module__.partition(".")[0] != target:
            raise
        first_line, *_ = [*str(error).strip().splitlines(), type(error).__name__]
        message = f"{target} says: {first_line}"
        raise InputError(place, message, "name another place by --out") from None
    finally:
        if target == "wandb":
            import_module(target).teardown()  # ends its threads and its service process
        os.environ.clear()
        os.environ.update(environment)
    existing = len(trials) - written
    rest = f"; {existing} exist there and are not changed" if existing else ""
    written_text = f"{target}: {counted(written, 'trial')} to {place}{rest}"
    return [written_text, f"look: {look.format(quote(place))}"]


FINISHED_FILE = "shardmark-finished"
"""Marks the folder of a run of Weights & Biases that has all its values."""


@contextmanager
def _wandb_run(place: str, group: str, key: str, config: Record) -> Iterator[Log | None]:
    import wandb

    mode = os.environ["WANDB_MODE"]
    if mode not in ("offline", "online"):
        raise InputError("WANDB_MODE", f"found {mode!r}", "allowed: offline, online")
    pattern = f"wandb/*run-*-{key}"
    for folder in Path(place).glob(pattern):
        if (folder / FINISHED_FILE).exists():
            yield None
            return
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
    yield run.log
    run.finish()
    for folder in Path(place).glob(pattern):
        (folder / FINISHED_FILE).touch()


@contextmanager
def _trackio_run(place: str, group: str, key: str, config: Record) -> Iterator[Log | None]:
    """A run gets its final name when it has all its values."""
    os.environ["TRACKIO_DIR"] = place
    trackio = import_module("trackio")
    unfinished = f"{key} (unfinished)"

    def runs_named(name: str) -> list[Any]:
        with suppress(ValueError):  # Trackio has no such project yet
            return [run for run in trackio.Api().runs(group) if run.name == name]
        return []

    if runs_named(key):
        yield None
        return
    for run in runs_named(unfinished):
        run.delete()
    off = dict.fromkeys(("embed", "auto_log_gpu", "auto_log_cpu"), False)
    started = trackio.init(group, name=unfinished, config=config, **off)
    yield started.log
    started.finish()
    for run in runs_named(unfinished):
        run.rename(key)


@contextmanager
def _tensorboard_run(place: str, group: str, key: str, config: Record) -> Iterator[Log | None]:
    """Write an event file, for which neither TensorFlow nor torch is needed."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams.summary_v2 import hparams_pb
    from tensorboard.summary.writer.record_writer import RecordWriter

    path = Path(place) / group / key / "events.out.tfevents.shardmark"
    if path.exists():
        yield None
        return
    buffer = io.BytesIO()
    writer = RecordWriter(buffer)

    def write(at_seconds: float, **content: Any) -> None:
        writer.write(Event(wall_time=at_seconds, **content).SerializeToString())

    def log(data: dict[str, float], step: int) -> None:
        end = data.pop("_timestamp")
        values = [Summary.Value(tag=name, simple_value=value) for name, value in data.items()]
        write(end, step=step, summary=Summary(value=values))

    settings = {k: v if isinstance(v, int | float) else plain(v) for k, v in config.items()}
    start = config["started_at_seconds"]
    write(start, file_version="brain.Event:2")
    write(start, summary=hparams_pb(settings, trial_id=key, start_time_secs=start))
    yield log
    write_files({path: buffer.getvalue()})


@contextmanager
def _mlflow_run(place: str, group: str, key: str, config: Record) -> Iterator[Log | None]:
    """Send the values together, when the run has all of them."""
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param

    if "://" not in place and not place.startswith(("file:", "databricks")):
        Path(place).mkdir(parents=True, exist_ok=True)
        place = Path(place).resolve().as_uri()
    client = MlflowClient(tracking_uri=place)
    experiment = client.get_experiment_by_name(group)
    identifier = experiment.experiment_id if experiment else client.create_experiment(group)
    for run in client.search_runs([identifier], f"tags.`shardmark.key` = '{key}'"):
        if run.info.status != "RUNNING":
            yield None
            return
        client.delete_run(run.info.run_id)
    metrics = list[Any]()
    end = round(1000 * config["started_at_seconds"])
    tags = {"shardmark.key": key}
    started = client.create_run(identifier, end, tags, run_name=config["trial"])

    def log(data: dict[str, float], step: int) -> None:
        nonlocal end
        end = round(1000 * data.pop("_timestamp"))
        metrics.extend(Metric(name, value, end, step) for name, value in data.items())

    yield log
    params = [Param(name, plain(value)[:6000]) for name, value in config.items()]
    client.log_batch(started.info.run_id, metrics, params)
    status = "FINISHED" if config["outcome"] == "ok" else "FAILED"
    client.set_terminated(started.info.run_id, status, end)


TRACKERS: Mapping[str, tuple[Callable[..., AbstractContextManager[Log | None]], str]] = {
    "tensorboard": (_tensorboard_run, "tensorboard --logdir {}"),
    "mlflow": (_mlflow_run, "MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri {}"),
    "wandb": (_wandb_run, "wandb sync {}/wandb/offline-run-*"),
    "trackio": (_trackio_run, "TRACKIO_DIR={} trackio show"),
}
"""Name of the tracker and its module -> context of a run of it, and command that shows it.

The context gets place, group, key and settings.  It yields the function that stores values, or None
if the tracker already holds the trial, deletes what an interrupted export left, and marks the run
as finished at its end."""
