"""`shardmark run`: every trial of an experiment, then the comparison."""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardmark.cli.arguments import EngineOption, ExperimentName, Overrides, path_of, with_engine
from shardmark.core.errors import StorageError
from shardmark.core.storage import storing
from shardmark.core.text import say, say_text

if TYPE_CHECKING:
    from shardmark.config.experiment import Experiment
    from shardmark.trials.matrix import Plan

SOME_FAILED = 1
REQUEUED_VARIABLE = "SLURM_RESTART_COUNT"
"""A job that SLURM has queued again goes on with what it had measured."""


def run(
    experiment: ExperimentName,
    *,
    overrides: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            parser=path_of,
            help="Folder of the run.  Given again, what is missing in it is finished.  "
            "By default runs/NAME, or runs/NAME-2 and so on.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the trials and what is left out; start none.")
    ] = False,
    retry: Annotated[
        bool,
        typer.Option("--retry", help="Repeat failed, timed-out and disturbed trials, too."),
    ] = False,
    remeasure: Annotated[
        bool,
        typer.Option(
            "--remeasure",
            help="Measure everything anew into the same folder; what was measured is kept in "
            "DIR/set-aside.",
        ),
    ] = False,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Begin no trial that does not fit: 90s, 30m, 2h or 1h30m.  What is left out is "
            "named.",
        ),
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print the final table and errors alone.")
    ] = False,
    engine: EngineOption = None,
) -> None:
    """Run every trial of an experiment and compare them."""
    from shardmark.config.load import load_experiment
    from shardmark.core.durations import parse_seconds
    from shardmark.trials.matrix import expand

    resolved = load_experiment(experiment, with_engine(engine, overrides))
    plan = expand(resolved)
    budget_seconds = None if budget is None else parse_seconds(budget, "--budget")
    if dry_run:
        from shardmark.cli.dry_run import print_plan

        print_plan(resolved, plan, out, budget_seconds, remeasure=remeasure)
        return
    from shardmark.launch.controller import run_experiment
    from shardmark.launch.engines import serve_as_node
    from shardmark.progress.display import listener
    from shardmark.results.runs_folder import create_run_folder, remove_if_empty

    words = ["shardmark", "run", experiment]
    words += [word for change in overrides or () for word in ("--set", change)]
    words += [] if engine is None else ["--engine", engine]
    options = [option for option, on in (("--retry", retry), ("--quiet", quiet)) if on]
    options += [] if budget is None else ["--budget", budget]
    _name_other_runs(resolved, plan, None if out is not None else [*words, *options])
    folder = out if out is not None else create_run_folder(resolved.name)
    again = shlex.join([*words, *options, "--out", str(folder)])
    if remeasure and REQUEUED_VARIABLE in os.environ:
        say("requeued job: it goes on; --remeasure counted for its first start alone", error=True)
        remeasure = False
    try:
        with _terminable(), storing(folder), remove_if_empty(None if out else folder):
            exit_code = serve_as_node(resolved, plan, (lambda _: None) if quiet else say)
            if exit_code is None:
                with listener(folder, quiet=quiet, budget_seconds=budget_seconds) as progress:
                    run_experiment(
                        resolved,
                        folder,
                        plan=plan,
                        progress=progress,
                        retry=retry,
                        remeasure=remeasure,
                        budget_seconds=budget_seconds,
                    )
    except KeyboardInterrupt:
        say(f"interrupted; go on with: {again}", error=True)
        raise
    except StorageError as error:
        where, found, remedy = error.args
        raise StorageError(where, found, f"{remedy}; go on with: {again}") from error
    if exit_code is None:
        exit_code = _print_results(folder, quiet=quiet)
    if exit_code:
        raise typer.Exit(exit_code)


def _name_other_runs(experiment: Experiment, plan: Plan, command: Sequence[str] | None) -> None:
    """Say which runs are measured now and, for a command without `--out`, which is unfinished."""
    from shardmark.core.errors import ShardmarkError
    from shardmark.results.runs_folder import folders_in_use, runs_named
    from shardmark.results.schema import Outcome
    from shardmark.results.store import RunFolder, load_run

    in_use, wanted = folders_in_use(), experiment.model_dump(mode="json")
    for folder in in_use:
        found = f"another command measures into {folder} now, and both disturb each other"
        say(f"{found}; end one of them, or expect disturbed trials", error=True)
    least = sum(trial.repeat < trial.measure.repeats.at_least for trial in plan.trials)
    for folder in runs_named(experiment.name) if command else ():
        with suppress(ShardmarkError, OSError):
            if folder not in in_use and RunFolder(folder).read_experiment() == wanted:
                outcomes = [trial.outcome for trial in load_run(folder).trials]
                ended = len(outcomes) - outcomes.count(Outcome.INTERRUPTED)
                if ended < max(least, len(outcomes)):
                    found = f"{folder} is unfinished, and this command begins anew"
                    there = shlex.join([*(command or ()), "--out", str(folder)])
                    say(f"{found}; to go on with {folder}: {there}", error=True)
                return


def _print_results(folder: Path, *, quiet: bool) -> int:
    """The answers and where they come from; 1 where a trial failed or its loss is not finite."""
    from shardmark.analysis.compare.comparison import compare
    from shardmark.cli.compare import terminal_width
    from shardmark.report.answers.overview import overview
    from shardmark.results.store import load_run

    stored = load_run(folder)
    text = overview(compare([stored], None), width=terminal_width() or 80)
    say_text(text if quiet else f"\n{text}")
    if not quiet:
        shown = shlex.quote(str(folder))
        say("", f"files: {folder}   again: shardmark compare {shown}")
        say(f"report: shardmark report {shown}")
    failed = any(
        result.outcome in ("failed", "timed_out") or result.diverged for result in stored.trials
    )
    return SOME_FAILED if failed else 0


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM end a run as Ctrl-C does: the trial under way is stored as interrupted."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
