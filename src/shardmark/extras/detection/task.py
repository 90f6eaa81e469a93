"""The object detection task."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from shardmark.base.errors import InputError
from shardmark.extras.detection.annotated import Detections, EvaluatedPicture
from shardmark.extras.detection.average_precision import average_precision
from shardmark.extras.detection.batch import DetectionBatch, decoded_masks, mirrored
from shardmark.extras.detection.building import build_detector
from shardmark.extras.detection.data import CocoSplit, load
from shardmark.extras.detection.proposals import PictureSampler, sample_by_picture
from shardmark.ranks.workloads.base import BatchPlan, LossSum
from shardmark.ranks.workloads.order import Share, generator, seed_of
from shardmark.ranks.workloads.sampled_task import SampledTask

if TYPE_CHECKING:
    from torch import Tensor, nn

    from shardmark.base.layout import Shard
    from shardmark.extras.detection.options import DetectionOptions
    from shardmark.ranks.workloads.base import Batch

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


build = Detection
