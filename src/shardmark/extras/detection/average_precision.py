"""Average precision of detections, as COCO defines it.  Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from faster_coco_eval import COCO

    from shardmark.extras.detection.annotated import EvaluatedPicture

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
