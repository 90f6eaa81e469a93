"""Draws handwritten digits on canvases and writes them in COCO's layout.  Imports no torch.

The draws are raw numbers of Philox, whose stream numpy promises to keep, and the drawing is integer
arithmetic: the pixels are the same on every machine.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

CANVAS_SIZE = 128
CATEGORY_IDS = tuple(range(1, 21, 2))
"""Of the digits 0 to 9: with gaps, as COCO's are."""

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

Pixels = NDArray[np.uint8]
Mask = NDArray[np.bool_]
Place = tuple[int, int, int, int]
"""Left, top, width, height."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Glyphs:
    """Handwritten digits to draw from."""

    pictures: Pixels
    """(n, 8, 8), ink from 0 to 255."""
    labels: NDArray[np.int64]
    """(n,), 0 to 9."""

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, slots=True, kw_only=True)
class Marked:
    """One annotation: a digit, or a crowd of one digit."""

    digit: int
    mask: Mask
    """(canvas, canvas): what is visible of it."""
    crowd: bool

    @property
    def box(self) -> Place:
        """Of the mask."""
        rows, columns = np.flatnonzero(self.mask.any(1)), np.flatnonzero(self.mask.any(0))
        left, top = int(columns[0]), int(rows[0])
        return left, top, int(columns[-1]) - left + 1, int(rows[-1]) - top + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Canvas:
    pixels: Pixels
    """(canvas, canvas, 3)."""
    marked: tuple[Marked, ...]


class _Draws:
    """Whole numbers from a stream of its own for each (split, canvas)."""

    def __init__(self, split: int, index: int) -> None:
        self._bits = np.random.Philox(key=_SEED, counter=[0, 0, split, index])

    def numbers(self, low: int, high: int, count: int) -> NDArray[np.int64]:
        """`count` numbers from `low` to below `high`."""
        raw = self._bits.random_raw(count) % np.uint64(high - low)
        return raw.astype(np.int64) + low

    def number(self, low: int, high: int) -> int:
        return int(self.numbers(low, high, 1)[0])


def draw_canvas(glyphs: Glyphs, *, split: int, index: int) -> Canvas:
    """Canvas `index` of a split, which depends on nothing else."""
    draws = _Draws(split, index)
    dark = draws.number(0, 2) == 0
    pixels = _background(draws, dark=dark)
    if draws.number(0, _EMPTY_IN) == 0:
        return Canvas(pixels=_clipped(pixels), marked=())
    crowd = draws.number(0, _CROWD_IN) == 0
    places: list[Place] = []
    marked: list[Marked] = []
    if crowd:
        marked.append(_draw_crowd(pixels, glyphs, draws, places, dark=dark))
    for _ in range(draws.number(1, _MOST_DIGITS + 1)):
        size = draws.number(*_DIGIT_SIZES)
        width = size * draws.number(75, 111) // 100
        place = _free_place(draws, places, width=width, height=size)
        if place is None:
            continue
        glyph = draws.number(0, len(glyphs))
        mask = _stamp(pixels, glyphs.pictures[glyph], place, _ink(draws, dark=dark))
        digit = int(glyphs.labels[glyph])
        marked = [replace(mark, mask=mark.mask & ~mask) for mark in marked]
        marked.append(Marked(digit=digit, mask=mask, crowd=False))
    visible = tuple(mark for mark in marked if mark.mask.any())
    return Canvas(pixels=_clipped(pixels), marked=visible)


def _background(draws: _Draws, *, dark: bool) -> NDArray[np.int32]:
    """One colour, shaded slowly, and grain: (canvas, canvas, 3)."""
    colour = draws.numbers(20, 90, 3)
    if not dark:
        colour = 255 - colour
    coarse = draws.numbers(0, 256, 25).astype(np.uint8).reshape(5, 5)
    shade = np.asarray(
        Image.fromarray(coarse).resize((CANVAS_SIZE, CANVAS_SIZE), Image.Resampling.BILINEAR),
        np.int32,
    )
    grain = draws.numbers(-6, 7, CANVAS_SIZE**2).reshape(CANVAS_SIZE, CANVAS_SIZE)
    light = (shade - 128) // 5 + grain
    return (colour + light[..., None]).astype(np.int32)


def _ink(draws: _Draws, *, dark: bool) -> NDArray[np.int64]:
    colour = draws.numbers(0, 106, 3)
    return 255 - colour if dark else colour


def _free_place(draws: _Draws, places: list[Place], *, width: int, height: int) -> Place | None:
    """One that covers little of what is there; None where none was found."""
    for _ in range(_TRIES):
        left = draws.number(0, CANVAS_SIZE - width + 1)
        top = draws.number(0, CANVAS_SIZE - height + 1)
        place = (left, top, width, height)
        if not any(_crowded(place, other) for other in places):
            places.append(place)
            return place
    return None


def _crowded(place: Place, other: Place) -> bool:
    """Whether they share more than an eighth of the smaller one."""
    ends = (min(place[axis] + place[axis + 2], other[axis] + other[axis + 2]) for axis in (0, 1))
    width, height = (max(0, end - max(place[i], other[i])) for i, end in enumerate(ends))
    return width * height * 8 > min(place[2] * place[3], other[2] * other[3])


def _stamp(pixels: NDArray[np.int32], glyph: Pixels, place: Place, ink: NDArray[np.int64]) -> Mask:
    """Draw the glyph there; return its mask."""
    left, top, width, height = place
    resized = Image.fromarray(glyph).resize((width, height), Image.Resampling.BICUBIC)
    alpha = np.asarray(resized, np.int32)[..., None]
    window = pixels[top : top + height, left : left + width]
    window += (ink.astype(np.int32) - window) * alpha // 255
    mask = np.zeros((CANVAS_SIZE, CANVAS_SIZE), np.bool_)
    mask[top : top + height, left : left + width] = alpha[..., 0] >= _INK_FROM
    return mask


def _draw_crowd(
    pixels: NDArray[np.int32],
    glyphs: Glyphs,
    draws: _Draws,
    places: list[Place],
    *,
    dark: bool,
) -> Marked:
    """Small digits of one class in a heap, marked as one group."""
    digit = draws.number(0, 10)
    same = np.flatnonzero(glyphs.labels == digit)
    extent = _CROWD_EXTENT
    left, top = (int(start) for start in draws.numbers(0, CANVAS_SIZE - extent + 1, 2))
    places.append((left, top, extent, extent))
    mask = np.zeros((CANVAS_SIZE, CANVAS_SIZE), np.bool_)
    for _ in range(draws.number(10, 16)):
        size = draws.number(*_CROWD_SIZES)
        column, row = (int(start) for start in draws.numbers(0, extent - size + 1, 2))
        glyph = glyphs.pictures[same[draws.number(0, len(same))]]
        mask |= _stamp(
            pixels, glyph, (left + column, top + row, size, size), _ink(draws, dark=dark)
        )
    return Marked(digit=digit, mask=mask, crowd=True)


def _clipped(pixels: NDArray[np.int32]) -> Pixels:
    return np.clip(pixels, 0, 255).astype(np.uint8)


def run_lengths(mask: Mask) -> list[int]:
    """COCO's uncompressed run lengths: column by column, a run of zeros first."""
    flat = mask.ravel(order="F")
    ends = np.append(np.flatnonzero(flat[1:] != flat[:-1]) + 1, flat.size)
    lengths: list[int] = np.diff(ends, prepend=0).tolist()
    return [0, *lengths] if flat[0] else lengths


def write_split(
    folder: Path, name: str, glyphs: Glyphs, *, split: int, first_id: int, count: int
) -> None:
    """`name`/*.png and annotations/instances_`name`.json."""
    (folder / name).mkdir(parents=True)
    (folder / "annotations").mkdir(exist_ok=True)
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for index in range(count):
        canvas = draw_canvas(glyphs, split=split, index=index)
        image_id = first_id + index
        file_name = f"{image_id:012d}.png"
        Image.fromarray(canvas.pixels).save(folder / name / file_name, compress_level=3)
        images.append(
            {"id": image_id, "file_name": file_name, "width": CANVAS_SIZE, "height": CANVAS_SIZE}
        )
        annotations += _annotations(canvas.marked, image_id, len(annotations) + 1)
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


def _annotations(marked: Sequence[Marked], image_id: int, first_id: int) -> list[dict[str, Any]]:
    return [
        {
            "id": first_id + index,
            "image_id": image_id,
            "category_id": CATEGORY_IDS[mark.digit],
            "bbox": list(mark.box),
            "area": int(mark.mask.sum()),
            "iscrowd": int(mark.crowd),
            "segmentation": {
                "size": [CANVAS_SIZE, CANVAS_SIZE],
                "counts": run_lengths(mark.mask),
            },
        }
        for index, mark in enumerate(marked)
    ]
