"""`shardmark time`: measures variants of a training script, unchanged, and compares them."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardmark.base.errors import InputError
from shardmark.cli.arguments import (
    AcceptOption,
    EngineOption,
    Overrides,
    QuietOption,
    StrictOption,
    TextOrJson,
    WritesOption,
    causes_of,
    folder_option,
    numbers_of_ranks,
    with_engine,
    words_of,
)
from shardmark.cli.run import RunFormat, resumable, run_and_print

RACE_BUDGET = "20m"
"""Default time of a race."""
IMPROVE_BUDGET = "15m"

if TYPE_CHECKING:
    from shardmark.scripts.command import ScriptCommand


def time(
    commands: Annotated[
        list[str],
        typer.Argument(
            metavar="COMMAND",
            help="A script with its arguments, in quotation marks: 'train.py --strategy ddp'.  Also"
            " with its launcher, whose number of ranks counts.  A single one may follow `--` as it"
            " is.",
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
    keep_if_faster: Annotated[
        bool,
        typer.Option(
            "--keep-if-faster",
            help="Race the others against the first command, and decide: keep, discard, or not "
            "decided (exit codes 0, 1, 2).",
        ),
    ] = False,
    improve: Annotated[
        bool,
        typer.Option(
            "--improve",
            help="Race changes of one command that may save time and train the same, and print the "
            "fastest as a patch.",
        ),
    ] = False,
    only: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="Try these of --improve alone.")
    ] = None,
    margin: Annotated[
        float,
        typer.Option(
            min=0.1, max=50.0, metavar="PERCENT", help="A smaller difference is none, in the race."
        ),
    ] = 1.0,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="Start no trial that would end later: 90s, 30m; of a race, 20m."
        ),
    ] = None,
    against_revision: Annotated[
        str | None,
        typer.Option(
            metavar="REVISION",
            help="Compare one command with itself in this commit of the repository.",
        ),
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
        folder_option(
            "Folder of the run; a run that is in it is continued.  By default runs/time-NAME."
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the trials; run none.")] = False,
    quiet: QuietOption = False,
    form: RunFormat = TextOrJson.TEXT,
) -> None:
    """Measure training scripts as they are, and say which is fastest.

    The same as `shardmark run` with `workload: {name: script}`.
    """
    from shardmark.base.durations import parse_seconds
    from shardmark.base.statistics.race import MOST_PAIRS
    from shardmark.bench.launch.run_options import RunOptions
    from shardmark.experiment.load import from_mapping

    if only is not None and not improve:
        raise InputError("--only", only, "it chooses of --improve, which is to be given, too")
    if until_exit and steps is not None:
        raise InputError("--steps", f"{steps}, and --until-exit, too", "give one of the two")
    mapping = experiment_of(
        [*map(measured_command, _commands(commands))],
        [] if ranks is None else numbers_of_ranks(ranks),
    )
    if against_revision is not None:
        mapping["workload"]["command"], mapping["matrix"]["variant"] = _in_two_commits(
            mapping, against_revision, writes_are_fine=writes_are_fine
        )
    mapping["workload"] |= {"until_exit": until_exit, "writes_are_fine": writes_are_fine}
    mapping["recipe"] = {} if steps is None else {"steps": warmup + steps}
    mapping["measure"] = {"warmup_steps": warmup, "verify": not no_audit}
    mapping["measure"]["accept"] = causes_of(accept, strict=strict)
    if repeats is not None:
        mapping["measure"]["repeats"] = repeats
    if improve or keep_if_faster:
        pairs = {"at_least": 2, "at_most": MOST_PAIRS}
        mapping["measure"]["repeats"] = {**pairs, "margin": margin / 100}
    if improve:
        _check_alone("--improve", mapping["matrix"], {
            "--keep-if-faster": keep_if_faster, "--against-revision": against_revision,
            "--repeats": repeats, "--no-audit": no_audit, "--dry-run": dry_run,
            "--until-exit": until_exit, "--engine": engine, "--set": overrides,
            "a second command": len(mapping["matrix"]["variant"]) > 1,
        })  # fmt: skip
        mapping["measure"]["verify"] = False
        _improve(mapping, words_of(only), budget, out, form, quiet=quiet)
        return
    if keep_if_faster:
        alone = {"--repeats": repeats, "--no-audit": no_audit}
        _check_alone("--keep-if-faster", mapping["matrix"], alone)
        if len(mapping["matrix"]["variant"]) < 2:
            allowed = "at least two: the first one is what the others are compared with"
            raise InputError("--keep-if-faster", "one command", allowed)
    experiment = from_mapping(mapping, with_engine(engine, overrides), place="shardmark time")
    longest = budget or (RACE_BUDGET if keep_if_faster else None)
    options = RunOptions(
        quiet=quiet or form is TextOrJson.JSON,
        budget_seconds=None if longest is None else parse_seconds(longest, "--budget"),
    )
    words = ["shardmark", *sys.argv[1:]]
    run_and_print(experiment, out, options, words, dry_run=dry_run, form=form)


def _improve(
    mapping: dict[str, Any], only: Sequence[str], budget: str | None, out: Path | None,
    form: TextOrJson, *, quiet: bool,
) -> None:  # fmt: skip
    """Race interventions on the mapping's one command, and print what to change."""
    import json

    from shardmark.base.durations import parse_seconds
    from shardmark.base.results.runs_folder import run_folder
    from shardmark.base.text import say_text
    from shardmark.bench.improve import improve
    from shardmark.bench.launch.run_options import RunOptions
    from shardmark.bench.progress.display import listener
    from shardmark.bench.report.answers.improvement import improvement_facts, improvement_lines
    from shardmark.experiment.experiment import Experiment
    from shardmark.experiment.load import from_mapping

    (arguments,) = mapping["matrix"]["variant"].values()
    command = " ".join(filter(None, (mapping["workload"]["command"], arguments)))
    mapping["workload"]["command"] = command

    def experiment_of(variants: Mapping[str, str], most_pairs: int) -> Experiment:
        matrix = {**mapping["matrix"], "variant": dict(variants)}
        mapping["measure"]["repeats"]["at_most"] = most_pairs
        return from_mapping({**mapping, "matrix": matrix}, [], place="shardmark time")

    seconds = parse_seconds(budget or IMPROVE_BUDGET, "--budget")
    options = RunOptions(quiet=quiet or form is TextOrJson.JSON, budget_seconds=seconds)
    with (
        run_folder(out, "improve") as folder,
        resumable(folder),
        listener(folder, options) as progress,
    ):
        improvement = improve(
            experiment_of, command, mapping["matrix"]["world_size"][0], folder, only=only,
            budget_seconds=seconds, listener=progress,
        )  # fmt: skip
    if form is TextOrJson.JSON:
        facts = {**improvement_facts(improvement), "run": str(folder)}
        say_text(json.dumps(facts, indent=1) + "\n")
    else:
        say_text("\n".join(["", *improvement_lines(improvement), "", f"files: {folder}", ""]))


def _check_alone(name: str, matrix: Mapping[str, Any], options: Mapping[str, object]) -> None:
    """Raise `InputError` for what an option takes no account of."""
    for other, value in options.items():
        if value:
            raise InputError(name, f"with {other}", "leave one of the two out")
    if len(matrix["world_size"]) > 1:
        raise InputError("--ranks", f"{len(matrix['world_size'])} numbers", f"one, for {name}")


def _in_two_commits(
    mapping: Mapping[str, Any], revision: str, *, writes_are_fine: bool
) -> tuple[str, dict[str, str]]:
    """Return the command and its variants: in a commit, and as the files are now."""
    from shardmark.audit.script import commit_of

    variants = mapping["matrix"]["variant"]
    if len(variants) > 1:
        raise InputError("--against-revision", f"{len(variants)} commands", "give one command")
    if writes_are_fine:
        allowed = "leave --writes-are-fine out: the revision is checked out in a private copy"
        raise InputError("--against-revision", revision, allowed)
    command = " ".join(filter(None, (mapping["workload"]["command"], *variants.values())))
    name = re.sub(r"[^A-Za-z0-9 ._=,+-]+", "-", revision).strip("-")
    return command, {name or "before": f"@{commit_of(revision)}", "now": ""}


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


def _commands(arguments: list[str]) -> list[str]:
    """Return the arguments, each of which is a command, or all of them as one, as after `--`."""
    from shardmark.scripts.command import SCRIPT

    first, *others = arguments
    is_launcher = len(first.split()) == 1 and SCRIPT.search(first) is None
    are_words = not any(" " in word for word in arguments) and not any(map(SCRIPT.search, others))
    is_one = others and (is_launcher or are_words or any(w.startswith("-") for w in others))
    return [shlex.join(arguments)] if is_one else arguments


def measured_command(typed: Sequence[str] | str) -> ScriptCommand:
    """Parse a command.  Raises `InputError` for {ranks}, and for options that would not count."""
    from shardmark.scripts.command import parse_command

    command = parse_command(typed)
    place = f"command {(typed if isinstance(typed, str) else shlex.join(typed))!r}"
    command.check_launched(place)
    if command.options:
        problem = f"{shlex.join(command.options)} would not count: Shardmark itself starts ranks"
        allowed = "leave it out, or put variables and wrappers before shardmark (A=1 shardmark ...)"
        raise InputError(place, problem, allowed)
    return command
