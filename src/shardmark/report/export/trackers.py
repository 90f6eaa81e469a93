"""Runs handed to TensorBoard, MLflow and Weights & Biases: one tracked run a trial."""

from __future__ import annotations

import hashlib
import io
import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from shardmark.analysis.compare.rows import plain
from shardmark.core.errors import InputError
from shardmark.core.storage import storage_error
from shardmark.report.export.tables import (
    Exported,
    Source,
    epoch_rows,
    require,
    step_rows,
    values_of,
)
from shardmark.results.files import write_files
from shardmark.results.schema import Outcome, TrialResult

if TYPE_CHECKING:
    from mlflow import MlflowClient

MEANS = {"loss": "train_loss", "learning_rate": "learning_rate"}
SPANS = [f"{part}_seconds" for part in ("step", "data", "forward", "backward", "optimizer")]


@dataclass(frozen=True, slots=True)
class Point:
    """One value of one series."""

    name: str
    """`step/...` or `epoch/...`."""
    index: int
    """The optimizer step, from 0, or the epoch, from 1."""
    step: int
    """The optimizer step it belongs to; for an epoch its last one."""
    at_seconds: float
    """Unix time at which the training had got there."""
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedTrial:
    """A trial as trackers see one; one that did not end ok has no number."""

    source: Source
    result: TrialResult

    @property
    def measurement(self) -> str:
        """The same trial, run again, has the same id and another start."""
        content = f"{self.result.id} {self.result.started_at_seconds!r}"
        return hashlib.sha256(content.encode()).hexdigest()[:12]

    @property
    def ok(self) -> bool:
        return self.result.outcome is Outcome.OK

    @property
    def ended_at_seconds(self) -> float:
        return self.result.started_at_seconds + self.result.total_seconds

    @property
    def final(self) -> dict[str, float]:
        return values_of(self.result)

    @property
    def settings(self) -> dict[str, Any]:
        """What was trained and how, by dotted key as in an experiment file; without the unset."""
        trial = self.result
        resolved = {key: trial.trial.get(key) for key in ("workload", "recipe", "slow_ranks")}
        return {
            "strategy": trial.strategy,
            **dict(_flat({"strategy": trial.strategy_options})),
            "world_size": trial.world_size,
            **dict(_flat(resolved)),
            **{key: value for key, value in _flat(trial.varied) if key != "strategy"},
            "recipe.precision": trial.precision,
            "repeat": trial.repeat,
        }

    @property
    def tags(self) -> dict[str, str]:
        """What it is, where its files are and how it ended, as text."""
        equivalent = self.source.equivalent(self.result)
        failure = self.result.failure
        tags = {
            "experiment": self.source.run.name,
            "run": self.source.label,
            "trial": self.result.id,
            "files": str(self.source.folder(self.result.id).absolute()),
            "outcome": str(self.result.outcome),
            "synthetic": str(self.result.synthetic).lower(),
            "equivalent": None if equivalent is None else str(equivalent).lower(),
            "failure": None if failure is None else failure.reason,
            "remedy": None if failure is None else failure.remedy,
        }
        return {name: value for name, value in tags.items() if value is not None}

    def history(self) -> Iterator[Point]:
        """By step, then by epoch; nothing for what is missing."""
        yield from _by_step(self.source, self.result)
        for row in epoch_rows(self.result):
            at_seconds = row.pop("ended_at_seconds") or self.result.started_at_seconds
            epoch, last_step = row.pop("epoch"), row.pop("end_step") - 1
            for name, value in row.items():
                if value is not None:
                    yield Point(f"epoch/{name}", epoch, last_step, at_seconds, value)


def tracked(sources: Sequence[Source]) -> list[TrackedTrial]:
    """Every trial of the runs."""
    return [
        TrackedTrial(source=source, result=trial)
        for source in sources
        for trial in source.run.trials
    ]


def _by_step(source: Source, trial: TrialResult) -> Iterator[Point]:
    """Loss: mean over the ranks.  Seconds: the slowest rank, measured steps alone.

    Nothing where one rank has no value: the others' mean would be another number.
    """
    import pandas as pd

    rows = step_rows(source, trial)
    if not rows:
        return
    frame = pd.DataFrame(rows)
    names = [*MEANS, *SPANS, "started_at_seconds"]
    numbers = frame.reindex(columns=names).astype(float).replace([float("inf")], float("nan"))
    numbers["ended_at_seconds"] = numbers.started_at_seconds + numbers.step_seconds.fillna(0.0)
    steps = numbers.groupby(frame["step"])
    complete = steps.count().eq(steps.size(), axis=0)
    measured = frame["measured"].groupby(frame["step"]).all()
    means = steps[[*MEANS]].mean().where(complete[[*MEANS]]).rename(columns=MEANS)
    spans = steps[SPANS].max().where(complete[SPANS]).where(measured)
    ends = steps["ended_at_seconds"].max().fillna(trial.started_at_seconds)
    for step, values in means.join([spans, ends]).to_dict("index").items():
        index, at_seconds = int(str(step)), float(values.pop("ended_at_seconds"))
        for name, value in values.items():
            if not math.isnan(value):
                yield Point(f"step/{name}", index, index, at_seconds, value)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key}", value


@contextmanager
def environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Within it those variables are set that the user has not; afterwards all is as it was.

    Trackers' libraries read their settings there, and set some variables of their own.
    """
    before = dict(os.environ)
    os.environ.update({**settings, **before})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


# TensorBoard, by its own record writer without TensorFlow

FILE_PREFIX = "events.out.tfevents"


def export_tensorboard(sources: Sequence[Source], out: str | None) -> Exported:
    """`OUT/RUN/TRIAL/` for each trial.

    The file's name tells the measurement, so that exporting again replaces it.  Raises `InputError`
    where the folder holds another measurement of the trial: TensorBoard would draw both as one.
    """
    require("tensorboard", "tensorboard", "tensorboard")
    root = Path(out or "exports/tensorboard").expanduser()
    trials = tracked(sources)
    encoded = {}
    for trial in trials:
        started = f"{trial.result.started_at_seconds:.0f}"
        folder = root / trial.source.label / trial.result.id
        path = folder / f"{FILE_PREFIX}.{started}.shardmark.{trial.measurement}"
        if any(other != path for other in folder.glob(f"{FILE_PREFIX}.*")):
            raise InputError(
                str(folder),
                "holds another measurement of this trial",
                "delete that folder, or name another one with --out",
            )
        encoded[path] = _event_file(trial)
    write_files(encoded)
    look = f"tensorboard --logdir {quote(str(root))}"
    return Exported(where=str(root), trials=len(trials), look=look)


def _event_file(trial: TrackedTrial) -> bytes:
    """Settings for the HPARAMS page, series, and final metrics under `metrics/`."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams.summary_v2 import hparams_pb
    from tensorboard.summary.writer.record_writer import RecordWriter

    output = io.BytesIO()
    writer = RecordWriter(output)

    def write(at_seconds: float, **content: Any) -> None:
        writer.write(Event(wall_time=at_seconds, **content).SerializeToString())

    def scalar(tag: str, value: float, step: int, at_seconds: float) -> None:
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
        write(at_seconds, step=step, summary=summary)

    start = trial.result.started_at_seconds
    settings = {name: _setting(value) for name, value in (trial.tags | trial.settings).items()}
    name = f"{trial.source.label}/{trial.result.id}"
    write(start, file_version="brain.Event:2")
    write(start, summary=hparams_pb(settings, trial_id=name, start_time_secs=start))
    for point in trial.history():
        scalar(point.name, point.value, point.index, point.at_seconds)
    for metric, value in trial.final.items():
        scalar(f"metrics/{metric}", value, 0, trial.ended_at_seconds)
    return output.getvalue()


def _setting(value: object) -> bool | float | str:
    if isinstance(value, bool):
        return value
    return float(value) if isinstance(value, int | float) else plain(value)


# MLflow: in the experiment of the same name

PREFIX = "shardmark."
MEASUREMENT = f"{PREFIX}measurement"
FINISHED = ("FINISHED", "FAILED", "KILLED")
METRICS_PER_BATCH = 1000
"""MLflow takes no more at once."""
PARAMS_PER_BATCH = 100
TAG_CHARACTERS = 5000
PARAM_CHARACTERS = 6000
MLFLOW_SETTINGS = {
    # The library refuses folders unless told that they are wanted: its own databases are newer.
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    # Seven otherwise, which take minutes to tell that nobody answers.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",
}
MLFLOW_ALLOWED = (
    "name a folder, or the URI of a server by --tracking-uri; a database needs the whole of MLflow,"
    " `pip install mlflow`"
)


def export_mlflow(sources: Sequence[Source], out: str | None) -> Exported:
    """To a folder or a tracking URI; by default MLFLOW_TRACKING_URI, else `exports/mlflow`.

    A trial that is there already is left as it is; one that an interrupted export left half there
    is written anew.
    """
    require("mlflow", "mlflow-skinny", "mlflow")
    place = out or os.environ.get("MLFLOW_TRACKING_URI") or "exports/mlflow"
    is_uri = "://" in place or place.startswith(("file:", "databricks"))
    trials = tracked(sources)
    with environment(MLFLOW_SETTINGS):
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        try:
            uri = place if is_uri else _folder_uri(place)
            client = MlflowClient(tracking_uri=uri)
            written = sum(_write_mlflow(client, trial, uri) for trial in trials)
        except MlflowException as error:
            said = f"MLflow says: {str(error).strip().splitlines()[0]}"
            raise InputError(place, said, MLFLOW_ALLOWED) from None
        except OSError as error:
            reason = storage_error(Path(place).expanduser(), error).args[1]
            raise InputError(place, reason, MLFLOW_ALLOWED) from None
    look = f"mlflow ui --backend-store-uri {quote(place)}"
    if not is_uri:
        look = f"MLFLOW_ALLOW_FILE_STORE=true {look}"
    elif not place.startswith(("file:", "sqlite:")):
        look = place
    return Exported(where=place, trials=written, kept=len(trials) - written, look=look)


def _folder_uri(place: str) -> str:
    path = Path(place).expanduser()
    path.mkdir(parents=True, exist_ok=True)
    return path.resolve().as_uri()


def _experiment(client: MlflowClient, name: str, uri: str) -> str:
    known = client.get_experiment_by_name(name)
    if known is not None:
        return str(known.experiment_id)
    artifacts = None
    if uri.startswith("sqlite:///"):  # MLflow would make a folder wherever the command was given
        path = Path(uri.removeprefix("sqlite:///"))
        artifacts = path.with_name(f"{path.name}-artifacts").resolve().as_uri()
    return str(client.create_experiment(name, artifacts))


def _write_mlflow(client: MlflowClient, trial: TrackedTrial, uri: str) -> bool:
    """Whether the trial was not there yet."""
    from mlflow.entities import Metric, Param

    experiment = _experiment(client, trial.source.run.name, uri)
    for run in client.search_runs([experiment], f"tags.`{MEASUREMENT}` = '{trial.measurement}'"):
        if run.info.status in FINISHED:
            return False
        client.delete_run(run.info.run_id)
    start, end = (
        round(1000 * seconds)
        for seconds in (trial.result.started_at_seconds, trial.ended_at_seconds)
    )
    tags = {f"{PREFIX}{key}": value[:TAG_CHARACTERS] for key, value in trial.tags.items()}
    tags[MEASUREMENT] = trial.measurement
    run_id = client.create_run(experiment, start, tags, run_name=trial.result.id).info.run_id
    params = [Param(key, plain(value)[:PARAM_CHARACTERS]) for key, value in trial.settings.items()]
    metrics = [
        *(Metric(p.name, p.value, round(1000 * p.at_seconds), p.index) for p in trial.history()),
        *(Metric(key, value, end, 0) for key, value in trial.final.items()),
    ]
    for first in range(0, len(params), PARAMS_PER_BATCH):
        client.log_batch(run_id, params=params[first : first + PARAMS_PER_BATCH])
    for first in range(0, len(metrics), METRICS_PER_BATCH):
        client.log_batch(run_id, metrics=metrics[first : first + METRICS_PER_BATCH])
    client.set_terminated(run_id, "FINISHED" if trial.ok else "FAILED", end)
    return True


# Weights & Biases: offline unless the user's WANDB_MODE says otherwise

WANDB_MODES = ("offline", "online")
WANDB_SETTINGS = {"WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}
WANDB_QUIET: dict[str, Any] = {
    "console": "off",
    "silent": True,
    "disable_git": True,
    "disable_code": True,
    "save_code": False,
    "x_disable_machine_info": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_save_requirements": False,
}
"""Nothing of the machine that exports: the trial was measured elsewhere, at another time."""


def export_wandb(sources: Sequence[Source], out: str | None) -> Exported:
    """A folder a trial, as `wandb sync` takes it; WANDB_PROJECT, WANDB_ENTITY, ... are heeded.

    A trial that is there already is left as it is.  A folder appears whole or not at all.
    """
    mode = os.environ.get("WANDB_MODE", "offline")
    if mode not in WANDB_MODES:
        raise InputError("WANDB_MODE", f"found {mode!r}", f"allowed: {', '.join(WANDB_MODES)}")
    require("wandb", "wandb", "wandb")
    root = Path(out or "exports/wandb").expanduser()
    trials = tracked(sources)
    pending = [trial for trial in trials if not any(root.glob(f"*run-*-{_wandb_id(trial)}"))]
    try:
        root.mkdir(parents=True, exist_ok=True)
        if pending:
            _write_wandb(root, pending, mode)
    except OSError as error:
        raise storage_error(root, error) from None
    sync = f"wandb sync {quote(str(root))}/offline-run-*"
    return Exported(
        where=str(root),
        trials=len(pending),
        kept=len(trials) - len(pending),
        look=sync if mode == "offline" else "the project's page",
    )


def _write_wandb(root: Path, pending: Sequence[TrackedTrial], mode: str) -> None:
    scratch = tempfile.TemporaryDirectory(dir=root, prefix=".unfinished-")
    with environment(WANDB_SETTINGS), scratch as folder:
        import wandb

        try:
            for trial in pending:
                _log_wandb(trial, Path(folder), mode)
                (written,) = Path(folder).glob(f"wandb/*run-*-{_wandb_id(trial)}")
                written.rename(root / written.name)
        finally:
            wandb.teardown()  # ends its service process and threads


def _wandb_id(trial: TrackedTrial) -> str:
    return f"{trial.result.id}-{trial.measurement}"


def _log_wandb(trial: TrackedTrial, folder: Path, mode: str) -> None:
    """An epoch's values stand beside its last step's."""
    import wandb

    outcome = str(trial.result.outcome)
    try:
        run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "shardmark"),
            group=trial.source.run.name,
            name=trial.result.id,
            id=_wandb_id(trial),
            resume="never" if mode == "online" else None,
            config={**trial.tags, **trial.settings},
            tags=[trial.result.strategy, outcome],
            dir=folder,
            settings=wandb.Settings(**{"mode": mode, **WANDB_QUIET}),
        )
    except wandb.Error as error:
        said = f"Weights & Biases says: {error}"
        remedy = "unset WANDB_MODE to export offline"
        raise InputError(f"trial {trial.result.id}", said, remedy) from None
    by_step: dict[int, dict[str, Any]] = {}
    for point in trial.history():
        values = by_step.setdefault(point.step, {"_timestamp": point.at_seconds})
        values[point.name] = point.value
        if point.name.startswith("epoch/"):
            values["epoch"] = point.index
    run.define_metric("epoch/*", step_metric="epoch")
    for step, values in sorted(by_step.items()):
        run.log(values, step=step)
    run.summary.update({**trial.final, "outcome": outcome})
    run.finish(exit_code=0 if trial.ok else 1)
