"""Handwritten digits on canvases: the embedded default of detection.  Imports no torch.

Made once, from scikit-learn's digits and a seed of its own, in COCO's layout: what is read and
evaluated later is read and evaluated as any other data set in that layout.  The draws are raw
numbers of Philox, whose stream numpy promises to keep, and the drawing is integer arithmetic: the
pixels are the same on every machine.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image

from shardmark.core.errors import DataError
from shardmark.workloads.datasets.digits import check_installed, read_splits
from shardmark.workloads.datasets.files import cache_folder, make_folder

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Pixels = NDArray[np.uint8]
    Numbers = NDArray[np.int64]
    Canvas = NDArray[np.int32]
    Mask = NDArray[np.bool_]

VERSION = 1
"""Goes up when any pixel or annotation changes."""
TRAINING_PICTURES = 1600
VALIDATION_PICTURES = 250
CANVAS_SIZE = 128
CATEGORY_IDS = tuple(range(1, 21, 2))
"""Of the digits 0 to 9: with gaps, as COCO's are."""

_MARKER = "digits-detection.txt"
_SEED = 20_250_101
_DIGIT_SIZES = (28, 57)
_CROWD_SIZES = (14, 21)
_CROWD_EXTENT = 56
_MOST_DIGITS = 5
_EMPTY_IN = 25
"""One canvas in so many has no digit; one in `_CROWD_IN` has a crowd."""
_CROWD_IN = 50
_TRIES = 20
_INK_FROM = 96
"""Least ink of 255 that belongs to a digit's mask."""


def default_folder() -> Path:
    return cache_folder() / f"digits-detection-{VERSION}"


def make(
    folder: Path, *, training: int = TRAINING_PICTURES, validation: int = VALIDATION_PICTURES
) -> None:
    """Write the data set into this folder, all or nothing, unless it is there already.

    Raises `DataError` where the folder has other files or cannot be written.
    """
    content = f"digits-detection, version {VERSION}: {training} + {validation} pictures\n"
    folder = folder.resolve()

    def is_made() -> bool:
        return _is_finished(folder, content)

    def write(beside: Path) -> None:
        check_installed()
        wanted = (("train2017", 1, training), ("val2017", 100_001, validation))
        for split, (name, first_id, count) in enumerate(wanted):
            _write_split(beside, name, split=split, first_id=first_id, count=count)
        (beside / _MARKER).write_text(content, encoding="utf-8")

    if not is_made():
        remedy = "set workload.data_dir, or $SHARDMARK_CACHE, to a folder that can be written"
        make_folder(folder, write, is_made, remedy)


def _is_finished(folder: Path, content: str) -> bool:
    """Whether the data set is there; raises `DataError` where something else is."""
    marker = folder / _MARKER
    if marker.is_file():
        found = marker.read_text(encoding="utf-8", errors="replace").strip()
        if found != content.strip():
            raise DataError(
                str(folder),
                f"holds another version ({found[:80]!r}, not {content.strip()!r})",
                "remove the folder, or set workload.data_dir to another one",
            )
        return True
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DataError(
            str(folder),
            "holds other files; digits-detection is made in a new or empty folder only",
            "set workload.data_dir to another folder, or leave it out for the cache folder",
        )
    return False


class Marked(NamedTuple):
    """One annotation: a digit, or a crowd of one digit."""

    digit: int
    mask: Mask
    """(canvas, canvas): what is visible of it."""
    crowd: bool


class Place(NamedTuple):
    """In pixels of the canvas."""

    left: int
    top: int
    width: int
    height: int

    def crowds(self, other: Place) -> bool:
        """Whether both share more than an eighth of the smaller one."""
        right = min(self.left + self.width, other.left + other.width)
        bottom = min(self.top + self.height, other.top + other.height)
        width = max(0, right - max(self.left, other.left))
        height = max(0, bottom - max(self.top, other.top))
        smaller = min(self.width * self.height, other.width * other.height)
        return width * height * 8 > smaller


class _Drawing:
    """One canvas of a split, which depends on the split, its index and nothing else."""

    def __init__(self, glyphs: Pixels, labels: Numbers, split: int, index: int) -> None:
        self._glyphs, self._labels = glyphs, labels
        self._bits = np.random.Philox(key=_SEED, counter=[0, 0, split, index])
        self._dark = self._number(0, 2) == 0
        self._canvas = self._background()
        self._places: list[Place] = []
        self.marked: list[Marked] = []
        if self._number(0, _EMPTY_IN) == 0:
            return
        if self._number(0, _CROWD_IN) == 0:
            self.marked.append(self._crowd())
        for _ in range(self._number(1, _MOST_DIGITS + 1)):
            self._digit()
        self.marked = [mark for mark in self.marked if mark.mask.any()]

    @property
    def pixels(self) -> Pixels:
        """(canvas, canvas, 3)."""
        return np.clip(self._canvas, 0, 255).astype(np.uint8)

    def _numbers(self, low: int, high: int, count: int) -> Numbers:
        """Whole numbers from `low` to below `high`."""
        raw = self._bits.random_raw(count) % np.uint64(high - low)
        return raw.astype(np.int64) + low

    def _number(self, low: int, high: int) -> int:
        return int(self._numbers(low, high, 1)[0])

    def _background(self) -> Canvas:
        """One colour, shaded slowly, and grain: (canvas, canvas, 3)."""
        colour = self._numbers(20, 90, 3)
        if not self._dark:
            colour = 255 - colour
        coarse = Image.fromarray(self._numbers(0, 256, 25).astype(np.uint8).reshape(5, 5))
        size = (CANVAS_SIZE, CANVAS_SIZE)
        shade = np.asarray(coarse.resize(size, Image.Resampling.BILINEAR), np.int32)
        light = (shade - 128) // 5 + self._numbers(-6, 7, CANVAS_SIZE**2).reshape(size)
        return (colour + light[..., None]).astype(np.int32)

    def _digit(self) -> None:
        """One more, unless there is no room for it; it hides what lies below."""
        size = self._number(*_DIGIT_SIZES)
        place = self._free_place(width=size * self._number(75, 111) // 100, height=size)
        if place is None:
            return
        glyph = self._number(0, len(self._labels))
        mask = self._stamp(glyph, place)
        self.marked = [mark._replace(mask=mark.mask & ~mask) for mark in self.marked]
        self.marked.append(Marked(int(self._labels[glyph]), mask, crowd=False))

    def _free_place(self, *, width: int, height: int) -> Place | None:
        """One that covers little of what is there; None where none was found."""
        for _ in range(_TRIES):
            left = self._number(0, CANVAS_SIZE - width + 1)
            top = self._number(0, CANVAS_SIZE - height + 1)
            place = Place(left, top, width, height)
            if not any(place.crowds(other) for other in self._places):
                self._places.append(place)
                return place
        return None

    def _crowd(self) -> Marked:
        """Small digits of one class in a heap, marked as one group."""
        digit = self._number(0, 10)
        same = np.flatnonzero(self._labels == digit)
        left, top = self._numbers(0, CANVAS_SIZE - _CROWD_EXTENT + 1, 2).tolist()
        self._places.append(Place(left, top, _CROWD_EXTENT, _CROWD_EXTENT))
        mask = np.zeros((CANVAS_SIZE, CANVAS_SIZE), np.bool_)
        for _ in range(self._number(10, 16)):
            size = self._number(*_CROWD_SIZES)
            column, row = self._numbers(0, _CROWD_EXTENT - size + 1, 2).tolist()
            glyph = int(same[self._number(0, len(same))])
            mask |= self._stamp(glyph, Place(left + column, top + row, size, size))
        return Marked(digit, mask, crowd=True)

    def _stamp(self, glyph: int, place: Place) -> Mask:
        """Draw the glyph there in a colour of its own; return its mask."""
        colour = self._numbers(0, 106, 3)
        ink = (255 - colour if self._dark else colour).astype(np.int32)
        picture = Image.fromarray(self._glyphs[glyph])
        resized = picture.resize((place.width, place.height), Image.Resampling.BICUBIC)
        alpha = np.asarray(resized, np.int32)[..., None]
        rows = slice(place.top, place.top + place.height)
        columns = slice(place.left, place.left + place.width)
        window = self._canvas[rows, columns]
        window += (ink - window) * alpha // 255
        mask = np.zeros((CANVAS_SIZE, CANVAS_SIZE), np.bool_)
        mask[rows, columns] = alpha[..., 0] >= _INK_FROM
        return mask


def _write_split(folder: Path, name: str, *, split: int, first_id: int, count: int) -> None:
    """`name`/*.png and annotations/instances_`name`.json."""
    (folder / name).mkdir()
    (folder / "annotations").mkdir(exist_ok=True)
    pictures, labels = read_splits()[split]
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for index in range(count):
        drawing = _Drawing(pictures[:, 0], labels, split, index)
        image_id = first_id + index
        file_name = f"{image_id:012d}.png"
        Image.fromarray(drawing.pixels).save(folder / name / file_name, compress_level=3)
        images.append(
            {"id": image_id, "file_name": file_name, "width": CANVAS_SIZE, "height": CANVAS_SIZE}
        )
        annotations += [
            {"id": number, "image_id": image_id, **_annotation(mark)}
            for number, mark in enumerate(drawing.marked, start=len(annotations) + 1)
        ]
    content = {
        "info": {"description": "scikit-learn's handwritten digits on canvases"},
        "licenses": [],
        "images": images,
        "annotations": annotations,
        "categories": [
            {"id": number, "name": str(digit), "supercategory": "digit"}
            for digit, number in enumerate(CATEGORY_IDS)
        ],
    }
    path = folder / "annotations" / f"instances_{name}.json"
    path.write_text(json.dumps(content, separators=(",", ":")), encoding="utf-8")


def _annotation(mark: Marked) -> dict[str, Any]:
    """COCO's: the box of the mask, and uncompressed run lengths column by column, zeros first."""
    rows, columns = (np.flatnonzero(mark.mask.any(axis)) for axis in (1, 0))
    left, top = int(columns[0]), int(rows[0])
    flat = mark.mask.ravel(order="F")
    changes = np.flatnonzero(np.diff(flat, prepend=False))
    counts: list[int] = np.diff([0, *changes, flat.size]).tolist()
    return {
        "category_id": CATEGORY_IDS[mark.digit],
        "bbox": [left, top, int(columns[-1]) - left + 1, int(rows[-1]) - top + 1],
        "area": int(mark.mask.sum()),
        "iscrowd": int(mark.crowd),
        "segmentation": {"size": [CANVAS_SIZE, CANVAS_SIZE], "counts": counts},
    }
