"""`shardmark run`: every trial of an experiment, then the comparison."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardmark.cli.experiment import EngineOption, ExperimentName, Overrides, with_engine

if TYPE_CHECKING:
    from shardmark.config.experiment import Experiment
    from shardmark.trials.matrix import Plan

SOME_FAILED = 1


Out = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Folder of the run.  Given again, what is missing in it is finished.  "
        "By default runs/NAME, or runs/NAME-2 and so on.",
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print the trials and what is left out; start none.")
]
Retry = Annotated[bool, typer.Option("--retry", help="Repeat failed and timed-out trials, too.")]
QuietFlag = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print the final table and errors alone.")
]


def run(
    experiment: ExperimentName,
    *,
    overrides: Overrides = None,
    out: Out = None,
    dry_run: DryRun = False,
    retry: Retry = False,
    quiet: QuietFlag = False,
    engine: EngineOption = None,
) -> None:
    """Run every trial of an experiment and compare them."""
    from shardmark.config.load import load_experiment
    from shardmark.trials.matrix import expand

    resolved = load_experiment(experiment, with_engine(engine, overrides))
    plan = expand(resolved)
    if dry_run:
        _print_plan(resolved, plan)
        return
    from shardmark.cli.progress import listener
    from shardmark.launch.controller import run_experiment
    from shardmark.results.runs_folder import fresh_folder

    folder = out.expanduser() if out is not None else fresh_folder(resolved.name)
    again = _command(experiment, overrides or (), engine, folder, retry=retry)
    done = _delegated(resolved, plan, folder, again, retry=retry, quiet=quiet)
    if done is not None:
        raise typer.Exit(done)
    try:
        with _terminable(), listener(folder, quiet=quiet) as progress:
            run_experiment(resolved, folder, plan=plan, progress=progress, retry=retry)
    except KeyboardInterrupt:
        typer.echo(f"interrupted; go on with: {again}", err=True)
        raise
    if _print_results(folder, quiet=quiet):
        raise typer.Exit(SOME_FAILED)


def _delegated(
    experiment: Experiment, plan: Plan, folder: Path, again: str, *, retry: bool, quiet: bool
) -> int | None:
    """The exit code, where another process does it; None where it is to be done here."""
    from shardmark.config.load import to_yaml
    from shardmark.launch.engine import RemoteCommand
    from shardmark.launch.engines import delegate
    from shardmark.launch.slurm.job import JobEndedError

    given = [*(["--retry"] if retry else []), *(["--quiet"] if quiet else [])]
    command = RemoteCommand(
        verb="run",
        experiment=to_yaml(experiment),
        options=("--out", str(folder.absolute()), *given),
        folder=folder,
    )
    try:
        with _terminable():
            tell = (lambda _: None) if quiet else typer.echo
            return delegate(experiment, plan, command, tell)
    except KeyboardInterrupt:
        typer.echo(f"interrupted; go on with: {again}", err=True)
        raise
    except JobEndedError as error:
        if any((folder / "trials").glob("*/result.json")):
            _print_results(folder, quiet=quiet)
        typer.echo(f"error: {error}\nwhat was measured is kept; go on with: {again}", err=True)
        return SOME_FAILED


def _command(
    experiment: str, overrides: Sequence[str], engine: str | None, folder: Path, *, retry: bool
) -> str:
    """What to paste in order to finish the run in that folder."""
    changes = [word for change in overrides for word in ("--set", change)]
    changes += [] if engine is None else ["--engine", engine]
    retrying = ["--retry"] if retry else []
    words = ["shardmark", "run", experiment, *changes, *retrying, "--out", str(folder)]
    return shlex.join(words)


def _print_results(folder: Path, *, quiet: bool) -> bool:
    """The table, and where it comes from; whether some trial failed or timed out."""
    from shardmark.analysis.compare.comparison import compare
    from shardmark.cli.compare import render
    from shardmark.results.store import load_run

    stored = load_run(folder)
    table = render(compare([stored], None))
    typer.echo(table if quiet else f"\n{table}", nl=False)
    if not quiet:
        shown = shlex.quote(str(folder))
        typer.echo(f"\nfiles: {folder}   again: shardmark compare {shown}")
        typer.echo(f"report: shardmark report {shown}")
    return any(result.outcome in ("failed", "timed_out") for result in stored.trials)


def _print_plan(experiment: Experiment, plan: Plan) -> None:
    """The trials in their order and the cells left out; asks no device and reads no data."""
    from shardmark.cli.plan import plan_lines, unavailable_lines
    from shardmark.launch.engines import submission
    from shardmark.measure.system.environment import machine

    here = machine(experiment.device)
    plan = plan.on("cuda" if here.device_type == "cuda" else "cpu")
    typer.echo("\n".join(plan_lines(plan)))
    without = [word for word in sys.argv[1:] if word != "--dry-run"]
    engine = experiment.engine.name
    lacking = unavailable_lines(plan.trials, here) if engine == "local" else []
    for line in [*submission(experiment, plan, ["shardmark", *without]), *lacking]:
        typer.echo(f"{engine}: {line}")


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
