"""The embedded detection data: the same everywhere, rightly marked, and made all or not at all."""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from faster_coco_eval.core import mask as coco_mask
from PIL import Image

from shardmark.base.errors import DataError
from shardmark.extras.detection import data, digits_detection
from shardmark.extras.detection.digits_detection import CANVAS_SIZE, CATEGORY_IDS, make
from shardmark.extras.detection.options import DetectionOptions
from shardmark.ranks.workloads import check_data
from shardmark.ranks.workloads.datasets.digits import read_splits
from tests.unit.extras.detection.detection_data import SPLITS, annotation_file

if TYPE_CHECKING:
    from numpy.typing import NDArray

COUNTS = dict(zip(SPLITS, (100, 30), strict=True))
DIGEST = "5ca844b3e35a16b525987a81803ab4b8982cd2cba24a5ccb727e4d4e05dc8303"
"""Digest of the first pictures and annotations; another digest is another version of the data."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "digits"
    make(folder, training=COUNTS["train2017"], validation=COUNTS["val2017"])
    return folder


def few(folder: Path) -> None:
    make(folder, training=2, validation=1)


def annotated(folder: Path, split: str = "train2017") -> dict[str, Any]:
    content: dict[str, Any] = json.loads(annotation_file(folder, split).read_text())
    return content


def pixels(path: Path) -> NDArray[np.uint8]:
    with Image.open(path) as picture:
        return np.asarray(picture.convert("RGB"))


def test_data_set_has_the_recorded_digest(made: Path) -> None:
    """Pixels and annotations; how PNG packs them is zlib's affair."""
    digest = hashlib.sha256()
    for split in COUNTS:
        content = annotated(made, split)
        digest.update(json.dumps(content, sort_keys=True).encode())
        for image in content["images"]:
            digest.update(pixels(made / split / image["file_name"]).tobytes())
    assert digest.hexdigest() == DIGEST, "another data set needs another VERSION"


def test_masks_boxes_and_areas_agree_and_all_kinds_occur(made: Path) -> None:
    """Pictures without digits, with one and with several, every class, and crowds."""
    content = annotated(made)
    assert len(content["images"]) == len(list((made / "train2017").iterdir())) == 100
    names = {category["id"]: category["name"] for category in content["categories"]}
    assert names == dict(zip(CATEGORY_IDS, "0123456789", strict=True))
    marks = content["annotations"]
    assert len({mark["id"] for mark in marks}) == len(marks)
    for mark in marks:
        packed = coco_mask.frPyObjects(mark["segmentation"], CANVAS_SIZE, CANVAS_SIZE)
        rows, columns = np.nonzero(coco_mask.decode(packed))
        left, top, width, height = mark["bbox"]
        assert (left, top) == (columns.min(), rows.min())
        assert (left + width, top + height) == (columns.max() + 1, rows.max() + 1)
        assert mark["area"] == len(rows) > 50
    counts = [sum(m["image_id"] == image["id"] for m in marks) for image in content["images"]]
    assert {0, 1, 2, 3, 4, 5} <= set(counts)
    assert {mark["category_id"] for mark in marks} == set(CATEGORY_IDS)
    assert 0 < sum(mark["iscrowd"] for mark in marks) < len(content["images"]) / 20


def test_each_split_shows_its_own_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No validation digit is a training digit."""
    splits = read_splits()
    training, validation = ({digit.tobytes() for digit in pictures} for pictures, _ in splits)
    assert not training & validation
    zero, other = (
        (pictures[at : at + 1], labels[at : at + 1]) for at, (pictures, labels) in enumerate(splits)
    )
    assert zero[1] != other[1]
    monkeypatch.setattr(digits_detection, "read_splits", lambda: (zero, other))
    make(tmp_path / "digits", training=5, validation=5)
    for split, (_, label) in zip(SPLITS, (zero, other), strict=True):
        marks = annotated(tmp_path / "digits", split)["annotations"]
        categories = {mark["category_id"] for mark in marks if not mark["iscrowd"]}
        assert categories == {CATEGORY_IDS[int(label[0])]}


def test_concurrent_processes_make_the_data_set_once(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "digits"
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(few, [folder] * 4))
    path = folder / "train2017" / "000000000001.png"
    changed = path.stat().st_mtime_ns
    few(folder)
    assert path.stat().st_mtime_ns == changed
    assert [path.name for path in folder.parent.iterdir()] == ["digits"], "nothing is left over"


def test_interrupted_creation_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(digits_detection, "_write_split", interrupt)
    with pytest.raises(KeyboardInterrupt):
        few(tmp_path / "digits")
    assert list(tmp_path.iterdir()) == []


def test_existing_files_are_left_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("keep")
    for folder in (tmp_path, file):
        with pytest.raises(DataError, match=r"has other files.*data_dir"):
            few(folder)
    with pytest.raises(DataError, match=r"cannot be made.*Not a directory.*SHARDMARK_CACHE"):
        few(file / "digits")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    assert file.read_text() == "keep"
    few(tmp_path / "digits")
    monkeypatch.setattr(digits_detection, "VERSION", 99)
    with pytest.raises(DataError, match=r"another version \('digits-detection, version 1: 2 \+ 1"):
        few(tmp_path / "digits")


@pytest.mark.usefixtures("_own_cache")
@pytest.mark.parametrize("below", [None, "mine"])
def test_data_set_is_made_in_the_users_folder_or_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, below: str | None
) -> None:
    monkeypatch.setattr(
        digits_detection, "make", lambda folder: make(folder, training=9, validation=6)
    )
    options = DetectionOptions(data_dir=None if below is None else str(tmp_path / below))
    assert check_data(options) == 9
    folder = tmp_path / (below or f"cache/digits-detection-{digits_detection.VERSION}")
    assert len(annotated(folder)["images"]) == 9
    made = data.load(options)
    assert (len(made.training), len(made.validation)) == (9, 6)
    assert made.classes == tuple("0123456789")
    assert made.training.read(np.arange(2)).pictures[0].shape == (3, CANVAS_SIZE, CANVAS_SIZE)
