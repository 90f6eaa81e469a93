"""Masks drawn from run lengths are those that faster-coco-eval decodes."""

from __future__ import annotations

import numpy as np
import pytest
from faster_coco_eval.core import mask as coding

from shardmark.workloads.detection.run_lengths import drawn


@pytest.mark.parametrize("density", [0.0, 0.001, 0.05, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("shape", [(1, 1), (7, 5), (300, 200), (3, 4000)])
def test_as_decoded(shape: tuple[int, int], density: float) -> None:
    """Long and short runs, growing and shrinking ones."""
    random = np.random.default_rng(0)
    masks = [(random.random(shape) < density).astype(np.uint8) for _ in range(3)]
    masks[1][: shape[0] // 2] = 1
    written = [coding.encode(np.asfortranarray(mask)) for mask in masks]
    found = drawn(written, *shape)
    assert found.dtype == np.uint8
    assert (found == np.stack(masks)).all()


def test_no_masks() -> None:
    assert drawn([], 4, 6).shape == (0, 4, 6)


@pytest.mark.parametrize("counts", [b"", b"5:"])
def test_runs_that_do_not_cover_the_picture(counts: bytes) -> None:
    with pytest.raises(ValueError, match="run lengths do not cover 120 pixels"):
        drawn([{"size": [12, 10], "counts": counts}], 12, 10)
