"""Average precision of detections, as COCO defines it.  Imports torch, by way of torchmetrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torchmetrics.detection import MeanAveragePrecision

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardmark.workloads.detection.annotated import EvaluatedPicture, RunLengths

AVERAGES = ("map", "map_50", "map_75")
# The library's own thresholds are float32: 0.55000001 would refuse an overlap of exactly 0.55.
OVERLAPS: list[float] = np.linspace(0.5, 0.95, 10).tolist()
RECALLS: list[float] = np.linspace(0.0, 1.0, 101).tolist()
DETECTIONS = [1, 10, 100]
"""The last one counts: so many of a category are looked at in one picture, the best first."""


def average_precision(
    pictures: Sequence[EvaluatedPicture], *, masks: bool
) -> dict[str, float | None]:
    """`map`, `map_50` and `map_75` of boxes and, with `masks`, `mask_map`, ... of masks, 0 to 1.

    None where the pictures mark no object, crowds aside (COCO's own code says -1).  Detections on a
    crowd count neither for nor against the model; those in a picture without objects count against
    it.  Equal scores are ranked by the picture's id, then by their order in the picture, so that
    the result does not depend on how ranks shared the pictures.
    Source: Lin et al., arXiv 1405.0312, and COCOeval of pycocotools, which agrees to 1e-6.
    """
    names = {name: f"bbox_{name}" if masks else name for name in AVERAGES}
    if masks:
        names |= {f"mask_{name}": f"segm_{name}" for name in AVERAGES}
    if all(picture.truth.crowds.all() for picture in pictures):
        return dict.fromkeys(names)
    ordered = sorted(pictures, key=lambda picture: picture.image_id)
    ids = [picture.image_id for picture in ordered]
    assert len(set(ids)) == len(ids), "no picture is evaluated twice"
    metric = _Metric(
        iou_type=("bbox", "segm") if masks else "bbox",
        iou_thresholds=OVERLAPS,
        rec_thresholds=RECALLS,
        max_detection_thresholds=DETECTIONS,
        backend="faster_coco_eval",
        sync_on_compute=False,  # every rank has all pictures already
        dist_sync_on_step=False,
    )
    for picture in ordered:
        metric.update(picture)
    averages = metric.compute()
    return {name: _fraction(averages[theirs]) for name, theirs in names.items()}


class _Metric(MeanAveragePrecision):
    """Takes masks as run lengths, which is how the library keeps them, too.

    Its own `update` wants pixels: 2 ms for each mask to unpack and pack it, half a million times
    for COCO's validation set.
    """

    def update(self, picture: EvaluatedPicture) -> None:  # type: ignore[override]
        truth, found = picture.truth, picture.found
        self.groundtruth_box.append(_corner_and_size(truth.boxes))
        self.groundtruth_labels.append(torch.tensor(truth.labels))
        self.groundtruth_crowds.append(torch.tensor(truth.crowds, dtype=torch.int64))
        self.groundtruth_area.append(torch.tensor(truth.areas))
        self.detection_box.append(_corner_and_size(found.boxes))
        self.detection_labels.append(torch.tensor(found.labels))
        self.detection_scores.append(torch.tensor(found.scores))
        if "segm" in self.iou_type:
            self.groundtruth_mask.append(_sizes_and_counts(truth.masks))
            self.detection_mask.append(_sizes_and_counts(found.masks))


def _corner_and_size(boxes: NDArray[np.float32]) -> torch.Tensor:
    """Left, top, width, height, shape (n, 4), without another rounding."""
    # A copy: what comes out of a cache may be read-only, of which torch warns.
    corners = torch.tensor(boxes, dtype=torch.float64).reshape(-1, 4)
    return torch.cat((corners[:, :2], corners[:, 2:] - corners[:, :2]), dim=1)


def _sizes_and_counts(masks: Sequence[RunLengths] | None) -> Any:
    assert masks is not None, "whoever wants averages of masks reads and predicts them"
    return tuple((tuple(mask["size"]), mask["counts"]) for mask in masks)


def _fraction(average: torch.Tensor) -> float | None:
    value = float(average)
    return None if value < 0 else value
