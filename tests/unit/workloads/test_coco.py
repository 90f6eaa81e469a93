"""COCO's layout: what is shown of it, and which folders are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.unit.workloads.coco_folder import (
    COCO,
    annotation_file,
    edit,
    load,
    marked,
    options,
    shown,
    write_folder,
)

from shardmark.core.errors import DataError, InputError

COCO_MINI = Path(__file__).parents[4] / "shared" / "data" / "coco-mini"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHARDMARK_CACHE", str(tmp_path / "cache"))
    return write_folder(tmp_path / "data")


def test_training_shows_what_can_be_learned(folder: Path) -> None:
    data = load(folder)
    objects = shown(data)
    assert list(objects) == [10, 20, 30, 40], "ascending"
    assert [len(found) for found in objects.values()] == [1, 2, 0, 0]
    assert objects[20].boxes.tolist() == [[1, 1, 5, 4], [6, 5, 10, 8]], "clipped"
    assert objects[20].labels.tolist() == [3, 2]
    assert objects[20].areas.tolist() == [7.5, 100], "the file's, or the box's"
    assert objects[30].boxes.shape == (0, 4)
    assert objects[30].boxes.dtype == np.float32
    assert objects[20].masks is None
    assert not objects[20].crowds.any()
    file = annotation_file(folder, "train2017")
    assert data.notes == (f"{file}: boxes without area, not trained on: annotations 105",)


def test_validation_shows_everything(folder: Path) -> None:
    objects = shown(load(folder), "validation")
    assert [len(found) for found in objects.values()] == [0, 0, 0, 2]
    assert objects[40].boxes.tolist() == [[1, 1, 5, 4], [6, 5, 16, 15]], "not clipped"
    assert objects[40].crowds.tolist() == [False, True]
    assert objects[40].areas.tolist() == [12, 33]


def test_sparse_categories(folder: Path) -> None:
    data = load(folder)
    assert (data.classes, data.category_ids) == (("ant", "dog", "z"), (1, 18, 90))


def test_pictures_without_objects_can_be_dropped(folder: Path) -> None:
    data = load(folder, pictures_without_objects="drop")
    assert list(shown(data)) == [10, 20], "30 shows a crowd only"
    assert len(data.validation) == 4


@pytest.mark.parametrize(
    "box",
    [[2, 2, 0, 3], [2, 2, 3, -1], [-9, 2, 9, 3], [2, 2, 1e-5, 3], [float("nan"), 2, 3, 3],
     [-float("inf"), 2, float("inf"), 3], [2, 2, 1e300, float("inf")]],
)  # fmt: skip
def test_boxes_without_area_are_not_trained_on(folder: Path, box: list[float]) -> None:
    edit(folder, lambda content: content["annotations"].append(marked(106, 10, 1, box)))
    data = load(folder)
    assert len(shown(data)[10]) == 1
    assert data.notes[0].endswith("annotations 106, 105")
    edit(folder, lambda c: c["annotations"].append(marked(203, 10, 1, box)), "val2017")
    assert len(shown(load(folder), "validation")[10]) == 1


def test_notes_name_a_few(folder: Path) -> None:
    flat = [marked(number, 40, 1, [1, 1, 0, 1]) for number in range(9)]
    edit(folder, lambda content: content["annotations"].extend(flat))
    assert load(folder).notes[0].endswith("annotations 105, 0, 1, 2, 3 and 5 more")


def test_subset(folder: Path) -> None:
    data = load(folder, training_samples=2, validation_samples=1)
    assert (len(data.training), len(data.validation)) == (2, 1)
    assert len(load(folder, training_samples=4).training) == 4
    for fields, message in (
        ({"training_samples": 5}, "workload.training_samples: found 5; coco has 4 at most"),
        ({"validation_samples": 5}, "workload.validation_samples: found 5; coco has 4 at most"),
        ({"training_samples": 3, "pictures_without_objects": "drop"}, "found 3; coco has 2"),
    ):
        with pytest.raises(InputError, match=message):
            COCO.check(options(folder, **fields))


def remove(path: Path) -> None:
    for below in sorted(path.rglob("*"), reverse=True):
        below.unlink() if below.is_file() else below.rmdir()
    path.unlink() if path.is_file() else path.rmdir()


@pytest.mark.parametrize(
    ("below", "where", "message"),
    [
        ("", "", "no such folder; expected annotations/instances_train2017.json"),
        ("annotations", "annotations", r"no instances_train\*.json there; expected annotations/"),
        ("annotations/instances_train2017.json", "annotations",
         r"no instances_train\*.json there, only instances_val2017.json; expected"),
        ("annotations/instances_val2017.json", "annotations", r"no instances_val\*.json there"),
        ("train2017", "train2017",
         "no such folder; it has the pictures of instances_train2017.json; expected"),
        ("val2017", "val2017", "no such folder"),
    ],
)  # fmt: skip
def test_wrong_layout(folder: Path, below: str, where: str, message: str) -> None:
    remove(folder / below)
    for call in (lambda: COCO.check(options(folder)), lambda: COCO.load(options(folder), 0)):
        with pytest.raises(DataError, match=message) as caught:
            call()
        assert caught.value.args[0] == str(folder / where)


def test_file_in_the_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="file: is not a folder; expected annotations/"):
        COCO.check(options(tmp_path / "file"))


def test_two_annotation_files(folder: Path) -> None:
    annotation_file(folder, "train2014").write_text("{}")
    with pytest.raises(
        DataError, match=r"2 files instances_train\*.json: instances_train2014"
    ) as e:
        COCO.check(options(folder))
    assert e.value.args[2] == "leave one of them there"


def test_another_year_and_subfolders(folder: Path) -> None:
    annotation_file(folder, "train2017").rename(annotation_file(folder, "train"))
    (folder / "train2017").rename(folder / "train")
    (folder / "train" / "more").mkdir()
    (folder / "train" / "020.png").rename(folder / "train" / "more" / "ä 20.png")
    edit(folder, lambda c: c["images"][3].update(file_name="more/ä 20.png"), "train")
    assert len(shown(load(folder))[20]) == 2


@pytest.mark.skipif(not COCO_MINI.is_dir(), reason=f"needs {COCO_MINI}")
def test_coco_mini(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDMARK_CACHE", str(tmp_path))
    data = load(COCO_MINI, model="maskrcnn_resnet50_fpn")
    training, validation = shown(data), shown(data, "validation")
    assert (len(training), len(validation), len(data.classes)) == (80, 79, 80)
    assert (data.classes[0], data.classes[-1], data.category_ids[-1]) == (
        "person",
        "toothbrush",
        90,
    )
    assert sum(map(len, training.values())) == 739 - 8, "eight crowds"
    assert sum(map(len, validation.values())) == 624
    assert sum(objects.crowds.sum() for objects in validation.values()) == 5
    read = data.training.read(np.array([0]))
    assert (read.pictures[0].shape[0], read.pictures[0].dtype) == (3, torch.uint8)
    assert read.objects[0].masks is not None
    assert len(read.objects[0].masks) == len(read.objects[0])
