"""`shardmark init`: writes an experiment to start from, with its task or script, or a lab."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from enum import StrEnum
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from shardmark.base.errors import InputError
from shardmark.base.files.storage import storing
from shardmark.base.masking import masked_command
from shardmark.base.text import say
from shardmark.cli.arguments import WritesOption
from shardmark.cli.phases import PhaseLines
from shardmark.scripts.command import ScriptCommand, parse_command
from shardmark.scripts.recording import LONGEST_SECONDS


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
        str | None,
        typer.Option(
            "--from",
            metavar="SCRIPT",
            help="Propose the experiment from the first step of a training script, or of a command"
            " such as 'train.py --lr 0.1', which runs in one process.",
        ),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(help="Number of ranks that train together; 2 by default.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the files; the current one by default.")
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=1.0, metavar="SECONDS", help="Longest time of the first step.")
    ] = LONGEST_SECONDS,
    *,
    writes_are_fine: WritesOption = False,
    sbatch: Annotated[
        bool, typer.Option("--sbatch", help="Also write run.sbatch, a job script for SLURM.")
    ] = False,
    lab: Annotated[
        bool,
        typer.Option(
            "--lab",
            help="Write a lab for a course instead: six exercises about distributed training, each"
            " graded by one command.",
        ),
    ] = False,
) -> None:
    """Write an experiment, and its task or script, which you then change into what you train.

    In a terminal and without options it asks what to write.
    """
    if task is not None and script is not None:
        raise InputError("--task", f"{task}, and --from {script}, too", "give one of the two")
    beside = {"--task": task, "--from": script, "--ranks": ranks, "--sbatch": sbatch}
    for option, value in beside.items() if lab else ():
        if value:
            raise InputError("--lab", f"{option}, too", "leave one of the two out: a lab is fixed")
    asks = sys.stdin.isatty() and not lab
    if asks and (task, script, ranks, out) == (None, None, None, None):
        question = f"What do you train ({', '.join(Template)})?"
        task = typer.prompt(question, Template.TOKENS, type=Template)
        ranks = typer.prompt("How many devices train together?", RANKS, type=int)
        out = typer.prompt("Folder for the files?", Path(), type=Path)
    command = None if script is None else _command_of(script)
    if ranks is not None and ranks < 1:
        raise InputError("--ranks", f"found {ranks}", "allowed is a whole number from 1")
    ranks = ranks or (None if command is None else command.ranks) or RANKS
    out, lines = out or Path(), list[str]()
    texts = {"experiment.yaml": ""}
    if lab:
        folder = files("shardmark.experiment") / "templates" / "lab"
        paths = sorted((path for path in folder.iterdir() if path.is_file()), key=str)
        texts = {path.name: path.read_text(encoding="utf-8") for path in paths}
    elif command is None:
        texts = _template_texts(task or Template.TOKENS, ranks)
    if sbatch:
        texts["run.sbatch"] = _template("run.sbatch")
    for name in texts:
        if (out / name).exists():
            raise InputError(str(out / name), "it exists already", "name another folder by --out")
    if command is not None:
        from shardmark.experiment.proposal import propose, record_first_step

        PhaseLines()("one process takes the first step")
        record, writes = record_first_step(command, timeout, writes_are_fine=writes_are_fine)
        proposal = propose(record, command, ranks)
        texts["experiment.yaml"] = proposal.text
        lines = [f"ran        the first step of {masked_command(command.text)}: {writes}"]
        lines += [f"found      {line}" for line in proposal.seen]
        lines += [f"not found  {line}" for line in proposal.missing]
        lines += [f"left out   {line}, not a key of an experiment" for line in proposal.left_out]
    with storing(out):
        out.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (out / name).write_text(text, encoding="utf-8")
    experiment = out / "experiment.yaml"
    text = texts.get("experiment.yaml", "")
    verify = "" if "name: script" in text else f"shardmark verify {experiment}; "
    following = f"read {out / 'README.md'}" if lab else f"{verify}shardmark run {experiment}"
    say(*lines, *(f"wrote {out / name}" for name in texts), f"next: {following}")


def _command_of(text: str) -> ScriptCommand:
    """Return the command of a script's path, or of a script with its arguments."""
    path = os.path.expanduser(text)  # noqa: PTH111 - a command may be no valid path
    if os.path.isfile(path):  # noqa: PTH113
        return ScriptCommand(launcher="python", words=(), script=(path,), ranks=None)
    return parse_command(text)


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
