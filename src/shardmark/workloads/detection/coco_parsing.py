"""Reads an annotation file of COCO.  Imports no torch."""

from __future__ import annotations

import json
from array import array
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from shardmark.core.errors import DataError
from shardmark.workloads.detection.coco_index import (
    COMPRESSED_RUN_LENGTHS,
    NO_MASK,
    POLYGONS,
    RUN_LENGTHS,
    CocoIndex,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

REMEDY = "correct the file, or get it again; cocodataset.org describes the format"
_FEWEST_COORDINATES = 6
"""Of a polygon: fewer than three points have no area."""

_TAKEN = object()
"""Stands in the parsed document for an annotation that has been taken."""


def parse(file: Path) -> CocoIndex:
    """The whole file as arrays.  Raises `DataError` that names the entry that is wrong."""
    annotations = _Annotations(file)
    try:
        document = json.loads(file.read_text(encoding="utf-8-sig"), object_hook=annotations)
    except OSError as error:
        raise DataError(str(file), f"cannot be read ({error})", "make it readable") from error
    except (ValueError, RecursionError) as error:
        raise DataError(str(file), f"is not JSON ({error})", REMEDY) from error
    pictures, categories, taken = (
        _list_of(file, document, key) for key in ("images", "categories", "annotations")
    )
    if len(taken) != len(annotations.ids) or any(entry is not _TAKEN for entry in taken):
        _refuse(file, "'annotations' is not a list of image_id, category_id and bbox each")
    image_ids, pictures = _sorted_pictures(file, pictures)
    category_ids, category_names = _categories(file, categories)
    picture_of = annotations.places(annotations.image_ids, image_ids, "image_id", "images")
    category_of = annotations.places(
        annotations.category_ids, category_ids, "category_id", "categories"
    )
    order = np.argsort(picture_of, kind="stable")
    return CocoIndex(
        image_ids=image_ids,
        file_names=np.array([picture["file_name"].encode() for picture in pictures], np.bytes_),
        widths=np.array([picture["width"] for picture in pictures], np.int64),
        heights=np.array([picture["height"] for picture in pictures], np.int64),
        object_offsets=_offsets(np.bincount(picture_of, minlength=len(image_ids))),
        labels=1 + category_of[order],
        **annotations.arrays(order),
        category_ids=category_ids,
        category_names=category_names,
    )


class _Annotations:
    """Takes each annotation from the parser when it is read: as dictionaries, those of COCO would
    fill gigabytes."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.ids = array("q")
        self.image_ids = array("q")
        self.category_ids = array("q")
        self.boxes = array("d")
        self.areas = array("d")
        self.crowds = array("b")
        self.mask_kinds = array("b")
        self.mask_parts = array("q")
        """Number of parts of each mask."""
        self.part_lengths = array("q")
        """Number of values of each part."""
        self.mask_values = array("d")

    def __call__(self, entry: dict[str, Any]) -> object:
        """What the parser puts in the place of the dictionary."""
        if not ("image_id" in entry or "category_id" in entry or "bbox" in entry):
            return entry
        try:
            self._take(entry)
        except (LookupError, TypeError, ValueError, OverflowError) as error:
            number = entry.get("id", f"number {len(self.image_ids)}")
            raise DataError(
                str(self.file), f"annotation {number}: {_fault(entry, error)}", REMEDY
            ) from error
        return _TAKEN

    def _take(self, entry: dict[str, Any]) -> None:
        self.image_ids.append(entry["image_id"])
        self.category_ids.append(entry["category_id"])
        left, top, width, height = entry["bbox"]
        self.boxes.extend((left, top, width, height))
        area = entry.get("area")
        self.areas.append(width * height if area is None else area)
        self.crowds.append(1 if entry.get("iscrowd") else 0)
        self.ids.append(entry.get("id", -1))
        parts: Sequence[Any]
        kind, parts = _mask(entry.get("segmentation"))
        self.mask_kinds.append(kind)
        self.mask_parts.append(len(parts))
        for part in parts:
            self.part_lengths.append(len(part))
            self.mask_values.extend(part)

    def places(
        self, wanted: array[int], known: NDArray[np.int64], key: str, of: str
    ) -> NDArray[np.int64]:
        """Where each annotation's id is among the known ones, which ascend."""
        ids = np.asarray(wanted, np.int64)
        found = np.searchsorted(known, ids).clip(max=len(known) - 1)
        strangers = np.flatnonzero(known[found] != ids)
        if len(strangers):
            first = strangers[0]
            more = f" (and {len(strangers) - 1} more annotations)" if len(strangers) > 1 else ""
            _refuse(
                self.file,
                f"annotation {self.ids[first]}: {key} {ids[first]} is not in {of!r}{more}",
            )
        return found.astype(np.int64, copy=False)

    def arrays(self, order: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """Fields of `CocoIndex`; the masks stay in the order of the file."""
        return {
            "annotation_ids": np.asarray(self.ids)[order],
            "boxes": np.asarray(self.boxes).reshape(-1, 4)[order],
            "areas": np.asarray(self.areas)[order],
            "crowds": np.asarray(self.crowds).astype(np.bool_)[order],
            "mask_rows": order,
            "mask_kinds": np.asarray(self.mask_kinds),
            "part_offsets": _offsets(np.asarray(self.mask_parts)),
            "value_offsets": _offsets(np.asarray(self.part_lengths)),
            "mask_values": np.asarray(self.mask_values),
        }


def _mask(segmentation: Any) -> tuple[int, Sequence[Any]]:
    """How it is written, and its parts."""
    if not segmentation:
        return NO_MASK, ()
    if isinstance(segmentation, list):
        if any(len(polygon) % 2 for polygon in segmentation):
            raise ValueError("a polygon has an odd number of coordinates")
        return POLYGONS, [p for p in segmentation if len(p) >= _FEWEST_COORDINATES]
    size, counts = segmentation["size"], segmentation["counts"]
    if len(size) != 2:
        raise ValueError("its size is not [height, width]")
    if isinstance(counts, str):
        return COMPRESSED_RUN_LENGTHS, (size, counts.encode("ascii"))
    return RUN_LENGTHS, (size, counts)


def _fault(entry: dict[str, Any], error: Exception) -> str:
    """Which key is missing or wrong."""
    for key in ("image_id", "category_id", "bbox"):
        if key not in entry:
            return f"has no {key}"
    for key in ("id", "image_id", "category_id"):
        if not isinstance(entry.get(key, 0), int):
            return f"{key} is {entry[key]!r}, not a whole number"
    box = entry["bbox"]
    if not isinstance(box, list) or len(box) != 4 or not all(map(_is_number, box)):
        return f"bbox is {box!r}, not four numbers"
    if not _is_number(entry.get("area", 0.0)):
        return f"area is {entry['area']!r}, not a number"
    return f"segmentation is neither polygons nor run lengths ({error})"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _list_of(file: Path, document: Any, key: str) -> list[Any]:
    if not isinstance(document, dict) or not isinstance(document.get(key), list):
        _refuse(file, f"has no list {key!r}")
    found: list[Any] = document[key]
    return found


def _categories(file: Path, categories: list[Any]) -> tuple[NDArray[np.int64], NDArray[np.bytes_]]:
    """Ids, ascending, and names."""
    names: dict[int, bytes] = {}
    for number, entry in enumerate(categories):
        identity, name = _wanted(file, f"category number {number}", entry, {"id": int, "name": str})
        if identity in names:
            _refuse(file, f"two categories have the id {identity}")
        names[identity] = name.encode()
    if not names:
        _refuse(file, "'categories' is empty")
    ids = sorted(names)
    return np.array(ids, np.int64), np.array([names[i] for i in ids], np.bytes_)


def _sorted_pictures(
    file: Path, pictures: list[Any]
) -> tuple[NDArray[np.int64], list[dict[str, Any]]]:
    """Ids, ascending, and the entries in that order."""
    keys = {"id": int, "file_name": str, "width": int, "height": int}
    for number, entry in enumerate(pictures):
        identity, name, width, height = _wanted(file, f"picture number {number}", entry, keys)
        if not name or min(width, height) < 1:
            found = f"{name!r}, {width} x {height}"
            _refuse(file, f"picture {identity} needs a file_name, a width and a height: {found}")
    if not pictures:
        _refuse(file, "'images' is empty")
    ordered = sorted(pictures, key=lambda entry: int(entry["id"]))
    for before, after in pairwise(ordered):
        if before["id"] == after["id"]:
            _refuse(file, f"two pictures have the id {after['id']}")
    return np.array([entry["id"] for entry in ordered], np.int64), ordered


def _wanted(file: Path, what: str, entry: Any, keys: dict[str, type]) -> list[Any]:
    """The entry's values of these keys, of these types."""
    if not isinstance(entry, dict):
        _refuse(file, f"{what} is no mapping")
    for key, kind in keys.items():
        if not isinstance(entry.get(key), kind):
            found = f"{key} is {entry[key]!r}" if key in entry else f"has no {key}"
            _refuse(file, f"{what}: {found}")
    return [entry[key] for key in keys]


def _offsets(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int64, copy=False)


def _refuse(file: Path, found: str) -> NoReturn:
    raise DataError(str(file), found, REMEDY)
