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
SMALL = "fasterrcnn_mobilenet_v3_large_320_fpn"


def write(root: Path, *, pictures: int = 6, sizes: Sequence[tuple[int, int]] = SIZES) -> Path:
    """So many pictures in each split, with 0, 1, 2, 0, 1, 2, ... rectangles marked in them."""
    drawn = np.random.default_rng(0)
    (root / "annotations").mkdir(parents=True)
    for split in ("train2017", "val2017"):
        (root / split).mkdir()
        content: dict[str, list[Any]] = {
            "images": [],
            "annotations": [],
            "categories": [{"id": n, "name": name} for n, name in CATEGORIES.items()],
        }
        for number in range(pictures):
            width, height = sizes[number % len(sizes)]
            pixels = drawn.integers(0, 256, (height, width, 3), dtype=np.uint8)
            name = f"{number}.png"
            Image.fromarray(pixels).save(root / split / name)
            shape = {"file_name": name, "width": width, "height": height}
            content["images"].append({"id": 100 + number} | shape)
            for _ in range(number % 3):
                content["annotations"].append(_rectangle(drawn, len(content["annotations"]), shape))
                content["annotations"][-1]["image_id"] = 100 + number
        (root / "annotations" / f"instances_{split}.json").write_text(json.dumps(content))
    return root


def _rectangle(drawn: np.random.Generator, number: int, shape: dict[str, Any]) -> dict[str, Any]:
    left, top = int(drawn.integers(0, 12)), int(drawn.integers(0, 12))
    width, height = int(drawn.integers(8, 18)), int(drawn.integers(8, 18))
    right, bottom = left + width, top + height
    assert right < shape["width"]
    assert bottom < shape["height"]
    return {
        "id": number,
        "category_id": list(CATEGORIES)[number % 3],
        "bbox": [left, top, width, height],
        "area": width * height,
        "iscrowd": 0,
        "segmentation": [[left, top, right, top, right, bottom, left, bottom]],
    }


def options(folder: Path, **fields: Any) -> DetectionOptions:
    chosen = {"dataset": "coco", "data_dir": str(folder), "model": SMALL} | fields
    return DetectionOptions.model_validate({"min_size": 64, "max_size": 64} | chosen)


def task(folder: Path, seed: int = 0, **fields: Any) -> Detection:
    return Detection(options(folder, **fields), seed)
