"""Predicted peak memory of a rank against that of real steps on the CPU.

    python benchmarks/predict_memory.py [--models resnet18 gpt] [--repeats 2] [--small]
        [--keep FILE]

Eight models of four tasks under eight strategies, one rank or four, all in one fork server.  What
is measured is each trial's `peak_memory_bytes`: tensors that Python reaches between two steps, and
how far the allocator's total rises in the next one, on the rank that holds most.  Of each rank the
smallest of its repeats counts.  What the data set holds in tensors, in the same memory on a CPU, is
counted here and added to each prediction.
"""

from __future__ import annotations

import gc
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from recording import BENCHMARKS, Table, options_of, store, surroundings
from shardmark.config.load import from_mapping
from shardmark.launch.listener import Silent
from shardmark.launch.local.engine import LocalEngine
from shardmark.launch.trial import TrialRunner
from shardmark.results.schema import Outcome
from shardmark.results.store import RunFolder
from shardmark.strategies import build_strategy
from shardmark.trials.matrix import expand
from shardmark.trials.trial import Trial
from shardmark.workloads import build_workload, check_data
from sides import add_sources_to_path

NAME = "predict_memory"
STRATEGIES = (
    *("single", "ddp", "fsdp", "fsdp-grad-op", "fsdp-hybrid"),
    *("zero-1", "zero-2", "zero-3"),
)
RANKS, GLOBAL_BATCH = 4, 16
WORST, MEDIAN = 0.03, 0.01
BAR = f"Bar: every strategy at most {WORST:.0%} off on every model, the median {MEDIAN:.0%}"
PICTURES = {
    "name": "classification",
    "dataset": "random",
    "image_size": 64,
    "training_samples": 128,
}
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
    "own": {"name": "own", "task": f"{BENCHMARKS / 'autoencoder_task.py'}:Task"},
}
MB = 1e6


def experiment_of(workload: Mapping[str, Any], repeats: int) -> dict[str, Any]:
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
        "matrix": {"strategy": list(STRATEGIES), "world_size": [1, RANKS]},
        "measure": {"warmup_steps": 1, "repeats": repeats, "evaluate": "never", "verify": False},
        "device": "cpu",
    }


@contextmanager
def trial_runner(trials: Sequence[Trial]) -> Iterator[TrialRunner]:
    """One fork server for the trials of all experiments."""
    engine = LocalEngine()
    with tempfile.TemporaryDirectory() as folder:
        try:
            machine = engine.machine("cpu")
            modules = {name: None for trial in trials for name in trial.built_strategy.loads()}
            engine.load(list(modules), machine.device_type)
            yield TrialRunner(
                engine=engine,
                machine=machine,
                folder=RunFolder.create(Path(folder) / "run"),
                listener=Silent(),
            )
        finally:
            engine.close()


def predicted(trials: Sequence[Trial]) -> dict[str, dict[str, float]]:
    """Strategy -> bytes by part, the data set's among them."""
    from shardmark.measure.memory.tensors import live_tensor_bytes
    from shardmark.predict.memory import rank_memory
    from shardmark.predict.trace import trace

    gc.collect()
    before = live_tensor_bytes("cpu")
    workload = build_workload(trials[0].workload, trials[0].recipe.seed)
    gc.collect()
    data = live_tensor_bytes("cpu") - before
    profile = trace(workload, trials[0].recipe, device_type="cpu")
    found = {}
    for trial in trials:
        if trial.repeat:
            continue
        strategy = build_strategy(trial.strategy.name, {}).for_workload(trial.workload)
        held = rank_memory(profile, strategy, trial.recipe, trial.world_size, device_type="cpu")
        parts = {name: getattr(held, name) for name in held.__dataclass_fields__}
        total = held.peak_bytes + data
        found[trial.strategy.name] = {"data_set": data, **parts, "peak": total}
    return found


def measured(runner: TrialRunner, trial: Trial, order: int) -> list[int]:
    """Each rank's bytes."""
    result = runner.run(trial, order=order)
    if result.outcome is not Outcome.OK:
        raise SystemExit(f"{trial.strategy.name} ended as {result.outcome}: {result.failure}")
    return [rank.probe.peak_memory_bytes for rank in result.ranks]


def main() -> None:
    parser = options_of(NAME, __doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--keep", type=Path, help="file of what was measured, to go on from")
    options = parser.parse_args()
    if options.small:
        options.models, options.repeats = ["vit_cifar"], 1
    add_sources_to_path()
    around = surroundings()
    kept = options.keep
    real: dict[str, dict[str, list[list[int]]]] = {}
    if kept and kept.exists():
        real = json.loads(kept.read_text())
    plans: dict[str, Sequence[Trial]] = {}
    for name in options.models:
        experiment = from_mapping(experiment_of(MODELS[name], options.repeats))
        check_data(experiment.workload)
        plans[name] = expand(experiment, "cpu").trials
    missing = [
        (name, trial)
        for name, trials in plans.items()
        for trial in trials
        if trial.repeat >= len(real.get(name, {}).get(trial.strategy.name, ()))
    ]
    missing.sort(key=lambda each: each[1].repeat)
    if missing:
        with trial_runner([trial for _, trial in missing]) as runner:
            for number, (name, trial) in enumerate(missing):
                peaks = measured(runner, trial, number)
                print(name, trial.strategy.name, max(peaks) / MB, flush=True)
                real.setdefault(name, {}).setdefault(trial.strategy.name, []).append(peaks)
                if kept:
                    kept.write_text(json.dumps(real))
    found: dict[str, Any] = {}
    for name, trials in plans.items():
        expected = predicted(trials)
        found[name] = {}
        for strategy in STRATEGIES:
            ranks = [min(peaks) for peaks in zip(*real[name][strategy], strict=True)]
            found[name][strategy] = {
                "measured": max(ranks),
                "repeats": real[name][strategy],
                "predicted": expected[strategy],
                "error": expected[strategy]["peak"] / max(ranks) - 1,
            }
        print(name, *(f"{s} {of['error']:+.1%}" for s, of in found[name].items()), flush=True)
    errors = {s: [abs(found[name][s]["error"]) for name in found] for s in STRATEGIES}
    medians = {strategy: median(each) for strategy, each in errors.items()}
    overall = median(error for each in errors.values() for error in each)
    store(
        NAME,
        options=options,
        around=around,
        bar=BAR,
        holds=max(map(max, errors.values())) <= WORST and overall <= MEDIAN,
        table=Table(
            columns=("strategy", *found, "median", "largest"),
            rows=tuple(
                (
                    strategy,
                    *(
                        f"{found[name][strategy]['measured'] / MB:.0f}"
                        f" {found[name][strategy]['error']:+.1%}"
                        for name in found
                    ),
                    f"{medians[strategy]:.1%}",
                    f"{max(errors[strategy]):.1%}",
                )
                for strategy in STRATEGIES
            ),
            notes=(
                f"Measured MB (10^6 bytes) of the fullest rank, and the prediction's error; AdamW, "
                f"{GLOBAL_BATCH} samples a step on {RANKS} ranks (`single`: on one).  Median of "
                f"all: {overall:.2%}.",
                "Learning rate 1e-6: after steps of 1e-4 Faster R-CNN has fewer proposals, and"
                " is predicted 20 to 43 % too high.",
            ),
        ),
        numbers={"models": found, "medians": medians, "median": overall},
    )


if __name__ == "__main__":
    main()
