"""Images in COCO's layout, and trained weights.  Imports torch only to decode images."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shardmark.base.errors import DataError
from shardmark.extras.detection import digits_detection
from shardmark.extras.detection.coco_file import CocoFile, read_coco
from shardmark.extras.detection.options import PUBLISHED
from shardmark.ranks.workloads.datasets.files import BrokenPictures, few_of, read_pictures
from shardmark.ranks.workloads.models import is_user_function
from shardmark.ranks.workloads.trained_weights import check_file, ensure

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from shardmark.extras.detection.options import DetectionOptions


RunLengths = dict[str, Any]
"""A compressed mask in COCO's format: {"size": [height, width], "counts": bytes}."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objects:
    """The n annotated objects of an image, in the order of the annotation file."""

    boxes: NDArray[np.float32]
    """(n, 4): left, top, right, bottom, in pixels of the stored image."""
    labels: NDArray[np.int64]
    """(n,), 1 to the number of classes; 0 is the background."""
    areas: NDArray[np.float64]
    """(n,), area in square pixels, from the file."""
    crowds: NDArray[np.bool_]
    """(n,), true for annotations of a crowd."""
    masks: tuple[RunLengths, ...] | None = None
    """n masks of the size of the image; None if masks are not read."""

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnotatedReading:
    """Samples as they are stored."""

    pictures: tuple[Tensor, ...]
    """Each (3, height, width), uint8, RGB."""
    objects: tuple[Objects, ...]
    image_ids: tuple[int, ...]
    """Ids in the annotation file."""
    sample_ids: tuple[int, ...]
    """The samples that were read: a broken one is replaced by the next one, or left out."""
    errors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Detections:
    """The k objects that a model detected in an image."""

    boxes: NDArray[np.float32]
    """(k, 4): left, top, right, bottom, in pixels of the stored image."""
    scores: NDArray[np.float32]
    """(k,)"""
    labels: NDArray[np.int64]
    """(k,), 1 to the number of classes."""
    masks: tuple[RunLengths, ...] | None = None
    """k masks of the size of the image; None for a model without masks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedPicture:
    """Annotations and detections of an image; ranks exchange them."""

    image_id: int
    truth: Objects
    detections: Detections


LAYOUT = (
    "expected annotations/instances_train2017.json, annotations/instances_val2017.json, "
    "train2017/ and val2017/ in data_dir (or another year in all four)"
)
SMALLEST_SIDE = 1e-3
"""Least width and height of a box in pixels: in float32 a flip may collapse a narrower one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CocoSplit:
    """A `Source`: p images of an annotation file by ascending id, and their objects.

    A training split leaves out crowds and boxes without area; a validation split has all objects.
    """

    file: Path
    root: Path
    """Folder of the images."""
    content: CocoFile
    boxes: NDArray[np.float32]
    """(n, 4): left, top, right, bottom of every object of the file."""
    shown: NDArray[np.bool_]
    """(n,): true for objects that belong to the split."""
    pictures: NDArray[np.int64]
    """Index in the file of the image of each sample."""
    broken: BrokenPictures
    with_masks: bool = False

    def __len__(self) -> int:
        return len(self.pictures)

    def select(self, ids: NDArray[np.int64]) -> CocoSplit:
        return replace(self, pictures=self.pictures[ids])

    def path(self, sample: int) -> Path:
        return self.root / str(self.content.file_names[self.pictures[sample]])

    def objects_shown(self) -> NDArray[np.int64]:
        """Number of objects of each sample."""
        before = np.concatenate(([0], np.cumsum(self.shown)))
        counts: NDArray[np.int64] = np.diff(before[self.content.offsets])[self.pictures]
        return counts

    def read(self, ids: NDArray[np.int64]) -> AnnotatedReading:
        """Read images, in memory as (height, width, 3), and their objects."""
        samples, read, errors = read_pictures(
            ids.tolist(), self._decode, path=self.path, samples=len(self), broken=self.broken
        )
        return AnnotatedReading(
            pictures=tuple(picture for picture, _ in read),
            objects=tuple(objects for _, objects in read),
            image_ids=tuple(self.content.image_ids[self.pictures[samples]].tolist()),
            sample_ids=tuple(samples),
            errors=errors,
        )

    def _decode(self, sample: int) -> tuple[Tensor, Objects]:
        """Decode a sample; raises `ValueError` if its annotations are for another image size."""
        content, number = self.content, int(self.pictures[sample])
        picture = decoded(self.path(sample))
        height, width = picture.shape[-2:]
        annotated = tuple(content.sizes[number].tolist())
        if annotated != (width, height):
            raise ValueError(
                f"it is {width} x {height}, but its annotations are for "
                f"{annotated[0]} x {annotated[1]}"
            )
        first, last = content.offsets[number : number + 2].tolist()
        rows = first + np.flatnonzero(self.shown[first:last])
        ends = content.mask_offsets
        masks = tuple(
            {"size": [height, width], "counts": content.masks[ends[row] : ends[row + 1]].tobytes()}
            for row in rows.tolist()
        )
        return picture, Objects(
            boxes=self.boxes[rows],
            labels=content.labels[rows],
            areas=content.areas[rows],
            crowds=content.crowds[rows],
            masks=masks if self.with_masks else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnotatedPictures:
    """A detection data set with both splits, ready to be read."""

    training: CocoSplit
    validation: CocoSplit
    notes: tuple[str, ...]
    """Messages about data left out of training, one line each; they count as data errors."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of labels 1, 2, ..."""
        return tuple(self.training.content.categories.values())


def check(options: DetectionOptions) -> int:
    """Number of training samples; `DataError` or `InputError` without data or weights."""
    data = load(options)
    published = PUBLISHED.get(options.weights or "")
    if published is not None:
        ensure(published[options.model], download=options.download)
    elif options.weights_file is not None:
        allowed = "null, coco, imagenet, or a file with the model's state dictionary"
        check_file(options.weights_file, allowed)
    return options.training_samples or len(data.training)


def paths(options: DetectionOptions) -> tuple[Path, ...]:
    """Annotation files, image folders, and the user's weights."""
    folder = _folder(options)
    file = options.weights_file
    weights = [] if file is None else [Path(file).expanduser()]
    return (*_find(folder, "train"), *_find(folder, "val"), *weights)


def load(options: DetectionOptions) -> AnnotatedPictures:
    """Load both splits; images are decoded when they are read."""
    folder = _folder(options)
    training, notes = _learnable(_split(folder, "train", options))
    validation = _split(folder, "val", options)
    _check_same_categories(training, validation)
    training, missing = _without_missing(training)
    validation, missing_in_validation = _without_missing(validation)
    if options.pictures_without_objects == "drop":
        training = training.select(np.flatnonzero(training.objects_shown()))
    if not training.objects_shown().sum():
        raise DataError(
            str(training.file), "has no object to learn", "add annotations that are not crowds"
        )
    options.check_sample_counts(len(training), len(validation))
    with_masks = _with_masks(options, training, validation)
    return AnnotatedPictures(
        training=replace(training, with_masks=with_masks),
        validation=replace(validation, with_masks=with_masks),
        notes=(*notes, *missing, *missing_in_validation),
    )


def _folder(options: DetectionOptions) -> Path:
    """The folder in COCO's layout; generates `digits-detection` if it is missing."""
    if options.dataset == "coco":
        if not options.folder.is_dir():
            raise options.no_folder(LAYOUT)
        return options.folder
    folder = options.folder if options.data_dir else digits_detection.default_folder()
    digits_detection.make(folder)
    return folder


def _split(folder: Path, name: str, options: DetectionOptions) -> CocoSplit:
    """The split `train` or `val` with all objects of its file."""
    file, root = _find(folder, name)
    content = read_coco(file, with_masks=options.with_masks)
    with np.errstate(over="ignore"):
        boxes = content.boxes.astype(np.float32)
    return CocoSplit(
        file=file,
        root=root,
        content=content,
        boxes=boxes,
        shown=np.ones(len(content.labels), np.bool_),
        pictures=np.arange(len(content.image_ids)),
        broken=BrokenPictures(skip=options.on_broken == "skip", replace=name == "train"),
    )


def _find(folder: Path, name: str) -> tuple[Path, Path]:
    """Annotation file and image folder of the split `train` or `val`."""
    annotations, pattern = folder / "annotations", f"instances_{name}*.json"
    files = sorted(annotations.glob(pattern))
    if len(files) != 1:
        existing = files or sorted(annotations.glob("*"))
        listed = f" (it has {few_of([path.name for path in existing])})" if existing else ""
        raise DataError(str(annotations), f"has {len(files)} files {pattern}{listed}", LAYOUT)
    root = folder / files[0].stem.removeprefix("instances_")
    if not root.is_dir():
        raise DataError(str(root), f"no such folder for the images of {files[0].name}", LAYOUT)
    return files[0], root


def _learnable(source: CocoSplit) -> tuple[CocoSplit, tuple[str, ...]]:
    """Select objects to learn, clip them to their image, and report boxes without area."""
    content = source.content
    finite = np.isfinite(content.boxes).all(axis=1)
    picture_of = np.repeat(np.arange(len(content.image_ids)), np.diff(content.offsets))
    boxes = np.clip(content.boxes, 0, np.tile(content.sizes[picture_of], 2).astype(np.float64))
    has_area = finite & (boxes[:, 2:] - boxes[:, :2] >= SMALLEST_SIDE).all(axis=1)
    degenerate = content.annotation_ids[~has_area & ~content.crowds]
    notes: tuple[str, ...] = ()
    if len(degenerate):
        ids = few_of(degenerate.tolist())
        notes = (f"{source.file}: boxes without area, not trained on: annotations {ids}",)
    shown = has_area & ~content.crowds
    return replace(source, boxes=boxes.astype(np.float32), shown=shown), notes


def _check_same_categories(training: CocoSplit, validation: CocoSplit) -> None:
    """Raise `DataError` unless each category has the same id and name in both files."""
    first, second = (set(split.content.categories.items()) for split in (training, validation))
    differing = sorted(
        f"{identity} {name!r} only in {split.file.name}"
        for split, only in ((training, first - second), (validation, second - first))
        for identity, name in only
    )
    if differing:
        problem = f"categories differ: {few_of(differing)}"
        raise DataError(str(training.file.parent), problem, "make them agree")


def _without_missing(source: CocoSplit) -> tuple[CocoSplit, tuple[str, ...]]:
    """Leave out samples without an image file, with a message for each of them."""
    names_in: dict[Path, frozenset[str]] = {}
    missing = []
    for sample in range(len(source)):
        path = source.path(sample)
        if path.parent not in names_in:  # list each folder once
            entries = os.listdir(path.parent) if path.parent.is_dir() else ()  # noqa: PTH208  (names)
            names_in[path.parent] = frozenset(entries)
        if path.name not in names_in[path.parent]:
            missing.append(sample)
    if len(missing) == len(source):
        raise DataError(
            str(source.root), f"has none of the images of {source.file.name}", "add them"
        )
    if missing and not source.broken.skip:
        names = few_of([source.path(sample).name for sample in missing])
        raise DataError(
            str(source.root),
            f"{len(missing)} of {len(source)} images are missing: {names}",
            "add them, or set workload.on_broken: skip",
        )
    notes = tuple(f"{source.path(sample)}: no such file" for sample in missing)
    return source.select(np.delete(np.arange(len(source)), missing)), notes


def _with_masks(options: DetectionOptions, *splits: CocoSplit) -> bool:
    """True if the model learns masks and all objects have one."""
    if not options.with_masks:
        return False
    for split in splits:
        without = np.flatnonzero(split.shown & (np.diff(split.content.mask_offsets) == 0))
        if len(without):
            if is_user_function(options.model):
                return False  # the model may not need masks
            number = split.content.annotation_ids[without[0]]
            raise DataError(
                str(split.file),
                f"annotation {number} has no segmentation, which {options.model} needs",
                "add it, or choose a model without masks",
            )
    return True


def decoded(path: Path) -> Tensor:
    """Decode to (3, height, width), uint8, RGB, without EXIF rotation: annotations have none."""
    import torch
    from PIL import Image, UnidentifiedImageError

    content = io.BytesIO(path.read_bytes())  # one read: Pillow would make many small ones
    try:
        opened = Image.open(content)
    except UnidentifiedImageError as error:  # its message has a memory address
        raise OSError("cannot identify image file") from error
    with opened:
        pixels = np.array(opened if opened.mode == "RGB" else opened.convert("RGB"))
    return torch.from_numpy(pixels).permute(2, 0, 1)
