"""Small data sets in COCO's layout, and detection tasks on them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from shardmark.extras.detection import data
from shardmark.extras.detection.data import AnnotatedPictures, CocoSplit, Objects
from shardmark.extras.detection.options import DetectionOptions
from shardmark.extras.detection.task import Detection

SPLITS = ("train2017", "val2017")
CATEGORIES = {3: "gizmo", 18: "dog", 90: "person"}
"""Ids with gaps, as COCO's; the second and third name are COCO's, too."""
SIZES = ((48, 32), (32, 48), (40, 40))
"""Width and height; most pictures differ from their neighbours."""
TWO_STAGES = "tests.distributed.models:small_detector"
"""Small, and samples proposals as all detectors of two stages do."""
SQUARE = [[2, 2, 6, 2, 6, 6, 2, 6]]
Document = dict[str, Any]
Change = Callable[[Document], None]


def save(root: Path, split: str, content: Document) -> None:
    """The annotation file, and pictures of noise."""
    drawn = np.random.default_rng(0)
    (root / "annotations").mkdir(parents=True, exist_ok=True)
    (root / split).mkdir()
    for picture in content["images"]:
        size = (picture["height"], picture["width"], 3)
        pixels = drawn.integers(0, 256, size, dtype=np.uint8)
        Image.fromarray(pixels).save(root / split / picture["file_name"])
    annotation_file(root, split).write_text(json.dumps(content))


def write(root: Path, *, pictures: int = 6, sizes: Sequence[tuple[int, int]] = SIZES) -> Path:
    """So many pictures in each split, with 0, 1, 2, 0, 1, 2, ... rectangles marked in them."""
    drawn = np.random.default_rng(0)
    for split in SPLITS:
        images: list[Document] = []
        marks: list[Document] = []
        for number in range(pictures):
            width, height = sizes[number % len(sizes)]
            image = {"id": 100 + number, "file_name": f"{number}.png"}
            images.append(image | {"width": width, "height": height})
            for _ in range(number % 3):  # inside the smallest picture
                box = drawn.integers((0, 0, 8, 8), (12, 12, 18, 18)).tolist()
                category = list(CATEGORIES)[len(marks) % 3]
                marks.append(marked(len(marks), 100 + number, category, box, area=box[2] * box[3]))
        categories = [{"id": number, "name": name} for number, name in CATEGORIES.items()]
        save(root, split, {"images": images, "annotations": marks, "categories": categories})
    return root


def marked(number: int, picture: int, category: int, box: list[float], **more: Any) -> Document:
    """A rectangle, as its polygon tells, too."""
    left, top, width, height = box
    right, bottom = left + width, top + height
    polygon = [left, top, right, top, right, bottom, left, bottom]
    entry = {"id": number, "image_id": picture, "category_id": category, "bbox": box}
    return entry | {"iscrowd": 0, "segmentation": [polygon]} | more


def _odd(*annotations: Document) -> Document:
    """Four pictures 10 wide and 8 high, not sorted, and three categories with gaps between."""
    return {
        "images": [
            {"id": number, "file_name": f"{number:03}.png", "width": 10, "height": 8}
            for number in (30, 10, 40, 20)
        ],
        "categories": [{"id": n, "name": name} for n, name in ((18, "dog"), (1, "ant"), (90, "z"))],
        "annotations": list(annotations),
    }


TRAINING = _odd(
    marked(101, 20, 90, [1, 1, 4, 3], area=7.5),
    marked(102, 10, 1, [2, 2, 4, 4]),
    marked(103, 20, 18, [6, 5, 10, 10]),  # reaches over the edges
    marked(104, 30, 18, [0, 0, 5, 5], iscrowd=1),
    marked(105, 20, 18, [10, 2, 3, 3]),  # outside
)
VALIDATION = _odd(
    marked(201, 40, 18, [1, 1, 4, 3]),
    marked(202, 40, 18, [6, 5, 10, 10], iscrowd=1, area=33),
)


def write_odd(root: Path) -> Path:
    """Four pictures in each split, with one of each oddity."""
    for split, content in zip(SPLITS, (TRAINING, VALIDATION), strict=True):
        save(root, split, content)
    return root


def annotation_file(folder: Path, split: str) -> Path:
    return folder / "annotations" / f"instances_{split}.json"


def edit(folder: Path, change: Change, split: str = "train2017") -> None:
    file = annotation_file(folder, split)
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def append(key: str, entry: object) -> Change:
    return lambda content: content[key].append(entry)


def options(folder: Path, **fields: Any) -> DetectionOptions:
    chosen = {"dataset": "coco", "data_dir": str(folder), "model": "fcos_resnet18_fpn"} | fields
    return DetectionOptions.model_validate(chosen)


def task(folder: Path, seed: int = 0, **fields: Any) -> Detection:
    return Detection(options(folder, **fields), seed)


def load(folder: Path, **fields: Any) -> AnnotatedPictures:
    data.check(options(folder, **fields))
    return data.load(options(folder, **fields))


def shown(split: CocoSplit) -> dict[int, Objects]:
    """Picture id -> its objects."""
    read = split.read(np.arange(len(split)))
    return dict(zip(read.image_ids, read.objects, strict=True))
