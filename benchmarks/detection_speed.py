"""What measuring a detector costs: samples per second of a trial over those of a bare loop.

    python benchmarks/detection_speed.py [--data DIR] [--pairs 7] [--steps 10] [--small]
        [--strategies ddp fsdp] [--min-size 160] [--max-size 256] [--no-masks]

Faster R-CNN ResNet-50-FPN from random weights on pictures of COCO, SGD, 4 pictures a step, 2 ranks
(`single`: one) of one thread each.  Pairs of a trial with all metrics on and of
`bare_detection.py`, which is written in the style of torchvision's detection reference, in
alternating order (A B, B A, ...).  Both train on the same pictures in the same order, from the same
weights; proposals are drawn at random by each in its own way.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

from recording import ROOT, Table, options_of, spread, store, surroundings
from sides import Shardmark, add_sources_to_path, metric, ranks_of, run_of, run_script

NAME = "detection_speed"
DATA = ROOT.parent / "shared" / "data" / "coco-mini"
STRATEGIES = ("single", "ddp", "fsdp", "zero-1")
MODEL = "fasterrcnn_resnet50_fpn"
GLOBAL_BATCH = 4
THREADS = 1
SEED = 0
SIDE_SECONDS = 1800
LEAST_RATIO = 0.99
BAR = f"Bar: the median of shardmark / bare is at least {LEAST_RATIO} for every strategy"
Order = list[list[list[int]]]
"""Rank -> step -> samples."""


def workload_of(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "name": "detection",
        "model": MODEL,
        "dataset": "coco",
        "data_dir": str(options.data.resolve()),
        "min_size": options.min_size,
        "max_size": options.max_size,
    }


def experiment_of(options: argparse.Namespace) -> dict[str, Any]:
    from bare_loop import SGD

    return {
        "name": "detection-speed",
        "workload": workload_of(options),
        "recipe": {
            "global_batch": GLOBAL_BATCH,
            "steps": options.warmup + options.steps,
            "optimizer": {"name": "sgd", **SGD},
            "seed": SEED,
            "threads_per_rank": THREADS,
        },
        "matrix": {"strategy": list(options.strategies), "world_size": [1, 2]},
        "measure": {
            "warmup_steps": options.warmup,
            "repeats": options.pairs,
            "probe": True,
            "evaluate": "never",
        },
        "limits": {"trial_seconds": SIDE_SECONDS},
        "device": "cpu",
    }


def check_same_settings(options: argparse.Namespace) -> int:
    """The bare side writes model and blocks out; they must be Shardmark's.  The training set's
    size."""
    import torch

    import overhead
    from bare_detection import ReferencePictures, blocks_of, build_model
    from shardmark.strategies.blocks import wrapped
    from shardmark.workloads import build_workload, check_data
    from shardmark.workloads import options as checked

    overhead.check_same_settings()
    detection = checked(workload_of(options))
    check_data(detection)
    workload = build_workload(detection, seed=SEED)
    pictures = ReferencePictures(options.data)
    assert len(pictures) == workload.training_samples
    ours = workload.build_model()
    model = build_model(
        outputs=pictures.outputs, min_size=options.min_size, max_size=options.max_size
    )
    theirs = model.state_dict()
    assert ours.state_dict().keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.state_dict().items())
    assert blocks_of(ours) == wrapped(ours, "blocks")
    return len(pictures)


def order_of(samples: int, *, ranks: int, steps: int) -> Order:
    """Shardmark's."""
    from shardmark.core.shares import Shard
    from shardmark.workloads.base import BatchPlan
    from shardmark.workloads.order import ShardOrder

    plan = BatchPlan(global_batch=GLOBAL_BATCH, seed=SEED)
    shards = [Shard(index=rank, count=ranks) for rank in range(ranks)]
    orders = [ShardOrder(samples, plan, shard) for shard in shards]
    return [
        [order.at(step, shard).ids.tolist() for step in range(steps)]
        for order, shard in zip(orders, shards, strict=True)
    ]


def run_shardmark(run: Shardmark, strategy: str, pair: int, order: Order) -> dict[str, Any]:
    from shardmark.train.record import sample_order_sha256

    result = run.trial(strategy, pair)
    for rank, steps in zip(result.ranks, order, strict=True):
        assert rank.sample_order_sha256 == sample_order_sha256(tuple(step) for step in steps)
        assert rank.nonfinite_steps == 0, "a loss that is no number is not what people train"
    return {
        "samples_per_second": metric(result, "samples_per_second"),
        "losses": [rank.epochs[-1].train_loss for rank in result.ranks],  # means of all steps
    }


def run_bare(options: argparse.Namespace, strategy: str, order: Order) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "order.json"
        file.write_text(json.dumps(order))
        bare = run_script(
            "bare_detection.py",
            *("--strategy", strategy, "--data", str(options.data.resolve()), "--order", str(file)),
            *("--warmup", str(options.warmup)),
            *("--min-size", str(options.min_size), "--max-size", str(options.max_size)),
            *(["--no-masks"] if options.no_masks else []),
            ranks=ranks_of(strategy),
            threads=THREADS,
            seconds=SIDE_SECONDS,
        )
    assert all(map(math.isfinite, bare.losses)), "a loss that is no number is not what people train"
    return {"samples_per_second": bare.samples_per_second, "losses": bare.losses}


def measure_pair(
    run: Shardmark, options: argparse.Namespace, strategy: str, pair: int, samples: int
) -> dict[str, Any]:
    steps = options.warmup + options.steps
    order = order_of(samples, ranks=ranks_of(strategy), steps=steps)
    sides = {
        "shardmark": lambda: run_shardmark(run, strategy, pair, order),
        "bare": lambda: run_bare(options, strategy, order),
    }
    names = list(sides) if pair % 2 == 0 else list(sides)[::-1]
    found = {side: sides[side]() for side in names}
    rates = {side: found[side]["samples_per_second"] for side in sides}
    ratio = rates["shardmark"] / rates["bare"]
    print(
        f"{strategy} pair {pair}: shardmark {rates['shardmark']:.3f}, "
        f"bare {rates['bare']:.3f} samples/s, ratio {ratio:.4f}",
        flush=True,
    )
    losses = {f"{side}_losses": found[side]["losses"] for side in sides}
    return {**rates, **losses, "first": names[0], "ratio": ratio}


def row_of(name: str, pairs: list[dict[str, Any]]) -> tuple[str, ...]:
    of = {key: spread([pair[key] for pair in pairs]) for key in ("shardmark", "bare", "ratio")}
    rates = (f"{of[side]['median']:.3f}" for side in ("shardmark", "bare"))
    shown = (of["ratio"][key] for key in ("median", "min", "max", "interquartile_range"))
    return (name, *rates, *(f"{value:.3f}" for value in shown), str(len(pairs)))


def options_from_command_line() -> argparse.Namespace:
    parser = options_of(NAME, __doc__)
    parser.add_argument("--data", type=Path, default=DATA, help="a folder in COCO's layout")
    parser.add_argument("--pairs", type=int)
    parser.add_argument("--warmup", type=int, help="steps before those that are measured")
    parser.add_argument("--steps", type=int, help="measured steps of each training")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=["ddp", "fsdp"])
    parser.add_argument("--min-size", type=int, help="shorter side to which pictures are resized")
    parser.add_argument("--max-size", type=int)
    parser.add_argument(
        "--no-masks", action="store_true", help="the bare side makes no masks, as ours"
    )
    options = parser.parse_args()
    small = options.small
    options.pairs = options.pairs or (1 if small else 7)
    options.warmup = options.warmup or (1 if small else 2)
    options.steps = options.steps or (2 if small else 10)
    options.min_size = options.min_size or (64 if small else 160)
    options.max_size = options.max_size or (96 if small else 256)
    return options


def main() -> None:
    options = options_from_command_line()
    if not options.data.is_dir():
        raise SystemExit(f"there is no folder {options.data}; --data names one in COCO's layout")
    add_sources_to_path()
    around = surroundings()
    measured: dict[str, list[dict[str, Any]]] = {name: [] for name in options.strategies}
    with tempfile.TemporaryDirectory() as cache:
        os.environ["SHARDMARK_CACHE"] = cache
        samples = check_same_settings(options)
        with run_of(experiment_of(options)) as run:
            for pair in range(options.pairs):
                for name in options.strategies:
                    measured[name].append(measure_pair(run, options, name, pair, samples))
    ratios = {name: spread([pair["ratio"] for pair in found]) for name, found in measured.items()}
    masks = "no masks" if options.no_masks else "masks of every picture"
    store(
        NAME,
        options=options,
        around=around,
        bar=BAR,
        holds=all(ratio["median"] >= LEAST_RATIO for ratio in ratios.values()),
        table=Table(
            columns=(
                *("strategy", "shardmark samples/s", "bare samples/s"),
                *("ratio: median", "min", "max", "IQR", "pairs"),
            ),
            rows=tuple(row_of(name, found) for name, found in measured.items()),
            notes=(
                f"{MODEL} on {options.data.name}, min_size {options.min_size}, max_size "
                f"{options.max_size}, {GLOBAL_BATCH} pictures a step, {THREADS} thread a rank, "
                f"{options.steps} steps after {options.warmup}; the bare side makes {masks}.",
            ),
        ),
        numbers={
            **{"global_batch": GLOBAL_BATCH, "warmup": options.warmup, "steps": options.steps},
            **{"min_size": options.min_size, "max_size": options.max_size},
            **{"bare_masks": not options.no_masks, "ratios": ratios, "pairs": measured},
        },
    )


if __name__ == "__main__":
    main()
