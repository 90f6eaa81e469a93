"""MLflow: one run a trial, in the experiment of the same name."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from shardmark.analysis.compare.rows import plain
from shardmark.core.errors import InputError
from shardmark.core.storage import storage_error
from shardmark.report.export.source import Exported, Source, require
from shardmark.report.export.tracked import TrackedTrial, environment, tracked

if TYPE_CHECKING:
    from mlflow import MlflowClient

PREFIX = "shardmark."
MEASUREMENT = f"{PREFIX}measurement"
FINISHED = ("FINISHED", "FAILED", "KILLED")
METRICS_PER_BATCH = 1000
"""MLflow takes no more at once."""
PARAMS_PER_BATCH = 100
TAG_CHARACTERS = 5000
PARAM_CHARACTERS = 6000
SETTINGS = {
    # The library refuses folders unless told that they are wanted: its own databases are newer.
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    # Seven otherwise, which take minutes to tell that nobody answers.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",
}
ALLOWED = (
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
    with environment(SETTINGS):
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        try:
            uri = place if is_uri else _folder_uri(place)
            client = MlflowClient(tracking_uri=uri)
            written = sum(_write(client, trial, uri) for trial in trials)
        except MlflowException as error:
            said = f"MLflow says: {str(error).strip().splitlines()[0]}"
            raise InputError(place, said, ALLOWED) from None
        except OSError as error:
            reason = storage_error(Path(place).expanduser(), error).args[1]
            raise InputError(place, reason, ALLOWED) from None
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


def _write(client: MlflowClient, trial: TrackedTrial, uri: str) -> bool:
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
    run = client.create_run(experiment, start, tags, run_name=trial.result.id)
    params = [Param(key, plain(value)[:PARAM_CHARACTERS]) for key, value in trial.settings.items()]
    metrics = [
        *(
            Metric(point.name, point.value, round(1000 * point.at_seconds), point.index)
            for point in trial.history()
        ),
        *(Metric(key, value, end, 0) for key, value in trial.final.items()),
    ]
    for batch in _batches(params, PARAMS_PER_BATCH):
        client.log_batch(run.info.run_id, params=batch)
    for batch in _batches(metrics, METRICS_PER_BATCH):
        client.log_batch(run.info.run_id, metrics=batch)
    client.set_terminated(run.info.run_id, "FINISHED" if trial.ok else "FAILED", end)
    return True


def _batches(values: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [values[first : first + size] for first in range(0, len(values), size)]
