"""Handwritten digits on canvases, the default data set of detection.  Imports no torch.

The data set is generated once, from the digits data and a fixed seed, in COCO's layout.  Random
draws are raw numbers of Philox, whose stream numpy guarantees, and drawing uses integer
arithmetic: the pixels are the same on every machine.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shardmark.base.errors import DataError
from shardmark.ranks.workloads.datasets.digits import read_splits
from shardmark.ranks.workloads.datasets.files import cache_folder, make_folder

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Pixels = NDArray[np.uint8]
    Numbers = NDArray[np.int64]
    Canvas = NDArray[np.int32]
    Mask = NDArray[np.bool_]

VERSION = 1
"""Version of the data set; must increase when any pixel or annotation changes."""
TRAINING_PICTURES = 1600
VALIDATION_PICTURES = 250
CANVAS_SIZE = 128
CATEGORY_IDS = tuple(range(1, 21, 2))
"""Category ids of the digits 0 to 9, with gaps like COCO's."""

_MARKER = "digits-detection.txt"
_SEED = 20_250_101
_DIGIT_SIZES = (28, 57)
_CROWD_SIZES = (14, 21)
_CROWD_EXTENT = 56
_MAX_DIGITS = 5
_EMPTY_PERIOD = 25
"""On average one canvas in 25 has no digit."""
_CROWD_PERIOD = 50
"""On average one canvas in 50 has a crowd."""
_TRIES = 20
_MASK_THRESHOLD = 96
"""Least ink, from 0 to 255, of pixels in the mask of a digit."""


def default_folder() -> Path:
    return cache_folder() / f"digits-detection-{VERSION}"


def make(
    folder: Path, *, training: int = TRAINING_PICTURES, validation: int = VALIDATION_PICTURES
) -> None:
    """Generate the data set in this folder, atomically, unless it exists.

    Raises `DataError` if the folder has other files or cannot be written.
    """
    content = f"digits-detection, version {VERSION}: {training} + {validation} pictures\n"
    folder = folder.resolve()

    def is_made() -> bool:
        return _is_finished(folder, content)

    def write(beside: Path) -> None:
        wanted = (("train2017", 1, training), ("val2017", 100_001, validation))
        for split, (name, first_id, count) in enumerate(wanted):
            _write_split(beside, name, split=split, first_id=first_id, count=count)
        (beside / _MARKER).write_text(content, encoding="utf-8")

    if not is_made():
        remedy = "set workload.data_dir, or $SHARDMARK_CACHE, to a folder that can be written"
        make_folder(folder, write, is_made, remedy)


def _is_finished(folder: Path, content: str) -> bool:
    """True if the folder has the data set; `DataError` if it has something else."""
    marker = folder / _MARKER
    if marker.is_file():
        stored = marker.read_text(encoding="utf-8", errors="replace").strip()
        if stored != content.strip():
            raise DataError(
                str(folder),
                f"has another version ({stored[:80]!r}, not {content.strip()!r})",
                "remove the folder, or set workload.data_dir to another one",
            )
        return True
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DataError(
            str(folder),
            "has other files; digits-detection needs a new or empty folder",
            "set workload.data_dir to another folder, or remove it to use the cache folder",
        )
    return False


class Mark(NamedTuple):
    """The annotation of a digit, or of a crowd of one digit."""

    digit: int
    mask: Mask
    """(canvas, canvas): visible pixels."""
    crowd: bool


class Rectangle(NamedTuple):
    """A rectangle in pixels of the canvas."""

    left: int
    top: int
    width: int
    height: int

    def overlaps(self, other: Rectangle) -> bool:
        """True if both share more than an eighth of the smaller one."""
        right = min(self.left + self.width, other.left + other.width)
        bottom = min(self.top + self.height, other.top + other.height)
        width = max(0, right - max(self.left, other.left))
        height = max(0, bottom - max(self.top, other.top))
        smaller = min(self.width * self.height, other.width * other.height)
        return width * height * 8 > smaller


class _Drawing:
    """A canvas, determined by its split and index."""

    def __init__(self, glyphs: Pixels, labels: Numbers, split: int, index: int) -> None:
        self._glyphs, self._labels = glyphs, labels
        self._bits = np.random.Philox(key=_SEED, counter=[0, 0, split, index])
        self._dark = self._number(0, 2) == 0
        self._canvas = self._background()
        self._occupied: list[Rectangle] = []
        self.marked: list[Mark] = []
        if self._number(0, _EMPTY_PERIOD) == 0:
            return
        if self._number(0, _CROWD_PERIOD) == 0:
            self.marked.append(self._crowd())
        for _ in range(self._number(1, _MAX_DIGITS + 1)):
            self._digit()
        self.marked = [mark for mark in self.marked if mark.mask.any()]

    @property
    def pixels(self) -> Pixels:
        """Pixels (canvas, canvas, 3)."""
        return np.clip(self._canvas, 0, 255).astype(np.uint8)

    def _numbers(self, low: int, high: int, count: int) -> Numbers:
        """Draw integers from `low` to below `high`."""
        raw = self._bits.random_raw(count) % np.uint64(high - low)
        return raw.astype(np.int64) + low

    def _number(self, low: int, high: int) -> int:
        return int(self._numbers(low, high, 1)[0])

    def _background(self) -> Canvas:
        """Draw the background (canvas, canvas, 3): one colour with smooth shading and noise."""
        from PIL import Image

        colour = self._numbers(20, 90, 3)
        if not self._dark:
            colour = 255 - colour
        coarse = Image.fromarray(self._numbers(0, 256, 25).astype(np.uint8).reshape(5, 5))
        size = (CANVAS_SIZE, CANVAS_SIZE)
        shade = np.asarray(coarse.resize(size, Image.Resampling.BILINEAR), np.int32)
        light = (shade - 128) // 5 + self._numbers(-6, 7, CANVAS_SIZE**2).reshape(size)
        return (colour + light[..., None]).astype(np.int32)

    def _digit(self) -> None:
        """Draw a digit over the others, unless there is no free place."""
        size = self._number(*_DIGIT_SIZES)
        rectangle = self._free_rectangle(width=size * self._number(75, 111) // 100, height=size)
        if rectangle is None:
            return
        glyph = self._number(0, len(self._labels))
        mask = self._stamp(glyph, rectangle)
        self.marked = [mark._replace(mask=mark.mask & ~mask) for mark in self.marked]
        self.marked.append(Mark(int(self._labels[glyph]), mask, crowd=False))

    def _free_rectangle(self, *, width: int, height: int) -> Rectangle | None:
        """Draw a rectangle that covers little of the others; None if all tries fail."""
        for _ in range(_TRIES):
            left = self._number(0, CANVAS_SIZE - width + 1)
            top = self._number(0, CANVAS_SIZE - height + 1)
            rectangle = Rectangle(left, top, width, height)
            if not any(rectangle.overlaps(other) for other in self._occupied):
                self._occupied.append(rectangle)
                return rectangle
        return None

    def _crowd(self) -> Mark:
        """Draw overlapping small digits of one class, with one annotation."""
        digit = self._number(0, 10)
        same = np.flatnonzero(self._labels == digit)
        left, top = self._numbers(0, CANVAS_SIZE - _CROWD_EXTENT + 1, 2).tolist()
        self._occupied.append(Rectangle(left, top, _CROWD_EXTENT, _CROWD_EXTENT))
        mask = np.zeros((CANVAS_SIZE, CANVAS_SIZE), np.bool_)
        for _ in range(self._number(10, 16)):
            size = self._number(*_CROWD_SIZES)
            column, row = self._numbers(0, _CROWD_EXTENT - size + 1, 2).tolist()
            glyph = int(same[self._number(0, len(same))])
            mask |= self._stamp(glyph, Rectangle(left + column, top + row, size, size))
        return Mark(digit, mask, crowd=True)

    def _stamp(self, glyph: int, rectangle: Rectangle) -> Mask:
        """Draw the glyph into the rectangle in a random colour; returns its mask."""
        from PIL import Image

        colour = self._numbers(0, 106, 3)
        ink = (255 - colour if self._dark else colour).astype(np.int32)
        picture = Image.fromarray(self._glyphs[glyph])
        resized = picture.resize((rectangle.width, rectangle.height), Image.Resampling.BICUBIC)
        alpha = np.asarray(resized, np.int32)[..., None]
        rows = slice(rectangle.top, rectangle.top + rectangle.height)
        columns = slice(rectangle.left, rectangle.left + rectangle.width)
        window = self._canvas[rows, columns]
        window += (ink - window) * alpha // 255
        mask = np.zeros((CANVAS_SIZE, CANVAS_SIZE), np.bool_)
        mask[rows, columns] = alpha[..., 0] >= _MASK_THRESHOLD
        return mask


def _write_split(folder: Path, name: str, *, split: int, first_id: int, count: int) -> None:
    """Write `name`/*.png and annotations/instances_`name`.json."""
    from PIL import Image

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


def _annotation(mark: Mark) -> dict[str, Any]:
    """Annotation in COCO's format: box, and uncompressed run lengths by column, zeros first."""
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
