"""Measures a script without one thing after the other, and explains its step.  Imports no torch."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardmark.base.errors import InputError
from shardmark.base.files.run_files import STEPS_FILE
from shardmark.base.results.schema import Outcome, TrialResult
from shardmark.bench.analysis.parts import NAMES, NOTEWORTHY
from shardmark.bench.analysis.taken_away import (
    ALL,
    BETWEEN,
    EQUAL_ROWS,
    LOOK,
    OWN_ROWS,
    PLAIN,
    UPDATE,
    WORTH_A_TRY,
    Explanation,
    Samples,
    explanation_of,
    largest_share,
    rows_differ,
    rows_vary,
    sample_of,
)
from shardmark.bench.launch.listener import ProgressListener
from shardmark.bench.launch.run_options import RunOptions
from shardmark.bench.launch.session import RunSession
from shardmark.bench.launch.trial_artifacts import read_lines
from shardmark.experiment.experiment import Experiment
from shardmark.experiment.load import from_mapping
from shardmark.experiment.matrix import expand
from shardmark.scripts.interventions import text_of

MOST_ROUNDS, LEAST_ROUNDS = 12, 3
WARMUP_STEPS = 5
STEPS = 20  # are measured
FIRST_SHARE = 0.6
"""Share of the budget after which what makes a rank late is tried, if there were some rounds."""
HANGS, LEAST_SECONDS = 5, 10.0
"""A variant ends as failed after so many times the longest trial, which is taken for this long."""
LARGE_UPDATE = 0.1
"""Share of a rank's time from which the optimizer's update is taken away, too."""


def explain(
    command: str, world_size: int, path: Path, *, budget_seconds: float, listener: ProgressListener
) -> Explanation:
    """Measure the command under interventions in a run's folder; a second call continues it.

    Raises `InputError` if the script does not run, or takes too few steps.
    """
    began = time.monotonic()
    with looked_at(command, world_size, path, began + budget_seconds, listener) as rounds:
        samples = rounds.samples
        seen = samples.seen
        chosen = _chosen(seen, world_size)
        variants: dict[str, Mapping[str, str]] = {PLAIN: {}}
        variants |= {name: {name: value} for name, value in chosen.items()}
        for name, interventions in variants.items():
            rounds.run(name, interventions, 0)
        if reason := samples.failures.get(PLAIN):
            raise InputError(f"command {command!r}", f"its second run: {reason}", "run again")
        working = {name: value for name, value in chosen.items() if name not in samples.failures}
        samples.stripped = ALL if len(working) > 1 else next(iter(working), PLAIN)
        if "same_batch" in working and rows_vary(seen):  # a rank is not late by few long rows
            samples.stripped = EQUAL_ROWS if len(working) == 1 else ALL
            working["rows_of"] = f"0+{working.pop('same_batch')}"
        variants.setdefault(samples.stripped, working)
        if largest_share(seen, "update") >= LARGE_UPDATE:
            variants[UPDATE] = {"no_update": ""}
        rounds.repeat(variants, most_rounds=LEAST_ROUNDS)
        rounds.ends_at_seconds = began + FIRST_SHARE * budget_seconds
        rounds.repeat(variants)
        if not samples.trials(PLAIN):
            raise InputError("--budget", f"{budget_seconds:.0f} s", "no time for two trials")
        rounds.ends_at_seconds = began + budget_seconds
        second = _second_variants(samples, working)
        rounds.repeat(second, most_rounds=LEAST_ROUNDS)
        rounds.repeat(variants | second)
        experiment = rounds.experiment().model_dump(mode="json")
        rounds.session.runner.folder.write_experiment(experiment)
        return explanation_of(samples, [*chosen])


@contextmanager
def looked_at(
    command: str, world_size: int, path: Path, ends_at_seconds: float, listener: ProgressListener
) -> Iterator[Rounds]:
    """Open a run's folder for rounds of trials, after a trial that changes nothing.

    Raises `InputError` if the script does not run, or not in time.
    """
    experiment = _experiment(command, world_size, {LOOK: "%look"})
    with RunSession.open(experiment, path, RunOptions(), listener) as session:
        session.runner.load(session.plan.trials)
        rounds = Rounds(session, command, Samples(world_size), {}, ends_at_seconds)
        rounds.run(LOOK, {"look": ""}, 0)
        if not rounds.samples.trials(LOOK):
            reason = rounds.samples.failures.get(LOOK)
            if reason is None or time.monotonic() > ends_at_seconds:
                problem = f"no time for one trial{f': {reason}' if reason else ''}"
                raise InputError("--budget", problem, "give it more")
            raise InputError(f"command {command!r}", reason, "mend that first")
        yield rounds


def _chosen(seen: Sequence[Mapping[str, Any]], world_size: int) -> dict[str, str]:
    """Return what is worth being taken away, with values, for what was seen on the ranks."""
    largest = {kind: largest_share(seen, kind) for kind in NAMES}
    chosen = {}
    makes_batches = "loader" in seen[0] or bool(seen[0]["functions"])
    is_unknown = makes_batches and not any(rank["rows"] for rank in seen)
    if largest["input"] >= WORTH_A_TRY or rows_differ(seen) or is_unknown:
        chosen["same_batch"] = "" if "loader" in seen[0] else "+".join(seen[0]["functions"])
    if world_size > 1:
        chosen["no_peers"] = ""
    return chosen | {name: "" for kind, name in BETWEEN.items() if largest[kind] >= WORTH_A_TRY}


def _second_variants(samples: Samples, chosen: Mapping[str, str]) -> dict[str, Mapping[str, str]]:
    """Return variants that tell why a rank is late, or whether all wait for the longest rows."""
    if (late := samples.late()) is None:
        return {}
    functions = chosen.get("same_batch", "")
    variants: dict[str, Mapping[str, str]] = {}
    if any(len(set(rank["rows"])) > 1 for rank in samples.seen):
        _, _, functions = chosen.get("rows_of", f"+{functions}").partition("+")
        variants[OWN_ROWS] = {"same_batch": functions}
        variants[EQUAL_ROWS] = {"rows_of": f"0+{functions}"}
    if late[1].value > NOTEWORTHY * samples.step.value:
        variants["places"] = {**chosen, "swap_places": ""}
        if "same_batch" in chosen:
            rest = {name: value for name, value in chosen.items() if name != "same_batch"}
            variants["rows"] = {**rest, "rows_of": f"next+{functions}"}
    return variants


@dataclass(slots=True)
class Rounds:
    """Runs the trials of one number of ranks."""

    session: RunSession
    command: str
    samples: Samples
    variants: dict[str, str]
    """Arguments of each variant that was tried."""
    ends_at_seconds: float
    """Time of the monotonic clock."""
    longest_seconds: float = 0.0

    def repeat(
        self, variants: Mapping[str, Mapping[str, str]], most_rounds: int = MOST_ROUNDS
    ) -> None:
        """Repeat the variants until their times are known precisely enough, or the budget ends."""
        for number in range(most_rounds if variants else 0):
            if number >= LEAST_ROUNDS and self.samples.precise(variants):
                return
            names = [*variants]
            random.Random(number).shuffle(names)
            for name in names:
                self.run(name, variants[name], number)

    def run(self, name: str, interventions: Mapping[str, str], number: int) -> None:
        """Run a variant in a round, unless it fails, has a result or the budget is used up."""
        runner = self.session.runner
        self.variants[name] = text_of(interventions)
        trials = expand(self.experiment()).on(runner.machine.device_type).trials
        trial = next(t for t in trials if t.strategy.name == name and t.repeat == number)
        result = runner.folder.read_result(trial.id)
        if not isinstance(result, TrialResult) or result.outcome is not Outcome.OK:
            left_seconds = self.ends_at_seconds - time.monotonic()
            if name in self.samples.failures or self.longest_seconds > left_seconds:
                return
            measure = trial.measure.model_copy(update={"probe": "look" in interventions})
            most_seconds = HANGS * max(self.longest_seconds, LEAST_SECONDS)
            most_seconds = most_seconds if self.longest_seconds else left_seconds
            limits = trial.limits.model_copy(update={"trial_seconds": most_seconds})
            count = sum(map(len, self.samples.by_variant.values())) + 1
            runner.listener.trial_started(count, None, trial)
            result = runner.run(trial.changed(measure=measure, limits=limits), order=count)
            runner.listener.trial_ended(count, None, result)
        if result.outcome is Outcome.INTERRUPTED:
            raise KeyboardInterrupt
        if result.outcome is not Outcome.OK:
            reason = result.failure.reason if result.failure else str(result.outcome)
            self.samples.failures[name] = reason
            return
        self.longest_seconds = max(self.longest_seconds, result.total_seconds)
        lines = [*read_lines(runner.folder.trial_folder(trial.id) / STEPS_FILE)]
        sample = sample_of(result, lines)
        returned = [facts["returned"] for facts in sample.seen("SameBatch")]
        if name == "same_batch" and not any(returned or [True]):
            self.samples.failures[name] = "no batch of the warm-up was loaded again"
            return
        self.samples.by_variant.setdefault(name, {})[number] = sample

    def experiment(self) -> Experiment:
        return _experiment(self.command, self.samples.world_size, self.variants)


def _experiment(command: str, world_size: int, variants: Mapping[str, str]) -> Experiment:
    """Return the experiment of a script's variants under interventions."""
    mapping: dict[str, Any] = {
        "name": "why",
        "workload": {"name": "script", "command": command},
        "matrix": {"variant": dict(variants), "world_size": [world_size]},
        "recipe": {"steps": WARMUP_STEPS + STEPS},
        "measure": {
            "warmup_steps": WARMUP_STEPS, "verify": False, "repeats": MOST_ROUNDS,
            "max_remeasure": 0,
        },
    }  # fmt: skip
    return from_mapping(mapping, [], place="shardmark why")
