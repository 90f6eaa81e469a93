"""MLflow: one run a trial, nested under one parent a Shardmark run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from shardmark import __version__
from shardmark.analysis.rows import plain
from shardmark.errors import InputError
from shardmark.report.export._protocol import (
    Exported,
    Source,
    measurement_id,
    require,
    settings_of,
    tags_of,
    values_of,
)
from shardmark.report.export.history import history
from shardmark.report.export.surroundings import variables
from shardmark.results.schema import Outcome, TrialResult
from shardmark.results.store import ENVIRONMENT_FILE, EXPERIMENT_FILE

if TYPE_CHECKING:
    from mlflow import MlflowClient

USUAL_PLACE = "exports/mlflow"
PREFIX = "shardmark."
MEASUREMENT = f"{PREFIX}measurement"
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
}


def export_mlflow(sources: Sequence[Source], out: str | None) -> Exported:
    """To a folder or a tracking URI; by default MLFLOW_TRACKING_URI, else `exports/mlflow`.

    The MLflow experiment has the Shardmark experiment's name.  A trial that is there already is
    left as it is; one that an interrupted export left half there is written anew.
    """
    require("mlflow", "mlflow-skinny", "mlflow", "mlflow")
    place = out or os.environ.get("MLFLOW_TRACKING_URI") or USUAL_PLACE
    uri = place if _is_uri(place) else _folder_uri(place)
    with variables(SETTINGS):
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        try:
            client = MlflowClient(tracking_uri=uri)
            written = sum(_export_run(client, source, uri) for source in sources)
        except MlflowException as error:
            raise InputError(
                place,
                f"MLflow says: {str(error).strip().splitlines()[0]}",
                "name a folder or the URI of a server; a database needs the whole of MLflow,"
                " `pip install mlflow`",
            ) from None
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
    name = source.run.name
    found = client.get_experiment_by_name(name)
    if found is None:
        experiment = client.create_experiment(name, _artifacts_uri(uri))
    else:
        experiment = found.experiment_id
    known = _known(client, experiment)
    wanted = {measurement_id(trial): trial for trial in source.trials}
    there = {name: run for name, run in known.items() if name in wanted}
    parents = [run.data.tags.get(PARENT) for run in there.values()]
    for name, run in list(there.items()):
        if run.info.status not in FINISHED:
            client.delete_run(run.info.run_id)
            del there[name]
    missing = {name: trial for name, trial in wanted.items() if name not in there}
    if not missing:
        return 0
    parent = next((one for one in parents if one), None) or _parent(client, experiment, source)
    for name, trial in missing.items():
        tags = {MEASUREMENT: name, PARENT: parent}
        _write_trial(client, experiment, tags, source, trial)
    return len(missing)


def _artifacts_uri(uri: str) -> str | None:
    """Beside an SQLite file: MLflow would make a folder wherever the command was given."""
    if not uri.startswith("sqlite:///"):
        return None
    path = Path(uri.removeprefix("sqlite:///"))
    return path.with_name(f"{path.name}-artifacts").resolve().as_uri()


def _known(client: MlflowClient, experiment: str) -> dict[str, Any]:
    """Measurement -> MLflow run, of every trial that was exported before."""
    known: dict[str, Any] = {}
    token: str | None = None
    while True:
        page = client.search_runs([experiment], max_results=1000, page_token=token)
        known |= {run.data.tags[MEASUREMENT]: run for run in page if MEASUREMENT in run.data.tags}
        token = page.token
        if not token:
            return known


def _parent(client: MlflowClient, experiment: str, source: Source) -> str:
    """The run's own MLflow run, with the resolved experiment and the machine as artifacts."""
    start = min(trial.started_at_seconds for trial in source.trials)
    end = max(trial.started_at_seconds + trial.total_seconds for trial in source.trials)
    tags = {f"{PREFIX}run": source.label, f"{PREFIX}version": __version__}
    run = client.create_run(experiment, _milliseconds(start), tags, run_name=source.label)
    for name in (EXPERIMENT_FILE, ENVIRONMENT_FILE):
        if (source.run.path / name).is_file():
            client.log_artifact(run.info.run_id, str(source.run.path / name))
    client.set_terminated(run.info.run_id, "FINISHED", _milliseconds(end))
    return str(run.info.run_id)


def _write_trial(
    client: MlflowClient,
    experiment: str,
    own_tags: Mapping[str, str],
    source: Source,
    trial: TrialResult,
) -> None:
    from mlflow.entities import Metric, Param

    start = _milliseconds(trial.started_at_seconds)
    end = _milliseconds(trial.started_at_seconds + trial.total_seconds)
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
