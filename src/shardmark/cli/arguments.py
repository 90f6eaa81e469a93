"""Arguments and options that several verbs share."""

from __future__ import annotations

import os
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from shardmark.base.errors import InputError


def path_of(text: str) -> Path:
    """Return the path that an option names.  Raises `InputError` for an invalid path."""
    try:
        path = Path(text).expanduser()
        os.fsencode(path)
        path.exists()
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(text[:60], f"is no path: {reason}", "name another") from None
    if "\0" in text:
        raise InputError(text[:60], "is no path: it has a NUL character", "name another")
    return path


def numbers_of_ranks(text: str) -> list[int]:
    """Return the numbers of `--ranks`.  Raises `InputError` for anything else."""
    numbers = text.split(",")
    if not all(number.strip().isdecimal() and int(number) > 0 for number in numbers):
        raise InputError("--ranks", f"found {text!r}", "numbers from 1, such as 2 or 1,2,4")
    return list(map(int, numbers))


def words_of(text: str | None) -> list[str]:
    """Return the words of a list with commas."""
    return (text or "").replace(",", " ").split()


def causes_of(accept: str | None, *, strict: bool) -> list[str]:
    """Return the causes to accept: those that the user names, and usual ones unless `strict`."""
    from shardmark.base.evidence.accepted import USUAL

    return [*dict.fromkeys([*([] if strict else USUAL), *words_of(accept)])]


def folder_option(text: str) -> Any:
    """Return an option that names a folder, with its description."""
    return typer.Option(metavar="DIR", parser=path_of, help=text)


class TextOrJson(StrEnum):
    """Output formats of a verb."""

    TEXT = "text"
    JSON = "json"


ExperimentName = Annotated[
    str, typer.Argument(metavar="EXPERIMENT", help="A YAML file, or the name of a preset.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change a key of the experiment; may be given repeatedly.",
    ),
]
EngineOption = Annotated[
    str | None,
    typer.Option(
        "--engine",
        metavar="ENGINE",
        help="Engine that starts the ranks: local, torchrun, slurm or ray.  --set engine.KEY=VALUE"
        " sets its options.",
    ),
]
QuietOption = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print only the final table and errors.")
]
FormatOption = Annotated[TextOrJson, typer.Option("--format", help="Format of the output.")]
AcceptOption = Annotated[
    str | None,
    typer.Option(
        "--accept",
        metavar="CAUSE,...",
        help="Causes that are no fault here, such as local_steps; all else is compared.",
    ),
]
StrictOption = Annotated[
    bool,
    typer.Option(
        "--strict",
        help="Let batch norm of each rank's samples count, which is accepted by default.",
    ),
]
WritesOption = Annotated[
    bool,
    typer.Option(
        "--writes-are-fine",
        help="Let the script write to your files; by default it writes to a private copy.",
    ),
]
Runs = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="RUN", parser=path_of, help="Folders of runs; the latest run by default."
    ),
]
Baseline = Annotated[
    str | None,
    typer.Option(
        metavar="STRATEGY",
        help="Strategy that speed-up and memory ratio refer to; by default `single`, or otherwise"
        " the first one of the matrix.",
    ),
]


def with_engine(engine: str | None, overrides: Sequence[str] | None) -> list[str]:
    """Return the overrides, with the engine's name first so that its options are valid."""
    name = [] if engine is None else [f"engine.name={engine}"]
    return [*name, *(overrides or ())]
