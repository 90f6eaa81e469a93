"""Compares the predicted largest batch with the one that bisection with real steps finds.

    python benchmarks/largest_batch.py [--models gpt] [--strategies ddp fsdp] [--small]

Each strategy runs on two ranks of the CPU.  The limit of a rank's tensors lets `ddp` take some
dozens of samples.  Every step of the bisection, and every try of `shardmark batch`, is a trial of
three real steps; both use the same stored trials.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from harness import Table, options_of, store, surroundings
from predict_memory import MODELS
from shardmark.config.load import from_mapping
from shardmark.launch.largest_batch import largest_batches, tried_trial
from shardmark.launch.listener import NullListener
from shardmark.launch.run_options import RunOptions
from shardmark.launch.session import RunSession
from shardmark.launch.trial import TrialRunner
from shardmark.results.schema import Outcome
from shardmark.trials.matrix import expand
from shardmark.trials.trial import Trial

NAME = "largest_batch"
STRATEGIES = ("single", "ddp", "fsdp", "fsdp-grad-op", "zero-1", "zero-2", "zero-3", "zro")
LIMITS = {"gpt": 0.8e9, "resnet18": 0.5e9, "vit_cifar": 0.6e9}
"""Limit of a rank's tensors in bytes: room for 25 samples or more."""
WORST = 0.05
BAR = f"Bar: each prediction at most {WORST:.0%} off what bisection finds"


def experiment_of(model: str, strategies: list[str]) -> dict[str, Any]:
    return {
        "name": "largest-batch",
        "workload": MODELS[model]
        | ({"training_samples": 1024} if "image_size" in MODELS[model] else {}),
        "recipe": {
            "per_rank_batch": 2,
            "steps": 3,
            "optimizer": {"name": "adamw", "lr": 1e-4},
            "threads_per_rank": 1,
        },
        "matrix": {"strategy": strategies, "world_size": [1, 2]},
        "measure": {
            "repeats": 1,
            "warmup_steps": 1,
            "evaluate": "never",
            "verify": False,
            "max_remeasure": 0,
        },
        "limits": {"trial_seconds": 300},
        "device": "cpu",
    }


def bisected(bytes_of: Callable[[int], float], limit: float, near: int) -> int:
    """Search the largest number of samples within the limit, starting at `near`."""
    low = high = near
    step = 1
    if bytes_of(near) <= limit:
        while bytes_of(high := low + step) <= limit:
            low, step = high, 2 * step
    else:
        while bytes_of(low := max(1, high - step)) > limit:
            high, step = low, 2 * step
    while high - low > 1:
        middle = (low + high) // 2
        if bytes_of(middle) <= limit:
            low = middle
        else:
            high = middle
    return low


def main() -> None:
    parser = options_of(NAME, __doc__)
    parser.add_argument("--models", nargs="+", choices=LIMITS, default=list(LIMITS))
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES))
    options = parser.parse_args()
    if options.small:
        options.models, options.strategies = ["vit_cifar"], ["ddp", "fsdp"]
    around_here = surroundings()
    results: dict[str, dict[str, dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for model in options.models:
            experiment, limit = (
                from_mapping(experiment_of(model, options.strategies)),
                LIMITS[model],
            )
            out = Path(folder) / model
            largest = largest_batches(experiment, out, memory_bytes=limit)
            plan = expand(experiment)
            once = tuple(trial for trial in plan.trials if not trial.repeat)
            with RunSession.open(
                experiment, out, RunOptions(), NullListener(), plan=replace(plan, trials=once)
            ) as session:
                session.runner.load(once)
                results[model] = {}
                for number, each in enumerate(largest):

                    @cache
                    def bytes_of(
                        samples: int,
                        cell: Trial = each.cell,
                        order: int = number,
                        runner: TrialRunner = session.runner,
                    ) -> float:
                        result = runner.run(tried_trial(cell, samples), order=order)
                        peak = result.metrics.get("peak_memory_bytes")
                        if result.outcome is not Outcome.OK or peak is None:
                            raise SystemExit(f"{cell.title}: {result.outcome}: {result.failure}")
                        return peak.value

                    if each.predicted is None or each.best is None:
                        raise SystemExit(f"{each.cell.title}: {each.reason or 'nothing fits'}")
                    real = bisected(bytes_of, limit, each.predicted)
                    results[model][each.cell.strategy.name] = {
                        "predicted": each.predicted,
                        "bisected": real,
                        "confirmed": each.best.samples,
                        "tries": len(each.tries),
                        "error": each.predicted / real - 1,
                    }
                    print(
                        model, each.cell.title, results[model][each.cell.strategy.name], flush=True
                    )
    errors = [abs(one["error"]) for model in results.values() for one in model.values()]
    exact = sum(
        one["confirmed"] == one["bisected"] for model in results.values() for one in model.values()
    )
    store(
        NAME,
        options=options,
        around=around_here,
        bar=BAR,
        holds=max(errors) <= WORST,
        table=Table(
            columns=("model", "strategy", "bisected", "predicted", "error", "after tries", "tries"),
            rows=tuple(
                (
                    model,
                    strategy,
                    str(one["bisected"]),
                    str(one["predicted"]),
                    f"{one['error']:+.1%}",
                    str(one["confirmed"]),
                    str(one["tries"]),
                )
                for model, strategies in results.items()
                for strategy, one in strategies.items()
            ),
            notes=(
                f"Samples of a rank. Median error {median(errors):.1%}; `shardmark batch` ended at"
                f" the bisected batch in {exact} of {len(errors)}.",
            ),
        ),
        numbers={"limits": {m: LIMITS[m] for m in results}, "found": results},
    )


if __name__ == "__main__":
    main()
