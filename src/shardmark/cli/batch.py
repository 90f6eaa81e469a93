"""`shardmark batch`: the largest batch that each strategy takes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardmark.cli.arguments import ExperimentName, Overrides, TextOrJson, path_of
from shardmark.core.text import say, say_text

GiB = 2**30


def batch(
    experiment: ExperimentName,
    *,
    memory_gib: Annotated[
        float | None,
        typer.Option(
            metavar="GIB",
            min=1e-3,
            help="For a rank's tensors.  By default what its device has, or its part of the"
            " memory that is available here.",
        ),
    ] = None,
    overrides: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            parser=path_of,
            help="Folder of the tries.  Given again, none is repeated.  By default"
            " runs/NAME-batch.",
        ),
    ] = None,
    form: Annotated[
        TextOrJson, typer.Option("--format", help="json holds every try.")
    ] = TextOrJson.TEXT,
) -> None:
    """Find the largest batch of every strategy: predicted, then tried by up to four real runs."""
    from shardmark.cli.compare import terminal_width
    from shardmark.config.load import load_experiment
    from shardmark.core.storage import storing
    from shardmark.launch.largest_batch import largest_batches
    from shardmark.progress.display import listener
    from shardmark.report.table.formats import Format
    from shardmark.report.views.largest_batch import render_largest
    from shardmark.results.runs_folder import create_run_folder, remove_if_empty

    resolved = load_experiment(experiment, overrides or ())
    folder = out if out is not None else create_run_folder(f"{resolved.name}-batch")
    quiet = form is TextOrJson.JSON
    with (
        storing(folder),
        remove_if_empty(folder if out is None else None),
        listener(folder, quiet=quiet) as progress,
    ):
        found = largest_batches(
            resolved,
            folder,
            memory_bytes=None if memory_gib is None else memory_gib * GiB,
            progress=progress,
        )
    text = render_largest(found, Format(form.value), terminal_width() or 80)
    say_text(text if quiet else f"\n{text}")
    if not quiet:
        say("", f"tries: {folder}")
