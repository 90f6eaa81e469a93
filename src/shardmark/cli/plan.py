"""`shardmark plan`: memory, time and cost on machines that nobody has."""

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
    """How a plan is printed."""

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
            help="A node type such as dgx-h100, so many of a card such as h100x8, or a YAML file."
            " Repeat it to compare machines.",
        ),
    ],
    nodes: Annotated[
        str,
        typer.Option(metavar="COUNTS", help="How many nodes: 4, 1,2,3 or, doubling, 1..128."),
    ] = "1",
    run: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="RUN",
            parser=path_of,
            help="Start from a stored run of this model: it fixes how fast computing and"
            " communication are, and gives intervals.",
        ),
    ] = None,
    price_per_hour: Annotated[
        list[float] | None,
        typer.Option(
            metavar="DOLLARS",
            min=0,
            help="Of one card; adds what the recipe costs. With several --on, one for all or one"
            " for each.",
        ),
    ] = None,
    search: Annotated[
        bool,
        typer.Option(
            "--search",
            help="Compare all layouts of the most ranks: copies, shards, tensor ranks, stages,"
            " micro-batches, activation checkpointing, CPU offload.",
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
        PlanFormat, typer.Option("--format", help="json holds every figure, in base units.")
    ] = PlanFormat.TEXT,
) -> None:
    """Predict memory, speed and cost of every strategy on machines that you do not have.

    Exit code 1 where nothing fits, or nothing could be predicted.
    """
    from shardmark.cli.compare import terminal_width
    from shardmark.config.load import load_experiment, to_yaml
    from shardmark.predict.models import Models
    from shardmark.predict.plan import compare_machines, parse_nodes
    from shardmark.report.table.formats import Format
    from shardmark.report.views.plan import render_plan
    from shardmark.results.store import load_run

    if write is not None and not write.parent.is_dir():
        raise InputError(f"--write {write}", "its folder is not there", "make it first")
    if write is not None and write.exists():
        raise InputError(f"--write {write}", "it is there already", "name another file")
    made = compare_machines(
        load_experiment(experiment, overrides or ()),
        on,
        parse_nodes(nodes),
        Models(),
        run=None if run is None else load_run(run),
        prices_per_hour=price_per_hour or (),
        search=search or write is not None,
    )
    say_text(render_plan(made, Format(form.value), terminal_width() or 80))
    if write is not None:
        if made.winner is None:
            raise InputError(
                f"--write {write}", "no layout fits", "use more nodes, or another card"
            )
        with storing(write):
            write.write_text(to_yaml(made.winner), encoding="utf-8")
        say(f"written: {write}   measure it: shardmark run {write}", error=form is PlanFormat.JSON)
    if not made.answered:
        raise typer.Exit(1)
