"""`shardmark batch`: finds the largest batch that each strategy can train with."""

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
            help="Memory for a rank's tensors; by default the memory of its device, or its share"
            " of the memory that is available on this machine.",
        ),
    ] = None,
    overrides: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            parser=path_of,
            help="Folder of the trials; those that are in it are not repeated.  By default"
            " runs/NAME-batch.",
        ),
    ] = None,
    form: Annotated[
        TextOrJson, typer.Option("--format", help="Format of the output; json has every trial.")
    ] = TextOrJson.TEXT,
) -> None:
    """Find the largest batch of every strategy: predict it, then test it by up to four trials."""
    from shardmark.cli.compare import terminal_width
    from shardmark.config.load import load_experiment
    from shardmark.core.storage import storing
    from shardmark.launch.largest_batch import largest_batches
    from shardmark.launch.run_options import RunOptions
    from shardmark.progress.display import listener
    from shardmark.report.table.formats import Format
    from shardmark.report.views.largest_batch import render_largest
    from shardmark.results.runs_folder import run_folder

    resolved = load_experiment(experiment, overrides or ())
    quiet = form is TextOrJson.JSON
    with (
        run_folder(out, f"{resolved.name}-batch") as folder,
        storing(folder),
        listener(folder, RunOptions(quiet=quiet)) as progress,
    ):
        batches = largest_batches(
            resolved,
            folder,
            memory_bytes=None if memory_gib is None else memory_gib * GiB,
            listener=progress,
        )
    text = render_largest(batches, Format(form.value), terminal_width() or 80)
    say_text(text if quiet else f"\n{text}")
    if not quiet:
        say("", f"trials: {folder}")
