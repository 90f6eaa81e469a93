"""COCO's layout: what is shown of it, what is refused, and its masks."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from faster_coco_eval.core import mask as coding
from PIL import Image

from shardmark.base.errors import DataError, InputError
from shardmark.extras.detection import coco_file, data
from shardmark.extras.detection.data import AnnotatedReading
from shardmark.ranks.workloads.datasets.files import cache_folder
from tests.unit.extras.detection.detection_data import (
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

SKIP = {"on_broken": "skip"}
MASKS = {"model": "maskrcnn_resnet50_fpn"}


def read(folder: Path, *ids: int, split: str = "training", **fields: Any) -> AnnotatedReading:
    reading: AnnotatedReading = getattr(load(folder, **fields), split).read(np.array(ids, np.int64))
    return reading


# Objects.


def test_training_data_are_sorted_and_clipped(coco_folder: Path) -> None:
    made = load(coco_folder)
    assert made.classes == ("ant", "dog", "z")
    by_id = shown(made.training)
    assert list(by_id) == [10, 20, 30, 40], "ascending"
    assert [len(objects) for objects in by_id.values()] == [1, 2, 0, 0]
    objects = by_id[20]
    assert objects.boxes.tolist() == [[1, 1, 5, 4], [6, 5, 10, 8]], "clipped"
    assert objects.labels.tolist() == [3, 2]
    assert objects.areas.tolist() == [7.5, 100], "the file's, or the box's"
    assert by_id[30].boxes.shape == (0, 4)
    assert objects.masks is None
    assert not objects.crowds.any()
    file = annotation_file(coco_folder, "train2017")
    assert made.notes == (f"{file}: boxes without area, not trained on: annotations 105",)
    dropped = load(coco_folder, pictures_without_objects="drop")
    assert list(shown(dropped.training)) == [10, 20]
    by_id = shown(dropped.validation)
    assert [len(objects) for objects in by_id.values()] == [0, 0, 0, 2], "validation shows all"
    assert by_id[40].boxes.tolist() == [[1, 1, 5, 4], [6, 5, 16, 15]], "not clipped"
    assert by_id[40].crowds.tolist() == [False, True]
    assert by_id[40].areas.tolist() == [12, 33]
    few = {"training_samples": 3, "pictures_without_objects": "drop"}
    with pytest.raises(InputError, match=r"workload.training_samples: found 3; coco has 2 at most"):
        data.check(options(coco_folder, **few))


@pytest.mark.parametrize(
    "box",
    [[2, 2, 0, 3], [2, 2, 3, -1], [-9, 2, 9, 3], [2, 2, 1e-5, 3], [float("nan"), 2, 3, 3],
     [-float("inf"), 2, float("inf"), 3], [2, 2, 1e300, float("inf")]],
)  # fmt: skip
def test_boxes_without_area_are_not_trained_on(coco_folder: Path, box: list[float]) -> None:
    edit(coco_folder, append("annotations", marked(106, 10, 1, box)))
    made = load(coco_folder)
    assert len(shown(made.training)[10]) == 1
    assert made.notes[0].endswith("annotations 106, 105")


# Folders and pictures.


@pytest.mark.parametrize(
    ("below", "where", "message"),
    [
        ("", "", "no such folder; expected annotations/instances_train2017.json"),
        ("annotations", "annotations", r"0 files instances_train\*.json; expected annotations/"),
        ("annotations/instances_train2017.json", "annotations", "it has instances_val2017.json"),
        ("train2017", "train2017", "no such folder for the images of instances_train2017.js"),
        ("val2017", "val2017", "no such folder"),
    ],
)
def test_wrong_layout_is_refused(coco_folder: Path, below: str, where: str, message: str) -> None:
    path = coco_folder / below
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(DataError, match=message) as caught:
        data.check(options(coco_folder))
    assert caught.value.args[0].endswith(str(coco_folder / where))


def test_other_years_and_subfolders_are_found(coco_folder: Path) -> None:
    file = annotation_file(coco_folder, "train2014")
    file.write_text("{}")
    with pytest.raises(DataError, match=r"instances_train2014.json: is not a folder; expected ann"):
        data.check(options(file))
    with pytest.raises(
        DataError, match=r"2 files .*it has instances_train2014.json, instances_train20"
    ):
        data.check(options(coco_folder))
    file.unlink()
    annotation_file(coco_folder, "train2017").rename(annotation_file(coco_folder, "train"))
    (coco_folder / "train2017").rename(coco_folder / "train")
    (coco_folder / "train" / "more").mkdir()
    (coco_folder / "train" / "020.png").rename(coco_folder / "train" / "more" / "ä 20.png")
    edit(coco_folder, lambda c: c["images"][3].update(file_name="more/ä 20.png"), "train")
    assert len(shown(load(coco_folder).training)[20]) == 2


@pytest.mark.parametrize("mode", ["L", "CMYK", "P", "RGB"])
def test_pictures_become_rgb(coco_folder: Path, mode: str) -> None:
    """EXIF turns nothing: annotations count the stored pixels."""
    file = coco_folder / "train2017" / "010.png"
    with Image.open(file) as opened:
        stored = opened.convert(mode)
    exif = Image.Exif()
    exif[0x0112] = 6
    # Formats are told by their content, as Pillow does.
    stored.save(file, "PNG" if mode == "P" else "JPEG", exif=exif)
    with Image.open(file) as opened:
        assert opened.mode == mode
        expected = np.array(opened.convert("RGB"))
    reading = read(coco_folder, 3, 0)
    assert (reading.sample_ids, reading.image_ids) == ((3, 0), (40, 10))
    picture = reading.pictures[1]
    assert torch.equal(picture, torch.from_numpy(expected).permute(2, 0, 1))
    picture.add_(1)  # it may be changed in place


def test_missing_pictures_are_refused_or_skipped(coco_folder: Path) -> None:
    missing = ("train2017/010.png", "train2017/030.png", "val2017/040.png")
    for name in missing:
        (coco_folder / name).unlink()
    with pytest.raises(DataError) as caught:
        data.check(options(coco_folder))
    where, what, remedy = caught.value.args
    assert where == str(coco_folder / "train2017")
    assert "2 of 4 images are missing: 010.png, 030.png" in what
    assert "workload.on_broken: skip" in remedy
    made = load(coco_folder, **SKIP)
    assert list(shown(made.training)) == [20, 40]
    assert list(shown(made.validation)) == [10, 20, 30]
    assert made.notes[1:] == tuple(f"{coco_folder / name}: no such file" for name in missing)
    for file in (coco_folder / "val2017").iterdir():
        file.unlink()
    with pytest.raises(DataError, match=r"val2017: has none of the images of instances_val2017"):
        data.check(options(coco_folder, **SKIP))


def test_unreadable_pictures_are_refused_or_replaced(coco_folder: Path) -> None:
    """Training goes on to the next one, validation leaves it out."""
    for split in ("train2017", "val2017"):
        (coco_folder / split / "040.png").write_bytes(b"no picture")
    Image.new("RGB", (8, 10)).save(coco_folder / "train2017" / "020.png")
    with pytest.raises(DataError, match=r"it is 8 x 10, but its annotations are for 10 x 8"):
        read(coco_folder, 1)
    reading = read(coco_folder, 0, 1, 3, **SKIP)
    assert (reading.sample_ids, reading.image_ids) == ((0, 2, 0), (10, 30, 10))
    assert [error.split(": ")[0][-7:] for error in reading.errors] == ["020.png", "040.png"]
    reading = read(coco_folder, 2, 3, split="validation", **SKIP)
    assert (reading.sample_ids, len(reading.pictures), len(reading.objects)) == ((2,), 1, 1)
    for file in (coco_folder / "train2017").iterdir():
        file.write_bytes(b"")
    with pytest.raises(DataError, match="train2017: has no readable image; add readable"):
        read(coco_folder, 0, **SKIP)


# Annotation files.


def annotation(**change: Any) -> Change:
    return lambda content: content["annotations"][1].update(change)


def replaced(**change: Any) -> Change:
    return lambda content: content.update(change)


@pytest.mark.parametrize(
    ("change", "where", "found"),
    [
        (lambda c: c["annotations"][1].pop("image_id"), "annotations[1].image_id", "required"),
        (annotation(image_id="10"), "annotations[1].image_id", "'10'"),
        (annotation(category_id=1.5), "annotations[1].category_id", "1.5"),
        (annotation(image_id=11), "annotation 102", "11 is not in 'images'"),
        (annotation(category_id=2), "annotation 102", "2 is not in 'categories'"),
        (annotation(bbox=[1, 2, 3]), "annotations[1].bbox", "required"),
        (annotation(area="big"), "annotations[1].area", "'big'"),
        (append("images", {"id": 7, "file_name": "", "width": 1, "height": 1}), "[4].file", "''"),
        (append("images", {"id": 7, "file_name": "a", "width": 0, "height": 1}), "[4].width", "0"),
        (append("images", TRAINING["images"][0]), "two images", "30"),
        (append("categories", {"id": 1, "name": "x"}), "two categories", "1"),
        (replaced(categories=[]), "categories", "at least 1"),
        (replaced(images={}), "images", "array"),
        (lambda content: content.pop("annotations"), "annotations", "required"),
    ],
)
def test_wrong_annotations_are_refused(
    coco_folder: Path, change: Change, where: str, found: str
) -> None:
    edit(coco_folder, change)
    with pytest.raises(DataError) as caught:
        data.check(options(coco_folder))
    file, said, remedy = caught.value.args
    assert (file, remedy) == (str(annotation_file(coco_folder, "train2017")), coco_file.REMEDY)
    assert where in said
    assert found in said


def folder_instead(file: Path) -> None:
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda file: file.write_bytes(b""), "the file: Invalid JSON"),
        (lambda file: file.write_bytes(b"[" * 100_000), "the file: Invalid JSON"),
        (lambda file: file.write_bytes(b"[1, 2]"), "should be an object"),
        (folder_instead, r"instances_train2017.json: cannot be read \("),
    ],
)
def test_unreadable_annotation_file_is_refused(
    coco_folder: Path, spoil: Callable[[Path], object], message: str
) -> None:
    spoil(annotation_file(coco_folder, "train2017"))
    with pytest.raises(DataError, match=message):
        data.check(options(coco_folder))


def test_different_categories_of_the_splits_are_refused(coco_folder: Path) -> None:
    edit(coco_folder, lambda content: content["categories"][0].update(name="wolf"))
    edit(coco_folder, append("categories", {"id": 7, "name": "x"}), "val2017")
    with pytest.raises(DataError) as caught:
        data.check(options(coco_folder))
    said = caught.value.args[1]
    assert "7 'x' only in instances_val2017.json" in said
    assert "18 'wolf' only in instances_train2017.json" in said


def test_annotations_without_objects_are_refused(coco_folder: Path) -> None:
    edit(coco_folder, replaced(annotations=[marked(1, 10, 1, [1, 1, 5, 5], iscrowd=1)]))
    for fields in ({}, {"pictures_without_objects": "drop"}):
        with pytest.raises(DataError, match="has no object to learn; add annotations"):
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
    first = str(shown(load(coco_folder).training))
    assert parsed == ["instances_train2017.json", "instances_val2017.json"]
    assert str(shown(load(coco_folder).training)) == first
    assert len(parsed) == len(entries()) == 2
    load(coco_folder, **MASKS)
    assert len(parsed) == len(entries()) == 4, "masks are kept apart"
    file = annotation_file(coco_folder, "train2017")
    stat = file.stat()
    edit(coco_folder, annotation(bbox=[1, 2, 4, 4]))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert shown(load(coco_folder).training)[10].boxes.tolist() == [[1, 2, 5, 6]]
    assert parsed[4:] == ["instances_train2017.json"]
    assert len(entries()) == 4, "the older entry is gone"


def test_damaged_cache_entry_is_replaced(coco_folder: Path, parsed: list[str]) -> None:
    expected = str(shown(load(coco_folder).training))
    first, second = entries()
    first.write_bytes(first.read_bytes()[:-30])
    second.write_bytes(b"what?")
    assert str(shown(load(coco_folder).training)) == expected
    assert len(parsed) == 4


def test_data_load_without_a_writable_cache(
    coco_folder: Path, parsed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (coco_folder / "file").write_text("")
    monkeypatch.setenv("SHARDMARK_CACHE", str(coco_folder / "file" / "cache"))
    assert len(shown(load(coco_folder).training)) == 4
    assert len(parsed) == 4, "in check and in load"


def test_variables_choose_the_folder_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDMARK_CACHE", "~/own")
    assert cache_folder() == Path("~/own").expanduser()
    monkeypatch.delenv("SHARDMARK_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_folder() == Path("/somewhere/shardmark")


# Masks.


def with_mask(coco_folder: Path, segmentation: object) -> np.ndarray[Any, Any]:
    """The mask that picture 10 shows, (8, 10)."""
    edit(coco_folder, annotation(segmentation=segmentation))
    masks = read(coco_folder, 0, **MASKS).objects[0].masks
    assert masks is not None
    assert isinstance(masks[0]["counts"], bytes)
    assert masks[0]["size"] == [8, 10]
    decoded: np.ndarray[Any, Any] = coding.decode(masks[0])
    return decoded


def test_polygons_become_masks(coco_folder: Path) -> None:
    expected = np.zeros((8, 10), np.uint8)
    expected[2:6, 2:6] = 1
    assert (with_mask(coco_folder, SQUARE) == expected).all()
    expected[6:8, 7:9] = 1
    apart = [[7, 6, 9, 6, 9, 8, 7, 8], *SQUARE, [0, 0, 1, 1]]  # the last has no area
    assert (with_mask(coco_folder, apart) == expected).all()
    assert not with_mask(coco_folder, [[0, 0, 1, 1]]).any()


def test_run_lengths_become_masks(coco_folder: Path) -> None:
    """Compressed, or column by column, first those outside."""
    mask = np.random.default_rng(1).integers(0, 2, (8, 10), np.uint8)
    mask[0, 0] = 0
    compressed: Document = coding.encode(np.asfortranarray(mask))
    compressed |= {"counts": compressed["counts"].decode()}
    flat = mask.ravel(order="F")
    changes = np.flatnonzero(np.diff(flat, prepend=0, append=1 - flat[-1])).tolist()
    plain = {"size": [8, 10], "counts": [b - a for a, b in pairwise([0, *changes])]}
    for written in (compressed, plain):
        assert (with_mask(coco_folder, written) == mask).all()


@pytest.mark.parametrize(
    ("segmentation", "message"),
    [
        ([[1, 2, 3, 4, 5, float("nan")]], "invalid polygons: a coordinate is not finite"),
        (
            {"size": [10, 8], "counts": [80]},
            "invalid run lengths: they belong to an image of another",
        ),
        ({"size": [8, 10], "counts": [79]}, "invalid run lengths: they do not sum to 80 pixels"),
        ({"size": [8, 10], "counts": [-1, 81]}, "invalid run lengths: they do not sum"),
        ({"size": [8, 10], "counts": "5:"}, "invalid run lengths: Invalid RLE mask"),
        ({"size": [8, 10], "counts": "garbage"}, "invalid run lengths: RLE string is malformed"),
    ],
)
def test_wrong_masks_are_refused(coco_folder: Path, segmentation: object, message: str) -> None:
    with pytest.raises(DataError, match=f"annotation 102 has {message}"):
        with_mask(coco_folder, segmentation)
    assert read(coco_folder, 0).image_ids == (10,), "nobody asks for masks"


@pytest.mark.parametrize("segmentation", [None, []])
def test_objects_without_mask_are_refused_by_models_that_need_masks(
    coco_folder: Path, segmentation: object
) -> None:
    edit(coco_folder, annotation(segmentation=segmentation))
    with pytest.raises(DataError, match="annotation 102 has no segmentation, which maskrcnn_resn"):
        data.check(options(coco_folder, **MASKS))
    own = {"model": "torchvision.models.detection:ssd300_vgg16"}
    assert read(coco_folder, 0, **own).objects[0].masks is None, "a user's own may not need them"
    edit(coco_folder, lambda content: content["annotations"].pop(1))
    assert read(coco_folder, 1, **own).objects[0].masks is not None


def test_masks_follow_their_objects(coco_folder: Path) -> None:
    """The file's objects are not in the order of its pictures, and some are not shown."""
    drawn = np.random.default_rng(2)
    for split, file in (("training", "train2017"), ("validation", "val2017")):
        boxes = drawn.integers(1, 5, (40, 4)).tolist()
        objects = [
            marked(n, (10, 20, 30, 40)[n * 7 % 4], 1, box, iscrowd=n % 2)
            for n, box in enumerate(boxes)
        ]
        edit(coco_folder, replaced(annotations=objects), file)
        for found in shown(getattr(load(coco_folder, **MASKS), split)).values():
            assert found.masks is not None
            for box, mask in zip(found.boxes, found.masks, strict=True):
                rows, columns = np.nonzero(coding.decode(mask))
                left, top, right, bottom = np.minimum(box, [10, 8, 10, 8]).astype(int)
                assert (rows.min(), rows.max() + 1) == (top, bottom)
                assert (columns.min(), columns.max() + 1) == (left, right)
