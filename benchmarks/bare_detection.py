"""Training a detector without Shardmark: the other side of `detection_speed.py`.

    torchrun --nproc-per-node 2 benchmarks/bare_detection.py --strategy ddp --data COCO \
        --order FILE --out FOLDER

Faster R-CNN with ResNet-50 and a feature pyramid from random weights, written in the style of
torchvision's `references/detection`: pycocotools' index through `CocoDetection`, masks from
polygons for every picture whether or not the model learns them (`--no-masks` leaves them out, as
the reference's transforms v2 do), a `DataLoader` in the rank's own process, a list of pictures and
of targets, the sum of the losses, torchvision's own random choice of proposals.  It prints no
metrics and copies no loss to the host.  FILE holds each rank's samples of each step.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import os
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchvision.datasets import CocoDetection
from torchvision.models.detection import fasterrcnn_resnet50_fpn
from torchvision.models.resnet import Bottleneck
from torchvision.ops import Conv2dNormActivation
from torchvision.transforms.functional import to_tensor

from bare_loop import start


class ReferencePictures(CocoDetection):  # type: ignore[misc]  # torchvision has no types
    """One picture and its target at a time, with all that the reference makes of it."""

    def __init__(self, data: Path, *, masks: bool = True) -> None:
        (file,) = (data / "annotations").glob("instances_train*.json")
        with redirect_stdout(io.StringIO()):  # pycocotools prints
            super().__init__(str(data / file.stem.removeprefix("instances_")), str(file))
        self._masks = masks
        self._labels = {number: label for label, number in enumerate(sorted(self.coco.cats), 1)}

    @property
    def outputs(self) -> int:
        """Classes and the background."""
        return len(self._labels) + 1

    def __getitem__(self, sample: int) -> tuple[Tensor, dict[str, Tensor]]:
        picture, objects = super().__getitem__(sample)
        found = [one for one in objects if not one["iscrowd"]]
        return to_tensor(picture), self._target(self.ids[sample], found, *picture.size)

    def _target(
        self, number: int, found: list[dict[str, Any]], width: int, height: int
    ) -> dict[str, Tensor]:
        boxes = torch.tensor([one["bbox"] for one in found], dtype=torch.float32).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        boxes[:, 0::2].clamp_(0, width)
        boxes[:, 1::2].clamp_(0, height)
        keep = (boxes[:, 2:] > boxes[:, :2]).all(1)
        labels = [self._labels[one["category_id"]] for one in found]
        target = {
            "boxes": boxes[keep],
            "labels": torch.tensor(labels, dtype=torch.int64)[keep],
            "area": torch.tensor([one["area"] for one in found])[keep],
            "image_id": torch.tensor(number),
        }
        if self._masks:
            masks = [torch.from_numpy(self.coco.annToMask(one)) for one in found]
            empty = torch.zeros((0, height, width), dtype=torch.uint8)
            target["masks"] = torch.stack(masks)[keep] if masks else empty
        return target


def together(samples: list[Any]) -> tuple[Any, ...]:
    return tuple(zip(*samples, strict=True))


def build_model(*, outputs: int, min_size: int, max_size: int) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = fasterrcnn_resnet50_fpn(
        weights=None,
        weights_backbone=None,
        num_classes=outputs,
        min_size=min_size,
        max_size=max_size,
    )
    return model


def blocks_of(model: Any) -> list[nn.Module]:
    """What FSDP gathers together."""
    kinds = (Bottleneck, Conv2dNormActivation)
    head = model.roi_heads.box_head
    return [*(part for part in model.modules() if isinstance(part, kinds)), head.fc6, head.fc7]


def sum_of_losses(
    model: nn.Module, pictures: Sequence[Tensor], targets: Sequence[dict[str, Tensor]]
) -> Tensor:
    losses: dict[str, Tensor] = model(list(pictures), list(targets))
    return torch.stack(list(losses.values())).sum()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", choices=("single", "ddp", "fsdp", "zero-1"), required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--order", type=Path, required=True)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--min-size", type=int, required=True)
    parser.add_argument("--max-size", type=int, required=True)
    parser.add_argument("--no-masks", action="store_true")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    steps: list[list[int]] = json.loads(options.order.read_text())[rank]
    pictures_of = ReferencePictures(options.data, masks=not options.no_masks)
    loader: DataLoader[Any] = DataLoader(
        pictures_of, batch_sampler=steps, num_workers=0, collate_fn=together
    )
    model = build_model(
        outputs=pictures_of.outputs, min_size=options.min_size, max_size=options.max_size
    )
    step = start(options.strategy, model.train(), blocks_of(model), sum_of_losses)
    reading = iter(loader)
    losses = []
    samples = 0
    dist.barrier()
    first_step_at = time.time()
    opened = time.perf_counter()
    for index in range(len(steps)):
        if index == options.warmup:
            # As in `bare_loop.py`: Shardmark's ranks do not search their imports' garbage either.
            gc.collect()
            gc.freeze()
            dist.barrier()
            samples = 0
            opened = time.perf_counter()
        pictures, targets = next(reading)
        losses.append(step(pictures, targets))
        samples += len(pictures)
    window_seconds = time.perf_counter() - opened
    report = {
        "rank": rank,
        "samples": samples,
        "window_seconds": window_seconds,
        "first_step_at_seconds": first_step_at,
        "threads": torch.get_num_threads(),
        "last_loss": float(losses[-1]),
    }
    (options.out / f"{rank}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    main()
