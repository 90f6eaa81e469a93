"""A tiny data set in COCO's layout, with one of each oddity."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from shardmark.workloads.detection.coco import AnnotatedPictures

from shardmark.workloads.detection import data
from shardmark.workloads.detection.annotated import Objects
from shardmark.workloads.detection.options import DetectionOptions

SQUARE = [[2, 2, 6, 2, 6, 6, 2, 6]]
Document = dict[str, Any]
Change = Callable[[Document], None]


def marked(number: int, picture: int, category: int, box: list[float], **more: Any) -> Document:
    entry = {"id": number, "image_id": picture, "category_id": category, "bbox": box}
    return entry | {"iscrowd": 0, "segmentation": SQUARE} | more


def document(*annotations: Document) -> Document:
    """Four pictures 10 wide and 8 high, not sorted, and three categories with gaps between."""
    return {
        "images": [
            {"id": number, "file_name": f"{number:03}.png", "width": 10, "height": 8}
            for number in (30, 10, 40, 20)
        ],
        "categories": [{"id": n, "name": name} for n, name in ((18, "dog"), (1, "ant"), (90, "z"))],
        "annotations": list(annotations),
    }


TRAINING = document(
    marked(101, 20, 90, [1, 1, 4, 3], area=7.5),
    marked(102, 10, 1, [2, 2, 4, 4]),
    marked(103, 20, 18, [6, 5, 10, 10]),  # reaches over the edges
    marked(104, 30, 18, [0, 0, 5, 5], iscrowd=1),
    marked(105, 20, 18, [10, 2, 3, 3]),  # outside
)
VALIDATION = document(
    marked(201, 40, 18, [1, 1, 4, 3]),
    marked(202, 40, 18, [6, 5, 10, 10], iscrowd=1, area=33),
)


def write_folder(root: Path) -> Path:
    """A data set of four pictures in each split."""
    drawn = np.random.default_rng(0)
    (root / "annotations").mkdir(parents=True)
    for split, content in (("train2017", TRAINING), ("val2017", VALIDATION)):
        (root / split).mkdir()
        for picture in content["images"]:
            pixels = drawn.integers(0, 256, (8, 10, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / split / picture["file_name"])
        annotation_file(root, split).write_text(json.dumps(content))
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
    return DetectionOptions.model_validate({"dataset": "coco", "data_dir": str(folder)} | fields)


def load(folder: Path, **fields: Any) -> AnnotatedPictures:
    data.check(options(folder, **fields))
    return data.load(options(folder, **fields), 0)


def shown(data: AnnotatedPictures, split: str = "training") -> dict[int, Objects]:
    """Picture id -> its objects."""
    source = getattr(data, split)
    read = source.read(np.arange(len(source)))
    return dict(zip(read.image_ids, read.objects, strict=True))
