"""The data sets that are kept in memory."""

from __future__ import annotations

import hashlib
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardmark.base.errors import DataError
from shardmark.ranks.workloads import build_workload, check_data
from shardmark.ranks.workloads.datasets import digits
from shardmark.ranks.workloads.datasets import sources as _sources
from shardmark.ranks.workloads.datasets.sources import InMemory, LabelledPictures
from shardmark.ranks.workloads.vision import data
from shardmark.ranks.workloads.vision.options import ClassificationOptions
from shardmark.ranks.workloads.vision.task import Classification


def load(seed: int = 0, **fields: Any) -> LabelledPictures:
    return data.load(ClassificationOptions.model_validate(fields), seed)


def everything(source: object) -> tuple[torch.Tensor, torch.Tensor]:
    assert isinstance(source, InMemory)
    read = source.read(np.arange(len(source)))
    return read.pictures, read.labels


def test_digits_are_split_by_class_and_normalised_by_what_is_documented() -> None:
    made = load(image_size=8)
    training, training_labels = everything(made.training)
    validation, validation_labels = everything(made.validation)
    assert (training.shape, validation.shape) == ((1437, 1, 8, 8), (360, 1, 8, 8))
    counts = validation_labels.bincount()
    assert set(counts.tolist()) <= {35, 36, 37}
    assert len(torch.unique(torch.cat([training_labels, validation_labels]))) == 10
    made = load()
    pictures = everything(made.training)[0] / 255
    assert pictures.shape[1:] == (1, 32, 32)
    assert pictures.mean().item() == pytest.approx(made.mean[0], abs=1e-3)
    assert pictures.std().item() == pytest.approx(made.std[0], abs=1e-3)


def test_subset_is_drawn_from_the_seed() -> None:
    few = ClassificationOptions(training_samples=30, validation_samples=9)
    first, again, other = (Classification(few, seed) for seed in (1, 1, 2))
    assert (first.training_samples, first.validation_samples) == (30, 9)
    assert torch.equal(everything(first._training)[0], everything(again._training)[0])
    assert not torch.equal(everything(first._training)[0], everything(other._training)[0])


def test_random_pictures_are_marked_and_come_from_the_seed() -> None:
    fields: dict[str, Any] = {
        "dataset": "random",
        "classes": 3,
        "image_size": 20,
        "training_samples": 50,
    }
    made = load(**fields)
    assert (made.synthetic, load().synthetic) == (True, False)
    assert made.classes == ("0", "1", "2")
    assert (len(made.training), len(made.validation)) == (50, 256)
    first, again, other = (everything(load(seed, **fields).training) for seed in (0, 0, 1))
    assert first[0].shape == (50, 3, 20, 20)
    assert all(map(torch.equal, first, again))
    assert not torch.equal(first[0], other[0])


def test_large_sets_are_resized_batch_by_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = everything(load(image_size=40).validation)[0]
    monkeypatch.setattr(_sources, "RESIZE_WHOLE_BYTES", 1000)
    assert torch.equal(everything(load(image_size=40).validation)[0], expected)


def write_mnist(folder: Path) -> None:
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for split, count in (("train", 12), ("t10k", 6)):
        pixels = np.full((count, 28, 28), 7, np.uint8)
        header = struct.pack(">IIII", 2051, count, 28, 28)
        (raw / f"{split}-images-idx3-ubyte").write_bytes(header + pixels.tobytes())
        labels = np.arange(count, dtype=np.uint8) % 10
        header = struct.pack(">II", 2049, count)
        (raw / f"{split}-labels-idx1-ubyte").write_bytes(header + labels.tobytes())


def write_cifar10(folder: Path) -> None:
    below = folder / "cifar-10-batches-py"
    below.mkdir(parents=True)
    for name in (*(f"data_batch_{part}" for part in range(1, 6)), "test_batch"):
        pixels = np.zeros((4, 3, 32, 32), np.uint8)
        pixels[:, 2] = 9  # blue
        entry = {"data": pixels.reshape(4, -1), "labels": [0, 1, 2, 9]}
        (below / name).write_bytes(pickle.dumps(entry))
    meta = {"label_names": [f"class {label}" for label in range(10)]}
    (below / "batches.meta").write_bytes(pickle.dumps(meta))


def test_mnist_is_read_from_its_layout(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    made = load(dataset="mnist", data_dir=str(tmp_path))
    pictures, labels = everything(made.training)
    assert pictures.shape == (12, 1, 32, 32)
    assert pictures.min() == pictures.max() == 7
    assert labels.tolist() == [*range(10), 0, 1]
    assert len(made.validation) == 6


def test_cifar10_is_read_from_its_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar10(tmp_path)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)
    made = load(dataset="cifar10", data_dir=str(tmp_path))
    pictures, labels = everything(made.training)
    assert pictures.shape == (20, 3, 32, 32)
    assert pictures[:, :2].max() == 0
    assert pictures[:, 2].min() == 9
    assert labels[:4].tolist() == [0, 1, 2, 9]
    assert len(made.validation) == 4
    assert made.classes[9] == "class 9"


@pytest.mark.parametrize(
    ("name", "file"),
    [("mnist", "MNIST/raw/train-images-idx3-ubyte"), ("cifar10", "cifar-10-batches-py/test_batch")],
)
def test_missing_files_are_named(name: str, file: str, tmp_path: Path) -> None:
    {"mnist": write_mnist, "cifar10": write_cifar10}[name](tmp_path)
    (tmp_path / file).unlink()
    options = ClassificationOptions.model_validate({"dataset": name, "data_dir": str(tmp_path)})
    for call in (check_data, lambda options: build_workload(options, 0)):
        with pytest.raises(DataError) as caught:
            call(options)
        found = str(caught.value)
        assert found.startswith(f"{tmp_path}: no {file} for {name}; expected ")
        assert "`download: true` fetches them" in found


def test_data_that_cannot_be_downloaded_or_read_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_cifar10(tmp_path)
    with pytest.raises(DataError, match=r"cifar10 cannot be read or downloaded .*corrupted"):
        load(dataset="cifar10", data_dir=str(tmp_path))

    def refuse(_: object) -> None:
        raise RuntimeError("no route to host")

    monkeypatch.setattr("torchvision.datasets.MNIST.download", refuse)
    new: dict[str, Any] = {"dataset": "mnist", "data_dir": str(tmp_path / "new"), "download": True}
    check_data(ClassificationOptions.model_validate(new))  # it may yet be downloaded
    with pytest.raises(DataError, match=r"cannot be read or downloaded \(no route to host"):
        load(**new)


def test_the_stored_digits_equal_those_of_scikit_learn() -> None:
    with np.load(digits.FILE) as stored:
        content = stored["pictures"].tobytes() + stored["labels"].tobytes()
    # SHA-256 of `sklearn.datasets.load_digits()`: images as uint8, then target as uint8.
    assert hashlib.sha256(content).hexdigest() == (
        "87ff0c9e40dc7e2c0e34e7257799c2e3f3aec1a016363bb11cad869ec428a826"
    )
