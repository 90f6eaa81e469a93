"""`shardmark why`: where the time of an unchanged script's step goes."""

from __future__ import annotations

import json
import os
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardmark.base.errors import InputError
from shardmark.base.text import say, say_text
from shardmark.cli.arguments import TextOrJson, folder_option, numbers_of_ranks
from shardmark.cli.run import resumable
from shardmark.cli.time import measured_command

if TYPE_CHECKING:
    from shardmark.bench.analysis.taken_away import Explanation


def explain_step(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="-- COMMAND",
            help="A script with its arguments, and its launcher if it has one.",
        ),
    ],
    *,
    ranks: Annotated[
        str | None,
        typer.Option(metavar="N,...", help="Numbers of ranks; by default the command's, or 1."),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="In all, such as 90s; by default 10m for each number."),
    ] = None,
    out: Annotated[
        Path | None,
        folder_option("Folder of the run; a run that is in it is continued.  By default runs/why."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the answer.")] = False,
    form: Annotated[
        TextOrJson, typer.Option("--format", help="json: the answer alone, in seconds.")
    ] = TextOrJson.TEXT,
) -> None:
    """Say where a step's time goes: take away input, peers, evaluation and more, one at a time."""
    from shardmark.base.durations import parse_seconds
    from shardmark.base.results.runs_folder import run_folder
    from shardmark.base.system.extras import is_installed
    from shardmark.bench.launch.run_options import RunOptions
    from shardmark.bench.progress.display import listener
    from shardmark.bench.report.answers.parts import facts_of, lines_of, scaling_lines
    from shardmark.bench.report.figures.drawing import draw, write_images
    from shardmark.bench.report.figures.measured import parts_by_ranks
    from shardmark.bench.why import explain

    parsed = measured_command(command)
    words = ["python", *parsed.script] if parsed.script[0] == "-m" else [*parsed.script]
    numbers = [parsed.ranks or 1] if ranks is None else numbers_of_ranks(ranks)
    if len(numbers) > 1:  # as in `time`, so that steps of one and of more ranks compare
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    longest = f"{10 * len(numbers)}m" if budget is None else budget
    ends_at = time.monotonic() + parse_seconds(longest, "--budget")
    missing: list[str] = []
    explanations: list[Explanation] = []
    documents = []
    with run_folder(out, "why") as folder, resumable(folder):
        for index, number in enumerate(numbers):
            seconds = max(ends_at - time.monotonic(), 0) / (len(numbers) - index)
            path = folder if len(numbers) == 1 else folder / f"ranks-{number}"
            options = RunOptions(quiet=quiet or form is TextOrJson.JSON, budget_seconds=seconds)
            with listener(path, options) as progress:
                try:
                    explanation = explain(
                        shlex.join(words), number, path, budget_seconds=seconds, listener=progress
                    )
                except InputError as error:
                    if not explanations:
                        raise
                    missing.append(f"no answer for {number} ranks: {error}")
                    continue
            explanations.append(explanation)
            documents.append({**facts_of(explanation), "run": str(path)})
            if form is TextOrJson.TEXT:
                say_text("\n".join(["", *lines_of(explanation), "", f"files: {path}", ""]))
        drawn = len(numbers) > 1 and is_installed("vl_convert")
        images = write_images(draw(parts_by_ranks(explanations)), folder) if drawn else []
    say(*missing, error=True)
    if form is TextOrJson.JSON:
        say_text(json.dumps(documents[0] if len(numbers) == 1 else documents, indent=1) + "\n")
    elif len(numbers) > 1:
        say_text("\n".join(["", *scaling_lines(explanations), *map(str, images), ""]))
