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

from shardmark.core.errors import DataError
from shardmark.workloads.datasets.digits import read_splits
from shardmark.workloads.detection import digits_detection
from shardmark.workloads.detection.digit_canvases import (
    CANVAS_SIZE,
    CATEGORY_IDS,
    Glyphs,
    draw_canvas,
    run_lengths,
)
from shardmark.workloads.detection.digits_detection import make
from shardmark.workloads.detection.options import DetectionOptions

if TYPE_CHECKING:
    from numpy.typing import NDArray

SPLITS = ("train2017", "val2017")
TRAINING, VALIDATION = 100, 30
DIGEST = "5ca844b3e35a16b525987a81803ab4b8982cd2cba24a5ccb727e4d4e05dc8303"
"""Of the first pictures and annotations; another one is another version of the data set."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "digits"
    make(folder, training=TRAINING, validation=VALIDATION)
    return folder


def annotated(folder: Path, split: str) -> dict[str, Any]:
    path = folder / "annotations" / f"instances_{split}.json"
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def pixels(path: Path) -> NDArray[np.uint8]:
    with Image.open(path) as picture:
        return np.asarray(picture.convert("RGB"))


def digest(folder: Path) -> str:
    """Of pixels and annotations; how PNG packs them is zlib's affair."""
    found = hashlib.sha256()
    for split in SPLITS:
        content = annotated(folder, split)
        found.update(json.dumps(content, sort_keys=True).encode())
        for image in content["images"]:
            found.update(pixels(folder / split / image["file_name"]).tobytes())
    return found.hexdigest()


def glyphs(split: int, chosen: slice = slice(None)) -> Glyphs:
    pictures, labels = read_splits()[split]
    return Glyphs(pictures=pictures[chosen, 0], labels=labels[chosen])


def test_same_everywhere_and_always(made: Path) -> None:
    assert digest(made) == DIGEST, "another data set needs another VERSION"


def test_a_canvas_depends_on_its_number_only() -> None:
    drawn = draw_canvas(glyphs(0), split=0, index=7)
    again = draw_canvas(glyphs(0), split=0, index=7)
    assert np.array_equal(drawn.pixels, again.pixels)
    for other in ((0, 8), (1, 7)):
        canvas = draw_canvas(glyphs(0), split=other[0], index=other[1])
        assert not np.array_equal(drawn.pixels, canvas.pixels)


@pytest.mark.parametrize(("split", "count"), [(0, TRAINING), (1, VALIDATION)])
def test_layout(made: Path, split: int, count: int) -> None:
    content = annotated(made, SPLITS[split])
    assert len(content["images"]) == count
    files = sorted(path.name for path in (made / SPLITS[split]).iterdir())
    assert files == sorted(image["file_name"] for image in content["images"])
    assert [category["id"] for category in content["categories"]] == list(CATEGORY_IDS)
    assert [category["name"] for category in content["categories"]] == list("0123456789")
    for image in content["images"]:
        shape = (image["height"], image["width"], 3)
        assert pixels(made / SPLITS[split] / image["file_name"]).shape == shape
    assert len({one["id"] for one in content["annotations"]}) == len(content["annotations"])


def test_all_kinds_of_pictures_occur(made: Path) -> None:
    """Pictures without digits, with one and with several, every class, and crowds."""
    content = annotated(made, "train2017")
    marks = content["annotations"]
    objects = [sum(one["image_id"] == image["id"] for one in marks) for image in content["images"]]
    assert {0, 1, 2, 3, 4, 5} <= set(objects)
    assert {one["category_id"] for one in marks} == set(CATEGORY_IDS)
    assert 0 < sum(one["iscrowd"] for one in marks) < len(content["images"]) / 20


@pytest.mark.parametrize("split", SPLITS)
def test_masks_boxes_and_areas_agree(made: Path, split: str) -> None:
    """As COCO's own tools read them."""
    for one in annotated(made, split)["annotations"]:
        packed = coco_mask.frPyObjects(one["segmentation"], CANVAS_SIZE, CANVAS_SIZE)
        mask = coco_mask.decode(packed)
        rows, columns = np.nonzero(mask)
        left, top, width, height = one["bbox"]
        assert (left, top) == (columns.min(), rows.min())
        assert (left + width, top + height) == (columns.max() + 1, rows.max() + 1)
        assert one["area"] == mask.sum() > 50


@pytest.mark.parametrize("corner", [False, True])
def test_run_lengths(corner: bool) -> None:
    mask = np.zeros((3, 2), np.bool_)
    mask[0, 0], mask[1:, 1] = corner, True
    assert run_lengths(mask) == ([0, 1, 3, 2] if corner else [4, 2])


def test_digits_are_where_the_boxes_say() -> None:
    """Ink differs from the canvas around it, inside each mask."""
    for index in range(20):
        canvas = draw_canvas(glyphs(0), split=0, index=index)
        if not canvas.marked:
            continue
        grey = canvas.pixels.mean(2)
        inked = np.logical_or.reduce([one.mask for one in canvas.marked])
        assert abs(np.median(grey[inked]) - np.median(grey[~inked])) > 40


def test_validation_digits_were_written_in_no_training_canvas() -> None:
    (training, _), (validation, _) = read_splits()
    assert (len(training), len(validation)) == (1437, 360)
    assert not {one.tobytes() for one in training} & {one.tobytes() for one in validation}


def test_split_uses_its_own_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one training digit and one of another class for validation, each split has its own."""
    zeros, ones = glyphs(0, slice(0, 1)), glyphs(1, slice(1, 2))
    assert zeros.labels != ones.labels
    shown = tuple((one.pictures[:, None], one.labels) for one in (zeros, ones))
    monkeypatch.setattr("shardmark.workloads.datasets.digits.read_splits", lambda: shown)
    make(tmp_path / "digits", training=5, validation=5)
    for split, only in zip(SPLITS, (zeros, ones), strict=True):
        marks = annotated(tmp_path / "digits", split)["annotations"]
        found = {one["category_id"] for one in marks if not one["iscrowd"]}
        assert found == {CATEGORY_IDS[int(only.labels[0])]}


def test_made_once(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "digits"
    make(folder, training=2, validation=1)
    path = folder / "train2017" / "000000000001.png"
    changed = path.stat().st_mtime_ns
    make(folder, training=2, validation=1)
    assert path.stat().st_mtime_ns == changed
    assert [path.name for path in folder.parent.iterdir()] == ["digits"], "nothing is left over"


def test_made_in_an_empty_folder(tmp_path: Path) -> None:
    make(tmp_path, training=2, validation=1)
    assert len(annotated(tmp_path, "train2017")["images"]) == 2


def test_made_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    make(tmp_path / "link", training=2, validation=1)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "val2017").is_dir()


def test_made_by_several_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "digits"
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: make(folder, training=6, validation=3), range(4)))
    assert len(list((folder / "train2017").iterdir())) == 6
    assert [path.name for path in tmp_path.iterdir()] == ["digits"]


def test_interrupted_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(digits_detection, "_write", interrupt)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "digits", training=2, validation=1)
    assert list(tmp_path.iterdir()) == []


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    mine = tmp_path / "mine.txt"
    mine.write_text("keep")
    with pytest.raises(DataError, match=r"holds other files.*data_dir"):
        make(tmp_path, training=2, validation=1)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    with pytest.raises(DataError, match="holds other files"):
        make(mine, training=2, validation=1)
    assert mine.read_text() == "keep"


def test_another_version_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "digits", training=2, validation=1)
    monkeypatch.setattr(digits_detection, "VERSION", 99)
    with pytest.raises(DataError, match=r"another version \('digits-detection, version 1: 2 \+ 1"):
        make(tmp_path / "digits", training=2, validation=1)


def test_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot be made.*Not a directory.*SHARDMARK_CACHE"):
        make(tmp_path / "file" / "digits", training=2, validation=1)


def test_without_scikit_learn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digits_detection, "find_spec", lambda _: None)
    with pytest.raises(DataError, match="pip install scikit-learn"):
        make(tmp_path / "digits", training=2, validation=1)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    def few(folder: Path) -> None:
        make(folder, training=40, validation=10)

    monkeypatch.setattr(digits_detection, "make", few)


@pytest.mark.usefixtures("_few")
def test_read_by_the_loader_of_coco(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDMARK_CACHE", str(tmp_path))
    options = DetectionOptions(validation_samples=4)
    digits_detection.check(options)
    assert (tmp_path / f"digits-detection-{digits_detection.VERSION}").is_dir()
    data = digits_detection.load(options, 0)
    assert (len(data.training), len(data.validation)) == (40, 4)
    assert data.classes == tuple("0123456789")
    assert data.category_ids == CATEGORY_IDS
    assert not data.synthetic, "real handwriting"
    assert not data.notes
    reading = data.training.read(np.arange(2))
    assert reading.pictures[0].shape == (3, CANVAS_SIZE, CANVAS_SIZE)


@pytest.mark.usefixtures("_few")
def test_made_in_the_users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDMARK_CACHE", str(tmp_path / "cache"))
    options = DetectionOptions(data_dir=str(tmp_path / "mine"))
    digits_detection.check(options)
    assert len(annotated(tmp_path / "mine", "train2017")["images"]) == 40
