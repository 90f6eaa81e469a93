"""`shardmark compare`: stored runs as answers and a table, or seen another way."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from shardmark.cli.arguments import Baseline, Runs, load_runs
from shardmark.core.errors import InputError
from shardmark.core.text import say, say_text
from shardmark.report.table.formats import Format

if TYPE_CHECKING:
    from shardmark.analysis.compare.comparison import Comparison
    from shardmark.report.table.table import Table
    from shardmark.results.store import StoredRun

PERCENT = 2.0
"""Smallest change that is called a regression."""
REGRESSED, UNDECIDED = 1, 2
"""Exit codes of `--regression`."""


def compare(
    runs: Runs = None,
    *,
    baseline: Baseline = None,
    form: Annotated[
        Format,
        typer.Option(
            "--format",
            help="csv and json hold every metric, in base units; latex needs booktabs and"
            " adjustbox.",
        ),
    ] = Format.TEXT,
    wide: Annotated[bool, typer.Option("--wide", help="Show more columns.")] = False,
    columns: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,NAME",
            help="Show these columns: metrics of `shardmark list metrics`, verdict, state_bytes,"
            " predicted (speed and memory by `plan`), ...",
        ),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="STUDY",
            help="Show a published study's figures beside the measured ones; `shardmark list"
            " studies` has the names.",
        ),
    ] = None,
    epochs: Annotated[
        bool, typer.Option("--epochs", help="Show loss, time and quality epoch by epoch instead.")
    ] = False,
    scaling: Annotated[
        bool,
        typer.Option(
            "--scaling", help="Show speed-up and efficiency over the numbers of ranks instead."
        ),
    ] = False,
    pareto: Annotated[
        bool,
        typer.Option(
            "--pareto", help="Show what nothing beats in throughput, memory and quality instead."
        ),
    ] = False,
    nodes: Annotated[
        bool,
        typer.Option(
            "--nodes",
            help="Show every row node by node instead: speed, memory, processes, devices.",
        ),
    ] = False,
    time_to: Annotated[
        str | None,
        typer.Option(
            metavar="METRIC[=VALUE]",
            help="Show the training time to a loss or quality instead, as in accuracy_top1=0.8;"
            " without VALUE, to the best one that every row reached.",
        ),
    ] = None,
    network: Annotated[
        bool,
        typer.Option(
            "--network", help="Show bytes by formula and as measured, bandwidth and links instead."
        ),
    ] = False,
    regression: Annotated[
        bool,
        typer.Option(
            "--regression",
            help="Hold the second run against the first instead: exit code 1 where a cell became"
            " slower or fails now, 2 where no cell is decided.",
        ),
    ] = False,
    threshold: Annotated[
        float | None,
        typer.Option(
            metavar="PERCENT", help="Smallest change that counts as a regression; 2 by default."
        ),
    ] = None,
) -> None:
    """Compare the trials of one or more runs: intervals, speed-up, efficiency, memory."""
    asked: dict[str, str | bool | None] = {
        "regression": regression,
        "scaling": scaling,
        "pareto": pareto,
        "time_to": time_to,
        "network": network,
        "nodes": nodes,
        "epochs": epochs,
    }
    views = {name: value for name, value in asked.items() if value not in (False, None)}
    _check_options([f"--{name.replace('_', '-')}" for name in views], form, against)
    if threshold is not None and not (regression and 0 < threshold < 100):
        raise InputError(
            "--threshold", f"found {threshold:g}", "it is a percentage, and goes with --regression"
        )
    if regression:
        raise typer.Exit(_regression(load_runs(runs), form, threshold or PERCENT))
    from shardmark.analysis.compare.comparison import compare as compare_runs
    from shardmark.report.answers.overview import overview, overview_json
    from shardmark.report.table.comparison import WIDE
    from shardmark.report.table.formats import render_tables

    comparison = compare_runs(load_runs(runs), baseline)
    if against is not None:
        views = {"against": against}
    tables = {name: _view(comparison, name, str(value)) for name, value in views.items()}
    names = list(WIDE) if wide else None
    if columns is not None:
        names = [name.strip() for name in columns.split(",") if name.strip()]
    if form is Format.JSON:
        documents = {name: _document(name, part) for name, part in tables.items()}
        output = overview_json(comparison, documents, names or ())
    else:
        parts = []
        if not tables or (against is not None and form is not Format.CSV):
            width = terminal_width() or (None if names else 80)
            parts.append(overview(comparison, form, names, width))
        if tables:
            shown = [table for part in tables.values() for table in part]
            if against is not None and form is Format.CSV:
                shown = shown[:1]  # the claims are another table
            parts.append(render_tables(shown, form, terminal_width()))
        output = "\n".join(parts)
    say_text(output)
    if form.for_programs:
        for damaged in comparison.damaged:
            say(f"damaged, left out: {damaged}", error=True)


def _regression(runs: Sequence[StoredRun], form: Format, percent: float) -> int:
    """Print what changed from the first run to the second.

    Returns the exit code: 1 where something regressed, 2 where nothing is decided.
    """
    from shardmark.analysis.compare.regression import find_regressions
    from shardmark.report.table.formats import render_json, render_points, render_tables
    from shardmark.report.views.regression import (
        regression_json,
        regression_lines,
        regression_table,
    )

    if len(runs) != 2:
        given = "one run is" if len(runs) == 1 else f"{len(runs)} runs are"
        raise InputError("--regression", f"{given} named", "name two: before and after")
    regression = find_regressions(*runs, threshold=percent / 100)
    if form is Format.JSON:
        say_text(render_json({"regression": regression_json(regression)}))
    else:
        width = terminal_width() or 80
        if form is not Format.CSV:
            say_text(render_points(regression_lines(regression), form, width) + "\n")
        say_text(render_tables([regression_table(regression)], form, width))
    if regression.regressions:
        return REGRESSED
    return 0 if regression.decided else UNDECIDED


def _view(comparison: Comparison, name: str, value: str) -> Sequence[Table]:
    """The tables of an option; the value is its own, where it takes one."""
    from shardmark.analysis.studies.against import set_against
    from shardmark.analysis.studies.study import load_study
    from shardmark.report.views import against, epochs, network, nodes, pareto, scaling

    views: dict[str, Callable[[], Sequence[Table]]] = {
        "scaling": lambda: scaling.scaling_tables(comparison),
        "pareto": lambda: pareto.pareto_tables(comparison),
        "time_to": lambda: epochs.time_to_tables(comparison, value),
        "network": lambda: network.network_tables(comparison),
        "nodes": lambda: nodes.nodes_tables(comparison),
        "epochs": lambda: epochs.epochs_tables(comparison),
        "against": lambda: against.against_tables(set_against(comparison, load_study(value))),
    }
    return views[name]()


def _document(name: str, tables: Sequence[Table]) -> object:
    """A view as JSON has it."""
    from shardmark.report.table.formats import records
    from shardmark.report.views.network import network_json

    if name == "network":
        return network_json(tables)
    return [record for table in tables for record in records(table)]


def _check_options(views: Sequence[str], form: Format, study: str | None) -> None:
    """Refuse what would print one thing and silently leave out another."""
    if study is not None and views:
        raise InputError(views[0], f"given together with --against {study}", "give one of the two")
    if "--regression" in views and len(views) > 1:
        raise InputError(views[1], "given together with --regression", "give one of the two")
    if form is Format.CSV and len(views) > 1:
        names = f"{', '.join(views[:-1])} and {views[-1]}"
        raise InputError("--format csv", f"{names} are several tables", "allowed is one at a time")


def terminal_width() -> int | None:
    """Characters in a line of the terminal; None where the output goes elsewhere."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None
