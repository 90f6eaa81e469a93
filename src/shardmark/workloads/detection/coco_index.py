"""An annotation file of COCO as arrays.  Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from shardmark.workloads.datasets.cache import entry_of, load_arrays, save_arrays

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

FORMAT_VERSION = 1
"""Of the cache; to be raised when a field of `CocoIndex` or its meaning changes."""

NO_MASK, POLYGONS, RUN_LENGTHS, COMPRESSED_RUN_LENGTHS = range(4)
"""How an object's mask is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CocoIndex:
    """p pictures by ascending id, n objects by picture and then in the order of the file."""

    image_ids: NDArray[np.int64]
    file_names: NDArray[np.bytes_]
    """(p,), UTF-8."""
    widths: NDArray[np.int64]
    heights: NDArray[np.int64]
    object_offsets: NDArray[np.int64]
    """(p + 1,): picture i has the objects from [i] to [i + 1]."""
    annotation_ids: NDArray[np.int64]
    """-1 where the file gives none."""
    boxes: NDArray[np.float64]
    """(n, 4): left, top, width, height, as in the file."""
    labels: NDArray[np.int64]
    """(n,), from 1: places of the categories by ascending id."""
    areas: NDArray[np.float64]
    crowds: NDArray[np.bool_]
    mask_rows: NDArray[np.int64]
    """(n,): where the object's mask is in the next two; they keep the order of the file."""
    mask_kinds: NDArray[np.int8]
    part_offsets: NDArray[np.int64]
    """(n + 1,): mask i has the parts from [i] to [i + 1].  A part is a polygon; of run lengths the
    first part is the size, the second the counts or the characters."""
    value_offsets: NDArray[np.int64]
    """(parts + 1,): part i has the values from [i] to [i + 1]."""
    mask_values: NDArray[np.float64]
    category_ids: NDArray[np.int64]
    """(classes,), ascending."""
    category_names: NDArray[np.bytes_]
    """(classes,), UTF-8."""

    @property
    def categories(self) -> dict[int, str]:
        """Name of each category, by ascending id."""
        names = (name.decode() for name in self.category_names.tolist())
        return dict(zip(self.category_ids.tolist(), names, strict=True))

    def name(self, picture: int) -> str:
        """The picture's file below the folder of its split."""
        return bytes(self.file_names[picture]).decode()


def read_index(file: Path) -> CocoIndex:
    """The file's arrays from the cache, or else from the file, and then kept in the cache.

    Raises `DataError` for whatever is wrong in the file.
    """
    entry = entry_of("coco", file, FORMAT_VERSION)
    names = [field.name for field in fields(CocoIndex)]
    found = load_arrays(entry, names)
    if found is not None and _fits(kept := CocoIndex(**found)):
        return kept
    from shardmark.workloads.detection.coco_parsing import parse

    parsed = parse(file)
    arrays = {name: getattr(parsed, name) for name in names}
    if save_arrays(entry, arrays) and (kept_arrays := load_arrays(entry, names)) is not None:
        return CocoIndex(**kept_arrays)  # so that the parsed ones can be freed
    return parsed


def _fits(index: CocoIndex) -> bool:
    """Whether the arrays belong together: one of them may be damaged."""
    pictures, objects = len(index.image_ids), len(index.labels)
    parts = len(index.value_offsets) - 1
    return (
        all(len(a) == pictures for a in (index.file_names, index.widths, index.heights))
        and all(
            len(a) == objects
            for a in (
                *(index.annotation_ids, index.areas, index.crowds),
                *(index.mask_rows, index.mask_kinds),
            )
        )
        and index.boxes.shape == (objects, 4)
        and len(index.object_offsets) == pictures + 1
        and index.object_offsets[-1] == objects
        and len(index.part_offsets) == objects + 1
        and index.part_offsets[-1] == parts
        and index.value_offsets[-1] == len(index.mask_values)
        and len(index.category_ids) == len(index.category_names)
    )
