"""How soon training starts: a further trial of a run against a bare `torchrun` script.

    python benchmarks/startup.py [--pairs 5] [--strategies ddp fsdp] [--small]

The measured value is the time from the launch to the first step of the last rank.  The bare script
imports torch, torchvision and, for ZeRO, DeepSpeed, whose operator is compiled before.  The run has
finished its first trial.  Both start new processes and a new process group each time; the order of
the two sides alternates.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import (
    Table,
    bare_loop_command,
    experiment_of,
    options_of,
    ranks_of,
    script_variables,
    spread,
    store,
    surroundings,
    trial_runner,
)
from shardmark.base.results.schema import Outcome
from shardmark.bench.launch.trial import TrialRunner
from shardmark.experiment.load import from_mapping
from shardmark.experiment.matrix import expand
from shardmark.ranks.trial import Trial
from shardmark.ranks.workloads import check_data

NAME = "startup"
STRATEGIES = ("ddp", "fsdp", "zero-1")
MOST_RATIO = 0.25
BAR = f"Bar: the median of shardmark / bare is at most {MOST_RATIO} for every strategy"
STEPS = 2
BARE_SECONDS = 600.0
SIDES = ("shardmark", "bare")


def trial_startup_seconds(runner: TrialRunner, trial: Trial) -> float:
    result = runner.run(trial, order=trial.repeat)
    if result.outcome is not Outcome.OK:
        raise SystemExit(f"{trial.title} ended as {result.outcome}: {result.failure}")
    startup = result.metrics["startup_seconds"]
    assert startup is not None
    return startup.value


def bare_startup_seconds(strategy: str) -> float:
    ranks = ranks_of(strategy)
    with tempfile.TemporaryDirectory() as folder:
        command = bare_loop_command(strategy, steps=STEPS, out=Path(folder))
        launched_at_seconds = time.time()
        subprocess.run(command, env=script_variables(ranks), check=True, timeout=BARE_SECONDS)
        reports = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(ranks)]
    return max(report["steps_at_seconds"][0] for report in reports) - launched_at_seconds


def measure_pair(runner: TrialRunner, trial: Trial) -> dict[str, Any]:
    strategy, seconds = trial.strategy.name, {}
    order = SIDES if trial.repeat % 2 else SIDES[::-1]
    for side in order:
        seconds[side] = (
            bare_startup_seconds(strategy)
            if side == "bare"
            else trial_startup_seconds(runner, trial)
        )
    ratio = seconds["shardmark"] / seconds["bare"]
    print(f"{strategy}: {seconds}, ratio {ratio:.3f}", flush=True)
    return {**seconds, "first": order[0], "ratio": ratio}


def main() -> None:
    parser = options_of(NAME, __doc__)
    parser.add_argument("--pairs", type=int)
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=STRATEGIES)
    options = parser.parse_args()
    pairs = options.pairs or (1 if options.small else 5)
    around = surroundings()
    experiment = from_mapping(experiment_of(options.strategies, STEPS, 1 + pairs, STEPS - 1))
    check_data(experiment.workload)
    trials = sorted(expand(experiment, "cpu").trials, key=lambda trial: trial.repeat)
    measured: dict[str, list[dict[str, Any]]] = {name: [] for name in options.strategies}
    with trial_runner(trials) as runner:
        for trial in trials:
            if trial.repeat == 0:  # it fills the page cache and compiles DeepSpeed's operator
                trial_startup_seconds(runner, trial)
                bare_startup_seconds(trial.strategy.name)
            else:
                measured[trial.strategy.name].append(measure_pair(runner, trial))
    ratios = {name: spread([pair["ratio"] for pair in of]) for name, of in measured.items()}
    medians = {
        name: [f"{spread([pair[side] for pair in of])['median']:.2f}" for side in SIDES]
        for name, of in measured.items()
    }
    table = Table(
        columns=("strategy", "shardmark s", "bare s", "ratio: median", "min", "max", "pairs"),
        rows=tuple(
            (
                name,
                *medians[name],
                *(f"{of[key]:.3f}" for key in ("median", "min", "max")),
                str(pairs),
            )
            for name, of in ratios.items()
        ),
    )
    store(
        NAME,
        options=options,
        around=around,
        bar=BAR,
        holds=all(ratio["median"] <= MOST_RATIO for ratio in ratios.values()),
        table=table,
        numbers={"ratios": ratios, "pairs": measured},
    )


if __name__ == "__main__":
    main()
