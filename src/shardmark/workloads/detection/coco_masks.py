"""Masks of COCO's annotations as compressed run lengths.  Imports faster-coco-eval, no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np
from faster_coco_eval.core import mask as coding

from shardmark.workloads.detection.coco_index import (
    COMPRESSED_RUN_LENGTHS,
    RUN_LENGTHS,
    CocoIndex,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardmark.workloads.detection.annotated import RunLengths


def run_lengths(index: CocoIndex, row: int, height: int, width: int) -> RunLengths:
    """The mask of the object in that row of the index.

    Raises `ValueError` where it does not fit a picture of this height and width.
    """
    place = int(index.mask_rows[row])
    kind = int(index.mask_kinds[place])
    parts = _parts(index, place)
    try:
        if kind in (RUN_LENGTHS, COMPRESSED_RUN_LENGTHS):
            size, values = parts
            if size.tolist() != [height, width]:
                raise ValueError("they are of a picture of another size")
            if kind == RUN_LENGTHS:
                return _from_counts(values, height, width)
            return _checked({"size": [height, width], "counts": bytes(values.astype("u1"))})
        return _from_polygons(parts, height, width)
    except (ValueError, RuntimeError) as error:
        what = "polygons" if kind not in (RUN_LENGTHS, COMPRESSED_RUN_LENGTHS) else "run lengths"
        number = int(index.annotation_ids[row])
        raise ValueError(f"annotation {number} has wrong {what}: {error}") from error


def _parts(index: CocoIndex, place: int) -> list[NDArray[np.float64]]:
    first, last = index.part_offsets[place : place + 2].tolist()
    bounds = index.value_offsets[first : last + 1].tolist()
    return [index.mask_values[bounds[i] : bounds[i + 1]] for i in range(last - first)]


def _from_polygons(parts: list[NDArray[np.float64]], height: int, width: int) -> RunLengths:
    """Their union; an empty mask where there are none."""
    if not parts:
        return _from_counts(np.array([height * width]), height, width)
    if not all(np.isfinite(part).all() for part in parts):
        raise ValueError("a coordinate is not finite")
    drawn = coding.frPyObjects([part.tolist() for part in parts], height, width)
    return cast("RunLengths", drawn[0] if len(drawn) == 1 else coding.merge(drawn))


def _from_counts(counts: NDArray[np.float64], height: int, width: int) -> RunLengths:
    if (counts < 0).any() or counts.sum() != height * width:
        raise ValueError(f"they do not add up to {height * width} pixels")
    written = {"size": [height, width], "counts": counts.astype(np.int64).tolist()}
    return cast("RunLengths", coding.frPyObjects(written, height, width))


def _checked(mask: RunLengths) -> RunLengths:
    coding.decode(mask)  # raises where the characters make no sense
    return mask
