"""What a rank holds while it trains a detector: peak memory and model state by strategy.

    python benchmarks/detection_memory.py [--data DIR] [--strategies ddp fsdp] [--steps 3] [--small]
        [--min-size 160] [--max-size 256]

Faster R-CNN ResNet-50-FPN from random weights on pictures of COCO, SGD with momentum, 4 pictures a
step on 4 ranks: one ordinary run, whose metrics of memory are shown, the largest over ranks.
`single` trains all 4 pictures on its one rank.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recording import ROOT, Table, options_of, store, surroundings
from sides import add_sources_to_path, metric

NAME = "detection_memory"
DATA = ROOT.parent / "shared" / "data" / "coco-mini"
RANKS = 4
STRATEGIES = (
    *("single", "ddp", "fsdp", "fsdp-grad-op", "fsdp-hybrid"),
    *("zero-0", "zero-1", "zero-2", "zero-3"),
)
MODEL, SMALL_MODEL = "fasterrcnn_resnet50_fpn", "fcos_resnet18_fpn"
STATE = ("parameter_bytes", "gradient_bytes", "optimizer_state_bytes")
METRICS = ("peak_memory_bytes", *STATE, "activation_peak_bytes", "peak_rss_bytes")
MOST_RATIO = 0.27
BAR = f"Bar: fsdp holds at most {MOST_RATIO} of the model state that ddp holds"
MB = 1e6


def experiment_of(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "name": "detection-memory",
        "workload": {
            "name": "detection",
            "model": options.model,
            "dataset": "coco",
            "data_dir": str(options.data.resolve()),
            "min_size": options.min_size,
            "max_size": options.max_size,
        },
        "recipe": {
            "global_batch": RANKS,
            "steps": options.steps,
            "optimizer": {"name": "sgd", "lr": 0.01, "momentum": 0.9, "weight_decay": 5e-4},
            "seed": 0,
            "threads_per_rank": 1,
        },
        "matrix": {"strategy": list(options.strategies), "world_size": [1, RANKS]},
        # Nothing is timed, so that resident memory can be looked at often.
        "measure": {
            "repeats": 1,
            **{"warmup_steps": 1, "sample_seconds": 0.1},
            **{"evaluate": "never", "verify": False},
        },
        "device": "cpu",
    }


def measure(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Strategy -> metric -> bytes, in the order of the strategies."""
    import shardmark

    with tempfile.TemporaryDirectory() as folder:
        os.environ["SHARDMARK_CACHE"] = folder
        run = shardmark.run(experiment_of(options), out=Path(folder) / "run")
        for trial in run.trials:
            if trial.failure is not None:
                raise SystemExit(f"{trial.strategy}: {trial.failure}")
        found = {t.strategy: {name: metric(t, name) for name in METRICS} for t in run.trials}
    return {name: found[name] for name in options.strategies}


def state_bytes(found: Mapping[str, float]) -> float:
    return sum(found[name] for name in STATE)


def rows_of(measured: Mapping[str, Mapping[str, float]]) -> tuple[tuple[str, ...], ...]:
    ddp = measured["ddp"]
    return tuple(
        (
            name,
            str(1 if name == "single" else RANKS),
            *(f"{found[key] / MB:.1f}" for key in STATE),
            f"{state_bytes(found) / state_bytes(ddp):.3f}",
            f"{found['activation_peak_bytes'] / MB:.1f}",
            *(
                text
                for key in ("peak_memory_bytes", "peak_rss_bytes")
                for text in (f"{found[key] / MB:.1f}", f"{found[key] / ddp[key]:.3f}")
            ),
        )
        for name, found in measured.items()
    )


def main() -> None:
    parser = options_of(NAME, __doc__)
    parser.add_argument("--data", type=Path, default=DATA, help="a folder in COCO's layout")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--steps", type=int, help="the one of the warm-up included")
    parser.add_argument("--min-size", type=int, help="shorter side to which pictures are resized")
    parser.add_argument("--max-size", type=int)
    options = parser.parse_args()
    if not options.data.is_dir():
        raise SystemExit(f"there is no folder {options.data}; --data names one in COCO's layout")
    options.model = SMALL_MODEL if options.small else MODEL
    options.steps = options.steps or (2 if options.small else 3)
    options.min_size = options.min_size or (64 if options.small else 160)
    options.max_size = options.max_size or (96 if options.small else 256)
    options.strategies = tuple(dict.fromkeys((*options.strategies, "ddp", "fsdp")))
    add_sources_to_path()
    around = surroundings()
    measured = measure(options)
    ratio = state_bytes(measured["fsdp"]) / state_bytes(measured["ddp"])
    store(
        NAME,
        options=options,
        around=around,
        bar=BAR,
        holds=ratio <= MOST_RATIO,
        table=Table(
            columns=(
                *("strategy", "ranks", "parameters", "gradients", "optimizer state"),
                *("state of ddp's", "activations", "peak", "of ddp's", "resident", "of ddp's"),
            ),
            rows=rows_of(measured),
            notes=(
                f"{options.model} on {options.data.name}, min_size {options.min_size}, max_size "
                f"{options.max_size}, {RANKS} pictures a step, SGD with momentum; MB (10^6 bytes), "
                "largest rank.  `activations` are the rest of the peak: temporaries and buffers "
                "of communication are among them.  `resident` counts the libraries, too, and "
                "pages that ranks share.",
            ),
        ),
        numbers={
            **{"model": options.model, "ranks": RANKS, "global_batch": RANKS},
            **{"steps": options.steps, "min_size": options.min_size, "max_size": options.max_size},
            "measured": measured,
        },
    )


if __name__ == "__main__":
    main()
