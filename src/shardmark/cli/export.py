"""`shardmark export`: hands finished runs to a tracker, or writes them as tables."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated

import typer

from shardmark.base.errors import InputError
from shardmark.base.text import say
from shardmark.cli.arguments import Runs, path_of

URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/|file:|databricks:")
DATABRICKS = "databricks"
"""MLflow accepts this word as a tracking URI."""


class To(StrEnum):
    """Target of an export."""

    TENSORBOARD = "tensorboard"
    MLFLOW = "mlflow"
    WANDB = "wandb"
    TRACKIO = "trackio"
    CSV = "csv"
    TORCHRUN = "torchrun"
    ACCELERATE = "accelerate"
    DEEPSPEED = "deepspeed"


def _target_of(text: str) -> To:
    if text not in [*To]:
        raise InputError("--to", f"found {text!r}", f"allowed are {', '.join(To)}")
    return To(text)


def export(
    to: Annotated[
        To,
        typer.Option(
            metavar=f"[{'|'.join(To)}]",
            parser=_target_of,
            autocompletion=lambda: [*To],
            help="A tracker; csv for table files; or a launcher, for which the fastest verified"
            " trial becomes a command and its configuration.",
        ),
    ],
    runs: Runs = None,
    # Text, since `Path` would turn the two slashes of a URI into one.
    out: Annotated[
        str | None,
        typer.Option(
            metavar="DIR_OR_FILE",
            help="Folder, or for csv a file for the trials alone; exports/TARGET by default.",
        ),
    ] = None,
    tracking_uri: Annotated[
        str | None,
        typer.Option(metavar="URI", help="Server or database of MLflow, in place of --out."),
    ] = None,
    trial: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Trial for a launcher in place of the fastest: a strategy such as fsdp or"
            " 'fsdp on 4 ranks', or a trial's id.",
        ),
    ] = None,
) -> None:
    """Export runs to a tracker or to tables, or one trial to a launch command."""
    from shardmark.base.results.store import load_runs
    from shardmark.bench.report.export.launch import LAUNCHERS, export_launch
    from shardmark.bench.report.export.trackers import export_runs

    place = _place(to, out, tracking_uri)
    if trial is not None and to.value not in LAUNCHERS:
        raise InputError("--trial", f"is for {', '.join(LAUNCHERS)}", "leave it out")
    loaded = load_runs(runs)
    for damaged in (damaged for run in loaded for damaged in run.damaged):
        say(f"damaged, left out: {damaged}", error=True)
    if to.value in LAUNCHERS:
        say(*export_launch(loaded, to.value, trial, place))
    else:
        say(*export_runs(loaded, to.value, place))


def _place(to: To, out: str | None, tracking_uri: str | None) -> str | None:
    """Return the folder, file or tracking URI; None for the usual place."""
    if tracking_uri is not None and (to is not To.MLFLOW or out is not None):
        reason = "is for mlflow" if to is not To.MLFLOW else "is given with --out"
        raise InputError("--tracking-uri", reason, "name the place once: --out, or this for mlflow")
    for option, value in (("--out", out), ("--tracking-uri", tracking_uri)):
        if value is not None and not value.strip():
            raise InputError(option, "is empty", "name a place, or leave the option out")
    if out is None:
        return tracking_uri
    if URI.match(out) or (to is To.MLFLOW and out == DATABRICKS):
        remedy = f"--tracking-uri {out}" if to is To.MLFLOW else "a folder"
        raise InputError(f"--out {out}", "is a URI, no folder", f"name {remedy}")
    return str(path_of(out))
