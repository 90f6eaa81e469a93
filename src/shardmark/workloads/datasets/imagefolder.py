"""The user's own pictures, in one folder a class.  Imports torch only in `load`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from shardmark.core.errors import DataError
from shardmark.workloads.datasets.reading import BrokenPictures, few_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardmark.workloads.datasets.sources import LabelledPictures
    from shardmark.workloads.vision.options import ClassificationOptions

LARGEST_OWN_SIZE = 224
MEAN = (0.485, 0.456, 0.406)
"""ImageNet's, as all of torchvision's models use."""
STD = (0.229, 0.224, 0.225)

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".ppm", ".pgm", ".gif", ".tif", ".tiff", ".webp")
VALIDATION_NAMES = ("test", "val", "validation")
LAYOUT = "expected train/CLASS/*.jpg and test/CLASS/*.jpg (or val/, validation/) in data_dir"


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderSplit:
    """The pictures of one split, sorted by class, then by name."""

    root: Path
    classes: tuple[str, ...]
    names: tuple[str, ...]
    """Each picture's path below its class folder."""
    labels: NDArray[np.int64]

    def path(self, sample: int) -> Path:
        return self.root / self.classes[int(self.labels[sample])] / self.names[sample]

    def select(self, ids: NDArray[np.int64]) -> FolderSplit:
        names = tuple(self.names[sample] for sample in ids.tolist())
        return FolderSplit(
            root=self.root, classes=self.classes, names=names, labels=self.labels[ids]
        )


def check(options: ClassificationOptions) -> None:
    """Raise `DataError` unless both splits have the same classes, and a picture in each."""
    training, validation = find_splits(options.folder)
    options.check_sample_counts(len(training.names), len(validation.names))


def load(options: ClassificationOptions, seed: int) -> LabelledPictures:
    """Find the files; pictures are decoded when they are read."""
    from shardmark.workloads.datasets.sources import Files, LabelledPictures

    splits = find_splits(options.folder)
    image_size = options.image_size or own_size(splits[0])
    training, validation = (
        Files(
            split=split,
            image_size=image_size,
            broken=BrokenPictures(skip=options.on_broken == "skip", replace=split is splits[0]),
        )
        for split in splits
    )
    return LabelledPictures(
        training=training,
        validation=validation,
        classes=splits[0].classes,
        image_size=image_size,
        mean=MEAN,
        std=STD,
    ).reduced(options, seed)


def own_size(split: FolderSplit) -> int:
    """Side of the first picture whose size can be read, if square and under 224; else 224."""
    from PIL import Image

    for sample in islice(range(len(split.names)), 16):
        try:
            with Image.open(split.path(sample)) as picture:
                width, height = picture.size
        except (OSError, SyntaxError, ValueError):
            continue
        return width if width == height and width < LARGEST_OWN_SIZE else LARGEST_OWN_SIZE
    return LARGEST_OWN_SIZE


def find_splits(folder: Path) -> tuple[FolderSplit, FolderSplit]:
    """The training and the validation split below `folder`; `DataError` for any other layout."""
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "no such folder"
        raise DataError(str(folder), what, LAYOUT)
    training = _find_split(folder / "train")
    there = [folder / name for name in VALIDATION_NAMES if (folder / name).is_dir()]
    validation = _find_split(there[0] if there else folder / VALIDATION_NAMES[0])
    if training.classes != validation.classes:
        only_training = sorted(set(training.classes) - set(validation.classes))
        only_validation = sorted(set(validation.classes) - set(training.classes))
        found = "; ".join(
            f"{few_of(names)} only in {split.root.name}/"
            for names, split in ((only_training, training), (only_validation, validation))
            if names
        )
        raise DataError(str(folder), f"class folders differ: {found}", "make them agree")
    if len(training.classes) < 2:
        raise DataError(
            str(training.root), f"one class only: {training.classes[0]}", "at least two are needed"
        )
    return training, validation


def _find_split(root: Path) -> FolderSplit:
    if not root.is_dir():
        raise DataError(str(root), "no such folder", LAYOUT)
    with os.scandir(root) as entries:
        found = (entry.name for entry in entries if entry.is_dir() and entry.name[0] != ".")
        classes = tuple(sorted(found))
    if not classes:
        raise DataError(str(root), "holds no class folder", LAYOUT)
    names: list[str] = []
    counts: list[int] = []
    for name in classes:
        pictures = sorted(_pictures(str(root / name), ""))
        if not pictures:
            raise DataError(
                str(root / name),
                "no picture in this class folder",
                f"put pictures there ({' '.join(SUFFIXES)}), or remove it in every split",
            )
        names += pictures
        counts.append(len(pictures))
    labels = np.repeat(np.arange(len(classes), dtype=np.int64), counts)
    return FolderSplit(root=root, classes=classes, names=tuple(names), labels=labels)


def _pictures(folder: str, below: str) -> Iterator[str]:
    """Paths of the pictures in the folder and its subfolders, relative to the class folder."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name[0] == ".":
                continue
            if entry.name.lower().endswith(SUFFIXES):
                yield below + entry.name
            elif entry.is_dir():
                yield from _pictures(entry.path, f"{below}{entry.name}/")
