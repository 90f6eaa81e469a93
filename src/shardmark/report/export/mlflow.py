"""MLflow: one run a trial, nested under one parent a Shardmark run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from shardmark.analysis.compare.rows import plain
from shardmark.core.errors import InputError
from shardmark.core.version import __version__
from shardmark.report.export.history import history
from shardmark.report.export.source import (
    Exported,
    Source,
    ended_at_seconds,
    environment,
    measurement_id,
    require,
    settings_of,
    tags_of,
    unwritable,
    values_of,
)
from shardmark.results.schema import Outcome, TrialResult
from shardmark.results.store import ENVIRONMENT_FILE, EXPERIMENT_FILE

if TYPE_CHECKING:
    from mlflow import MlflowClient

USUAL_PLACE = "exports/mlflow"
PREFIX = "shardmark."
MEASUREMENT = f"{PREFIX}measurement"
MEASUREMENTS = f"{PREFIX}measurements"
PARENT_MEASUREMENTS = 300
"""As many as fit into a tag; enough to know a run by."""
PARENT = "mlflow.parentRunId"
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

    The MLflow experiment has the Shardmark experiment's name.  A trial that is there already is
    left as it is; one that an interrupted export left half there is written anew.
    """
    require("mlflow", "mlflow-skinny", "mlflow")
    place = out or os.environ.get("MLFLOW_TRACKING_URI") or USUAL_PLACE
    with environment(SETTINGS):
        from mlflow.exceptions import MlflowException

        try:
            from mlflow import MlflowClient

            uri = place if _is_uri(place) else _folder_uri(place)
            client = MlflowClient(tracking_uri=uri)
            written = sum(_export_run(client, source, uri) for source in sources)
        except MlflowException as error:
            said = f"MLflow says: {str(error).strip().splitlines()[0]}"
            raise InputError(place, said, ALLOWED) from None
        except OSError as error:
            raise unwritable(place, error, ALLOWED) from None
    trials = sum(len(source.trials) for source in sources)
    return Exported(where=place, trials=written, kept=trials - written, look=_look(place))


def _look(place: str) -> str:
    if not _is_uri(place):
        return f"MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri {quote(place)}"
    local = place.startswith(("file:", "sqlite:"))
    return f"mlflow ui --backend-store-uri {quote(place)}" if local else place


def _is_uri(place: str) -> bool:
    return "://" in place or place == "databricks" or place.startswith(("file:", "databricks:"))


def _folder_uri(place: str) -> str:
    path = Path(place).expanduser()
    if path.exists() and not path.is_dir():
        raise InputError(place, "is a file", "name a folder, or a tracking URI")
    return path.resolve().as_uri()


def _export_run(client: MlflowClient, source: Source, uri: str) -> int:
    """How many trials were written."""
    known = client.get_experiment_by_name(source.run.name)
    experiment = (
        client.create_experiment(source.run.name, _artifacts_uri(uri))
        if known is None
        else known.experiment_id
    )
    runs = _runs(client, experiment)
    wanted = {measurement_id(trial): trial for trial in source.trials}
    there = {id_: run for id_, run in runs.items() if run.data.tags.get(MEASUREMENT) in wanted}
    parents = [run.data.tags.get(PARENT) for run in there.values()]
    # A parent is found by the measurements that it was made for, before it has children.
    parents += [
        id_
        for id_, run in runs.items()
        if {*run.data.tags.get(MEASUREMENTS, "").split()} & wanted.keys()
    ]
    for id_, run in there.items():
        if run.info.status in FINISHED:
            wanted.pop(run.data.tags[MEASUREMENT], None)
        else:
            client.delete_run(id_)
    if not wanted:
        return 0
    parent = next((id_ for id_ in parents if id_ in runs), None)
    if parent is None:
        parent = _new_parent(client, experiment, source)
    _finish_parent(client, parent, source)
    for name, trial in wanted.items():
        tags = {MEASUREMENT: name, PARENT: parent}
        _write_trial(client, experiment, tags, source, trial)
    return len(wanted)


def _artifacts_uri(uri: str) -> str | None:
    """Beside an SQLite file: MLflow would make a folder wherever the command was given."""
    if not uri.startswith("sqlite:///"):
        return None
    path = Path(uri.removeprefix("sqlite:///"))
    return path.with_name(f"{path.name}-artifacts").resolve().as_uri()


def _runs(client: MlflowClient, experiment: str) -> dict[str, Any]:
    """Id -> MLflow run, of every run of the experiment that is not deleted."""
    runs: dict[str, Any] = {}
    token: str | None = None
    while True:
        page = client.search_runs([experiment], max_results=1000, page_token=token)
        runs |= {run.info.run_id: run for run in page}
        token = page.token
        if not token:
            return runs


def _new_parent(client: MlflowClient, experiment: str, source: Source) -> str:
    start = min(trial.started_at_seconds for trial in source.trials)
    tags = {
        f"{PREFIX}run": source.label,
        f"{PREFIX}version": __version__,
        MEASUREMENTS: " ".join(map(measurement_id, source.trials[:PARENT_MEASUREMENTS])),
    }
    run = client.create_run(experiment, _milliseconds(start), tags, run_name=source.label)
    return str(run.info.run_id)


def _finish_parent(client: MlflowClient, parent: str, source: Source) -> None:
    """The resolved experiment and the machine as artifacts, as they are now, and the end."""
    end = max(map(ended_at_seconds, source.trials))
    for name in (EXPERIMENT_FILE, ENVIRONMENT_FILE):
        if (source.run.path / name).is_file():
            client.log_artifact(parent, str(source.run.path / name))
    client.set_terminated(parent, "FINISHED", _milliseconds(end))


def _write_trial(
    client: MlflowClient,
    experiment: str,
    own_tags: Mapping[str, str],
    source: Source,
    trial: TrialResult,
) -> None:
    from mlflow.entities import Metric, Param

    start = _milliseconds(trial.started_at_seconds)
    end = _milliseconds(ended_at_seconds(trial))
    told = {
        f"{PREFIX}{key}": value[:TAG_CHARACTERS] for key, value in tags_of(source, trial).items()
    }
    tags = {**told, **own_tags}
    run = client.create_run(experiment, start, tags, run_name=trial.id)
    run_id = run.info.run_id
    params = [
        Param(key, plain(value)[:PARAM_CHARACTERS]) for key, value in settings_of(trial).items()
    ]
    metrics = [
        Metric(point.name, point.value, _milliseconds(point.at_seconds), point.index)
        for point in history(source, trial)
    ]
    metrics += [Metric(key, value, end, 0) for key, value in values_of(trial).items()]
    for part in _parts(params, PARAMS_PER_BATCH):
        client.log_batch(run_id, params=part)
    for part in _parts(metrics, METRICS_PER_BATCH):
        client.log_batch(run_id, metrics=part)
    ok = trial.outcome is Outcome.OK
    client.set_terminated(run_id, "FINISHED" if ok else "FAILED", end)


def _parts(entries: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for first in range(0, len(entries), size):
        yield entries[first : first + size]


def _milliseconds(seconds: float) -> int:
    """Of Unix time, as MLflow counts it."""
    return round(1000 * seconds)
