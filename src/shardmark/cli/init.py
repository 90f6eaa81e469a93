"""`shardmark init`: writes a task and an experiment to start from."""

from __future__ import annotations

import sys
from enum import StrEnum
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from shardmark.core.errors import InputError
from shardmark.core.text import say


class Template(StrEnum):
    """Kind of task to start from."""

    TOKENS = "tokens"
    REGRESSION = "regression"
    SEGMENTATION = "segmentation"


RANKS = 2
"""Ranks of the template's experiment."""
BATCH = 32
"""Global batch of the template's experiment, in samples."""


def init(
    task: Annotated[
        Template | None, typer.Option("--task", help="What the task learns; `tokens` by default.")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(help="Number of ranks that train together; 2 by default.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for my_task.py and experiment.yaml; the current one by default."),
    ] = None,
    *,
    sbatch: Annotated[
        bool, typer.Option("--sbatch", help="Also write run.sbatch, a job script for SLURM.")
    ] = False,
) -> None:
    """Write a task and its experiment, which you then change into what you train.

    In a terminal and without options it asks what to write.
    """
    if sys.stdin.isatty() and (task, ranks, out) == (None, None, None):
        task = typer.prompt(
            f"What does it learn ({', '.join(Template)})?", Template.TOKENS, type=Template
        )
        ranks = typer.prompt("How many devices train together?", RANKS, type=int)
        out = typer.prompt("Folder for my_task.py and experiment.yaml?", Path(), type=Path)
    task, ranks, out = task or Template.TOKENS, RANKS if ranks is None else ranks, out or Path()
    if ranks < 1:
        raise InputError("--ranks", f"found {ranks}", "allowed is a whole number from 1")
    templates = files("shardmark.config") / "templates"
    sources = {"my_task.py": f"{task}.py", "experiment.yaml": "experiment.yaml"}
    if sbatch:
        sources["run.sbatch"] = "run.sbatch"
    for name in sources:
        if (out / name).exists():
            raise InputError(str(out / name), "it exists already", "name another folder by --out")
    out.mkdir(parents=True, exist_ok=True)
    for name, source in sources.items():
        text = (templates / source).read_text(encoding="utf-8")
        written = text.replace(f"world_size: [{RANKS}]", f"world_size: [{ranks}]")
        shared = ranks * max(1, round(BATCH / ranks))
        written = written.replace(f"global_batch: {BATCH} ", f"global_batch: {shared} ")
        (out / name).write_text(written, encoding="utf-8")
    experiment = out / "experiment.yaml"
    say(
        *(f"wrote {out / name}" for name in sources),
        f"next: shardmark verify {experiment}; shardmark run {experiment}",
    )
