"""The user's images, one folder per class.  Imports torch only to read images."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from shardmark.base.errors import DataError
from shardmark.ranks.workloads.datasets.files import BrokenPictures, few_of, read_pictures

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL import Image

    from shardmark.ranks.workloads.datasets.sources import LabelledPictures, Reading
    from shardmark.ranks.workloads.vision.options import ClassificationOptions

LARGEST_NATIVE_SIZE = 224
MEAN = (0.485, 0.456, 0.406)
"""Mean of ImageNet's channels, as all of torchvision's models use it."""
STD = (0.229, 0.224, 0.225)

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".ppm", ".pgm", ".gif", ".tif", ".tiff", ".webp")
VALIDATION_NAMES = ("test", "val", "validation")
LAYOUT = "expected train/CLASS/*.jpg and test/CLASS/*.jpg (or val/, validation/) in data_dir"


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureFolder:
    """A `PictureSource`: the images of one split, sorted by class, then by name.

    Reading an image decodes it to RGB and resizes it to a square of `image_size`.
    """

    root: Path
    classes: tuple[str, ...]
    names: tuple[str, ...]
    """Path of each image below the root."""
    labels: NDArray[np.int64]
    broken: BrokenPictures
    image_size: int

    def __len__(self) -> int:
        return len(self.names)

    def path(self, sample: int) -> Path:
        return self.root / self.names[sample]

    def select(self, ids: NDArray[np.int64]) -> PictureFolder:
        names = tuple(self.names[sample] for sample in ids.tolist())
        return replace(self, names=names, labels=self.labels[ids])

    def read(self, ids: NDArray[np.int64]) -> Reading:
        import torch

        from shardmark.ranks.workloads.datasets.sources import Reading

        read, decoded, errors = read_pictures(
            ids.tolist(), self._decode, path=self.path, samples=len(self), broken=self.broken
        )
        pictures = np.empty((len(read), 3, self.image_size, self.image_size), np.uint8)
        for row, picture in zip(pictures, decoded, strict=True):
            row[:] = np.asarray(picture).transpose(2, 0, 1)
        return Reading(
            pictures=torch.from_numpy(pictures),
            labels=torch.from_numpy(self.labels[np.array(read, np.int64)]),
            sample_ids=tuple(read),
            errors=errors,
        )

    def _decode(self, sample: int) -> Image.Image:
        from PIL import Image

        with Image.open(self.path(sample)) as opened:
            picture = opened.convert("RGB")
        size = (self.image_size, self.image_size)
        return picture if picture.size == size else picture.resize(size, Image.Resampling.BILINEAR)


def check(options: ClassificationOptions) -> int:
    """Raise `DataError` unless both splits have the same classes, and an image in each."""
    training, validation = _splits(options)
    return options.check_sample_counts(len(training), len(validation))


def paths(options: ClassificationOptions) -> tuple[Path, ...]:
    """The folders of both splits."""
    return options.folder / "train", _validation_folder(options.folder)


def load(options: ClassificationOptions, seed: int) -> LabelledPictures:  # noqa: ARG001
    """Find the files; images are decoded when they are read."""
    from shardmark.ranks.workloads.datasets.sources import LabelledPictures

    training, validation = _splits(options)
    image_size = options.image_size or _native_size(training)
    return LabelledPictures(
        training=replace(training, image_size=image_size),
        validation=replace(validation, image_size=image_size),
        classes=training.classes,
        image_size=image_size,
        mean=MEAN,
        std=STD,
    )


def _native_size(split: PictureFolder) -> int:
    """Side of the first readable image if it is square and smaller than 224; else 224."""
    from PIL import Image

    for sample in islice(range(len(split)), 16):
        try:
            with Image.open(split.path(sample)) as picture:
                width, height = picture.size
        except (OSError, SyntaxError, ValueError):
            continue
        return width if width == height and width < LARGEST_NATIVE_SIZE else LARGEST_NATIVE_SIZE
    return LARGEST_NATIVE_SIZE


def _splits(options: ClassificationOptions) -> tuple[PictureFolder, PictureFolder]:
    """Find the training and validation split; `DataError` for any other layout."""
    folder, skip = options.folder, options.on_broken == "skip"
    if not folder.is_dir():
        raise options.no_folder(LAYOUT)
    training = _split(folder / "train", BrokenPictures(skip=skip, replace=True))
    validation = _split(_validation_folder(folder), BrokenPictures(skip=skip, replace=False))
    differing = "; ".join(
        f"{few_of(sorted(names))} only in {split.root.name}/"
        for split, other in ((training, validation), (validation, training))
        if (names := set(split.classes) - set(other.classes))
    )
    if differing:
        raise DataError(str(folder), f"class folders differ: {differing}", "make them agree")
    if len(training.classes) < 2:
        raise DataError(
            str(training.root), f"has only the class {training.classes[0]}", "add a second class"
        )
    return training, validation


def _validation_folder(folder: Path) -> Path:
    candidates = [folder / name for name in VALIDATION_NAMES]
    return next((path for path in candidates if path.is_dir()), candidates[0])


def _split(root: Path, broken: BrokenPictures) -> PictureFolder:
    if not root.is_dir():
        raise DataError(str(root), "no such folder", LAYOUT)
    with os.scandir(root) as entries:
        classes = sorted(e.name for e in entries if e.is_dir() and e.name[0] != ".")
    if not classes:
        raise DataError(str(root), "has no class folder", LAYOUT)
    by_class = [sorted(_pictures(str(root / name), f"{name}/")) for name in classes]
    for name, pictures in zip(classes, by_class, strict=True):
        if not pictures:
            raise DataError(
                str(root / name),
                "this class folder has no image",
                f"add images ({' '.join(SUFFIXES)}), or remove the folder from every split",
            )
    return PictureFolder(
        root=root,
        classes=tuple(classes),
        names=tuple(name for pictures in by_class for name in pictures),
        labels=np.repeat(np.arange(len(classes), dtype=np.int64), list(map(len, by_class))),
        broken=broken,
        image_size=LARGEST_NATIVE_SIZE,
    )


def _pictures(folder: str, below: str) -> Iterator[str]:
    """Yield the paths of images in the folder and its subfolders, with the prefix `below`."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name[0] == ".":
                continue
            if entry.name.lower().endswith(SUFFIXES):
                yield below + entry.name
            elif entry.is_dir():
                yield from _pictures(entry.path, f"{below}{entry.name}/")
