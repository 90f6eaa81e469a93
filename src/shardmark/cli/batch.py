"""`shardmark batch`: finds the largest batch that each strategy can train with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardmark.base.text import say, say_text
from shardmark.cli.arguments import ExperimentName, Overrides, TextOrJson, folder_option


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
        folder_option(
            "Folder of the trials; those that are in it are not repeated.  By default"
            " runs/NAME-batch."
        ),
    ] = None,
    form: Annotated[
        TextOrJson, typer.Option("--format", help="Format of the output; json has every trial.")
    ] = TextOrJson.TEXT,
) -> None:
    """Find the largest batch of every strategy: predict it, then test it by up to four trials."""
    from shardmark.base.files.storage import storing
    from shardmark.base.results.runs_folder import run_folder
    from shardmark.base.table.formats import Format
    from shardmark.base.text import terminal_width
    from shardmark.bench.launch.run_options import RunOptions
    from shardmark.bench.progress.display import listener
    from shardmark.experiment.load import load_experiment
    from shardmark.predict.batch.table import render_largest
    from shardmark.predict.batch.trials import largest_batches

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
            memory_bytes=None if memory_gib is None else memory_gib * 2**30,
            listener=progress,
        )
    text = render_largest(batches, Format(form.value), terminal_width() or 80)
    say_text(text if quiet else f"\n{text}")
    if not quiet:
        say("", f"trials: {folder}")
