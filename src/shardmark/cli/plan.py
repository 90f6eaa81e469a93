"""`shardmark plan`: predicts memory, time and cost on other machines."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from shardmark.cli.arguments import ExperimentName, Overrides, path_of
from shardmark.core.errors import InputError
from shardmark.core.storage import storing
from shardmark.core.text import say, say_text


class PlanFormat(StrEnum):
    """Output formats of a plan."""

    TEXT = "text"
    MARKDOWN = "markdown"
    JSON = "json"


def plan(
    experiment: ExperimentName,
    *,
    on: Annotated[
        list[str],
        typer.Option(
            "--on",
            metavar="HARDWARE",
            help="A node type such as dgx-h100, a number of cards such as h100x8, or a YAML file."
            " Repeat it to compare machines.",
        ),
    ],
    nodes: Annotated[
        str,
        typer.Option(
            metavar="COUNTS", help="Numbers of nodes: 4, or 1,2,3, or 1..128, which doubles."
        ),
    ] = "1",
    run: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="RUN",
            parser=path_of,
            help="Calibrate the prediction by a stored run of this model, which also gives"
            " intervals.",
        ),
    ] = None,
    price_per_hour: Annotated[
        list[float] | None,
        typer.Option(
            metavar="DOLLARS",
            min=0,
            help="Price of one card; adds the cost of the recipe.  With several --on, one price for"
            " all or one for each.",
        ),
    ] = None,
    search: Annotated[
        bool,
        typer.Option(
            "--search",
            help="Compare all layouts of the largest number of ranks: replicas, shards, tensor"
            " ranks, stages, micro-batches, activation checkpointing, CPU offload.",
        ),
    ] = False,
    write: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            parser=path_of,
            help="Search, and write the fastest layout that fits as an experiment for `run`.",
        ),
    ] = None,
    overrides: Overrides = None,
    form: Annotated[
        PlanFormat, typer.Option("--format", help="json has every value, in base units.")
    ] = PlanFormat.TEXT,
) -> None:
    """Predict memory, speed and cost of every strategy on machines that you do not have.

    Exit code 1 if nothing fits, or nothing could be predicted.
    """
    from shardmark.cli.compare import terminal_width
    from shardmark.config.load import load_experiment, to_yaml
    from shardmark.predict.models import Models
    from shardmark.predict.plan import compare_machines, parse_nodes
    from shardmark.report.table.formats import Format
    from shardmark.report.views.plan import render_plan
    from shardmark.results.store import load_run

    if write is not None and not write.parent.is_dir():
        raise InputError(f"--write {write}", "its folder does not exist", "create it first")
    if write is not None and write.exists():
        raise InputError(f"--write {write}", "it exists already", "name another file")
    predicted = compare_machines(
        load_experiment(experiment, overrides or ()),
        on,
        parse_nodes(nodes),
        Models(),
        run=None if run is None else load_run(run),
        prices_per_hour=price_per_hour or (),
        search=search or write is not None,
    )
    say_text(render_plan(predicted, Format(form.value), terminal_width() or 80))
    if write is not None:
        if predicted.winner is None:
            raise InputError(
                f"--write {write}", "no layout fits", "use more nodes, or another card"
            )
        with storing(write):
            write.write_text(to_yaml(predicted.winner), encoding="utf-8")
        say(f"written: {write}   measure it: shardmark run {write}", error=form is PlanFormat.JSON)
    if not predicted.answered:
        raise typer.Exit(1)
