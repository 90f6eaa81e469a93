"""`shardmark time`: measures variants of a training script, unchanged, and compares them."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardmark.base.errors import InputError
from shardmark.cli.arguments import (
    AcceptOption,
    EngineOption,
    Overrides,
    StrictOption,
    TextOrJson,
    WritesOption,
    causes_of,
    numbers_of_ranks,
    path_of,
    with_engine,
)
from shardmark.cli.run import RunFormat, run_and_print

if TYPE_CHECKING:
    from shardmark.scripts.command import ScriptCommand


def time(
    commands: Annotated[
        list[str],
        typer.Argument(
            metavar="COMMAND...",
            help="A script with its arguments, in quotation marks: 'train.py --strategy ddp'.  Also"
            " with its launcher, whose number of ranks counts.",
        ),
    ],
    *,
    ranks: Annotated[
        str | None,
        typer.Option(metavar="N,...", help="Numbers of ranks; by default the commands', or 1."),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Measured optimizer steps of each trial; 30.")
    ] = None,
    warmup: Annotated[
        int, typer.Option(min=0, help="Steps before them, which are not measured.")
    ] = 5,
    until_exit: Annotated[
        bool, typer.Option("--until-exit", help="Measure until the script ends by itself.")
    ] = False,
    repeats: Annotated[
        int | None,
        typer.Option(min=1, help="Trials of each command; 3 to 6, until the result is precise."),
    ] = None,
    no_audit: Annotated[
        bool,
        typer.Option("--no-audit", help="Do not check that N ranks train what one process does."),
    ] = False,
    accept: AcceptOption = None,
    strict: StrictOption = False,
    writes_are_fine: WritesOption = False,
    overrides: Overrides = None,
    engine: EngineOption = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            parser=path_of,
            help="Folder of the run; a run that is in it is continued.  By default runs/time-NAME.",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the trials; run none.")] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print only the final table and errors.")
    ] = False,
    form: RunFormat = TextOrJson.TEXT,
) -> None:
    """Measure training scripts as they are, and say which is fastest.

    The same as `shardmark run` with `workload: {name: script}`.
    """
    from shardmark.bench.launch.run_options import RunOptions
    from shardmark.experiment.load import from_mapping

    if until_exit and steps is not None:
        raise InputError("--steps", f"{steps}, and --until-exit, too", "give one of the two")
    mapping = experiment_of(
        list(map(_parsed, commands)), [] if ranks is None else numbers_of_ranks(ranks)
    )
    mapping["workload"] |= {"until_exit": until_exit, "writes_are_fine": writes_are_fine}
    mapping["recipe"] = {} if steps is None else {"steps": warmup + steps}
    mapping["measure"] = {"warmup_steps": warmup, "verify": not no_audit}
    mapping["measure"]["accept"] = causes_of(accept, strict=strict)
    if repeats is not None:
        mapping["measure"]["repeats"] = repeats
    experiment = from_mapping(mapping, with_engine(engine, overrides), place="shardmark time")
    options = RunOptions(quiet=quiet or form is TextOrJson.JSON)
    words = ["shardmark", *sys.argv[1:]]
    run_and_print(experiment, out, options, words, dry_run=dry_run, form=form)


def experiment_of(commands: Sequence[ScriptCommand], ranks: Sequence[int]) -> dict[str, Any]:
    """Return an experiment with a variant for each command.

    Without `ranks`, the commands give their number.  Raises `InputError` if they differ in it.
    """
    from shardmark.base.masking import masked_words
    from shardmark.scripts.variants import named_variants

    named = sorted({command.ranks for command in commands if command.ranks is not None})
    if not ranks and len(named) > 1:
        numbers = " and ".join(map(str, named))
        raise InputError("commands", f"they name {numbers} ranks", "give --ranks for all of them")
    shown = [replace(command, script=tuple(masked_words(command.script))) for command in commands]
    shared, variants = named_variants(commands)
    variants = dict(zip(named_variants(shown)[1], variants.values(), strict=True))
    _, alone = named_variants(shown[:1])
    return {
        "name": f"time-{next(iter(alone))}",
        "workload": {"name": "script", "command": shared},
        "matrix": {"variant": variants, "world_size": [*ranks] or named or [1]},
    }


def _parsed(text: str) -> ScriptCommand:
    """Parse a command.  Raises `InputError` for options before the script: they would not count."""
    from shardmark.scripts.command import parse_command

    try:
        words = shlex.split(text)
    except ValueError as error:
        raise InputError(f"command {text!r}", str(error), "close the quotation") from None
    command = parse_command(words)
    options = command.options
    if options:
        raise InputError(
            f"command {text!r}",
            f"{shlex.join(options)} would not count: Shardmark starts the ranks itself",
            "leave it out, or put variables and wrappers before shardmark (A=1 shardmark time ...)",
        )
    return command
