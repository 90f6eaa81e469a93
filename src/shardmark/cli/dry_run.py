"""Prints the plan of `run --dry-run`: trials, cells left out, expected time, missing software."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Set
from dataclasses import replace
from pathlib import Path

from shardmark.base.cells import title_of
from shardmark.base.errors import StrategyUnavailable
from shardmark.base.machine import Machine
from shardmark.base.results.schema import TrialResult
from shardmark.base.results.store import RunFolder, is_run, load_run
from shardmark.base.text import counted, listed, render_json, say, say_text
from shardmark.bench.launch.engines import submission
from shardmark.bench.launch.fingerprint import check_same_run, fingerprint_of
from shardmark.bench.launch.input_checks import check_plan, check_schedules, refused_models
from shardmark.bench.launch.run_options import RunOptions
from shardmark.bench.launch.trial_queue import runs_again, time_lines
from shardmark.bench.progress.lines import shown
from shardmark.cli.arguments import TextOrJson
from shardmark.experiment.experiment import Experiment
from shardmark.experiment.matrix import TrialPlan
from shardmark.ranks.measure.system.environment import machine
from shardmark.ranks.trial import Trial

GAP = "  "
"""Separator of columns, which no column contains."""


def print_plan(
    experiment: Experiment,
    plan: TrialPlan,
    out: Path | None,
    options: RunOptions,
    form: TextOrJson = TextOrJson.TEXT,
) -> None:
    """Print what the command would do, without touching a device or fetching data.

    Raises `InputError` or `DataError` for trials that could not be measured.
    """
    available = tuple(trial for trial in plan.trials if not trial.workload.fetches_data)
    checked = replace(plan, trials=available)
    check_plan(checked)
    check_schedules(checked)
    if out is not None:
        RunFolder.check(out)
        if not options.remeasure:
            check_same_run(out, experiment, fingerprint_of(available))
    this_machine = machine(experiment.device)
    plan = plan.on("cuda" if this_machine.device_type == "cuda" else "cpu")
    continued = out if out is not None and is_run(out) and not options.remeasure else None
    stored = load_run(continued) if continued else None
    results = {r.id: r for r in (*stored.trials, *stored.twins)} if stored else {}
    finished = {key for key, r in results.items() if not runs_again(r, retry=options.retry)}
    remaining = [trial for trial in plan.with_twin if trial.id not in finished]
    verify = experiment.measure.verify
    time = time_lines(remaining, continued, options.budget_seconds, verify=verify)
    engine = experiment.engine.name
    unavailable = _unavailable_lines(plan, this_machine if engine == "local" else None)
    if form is TextOrJson.JSON:
        document = {
            "trials": [_facts(trial, results, finished) for trial in plan.with_twin],
            "left_out": list(map(str, plan.left_out)),
            "unavailable": list(unavailable),
            "notes": [*_duration_lines(plan), *time],
        }
        say_text(render_json(document))
        return
    say(*_trial_lines(plan, results, finished), *_duration_lines(plan), *time)
    command = ["shardmark", *(word for word in sys.argv[1:] if word != "--dry-run")]
    for line in (*submission(experiment, plan, command), *unavailable):
        say(f"{engine}: {line}")


def _facts(
    trial: Trial, results: Mapping[str, TrialResult], finished: Set[str]
) -> dict[str, object]:
    """Return what JSON has about a planned trial; `outcome` is that of a stored result."""
    stored = results.get(trial.id)
    return {
        "id": trial.id,
        "strategy": trial.strategy.name,
        "strategy_options": dict(trial.strategy.options),
        "world_size": trial.world_size,
        "varied": dict(trial.varied),
        "repeat": trial.repeat,
        "if_needed": trial.repeat >= trial.measure.repeats.at_least,
        "twin": trial.twin,
        "finished": trial.id in finished,
        "outcome": None if stored is None else stored.outcome,
    }


def _trial_lines(
    plan: TrialPlan, results: Mapping[str, TrialResult], finished: Set[str]
) -> Iterator[str]:
    """Yield a line for each certain trial: number, id, strategy, ranks, repeat, keys, state.

    One line counts the repeats that run only if they are needed.  `results` are stored ones by
    trial; `finished` are the trials among them that do not run again.
    """
    repeats = plan.trials[0].measure.repeats
    certain = [trial for trial in plan.with_twin if trial.repeat < repeats.at_least]
    states = {
        key: f"{'finished' if key in finished else 'runs again'}: {result.outcome}"
        for key, result in results.items()
    }
    rows = [
        [*_row(number, trial), states.get(trial.id, "")]
        for number, trial in enumerate(certain, start=1)
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield GAP.join(t.ljust(width) for t, width in zip(row, widths, strict=True)).rstrip()
    if repeats.adaptive:
        more = repeats.at_most - repeats.at_least
        until = f"the rate is known to {repeats.until:.0%} or the differences are decided"
        if repeats.margin is not None:
            until = f"the race is decided (a difference below {repeats.margin:.1%} is none)"
        yield f"then up to {more} more repeats, until {until}"
    for cell in plan.left_out:
        yield f"left out: {cell}"
    count = len(plan.with_twin)
    most = f" to {count}" if repeats.adaptive else ""
    trials = f"{len(certain)}{most} trial{'' if count == 1 else 's'}"
    done = sum(trial.id in finished for trial in plan.with_twin)
    state = f", {done} finished" if results else ""
    yield f"{trials}{state}, {counted(len(plan.left_out), 'cell')} left out"


def _row(number: int, trial: Trial) -> list[str]:
    varied = {title_of(key): value for key, value in trial.varied.items()}
    varied = trial.strategy.options | varied
    return [
        f"{number:4d}",
        trial.id,
        trial.strategy.name,
        counted(trial.world_size, "rank"),
        trial.repeat_title,
        GAP.join(f"{key}={' '.join(shown(value).split())}" for key, value in varied.items()),
    ]


def _duration_lines(plan: TrialPlan) -> list[str]:
    """Return the least durations of warm-up and measurement, if the experiment sets any."""
    lines: dict[str, None] = {}
    for trial in plan.trials:
        warmup_seconds, window_seconds = trial.least_seconds
        if warmup_seconds:
            steps = counted(trial.measure.warmup_steps, "step")
            lines[f"warm-up: at least {steps} and {warmup_seconds:g} s"] = None
        if window_seconds:
            added = "if the recipe is shorter, steps are added after its end"
            lines[f"measured: at least {window_seconds:g} s; {added}"] = None
    return list(lines)


def _unavailable_lines(plan: TrialPlan, this_machine: Machine | None) -> Iterator[str]:
    """Yield each reason why trials cannot run on this machine, with its remedy and the trials."""
    refused, titles = refused_models(plan.trials), defaultdict[str, list[str]](list)
    for trial in plan.trials:
        try:
            if this_machine is not None and trial.nodes == 1:
                trial.built_strategy.check(trial.world_size, this_machine, trial.recipe)
            if trial.id in refused:
                raise refused[trial.id]
        except StrategyUnavailable as error:
            reason = f"{error.reason}; {error.remedy}" if error.remedy else error.reason
            titles[reason].append(trial.title)
    for reason, trials in titles.items():
        verb = "is" if len(trials) == 1 else "are"
        count = f"{counted(len(trials), 'trial')} {verb} recorded as unavailable here"
        yield f"{count}: {reason} ({listed([*dict.fromkeys(trials)])})"
