"""Annotation files of COCO: what is wrong in them is told, the rest is kept; masks."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faster_coco_eval.core import mask as coding
from tests.unit.workloads.coco_folder import (
    SQUARE,
    TRAINING,
    Change,
    Document,
    annotation_file,
    append,
    edit,
    load,
    marked,
    options,
    shown,
)

from shardmark.core.errors import DataError
from shardmark.workloads.datasets.files import cache_folder
from shardmark.workloads.detection import coco_file, data
from shardmark.workloads.detection.annotated import AnnotatedReading

MASKS = {"model": "maskrcnn_resnet50_fpn"}


def read(coco_folder: Path, *ids: int, **fields: Any) -> AnnotatedReading:
    return load(coco_folder, **fields).training.read(np.array(ids, np.int64))


def annotation(**change: Any) -> Change:
    return lambda content: content["annotations"][1].update(change)


def without(key: str) -> Change:
    return lambda content: content["annotations"][1].pop(key)


def replaced(**change: Any) -> Change:
    return lambda content: content.update(change)


@pytest.mark.parametrize(
    ("change", "where", "found"),
    [
        (without("image_id"), "annotations[1].image_id", "required"),
        (annotation(image_id="10"), "annotations[1].image_id", "'10'"),
        (annotation(category_id=1.5), "annotations[1].category_id", "1.5"),
        (annotation(image_id=11), "annotation 102", "11 is not in 'images'"),
        (annotation(category_id=2), "annotation 102", "2 is not in 'categories'"),
        (annotation(bbox=[1, 2, 3]), "annotations[1].bbox", "required"),
        (annotation(area="big"), "annotations[1].area", "'big'"),
        (append("images", {"id": 7, "file_name": "", "width": 1, "height": 1}), "[4].file", "''"),
        (append("images", {"id": 7, "file_name": "a", "width": 0, "height": 1}), "[4].width", "0"),
        (append("images", TRAINING["images"][0]), "two pictures", "30"),
        (append("categories", {"id": 1, "name": "x"}), "two categories", "1"),
        (replaced(categories=[]), "categories", "at least 1"),
        (replaced(images={}), "images", "array"),
        (lambda content: content.pop("annotations"), "annotations", "required"),
    ],
)
def test_wrong_annotations(coco_folder: Path, change: Change, where: str, found: str) -> None:
    edit(coco_folder, change)
    with pytest.raises(DataError) as caught:
        data.check(options(coco_folder))
    file, said, remedy = caught.value.args
    assert (file, remedy) == (str(annotation_file(coco_folder, "train2017")), coco_file.REMEDY)
    assert where in said
    assert found in said


@pytest.mark.parametrize("content", [b"", b"{", b"[1, 2]", b"\xff\xfe", b"[" * 100_000])
def test_no_annotations_at_all(coco_folder: Path, content: bytes) -> None:
    annotation_file(coco_folder, "train2017").write_bytes(content)
    with pytest.raises(DataError, match=r"the file: Invalid JSON|should be an object"):
        data.check(options(coco_folder))


def test_annotations_that_are_a_folder(coco_folder: Path) -> None:
    annotation_file(coco_folder, "val2017").unlink()
    annotation_file(coco_folder, "val2017").mkdir()
    with pytest.raises(DataError, match=r"instances_val2017.json: cannot be read \("):
        data.check(options(coco_folder))


def test_categories_of_the_splits_differ(coco_folder: Path) -> None:
    edit(coco_folder, lambda content: content["categories"][0].update(name="wolf"))
    edit(coco_folder, append("categories", {"id": 7, "name": "x"}), "val2017")
    with pytest.raises(DataError) as caught:
        data.check(options(coco_folder))
    said = caught.value.args[1]
    assert "7 'x' only in instances_val2017.json" in said
    assert "18 'wolf' only in instances_train2017.json" in said


def test_nothing_to_learn(coco_folder: Path) -> None:
    edit(coco_folder, replaced(annotations=[marked(1, 10, 1, [1, 1, 5, 5], iscrowd=1)]))
    for fields in ({}, {"pictures_without_objects": "drop"}):
        with pytest.raises(DataError, match="no object in it can be learned; annotate some"):
            data.check(options(coco_folder, **fields))


def entries() -> list[Path]:
    return sorted(path for path in cache_folder().glob("coco/*/*") if path.is_file())


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were parsed."""
    names: list[str] = []
    parse = coco_file._parsed

    def noted(file: Path, *, with_masks: bool) -> Any:
        names.append(file.name)
        return parse(file, with_masks=with_masks)

    monkeypatch.setattr(coco_file, "_parsed", noted)
    return names


def test_annotations_are_parsed_once(coco_folder: Path, parsed: list[str]) -> None:
    first = str(shown(load(coco_folder)))
    assert parsed == ["instances_train2017.json", "instances_val2017.json"]
    assert len(entries()) == 2
    assert str(shown(load(coco_folder))) == first
    assert len(parsed) == 2
    load(coco_folder, **MASKS)
    assert (len(parsed), len(entries())) == (4, 4), "masks are kept apart"


def test_changed_annotations_are_parsed_again(coco_folder: Path, parsed: list[str]) -> None:
    data.check(options(coco_folder))
    file = annotation_file(coco_folder, "train2017")
    stat = file.stat()
    edit(coco_folder, annotation(bbox=[1, 2, 4, 4]))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert shown(load(coco_folder))[10].boxes.tolist() == [[1, 2, 5, 6]]
    assert parsed[2:] == ["instances_train2017.json"]
    assert len(entries()) == 2, "the older entry is gone"


@pytest.mark.parametrize("damage", ["empty", "cut", "text"])
def test_damaged_entry_is_made_again(coco_folder: Path, parsed: list[str], damage: str) -> None:
    expected = str(shown(load(coco_folder)))
    for file in entries():
        content = {"empty": b"", "cut": file.read_bytes()[:-30], "text": b"what?"}[damage]
        file.write_bytes(content)
    assert str(shown(load(coco_folder))) == expected
    assert len(parsed) == 4
    load(coco_folder)
    assert len(parsed) == 4, "it was stored"


def test_cache_that_cannot_be_written(
    coco_folder: Path, parsed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (coco_folder / "file").write_text("")
    monkeypatch.setenv("SHARDMARK_CACHE", str(coco_folder / "file" / "cache"))
    assert len(shown(load(coco_folder))) == 4
    assert len(parsed) == 4, "in check and in load"


def test_nothing_unfinished_is_left(coco_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    assert len(shown(load(coco_folder))) == 4
    assert entries() == []


def test_place_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDMARK_CACHE", "~/own")
    assert cache_folder() == Path("~/own").expanduser()
    monkeypatch.delenv("SHARDMARK_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_folder() == Path("/somewhere/shardmark")


def with_mask(coco_folder: Path, segmentation: object) -> np.ndarray[Any, Any]:
    """The mask that picture 10 shows, (8, 10)."""
    edit(coco_folder, lambda c: c["annotations"][1].update(segmentation=segmentation))
    masks = read(coco_folder, 0, **MASKS).objects[0].masks
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


def test_masks_of_polygons(coco_folder: Path) -> None:
    expected = np.zeros((8, 10), np.uint8)
    expected[2:6, 2:6] = 1
    assert (with_mask(coco_folder, SQUARE) == expected).all()
    expected[6:8, 7:9] = 1
    apart = [[7, 6, 9, 6, 9, 8, 7, 8], *SQUARE, [0, 0, 1, 1]]  # the last has no area
    assert (with_mask(coco_folder, apart) == expected).all()
    assert not with_mask(coco_folder, [[0, 0, 1, 1]]).any()


@pytest.mark.parametrize("compressed", [True, False])
def test_masks_of_run_lengths(coco_folder: Path, compressed: bool) -> None:
    mask = np.random.default_rng(1).integers(0, 2, (8, 10), np.uint8)
    mask[0, 0] = 0
    assert (with_mask(coco_folder, written(mask, compressed=compressed)) == mask).all()


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
def test_wrong_masks(coco_folder: Path, segmentation: object, message: str) -> None:
    with pytest.raises(DataError, match=f"annotation 102 has {message}"):
        with_mask(coco_folder, segmentation)
    assert read(coco_folder, 0).image_ids == (10,), "nobody asks for masks"


@pytest.mark.parametrize("segmentation", [None, [], "absent"])
def test_objects_without_mask(coco_folder: Path, segmentation: object) -> None:
    def change(content: Document) -> None:
        content["annotations"][1]["segmentation"] = segmentation
        if segmentation == "absent":
            del content["annotations"][1]["segmentation"]

    edit(coco_folder, change)
    with pytest.raises(DataError) as caught:
        data.check(options(coco_folder, **MASKS))
    assert caught.value.args == (
        str(annotation_file(coco_folder, "train2017")),
        "annotation 102 has no segmentation, which maskrcnn_resnet50_fpn learns from",
        "add it, or choose a model without masks",
    )
    own = {"model": "torchvision.models.detection:ssd300_vgg16"}
    assert read(coco_folder, 0, **own).objects[0].masks is None, (
        "a model of one's own may not need them"
    )
    edit(coco_folder, lambda content: content["annotations"].pop(1))
    assert read(coco_folder, 1, **own).objects[0].masks is not None


def around(box: list[float]) -> list[float]:
    left, top, width, height = box
    right, bottom = left + width, top + height
    return [left, top, right, top, right, bottom, left, bottom]


def test_masks_follow_their_objects(coco_folder: Path) -> None:
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
        edit(coco_folder, replaced(annotations=objects), file)
        for found in shown(load(coco_folder, **MASKS), split).values():
            assert found.masks is not None
            for box, mask in zip(found.boxes, found.masks, strict=True):
                rows, columns = np.nonzero(coding.decode(mask))
                left, top, right, bottom = np.minimum(box, [10, 8, 10, 8]).astype(int)
                assert (rows.min(), rows.max() + 1) == (top, bottom)
                assert (columns.min(), columns.max() + 1) == (left, right)


def test_masks_are_those_of_pycocotools(coco_folder: Path) -> None:
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
    edit(coco_folder, replaced(annotations=objects))
    masks = read(coco_folder, 0, **MASKS).objects[0].masks
    assert masks is not None
    for polygon, mask in zip(polygons, masks, strict=True):
        expected = reference.merge(reference.frPyObjects(polygon, 8, 10))
        assert mask == expected, polygon
