"""Object detection as a workload."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from shardmark.core.errors import InputError
from shardmark.workloads.base import BatchPlan, LossSum
from shardmark.workloads.detection.annotated import Detections, EvaluatedPicture
from shardmark.workloads.detection.batch import DetectionBatch, Target, decoded_masks, mirrored
from shardmark.workloads.detection.building import build_detector
from shardmark.workloads.detection.data import load
from shardmark.workloads.detection.proposals import PictureSampler, sample_by_picture
from shardmark.workloads.flops import counted_flops
from shardmark.workloads.order import Share, generator, seed_of
from shardmark.workloads.sampled_task import SampledTask

if TYPE_CHECKING:
    from torch import Tensor, nn

    from shardmark.core.shares import Shard
    from shardmark.workloads.base import Batch
    from shardmark.workloads.detection.annotated import AnnotatedReading
    from shardmark.workloads.detection.options import DetectionOptions

EVALUATION_BATCH = 4
"""Pictures of different sizes are padded to the largest: few at a time waste little."""
MASK_THRESHOLD = 0.5
"""Probability from which a pixel belongs to a mask (He et al., 2017, section 3.1)."""
COUNTED_PICTURES = 2


class Detection(SampledTask[DetectionBatch]):
    """The sum of a detector's losses on annotated pictures."""

    not_additive = (
        "a detector divides its losses by what it draws from all pictures that it is given at once"
    )

    def __init__(self, options: DetectionOptions, seed: int) -> None:
        self._options = options
        self._seed = seed
        self._data = load(options, seed)
        self._samplers: Sequence[PictureSampler] = ()
        super().__init__(options, self._data, self._data.notes)

    @property
    def classes(self) -> tuple[str, ...]:
        """Name of each class, in the order of the labels."""
        return self._data.classes

    def build_model(self) -> nn.Module:
        model = build_detector(self._options, classes=self._data.classes, seed=self._seed)
        self._samplers = sample_by_picture(model)
        return model

    def _training_batch(self, plan: BatchPlan, share: Share) -> DetectionBatch:
        read = self._data.training.read(share.ids)
        pictures, targets, masks = [], [], []
        positions = range(share.positions.start, share.positions.stop)
        for picture, objects, image_id, position in zip(
            read.pictures, read.objects, read.image_ids, positions, strict=True
        ):
            boxes, mask = objects.boxes, None
            if self._options.with_masks and objects.masks is not None:
                mask = decoded_masks(objects.masks, picture)
            if self._options.augment == "flip" and self._flipped(plan, share.epoch, position):
                picture, boxes = mirrored(picture, boxes)  # noqa: PLW2901
                mask = None if mask is None else mask.flip(-1)
            pictures.append(picture)
            masks.append(mask)
            seed = seed_of(plan.seed, "proposals", plan.draws, share.epoch, position)
            targets.append(
                Target(boxes=boxes, labels=objects.labels, image_id=image_id, sampling_seed=seed)
            )
        known = [mask for mask in masks if mask is not None]
        return DetectionBatch(
            pictures=tuple(pictures),
            targets=tuple(targets),
            sample_ids=read.sample_ids,
            step_weight=share.step_weight,
            masks=tuple(known) if len(known) == len(masks) else None,
            errors=read.errors,
        )

    def _flipped(self, plan: BatchPlan, epoch: int, position: int) -> bool:
        return bool(generator(plan.seed, "augment", epoch, position).integers(0, 2))

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        """The detector's losses added up, each a mean over what it samples; times the pictures."""
        detection = cast("DetectionBatch", batch)
        losses = model(list(detection.pictures), detection.model_targets)
        if not (isinstance(losses, Mapping) and losses) or not all(
            isinstance(loss, torch.Tensor) for loss in losses.values()
        ):
            raise InputError(
                "workload.model",
                f"{self._options.model} returns a {type(losses).__name__} in training mode",
                "expected a dictionary of losses, as torchvision's detectors do",
            )
        # DataParallel returns a value from each device.
        mean: Tensor = sum(loss.float().mean() for loss in losses.values())
        return LossSum(total=mean * batch.weight, weight=batch.weight)

    def watch_draws(self) -> Callable[[], tuple[str, ...]]:
        """Which anchors each picture learns from, which weights and rounding do not change."""
        drawn: list[str] = []
        for sampler in self._samplers:
            sampler.record = drawn.append

        def told() -> tuple[str, ...]:
            since_last = tuple(sorted(drawn))
            drawn.clear()
            return since_last

        return told

    @torch.inference_mode()
    def evaluate(
        self, model: nn.Module, shard: Shard, device: torch.device
    ) -> list[EvaluatedPicture]:
        """This shard's validation pictures with what was found in them."""
        evaluated = []
        for read in self._validation_readings(shard):
            if not read.pictures:
                continue
            pictures = [picture.to(device).float().div_(255) for picture in read.pictures]
            for image_id, truth, found in zip(
                read.image_ids, read.objects, model(pictures), strict=True
            ):
                evaluated.append(
                    EvaluatedPicture(
                        image_id=image_id,
                        truth=truth,
                        found=_detections(found, self._options.with_masks),
                    )
                )
        return evaluated

    def quality(self, parts: Iterable[object]) -> Mapping[str, float | None]:
        """`map`, `map_50` and `map_75`, and the same of masks for Mask R-CNN."""
        # It takes seconds, which only an evaluation needs.
        from shardmark.workloads.detection.average_precision import average_precision

        pictures = [picture for part in parts for picture in cast("list[EvaluatedPicture]", part)]
        masks = self._options.with_masks and all(
            None not in (picture.found.masks, picture.truth.masks) for picture in pictures
        )
        return average_precision(pictures, masks=masks)

    def sample_input_flops(self, model: nn.Module) -> int | None:
        """Operations of one forward and backward pass per picture; None if unknown.

        Counted while the first pictures are really passed: what a detector does depends on them.
        """
        first = np.arange(min(COUNTED_PICTURES, self.training_samples))
        count = len(first)
        share = Share(epoch=0, positions=slice(0, count), ids=first, step_weight=count)
        plan = BatchPlan(global_batch=count, seed=self._seed)
        batch = self._training_batch(plan, share).to(torch.device("cpu"))
        copied = copy.deepcopy(model)  # the passes leave gradients and batch norms' statistics
        total = counted_flops(copied, lambda: self.loss(copied, batch).total)
        return None if total is None else total // len(batch) or None

    def _validation_readings(self, shard: Shard) -> Iterator[AnnotatedReading]:
        """Groups index, index + count, ... of pictures, cut the same however many shards there are.

        Smaller pictures of a group are padded, which changes a little of what is found in them.
        """

        def make(start: int) -> AnnotatedReading:
            stop = min(start + EVALUATION_BATCH, self.validation_samples)
            return self._data.validation.read(np.arange(start, stop))

        first, step = (number * EVALUATION_BATCH for number in (shard.index, shard.count))
        starts = range(first, self.validation_samples, step)
        return self._in_order(make, starts)


def _detections(found: Mapping[str, Tensor], with_masks: bool) -> Detections:
    masks = None
    if with_masks and "masks" in found:
        from faster_coco_eval.core import mask

        shapes = found["masks"][:, 0].cpu().numpy() >= MASK_THRESHOLD  # (k, height, width)
        masks = tuple(mask.encode(np.asfortranarray(shape.astype(np.uint8))) for shape in shapes)
    return Detections(
        boxes=found["boxes"].float().cpu().numpy(),
        scores=found["scores"].float().cpu().numpy(),
        labels=found["labels"].cpu().numpy(),
        masks=masks,
    )


build = Detection
