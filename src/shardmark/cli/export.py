"""`shardmark export`: finished runs handed to a tracker, or written as tables."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from shardmark.errors import InputError


class To(StrEnum):
    """Who gets the runs."""

    TENSORBOARD = "tensorboard"
    MLFLOW = "mlflow"
    WANDB = "wandb"
    PARQUET = "parquet"
    CSV = "csv"


def export(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN", help="Folders that `run` has written.")
    ],
    to: Annotated[
        To,
        typer.Option(
            "--to", help="A tracker, or table files; for pandas there is `Run.to_pandas()`."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR_OR_FILE",
            help="Folder, or for parquet and csv a file for the trials alone;"
            " exports/TARGET by default.",
        ),
    ] = None,
    tracking_uri: Annotated[
        str | None,
        typer.Option(
            metavar="URI", help="MLflow's server or database, instead of a folder by --out."
        ),
    ] = None,
) -> None:
    """Hand finished runs to TensorBoard, MLflow or Weights & Biases, or write them as tables."""
    from shardmark.report.export import export_runs
    from shardmark.results.store import load_run

    if tracking_uri is not None and (to is not To.MLFLOW or out is not None):
        found = "is for mlflow" if to is not To.MLFLOW else "stands beside --out"
        raise InputError("--tracking-uri", found, "name the place once: --out, or this for mlflow")
    folders = {path.expanduser().resolve(): path.expanduser() for path in runs}
    loaded = [load_run(path) for path in folders.values()]
    for damaged in (one for run in loaded for one in run.damaged):
        typer.echo(f"damaged, left out: {damaged}", err=True)
    place = tracking_uri if out is None else str(out)
    done = export_runs(loaded, to.value, place)
    kept = f"; {done.kept} there already, left as they are" if done.kept else ""
    trials = "1 trial" if done.trials == 1 else f"{done.trials} trials"
    typer.echo(f"{to.value}: {trials} to {done.where}{kept}")
    typer.echo(f"look: {done.look}")
