"""Reading COCO's pictures: their values, and files that are broken or not there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.unit.workloads.coco_folder import (
    COCO,
    edit,
    load,
    options,
    shown,
    write_folder,
)

from shardmark.core.errors import DataError
from shardmark.workloads.detection.annotated import AnnotatedReading

SKIP = {"on_broken": "skip"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHARDMARK_CACHE", str(tmp_path / "cache"))
    return write_folder(tmp_path / "data")


def read(folder: Path, *ids: int, split: str = "training", **fields: Any) -> AnnotatedReading:
    reading: AnnotatedReading = getattr(load(folder, **fields), split).read(np.array(ids, np.int64))
    return reading


def test_pictures_as_they_are_stored(folder: Path) -> None:
    reading = read(folder, 3, 0)
    assert (reading.sample_ids, reading.image_ids) == ((3, 0), (40, 10))
    for picture, name in zip(reading.pictures, ("040.png", "010.png"), strict=True):
        with Image.open(folder / "train2017" / name) as opened:
            expected = torch.from_numpy(np.array(opened)).permute(2, 0, 1)
        assert picture.dtype == torch.uint8
        assert torch.equal(picture, expected)


@pytest.mark.parametrize("mode", ["L", "CMYK", "RGBA", "P", "1", "RGB"])
def test_other_modes_become_rgb(folder: Path, mode: str) -> None:
    file = folder / "train2017" / "010.png"
    with Image.open(file) as opened:
        stored = opened.convert(mode)
    # Formats are told by their content, as Pillow does.
    stored.save(file, "JPEG" if mode in ("L", "CMYK", "RGB") else "PNG")
    with Image.open(file) as opened:
        assert opened.mode == mode
        expected = np.array(opened.convert("RGB"))
    picture = read(folder, 0).pictures[0]
    assert picture.shape == (3, 8, 10)
    assert torch.equal(picture, torch.from_numpy(expected).permute(2, 0, 1))
    picture.add_(1)  # it may be changed in place


def test_exif_does_not_turn_the_picture(folder: Path) -> None:
    file = folder / "train2017" / "010.png"
    exif = Image.Exif()
    exif[0x0112] = 6
    with Image.open(file) as opened:
        opened.copy().save(file, "JPEG", exif=exif)
    assert read(folder, 0).pictures[0].shape == (3, 8, 10)


def test_selection_is_numbered_anew(folder: Path) -> None:
    source = load(folder).training.select(np.array([1, 3]))
    reading = source.select(np.array([1, 0])).read(np.array([1]))
    assert (len(source), reading.sample_ids, reading.image_ids) == (2, (1,), (20,))
    assert len(reading.objects[0]) == 2
    empty = source.read(np.array([], np.int64))
    assert (empty.pictures, empty.image_ids) == ((), ())


# Files that are not there, or no pictures.


def test_missing_pictures(folder: Path) -> None:
    for name in ("train2017/010.png", "train2017/030.png", "val2017/040.png"):
        (folder / name).unlink()
    with pytest.raises(DataError) as caught:
        COCO.check(options(folder))
    assert caught.value.args == (
        str(folder / "train2017"),
        "2 of 4 pictures are missing: 010.png, 030.png",
        "put them there, or set workload.on_broken: skip",
    )
    data = load(folder, **SKIP)
    assert list(shown(data)) == [20, 40]
    assert list(shown(data, "validation")) == [10, 20, 30]
    assert data.notes[1:] == tuple(
        f"{folder / name}: no such file"
        for name in ("train2017/010.png", "train2017/030.png", "val2017/040.png")
    )


def test_only_a_few_missing_pictures_are_named(folder: Path) -> None:
    more = [{"id": n, "file_name": f"{n}", "width": 1, "height": 1} for n in range(7)]
    edit(folder, lambda content: content["images"].extend(more), "val2017")
    with pytest.raises(DataError, match="7 of 11 pictures are missing: 0, 1, 2, 3, 4 and 2 more;"):
        COCO.check(options(folder))


@pytest.mark.parametrize("fields", [{}, SKIP])
def test_all_pictures_missing(folder: Path, fields: dict[str, Any]) -> None:
    for file in (folder / "val2017").iterdir():
        file.unlink()
    with pytest.raises(DataError, match=r"val2017: has none of the pictures of instances_val2017"):
        COCO.check(options(folder, **fields))


@pytest.mark.parametrize("content", [b"", b"no picture", None])
def test_unreadable_picture(folder: Path, content: bytes | None) -> None:
    names = [folder / split / "020.png" for split in ("train2017", "val2017")]
    for file in names:
        file.write_bytes(file.read_bytes()[:60] if content is None else content)
    for split, file in zip(("training", "validation"), names, strict=True):
        with pytest.raises(DataError) as caught:
            read(folder, 1, split=split)
        where, found, remedy = caught.value.args
        assert where == str(file)
        assert found.startswith("cannot be read as a picture (")
        assert remedy == "replace or remove it, or set workload.on_broken: skip"
    reading = read(folder, 0, 1, **SKIP)
    assert (reading.sample_ids, reading.image_ids) == ((0, 2), (10, 30)), "the next takes its place"
    assert len(reading.errors) == 1
    assert reading.errors[0].startswith(f"{names[0]}: cannot be read (")
    reading = read(folder, 0, 1, 2, split="validation", **SKIP)
    assert (reading.sample_ids, reading.image_ids) == ((0, 2), (10, 30)), "it is left out"
    assert len(reading.pictures) == len(reading.objects) == 2


def test_last_picture_is_followed_by_the_first(folder: Path) -> None:
    (folder / "train2017" / "040.png").write_bytes(b"")
    assert read(folder, 3, **SKIP).image_ids == (10,)


def test_no_picture_can_be_read(folder: Path) -> None:
    for file in (folder / "train2017").iterdir():
        file.write_bytes(b"")
    with pytest.raises(DataError, match="train2017: no picture can be read; put readable"):
        read(folder, 0, **SKIP)


def test_picture_of_another_size(folder: Path) -> None:
    Image.new("RGB", (8, 10)).save(folder / "train2017" / "010.png")
    with pytest.raises(DataError, match=r"it is 8 x 10 and its annotations are of 10 x 8"):
        read(folder, 0)
    assert read(folder, 0, **SKIP).image_ids == (20,)
