"""Average precision of detections, as COCO defines it.  Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from faster_coco_eval import COCO, COCOeval_faster

if TYPE_CHECKING:
    from shardmark.workloads.detection.annotated import EvaluatedPicture

AVERAGES = {"map": slice(None), "map_50": slice(0, 1), "map_75": slice(5, 6)}
"""Name -> which of the ten overlaps from 0.5 to 0.95 are averaged."""


def average_precision(
    pictures: Sequence[EvaluatedPicture], *, masks: bool
) -> dict[str, float | None]:
    """`map`, `map_50` and `map_75` of boxes and, with `masks`, `mask_map`, ... of masks, 0 to 1.

    None where the pictures mark no object, crowds aside (COCO's own code says -1).  Detections on a
    crowd count neither for nor against the model; those in a picture without objects count against
    it.  At most 100 detections of a category are looked at in one picture, the best first.  Equal
    scores are ranked by the picture's id, then by their order in the picture, so that the result
    does not depend on how ranks shared the pictures.
    Source: Lin et al., arXiv 1405.0312, and COCOeval of pycocotools, which agrees to 1e-6.
    """
    kinds = {"": "bbox", "mask_": "segm"} if masks else {"": "bbox"}
    averages: dict[str, float | None] = {p + name: None for p in kinds for name in AVERAGES}
    if all(picture.truth.crowds.all() for picture in pictures):
        return averages
    ordered = sorted(pictures, key=lambda picture: picture.image_id)
    assert len({picture.image_id for picture in ordered}) == len(ordered), "none is evaluated twice"
    truth, found = (_indexed(ordered, which, masks=masks) for which in ("truth", "found"))
    for prefix, kind in kinds.items():
        evaluation = COCOeval_faster(truth, found, iouType=kind)
        evaluation.evaluate()
        evaluation.accumulate()
        # (overlaps, recalls, categories) of objects of all sizes; -1 for categories without any
        precision = evaluation.eval["precision"][..., 0, -1]
        for name, overlaps in AVERAGES.items():
            averages[prefix + name] = float(precision[overlaps][precision[overlaps] >= 0].mean())
    return averages


def _indexed(pictures: Sequence[EvaluatedPicture], which: str, *, masks: bool) -> COCO:
    """What is marked, or found, as the library reads it from files."""
    entries: list[dict[str, Any]] = []
    for picture in pictures:
        marks: Any = getattr(picture, which)
        boxes = marks.boxes.astype(np.float64)
        boxes[:, 2:] -= boxes[:, :2]  # width and height, without another rounding
        columns = {
            "category_id": marks.labels.tolist(),
            "bbox": boxes.tolist(),
            **({"segmentation": marks.masks} if masks else {}),
        }
        if which == "truth":
            columns |= {"area": marks.areas.tolist(), "iscrowd": marks.crowds.astype(int).tolist()}
        else:
            columns |= {"area": boxes[:, 2:].prod(axis=1).tolist(), "score": marks.scores.tolist()}
        for values in zip(*columns.values(), strict=True):
            entry = dict(zip(columns, values, strict=True))
            entries.append(entry | {"id": len(entries) + 1, "image_id": picture.image_id})
    labels = {label for p in pictures for label in (*p.truth.labels, *p.found.labels)}
    size = {"height": 0, "width": 0}  # asked for, though run lengths know theirs
    return COCO(
        {
            "images": [{"id": picture.image_id, **size} for picture in pictures],
            "categories": [{"id": label} for label in sorted(map(int, labels))],
            "annotations": entries,
        }
    )
