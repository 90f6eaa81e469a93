"""`shardmark run`: runs every trial of an experiment and prints the comparison."""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardmark.base.errors import StorageError
from shardmark.base.files.storage import storing
from shardmark.base.text import say, say_text
from shardmark.cli.arguments import (
    EngineOption,
    ExperimentName,
    Overrides,
    QuietOption,
    TextOrJson,
    folder_option,
    with_engine,
)

if TYPE_CHECKING:
    from shardmark.bench.launch.run_options import RunOptions
    from shardmark.experiment.experiment import Experiment
    from shardmark.experiment.matrix import TrialPlan

RunFormat = Annotated[
    TextOrJson,
    typer.Option("--format", help="json: the document of `compare` and the run's folder, alone."),
]
SOME_FAILED = 1
REQUEUED_VARIABLE = "SLURM_RESTART_COUNT"
"""Set in a job that SLURM has queued again, which continues its run."""


def run(
    experiment: ExperimentName,
    *,
    overrides: Overrides = None,
    out: Annotated[
        Path | None,
        folder_option(
            "Folder of the run; a run that is in it is continued.  By default runs/NAME, or"
            " runs/NAME-2 and so on."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the trials and the omitted cells; run none.")
    ] = False,
    retry: Annotated[
        bool, typer.Option("--retry", help="Also repeat failed, timed-out and disturbed trials.")
    ] = False,
    remeasure: Annotated[
        bool,
        typer.Option(
            "--remeasure",
            help="Measure everything anew into the same folder; earlier results move to"
            " DIR/set-aside.",
        ),
    ] = False,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Start no trial that would end later than this: 90s, 30m, 2h or 1h30m.",
        ),
    ] = None,
    quiet: QuietOption = False,
    engine: EngineOption = None,
    form: RunFormat = TextOrJson.TEXT,
) -> None:
    """Run every trial of an experiment and compare them."""
    from shardmark.base.durations import parse_seconds
    from shardmark.bench.launch.run_options import RunOptions
    from shardmark.experiment.load import load_experiment

    resolved = load_experiment(experiment, with_engine(engine, overrides))
    words = ["shardmark", "run", experiment]
    words += [word for change in overrides or () for word in ("--set", change)]
    words += [] if engine is None else ["--engine", engine]
    options = RunOptions(
        retry=retry,
        remeasure=remeasure,
        budget_seconds=None if budget is None else parse_seconds(budget, "--budget"),
        quiet=quiet or form is TextOrJson.JSON,
    )
    words += [option for option, is_set in (("--retry", retry), ("--quiet", quiet)) if is_set]
    words += [] if budget is None else ["--budget", budget]
    words += ["--format", form] if form is TextOrJson.JSON else []
    run_and_print(resolved, out, options, words, dry_run=dry_run, form=form)


def run_and_print(
    experiment: Experiment,
    out: Path | None,
    options: RunOptions,
    words: Sequence[str],
    *,
    dry_run: bool,
    form: TextOrJson = TextOrJson.TEXT,
) -> None:
    """Run the experiment and print its results; `words` is the command, with or without `--out`."""
    from shardmark.experiment.matrix import expand

    plan = expand(experiment)
    if dry_run:
        from shardmark.cli.dry_run import print_plan

        print_plan(experiment, plan, out, options, form)
        return
    from shardmark.base.results.runs_folder import run_folder
    from shardmark.bench.launch.engines import serve_as_node
    from shardmark.bench.launch.session import run_experiment
    from shardmark.bench.progress.display import listener

    quiet = options.quiet
    if options.remeasure and REQUEUED_VARIABLE in os.environ:
        say("requeued job: --remeasure counts for the first start alone", error=True)
        options = replace(options, remeasure=False)
    _name_other_runs(experiment, plan, None if out is not None else words)
    with run_folder(out, experiment.name) as folder:
        names_folder = any(word == "--out" or word.startswith("--out=") for word in words)
        again = shlex.join(words if names_folder else [*words, "--out", str(folder)])
        with resumable(folder, again):
            exit_code = serve_as_node(experiment, plan, (lambda _: None) if quiet else say)
            if exit_code is None:
                with listener(folder, options) as progress:
                    run_experiment(experiment, folder, options, plan=plan, listener=progress)
        if exit_code is None:
            exit_code = _print_results(
                folder, form, quiet=quiet, margin=experiment.measure.repeats.margin
            )
    if exit_code:
        raise typer.Exit(exit_code)


@contextmanager
def resumable(folder: Path, again: str = "") -> Iterator[None]:
    """Say how a run continues, after Ctrl-C, SIGTERM or an error of the disk."""
    again = again or f"the same command and --out {shlex.quote(str(folder))}"
    try:
        with _interrupted_by_sigterm(), storing(folder):
            yield
    except KeyboardInterrupt:
        say(f"interrupted; continue with: {again}", error=True)
        raise
    except StorageError as error:
        place, problem, remedy = error.args
        raise StorageError(place, problem, f"{remedy}; continue with: {again}") from error


def _name_other_runs(
    experiment: Experiment, plan: TrialPlan, command: Sequence[str] | None
) -> None:
    """Print which runs are measured now and, for a command without `--out`, which is unfinished."""
    from shardmark.base.errors import ShardmarkError
    from shardmark.base.masking import masked_commands
    from shardmark.base.results.runs_folder import folders_in_use, runs_named
    from shardmark.base.results.schema import Outcome
    from shardmark.base.results.store import RunFolder, load_run

    in_use, resolved = folders_in_use(), masked_commands(experiment.model_dump(mode="json"))
    for folder in in_use:
        problem = f"another command measures into {folder} now, and the two disturb each other"
        say(f"{problem}; end one of them, or expect disturbed trials", error=True)
    least = sum(trial.repeat < trial.measure.repeats.at_least for trial in plan.trials)
    for folder in runs_named(experiment.name) if command else ():
        with suppress(ShardmarkError, OSError):
            if folder not in in_use and RunFolder(folder).read_experiment() == resolved:
                outcomes = [trial.outcome for trial in load_run(folder).trials]
                ended = len(outcomes) - outcomes.count(Outcome.INTERRUPTED)
                if ended < max(least, len(outcomes)):
                    to_continue = shlex.join([*(command or ()), "--out", str(folder)])
                    say(
                        f"{folder} is unfinished, and this command starts a new run; to continue"
                        f" {folder}: {to_continue}",
                        error=True,
                    )
                return


def _print_results(
    folder: Path, form: TextOrJson, *, quiet: bool, margin: float | None = None
) -> int:
    """Print the answers; return 1 if a trial failed, timed out or diverged.

    A race with a `margin` is decided: 0 to keep a variant, 1 to discard all, 2 if undecided.
    """
    from shardmark.base.results.store import load_run
    from shardmark.base.text import terminal_width
    from shardmark.bench.analysis.compare.comparison import compare
    from shardmark.bench.analysis.compare.race import race_of
    from shardmark.bench.report.answers.overview import overview, overview_json
    from shardmark.bench.report.answers.race import DECISIONS, race_facts

    stored = load_run(folder)
    comparison = compare([stored], None)
    race = None if margin is None else race_of(comparison.rows, stored.strategies[0], margin)
    facts = [] if race is None else race_facts(race)
    if form is TextOrJson.JSON:
        views: dict[str, object] = {"run": str(folder)}
        say_text(overview_json(comparison, views | ({"race": facts} if facts else {})))
    else:
        text = overview(comparison, width=terminal_width() or 80)
        decisions = "".join(f"{candidate['text']}\n" for candidate in facts)
        say_text(decisions + text if quiet else f"\n{decisions}\n{text}")
    if not quiet:
        shown = shlex.quote(str(folder))
        say("", f"files: {folder}   again: shardmark compare {shown}")
        say(f"report: shardmark report {shown}")
    if facts:
        return DECISIONS.index(facts[0]["decision"])  # the best one's comes first
    failed = any(
        result.outcome in ("failed", "timed_out") or result.diverged for result in stored.trials
    )
    return SOME_FAILED if failed else 0


@contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end a run as Ctrl-C does, so that the current trial is stored as interrupted."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
