"""Pictures of several sizes in COCO's layout, and detection tasks on them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from shardmark.workloads.detection.options import DetectionOptions
from shardmark.workloads.detection.task import Detection

CATEGORIES = {3: "gizmo", 18: "dog", 90: "person"}
"""Ids with gaps, as COCO's; the second and third name are COCO's, too."""
SIZES = ((48, 32), (32, 48), (40, 40))
"""Width and height; most pictures differ from their neighbours."""
TWO_STAGES = "tests.distributed.models:small_detector"
"""Small, and samples proposals as all detectors of two stages do."""


def write(root: Path, *, pictures: int = 6, sizes: Sequence[tuple[int, int]] = SIZES) -> Path:
    """So many pictures in each split, with 0, 1, 2, 0, 1, 2, ... rectangles marked in them."""
    drawn = np.random.default_rng(0)
    (root / "annotations").mkdir(parents=True)
    for split in ("train2017", "val2017"):
        (root / split).mkdir()
        images: list[dict[str, Any]] = []
        marks: list[dict[str, Any]] = []
        for number in range(pictures):
            width, height = sizes[number % len(sizes)]
            pixels = drawn.integers(0, 256, (height, width, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / split / f"{number}.png")
            image = {"id": 100 + number, "file_name": f"{number}.png"}
            images.append(image | {"width": width, "height": height})
            marks += [
                _rectangle(drawn, len(marks) + index, image["id"]) for index in range(number % 3)
            ]
        categories = [{"id": number, "name": name} for number, name in CATEGORIES.items()]
        content = {"images": images, "annotations": marks, "categories": categories}
        (root / "annotations" / f"instances_{split}.json").write_text(json.dumps(content))
    return root


def _rectangle(drawn: np.random.Generator, number: int, picture: object) -> dict[str, Any]:
    """Inside the smallest picture."""
    left, top, width, height = drawn.integers((0, 0, 8, 8), (12, 12, 18, 18)).tolist()
    right, bottom = left + width, top + height
    return {
        "id": number,
        "image_id": picture,
        "category_id": list(CATEGORIES)[number % 3],
        "bbox": [left, top, width, height],
        "area": width * height,
        "iscrowd": 0,
        "segmentation": [[left, top, right, top, right, bottom, left, bottom]],
    }


def options(folder: Path, **fields: Any) -> DetectionOptions:
    chosen = {"dataset": "coco", "data_dir": str(folder), "model": "fcos_resnet18_fpn"} | fields
    return DetectionOptions.model_validate(chosen)


def task(folder: Path, seed: int = 0, **fields: Any) -> Detection:
    return Detection(options(folder, **fields), seed)
