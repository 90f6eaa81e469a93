"""The object detection task, and its batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np
import torch

from shardmark.base.errors import InputError
from shardmark.extras.detection.building import build_detector
from shardmark.extras.detection.data import CocoSplit, Detections, EvaluatedPicture, load
from shardmark.extras.detection.proposals import PictureSampler, sample_by_picture
from shardmark.ranks.workloads.base import BatchPlan, LossSum
from shardmark.ranks.workloads.order import Share, generator, seed_of
from shardmark.ranks.workloads.sampled_task import SampledBatch, SampledTask, with_tensors

if TYPE_CHECKING:
    from faster_coco_eval import COCO
    from numpy.typing import NDArray
    from torch import Tensor, nn

    from shardmark.base.layout import Shard
    from shardmark.extras.detection.data import RunLengths
    from shardmark.extras.detection.options import DetectionOptions
    from shardmark.ranks.workloads.base import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectionBatch(SampledBatch):
    """Annotated images of one step."""

    pictures: tuple[Tensor, ...]
    """Each (3, height, width): uint8 as stored, float32 from 0 to 1 after `to`."""
    targets: tuple[dict[str, Any], ...]
    """Targets of torchvision's detectors, with the `sampling_seed` of the image's proposals.

    Boxes and labels are arrays, which are cheaper to send between processes, until `to` converts
    them; masks, (n, height, width) of uint8, are tensors.
    """

    def to(self, device: torch.device) -> Self:
        """Copy the batch to the device, and convert images like torchvision's `ToTensor`."""
        pictures = tuple(
            picture.to(device, non_blocking=True).float().div_(255)
            if picture.dtype == torch.uint8
            else picture.to(device)
            for picture in self.pictures
        )
        return replace(self, pictures=pictures, targets=_moved(self.targets, device))

    def _sliced_contents(self, rows: slice) -> dict[str, Any]:
        return {"pictures": self.pictures[rows], "targets": self.targets[rows]}


def _moved(targets: Sequence[dict[str, Any]], device: torch.device) -> tuple[dict[str, Any], ...]:
    tensors = tuple(
        {
            key: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
            for key, value in target.items()
        }
        for target in targets
    )
    moved: tuple[dict[str, Any], ...] = with_tensors(
        tensors, lambda tensor: tensor.to(device, non_blocking=True)
    )
    return moved


def mirrored(picture: Tensor, boxes: NDArray[np.float32]) -> tuple[Tensor, NDArray[np.float32]]:
    """Mirror an image (3, height, width) and its boxes horizontally."""
    width = np.float32(picture.shape[-1])
    flipped = boxes.copy()
    flipped[:, 0], flipped[:, 2] = width - boxes[:, 2], width - boxes[:, 0]
    return picture.flip(-1), flipped


def decoded_masks(masks: Sequence[RunLengths], picture: Tensor) -> Tensor:
    """Decode run lengths to masks (n, height, width), uint8."""
    from faster_coco_eval.core import mask as coding

    if not masks:
        return torch.zeros((0, *picture.shape[-2:]), dtype=torch.uint8)
    pixels = coding.decode(list(masks))  # (height, width, n), column by column in memory
    return torch.from_numpy(pixels.transpose(2, 0, 1))


MASK_THRESHOLD = 0.5
"""Least probability of a pixel in a mask (He et al., 2017, section 3.1)."""


class Detection(SampledTask[CocoSplit, DetectionBatch]):
    """Object detection with the sum of the detector's losses."""

    not_additive = (
        "a detector divides its losses by the number of proposals that it samples from all images"
        " of a batch"
    )
    _counted_samples = 2
    _evaluation_batch = 4
    """Number of images per batch; they are padded to the largest, so that few waste little."""

    def __init__(self, options: DetectionOptions, seed: int) -> None:
        self._options = options
        data = load(options)
        self.classes = data.classes
        """Name of each class, in the order of the labels."""
        self._samplers: Sequence[PictureSampler] = ()
        super().__init__(options, seed, data.training, data.validation, notes=data.notes)

    def build_model(self) -> nn.Module:
        model = build_detector(self._options, classes=self.classes, seed=self._seed)
        self._samplers = sample_by_picture(model)
        return model

    def _training_batch(self, plan: BatchPlan, share: Share) -> DetectionBatch:
        read = self._training.read(share.ids)
        pictures: list[Tensor] = []
        targets: list[dict[str, Any]] = []
        positions = range(share.positions.start, share.positions.stop)
        flips = self._options.augment == "flip"
        for picture, objects, image_id, position in zip(
            read.pictures, read.objects, read.image_ids, positions, strict=True
        ):
            boxes, masks = objects.boxes, None
            if objects.masks is not None:
                masks = decoded_masks(objects.masks, picture)
            if flips and generator(plan.seed, "augment", share.epoch, position).integers(0, 2):
                picture, boxes = mirrored(picture, boxes)  # noqa: PLW2901
                masks = None if masks is None else masks.flip(-1)
            target: dict[str, Any] = {
                "boxes": boxes,
                "labels": objects.labels,
                "image_id": image_id,
                "sampling_seed": seed_of(plan.seed, "proposals", plan.draws, share.epoch, position),
            }
            pictures.append(picture)
            targets.append(target if masks is None else target | {"masks": masks})
        return DetectionBatch(
            pictures=tuple(pictures),
            targets=tuple(targets),
            sample_ids=read.sample_ids,
            step_weight=share.step_weight,
            errors=read.errors,
        )

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        """Sum of the detector's losses, each a mean over its samples, times the batch size."""
        detection = cast("DetectionBatch", batch)
        losses = model(list(detection.pictures), list(detection.targets))
        if not (isinstance(losses, Mapping) and losses) or not all(
            isinstance(loss, torch.Tensor) for loss in losses.values()
        ):
            raise InputError(
                "workload.model",
                f"{self._options.model} returns a {type(losses).__name__} in training mode",
                "expected a dictionary of losses, as torchvision's detectors do",
            )
        # DataParallel returns one value per device.
        mean: Tensor = sum(loss.float().mean() for loss in losses.values())
        return LossSum(total=mean * batch.weight, weight=batch.weight)

    def watch_draws(self) -> Callable[[], tuple[str, ...]]:
        """Record the anchors sampled for each image, which weights and rounding do not change."""
        drawn: list[str] = []
        for sampler in self._samplers:
            sampler.record = drawn.append

        def draws_since_last_call() -> tuple[str, ...]:
            since_last = tuple(sorted(drawn))
            drawn.clear()
            return since_last

        return draws_since_last_call

    @torch.inference_mode()
    def evaluate(
        self, model: nn.Module, shard: Shard, device: torch.device
    ) -> list[EvaluatedPicture]:
        """Detections in the shard's validation images.

        Smaller images of a batch are padded, which slightly changes their detections.
        """
        evaluated = []
        for read in self._validated(self._validation.read, shard):
            if not read.pictures:
                continue
            pictures = [picture.to(device).float().div_(255) for picture in read.pictures]
            outputs = [_detections(output, self._options.with_masks) for output in model(pictures)]
            evaluated += [
                EvaluatedPicture(image_id=image_id, truth=truth, detections=detections)
                for image_id, truth, detections in zip(
                    read.image_ids, read.objects, outputs, strict=True
                )
            ]
        return evaluated

    def quality(self, parts: Iterable[object]) -> Mapping[str, float | None]:
        """`map`, `map_50` and `map_75`, and the same of masks for Mask R-CNN."""
        pictures = [picture for part in parts for picture in cast("list[EvaluatedPicture]", part)]
        masks = self._options.with_masks and all(
            None not in (picture.detections.masks, picture.truth.masks) for picture in pictures
        )
        return average_precision(pictures, masks=masks)


def _detections(output: Mapping[str, Tensor], with_masks: bool) -> Detections:
    masks = None
    if with_masks and "masks" in output:
        from faster_coco_eval.core import mask

        shapes = output["masks"][:, 0].cpu().numpy() >= MASK_THRESHOLD  # (k, height, width)
        masks = tuple(mask.encode(np.asfortranarray(shape.astype(np.uint8))) for shape in shapes)
    return Detections(
        boxes=output["boxes"].float().cpu().numpy(),
        scores=output["scores"].float().cpu().numpy(),
        labels=output["labels"].cpu().numpy(),
        masks=masks,
    )


AVERAGES = {"map": slice(None), "map_50": slice(0, 1), "map_75": slice(5, 6)}
"""Metric -> the IoU thresholds, of the ten from 0.5 to 0.95, over which it averages."""


def average_precision(
    pictures: Sequence[EvaluatedPicture], *, masks: bool
) -> dict[str, float | None]:
    """Compute `map`, `map_50` and `map_75` of boxes and, with `masks`, `mask_map`, ..., 0 to 1.

    Values are None if no image has an object that is not a crowd (COCO's own code returns -1).
    Detections on a crowd are ignored; detections in an image without objects are false positives.
    The 100 best detections of each category and image count.  Equal scores are ranked by the id of
    the image, then by their order in it, so that the result does not depend on the sharding.
    Source: Lin et al., arXiv 1405.0312, and COCOeval of pycocotools, which agrees to 1e-6.
    """
    from faster_coco_eval import COCOeval_faster

    iou_types = {"": "bbox", "mask_": "segm"} if masks else {"": "bbox"}
    averages: dict[str, float | None] = {p + name: None for p in iou_types for name in AVERAGES}
    if all(picture.truth.crowds.all() for picture in pictures):
        return averages
    ordered = sorted(pictures, key=lambda picture: picture.image_id)
    assert len({picture.image_id for picture in ordered}) == len(ordered), "an image came twice"
    truth, detections = (_indexed(ordered, name, masks=masks) for name in ("truth", "detections"))
    for prefix, iou_type in iou_types.items():
        evaluation = COCOeval_faster(truth, detections, iouType=iou_type)
        evaluation.evaluate()
        evaluation.accumulate()
        # (thresholds, recalls, categories), objects of all sizes; -1 for categories without objects
        precision = evaluation.eval["precision"][..., 0, -1]
        for name, thresholds in AVERAGES.items():
            values = precision[thresholds]
            averages[prefix + name] = float(values[values >= 0].mean())
    return averages


def _indexed(pictures: Sequence[EvaluatedPicture], name: str, *, masks: bool) -> COCO:
    """Convert annotations or detections to the library's representation of a COCO file."""
    from faster_coco_eval import COCO

    entries: list[dict[str, Any]] = []
    for picture in pictures:
        objects: Any = getattr(picture, name)
        boxes = objects.boxes.astype(np.float64)
        boxes[:, 2:] -= boxes[:, :2]  # width and height, without another rounding
        columns = {
            "category_id": objects.labels.tolist(),
            "bbox": boxes.tolist(),
            **({"segmentation": objects.masks} if masks else {}),
        }
        if name == "truth":
            columns["area"] = objects.areas.tolist()
            columns["iscrowd"] = objects.crowds.astype(int).tolist()
        else:
            columns["area"] = boxes[:, 2:].prod(axis=1).tolist()
            columns["score"] = objects.scores.tolist()
        for values in zip(*columns.values(), strict=True):
            entry = dict(zip(columns, values, strict=True))
            entries.append(entry | {"id": len(entries) + 1, "image_id": picture.image_id})
    labels = {label for p in pictures for label in (*p.truth.labels, *p.detections.labels)}
    size = {"height": 0, "width": 0}  # required keys; run lengths have their own size
    return COCO(
        {
            "images": [{"id": picture.image_id, **size} for picture in pictures],
            "categories": [{"id": label} for label in sorted(map(int, labels))],
            "annotations": entries,
        }
    )


build = Detection
