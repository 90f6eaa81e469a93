"""`shardmark compare`: stored runs as a table."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from shardmark.analysis.against import Against
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
    paper: Annotated[
        str | None,
        typer.Option(
            "--against",
            metavar="PAPER",
            help="Show a published study's figures beside the measured ones; `shardmark list"
            " papers` has the names.",
        ),
    ] = None,
    epochs: Annotated[
        bool, typer.Option("--epochs", help="Show loss, time and quality epoch by epoch instead.")
    ] = False,
) -> None:
    """Compare the trials of one or more runs: intervals, speed-up, efficiency, memory."""
    from shardmark.analysis.comparison import compare as compare_runs
    from shardmark.papers import load_paper
    from shardmark.results.store import load_run

    study = None if paper is None else load_paper(paper)
    folders = {path.expanduser().resolve(): path.expanduser() for path in runs}
    comparison = compare_runs([load_run(path) for path in folders.values()], baseline)
    if study is not None:
        from shardmark.analysis.against import set_against

        typer.echo(_beside(comparison, set_against(comparison, study), form, epochs), nl=False)
    elif epochs:
        typer.echo(_by_epoch(comparison, form), nl=False)
    else:
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


def _by_epoch(comparison: Comparison, form: Format) -> str:
    from shardmark.report.data import render_json
    from shardmark.report.epochs import epochs_csv, epochs_json, epochs_section
    from shardmark.report.sections import render_sections

    if form is Format.CSV:
        return epochs_csv(comparison)
    if form is Format.JSON:
        return render_json(comparison, {"epochs": epochs_json(comparison)})
    return render_sections([epochs_section(comparison)], markdown=form is Format.MARKDOWN)


def _beside(comparison: Comparison, against: Against, form: Format, epochs: bool) -> str:
    """The comparison and the study; with `epochs` only the tables by epoch."""
    from shardmark.report.against import against_sections, epoch_sections
    from shardmark.report.against_data import against_csv, against_epochs_csv, against_json
    from shardmark.report.data import render_json
    from shardmark.report.epochs import epochs_json
    from shardmark.report.sections import render_sections

    if form is Format.CSV:
        return (against_epochs_csv if epochs else against_csv)(comparison, against)
    if form is Format.JSON:
        by_epoch = {"epochs": epochs_json(comparison)} if epochs else {}
        return render_json(comparison, {**by_epoch, "against": against_json(against)})
    markdown = form is Format.MARKDOWN
    if epochs:
        return render_sections(epoch_sections(against), markdown=markdown)
    sections = render_sections(against_sections(against), markdown=markdown)
    return f"{render(comparison, form)}\n{sections}"
