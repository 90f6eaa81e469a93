"""Reading COCO's pictures: ours beside a loader in the style of torchvision's detection reference.

    python benchmarks/loader.py [--data DIR] [--pairs 9] [--passes 3] [--workers 0 2] [--small]

Pictures per second until a batch is there, without a model.  The other side is written as
`references/detection` has it: pycocotools' index, Pillow, masks from polygons for every picture
whether or not the model learns them, float pictures, torch's `DataLoader` with the same number of
processes, a list of pictures and targets.  Ours keeps pictures in bytes until they are on their
device (a quarter of the memory to move), here the CPU, so that both end with float pictures from 0
to 1; and makes masks only for a model that learns them: once without, once with them.  Pairs are
read in alternating order (A B, B A, ...).
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from bare_detection import ReferencePictures, together
from recording import ROOT, Table, options_of, spread, store, surroundings
from shardmark.core.shares import Shard
from shardmark.workloads import check_data
from shardmark.workloads.base import BatchPlan
from shardmark.workloads.detection.options import DetectionOptions
from shardmark.workloads.detection.task import Detection

NAME = "loader"
DATA = ROOT.parent / "shared" / "data" / "coco-mini"
BATCH = 4
LEAST_RATIO = 1.0
BAR = f"Bar: the median of shardmark / reference is at least {LEAST_RATIO:g} in every row"
MODELS = {"boxes": "fasterrcnn_resnet50_fpn", "boxes and masks": "maskrcnn_resnet50_fpn"}
Batches = Callable[[], Iterator[Any]]
"""Starts a loader anew and gives what it reads, one epoch or more."""


def reference(data: Path, *, workers: int) -> Batches:
    pictures = ReferencePictures(data)

    def start() -> Iterator[Any]:
        loader = DataLoader(
            pictures,
            batch_size=BATCH,
            shuffle=True,
            drop_last=True,
            num_workers=workers,
            persistent_workers=workers > 0,
            multiprocessing_context="fork" if workers else None,
            collate_fn=together,
        )
        while True:
            yield from loader

    return start


def shardmark(data: Path, model: str, *, workers: int) -> Batches:
    """Through the task itself, as a trial's rank reads its batches."""
    options = DetectionOptions(
        dataset="coco", data_dir=str(data), model=model, loader_workers=workers
    )
    check_data(options)
    task = Detection(options, seed=0)
    plan, whole = BatchPlan(global_batch=BATCH, seed=0), Shard(index=0, count=1)
    device = torch.device("cpu")
    return lambda: (batch.to(device) for batch in task.batches(plan, whole))


def pictures_per_second(start: Batches, batches: int) -> float:
    """Of a loader that has begun: processes are up and the first batches were read."""
    reading = start()
    for _ in islice(reading, BATCH):
        pass
    begun = time.perf_counter()
    for _ in islice(reading, batches):
        pass
    seconds = time.perf_counter() - begun
    del reading  # ends its processes
    return batches * BATCH / seconds


def measure(sides: dict[str, Batches], pairs: int, batches: int) -> list[dict[str, Any]]:
    measured = []
    for pair in range(pairs):
        order = list(sides) if pair % 2 == 0 else list(sides)[::-1]
        found: dict[str, Any] = {s: pictures_per_second(sides[s], batches) for s in order}
        found |= {"first": order[0], "ratio": found["shardmark"] / found["reference"]}
        measured.append(found)
        print(
            f"  pair {pair}: shardmark {found['shardmark']:.1f}, "
            f"reference {found['reference']:.1f} pictures/s, ratio {found['ratio']:.3f}",
            flush=True,
        )
    return measured


def rows_of(measured: dict[str, list[dict[str, Any]]]) -> tuple[tuple[str, ...], ...]:
    rows = []
    for name, pairs in measured.items():
        of = {key: spread([p[key] for p in pairs]) for key in ("shardmark", "reference", "ratio")}
        rates = (f"{of[side]['median']:.1f}" for side in ("shardmark", "reference"))
        ratio = of["ratio"]
        shown = (ratio[key] for key in ("median", "min", "max", "interquartile_range"))
        rows.append((name, *rates, *(f"{value:.3f}" for value in shown), str(len(pairs))))
    return tuple(rows)


def main() -> None:
    parser = options_of(NAME, __doc__)
    parser.add_argument("--data", type=Path, default=DATA, help="a folder in COCO's layout")
    parser.add_argument("--pairs", type=int)
    parser.add_argument("--passes", type=int, help="times that each side reads the training set")
    parser.add_argument("--workers", nargs="+", type=int, default=[0, 2])
    options = parser.parse_args()
    if not options.data.is_dir():
        print(f"skipped: there is no folder {options.data}; --data names another")
        return
    pairs = options.pairs or (2 if options.small else 9)
    passes = options.passes or (1 if options.small else 3)
    torch.set_num_threads(1)  # as in a process of a loader
    around = surroundings()
    measured = {}
    with tempfile.TemporaryDirectory() as cache:
        os.environ["SHARDMARK_CACHE"] = cache
        for workers in options.workers:
            theirs = reference(options.data, workers=workers)
            for learned, model in MODELS.items():
                name = f"{learned}, {workers} processes"
                print(name, flush=True)
                ours = shardmark(options.data, model, workers=workers)
                sides = {"shardmark": ours, "reference": theirs}
                batches = passes * (len(ReferencePictures(options.data)) // BATCH)
                measured[name] = measure(sides, pairs, batches)
    ratios = {name: spread([p["ratio"] for p in found]) for name, found in measured.items()}
    store(
        NAME,
        options=options,
        around=around,
        bar=BAR,
        holds=all(ratio["median"] >= LEAST_RATIO for ratio in ratios.values()),
        table=Table(
            columns=(
                *("a model that learns, read by", "shardmark pictures/s", "reference pictures/s"),
                *("ratio: median", "min", "max", "IQR", "pairs"),
            ),
            rows=rows_of(measured),
            notes=(f"{options.data.name}, batches of {BATCH}, {passes} passes on each side.",),
        ),
        numbers={"batch": BATCH, "passes": passes, "ratios": ratios, "pairs": measured},
    )


if __name__ == "__main__":
    main()
