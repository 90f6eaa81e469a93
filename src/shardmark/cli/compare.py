"""`shardmark compare`: prints stored runs as answers and a table, or as a view."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from shardmark.base.errors import InputError
from shardmark.base.table.formats import Format
from shardmark.base.text import say, say_text, terminal_width
from shardmark.cli.arguments import Baseline, Runs

if TYPE_CHECKING:
    from shardmark.base.results.store import Damaged, StoredRun
    from shardmark.base.table.table import Table
    from shardmark.bench.analysis.compare.comparison import Comparison
    from shardmark.bench.report.views.registry import View

DEFAULT_THRESHOLD_PERCENT = 2.0
"""The smallest change that is called a regression."""
REGRESSED, UNDECIDED = 1, 2
"""Exit codes of `--regression`."""


def compare(
    runs: Runs = None,
    *,
    baseline: Baseline = None,
    form: Annotated[
        Format,
        typer.Option(
            "--format", help="csv and json have every metric, in base units; latex needs booktabs."
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
    view: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[:VALUE]",
            help="Show a view instead of the comparison: scaling (speed-up and efficiency over the"
            " numbers of ranks), epochs (loss, time and quality of every epoch), network (bytes,"
            " bandwidth and links), metrics (all metrics of every row), when (the best strategy"
            " over each axis), effort (packages, arguments and lines that a strategy adds),"
            " time-to:METRIC[=VALUE] (training time to a loss or quality, such as"
            " time-to:accuracy_top1=0.8; without =VALUE, to the best one that every row reached),"
            " study:NAME (the comparison, then a published study; `shardmark list studies` has"
            " the names).  May be given repeatedly.",
        ),
    ] = None,
    regression: Annotated[
        bool,
        typer.Option(
            "--regression",
            help="Compare the second run with the first instead: exit code 1 if a cell became"
            " slower or fails now, 2 if a cell is not decided (see --min-decided).",
        ),
    ] = False,
    min_decided: Annotated[
        float | None,
        typer.Option(
            metavar="PERCENT",
            help="Percentage of the cells that must be decided for exit code 0; 100 by default.",
        ),
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option(
            metavar="PERCENT", help="Smallest change that counts as a regression; 2 by default."
        ),
    ] = None,
) -> None:
    """Compare the trials of one or more runs: intervals, speed-up, efficiency, memory."""
    views = view or []
    if regression and views:
        raise InputError(f"--view {views[0]}", "given with --regression", "give one of the two")
    if form is Format.CSV and len(views) > 1:
        raise InputError("--format csv", f"{len(views)} views are given", "allowed is one")
    if threshold is not None and not (regression and 0 < threshold < 100):
        raise InputError(
            "--threshold", f"found {threshold:g}", "it is a percentage, and goes with --regression"
        )
    if min_decided is not None and not (regression and 0 < min_decided <= 100):
        problem = f"found {min_decided:g}"
        remedy = "it is a percentage above 0, and goes with --regression"
        raise InputError("--min-decided", problem, remedy)
    table_options = {
        "--wide": wide,
        "--columns": columns is not None,
        # The rows of a view have their verdicts against the baseline in CSV.
        "--baseline": baseline is not None and (regression or form is not Format.CSV),
    }
    table_only = [option for option, is_set in table_options.items() if is_set]
    from shardmark.base.results.store import load_runs

    if regression:
        _refuse_table_options(table_only, "--regression")
        percent = threshold or DEFAULT_THRESHOLD_PERCENT
        loaded = load_runs(runs)
        _report_damaged(damaged for run in loaded for damaged in run.damaged)
        raise typer.Exit(_regression(loaded, form, percent, min_decided or 100))
    from shardmark.bench.analysis.compare.comparison import compare as compare_runs
    from shardmark.bench.report.table.comparison import WIDE
    from shardmark.bench.report.views.registry import find_view

    parsed_views = [find_view(name) for name in views]
    with_comparison = _with_comparison(parsed_views, form)
    if not with_comparison:
        _refuse_table_options(table_only, f"--view {views[0]}")
    names = list(WIDE) if wide else None
    if columns is not None:
        names = [name.strip() for name in columns.split(",") if name.strip()]
        if wide or not names:
            problem = "given with --wide" if wide else "names no column"
            raise InputError("--columns", problem, "give one of --wide and --columns NAME,NAME")
    comparison = compare_runs(load_runs(runs), baseline)
    say_text(_render(comparison, parsed_views, form, names))
    if form.for_programs or not with_comparison:  # otherwise a note below the comparison
        _report_damaged(comparison.damaged)


def _report_damaged(results: Iterable[Damaged]) -> None:
    for damaged in results:
        say(f"damaged, left out: {damaged}", error=True)


def _with_comparison(views: Sequence[tuple[View, str]], form: Format) -> bool:
    """Return True if the output has the comparison, alone or beside the views."""
    if not views or form is Format.JSON:
        return True
    return form is not Format.CSV and any(view.with_comparison for view, _ in views)


def _refuse_table_options(options: Sequence[str], printed: str) -> None:
    """Raise `InputError` if an option of the comparison table is given, which is not printed."""
    if options:
        problem = f"it is for the comparison table, in place of which {printed} prints another"
        raise InputError(options[0], problem, f"leave out {options[0]} or {printed}")


def _render(
    comparison: Comparison,
    views: Sequence[tuple[View, str]],
    form: Format,
    columns: Sequence[str] | None,
) -> str:
    from shardmark.base.table.formats import render_tables
    from shardmark.bench.report.answers.overview import overview, overview_json

    tables: dict[View, list[Table]] = {}
    for view, value in views:
        tables.setdefault(view, []).extend(view.tables(comparison, value))
    if form is Format.JSON:
        documents = {view.key: view.document(made) for view, made in tables.items()}
        return overview_json(comparison, documents, columns or ())
    parts = []
    if _with_comparison(views, form):
        width = terminal_width() or (None if columns else 80)
        parts.append(overview(comparison, form, columns, width))
    if views:
        all_tables = [table for made in tables.values() for table in made]
        parts.append(render_tables(all_tables, form, terminal_width()))
    return "\n".join(parts)


def _regression(runs: Sequence[StoredRun], form: Format, percent: float, min_decided: float) -> int:
    """Print the changes from the first run to the second and return the exit code.

    The code is 1 if a cell regressed, 2 if fewer cells are decided than `min_decided` percent.
    """
    from shardmark.base.table.formats import render_points, render_tables
    from shardmark.base.text import render_json
    from shardmark.bench.analysis.compare.regression import find_regressions
    from shardmark.bench.report.views.regression import (
        regression_json,
        regression_lines,
        regression_table,
    )

    if len(runs) != 2:
        count = "one run is" if len(runs) == 1 else f"{len(runs)} runs are"
        raise InputError("--regression", f"{count} named", "name two different runs: before, after")
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
    return 0 if 100 * regression.decided_share >= min_decided else UNDECIDED
