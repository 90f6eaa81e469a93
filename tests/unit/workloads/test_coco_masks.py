"""Masks of COCO's annotations, however they are written."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faster_coco_eval.core import mask as coding
from tests.unit.workloads.coco_folder import (
    COCO,
    SQUARE,
    Change,
    Document,
    annotation_file,
    edit,
    load,
    marked,
    options,
    shown,
    write_folder,
)

from shardmark.core.errors import DataError
from shardmark.workloads.detection.annotated import AnnotatedReading

MASKS = {"model": "maskrcnn_resnet50_fpn"}
SKIP = {"on_broken": "skip"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHARDMARK_CACHE", str(tmp_path / "cache"))
    return write_folder(tmp_path / "data")


def read(folder: Path, *ids: int, split: str = "training", **fields: Any) -> AnnotatedReading:
    reading: AnnotatedReading = getattr(load(folder, **fields), split).read(np.array(ids, np.int64))
    return reading


def with_mask(folder: Path, segmentation: object) -> np.ndarray[Any, Any]:
    """The mask that picture 10 shows, (8, 10)."""
    edit(folder, lambda c: c["annotations"][1].update(segmentation=segmentation))
    masks = read(folder, 0, **MASKS).objects[0].masks
    assert masks is not None
    assert isinstance(masks[0]["counts"], bytes)
    assert masks[0]["size"] == [8, 10]
    decoded: np.ndarray[Any, Any] = coding.decode(masks[0])
    return decoded


def written(mask: np.ndarray[Any, Any], *, compressed: bool) -> Document:
    """As annotation files have run lengths: column by column, first those outside."""
    flat = mask.ravel(order="F")
    changes = np.flatnonzero(np.diff(flat, prepend=0, append=1 - flat[-1]))
    counts = [b - a for a, b in pairwise([0, *changes.tolist()])]
    if not compressed:
        return {"size": list(mask.shape), "counts": counts}
    found: Document = coding.encode(np.asfortranarray(mask))
    return found | {"counts": found["counts"].decode()}


def test_masks_of_polygons(folder: Path) -> None:
    expected = np.zeros((8, 10), np.uint8)
    expected[2:6, 2:6] = 1
    assert (with_mask(folder, SQUARE) == expected).all()
    expected[6:8, 7:9] = 1
    apart = [[7, 6, 9, 6, 9, 8, 7, 8], *SQUARE, [0, 0, 1, 1]]  # the last has no area
    assert (with_mask(folder, apart) == expected).all()
    assert not with_mask(folder, [[0, 0, 1, 1]]).any()


@pytest.mark.parametrize("compressed", [True, False])
def test_masks_of_run_lengths(folder: Path, compressed: bool) -> None:
    mask = np.random.default_rng(1).integers(0, 2, (8, 10), np.uint8)
    mask[0, 0] = 0
    assert (with_mask(folder, written(mask, compressed=compressed)) == mask).all()


@pytest.mark.parametrize(
    ("segmentation", "message"),
    [
        ([[1, 2, 3, 4, 5, float("nan")]], "wrong polygons: a coordinate is not finite"),
        ({"size": [10, 8], "counts": [80]}, "wrong run lengths: they are of a picture of another"),
        ({"size": [8, 10], "counts": [79]}, "wrong run lengths: they do not add up to 80 pixels"),
        ({"size": [8, 10], "counts": [-1, 81]}, "wrong run lengths: they do not add up"),
        ({"size": [8, 10], "counts": "5:"}, "wrong run lengths: Invalid RLE mask"),
        ({"size": [8, 10], "counts": "garbage"}, "wrong run lengths: RLE string is malformed"),
    ],
)
def test_wrong_masks(folder: Path, segmentation: object, message: str) -> None:
    with pytest.raises(DataError, match=f"annotation 102 has {message}"):
        with_mask(folder, segmentation)
    assert read(folder, 0, **MASKS, **SKIP).image_ids == (20,)
    assert read(folder, 0).image_ids == (10,), "nobody asks for masks"


@pytest.mark.parametrize("segmentation", [None, [], "absent"])
def test_objects_without_mask(folder: Path, segmentation: object) -> None:
    def change(content: Document) -> None:
        content["annotations"][1]["segmentation"] = segmentation
        if segmentation == "absent":
            del content["annotations"][1]["segmentation"]

    edit(folder, change)
    with pytest.raises(DataError) as caught:
        COCO.check(options(folder, **MASKS))
    assert caught.value.args == (
        str(annotation_file(folder, "train2017")),
        "annotation 102 has no segmentation, which maskrcnn_resnet50_fpn learns from",
        "add it, or choose a model without masks",
    )
    own = {"model": "torchvision.models.detection:ssd300_vgg16"}
    assert read(folder, 0, **own).objects[0].masks is None, "a model of one's own may not need them"
    edit(folder, lambda content: content["annotations"].pop(1))
    assert read(folder, 1, **own).objects[0].masks is not None


def replaced(annotations: list[Document]) -> Change:
    return lambda content: content.update(annotations=annotations)


def around(box: list[float]) -> list[float]:
    left, top, width, height = box
    right, bottom = left + width, top + height
    return [left, top, right, top, right, bottom, left, bottom]


def test_masks_follow_their_objects(folder: Path) -> None:
    """The file's objects are not in the order of its pictures, and some are not shown."""
    drawn = np.random.default_rng(2)
    for split, file in (("training", "train2017"), ("validation", "val2017")):
        boxes = drawn.integers(1, 5, (40, 4)).tolist()
        objects = [
            marked(
                n, (10, 20, 30, 40)[n * 7 % 4], 1, box, iscrowd=n % 2, segmentation=[around(box)]
            )
            for n, box in enumerate(boxes)
        ]
        edit(folder, replaced(objects), file)
        for found in shown(load(folder, **MASKS), split).values():
            assert found.masks is not None
            for box, mask in zip(found.boxes, found.masks, strict=True):
                rows, columns = np.nonzero(coding.decode(mask))
                left, top, right, bottom = np.minimum(box, [10, 8, 10, 8]).astype(int)
                assert (rows.min(), rows.max() + 1) == (top, bottom)
                assert (columns.min(), columns.max() + 1) == (left, right)


def test_masks_are_those_of_pycocotools(folder: Path) -> None:
    reference = pytest.importorskip("pycocotools.mask")
    drawn = np.random.default_rng(3)
    polygons = [
        [(drawn.random((points, 2)) * (11, 9)).round(2).ravel().tolist() for _ in range(count)]
        for points, count in zip(drawn.integers(3, 9, 20), drawn.integers(1, 4, 20), strict=True)
    ]
    objects = [
        marked(number, 10, 1, [1, 1, 5, 5], segmentation=polygon)
        for number, polygon in enumerate(polygons)
    ]
    edit(folder, replaced(objects))
    masks = read(folder, 0, **MASKS).objects[0].masks
    assert masks is not None
    for polygon, mask in zip(polygons, masks, strict=True):
        expected = reference.merge(reference.frPyObjects(polygon, 8, 10))
        assert mask == expected, polygon
