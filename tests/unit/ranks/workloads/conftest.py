"""Small data on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

MakeFolder = Callable[..., Path]


@pytest.fixture
def make_folder(tmp_path: Path) -> MakeFolder:
    """Writes an image folder of random pictures."""

    def make(
        *,
        classes: tuple[str, ...] = ("ant", "bee", "cat"),
        splits: tuple[str, ...] = ("train", "test"),
    ) -> Path:
        drawn = np.random.default_rng(0)
        for folder in (tmp_path / split / name for split in splits for name in classes):
            folder.mkdir(parents=True)
            for number in range(4):
                pixels = drawn.integers(0, 256, (8, 8, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
        return tmp_path

    return make
