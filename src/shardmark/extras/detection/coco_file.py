"""Reads an annotation file of COCO into arrays, and caches them.  Imports no torch."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NotRequired
from zipfile import BadZipFile

import numpy as np
from pydantic import Field, PositiveInt, StrictInt, StrictStr, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic wants it before Python 3.12

from shardmark.base.errors import DataError, StorageError
from shardmark.base.results.files import write_atomically
from shardmark.ranks.workloads.datasets.files import cache_folder

if TYPE_CHECKING:
    from numpy.typing import NDArray

FORMAT_VERSION = 2
"""Version of the cache; must increase when a field of `CocoFile` changes."""
REMEDY = "correct the file, or download it again; cocodataset.org describes the format"
_MIN_COORDINATES = 6
"""Fewest coordinates of a polygon with an area: three points."""


class _Picture(TypedDict):
    id: StrictInt
    file_name: Annotated[StrictStr, Field(min_length=1)]
    width: PositiveInt
    height: PositiveInt


class _Category(TypedDict):
    id: StrictInt
    name: StrictStr


class _Annotation(TypedDict):
    image_id: StrictInt
    category_id: StrictInt
    bbox: tuple[float, float, float, float]
    id: NotRequired[StrictInt]
    area: NotRequired[float | None]
    iscrowd: NotRequired[bool]


class _RunLengths(TypedDict):
    size: tuple[int, int]
    counts: str | list[int]


class _MaskedAnnotation(_Annotation):
    segmentation: NotRequired[list[list[float]] | _RunLengths | None]


class _Document(TypedDict):
    images: Annotated[list[_Picture], Field(min_length=1)]
    categories: Annotated[list[_Category], Field(min_length=1)]
    annotations: list[_Annotation]


class _MaskedDocument(_Document):
    annotations: list[_MaskedAnnotation]  # type: ignore[misc]  # one that has more keys


@dataclass(frozen=True, slots=True, kw_only=True)
class CocoFile:
    """p images by ascending id, and n objects by image and then in the order of the file."""

    image_ids: NDArray[np.int64]
    file_names: NDArray[np.str_]
    sizes: NDArray[np.int64]
    """(p, 2): width, height in pixels."""
    offsets: NDArray[np.int64]
    """(p + 1,): image i has the objects from [i] to [i + 1]."""
    annotation_ids: NDArray[np.int64]
    """(n,), -1 for annotations without an id."""
    boxes: NDArray[np.float64]
    """(n, 4): left, top, right, bottom in pixels, neither clipped nor checked."""
    labels: NDArray[np.int64]
    """(n,), from 1: index of the category by ascending id."""
    areas: NDArray[np.float64]
    crowds: NDArray[np.bool_]
    category_ids: NDArray[np.int64]
    category_names: NDArray[np.str_]
    masks: NDArray[np.uint8]
    """Concatenated compressed run lengths of all masks; empty if masks are not read."""
    mask_offsets: NDArray[np.int64]
    """(n + 1,): object i has the bytes from [i] to [i + 1], none without a mask."""

    @property
    def categories(self) -> dict[int, str]:
        """Id -> name of each category, by ascending id."""
        return dict(zip(self.category_ids.tolist(), self.category_names.tolist(), strict=True))


def read_coco(file: Path, *, with_masks: bool) -> CocoFile:
    """Read the arrays from the cache, or else from the file, and cache them.

    Parsing COCO's own training file needs several GB and half a minute, with masks some minutes;
    reading the cache needs a second.  Raises `DataError` for an invalid file.
    """
    stat = file.stat()
    path_hash = hashlib.sha256(os.fsencode(file.absolute())).hexdigest()[:16]
    state = f"{stat.st_size}-{stat.st_mtime_ns}-{FORMAT_VERSION}{'-masks' * with_masks}"
    cached = cache_folder() / "coco" / f"{file.stem}-{path_hash}" / f"{state}.npz"
    try:
        with cached.open("rb") as stored, np.load(stored, allow_pickle=False) as arrays:
            return CocoFile(**{field.name: arrays[field.name] for field in fields(CocoFile)})
    except (OSError, ValueError, KeyError, EOFError, BadZipFile):
        parsed = _parsed(file, with_masks=with_masks)
        with suppress(OSError, StorageError):  # the next call parses the file again
            _store(cached, {field.name: getattr(parsed, field.name) for field in fields(CocoFile)})
        return parsed


def _store(path: Path, arrays: dict[str, NDArray[Any]]) -> None:
    """Write the cache atomically, and remove the caches of older states of the file."""
    content = io.BytesIO()
    np.savez(content, allow_pickle=False, **arrays)
    path.parent.mkdir(parents=True, exist_ok=True)
    for older in path.parent.glob("*.npz"):
        if older.stem.endswith("-masks") == path.stem.endswith("-masks"):
            older.unlink(missing_ok=True)
    write_atomically(path, content.getvalue())


def _parsed(file: Path, *, with_masks: bool) -> CocoFile:
    document = _validated(file, with_masks=with_masks)
    pictures = sorted(document["images"], key=lambda picture: picture["id"])
    categories = sorted(document["categories"], key=lambda category: category["id"])
    image_ids = np.array([picture["id"] for picture in pictures], np.int64)
    category_ids = np.array([category["id"] for category in categories], np.int64)
    for name, ids in (("images", image_ids), ("categories", category_ids)):
        duplicates = np.flatnonzero(ids[1:] == ids[:-1])
        if len(duplicates):
            raise DataError(str(file), f"two {name} have the id {ids[duplicates[0]]}", REMEDY)
    annotations = document["annotations"]
    picture_of = _indices(file, annotations, "image_id", image_ids, "images")
    order = np.argsort(picture_of, kind="stable")
    annotations = [annotations[index] for index in order.tolist()]
    boxes = np.array([entry["bbox"] for entry in annotations], np.float64).reshape(-1, 4)
    areas = [entry.get("area") for entry in annotations]
    with np.errstate(invalid="ignore", over="ignore"):  # infinite boxes
        box_areas = boxes[:, 2] * boxes[:, 3]
        boxes[:, 2:] += boxes[:, :2]
    masks = [b""] * len(annotations)
    if with_masks:
        sizes = [pictures[index] for index in picture_of[order].tolist()]
        masks = [
            _run_lengths(file, entry, picture["height"], picture["width"])
            for entry, picture in zip(annotations, sizes, strict=True)
        ]
    return CocoFile(
        image_ids=image_ids,
        file_names=np.array([picture["file_name"] for picture in pictures]),
        sizes=np.array([(picture["width"], picture["height"]) for picture in pictures], np.int64),
        offsets=np.searchsorted(picture_of[order], np.arange(len(pictures) + 1)),
        annotation_ids=np.array([entry.get("id", -1) for entry in annotations], np.int64),
        boxes=boxes,
        labels=1 + _indices(file, annotations, "category_id", category_ids, "categories"),
        areas=np.where([area is None for area in areas], box_areas, np.array(areas, np.float64)),
        crowds=np.array([entry.get("iscrowd", False) for entry in annotations], np.bool_),
        category_ids=category_ids,
        category_names=np.array([category["name"] for category in categories]),
        masks=np.frombuffer(b"".join(masks), np.uint8),
        mask_offsets=np.cumsum([0, *map(len, masks)]),
    )


def _validated(file: Path, *, with_masks: bool) -> Any:
    try:
        content = file.read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise DataError(str(file), f"cannot be read ({error})", "make it readable") from error
    try:
        return TypeAdapter(_MaskedDocument if with_masks else _Document).validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        path = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in first["loc"])
        value = repr(first["input"])
        actual = f"found {value[:60]}{'...' if len(value) > 60 else ''}: " if path else ""
        problem = f"{path.removeprefix('.') or 'the file'}: {actual}{first['msg']}"
        raise DataError(str(file), problem, REMEDY) from None


def _indices(
    file: Path, annotations: list[Any], key: str, sorted_ids: NDArray[np.int64], owner: str
) -> NDArray[np.int64]:
    """Index in `sorted_ids` of the id under `key` of each annotation."""
    ids = np.array([entry[key] for entry in annotations], np.int64)
    indices = np.searchsorted(sorted_ids, ids).clip(max=len(sorted_ids) - 1)
    unknown = np.flatnonzero(sorted_ids[indices] != ids)
    if len(unknown):
        entry = annotations[unknown[0]]
        more = f" (and {len(unknown) - 1} more annotations)" if len(unknown) > 1 else ""
        problem = f"annotation {entry.get('id')}: {key} {entry[key]} is not in {owner!r}{more}"
        raise DataError(str(file), problem, REMEDY)
    return indices.astype(np.int64, copy=False)


def _run_lengths(file: Path, annotation: Any, height: int, width: int) -> bytes:
    """Compressed run lengths of the mask; empty if the annotation has none."""
    from faster_coco_eval.core import mask as coding

    segmentation = annotation.get("segmentation")
    encode: Callable[..., Any] = coding.frPyObjects
    try:
        if not segmentation:
            return b""
        if isinstance(segmentation, list):
            if not all(np.isfinite(polygon).all() for polygon in segmentation):
                raise ValueError("a coordinate is not finite")
            if any(len(polygon) % 2 for polygon in segmentation):
                raise ValueError("a polygon has an odd number of coordinates")
            polygons = [polygon for polygon in segmentation if len(polygon) >= _MIN_COORDINATES]
            empty = {"size": [height, width], "counts": [height * width]}
            mask = coding.merge(encode(polygons, height, width)) if polygons else None
            return bytes((mask or encode(empty, height, width))["counts"])
        if segmentation["size"] != (height, width):
            raise ValueError("they belong to an image of another size")
        counts = segmentation["counts"]
        if isinstance(counts, str):
            characters = counts.encode("ascii")
            # Raises an error for invalid characters.
            coding.decode({"size": [height, width], "counts": characters})
            return characters
        if min(counts, default=0) < 0 or sum(counts) != height * width:
            raise ValueError(f"they do not sum to {height * width} pixels")
        return bytes(encode({"size": [height, width], "counts": counts}, height, width)["counts"])
    except (ValueError, RuntimeError) as error:
        form = "polygons" if isinstance(segmentation, list) else "run lengths"
        problem = f"annotation {annotation.get('id')} has invalid {form}: {error}"
        raise DataError(str(file), problem, REMEDY) from error
