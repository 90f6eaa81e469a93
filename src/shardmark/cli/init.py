"""`shardmark init`: writes an experiment to start from, with a task or a script if it needs one."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from enum import StrEnum
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from shardmark.base.errors import InputError
from shardmark.base.text import say
from shardmark.cli.arguments import path_of


class Template(StrEnum):
    """Kind of training to start from."""

    CLASSIFICATION = "classification"
    LANGUAGE = "language"
    DETECTION = "detection"
    SCRIPT = "script"
    TOKENS = "tokens"
    REGRESSION = "regression"
    SEGMENTATION = "segmentation"
    RL = "rl"


CODE_FILES: Mapping[Template, str] = {
    Template.SCRIPT: "train.py",
    **dict.fromkeys(
        (Template.TOKENS, Template.REGRESSION, Template.SEGMENTATION, Template.RL), "my_task.py"
    ),
}
"""Templates with code -> name of its file; the others need an experiment file alone."""
RANKS = 2
"""Ranks of the templates' experiments."""
BATCH = re.compile(r"(?<=global_batch: )\d+")


def init(
    task: Annotated[
        Template | None,
        typer.Option(
            "--task",
            help="What is trained; `tokens` by default.  tokens, regression, segmentation and rl"
            " are tasks of your own, in a class that you change.",
        ),
    ] = None,
    script: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="SCRIPT",
            parser=path_of,
            help="Propose the experiment from a training script, which is read and not run.",
        ),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(help="Number of ranks that train together; 2 by default.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the files; the current one by default."),
    ] = None,
    *,
    sbatch: Annotated[
        bool, typer.Option("--sbatch", help="Also write run.sbatch, a job script for SLURM.")
    ] = False,
) -> None:
    """Write an experiment, and its task or script, which you then change into what you train.

    In a terminal and without options it asks what to write.
    """
    if task is not None and script is not None:
        raise InputError("--task", f"{task}, and --from {script}, too", "give one of the two")
    if sys.stdin.isatty() and (task, script, ranks, out) == (None, None, None, None):
        question = f"What do you train ({', '.join(Template)})?"
        task = typer.prompt(question, Template.TOKENS, type=Template)
        ranks = typer.prompt("How many devices train together?", RANKS, type=int)
        out = typer.prompt("Folder for the files?", Path(), type=Path)
    ranks, out = RANKS if ranks is None else ranks, out or Path()
    if ranks < 1:
        raise InputError("--ranks", f"found {ranks}", "allowed is a whole number from 1")
    lines: list[str] = []
    if script is None:
        texts = _template_texts(task or Template.TOKENS, ranks)
    else:
        from shardmark.experiment.proposal import propose

        proposal = propose(script, ranks)
        texts = {"experiment.yaml": proposal.text}
        lines = [f"found      {line}" for line in proposal.lines]
        lines += [f"not found  {line}" for line in proposal.missing]
        lines += [f"left out   {line}, not a key of an experiment" for line in proposal.left_out]
    if sbatch:
        texts["run.sbatch"] = _template("run.sbatch")
    for name in texts:
        if (out / name).exists():
            raise InputError(str(out / name), "it exists already", "name another folder by --out")
    out.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (out / name).write_text(text, encoding="utf-8")
    experiment = out / "experiment.yaml"
    verify = (
        "" if "name: script" in texts["experiment.yaml"] else f"shardmark verify {experiment}; "
    )
    say(
        *lines,
        *(f"wrote {out / name}" for name in texts),
        f"next: {verify}shardmark run {experiment}",
    )


def _template(name: str) -> str:
    return (files("shardmark.experiment") / "templates" / name).read_text(encoding="utf-8")


def _template_texts(task: Template, ranks: int) -> dict[str, str]:
    """Return file name -> text, with a batch that the ranks can share evenly."""

    def shared(batch: re.Match[str]) -> str:
        return str(ranks * max(1, round(int(batch[0]) / ranks)))

    has_task = CODE_FILES.get(task) == "my_task.py"
    experiment = _template("experiment.yaml" if has_task else f"{task}.yaml")
    experiment = experiment.replace(f"world_size: [{RANKS}]", f"world_size: [{ranks}]")
    code = {CODE_FILES[task]: _template(f"{task}.py")} if task in CODE_FILES else {}
    return {**code, "experiment.yaml": BATCH.sub(shared, experiment, count=1)}
