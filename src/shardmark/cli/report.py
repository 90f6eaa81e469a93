"""`shardmark report`: one page to read and to keep, and the figures beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RUN", help="Folders that `run` has written; the latest by default."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The page; report.html inside the run's folder by default.  The figures lie"
            " beside it, in NAME-figures.",
        ),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            metavar="STRATEGY",
            help="Strategy that speed-up and memory ratio refer to; `single` by default.",
        ),
    ] = None,
    images: Annotated[
        bool, typer.Option("--images/--no-images", help="Write the figures as PNG and SVG, too.")
    ] = True,
) -> None:
    """Write one self-contained, interactive page about one or more runs, and its figures."""
    from shardmark.analysis.compare.comparison import compare
    from shardmark.report.page.page import default_out, write_report
    from shardmark.results.runs_folder import latest_run
    from shardmark.results.store import load_run

    folders = {path.expanduser().resolve(): path.expanduser() for path in runs or [latest_run()]}
    stored = [load_run(path) for path in folders.values()]
    page = default_out(list(folders.values())) if out is None else out.expanduser()
    written = write_report(stored, compare(stored, baseline), page, images=images)
    typer.echo(f"report: {written.page}")
    if written.images is not None:
        typer.echo(f"figures: {written.images} ({written.figures}, each as PNG and SVG)")
