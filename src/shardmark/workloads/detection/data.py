"""Pictures in COCO's layout, and trained weights.  Imports torch only to decode pictures."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from shardmark.core.errors import DataError
from shardmark.workloads.datasets.files import BrokenPictures, few_of, read_pictures
from shardmark.workloads.detection import digits_detection
from shardmark.workloads.detection.annotated import AnnotatedReading, Objects
from shardmark.workloads.detection.coco_file import CocoFile, read_coco
from shardmark.workloads.detection.weights import PUBLISHED, ensure
from shardmark.workloads.models import is_user_function

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from shardmark.workloads.detection.options import DetectionOptions

LAYOUT = (
    "expected annotations/instances_train2017.json, annotations/instances_val2017.json, "
    "train2017/ and val2017/ in data_dir (or another year in all four)"
)
SMALLEST_SIDE = 1e-3
"""Pixels.  Float32 tells no narrower box from a line, once it is flipped or resized."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CocoSplit:
    """A `Source`: p pictures of one annotation file by ascending id, and which objects count.

    A training split shows no crowds and no boxes without area; a validation split shows all.
    """

    file: Path
    root: Path
    """Folder of the pictures."""
    content: CocoFile
    boxes: NDArray[np.float32]
    """(n, 4): left, top, right, bottom of every object of the file."""
    shown: NDArray[np.bool_]
    """(n,): objects that this split shows."""
    pictures: NDArray[np.int64]
    """Sample -> picture of the file."""
    broken: BrokenPictures
    with_masks: bool = False

    def __len__(self) -> int:
        return len(self.pictures)

    def select(self, ids: NDArray[np.int64]) -> CocoSplit:
        return replace(self, pictures=self.pictures[ids])

    def path(self, sample: int) -> Path:
        return self.root / str(self.content.file_names[self.pictures[sample]])

    def objects_shown(self) -> NDArray[np.int64]:
        """Sample -> how many objects it shows."""
        before = np.concatenate(([0], np.cumsum(self.shown)))
        counts: NDArray[np.int64] = np.diff(before[self.content.offsets])[self.pictures]
        return counts

    def read(self, ids: NDArray[np.int64]) -> AnnotatedReading:
        """Pictures, their values laid out in memory as (height, width, 3), and their objects."""
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
        """Raises `ValueError` where the annotations are of a picture of another size."""
        content, number = self.content, int(self.pictures[sample])
        picture = decoded(self.path(sample))
        height, width = picture.shape[-2:]
        annotated = tuple(content.sizes[number].tolist())
        if annotated != (width, height):
            raise ValueError(
                f"it is {width} x {height} and its annotations are of {annotated[0]} x "
                f"{annotated[1]}"
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
    """A data set, ready to be read."""

    training: CocoSplit
    validation: CocoSplit
    notes: tuple[str, ...]
    """What was left out of training, one line each; these are data errors."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of labels 1, 2, ..."""
        return tuple(self.training.content.categories.values())


def check(options: DetectionOptions) -> int:
    """The number of training samples; `DataError` or `InputError` without data or weights."""
    data = load(options)
    published = PUBLISHED.get(options.weights or "")
    if published is not None:
        ensure(published[options.model], download=options.download)
    elif options.weights is not None and not Path(options.weights).expanduser().is_file():
        raise DataError(
            "workload.weights",
            f"there is no file {options.weights}",
            "null, coco, imagenet, or a file of the model's state dictionary",
        )
    return options.training_samples or len(data.training)


def paths(options: DetectionOptions) -> tuple[Path, ...]:
    """Annotation files, picture folders, and the user's own weights."""
    folder = _folder(options)
    own = options.weights is not None and options.weights not in PUBLISHED
    weights = [Path(str(options.weights)).expanduser()] if own else []
    return (*_find(folder, "train"), *_find(folder, "val"), *weights)


def load(options: DetectionOptions) -> AnnotatedPictures:
    """All of it; pictures are decoded when they are read."""
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
            str(training.file), "no object in it can be learned", "annotate some, crowds aside"
        )
    options.check_sample_counts(len(training), len(validation))
    with_masks = _with_masks(options, training, validation)
    return AnnotatedPictures(
        training=replace(training, with_masks=with_masks),
        validation=replace(validation, with_masks=with_masks),
        notes=(*notes, *missing, *missing_in_validation),
    )


def _folder(options: DetectionOptions) -> Path:
    """The data in COCO's layout; digits are drawn there first."""
    if options.dataset == "coco":
        if not options.folder.is_dir():
            raise options.no_folder(LAYOUT)
        return options.folder
    folder = options.folder if options.data_dir else digits_detection.default_folder()
    digits_detection.make(folder)
    return folder


def _split(folder: Path, name: str, options: DetectionOptions) -> CocoSplit:
    """The split `train` or `val` with all its objects, as the file has them."""
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
    """Annotation file and picture folder of the split `train` or `val`."""
    annotations, pattern = folder / "annotations", f"instances_{name}*.json"
    files = sorted(annotations.glob(pattern))
    if len(files) != 1:
        there = files or sorted(annotations.glob("*"))
        only = f" (there: {few_of([path.name for path in there])})" if there else ""
        raise DataError(str(annotations), f"has {len(files)} files {pattern}{only}", LAYOUT)
    root = folder / files[0].stem.removeprefix("instances_")
    if not root.is_dir():
        found = f"no such folder; it has the pictures of {files[0].name}"
        raise DataError(str(root), found, LAYOUT)
    return files[0], root


def _learnable(source: CocoSplit) -> tuple[CocoSplit, tuple[str, ...]]:
    """Only objects that can be learned, clipped to their picture; and a note on the others."""
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
        found = f"categories differ: {few_of(differing)}"
        raise DataError(str(training.file.parent), found, "make them agree")


def _without_missing(source: CocoSplit) -> tuple[CocoSplit, tuple[str, ...]]:
    """Without the pictures whose file is not there, and a line for each of them."""
    there: dict[Path, frozenset[str]] = {}
    missing = []
    for sample in range(len(source)):
        path = source.path(sample)
        if path.parent not in there:  # each folder is listed once
            entries = os.listdir(path.parent) if path.parent.is_dir() else ()  # noqa: PTH208  (names)
            there[path.parent] = frozenset(entries)
        if path.name not in there[path.parent]:
            missing.append(sample)
    if len(missing) == len(source):
        raise DataError(
            str(source.root), f"has none of the pictures of {source.file.name}", "put them there"
        )
    if missing and not source.broken.skip:
        names = few_of([source.path(sample).name for sample in missing])
        raise DataError(
            str(source.root),
            f"{len(missing)} of {len(source)} pictures are missing: {names}",
            "put them there, or set workload.on_broken: skip",
        )
    notes = tuple(f"{source.path(sample)}: no such file" for sample in missing)
    return source.select(np.delete(np.arange(len(source)), missing)), notes


def _with_masks(options: DetectionOptions, *splits: CocoSplit) -> bool:
    """Whether masks are read: if the model learns them, and all objects have one."""
    if not options.with_masks:
        return False
    for split in splits:
        without = np.flatnonzero(split.shown & (np.diff(split.content.mask_offsets) == 0))
        if len(without):
            if is_user_function(options.model):
                return False  # it may not want them
            number = split.content.annotation_ids[without[0]]
            raise DataError(
                str(split.file),
                f"annotation {number} has no segmentation, which {options.model} learns from",
                "add it, or choose a model without masks",
            )
    return True


def decoded(path: Path) -> Tensor:
    """(3, height, width), uint8, RGB, without any turn that EXIF asks for: annotations count the
    stored pixels.
    """
    import torch
    from PIL import Image, UnidentifiedImageError

    content = io.BytesIO(path.read_bytes())  # in one piece: Pillow would read bit by bit
    try:
        opened = Image.open(content)
    except UnidentifiedImageError as error:  # it names an address, another one each time
        raise OSError("cannot identify image file") from error
    with opened:
        pixels = np.array(opened if opened.mode == "RGB" else opened.convert("RGB"))
    return torch.from_numpy(pixels).permute(2, 0, 1)
