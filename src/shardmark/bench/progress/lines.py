"""Prints a run's progress as plain lines."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from shardmark.base.cells import NODES
from shardmark.base.durations import duration
from shardmark.base.files.strict_yaml import format_yaml
from shardmark.base.metrics import METRICS, RATES
from shardmark.base.results.schema import Outcome, TrialResult
from shardmark.base.text import counted, one_line, say
from shardmark.bench.launch.listener import ProgressListener, TrialProgress
from shardmark.bench.progress.pace import Pace
from shardmark.bench.report.answers.wording import size
from shardmark.experiment.messages import show
from shardmark.ranks.trial import Trial

if TYPE_CHECKING:
    from pathlib import Path

    from shardmark.experiment.matrix import LeftOut

LINE_EVERY_SECONDS = 30.0


class Lines(ProgressListener):
    """Prints a line when a trial has ended, and every half minute before."""

    def __init__(self, folder: Path | None = None, *, budget_seconds: float | None = None) -> None:
        self._folder = folder
        self._pace = Pace(budget_seconds)
        self._title = ""
        self._printed_at = 0.0
        self._noted: set[str] = set()

    def planned(self, total: int | None, finished: int, left_out: tuple[LeftOut, ...]) -> None:
        if self._folder is not None:
            self._print(f"writing to {self._folder}")
        for cell in left_out:
            self._print(f"left out: {cell}")
        done = f", {finished} finished already" if finished else ""
        trials = "as many trials as decide" if total is None else counted(total, "trial")
        self._print(f"{trials}{done}; loading libraries")
        self._pace.planned(None if total is None else total - finished)

    def note(self, text: str) -> None:
        if text not in self._noted:  # a command may open several runs
            self._noted.add(text)
            self._print(text)

    def doing(self, text: str) -> None:
        self._print(text)

    def trial_started(self, number: int, total: int | None, trial: Trial) -> None:
        self._title = f"{_place(number, total)} {title(trial)}"
        self._printed_at = time.monotonic()
        left = None if total is None else total - number + 1  # fewer after cells are decided
        self._pace.planned(left)
        tokens = trial.workload.tokens_per_sample
        self._pace.trial_started(trial.samples_per_step, tokens_per_sample=tokens)

    def trial_stepped(self, progress: TrialProgress) -> None:
        self._pace.stepped(progress.steps, progress.total_steps)
        self.show(progress)

    def show(self, progress: TrialProgress) -> None:
        """Print the progress if the last line is old; `Display` draws it."""
        if time.monotonic() - self._printed_at >= LINE_EVERY_SECONDS:
            self._printed_at = time.monotonic()
            self._print(f"{self._title}: {', '.join(figures(progress, self._pace))}")

    def trial_ended(self, number: int, total: int | None, result: TrialResult) -> None:  # noqa: ARG002
        self._pace.trial_ended(ran_through=result.outcome in (Outcome.OK, Outcome.TIMED_OUT))
        is_last = result.outcome is Outcome.INTERRUPTED
        left = None if is_last else self._pace.run_left_seconds(between_trials=True)
        tail = f", about {duration(left)} left" if left else ""
        self._print(f"{self._title}: {ending(result)}{tail}")

    def _print(self, text: str) -> None:
        say(text)


class Quiet(ProgressListener):
    """Prints only failures, on standard error."""

    def trial_started(self, number: int, total: int | None, trial: Trial) -> None:
        self._title = f"{_place(number, total)} {title(trial)}"

    def trial_ended(self, number: int, total: int | None, result: TrialResult) -> None:  # noqa: ARG002
        if result.outcome in (Outcome.FAILED, Outcome.TIMED_OUT):
            say(f"error: {self._title}: {ending(result)}", error=True)


def _place(number: int, total: int | None) -> str:
    return f"[{number}]" if total is None else f"[{number}/{total}]"


def title(trial: Trial) -> str:
    """Return a trial's title, such as `ddp on 4 ranks of 2 nodes, recipe.precision=bf16`."""
    parts = [trial.title]
    parts += [f"{key}={shown(value)}" for key, value in trial.varied.items() if key != NODES]
    if trial.measure.repeats.at_most > 1:
        parts += [] if trial.twin else [trial.repeat_title]
    return ", ".join(parts)


def shown(value: object) -> str:
    """Return a varied value as YAML on one line."""
    if isinstance(value, Mapping | list | tuple):
        return one_line(format_yaml(value, one_line=True))
    return one_line(value if isinstance(value, str) else show(value))


def figures(progress: TrialProgress, pace: Pace) -> tuple[str, ...]:
    """Return the state of the current trial in words, the most important first."""
    total = progress.total_steps
    parts = [f"step {progress.steps} of {total}" if total else f"step {progress.steps}"]
    if progress.steps >= total > 0:
        parts.append("finishing")
    elif pace.still_seconds:
        parts.append(f"no step for {duration(pace.still_seconds)}")
    elif (rate := pace.samples_per_second) is not None:
        tokens = pace.tokens_per_sample
        parts.append(f"{rate * tokens:.0f} tokens/s" if tokens else f"{rate:.1f} samples/s")
    if progress.loss is not None and progress.loss_steps is not None:
        # Only a loss of an earlier step is printed with its step.
        late = progress.steps - progress.loss_steps > 1
        parts.append(f"loss {progress.loss:.4g}" + (f" at step {progress.loss_steps}" * late))
    parts.append(f"{duration(pace.trial_seconds)} elapsed")
    left = pace.run_left_seconds()
    if left is not None and left >= 1:
        parts.append(f"about {duration(left)} left")
    return tuple(parts)


def ending(result: TrialResult) -> str:
    """Return the end of a trial in words."""
    seconds = f"{result.total_seconds:.1f} s"
    if result.outcome is Outcome.INTERRUPTED:
        return f"interrupted after {seconds} (trials/{result.id})"
    if result.outcome is not Outcome.OK:
        reason = f": {result.failure.reason}" if result.failure else ""
        remedy = f"; {result.failure.remedy}" if result.failure and result.failure.remedy else ""
        return f"{result.outcome} after {seconds}{reason}{remedy} (trials/{result.id})"
    rates = [(name, rate) for name in RATES if (rate := result.metrics.get(name)) is not None]
    speed = "".join(f", {rate.value:.1f} {METRICS[name].unit}" for name, rate in rates[:1])
    peak = result.metrics.get("peak_memory_bytes")
    memory = "" if peak is None else f", peak {size(peak.value)}"
    disturbed = f", disturbed: {result.disturbed}" if result.disturbed else ""
    diverged = f", {result.diverged}" if result.diverged else ""
    return f"ok in {seconds}{speed}{memory}{disturbed}{diverged}"
