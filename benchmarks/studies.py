"""Checks the figures of published studies by arithmetic; `docs/studies/` explains the results.

    python benchmarks/studies.py

Computed from the studies' own figures in `src/shardmark/analysis/studies/`, the parameters of
torchvision's models and the mAP that torchvision publishes of its weights.  Measures nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from torchvision.models import mobilenet_v2, resnet18
from torchvision.models.detection import FasterRCNN_ResNet50_FPN_Weights

from harness import Table, options_of, store, surroundings
from shardmark.analysis.studies.study import Figures, Study, load_study

NAME = "studies"
BAR = "Bar: none, it only computes"
SLOTS = {"SGD": 0, "SGD with momentum": 1, "Adam": 2}
"""Numbers that the optimizer keeps for each parameter."""
ASU_TOTAL_SECONDS = {
    ("single", "resnet18"): 906.825,
    ("single", "mobilenet_v2"): 1023.64,
    ("fsdp", "resnet18"): 1005.49,
    ("fsdp", "mobilenet_v2"): 1135.67,
}
"""Table 1, total time."""

Line = tuple[str, str, str, str]
"""Study, quantity, published or claimed, computed."""


def asu(study: Study) -> Iterator[Line]:
    """Two ranks, one of which can give half of parameters, gradients and optimizer state away."""
    parameters = {
        build.__name__: sum(p.numel() for p in build(num_classes=10).parameters())
        for build in (resnet18, mobilenet_v2)
    }
    by_training = {
        (each.title, str(each.conditions["workload.model"])): each.headline
        for each in study.figures
    }
    for model, count in parameters.items():
        single, fsdp = by_training["single", model], by_training["fsdp", model]
        before, after = (each["peak_memory_bytes"] for each in (single, fsdp))
        most = {name: (2 + slots) * 4 * count / 2 for name, slots in SLOTS.items()}
        saved = ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in most.items())
        yield study.name, f"fall of the peak, {model}", f"{(before - after) / 1e6:.0f} MB", saved
        ratio = f"{after / before:.2f}"
        yield study.name, f"peak of FSDP over one GPU, {model}", ratio, "at least 0.50"
        epochs = round(ASU_TOTAL_SECONDS["single", model] / single["epoch_seconds"])
        total = ASU_TOTAL_SECONDS["fsdp", model]
        seconds = epochs * fsdp["epoch_seconds"]
        text = f"{epochs} epochs: {seconds:.0f} s, or {total / fsdp['epoch_seconds']:.1f} epochs"
        yield study.name, f"total time of FSDP, {model}", f"{total:.0f} s", text
        alone = f"one GPU {ASU_TOTAL_SECONDS['single', model]:.0f} s"
        yield study.name, f"fastest in total, {model}", f"FSDP {total:.0f} s", alone


def lamsal(study: Study) -> Iterator[Line]:
    best = max(max(each.epochs["map"]) for each in study.figures)
    meta = FasterRCNN_ResNet50_FPN_Weights.COCO_V1.meta["_metrics"]["COCO-val2017"]["box_map"]
    yield (
        study.name,
        "highest mAP of all trainings",
        f"{best:.4f}",
        f"weights alone {meta / 100:.3f}",
    )
    for each in study.figures:
        fewest = study.fewest_ranks(each)
        if fewest is not each:
            speedup = fewest.headline["epoch_seconds"] / each.headline["epoch_seconds"]
            factor = each.world_size / fewest.world_size
            text = f"{speedup:.2f}x, efficiency {speedup / factor:.0%}"
            ranks = f"{fewest.world_size} to {each.world_size}"
            yield study.name, f"speed-up of {each.title}, {ranks} GPUs", "near linear", text
    for size in (2, 4):
        times = {
            e.title: e.headline["epoch_seconds"] for e in study.figures if e.world_size == size
        }
        text = ", ".join(
            f"{name} {times[name]:.1f} s" for name in sorted(times, key=times.__getitem__)
        )
        yield study.name, f"fastest on {size} GPUs", "DDP (abstract)", text
    ddp, zero = (_training(study, name, 4) for name in ("ddp", "zero-1"))
    lead = ddp.epochs["map"][-1] - zero.epochs["map"][-1]
    scatter = max(max(each.epochs["map"][1:]) - min(each.epochs["map"][1:]) for each in (ddp, zero))
    text = f"scatter of one training {scatter:.4f}"
    yield study.name, "lead of DDP in mAP, 4 GPUs", f"{lead:.4f}", text


def _training(study: Study, strategy: str, ranks: int) -> Figures:
    (found,) = (e for e in study.figures if (e.strategy, e.world_size) == (strategy, ranks))
    return found


def ovi(study: Study) -> Iterator[Line]:
    """DDP holds its gradients twice, as buckets; FSDP an n-th of all state; activations none."""
    for ranks in (2, 3, 4, 8):
        least = min((2 + s) / ranks / (3 + s) for s in SLOTS.values())
        yield study.name, f"FSDP over DDP, {ranks} GPUs", "0.17 to 0.25", f"at least {least:.3f}"


def poster(study: Study) -> Iterator[Line]:
    """Eight ranks; hybrid sharding in groups of two holds most, ZeRO-3 least."""
    least = (1 / 8) / (1 / 2)
    yield study.name, "ZeRO-3 over FSDP, hybrid", "down to 0.70", f"at least {least:.2f}"
    yield study.name, "ZeRO-3 over FSDP, full", "down to 0.70", "1.00: both hold an eighth"


def main() -> None:
    options = options_of(NAME, __doc__).parse_args()
    makers = {
        "asu-fsdp-2024": asu,
        "lamsal-2025": lamsal,
        "ovi-2025": ovi,
        "fsdp-vs-deepspeed-poster": poster,
    }
    lines = [line for name, make in makers.items() for line in make(load_study(name))]
    store(
        NAME,
        options=options,
        around=surroundings(),
        bar=BAR,
        holds=True,
        table=Table(columns=("study", "quantity", "published", "computed"), rows=tuple(lines)),
        numbers={"lines": lines},
    )


if __name__ == "__main__":
    main()
