"""COCO's layout: what is shown of it, which folders are refused, and pictures that are broken."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.unit.workloads.coco_folder import (
    annotation_file,
    append,
    edit,
    load,
    marked,
    options,
    shown,
)

from shardmark.core.errors import DataError, InputError
from shardmark.workloads.detection import data
from shardmark.workloads.detection.annotated import AnnotatedReading

COCO_MINI = Path(__file__).parents[4] / "shared" / "data" / "coco-mini"
SKIP = {"on_broken": "skip"}


def read(folder: Path, *ids: int, split: str = "training", **fields: Any) -> AnnotatedReading:
    reading: AnnotatedReading = getattr(load(folder, **fields), split).read(np.array(ids, np.int64))
    return reading


# Objects.


def test_training_shows_what_can_be_learned(coco_folder: Path) -> None:
    made = load(coco_folder)
    assert made.classes == ("ant", "dog", "z")
    by_id = shown(made)
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
    assert list(shown(load(coco_folder, pictures_without_objects="drop"))) == [10, 20]


def test_validation_shows_everything(coco_folder: Path) -> None:
    by_id = shown(load(coco_folder, pictures_without_objects="drop"), "validation")
    assert [len(objects) for objects in by_id.values()] == [0, 0, 0, 2]
    assert by_id[40].boxes.tolist() == [[1, 1, 5, 4], [6, 5, 16, 15]], "not clipped"
    assert by_id[40].crowds.tolist() == [False, True]
    assert by_id[40].areas.tolist() == [12, 33]


@pytest.mark.parametrize(
    "box",
    [[2, 2, 0, 3], [2, 2, 3, -1], [-9, 2, 9, 3], [2, 2, 1e-5, 3], [float("nan"), 2, 3, 3],
     [-float("inf"), 2, float("inf"), 3], [2, 2, 1e300, float("inf")]],
)  # fmt: skip
def test_boxes_without_area_are_not_trained_on(coco_folder: Path, box: list[float]) -> None:
    edit(coco_folder, append("annotations", marked(106, 10, 1, box)))
    made = load(coco_folder)
    assert len(shown(made)[10]) == 1
    assert made.notes[0].endswith("annotations 106, 105")
    edit(coco_folder, append("annotations", marked(203, 10, 1, box)), "val2017")
    assert len(shown(load(coco_folder), "validation")[10]) == 1


def test_subset(coco_folder: Path) -> None:
    made = load(coco_folder, training_samples=2, validation_samples=1)
    assert (len(made.training), len(made.validation)) == (2, 1)
    assert len(load(coco_folder, training_samples=4).training) == 4
    dropped = {"training_samples": 3, "pictures_without_objects": "drop"}
    with pytest.raises(InputError, match=r"workload.training_samples: found 3; coco has 2 at most"):
        data.check(options(coco_folder, **dropped))


# Folders.


@pytest.mark.parametrize(
    ("below", "where", "message"),
    [
        ("", "", "no such folder; expected annotations/instances_train2017.json"),
        ("annotations", "annotations", r"no instances_train\*.json there; expected annotations/"),
        ("annotations/instances_train2017.json", "annotations",
         r"no instances_train\*.json there, only instances_val2017.json; expected"),
        ("annotations/instances_val2017.json", "annotations", r"no instances_val\*.json there"),
        ("train2017", "train2017", "no such folder; it has the pictures of instances_train2017.js"),
        ("val2017", "val2017", "no such folder"),
    ],
)  # fmt: skip
def test_wrong_layout(coco_folder: Path, below: str, where: str, message: str) -> None:
    path = coco_folder / below
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    for call in (data.check, lambda chosen: data.load(chosen, 0)):
        with pytest.raises(DataError, match=message) as caught:
            call(options(coco_folder))
        assert caught.value.args[0] == str(coco_folder / where)


def test_file_in_the_place_of_the_folder_and_two_annotation_files(coco_folder: Path) -> None:
    file = annotation_file(coco_folder, "train2014")
    file.write_text("{}")
    with pytest.raises(DataError, match=r"instances_train2014.json: is not a folder; expected ann"):
        data.check(options(file))
    with pytest.raises(DataError, match=r"2 files .*: instances_train2014.*leave one of them"):
        data.check(options(coco_folder))


def test_another_year_and_subfolders(coco_folder: Path) -> None:
    annotation_file(coco_folder, "train2017").rename(annotation_file(coco_folder, "train"))
    (coco_folder / "train2017").rename(coco_folder / "train")
    (coco_folder / "train" / "more").mkdir()
    (coco_folder / "train" / "020.png").rename(coco_folder / "train" / "more" / "ä 20.png")
    edit(coco_folder, lambda c: c["images"][3].update(file_name="more/ä 20.png"), "train")
    assert len(shown(load(coco_folder))[20]) == 2


@pytest.mark.skipif(not COCO_MINI.is_dir(), reason=f"needs {COCO_MINI}")
@pytest.mark.usefixtures("_own_cache")
def test_coco_mini() -> None:
    made = load(COCO_MINI, model="maskrcnn_resnet50_fpn")
    assert (len(made.training), len(made.validation), len(made.classes)) == (80, 79, 80)
    assert (made.classes[0], made.classes[-1]) == ("person", "toothbrush")
    training, validation = shown(made), shown(made, "validation")
    assert sum(map(len, training.values())) == 739 - 8, "eight crowds"
    assert sum(map(len, validation.values())) == 624
    assert sum(objects.crowds.sum() for objects in validation.values()) == 5
    assert all(len(objects.masks or ()) == len(objects) for objects in training.values())


# Pictures.


def test_pictures_as_they_are_stored(coco_folder: Path) -> None:
    reading = read(coco_folder, 3, 0)
    assert (reading.sample_ids, reading.image_ids) == ((3, 0), (40, 10))
    for picture, name in zip(reading.pictures, ("040.png", "010.png"), strict=True):
        with Image.open(coco_folder / "train2017" / name) as opened:
            expected = torch.from_numpy(np.array(opened)).permute(2, 0, 1)
        assert picture.dtype == torch.uint8
        assert torch.equal(picture, expected)
    source = load(coco_folder).training.select(np.array([1, 3])).select(np.array([1, 0]))
    reading = source.read(np.array([1]))
    assert (len(source), reading.sample_ids, reading.image_ids) == (2, (1,), (20,))
    assert source.read(np.array([], np.int64)).pictures == ()


@pytest.mark.parametrize("mode", ["L", "CMYK", "RGBA", "P", "1", "RGB"])
def test_other_modes_become_rgb(coco_folder: Path, mode: str) -> None:
    """EXIF turns nothing: annotations count the stored pixels."""
    file = coco_folder / "train2017" / "010.png"
    with Image.open(file) as opened:
        stored = opened.convert(mode)
    exif = Image.Exif()
    exif[0x0112] = 6
    # Formats are told by their content, as Pillow does.
    stored.save(file, "JPEG" if mode in ("L", "CMYK", "RGB") else "PNG", exif=exif)
    with Image.open(file) as opened:
        assert opened.mode == mode
        expected = np.array(opened.convert("RGB"))
    picture = read(coco_folder, 0).pictures[0]
    assert picture.shape == (3, 8, 10)
    assert torch.equal(picture, torch.from_numpy(expected).permute(2, 0, 1))
    picture.add_(1)  # it may be changed in place


def test_missing_pictures(coco_folder: Path) -> None:
    missing = ("train2017/010.png", "train2017/030.png", "val2017/040.png")
    for name in missing:
        (coco_folder / name).unlink()
    with pytest.raises(DataError) as caught:
        data.check(options(coco_folder))
    where, what, remedy = caught.value.args
    assert where == str(coco_folder / "train2017")
    assert "2 of 4 pictures are missing: 010.png, 030.png" in what
    assert "workload.on_broken: skip" in remedy
    made = load(coco_folder, **SKIP)
    assert list(shown(made)) == [20, 40]
    assert list(shown(made, "validation")) == [10, 20, 30]
    assert made.notes[1:] == tuple(f"{coco_folder / name}: no such file" for name in missing)


@pytest.mark.parametrize("fields", [{}, SKIP])
def test_all_pictures_missing(coco_folder: Path, fields: dict[str, Any]) -> None:
    for file in (coco_folder / "val2017").iterdir():
        file.unlink()
    with pytest.raises(DataError, match=r"val2017: has none of the pictures of instances_val2017"):
        data.check(options(coco_folder, **fields))


@pytest.mark.parametrize("content", [b"", b"no picture", None])
def test_unreadable_picture(coco_folder: Path, content: bytes | None) -> None:
    files = [coco_folder / split / "020.png" for split in ("train2017", "val2017")]
    for file, split in zip(files, ("training", "validation"), strict=True):
        file.write_bytes(file.read_bytes()[:60] if content is None else content)
        with pytest.raises(DataError, match=rf"{file}: cannot be read .*workload.on_broken: skip"):
            read(coco_folder, 1, split=split)
    reading = read(coco_folder, 0, 1, **SKIP)
    assert (reading.sample_ids, reading.image_ids) == ((0, 2), (10, 30)), "the next takes its place"
    (error,) = reading.errors
    assert error.startswith(f"{files[0]}: cannot be read (")
    reading = read(coco_folder, 0, 1, 2, split="validation", **SKIP)
    assert (reading.sample_ids, reading.image_ids) == ((0, 2), (10, 30)), "it is left out"
    assert len(reading.pictures) == len(reading.objects) == 2


def test_last_picture_is_followed_by_the_first(coco_folder: Path) -> None:
    (coco_folder / "train2017" / "040.png").write_bytes(b"")
    assert read(coco_folder, 3, **SKIP).image_ids == (10,)
    for file in (coco_folder / "train2017").iterdir():
        file.write_bytes(b"")
    with pytest.raises(DataError, match="train2017: no picture can be read; put readable"):
        read(coco_folder, 0, **SKIP)


def test_picture_of_another_size(coco_folder: Path) -> None:
    Image.new("RGB", (8, 10)).save(coco_folder / "train2017" / "010.png")
    with pytest.raises(DataError, match=r"it is 8 x 10 and its annotations are of 10 x 8"):
        read(coco_folder, 0)
    assert read(coco_folder, 0, **SKIP).image_ids == (20,)
