"""`shardmark compare`: stored runs as tables, and what they say."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardmark.core.errors import InputError
from shardmark.report.table.formats import Format

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from shardmark.analysis.compare.comparison import Comparison
    from shardmark.analysis.studies.against import Against
    from shardmark.report.table.table import Table

Runs = Annotated[
    list[Path] | None,
    typer.Argument(metavar="RUN", help="Folders that `run` has written; the latest by default."),
]
Baseline = Annotated[
    str | None,
    typer.Option(
        metavar="STRATEGY",
        help="Strategy that speed-up and memory ratio refer to; `single` by default.",
    ),
]
Form = Annotated[
    Format,
    typer.Option(
        "--format",
        help="csv and json hold every metric, in base units; latex needs booktabs and adjustbox.",
    ),
]
Wide = Annotated[bool, typer.Option("--wide", help="Show more columns.")]
Columns = Annotated[
    str | None,
    typer.Option(
        metavar="NAME,NAME",
        help="Show these columns: metrics of `shardmark list metrics`, verdict, state_bytes, ...",
    ),
]
Study = Annotated[
    str | None,
    typer.Option(
        "--against",
        metavar="STUDY",
        help="Show a published study's figures beside the measured ones; `shardmark list"
        " studies` has the names.",
    ),
]
Epochs = Annotated[
    bool, typer.Option("--epochs", help="Show loss, time and quality epoch by epoch instead.")
]
Scaling = Annotated[
    bool,
    typer.Option(
        "--scaling", help="Show speed-up and efficiency over the numbers of ranks instead."
    ),
]
Pareto = Annotated[
    bool,
    typer.Option(
        "--pareto", help="Show what nothing beats in throughput, memory and quality instead."
    ),
]
Network = Annotated[
    bool,
    typer.Option(
        "--network",
        help="Show bytes by formula and as measured, bandwidth and links instead.",
    ),
]
Nodes = Annotated[
    bool,
    typer.Option(
        "--nodes", help="Show every row node by node instead: speed, memory, processes, devices."
    ),
]
TimeTo = Annotated[
    str | None,
    typer.Option(
        "--time-to",
        metavar="METRIC[=VALUE]",
        help="Show the training time to a loss or quality instead, as in accuracy_top1=0.8;"
        " without VALUE, to the best one that every row reached.",
    ),
]


def compare(
    runs: Runs = None,
    *,
    baseline: Baseline = None,
    form: Form = Format.TEXT,
    wide: Wide = False,
    columns: Columns = None,
    against: Study = None,
    epochs: Epochs = False,
    scaling: Scaling = False,
    pareto: Pareto = False,
    nodes: Nodes = False,
    time_to: TimeTo = None,
    network: Network = False,
) -> None:
    """Compare the trials of one or more runs: intervals, speed-up, efficiency, memory."""
    asked = {
        "--scaling": scaling,
        "--pareto": pareto,
        "--time-to": time_to is not None,
        "--network": network,
        "--nodes": nodes,
        "--epochs": epochs,
    }
    views = [name for name, wanted in asked.items() if wanted]
    _check_options(views, form, against)
    from shardmark.analysis.compare.comparison import compare as compare_runs
    from shardmark.analysis.studies.study import load_study
    from shardmark.results.runs_folder import latest_run
    from shardmark.results.store import load_run

    study = None if against is None else load_study(against)
    folders = {path.expanduser().resolve(): path.expanduser() for path in runs or [latest_run()]}
    comparison = compare_runs([load_run(path) for path in folders.values()], baseline)
    if study is not None:
        from shardmark.analysis.studies.against import set_against

        output = _beside(comparison, set_against(comparison, study), form)
    elif views:
        output = _viewed(comparison, views, form, time_to)
    else:
        output = render(comparison, form, _names(wide=wide, columns=columns))
    typer.echo(output, nl=False)
    if form.for_programs:
        for damaged in comparison.damaged:
            typer.echo(f"damaged, left out: {damaged}", err=True)


def render(
    comparison: Comparison, form: Format = Format.TEXT, columns: Sequence[str] | None = None
) -> str:
    """The answers and the table in that format; ends with a line break.

    A table that is wider than the terminal, or than 80 characters elsewhere, is divided where no
    columns were asked for; CSV is the table alone.
    """
    from shardmark.report.answers.answers import answer_grid, answer_lines, next_commands
    from shardmark.report.answers.why import why_lines
    from shardmark.report.table.comparison import BRIEF, comparison_table
    from shardmark.report.table.formats import render_points, render_tables

    if form is Format.JSON:
        return _json(comparison)
    table = comparison_table(comparison, columns or BRIEF)
    width = terminal_width() or (None if columns else 80)
    shown = render_tables([table], form, width, headings=False)
    if form is Format.CSV:
        return shown
    grid = answer_grid(comparison)
    last = [*why_lines(comparison), *next_commands(comparison)]
    parts = [
        *([render_points(lines, form, width)] if (lines := answer_lines(comparison)) else []),
        *([] if grid is None else [render_tables([grid], form, width)]),
        shown,
        *([render_points(last, form, width)] if last else []),
    ]
    return "\n".join(parts)


def _json(comparison: Comparison, views: Mapping[str, object] | None = None) -> str:
    """`answers`, `rows` and `warnings`, then the views by name."""
    from shardmark.report.answers.answers import answers_json
    from shardmark.report.table.comparison import comparison_json
    from shardmark.report.table.formats import render_json

    document = {"answers": answers_json(comparison), **comparison_json(comparison)}
    return render_json(document | dict(views or {}))


def terminal_width() -> int | None:
    """Characters in a line of the terminal; None where the output goes elsewhere."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _names(*, wide: bool, columns: str | None) -> list[str] | None:
    """Columns of the table; None for the few."""
    from shardmark.report.table.comparison import WIDE

    if columns is not None:
        return [name.strip() for name in columns.split(",") if name.strip()]
    return list(WIDE) if wide else None


def _check_options(views: Sequence[str], form: Format, study: str | None) -> None:
    """Refuse what would print one thing and silently leave out another."""
    if study is not None and views:
        raise InputError(views[0], f"given together with --against {study}", "give one of the two")
    if form is Format.CSV and len(views) > 1:
        names = f"{', '.join(views[:-1])} and {views[-1]}"
        raise InputError("--format csv", f"{names} are several tables", "allowed is one at a time")


def _viewed(comparison: Comparison, names: Sequence[str], form: Format, time_to: str | None) -> str:
    """The views in the order of the names, whatever that of the options."""
    from shardmark.report.table.formats import records, render_tables
    from shardmark.report.views.epochs import epochs_tables
    from shardmark.report.views.network import network_json, network_tables
    from shardmark.report.views.pareto import pareto_tables
    from shardmark.report.views.per_node import nodes_tables
    from shardmark.report.views.scaling import scaling_tables
    from shardmark.report.views.time_to_quality import time_to_tables

    makers: dict[str, Callable[[], list[Table]]] = {
        "--scaling": lambda: scaling_tables(comparison),
        "--pareto": lambda: pareto_tables(comparison),
        "--time-to": lambda: time_to_tables(comparison, str(time_to)),
        "--network": lambda: network_tables(comparison),
        "--nodes": lambda: nodes_tables(comparison),
        "--epochs": lambda: epochs_tables(comparison),
    }
    tables = {name: makers[name]() for name in names}
    if form is not Format.JSON:
        everything = [table for part in tables.values() for table in part]
        return render_tables(everything, form, terminal_width())
    documents = {
        name.removeprefix("--").replace("-", "_"): network_json(part)
        if name == "--network"
        else [record for table in part for record in records(table)]
        for name, part in tables.items()
    }
    return _json(comparison, documents)


def _beside(comparison: Comparison, against: Against, form: Format) -> str:
    """The comparison and the study; CSV is the study's table alone."""
    from shardmark.report.table.formats import records, render_tables
    from shardmark.report.views.against import against_tables

    tables = against_tables(against)
    if form is Format.JSON:
        lines = [record for table in tables for record in records(table)]
        return _json(comparison, {"against": lines})
    if form is Format.CSV:
        return render_tables(tables[:1], form)
    return f"{render(comparison, form)}\n{render_tables(tables, form, terminal_width())}"
