"""The user's own pictures: layouts, sizes, and files that are broken."""

from __future__ import annotations

import multiprocessing
import shutil
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from shardmark.base.errors import DataError
from shardmark.base.layout import Shard
from shardmark.ranks.workloads import check_data
from shardmark.ranks.workloads.base import BatchPlan
from shardmark.ranks.workloads.vision.options import ClassificationOptions
from shardmark.ranks.workloads.vision.task import Classification

MakeFolder = Callable[..., Path]
WHOLE = Shard(index=0, count=1)


def options(folder: Path, **fields: Any) -> ClassificationOptions:
    chosen = {"dataset": "imagefolder", "data_dir": str(folder)} | fields
    return ClassificationOptions.model_validate(chosen)


def ids(made: Classification, steps: int, shard: Shard = WHOLE) -> list[tuple[int, ...]]:
    batches = made.batches(BatchPlan(global_batch=4, seed=0), shard)
    return [batch.sample_ids for batch in islice(batches, steps)]


@pytest.mark.parametrize("validation", ["test", "val", "validation"])
def test_folder_is_read_with_its_classes(make_folder: MakeFolder, validation: str) -> None:
    folder = make_folder(splits=("train", validation))
    (folder / "train" / "ant" / "notes.txt").write_text("no picture")
    (folder / "train" / "ant" / "more").mkdir()
    shutil.copy(folder / "train" / "ant" / "0.png", folder / "train" / "ant" / "more" / "9.PNG")
    check_data(options(folder))
    made = Classification(options(folder), 0)
    assert made.classes == ("ant", "bee", "cat")
    assert (made.training_samples, made.validation_samples) == (13, 12)
    batch = next(made.batches(BatchPlan(global_batch=13, seed=0), WHOLE))
    assert batch.pictures.shape == (13, 3, 8, 8), "the first picture's own size"
    order = np.argsort(batch.sample_ids)
    assert batch.labels[order].tolist() == [0] * 5 + [1] * 4 + [2] * 4


def first_batch(folder: Path, **fields: Any) -> Any:
    made = Classification(options(folder, **fields), 0)
    return next(made.batches(BatchPlan(global_batch=12, seed=0), WHOLE))


def test_pictures_are_decoded_and_normalised(make_folder: MakeFolder) -> None:
    """Pictures of other sizes and modes are converted."""
    folder = make_folder()
    batch = first_batch(folder)
    with Image.open(folder / "train" / "bee" / "1.png") as picture:
        pixels = torch.from_numpy(np.asarray(picture).copy()).permute(2, 0, 1) / 255
    mean, std = torch.tensor((0.485, 0.456, 0.406)), torch.tensor((0.229, 0.224, 0.225))
    expected = (pixels - mean[:, None, None]) / std[:, None, None]
    torch.testing.assert_close(batch.pictures[batch.sample_ids.index(5)], expected)
    Image.new("L", (30, 20), 100).save(folder / "train" / "ant" / "0.png")
    assert first_batch(folder).pictures.shape == (12, 3, 224, 224), "the first is not square"
    assert first_batch(folder, image_size=16).pictures.shape == (12, 3, 16, 16)


def remove(folder: Path) -> None:
    shutil.rmtree(folder)


def empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


@pytest.mark.parametrize(
    ("break_it", "below", "where", "message"),
    [
        (remove, "", "", "no such folder; expected train/CLASS/*.jpg and test/CLASS/*.jpg"),
        (empty, "", "train", "no such folder; expected train/CLASS/*.jpg"),
        (remove, "train", "train", "no such folder; expected train/CLASS/*.jpg"),
        (empty, "train", "train", "has no class folder; expected train/CLASS/*.jpg"),
        (empty, "train/bee", "train/bee", "this class folder has no image; add images"),
        (remove, "test", "test", "no such folder; expected train/CLASS/*.jpg"),
        (empty, "test/bee", "test/bee", "this class folder has no image"),
        (remove, "test/bee", "", "class folders differ: bee only in train/; make them agree"),
        (remove, "train/cat", "", "class folders differ: cat only in test/"),
    ],
)
def test_wrong_layout_is_refused(
    make_folder: MakeFolder, break_it: Callable[[Path], None], below: str, where: str, message: str
) -> None:
    folder = make_folder()
    break_it(folder / below)
    with pytest.raises(DataError) as caught:
        check_data(options(folder))
    assert f"{folder / where}: {message}" in str(caught.value)


def test_file_or_single_class_is_refused(make_folder: MakeFolder, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="file: is not a folder; expected train/CLASS"):
        check_data(options(tmp_path / "file"))
    with pytest.raises(DataError, match="has only the class ant; add a second class"):
        check_data(options(make_folder(classes=("ant",))))


def test_broken_picture_ends_the_trial(make_folder: MakeFolder) -> None:
    folder = make_folder()
    broken = folder / "train" / "bee" / "0.png"
    broken.write_bytes(broken.read_bytes()[:60])
    made = Classification(options(folder, loader_workers=2), 0)
    with pytest.raises(DataError) as caught:
        ids(made, 3)
    assert str(caught.value).startswith(f"{broken}: cannot be read as an image (")
    assert "workload.on_broken: skip" in str(caught.value)
    assert not multiprocessing.active_children(), "though the error keeps the generator's frame"


@pytest.mark.parametrize("workers", [0, 1])
def test_next_sample_takes_the_place_of_a_broken_one(make_folder: MakeFolder, workers: int) -> None:
    folder = make_folder()
    expected = ids(Classification(options(folder), 0), 6)
    for name in ("bee/0.png", "bee/1.png", "cat/3.png"):  # samples 4, 5 and 11
        (folder / "train" / name).write_bytes(b"no picture")
    made = Classification(options(folder, on_broken="skip", loader_workers=workers), 0)
    replaced = {4: 6, 5: 6, 11: 0}
    assert ids(made, 6) == [tuple(replaced.get(i, i) for i in step) for step in expected]
    halves = [ids(made, 6, Shard(index=index, count=2)) for index in range(2)]
    assert [a + b for a, b in zip(*halves, strict=True)] == ids(made, 6)
    assert len(made.data_errors) == 3, "each file is named once"
    named = sorted(line.split(": cannot be read (")[0] for line in made.data_errors)
    assert named == [str(folder / "train" / n) for n in ("bee/0.png", "bee/1.png", "cat/3.png")]


def test_broken_validation_picture_is_left_out(make_folder: MakeFolder) -> None:
    folder = make_folder()
    broken = folder / "test" / "cat" / "2.png"
    broken.write_bytes(b"")
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 3)).eval()
    made = Classification(options(folder, on_broken="skip"), 0)
    parts = [
        made.evaluate(model, Shard(index=index, count=2), torch.device("cpu")) for index in range(2)
    ]
    assert [part["samples"] for part in parts] == [11, 0]
    assert [line.split(": ")[0] for line in made.data_errors] == [str(broken)]
    with pytest.raises(DataError, match=r"2\.png: cannot be read as an image"):
        Classification(options(folder), 0).evaluate(model, WHOLE, torch.device("cpu"))
