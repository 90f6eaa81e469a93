"""`shardmark report`: writes a page about runs, and its figures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardmark.base.text import say
from shardmark.cli.arguments import Baseline, Runs, path_of


def report(
    runs: Runs = None,
    *,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            parser=path_of,
            help="File of the page; report.html in the run's folder by default.  The figures are"
            " beside it, in NAME-figures.",
        ),
    ] = None,
    baseline: Baseline = None,
    images: Annotated[
        bool,
        typer.Option("--images/--no-images", help="Also write the figures as PNG and SVG files."),
    ] = True,
    predicted: Annotated[
        bool,
        typer.Option(
            "--predicted",
            help="Also draw the predictions of `plan` against the measurements; tracing the models"
            " takes seconds.",
        ),
    ] = False,
    anonymous: Annotated[
        bool,
        typer.Option(
            "--anonymous",
            help="Leave out the names of machines and users, and absolute paths: for a page that is"
            " published.",
        ),
    ] = False,
    latex: Annotated[
        bool,
        typer.Option("--latex", help="Also write the tables as LaTeX, with booktabs: NAME.tex."),
    ] = False,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="STUDY",
            help="Add the tables, figures and claims of a published study beside the measurements;"
            " `shardmark list studies` has the names.",
        ),
    ] = None,
) -> None:
    """Write a self-contained, interactive page about one or more runs, and its figures."""
    from shardmark.base.results.store import load_runs
    from shardmark.bench.analysis.compare.comparison import compare
    from shardmark.bench.report.page.page import default_out, study_part, write_report

    part_of = None if against is None else study_part(against, "--against")
    stored = load_runs(runs)
    comparison = compare(stored, baseline)
    page = default_out([run.path for run in stored]) if out is None else out
    written = write_report(
        stored,
        comparison,
        page,
        images=images,
        predicted=predicted,
        anonymous=anonymous,
        latex=latex,
        against=None if part_of is None else part_of(comparison),
    )
    say(*written)
