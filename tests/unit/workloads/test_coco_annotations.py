"""Annotation files that are wrong: each is refused with what is wrong and where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.unit.workloads.coco_folder import (
    COCO,
    TRAINING,
    Change,
    annotation_file,
    edit,
    marked,
    options,
    write_folder,
)

from shardmark.core.errors import DataError
from shardmark.workloads.detection import coco_parsing as _coco_parsing


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHARDMARK_CACHE", str(tmp_path / "cache"))
    return write_folder(tmp_path / "data")


def annotation(**change: Any) -> Change:
    return lambda content: content["annotations"][1].update(change)


def without(key: str) -> Change:
    return lambda content: content["annotations"][1].pop(key)


def append(key: str, entry: object) -> Change:
    return lambda content: content[key].append(entry)


def replace(**change: Any) -> Change:
    return lambda content: content.update(change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("image_id"), "annotation 102: has no image_id"),
        (without("category_id"), "annotation 102: has no category_id"),
        (without("bbox"), "annotation 102: has no bbox"),
        (annotation(image_id="10"), "annotation 102: image_id is '10', not a whole number"),
        (annotation(category_id=1.5), "annotation 102: category_id is 1.5, not a whole number"),
        (annotation(id=None), "annotation None: id is None, not a whole number"),
        (annotation(image_id=11), "annotation 102: image_id 11 is not in 'images'"),
        (annotation(category_id=2), "annotation 102: category_id 2 is not in 'categories'"),
        (annotation(bbox=[1, 2, 3]), r"annotation 102: bbox is \[1, 2, 3\], not four numbers"),
        (annotation(bbox=["1", 2, 3, 4]), "not four numbers"),
        (annotation(bbox=7), "annotation 102: bbox is 7, not four numbers"),
        (annotation(area="big"), "annotation 102: area is 'big', not a number"),
        (annotation(segmentation=[1, 2]), "segmentation is neither polygons nor run lengths"),
        (annotation(segmentation=[[1] * 7]), "a polygon has an odd number of coordinates"),
        (annotation(segmentation=[["a"] * 6]), "segmentation is neither polygons nor run lengths"),
        (annotation(segmentation={"counts": [3]}), "neither polygons nor run lengths .'size'"),
        (annotation(segmentation={"size": [1], "counts": [3]}), r"size is not \[height, width\]"),
        (annotation(segmentation={"size": [8, 10], "counts": "ä"}), "neither polygons nor run"),
        (append("annotations", {}), "'annotations' is not a list of image_id, category_id and"),
        (append("annotations", 3), "'annotations' is not a list of image_id, category_id and"),
        (append("images", marked(1, 10, 1, [1, 2, 3, 4])), "'annotations' is not a list of"),
        (append("images", 3), "picture number 4 is no mapping"),
        (append("images", {}), "picture number 4: has no id"),
        (append("images", {"id": "7"}), "picture number 4: id is '7'"),
        (append("images", {"id": 7, "file_name": "", "width": 1, "height": 1}),
         "picture 7 needs a file_name, a width and a height: '', 1 x 1"),
        (append("images", {"id": 7, "file_name": "a", "width": 0, "height": 1}), "'a', 0 x 1"),
        (append("images", TRAINING["images"][0]), "two pictures have the id 30"),
        (append("categories", {"id": 1, "name": "x"}), "two categories have the id 1"),
        (append("categories", {"id": 5}), "category number 3: has no name"),
        (replace(categories=[]), "'categories' is empty"),
        (replace(images=[]), "'images' is empty"),
        (replace(images={}), "has no list 'images'"),
        (lambda content: content.pop("annotations"), "has no list 'annotations'"),
    ],
)  # fmt: skip
def test_wrong_annotations(folder: Path, change: Change, message: str) -> None:
    edit(folder, change)
    with pytest.raises(DataError, match=message) as caught:
        COCO.check(options(folder))
    assert caught.value.args[0] == str(annotation_file(folder, "train2017"))
    assert caught.value.args[2] == _coco_parsing.REMEDY


def test_several_annotations_of_unknown_pictures(folder: Path) -> None:
    edit(folder, lambda content: content["images"].pop(1))
    edit(folder, append("annotations", marked(107, 10, 1, [1, 1, 2, 2])))
    with pytest.raises(DataError, match=r"annotation 102: image_id 10 .* \(and 1 more annotations"):
        COCO.check(options(folder))


@pytest.mark.parametrize("content", [b"", b"{", b"[1, 2]", b"\xff\xfe", b"[" * 100_000])
def test_no_annotations_at_all(folder: Path, content: bytes) -> None:
    annotation_file(folder, "train2017").write_bytes(content)
    with pytest.raises(DataError, match=r"is not JSON \(|has no list 'images'"):
        COCO.check(options(folder))


def test_annotations_that_are_a_folder(folder: Path) -> None:
    annotation_file(folder, "val2017").unlink()
    annotation_file(folder, "val2017").mkdir()
    with pytest.raises(DataError, match=r"instances_val2017.json: cannot be read \("):
        COCO.check(options(folder))


def test_categories_of_the_splits_differ(folder: Path) -> None:
    edit(folder, lambda content: content["categories"][0].update(name="wolf"))
    edit(folder, append("categories", {"id": 7, "name": "x"}), "val2017")
    with pytest.raises(DataError) as caught:
        COCO.check(options(folder))
    assert caught.value.args[1:] == (
        "categories differ: 7 'x' only in instances_val2017.json, "
        "18 'dog' only in instances_val2017.json, 18 'wolf' only in instances_train2017.json",
        "make them agree",
    )


def test_nothing_to_learn(folder: Path) -> None:
    edit(folder, replace(annotations=[marked(1, 10, 1, [1, 1, 5, 5], iscrowd=1)]))
    for fields in ({}, {"pictures_without_objects": "drop"}):
        with pytest.raises(DataError, match="no object in it can be learned; annotate some"):
            COCO.check(options(folder, **fields))
