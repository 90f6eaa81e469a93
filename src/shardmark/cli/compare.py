"""`shardmark compare`: stored runs as a table."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from shardmark.analysis.comparison import Comparison


class Format(StrEnum):
    """How the comparison is printed."""

    TEXT = "text"
    MARKDOWN = "markdown"
    CSV = "csv"
    JSON = "json"


def compare(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN", help="Folders that `run` has written.")
    ],
    baseline: Annotated[
        str | None,
        typer.Option(
            metavar="STRATEGY",
            help="Strategy that speed-up and memory ratio refer to; `single` by default.",
        ),
    ] = None,
    form: Annotated[
        Format, typer.Option("--format", help="csv and json hold every metric, in base units.")
    ] = Format.TEXT,
) -> None:
    """Compare the trials of one or more runs: intervals, speed-up, efficiency, memory."""
    from shardmark.analysis.comparison import compare as compare_runs
    from shardmark.results.store import load_run

    folders = {path.expanduser().resolve(): path.expanduser() for path in runs}
    comparison = compare_runs([load_run(path) for path in folders.values()], baseline)
    typer.echo(render(comparison, form), nl=False)
    if form in (Format.CSV, Format.JSON):
        for damaged in comparison.damaged:
            typer.echo(f"damaged, left out: {damaged}", err=True)


def render(comparison: Comparison, form: Format = Format.TEXT) -> str:
    """The comparison in that format; ends with a line break."""
    if form in (Format.CSV, Format.JSON):
        from shardmark.report.data import render_csv, render_json

        return render_json(comparison) if form is Format.JSON else render_csv(comparison)
    from shardmark.report.markdown import render_markdown
    from shardmark.report.tables import comparison_table
    from shardmark.report.text import render_text

    table = comparison_table(comparison)
    return render_markdown(table) if form is Format.MARKDOWN else render_text(table)
