"""What a person sees while a run works: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from shardmark.experiment.schema import Trial
from shardmark.results.schema import Outcome, TrialResult

if TYPE_CHECKING:
    from rich.status import Status

    from shardmark.experiment.matrix import LeftOut
    from shardmark.launch.listener import ProgressListener

LINE_EVERY_SECONDS = 30.0


class Lines:
    """One line when a trial starts and one when it ends; in between one every half minute."""

    def __init__(self, status: Status | None = None) -> None:
        self._status = status
        self._title = ""
        self._started_at = 0.0
        self._lined_at = 0.0
        self._run_started_at = time.monotonic()
        self._done_here = 0
        self._to_do = 0

    def planned(self, total: int, finished: int, left_out: tuple[LeftOut, ...]) -> None:
        for cell in left_out:
            typer.echo(f"left out: {cell}")
        done = f", {finished} have their result already" if finished else ""
        typer.echo(f"{total} trials{done}; loading libraries")
        self._to_do = total - finished
        self._run_started_at = time.monotonic()

    def note(self, text: str) -> None:
        typer.echo(text)

    def trial_started(self, number: int, total: int, trial: Trial) -> None:
        if not self._done_here:
            self._run_started_at = time.monotonic()  # loading and verifying come only once
        self._title = f"[{number}/{total}] {trial.id}"
        self._started_at = self._lined_at = time.monotonic()
        if self._status is not None:
            self._show(f"{self._title}: starting")

    def trial_stepped(self, steps: int, total_steps: int) -> None:
        now = time.monotonic()
        text = f"{self._title}: step {steps} of {total_steps}, {now - self._started_at:.0f} s"
        if self._status is not None:
            self._show(text)
        elif now - self._lined_at >= LINE_EVERY_SECONDS:
            self._lined_at = now
            typer.echo(text)

    def trial_ended(self, number: int, total: int, result: TrialResult) -> None:  # noqa: ARG002
        self._done_here += 1
        typer.echo(f"{self._title}: {_ending(result)}{self._left()}")

    def _left(self) -> str:
        """Time left, if the trials to come take as long as those so far did."""
        trials = self._to_do - self._done_here
        if trials <= 0:
            return ""
        each = (time.monotonic() - self._run_started_at) / self._done_here
        return f"  (about {each * trials / 60:.1f} min left)"

    def _show(self, text: str) -> None:
        assert self._status is not None, "the caller looked"
        from rich.text import Text

        self._status.update(Text(text))


def _ending(result: TrialResult) -> str:
    seconds = f"{result.total_seconds:.1f} s"
    if result.outcome is not Outcome.OK:
        reason = f": {result.failure.reason}" if result.failure else ""
        remedy = f"; {result.failure.remedy}" if result.failure and result.failure.remedy else ""
        return f"{result.outcome} after {seconds}{reason}{remedy}"
    rate = result.metrics.get("samples_per_second")
    speed = f", {rate.value:.1f} samples/s" if rate else ""
    return f"ok in {seconds}{speed}"


@contextmanager
def listener() -> Iterator[ProgressListener]:
    """The listener that fits standard output."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        yield Lines()
        return
    with console.status("starting") as status:
        yield Lines(status)
