"""`shardmark compare`: stored runs as tables, and what they say."""

from __future__ import annotations

import shutil
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardmark.core.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardmark.analysis.compare.comparison import Comparison
    from shardmark.analysis.studies.against import Against
    from shardmark.report.table.sections import View

ANSWERS = "Answers"


class Format(StrEnum):
    """How the comparison is printed."""

    TEXT = "text"
    MARKDOWN = "markdown"
    CSV = "csv"
    JSON = "json"
    LATEX = "latex"


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
        help="csv and json hold every metric, in base units; latex needs booktabs and graphicx.",
    ),
]
Paper = Annotated[
    str | None,
    typer.Option(
        "--against",
        metavar="PAPER",
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
        "--nodes", help="Show every row node by node instead: speed, memory, network, devices."
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
    paper: Paper = None,
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
    }
    names = [name for name, wanted in asked.items() if wanted]
    _check_options(["--epochs", *names] if epochs else names, form, paper)
    from shardmark.analysis.compare.comparison import compare as compare_runs
    from shardmark.analysis.studies import load_paper
    from shardmark.results.runs_folder import latest_run
    from shardmark.results.store import load_run

    study = None if paper is None else load_paper(paper)
    folders = {path.expanduser().resolve(): path.expanduser() for path in runs or [latest_run()]}
    comparison = compare_runs([load_run(path) for path in folders.values()], baseline)
    if study is not None:
        from shardmark.analysis.studies.against import set_against

        output = _beside(comparison, set_against(comparison, study), form, epochs)
    elif epochs or names:
        views = _views(comparison, [*names, *(["--epochs"] if epochs else [])], time_to)
        output = _viewed(comparison, views, form)
    else:
        output = render(comparison, form)
    typer.echo(output, nl=False)
    if form in (Format.CSV, Format.JSON):
        for damaged in comparison.damaged:
            typer.echo(f"damaged, left out: {damaged}", err=True)


def render(comparison: Comparison, form: Format = Format.TEXT) -> str:
    """The table and what to choose in that format; ends with a line break.

    On a terminal a table that is wider than it is divided; CSV is the table alone.
    """
    from shardmark.report.answers.answers import answer_lines, answers_json, next_commands
    from shardmark.report.answers.why import why_lines

    if form in (Format.CSV, Format.JSON):
        from shardmark.report.table.data import render_csv, render_json

        if form is Format.CSV:
            return render_csv(comparison)
        return render_json(comparison, {"answers": answers_json(comparison)})
    from shardmark.report.table.sections import Markup, render_points, render_table
    from shardmark.report.table.tables import comparison_table

    markup, width = Markup(form.value), terminal_width()
    tasks = dict.fromkeys(f"{row.experiment}: {row.workload}" for row in comparison.rows)
    table = render_table(comparison_table(comparison), markup, width, "; ".join(tasks) or None)
    lines = [*answer_lines(comparison), *why_lines(comparison), *next_commands(comparison)]
    if not lines:
        return table
    return f"{table}\n{render_points(ANSWERS, lines, markup, width)}"


def terminal_width() -> int | None:
    """Characters in a line of the terminal; None where the output goes elsewhere."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _check_options(views: Sequence[str], form: Format, paper: str | None) -> None:
    """Refuse what would print one thing and silently leave out another."""
    if paper is not None:
        for name in views:
            if name != "--epochs":
                raise InputError(
                    name, f"given together with --against {paper}", "allowed there is only --epochs"
                )
    if form is Format.CSV and len(views) > 1:
        number = "two" if len(views) == 2 else str(len(views))
        found = f"{', '.join(views[:-1])} and {views[-1]} are {number} tables"
        raise InputError("--format csv", found, "allowed is one at a time")


def _views(comparison: Comparison, names: Sequence[str], time_to: str | None) -> list[View]:
    """In the order of the names, whatever that of the options."""
    from shardmark.report.views.epochs import epochs_view
    from shardmark.report.views.network_view import network_view
    from shardmark.report.views.pareto import pareto_view
    from shardmark.report.views.per_node import nodes_view
    from shardmark.report.views.scaling import scaling_view
    from shardmark.report.views.time_to_quality import time_to_view

    makers: dict[str, Callable[[], View]] = {
        "--scaling": lambda: scaling_view(comparison),
        "--pareto": lambda: pareto_view(comparison),
        "--time-to": lambda: time_to_view(comparison, str(time_to)),
        "--network": lambda: network_view(comparison),
        "--nodes": lambda: nodes_view(comparison),
        "--epochs": lambda: epochs_view(comparison),
    }
    return [makers[name]() for name in names]


def _viewed(comparison: Comparison, views: Sequence[View], form: Format) -> str:
    from shardmark.report.table.data import render_json
    from shardmark.report.table.sections import Markup, render_sections

    if form is Format.CSV:
        (view,) = views
        return view.csv()
    if form is Format.JSON:
        return render_json(comparison, {view.key: view.data() for view in views})
    sections = [section for view in views for section in view.sections()]
    return render_sections(sections, Markup(form.value), terminal_width())


def _beside(comparison: Comparison, against: Against, form: Format, epochs: bool) -> str:
    """The comparison and the study; with `epochs` only the tables by epoch."""
    from shardmark.report.answers.answers import answers_json
    from shardmark.report.studies.against import against_sections, epoch_sections, no_epochs
    from shardmark.report.studies.against_data import against_csv, against_epochs_csv, against_json
    from shardmark.report.table.data import render_json
    from shardmark.report.table.sections import Markup, render_sections
    from shardmark.report.views.epochs import epochs_json

    if form is Format.CSV:
        for note in no_epochs(against) if epochs else ():
            typer.echo(note, err=True)
        return (against_epochs_csv if epochs else against_csv)(comparison, against)
    if form is Format.JSON:
        beside = (
            {"epochs": epochs_json(comparison)} if epochs else {"answers": answers_json(comparison)}
        )
        return render_json(comparison, {**beside, "against": against_json(against)})
    markup, width = Markup(form.value), terminal_width()
    if epochs:
        return render_sections(epoch_sections(against), markup, width)
    sections = render_sections(against_sections(against), markup, width)
    return f"{render(comparison, form)}\n{sections}"
