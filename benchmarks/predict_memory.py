"""Compares the predicted peak memory of a rank with that of real steps on the CPU.

    python benchmarks/predict_memory.py [--models resnet18 gpt] [--others] [--repeats 2] [--small]

Seven models of three tasks train under eight strategies, on one rank or four; `--others` takes
every other strategy, on three models whose layers can be sharded.  The measured value is a trial's
`peak_memory_bytes` on the training rank that holds most: bytes of tensors between two steps, and
the rise of the allocator's total in the next step.  The smallest repeat of each rank counts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from statistics import median
from typing import Any

from harness import Table, options_of, store, surroundings, trial_runner
from shardmark.base.results.schema import Outcome
from shardmark.bench.launch.trial import TrialRunner
from shardmark.experiment.load import from_mapping
from shardmark.experiment.matrix import expand
from shardmark.ranks.trial import Trial
from shardmark.ranks.workloads import check_data

NAME = "predict_memory"
FSDP, ZERO = ("fsdp", "fsdp-grad-op", "fsdp-hybrid"), ("zero-1", "zero-2", "zero-3")
STRATEGIES = ("single", "ddp", *FSDP, *ZERO)
OTHERS: tuple[str | dict[str, Any], ...] = (
    *("tp", {"name": "tp", "sequence_parallel": True}, "fsdp-tp"),
    *({"name": "pp", "schedule": schedule} for schedule in ("1f1b", "gpipe", "interleaved")),
    *({"name": "pp", "schedule": "zero-bubble"}, "ddp-pp", "fsdp-pp"),
    *("ulysses", "fsdp-ulysses", "zro", "fsdp1", "ps-sync", "ps-async"),
    *({"name": name, "period_steps": 1} for name in ("local-sgd", "diloco")),
)
RANKS, GLOBAL_BATCH = 4, 16
WORST, MEDIAN = 0.03, 0.01
BAR = f"Bar: every strategy at most {WORST:.0%} off on every model, the median {MEDIAN:.0%}"
PICTURES: dict[str, Any] = {"name": "classification", "dataset": "random", "image_size": 64}
PICTURES |= {"training_samples": 128}
MODELS: dict[str, dict[str, Any]] = {
    "resnet18": PICTURES | {"model": "resnet18"},
    "resnet50": PICTURES | {"model": "resnet50"},
    "mobilenet_v2": PICTURES | {"model": "mobilenet_v2"},
    "vit_cifar": PICTURES | {"model": "vit_cifar", "image_size": 32},
    "gpt": {
        **{"name": "language", "model": "gpt", "layers": 4, "width": 256, "heads": 4},
        "sequence_length": 256,
    },
    "hf:gpt2": {
        **{"name": "language", "model": "hf:gpt2", "sequence_length": 128},
        "model_options": {"n_layer": 4, "n_embd": 256, "n_head": 4},
    },
    "fasterrcnn": {
        **{"name": "detection", "model": "fasterrcnn_mobilenet_v3_large_fpn"},
        **{"dataset": "digits-detection", "min_size": 160, "max_size": 256},
    },
}
DIVISIBLE: dict[str, dict[str, Any]] = {
    **{name: MODELS[name] for name in ("vit_cifar", "gpt")},
    "hf:llama": {
        **{"name": "language", "model": "hf:llama", "sequence_length": 128},
        "model_options": {
            **{"num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 1024},
            **{"num_attention_heads": 4, "num_key_value_heads": 4},
        },
    },
}
MB = 1e6


def experiment_of(
    workload: Mapping[str, Any], repeats: int, strategies: Sequence[str | dict[str, Any]]
) -> dict[str, Any]:
    return {
        "name": "predict-memory",
        "workload": dict(workload),
        "recipe": {
            "global_batch": GLOBAL_BATCH,
            "steps": 2,
            # With other weights a detector has other proposals.
            "optimizer": {"name": "adamw", "lr": 1e-6},
            "threads_per_rank": 1,
        },
        "matrix": {
            "strategy": list(strategies),
            "world_size": [1, RANKS] if "single" in strategies else [RANKS],
        },
        "measure": {"warmup_steps": 1, "repeats": repeats, "evaluate": "never", "verify": False},
        "device": "cpu",
    }


def predicted(trials: Sequence[Trial], refused: Collection[str]) -> dict[str, dict[str, float]]:
    """Predicted bytes by part, by strategy."""
    from shardmark.predict.memory import rank_memory
    from shardmark.predict.models import Models

    models, bytes_by_part = Models(), {}
    for trial in trials:
        if trial.repeat or str(trial.strategy) in refused:
            continue
        ranks, strategy = trial.world_size, trial.built_strategy
        profile = models.profile_of(trial, ranks, 1, device_type="cpu")
        held = rank_memory(profile, strategy, trial.recipe, ranks, device_type="cpu")
        parts = {name: getattr(held, name) for name in held.__dataclass_fields__}
        bytes_by_part[str(trial.strategy)] = {**parts, "peak": held.peak_bytes}
    return bytes_by_part


def measured(runner: TrialRunner, trial: Trial, order: int) -> list[int]:
    """Peak bytes of each training rank; empty if the strategy refuses the model."""
    result = runner.run(trial, order=order)
    if result.outcome is Outcome.UNAVAILABLE:
        return []
    if result.outcome is not Outcome.OK:
        raise SystemExit(f"{trial.strategy.name} ended as {result.outcome}: {result.failure}")
    return [rank.probe.peak_memory_bytes for rank in result.ranks[: trial.world_size]]


def main() -> None:
    parser = options_of(NAME, __doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS | DIVISIBLE)
    parser.add_argument("--others", action="store_true", help="all but the eight with a bar")
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    models, tried = (DIVISIBLE, OTHERS) if options.others else (MODELS, STRATEGIES)
    options.models = options.models or list(models)
    if options.small:
        options.models, options.repeats = ["vit_cifar"], 1
    around = surroundings()
    real: dict[str, dict[str, list[list[int]]]] = {}
    plans: dict[str, Sequence[Trial]] = {}
    for name in options.models:
        experiment = from_mapping(experiment_of(models[name], options.repeats, tried))
        check_data(experiment.workload)
        plans[name] = expand(experiment, "cpu").trials
    strategies = [*dict.fromkeys(str(each.strategy) for of in plans.values() for each in of)]
    trials = [(name, trial) for name, plan in plans.items() for trial in plan]
    trials.sort(key=lambda pair: pair[1].repeat)
    with trial_runner([trial for _, trial in trials]) as runner:
        for number, (name, trial) in enumerate(trials):
            peaks = measured(runner, trial, number)
            print(name, trial.strategy, max(peaks, default=0) / MB, flush=True)
            real.setdefault(name, {}).setdefault(str(trial.strategy), []).append(peaks)
    results: dict[str, Any] = {}
    for name, plan in plans.items():
        refused = {strategy for strategy, peaks in real[name].items() if not peaks[0]}
        expected = predicted(plan, refused)
        results[name] = {}
        for strategy in strategies:
            if strategy in refused:
                continue
            ranks = [min(peaks) for peaks in zip(*real[name][strategy], strict=True)]
            results[name][strategy] = {
                "measured": max(ranks),
                "repeats": real[name][strategy],
                "predicted": expected[strategy],
                "error": expected[strategy]["peak"] / max(ranks) - 1,
            }
        print(name, *(f"{s} {of['error']:+.1%}" for s, of in results[name].items()), flush=True)
    errors = {s: [abs(of[s]["error"]) for of in results.values() if s in of] for s in strategies}
    medians = {strategy: median(each) for strategy, each in errors.items()}
    overall = median(error for each in errors.values() for error in each)
    store(
        NAME,
        variant="others" if options.others else "",
        options=options,
        around=around,
        bar=BAR,
        holds=max(map(max, errors.values())) <= WORST and overall <= MEDIAN,
        table=Table(
            columns=("strategy", *results, "median", "largest"),
            rows=tuple(
                (
                    strategy,
                    *(
                        f"{of[strategy]['measured'] / MB:.0f} {of[strategy]['error']:+.1%}"
                        if strategy in of
                        else "refused"
                        for of in results.values()
                    ),
                    f"{medians[strategy]:.1%}",
                    f"{max(errors[strategy]):.1%}",
                )
                for strategy in strategies
            ),
            notes=(
                f"Measured MB (10^6 bytes) of the fullest rank, and the prediction's error; AdamW, "
                f"{GLOBAL_BATCH} samples a step on {RANKS} ranks (`single`: on one).  Median of "
                f"all: {overall:.2%}.",
                "Learning rate 1e-6: after steps of 1e-4 Faster R-CNN has fewer proposals, and"
                " is predicted 20 to 43 % too high.",
            ),
        ),
        numbers={"models": results, "medians": medians, "median": overall},
    )


if __name__ == "__main__":
    main()
