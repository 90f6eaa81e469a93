"""Measures a script without one thing after the other, and explains its step.  Imports no torch."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
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
STEPS = 20
"""Measured steps of a trial."""
FIRST_SHARE = 0.6
"""Share of the budget after which what makes a rank late is tried."""
LARGE_UPDATE = 0.1
"""Share of a rank's time from which the optimizer's update is taken away, too."""

Interventions = Mapping[str, str]


def explain(
    command: str, world_size: int, path: Path, *, budget_seconds: float, listener: ProgressListener
) -> Explanation:
    """Measure the command under interventions in a run's folder; a second call continues it.

    Raises `InputError` if the script does not run, or takes too few steps.
    """
    began = time.monotonic()
    experiment = _experiment(command, world_size, {LOOK: "%look"})
    with RunSession.open(experiment, path, RunOptions(), listener) as session:
        session.runner.load(session.plan.trials)
        rounds = _Rounds(session, command, Samples(world_size), {}, began + budget_seconds)
        samples = rounds.samples
        rounds.look()
        seen = samples.seen
        chosen = _chosen(seen, world_size)
        variants: dict[str, Interventions] = {PLAIN: {}}
        variants |= {name: {name: value} for name, value in chosen.items()}
        for name, interventions in variants.items():
            rounds.run(name, interventions, 0)
        working = {name: value for name, value in chosen.items() if name not in samples.failures}
        samples.stripped = ALL if len(working) > 1 else next(iter(working), PLAIN)
        if "same_batch" in working and rows_vary(seen):  # a rank is not late by few long rows
            samples.stripped = EQUAL_ROWS if len(working) == 1 else ALL
            working["rows_of"] = _rows_of("0", working.pop("same_batch"))
        variants.setdefault(samples.stripped, working)
        if largest_share(seen, "update") >= LARGE_UPDATE:
            variants[UPDATE] = {"no_update": ""}
        rounds.ends_at_seconds = began + FIRST_SHARE * budget_seconds
        rounds.repeat(variants)
        if not samples.trials(PLAIN):
            raise InputError("--budget", f"{budget_seconds:.0f} s", "no time for two trials")
        rounds.ends_at_seconds = began + budget_seconds
        rounds.repeat(_second_variants(samples, working))
        rounds.repeat(variants)
        session.runner.folder.write_experiment(rounds.experiment().model_dump(mode="json"))
        return explanation_of(samples, [*chosen])


def look_at(
    command: str, world_size: int, path: Path, *, listener: ProgressListener
) -> tuple[dict[str, Any], str]:
    """Run a trial that changes nothing; return what was seen on rank 0, and the kind of device.

    Raises `InputError` if the script does not run.
    """
    experiment = _experiment(command, world_size, {LOOK: "%look"})
    with RunSession.open(experiment, path, RunOptions(), listener) as session:
        session.runner.load(session.plan.trials)
        rounds = _Rounds(session, command, Samples(world_size), {}, float("inf"))
        rounds.look()
        return rounds.samples.seen[0], session.runner.machine.device_type


def _chosen(seen: Sequence[Mapping[str, Any]], world_size: int) -> dict[str, str]:
    """Return what is worth being taken away, with values, for what was seen on the ranks."""
    largest = {kind: largest_share(seen, kind) for kind in NAMES}
    chosen = {}
    is_unknown = bool(seen[0]["functions"]) and not any(rank["rows"] for rank in seen)
    if largest["input"] >= WORTH_A_TRY or rows_differ(seen) or is_unknown:
        chosen["same_batch"] = "" if "loader" in seen[0] else "+".join(seen[0]["functions"])
    if world_size > 1:
        chosen["no_peers"] = ""
    return chosen | {name: "" for kind, name in BETWEEN.items() if largest[kind] >= WORTH_A_TRY}


def _second_variants(samples: Samples, chosen: Interventions) -> dict[str, Interventions]:
    """Return variants that tell why a rank is late, or whether all wait for the longest rows."""
    if (late := samples.late()) is None:
        return {}
    functions = chosen.get("same_batch", "")
    variants: dict[str, Interventions] = {}
    if any(len(set(rank["rows"])) > 1 for rank in samples.seen):
        _, _, functions = chosen.get("rows_of", f"+{functions}").partition("+")
        variants[OWN_ROWS] = {"same_batch": functions}
        variants[EQUAL_ROWS] = {"rows_of": _rows_of("0", functions)}
    if late[1].value > NOTEWORTHY * samples.step.value:
        variants["places"] = {**chosen, "swap_places": ""}
        if "same_batch" in chosen:
            rest = {name: value for name, value in chosen.items() if name != "same_batch"}
            variants["rows"] = {**rest, "rows_of": _rows_of("next", functions)}
    return variants


def _rows_of(rank: str, functions: str) -> str:
    return f"{rank}+{functions}" if functions else rank


@dataclass(slots=True)
class _Rounds:
    """Runs the trials of one number of ranks."""

    session: RunSession
    command: str
    samples: Samples
    variants: dict[str, str]
    """Arguments of each variant that was tried."""
    ends_at_seconds: float
    """Time of the monotonic clock."""
    longest_seconds: float = 0.0

    def look(self) -> None:
        """Look at what the script does.  Raises `InputError` if it does not run."""
        self.run(LOOK, {"look": ""}, 0)
        if not self.samples.trials(LOOK):
            if LOOK not in self.samples.failures:
                raise InputError("--budget", "no time for one trial", "give it more")
            reason = self.samples.failures[LOOK]
            raise InputError(f"command {self.command!r}", reason, "mend that first")

    def repeat(self, variants: Mapping[str, Interventions]) -> None:
        """Repeat the variants until their times are known precisely enough, or the budget ends."""
        for number in range(MOST_ROUNDS if variants else 0):
            if number >= LEAST_ROUNDS and self.samples.precise(variants):
                return
            names = [*variants]
            random.Random(number).shuffle(names)
            for name in names:
                self.run(name, variants[name], number)

    def run(self, name: str, interventions: Interventions, number: int) -> None:
        """Run a variant in a round, unless it fails, has a result or the budget is used up."""
        runner = self.session.runner
        self.variants[name] = text_of(interventions)
        trials = expand(self.experiment()).on(runner.machine.device_type).trials
        trial = next(t for t in trials if t.strategy.name == name and t.repeat == number)
        result = runner.folder.read_result(trial.id)
        if not isinstance(result, TrialResult) or result.outcome is not Outcome.OK:
            late = time.monotonic() + self.longest_seconds > self.ends_at_seconds
            if name in self.samples.failures or late:
                return
            measure = trial.measure.model_copy(update={"probe": "look" in interventions})
            count = sum(map(len, self.samples.by_variant.values())) + 1
            runner.listener.trial_started(count, None, trial)
            result = runner.run(trial.changed(measure=measure), order=count)
            runner.listener.trial_ended(count, None, result)
            self.longest_seconds = max(self.longest_seconds, result.total_seconds)
        if result.outcome is Outcome.INTERRUPTED:
            raise KeyboardInterrupt
        if result.outcome is not Outcome.OK:
            reason = result.failure.reason if result.failure else str(result.outcome)
            self.samples.failures[name] = reason
            return
        lines = [*read_lines(runner.folder.trial_folder(trial.id) / STEPS_FILE)]
        self.samples.by_variant.setdefault(name, {})[number] = sample_of(result, lines)

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
