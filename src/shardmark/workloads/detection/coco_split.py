"""Finds a data set in COCO's layout, and what of it each split shows.  Imports no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from shardmark.core.errors import DataError
from shardmark.workloads.detection.coco_index import NO_MASK, CocoIndex, read_index

if TYPE_CHECKING:
    from numpy.typing import NDArray

LAYOUT = (
    "expected annotations/instances_train2017.json, annotations/instances_val2017.json, "
    "train2017/ and val2017/ in data_dir (or another year in all four)"
)
SMALLEST_SIDE = 1e-3
"""Pixels.  Float32 tells no narrower box from a line, once it is flipped or resized."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CocoSplit:
    """One annotation file, the folder of its pictures, and what of both is shown."""

    file: Path
    root: Path
    index: CocoIndex
    pictures: NDArray[np.int64]
    """Sample -> picture of the index."""
    shown: NDArray[np.int64]
    """Objects of the index that are shown, ascending."""
    offsets: NDArray[np.int64]
    """Picture i of the index shows the objects `shown[offsets[i]:offsets[i + 1]]`."""
    boxes: NDArray[np.float32]
    """(objects shown, 4): left, top, right, bottom."""

    def __len__(self) -> int:
        return len(self.pictures)

    @property
    def objects(self) -> int:
        """How many objects the pictures show."""
        return int(np.diff(self.offsets)[self.pictures].sum())

    def path(self, sample: int) -> Path:
        return self.root / self.index.name(int(self.pictures[sample]))

    def select(self, ids: NDArray[np.int64]) -> CocoSplit:
        return replace(self, pictures=self.pictures[ids])

    def without_empty(self) -> CocoSplit:
        """Only pictures that show an object."""
        return replace(self, pictures=self.pictures[np.diff(self.offsets)[self.pictures] > 0])

    def missing(self) -> list[int]:
        """Samples whose file is not there.  Reads each folder once."""
        folders: dict[bytes, frozenset[bytes]] = {}
        found = []
        for sample, name in enumerate(self.index.file_names[self.pictures].tolist()):
            parent, _, file = name.rpartition(b"/")
            if parent not in folders:
                folders[parent] = _names(os.path.join(os.fsencode(self.root), parent))  # noqa: PTH118
            if file not in folders[parent]:
                found.append(sample)
        return found

    def first_without_mask(self) -> int | None:
        """Annotation id of the first object shown whose mask the file does not give."""
        without = np.flatnonzero(self.index.mask_kinds[self.index.mask_rows[self.shown]] == NO_MASK)
        return int(self.index.annotation_ids[self.shown[without[0]]]) if len(without) else None


def find_split(folder: Path, name: str) -> tuple[Path, Path]:
    """Annotation file and picture folder of the split `train` or `val`."""
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "no such folder"
        raise DataError(str(folder), what, LAYOUT)
    annotations = folder / "annotations"
    pattern = f"instances_{name}*.json"
    files = sorted(annotations.glob(pattern))
    if not files:
        there = sorted(map(os.fsdecode, _names(os.fsencode(annotations))))
        found = f", only {_some(there)}" if there else ""
        raise DataError(str(annotations), f"no {pattern} there{found}", LAYOUT)
    if len(files) > 1:
        names = _some([file.name for file in files])
        raise DataError(
            str(annotations), f"{len(files)} files {pattern}: {names}", "leave one of them there"
        )
    root = folder / files[0].stem.removeprefix("instances_")
    if not root.is_dir():
        raise DataError(
            str(root), f"no such folder; it has the pictures of {files[0].name}", LAYOUT
        )
    return files[0], root


def training_split(folder: Path) -> tuple[CocoSplit, tuple[str, ...]]:
    """Objects that can be learned, clipped to their picture; and a note on those that cannot."""
    file, root = find_split(folder, "train")
    index = read_index(file)
    boxes = _corners(index)
    finite = np.isfinite(boxes).all(axis=1)
    picture_of = np.repeat(np.arange(len(index.image_ids)), np.diff(index.object_offsets))
    for axis, sizes in ((0, index.widths), (1, index.heights)):
        limit = sizes[picture_of][:, None].astype(np.float64)
        boxes[:, axis::2] = np.clip(boxes[:, axis::2], 0, limit)
    sides = boxes[:, 2:] - boxes[:, :2]
    fine = finite & (sides >= SMALLEST_SIDE).all(axis=1)
    degenerate = index.annotation_ids[~fine & ~index.crowds]
    notes: tuple[str, ...] = ()
    if len(degenerate):
        ids = _some([str(identity) for identity in degenerate[:6].tolist()], len(degenerate))
        notes = (f"{file}: boxes without area, not trained on: annotations {ids}",)
    return _split(file, root, index, boxes, fine & ~index.crowds), notes


def validation_split(folder: Path) -> CocoSplit:
    """All objects, crowds among them, as the file has them."""
    file, root = find_split(folder, "val")
    index = read_index(file)
    return _split(file, root, index, _corners(index), np.ones(len(index.labels), np.bool_))


def check_same_categories(training: CocoSplit, validation: CocoSplit) -> None:
    """Raise `DataError` unless each category has the same id and name in both files."""
    first, second = training.index.categories, validation.index.categories
    if first == second:
        return
    differing = sorted(set(first.items()) ^ set(second.items()))
    found = []
    for identity, name in differing:
        split = training if first.get(identity) == name else validation
        found.append(f"{identity} {name!r} only in {split.file.name}")
    raise DataError(
        str(training.file.parent), f"categories differ: {_some(found)}", "make them agree"
    )


def _corners(index: CocoIndex) -> NDArray[np.float64]:
    """(n, 4): left, top, right, bottom."""
    with np.errstate(invalid="ignore"):  # infinite ones
        far = index.boxes[:, :2] + index.boxes[:, 2:]
    return np.concatenate((index.boxes[:, :2], far), axis=1)


def _split(
    file: Path,
    root: Path,
    index: CocoIndex,
    boxes: NDArray[np.float64],
    show: NDArray[np.bool_],
) -> CocoSplit:
    shown = np.flatnonzero(show)
    with np.errstate(over="ignore"):
        stored = boxes[shown].astype(np.float32)
    return CocoSplit(
        file=file,
        root=root,
        index=index,
        pictures=np.arange(len(index.image_ids)),
        shown=shown,
        offsets=np.searchsorted(shown, index.object_offsets),
        boxes=stored,
    )


def _names(folder: bytes) -> frozenset[bytes]:
    """As bytes, so that 100,000 names need no decoding."""
    try:
        return frozenset(os.listdir(folder))  # noqa: PTH208  (names are all that is needed)
    except OSError:
        return frozenset()


def _some(names: list[str], count: int | None = None) -> str:
    count = len(names) if count is None else count
    more = f" and {count - 5} more" if count > 5 else ""
    return ", ".join(names[:5]) + more
