"""An annotation file of COCO as arrays, read once and kept in the cache.  Imports no torch."""

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

from shardmark.core.errors import DataError, StorageError
from shardmark.results.files import write_atomically
from shardmark.workloads.datasets.files import cache_folder

if TYPE_CHECKING:
    from numpy.typing import NDArray

FORMAT_VERSION = 2
"""Of the cache; to be raised when a field of `CocoFile` or its meaning changes."""
REMEDY = "correct the file, or get it again; cocodataset.org describes the format"
_FEWEST_COORDINATES = 6
"""Of a polygon: fewer than three points have no area."""


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
    """p pictures by ascending id, n objects by picture and then in the order of the file."""

    image_ids: NDArray[np.int64]
    file_names: NDArray[np.str_]
    sizes: NDArray[np.int64]
    """(p, 2): width, height in pixels."""
    offsets: NDArray[np.int64]
    """(p + 1,): picture i has the objects from [i] to [i + 1]."""
    annotation_ids: NDArray[np.int64]
    """-1 where the file gives none."""
    boxes: NDArray[np.float64]
    """(n, 4): left, top, right, bottom in pixels, neither clipped nor checked."""
    labels: NDArray[np.int64]
    """(n,), from 1: places of the categories by ascending id."""
    areas: NDArray[np.float64]
    crowds: NDArray[np.bool_]
    category_ids: NDArray[np.int64]
    category_names: NDArray[np.str_]
    masks: NDArray[np.uint8]
    """All masks' compressed run lengths, one after the other; empty unless they were asked for."""
    mask_offsets: NDArray[np.int64]
    """(n + 1,); an object without a mask has none of the bytes."""

    @property
    def categories(self) -> dict[int, str]:
        """Name of each category, by ascending id."""
        return dict(zip(self.category_ids.tolist(), self.category_names.tolist(), strict=True))


def read_coco(file: Path, *, with_masks: bool) -> CocoFile:
    """The file's arrays from the cache, or else from the file, and then kept in the cache.

    COCO's own training file takes several GB and half a minute once, with masks some minutes; from
    the cache a second.
    Raises `DataError` for whatever is wrong in the file.
    """
    stat = file.stat()
    place = hashlib.sha256(os.fsencode(file.absolute())).hexdigest()[:16]
    state = f"{stat.st_size}-{stat.st_mtime_ns}-{FORMAT_VERSION}{'-masks' * with_masks}"
    kept = cache_folder() / "coco" / f"{file.stem}-{place}" / f"{state}.npz"
    try:
        with kept.open("rb") as stored, np.load(stored, allow_pickle=False) as arrays:
            return CocoFile(**{field.name: arrays[field.name] for field in fields(CocoFile)})
    except (OSError, ValueError, KeyError, EOFError, BadZipFile):
        parsed = _parsed(file, with_masks=with_masks)
        with suppress(OSError, StorageError):  # it is parsed again next time
            _keep(kept, {field.name: getattr(parsed, field.name) for field in fields(CocoFile)})
        return parsed


def _keep(place: Path, arrays: dict[str, NDArray[Any]]) -> None:
    """Written whole or not at all, in place of what an older state of the file gave."""
    content = io.BytesIO()
    np.savez(content, allow_pickle=False, **arrays)
    place.parent.mkdir(parents=True, exist_ok=True)
    for older in place.parent.glob("*.npz"):
        if older.stem.endswith("-masks") == place.stem.endswith("-masks"):
            older.unlink(missing_ok=True)
    write_atomically(place, content.getvalue())


def _parsed(file: Path, *, with_masks: bool) -> CocoFile:
    document = _validated(file, with_masks=with_masks)
    pictures = sorted(document["images"], key=lambda picture: picture["id"])
    categories = sorted(document["categories"], key=lambda category: category["id"])
    image_ids = np.array([picture["id"] for picture in pictures], np.int64)
    category_ids = np.array([category["id"] for category in categories], np.int64)
    for what, ids in (("pictures", image_ids), ("categories", category_ids)):
        twice = np.flatnonzero(ids[1:] == ids[:-1])
        if len(twice):
            raise DataError(str(file), f"two {what} have the id {ids[twice[0]]}", REMEDY)
    annotations = document["annotations"]
    picture_of = _places(file, annotations, "image_id", image_ids, "images")
    order = np.argsort(picture_of, kind="stable")
    annotations = [annotations[index] for index in order.tolist()]
    boxes = np.array([entry["bbox"] for entry in annotations], np.float64).reshape(-1, 4)
    areas = [entry.get("area") for entry in annotations]
    with np.errstate(invalid="ignore", over="ignore"):  # infinite boxes
        of_boxes = boxes[:, 2] * boxes[:, 3]
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
        labels=1 + _places(file, annotations, "category_id", category_ids, "categories"),
        areas=np.where([area is None for area in areas], of_boxes, np.array(areas, np.float64)),
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
        where = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in first["loc"])
        shown = repr(first["input"])
        found = f"found {shown[:60]}{'...' if len(shown) > 60 else ''}: " if where else ""
        said = f"{where.removeprefix('.') or 'the file'}: {found}{first['msg']}"
        raise DataError(str(file), said, REMEDY) from None


def _places(
    file: Path, annotations: list[Any], key: str, known: NDArray[np.int64], owner: str
) -> NDArray[np.int64]:
    """Where each annotation's id is among the known ones, which ascend."""
    ids = np.array([entry[key] for entry in annotations], np.int64)
    places = np.searchsorted(known, ids).clip(max=len(known) - 1)
    strangers = np.flatnonzero(known[places] != ids)
    if len(strangers):
        entry = annotations[strangers[0]]
        more = f" (and {len(strangers) - 1} more annotations)" if len(strangers) > 1 else ""
        said = f"annotation {entry.get('id')}: {key} {entry[key]} is not in {owner!r}{more}"
        raise DataError(str(file), said, REMEDY)
    return places.astype(np.int64, copy=False)


def _run_lengths(file: Path, annotation: Any, height: int, width: int) -> bytes:
    """The mask's compressed run lengths; nothing where the annotation has none."""
    from faster_coco_eval.core import mask as coding

    given = annotation.get("segmentation")
    encode: Callable[..., Any] = coding.frPyObjects
    try:
        if not given:
            return b""
        if isinstance(given, list):
            if not all(np.isfinite(polygon).all() for polygon in given):
                raise ValueError("a coordinate is not finite")
            if any(len(polygon) % 2 for polygon in given):
                raise ValueError("a polygon has an odd number of coordinates")
            polygons = [polygon for polygon in given if len(polygon) >= _FEWEST_COORDINATES]
            nothing = {"size": [height, width], "counts": [height * width]}
            drawn = coding.merge(encode(polygons, height, width)) if polygons else None
            return bytes((drawn or encode(nothing, height, width))["counts"])
        if given["size"] != (height, width):
            raise ValueError("they are of a picture of another size")
        counts = given["counts"]
        if isinstance(counts, str):
            characters = counts.encode("ascii")
            # It raises where the characters make no sense.
            coding.decode({"size": [height, width], "counts": characters})
            return characters
        if min(counts, default=0) < 0 or sum(counts) != height * width:
            raise ValueError(f"they do not add up to {height * width} pixels")
        return bytes(encode({"size": [height, width], "counts": counts}, height, width)["counts"])
    except (ValueError, RuntimeError) as error:
        what = "polygons" if isinstance(given, list) else "run lengths"
        said = f"annotation {annotation.get('id')} has wrong {what}: {error}"
        raise DataError(str(file), said, REMEDY) from error
