"""Arguments that several verbs have."""

from __future__ import annotations

import os
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardmark.core.errors import InputError

if TYPE_CHECKING:
    from shardmark.results.store import StoredRun


def path_of(text: str) -> Path:
    """The path that an option names.  Raises `InputError` for one that no file system takes."""
    try:
        path = Path(text).expanduser()
        os.fsencode(path)
        path.exists()
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(text[:60], f"is no path: {reason}", "name another") from None
    if "\0" in text:
        raise InputError(text[:60], "is no path: it holds a NUL character", "name another")
    return path


class TextOrJson(StrEnum):
    """How findings are printed."""

    TEXT = "text"
    JSON = "json"


ExperimentName = Annotated[
    str, typer.Argument(metavar="EXPERIMENT", help="A YAML file, or the name of a preset.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a key; may be given repeatedly."),
]
EngineOption = Annotated[
    str | None,
    typer.Option(
        "--engine",
        metavar="ENGINE",
        help="Who starts the ranks: local, torchrun, slurm, ray.  Its options are set by "
        "--set engine.KEY=...",
    ),
]
Runs = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="RUN", parser=path_of, help="Folders that `run` has written; the latest by default."
    ),
]
Baseline = Annotated[
    str | None,
    typer.Option(
        metavar="STRATEGY",
        help="Strategy that speed-up and memory ratio refer to; by default `single`, or the "
        "matrix's first without it.",
    ),
]


def with_engine(engine: str | None, overrides: Sequence[str] | None) -> list[str]:
    """The overrides with the engine's name first, so that its options are known."""
    named = [] if engine is None else [f"engine.name={engine}"]
    return [*named, *(overrides or ())]


def load_runs(runs: Sequence[Path] | None) -> list[StoredRun]:
    """Each folder once; without any the latest run.  Raises `InputError` for what is no run."""
    from shardmark.results.runs_folder import latest_run
    from shardmark.results.store import load_run

    folders = {path.resolve(): path for path in runs or [latest_run()]}
    return [load_run(path) for path in folders.values()]
