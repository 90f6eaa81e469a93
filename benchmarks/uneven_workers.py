"""Uneven workers: what waiting for the slower one costs, and what not waiting costs in accuracy.

    python benchmarks/uneven_workers.py [--steps 24] [--global-batch 256] [--seeds 0 1 2]
        [--model resnet18] [--small]

ResNet-18 on digits with 2 workers, one of which computes 2 times slower (`slow_ranks: {1: 2.0}`),
in an ordinary run.  Time is that of the whole training without evaluation, the slowest worker's.
The recipe counts steps, since workers of every mode wait for each other at the end of an epoch.
Every strategy takes the same number of samples.  Intervals are 95 % over seeds, and of the ratio
over pairs of the same seed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from recording import Table, options_of, store, surroundings
from shardmark import run
from shardmark.analysis.statistics.intervals import Estimate, estimate_mean, estimate_ratio
from shardmark.results.schema import TrialResult
from sides import add_sources_to_path, metric

NAME = "uneven_workers"
WORKERS, SLOW, FACTOR = 2, 1, 2.0
STALENESS = 2
STRATEGIES = ("ps-sync", "ps-async", "ps-bounded", "ddp")
MOST_RATIO = 0.75
BAR = f"Bar: ps-async takes at most {MOST_RATIO} of the time of ps-sync"


def experiment(
    strategies: Sequence[str],
    seeds: Sequence[int],
    length: Mapping[str, int],
    *,
    model: str,
    global_batch: int,
) -> dict[str, Any]:
    entries = [
        {"name": name, "staleness": STALENESS} if name == "ps-bounded" else name
        for name in strategies
    ]
    return {
        "name": "uneven-workers",
        "workload": {"name": "classification", "model": model, "dataset": "digits"},
        "recipe": {
            "global_batch": global_batch,
            **length,
            "optimizer": {"name": "sgd", "lr": 0.01, "momentum": 0.9, "weight_decay": 5e-4},
        },
        "matrix": {"strategy": entries, "world_size": [WORKERS], "recipe.seed": list(seeds)},
        "measure": {
            "repeats": 1,
            "warmup_steps": 0,
            "probe": False,
            "verify": False,
            "evaluate": "end",
        },
        "limits": {"trial_seconds": 600},
        "device": "cpu",
        "slow_ranks": {SLOW: FACTOR},
    }


def found_in(result: TrialResult) -> dict[str, Any]:
    workers = [rank for rank in result.ranks if rank.role == "worker"]
    samples = [worker.samples for worker in workers]
    epochs = zip(*(worker.windows for worker in workers), strict=True)
    served = ("staleness_mean", "staleness_max", "server_wait_seconds")
    return {
        "seed": result.varied["recipe.seed"],
        "training_seconds": sum(max(w.window_seconds for w in epoch) for epoch in epochs),
        "samples": sum(samples),
        "slow_share": samples[SLOW] / sum(samples),
        "accuracy": metric(result, "accuracy_top1"),
        **{name: None if (s := result.metrics.get(name)) is None else s.value for name in served},
    }


def measured(
    mapping: Mapping[str, Any], strategies: Sequence[str]
) -> dict[str, list[dict[str, Any]]]:
    """Strategy -> what was found with each seed, in order of seeds."""
    with tempfile.TemporaryDirectory() as folder:
        trials = run(mapping, Path(folder) / "run").trials
    for trial in trials:
        if trial.failure is not None:
            raise SystemExit(f"{trial.strategy}: {trial.failure}")
    found = {
        name: sorted(
            (found_in(trial) for trial in trials if trial.strategy == name),
            key=lambda one: one["seed"],
        )
        for name in strategies
    }
    taken = {one["samples"] for each in found.values() for one in each}
    assert len(taken) == 1, f"strategies took different numbers of samples: {taken}"
    return found


def ratio_to_sync(found: Mapping[str, Sequence[Mapping[str, Any]]], name: str) -> Estimate:
    times = {n: [one["training_seconds"] for one in found[n]] for n in ("ps-sync", name)}
    return estimate_ratio(times[name], times["ps-sync"])


def shown(value: Estimate, digits: int) -> str:
    half = "" if value.half_width is None else f" +/- {value.half_width:.{digits}f}"
    return f"{value.value:.{digits}f}{half}"


def row_of(name: str, each: Sequence[Mapping[str, Any]], ratio: Estimate) -> tuple[str, ...]:
    def mean(key: str, digits: int) -> str:
        values = [one[key] for one in each]
        return "" if None in values else f"{fmean(values):.{digits}f}"

    return (
        name,
        shown(estimate_mean([one["training_seconds"] for one in each]), 1),
        shown(ratio, 3),
        shown(estimate_mean([100 * one["accuracy"] for one in each]), 1),
        f"{100 * fmean(one['slow_share'] for one in each):.0f}",
        mean("staleness_mean", 2),
        "" if each[0]["staleness_max"] is None else f"{max(o['staleness_max'] for o in each):.0f}",
        mean("server_wait_seconds", 3),
    )


def about_bounded(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Whether ps-bounded lies between the two, and why it lies where it does."""
    sync, bounded, asynchronous = (
        fmean(one["training_seconds"] for one in found[name])
        for name in ("ps-sync", "ps-bounded", "ps-async")
    )
    place = "lies between" if asynchronous <= bounded <= sync else "does NOT lie between"
    share = fmean(one["slow_share"] for one in found["ps-bounded"])
    waited = fmean(one["server_wait_seconds"] for one in found["ps-bounded"])
    return (
        f"ps-bounded {place} ({asynchronous:.1f}, {bounded:.1f}, {sync:.1f} s): a worker that is "
        f"always {FACTOR:g} times faster is {STALENESS} steps ahead soon, and then takes one step "
        f"for each of the slow one's, whose share is {100 * share:.0f} % of the samples; pulls "
        f"waited for {waited:.3f} s on average. A bound hides delays that come and go, not "
        "a worker that is always slow."
    )


def main() -> None:
    parser = options_of(NAME, __doc__)
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=STRATEGIES[:3])
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--global-batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--seeds", nargs="+", type=int)
    options = parser.parse_args()
    add_sources_to_path()
    strategies = tuple(dict.fromkeys(("ps-sync", "ps-async", *options.strategies)))
    seeds = options.seeds or ([0] if options.small else [0, 1, 2])
    length = {"steps": 10 if options.small else options.steps}
    around = surroundings()
    mapping = experiment(
        strategies, seeds, length, model=options.model, global_batch=options.global_batch
    )
    found = measured(mapping, strategies)
    ratios = {name: ratio_to_sync(found, name) for name in strategies}
    samples = found["ps-sync"][0]["samples"]
    notes = [
        f"{options.model} on digits, global batch {options.global_batch}, {samples} samples a "
        f"training, {WORKERS} workers, rank {SLOW} {FACTOR:g} times slower; {len(seeds)} seed(s), "
        "95 % intervals. Staleness in updates; server wait: seconds that a pull waited for others."
    ]
    if "ps-bounded" in found:
        notes.append(about_bounded(found))
    store(
        NAME,
        options=options,
        around=around,
        bar=BAR,
        holds=ratios["ps-async"].value <= MOST_RATIO,
        table=Table(
            columns=(
                *("strategy", "training s", "of ps-sync's", "top-1 %", "slow worker's samples %"),
                *("mean staleness", "largest", "server wait s"),
            ),
            rows=tuple(row_of(name, found[name], ratios[name]) for name in strategies),
            notes=tuple(notes),
        ),
        numbers={
            "seeds": seeds,
            "ratios": {
                name: {"value": r.value, "low": r.low, "high": r.high} for name, r in ratios.items()
            },
            "trials": found,
        },
    )


if __name__ == "__main__":
    main()
