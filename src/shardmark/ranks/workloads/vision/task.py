"""The image classification task."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.nn import functional

from shardmark.ranks.workloads.base import CannotShard, LossSum, TensorPlan
from shardmark.ranks.workloads.datasets.sources import PictureSource
from shardmark.ranks.workloads.flops import flops_on_meta
from shardmark.ranks.workloads.model_building import build_model, seeded
from shardmark.ranks.workloads.sampled_task import SampledTask, added, checked_logits
from shardmark.ranks.workloads.vision.data import load, weights_file
from shardmark.ranks.workloads.vision.pictures import (
    ImageBatch,
    Normalise,
    crop_flip,
    crop_flip_draws,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor, nn

    from shardmark.base.layout import Shard
    from shardmark.ranks.workloads.base import Batch, BatchPlan
    from shardmark.ranks.workloads.datasets.sources import Reading
    from shardmark.ranks.workloads.order import Share
    from shardmark.ranks.workloads.vision.options import ClassificationOptions

COUNTED_PICTURES = 2
"""Images of a made-up batch; batch norm rejects one sample with a feature map of one pixel."""


class Classification(SampledTask[PictureSource, ImageBatch]):
    """Image classification with cross entropy."""

    _evaluation_batch = 128

    def __init__(self, options: ClassificationOptions, seed: int) -> None:
        self._options = options
        self._data = data = load(options, seed)
        self._normalise = Normalise(data.mean, data.std)
        self._initial_weights: str | None = None
        super().__init__(options, seed, data.training, data.validation, synthetic=data.synthetic)

    @property
    def classes(self) -> tuple[str, ...]:
        """Name of each class, in the order of the labels."""
        return self._data.classes

    def build_model(self) -> nn.Module:
        classes = len(self.classes)
        model = build_model(
            self._options.model,
            self._options.model_options,
            classes=classes,
            image_size=self._data.image_size,
            seed=self._seed,
        )
        file = weights_file(self._options)
        if file is not None:
            from shardmark.ranks.workloads.trained_weights import fill_classifier

            initial = fill_classifier(model, file, classes=classes)
            head = f"; {' and '.join(initial)} from the seed, for {classes} classes"
            self._initial_weights = f"{file.name}{head if initial else ''}"
        return model

    @property
    def settings(self) -> Mapping[str, object]:
        return {"initial_weights": self._initial_weights} if self._initial_weights else {}

    def _training_batch(self, plan: BatchPlan, share: Share) -> ImageBatch:
        read = self._training.read(share.ids)
        if self._options.augment == "none":
            return self._batch(read, read.pictures, share.step_weight)
        corners, flipped = crop_flip_draws(plan.seed, share.epoch, self.training_samples)
        rows = share.positions
        pictures = crop_flip(read.pictures, corners[:, rows], flipped[rows])
        return self._batch(read, pictures, share.step_weight)

    def _validation_batch(self, ids: NDArray[np.int64]) -> ImageBatch:
        read = self._validation.read(ids)
        return self._batch(read, read.pictures, float(len(ids)))

    def _batch(self, read: Reading, pictures: Tensor, step_weight: float) -> ImageBatch:
        return ImageBatch(
            pictures=self._normalise(pictures),
            labels=read.labels,
            sample_ids=read.sample_ids,
            step_weight=step_weight,
            errors=read.errors,
        )

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        """Cross entropy, summed over the images in fp32 under every precision."""
        pictures = cast("ImageBatch", batch)
        total = functional.cross_entropy(
            self._logits(model, pictures),
            pictures.labels,
            label_smoothing=self._options.label_smoothing,
            reduction="sum",
        )
        return LossSum(total=total, weight=batch.weight)

    @torch.inference_mode()
    def evaluate(self, model: nn.Module, shard: Shard, device: torch.device) -> dict[str, float]:
        """Sums over the shard's validation batches, without label smoothing."""
        sums = torch.zeros(3, dtype=torch.float64, device=device)  # loss, top-1, top-5
        samples = 0
        for batch in self._validated(self._validation_batch, shard):
            if not len(batch):
                continue
            moved = batch.to(device)
            logits = self._logits(model, moved)  # (batch, classes)
            losses = functional.cross_entropy(logits, moved.labels, reduction="none")
            best = logits.topk(min(5, len(self.classes))).indices
            hits = best == moved.labels[:, None]
            sums += torch.stack([losses.double().sum(), hits[:, 0].sum(), hits.sum()])
            samples += len(batch)
        loss, top1, top5 = sums.tolist()
        return {"samples": samples, "loss": loss, "top1": top1, "top5": top5}

    def quality(self, parts: Iterable[object]) -> Mapping[str, float]:
        """`validation_loss`, `accuracy_top1` and, with more than five classes, `accuracy_top5`."""
        sums = added(parts)
        samples = sums.get("samples")
        if not samples:
            return {}
        names = {"validation_loss": "loss", "accuracy_top1": "top1"}
        if len(self.classes) > 5:
            names["accuracy_top5"] = "top5"
        return {metric: sums[name] / samples for metric, name in names.items()}

    def tensor_plan(self, model: nn.Module) -> TensorPlan | CannotShard:
        from shardmark.ranks.workloads.vision import transformers

        if not transformers.is_vision_transformer(model):
            return super().tensor_plan(model)
        return transformers.tensor_plan(model)

    def pipeline_parts(self, model: nn.Module) -> Sequence[nn.Module] | CannotShard:
        from shardmark.ranks.workloads.vision import transformers

        if not transformers.is_vision_transformer(model):
            return super().pipeline_parts(model)
        with seeded(0):
            batch = self._example_batch(torch.rand)
        return transformers.pipeline_parts(model, lambda module: self._logits(module, batch))

    def _example_batch(self, make: Callable[..., Tensor], **options: Any) -> ImageBatch:
        size = self._data.image_size
        return ImageBatch(
            pictures=make((COUNTED_PICTURES, 3, size, size), **options),
            labels=torch.zeros(COUNTED_PICTURES, dtype=torch.int64, **options),
            sample_ids=tuple(range(COUNTED_PICTURES)),
            step_weight=1.0,
        )

    def sample_input_flops(self, model: nn.Module) -> int | None:
        batch = self._example_batch(torch.empty, device="meta")
        total = flops_on_meta(model, lambda: self.loss(model, batch).total)
        return None if total is None else total // COUNTED_PICTURES or None

    def _logits(self, model: nn.Module, batch: ImageBatch) -> Tensor:
        shape = (len(batch), len(self.classes))
        return checked_logits(model(batch.pictures), shape, self._options.model).float()


build = Classification
