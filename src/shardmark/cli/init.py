"""`shardmark init`: a task and an experiment to start from."""

from __future__ import annotations

import sys
from enum import StrEnum
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from shardmark.core.errors import InputError
from shardmark.core.text import say


class Kind(StrEnum):
    """What the task to start from learns."""

    TOKENS = "tokens"
    REGRESSION = "regression"
    SEGMENTATION = "segmentation"


def init(
    task: Annotated[
        Kind | None, typer.Option("--task", help="What the task to start from learns.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for my_task.py and experiment.yaml.")] = Path(),
) -> None:
    """Write a task of your own and its experiment, to be changed into what you train."""
    if task is None:
        asked = sys.stdin.isatty()
        question = f"What does it learn ({', '.join(Kind)})?"
        task = Kind(typer.prompt(question, Kind.TOKENS, type=Kind)) if asked else Kind.TOKENS
    templates = files("shardmark.config") / "templates"
    sources = {"my_task.py": f"{task}.py", "experiment.yaml": "experiment.yaml"}
    for name in sources:
        if (out / name).exists():
            raise InputError(str(out / name), "it is there already", "name another folder by --out")
    out.mkdir(parents=True, exist_ok=True)
    for name, source in sources.items():
        (out / name).write_text((templates / source).read_text(encoding="utf-8"), encoding="utf-8")
    experiment = out / "experiment.yaml"
    say(
        *(f"wrote {out / name}" for name in sources),
        f"next: shardmark verify {experiment}; shardmark run {experiment}",
    )
