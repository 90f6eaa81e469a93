"""Small data on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.unit.workloads import detection_data

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


@pytest.fixture
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDMARK_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def detection_folder(tmp_path: Path, _own_cache: None) -> Path:
    """Six pictures of three sizes in each split."""
    return detection_data.write(tmp_path / "data")


@pytest.fixture
def coco_folder(tmp_path: Path, _own_cache: None) -> Path:
    """Four pictures in each split, with one of each oddity."""
    return detection_data.write_odd(tmp_path / "data")
