"""Arguments of the verbs that take an experiment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

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


def with_engine(engine: str | None, overrides: Sequence[str] | None) -> list[str]:
    """The overrides with the engine's name first, so that its options are known."""
    named = [] if engine is None else [f"engine.name={engine}"]
    return [*named, *(overrides or ())]
