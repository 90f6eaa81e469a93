"""What `run --dry-run` prints: the trials, the cells left out, the time, what is missing here."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from shardmark.config.axes import title_of
from shardmark.config.experiment import Experiment
from shardmark.core.errors import StrategyUnavailable
from shardmark.core.machine import Machine
from shardmark.core.text import say
from shardmark.launch.controller import check_folder, check_plan, check_schedules, refused_models
from shardmark.launch.engines import submission
from shardmark.launch.estimate import time_lines
from shardmark.launch.fingerprint import fingerprint_of
from shardmark.measure.system.environment import machine
from shardmark.progress.lines import shown
from shardmark.report.answers.wording import listed
from shardmark.results.store import is_run, load_run
from shardmark.trials.matrix import Plan
from shardmark.trials.trial import Trial

GAP = "  "
"""Between columns; no column has it inside."""


def print_plan(
    experiment: Experiment,
    plan: Plan,
    out: Path | None,
    budget_seconds: float | None,
    *,
    remeasure: bool,
) -> None:
    """Print what the command would do; asks no device, fetches nothing.

    Raises `InputError` or `DataError` for what could not be measured.
    """
    there = tuple(trial for trial in plan.trials if not trial.workload.fetches_data)
    known = replace(plan, trials=there)
    check_plan(known)
    check_schedules(known)
    if out is not None:
        check_folder(out, experiment, fingerprint_of(there), remeasure=remeasure)
    here = machine(experiment.device)
    plan = plan.on("cuda" if here.device_type == "cuda" else "cpu")
    goes_on = out if out is not None and is_run(out) and not remeasure else None
    stored = load_run(goes_on) if goes_on else None
    done = {result.id for result in (*stored.trials, *stored.twins)} if stored else set()
    todo = [trial for trial in plan.with_twin if trial.id not in done]
    say(*_trial_lines(plan), *_duration_lines(plan))
    say(*time_lines(todo, goes_on, budget_seconds, verify=experiment.measure.verify))
    command = ["shardmark", *(word for word in sys.argv[1:] if word != "--dry-run")]
    engine = experiment.engine.name
    lacking = _unavailable_lines(plan, here if engine == "local" else None)
    for line in (*submission(experiment, plan, command), *lacking):
        say(f"{engine}: {line}")


def _trial_lines(plan: Plan) -> Iterator[str]:
    """Number, id, strategy, ranks, repeat, then each option and varied key as KEY=VALUE.

    Repeats that come only where they are needed are counted in one line.
    """
    repeats = plan.trials[0].measure.repeats
    sure = [trial for trial in plan.with_twin if trial.repeat < repeats.at_least]
    rows = [_row(number, trial) for number, trial in enumerate(sure, start=1)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield GAP.join(t.ljust(width) for t, width in zip(row, widths, strict=True)).rstrip()
    if repeats.adaptive:
        more = repeats.at_most - repeats.at_least
        known = f"the rate is known to {repeats.until:.0%} or the differences are decided"
        yield f"then up to {more} more repeats, until {known}"
    for cell in plan.left_out:
        yield f"left out: {cell}"
    count = len(plan.with_twin)
    most = f" to {count}" if repeats.adaptive else ""
    trials = f"{len(sure)}{most} trial{'' if count == 1 else 's'}"
    yield f"{trials}, {_counted(len(plan.left_out), 'cell')} left out"


def _row(number: int, trial: Trial) -> list[str]:
    varied = {title_of(key): value for key, value in trial.varied.items()}
    varied = trial.strategy.options | varied
    return [
        f"{number:4d}",
        trial.id,
        trial.strategy.name,
        _counted(trial.world_size, "rank"),
        trial.repeat_title,
        GAP.join(f"{key}={' '.join(shown(value).split())}" for key, value in varied.items()),
    ]


def _duration_lines(plan: Plan) -> list[str]:
    """How long trials warm up and are measured at least; nothing where steps alone count."""
    lines: dict[str, None] = {}
    for trial in plan.trials:
        warmup_seconds, window_seconds = trial.least_seconds
        if warmup_seconds:
            steps = _counted(trial.measure.warmup_steps, "step")
            lines[f"warm-up: at least {steps} and {warmup_seconds:g} s"] = None
        if window_seconds:
            added = "where the recipe is shorter, steps are added after its end"
            lines[f"measured: at least {window_seconds:g} s; {added}"] = None
    return list(lines)


def _unavailable_lines(plan: Plan, here: Machine | None) -> Iterator[str]:
    """What this machine lacks for the trials of one node, and models that cannot be divided: each
    reason once, with its remedy."""
    refused, titles = refused_models(plan.trials), defaultdict[str, list[str]](list)
    for trial in plan.trials:
        try:
            if here is not None and trial.nodes == 1:
                trial.built_strategy.check(trial.world_size, here, trial.recipe)
            if trial.id in refused:
                raise refused[trial.id]
        except StrategyUnavailable as error:
            reason = f"{error.reason}; {error.remedy}" if error.remedy else error.reason
            titles[reason].append(trial.title)
    for reason, found in titles.items():
        verb = "is" if len(found) == 1 else "are"
        told = f"{_counted(len(found), 'trial')} {verb} recorded as unavailable here: {reason}"
        yield f"{told} ({listed([*dict.fromkeys(found)])})"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
